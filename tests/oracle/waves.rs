//! Wave kernels of the population: plans that are derived from small models of every kind, and broken in named ways. The proof of plans judges
//! them, and [`crate::executor`], which executes them and shares no code with that proof.
//!
//! A plan is wrong if it leaves other keys, values or states than its model, decides other tokens, or means nothing: then the executor panics, for
//! example where a wave names a column that its buffer does not have. Numbers that decide only what fits a device do not change what it computes.

use super::bases::of;
use super::explore::Rng;
use super::hybrids::{Widths, with_deltas};
use super::population::{Count, Outcome};
use crate::executor::{Executor, First, Row, Rows, TOLERANCE, cached_by, difference};
use crate::proof_support::{BF16, MIXTURE, Mixture, TOY, Toy};
use monobloc::candidate::Candidate;
use monobloc::defaults::rows::{Room, place_rows};
use monobloc::dtype::DType;
use monobloc::ir::op::Op;
use monobloc::ir::program::Program;
use monobloc::ir::{BufferId, GridId};
use monobloc::model::config::Imported;
use monobloc::model::graph::QkNormSpan;
use monobloc::model::weights::Weights;
use monobloc::reference::{Session, argmax};
use monobloc::target::Target;
use monobloc::validate::{Entity, Rule, Validated, Violation, validate};
use monobloc::waves::{
    Action, Form, Input, Layout, NormOf, Over, Plan, Share, Slots, Splits, Sum, Sums, Target as Written, WorkId,
    derive, derive_split, prove, prove_tail,
};
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

/// Mutants of one base: a base costs more than a mutant.
const MUTANTS: usize = 32;

/// Steps that a plan of steps decodes after its text.
const DECODED: usize = 2;

/// Bytes of activations that the executor has room for.
const ARENA_MAX: u64 = 64 << 20;

/// A proven plan, its model, and what the model leaves of a text.
pub struct Base {
    name: String,
    imported: Imported,
    validated: Validated,
    target: Target,
    plan: Plan,
    /// For a tail: the plan of chunks before it, and where its residual begins.
    chunk: Option<(Plan, u64)>,
    text: Vec<u32>,
    cached: Vec<[Rows; 2]>,
    /// The token that follows each position, of the text and of what is decoded after it.
    decided: Vec<u32>,
}

thread_local! {
    /// Whether a panic of this thread is a verdict.
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Nothing is printed about panics that are verdicts.
fn silent_once() {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !EXPECTED.get() {
                before(info);
            }
        }));
    });
}

/// What a mutation has touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touched {
    Machine,
    Wave(usize),
    Work(WorkId),
    Division(usize),
}

type Mutate = fn(&mut Plan, &Program, &mut Rng) -> Option<Vec<Touched>>;

const PAIR: &str = "pair of blocks";
const EXPERTS: &str = "places of experts";
const STATES: &str = "states of a wave kernel";
const FACTOR: &str = "factor of a sum";

/// The ways to break a plan.
const CLASSES: &[(&str, Mutate)] = &[
    ("meeting or none", meeting),
    ("waves in another order", order),
    ("wave of another grid", other_grid),
    ("activations of another wave", other_work),
    ("place of activations", place),
    ("layout of activations", layout),
    ("share", share),
    ("share of another SM", other_sm),
    (PAIR, pair),
    ("parts of a division", parts),
    ("norm of a wave", norm),
    (FACTOR, factor),
    ("declared order of sums", sums),
    ("how a product is multiplied", product),
    (EXPERTS, experts),
    (STATES, states),
    ("KV splits", splits),
    ("machine of a wave kernel", machine),
    // Again, because few bases have these.
    (PAIR, pair),
    (EXPERTS, experts),
    (STATES, states),
    (FACTOR, factor),
    (PAIR, pair),
    (EXPERTS, experts),
    (STATES, states),
];

/// What a base has that others may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Dense,
    /// Products in pairs of blocks, or blocks that share weights.
    Pairs,
    Experts,
    /// Gated delta nets.
    Nets,
    /// KV splits.
    Splits,
}

const KINDS: [Kind; 5] = [Kind::Dense, Kind::Pairs, Kind::Experts, Kind::Nets, Kind::Splits];

