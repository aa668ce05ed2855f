//! Tests the proof against a second judge for order, races and proxies. It makes a graph of every position of a text, closes it
//! transitively, and compares every pair of accesses. It shares no code with the proof, takes cubic time, and must agree on
//! thousands of random mutants.

use crate::proof_support::*;
use monobloc::candidate::Candidate;
use monobloc::ir::op::{Access, Op};
use monobloc::ir::program::{Rows, Space};
use monobloc::ir::schedule::{Mechanism, Regime, Schedule, Task};
use monobloc::ir::{BufferId, TaskId};
use monobloc::target::{CopyMechanism, Target};
use monobloc::validate::{Rule, check};

/// Sets of nodes as bits.
#[derive(Clone)]
struct Set(Vec<u64>);

impl Set {
    fn add(&mut self, node: usize) {
        self.0[node / 64] |= 1 << (node % 64);
    }

    fn has(&self, node: usize) -> bool {
        self.0[node / 64] >> (node % 64) & 1 == 1
    }

    fn join(&mut self, other: &Set) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }
}

struct Text<'a> {
    schedule: &'a Schedule,
    /// First node of each step.
    starts: Vec<usize>,
    /// Nodes known to be done when a node has waited, by any event, by events that order memory, and by the last fence.
    dependency: Vec<Set>,
    visibility: Vec<Set>,
    fenced: Vec<Set>,
}

