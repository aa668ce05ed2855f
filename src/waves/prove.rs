//! The proof of a plan: the plan computes the program of a proven schedule, without a race and without a deadlock.
//!
//! The form of a plan excludes deadlock. All SMs execute all waves in order. Each SM adds one to the count before each meeting, and waits only for
//! counts of earlier meetings, or for packets of the wave before, which each SM has executed before it waits. Within an SM the loader fills chunks in the order in which consumers take them, because both walk the same shares
//! or the same KV splits. The rules below check everything else. They trust nothing that [`super::derive`] computed.

use super::experts::{
    Chosen, FILLED_PLACES, SHARED_EXPERT_PASS_MAX, TILE_UNITS, expert_granules, expert_parts, gather_scratch,
    is_combined, route_scratch, same_norm, scores_cols, scores_groups, scores_rows, scores_scratch, unit_tiles_max,
};
use super::mix::{Carried, GateNorm, POSITIONS, group_channels, row_bytes, scan_cols};
use super::{
    Action, BOX_PIECE_BYTES_MAX, BOX_UNITS, CHUNK_BLOCK_ROWS, Division, Form, HELD_AND_SUMS_MAX, Input, Layout,
    Machine, NormOf, Over, Plan, Products, ROWS_OF_LINE, Ragged, Ring, SHARED_PASS_MAX, SHARED_UNITS, SHARED_WARPS,
    STEP_ROWS_MAX, Share, Slots, Splits, Sum, Sums, TILE_WARPS, Target as Written, Tiling, WIDE_TILE, WIDE_UNITS,
    Warps, Wave, Work, WorkId, attends_wide, parts_of, sums_max, tile_sums_max, wide_tiles_max,
};
use crate::dtype::DType;
use crate::format::Format;
use crate::ir::layout::share_of;
use crate::ir::op::{Attention, Combine, Convolve, Epilogue, MatVec, Mix, NormAttr, Op, QkNormAttr, Role, Route, Scan};
use crate::ir::program::{Grid, Space};
use crate::ir::{BufferId, GridId};
use crate::target::{CopyMechanism, DotMechanism, Target, TargetKind};
use crate::validate::{Entity, Rule, Validated, Violation};
use std::collections::{BTreeMap, BTreeSet};

const NO_CHUNK: &str = "expected a plan of chunks before it";

/// At a wave, counted from 0, or about the plan as a whole.
fn violation(rule: Rule, wave: Option<usize>, what: impl Into<String>) -> Violation {
    let entity = wave.map_or(Entity::Schedule, |w| Entity::Wave(w as u32));
    Violation { rule, entity, message: what.into(), witness: vec![] }
}

/// A proven plan, and the schedule that it was proven against. Only [`prove`] makes one.
#[derive(Debug, Clone)]
pub struct Proven<'a> {
    plan: Plan,
    validated: &'a Validated,
    left: Option<Left>,
    choices: BTreeMap<BufferId, WorkId>,
}

/// The residual of each row when a plan has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Left {
    residual: WorkId,
    /// The exchange that holds the same values in the program, and the grid that wrote it: the last one that changes the residual.
    exchange: BufferId,
    grid: GridId,
}

impl<'a> Proven<'a> {
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn validated(&self) -> &'a Validated {
        self.validated
    }

    /// The launches for which a plan that splits histories is faster than other plans. `None` if the plan splits none.
    pub fn ragged(&self) -> Option<Ragged> {
        Ragged::of(&self.plan, &self.validated.schedule().program)
    }

    /// Where the ids that rows chose lie when a launch has ended, by slot: for each choice of the plan, by the exchange of the program that has it.
    pub fn choices(&self) -> &BTreeMap<BufferId, WorkId> {
        &self.choices
    }
}

/// Proves a plan of the program of `validated` on `target`.
///
/// # Errors
/// The rules that the plan breaks.
pub fn prove<'a>(plan: Plan, validated: &'a Validated, target: &Target) -> Result<Proven<'a>, Vec<Violation>> {
    prove_after(plan, validated, target, None)
}

/// A proven plan of chunks with a proven tail. Only [`prove_tail`] makes one.
#[derive(Debug, Clone)]
pub struct WithTail<'a> {
    chunk: Proven<'a>,
    tail: Proven<'a>,
    taken: u64,
}

impl<'a> WithTail<'a> {
    pub fn chunk(&self) -> &Proven<'a> {
        &self.chunk
    }

    pub fn tail(&self) -> &Proven<'a> {
        &self.tail
    }

    /// Where the tail reads the residual of the chunk: the byte offset of row 0 in the arena of the chunk. Rows are contiguous, in fp32.
    pub fn taken(&self) -> u64 {
        self.taken
    }
}

/// Proves a tail of a proven plan of chunks. A tail computes the rest of the program with the pack and the caches of that plan, and begins with
/// the residual that the chunk leaves.
///
/// # Errors
/// The rules that the tail breaks, by itself or as a successor of that plan.
pub fn prove_tail<'a>(tail: Plan, chunk: Proven<'a>, target: &Target) -> Result<WithTail<'a>, Vec<Violation>> {
    let violation = |what: &str| Err(vec![violation(Rule::Tail, None, what)]);
    let (Form::Chunk, Some(left)) = (chunk.plan.form, chunk.left) else {
        return violation(NO_CHUNK);
    };
    if tail.form != Form::Tail {
        return violation("expected a plan of a tail");
    }
    let tail = prove_after(tail, chunk.validated, target, Some(left))?;
    // Only sums write the residual, in place. So waves of the chunk after its last sum leave it unchanged.
    let taken = chunk.plan.work[left.residual.index()].place;
    Ok(WithTail { chunk, tail, taken })
}

/// What keeps each plan from a proof. A tail follows the last plan of chunks before it.
pub fn check(plans: impl IntoIterator<Item = Plan>, validated: &Validated, target: &Target) -> Vec<Vec<Violation>> {
    let mut chunk: Option<Proven<'_>> = None;
    let mut one = |plan: Plan| {
        let judged = match (plan.form, chunk.clone()) {
            (Form::Tail, Some(chunk)) => prove_tail(plan, chunk, target).map(drop),
            (Form::Tail, None) => Err(vec![violation(Rule::Tail, None, NO_CHUNK)]),
            (Form::Chunk, _) => prove(plan, validated, target).map(|proven| chunk = Some(proven)),
            (Form::Steps, _) => prove(plan, validated, target).map(drop),
        };
        judged.err().unwrap_or_default()
    };
    plans.into_iter().map(&mut one).collect()
}

/// `before`: for a tail, the residual that its chunk left.
fn prove_after<'a>(
    plan: Plan,
    validated: &'a Validated,
    target: &Target,
    before: Option<Left>,
) -> Result<Proven<'a>, Vec<Violation>> {
    let mut judge = Judge {
        plan: &plan,
        validated,
        before,
        found: vec![],
        holds: BTreeMap::new(),
        drawn: BTreeSet::new(),
        residual: None,
        grid: GridId(0),
        left: None,
        best: None,
        decides: false,
        choices: BTreeMap::new(),
    };
    judge.machine(target);
    judge.arena();
    judge.divisions();
    // The rules for waves use indices that the rules above have checked.
    if judge.found.is_empty() {
        judge.waves();
    }
    let Judge { found, left, choices, .. } = judge;
    if found.is_empty() { Ok(Proven { plan, validated, left, choices }) } else { Err(found) }
}

/// Proven plans of steps of one schedule that add up in the same order. A row has the same bits in all of them, whatever other rows are in its
/// launch. Only [`prove_alike`] makes one.
#[derive(Debug, Clone)]
pub struct Alike<'a> {
    plans: Vec<Proven<'a>>,
}

impl<'a> Alike<'a> {
    /// At least one plan, in ascending order of rows.
    pub fn plans(&self) -> &[Proven<'a>] {
        &self.plans
    }
}

/// Proves plans of steps of the program of `validated` on `target`. Also proves the rule `alike`: in all plans each wave adds up in the same order, and
/// reads what the same waves left.
///
/// # Errors
/// The rules that a plan breaks, or the first wave that differs.
pub fn prove_alike<'a>(
    plans: Vec<Plan>,
    validated: &'a Validated,
    target: &Target,
) -> Result<Alike<'a>, Vec<Violation>> {
    let violation = |wave, what: String| Err(vec![violation(Rule::Alike, wave, what)]);
    let plans: Vec<Proven<'a>> =
        plans.into_iter().map(|plan| prove(plan, validated, target)).collect::<Result<_, _>>()?;
    let Some(first) = plans.first().map(Proven::plan) else {
        return violation(None, "no plan".to_string());
    };
    // A lane has other columns in chunks than in steps, so its sums have another order.
    if plans.iter().any(|proven| proven.plan().form != Form::Steps) {
        return violation(None, "a plan of chunks".to_string());
    }
    if plans.windows(2).any(|pair| pair[0].plan().rows >= pair[1].plan().rows) {
        return violation(None, "plans that do not ascend by rows".to_string());
    }
    for other in plans.iter().skip(1).map(Proven::plan) {
        if other.machine.warps != first.machine.warps || other.waves.len() != first.waves.len() {
            return violation(
                None,
                format!("plans for {} and {} rows have other warps or waves", first.rows, other.rows),
            );
        }
        let mut pairs = first.waves.iter().zip(&other.waves).enumerate();
        if let Some((w, (a, b))) = pairs.find(|(_, (a, b))| a.sums != b.sums) {
            let (few, many) = (first.rows, other.rows);
            return violation(Some(w), format!("order({}) for {few} rows, order({}) for {many}", a.sums, b.sums));
        }
        // An instruction for 32 rows may add up in another order than one for 64.
        if let Some(w) = first.waves.iter().position(|wave| matches!(wave.sums, Sums::Product { tiles: true, .. })) {
            let what = format!("tiles of {} and of {} rows, which may add up in other orders", first.rows, other.rows);
            return violation(Some(w), what);
        }
        // One product may take a norm, another one the same residual and a factor: the order of all sums would be the same.
        let mut pairs = sources(first).into_iter().zip(sources(other)).enumerate();
        if let Some((w, _)) = pairs.find(|(_, (a, b))| a != b) {
            let what = format!("reads what other waves left for {} rows than for {}", first.rows, other.rows);
            return violation(Some(w), what);
        }
        // The units of a pair decide which columns each of its sums of squares has.
        let squares = |wave: &Wave| matches!(wave.sums, Sums::Product { squares: 1.., .. });
        let of =
            |plan: &Plan, wave: &Wave| plan.divisions[wave.division.index()].shares.first().map(|of_sms| lo_hi(of_sms));
        let mut pairs = first.waves.iter().zip(&other.waves).enumerate();
        if let Some((w, _)) = pairs.find(|(_, (a, b))| squares(a) && of(first, a) != of(other, b)) {
            return violation(
                Some(w),
                format!("plans for {} and {} rows divide units otherwise", first.rows, other.rows),
            );
        }
    }
    Ok(Alike { plans })
}

/// The values in a buffer of activations.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Value {
    /// The values of this exchange of the program.
    Exchange(BufferId),
    /// The norm of the residual, or of what Mamba-2 gives, that the program has in this exchange.
    Normed(BufferId, Option<NormOf>),
    /// The same, not yet multiplied by the factor of the norm.
    Weighted(BufferId, NormOf),
    /// The sums of squares of parts of that residual.
    Squares(BufferId),
    /// The heads of a grid of attention: q and k after their norms over all heads.
    NormedHeads(GridId),
    /// The rotated queries of a grid of attention.
    Queries(GridId),
    /// The same input of a product row by row.
    Rows(BufferId, Option<NormOf>),
    /// Where the slots of this choice have their places, as records of tiles and by row and slot.
    Groups(BufferId),
    /// The rows of places by this choice.
    Sources(BufferId),
    Places(BufferId),
    /// At each place of this choice, the row that has it: a residual, normalised or as it is.
    Gathered {
        of: BufferId,
        norm: Option<NormOf>,
        choices: BufferId,
    },
    /// At each place of this choice, what this exchange of the program has of the slot.
    Slots {
        of: BufferId,
        choices: BufferId,
    },
    /// What the shared expert left in this exchange.
    Shared(BufferId),
    /// q, k and v of a net after its convolution, betas and decays; of Mamba-2 x, b and c, steps and decays.
    Turned(GridId),
    /// What positions read of the states of a net, or of Mamba-2, before the gate.
    Mixed(GridId),
    /// The output of the product of this grid, which is added to the residual.
    Addend(GridId),
}

struct Judge<'a> {
    plan: &'a Plan,
    validated: &'a Validated,
    /// For a tail: the residual with which it begins.
    before: Option<Left>,
    found: Vec<Violation>,
    holds: BTreeMap<WorkId, Value>,
    /// Groups whose tickets are drawn, for the first product or the second. The wave that finds places makes them new.
    drawn: BTreeSet<(WorkId, bool)>,
    /// The buffer of the residual, and the exchange that holds the same values in the program; none holds a sum between two branches.
    residual: Option<(WorkId, Option<BufferId>)>,
    /// The current grid, and the residual after the last grid that changed it.
    grid: GridId,
    left: Option<Left>,
    /// The buffer from which the first wave of a step reads the tokens that the previous step decided.
    best: Option<WorkId>,
    /// Whether a product has written that buffer.
    decides: bool,
    /// As [`Proven::choices`].
    choices: BTreeMap<BufferId, WorkId>,
}

