//! Prints the kernel of a proven plan of waves, and encodes what it walks, as `kernels/waves/context.cuh` declares it.

use super::abi::{NONE, row_scales};
use super::emit::{Trace, attention_members, coding_members, elem, epilogue_members, norm_members};
use super::{Float, HEADERS, KernelSource, ROWS_HEADERS, WAVES_HEADERS};
use crate::digest::Digest;
use crate::ir::layout::{Matrix, PLACE_ALIGN_BYTES, matrices};
use crate::ir::op::{Op, Role};
use crate::ir::program::Grid;
use crate::ir::{BufferId, GridId};
use crate::rows::Shape;
use crate::target::Target;
use crate::waves::{
    Action, BLOCK_ROWS, Input, Layout, NormOf, Proven, Sum, Target as Written, Wave as PlanWave, WorkId,
};
use bytemuck::{Pod, Zeroable};
use std::fmt::Write;

/// Name of the kernel's entry point.
pub const ENTRY_POINT: &str = "monobloc_waves";

/// `Wave` of waves/context.cuh; some fields mean different things for different ops.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Wave {
    pub op: u32,
    pub division: u32,
    pub x: u32,
    pub out: u32,
    pub residual: u32,
    pub branch: u32,
    pub weight: u32,
    /// Norm weight of the output, or of q.
    pub norm_weight: u32,
    /// Norm bias of the output, or the norm weight of k.
    pub norm_bias: u32,
    /// Bias, rotary table, or embedding table.
    pub table: u32,
    pub branch_weight: u32,
    pub branch_bias: u32,
    pub k_cache: u32,
    pub v_cache: u32,
    pub grid: u32,
    /// Scales of the rows of a matrix of codes.
    pub row_scales: u32,
}

/// `Share` of waves/context.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Share {
    pub row: u32,
    pub rows: u32,
    pub lo: u32,
    pub hi: u32,
}

/// `WaveParams` of waves/context.cuh: the one kernel parameter. Pointers are device addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct WaveParams {
    pub pack: u64,
    pub cache: u64,
    pub work: u64,
    pub waves: u64,
    pub shares: u64,
    pub share_index: u64,
    pub tokens: u64,
    pub pages: u64,
    pub arrived: u64,
    pub report: u64,
    pub abort: u64,
    pub stamps: u64,
    pub timeout_ns: u64,
    pub wave_count: u32,
    pub row_count: u32,
    pub position: u32,
    pub reserved: u32,
}

/// Everything the kernel walks, encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaveTables {
    pub waves: Vec<Wave>,
    pub shares: Vec<Share>,
    /// First share of each number of blocks of rows, division and SM, in this order; one more at the end.
    pub share_index: Vec<u32>,
}

impl WaveTables {
    /// Of every byte that is uploaded.
    pub fn digest(&self) -> Digest {
        let parts: [&[u8]; 3] = [
            bytemuck::cast_slice(&self.waves),
            bytemuck::cast_slice(&self.shares),
            bytemuck::cast_slice(&self.share_index),
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
            let hidden = plan.work[residual.index()].cols;
            let (embed, embed_scale) = match sum {
                Some(Sum::Embed { scale, .. }) => (true, *scale),
                _ => (false, 1.0),
            };
            let branch = match sum {
                Some(Sum::Branch { norm, scale, .. }) => Some((norm.norm, *scale)),
                _ => None,
            };
            let prefixed = |of: &str| of.lines().fold(String::new(), |s, line| s + &renamed(line) + "\n");
            let mut s = format!(
                "int HIDDEN = {hidden}\nbool EMBED = {embed}\nfloat EMBED_SCALE = {}\nbool BRANCH = {}\nfloat BRANCH_SCALE = {}\nbool OUT = {}\n",
                Float(embed_scale),
                branch.is_some(),
                Float(branch.map_or(1.0, |(_, scale)| scale)),
                out.is_some(),
            );
            s += &prefixed(&norm_members(branch.map(|(norm, _)| norm)));
            s += &norm_members(out.and_then(|out| out.norm).map(|norm| norm.norm));
            ("WaveRows", s)
        }
        (Action::MatMul { target, pass, .. }, Op::MatVec(m)) => {
            let plain = match target {
                Written::Out(out) => plan.work[out.index()].layout != Layout::Operand,
                Written::Residual(_) => true,
            };
            let members = format!(
                "int ROWS = {}\nint K = {}\nint UNIT_ROWS = {}\nint PASS = {pass}\n{}\
                 bool BIAS = {}\nbool PLAIN = {plain}\n",
                m.rows,
                m.k,
                m.unit_rows,
                epilogue_members(m.epilogue),
                grid.operand(Role::Bias).is_some(),
            );
            ("WaveMatMul", members + &coding_members(schedule.program.format_of(grid), m.k))
        }
        (Action::Append { .. }, Op::Attention(a)) => ("WaveAppend", attention_members(schedule, wave.grid, a, 0)),
        (Action::Attend { tile, .. }, Op::Attention(a)) => {
            ("WaveAttend", format!("{}int TILE = {tile}\n", attention_members(schedule, wave.grid, a, 0)))
        }
        _ => unreachable!("prove: waves are those of the ops of their grids"),
    }
}

