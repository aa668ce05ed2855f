//! Owns the bytes a launch uploads beside the weights: queue entries and stream runs. The structs here are the source of the declarations
//! in `kernels/`; a test compares them, and `BLESS=1` writes them.

use super::emit::classes;
use super::kernel_struct::kernel_struct;
use crate::digest::Digest;
use crate::ir::layout::{
    COPY_ALIGN_BYTES, Held, Matrix, PACKET_BYTES, PLACE_ALIGN_BYTES, held, matrices, packet_row_bytes,
};
use crate::ir::op::{Attention, MatVec, Op, Role};
use crate::ir::program::{Cols, Grid, Rows, Space};
use crate::ir::schedule::{Machine, Run, Schedule, Source, Task};
use crate::ir::variant::{AttentionVariant, MatVecVariant, Variant};
use crate::ir::{GridId, TaskId};
use crate::validate::Validated;
use bytemuck::Zeroable;

kernel_struct! {
    /// One queue entry: what a task needs at run time.
    #[derive(Eq)]
    Entry = "struct alignas(16) Entry" {
        /// case of the generated dispatch
        op: u32,
        /// t12, for the watchdog
        task: u32,
        /// first event the task waits for, for the watchdog
        event: u32,
        /// launch indices, from here
        lo: u32,
        /// ... up to here
        hi: u32,
        /// second index
        j: u32,
        /// packets of the first exchange operand (x, q, best, partial)
        x: u32,
        /// packets of the published operand
        out: u32,
        /// packets of a second published operand (best of the head, shares of experts), or of the buffer with beta; of attention: scales of a cache in fp8, in OFFSET_BYTES
        aux_or_scales: u32 as [aux, cache_scales, beta],
        /// of a matrix of codes: the scales of its rows, in OFFSET_BYTES; else the row of the step that the task takes
        row_scales_or_row: u32 as [row_scales, row],
        /// first residual value of this block that the task owns; of attention: sinks, of Mamba-2 and short convolutions the bias of the convolution, in OFFSET_BYTES; of a merge, or of a norm: packets of the gate's buffer
        residual: u32 as [residual, sinks, gate, conv_bias],
        /// norm weight of the input, or of q; of Mamba-2 its d
        norm_weight: u32 as [norm_weight, q_norm, d],
        /// norm bias of the input, or norm weight of k; of a mix and of Mamba-2 its a_log
        norm_bias: u32 as [norm_bias, k_norm, a_log],
        /// by op
        table: u32 as [bias, rope, table, conv],
        /// where keys are appended; packets of the choice of a slot, or of the gate of a shared expert; a state, in OFFSET_BYTES
        k_cache: u32 as [k_cache, choice, shared_gate, state],
        /// where values are appended; of rows, where parts are dealt: whether it is the first task of its layer to which they are; of a mix and of Mamba-2 its dt_bias
        v_cache: u32 as [v_cache, deals_first, dt_bias],
    }
}

kernel_struct! {
    /// One run of an SM's stream: weights of one task, or its share of the history.
    #[derive(Eq)]
    StreamRun = "struct alignas(16) StreamRun" {
        /// weights: bytes of the run; history: 0
        bytes: u32,
        /// weights: what chunks do not reach beyond, in bytes; history: keys of this layer, in OFFSET_BYTES
        k_cache: u32 as [block_bytes, k_cache],
        /// weights: bytes of a chunk, the last of a block may be shorter; history: values of this layer
        v_cache: u32 as [chunk_bytes, v_cache],
        /// weights: first byte in the pack, in units of 256 bytes, rounded down; history: KV head << 16 | share
        head_j: u32 as [source, head_j],
        /// history: shares; of rows: the row. Weights: above 16 bits the bytes from `source` on; of rows: units that are streamed together; else slots whose parts are, if not one
        splits: u32,
        /// history: visible positions, 0: all. Weights: one more than the packet of the choice of their part, 0: there are no parts
        window: u32 as [window, choice],
        /// history: bytes of one cache row of one KV head. Weights: from part to part, in units of 16 bytes
        row_bytes: u32 as [row_bytes, part],
        /// history: rows of one chunk. Weights: parts, and above 16 bits, of rows: which share of what is dealt, and in the top bit whether it is the first run of its layer; of several slots a unit of a part, in units of 16 bytes
        rows: u32 as [rows, parts],
    }
}

