//! A second judge for order, races and proxies. It makes a graph of every position of a text, closes it transitively, and compares every pair
//! of accesses. It shares no code with the proof, and takes cubic time.

use monobloc::ir::op::{Access, Op};
use monobloc::ir::program::{Rows, Space};
use monobloc::ir::schedule::{Mechanism, Regime, Schedule, Task};
use monobloc::ir::{BufferId, EventId};
use monobloc::target::{CopyMechanism, Target};

/// Whether all tasks of all positions run, and all accesses are in order.
pub fn race_free(schedule: &Schedule, target: &Target) -> bool {
    Text::run(schedule).is_some_and(|text| text.race_free(target))
}

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
            let same = |e: &EventId| {
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
