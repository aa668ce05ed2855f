//! Prints the translation unit of one kernel: a machine, one configuration per distinct op, the dispatch, the entry point.

use super::{Float, HEADERS, JOIN_HEADERS, KernelSource, ROWS_HEADERS};
use crate::dtype::DType;
use crate::format::{Code, Format, ScaleCode, TableRow};
use crate::ir::GridId;
use crate::ir::layout::WORD_ROWS;
use crate::ir::op::{
    Attention, Combine, Convolve, Epilogue, GroupNorm, MatVec, Mix, NormAttr, Op, QkNormAttr, Role, Route, Scan,
};
use crate::ir::program::{Buffer, Grid, Operand, Program};
use crate::ir::schedule::{Schedule, SmemKind, Source};
use crate::ir::table::Holds;
use crate::ir::variant::{AttentionVariant, MatVecVariant};
use crate::model::graph::{Act, ClampedSwiglu, GroupScore, NormKind, QkNormSpan, QueryScale, Score};
use crate::rows::Shape;
use crate::target::{CopyMechanism, DotMechanism, Target};
use crate::validate::Validated;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Whether the kernel writes time stamps of every task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Trace {
    Off,
    On,
}

/// Name of the kernel's entry point.
pub const ENTRY_POINT: &str = "monobloc_decode";

/// One configuration of an op template, shared by all grids that print the same.
#[derive(Debug, Clone, PartialEq)]
pub struct OpClass {
    /// C++ template: `MatVec`.
    pub template: &'static str,
    /// Members of the configuration struct.
    pub members: String,
    /// Grids of this class, in order.
    pub grids: Vec<GridId>,
}

/// The classes of a schedule in order of first use, and the class of each grid.
pub fn classes(schedule: &Schedule) -> (Vec<OpClass>, Vec<usize>) {
    let mut classes: Vec<OpClass> = vec![];
    let mut of_grid = vec![];
    let chunk_rows = chunk_rows(schedule);
    for (g, grid) in schedule.program.grids.iter().enumerate() {
        let rows = chunk_rows.get(&GridId::from(g)).copied().unwrap_or(0);
        let (template, members) = class_of(schedule, GridId::from(g), grid, rows);
        let found = classes.iter().position(|c| c.template == template && c.members == members);
        let class = found.unwrap_or_else(|| {
            classes.push(OpClass { template, members, grids: vec![] });
            classes.len() - 1
        });
        classes[class].grids.push(GridId::from(g));
        of_grid.push(class);
    }
    (classes, of_grid)
}

/// Cache rows of a chunk of each attention: its runs of the history have as many (the validator holds that).
fn chunk_rows(schedule: &Schedule) -> BTreeMap<GridId, u32> {
    let mut rows_of = BTreeMap::new();
    for regime in &schedule.regimes {
        for run in regime.streams.iter().flatten() {
            if let Source::History { rows } = run.source {
                rows_of.insert(regime.tasks[run.task.index()].grid, rows);
            }
        }
    }
    rows_of
}