/// End-of-sequence ids a launch takes; `EOS_MAX` of context.cuh.
pub const EOS_MAX: usize = 8;

kernel_struct! {
    /// The one kernel parameter. Pointers are device addresses.
    Params = "struct Params" {
        /// weights and constants
        pack: u64 = "const u8*",
        /// keys and values of earlier positions
        cache: u64 = "u8*",
        /// what SMs tell each other
        exchange: u64 = "u64*",
        /// [steps][VOCAB], or null
        logits: u64 = "float*",
        /// all queues, one after another
        entries: u64 = "const Entry*",
        /// [REGIMES * SMS + 1]
        entry_index: u64 = "const u32*",
        /// all streams, one after another
        runs: u64 = "const StreamRun*",
        /// [REGIMES * SMS + 1]
        run_index: u64 = "const u32*",
        /// token of each position below prompt_len
        prompt: u64 = "const i32*",
        /// host-visible: [0] tokens decided so far (positions), then the token of each position; of rows null if a sampler decides
        mailbox: u64 = "volatile i32*",
        /// host-visible watchdog report, 8 words an SM
        report: u64 = "u32*",
        /// host-visible
        abort: u64 = "volatile u32*",
        /// [steps][SMS][STAMPS_MAX][STAMP_WORDS] nanoseconds, traced builds only
        stamps: u64 = "u64*",
        /// of each wait
        timeout_ns: u64,
        /// of sampling
        seed: u64,
        /// tokens of `prompt`
        prompt_len: u32,
        /// of the first step
        position: u32,
        /// of the launch
        steps: u32,
        /// of the first step; the next step has the next tag
        tag: u32,
        /// ids in `eos`
        eos_count: u32,
        /// ids that end a text
        eos: [i32; EOS_MAX],
        /// 0: greedy
        inverse_temperature: f32,
        /// ids that top-k keeps, 0: all
        top_k: u32,
        /// probability that top-p keeps in units of 2^-32, 0: all
        top_p_q32: u32,
    }
}

kernel_struct! {
    /// The one parameter of a decode kernel of several devices.
    DevicesParams = "struct DevicesParams : Params" {
        /// what every kernel gets
        params: Params as [],
        /// from `exchange` of this device to that of each other one, in bytes modulo 2^64
        peers: [u64; PEERS_MAX],
        /// the same of `logits`
        peer_logits: [u64; PEERS_MAX],
    }
}

/// Devices that run a model together with one of them, at most.
pub const PEERS_MAX: usize = 7;

kernel_struct! {
    /// The one parameter of a decode kernel over a pool of pages.
    PagedParams = "struct PagedParams : Params" {
        /// what every kernel gets
        params: Params as [],
        /// of each block of PAGE_ROWS positions, its page
        pages: u64 = "const u32*",
        /// row of the page table, and of recurrent states
        sequence: u32,
        /// no meaning yet
        reserved_of_pages: u32,
    }
}

kernel_struct! {
    /// The same of several devices.
    PagedDevicesParams = "struct PagedDevicesParams : PagedParams" {
        /// what a kernel over a pool of pages gets
        params: PagedParams as [],
        /// from `exchange` of this device to that of each other one, in bytes modulo 2^64
        peers: [u64; PEERS_MAX],
        /// the same of `logits`
        peer_logits: [u64; PEERS_MAX],
    }
}

