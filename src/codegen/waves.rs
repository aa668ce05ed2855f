//! Prints the kernel of a proven plan of waves, and encodes what it walks, as `kernels/waves/context.cuh` declares it.

use super::abi::{NONE, PEERS_MAX, row_scales_at};
use super::emit::{
    Trace, attention_members, coding_members, elem, epilogue_members, facts, gate_member, net_cols, net_members,
    norm_members, route_members, scan_members, table_members, vocab,
};
use super::kernel_struct::kernel_struct;
use super::{
    ATTEND_HEADERS, CONVOLVE_HEADERS, EXPERTS_HEADERS, Float, HEADERS, KernelSource, NET_HEADERS, ROWS_HEADERS,
    SCAN_HEADERS, STATE_HEADERS, WAVES_HEADERS,
};
use crate::digest::Digest;
use crate::format::{Code, Format};
use crate::ir::layout::{Held, Matrix, PLACE_ALIGN_BYTES, cache_row_bytes, held, matrices};
use crate::ir::op::{Combine, Convolve, Epilogue, MatVec, Mix, NormAttr, Op, Role, Scan};
use crate::ir::program::{Grid, Program, Rows, Space};
use crate::ir::{BufferId, GridId};
use crate::rows::Shape;
use crate::target::Target;
use crate::waves::{
    Action, Form, GateNorm, Input, Layout, NormOf, Over, Plan, Products, Proven, Slots, Splits, Sum, Target as Written,
    Tiling, Wave as PlanWave, Work, WorkId, group_channels, scores_cols,
};
use bytemuck::{Pod, Zeroable};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Name of the kernel's entry point.
pub const ENTRY_POINT: &str = "monobloc_waves";

kernel_struct! {
    /// One wave. Places of the work arena, of constants and of caches are in units of 256 bytes.
    #[derive(Eq)]
    Wave = "struct alignas(16) Wave" {
        /// case of the generated dispatch
        op: u32,
        /// which division of work it has
        division: u32,
        /// work arena: what it reads
        x: u32,
        /// work arena: what it writes
        out: u32,
        /// work arena
        residual: u32,
        /// work arena: what is added to the residual; of attention what KV splits leave, or heads with the gate; of a product parts of squares, or where sums of parts go
        branch: u32 as [branch, square_parts, gate],
        /// matrix; or work arena: the output row by row
        weight: u32 as [weight, rows],
        /// norm weight of the output, or of q
        norm_weight: u32 as [norm_weight, q_norm],
        /// norm bias of the output, or norm weight of k; of a product 1 if the residual goes to all devices
        norm_bias: u32 as [norm_bias, k_norm, shown],
        /// by op
        table: u32 as [bias, rope, table],
        /// norm of a branch before it is added; of attention sinks; of a product in a chunk most parts of k of the one that left squares
        branch_weight: u32 as [branch_weight, sinks, square_splits],
        /// its bias; or boxes of a matrix: the first of three tensor maps
        branch_bias: u32 as [branch_bias, boxes],
        /// cache; or work arena: sums of squares of parts of rows, for a norm
        k_cache: u32 as [k_cache, squares],
        /// cache; or work arena: sums of squares that a product leaves
        v_cache: u32 as [v_cache, squares_out],
        /// division of the wave after it; of the last one, of the first
        next_division: u32,
        /// of a matrix of codes
        row_scales: u32,
        /// of all blocks in the step, before it
        meetings: u32,
        /// 1 if all blocks meet after it, else 0
        meets: u32,
        /// op of the wave after it; of the last one, of the first
        next_op: u32,
        /// unit of the matrix where the device's part begins
        first_unit: u32,
    }
}

kernel_struct! {
    /// What one block does of a wave: launch indices for rows of the launch.
    #[derive(Eq)]
    Share = "struct alignas(16) Share" {
        /// rows of the launch, from here
        row: u32,
        /// so many
        rows: u32,
        /// launch indices, from here
        lo: u32,
        /// ... up to here
        hi: u32,
    }
}

/// Shares that a record holds itself; `SHARES_HELD` of waves/context.cuh.
pub const SHARES_HELD: usize = 4;

kernel_struct! {
    /// All that one block has of a division. The first shares stand here, too: they are there as soon as the record is.
    #[derive(Eq)]
    ShareRecord = "struct alignas(16) ShareRecord" {
        /// in the list of all shares
        first: u32,
        /// shares of the block
        count: u32,
        /// 0
        reserved: [u32; 2],
        /// the first of them
        held: [Share; SHARES_HELD],
    }
}

kernel_struct! {
    /// The one kernel parameter. Pointers are device addresses.
    WaveParams = "struct WaveParams" {
        /// weights and constants
        pack: u64 = "const u8*",
        /// keys and values of earlier positions
        cache: u64 = "u8*",
        /// activations of the rows
        work: u64 = "u8*",
        /// of a step
        waves: u64 = "const Wave*",
        /// of all blocks and divisions
        shares: u64 = "const Share*",
        /// [blocks of rows - 1][divisions][SMS]
        records: u64 = "const ShareRecord*",
        /// of the launch
        rows: u64 = "const Row*",
        /// [sequences][M::BLOCKS]; of a chunk there is one sequence
        pages: u64 = "const u32*",
        /// arrivals of blocks at meetings of the launch; 0 before it
        arrived: u64 = "u32*",
        /// host-visible watchdog report, 8 words an SM
        report: u64 = "u32*",
        /// host-visible
        abort: u64 = "volatile u32*",
        /// [SMS][steps][waves][STAMP_WORDS] nanoseconds, traced builds only
        stamps: u64 = "u64*",
        /// null, or of the last step: [ROWS][vocabulary]
        logits: u64 = "float*",
        /// host-visible: [1 + step * ROWS + row] tokens; of a launch that decides none not looked at
        mailbox: u64 = "i32*",
        /// of the launch
        timeout_ns: u64,
        /// waves of a step
        wave_count: u32,
        /// rows of the launch
        row_count: u32,
        /// of the first row
        position: u32,
        /// of the launch
        steps: u32,
        /// of a tail: residual of the rows of the chunk before it
        taken: u64 = "const float*",
        /// tensor maps, of 128 bytes each
        boxes: u64 = "const u8*",
        /// of packets of the first wave; each wave of the launch has the next one
        tag: u32,
        /// 0
        reserved: u32,
    }
}

kernel_struct! {
    /// The kernel parameter on one of several devices.
    WaveDevicesParams = "struct WaveDevicesParams : WaveParams" {
        /// what a kernel of one device gets
        params: WaveParams as [],
        /// from `work` of this device to that of each other one, in bytes modulo 2^64
        peers: [u64; PEERS_MAX],
        /// the same of `arrived`
        peer_counts: [u64; PEERS_MAX],
        /// blocks of the devices before this one
        first_block: u32,
        /// 0
        spare: u32,
    }
}

