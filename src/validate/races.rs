//! Group 4: happens-before over a few steps of the loop, as one vector clock for each SM.
//!
//! Entry `a` of a clock counts the tasks of SM `a`, over all steps of the run, that are known to be done. Clocks are
//! kept for the present task of each SM and for events between their first signal and their last wait, never for each
//! task: a later task asks its own clock about an earlier one by (SM, place in the run), which are known without a
//! clock.
//!
//! Three orders, hence three clocks an SM: `dependency` (all events), `visibility` (events that order memory), and
//! `fenced`, what was visible when the SM's loader last fenced the asynchronous proxy.

use super::wellformed::{Grids, Owners, Region, Writes};
use super::{Entity, Found, Rule, events::Joins, note, proxies};
use crate::ir::program::Space;
use crate::ir::schedule::{Regime, Schedule};
use crate::ir::{BufferId, EventId, SmId, TaskId};
use crate::target::{CopyMechanism, Target};
use std::collections::BinaryHeap;

/// What earlier groups have proven, by regime.
pub(super) struct Facts<'a> {
    pub grids: &'a Grids,
    pub owners: &'a [Owners],
    pub writes: &'a [Writes],
    pub joins: &'a [Joins],
    pub orders: &'a [Vec<TaskId>],
}

/// One step of the run: its regime, and which of that regime's steps in the run it is.
#[derive(Clone, Copy)]
struct Step {
    regime: usize,
    index: u32,
}

/// A run through all regimes: of each as many steps as it has, at most `most`.
fn steps(schedule: &Schedule, most: u32) -> Vec<Step> {
    let mut steps = vec![];
    for regime in 0..schedule.regimes.len() {
        steps.extend((0..length(schedule, regime).min(most)).map(|index| Step { regime, index }));
    }
    steps
}

/// Positions that a regime serves.
fn length(schedule: &Schedule, regime: usize) -> u32 {
    let end = schedule.regimes.get(regime + 1).map_or(schedule.program.context_max, |next| next.from_position);
    end - schedule.regimes[regime].from_position
}

pub(super) fn check(schedule: &Schedule, target: &Target, facts: &Facts, found: &mut Found) {
    let exchange = schedule.program.buffers.iter().filter(|b| b.space == Space::Exchange);
    let phases = exchange.map(|b| if b.words { 1 } else { b.phases }).max().unwrap_or(1);
    if phases > 1 {
        // Mostly every SM begins a step by learning that all of the step before is done, and by seeing all that it wrote.
        // By induction that holds for all steps before: pairs two steps and more apart are ordered, in both orders, and
        // two steps of each regime show the pairs one step apart.
        let mut few = Found::default();
        if run(schedule, target, facts, 2, true, &mut few) {
            *found = few;
            return;
        }
    }
    run(schedule, target, facts, 1 + phases, false, found);
}

/// Judges a run of at most `most` steps of each regime. Returns whether each SM knew after the first task of each step
/// that all of the step before was done, and saw it where regimes change; with `only_knowing` it ends where that is not so.
fn run(schedule: &Schedule, target: &Target, facts: &Facts, most: u32, only_knowing: bool, found: &mut Found) -> bool {
    let steps = steps(schedule, most);
    let instances: u64 = steps.iter().map(|s| schedule.regimes[s.regime].tasks.len() as u64).sum();
    if instances >= u64::from(u32::MAX) {
        found.add(Rule::Counts, Entity::Schedule, || {
            format!("expected fewer than 2^32 - 1 tasks in {} steps, found {instances}", steps.len())
        });
        return true;
    }
    let sms = schedule.machine.sms as usize;
    let bulk = target.spec.copy == CopyMechanism::Bulk;
    let mut run = Run {
        schedule,
        facts,
        sms,
        bulk,
        steps: &steps,
        bases: vec![0; sms * (steps.len() + 1)],
        dependency: vec![0; sms * sms],
        visibility: vec![0; sms * sms],
        fenced: vec![0; if bulk { sms * sms } else { 0 }],
        readers: schedule.regimes.iter().map(|_| None).collect(),
        all_known: true,
    };
    let mut pool = Pool { sms, clocks: vec![], free: vec![] };
    let mut carried: Vec<Option<u32>> = vec![];
    for s in 0..steps.len() {
        carried = run.step(s, &carried, &mut pool, found);
        if only_knowing && !run.all_known {
            return false;
        }
    }
    run.all_known
}