kernel_struct! {
    /// The one parameter of a decode kernel of a draft.
    GivenParams = "struct GivenParams : Params" {
        /// what every kernel gets
        params: Params as [],
        /// [steps][HIDDEN] what the first steps read in addition to their tokens; null: what a model left, with its norm
        given: u64 = "const float*",
        /// words of rows that a batch kernel of the model left
        left: u64 = "const u8*",
        /// [HIDDEN] of the final norm of the model
        norm_of_model: u64 = "const float*",
        /// [HIDDEN] of that of the draft
        norm: u64 = "const float*",
        /// of the norm of the model
        eps_of_model: f32,
        /// of that of the draft
        eps: f32,
        /// row of `left` that the first step reads; the next step reads the next row
        left_row: u32,
        /// steps that are given something; later ones go on with what the step before left
        given_steps: u32,
        /// positions that the text is ahead of the cache
        ahead: u32,
        /// no step chooses a token: all are in `prompt`
        only_reads: u32,
    }
}

kernel_struct! {
    /// One row of a launch, as the host's guard has judged it.
    Row = "struct alignas(16) Row" {
        /// row of the page table
        sequence: u32,
        /// in the first step; one more in each step after it
        position: u32,
        /// of the first step; below 0: what row `from` of the step before this launch decided
        token: i32,
        /// see `token`
        from: u32,
        /// the first row of the launch of the same sequence
        first: u32,
        /// steps that the row takes part in
        steps: u32,
        /// of sampling, the low half
        seed_low: u32,
        /// of sampling, the high half
        seed_high: u32,
        /// 0: greedy
        inverse_temperature: f32,
        /// which recurrent states are those of its sequence
        slot: u32,
        /// no meaning yet
        reserved: [u32; 2],
    }
}

kernel_struct! {
    /// The one parameter of a batch kernel.
    RowsParams = "struct RowsParams : Params" {
        /// what every kernel gets
        params: Params as [],
        /// rows of the launch
        rows: u64 = "const Row*",
        /// [sequences][M::BLOCKS]
        pages: u64 = "const u32*",
        /// of each block: entries and runs of a launch that only fills the cache; null: the launch has whole steps
        fills: u64 = "const uint2*",
        /// rows of the launch
        row_count: u32,
        /// first step whose logits are written
        logits_from: u32,
    }
}

kernel_struct! {
    /// The one parameter of a batch kernel of several devices.
    RowsDevicesParams = "struct RowsDevicesParams : RowsParams" {
        /// what a batch kernel gets
        params: RowsParams as [],
        /// from `exchange` of this device to that of each other one, in bytes modulo 2^64
        peers: [u64; PEERS_MAX],
        /// the same of `logits`
        peer_logits: [u64; PEERS_MAX],
    }
}

/// Absent operand.
pub const NONE: u32 = u32::MAX;

/// Everything the kernel walks, encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tables {
    pub entries: Vec<Entry>,
    /// First entry of queue `regime * sms + sm`; one more at the end.
    pub entry_index: Vec<u32>,
    pub runs: Vec<StreamRun>,
    pub run_index: Vec<u32>,
    /// For each queue, how many of its entries and runs a launch executes if it only fills the cache.
    pub fills: Vec<[u32; 2]>,
    /// Bytes of the exchange, cache and output arenas.
    pub exchange_bytes: u64,
    pub cache_bytes: u64,
}