/// Everything the kernel walks, encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaveTables {
    pub waves: Vec<Wave>,
    pub shares: Vec<Share>,
    /// Of each number of blocks of rows, division and SM, in this order.
    pub records: Vec<ShareRecord>,
    /// Of each matrix that is copied in boxes three, as `load_weights` of waves/matmul.cuh takes them. If they are swizzled, one.
    pub boxes: Vec<WeightBox>,
    /// After them, of attention by warpgroups: keys and values of a layer.
    pub caches: Vec<CacheBox>,
}

/// A box of positions of a cache that one copy brings: neighbouring ones of a pool, from a multiple of eight on, as `TileOperand` of waves/attend.cuh says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CacheBox {
    /// Where the pools of all KV heads begin in the cache, bytes.
    pub place: u64,
    /// Positions of all pools.
    pub rows: u64,
    /// Bytes of a position, whole lines of 128.
    pub row_bytes: u32,
    /// Positions of a box, whole eights.
    pub positions: u32,
}

/// A box of weights that one copy brings: a piece of each of some units, side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WeightBox {
    /// Where the matrix begins in the pack, bytes.
    pub place: u64,
    /// Units of the matrix, and bytes of one.
    pub units: u64,
    pub unit_bytes: u64,
    /// Units of a box, and bytes of each unit in it.
    pub box_units: u32,
    pub piece_bytes: u32,
    /// Bytes of a line whose pieces of 16 bytes are swizzled, as `SwizzledOperand` of waves/warpgroup.cuh says; 0: as it lies in the pack.
    pub line_bytes: u32,
    pub reserved: u32,
}

/// Bytes of a row of a granule of plain weights.
const LINE_BYTES: u32 = 64;

impl WaveTables {
    /// Of every byte that is uploaded.
    pub fn digest(&self) -> Digest {
        let parts: [&[u8]; 5] = [
            bytemuck::cast_slice(&self.waves),
            bytemuck::cast_slice(&self.shares),
            bytemuck::cast_slice(&self.records),
            bytemuck::cast_slice(&self.boxes),
            bytemuck::cast_slice(&self.caches),
        ];
        Digest::of(format!("{:?}", parts.map(Digest::of)).as_bytes())
    }
}

/// A configuration of a template, shared by all waves that print the same.
struct Class {
    template: &'static str,
    members: String,
    first: usize,
}

/// The classes of a plan in order of first use, and the class of each wave.
fn classes(proven: &Proven<'_>) -> (Vec<Class>, Vec<usize>) {
    let mut classes: Vec<Class> = vec![];
    let mut of_wave = vec![];
    for (w, wave) in proven.plan().waves.iter().enumerate() {
        let (template, members) = class_of(proven, wave);
        let found = classes.iter().position(|class| class.template == template && class.members == members);
        of_wave.push(found.unwrap_or_else(|| {
            classes.push(Class { template, members, first: w });
            classes.len() - 1
        }));
    }
    (classes, of_wave)
}

fn grid_of<'a>(proven: &'a Proven<'_>, id: GridId) -> &'a Grid {
    &proven.validated().schedule().program.grids[id.index()]
}