impl Judge<'_> {
    fn violate(&mut self, rule: Rule, wave: Option<usize>, what: impl Into<String>) {
        self.found.push(violation(rule, wave, what));
    }

    /// `machine`: the target has enough SMs, registers and shared memory, and the features that wave kernels need.
    fn machine(&mut self, target: &Target) {
        let (m, spec) = (&self.plan.machine, &target.spec);
        let [warps, loader_warps, weights, inputs] =
            [m.warps, m.loader_warps, m.weights.slots, m.inputs.slots].map(u64::from);
        let slots = weights + inputs;
        let threads = (warps + loader_warps) * 32;
        // Registers of each thread at launch, in steps of 8. A thread that asks for more waits until other threads release some. It waits for ever
        // if all threads together ask for more than the SM has.
        let each = u64::from(spec.registers_per_sm) / threads.max(1) / 8 * 8;
        let (most, least) = (u64::from(m.registers), u64::from(m.loader_registers));
        let registers = (warps * most).saturating_add(loader_warps * least).saturating_mul(32);
        let moves = [most, least].iter().all(|n| n.is_multiple_of(8) && (24..=248).contains(n)) && least <= each;
        let row_bytes = match self.plan.form {
            Form::Chunk => 16,
            Form::Steps | Form::Tail => 16 * u64::from(self.plan.rows) + 8,
        };
        let cuts = self.plan.waves.iter().any(|wave| matches!(wave.action, Action::AttendRow { splits: Some(_), .. }));
        let split_bytes = if cuts { 48 } else { 0 };
        let stats_bytes = warps * if self.plan.form == Form::Chunk { 8 * u64::from(ROWS_OF_LINE) } else { 32 };
        let tiles = self.plan.waves.iter().any(|wave| wave.action.is_tiles());
        let tiles = tiles || self.plan.form == Form::Chunk && self.plan.has_items();
        let wide = self.plan.waves.iter().any(|wave| matches!(wave.action, Action::Attend { wide: true, .. }));
        let ring = |ring: Ring| u64::from(ring.slots) * u64::from(ring.slot_bytes);
        let rest = u64::from(m.scratch_bytes) + u64::from(m.state_bytes);
        let smem = ring(m.weights).saturating_add(ring(m.inputs)).saturating_add(rest);
        let turn_bytes = if self.plan.has_items() { 16 * u64::from(self.plan.turns_told()) } else { 0 };
        let is_ring = |ring: Ring| ring.slots >= 2 && ring.slot_bytes > 0 && ring.slot_bytes.is_multiple_of(128);
        let capable = target.kind == TargetKind::Cuda
            && (spec.copy, spec.dot) == (CopyMechanism::Bulk, DotMechanism::Mma)
            && spec.register_reallocation;
        let wrong = [
            (m.target != target.name, "another target"),
            (
                (m.devices, m.devices) != (target.devices, self.validated.schedule().machine.devices),
                "another number of devices than the target and the other kernels have",
            ),
            (!m.sms.is_multiple_of(m.devices.max(1)), "devices with unequal numbers of blocks"),
            (!capable, "a target without bulk copies, tensor cores or registers that move"),
            (m.sms == 0 || m.sms > target.sms(), "more blocks than SMs, which would wait for each other for ever"),
            (m.warps != 8 || m.loader_warps != 4, "expected 8 warps and a loader of 4"),
            (m.products != Products::Warps && !spec.warpgroup_mma, "products by warpgroups, which the target lacks"),
            (
                m.products != Products::Warps && self.plan.form != Form::Chunk,
                "products of steps by warpgroups, which add up in another order than warps",
            ),
            (tiles && !spec.warpgroup_mma, "tiles, which warpgroups multiply and the target lacks"),
            (wide && !spec.warpgroup_mma, "attention by warpgroups, which the target lacks"),
            (threads > u64::from(spec.threads_per_block_max), "too many threads"),
            (registers > each * threads, "more registers than the launch gives, for which warps would wait for ever"),
            (!moves || most < each, "registers that do not move from the loader to consumers in steps of 8"),
            (smem > u64::from(spec.smem_bytes_per_block_max), "too much shared memory"),
            (!is_ring(m.weights) || !is_ring(m.inputs), "expected 2 slots at least, of whole cache lines"),
            (
                m.pairs && (spec.cluster_max < 2 || !m.sms.is_multiple_of(2 * m.devices.max(1))),
                "pairs of an odd number of blocks, or of a target without clusters",
            ),
            (!m.scratch_bytes.is_multiple_of(128), "expected scratch of whole cache lines"),
            // 24 bytes for a watchdog, two barriers for each slot, eight statistics for each warp (of a chunk two for each row side by side), 80 bytes for a wave and 80 for its record, and the same
            // for the next wave. Steps add four words for each row, a barrier for the pair, and three words for each of the four KV splits that a block holds at a time.
            // Experts add four words for each turn that a block remembers.
            (
                u64::from(m.state_bytes) < 24 + 16 * slots + stats_bytes + 352 + row_bytes + split_bytes + turn_bytes,
                "too little room for barriers",
            ),
        ];
        for (_, what) in wrong.into_iter().chain(self.shared_machine()).filter(|(wrong, _)| *wrong) {
            self.violate(Rule::Machine, None, what);
        }
        let (rows, block) = (self.plan.rows, self.plan.block_rows);
        let whole = match self.plan.form {
            Form::Chunk => block == CHUNK_BLOCK_ROWS && rows > 0 && rows.is_multiple_of(block),
            Form::Steps | Form::Tail => block == rows && (16..=STEP_ROWS_MAX).contains(&rows) && rows.is_power_of_two(),
        };
        if !whole {
            self.violate(Rule::Machine, None, "expected whole blocks of rows, and of steps one");
        }
    }

    /// What a machine needs whose tensor cores read both operands from shared memory, and whose pairs of blocks share weights.
    fn shared_machine(&self) -> [(bool, &'static str); 2] {
        let m = &self.plan.machine;
        let unaligned = |ring: Ring| !ring.slot_bytes.is_multiple_of(1024);
        [
            (
                m.pairs && self.plan.form == Form::Chunk && m.products != Products::Shared,
                "pairs of blocks of a chunk whose products have weights in registers",
            ),
            // The block of weights that the tensor cores read begins at a whole pattern of the swizzle. That of experts is in the ring of inputs.
            (
                m.products == Products::Shared
                    && (unaligned(m.weights) || self.plan.has_items() && unaligned(m.inputs)),
                "both operands in shared memory, in slots that are no multiple of 1024 bytes",
            ),
        ]
    }

    /// `arena`: buffers of activations do not overlap.
    fn arena(&mut self) {
        let mut places: Vec<_> = self.plan.work.iter().map(|w| (w.place, w.bytes(self.plan.rows))).collect();
        places.sort_unstable();
        let apart = places.windows(2).all(|pair| pair[0].0.saturating_add(pair[0].1) <= pair[1].0);
        if !apart || places.iter().any(|(place, _)| !place.is_multiple_of(256)) {
            self.violate(Rule::Arena, None, "buffers of activations overlap, or begin within 256 bytes");
        }
        // A wave has 32 bits for a place, in units of 256 bytes.
        if self.plan.work_bytes() >= 1 << 40 {
            self.violate(Rule::Arena, None, "places that a wave cannot name");
        }
        // So has a byte in the input of a product.
        let named = |work: &Work| work.layout.is_input() || matches!(work.layout, Layout::Grouped(_));
        let wide = |work: &&Work| named(work) && work.bytes(self.plan.rows) > u64::from(u32::MAX);
        if let Some(work) = self.plan.work.iter().find(wide) {
            self.violate(Rule::Arena, None, format!("`{}` has 4 GiB or more, expected places of 32 bits", work.name));
        }
    }

    /// `partition`: for every number of blocks of rows, each launch index of each row belongs to exactly one share.
    fn divisions(&mut self) {
        let plan = self.plan;
        for (d, division) in plan.divisions.iter().enumerate() {
            let Division { over, shares } = division;
            if shares.len() as u32 != plan.rows / plan.block_rows.max(1) {
                self.violate(Rule::Partition, None, format!("d{d}: expected shares of each number of blocks"));
                continue;
            }
            for (blocks, of_sms) in (1..).zip(shares) {
                if of_sms.len() as u32 != plan.machine.sms {
                    self.violate(Rule::Partition, None, format!("d{d}: expected shares of each SM"));
                } else if let Err(what) = self.partitions(*over, blocks * plan.block_rows, of_sms) {
                    self.violate(Rule::Partition, None, format!("d{d}, {blocks} blocks: {what}"));
                } else if plan.shares_weights(blocks)
                    && matches!(over, Over::Units { .. })
                    && let Some(pair) = lo_hi(of_sms).chunks(2).position(|pair| pair.first() != pair.get(1))
                {
                    let what = "other units, of which each copies half to both";
                    self.violate(
                        Rule::Pairs,
                        None,
                        format!("d{d}, {blocks} blocks: blocks of pair {pair} have {what}"),
                    );
                }
            }
        }
    }

    /// As [`partitions`]. Of several devices each has all rows of a wave that it does for itself, and of another one the launch indices that are its own.
    fn partitions(&self, over: Over, rows: u32, of_sms: &[Vec<Share>]) -> Result<(), String> {
        let (block_rows, devices) = (self.plan.block_rows, self.plan.machine.devices.max(1));
        let each = (of_sms.len() / devices as usize).max(1);
        if matches!(over, Over::Items { .. } | Over::States { .. }) && devices > 1 {
            return Err("items or states, of which no device of several has its part".to_string());
        }
        if let Over::Rows { .. } | Over::Sums { .. } = over {
            let of_device = |(device, of_sms): (usize, &[Vec<Share>])| {
                partitions(over, rows, block_rows, of_sms).map_err(|what| match devices {
                    1 => what,
                    _ => format!("device {device}: {what}"),
                })
            };
            return of_sms.chunks(each).enumerate().try_for_each(of_device);
        }
        partitions(over, rows, block_rows, of_sms)?;
        let n = match over {
            Over::Units { n, .. } | Over::Heads { n, .. } => n.max(1),
            _ => return Ok(()),
        };
        for (device, of_sms) in (0..).zip(of_sms.chunks(each)) {
            let is_own = |index: u32| match over {
                Over::Heads { kept, .. } => {
                    let (head, heads) = (u64::from(index / kept.max(1)), u64::from(n / kept.max(1)).max(1));
                    head * u64::from(devices) / heads == u64::from(device)
                }
                _ => share_of(n, device, devices).contains(&index),
            };
            let shares = of_sms.iter().flatten();
            if let Some(share) = shares.into_iter().find(|s| !is_own(s.lo % n) || !is_own((s.hi - 1) % n)) {
                return Err(format!("{share:?} is on device {device}, which does not hold it"));
            }
        }
        Ok(())
    }

    /// `home`: of several devices, what one has done a part of lies on all, if any wave reads more of it than the part itself. A product that adds to a residual reads
    /// where it writes. The best logits are also read for the host, and the residual of a chunk by its tail.
    fn homes(&mut self) {
        let plan = self.plan;
        for (id, work) in (0..).map(WorkId).zip(&plan.work) {
            let in_place = |wave: &Wave| match wave.action {
                Action::MatMul { target: Written::Residual(of) | Written::Sums { residual: of, .. }, .. } => of == id,
                _ => false,
            };
            // Sums say themselves where the residual goes.
            let says = |wave: &Wave| matches!(wave.action, Action::MatMul { target: Written::Sums { .. }, .. });
            let writes = |wave: &Wave| {
                let is_said = in_place(wave) && says(wave);
                wave.action.is_divided() && wave.action.accesses().1.contains(&id) && !is_said
            };
            let reads = |wave: &Wave| wave.action.accesses().0.contains(&id) && !in_place(wave);
            let kept = work.layout == Layout::Best || plan.form == Form::Chunk;
            let is_divided = plan.machine.devices > 1 && plan.waves.iter().any(writes);
            let crosses = is_divided && (kept || plan.waves.iter().any(reads));
            if crosses && !work.everywhere {
                let what = format!("{id} has a part on each device, expected it everywhere");
                self.violate(Rule::Home, None, what);
            } else if work.everywhere && plan.machine.devices == 1 {
                self.violate(Rule::Home, None, format!("{id} is everywhere, and there is one device"));
            }
        }
        for (w, wave) in plan.waves.iter().enumerate() {
            let Action::MatMul { target: Written::Sums { residual, shown, .. }, .. } = wave.action else { continue };
            if shown != (plan.machine.devices > 1 && !plan.keeps_columns(w)) {
                let what =
                    if shown { "goes to all devices, and nothing reads it there" } else { "has a part on each device" };
                self.violate(Rule::Home, Some(w), format!("{residual} {what}"));
            }
        }
    }

    /// `order`: the waves are those of the grids of the program, in order. A chunk ends with the last append. A tail begins with the grid after
    /// the last sum of its chunk. `kept`: no later wave writes where rows have left their choice.
    fn waves(&mut self) {
        let (plan, validated) = (self.plan, self.validated);
        let program = &validated.schedule().program;
        let Some(last) = program.last_append() else {
            return self.violate(Rule::Order, None, "the program appends nothing");
        };
        let (mut next, mut begins) = (0, 0);
        if plan.form == Form::Tail {
            match self.take() {
                Ok(first) => (next, begins) = (1, first),
                Err(what) => return self.violate(Rule::Order, Some(0), what),
            }
        }
        let ends = (plan.form == Form::Chunk).then_some(last);
        let count = ends.map_or(program.grids.len(), |last| last.index() + 1);
        for (g, grid) in program.grids.iter().enumerate().take(count).skip(begins) {
            let id = GridId::from(g);
            self.grid = id;
            let first = next;
            while plan.waves.get(next).is_some_and(|wave| wave.grid == id) {
                next += 1;
            }
            let waves = &plan.waves[first..next];
            for (w, wave) in (first..).zip(waves) {
                self.in_bounds(w, wave);
            }
            if !self.found.is_empty() {
                return;
            }
            if let Err(what) = self.grid(id, grid, first, waves, Some(id) == ends) {
                return self.violate(Rule::Order, Some(first), format!("{id} {}: {what}", grid.name));
            }
        }
        if next != plan.waves.len() {
            return self.violate(Rule::Order, Some(next), "a wave of no grid, or of one that has passed");
        }
        for (w, wave) in plan.waves.iter().enumerate() {
            self.order_of_sums(w, wave);
            if let Err(what) = self.boxes(wave) {
                self.violate(Rule::Boxes, Some(w), what);
            }
            if let Err(what) = self.meeting(w, wave) {
                self.violate(Rule::Meeting, Some(w), what);
            }
        }
        self.homes();
        // The first wave of a step reads the tokens that the previous step decided. Only the last wave of a step writes them, and writes them all.
        if plan.form.decides() && !self.decides {
            self.violate(Rule::Order, None, "steps without logits");
        }
        let is_gone = |(choice, at): (&BufferId, &WorkId)| self.holds.get(at) != Some(&Value::Exchange(*choice));
        if self.choices.iter().any(is_gone) {
            self.violate(Rule::Kept, None, "choices that are not there when the launch has ended");
        }
    }

    /// Checks the first wave of a tail: rows that take the residual from the chunk. Returns the index of the first grid of the rest of the program.
    fn take(&mut self) -> Result<usize, String> {
        let no = |what: &str| Err(what.to_string());
        let Some(Left { exchange, grid, .. }) = self.before else { return no("a tail without its chunk") };
        let Some(wave) = self.plan.waves.first() else { return no("no wave") };
        self.in_bounds(0, wave);
        if !self.found.is_empty() {
            return no("expected rows that take a residual");
        }
        let Action::Rows { residual, sum: Some(Sum::Taken), out } = wave.action else {
            return no("expected rows that take a residual");
        };
        let first = grid.index() + 1;
        if wave.grid.index() != first {
            return Err(format!("expected the grid after {grid}, the last sum of the chunk"));
        }
        self.layout(residual, Layout::Rows(DType::F32), self.cols(exchange))?;
        self.residual = Some((residual, Some(exchange)));
        self.rows_end(wave, out)?;
        Ok(first)
    }

    /// `bounds`: the buffers and the division of a wave exist. `in-place`: the only buffer that a wave both reads and writes is its residual.
    fn in_bounds(&mut self, w: usize, wave: &Wave) {
        let (reads, writes) = wave.action.accesses();
        let exists = |id: &WorkId| id.index() < self.plan.work.len();
        if !reads.iter().chain(&writes).all(exists) || wave.division.index() >= self.plan.divisions.len() {
            return self.violate(Rule::Bounds, Some(w), "a buffer or a division that does not exist");
        }
        let residual = match wave.action {
            Action::Rows { residual, .. } => Some(residual),
            Action::MatMul { target, .. } => target.residual(),
            _ => None,
        };
        let both = |id: &&WorkId| writes.contains(id) && Some(**id) != residual;
        let twice = writes.iter().enumerate().any(|(i, id)| writes[..i].contains(id));
        if reads.iter().any(|id| both(&id)) || twice {
            self.violate(Rule::InPlace, Some(w), "a buffer is read and written, or written twice");
        }
    }

    /// `meeting`: all SMs meet before each wave, except before one that reads nothing of the wave before it but packets. Then the two waves run at the
    /// same time, and neither writes what the other one accesses. All SMs meet before the first of them and after the second: so packets are written
    /// again only after all their readers have ended.
    fn meeting(&self, w: usize, wave: &Wave) -> Result<(), String> {
        let plan = self.plan;
        let (reads, writes) = wave.action.accesses();
        let before = w.checked_sub(1).map(|w| &plan.waves[w]);
        let (read_before, written_before) = before.map(|wave| wave.action.accesses()).unwrap_or_default();
        // Packets have the number of the wave before as their tag.
        let packets: Vec<WorkId> = reads.iter().copied().filter(|id| plan.holds_packets(*id)).collect();
        if let Some(id) = packets.iter().find(|id| !written_before.contains(id)) {
            return Err(format!("{id} holds packets of another wave than the one before"));
        }
        if wave.meets {
            return Ok(());
        }
        if !matches!(wave.action, Action::AttendRow { .. }) || packets.is_empty() {
            return Err("expected a meeting before a wave that waits for no packets".to_string());
        }
        let meets = |wave: Option<&Wave>| wave.is_some_and(|wave| wave.meets);
        if !meets(before) || !meets(plan.waves.get(w + 1).or(plan.waves.first())) {
            return Err(
                "expected meetings before the wave of the packets, and after the one that reads them".to_string()
            );
        }
        let races = |id: &WorkId| written_before.contains(id) && !packets.contains(id);
        let overwrites = |id: &WorkId| read_before.contains(id) || written_before.contains(id);
        match reads.iter().find(|id| races(id)).or(writes.iter().find(|id| overwrites(id))) {
            Some(id) => Err(format!("{id} is accessed by the wave before, too")),
            None => Ok(()),
        }
    }

    /// `boxes`: weights are copied in boxes that a tensor map can have, and that together make up every pass. The kernel copies the first for a whole pass, the second for one
    /// unit less, and as many of the third as fit what is left over; swizzled lines by the third alone, and in no other way.
    fn boxes(&self, wave: &Wave) -> Result<(), String> {
        let swizzled = self.plan.machine.products == Products::Shared;
        let (Action::MatMul { pass, chunk, .. } | Action::Experts { pass, chunk, .. }) = wave.action else {
            return if wave.boxes.is_empty() { Ok(()) } else { Err("boxes of no weights".to_string()) };
        };
        if wave.boxes.is_empty() && !swizzled {
            return Ok(());
        }
        let program = &self.validated.schedule().program;
        let granule_bytes = program.format_of(&program.grids[wave.grid.index()]).granule_bytes();
        let piece_bytes = u64::from(chunk) * u64::from(granule_bytes);
        let all = [pass, pass.saturating_sub(1).max(1), BOX_UNITS];
        let expected = if swizzled { &all[2..] } else { &all };
        if wave.boxes != expected {
            return Err(format!("expected boxes of {expected:?} units, found {:?}", wave.boxes));
        }
        let has_map = all.iter().all(|units| (1..=256).contains(units)) && granule_bytes.is_multiple_of(16);
        if !has_map || piece_bytes > u64::from(BOX_PIECE_BYTES_MAX) {
            return Err(format!("no map has boxes of {pass} units of {piece_bytes} bytes"));
        }
        Ok(())
    }

    /// `sums`: a wave adds up in the order that it declares.
    fn order_of_sums(&mut self, w: usize, wave: &Wave) {
        let program = &self.validated.schedule().program;
        let grid = &program.grids[wave.grid.index()];
        let over = self.plan.divisions.get(wave.division.index()).map(|division| division.over);
        let found = match (&wave.action, over, &grid.op) {
            (Action::Rows { .. }, Some(Over::Rows { parts }), _) => Some(Sums::Row { parts }),
            (Action::Rows { .. }, Some(Over::Sums { .. }), _) => Some(Sums::Row { parts: 1 }),
            (&Action::MatMul { warps, target, then, tiles, .. }, Some(Over::Units { parts, .. }), Op::MatVec(m)) => {
                let format = grid.operand(Role::Weight).map(|weight| program.buffers[weight.buffer.index()].format());
                let granules = format.map(|format| part_granules(m, format, parts));
                let paired = target.is_paired(parts);
                let squares = match (then, target) {
                    (None, _) => 0,
                    (_, Written::Sums { .. }) => m.units().div_ceil(SHARED_UNITS),
                    _ => self.plan.machine.sms / 2,
                };
                granules.map(|granules| Sums::Product { parts, granules, groups: warps.k, paired, squares, tiles })
            }
            (Action::NormHeads { .. } | Action::Append { .. } | Action::ShortConv { .. }, ..) => Some(Sums::Heads),
            (&Action::Attend { tile, .. }, _, Op::Attention(a)) => {
                let scratch_bytes = self.plan.machine.scratch_bytes;
                Some(Sums::History { tile, heads: a.heads_per_task, scratch_bytes, split: None })
            }
            (&Action::AttendRow { tile, splits, .. }, _, Op::Attention(a)) => {
                let (scratch_bytes, split) = (self.plan.machine.scratch_bytes, splits.map(|splits| splits.positions));
                Some(Sums::History { tile, heads: a.heads_per_task, scratch_bytes, split })
            }
            (Action::Merge { splits, .. }, ..) => Some(Sums::Splits { positions: splits.positions }),
            (Action::Scores { .. }, _, Op::MatVec(m)) => {
                let granules = part_granules(m, program.format_of(grid), 1);
                let groups = scores_groups(self.plan.machine.warps, self.plan.form);
                Some(Sums::Product { parts: 1, granules, groups, paired: false, squares: 0, tiles: false })
            }
            (Action::Route { .. }, ..) => Some(Sums::Choice),
            (Action::Gather { .. } | Action::Places { .. } | Action::Fill { .. }, ..) => Some(Sums::Nothing),
            (Action::Experts { x, .. }, _, Op::MatVec(m)) => {
                let granules = u64::from(m.k).div_ceil(32 * granule_spans(m, program.format_of(grid)));
                Sums::of_experts(granules as u32, &self.plan.work[x.index()])
            }
            (Action::Combine { slots, .. }, _, Op::Combine(combine)) => {
                Some(Sums::Slots { slots: combine.slots, shared: slots.shared.is_some() })
            }
            (Action::Gated { .. }, _, Op::GroupNorm(_) | Op::MatVec(_)) => Some(Sums::Row { parts: 1 }),
            (Action::Convolve { .. } | Action::Gated { .. }, ..) => Some(Sums::Heads),
            (Action::Mix { .. }, ..) => Some(Sums::State { positions: POSITIONS }),
            (Action::MixRow { .. }, ..) => Some(Sums::State { positions: 1 }),
            // Another rule reports what is wrong with this wave.
            _ => None,
        };
        if let Some(found) = found.filter(|found| *found != wave.sums) {
            self.violate(Rule::Sums, Some(w), format!("order({}), expected order({found})", wave.sums));
        }
    }

    fn layout(&self, id: WorkId, layout: Layout, cols: u32) -> Result<(), String> {
        let work = &self.plan.work[id.index()];
        let right = work.layout == layout && work.cols == cols;
        if right { Ok(()) } else { Err(format!("{id} is {} of {} columns", work.layout, work.cols)) }
    }

    /// Checks the waves of one grid. `first` is the number of the first one.
    fn grid(&mut self, id: GridId, grid: &Grid, first: usize, waves: &[Wave], is_last: bool) -> Result<(), String> {
        let buffer = |role: Role| grid.operand(role).map(|operand| operand.buffer).ok_or("an operand is missing");
        let no = |what: &str| Err(what.to_string());
        match (&grid.op, waves) {
            (Op::Select | Op::Report, []) => Ok(()),
            (Op::Embed { scale, everywhere: false }, [wave]) => {
                let Action::Rows { residual, sum: Some(Sum::Embed { table, scale: times, best }), out } = wave.action
                else {
                    return no("expected rows that embed");
                };
                self.best = best;
                if best.is_some() != self.plan.form.decides() || first != 0 {
                    return no("expected the first wave, and best logits of steps alone");
                }
                if let Some(best) = best {
                    self.layout(best, Layout::Best, self.plan.machine.sms)?;
                }
                let (cols, table_of, out_of) =
                    (self.cols(buffer(Role::Table)?), buffer(Role::Table)?, buffer(Role::Out)?);
                // Waves of rows read the row of a token as bf16, or decode it from codes.
                let buffer = &self.validated.schedule().program.buffers[table_of.index()];
                let taken = buffer.dtype == DType::Bf16 || buffer.coded.is_some();
                if !taken || table != table_of || times.to_bits() != scale.to_bits() || self.residual.is_some() {
                    return no("another table or scale");
                }
                self.layout(residual, Layout::Rows(DType::F32), cols)?;
                self.becomes(residual, Some(out_of));
                self.rows_end(wave, out)
            }
            (Op::NormAdd { norm, scale, everywhere: false, width }, [wave]) => {
                let Action::Rows { residual, sum: Some(Sum::Branch { branch, norm: of, scale: times }), out } =
                    wave.action
                else {
                    return no("expected rows that add a branch");
                };
                self.rows_or_parts(branch, *width)?;
                self.holds(branch, Value::Exchange(buffer(Role::X)?))?;
                if of != Some(norm_of(grid, *norm)) || times.to_bits() != scale.to_bits() {
                    return no("another norm or scale");
                }
                self.sums(residual, Some(buffer(Role::Out)?), *width)?;
                self.rows_end(wave, out)
            }
            (Op::MatVec(m), waves) if m.epilogue == Epilogue::Scores => self.scores(grid, m, waves),
            (Op::MatVec(m), waves) => match Chosen::of(&self.validated.schedule().program, grid) {
                Some(chosen) => self.experts(grid, m, chosen, waves, first),
                None => self.matvec(grid, m, waves, first),
            },
            (Op::Route(route), [wave]) => self.route(grid, route, wave),
            (Op::Combine(combine), [wave]) => self.combine(grid, combine, wave),
            (Op::Attention(a), waves) => self.attention(id, grid, a, waves, is_last),
            (Op::Mix(mix), waves) => self.mix(id, grid, mix, waves, is_last),
            (Op::Convolve(convolve), [wave]) => self.short_conv(grid, convolve, wave),
            (Op::Scan(scan), waves) => self.scan(id, grid, scan, waves),
            (Op::GroupNorm(_), [wave]) => {
                let out = self.gate_norm(grid, wave)?;
                self.holds.insert(out, Value::Exchange(buffer(Role::Out)?));
                Ok(())
            }
            _ => no("expected other waves of this op"),
        }
    }

    /// Takes a wave of rows that norms, if it is the first one.
    fn normed<'w>(&mut self, waves: &'w [Wave]) -> Result<&'w [Wave], String> {
        let [rows, rest @ ..] = waves else { return Ok(waves) };
        let Action::Rows { residual, sum: None, out: Some(out) } = rows.action else { return Ok(waves) };
        if self.residual.map(|(id, _)| id) != Some(residual) {
            return Err("another residual".to_string());
        }
        self.rows_end(rows, Some(out))?;
        Ok(rest)
    }

    /// Expects optional rows that norm, then scores: 16 rows and some columns of each task, whose sums meet in scratch.
    fn scores(&mut self, grid: &Grid, m: &MatVec, waves: &[Wave]) -> Result<(), String> {
        let [wave] = self.normed(waves)? else { return Err("expected scores".to_string()) };
        let Action::Scores { x, out } = wave.action else { return Err("expected scores".to_string()) };
        self.input(grid, m, (x, Layout::Operand), None)?;
        if self.validated.schedule().program.format_of(grid) != Format::plain(DType::Bf16) {
            return Err("weights of a router that are not bf16".to_string());
        }
        self.layout(out, Layout::Rows(DType::F32), m.rows)?;
        let (n, rows) = (m.rows.div_ceil(scores_cols(self.plan.form)), scores_rows(self.plan.form));
        self.over(wave, Over::Heads { n, rows, kept: 1 })?;
        self.scratch(scores_scratch(self.plan.machine.warps, self.plan.form), "sums of scores")?;
        let to = grid.operand(Role::Out).ok_or("an operand is missing")?.buffer;
        self.holds.insert(out, Value::Exchange(to));
        Ok(())
    }

    /// Expects the input of the product `m` of `grid`, row by row.
    fn rows_of(&self, grid: &Grid, m: &MatVec, x: WorkId) -> Result<(), String> {
        let input = grid.operand(Role::X).ok_or("an operand is missing")?.buffer;
        let expected = m.norm.map(|norm| norm_of(grid, norm));
        let program = &self.validated.schedule().program;
        match self.holds.get(&x) {
            Some(&Value::Rows(of, norm)) if of == input && same_norm(program, norm, expected) && !m.own_input => {}
            found => return Err(format!("{x} holds {found:?}, expected rows of the input of the product")),
        }
        self.layout(x, Layout::Rows(DType::Bf16), m.k)
    }

    fn scratch(&self, bytes: u32, what: &str) -> Result<(), String> {
        if bytes <= self.plan.machine.scratch_bytes { Ok(()) } else { Err(format!("{what} that no scratch holds")) }
    }

    /// A choice: each row by itself. The op says that ids are below the number of experts, and distinct in a row.
    fn route(&mut self, grid: &Grid, route: &Route, wave: &Wave) -> Result<(), String> {
        let buffer = |role: Role| grid.operand(role).map(|operand| operand.buffer).ok_or("an operand is missing");
        let Action::Route { scores, choices, shares } = wave.action else {
            return Err("expected a choice".to_string());
        };
        let x = buffer(Role::X)?;
        self.holds(scores, Value::Exchange(x))?;
        self.layout(scores, Layout::Rows(DType::F32), self.cols(x))?;
        self.layout(choices, Layout::Rows(DType::I32), route.top_k)?;
        self.layout(shares, Layout::Rows(DType::F32), route.top_k)?;
        self.over(wave, Over::Rows { parts: 1 })?;
        if route.top_k > 32 || route.top_k > route.experts {
            return Err("more slots than lanes or experts".to_string());
        }
        self.scratch(route_scratch(route, self.plan.machine.warps), "keys of experts")?;
        self.holds.insert(choices, Value::Exchange(buffer(Role::Out)?));
        self.choices.insert(buffer(Role::Out)?, choices);
        self.holds.insert(shares, Value::Exchange(buffer(Role::Shares)?));
        Ok(())
    }

    /// Expects a product of the places of each tile. Before the first one of a layer also optional rows that norm, and a wave that finds the places.
    ///
    /// For every choice each slot of each row has exactly one place: the places of an expert begin with a tile of its own, and within them a slot has as
    /// many before it as there are earlier slots with that expert. The number of a tile is below `Tiling::most`, so its places are in bounds. The
    /// device numbers items by the same records, and gives each to one SM. All SMs meet between the choice and its use.
    fn experts(&mut self, grid: &Grid, m: &MatVec, chosen: Chosen, waves: &[Wave], first: usize) -> Result<(), String> {
        let no = |what: &str| Err(what.to_string());
        let buffer = |role: Role| grid.operand(role).map(|operand| operand.buffer).ok_or("an operand is missing");
        let rest = self.normed(waves)?;
        let rest = match rest {
            // A chunk's places have another layout if both operands are in shared memory.
            [gather, rest @ ..] if matches!(gather.action, Action::Gather { .. }) && self.plan.form != Form::Chunk => {
                self.gather(grid, m, chosen, gather)?;
                rest
            }
            [places, fill, rest @ ..] if matches!(places.action, Action::Places { .. }) => {
                self.places(chosen, places)?;
                self.fill(grid, m, chosen, fill)?;
                rest
            }
            _ if rest.len() < waves.len() => return no("rows that no wave gathers"),
            _ => rest,
        };
        let [wave] = rest else { return no("expected a product of experts") };
        let Action::Experts { x, groups, out, pass, chunk, tickets } = wave.action else {
            return no("expected a product of experts");
        };
        let Layout::Grouped(tiling) = self.plan.work[x.index()].layout else {
            return no("an input that is not by place");
        };
        let (of, choices, expected) = (buffer(Role::X)?, chosen.choices, m.norm.map(|norm| norm_of(grid, norm)));
        match self.holds.get(&x) {
            Some(Value::Slots { of: slots, choices: by }) if (*slots, *by) == (of, choices) && expected.is_none() => {}
            Some(Value::Gathered { of: rows, norm, choices: by })
                if (*rows, *by) == (of, choices) && *norm == expected => {}
            found => return Err(format!("{x} holds {found:?}, expected the input of the product")),
        }
        if m.own_input || buffer(Role::Choices)? != choices {
            return no("another choice, or an input that is no exchange");
        }
        self.layout(x, Layout::Grouped(tiling), m.k)?;
        self.holds(groups, Value::Groups(choices))?;
        self.layout(groups, Layout::Groups(tiling), 4)?;
        let (layout, cols) = match m.epilogue {
            Epilogue::Store => (Layout::Placed(tiling), m.rows),
            Epilogue::Gated(_) | Epilogue::Clamped(_) => (Layout::Grouped(tiling), m.rows / 2),
            Epilogue::Act(_) => (Layout::Grouped(tiling), m.rows),
            _ => return no("an epilogue that experts do not have"),
        };
        if !m.rows.is_multiple_of(4) && layout != Layout::Placed(tiling) || !cols.is_multiple_of(2) {
            return no("an odd number of columns");
        }
        self.layout(out, layout, cols)?;
        let format = self.validated.schedule().program.format_of(grid);
        if format.is_plain() && format != Format::plain(DType::Bf16) || format.has_minima() {
            return no("weights that are neither bf16 nor codes without minima");
        }
        let parts = expert_parts(m.units(), pass, &self.plan.machine);
        self.over(wave, Over::Items { parts, tiling })?;
        if tickets && !self.drawn.insert((groups, m.epilogue == Epilogue::Store)) {
            return no("tickets that another wave has drawn");
        }
        for what in self.ring_of_experts(m, format, chosen, (tiling, pass, chunk)) {
            self.violate(Rule::Ring, Some(first + waves.len() - 1), what);
        }
        self.holds.insert(out, Value::Slots { of: buffer(Role::Out)?, choices });
        Ok(())
    }

    /// A wave that finds places and copies rows there.
    fn gather(&mut self, grid: &Grid, m: &MatVec, chosen: Chosen, wave: &Wave) -> Result<(), String> {
        let Action::Gather { x, choices: ids, groups, places, out } = wave.action else {
            return Err("expected rows that are gathered".to_string());
        };
        let tiling = self.find_places(chosen, (ids, groups, places), out)?;
        self.over(wave, Over::Heads { n: 1, rows: 1, kept: 1 })?;
        self.input(grid, m, (x, Layout::Operand), None)?;
        self.copied(grid, m, chosen, out, tiling)
    }

    /// A wave that finds places, and the row of each: as many places as rows have slots, so no two rows have one.
    fn places(&mut self, chosen: Chosen, wave: &Wave) -> Result<(), String> {
        let Action::Places { choices: ids, groups, places, sources } = wave.action else {
            return Err("expected places".to_string());
        };
        let tiling = self.find_places(chosen, (ids, groups, places), sources)?;
        self.layout(sources, Layout::Sources(tiling), 1)?;
        self.over(wave, Over::Rows { parts: 1 })?;
        self.holds.insert(sources, Value::Sources(chosen.choices));
        Ok(())
    }

    /// A wave that copies rows to places. The device numbers groups of neighbouring places by the records of tiles, and gives each to one SM.
    fn fill(&mut self, grid: &Grid, m: &MatVec, chosen: Chosen, wave: &Wave) -> Result<(), String> {
        let Action::Fill { x, groups, sources, out } = wave.action else {
            return Err("expected rows that are copied to places".to_string());
        };
        let Layout::Grouped(tiling) = self.plan.work[out.index()].layout else {
            return Err("an output that is not by place".to_string());
        };
        self.holds(groups, Value::Groups(chosen.choices))?;
        self.layout(groups, Layout::Groups(tiling), 4)?;
        self.holds(sources, Value::Sources(chosen.choices))?;
        self.layout(sources, Layout::Sources(tiling), 1)?;
        self.over(wave, Over::Items { parts: tiling.rows / FILLED_PLACES, tiling })?;
        self.rows_of(grid, m, x)?;
        self.copied(grid, m, chosen, out, tiling)
    }

    /// What a wave that finds places reads and writes: room for every choice, and counts of all experts in scratch. `by_place`: a buffer by place.
    fn find_places(
        &mut self,
        chosen: Chosen,
        (ids, groups, places): (WorkId, WorkId, WorkId),
        by_place: WorkId,
    ) -> Result<Tiling, String> {
        let Chosen { experts, slots, choices } = chosen;
        self.holds(ids, Value::Exchange(choices))?;
        self.layout(ids, Layout::Rows(DType::I32), slots)?;
        let (Layout::Grouped(tiling) | Layout::Sources(tiling)) = self.plan.work[by_place.index()].layout else {
            return Err("an output that is not by place".to_string());
        };
        let least = Tiling::of(self.plan.rows, slots, experts, tiling.rows);
        let products = self.plan.machine.products;
        if !tiling.is_multiplied(products) || tiling.most < least.most || tiling.places() > u64::from(u32::MAX) {
            return Err(format!("{} tiles of {} places, expected {} at least", tiling.most, tiling.rows, least.most));
        }
        self.layout(groups, Layout::Groups(tiling), 4)?;
        self.layout(places, Layout::Rows(DType::I32), slots)?;
        self.scratch(gather_scratch(experts, slots), "counts of experts")?;
        self.holds.insert(groups, Value::Groups(choices));
        self.drawn.retain(|(of, _)| *of != groups);
        self.holds.insert(places, Value::Places(choices));
        Ok(tiling)
    }

    /// Rows of the input of a product that are copied to their places.
    fn copied(&mut self, grid: &Grid, m: &MatVec, chosen: Chosen, out: WorkId, tiling: Tiling) -> Result<(), String> {
        self.layout(out, Layout::Grouped(tiling), m.k)?;
        let of = grid.operand(Role::X).ok_or("an operand is missing")?.buffer;
        let norm = m.norm.map(|norm| norm_of(grid, norm));
        self.holds.insert(out, Value::Gathered { of, norm, choices: chosen.choices });
        Ok(())
    }

    /// The faults in how a block multiplies experts. Both warpgroups have two units of each 16 for each warp; parts of the units of an expert are nearly
    /// equal, and none is longer than a pass. With both operands in shared memory the rings have changed places: so the two blocks of a pair share the input.
    fn ring_of_experts(
        &self,
        m: &MatVec,
        format: Format,
        chosen: Chosen,
        (tiling, pass, chunk): (Tiling, u32, u32),
    ) -> Vec<String> {
        let machine = &self.plan.machine;
        let is_shared = machine.products == Products::Shared;
        let (of_weights, of_places) = match is_shared {
            true => (machine.inputs, machine.weights),
            false => (machine.weights, machine.inputs),
        };
        let padded = u64::from(pass).next_multiple_of(u64::from(TILE_UNITS));
        let bytes = padded.saturating_mul(u64::from(chunk)).saturating_mul(u64::from(format.granule_bytes()));
        let of_input = u64::from(chunk).saturating_mul(granule_spans(m, format)) * u64::from(tiling.rows) * 64;
        let most = match is_shared {
            true => SHARED_EXPERT_PASS_MAX,
            false => unit_tiles_max(tiling.rows, format.groups.is_some()) * TILE_UNITS,
        };
        let rows = u64::from(chosen.experts) * u64::from(m.units()) * 8;
        let parts = u64::from(expert_parts(m.units(), pass, machine));
        let wrong = [
            (m.parts() != 1, "of units of fewer than eight rows".to_string()),
            (is_shared && !format.is_plain(), "codes, with both operands in shared memory".to_string()),
            (parts > u64::from(m.units()), "a part without a unit".to_string()),
            (
                chunk != expert_granules(self.plan.form, format),
                "expected chunks of 64 of k, or of a granule of codes, and in a step of twice as many".to_string(),
            ),
            (pass == 0 || padded > u64::from(most), format!("a pass of {pass} units, whose sums no lane has")),
            (pass > 96, "more units of a pass than lanes copy".to_string()),
            (
                bytes > u64::from(of_weights.slot_bytes),
                format!("{bytes} bytes of a pass of {pass} units, which no slot holds"),
            ),
            (of_input > u64::from(of_places.slot_bytes), "a chunk of a tile, which no slot holds".to_string()),
            (
                rows > u64::from(u32::MAX) || (u64::from(tiling.most) + 1) * parts.max(1) > u64::from(u32::MAX),
                "more rows of all experts, or items, than 32 bits count".to_string(),
            ),
            (
                u64::from(m.units()).saturating_mul(parts) > u64::from(u32::MAX),
                "more units than 32 bits divide".to_string(),
            ),
        ];
        wrong.into_iter().filter(|(wrong, _)| *wrong).map(|(_, what)| format!("experts: {what}")).collect()
    }

    /// The sum over slots, each at its place, and of the shared expert.
    fn combine(&mut self, grid: &Grid, combine: &Combine, wave: &Wave) -> Result<(), String> {
        let no = |what: &str| Err(what.to_string());
        let buffer = |role: Role| grid.operand(role).map(|operand| operand.buffer).ok_or("an operand is missing");
        let Combine { width, slots: count, shared: scale, scale: _, adds } = *combine;
        let slots = match wave.action {
            Action::Rows { sum: Some(Sum::Slots(slots)), .. } if adds => slots,
            Action::Combine { slots, .. } if !adds => slots,
            _ => return no("expected a sum over slots, which goes where the program says"),
        };
        let Slots { x, places, shares, shared, gate } = slots;
        let made = buffer(Role::X)?;
        let Some(&Value::Slots { of, choices }) = self.holds.get(&x) else {
            return Err(format!("{x} holds {:?}, expected what experts made", self.holds.get(&x)));
        };
        let Layout::Placed(tiling) = self.plan.work[x.index()].layout else {
            return no("slots that are not by place");
        };
        if of != made || !width.is_multiple_of(8) {
            return no("the slots of other experts, or rows that are no whole pieces of 8");
        }
        self.layout(x, Layout::Placed(tiling), width)?;
        self.holds(places, Value::Places(choices))?;
        self.layout(places, Layout::Rows(DType::I32), count)?;
        self.holds(shares, Value::Exchange(buffer(Role::Shares)?))?;
        self.layout(shares, Layout::Rows(DType::F32), count)?;
        match (scale, shared) {
            (None, None) => {}
            (Some(_), Some(shared)) => {
                self.holds(shared, Value::Shared(made))?;
                self.layout(shared, Layout::Rows(DType::Bf16), width)?;
            }
            _ => return no("a shared expert, or none"),
        }
        match (grid.operand(Role::Gate), gate) {
            (None, None) => {}
            (Some(of), Some(gate)) => {
                self.holds(gate, Value::Exchange(of.buffer))?;
                self.layout(gate, Layout::Rows(DType::F32), self.cols(of.buffer))?;
            }
            _ => return no("the gate of a shared expert, or none"),
        }
        match wave.action {
            Action::Rows { residual, out, .. } => {
                self.sums(residual, Some(buffer(Role::Out)?), width)?;
                self.rows_end(wave, out)
            }
            Action::Combine { out, .. } => {
                self.over(wave, Over::Rows { parts: 1 })?;
                self.layout(out, Layout::Parts(1), width)?;
                self.holds.insert(out, Value::Exchange(buffer(Role::Out)?));
                Ok(())
            }
            _ => no("expected a sum over slots"),
        }
    }

    /// Expects optional rows that norm, then a product. If the product leaves an addend in parts, expects rows that add it.
    fn matvec(&mut self, grid: &Grid, m: &MatVec, mut waves: &[Wave], mut first: usize) -> Result<(), String> {
        let no = |what: &str| Err(what.to_string());
        let rest = self.normed(waves)?;
        let rest = self.normed_scan(grid, m, rest)?;
        first += waves.len() - rest.len();
        waves = rest;
        let [product, rest @ ..] = waves else { return no("expected a product") };
        self.product(grid, m, product, first)?;
        let (parts, left, scale) = match (&product.action, m.epilogue) {
            (&Action::MatMul { target: Written::Out(parts), .. }, Epilogue::Residual { scale }) => (parts, None, scale),
            (
                &Action::MatMul { target: Written::Sums { branch: Some(parts), .. }, then, .. },
                Epilogue::Residual { scale },
            ) => (parts, then, scale),
            _ if rest.is_empty() => return Ok(()),
            _ => return no("expected no wave after the product"),
        };
        let [rows] = rest else { return no("expected rows that add what the product left") };
        let Action::Rows { residual, sum: Some(Sum::Branch { branch, norm: None, scale: times }), out } = rows.action
        else {
            return no("expected rows that add a branch as it is");
        };
        self.holds(branch, Value::Addend(self.grid))?;
        if branch != parts || times.to_bits() != scale.to_bits() {
            return no("another branch or scale");
        }
        if let Some(left) = left {
            // In launches with several parts these rows leave what the product leaves in others, with the factor of its norm.
            let of = match self.plan.divisions[product.division.index()].over {
                Over::Units { parts, .. } => parts,
                _ => 1,
            };
            self.over(rows, Over::Sums { parts: of })?;
            let same =
                self.residual.map(|(id, _)| id) == Some(residual) && out == Some(Input { squares: None, ..left });
            return if same { Ok(()) } else { no("expected rows that leave what the product leaves") };
        }
        self.sums(residual, grid.operand(Role::Out).map(|out| out.buffer), m.rows)?;
        self.rows_end(rows, out)
    }

    /// Expects bf16 row by row, or sums of parts.
    fn rows_or_parts(&self, id: WorkId, cols: u32) -> Result<(), String> {
        match self.plan.work[id.index()].layout {
            parts @ Layout::Parts(1..) => self.layout(id, parts, cols),
            _ => self.layout(id, Layout::Rows(DType::Bf16), cols),
        }
    }

    /// In a chunk, expects an append, then attention except in the last layer. In a step, expects one wave that does both, then a wave that merges
    /// KV splits if histories are split.
    fn attention(
        &mut self,
        id: GridId,
        grid: &Grid,
        a: &Attention,
        waves: &[Wave],
        is_last: bool,
    ) -> Result<(), String> {
        let buffer = |role: Role| grid.operand(role).map(|operand| operand.buffer).ok_or("an operand is missing");
        let no = |what: &str| Err(what.to_string());

        let (precision, warps) = (self.validated.schedule().program.precision, self.plan.machine.warps);
        let variant = self.validated.schedule().attention_variant(id).ok_or("attention without a variant")?;
        let heads = if a.norms_all_heads() { a.without_norms() } else { a.clone() };
        if !heads.on_tensor_cores(precision, warps, variant.warps_per_head) || a.splits != 1 {
            return no("expected attention of whole heads on tensor cores");
        }
        if self.validated.schedule().program.precision.cache != DType::Bf16 {
            return no("expected a cache in bf16");
        }
        let (cols, qkv) = (a.heads * a.head_dim, (a.heads + 2 * a.kv_heads()) * a.head_dim);
        let x_of = buffer(Role::Q)?;
        // The kernel reads the gate after q, k and v.
        let gate = grid.operand(Role::Gate).map(|gate| (gate.buffer, gate.cols.base));
        if gate != a.gate.then_some((x_of, qkv)) {
            return no("expected the gate after q, k and v, where there is one");
        }
        let all = if a.gate { qkv + cols } else { qkv };
        let (waves, of_heads) = match waves {
            [norms, rest @ ..] if a.norms_all_heads() => {
                self.norm_heads(id, a, norms, (x_of, all))?;
                (rest, Value::NormedHeads(id))
            }
            _ => (waves, Value::Exchange(x_of)),
        };
        // The input of the wave that appends. Only a step has it in packets.
        let heads = |judge: &Self, x: WorkId| {
            judge.holds(x, of_heads)?;
            match judge.plan.work[x.index()].layout {
                packets @ Layout::Packets(1..) if judge.plan.form.decides() => judge.layout(x, packets, all),
                _ => judge.rows_or_parts(x, all),
            }
        };
        let program = &self.validated.schedule().program;
        let cache = &program.buffers[buffer(Role::AppendK)?.index()];
        // Bytes of a row of a KV head, a multiple of 16.
        let row = (a.head_dim * cache.dtype.bytes() as u32).next_multiple_of(16);
        let page = cache.paging.map_or(0, |paging| paging.rows);
        let (wave, out, tile, rows) = match (self.plan.form, waves) {
            (Form::Chunk, [append, rest @ ..]) => {
                let Action::Append { x, queries } = append.action else { return no("expected an append") };
                heads(self, x)?;
                self.layout(queries, Layout::Rows(DType::Bf16), cols)?;
                self.over(append, Over::Rows { parts: 1 })?;
                self.holds.insert(queries, Value::Queries(id));
                match rest {
                    [] if is_last => return Ok(()),
                    [wave] if !is_last => {
                        let Action::Attend { queries, out, tile, wide, gate } = wave.action else {
                            return no("expected attention");
                        };
                        self.holds(queries, Value::Queries(id))?;
                        // The heads from which this layer has appended.
                        if gate != a.gate.then_some(x) {
                            return no("expected the gate among the heads, where there is one");
                        }
                        gate.map_or(Ok(()), |gate| self.holds(gate, of_heads))?;
                        let Machine { inputs, weights, .. } = self.plan.machine;
                        // Slots of inputs follow those of weights, and the swizzle is of 1024 bytes.
                        let begins = weights.bytes().is_multiple_of(1024);
                        if wide && !(begins && attends_wide(self.validated.schedule(), id, a, inputs)) {
                            return no("attention by warpgroups of heads, or with slots, that they do not take");
                        }
                        if wide && tile != WIDE_TILE {
                            return no("expected the tile of attention by warpgroups");
                        }
                        (wave, out, tile, 8 / a.heads_per_task * 16)
                    }
                    _ => return no("expected attention after the append, but in the last layer"),
                }
            }
            (Form::Steps | Form::Tail, [wave, rest @ ..]) => {
                let Action::AttendRow { x, out, tile, splits } = wave.action else {
                    return no("expected attention of rows");
                };
                self.splits(a, (x, out, tile, splits), wave, rest)?;
                heads(self, x)?;
                // The next step reads what this wave appends.
                let same = |append, history| Ok::<_, &str>(buffer(append)? == buffer(history)?);
                if !same(Role::AppendK, Role::HistoryK)? || !same(Role::AppendV, Role::HistoryV)? {
                    return no("expected one cache that is read and appended to");
                }
                self.row_heads(a, row, tile)?;
                (wave, out, tile, 1)
            }
            _ => return no("expected other waves of attention"),
        };
        self.operand(out, cols)?;
        let kept = if self.plan.machine.devices > 1 { a.group / a.heads_per_task } else { 1 };
        self.over(wave, Over::Heads { n: a.heads / a.heads_per_task, rows, kept })?;
        let pages = tile > 0 && tile.is_multiple_of(16) && page > 0 && page.is_multiple_of(tile);
        // Warpgroups have keys and values in slots of their own.
        let of_slot =
            if matches!(wave.action, Action::Attend { wide: true, .. }) { tile } else { tile.saturating_mul(2) };
        if !pages || of_slot.saturating_mul(row) > self.plan.machine.inputs.slot_bytes {
            return no("expected tiles of whole 16 positions that divide pages, with keys and values in one slot");
        }
        self.holds.insert(out, Value::Exchange(buffer(Role::Out)?));
        Ok(())
    }

    /// A wave that norms q and k of the exchange `x_of` of `all` columns: whole rows, each with norms over all heads alone, whose sums of squares one block adds up.
    fn norm_heads(
        &mut self,
        id: GridId,
        a: &Attention,
        wave: &Wave,
        (x_of, all): (BufferId, u32),
    ) -> Result<(), String> {
        let Action::NormHeads { x, out } = wave.action else {
            return Err("expected rows that norm all heads".to_string());
        };
        let whole = |norm: &QkNormAttr| norm.is_over_all_heads() && norm.norm.is_factor();
        // The kernel has 8 columns of one kind at a time.
        if ![&a.q_norm, &a.k_norm].into_iter().flatten().all(whole) || !a.head_dim.is_multiple_of(8) {
            return Err("norms that are not over all heads alone".to_string());
        }
        self.holds(x, Value::Exchange(x_of))?;
        self.rows_or_parts(x, all)?;
        self.layout(out, Layout::Parts(1), all)?;
        self.over(wave, Over::Rows { parts: 1 })?;
        self.holds.insert(out, Value::NormedHeads(id));
        Ok(())
    }

    /// In a chunk, expects a convolution, then states through all rows, then the norm and the gate, except in the last layer. In a step, expects one wave that does
    /// all of it.
    ///
    /// A state has one grid (`validate`), and this grid has one wave that writes it. In a chunk a share of that wave has all rows, so one block has a column of a state and
    /// takes the positions in their order; the block with the first columns of a head writes its past inputs, which only the wave before reads. In a step the share of the first
    /// row of a sequence has the state for all of its rows: rows of a sequence are neighbours (`consecutive`). The first row finds the state before it (`at`).
    /// Meetings order waves that access a state, also those of two steps.
    fn mix(&mut self, id: GridId, grid: &Grid, mix: &Mix, waves: &[Wave], is_last: bool) -> Result<(), String> {
        let no = |what: &str| Err(what.to_string());
        let out = match (self.plan.form, waves) {
            (Form::Chunk, waves) => match self.mix_chunk(id, grid, mix, waves, is_last)? {
                Some(out) => out,
                None => return Ok(()),
            },
            (Form::Steps, [wave]) => {
                let Action::MixRow { x, scalars, out } = wave.action else { return no("expected states of rows") };
                self.net_inputs(grid, mix, (x, scalars))?;
                self.over(wave, Over::Heads { n: mix.value_heads, rows: 1, kept: 1 })?;
                self.scratch(row_bytes(&grid.op, self.plan.machine.warps), "values of a head")?;
                out
            }
            (Form::Tail, _) => return no("a state, which a tail would bring on a second time"),
            _ => return no("expected other waves of a net"),
        };
        self.operand(out, mix.value_heads * mix.value_dim)?;
        self.holds.insert(out, Value::Exchange(grid.operand(Role::Out).ok_or("an operand is missing")?.buffer));
        Ok(())
    }

    /// Expects a wave that brings the state of a short convolution on, and reads b, c and x one after another. As of a net, a share has all rows of a sequence for its
    /// channels, and channels have states of their own.
    fn short_conv(&mut self, grid: &Grid, convolve: &Convolve, wave: &Wave) -> Result<(), String> {
        let place = |role: Role| grid.operand(role).map(|o| (o.buffer, o.cols.base)).ok_or("an operand is missing");
        let Action::ShortConv { x, out } = wave.action else { return Err("expected a short convolution".to_string()) };
        let Convolve { channels, kernel } = *convolve;
        let x_of = place(Role::X)?.0;
        for (role, base) in [(Role::B, 0), (Role::C, channels), (Role::X, 2 * channels)] {
            if place(role)? != (x_of, base) {
                return Err("expected b, c and x one after another".to_string());
            }
        }
        // A lane has two channels, which keep an input at least.
        if !channels.is_multiple_of(2) || kernel < 2 || self.cols(x_of) != 3 * channels {
            return Err("channels that are no pairs, or keep nothing".to_string());
        }
        self.holds(x, Value::Exchange(x_of))?;
        self.rows_or_parts(x, 3 * channels)?;
        let n = channels.div_ceil(group_channels(self.plan.form));
        match self.plan.form {
            Form::Chunk => {
                self.layout(x, Layout::Rows(DType::Bf16), 3 * channels)?;
                self.over(wave, Over::States { n })?;
            }
            Form::Steps => self.over(wave, Over::Heads { n, rows: 1, kept: 1 })?,
            Form::Tail => return Err("a state, which a tail would bring on a second time".to_string()),
        }
        self.operand(out, channels)?;
        self.holds.insert(out, Value::Exchange(place(Role::Out)?.0));
        Ok(())
    }

    /// The waves of a net in a chunk. Returns what the last one leaves for the product after it; `None`: nothing reads it.
    fn mix_chunk(
        &mut self,
        id: GridId,
        grid: &Grid,
        mix: &Mix,
        waves: &[Wave],
        is_last: bool,
    ) -> Result<Option<WorkId>, String> {
        let no = |what: &str| Err(what.to_string());
        let [convolve, carry, rest @ ..] = waves else { return no("expected a convolution and states") };
        let Action::Convolve { x, scalars, out: turned } = convolve.action else {
            return no("expected a convolution");
        };
        let [x_of, scalars_of] = self.net_inputs(grid, mix, (x, scalars))?;
        // Products of chunks leave no parts.
        self.layout(x, Layout::Rows(DType::Bf16), self.cols(x_of))?;
        self.layout(scalars, Layout::Rows(DType::Bf16), self.cols(scalars_of))?;
        self.layout(turned, Layout::Rows(DType::F32), mix.qkv_cols() + 2 * mix.value_heads)?;
        self.over(convolve, Over::Rows { parts: 1 })?;
        self.holds.insert(turned, Value::Turned(id));

        let Action::Mix { out: mixed, .. } = carry.action else { return no("expected states") };
        if carry.action != (Action::Mix { turned, x, out: mixed }) {
            return no("expected states that take what the wave before made, and keep its inputs");
        }
        self.holds(x, Value::Exchange(x_of))?;
        self.layout(mixed, Layout::Rows(DType::F32), mix.value_heads * mix.value_dim)?;
        self.states(grid, carry)?;
        self.holds.insert(mixed, Value::Mixed(id));

        let [wave] = rest else {
            let ends = is_last && rest.is_empty();
            return if ends {
                Ok(None)
            } else {
                no("expected a norm and a gate after the states, but in the last layer")
            };
        };
        let Action::Gated { out, .. } = wave.action else { return no("expected a norm and a gate") };
        if wave.action != (Action::Gated { mixed, x, out }) || is_last {
            return no(
                "expected the norm of what states gave, and the gate beside their inputs; none in the last layer",
            );
        }
        self.holds(x, Value::Exchange(x_of))?;
        self.over(wave, Over::Rows { parts: 1 })?;
        Ok(Some(out))
    }

    /// Expects what [`mix`](Self::mix) does of the waves of Mamba-2, with states in the same places. Where a norm follows, they leave the output before its gate.
    fn scan(&mut self, id: GridId, grid: &Grid, scan: &Scan, waves: &[Wave]) -> Result<(), String> {
        let no = |what: &str| Err(what.to_string());
        let (x_of, out_of) =
            (self.scan_inputs(grid, scan)?, grid.operand(Role::Out).ok_or("an operand is missing")?.buffer);
        let of_x = |judge: &Self, x: WorkId, scalars: WorkId| {
            if x != scalars {
                return Err("expected all inputs in one buffer".to_string());
            }
            judge.holds(x, Value::Exchange(x_of))?;
            judge.rows_or_parts(x, judge.cols(x_of))
        };
        let out = match (self.plan.form, waves) {
            (Form::Chunk, [convolve, carry]) => {
                let Action::Convolve { x, scalars, out: turned } = convolve.action else {
                    return no("expected a convolution");
                };
                of_x(self, x, scalars)?;
                // Products of chunks leave no parts.
                self.layout(x, Layout::Rows(DType::Bf16), self.cols(x_of))?;
                self.layout(turned, Layout::Rows(DType::F32), scan_cols(scan))?;
                self.over(convolve, Over::Rows { parts: 1 })?;
                self.holds.insert(turned, Value::Turned(id));
                let Action::Mix { out, .. } = carry.action else { return no("expected states") };
                if carry.action != (Action::Mix { turned, x, out }) {
                    return no("expected states that take what the wave before made, and keep its inputs");
                }
                self.holds(x, Value::Exchange(x_of))?;
                self.states(grid, carry)?;
                out
            }
            (Form::Steps, [wave]) => {
                let Action::MixRow { x, scalars, out } = wave.action else { return no("expected states of rows") };
                of_x(self, x, scalars)?;
                self.over(wave, Over::Heads { n: scan.heads, rows: 1, kept: 1 })?;
                self.scratch(row_bytes(&grid.op, self.plan.machine.warps), "values of a head")?;
                out
            }
            (Form::Tail, _) => return no("a state, which a tail would bring on a second time"),
            _ => return no("expected other waves of Mamba-2"),
        };
        if GateNorm::follows(&self.validated.schedule().program, out_of) {
            self.layout(out, Layout::Rows(DType::F32), scan.inner())?;
            self.holds.insert(out, Value::Mixed(id));
        } else if scan.gate.is_some() {
            self.operand(out, scan.inner())?;
            self.holds.insert(out, Value::Exchange(out_of));
        } else {
            return no("an output that is neither gated nor normed");
        }
        Ok(())
    }

    /// Checks the columns that Mamba-2 reads: the gate, x, b, c and steps one after another. Returns their exchange.
    fn scan_inputs(&self, grid: &Grid, scan: &Scan) -> Result<BufferId, String> {
        let place = |role: Role| grid.operand(role).map(|o| (o.buffer, o.cols.base));
        let (inner, grouped) = (scan.inner(), scan.groups * scan.state);
        let x_of = place(Role::X).ok_or("an operand is missing")?.0;
        let steps = 2 * (inner + grouped);
        for (role, base) in
            [(Role::X, inner), (Role::B, 2 * inner), (Role::C, 2 * inner + grouped), (Role::Step, steps)]
        {
            if place(role) != Some((x_of, base)) {
                return Err("expected x, b, c and steps one after another".to_string());
            }
        }
        if scan.gate.is_some() && place(Role::Gate) != Some((x_of, 0)) || self.cols(x_of) != steps + scan.heads {
            return Err("expected the gate before x, and no column after the steps".to_string());
        }
        // A lane reads two columns.
        let even = [scan.head_dim, scan.state, self.cols(x_of)];
        if even.iter().any(|cols| !cols.is_multiple_of(2)) || scan.kernel == 0 {
            return Err("an odd number of columns, or no taps".to_string());
        }
        Ok(x_of)
    }

    /// Expects whole rows of what Mamba-2 gives, normed with its gate. Returns what the wave leaves.
    fn gate_norm(&mut self, grid: &Grid, wave: &Wave) -> Result<WorkId, String> {
        let program = &self.validated.schedule().program;
        let Some(norm) = GateNorm::of(program, grid) else {
            return Err("a norm of something else than Mamba-2 with one gate".to_string());
        };
        let Action::Gated { mixed, x, out } = wave.action else { return Err("expected a norm and a gate".to_string()) };
        let scan = &program.grids[norm.scan.index()];
        let x_of = scan.operand(Role::X).ok_or("an operand is missing")?.buffer;
        let gate = scan.operand(Role::Gate).or(grid.operand(Role::Gate)).ok_or("an operand is missing")?;
        if (gate.buffer, gate.cols.base) != (x_of, 0) {
            return Err("expected the gate before the inputs of Mamba-2".to_string());
        }
        if norm.groups == 0 || !norm.width.is_multiple_of(2 * norm.groups) {
            return Err("groups of an odd number of columns".to_string());
        }
        self.holds(mixed, Value::Mixed(norm.scan))?;
        self.layout(mixed, Layout::Rows(DType::F32), norm.width)?;
        self.holds(x, Value::Exchange(x_of))?;
        self.rows_or_parts(x, self.cols(x_of))?;
        self.over(wave, Over::Rows { parts: 1 })?;
        self.operand(out, norm.width)?;
        Ok(out)
    }

    /// Takes a wave that norms what Mamba-2 gives for a product, if it is the first one.
    fn normed_scan<'w>(&mut self, grid: &Grid, m: &MatVec, waves: &'w [Wave]) -> Result<&'w [Wave], String> {
        let ([wave, rest @ ..], Some(norm)) = (waves, m.norm) else { return Ok(waves) };
        if !matches!(wave.action, Action::Gated { .. }) {
            return Ok(waves);
        }
        let out = self.gate_norm(grid, wave)?;
        let of = grid.operand(Role::X).ok_or("an operand is missing")?.buffer;
        self.holds.insert(out, Value::Normed(of, Some(norm_of(grid, norm))));
        Ok(rest)
    }

    /// Checks the columns that a net reads: q, k, v and the gate one after another in `x`, beta and the decay in `scalars`. Returns their exchanges.
    fn net_inputs(&self, grid: &Grid, mix: &Mix, (x, scalars): (WorkId, WorkId)) -> Result<[BufferId; 2], String> {
        let place = |role: Role| grid.operand(role).map(|o| (o.buffer, o.cols.base)).ok_or("an operand is missing");
        let (keys, values) = (mix.key_heads * mix.key_dim, mix.value_heads * mix.value_dim);
        let (x_of, scalars_of) = (place(Role::Q)?.0, place(Role::Beta)?.0);
        for (role, base) in [(Role::Q, 0), (Role::K, keys), (Role::V, 2 * keys), (Role::Gate, 2 * keys + values)] {
            if place(role)? != (x_of, base) {
                return Err("expected q, k, v and the gate one after another".to_string());
            }
        }
        if place(Role::Decay)?.0 != scalars_of {
            return Err("expected beta and decay in one buffer".to_string());
        }
        // A lane reads two columns.
        let even = [mix.key_dim, mix.value_dim, self.cols(x_of), self.cols(scalars_of)];
        if even.iter().any(|cols| !cols.is_multiple_of(2)) {
            return Err("an odd number of columns".to_string());
        }
        for (id, of) in [(x, x_of), (scalars, scalars_of)] {
            self.holds(id, Value::Exchange(of))?;
            self.rows_or_parts(id, self.cols(of))?;
        }
        Ok([x_of, scalars_of])
    }

    /// Columns of states: whole tiles for each block, and memory for them. Nothing is on its way to the ring of inputs then: a copy to it waits until
    /// all blocks have met after this wave.
    fn states(&self, grid: &Grid, wave: &Wave) -> Result<(), String> {
        let states = Carried::of(&grid.op).ok_or("no states")?;
        let Over::States { n } = self.plan.divisions[wave.division.index()].over else {
            return Err("states that are not divided over their columns".to_string());
        };
        let (parts, machine) = (n / states.heads.max(1), &self.plan.machine);
        if n != states.heads.saturating_mul(parts) || !states.has_tiles(parts) {
            return Err(format!("{n} groups of columns of {} heads, which are no whole tiles", states.heads));
        }
        let room = machine.inputs.bytes().saturating_add(machine.scratch_bytes);
        if states.chunk_bytes(parts) <= room {
            Ok(())
        } else {
            Err("states that no memory of a block holds".to_string())
        }
    }

    /// Checks the KV splits of attention `(x, out, tile, splits)`, and the waves `rest` after it: one that merges, if there are splits.
    ///
    /// Each split of each row has its own place. The kernel assigns splits to the `sms` blocks by their number, so each split has exactly one block
    /// for every table of rows. The first wave writes the rows that have one split, the second wave writes all others. Both waves have the same
    /// splits, so they agree on which rows these are.
    fn splits(
        &self,
        a: &Attention,
        (x, out, tile, splits): (WorkId, WorkId, u32, Option<Splits>),
        attends: &Wave,
        rest: &[Wave],
    ) -> Result<(), String> {
        let no = |what: &str| Err(what.to_string());
        let (Some(splits), [merge]) = (splits, rest) else {
            return if splits.is_none() && rest.is_empty() {
                Ok(())
            } else {
                no("expected splits and a wave that merges them, or neither")
            };
        };
        if self.plan.form != Form::Steps {
            return no("splits of what is no step");
        }
        if self.plan.machine.devices > 1 {
            return no("splits, which blocks of one device deal out");
        }
        // What the heads hold is checked where attention reads them, and neither wave writes them.
        let gate = a.gate.then_some(x);
        if merge.action != (Action::Merge { out, splits, gate }) || merge.division != attends.division {
            return no("expected a wave that merges the splits of the wave before it");
        }
        let Splits { positions, most, left } = splits;
        // The kernel compares last splits by eighths of the length of a split, so a split has at least 8 positions. One word holds a row in 8 bits and
        // the number of a split in 24.
        if tile == 0 || !positions.is_multiple_of(tile) || positions < 8 {
            return no("splits that are no whole tiles");
        }
        let context = self.validated.schedule().program.context_max;
        let longest = a.window.map_or(context, |window| window.saturating_add(tile).min(context));
        if u64::from(positions) * u64::from(most) < u64::from(longest) || !(2..1 << 24).contains(&most) {
            return Err(format!("{most} splits of {positions} positions, of histories of up to {longest}"));
        }
        self.layout(left, Layout::Splits(most), a.heads * (a.head_dim + 2))
    }

    /// Attention of a row in a step: the heads of a task fit one tile, and scratch has room for their data. `row`: bytes of a cache row.
    fn row_heads(&self, a: &Attention, row: u32, tile: u32) -> Result<(), String> {
        // A tile has 16 rows, one for each head. One of the tasks that share a KV head appends, so no task may have heads of several KV heads.
        if a.heads_per_task > 16 || !a.group.is_multiple_of(a.heads_per_task) {
            return Err("heads of a row that no tile holds, or of several KV heads".to_string());
        }
        // Scratch holds queries, a key and a value of each row. After them, in the same place: keys and values of 16 or 32 positions, or the
        // results of a team of warps, which are values and two statistics of each head.
        // With a gate also the gates of the heads.
        let gates = if a.gate { a.heads_per_task * a.head_dim * 2 } else { 0 };
        let own = (a.heads_per_task * (a.head_dim * 2 + 16) + 2 * row + gates).next_multiple_of(128);
        let new = 2 * row * if a.head_dim <= 64 && tile.is_multiple_of(32) { 32 } else { 16 };
        let left = a.heads_per_task * (a.head_dim + 2) * 4;
        let scratch = self.plan.machine.scratch_bytes;
        let own = own * (scratch / 4 / own).clamp(1, 4);
        let fits = own + new.max(left) <= scratch;
        if fits { Ok(()) } else { Err("heads of a row that no scratch holds".to_string()) }
    }

    /// Checks the input that a wave of rows leaves: it must be the input of a product of the program.
    fn rows_end(&mut self, wave: &Wave, out: Option<Input>) -> Result<(), String> {
        let squares = out.and_then(|out| out.squares);
        let parts = match squares.map(|id| self.plan.work[id.index()].layout) {
            Some(Layout::Parts(parts)) => parts,
            _ => 1,
        };
        self.over(wave, Over::Rows { parts })?;
        let cols = self.residual.map_or(0, |(residual, _)| self.plan.work[residual.index()].cols);
        // A lane processes 8 columns at a time.
        if !cols.is_multiple_of(8) {
            return Err(format!("rows of {cols} columns, which are no whole pieces of 8"));
        }
        let Some(out) = out else { return Ok(()) };
        if squares.is_some() {
            // They have the same number of whole pieces of columns.
            let branch_is_whole =
                matches!(wave.action, Action::Rows { sum: Some(Sum::Branch { norm: Some(_), .. }), .. });
            let even = (2..=8).contains(&parts) && cols.is_multiple_of(8 * parts);
            if branch_is_whole || !even || !self.plan.form.decides() {
                return Err(format!("{parts} parts of a row that is whole, or that they do not share evenly"));
            }
        }
        self.leaves(out, Layout::Parts(parts))
    }

    /// A wave leaves the residual as the input of a product of the program; with squares of parts of each row, which lie as `parts` says, if any.
    fn leaves(&mut self, Input { to, norm, squares, rows }: Input, parts: Layout) -> Result<(), String> {
        let Some((residual, Some(exchange))) = self.residual else {
            return Err("no residual that the program has in an exchange".to_string());
        };
        self.operand(to, self.plan.work[residual.index()].cols)?;
        let takes = |grid: &Grid| match &grid.op {
            Op::MatVec(m) => {
                let x = grid.operand(Role::X).map(|x| x.buffer);
                x == Some(exchange) && m.norm.map(|norm| norm_of(grid, norm)) == norm
            }
            _ => false,
        };
        if !self.validated.schedule().program.grids.iter().any(takes) {
            return Err(format!("{to} is normalised as no product takes it"));
        }
        if let Some(rows) = rows {
            if squares.is_some() || self.plan.form != Form::Chunk {
                return Err(format!("{to} lacks its factor, or is of a step, and is left row by row, too"));
            }
            self.layout(rows, Layout::Rows(DType::Bf16), self.plan.work[residual.index()].cols)?;
            self.holds.insert(rows, Value::Rows(exchange, norm));
        }
        let Some(squares) = squares else {
            self.holds.insert(to, Value::Normed(exchange, norm));
            return Ok(());
        };
        // Blocks that share a row cannot compute a norm that needs more than a factor: the product multiplies by the factor.
        self.layout(squares, parts, 1)?;
        let Some(norm) = norm.filter(|of| of.norm.is_factor() && of.bias.is_none()) else {
            return Err("squares of a norm that wants more than a factor".to_string());
        };
        self.holds.insert(to, Value::Weighted(exchange, norm));
        self.holds.insert(squares, Value::Squares(exchange));
        Ok(())
    }

    /// The two blocks of each pair have the two parts of k of the same units, in one pass, so that each sends the other one sums once, of tiles that
    /// it has itself; scratch has room for them. The memory of what was sent is used again after all blocks met.
    fn paired(&self, wave: &Wave, m: &MatVec, product: Product) -> Result<(), String> {
        let Product { pass, warps, parts, .. } = product;
        if !self.plan.machine.pairs || parts != 2 || !self.plan.form.decides() || !m.rows.is_multiple_of(2) {
            return Err("sums of pairs of blocks, which are no pairs or have no two parts".to_string());
        }
        if matches!(wave.action, Action::MatMul { squares: Some(_), .. }) {
            return Err("a product in pairs whose input lacks a factor".to_string());
        }
        let n = m.units();
        let shares = self.plan.divisions[wave.division.index()].shares.first().map_or(&[][..], Vec::as_slice);
        for pair in shares.chunks(2) {
            let units = |sm: usize, part: u32| match pair.get(sm).map(Vec::as_slice) {
                Some([]) => Some(None),
                Some([s]) if s.lo / n == part => Some(Some((s.row, s.rows, s.lo % n, s.hi - s.lo))),
                _ => None,
            };
            let (Some(even), Some(odd)) = (units(0, 0), units(1, 1)) else {
                return Err("a block of a pair without a part of its own".to_string());
            };
            if even != odd || even.is_some_and(|(.., units)| units > pass) {
                return Err("blocks of a pair with other units, or with several passes".to_string());
            }
        }
        let rows = u64::from(self.plan.block_rows);
        let [pass, by_rows, by_units, by_k] =
            [pass, warps.rows.max(1), warps.units.max(1), warps.k.max(1)].map(u64::from);
        let padded = pass.next_multiple_of(by_units * if wave.action.is_tiles() { u64::from(WIDE_UNITS) } else { 1 });
        // The sums of one unit for each warp in half of the groups of k; the sums that the other block sends; squares. The last two for half of the rows.
        let met = (8 / by_k).saturating_mul((by_k / 2).max(1)).saturating_mul(rows / 16 / by_rows * 512);
        let bytes = met.saturating_add(padded.saturating_mul(rows / 2 * 8 * 4 + rows / 2 * 4));
        if bytes > u64::from(self.plan.machine.scratch_bytes) {
            return Err("sums of a pair that no scratch holds".to_string());
        }
        Ok(())
    }

    /// A product that leaves sums ([`Written::Sums`]): with both operands in shared memory, in a chunk. In launches with one part of k a block has whole groups of columns, of each of
    /// which it leaves a sum of squares. Launches with several parts leave these in `branch`.
    fn sums_and_input(&self, wave: &Wave, m: &MatVec, product: Product, branch: Option<WorkId>) -> Result<(), String> {
        let (plan, parts) = (self.plan, product.parts);
        if plan.form != Form::Chunk || plan.machine.products != Products::Shared {
            return Err("sums of a product that no chunk leaves with both operands in shared memory".to_string());
        }
        let Action::MatMul { squares: None, then: Some(Input { squares: Some(_), .. }), .. } = wave.action else {
            return Err("sums of an input that lacks a factor, or without squares".to_string());
        };
        if !m.rows.is_multiple_of(8) || branch.is_some() != (parts > 1) {
            return Err("sums of columns that are no whole pieces of 8, or of other parts".to_string());
        }
        if let Some(branch) = branch {
            self.layout(branch, Layout::Parts(parts), m.rows)?;
        }
        self.over(wave, Over::Units { n: m.units(), parts, step: SHARED_UNITS })
    }

    /// The last wave leaves the best logits of all rows in `best`.
    fn decided(&mut self, best: WorkId, w: usize) -> Result<(), String> {
        // A tail has one step, so none of its waves reads the token that its head decides.
        if self.plan.form == Form::Tail {
            self.layout(best, Layout::Best, self.plan.machine.sms)?;
            self.best = Some(best);
        }
        if self.best != Some(best) || self.decides || w + 1 != self.plan.waves.len() {
            return Err("best logits that the next step does not read".to_string());
        }
        // Each warp leaves a score and an id for each row: 8 bytes.
        if self.plan.machine.warps * 8 * self.plan.rows > self.plan.machine.scratch_bytes {
            return Err("best logits of warps that no scratch holds".to_string());
        }
        self.decides = true;
        Ok(())
    }

    /// What a product in pairs leaves for the next one.
    fn then(&mut self, then: Option<Input>) -> Result<(), String> {
        match then {
            Some(Input { squares: None, .. }) => Err("expected a norm factor after the product of a pair".to_string()),
            Some(then) => self.leaves(then, Layout::Parts(self.plan.machine.sms / 2)),
            None => Ok(()),
        }
    }

    /// Checks that `x`, with `squares` if there are any, is the input of the product of `grid`.
    fn input(
        &self,
        grid: &Grid,
        m: &MatVec,
        (x, layout): (WorkId, Layout),
        squares: Option<WorkId>,
    ) -> Result<(), String> {
        let input = grid.operand(Role::X).ok_or("an operand is missing")?.buffer;
        self.layout(x, layout, m.k)?;
        let program = &self.validated.schedule().program;
        let found = self.holds.get(&x).copied();
        let expected = m.norm.map(|norm| norm_of(grid, norm));
        let same = match (found, squares) {
            (Some(Value::Exchange(of)), None) => of == input && m.norm.is_none(),
            (Some(Value::Normed(of, norm)), None) => of == input && same_norm(program, norm, expected),
            (Some(Value::Weighted(of, norm)), Some(squares)) => {
                self.holds(squares, Value::Squares(of))?;
                if !matches!(self.plan.work[squares.index()].layout, Layout::Parts(_) | Layout::Squares { .. }) {
                    return Err(format!("{squares} has no sums of parts"));
                }
                of == input && Some(norm) == expected
            }
            _ => false,
        };
        if !same || m.own_input {
            return Err(format!("{x} holds {found:?}, expected the input of the product"));
        }
        Ok(())
    }

    fn product(&mut self, grid: &Grid, m: &MatVec, wave: &Wave, w: usize) -> Result<(), String> {
        let program = &self.validated.schedule().program;
        let Action::MatMul { x, squares, target, then, pass, chunk, warps, tiles, held } = wave.action else {
            return Err("expected a product".to_string());
        };
        let buffer = |role: Role| grid.operand(role).map(|operand| operand.buffer).ok_or("an operand is missing");
        self.input(grid, m, (x, Layout::of_input(tiles)), squares)?;
        let weights = &program.buffers[buffer(Role::Weight)?.index()];
        let format = weights.format();
        if format.is_plain() && format != Format::plain(DType::Bf16) {
            return Err("weights that are neither bf16 nor codes".to_string());
        }
        let Over::Units { parts, step, .. } = self.plan.divisions[wave.division.index()].over else {
            return Err("a product that is not divided over units".to_string());
        };
        self.over(wave, Over::Units { n: m.units(), parts, step })?;
        let product = Product { pass, chunk, warps, parts };
        let ring = if tiles { self.tiles_of(m, format, product) } else { self.ring_of(m, format, product) };
        for what in ring.into_iter().chain(self.held_of(m, format, product, (tiles, held))) {
            self.violate(Rule::Ring, Some(w), what);
        }
        // A pass begins at the units of the share, times its number, divided by the number of passes.
        let shares = self.plan.divisions[wave.division.index()].shares.iter().flatten().flatten();
        let longest = shares.map(|share| u64::from(share.hi - share.lo)).max().unwrap_or(0);
        if longest * longest.div_ceil(u64::from(pass.max(1))) > u64::from(u32::MAX) {
            return Err(format!("passes of {pass} of {longest} units, which 32 bits do not divide"));
        }
        if then.is_some() && !target.is_paired(parts) && !matches!(target, Written::Sums { .. }) {
            return Err("the input of the next product, of a product that has no whole residual in pairs".to_string());
        }
        self.written(grid, m, (wave, product), w)
    }

    /// What a product leaves, by its epilogue.
    fn written(&mut self, grid: &Grid, m: &MatVec, (wave, product): (&Wave, Product), w: usize) -> Result<(), String> {
        let program = &self.validated.schedule().program;
        let Action::MatMul { target, then, .. } = wave.action else {
            return Err("expected a product".to_string());
        };
        let buffer = |role: Role| grid.operand(role).map(|operand| operand.buffer).ok_or("an operand is missing");
        let parts = product.parts;
        match (m.epilogue, target) {
            (Epilogue::Residual { .. }, Written::Residual(residual)) => {
                if parts > 1 {
                    self.paired(wave, m, product)?;
                }
                self.sums(residual, grid.operand(Role::Out).map(|out| out.buffer), m.rows)?;
                self.then(then)
            }
            (Epilogue::Residual { .. }, Written::Sums { branch, residual, .. }) => {
                self.sums_and_input(wave, m, product, branch)?;
                self.sums(residual, grid.operand(Role::Out).map(|out| out.buffer), m.rows)?;
                let then = then.ok_or("sums that leave no input of the next product")?;
                if let Some(branch) = branch {
                    self.holds.insert(branch, Value::Addend(self.grid));
                }
                self.leaves(then, Layout::Squares { groups: m.units().div_ceil(SHARED_UNITS), parts })
            }
            (Epilogue::Residual { .. }, Written::Out(out)) if parts > 1 => {
                self.layout(out, Layout::Parts(parts), m.rows)?;
                self.holds.insert(out, Value::Addend(self.grid));
                Ok(())
            }
            (Epilogue::Store, Written::Out(out)) if parts > 1 && !is_combined(program, buffer(Role::Out)?) => {
                let to = buffer(Role::Out)?;
                let packets = self.plan.form.decides() && self.plan.holds_packets(out);
                let layout = if packets { Layout::Packets(parts) } else { Layout::Parts(parts) };
                self.layout(out, layout, self.cols(to))?;
                if !self.cols(to).is_multiple_of(2) {
                    return Err("an odd number of columns".to_string());
                }
                self.holds.insert(out, Value::Exchange(to));
                Ok(())
            }
            // A shared expert leaves its output beside the slots of the others.
            (Epilogue::Store, Written::Out(out)) if is_combined(program, buffer(Role::Out)?) && parts == 1 => {
                self.layout(out, Layout::Rows(DType::Bf16), m.rows)?;
                self.holds.insert(out, Value::Shared(buffer(Role::Out)?));
                Ok(())
            }
            (Epilogue::Store | Epilogue::Act(_) | Epilogue::Gated(_) | Epilogue::GatedBy { .. }, Written::Out(out))
                if parts == 1 =>
            {
                let to = buffer(Role::Out)?;
                let work = &self.plan.work[out.index()];
                let stored = work.layout.is_input() || work.layout == Layout::Rows(DType::Bf16);
                if work.cols != self.cols(to) || !work.cols.is_multiple_of(2) || !stored {
                    return Err(format!("{out} is {} of {} columns", work.layout, work.cols));
                }
                self.holds.insert(out, Value::Exchange(to));
                Ok(())
            }
            (Epilogue::Logits { .. }, Written::Best(best)) if parts == 1 && self.plan.form.decides() => {
                self.decided(best, w)
            }
            _ => Err("another epilogue, or a number of parts that it cannot have".to_string()),
        }
    }

    /// The faults in how a block multiplies. A step of the loop covers the k that the shorter of an input chunk and a weight chunk has.
    fn ring_of(&self, m: &MatVec, format: Format, product: Product) -> Vec<String> {
        let Product { pass, chunk, warps: Warps { rows, units, k }, parts } = product;
        let (block, machine) = (u64::from(self.plan.block_rows), &self.plan.machine);
        let (wide, shared) = (machine.products == Products::Warpgroups, machine.products == Products::Shared);
        let [pass, chunk, rows, units, k, parts] = [pass, chunk, rows, units, k, parts].map(u64::from);
        let spans = granule_spans(m, format);
        let places = rows.saturating_mul(units).saturating_mul(k);
        if [pass, chunk, rows, units, k, parts].contains(&0) || places != u64::from(machine.warps) {
            return vec![format!("expected a place for each of {} warps", machine.warps)];
        }
        let tiles = block / 16;
        let (of_inputs, of_weights) = (u64::from(machine.inputs.slot_bytes) / (block * 64), chunk * spans);
        let step = of_inputs.min(of_weights);
        // In a warpgroup each warp has two units of each tile.
        let tile = match machine.products {
            Products::Warps => units,
            Products::Warpgroups => 2 * units,
            Products::Shared => SHARED_UNITS.into(),
        };
        let grouped = format.groups.is_some();
        let padded = pass.next_multiple_of(tile);
        let sums_of = |tiles: u64| block / rows / 2 * tiles;
        let (sums, of_lane) = if wide {
            (sums_of(wide_tiles_max((block / rows) as u32, grouped).into()), sums_of(padded / tile))
        } else if shared {
            (u64::from(SHARED_PASS_MAX) * 4, padded * 4)
        } else {
            (sums_max(grouped).into(), tiles / rows * (padded / units) * 4)
        };
        let bytes = padded.saturating_mul(chunk).saturating_mul(u64::from(format.granule_bytes()));
        let whole = step >= 2
            && step.is_multiple_of(2)
            && of_inputs.is_multiple_of(step)
            && of_weights.is_multiple_of(step)
            && step.is_multiple_of(spans)
            && (step / spans).is_multiple_of(k);
        let wrong = [
            (!tiles.is_multiple_of(rows), "rows that groups of warps do not share evenly".to_string()),
            (
                !whole,
                format!("chunks of {of_inputs} and {of_weights} spans, which have no step of {k} groups in common"),
            ),
            (
                bytes > u64::from(machine.weights.slot_bytes),
                format!("{bytes} bytes of a pass of {pass} units, which no slot holds"),
            ),
            (of_lane > sums, format!("more than {sums} sums of a lane")),
            (
                wide && (of_inputs != of_weights || of_weights != spans.max(2) || m.parts() != 1),
                "expected chunks of 64 of k, or of a granule that is longer, of units of eight rows, which warpgroups multiply"
                    .to_string(),
            ),
            (
                wide && !([(1, 8), (2, 4)].contains(&(rows, units)) && k == 1),
                "expected warpgroups that share rows or units".to_string(),
            ),
            // Every pass has whole tiles, except the last one of a share.
            ((wide || shared) && pass != padded, format!("a pass of {pass} units, which is no whole tiles of {tile}")),
            // Each lane of three loader warps copies one unit of a pass.
            (pass > 96, "more units of a pass than lanes copy".to_string()),
            // In steps, warps exchange sums through scratch, which must hold those of at least one unit.
            (
                self.plan.form.decides() && 8 * tiles / rows * 512 > u64::from(machine.scratch_bytes),
                "sums of warps that no scratch holds".to_string(),
            ),
            (self.plan.form == Form::Chunk && k > 1, "groups of k of a chunk, which has no scratch".to_string()),
            (self.empty_part(m, format, product.parts), "a part of k that is empty".to_string()),
            // Other loops, and readers of other outputs, do not look how many parts a launch of several blocks has.
            (
                self.plan.form == Form::Chunk
                    && parts > 1
                    && !(shared && matches!(m.epilogue, Epilogue::Residual { .. })),
                "parts of k of a chunk, which may have several blocks".to_string(),
            ),
        ];
        let of_shared = [
            (
                !format.is_plain() || of_inputs != 2 || of_weights != 2 || m.parts() != 1,
                "expected plain weights, in units of eight rows and chunks of 64 of k, in shared memory".to_string(),
            ),
            (product.warps != SHARED_WARPS || block != 128, "expected two warpgroups of 64 rows each".to_string()),
        ];
        let of_shared = of_shared.into_iter().filter(|_| shared);
        wrong.into_iter().chain(of_shared).filter(|(wrong, _)| *wrong).map(|(_, what)| what).collect()
    }

    /// Whether a launch of some number of blocks has a part of k without granules.
    fn empty_part(&self, m: &MatVec, format: Format, most: u32) -> bool {
        let granules = u64::from(m.k).div_ceil(32 * granule_spans(m, format));
        (1..=self.plan.rows / self.plan.block_rows.max(1)).any(|blocks| {
            let parts = parts_of(most, blocks);
            parts > 1 && u64::from(part_granules(m, format, parts)) * u64::from(parts - 1) >= granules
        })
    }

    /// `id` is an input of products, as either kind reads it.
    fn operand(&self, id: WorkId, cols: u32) -> Result<(), String> {
        self.layout(id, Layout::of_input(self.plan.work[id.index()].layout == Layout::Tiles), cols)
    }

    /// The faults in how warpgroups of a block multiply tiles. Each warp has two units of each tile of a pass; sums of those that do not exist are not stored. A chunk
    /// of the input has whole chunks of weights, and of each of these every group of k has 64 of k or a granule of codes.
    fn tiles_of(&self, m: &MatVec, format: Format, product: Product) -> Vec<String> {
        let Product { pass, chunk, warps, parts } = product;
        let (plan, machine, spans) = (self.plan, &self.plan.machine, granule_spans(m, format));
        let [block, pass, chunk, k] = [plan.block_rows, pass, chunk, warps.k].map(u64::from);
        let of_inputs = u64::from(machine.inputs.slot_bytes) / (block * 64);
        let of_weights = chunk.saturating_mul(spans);
        let tile = u64::from(WIDE_UNITS.saturating_mul(warps.units)).max(1);
        // All units of a tile of plain weights are read.
        let read = if format.is_plain() { pass.next_multiple_of(tile) } else { pass };
        let bytes = read.saturating_mul(chunk).saturating_mul(u64::from(format.granule_bytes()));
        let sums = block / 2 * pass.div_ceil(tile);
        let sums_most = u64::from(tile_sums_max(plan.block_rows));
        let part = u64::from(part_granules(m, format, parts.max(1)));
        let granules = u64::from(m.k).div_ceil(32 * spans);
        let steps = of_inputs / of_weights.max(1); // chunks of weights of a chunk of the input
        let wrong = [
            (plan.form != Form::Steps, "outside a step".to_string()),
            (![32, 64, 128].contains(&block), format!("of {block} rows, for which there is no instruction")),
            // Sums of a group would need registers, too.
            (block == 128 && !format.is_plain(), "of codes and 128 rows".to_string()),
            (!TILE_WARPS.contains(&warps), "expected two units of a tile for each warp".to_string()),
            (m.parts() != 1, "of units of fewer than eight rows".to_string()),
            (parts == 0 || part * (u64::from(parts) - 1) >= granules, "a part of k that is empty".to_string()),
            (pass == 0 || sums > sums_most, format!("expected 1 to {sums_most} sums of a lane, found {sums}")),
            (pass > 96, "more units of a pass than lanes copy".to_string()),
            (
                if format.is_plain() {
                    of_weights != if sums > 64 { k } else { 2 * k } || !m.k.is_multiple_of(64)
                } else {
                    chunk != k || !spans.is_multiple_of(2)
                },
                "expected chunks of 64 of k, or of a granule of codes or of several tiles, for each group of k"
                    .to_string(),
            ),
            (
                of_weights == 0 || of_inputs == 0 || !of_inputs.is_multiple_of(of_weights.max(1)),
                format!("chunks of {of_inputs} spans of the input, which are not whole chunks of {of_weights}"),
            ),
            // A warp has the words of two chunks, and takes turns. Code for a chunk of the input begins with the first of them.
            (
                steps > 1 && !steps.is_multiple_of(2),
                format!("{steps} chunks of weights of a chunk of the input, expected one or an even number"),
            ),
            (
                bytes > u64::from(machine.weights.slot_bytes),
                format!("{bytes} bytes of a pass of {pass} units, which no slot holds"),
            ),
            (
                8 * block / 16 * 512 > u64::from(machine.scratch_bytes),
                "sums of warps that no scratch holds".to_string(),
            ),
        ];
        wrong.into_iter().filter(|(wrong, _)| *wrong).map(|(_, what)| format!("tiles: {what}")).collect()
    }

    /// The fault in the chunks of weights that warps hold while blocks meet. A block takes them if it has any share.
    fn held_of(&self, m: &MatVec, format: Format, product: Product, (tiles, held): (bool, u32)) -> Option<String> {
        if held == 0 {
            return None;
        }
        let Product { pass, chunk, warps: Warps { rows, units, k }, parts } = product;
        let (block, machine) = (u64::from(self.plan.block_rows), &self.plan.machine);
        let [pass, chunk, held, rows, units, k] = [pass, chunk, held, rows, units, k].map(u64::from);
        let of_inputs = u64::from(machine.inputs.slot_bytes) / (block * 64);
        let of_weights = chunk.saturating_mul(granule_spans(m, format));
        let registers = held
            .saturating_mul(chunk.div_ceil(k.max(1)))
            .saturating_add(block / 16 / rows.max(1))
            .saturating_mul(pass.div_ceil(units.max(1)) * 4);
        let wrong = [
            (self.plan.form != Form::Steps, "outside a step"),
            (!format.is_plain(), "that are codes"),
            (parts > 1, "of a part of k"),
            (tiles, "of tiles"),
            (held >= u64::from(machine.weights.slots), "as many as the ring has"),
            (!held.saturating_mul(of_weights).is_multiple_of(of_inputs.max(1)), "that end inside a chunk of the input"),
            (
                held.saturating_mul(chunk) > u64::from(m.k).div_ceil(32 * granule_spans(m, format)),
                "that are more than a unit has",
            ),
            (registers > u64::from(HELD_AND_SUMS_MAX), "that registers have no room for beside the sums"),
        ];
        let (_, what) = wrong.into_iter().find(|(wrong, _)| *wrong)?;
        Some(format!("{held} chunks held {what}"))
    }

    /// The residual changes as in the program: it now has the values of `exchange`.
    fn sums(&mut self, residual: WorkId, exchange: Option<BufferId>, cols: u32) -> Result<(), String> {
        self.layout(residual, Layout::Rows(DType::F32), cols)?;
        if self.residual.map(|(id, _)| id) != Some(residual) {
            return Err("another residual".to_string());
        }
        self.becomes(residual, exchange);
        Ok(())
    }

    /// Records that the residual has the values that the current grid left in `exchange`.
    fn becomes(&mut self, residual: WorkId, exchange: Option<BufferId>) {
        self.residual = Some((residual, exchange));
        self.left = exchange.map(|exchange| Left { residual, exchange, grid: self.grid });
    }

    fn holds(&self, id: WorkId, expected: Value) -> Result<(), String> {
        let found = self.holds.get(&id);
        if found == Some(&expected) { Ok(()) } else { Err(format!("{id} holds {found:?}, expected {expected:?}")) }
    }

    fn over(&self, wave: &Wave, expected: Over) -> Result<(), String> {
        let found = self.plan.divisions[wave.division.index()].over;
        if found == expected { Ok(()) } else { Err(format!("divided over {found:?}, expected {expected:?}")) }
    }

    fn cols(&self, buffer: BufferId) -> u32 {
        let buffer = &self.validated.schedule().program.buffers[buffer.index()];
        debug_assert!(matches!(buffer.space, Space::Exchange | Space::Constant));
        buffer.cols
    }
}

