//! Judges many schedules with both judges, and counts the results by class of mutation.

use super::bases::{Base, medium, mixed, random_program, real, several, small};
use super::entries::disagreement;
use super::explore::{Effort, Rng, Verdict, judge};
use super::hybrids::{divided, fleet, hybrid, of_two_nets};
use super::mutate::{CLASSES, DEVICES, EXPERTS, OTHER_NET, PARTS, REUSED, SEVERAL, STATES, names};
use super::waves::judge_waves;
use monobloc::codegen::abi::encode;
use monobloc::ir::print::print;
use monobloc::model::graph::ModelGraph;
use monobloc::target::TargetKind;
use monobloc::validate::{Rule, check, validate};
use std::collections::BTreeMap;
use std::fmt::Write;

/// How many schedules of each kind to judge.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub real: usize,
    pub single: usize,
    pub double: usize,
    pub random: usize,
    /// Plans of wave kernels.
    pub waves: usize,
    pub seed: u64,
}

/// Results for the schedules of one class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    pub judged: usize,
    /// Found unsafe by the machine.
    pub unsafe_: usize,
    pub rejected: usize,
    /// Unsafe and accepted: must be none.
    pub false_accepts: usize,
    /// Rejected only for limits of today's kernels.
    pub kernels: usize,
    /// Rejected for other reasons although the machine found no fault: the proof asks for more than safety.
    pub stricter: usize,
    /// Rejections that name nothing that was touched: must be none.
    pub unnamed: usize,
    /// Accepted after every interleaving was walked.
    pub exhaustive: usize,
}

impl Count {
    fn add(&mut self, other: &Count) {
        self.judged += other.judged;
        self.unsafe_ += other.unsafe_;
        self.rejected += other.rejected;
        self.false_accepts += other.false_accepts;
        self.kernels += other.kernels;
        self.stricter += other.stricter;
        self.unnamed += other.unnamed;
        self.exhaustive += other.exhaustive;
    }
}

/// Counts by class, and descriptions of forbidden results.
#[derive(Debug, Default)]
pub struct Outcome {
    pub classes: BTreeMap<String, Count>,
    pub faults: Vec<String>,
}

/// Most descriptions that are kept; the counts have all.
const FAULTS_KEPT: usize = 40;

impl Outcome {
    pub fn total(&self) -> Count {
        let mut total = Count::default();
        self.classes.values().for_each(|c| total.add(c));
        total
    }

    /// Adds a result to its class.
    pub fn count(&mut self, class: &str, found: &Count) {
        self.classes.entry(class.to_string()).or_default().add(found);
    }

    /// Keeps the description of a forbidden result.
    pub fn tell(&mut self, what: String) {
        if self.faults.len() < FAULTS_KEPT {
            self.faults.push(what);
        }
    }

    pub fn merge(&mut self, other: Outcome) {
        for (class, count) in other.classes {
            self.classes.entry(class).or_default().add(&count);
        }
        self.faults.extend(other.faults);
        self.faults.truncate(FAULTS_KEPT);
    }

    pub fn table(&self) -> String {
        let mut text = "| class | judged | unsafe | rejected | false accepts | rejected, only beyond kernels | \
                        rejected, nothing found | unnamed | accepted, all interleavings |\n\
                        | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
            .to_string();
        let total = self.total();
        let rows = self.classes.iter().map(|(name, count)| (name.as_str(), count));
        for (name, c) in rows.chain([("all", &total)]) {
            let Count { judged, unsafe_, rejected, false_accepts, kernels, stricter, unnamed, exhaustive } = c;
            let _ = writeln!(
                text,
                "| {name} | {judged} | {unsafe_} | {rejected} | {false_accepts} | {kernels} | {stricter} | {unnamed} | \
                 {exhaustive} |"
            );
        }
        text
    }
}

/// The first difference between the queues of a proven schedule and the schedule.
fn said_otherwise(base: &Base) -> Option<String> {
    if base.target.kind != TargetKind::Cuda {
        return None;
    }
    let validated = validate(base.schedule.clone(), &base.target).ok()?;
    disagreement(&base.schedule, &encode(&validated))
}