fn model(random: &mut Rng, kind: Kind) -> Toy {
    let kv_heads = of(random, &[1, 1, 2]);
    let parallel = kind == Kind::Dense && random.below(4) == 0;
    let experts = kind == Kind::Experts;
    Toy {
        layers: if kind == Kind::Nets { 2 } else { of(random, &[1, 2]) },
        // Units of two parts of k on twelve SMs.
        hidden: if kind == Kind::Pairs { 128 } else { of(random, &[64, 72, 128]) },
        heads: kv_heads * of(random, &[1, 2, 3]),
        kv_heads,
        dim: 64,
        intermediate: if experts { of(random, &[32, 96]) } else { of(random, &[36, 64]) },
        vocab: of(random, &[72, 100]),
        context: 256,
        gated: experts || random.below(2) == 0,
        bias: random.below(2) == 0,
        parallel,
        post_norms: !parallel && random.below(3) == 0,
        qk_norm: of(random, &[None, None, Some(QkNormSpan::Head)]),
        window: if kind == Kind::Splits { None } else { of(random, &[None, None, Some(9)]) },
        rope: random.below(4) > 0,
        mixture: experts.then(|| Mixture { shared: of(random, &[None, Some(false), Some(true)]), ..MIXTURE }),
        ..TOY
    }
}

/// A model on a few SMs of an H200, and a plan of any form that it can have; `None` if it has none.
fn base(random: &mut Rng, kind: Kind) -> Option<Base> {
    let toy = model(random, kind);
    let mut graph = toy.graph();
    if kind == Kind::Nets {
        with_deltas(random, &mut graph, Widths { keys: [16, 16, 32], values: [16, 32, 32] });
    }
    let mut target = Target::builtin("h200")?;
    target.spec.sm_count = if kind == Kind::Pairs { 12 } else { of(random, &[2, 3, 4, 6, 12]) };
    let candidate = Candidate::default_for(&graph, &target, BF16);
    let room = Room { rows: 8, sequences: 8, positions: 2048 };
    let placed = place_rows(&graph, "waves", BF16, toy.context, &target, &candidate, room).ok()?;
    let validated = validate(placed, &target).unwrap_or_else(|rejected| panic!("{rejected}"));
    let schedule = validated.schedule();
    let plan = match (kind, random.below(3)) {
        (Kind::Splits, _) => derive_split(schedule, &target, 64, 64),
        (Kind::Pairs, 0) => derive(schedule, &target, Form::Chunk, 256),
        (_, 0) => derive(schedule, &target, Form::Chunk, of(random, &[128, 256])),
        (_, 1) => derive(schedule, &target, Form::Tail, 16),
        _ => derive(schedule, &target, Form::Steps, of(random, &[16, 32, 64, 128])),
    };
    let plan = plan.ok()?;
    let chunk = match plan.form {
        Form::Tail => {
            let chunk = derive(schedule, &target, Form::Chunk, 128).ok()?;
            let proven = prove(chunk.clone(), &validated, &target).ok()?;
            let both = prove_tail(plan.clone(), proven, &target);
            let both = both.unwrap_or_else(|violations| panic!("a tail of {toy:?}: {violations:?}"));
            Some((chunk, both.taken()))
        }
        _ => None,
    };
    // Two blocks of rows, histories of two splits, or a few rows.
    let count = match (plan.form, kind) {
        (Form::Chunk, Kind::Pairs) => 134,
        (Form::Steps, Kind::Splits) => 70,
        _ => 5 + random.below(8) as u32,
    };
    let text = (0..count).map(|i| (i * i * 7 + i * 13 + 5) % toy.vocab).collect();
    let weights = Weights::synthetic(&graph, 1 + random.below(1000) as u64);
    let imported = Imported { graph, weights, header_bytes_read: 0, config_text: String::new(), notes: vec![] };
    let name = format!("{:?} of {} rows on {} SMs, {toy:?}", plan.form, plan.rows, target.spec.sm_count);
    let (cached, decided) = (vec![], vec![]);
    Some(with_model(Base { name, imported, validated, target, plan, chunk, text, cached, decided }))
}

/// Adds what the reference says of the text.
fn with_model(mut base: Base) -> Base {
    let mut session = Session::new(&base.imported.graph, &base.imported.weights);
    let mut decided: Vec<u32> = base.text.iter().map(|&token| argmax(&session.step(token))).collect();
    if base.plan.form == Form::Steps {
        for _ in 0..DECODED {
            let last = *decided.last().expect("a text");
            decided.push(argmax(&session.step(last)));
        }
    }
    base.cached = cached_by(&session, &base.imported.graph);
    base.decided = decided;
    base
}

impl Base {
    /// What goes wrong if the plan runs the text; an executor that panics says that the plan means nothing.
    fn runs(&self, plan: &Plan, seed: u64) -> Result<(), String> {
        let sane = plan.rows <= 4 * self.plan.rows
            && plan.work_bytes() <= ARENA_MAX
            && plan.machine.sms <= 64
            && plan.waves.len() <= 4 * self.plan.waves.len();
        if !sane {
            return Err("numbers without a meaning".to_string());
        }
        silent_once();
        EXPECTED.set(true);
        let ran = catch_unwind(AssertUnwindSafe(|| self.computes(plan, seed)));
        EXPECTED.set(false);
        ran.unwrap_or_else(|_| Err("means nothing".to_string()))
    }