/// Encodes the queues and streams of a proven schedule.
pub fn encode(validated: &Validated) -> Tables {
    let schedule = validated.schedule();
    let program = &schedule.program;
    let (_, class_of_grid) = classes(schedule);
    let matrices = matrices(program);
    // A device finds constants and its part of each matrix at places of its own.
    let held: Vec<Held> = (0..schedule.machine.devices).map(|device| held(schedule, device)).collect();
    let of_device = |held| -> Vec<GridEntry<'_>> {
        let grids = (0..).map(GridId).zip(&program.grids).zip(&class_of_grid);
        grids.map(|((id, grid), class)| GridEntry::of(schedule, held, &matrices, id, grid, *class as u32)).collect()
    };
    let devices: Vec<Vec<GridEntry<'_>>> = held.iter().map(of_device).collect();
    let last_append = program.last_append();
    let mut tables = Tables {
        entries: vec![],
        entry_index: vec![0],
        runs: vec![],
        run_index: vec![0],
        fills: vec![],
        exchange_bytes: schedule.arena_bytes(Space::Exchange),
        cache_bytes: schedule.arena_bytes(Space::Cache),
    };
    for regime in &schedule.regimes {
        for (sm, (queue, stream)) in regime.queues.iter().zip(&regime.streams).enumerate() {
            let grids = &devices[schedule.machine.device_of(sm) as usize];
            let tasks = || queue.iter().map(|id| (id, &regime.tasks[id.index()]));
            let of = |task: &Task| &grids[task.grid.index()];
            let residual_base = tasks().filter_map(|(_, task)| of(task).residual(task)).min().unwrap_or(0);
            tables.entries.extend(tasks().map(|(id, task)| of(task).entry(*id, task, residual_base)));
            tables.entry_index.push(tables.entries.len() as u32);
            tables.runs.extend(stream.iter().map(|run| {
                let task = &regime.tasks[run.task.index()];
                of(task).run(&matrices, task, run)
            }));
            tables.run_index.push(tables.runs.len() as u32);
            let fills = |task: &Task| Some(task.grid) <= last_append;
            let entries = tasks().filter(|(_, task)| fills(task)).count();
            let runs = stream.iter().filter(|run| fills(&regime.tasks[run.task.index()])).count();
            tables.fills.push([entries as u32, runs as u32]);
        }
    }
    tables
}

impl Tables {
    /// The queues and streams of the SMs of one device of `machine`.
    pub fn of_device(&self, machine: &Machine, device: u32) -> Tables {
        let (sms, each) = (machine.sms as usize, (machine.sms / machine.devices.max(1)) as usize);
        let first = device as usize * each;
        let queues = (0..self.fills.len()).filter(|queue| (first..first + each).contains(&(queue % sms)));
        let mut tables = Tables {
            entry_index: vec![0],
            run_index: vec![0],
            ..Tables { entries: vec![], runs: vec![], fills: vec![], ..self.clone() }
        };
        for queue in queues {
            let of = |index: &[u32]| index[queue] as usize..index[queue + 1] as usize;
            tables.entries.extend_from_slice(&self.entries[of(&self.entry_index)]);
            tables.entry_index.push(tables.entries.len() as u32);
            tables.runs.extend_from_slice(&self.runs[of(&self.run_index)]);
            tables.run_index.push(tables.runs.len() as u32);
            tables.fills.push(self.fills[queue]);
        }
        tables
    }
}

/// The place of an operand in `space`, in units of `unit` bytes; [`NONE`] if the grid has none there.
fn place(schedule: &Schedule, grid: &Grid, role: Role, space: Space, unit: u64) -> u32 {
    grid.operand(role)
        .filter(|o| schedule.program.buffers[o.buffer.index()].space == space)
        .and_then(|o| schedule.placement[o.buffer.index()])
        .map_or(NONE, |at| (at / unit) as u32)
}

/// Where a device has a constant of a grid; [`NONE`] if the grid has none.
fn constant_at(schedule: &Schedule, held: &Held, grid: &Grid, role: Role) -> u32 {
    let constants = |buffer: &usize| schedule.program.buffers[*buffer].space == Space::Constant;
    let buffer = grid.operand(role).map(|operand| operand.buffer.index()).filter(constants);
    buffer.and_then(|buffer| held.placement[buffer]).map_or(NONE, |at| (at / PLACE_ALIGN_BYTES) as u32)
}

/// Where a device has the scales of the rows of a grid's matrix, if it has them.
pub(super) fn row_scales_at(held: &Held, matrices: &[Option<Matrix>], grid: &Grid) -> Option<u32> {
    let buffer = grid.operand(Role::Weight)?.buffer.index();
    matrices[buffer]?.format.row_scales.then(|| (held.row_scales[buffer] / PLACE_ALIGN_BYTES) as u32)
}

/// What the entries and the runs of a grid's tasks have in common. A grid has hundreds of tasks, so its operands are looked up once.
struct GridEntry<'a> {
    grid: &'a Grid,
    /// The entry without what a task says.
    entry: Entry,
    has_row_scales: bool,
    /// Whether operands begin elsewhere than at the first column of their buffer.
    has_slots: bool,
    /// Whether its tasks are the first ones of a layer to which parts are dealt.
    deals_first: bool,
    schedule: &'a Schedule,
    /// What the device has of the pack.
    held: &'a Held,
    residual: Option<&'a Cols>,
    variant: Option<&'a Variant>,
    history_k: u32,
    history_v: u32,
}