fn class_of(proven: &Proven<'_>, wave: &PlanWave) -> (&'static str, String) {
    let (plan, schedule) = (proven.plan(), proven.validated().schedule());
    let grid = grid_of(proven, wave.grid);
    match (&wave.action, &grid.op) {
        (Action::Rows { residual, sum, out }, _) => {
            let over = plan.divisions[wave.division.index()].over;
            ("WaveRows", rows_members(&schedule.program, plan, (grid, over), *residual, sum.as_ref(), out.as_ref()))
        }
        (Action::MatMul { squares, target, then, pass, chunk, warps, tiles, held, .. }, Op::MatVec(m)) => {
            let factor = squares.is_some() || may_lack_factor(proven, grid, m);
            let norm_eps = m.norm.filter(|_| factor).map_or(0.0, |norm| norm.eps);
            let plain = match target {
                Written::Out(out) => !plan.work[out.index()].layout.is_input(),
                Written::Residual(_) | Written::Sums { .. } => then.is_none(),
                Written::Best(_) => true,
            };
            let to = match (then, target) {
                (Some(then), _) => Some(then.to),
                (None, Written::Out(out)) => Some(*out),
                _ => None,
            };
            let splits = match plan.divisions[wave.division.index()].over {
                Over::Units { parts, .. } => parts,
                _ => unreachable!("prove: products are divided over units"),
            };
            let (boxed, paired) = (!wave.boxes.is_empty(), target.is_paired(splits));
            let packets = matches!(target, Written::Out(out) if plan.holds_packets(*out));
            let softcap = match m.epilogue {
                Epilogue::Logits { softcap, .. } => softcap.unwrap_or(0.0),
                _ => 0.0,
            };
            let members = format!(
                "int ROWS = {}\nint K = {}\nint UNIT_ROWS = {}\nint PASS = {pass}\nint CHUNK = {chunk}\nbool TILES = {tiles}\nint HELD = {held}\nbool BOXED = {boxed}\nint SPLITS = {splits}\n\
                 int ROW_GROUPS = {}\nint UNIT_GROUPS = {}\nint K_GROUPS = {}\n{}float SOFTCAP = {}\nbool BIAS = {}\nbool PLAIN = {plain}\nbool PAIRED = {paired}\nbool PACKETS = {packets}\nbool OUT = {}\nbool OUT_TILES = {}\nbool FACTOR = {factor}\nfloat NORM_EPS = {}\n",
                m.rows,
                m.k,
                m.unit_rows,
                warps.rows,
                warps.units,
                warps.k,
                epilogue_members(m.epilogue),
                Float(softcap),
                grid.operand(Role::Bias).is_some(),
                then.is_some(),
                to.is_some_and(|to| is_tiles(plan, to)),
                Float(norm_eps),
            );
            let left = match (then, target) {
                (Some(then), _) => then.to,
                (None, Written::Out(out) | Written::Best(out)) => *out,
                (None, Written::Residual(out) | Written::Sums { residual: out, .. }) => *out,
            };
            let residual = everywhere_member(plan, "RESIDUAL_EVERYWHERE", target.residual().unwrap_or(left));
            let homes = everywhere_member(plan, "EVERYWHERE", left) + &residual;
            let sums = format!("bool SUMS = {}\n", matches!(target, Written::Sums { .. }));
            ("WaveMatMul", members + &sums + &homes + &coding_members(schedule.program.format_of(grid)))
        }
        (Action::NormHeads { x, .. }, Op::Attention(a)) => {
            let members = attention_members(schedule, wave.grid, a, 0) + &gate_member(grid);
            ("WaveNormHeads", format!("{members}int PARTS = {}\n", parts_of(plan, *x)))
        }
        (Action::Append { x, .. }, Op::Attention(a)) => {
            let members = attention_members(schedule, wave.grid, a, 0) + &gate_member(grid);
            ("WaveAppend", format!("{members}int PARTS = {}\nbool PACKETS = false\n", parts_of(plan, *x)))
        }
        (Action::Attend { out, tile, wide, gate, .. }, Op::Attention(a)) => {
            let members = format!("{}int TILE = {tile}\n", attention_members(schedule, wave.grid, a, 0));
            let home = everywhere_member(plan, "EVERYWHERE", *out);
            let name = if *wide { "WaveAttendWide" } else { "WaveAttend" };
            (name, members + &home + &gate_members(plan, grid, *gate))
        }
        (&Action::AttendRow { x, out, tile, splits }, Op::Attention(a)) => {
            let members = attention_members(schedule, wave.grid, a, 0) + &gate_member(grid);
            let parts = parts_of(plan, x);
            let packets = plan.holds_packets(x);
            let out_tiles = is_tiles(plan, out);
            let members = format!(
                "{members}int TILE = {tile}\nint PARTS = {parts}\nbool PACKETS = {packets}\nbool OUT_TILES = {out_tiles}\n{}",
                everywhere_member(plan, "EVERYWHERE", out)
            );
            match splits {
                None => ("WaveAttendRow", members),
                Some(splits) => ("WaveAttendSplits", members + &splits_members(splits)),
            }
        }
        (&Action::Merge { out, splits, gate }, Op::Attention(a)) => {
            let tile = plan.waves.iter().find_map(|of| match of.action {
                Action::AttendRow { tile, .. } if of.grid == wave.grid => Some(tile),
                _ => None,
            });
            let tile = tile.expect("prove: splits are those of attention of the same grid");
            let members = attention_members(schedule, wave.grid, a, 0);
            let (out_tiles, splits) = (is_tiles(plan, out), splits_members(splits));
            let members = format!("{members}int TILE = {tile}\nbool OUT_TILES = {out_tiles}\n{splits}");
            ("WaveMerge", members + &gate_members(plan, grid, gate))
        }
        (Action::Scores { .. }, Op::MatVec(m)) => {
            let biased = grid.operand(Role::Bias).is_some();
            let (rows, k, unit_rows) = (m.rows, m.k, m.unit_rows);
            let columns = scores_cols(plan.form);
            let members = format!(
                "int ROWS = {rows}\nint K = {k}\nint UNIT_ROWS = {unit_rows}\nint COLUMNS = {columns}\nbool BIAS = {biased}\n"
            );
            ("WaveScores", members)
        }
        (Action::Route { scores, .. }, Op::Route(route)) => {
            let cols = plan.work[scores.index()].cols;
            ("WaveRoute", format!("{}int COLS = {cols}\n", route_members(grid, route)))
        }
        (Action::Gather { choices, out, .. }, Op::MatVec(m)) => {
            let (experts, slots) = (experts_of(proven, grid), plan.work[choices.index()].cols);
            let (k, tile) = (m.k, tiling_of(plan, *out).rows);
            let power = input_power(plan, proven.validated().schedule().program.format_of(grid));
            let members = format!(
                "int K = {k}\nint EXPERTS = {experts}\nint TOP_K = {slots}\nint TILE = {tile}\nint POWER = {power}\n"
            );
            ("WaveGather", members)
        }
        (Action::Places { choices, sources, .. }, _) => {
            let (experts, slots) = (experts_of(proven, grid), plan.work[choices.index()].cols);
            let tile = tiling_of(plan, *sources).rows;
            ("WavePlaces", format!("int EXPERTS = {experts}\nint TOP_K = {slots}\nint TILE = {tile}\n"))
        }
        (Action::Fill { out, .. }, Op::MatVec(m)) => {
            ("WaveFill", format!("int K = {}\nint TILE = {}\n", m.k, tiling_of(plan, *out).rows))
        }
        (Action::Experts { x, groups, pass, chunk, tickets, .. }, Op::MatVec(m)) => {
            let (tile, boxed) = (tiling_of(plan, *x).rows, !wave.boxes.is_empty());
            let biased = grid.operand(Role::Bias).is_some();
            let (rows, k, unit_rows) = (m.rows, m.k, m.unit_rows);
            let members = format!(
                "int ROWS = {rows}\nint K = {k}\nint UNIT_ROWS = {unit_rows}\nint TILE = {tile}\nint PASS = {pass}\nint CHUNK = {chunk}\n\
                 bool TILES = true\nbool BOXED = {boxed}\nbool TICKETS = {tickets}\nbool BIAS = {biased}\nint POWER = {}\nint OUT_POWER = {}\n{}",
                input_power(plan, schedule.program.format_of(grid)),
                output_power(proven, wave),
                epilogue_members(m.epilogue)
            );
            let members = members + &coding_members(schedule.program.format_of(grid));
            match plan.machine.products {
                Products::Shared => ("WaveExpertsShared", members),
                _ => ("WaveExperts", format!("{members}bool MET = {}\n", knows_groups(plan, wave, *x, *groups))),
            }
        }
        (Action::Combine { slots, .. }, Op::Combine(combine)) => {
            let members = format!("int WIDTH = {}\nfloat SCALE = {}\n", combine.width, Float(combine.scale));
            ("WaveCombine", members + &slots_members(plan, grid, slots, combine))
        }
        (&Action::Convolve { x, scalars, .. }, Op::Mix(mix)) => {
            ("WaveConvolve", net_wave_members(proven, grid, mix, (x, Some(scalars))))
        }
        (&Action::ShortConv { x, out }, Op::Convolve(Convolve { channels, kernel })) => {
            let (group, biased) = (group_channels(plan.form), grid.operand(Role::Bias).is_some());
            let (parts, out_tiles) = (parts_of(plan, x), is_tiles(plan, out));
            let members = format!(
                "int CHANNELS = {channels}\nint KERNEL = {kernel}\nint GROUP = {group}\nbool BIAS = {biased}\nint PARTS = {parts}\nbool OUT_TILES = {out_tiles}\n"
            );
            ("WaveShortConv", members)
        }
        (&Action::Mix { x, .. }, Op::Mix(mix)) => {
            let Over::States { n } = plan.divisions[wave.division.index()].over else {
                unreachable!("prove: states are divided over their columns")
            };
            let members = net_wave_members(proven, grid, mix, (x, None));
            ("WaveMix", format!("{members}int PARTS = {}\n", n / mix.value_heads))
        }
        (&Action::Gated { x, out, .. }, Op::Mix(mix)) => {
            let members = net_wave_members(proven, grid, mix, (x, None));
            ("WaveGated", format!("{members}bool OUT_TILES = {}\n", is_tiles(plan, out)))
        }
        (&Action::MixRow { x, scalars, out }, Op::Mix(mix)) => {
            let members = net_wave_members(proven, grid, mix, (x, Some(scalars)));
            ("WaveMixRow", format!("{members}bool OUT_TILES = {}\n", is_tiles(plan, out)))
        }
        (&Action::Convolve { x, out, .. }, Op::Scan(scan)) => {
            ("WaveScanInputs", scan_wave_members(proven, grid, scan, (x, out)))
        }
        (&Action::Mix { x, out, .. }, Op::Scan(scan)) => {
            let Over::States { n } = plan.divisions[wave.division.index()].over else {
                unreachable!("prove: states are divided over their columns")
            };
            let members = scan_wave_members(proven, grid, scan, (x, out));
            ("WaveScan", format!("{members}int PARTS = {}\n", n / scan.heads))
        }
        (&Action::MixRow { x, out, .. }, Op::Scan(scan)) => {
            ("WaveScanRow", scan_wave_members(proven, grid, scan, (x, out)))
        }
        (&Action::Gated { x, out, .. }, Op::GroupNorm(_) | Op::MatVec(_)) => {
            let norm = GateNorm::of(&schedule.program, grid).expect("prove: a norm of Mamba-2");
            let GateNorm { scan: _, width, groups, eps, scale, first } = norm;
            let members = format!(
                "int WIDTH = {width}\nint GROUPS = {groups}\nfloat EPS = {}\nfloat GATE_SCALE = {}\nbool FIRST = {first}\nint COLS = {}\nint X_PARTS = {}\nbool OUT_TILES = {}\n",
                Float(eps),
                Float(scale),
                plan.work[x.index()].cols,
                parts_of(plan, x),
                is_tiles(plan, out),
            );
            ("WaveGateNorm", members)
        }
        _ => unreachable!("prove: waves are those of the ops of their grids"),
    }
}