/// Prints the kernel of a proven schedule.
pub fn emit(validated: &Validated, target: &Target, trace: Trace) -> KernelSource {
    let schedule = validated.schedule();
    let program = &schedule.program;
    let (classes, _) = classes(schedule);
    let mut out = String::new();
    let m = &schedule.machine;
    let w = &mut out;
    // Writing to a String cannot fail.
    macro_rules! line {
        ($($arg:tt)*) => { writeln!(w, $($arg)*).expect("writing to a string") };
    }
    let sms = m.sms / m.devices;
    line!("// Decode kernel for `{}`: whole steps in one launch.", target.name);
    line!(
        "// {sms} blocks of {} consumer warps, {} grids in {} classes.",
        m.consumer_warps,
        program.grids.len(),
        classes.len()
    );
    let rows = program.rows > 1;
    if m.devices > 1 {
        line!("#define SEVERAL_DEVICES");
    }
    line!("{}#include \"{}\"", facts(target), if rows { "monobloc_rows.cuh" } else { "monobloc.cuh" });
    let of_draft = if program.joins() { &JOIN_HEADERS[..] } else { &[] };
    for (name, _) in of_draft {
        line!("#include \"{name}\"");
    }
    line!();
    line!("struct Machine {{");
    line!("  static constexpr int SMS = {sms};");
    let params = params_of(program, m.devices);
    if m.devices > 1 {
        line!("  static constexpr int PEERS = {};  // devices that run a step with this one", m.devices - 1);
        line!("  typedef {params} Launch;");
    }
    line!("  static constexpr int WARPS = {};", m.consumer_warps);
    line!("  static constexpr int LOADER_WARPS = {};", m.loader_warps);
    line!("  static constexpr int SLOTS = {};", m.ring.slots);
    line!("  static constexpr int SLOT_BYTES = {};", m.ring.slot_bytes);
    line!("  static constexpr int FLIGHT_HIGH = {};", m.ring.flight_high);
    line!("  static constexpr int FLIGHT_LOW = {};", m.ring.flight_low);
    line!("  static constexpr int FLIGHT_FREE = {};", m.ring.flight_free);
    if rows {
        line!("  static constexpr int COPIERS = {};", m.ring.copiers);
    }
    for part in &m.smem {
        line!(
            "  static constexpr int {}_AT = {};  // {} bytes",
            part.kind.name().to_uppercase(),
            part.offset,
            part.bytes
        );
    }
    let state = schedule.smem(SmemKind::State).map_or(0, |p| p.bytes);
    line!("  static constexpr int STATE_BYTES = {state};");
    // Parts that lie side by side, and that sampling uses together.
    let scratch: u32 =
        [SmemKind::Stage, SmemKind::Reduce].into_iter().filter_map(|kind| schedule.smem(kind)).map(|p| p.bytes).sum();
    line!("  static constexpr int SCRATCH_BYTES = {scratch};");
    line!("  static constexpr u32 CONTEXT_MAX = {};", program.context_max);
    let split_from = schedule.regimes.get(1).map_or(u32::MAX, |r| r.from_position);
    line!("  static constexpr u32 SPLIT_FROM = {split_from}u;  // first position of the split regime");
    line!("  static constexpr Elem WEIGHT = {};", elem(program.precision.weights));
    line!("  static constexpr Elem CACHE = {};", elem(program.precision.cache));
    line!("  static constexpr Elem WIRE = {};", elem(program.precision.wire));
    let copy = match target.spec.copy {
        CopyMechanism::Plain => "PLAIN",
        CopyMechanism::CpAsync => "CP_ASYNC",
        CopyMechanism::Bulk => "BULK",
    };
    line!("  static constexpr Copy COPY = Copy::{copy};");
    let dot = match target.spec.dot {
        DotMechanism::Fma => "FMA",
        DotMechanism::Mma => "MMA",
    };
    line!("  static constexpr Dot DOT = Dot::{dot};");
    line!("  static constexpr int REDUCE_BATCH = {};", m.reduce_batch);
    // Only where there are experts: other kernels have the text that they had before.
    if program.tables.iter().any(|table| table.holds == Holds::Choices) {
        line!("  static constexpr bool CHOOSES = true;");
    }
    if let Some((parts, slots)) = program.chosen_max().filter(|_| rows) {
        line!("  static constexpr int CHOSEN_PARTS = {parts};");
        line!("  static constexpr int CHOSEN_EACH = {slots};  // by a row");
    }
    let slots = |grid: &Grid| if let Op::MatVec(m) = &grid.op { m.slots } else { 1 };
    if let Some(slots) = program.grids.iter().map(slots).max().filter(|slots| *slots > 1) {
        line!("  static constexpr int CHOSEN_SLOTS = {slots};");
    }
    if let Some(entries) = schedule.queue_window() {
        line!("  static constexpr u32 QUEUE_WINDOW = {entries};");
    }
    for member in rows_members(schedule) {
        line!("  static constexpr {member};");
    }
    line!("  static constexpr bool TRACE = {};", trace == Trace::On);
    line!("  static constexpr int STAMPS_MAX = {};", schedule.queue_max());
    line!("}};");
    for (i, class) in classes.iter().enumerate() {
        line!();
        let first = &program.grids[class.grids[0].index()];
        let more = class.grids.len() - 1;
        let tail = if more > 0 { format!(" and {more} more") } else { String::new() };
        line!("// {} {}{tail}", class.grids[0], first.name);
        line!("struct Class{i} {{");
        for member in class.members.lines() {
            line!("  static constexpr {member};");
        }
        line!("}};");
    }
    line!();
    // Ops of several rows have templates of their own.
    let prefix = if rows { "Rows" } else { "" };
    line!("struct Dispatch {{");
    line!("  static __device__ __forceinline__ void run(Context<Machine>& c, u32 op, const Entry& e) {{");
    line!("    switch (op) {{");
    for group in sharing(schedule, &classes) {
        line!("      {}", case_of(program, &classes, &group, prefix));
    }
    line!("    }}");
    line!("  }}");
    line!("  static __device__ __forceinline__ void select_and_report(Context<Machine>& c, const Entry& e) {{");
    line!("    const u32 op = uniform(e.op);");
    for (i, class) in classes.iter().enumerate() {
        if matches!(class.template, "Select" | "Report") {
            line!("    if (op == {i}) return {prefix}{}<Machine, Class{i}>::run(c, e);", class.template);
        }
    }
    line!("  }}");
    line!("}};");
    line!();
    let threads = (m.consumer_warps + m.loader_warps) * 32;
    line!(
        "extern \"C\" __global__ void __launch_bounds__({threads}, 1) {ENTRY_POINT}(const __grid_constant__ {params} p) {{"
    );
    line!("  persistent{}<Machine, Dispatch>(p);", if rows { "_rows" } else { "" });
    line!("}}");
    KernelSource {
        name: "monobloc_decode.cu".to_string(),
        text: out,
        headers: HEADERS
            .iter()
            .chain(if rows { &ROWS_HEADERS[..] } else { &[] })
            .chain(of_draft)
            .map(|(n, t)| (n.to_string(), t.to_string()))
            .collect(),
        arch: target.spec.arch.clone(),
    }
}