/// Clocks of events: dependency, then visibility, of each.
struct Pool {
    sms: usize,
    clocks: Vec<u32>,
    free: Vec<u32>,
}

impl Pool {
    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            let slot = self.clocks.len() / (2 * self.sms);
            self.clocks.resize(self.clocks.len() + 2 * self.sms, 0);
            slot as u32
        })
    }

    fn get(&self, slot: u32) -> (&[u32], &[u32]) {
        self.clocks[slot as usize * 2 * self.sms..][..2 * self.sms].split_at(self.sms)
    }

    fn get_mut(&mut self, slot: u32) -> (&mut [u32], &mut [u32]) {
        self.clocks[slot as usize * 2 * self.sms..][..2 * self.sms].split_at_mut(self.sms)
    }
}

fn join(into: &mut [u32], from: &[u32]) {
    for (into, &from) in into.iter_mut().zip(from) {
        *into = (*into).max(from);
    }
}

/// Whether a clock knows that everything before `base` is done.
fn settled(clock: &[u32], base: &[u32]) -> bool {
    clock.iter().zip(base).all(|(known, end)| known >= end)
}

struct Run<'a> {
    schedule: &'a Schedule,
    facts: &'a Facts<'a>,
    sms: usize,
    bulk: bool,
    steps: &'a [Step],
    /// Tasks of each SM before each step of the run; a row of SMs a step.
    bases: Vec<u32>,
    /// A row for each SM.
    dependency: Vec<u32>,
    visibility: Vec<u32>,
    fenced: Vec<u32>,
    /// Made for a regime when a pair is not ordered by whole steps.
    readers: Vec<Option<Readers>>,
    /// So far, each SM knew after the first task of each step that the step before was done. With several regimes it saw
    /// what that step wrote, too: only a change of regime asks exchanges for visibility.
    all_known: bool,
}