/// Whether all blocks have met since `groups` were written, before they meet before `wave`: another product of these groups has left `x`.
fn knows_groups(plan: &Plan, wave: &PlanWave, x: WorkId, groups: WorkId) -> bool {
    let writes = |of: &PlanWave, id: WorkId| of.action.accesses().1.contains(&id);
    let earlier = plan.waves.iter().take_while(|of| !std::ptr::eq(*of, wave));
    let mut since: Vec<&PlanWave> = earlier.collect();
    since.drain(..since.iter().rposition(|of| writes(of, x)).unwrap_or(since.len()));
    let product = since.first().map(|of| &of.action);
    matches!(product, Some(Action::Experts { groups: of, .. }) if *of == groups)
        && !since.iter().any(|of| writes(of, groups))
}

/// Members of a wave of a net that reads `x`, and maybe its scalars.
fn net_wave_members(proven: &Proven<'_>, grid: &Grid, mix: &Mix, (x, scalars): (WorkId, Option<WorkId>)) -> String {
    let (plan, program) = (proven.plan(), &proven.validated().schedule().program);
    let of_scalars = scalars.map_or(0, |scalars| parts_of(plan, scalars));
    let parts = format!("int X_PARTS = {}\nint SCALAR_PARTS = {of_scalars}\n", parts_of(plan, x));
    net_members(grid, mix) + &net_cols(program, grid) + &parts
}

/// Members of a wave of Mamba-2 that reads `x` and writes `out`. It gates what it leaves for a product, and nothing that a norm reads.
fn scan_wave_members(proven: &Proven<'_>, grid: &Grid, scan: &Scan, (x, out): (WorkId, WorkId)) -> String {
    let plan = proven.plan();
    let gate = scan.gate.filter(|_| plan.work[out.index()].layout.is_input());
    let members = scan_members(grid, &Scan { gate, ..*scan });
    format!("{members}int X_PARTS = {}\nbool OUT_TILES = {}\n", parts_of(plan, x), is_tiles(plan, out))
}

/// The power of two times which inputs of experts are stored for codes of a format. In a step, operands of floats are their bits (`raw` in kernels/waves/warpgroup_codes.cuh);
/// in a chunk operands are multiplied themselves.
fn input_power(plan: &Plan, format: Format) -> u32 {
    match format.code {
        Code::E4m3 | Code::E2m1 if plan.form != Form::Chunk => 100,
        _ => 0,
    }
}

/// The same of what a wave of experts leaves: of the next one that reads it.
fn output_power(proven: &Proven<'_>, wave: &PlanWave) -> u32 {
    let (plan, program) = (proven.plan(), &proven.validated().schedule().program);
    let later = plan.waves.iter().skip_while(|of| !std::ptr::eq(*of, wave)).skip(1);
    let reads = |of: &&PlanWave| match (&of.action, &wave.action) {
        (Action::Experts { x, .. }, Action::Experts { out, .. }) => x == out,
        _ => false,
    };
    later
        .filter(reads)
        .map(|of| input_power(plan, program.format_of(&program.grids[of.grid.index()])))
        .next()
        .unwrap_or(0)
}

/// Whether the input of a product may lack the factor of its norm: a wave says whether it does, so all products of a shape are of one class.
fn may_lack_factor(proven: &Proven<'_>, grid: &Grid, m: &MatVec) -> bool {
    let has_squares = |work: &Work| matches!(work.layout, Layout::Squares { .. });
    let is_factor = m.norm.as_ref().is_some_and(NormAttr::is_factor) && grid.operand(Role::NormBias).is_none();
    is_factor && proven.plan().work.iter().any(has_squares)
}

/// How a buffer by place has its tiles.
fn tiling_of(plan: &Plan, id: WorkId) -> Tiling {
    match plan.work[id.index()].layout {
        Layout::Grouped(tiling) | Layout::Sources(tiling) => tiling,
        _ => unreachable!("prove: experts read what is by place"),
    }
}

/// The number of matrices among which the matrix of a grid is chosen; 1 if it is not.
fn experts_of(proven: &Proven<'_>, grid: &Grid) -> u32 {
    let program = &proven.validated().schedule().program;
    match grid.operand(Role::Weight).map(|weight| weight.rows) {
        Some(Rows::Lookup(table)) => program.tables[table.index()].bound,
        _ => 1,
    }
}

/// Members of a wave that reads gates from sums of heads; none without a gate.
fn gate_members(plan: &Plan, grid: &Grid, gate: Option<WorkId>) -> String {
    gate.map_or(String::new(), |gate| gate_member(grid) + &format!("int PARTS = {}\n", parts_of(plan, gate)))
}

fn splits_members(Splits { positions, most, .. }: Splits) -> String {
    format!("u32 SPLIT = {positions}\nu32 SPLITS_MOST = {most}\n")
}