/// What a launch of a program gets on a machine of this many devices.
fn params_of(program: &Program, devices: u32) -> &'static str {
    match (program.rows > 1, Shape::of(program), devices > 1) {
        (true, _, false) => "RowsParams",
        (true, _, true) => "RowsDevicesParams",
        (false, Some(_), false) => "PagedParams",
        (false, Some(_), true) => "PagedDevicesParams",
        (false, None, _) if program.joins() => "GivenParams",
        (false, None, true) => "DevicesParams",
        (false, None, false) => "Params",
    }
}

/// The case of the dispatch of classes that share code.
fn case_of(program: &Program, classes: &[OpClass], group: &[usize], prefix: &str) -> String {
    let first = &classes[group[0]];
    let cases: Vec<_> = group.iter().map(|i| format!("case {i}:")).collect();
    let configurations: String = group.iter().map(|i| format!(", Class{i}")).collect();
    let numbers = group.iter().enumerate().skip(1);
    let which: String = numbers.map(|(number, i)| format!("op == {i} ? {number} : ")).collect();
    let which = if which.is_empty() { which } else { format!(", {which}0") };
    let run = format!("{prefix}{}<Machine{configurations}>", first.template);
    let run = if is_head_of_draft(program, first) { format!("InText<{run}>") } else { run };
    format!("{} return {run}::run(c, e{which});", cases.join(" "))
}

/// Whether a class is the head of a draft, whose positions are not those of its text.
fn is_head_of_draft(program: &Program, class: &OpClass) -> bool {
    let grid = &program.grids[class.grids[0].index()];
    program.joins() && matches!(&grid.op, Op::MatVec(m) if matches!(m.epilogue, Epilogue::Logits { .. }))
}

/// The classes of a kernel, those that share code together: what of a matvec is the same for all of them is the key.
fn sharing(schedule: &Schedule, classes: &[OpClass]) -> Vec<Vec<usize>> {
    let program = &schedule.program;
    let key = |class: &OpClass| {
        let Op::MatVec(m) = &program.grids[class.grids[0].index()].op else { return None };
        let variants = || class.grids.iter().filter_map(|grid| schedule.matvec_variant(*grid));
        let block = variants().next()?.chunk.min(m.granules(program.format_of(&program.grids[class.grids[0].index()])));
        variants().all(|variant| variant.shared).then_some((m.unit_rows, block))
    };
    let keys: Vec<_> = classes.iter().map(key).collect();
    let mut groups: Vec<Vec<usize>> = vec![];
    for (i, key) in keys.iter().enumerate() {
        match groups.iter_mut().find(|group| key.is_some() && keys[group[0]] == *key) {
            Some(group) => group.push(i),
            None => groups.push(vec![i]),
        }
    }
    groups
}