/// Judges one schedule; `touched` is `None` for an unbroken one.
fn one(
    outcome: &mut Outcome,
    class: &str,
    base: &Base,
    touched: Option<&[monobloc::validate::Entity]>,
    may_explore: bool,
    seed: u64,
) {
    let Base { schedule, target, .. } = base;
    let violations = check(schedule, target);
    let accepted = violations.is_empty();
    let only_kernels = !accepted && violations.iter().all(|v| v.rule == Rule::Kernel);
    // Accepted schedules are attacked hardest.
    let believed = accepted || only_kernels;
    let states_max = match (may_explore, believed) {
        (false, _) => 0,
        (true, true) => 60_000,
        (true, false) => 5_000,
    };
    let (steps, walks) = (if may_explore { 3 } else { 4 }, if believed { 8 } else { 3 });
    let stores = match (may_explore, believed) {
        (true, true) => usize::MAX,
        (false, true) => 16,
        (_, false) => 2,
    };
    let effort = Effort { steps, states_max, walks, stores, seed };
    let verdict = judge(schedule, target, &effort);
    let count = outcome.classes.entry(class.to_string()).or_default();
    count.judged += 1;
    count.rejected += usize::from(!accepted);
    count.unsafe_ += usize::from(verdict.is_unsafe());
    count.exhaustive += usize::from(accepted && verdict == Verdict::Safe { exhaustive: true });
    count.kernels += usize::from(only_kernels && !verdict.is_unsafe());
    count.stricter += usize::from(!accepted && !only_kernels && !verdict.is_unsafe());
    let mut tell = |what: String| {
        if outcome.faults.len() < FAULTS_KEPT {
            outcome.faults.push(format!("{class}, {}: {what}\n{}", base.name, print(schedule)));
        }
    };
    if let Some(what) = accepted.then(|| said_otherwise(base)).flatten() {
        count.false_accepts += 1;
        tell(format!("accepted, and {what}; touched {touched:?}"));
    }
    if let (true, Verdict::Unsafe(fault)) = (accepted, &verdict) {
        count.false_accepts += 1;
        tell(format!("accepted, and {fault}; touched {touched:?}"));
    }
    if let Some(touched) = touched
        && !accepted
        && !violations.iter().any(|v| names(v, touched, schedule))
    {
        count.unnamed += 1;
        tell(format!("touched {touched:?}, and the proof names only {}", violations[0]));
    }
}

/// Judges a population. Real lowerings are those of random shapes and of `graphs`.
pub fn judge_population(size: &Size, graphs: &[(String, ModelGraph)]) -> Outcome {
    let mut outcome = Outcome::default();
    let mut random = Rng(size.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut reals = 0;
    while reals < size.real {
        let Some(base) = real(&mut random, graphs) else { continue };
        reals += 1;
        let violations = check(&base.schedule, &base.target);
        let count = outcome.classes.entry("real lowering".to_string()).or_default();
        count.judged += 1;
        if !violations.is_empty() {
            count.rejected += 1;
            outcome.faults.push(format!("real lowering of {} is rejected: {}", base.name, violations[0]));
        } else if let Some(what) = said_otherwise(&base) {
            count.false_accepts += 1;
            outcome.faults.push(format!("real lowering of {}: {what}", base.name));
        } else if base.schedule.task_count() < 1500 && reals % 8 == 0 {
            // The machine is slower than the proof: it runs a part of them.
            let effort = Effort { steps: 4, states_max: 0, walks: 2, stores: 8, seed: reals as u64 };
            if let Verdict::Unsafe(fault) = judge(&base.schedule, &base.target, &effort) {
                count.unsafe_ += 1;
                count.false_accepts += 1;
                outcome.faults.push(format!("real lowering of {}: {fault}", base.name));
            }
        }
    }
    for nth in 0..size.single + size.double {
        // With any number of classes, each has small bases and large ones.
        let kind = nth + nth / CLASSES.len();
        let (class, mutate) = CLASSES[nth % CLASSES.len()];
        let has_experts = EXPERTS.contains(&class);
        let (has_states, has_devices) = (STATES.contains(&class), DEVICES.contains(&class));
        let is_any = !has_experts && !has_states && !has_devices && !SEVERAL.contains(&class);
        let has_several = SEVERAL.contains(&class) || is_any && kind.is_multiple_of(5);
        let has_states = has_states || is_any && !has_several && kind.is_multiple_of(7);
        // Tables have many draws, so schedules of several rows run in random orders.
        let mut may_explore = !kind.is_multiple_of(3) && !has_several && !has_devices;
        let mut base = match (has_several, may_explore) {
            _ if has_experts => mixed(&mut random),
            _ if class == PARTS => divided(&mut random),
            _ if class == OTHER_NET => of_two_nets(&mut random),
            _ if has_states => hybrid(&mut random),
            _ if has_devices => fleet(&mut random),
            (true, _) => several(&mut random),
            (false, true) => small(&mut random),
            (false, false) => medium(&mut random),
        };
        may_explore &= base.schedule.program.rows == 1;
        // In a decoder every SM works between two arg-max pairs of any SM, so that one copy is enough.
        if class == REUSED && (nth / CLASSES.len()).is_multiple_of(2) {
            base = random_program(&mut random);
            if !check(&base.schedule, &base.target).is_empty() {
                continue;
            }
        }
        let Some(mut touched) = mutate(&mut base.schedule, &mut base.target, &mut random) else { continue };
        let double = nth >= size.single;
        if double {
            let (_, other) = CLASSES[random.below(CLASSES.len())];
            match other(&mut base.schedule, &mut base.target, &mut random) {
                Some(more) => touched.extend(more),
                None => continue,
            }
        }
        let class = if double { format!("two at once, {class}") } else { class.to_string() };
        one(&mut outcome, &class, &base, Some(&touched), may_explore, nth as u64 + 1);
    }
    for nth in 0..size.random {
        let base = random_program(&mut random);
        one(&mut outcome, "random program", &base, None, true, nth as u64 + 1);
    }
    judge_waves(&mut outcome, size.waves, &mut random);
    outcome
}