/// Members of a wave of rows.
fn rows_members(
    program: &Program,
    plan: &Plan,
    (grid, over): (&Grid, Over),
    residual: WorkId,
    sum: Option<&Sum>,
    out: Option<&Input>,
) -> String {
    let hidden = plan.work[residual.index()].cols;
    let (embed, embed_scale, table) = match sum {
        Some(Sum::Embed { scale, table, .. }) => (true, *scale, table_members(&program.buffers[table.index()])),
        _ => (false, 1.0, String::new()),
    };
    let (branch, branch_norm, branch_scale, slots) = match (sum, &grid.op) {
        (Some(Sum::Branch { branch, norm, scale }), _) => {
            (Some(parts_of(plan, *branch)), norm.map(|of| of.norm), *scale, String::new())
        }
        (Some(Sum::Slots(slots)), Op::Combine(combine)) => {
            (Some(0), None, combine.scale, slots_members(plan, grid, slots, combine))
        }
        _ => (None, None, 1.0, String::new()),
    };
    let row_parts = match over {
        Over::Rows { parts } => parts,
        Over::Sums { .. } => 1,
        _ => unreachable!("prove: rows are divided over rows"),
    };
    let prefixed = |of: &str| of.lines().fold(String::new(), |s, line| s + &renamed(line) + "\n");
    let take = matches!(sum, Some(Sum::Taken));
    let mut s = format!(
        "int HIDDEN = {hidden}\nint ROW_PARTS = {row_parts}\nbool TAKE = {take}\nbool EMBED = {embed}\nfloat EMBED_SCALE = {}\nbool BRANCH = {}\nint BRANCH_PARTS = {}\nfloat BRANCH_SCALE = {}\nbool OUT = {}\nbool OUT_TILES = {}\nbool OUT_ROWS = {}\n",
        Float(embed_scale),
        branch.is_some(),
        branch.unwrap_or(0),
        Float(branch_scale),
        out.is_some(),
        out.is_some_and(|out| is_tiles(plan, out.to)),
        out.is_some_and(|out| out.rows.is_some()),
    );
    s += &table;
    s += &slots;
    s += &prefixed(&norm_members(branch_norm));
    s += &norm_members(out.and_then(|out| out.norm).map(|norm| norm.norm));
    s
}

/// Members of a wave that adds up what experts made of a row.
fn slots_members(plan: &Plan, grid: &Grid, slots: &Slots, combine: &Combine) -> String {
    format!(
        "int SLOTS = {}\nbool SHARED = {}\nfloat SHARED_SCALE = {}\nbool GATED = {}\nint SCORES = {}\nint GATE = {}\n",
        combine.slots,
        combine.shared.is_some(),
        Float(combine.shared.unwrap_or(0.0)),
        slots.gate.is_some(),
        slots.gate.map_or(0, |gate| plan.work[gate.index()].cols),
        grid.operand(Role::Gate).map_or(0, |gate| gate.cols.base),
    )
}

/// The member `name`: whether what a wave writes into a buffer goes to all devices. Of one device there is none.
fn everywhere_member(plan: &Plan, name: &str, id: WorkId) -> String {
    match plan.machine.devices {
        1 => String::new(),
        _ => format!("bool {name} = {}\n", plan.work[id.index()].everywhere),
    }
}

/// Whether warpgroups of a step read a buffer of activations.
fn is_tiles(plan: &Plan, id: WorkId) -> bool {
    plan.work[id.index()].layout == Layout::Tiles
}

/// Sums of squares of each row in a buffer of activations, and parts of k of the product that leaves them in some launches alone; `None`: in all.
fn squares_of(plan: &Plan, id: WorkId) -> (u32, Option<u32>) {
    match plan.work[id.index()].layout {
        Layout::Squares { groups, parts } => (groups, Some(parts)),
        _ => (parts_of(plan, id), None),
    }
}

/// Parts of the sums in a buffer of activations; 0 if it holds no sums.
fn parts_of(plan: &Plan, id: WorkId) -> u32 {
    match plan.work[id.index()].layout {
        Layout::Parts(parts) | Layout::Packets(parts) => parts,
        _ => 0,
    }
}

/// The member of a norm, for the norm of a branch.
fn renamed(member: &str) -> String {
    member.replacen(" NORM =", " BRANCH_NORM =", 1).replacen(" EPS =", " BRANCH_EPS =", 1)
}

/// Members of the machine.
fn machine_members(proven: &Proven<'_>, trace: Trace) -> Vec<String> {
    let (plan, program) = (proven.plan(), &proven.validated().schedule().program);
    let shape = Shape::of(program).expect("validate: a batch kernel has tables");
    let m = &plan.machine;
    let mut members = vec![
        format!("int SMS = {}", m.sms / m.devices),
        format!("int WARPS = {}", m.warps),
        format!("int LOADER_WARPS = {}", m.loader_warps),
        format!("int REGISTERS = {}", m.registers),
        format!("int LOADER_REGISTERS = {}", m.loader_registers),
        format!("bool STEPS = {}", plan.form.decides()),
        format!("bool WARPGROUPS = {}", m.products != Products::Warps),
        format!("bool SHARED = {}", m.products == Products::Shared),
        format!("bool PAIRS = {}", m.pairs),
        format!("int SQUARE_PARTS = {}", square_parts(plan)),
        format!("int BLOCK_ROWS = {}", plan.block_rows),
        format!("int WEIGHT_SLOTS = {}", m.weights.slots),
        format!("int WEIGHT_BYTES = {}", m.weights.slot_bytes),
        format!("int INPUT_SLOTS = {}", m.inputs.slots),
        format!("int INPUT_BYTES = {}", m.inputs.slot_bytes),
        format!("int INPUT_AT = {}", m.weights.bytes()),
        format!("int SCRATCH_AT = {}", m.weights.bytes() + m.inputs.bytes()),
        format!("int SCRATCH_BYTES = {}", m.scratch_bytes),
        format!("int STATE_AT = {}", plan.smem_bytes() - m.state_bytes),
        format!("int STATE_BYTES = {}", m.state_bytes),
        format!("int DIVISIONS = {}", plan.divisions.len()),
        format!("u32 MEETINGS = {}", plan.meetings()),
        format!("u32 BEST = {}", plan.best().map_or(NONE, |id| work_place(plan, id))),
        format!("int VOCAB = {}", vocab(program)),
        format!("u32 CONTEXT_MAX = {}", program.context_max),
        format!("u32 BLOCKS = {}", shape.blocks()),
        format!("u32 PAGE_ROWS = {}", shape.page_rows),
        format!("u32 PAGES = {}", shape.pages),
        format!("u64 POOL_ROWS = {}", u64::from(shape.pages) * u64::from(shape.page_rows)),
        format!("Elem WEIGHT = {}", elem(program.precision.weights)),
        format!("Elem CACHE = {}", elem(program.precision.cache)),
        format!("Elem WIRE = {}", elem(program.precision.wire)),
        "Dot DOT = Dot::MMA".to_string(),
        format!("bool TRACE = {}", trace == Trace::On),
    ];
    // Blocks of kernels with experts are told their turns at items.
    if plan.has_items() {
        members.push(format!("int TURNS = {}", plan.turns_told()));
    }
    members
}