/// What the headers must know of a target before they are included. Nothing about the GPU is asked of the compiler.
pub(super) fn facts(target: &Target) -> &'static str {
    if target.spec.fp8_cvt { "#define FP8_CVT\n" } else { "" }
}

/// Members for the pages of a kernel, and, in one for rows, for its rows; none if one sequence has the whole cache.
fn rows_members(schedule: &Schedule) -> Vec<String> {
    let program = &schedule.program;
    let Some(shape) = Shape::of(program) else { return vec![] };
    let pages = [
        format!("u32 PAGE_ROWS = {}", shape.page_rows),
        format!("u32 PAGES = {}", shape.pages),
        format!("u64 POOL_ROWS = {}", u64::from(shape.pages) * u64::from(shape.page_rows)),
    ];
    if program.rows == 1 {
        return pages.to_vec();
    }
    let [page_rows, page_count, pool_rows] = pages;
    vec![
        format!("int ROWS = {}", program.rows.next_multiple_of(WORD_ROWS)),
        format!("int RESIDUAL_COLS = {}", schedule.machine.residual_cols),
        page_rows,
        page_count,
        pool_rows,
        format!("u32 BLOCKS = {}", shape.blocks()),
        format!("int REGISTERS = {}", schedule.machine.registers_per_thread),
        format!("int LOADER_REGISTERS = {}", schedule.machine.loader_registers),
    ]
}

pub(super) fn elem(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "Elem::BF16",
        DType::E4m3 => "Elem::FP8",
        _ => "Elem::F32",
    }
}

pub(super) fn norm_members(norm: Option<NormAttr>) -> String {
    let (kind, eps) = match norm {
        None => ("NONE", 0.0),
        Some(NormAttr { kind: NormKind::Rms, eps }) => ("RMS", eps),
        Some(NormAttr { kind: NormKind::Layer, eps }) => ("LAYER", eps),
    };
    format!("Norm NORM = Norm::{kind}\nfloat EPS = {}\n", Float(eps))
}

pub(super) fn act(act: Act) -> &'static str {
    match act {
        Act::Silu => "Act::SILU",
        Act::GeluErf => "Act::GELU_ERF",
        Act::GeluTanh => "Act::GELU_TANH",
        Act::Relu => "Act::RELU",
        Act::SquaredRelu => "Act::SQUARED_RELU",
    }
}

/// C++ template and configuration members of a grid; `rows`: the cache rows of its chunks, if it is an attention.
fn class_of(schedule: &Schedule, id: GridId, grid: &Grid, rows: u32) -> (&'static str, String) {
    let program = &schedule.program;
    match &grid.op {
        Op::Select => ("Select", format!("int PARTS = {}\nint VOCAB = {}\n", parts(program), vocab(program))),
        Op::Report => ("Report", String::new()),
        Op::Route(route) => ("Route", route_members(grid, route)),
        Op::Combine(combine) => ("Combine", combine_members(program, grid, combine)),
        Op::Mix(mix) => ("Mix", mix_members(program, grid, mix)),
        Op::Convolve(Convolve { channels, kernel }) => {
            let biased = grid.operand(Role::Bias).is_some();
            ("Convolve", format!("int CHANNELS = {channels}\nint KERNEL = {kernel}\nbool BIAS = {biased}\n"))
        }
        Op::Scan(scan) => ("Scan", scan_members(grid, scan) + &parts_member(program, grid)),
        Op::GroupNorm(norm) => ("GroupNorm", group_norm_members(program, grid, norm)),
        Op::Join { scale } => {
            let (hidden, table) = table_of(program, grid);
            ("Join", format!("int HIDDEN = {hidden}\nfloat SCALE = {}\n{table}", Float(*scale)))
        }
        Op::Embed { scale, everywhere } => {
            let (hidden, table) = table_of(program, grid);
            let members =
                format!("int HIDDEN = {hidden}\nfloat SCALE = {}\nbool REPLICATED = {everywhere}\n", Float(*scale));
            ("Embed", members + &table)
        }
        Op::MatVec(m) => ("MatVec", matvec_members(schedule, id, grid, m)),
        Op::Attention(a) => ("Attention", attention_members(schedule, id, a, rows) + &gate_member(grid)),
        Op::AttentionMerge { head_dim, splits, heads_per_task, gate: _ } => {
            let heads = grid.n;
            let members = format!(
                "int HEADS = {heads}\nint DIM = {head_dim}\nint SPLITS = {splits}\nint HEADS_PER_TASK = {heads_per_task}\n"
            );
            ("AttentionMerge", members + &gate_member(grid))
        }
        Op::NormAdd { norm, width, scale, everywhere } => {
            let members = format!(
                "int WIDTH = {width}\nfloat EPS = {}\nfloat SCALE = {}\nbool REPLICATED = {everywhere}\n",
                Float(norm.eps),
                Float(*scale)
            );
            ("NormAdd", members)
        }
    }
}