impl<'a> Run<'a> {
    fn regime(&self, s: usize) -> &'a Regime {
        &self.schedule.regimes[self.steps[s].regime]
    }

    /// Columns as a message names them.
    fn told(&self, buffer: BufferId, lo: u32, hi: u32) -> String {
        self.facts.grids.rows(buffer).told(lo, hi)
    }

    fn base(&self, s: usize) -> &[u32] {
        &self.bases[s * self.sms..][..self.sms]
    }

    /// The count of its SM that says that task `id` of step `s` is done.
    fn done(&self, s: usize, id: TaskId) -> (usize, u32) {
        let owners = &self.facts.owners[self.steps[s].regime];
        let sm = owners.sm[id.index()] as usize;
        (sm, self.base(s)[sm] + owners.pos[id.index()] + 1)
    }

    /// Runs step `s` in topological order; `before` are the carried events of the step before, by id. Returns those of
    /// this one.
    fn step(&mut self, s: usize, before: &[Option<u32>], pool: &mut Pool, found: &mut Found) -> Vec<Option<u32>> {
        let r = self.steps[s].regime;
        let (regime, facts, sms) = (self.regime(s), self.facts, self.sms);
        let joins = &facts.joins[r];
        let entered = s > 0 && self.steps[s - 1].regime != r;
        let mut waits_left = joins.waits.clone();
        let mut slots: Vec<Option<u32>> = vec![None; regime.events.len()];
        // SMs whose dependency clock knows all of the steps before this one: nothing there can be unordered.
        let mut knows_all = vec![false; sms];
        for &id in &facts.orders[r] {
            let task = &regime.tasks[id.index()];
            let owners = &facts.owners[r];
            let (sm, pos) = (owners.sm[id.index()] as usize, owners.pos[id.index()]);
            let row = sm * sms..(sm + 1) * sms;
            for wait in &task.waits {
                let event = &regime.events[wait.event.index()];
                let slot = if event.carried {
                    // Nothing ran before the first step.
                    let other = if entered { joins.before.get(&wait.event) } else { Some(&wait.event) };
                    other.and_then(|e| before.get(e.index()).copied().flatten())
                } else {
                    slots[wait.event.index()]
                };
                let Some(slot) = slot else { continue };
                if facts.grids.tells(task.grid, event.buffer) {
                    let (dependency, visibility) = pool.get(slot);
                    join(&mut self.dependency[row.clone()], dependency);
                    if event.mechanism.orders_memory() {
                        join(&mut self.visibility[row.clone()], visibility);
                    }
                }
                if !event.carried {
                    let left = &mut waits_left[wait.event.index()];
                    *left -= 1;
                    if *left == 0 {
                        pool.free.push(slot);
                    }
                }
            }
            // What its loader waited for came before the task, too, but shows the consumers no memory.
            if let Some(event) = joins.after[id.index()]
                && let Some(slot) = slots[event.index()]
            {
                join(&mut self.dependency[row.clone()], pool.get(slot).0);
                let left = &mut waits_left[event.index()];
                *left -= 1;
                if *left == 0 {
                    pool.free.push(slot);
                }
            }
            // The loader takes over what the first task has acquired, and fences. No other task has a proxy (`proxies`).
            if self.bulk && task.waits.iter().any(|w| regime.events[w.event.index()].proxy) {
                self.fenced[row.clone()].copy_from_slice(&self.visibility[row.clone()]);
            }
            if s > 0 {
                if pos == 0 {
                    self.histories(s, sm, found);
                    knows_all[sm] = settled(&self.dependency[row.clone()], self.base(s));
                    let sees_all =
                        self.schedule.regimes.len() == 1 || settled(&self.visibility[row.clone()], self.base(s));
                    self.all_known &= knows_all[sm] && sees_all;
                    self.words(s, sm, found);
                }
                self.overwrites(s, id, sm, &mut knows_all[sm], found);
            }
            let done = self.base(s)[sm] + pos + 1;
            self.dependency[row.start + sm] = done;
            self.visibility[row.start + sm] = done;
            for event in &task.signals {
                let e = event.index();
                if joins.waits[e] == 0 && !regime.events[e].carried {
                    continue;
                }
                let (dependency, visibility) = (&self.dependency[row.clone()], &self.visibility[row.clone()]);
                match slots[e] {
                    Some(slot) => {
                        let clocks = pool.get_mut(slot);
                        join(clocks.0, dependency);
                        join(clocks.1, visibility);
                    }
                    None => {
                        let slot = pool.take();
                        let clocks = pool.get_mut(slot);
                        clocks.0.copy_from_slice(dependency);
                        clocks.1.copy_from_slice(visibility);
                        slots[e] = Some(slot);
                    }
                }
            }
        }
        pool.free.extend(before.iter().flatten());
        for (slot, event) in slots.iter_mut().zip(&regime.events) {
            if !event.carried {
                *slot = None;
            }
        }
        for (sm, queue) in regime.queues.iter().enumerate() {
            self.bases[(s + 1) * sms + sm] = self.bases[s * sms + sm] + queue.len() as u32;
        }
        slots
    }

    /// After the first task of an SM's queue its loader may read the history: each append of the step before must be
    /// visible by then. Older appends are too: the task that appends a column in a step reads its history in that step.
    fn histories(&self, s: usize, sm: usize, found: &mut Found) {
        if s >= 2 && self.steps[s - 2].regime == self.steps[s].regime {
            return;
        }
        let row = sm * self.sms..(sm + 1) * self.sms;
        let visible = &self.visibility[row.clone()];
        let fenced = if self.bulk { &self.fenced[row] } else { visible };
        if settled(visible, self.base(s)) && settled(fenced, self.base(s)) {
            return;
        }
        let (r, before) = (self.steps[s].regime, self.steps[s - 1].regime);
        let regime = self.regime(s);
        let queue = &regime.queues[sm];
        for &reader in queue {
            let task = &regime.tasks[reader.index()];
            for flow in self.facts.grids.history(task.grid) {
                let appends = |(lo, hi): (u32, u32)| self.facts.writes[before].overlapping(flow.buffer, lo, hi).iter();
                for append in flow.spans(task).flat_map(appends) {
                    let (other, done) = self.done(s - 1, append.task);
                    let story = || {
                        let appends = note(
                            Entity::Task(before as u32, append.task),
                            format!("on sm{other} appends to {} in the step before", flow.buffer),
                        );
                        let acquires = queue.first().map(|&first| {
                            note(Entity::Task(r as u32, first), format!("is what the loader of sm{sm} waits for"))
                        });
                        let releases = note(
                            Entity::Sm(before as u32, SmId::from(other)),
                            "signals nothing after it that orders memory and reaches that far",
                        );
                        std::iter::once(appends).chain(acquires).chain([releases]).collect()
                    };
                    let at = Entity::Task(r as u32, reader);
                    if visible[other] < done {
                        found.add_with(Rule::HistoryUnordered, at, || {
                            let columns = self.told(flow.buffer, append.lo, append.hi);
                            let message = format!(
                                "the loader of sm{sm} may read {columns} of {} before an append is visible",
                                flow.buffer
                            );
                            (message, story())
                        });
                    } else if fenced[other] < done {
                        proxies::missing(at, sm, flow.buffer, story, found);
                    }
                }
            }
        }
    }

    /// After the first task of its queue an SM may read words: it must see by then that the step before has cleared them.
    fn words(&self, s: usize, sm: usize, found: &mut Found) {
        let visible = &self.visibility[sm * self.sms..][..self.sms];
        if settled(visible, self.base(s)) {
            return;
        }
        let Some(words) = (0..).zip(&self.schedule.program.buffers).find(|(_, b)| b.words).map(|(b, _)| BufferId(b))
        else {
            return;
        };
        let (r, before) = (self.steps[s].regime as u32, self.steps[s - 1].regime as u32);
        let unseen = visible.iter().zip(self.base(s)).position(|(seen, end)| seen < end).unwrap_or(0);
        found.add_with(Rule::WordsUnseen, Entity::Sm(r, SmId::from(sm)), || {
            let message = format!(
                "may read words of {words} before it sees that sm{unseen} has cleared them in the step before, expected its first task \
                 to acquire that"
            );
            (message, vec![note(Entity::Sm(before, SmId::from(unseen)), "releases less than its whole step")])
        });
    }

    /// What task `id` on `sm` overwrites in step `s` must have been written, and read, before.
    fn overwrites(&mut self, s: usize, id: TaskId, sm: usize, knows_all: &mut bool, found: &mut Found) {
        let task = &self.regime(s).tasks[id.index()];
        for flow in self.facts.grids.writes(task.grid) {
            let buffer = &self.schedule.program.buffers[flow.buffer.index()];
            // Rows of the cache are written once in a text.
            if buffer.space == Space::Cache {
                continue;
            }
            let exchange = buffer.space == Space::Exchange;
            // Words of the other phase are cleared: those of the step before.
            let phases = if buffer.words { 1 } else { buffer.phases };
            if exchange {
                // Later steps of a regime find columns as their own writers left them.
                if self.steps[s].regime > 0
                    && self.steps[s].index < phases
                    && !settled(&self.visibility[sm * self.sms..][..self.sms], self.base(s))
                    && let Some(q) = self.last_write(s, flow.buffer, phases)
                    && self.steps[q].regime != self.steps[s].regime
                {
                    for (lo, hi) in flow.spans(task) {
                        self.landed(s, q, flow.buffer, Region { lo, hi, task: id }, sm, found);
                    }
                }
                *knows_all = *knows_all || settled(&self.dependency[sm * self.sms..][..self.sms], self.base(s));
                // With one phase, what the step before wrote may still be read in this one.
                let carried = &self.facts.joins[self.steps[s].regime].carried;
                if *knows_all && (phases > 1 || carried.binary_search(&flow.buffer).is_err()) {
                    continue;
                }
            }
            let Some(q) = self.last_write(s, flow.buffer, phases) else { continue };
            if q > 0 && self.steps[q - 1].regime == self.steps[s].regime {
                continue;
            }
            for (lo, hi) in flow.spans(task) {
                let region = Region { lo, hi, task: id };
                if !(exchange && *knows_all) {
                    self.after_writers(s, q, flow.buffer, region, sm, exchange, found);
                    if exchange {
                        self.after_readers(s, q, false, flow.buffer, region, sm, found);
                    }
                }
                if exchange && q < s {
                    self.after_readers(s, q + 1, true, flow.buffer, region, sm, found);
                }
            }
        }
    }

    /// Only a packet's readers know that it has landed, and it says nothing of other packets of its task. So a packet without a
    /// reader may land late, over what another SM has written since. Within a regime a column has the same writer in every step,
    /// and stores of one SM to one place keep their order, so only a change of regime can show it.
    fn landed(&mut self, s: usize, q: usize, buffer: BufferId, region: Region, sm: usize, found: &mut Found) {
        let (r, before, facts) = (self.steps[s].regime, self.steps[q].regime, self.facts);
        for write in facts.writes[before].overlapping(buffer, region.lo, region.hi) {
            let (other, done) = self.done(q, write.task);
            if other == sm || self.visibility[sm * self.sms + other] >= done {
                continue;
            }
            let (lo, hi) = (write.lo.max(region.lo), write.hi.min(region.hi));
            let Some((lo, hi)) = self.unread(q, buffer, lo, hi) else { continue };
            found.add_with(Rule::OverwriteUnordered, Entity::Task(r as u32, region.task), || {
                let columns = facts.grids.rows(buffer).told(lo, hi);
                let message = format!(
                    "on sm{sm} writes {columns} of {buffer} {}, where packets without a reader may land later",
                    later(self.distance(q, s))
                );
                let at = Entity::Task(before as u32, write.task);
                (message, vec![note(at, format!("on sm{other} wrote them"))])
            });
        }
    }

    /// The first of columns `lo..hi` that no task reads as step `q` left them: in that step, or carried into the next.
    fn unread(&mut self, q: usize, buffer: BufferId, lo: u32, hi: u32) -> Option<(u32, u32)> {
        let mut reads: Vec<(u32, u32)> = vec![];
        for (step, carried) in [(q, false), (q + 1, true)] {
            let readers = self.readers(self.steps[step].regime);
            for group in readers.groups(carried, buffer) {
                let parts = &readers.parts[group.parts.0..group.parts.1];
                let first = parts.partition_point(|p| p.hi <= lo);
                reads.extend(parts[first..].iter().take_while(|p| p.lo < hi).map(|p| (p.lo, p.hi)));
            }
        }
        reads.sort_unstable();
        let mut at = lo;
        for (from, to) in reads {
            if from > at {
                break;
            }
            at = at.max(to);
        }
        (at < hi).then_some((at, hi))
    }

    /// The readers of a regime, indexed when they are asked for first.
    fn readers(&mut self, r: usize) -> &Readers {
        let facts = self.facts;
        let regime = &self.schedule.regimes[r];
        self.readers[r].get_or_insert_with(|| Readers::of(regime, facts.grids, &facts.owners[r]))
    }

    /// The latest step before `s` that wrote the same phase of a buffer.
    fn last_write(&self, s: usize, buffer: BufferId, phases: u32) -> Option<usize> {
        (0..s).rev().find(|&q| {
            self.distance(q, s).is_multiple_of(u64::from(phases))
                && !self.facts.writes[self.steps[q].regime].buffer(buffer).is_empty()
        })
    }

    /// Positions from step `q` to step `s` of the run: the last steps of a regime stand before the first of the next.
    fn distance(&self, q: usize, s: usize) -> u64 {
        let (from, to) = (self.steps[q], self.steps[s]);
        if from.regime == to.regime {
            return u64::from(to.index - from.index);
        }
        let rest = self.steps[q..].iter().take_while(|step| step.regime == from.regime).count() as u64;
        let between = (from.regime + 1..to.regime).map(|r| u64::from(length(self.schedule, r))).sum::<u64>();
        rest + between + u64::from(to.index)
    }

    #[allow(clippy::too_many_arguments)] // Two places in the run.
    fn after_writers(
        &self,
        s: usize,
        q: usize,
        buffer: BufferId,
        region: Region,
        sm: usize,
        exchange: bool,
        found: &mut Found,
    ) {
        let clocks = if exchange { &self.dependency } else { &self.visibility };
        let clock = &clocks[sm * self.sms..][..self.sms];
        for write in self.facts.writes[self.steps[q].regime].overlapping(buffer, region.lo, region.hi) {
            let (other, done) = self.done(q, write.task);
            if clock[other] < done {
                found.add_with(
                    Rule::OverwriteUnordered,
                    Entity::Task(self.steps[s].regime as u32, region.task),
                    || {
                        let message = format!(
                            "on sm{sm} writes {} of {buffer} {}, unordered after the writer before",
                            self.told(buffer, region.lo, region.hi),
                            later(self.distance(q, s))
                        );
                        let at = Entity::Task(self.steps[q].regime as u32, write.task);
                        (message, vec![note(at, format!("on sm{other} wrote them"))])
                    },
                );
            }
        }
    }

    /// The readers in step `q` of what is overwritten in step `s`; `carried`: those that read the step before theirs.
    #[allow(clippy::too_many_arguments)] // Two places in the run.
    fn after_readers(
        &mut self,
        s: usize,
        q: usize,
        carried: bool,
        buffer: BufferId,
        region: Region,
        sm: usize,
        found: &mut Found,
    ) {
        let r = self.steps[q].regime;
        self.readers(r);
        let Some(readers) = &self.readers[r] else { return };
        let clock = &self.dependency[sm * self.sms..][..self.sms];
        for group in readers.groups(carried, buffer) {
            let parts = &readers.parts[group.parts.0..group.parts.1];
            let first = parts.partition_point(|p| p.hi <= region.lo);
            for part in parts[first..].iter().take_while(|p| p.lo < region.hi) {
                let (other, done) = self.done(q, part.task);
                if clock[other] < done {
                    found.add_with(
                        Rule::OverwriteUnread,
                        Entity::Task(self.steps[s].regime as u32, region.task),
                        || {
                            let message = format!(
                                "on sm{sm} may overwrite {} of {buffer} {} before they are read",
                                self.told(buffer, region.lo, region.hi),
                                later(self.distance(q, s))
                            );
                            (message, vec![note(Entity::Task(r as u32, part.task), format!("on sm{other} reads them"))])
                        },
                    );
                }
            }
        }
    }
}