/// Most sums of squares of a row that a product adds up.
fn square_parts(plan: &Plan) -> u32 {
    let parts = |wave: &PlanWave| match wave.action {
        Action::MatMul { squares: Some(squares), .. } => squares_of(plan, squares).0,
        _ => 0,
    };
    plan.waves.iter().map(parts).max().unwrap_or(0)
}

/// Prints the kernel of a proven plan.
pub fn emit(proven: &Proven<'_>, target: &Target, trace: Trace) -> KernelSource {
    let plan = proven.plan();
    let (classes, of_wave) = classes(proven);
    let m = &plan.machine;
    let mut out = String::new();
    let w = &mut out;
    // Writing to a String cannot fail.
    macro_rules! line {
        ($($arg:tt)*) => { writeln!(w, $($arg)*).expect("writing to a string") };
    }
    let does = match plan.form {
        Form::Chunk => format!("reads prompt chunks of up to {} tokens", plan.rows),
        Form::Steps => format!("runs steps of up to {} rows", plan.rows),
        Form::Tail => format!("decides what follows up to {} rows of a prompt chunk", plan.rows),
    };
    line!("// Kernel for `{}` that {does}.", target.name);
    line!(
        "// {} blocks of {} consumer warps, {} waves in {} classes.",
        m.sms / m.devices,
        m.warps,
        plan.waves.len(),
        classes.len()
    );
    if m.devices > 1 {
        line!("#define SEVERAL_DEVICES");
    }
    line!("{}#include \"monobloc_waves.cuh\"", facts(target));
    let has = |which: fn(&Action) -> bool| plan.waves.iter().any(|wave| which(&wave.action));
    let experts = has(|action| matches!(action, Action::Route { .. }));
    let of = |which: fn(&Op) -> bool| plan.waves.iter().any(|wave| which(&grid_of(proven, wave.grid).op));
    let (nets, scans) = (of(|op| matches!(op, Op::Mix(_))), of(|op| matches!(op, Op::Scan(_))));
    let experts = match (experts, m.products) {
        (false, _) => &[],
        (true, Products::Shared) => &EXPERTS_HEADERS[..],
        (true, Products::Warps | Products::Warpgroups) => &EXPERTS_HEADERS[..1],
    };
    let wide = has(|action| matches!(action, Action::Attend { wide: true, .. }));
    let attends = if wide { &ATTEND_HEADERS[..] } else { &[] };
    let convolves = has(|action| matches!(action, Action::ShortConv { .. }));
    let states = [
        (nets || scans || convolves, &STATE_HEADERS[..]),
        (nets, &NET_HEADERS[..]),
        (scans, &SCAN_HEADERS[..]),
        (convolves, &CONVOLVE_HEADERS[..]),
    ];
    let states = states.into_iter().filter(|(has, _)| *has).flat_map(|(_, headers)| headers);
    for (name, _) in attends.iter().chain(experts).chain(states.clone()) {
        line!("#include \"{name}\"");
    }
    line!();
    line!("struct Machine {{");
    let params = if m.devices > 1 { "WaveDevicesParams" } else { "WaveParams" };
    if m.devices > 1 {
        line!("  static constexpr int PEERS = {};  // devices that run a launch with this one", m.devices - 1);
        line!("  typedef {params} Launch;");
    }
    for member in machine_members(proven, trace) {
        line!("  static constexpr {member};");
    }
    line!("}};");
    for (i, class) in classes.iter().enumerate() {
        line!();
        let first = &plan.waves[class.first];
        line!("// {} {}", first.grid, grid_of(proven, first.grid).name);
        line!("struct Class{i} {{");
        for member in class.members.lines() {
            line!("  static constexpr {member};");
        }
        line!("}};");
    }
    line!();
    line!("struct Dispatch {{");
    for (function, argument) in [("run", "WaveContext<Machine>"), ("load", "L")] {
        if function == "load" {
            line!("  template <class L>");
        }
        line!("  static __device__ __forceinline__ void {function}({argument}& c, u32 op, const Wave& wave) {{");
        line!("    switch (op) {{");
        for (i, class) in classes.iter().enumerate() {
            line!("      case {i}: return {}<Machine, Class{i}>::{function}(c, wave);", class.template);
        }
        line!("    }}");
        line!("  }}");
    }
    let held = plan.waves.iter().enumerate().filter(|(_, wave)| wave.action.held() > 0);
    let ops: BTreeSet<usize> = held.map(|(w, _)| of_wave[w]).collect();
    let holds: Vec<String> = ops.iter().map(|op| format!("op == {op}")).collect();
    let holds = if holds.is_empty() { "false".to_string() } else { holds.join(" || ") };
    line!("  static __device__ __forceinline__ bool holds(u32 op) {{ return {holds}; }}");
    line!("}};");
    line!();
    let threads = (m.warps + m.loader_warps) * 32;
    line!(
        "extern \"C\" __global__ void __launch_bounds__({threads}, 1) {ENTRY_POINT}(const __grid_constant__ {params} p) {{"
    );
    line!("  run_waves<Machine, Dispatch>(p);");
    line!("}}");
    KernelSource {
        name: "monobloc_waves.cu".to_string(),
        text: out,
        headers: HEADERS
            .iter()
            .chain(&ROWS_HEADERS)
            .chain(&WAVES_HEADERS)
            .chain(attends)
            .chain(experts)
            .chain(states)
            .map(|(n, t)| (n.to_string(), t.to_string()))
            .collect(),
        arch: target.spec.arch.clone(),
    }
}