/// Columns of the table that a grid looks up, and how a row of it is stored.
fn table_of(program: &Program, grid: &Grid) -> (u32, String) {
    let table = grid.operand(Role::Table).map(|o| &program.buffers[o.buffer.index()]);
    (table.map_or(0, |table| table.cols), table.map_or(String::new(), table_members))
}

pub(super) fn route_members(grid: &Grid, route: &Route) -> String {
    // Destructured so that a new attribute does not compile until the kernel knows it.
    let Route { experts, top_k, score, groups, normalise, scale } = *route;
    let (count, kept, sum_of_two) =
        groups.map_or((0, 0, false), |g| (g.count, g.kept, g.score == GroupScore::SumOfTwo));
    let (sigmoid, corrected) = (score == Score::Sigmoid, grid.operand(Role::Bias).is_some());
    format!(
        "int EXPERTS = {experts}\nint TOP_K = {top_k}\nbool SIGMOID = {sigmoid}\nbool CORRECTED = {corrected}\nint GROUPS = {count}\n\
         int KEPT = {kept}\nbool SUM_OF_TWO = {sum_of_two}\nbool NORMALISED = {}\nfloat ADDED = {}\nfloat SCALE = {}\n",
        normalise.is_some(),
        Float(normalise.unwrap_or(0.0)),
        Float(scale),
    )
}

fn combine_members(program: &Program, grid: &Grid, combine: &Combine) -> String {
    let Combine { width, slots, shared, scale, adds } = *combine;
    let (gated, publish) = (grid.operand(Role::Gate).is_some(), grid.operand(Role::Out).is_some());
    // Packets of the scores of a row.
    let scores = grid.operand(Role::Gate).map_or(0, |gate| program.buffers[gate.buffer.index()].cols);
    let pitch = match program.rows {
        1 => String::new(),
        _ => format!("u32 GATE_PITCH = {}\n", scores.next_multiple_of(2)),
    };
    format!(
        "int WIDTH = {width}\nint SLOTS = {slots}\nbool SHARED = {}\nfloat SHARED_SCALE = {}\nbool GATED = {gated}\nfloat SCALE = {}\nbool ADDS = {adds}\n\
         bool PUBLISH = {publish}\n{pitch}",
        shared.is_some(),
        Float(shared.unwrap_or(0.0)),
        Float(scale),
    )
}

/// Parts of the sequences, of steps of several rows.
fn parts_member(program: &Program, grid: &Grid) -> String {
    if program.rows == 1 { String::new() } else { format!("int PARTS = {}\n", grid.parts()) }
}

fn mix_members(program: &Program, grid: &Grid, mix: &Mix) -> String {
    // Where words lie depends on how many columns there are.
    let words = match program.rows {
        1 => String::new(),
        _ => net_cols(program, grid) + &parts_member(program, grid),
    };
    net_members(grid, mix) + &words
}

/// Columns of the buffers of q, and of beta.
pub(super) fn net_cols(program: &Program, grid: &Grid) -> String {
    let cols = |role| grid.operand(role).map_or(0, |operand| program.buffers[operand.buffer.index()].cols);
    format!("int COLS = {}\nint SCALAR_COLS = {}\n", cols(Role::Q), cols(Role::Beta))
}