impl<'a> Text<'a> {
    fn regime(schedule: &'a Schedule, step: usize) -> &'a Regime {
        schedule.regime_at(step as u32)
    }

    /// `None`: some task never runs.
    fn run(schedule: &'a Schedule) -> Option<Text<'a>> {
        let steps = schedule.program.context_max as usize;
        let mut starts = vec![0];
        for step in 0..steps {
            starts.push(starts[step] + Self::regime(schedule, step).tasks.len());
        }
        let nodes = starts[steps];
        let empty = Set(vec![0; nodes.div_ceil(64)]);
        let mut done: Vec<bool> = vec![false; nodes];
        let (mut dependency, mut visibility, mut fenced) =
            (vec![empty.clone(); nodes], vec![empty.clone(); nodes], vec![empty.clone(); nodes]);
        loop {
            let mut progress = false;
            for step in 0..steps {
                let regime = Self::regime(schedule, step);
                for (sm, queue) in regime.queues.iter().enumerate() {
                    for (pos, id) in queue.iter().enumerate() {
                        let node = starts[step] + id.index();
                        if done[node] {
                            continue;
                        }
                        let before = match pos {
                            0 if step == 0 => None,
                            0 => {
                                Self::regime(schedule, step - 1).queues[sm].last().map(|t| starts[step - 1] + t.index())
                            }
                            _ => Some(starts[step] + queue[pos - 1].index()),
                        };
                        if before.is_some_and(|b| !done[b]) {
                            break;
                        }
                        let task = &regime.tasks[id.index()];
                        let signallers = Self::signallers(schedule, step, task, &starts);
                        if signallers.iter().any(|(_, from)| from.iter().any(|&n| !done[n])) {
                            break;
                        }
                        let (mut dep, mut vis, mut fence) = (empty.clone(), empty.clone(), empty.clone());
                        for set in [(&mut dep, &dependency), (&mut vis, &visibility)] {
                            if let Some(b) = before {
                                set.0.join(&set.1[b]);
                                set.0.add(b);
                            }
                        }
                        if let Some(b) = before {
                            fence.join(&fenced[b]);
                        }
                        for (e, from) in signallers {
                            let event = &regime.events[e];
                            for n in from {
                                dep.join(&dependency[n]);
                                dep.add(n);
                                if event.mechanism != Mechanism::Packets {
                                    vis.join(&visibility[n]);
                                    vis.add(n);
                                }
                            }
                        }
                        // The loader fences after the handover from the first task.
                        if pos == 0 && task.waits.iter().any(|w| regime.events[w.event.index()].proxy) {
                            fence = vis.clone();
                        }
                        (dependency[node], visibility[node], fenced[node]) = (dep, vis, fence);
                        done[node] = true;
                        progress = true;
                    }
                }
            }
            if !progress {
                break;
            }
        }
        done.iter().all(|d| *d).then_some(Text { schedule, starts, dependency, visibility, fenced })
    }

    /// For each wait: the event's index, and the nodes that signal it.
    fn signallers(schedule: &'a Schedule, step: usize, task: &Task, starts: &[usize]) -> Vec<(usize, Vec<usize>)> {
        let regime = Self::regime(schedule, step);
        let mut all = vec![];
        for wait in &task.waits {
            let event = &regime.events[wait.event.index()];
            if event.carried && step == 0 {
                continue;
            }
            let at = if event.carried { step - 1 } else { step };
            let from = Self::regime(schedule, at);
            let same = |e: &monobloc::ir::EventId| {
                let other = &from.events[e.index()];
                (other.buffer, other.lo, other.hi, other.carried) == (event.buffer, event.lo, event.hi, event.carried)
            };
            let tasks = from.tasks.iter().enumerate().filter(|(_, t)| t.signals.iter().any(same));
            all.push((wait.event.index(), tasks.map(|(t, _)| starts[at] + t).collect()));
        }
        all
    }

    /// Accesses of a task to buffers of a space: buffer, columns, whether it writes, whether the loader does it.
    fn touches(&self, task: &Task, space: Space) -> Vec<(BufferId, u64, u64, bool, bool)> {
        let grid = &self.schedule.program.grids[task.grid.index()];
        let of_space = grid.operands.iter().filter(|o| self.schedule.program.buffers[o.buffer.index()].space == space);
        of_space
            .map(|o| {
                let (lo, hi) = o.cols.range(task.lo, task.hi, task.j);
                (o.buffer, lo, hi, o.access == Access::Write, o.rows == Rows::History)
            })
            .filter(|t| t.1 < t.2)
            .collect()
    }

    fn tasks(&self, step: usize) -> impl Iterator<Item = (usize, &'a Task)> {
        let start = self.starts[step];
        Self::regime(self.schedule, step).tasks.iter().enumerate().map(move |(t, task)| (start + t, task))
    }

    fn race_free(&self, target: &Target) -> bool {
        let steps = self.schedule.program.context_max as usize;
        let overlap = |a: &(BufferId, u64, u64, bool, bool), b: &(BufferId, u64, u64, bool, bool)| {
            a.0 == b.0 && a.1 < b.2 && b.1 < a.2
        };
        for s in 0..steps {
            for (w, task) in self.tasks(s) {
                for write in self.touches(task, Space::Exchange).iter().filter(|t| t.3) {
                    let phases = self.schedule.program.buffers[write.0.index()].phases as usize;
                    for q in (0..s).filter(|q| (s - q) % phases == 0) {
                        // Writers and readers of the old value in its step, and late readers in the next step.
                        for at in [q, q + 1] {
                            for (n, other) in self.tasks(at) {
                                let late = matches!(self.schedule.program.grids[other.grid.index()].op, Op::Select);
                                let concerned = |t: &(BufferId, u64, u64, bool, bool)| {
                                    overlap(t, write) && if t.3 { at == q } else { late == (at == q + 1) }
                                };
                                let any = self.touches(other, Space::Exchange).iter().any(concerned);
                                if any && !self.dependency[w].has(n) {
                                    return false;
                                }
                            }
                        }
                    }
                }
                for write in self.touches(task, Space::Output) {
                    for q in 0..s {
                        for (n, other) in self.tasks(q) {
                            let any = self.touches(other, Space::Output).iter().any(|t| overlap(t, &write));
                            if any && !self.visibility[w].has(n) {
                                return false;
                            }
                        }
                    }
                }
            }
            // The loader reads after the first task of its SM's queue.
            for queue in &Self::regime(self.schedule, s).queues {
                let acquire = self.starts[s] + queue[0].index();
                for id in queue {
                    let task = &Self::regime(self.schedule, s).tasks[id.index()];
                    for read in self.touches(task, Space::Cache).iter().filter(|t| t.4) {
                        for (n, other) in (0..s).flat_map(|q| self.tasks(q)) {
                            let appends = self.touches(other, Space::Cache);
                            if appends.iter().any(|t| t.3 && overlap(t, read)) {
                                let fenced = target.spec.copy != CopyMechanism::Bulk || self.fenced[acquire].has(n);
                                if !self.visibility[acquire].has(n) || !fenced {
                                    return false;
                                }
                            }
                        }
                    }
                }
            }
        }
        true
    }
}

/// Mutations that keep a schedule well-formed and its events whole, and may or may not break order.
fn mutate(s: &mut Schedule, random: &mut Random) {
    match random.below(8) {
        // Two tasks of one SM, the same in all regimes where both are there.
        0 | 1 => {
            let sm = random.below(s.regimes[0].queues.len());
            let queue = &s.regimes[0].queues[sm];
            let (a, b) = (queue[random.below(queue.len())], queue[random.below(queue.len())]);
            let name = |id: TaskId| s.regimes[0].tasks[id.index()].clone();
            let (a, b) = (name(a), name(b));
            for r in 0..s.regimes.len() {
                let find = |t: &Task| {
                    let mut tasks = s.regimes[r].tasks.iter();
                    tasks.position(|o| (o.grid, o.lo, o.j) == (t.grid, t.lo, t.j)).map(TaskId::from)
                };
                if let (Some(a), Some(b)) = (find(&a), find(&b)) {
                    swap_queued(s, r, a, b);
                }
            }
        }
        // Moves a task without a stream to any place of any SM.
        2 => {
            let r = random.below(s.regimes.len());
            let grids = &s.program.grids;
            let free = |t: &Task| matches!(grids[t.grid.index()].op, Op::Report | Op::AttentionMerge { .. });
            let tasks: Vec<usize> = (0..s.regimes[r].tasks.len()).filter(|&t| free(&s.regimes[r].tasks[t])).collect();
            let id = TaskId::from(tasks[random.below(tasks.len())]);
            let queues = &mut s.regimes[r].queues;
            queues.iter_mut().for_each(|q| q.retain(|t| *t != id));
            let sm = random.below(queues.len());
            let place = 1 + random.below(queues[sm].len());
            queues[sm].insert(place, id);
        }
        3 => {
            let buffers: Vec<usize> =
                (0..s.program.buffers.len()).filter(|&b| s.program.buffers[b].space == Space::Exchange).collect();
            let b = buffers[random.below(buffers.len())];
            let phases = 1 + random.below(3) as u32;
            s.program.buffers[b].phases = phases;
            s.placement[b] = Some((1 + b as u64) << 20);
        }
        4 => {
            let mechanism = [Mechanism::Packets, Mechanism::Fenced][random.below(2)];
            for regime in &mut s.regimes {
                regime.events.iter_mut().filter(|e| e.carried).for_each(|e| e.mechanism = mechanism);
            }
        }
        5 => {
            let r = random.below(s.regimes.len());
            let e = random.below(s.regimes[r].events.len());
            let event = &mut s.regimes[r].events[e];
            if event.carried {
                event.proxy = !event.proxy;
            } else if random.below(2) == 0 {
                event.mechanism = Mechanism::Fenced;
            }
        }
        6 if !s.program.grids.iter().any(|g| g.name == "extra")
            && s.program.buffers.iter().any(|b| b.name == "x.0") =>
        {
            let after = ["embed", "qkv.0", "o.0", "gate_up.1", "head"][random.below(5)];
            let sm = random.below(4);
            add_extra(s, after, [sm, sm]);
        }
        _ => {
            // Moves heads and splits of attention to other SMs, which read history that other SMs appended.
            let r = random.below(s.regimes.len());
            let grids = &s.program.grids;
            let attention = |t: &Task| matches!(grids[t.grid.index()].op, Op::Attention(_));
            let tasks: Vec<usize> =
                (0..s.regimes[r].tasks.len()).filter(|&t| attention(&s.regimes[r].tasks[t])).collect();
            let (a, b) = (tasks[random.below(tasks.len())], tasks[random.below(tasks.len())]);
            if s.regimes[r].tasks[a].grid == s.regimes[r].tasks[b].grid {
                swap_queued(s, r, TaskId::from(a), TaskId::from(b));
            }
        }
    }
    restream(s);
}

/// The rules that the second judge checks.
const JUDGED: [Rule; 5] =
    [Rule::Deadlock, Rule::OverwriteUnread, Rule::OverwriteUnordered, Rule::HistoryUnordered, Rule::MissingProxy];

#[test]
fn two_judges_agree_on_random_mutants() {
    let target = beyond_kernels();
    let base = Candidate { split_from: 4, ..on_h200(4) };
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut safe, mut unsafe_, mut other) = ([0; 2], [0; 2], 0);
    for round in 0..1000 {
        // One position of either regime, or several of both.
        let split_from = [1, 3, 6][round % 3];
        // With a narrow residual, half of the SMs own none of it and are less tightly bound to the others.
        let hidden = [64, 16, 24][random.below(3)];
        // If every SM has all of it, fewer exchanges order the steps.
        let everywhere = random.below(3) == 0;
        let toy = Toy { context: 7, hidden, post_norms: everywhere, ..TOY };
        let candidate = Candidate { split_from, sums_everywhere: u32::from(everywhere), ..base.clone() };
        let mut s = toy.schedule(&h200(), &candidate);
        for _ in 0..1 + random.below(4) {
            mutate(&mut s, &mut random);
        }
        let violations = check(&s, &target);
        if violations.iter().any(|v| !JUDGED.contains(&v.rule)) {
            other += 1;
            continue;
        }
        let fine = Text::run(&s).is_some_and(|text| text.race_free(&target));
        assert_eq!(violations.is_empty(), fine, "round {round}: the second judge says {fine}\n{}", listed(&violations));
        let count = if fine { &mut safe } else { &mut unsafe_ };
        count[usize::from(everywhere)] += 1;
    }
    let counts = format!("{safe:?} safe, {unsafe_:?} unsafe, {other} broken otherwise");
    assert!(
        safe[0].min(unsafe_[0]) > 150 && safe[1].min(unsafe_[1]) > 50,
        "the mutants do not exercise both answers: {counts}"
    );
}