    fn computes(&self, plan: &Plan, seed: u64) -> Result<(), String> {
        let program = &self.validated.schedule().program;
        let positions = self.text.len() + if self.plan.form == Form::Steps { DECODED } else { 0 };
        let first = self.chunk.as_ref().map_or(plan, |(chunk, _)| chunk);
        let mut executor = Executor::new(program, &self.imported, first, &[positions], seed);
        let row = |position: usize| Row { sequence: 0, position, first: First::Given(self.text[position]) };
        let most = if self.plan.form == Form::Steps { self.plan.rows as usize } else { self.text.len() };
        // One row, then the rest, in as many launches as it takes.
        let (mut begin, mut launched) = (0, vec![]);
        while begin < self.text.len() {
            let end = if begin == 0 { 1 } else { self.text.len().min(begin + most.min(130)) };
            launched = executor.launch(&(begin..end).map(row).collect::<Vec<_>>(), 1);
            if end == self.text.len() {
                break;
            }
            begin = end;
        }
        let decided: Vec<Option<u32>> = self.decided.iter().map(|token| Some(*token)).collect();
        let last = self.text.len() - 1;
        let said = match (&self.chunk, self.plan.form) {
            (Some((_, taken)), _) => {
                let of = |position: usize| Row { sequence: 0, position, first: First::Decided(position - begin) };
                let rows: Vec<Row> = (begin.max(last.saturating_sub(2))..=last).map(of).collect();
                let found = executor.end(plan, *taken, &rows);
                rows.iter().zip(found).all(|(row, token)| token == decided[row.position])
            }
            (None, Form::Steps) => {
                let now = launched.last().is_some_and(|of| of.last() == Some(&decided[last]));
                let next = Row { sequence: 0, position: last + 1, first: First::Decided(last - begin) };
                let then: Vec<Option<u32>> = executor.launch(&[next], DECODED).into_iter().map(|of| of[0]).collect();
                now && then == decided[last..]
            }
            (None, _) => true,
        };
        if !said {
            return Err("decides other tokens".to_string());
        }
        let by = difference(&self.cached, &executor.cached(0));
        if by < TOLERANCE { Ok(()) } else { Err(format!("differs by {by:e}")) }
    }

    fn judged(&self, plan: &Plan) -> Vec<Violation> {
        let judged = match &self.chunk {
            None => prove(plan.clone(), &self.validated, &self.target).map(drop),
            Some((chunk, _)) => {
                let chunk = prove(chunk.clone(), &self.validated, &self.target).expect("a proven plan of chunks");
                prove_tail(plan.clone(), chunk, &self.target).map(drop)
            }
        };
        judged.err().unwrap_or_default()
    }
}

/// Judges as many plans, of all kinds of bases in turn.
pub fn judge_waves(outcome: &mut Outcome, plans: usize, random: &mut Rng) {
    let (mut judged, mut nth, mut kind, mut draws) = (0, 0, random.below(KINDS.len()), 0);
    while judged < plans {
        draws += 1;
        assert!(draws < 1000 + 100 * plans, "models have no plans");
        let Some(base) = base(random, KINDS[kind % KINDS.len()]) else { continue };
        kind += 1;
        one(outcome, "wave kernel, derived", &base, &base.plan, None, nth as u64);
        judged += 1;
        let end = plans.min(judged + MUTANTS);
        for _ in 0..4 * MUTANTS {
            if judged == end {
                break;
            }
            let (class, mutate) = CLASSES[nth % CLASSES.len()];
            nth += 1;
            let mut plan = base.plan.clone();
            let touched = mutate(&mut plan, &base.validated.schedule().program, random);
            // Many of the changes that are drawn change nothing here.
            let Some(touched) = touched.filter(|_| plan != base.plan) else { continue };
            one(outcome, &format!("wave kernel, {class}"), &base, &plan, Some(&touched), nth as u64);
            judged += 1;
        }
    }
}