impl<'a> GridEntry<'a> {
    fn of(
        schedule: &'a Schedule,
        held: &'a Held,
        matrices: &[Option<Matrix>],
        id: GridId,
        grid: &'a Grid,
        class: u32,
    ) -> GridEntry<'a> {
        let packets = |role: Role| place(schedule, grid, role, Space::Exchange, PACKET_BYTES);
        let constant = |role: Role| constant_at(schedule, held, grid, role);
        let cache = |role: Role| place(schedule, grid, role, Space::Cache, PLACE_ALIGN_BYTES);
        let first_read = [Role::X, Role::Q, Role::Partial].into_iter().map(packets).find(|&p| p != NONE);
        // An op has at most one of the operands that share a field.
        let either = |roles: &[Role]| roles.iter().map(|&r| constant(r)).find(|&at| at != NONE).unwrap_or(NONE);
        let reads_best = matches!(grid.op, Op::Select);
        let row_scales = row_scales_at(held, matrices, grid);
        let entry = Entry {
            op: class,
            task: NONE,
            event: NONE,
            lo: 0,
            hi: 0,
            j: 0,
            x: if reads_best { packets(Role::Best) } else { first_read.unwrap_or(NONE) },
            out: packets(Role::Out),
            aux_or_scales: match grid.op {
                Op::Select => NONE,
                Op::Attention(_) => constant(Role::CacheScales),
                Op::Route(_) | Op::Combine(_) => packets(Role::Shares),
                Op::Mix(_) => packets(Role::Beta),
                Op::Join { .. } => packets(Role::Given),
                _ => packets(Role::Best),
            },
            row_scales_or_row: row_scales.unwrap_or(0),
            residual: match grid.op {
                Op::Attention(Attention { sinks: true, .. }) => constant(Role::Sinks),
                Op::AttentionMerge { gate: true, .. } => packets(Role::Gate),
                Op::GroupNorm(_) => packets(Role::Gate),
                Op::Convolve(_) | Op::Scan(_) => constant(Role::Bias),
                _ => 0,
            },
            norm_weight: either(&[Role::NormWeight, Role::QNormWeight, Role::D]),
            norm_bias: either(&[Role::NormBias, Role::KNormWeight, Role::ALog]),
            table: match grid.op {
                Op::Convolve(_) | Op::Scan(_) => constant(Role::Conv),
                _ => either(&[Role::Bias, Role::Rope, Role::Table, Role::Conv]),
            },
            k_cache: match grid.op {
                Op::MatVec(_) => packets(Role::Choices),
                Op::Combine(_) => columns_of(schedule, grid, Role::Gate, 0),
                Op::Mix(_) | Op::Convolve(_) | Op::Scan(_) => {
                    place(schedule, grid, Role::State, Space::State, PLACE_ALIGN_BYTES)
                }
                _ => cache(Role::AppendK),
            },
            v_cache: match grid.op {
                Op::Mix(_) | Op::Scan(_) => constant(Role::DtBias),
                _ => cache(Role::AppendV),
            },
        };
        GridEntry {
            grid,
            entry,
            has_row_scales: row_scales.is_some(),
            has_slots: grid.operands.iter().any(|o| o.role == Role::Choices || o.role == Role::Out && o.cols.base > 0),
            deals_first: schedule.program.deals_first(id),
            schedule,
            held,
            residual: grid.operand(Role::Residual).map(|operand| &operand.cols),
            variant: schedule.variants.get(&id),
            history_k: cache(Role::HistoryK),
            history_v: cache(Role::HistoryV),
        }
    }

    /// The first column of the residual that a task owns, if it owns some.
    fn residual(&self, task: &Task) -> Option<u64> {
        self.residual.map(|cols| cols.range(task.lo, task.hi, task.j).0)
    }

    /// The entry of a task. Its place in the residual of its SM counts from `residual_base`.
    fn entry(&self, id: TaskId, task: &Task, residual_base: u64) -> Entry {
        // Slots lie side by side, and a shared expert beside them.
        let at = |role| columns_at(self.schedule, self.grid, role, task);
        let Entry { x, out, aux_or_scales, k_cache, v_cache, .. } = self.entry;
        let (x, out, aux_or_scales, k_cache, v_cache) = match self.grid.op {
            Op::MatVec(_) if self.has_slots => {
                let share = Some(at(Role::Shares)).filter(|at| *at != NONE);
                let first = u32::from(self.deals_first);
                (at(Role::X), at(Role::Out), share.unwrap_or(aux_or_scales), at(Role::Choices), first)
            }
            Op::Route(_) => (at(Role::X), at(Role::Out), at(Role::Shares), k_cache, v_cache),
            _ => (x, out, aux_or_scales, k_cache, v_cache),
        };
        Entry {
            x,
            out,
            aux_or_scales,
            k_cache,
            v_cache,
            task: id.0,
            event: task.waits.first().map_or(NONE, |wait| wait.event.0),
            lo: task.lo,
            hi: task.hi,
            j: self.share(task),
            row_scales_or_row: if self.has_row_scales { self.entry.row_scales_or_row } else { task.row },
            residual: self.residual(task).map_or(self.entry.residual, |first| (first - residual_base) as u32),
            ..self.entry
        }
    }

    /// The second index of a task, of what is dealt among those of its device.
    fn share(&self, task: &Task) -> u32 {
        self.grid.share_on_device(task.j, self.schedule.machine.devices).map_or(task.j, |(share, _)| share)
    }

    /// What a run says of the parts of its matrix, which have `bytes` each, in units of `unit` bytes.
    fn parts(&self, m: &MatVec, bytes: u64, unit: u64, task: &Task) -> StreamRun {
        let Some(weight) = self.grid.operand(Role::Weight) else { return StreamRun::zeroed() };
        let Rows::Lookup(table) = weight.rows else { return StreamRun::zeroed() };
        let aligned = |bytes: u64| (bytes / u64::from(COPY_ALIGN_BYTES)) as u32;
        // Only a step of one row has runs of all slots, and only those of several rows deal.
        let above = match self.grid.is_dealt() {
            true => self.share(task) | (u32::from(self.deals_first) << 15),
            false if m.slots > 1 => aligned(unit),
            false => 0,
        };
        StreamRun {
            window: columns_at(self.schedule, self.grid, Role::Choices, task) + 1,
            row_bytes: aligned(bytes),
            rows: self.schedule.program.tables[table.index()].bound | above << 16,
            ..StreamRun::zeroed()
        }
    }

    fn run(&self, matrices: &[Option<Matrix>], task: &Task, run: &Run) -> StreamRun {
        let schedule = self.schedule;
        match (run.source, &self.grid.op, self.variant) {
            (Source::History { rows }, Op::Attention(a), Some(Variant::Attention(AttentionVariant { pitch, .. }))) => {
                StreamRun {
                    bytes: 0,
                    k_cache: self.history_k,
                    v_cache: self.history_v,
                    head_j: (task.lo * a.heads_per_task / a.group) << 16 | task.j,
                    // A batch kernel has one share of each row's history, and the row here.
                    splits: if schedule.program.rows > 1 { task.row } else { a.splits },
                    window: a.window.unwrap_or(0),
                    row_bytes: pitch * schedule.program.precision.cache.bytes() as u32,
                    rows,
                }
            }
            (Source::Units { buffer, lo, hi }, Op::MatVec(m), Some(Variant::MatVec(variant))) => {
                let MatVecVariant { chunk, block, granule, pass, .. } = variant;
                let matrix = matrices[buffer.index()].expect("validate: a matvec streams its matrix");
                let bytes = u64::from(hi - lo) * matrix.unit_bytes * u64::from(m.slots);
                let place = self.held.placement[buffer.index()].expect("validate: every matrix has a place");
                let own = &self.held.units[buffer.index()];
                let begin = place + u64::from(lo - own.start) * matrix.unit_bytes;
                let part = own.len() as u64 * matrix.unit_bytes;
                StreamRun {
                    bytes: bytes as u32,
                    k_cache: bytes.min(u64::from(*block) * u64::from(*granule)) as u32,
                    v_cache: chunk * granule,
                    head_j: (begin / PLACE_ALIGN_BYTES) as u32,
                    splits: (if m.slots > 1 { m.slots } else { *pass }) | ((begin % PLACE_ALIGN_BYTES) as u32) << 16,
                    ..self.parts(m, part, matrix.unit_bytes, task)
                }
            }
            _ => unreachable!("validate: matvecs stream weights, attention streams history, and both have variants"),
        }
    }
}