fn later(steps: u64) -> String {
    match steps {
        0 => "in the same step".to_string(),
        1 => "one step later".to_string(),
        n => format!("{n} steps later"),
    }
}

/// The last reader of each column on each SM. Queue order makes earlier readers follow.
struct Readers {
    /// Ascending.
    groups: Vec<Group>,
    parts: Vec<Part>,
}

/// Carried, buffer, SM.
type Key = (bool, BufferId, u32);

/// The readers of one buffer on one SM.
struct Group {
    key: Key,
    parts: (usize, usize),
}

/// Columns that a task reads; `pos` is its place in the queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Read {
    lo: u32,
    hi: u32,
    pos: u32,
    task: TaskId,
}

/// Disjoint and ascending within a group.
struct Part {
    lo: u32,
    hi: u32,
    task: TaskId,
}

impl Readers {
    fn of(regime: &Regime, grids: &Grids, owners: &Owners) -> Readers {
        let mut reads: Vec<(Key, Read)> = vec![];
        for (t, task) in (0..).zip(&regime.tasks) {
            for flow in grids.reads(task.grid).iter().chain(grids.lookups(task.grid)) {
                for (lo, hi) in flow.spans(task) {
                    let about = |e: EventId| regime.events[e.index()].buffer == flow.buffer;
                    let carried = task.waits.iter().any(|w| about(w.event) && regime.events[w.event.index()].carried);
                    let key = (carried, flow.buffer, owners.sm[t as usize]);
                    reads.push((key, Read { lo, hi, pos: owners.pos[t as usize], task: TaskId(t) }));
                }
            }
        }
        reads.sort_unstable();
        let mut readers = Readers { groups: vec![], parts: vec![] };
        for group in reads.chunk_by(|a, b| a.0 == b.0) {
            let start = readers.parts.len();
            readers.paint(group.iter().map(|read| read.1));
            readers.groups.push(Group { key: group[0].0, parts: (start, readers.parts.len()) });
        }
        readers
    }