fn one(outcome: &mut Outcome, class: &str, base: &Base, plan: &Plan, touched: Option<&[Touched]>, seed: u64) {
    let violations = base.judged(plan);
    let wrong = base.runs(plan, seed).err();
    let accepted = violations.is_empty();
    let only_machine = !accepted && violations.iter().all(|violation| violation.rule == Rule::Machine);
    let found = Count {
        judged: 1,
        unsafe_: usize::from(wrong.is_some()),
        rejected: usize::from(!accepted),
        false_accepts: usize::from(accepted && wrong.is_some()),
        kernels: usize::from(only_machine && wrong.is_none()),
        stricter: usize::from(!accepted && !only_machine && wrong.is_none()),
        unnamed: usize::from(
            !accepted && touched.is_some_and(|of| !violations.iter().any(|v| names(v, of, plan, &base.plan))),
        ),
        exhaustive: 0,
    };
    if found.false_accepts + found.unnamed > 0 || touched.is_none() && !accepted {
        let what =
            violations.first().map_or_else(|| format!("accepted, and {wrong:?}"), |first| format!("says {first}"));
        outcome.tell(format!("{class}, {}: {what}; touched {touched:?}\n{plan:?}", base.name));
    }
    outcome.count(class, &found);
}

/// Whether a violation is about what was touched. It names a grid by the first of its waves: a wave of this grid, or next to it, was touched, or
/// activations or a division that one of its waves has. A violation without a wave is about the machine, the activations or the divisions.
fn names(violation: &Violation, touched: &[Touched], plan: &Plan, was: &Plan) -> bool {
    let Entity::Wave(w) = violation.entity else { return true };
    let (w, Some(wave)) = (w as usize, plan.waves.get(w as usize)) else { return true };
    let of_grid = || plan.waves.iter().filter(|other| other.grid == wave.grid);
    let accesses = |id: WorkId| {
        of_grid().any(|wave| {
            let (reads, writes) = wave.action.accesses();
            reads.contains(&id) || writes.contains(&id)
        })
    };
    touched.iter().any(|of| match *of {
        Touched::Machine => true,
        Touched::Wave(at) => {
            let same = |plan: &Plan| plan.waves.get(at).is_some_and(|touched| touched.grid == wave.grid);
            at.abs_diff(w) <= 1 || same(plan) || same(was)
        }
        Touched::Work(id) => accesses(id),
        Touched::Division(d) => of_grid().any(|wave| wave.division.index() == d),
    })
}

fn a_wave(plan: &Plan, random: &mut Rng, wanted: impl Fn(&Action) -> bool) -> Option<usize> {
    let all: Vec<usize> = (0..plan.waves.len()).filter(|w| wanted(&plan.waves[*w].action)).collect();
    (!all.is_empty()).then(|| all[random.below(all.len())])
}

/// A wave meets the one before it, or does not.
fn meeting(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let w = random.below(plan.waves.len());
    plan.waves[w].meets = !plan.waves[w].meets;
    Some(vec![Touched::Wave(w), Touched::Wave(w.saturating_sub(1)), Touched::Wave(w + 1)])
}

fn order(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let w = random.below(plan.waves.len());
    let mut touched: Vec<Touched> = (w.saturating_sub(1)..w + 3).map(Touched::Wave).collect();
    match random.below(3) {
        0 if w + 1 < plan.waves.len() => plan.waves.swap(w, w + 1),
        1 => plan.waves.insert(w, plan.waves[w].clone()),
        _ => {
            // What it wrote is missing wherever it is read.
            let wave = plan.waves.remove(w);
            touched.extend(wave.action.accesses().1.into_iter().map(Touched::Work));
            // Later waves are those of grids that seem to come too early; and the last one leaves what is read after the launch.
            touched.push(Touched::Wave(plan.waves.len().saturating_sub(1)));
        }
    }
    Some(touched)
}

fn other_grid(plan: &mut Plan, program: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let w = random.below(plan.waves.len());
    let was = plan.waves[w].grid;
    let kind = std::mem::discriminant(&program.grids[was.index()].op);
    let same = |g: &usize| std::mem::discriminant(&program.grids[*g].op) == kind && *g != was.index();
    let all: Vec<usize> = (0..program.grids.len()).filter(same).collect();
    let other = *all.get(random.below(all.len()))?;
    plan.waves[w].grid = GridId::from(other);
    Some(vec![Touched::Wave(w), Touched::Wave(w + 1)])
}