/// How a block multiplies: fields of [`Action::MatMul`], and the parts of k of its division.
#[derive(Debug, Clone, Copy)]
struct Product {
    pass: u32,
    chunk: u32,
    warps: Warps,
    parts: u32,
}

/// Length of a granule in spans of 32 of k. It is 4 for units of 2 rows and for codes of 4 bits, 2 for units of 4 rows and for codes of 8 bits,
/// else 1.
fn granule_spans(m: &MatVec, format: Format) -> u64 {
    match (format.code.bits(), m.unit_rows) {
        (4, _) | (_, 2) => 4,
        (8, _) | (_, 4) => 2,
        _ => 1,
    }
}

/// Granules in one of `parts` parts of k. Each part begins at a multiple of 64 columns.
fn part_granules(m: &MatVec, format: Format, parts: u32) -> u32 {
    let spans = granule_spans(m, format);
    let granules = u64::from(m.k).div_ceil(32 * spans);
    granules.div_ceil(u64::from(parts.max(1))).next_multiple_of(if spans == 1 { 2 } else { 1 }) as u32
}

fn norm_of(grid: &Grid, norm: NormAttr) -> NormOf {
    let of = |role: Role| grid.operand(role).map(|operand| operand.buffer);
    NormOf { norm, weight: of(Role::NormWeight), bias: of(Role::NormBias) }
}