/// The packet with which an operand of a task begins, of its slot and row; [`NONE`] if the grid has none. Where words begin in their
/// buffer is known to the kernel, so for them it is the first of all.
fn columns_at(schedule: &Schedule, grid: &Grid, role: Role, task: &Task) -> u32 {
    let at = columns_of(schedule, grid, role, task.j);
    let Some(operand) = grid.operand(role).filter(|operand| at != NONE && operand.rows == Rows::Own) else { return at };
    let buffer = &schedule.program.buffers[operand.buffer.index()];
    let packets = (packet_row_bytes(buffer) / PACKET_BYTES) as u32;
    if buffer.words { at } else { at + task.row * packets }
}

/// The same of the first row.
fn columns_of(schedule: &Schedule, grid: &Grid, role: Role, j: u32) -> u32 {
    let Some(operand) = grid.operand(role) else { return NONE };
    let buffer = &schedule.program.buffers[operand.buffer.index()];
    let column = if buffer.words { 0 } else { operand.cols.base + operand.cols.stride_j * j };
    let at = place(schedule, grid, role, Space::Exchange, PACKET_BYTES);
    if at == NONE { NONE } else { at + column / (4 / buffer.dtype.bytes() as u32) }
}

/// The queues of a proven schedule, and the digest of every byte of them that is uploaded. There is no other way to make
/// one, so what reaches a device was proven.
#[derive(Debug, Clone, PartialEq)]
pub struct Queues<'a> {
    validated: &'a Validated,
    tables: Tables,
    digest: Digest,
}