/// The buffers that an action names.
pub fn works(action: &mut Action) -> Vec<&mut WorkId> {
    match action {
        Action::Rows { residual, sum, out } => {
            let added = match sum {
                Some(Sum::Branch { branch, .. }) => vec![branch],
                Some(Sum::Slots(slots)) => of_slots(slots),
                Some(Sum::Embed { best, .. }) => best.iter_mut().collect(),
                Some(Sum::Taken) | None => vec![],
            };
            let written =
                out.iter_mut().flat_map(|out| [&mut out.to].into_iter().chain(&mut out.squares).chain(&mut out.rows));
            [residual].into_iter().chain(added).chain(written).collect()
        }
        Action::MatMul { x, squares, target, then, .. } => {
            let written = then.iter_mut().flat_map(|then| [&mut then.to].into_iter().chain(&mut then.squares));
            [x].into_iter().chain(written_by(target)).chain(squares).chain(written).collect()
        }
        Action::NormHeads { x, out } | Action::ShortConv { x, out } => vec![x, out],
        Action::Append { x, queries } => vec![x, queries],
        Action::Attend { queries, out, gate, .. } => [queries, out].into_iter().chain(gate).collect(),
        Action::AttendRow { x, out, splits, .. } => {
            [x, out].into_iter().chain(splits.as_mut().map(|splits| &mut splits.left)).collect()
        }
        Action::Merge { out, splits, gate } => [out, &mut splits.left].into_iter().chain(gate).collect(),
        Action::Scores { x, out } => vec![x, out],
        Action::Route { scores, choices, shares } => vec![scores, choices, shares],
        Action::Gather { x, choices, groups, places, out } => vec![x, choices, groups, places, out],
        Action::Places { choices, groups, places, sources } => vec![choices, groups, places, sources],
        Action::Fill { x, groups, sources, out } => vec![x, groups, sources, out],
        Action::Experts { x, groups, out, .. } => vec![x, groups, out],
        Action::Combine { slots, out } => of_slots(slots).into_iter().chain([out]).collect(),
        Action::Convolve { x, scalars, out } | Action::MixRow { x, scalars, out } => vec![x, scalars, out],
        Action::Mix { turned, x, out } => vec![turned, x, out],
        Action::Gated { mixed, x, out } => vec![mixed, x, out],
    }
}

fn of_slots(Slots { x, places, shares, shared, gate }: &mut Slots) -> Vec<&mut WorkId> {
    [x, places, shares].into_iter().chain(shared).chain(gate).collect()
}

/// The sum over slots that a wave takes.
fn slots_of(action: &mut Action) -> Option<&mut Slots> {
    match action {
        Action::Rows { sum: Some(Sum::Slots(slots)), .. } | Action::Combine { slots, .. } => Some(slots),
        _ => None,
    }
}

fn written_by(target: &mut Written) -> Vec<&mut WorkId> {
    match target {
        Written::Out(id) | Written::Residual(id) | Written::Best(id) => vec![id],
        Written::Sums { branch, residual, .. } => branch.iter_mut().chain([residual]).collect(),
    }
}

fn other_work(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let w = random.below(plan.waves.len());
    let shapes: Vec<(Layout, u32)> = plan.work.iter().map(|work| (work.layout, work.cols)).collect();
    let mut ids = works(&mut plan.waves[w].action);
    let at = random.below(ids.len());
    let was = *ids[at];
    let alike = random.below(2) == 0;
    let fits = |n: &usize| *n != was.index() && (!alike || shapes[*n] == shapes[was.index()]);
    let all: Vec<usize> = (0..shapes.len()).filter(fits).collect();
    let other = WorkId::from(*all.get(random.below(all.len()))?);
    *ids[at] = other;
    Some(vec![Touched::Wave(w), Touched::Work(was), Touched::Work(other)])
}

fn place(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let (a, b) = (random.below(plan.work.len()), random.below(plan.work.len()));
    let (was, other) = (plan.work[a].place, plan.work[b].place);
    plan.work[a].place = match random.below(4) {
        0 => was + 2,
        1 => was.checked_sub(256)?,
        2 => plan.work_bytes() + 256,
        _ => other,
    };
    Some([a, b].map(|n| Touched::Work(WorkId::from(n))).to_vec())
}

fn layout(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let (a, b) = (random.below(plan.work.len()), random.below(plan.work.len()));
    let other = plan.work[b].layout;
    let work = &mut plan.work[a];
    match random.below(4) {
        0 => work.cols = work.cols.checked_sub(2)?,
        1 => work.cols += 2,
        2 => work.layout = Layout::Rows(of(random, &[DType::F32, DType::Bf16])),
        _ => work.layout = other,
    }
    Some(vec![Touched::Work(WorkId::from(a))])
}

/// A division, for a number of blocks that launches of the text have, and an SM with a share.
fn a_share(plan: &Plan, random: &mut Rng, over: impl Fn(Over) -> bool) -> Option<(usize, usize, usize, usize)> {
    let all: Vec<usize> = (0..plan.divisions.len()).filter(|d| over(plan.divisions[*d].over)).collect();
    let d = *all.get(random.below(all.len()))?;
    let blocks = random.below(plan.divisions[d].shares.len());
    let sms = plan.divisions[d].shares[blocks].iter().enumerate().filter(|(_, shares)| !shares.is_empty());
    let sms: Vec<usize> = sms.map(|(sm, _)| sm).collect();
    let sm = *sms.get(random.below(sms.len()))?;
    Some((d, blocks, sm, random.below(plan.divisions[d].shares[blocks][sm].len())))
}