pub(super) fn net_members(grid: &Grid, mix: &Mix) -> String {
    // Destructured so that a new attribute does not compile until the kernel knows it.
    let Mix { key_heads, value_heads, key_dim, value_dim, kernel, eps, doubles } = mix;
    let at = |role| grid.operand(role).map_or(0, |operand| operand.cols.base);
    format!(
        "int KEY_HEADS = {key_heads}\nint VALUE_HEADS = {value_heads}\nint KEY_DIM = {key_dim}\nint VALUE_DIM = {value_dim}\n\
         int KERNEL = {kernel}\nfloat EPS = {}\nbool DOUBLES = {doubles}\nint BETA_AT = {}\nint DECAY_AT = {}\n",
        Float(*eps),
        at(Role::Beta),
        at(Role::Decay),
    )
}

pub(super) fn scan_members(grid: &Grid, scan: &Scan) -> String {
    // Destructured so that a new attribute does not compile until the kernel knows it.
    let Scan { heads, head_dim, groups, state, kernel, scales: [x, b, c, step], gate } = scan;
    format!(
        "int HEADS = {heads}\nint HEAD_DIM = {head_dim}\nint GROUPS = {groups}\nint STATE = {state}\nint KERNEL = {kernel}\n\
         float X_SCALE = {}\nfloat B_SCALE = {}\nfloat C_SCALE = {}\nfloat STEP_SCALE = {}\nbool GATED = {}\n\
         float GATE_SCALE = {}\nbool BIAS = {}\n",
        Float(*x),
        Float(*b),
        Float(*c),
        Float(*step),
        gate.is_some(),
        Float(gate.unwrap_or(1.0)),
        grid.operand(Role::Bias).is_some(),
    )
}

fn group_norm_members(program: &Program, grid: &Grid, norm: &GroupNorm) -> String {
    let GroupNorm { width, groups, eps, gate } = norm;
    let (at, cols) = grid
        .operand(Role::Gate)
        .map_or((0, 0), |operand| (operand.cols.base, program.buffers[operand.buffer.index()].cols));
    // Where words lie depends on how many columns there are.
    let words = match program.rows {
        1 => String::new(),
        _ => format!("int GATE_COLS = {}\n", cols.max(1)),
    };
    format!(
        "int WIDTH = {width}\nint GROUPS = {groups}\nfloat EPS = {}\nbool GATED = {}\nfloat GATE_SCALE = {}\nint GATED_AT = {at}\n{words}",
        Float(*eps),
        gate.is_some(),
        Float(gate.unwrap_or(1.0)),
    )
}

/// Logits of one step.
pub(super) fn vocab(program: &Program) -> u32 {
    let logits = program.grids.iter().find_map(|g| g.operand(Role::Logits));
    logits.map_or(0, |o| program.buffers[o.buffer.index()].cols)
}

/// Arg-max pairs of one step: one for each task of the head.
fn parts(program: &Program) -> u32 {
    program
        .grids
        .iter()
        .find(|g| matches!(&g.op, Op::MatVec(m) if matches!(m.epilogue, Epilogue::Logits { .. })))
        .map_or(0, |g| g.second.extent())
}