/// Encodes the waves of a proven plan, and the shares of one of its devices.
pub fn encode(proven: &Proven<'_>, device: u32) -> WaveTables {
    let (plan, held) = (proven.plan(), held(proven.validated().schedule(), device));
    let (_, of_wave) = classes(proven);
    let matrices = matrices(&proven.validated().schedule().program);
    let next = plan.waves.iter().cycle().skip(1);
    let mut meetings = 0;
    let next_class = of_wave.iter().cycle().skip(1);
    let entries =
        plan.waves.iter().zip(&of_wave).zip(next.zip(next_class)).map(|((wave, &class), (next, &next_class))| {
            let entry = entry(proven, (&held, &matrices), wave, class);
            let before = meetings;
            meetings += u32::from(next.meets);
            Wave {
                next_division: next.division.0,
                meetings: before,
                meets: next.meets.into(),
                next_op: next_class as u32,
                ..entry
            }
        });
    let waves = entries.collect();
    let mut tables = WaveTables { waves, shares: vec![], records: vec![], boxes: vec![], caches: vec![] };
    for (entry, wave) in tables.waves.iter_mut().zip(&plan.waves) {
        if let Some(boxes) = boxes_of(proven, &held, wave) {
            entry.branch_bias = tables.boxes.len() as u32;
            tables.boxes.extend(boxes);
        }
    }
    for (entry, wave) in tables.waves.iter_mut().zip(&plan.waves) {
        if let Action::Attend { wide: true, tile, .. } = wave.action {
            let at = |place: u32| cache_box(proven, wave.grid, place, tile);
            let of = [at(entry.k_cache), at(entry.v_cache)];
            entry.branch_bias = (tables.boxes.len() + tables.caches.len()) as u32;
            tables.caches.extend(of);
        }
    }
    let each = (plan.machine.sms / plan.machine.devices) as usize;
    for blocks in 0..(plan.rows / plan.block_rows) as usize {
        for division in &plan.divisions {
            for shares in &division.shares[blocks][device as usize * each..][..each] {
                let share = |s: &crate::waves::Share| Share { row: s.row, rows: s.rows, lo: s.lo, hi: s.hi };
                let (first, count) = (tables.shares.len() as u32, shares.len() as u32);
                tables.shares.extend(shares.iter().map(share));
                let mut record = ShareRecord { first, count, ..ShareRecord::zeroed() };
                record.held.iter_mut().zip(shares).for_each(|(held, s)| *held = share(s));
                tables.records.push(record);
            }
        }
    }
    tables
}

/// The digest of what [`encode`] makes for all devices.
pub fn tables_digest(proven: &Proven<'_>) -> Digest {
    match proven.plan().machine.devices {
        1 => encode(proven, 0).digest(),
        devices => {
            let each: Vec<Digest> = (0..devices).map(|device| encode(proven, device).digest()).collect();
            Digest::of(format!("{each:?}").as_bytes())
        }
    }
}

/// The boxes of a wave over the matrix of its grid.
fn boxes_of(proven: &Proven<'_>, held: &Held, wave: &PlanWave) -> Option<Vec<WeightBox>> {
    let (schedule, grid) = (proven.validated().schedule(), grid_of(proven, wave.grid));
    let (Action::MatMul { chunk, .. } | Action::Experts { chunk, .. }, Op::MatVec(m)) = (&wave.action, &grid.op) else {
        return None;
    };
    let weight = grid.operand(Role::Weight)?.buffer.index();
    let place = held.placement[weight]?;
    let format = schedule.program.format_of(grid);
    let (unit_bytes, piece_bytes) = (m.unit_bytes(format), chunk * format.granule_bytes());
    let units = held.units[weight].len() as u64 * u64::from(experts_of(proven, grid));
    let line_bytes = if proven.plan().machine.products == Products::Shared { LINE_BYTES } else { 0 };
    let of = |&box_units: &u32| WeightBox { place, units, unit_bytes, box_units, piece_bytes, line_bytes, reserved: 0 };
    (!wave.boxes.is_empty()).then(|| wave.boxes.iter().map(of).collect())
}

/// The box of `positions` positions of the pools that begin `place` times 256 bytes into the cache.
fn cache_box(proven: &Proven<'_>, grid: GridId, place: u32, positions: u32) -> CacheBox {
    let program = &proven.validated().schedule().program;
    let Op::Attention(a) = &grid_of(proven, grid).op else { unreachable!("prove: a wave of attention") };
    let shape = Shape::of(program).expect("validate: a batch kernel has tables");
    let rows = u64::from(a.kv_heads()) * u64::from(shape.pages) * u64::from(shape.page_rows);
    let row_bytes = cache_row_bytes(a.head_dim, program.precision.cache);
    CacheBox { place: u64::from(place) * PLACE_ALIGN_BYTES, rows, row_bytes, positions }
}

/// A wave without operands.
const NOTHING: Wave = Wave {
    op: 0,
    division: 0,
    x: NONE,
    out: NONE,
    residual: NONE,
    branch: NONE,
    weight: NONE,
    norm_weight: NONE,
    norm_bias: NONE,
    table: NONE,
    branch_weight: NONE,
    branch_bias: NONE,
    k_cache: NONE,
    v_cache: NONE,
    next_division: 0,
    row_scales: NONE,
    meetings: 0,
    meets: 0,
    next_op: 0,
    first_unit: 0,
};

/// Where a buffer of activations begins, as waves name it.
fn work_place(plan: &Plan, id: WorkId) -> u32 {
    (plan.work[id.index()].place / PLACE_ALIGN_BYTES) as u32
}

/// Which buffers have what: `WaveSlots` of kernels/waves/rows.cuh.
fn slots_entry(plan: &Plan, Slots { x, places, shares, shared, gate }: Slots, entry: Wave) -> Wave {
    let work = |id: WorkId| work_place(plan, id);
    Wave {
        x: work(x),
        branch: work(places),
        branch_weight: shared.map_or(NONE, work),
        table: gate.map_or(NONE, work),
        v_cache: work(shares),
        ..entry
    }
}