fn share(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let (d, blocks, sm, at) = a_share(plan, random, |_| true)?;
    let shares = &mut plan.divisions[d].shares[blocks][sm];
    let Share { row, rows, lo, hi } = &mut shares[at];
    match random.below(8) {
        0 => *lo += 1,
        1 => *hi += 1,
        2 => *hi = hi.checked_sub(1)?,
        3 => *row += 1,
        4 => *rows = rows.checked_sub(1)?,
        5 => *rows += 1,
        6 => drop(shares.remove(at)),
        _ => {
            let again = shares[at];
            shares.push(again);
        }
    }
    Some(vec![Touched::Division(d)])
}

fn other_sm(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let (d, blocks, from, at) = a_share(plan, random, |_| true)?;
    let sms = &mut plan.divisions[d].shares[blocks];
    let to = random.below(sms.len());
    match random.below(3) {
        0 => sms.swap(from, to),
        1 => {
            let moved = sms[from].remove(at);
            sms[to].push(moved);
        }
        // A share of rows in two halves, the second one first.
        _ => {
            let Share { row, rows, lo, hi } = sms[from][at];
            let half = rows / 2;
            if half == 0 {
                return None;
            }
            sms[from][at] = Share { row: row + half, rows: rows - half, lo, hi };
            sms[to].push(Share { row, rows: half, lo, hi });
        }
    }
    Some(vec![Touched::Division(d)])
}

/// Two parts of k that are not those of a pair of blocks, or no pairs.
fn pair(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    if !plan.machine.pairs {
        return None;
    }
    let shares_weights = plan.form == Form::Chunk;
    if random.below(6) == 0 {
        plan.machine.pairs = false;
        return Some(vec![Touched::Machine]);
    }
    let wanted = |over| match over {
        Over::Units { parts, .. } => shares_weights || parts > 1,
        _ => false,
    };
    let (d, blocks, sm, _) = a_share(plan, random, wanted)?;
    let sms = &mut plan.divisions[d].shares[blocks];
    let other = random.below(sms.len());
    match random.below(4) {
        // The two parts of a pair, or of all pairs.
        0 => sms.swap(sm, sm ^ 1),
        1 => sms.chunks_mut(2).for_each(|pair| pair.reverse()),
        // Other units than the peer has.
        2 => sms.swap(sm, other / 2 * 2 + sm % 2),
        // Both parts in one block.
        _ => {
            let of_peer = std::mem::take(&mut sms[sm ^ 1]);
            sms[sm].extend(of_peer);
        }
    }
    Some(vec![Touched::Division(d)])
}

fn parts(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let d = random.below(plan.divisions.len());
    let k = random.below(3);
    let other = |n: u32| [n + 1, n.saturating_sub(1), 2 * n][k];
    plan.divisions[d].over = match plan.divisions[d].over {
        Over::Rows { parts } => Over::Rows { parts: other(parts) },
        Over::Sums { parts } => Over::Sums { parts: other(parts) },
        Over::Units { n, parts, step } => match random.below(3) {
            0 => Over::Units { n: other(n), parts, step },
            1 => Over::Units { n, parts: other(parts), step },
            _ => Over::Units { n, parts, step: other(step) },
        },
        Over::Heads { n, rows, kept } if random.below(2) == 0 => Over::Heads { n: other(n), rows, kept },
        Over::Heads { n, rows, kept } => Over::Heads { n, rows: other(rows), kept },
        Over::Items { parts, tiling } => Over::Items { parts: other(parts), tiling },
        Over::States { n } => Over::States { n: other(n) },
    };
    Some(vec![Touched::Division(d)])
}

/// The inputs of products that a wave leaves.
fn inputs(action: &mut Action) -> Option<&mut Input> {
    match action {
        Action::Rows { out, .. } => out.as_mut(),
        Action::MatMul { then, .. } => then.as_mut(),
        _ => None,
    }
}