impl<'a> Queues<'a> {
    pub fn of(validated: &'a Validated) -> Queues<'a> {
        let tables = encode(validated);
        let Tables { entries, entry_index, runs, run_index, fills, exchange_bytes, cache_bytes } = &tables;
        let parts: [&[u8]; 5] = [
            bytemuck::cast_slice(entries),
            bytemuck::cast_slice(entry_index),
            bytemuck::cast_slice(runs),
            bytemuck::cast_slice(run_index),
            bytemuck::cast_slice(fills),
        ];
        let digests = parts.map(Digest::of);
        let digest = Digest::of(format!("{digests:?} {exchange_bytes} {cache_bytes}").as_bytes());
        Queues { validated, tables, digest }
    }

    /// The proof.
    pub fn validated(&self) -> &'a Validated {
        self.validated
    }

    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    pub fn digest(&self) -> Digest {
        self.digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codegen::kernel_struct::assert_declared;

    #[test]
    fn kernels_declare_what_the_host_fills() {
        assert_declared([
            ("runtime/queue.cuh", Entry::declaration()),
            ("runtime/queue.cuh", StreamRun::declaration()),
            ("runtime/context.cuh", Params::declaration()),
            ("runtime/context.cuh", DevicesParams::declaration()),
            ("runtime/context.cuh", PagedParams::declaration()),
            ("runtime/context.cuh", PagedDevicesParams::declaration()),
            ("ops/join.cuh", GivenParams::declaration()),
            ("rows/context.cuh", Row::declaration()),
            ("rows/context.cuh", RowsParams::declaration()),
            ("rows/context.cuh", RowsDevicesParams::declaration()),
        ]);
    }
}