/// The member of a norm, for the norm of a branch.
fn renamed(member: &str) -> String {
    member.replacen(" NORM =", " BRANCH_NORM =", 1).replacen(" EPS =", " BRANCH_EPS =", 1)
}

/// Members of the machine.
fn machine_members(proven: &Proven<'_>, trace: Trace) -> Vec<String> {
    let (plan, program) = (proven.plan(), &proven.validated().schedule().program);
    let shape = Shape::of(program).expect("validate: a kernel for rows has tables");
    let m = &plan.machine;
    vec![
        format!("int SMS = {}", m.sms),
        format!("int WARPS = {}", m.warps),
        format!("int LOADER_WARPS = {}", m.loader_warps),
        format!("int REGISTERS = {}", m.registers),
        format!("int LOADER_REGISTERS = {}", m.loader_registers),
        format!("int SLOTS = {}", m.slots),
        format!("int SLOT_BYTES = {}", m.slot_bytes),
        format!("int STATE_AT = {}", m.slots * m.slot_bytes),
        format!("int STATE_BYTES = {}", m.state_bytes),
        format!("int DIVISIONS = {}", plan.divisions.len()),
        format!("u32 PAGE_ROWS = {}", shape.page_rows),
        format!("u32 PAGES = {}", shape.pages),
        format!("u64 POOL_ROWS = {}", u64::from(shape.pages) * u64::from(shape.page_rows)),
        format!("Elem WEIGHT = {}", elem(program.precision.weights)),
        format!("Elem CACHE = {}", elem(program.precision.cache)),
        format!("Elem WIRE = {}", elem(program.precision.wire)),
        "Dot DOT = Dot::MMA".to_string(),
        format!("bool TRACE = {}", trace == Trace::On),
    ]
}

/// Prints the kernel of a proven plan.
pub fn emit(proven: &Proven<'_>, target: &Target, trace: Trace) -> KernelSource {
    let (plan, program) = (proven.plan(), &proven.validated().schedule().program);
    let (classes, _) = classes(proven);
    let m = &plan.machine;
    let mut out = String::new();
    let w = &mut out;
    // Writing to a String cannot fail.
    macro_rules! line {
        ($($arg:tt)*) => { writeln!(w, $($arg)*).expect("writing to a string") };
    }
    line!(
        "// Kernel of `{}` for `{}` that reads prompt chunks of up to {} tokens.",
        program.name,
        target.name,
        plan.rows
    );
    line!(
        "// {} blocks of {} consumer warps, {} waves in {} classes.",
        m.sms,
        m.warps,
        plan.waves.len(),
        classes.len()
    );
    line!("#include \"monobloc_waves.cuh\"");
    line!();
    line!("struct Machine {{");
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
    for (function, argument) in [("run", "WaveContext<Machine>& c"), ("load", "WaveLoader<Machine>& c")] {
        line!("  static __device__ __forceinline__ void {function}({argument}, u32 op, const Wave& wave) {{");
        line!("    switch (op) {{");
        for (i, class) in classes.iter().enumerate() {
            line!("      case {i}: return {}<Machine, Class{i}>::{function}(c, wave);", class.template);
        }
        line!("    }}");
        line!("  }}");
    }
    line!("}};");
    line!();
    let threads = (m.warps + m.loader_warps) * 32;
    line!(
        "extern \"C\" __global__ void __launch_bounds__({threads}, 1) {ENTRY_POINT}(const __grid_constant__ WaveParams p) {{"
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
            .map(|(n, t)| (n.to_string(), t.to_string()))
            .collect(),
        arch: target.spec.arch.clone(),
    }
}