fn norm(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let w =
        a_wave(plan, random, |action| matches!(action, Action::Rows { .. } | Action::MatMul { then: Some(_), .. }))?;
    let branch = random.below(2) == 0;
    let norm = match &mut plan.waves[w].action {
        Action::Rows { sum: Some(Sum::Branch { norm: Some(norm), .. }), .. } if branch => norm,
        action => inputs(action)?.norm.as_mut()?,
    };
    let NormOf { norm: attr, weight, bias } = norm;
    match random.below(4) {
        0 => attr.eps *= 2.0,
        1 => *weight = None,
        2 => *weight = weight.map(|id| BufferId(id.0 + 1)),
        _ => *bias = if bias.is_some() { None } else { *weight },
    }
    // The wave that reads it finds another input.
    Some((w..plan.waves.len()).map(Touched::Wave).collect())
}

fn factor(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let w = a_wave(plan, random, |action| matches!(action, Action::Rows { .. } | Action::MatMul { .. }))?;
    match &mut plan.waves[w].action {
        Action::Rows { sum, out, .. } => match (sum, out, random.below(3)) {
            (Some(Sum::Branch { scale, .. } | Sum::Embed { scale, .. }), _, 0) => *scale *= 2.0,
            (Some(Sum::Embed { best, .. }), _, 1) => *best = None,
            (sum @ Some(Sum::Branch { .. } | Sum::Slots(_)), _, 1) => *sum = None,
            (_, Some(out), _) => out.squares = None,
            (_, out, _) => *out = None,
        },
        Action::MatMul { squares, then, .. } => match random.below(2) {
            0 => *squares = None,
            _ => *then = None,
        },
        _ => return None,
    }
    Some((w..plan.waves.len()).map(Touched::Wave).collect())
}

fn sums(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let (w, other) = (random.below(plan.waves.len()), random.below(plan.waves.len()));
    let declared = plan.waves[other].sums;
    let sums = &mut plan.waves[w].sums;
    match (sums, random.below(3)) {
        (Sums::Product { groups, .. }, 0) => *groups += 1,
        (Sums::Product { granules, .. }, 1) => *granules += 1,
        (Sums::History { tile, .. }, 0) => *tile += 16,
        (Sums::Row { parts }, 0) => *parts += 1,
        (sums, _) => *sums = declared,
    }
    Some(vec![Touched::Wave(w)])
}

fn product(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let w = a_wave(plan, random, |action| matches!(action, Action::MatMul { .. }))?;
    let Action::MatMul { pass, chunk, warps, tiles, held, .. } = &mut plan.waves[w].action else { return None };
    match random.below(6) {
        0 => *pass = of(random, &[0, 1, *pass + 1, 2 * *pass]),
        1 => *chunk = of(random, &[0, 1, *chunk + 1, 2 * *chunk]),
        2 => warps.units = of(random, &[0, 1, 2, 2 * warps.units]),
        3 => warps.k = of(random, &[0, 2, 3, 8]),
        4 => *tiles = !*tiles,
        _ => *held = of(random, &[0, 1, 4, 64]),
    }
    Some(vec![Touched::Wave(w)])
}

/// Slots of experts that have no place or that of another one, a choice of another layer, and room for fewer tiles.
fn experts(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let of_experts = |action: &Action| {
        matches!(
            action,
            Action::Route { .. }
                | Action::Gather { .. }
                | Action::Places { .. }
                | Action::Fill { .. }
                | Action::Experts { .. }
                | Action::Combine { .. }
                | Action::Rows { sum: Some(Sum::Slots(_)), .. }
        )
    };
    let w = a_wave(plan, random, of_experts)?;
    let mut touched = vec![Touched::Wave(w)];
    touched.extend(works(&mut plan.waves[w].action).into_iter().map(|id| Touched::Work(*id)));
    match random.below(4) {
        0 => {
            let mut ids = works(&mut plan.waves[w].action);
            let (a, b) = (random.below(ids.len()), random.below(ids.len()));
            (*ids[a], *ids[b]) = (*ids[b], *ids[a]);
        }
        1 => {
            let mut tilings = plan.work.iter_mut().enumerate().filter_map(|(n, work)| match &mut work.layout {
                Layout::Groups(tiling) | Layout::Sources(tiling) | Layout::Grouped(tiling) | Layout::Placed(tiling) => {
                    Some((n, tiling))
                }
                _ => None,
            });
            let (n, tiling) = tilings.nth(random.below(3))?;
            touched.push(Touched::Work(WorkId::from(n)));
            match random.below(3) {
                0 => tiling.most = tiling.most.checked_sub(1)?,
                1 => tiling.most = 1,
                _ => tiling.rows *= 2,
            }
        }
        2 => match &mut plan.waves[w].action {
            Action::Experts { pass, chunk, .. } => {
                if random.below(2) == 0 {
                    *pass += 1;
                } else {
                    *chunk *= 2;
                }
            }
            action => {
                let Slots { shared, gate, .. } = slots_of(action)?;
                if gate.is_some() && random.below(2) == 0 {
                    *gate = None;
                } else {
                    shared.take()?;
                }
            }
        },
        // An expert twice, or never.
        _ => {
            if random.below(2) == 0 {
                let wave = plan.waves[w].clone();
                plan.waves.insert(w, wave);
            } else {
                plan.waves.remove(w);
            }
            touched.extend((w..plan.waves.len()).map(Touched::Wave));
        }
    }
    Some(touched)
}