/// `held`: what the device of the wave holds of the pack.
fn entry(proven: &Proven<'_>, (held, matrices): (&Held, &[Option<Matrix>]), wave: &PlanWave, class: usize) -> Wave {
    let (plan, schedule) = (proven.plan(), proven.validated().schedule());
    let grid = grid_of(proven, wave.grid);
    let work = |id: WorkId| work_place(plan, id);
    let place = |id: BufferId| {
        let of_pack = matches!(schedule.program.buffers[id.index()].space, Space::Weight | Space::Constant);
        let all = if of_pack { &held.placement } else { &schedule.placement };
        all[id.index()].map_or(NONE, |at| (at / PLACE_ALIGN_BYTES) as u32)
    };
    let vector = |id: Option<BufferId>| id.map_or(NONE, place);
    let of = |role: Role| grid.operand(role).map_or(NONE, |operand| place(operand.buffer));
    let none = Wave { op: class as u32, division: wave.division.0, ..NOTHING };
    match wave.action {
        Action::Rows { residual, sum, out } => {
            let (weight, bias) = norm_places(out.and_then(|Input { norm, .. }| norm));
            let (branch_weight, branch_bias) = norm_places(match sum {
                Some(Sum::Branch { norm, .. }) => norm,
                _ => None,
            });
            let none = match sum {
                Some(Sum::Embed { table, .. }) => Wave { table: place(table), ..none },
                Some(Sum::Branch { branch, .. }) => Wave {
                    branch: work(branch),
                    branch_weight: vector(branch_weight),
                    branch_bias: vector(branch_bias),
                    ..none
                },
                Some(Sum::Slots(slots)) => slots_entry(plan, slots, none),
                Some(Sum::Taken) | None => none,
            };
            Wave {
                residual: work(residual),
                out: out.map_or(NONE, |out| work(out.to)),
                norm_weight: vector(weight),
                norm_bias: vector(bias),
                k_cache: out.and_then(|out| out.squares).map_or(NONE, work),
                weight: out.and_then(|out| out.rows).map_or(NONE, work),
                ..none
            }
        }
        Action::MatMul { x, squares, target, then, .. } => {
            let then_to = then.map_or(NONE, |then| work(then.to));
            let (out, residual) = match target {
                Written::Out(out) | Written::Best(out) => (work(out), NONE),
                Written::Residual(residual) | Written::Sums { residual, .. } => (then_to, work(residual)),
            };
            let lacks = matches!(&grid.op, Op::MatVec(m) if may_lack_factor(proven, grid, m));
            let (parts, splits) = match squares.map(|squares| squares_of(plan, squares)) {
                Some((parts, splits)) => (parts, splits.unwrap_or(NONE)),
                None if lacks => (0, 0),
                None => (NONE, NONE),
            };
            let (branch, shown) = match target {
                Written::Sums { branch, shown, .. } => (branch.map_or(NONE, work), shown.into()),
                _ => (parts, NONE),
            };
            let row_scales = row_scales_at(held, matrices, grid).unwrap_or(NONE);
            let own = grid.operand(Role::Weight).map(|weight| held.units[weight.buffer.index()].start);
            Wave {
                x: work(x),
                out,
                residual,
                first_unit: own.unwrap_or(0),
                weight: of(Role::Weight),
                row_scales,
                table: of(Role::Bias),
                norm_weight: vector(then.and_then(|then| then.norm).and_then(|of| of.weight)),
                branch,
                norm_bias: shown,
                branch_weight: splits,
                k_cache: squares.map_or(NONE, work),
                v_cache: then.and_then(|then| then.squares).map_or(NONE, work),
                ..none
            }
        }
        Action::NormHeads { x, out } => Wave {
            x: work(x),
            out: work(out),
            norm_weight: of(Role::QNormWeight),
            norm_bias: of(Role::KNormWeight),
            ..none
        },
        Action::Append { x, queries: out } | Action::AttendRow { x, out, .. } => Wave {
            x: work(x),
            out: work(out),
            branch: match wave.action {
                Action::AttendRow { splits: Some(splits), .. } => work(splits.left),
                _ => NONE,
            },
            norm_weight: of(Role::QNormWeight),
            norm_bias: of(Role::KNormWeight),
            table: of(Role::Rope),
            branch_weight: match wave.action {
                Action::AttendRow { .. } => of(Role::Sinks),
                _ => NONE,
            },
            k_cache: of(Role::AppendK),
            v_cache: of(Role::AppendV),
            ..none
        },
        Action::Merge { out, splits, gate } => {
            Wave { x: gate.map_or(NONE, work), out: work(out), branch: work(splits.left), ..none }
        }
        Action::Scores { x, out } => {
            Wave { x: work(x), out: work(out), weight: of(Role::Weight), table: of(Role::Bias), ..none }
        }
        // Choices, groups, places and shares: waves/experts.cuh.
        Action::Route { scores, choices, shares } => {
            Wave { x: work(scores), out: work(choices), table: of(Role::Bias), v_cache: work(shares), ..none }
        }
        Action::Gather { x, choices, groups, places, out } => Wave {
            x: work(x),
            out: work(out),
            residual: work(choices),
            branch: work(groups),
            k_cache: work(places),
            ..none
        },
        Action::Places { choices, groups, places, sources } => {
            Wave { out: work(sources), residual: work(choices), branch: work(groups), k_cache: work(places), ..none }
        }
        Action::Fill { x, groups, sources, out } => {
            Wave { x: work(x), out: work(out), branch: work(groups), residual: work(sources), ..none }
        }
        Action::Experts { x, groups, out, .. } => Wave {
            x: work(x),
            out: work(out),
            branch: work(groups),
            weight: of(Role::Weight),
            row_scales: row_scales_at(held, matrices, grid).unwrap_or(NONE),
            table: of(Role::Bias),
            ..none
        },
        Action::Combine { slots, out } => Wave { out: work(out), ..slots_entry(plan, slots, none) },
        // Taps and their bias, d, rates and states: waves/scan.cuh.
        Action::Convolve { x, out, .. } | Action::MixRow { x, out, .. } if matches!(grid.op, Op::Scan(_)) => Wave {
            x: work(x),
            out: work(out),
            weight: of(Role::Conv),
            table: of(Role::Bias),
            branch_weight: of(Role::DtBias),
            norm_bias: of(Role::D),
            k_cache: of(Role::State),
            v_cache: of(Role::ALog),
            ..none
        },
        // Scalars, taps, states and inputs: waves/mix.cuh.
        Action::Convolve { x, scalars, out } | Action::MixRow { x, scalars, out } => Wave {
            x: work(x),
            out: work(out),
            branch: work(scalars),
            weight: of(Role::Conv),
            norm_weight: match wave.action {
                Action::MixRow { .. } => of(Role::NormWeight),
                _ => NONE,
            },
            table: of(Role::ALog),
            branch_weight: of(Role::DtBias),
            k_cache: of(Role::State),
            ..none
        },
        // Taps, bias and states: waves/convolve.cuh.
        Action::ShortConv { x, out } => Wave {
            x: work(x),
            out: work(out),
            weight: of(Role::Conv),
            table: of(Role::Bias),
            k_cache: of(Role::State),
            ..none
        },
        Action::Mix { turned, x, out } => {
            let (norm_bias, k_cache) = (of(Role::D), of(Role::State));
            Wave { x: work(turned), out: work(out), residual: work(x), norm_bias, k_cache, ..none }
        }
        Action::Gated { mixed, x, out } => {
            Wave { x: work(mixed), out: work(out), branch: work(x), norm_weight: of(Role::NormWeight), ..none }
        }
        Action::Attend { queries, out, gate, .. } => Wave {
            x: work(queries),
            out: work(out),
            branch: gate.map_or(NONE, work),
            branch_weight: of(Role::Sinks),
            k_cache: of(Role::HistoryK),
            v_cache: of(Role::HistoryV),
            ..none
        },
    }
}

fn norm_places(norm: Option<NormOf>) -> (Option<BufferId>, Option<BufferId>) {
    norm.map_or((None, None), |norm| (norm.weight, norm.bias))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codegen::kernel_struct::assert_declared;

    #[test]
    fn kernels_declare_what_the_host_fills() {
        assert_declared([
            ("waves/context.cuh", Wave::declaration()),
            ("waves/context.cuh", Share::declaration()),
            ("waves/context.cuh", ShareRecord::declaration()),
            ("waves/context.cuh", WaveParams::declaration()),
            ("waves/context.cuh", WaveDevicesParams::declaration()),
        ]);
    }
}