fn matvec_members(schedule: &Schedule, id: GridId, grid: &Grid, m: &MatVec) -> String {
    let program = &schedule.program;
    // Destructured so that a new attribute does not compile until the kernel knows it.
    let MatVec { rows, k: _, slots, norm, own_input, epilogue, unit_rows } = *m;
    let k = m.inputs();
    let variant = schedule.matvec_variant(id).expect("validate: every matvec has a variant");
    let MatVecVariant { units, chunk, block: _, units_per_warp, poll_batch, granule: _, pass, shared: _ } = variant;
    let mut s = format!(
        "int ROWS = {rows}\nint K = {k}\nint UNIT_ROWS = {unit_rows}\nint CHUNK = {chunk}\nint UNITS = {units}\n"
    );
    s += &if program.rows > 1 {
        format!("int PASS = {pass}\n")
    } else {
        format!("int UNITS_PER_WARP = {units_per_warp}\nint POLL_BATCH = {poll_batch}\nbool OWN_INPUT = {own_input}\n")
    };
    s += &coding_members(program.format_of(grid));
    s += &norm_members(norm);
    s += &epilogue_members(epilogue);
    let (cap, parts) = match epilogue {
        Epilogue::Logits { softcap, .. } => (softcap.unwrap_or(0.0), parts(program)),
        _ => (0.0, 0),
    };
    // Writing to a String cannot fail.
    let _ = write!(
        s,
        "float SOFTCAP = {}\nbool BIAS = {}\nbool PUBLISH = {}\nint PARTS = {parts}\n",
        Float(cap),
        grid.operand(Role::Bias).is_some(),
        grid.operand(Role::Out).is_some(),
    );
    // Only where there are slots: other kernels have the text that they had before there were experts.
    let [x, out] = [Role::X, Role::Out].map(|role| grid.operand(role));
    let table = program.looked_up(grid);
    if let (Some(x), Some(out), true) = (x, out, program.rows > 1)
        && (table.is_some() || out.cols.base != 0)
    {
        let cols = |operand: &Operand| program.buffers[operand.buffer.index()].cols;
        let (x_cols, out_cols) = (cols(x), cols(out));
        // A dealt task names the columns of all slots.
        let each = table.map_or(0, |table| table.cols);
        let out_step = out.cols.len.checked_div(each).unwrap_or(0);
        let of_input = program.input_step(grid);
        let _ = write!(s, "int X_COLS = {x_cols}\nint X_STEP = {of_input}\nint OUT_COLS = {out_cols}\n");
        let _ = write!(s, "int OUT_AT = {}\nint OUT_STEP = {out_step}\nint EACH = {each}\n", out.cols.base);
    }
    // A task of all slots does not depend on what they chose: its loader does.
    if let (Some(table), 1) = (table, slots) {
        // What all slots read was there before the choice.
        let input = grid.operand(Role::X).map(|x| &x.cols);
        let first = input.is_some_and(|cols| cols.stride_j == 0 && cols.len == k);
        let _ = write!(s, "int EXPERTS = {}\nint PART_UNITS = {}\nbool INPUT_FIRST = {first}\n", table.bound, grid.n);
        if grid.operand(Role::Shares).is_some() {
            s += "bool WEIGHED = true\n";
        }
    }
    s
}

/// Members that say what is done with the products of a matrix.
pub(super) fn epilogue_members(epilogue: Epilogue) -> String {
    let clamp = match epilogue {
        Epilogue::Clamped(ClampedSwiglu { alpha, limit }) => {
            format!("float ALPHA = {}\nfloat LIMIT = {}\n", Float(alpha), Float(limit))
        }
        _ => String::new(),
    };
    let (epilogue, activation, scale) = match epilogue {
        Epilogue::Store => ("STORE", None, 1.0),
        Epilogue::Scores => ("SCORES", None, 1.0),
        Epilogue::Clamped(_) => ("CLAMPED", None, 1.0),
        Epilogue::Act(a) => ("ACT", Some(a), 1.0),
        Epilogue::Gated(a) => ("GATED", Some(a), 1.0),
        Epilogue::GatedBy { act, scale } => ("GATED", Some(act), scale),
        Epilogue::Residual { scale } => ("RESIDUAL", None, scale),
        Epilogue::Logits { scale, .. } => ("LOGITS", None, scale),
    };
    format!(
        "Epilogue EPILOGUE = Epilogue::{epilogue}\nAct ACT = {}\nfloat SCALE = {}\n{clamp}",
        activation.map_or("Act::SILU", act),
        Float(scale),
    )
}

/// Members that say how a matrix of codes is read; none for plain weights.
pub(super) fn coding_members(format: Format) -> String {
    match code_members(format) {
        members if members.is_empty() => members,
        members => members + &format!("int GRANULE_BYTES = {}\n", format.granule_bytes()),
    }
}