    /// Appends the parts of one group: over each column the read latest in the queue. `reads` ascend by first column.
    fn paint(&mut self, reads: impl Iterator<Item = Read>) {
        let start = self.parts.len();
        let mut reads = reads.peekable();
        let mut open: BinaryHeap<(u32, u32, TaskId)> = BinaryHeap::new();
        let mut at = 0;
        loop {
            while let Some(read) = reads.next_if(|read| read.lo <= at) {
                open.push((read.pos, read.hi, read.task));
            }
            while open.peek().is_some_and(|top| top.1 <= at) {
                open.pop();
            }
            let next = reads.peek().map(|read| read.lo);
            let Some(&(_, hi, task)) = open.peek() else {
                match next {
                    Some(next) => at = next,
                    None => return,
                }
                continue;
            };
            let end = next.map_or(hi, |next| next.min(hi));
            match self.parts[start..].last_mut() {
                Some(last) if last.task == task && last.hi == at => last.hi = end,
                _ => self.parts.push(Part { lo: at, hi: end, task }),
            }
            at = end;
        }
    }

    fn groups(&self, carried: bool, buffer: BufferId) -> &[Group] {
        let first = self.groups.partition_point(|g| g.key < (carried, buffer, 0));
        let rest = &self.groups[first..];
        &rest[..rest.partition_point(|g| g.key <= (carried, buffer, u32::MAX))]
    }
}