/// States that are brought on twice, never, too early, or on another SM; or columns that are no groups of them.
fn states(plan: &mut Plan, program: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let w = a_wave(plan, random, |action| {
        matches!(action, Action::Mix { .. } | Action::MixRow { .. } | Action::Convolve { .. } | Action::Gated { .. })
    })?;
    let d = plan.waves[w].division.index();
    let mut touched = vec![Touched::Wave(w), Touched::Division(d)];
    touched.extend(works(&mut plan.waves[w].action).into_iter().map(|id| Touched::Work(*id)));
    match random.below(6) {
        0 => {
            let wave = plan.waves[w].clone();
            plan.waves.insert(w, wave);
        }
        1 => drop(plan.waves.remove(w)),
        2 if w > 0 => plan.waves.swap(w, w - 1),
        3 => return other_grid(plan, program, random),
        4 => {
            let mut ids = works(&mut plan.waves[w].action);
            let (a, b) = (random.below(ids.len()), random.below(ids.len()));
            (*ids[a], *ids[b]) = (*ids[b], *ids[a]);
        }
        _ => {
            let Over::States { n } = plan.divisions[d].over else { return None };
            let shares = &mut plan.divisions[d].shares[0];
            if random.below(2) == 0 {
                plan.divisions[d].over = Over::States { n: if random.below(2) == 0 { 2 * n } else { n / 2 } };
            } else {
                let (a, b) = (random.below(shares.len()), random.below(shares.len()));
                let moved = shares[a].pop()?;
                shares[b].extend([moved, moved]);
            }
        }
    }
    touched.extend((w.saturating_sub(1)..plan.waves.len()).map(Touched::Wave));
    Some(touched)
}

fn splits(plan: &mut Plan, _: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let w = a_wave(plan, random, |action| {
        matches!(action, Action::Merge { .. } | Action::AttendRow { .. } | Action::Attend { .. })
    })?;
    let touched = vec![Touched::Wave(w), Touched::Wave(w + 1), Touched::Wave(w.saturating_sub(1))];
    let k = random.below(4);
    match &mut plan.waves[w].action {
        Action::Attend { tile, .. } | Action::AttendRow { tile, splits: None, .. } => {
            *tile = [0, *tile / 2, *tile + 16, 2 * *tile][k];
        }
        Action::AttendRow { splits, .. } if k == 0 => *splits = None,
        Action::AttendRow { splits: Some(Splits { positions, most, .. }), .. }
        | Action::Merge { splits: Splits { positions, most, .. }, .. } => match k {
            0 | 1 => *positions = [*positions / 2, 2 * *positions][random.below(2)],
            2 => *positions += 16,
            _ => *most = [1, most.saturating_sub(1), *most + 1][random.below(3)],
        },
        _ => return None,
    }
    Some(touched)
}

fn machine(plan: &mut Plan, program: &Program, random: &mut Rng) -> Option<Vec<Touched>> {
    let has_state = program.grids.iter().any(|grid| matches!(grid.op, Op::Mix(_)));
    let (rows, m) = (plan.rows, &mut plan.machine);
    match random.below(11) {
        0 => m.sms = [0, m.sms - 1, m.sms + 1][random.below(3)],
        1 => m.warps = [0, 4, 16][random.below(3)],
        2 => m.loader_warps = [0, 1, 8][random.below(3)],
        3 => m.registers = [24, 248, 256][random.below(3)],
        4 => m.loader_registers = [0, 24, 248][random.below(3)],
        5 => m.weights.slots = [0, 1, m.weights.slots + 1, 64][random.below(4)],
        6 => m.inputs.slot_bytes = [0, m.inputs.slot_bytes / 2, 2 * m.inputs.slot_bytes][random.below(3)],
        7 => m.scratch_bytes = if has_state { 0 } else { [0, 64, m.scratch_bytes / 2][random.below(3)] },
        8 => m.state_bytes = [0, 64][random.below(2)],
        9 => plan.rows = [0, rows / 2, rows + 16, 2 * rows][random.below(4)],
        _ => plan.block_rows = [0, 8, plan.block_rows / 2, 2 * plan.block_rows][random.below(4)],
    }
    Some(vec![Touched::Machine])
}