/// Members that say what codes and scales are; none for plain weights.
fn code_members(format: Format) -> String {
    let Format { code, groups, row_scales } = format;
    let code = match code {
        Code::F32 | Code::Bf16 => return String::new(),
        Code::Int8 => "INT8",
        Code::Int4 => "INT4",
        Code::E4m3 => "E4M3",
        Code::E2m1 => "E2M1",
    };
    // Only where there are some: other kernels have the text that they had before there were minima.
    let minima = if format.has_minima() { "bool MINIMA = true\n" } else { "" };
    let (group_k, scale, zeros) = groups.map_or((0, "NONE", false), |groups| {
        let scale = match groups.scale {
            ScaleCode::F32 => "F32",
            ScaleCode::F16 => "F16",
            ScaleCode::Bf16 => "BF16",
            ScaleCode::E4m3 => "E4M3",
            ScaleCode::E8m0 => "E8M0",
            ScaleCode::F16x6 => "F16X6",
        };
        (groups.k, scale, groups.zeros)
    });
    format!(
        "Code CODE = Code::{code}\nint GROUP_K = {group_k}\nScaleCode SCALE_CODE = ScaleCode::{scale}\nbool ZEROS = {zeros}\n\
         bool ROW_SCALES = {row_scales}\n{minima}"
    )
}

/// Members of a table of codes; none for a table of values.
pub(super) fn table_members(table: &Buffer) -> String {
    let Some(format) = table.coded else { return String::new() };
    let TableRow { scales, zeros, row_scale, bytes } = format.table_row(table.cols);
    let places = format!(
        "int SCALES_AT = {scales}\nint ZEROS_AT = {zeros}\nint ROW_SCALE_AT = {row_scale}\nint ROW_BYTES = {bytes}\n"
    );
    code_members(format) + &places
}

/// Where the gate of a grid's heads begins in its buffer; none without a gate.
pub(super) fn gate_member(grid: &Grid) -> String {
    grid.operand(Role::Gate).map_or(String::new(), |gate| format!("int GATE_AT = {}\n", gate.cols.base))
}

pub(super) fn attention_members(schedule: &Schedule, id: GridId, a: &Attention, rows: u32) -> String {
    // Destructured so that a new attribute does not compile until the kernel knows it.
    let Attention {
        heads_per_task,
        group,
        heads,
        head_dim,
        scale,
        softcap,
        window,
        rotary,
        interleaved,
        q_norm,
        k_norm,
        splits,
        sinks,
        gate: _,
        query_scale,
        norm_after_rope,
    } = a;
    let variant = schedule.attention_variant(id).expect("validate: every attention has a variant");
    let AttentionVariant { warps_per_head, prefetch_v, swizzled, pitch } = variant;
    let head_norm = |n: &Option<QkNormAttr>| match n {
        None => ("NONE", 0.0),
        Some(QkNormAttr { norm, span: QkNormSpan::Head }) => ("HEAD", norm.eps),
        Some(QkNormAttr { norm, span: QkNormSpan::OwnGains }) => ("CENTRED", norm.eps),
        Some(QkNormAttr { norm, span: QkNormSpan::Projection }) => ("PROJECTION", norm.eps),
    };
    let ((qn, qe), (kn, ke)) = (head_norm(q_norm), head_norm(k_norm));
    let members = format!(
        "int HEADS = {heads}\nint GROUP = {group}\nint HEADS_PER_TASK = {heads_per_task}\nint DIM = {head_dim}\nint PITCH = {pitch}\n\
         float SCALE = {}\nfloat SOFTCAP = {}\nu32 WINDOW = {}\nint ROTARY = {rotary}\nbool INTERLEAVED = {interleaved}\n\
         HeadNorm Q_NORM = HeadNorm::{qn}\nfloat Q_EPS = {}\nHeadNorm K_NORM = HeadNorm::{kn}\nfloat K_EPS = {}\n\
         int SPLITS = {splits}\nint CHUNK_ROWS = {rows}\nint WARPS_PER_HEAD = {warps_per_head}\nbool PREFETCH_V = {prefetch_v}\nbool SWIZZLED = {swizzled}\n",
        Float(*scale),
        Float(softcap.unwrap_or(0.0)),
        window.unwrap_or(0),
        Float(qe),
        Float(ke),
    );
    // Only where there are some: other kernels have the text that they had before.
    let sinks = if *sinks { "bool SINKS = true\n" } else { "" };
    let after = if *norm_after_rope { "bool NORM_AFTER_ROPE = true\n" } else { "" };
    let scaled = query_scale.map_or(String::new(), |QueryScale { beta, original }| {
        format!("float QUERY_BETA = {}\nu32 QUERY_ORIGINAL = {original}\n", Float(beta))
    });
    members + sinks + after + &scaled
}