/// For each wave and each buffer that it reads, the last earlier wave that wrote the buffer. The previous step leaves only its best logits.
fn sources(plan: &Plan) -> Vec<Vec<Option<usize>>> {
    let mut wrote = BTreeMap::new();
    let of_wave = |(w, wave): (usize, &Wave)| {
        let (reads, writes) = wave.action.accesses();
        let from = reads.iter().map(|id| wrote.get(id).copied()).collect();
        wrote.extend(writes.into_iter().map(|id| (id, w)));
        from
    };
    plan.waves.iter().enumerate().map(of_wave).collect()
}

/// The launch indices of each SM.
fn lo_hi(shares: &[Vec<Share>]) -> Vec<Vec<(u32, u32)>> {
    shares.iter().map(|of_sm| of_sm.iter().map(|share| (share.lo, share.hi)).collect()).collect()
}

/// Checks that the shares cover each launch index of each of `rows` rows exactly once.
fn partitions(over: Over, rows: u32, block_rows: u32, of_sms: &[Vec<Share>]) -> Result<(), String> {
    let (n, aligned) = match over {
        // Devices deal items out.
        Over::Items { .. } => {
            let shares = of_sms.iter().map(Vec::len).sum::<usize>();
            return if shares == 0 { Ok(()) } else { Err(format!("{shares} shares of items that devices deal out")) };
        }
        Over::Sums { parts } if parts_of(parts, rows / block_rows.max(1)) <= 1 => {
            let shares = of_sms.iter().map(Vec::len).sum::<usize>();
            return if shares == 0 { Ok(()) } else { Err(format!("{shares} shares of rows of no sums")) };
        }
        Over::Sums { .. } => (1, 1),
        Over::Rows { parts } => (parts, 1),
        Over::Units { n, parts, .. } => (n.saturating_mul(parts_of(parts, rows / block_rows.max(1))), block_rows),
        Over::Heads { n, rows, .. } => (n, rows),
        // A share has all rows, so their order is that of one block.
        Over::States { n } => (n, rows),
    };
    if aligned == 0 || !rows.is_multiple_of(aligned) {
        return Err(format!("{rows} rows are no whole tiles of {aligned}"));
    }
    let (tiles, n) = ((rows / aligned) as usize, n as usize);
    let mut owned = vec![false; tiles * n];
    for share in of_sms.iter().flatten() {
        let Share { row, rows: count, lo, hi } = *share;
        // A share has any number of single rows, or exactly one tile.
        let whole = matches!(over, Over::Rows { .. } | Over::Sums { .. }) || count == aligned;
        let inside = u64::from(row) + u64::from(count) <= u64::from(rows) && lo < hi && hi as usize <= n;
        if !whole || !inside || count == 0 || !row.is_multiple_of(aligned) {
            return Err(format!("{share:?} is out of its bounds"));
        }
        if matches!(over, Over::Heads { .. }) && hi != lo + 1 {
            return Err(format!("{share:?} has several groups of heads"));
        }
        if let Over::Units { n, parts, step } = over {
            if lo / n != (hi - 1) / n {
                return Err(format!("{share:?} has units of several parts of k"));
            }
            if step == 0 || parts_of(parts, rows / block_rows.max(1)) == 1 && !(lo % n).is_multiple_of(step) {
                return Err(format!("{share:?} begins within {step} units"));
            }
        }
        for tile in row / aligned..(row + count) / aligned {
            for index in lo..hi {
                let own = &mut owned[tile as usize * n + index as usize];
                if std::mem::replace(own, true) {
                    return Err(format!("rows from {} on, index {index}: two shares have it", tile * aligned));
                }
            }
        }
    }
    match owned.iter().position(|owned| !owned) {
        Some(at) => Err(format!("rows from {} on, index {}: no share has it", at / n * aligned as usize, at % n)),
        None => Ok(()),
    }
}