/// Encodes the waves and shares of a proven plan.
pub fn encode(proven: &Proven<'_>) -> WaveTables {
    let plan = proven.plan();
    let (_, of_wave) = classes(proven);
    let matrices = matrices(&proven.validated().schedule().program);
    let waves = plan.waves.iter().zip(&of_wave).map(|(wave, &class)| entry(proven, &matrices, wave, class)).collect();
    let mut tables = WaveTables { waves, shares: vec![], share_index: vec![0] };
    for blocks in 0..(plan.rows / BLOCK_ROWS) as usize {
        for division in &plan.divisions {
            for shares in &division.shares[blocks] {
                let share = |s: &crate::waves::Share| Share { row: s.row, rows: s.rows, lo: s.lo, hi: s.hi };
                tables.shares.extend(shares.iter().map(share));
                tables.share_index.push(tables.shares.len() as u32);
            }
        }
    }
    tables
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
    grid: 0,
    row_scales: NONE,
};

fn entry(proven: &Proven<'_>, matrices: &[Option<Matrix>], wave: &PlanWave, class: usize) -> Wave {
    let (plan, schedule) = (proven.plan(), proven.validated().schedule());
    let grid = grid_of(proven, wave.grid);
    let work = |id: WorkId| (plan.work[id.index()].place / PLACE_ALIGN_BYTES) as u32;
    let place = |id: BufferId| schedule.placement[id.index()].map_or(NONE, |at| (at / PLACE_ALIGN_BYTES) as u32);
    let vector = |id: Option<BufferId>| id.map_or(NONE, place);
    let of = |role: Role| grid.operand(role).map_or(NONE, |operand| place(operand.buffer));
    let none = Wave { op: class as u32, division: wave.division.0, grid: wave.grid.0, ..NOTHING };
    match wave.action {
        Action::Rows { residual, sum, out } => {
            let (weight, bias) = norm_places(out.and_then(|Input { norm, .. }| norm));
            let branch = match sum {
                Some(Sum::Branch { branch, norm, .. }) => Some((branch, norm)),
                _ => None,
            };
            let (branch_weight, branch_bias) = norm_places(branch.map(|(_, norm)| norm));
            let table = match sum {
                Some(Sum::Embed { table, .. }) => place(table),
                _ => NONE,
            };
            Wave {
                residual: work(residual),
                out: out.map_or(NONE, |out| work(out.to)),
                branch: branch.map_or(NONE, |(branch, _)| work(branch)),
                norm_weight: vector(weight),
                norm_bias: vector(bias),
                branch_weight: vector(branch_weight),
                branch_bias: vector(branch_bias),
                table,
                ..none
            }
        }
        Action::MatMul { x, target, .. } => {
            let (out, residual) = match target {
                Written::Out(out) => (work(out), NONE),
                Written::Residual(residual) => (NONE, work(residual)),
            };
            let row_scales = row_scales(schedule, matrices, grid).unwrap_or(NONE);
            Wave { x: work(x), out, residual, weight: of(Role::Weight), row_scales, table: of(Role::Bias), ..none }
        }
        Action::Append { x, queries } => Wave {
            x: work(x),
            out: work(queries),
            norm_weight: of(Role::QNormWeight),
            norm_bias: of(Role::KNormWeight),
            table: of(Role::Rope),
            k_cache: of(Role::AppendK),
            v_cache: of(Role::AppendV),
            ..none
        },
        Action::Attend { queries, out, .. } => {
            Wave { x: work(queries), out: work(out), k_cache: of(Role::HistoryK), v_cache: of(Role::HistoryV), ..none }
        }
    }
}

fn norm_places(norm: Option<NormOf>) -> (Option<BufferId>, Option<BufferId>) {
    norm.map_or((None, None), |norm| (norm.weight, norm.bias))
}
