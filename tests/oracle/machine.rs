//! The memory model as a machine: its state, and the moves that blocks and loaders can make.
//!
//! A window of a few steps is laid out in full: every task of every step is an *instance*. A block takes its instances in
//! order, each in three moves: it passes its waits, it reads, it publishes. A loader makes one move for each run of the
//! history that it brings in, and one for each run whose source the step chooses. A state holds everything that decides the
//! future: the progress of each block and loader, the plain memory that each SM sees, and the writer of each piece of the arenas.
//!
//! Waits for events by packets end in two ways, and a schedule must be right in both. [`Poll::Counts`] waits until the number of
//! tasks in the wait have signalled, like the interpreter. [`Poll::Tags`] looks only at the tags of the polled packets, like a
//! device. And a store need not land when it is made: one store of a run may be held back until its SM releases memory or
//! stores to the same place again.
//!
//! A word is its own flag: a poll passes with any value of the word, unless it was cleared. The task that stores a word of a step
//! also clears it in the other phase, by a separate store, which may land late, too.
//!
//! Shadow memory is exact to the byte and stored by *atoms*: the pieces into which the borders of all accesses of the
//! window cut the arena. All bytes of an atom are always written and read together.

use super::draws::Draw;
use super::footprint::{Deal, Foot, Touch, footprints, phase_bytes, row_bytes, word_spans};
use super::{Fault, Kind, words};
use monobloc::ir::op::Op;
use monobloc::ir::program::{Grid, Operand, Second, Space};
use monobloc::ir::schedule::{Event, Mechanism, Regime, Schedule, Source, Wait};
use monobloc::ir::{BufferId, EventId};
use monobloc::target::{CopyMechanism, Target};
use std::collections::BTreeMap;
use std::ops::Range;

/// Most steps of a window across a whole regime.
const LONG: u32 = 16;

/// A schedule with the accesses of its tasks.
pub struct Plan<'a> {
    pub schedule: &'a Schedule,
    feet: Vec<Vec<Foot>>,
    bulk: bool,
}

impl<'a> Plan<'a> {
    pub fn new(schedule: &'a Schedule, target: &Target) -> Result<Plan<'a>, Fault> {
        let feet = footprints(schedule, target)?;
        events(schedule)?;
        words::judge(schedule, &feet)?;
        Ok(Plan { schedule, feet, bulk: target.spec.copy == CopyMechanism::Bulk })
    }

    /// The accesses of tasks, by regime.
    pub fn feet(&self) -> &[Vec<Foot>] {
        &self.feet
    }

    /// First positions of the most useful windows of `steps` steps: at the start of a text, at each change of regime, and at the
    /// end of a text.
    pub fn windows(&self, steps: u32) -> Vec<u32> {
        let most = self.schedule.program.context_max;
        let mut starts = vec![0];
        for regime in &self.schedule.regimes[1..] {
            starts.push(regime.from_position.saturating_sub(steps / 2));
            starts.push(regime.from_position.saturating_sub(steps - 1));
        }
        starts.push(most.saturating_sub(steps));
        starts.sort_unstable();
        starts.dedup();
        starts
    }

    /// Longer windows (first position, steps), for faults that windows of `steps` steps cannot show: copies of a buffer that are
    /// reused later, and regimes between two others.
    pub fn long_windows(&self, steps: u32) -> Vec<(u32, u32)> {
        let s = self.schedule;
        let phases =
            s.program.buffers.iter().filter(|b| b.space == Space::Exchange).map(|b| b.phases).max().unwrap_or(1);
        let mut windows = vec![];
        if phases >= steps {
            windows.push((0, phases + 1));
            // All steps after a border that overwrite data of a step before it.
            let borders = s.regimes[1..].iter().map(|r| r.from_position.saturating_sub(phases));
            windows.extend(borders.map(|from| (from, 2 * phases)));
        }
        // From before the second regime to after the border that ends it.
        for pair in s.regimes[1..].windows(2) {
            let from = pair[0].from_position - 1;
            let length = pair[1].from_position - from + 2;
            windows.extend((length > steps && length <= LONG).then_some((from, length)));
        }
        windows
    }
}

/// Refuses events that are meaningless.
fn events(s: &Schedule) -> Result<(), Fault> {
    let malformed = |what: String| Err(Fault::new(Kind::Malformed, what));
    let mut tagged: BTreeMap<BufferId, bool> = BTreeMap::new();
    for (r, regime) in s.regimes.iter().enumerate() {
        for (e, event) in regime.events.iter().enumerate() {
            let buffer = &s.program.buffers[event.buffer.index()];
            if buffer.space != Space::Exchange || event.lo >= event.hi {
                return malformed(format!("e{e} of r{r} is about nothing"));
            }
            if event.hi > buffer.cols || event.row.is_some_and(|row| row >= buffer.rows) {
                return Err(Fault::new(Kind::OutOfBounds, format!("e{e} of r{r} polls beyond {}", event.buffer)));
            }
            if (event.mechanism == Mechanism::Words) != buffer.words || buffer.words && buffer.phases != 2 {
                return malformed(format!("e{e} of r{r} is about words of one phase, or takes packets for words"));
            }
            let tags = event.mechanism != Mechanism::Counter;
            if *tagged.entry(event.buffer).or_insert(tags) != tags {
                return malformed(format!("{} is tagged and is not", event.buffer));
            }
            // A counter increases in each step by the count of its event.
            let signals = regime.tasks.iter().flat_map(|t| &t.signals).filter(|s| s.index() == e).count();
            if !tags && signals != event.count as usize {
                return malformed(format!("e{e} of r{r} counts {} of {signals} signals", event.count));
            }
        }
    }
    Ok(())
}

/// The writer of a piece of memory: the instance and which of its writes, never 0. Odd ids are the parts of a packet that a
/// write of other columns overwrites.
type Id = u32;
const NO_WRITER: Id = 0;
/// Ids of one instance: up to 7 writes, two each.
const IDS: u32 = 16;

/// Offset of the id of an instance for words that it cleared.
const CLEARED: u32 = IDS - 1;

/// Whether a word with this id is cleared.
fn is_cleared(id: Id) -> bool {
    id == NO_WRITER || id % IDS == CLEARED
}

/// Whether a waiter of an event sees more memory than the event's columns.
fn orders_memory(mechanism: Mechanism) -> bool {
    match mechanism {
        Mechanism::Packets | Mechanism::Words => false,
        Mechanism::Fenced | Mechanism::Counter => true,
    }
}

fn instance_of(id: Id) -> usize {
    (id / IDS - 1) as usize
}

/// Atoms, and their writers.
type Pieces = Vec<(Range<u32>, Id)>;

/// A read of one region: its pieces, and the required writer of each.
struct Expect {
    pieces: Vec<Piece>,
}

struct Piece {
    atoms: Range<u32>,
    id: Id,
    /// Columns, to find the wait that covers them.
    lo: u32,
    hi: u32,
}

/// A task in a step.
struct Instance {
    sm: usize,
    /// Place among all instances of its SM.
    place: u32,
    step: usize,
    waits: Vec<WaitOn>,
    /// Index of the event instance; twice if it is signalled twice.
    signals: Vec<u32>,
    /// Reads by region, and for each piece whether packets that the task polls guarantee it.
    reads: Vec<(u32, Vec<bool>)>,
    writes: Vec<Pieces>,
    private_reads: Vec<(Range<u32>, u32)>,
    /// Its writer id in shared memory: step and grid, because tasks of one grid on one SM are one writer.
    private_id: u32,
    private_writes: Vec<Range<u32>>,
    outputs: Vec<Range<u32>>,
    /// The reads of its loader.
    history: Option<History>,
}

struct WaitOn {
    /// `None`: no task ever signals it, or there was no earlier step.
    event: Option<u32>,
    count: u32,
    /// The reads of a poll: the pieces that hold the tags of its packets, and the step whose tag it waits for. `None`: a counter, or
    /// there was no earlier step.
    tags: Option<(Vec<u32>, usize)>,
    /// The pieces are words, which have no tags.
    words: bool,
    /// It can never be satisfied.
    never: bool,
    orders: bool,
    proxy: bool,
}

/// The chunks of a task whose loader looks at memory that the step or an earlier one made.
struct History {
    /// Rows of a history wait for the first task of the step; a chosen source waits for its event, if it has one.
    gated: bool,
    after: Option<WaitOn>,
    /// Entries of tables that choose what to load, in the form of reads.
    choices: Vec<(u32, Vec<bool>)>,
    /// Index among such runs of its SM.
    ordinal: u32,
    chunks: u32,
    /// Chunks of its SM's stream before it.
    before: u32,
    /// Cache pieces and the instance that appended each.
    rows: Vec<(Range<u32>, usize)>,
}

/// An event in one step.
struct EventAt {
    tagged: bool,
    /// Index of its clock, if it orders memory.
    clock: Option<u32>,
    /// The tasks that signal, and the atoms of its columns that they publish.
    by: Vec<(u32, Pieces)>,
}

/// A window of steps, laid out.
pub struct Window {
    /// How waits end; the walk chooses it.
    pub poll: Poll,
    /// The store that lands late: an instance, and which of its writes.
    pub late: Option<(usize, usize)>,
    k: usize,
    bulk: bool,
    slots: u32,
    instances: Vec<Instance>,
    /// Instances of each SM, in order.
    lanes: Vec<Vec<u32>>,
    /// For each SM: history runs as (instance, step).
    loads: Vec<Vec<u32>>,
    /// Instances of each SM before each step.
    firsts: Vec<Vec<u32>>,
    /// Chunks that each SM has consumed before each of its instances.
    consumed: Vec<Vec<u32>>,
    expects: Vec<Expect>,
    events: Vec<EventAt>,
    /// For each id: the instances that must read it, and where.
    readers: BTreeMap<Id, Vec<(u32, Range<u32>)>>,
    layout: Layout,
    names: Vec<String>,
}

/// The layout of a state.
#[derive(Clone, Copy)]
struct Layout {
    at: usize,
    phase: usize,
    loaded: usize,
    signalled: usize,
    visible: usize,
    fenced: usize,
    gate: usize,
    shadow: usize,
    private: usize,
    outputs: usize,
    clocks: usize,
    late: usize,
    len: usize,
}

/// All that decides the future of a run.
#[derive(Clone)]
pub struct State(pub Vec<u32>);

/// How the wait for an event by packets ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Poll {
    /// Enough tasks have signalled, and what they published is still there.
    Counts,
    /// All packets of its columns carry the tag of the step, from any task.
    Tags,
}

/// Moves of a block: it passes its waits, reads, publishes.
const WAIT: u32 = 0;
const READ: u32 = 1;
const PUBLISH: u32 = 2;

/// States of the store that lands late: made, and landed.
const PENDING: u32 = 1;
const LANDED: u32 = 2;

/// Cuts an address space at the borders of all ranges that are added, then names ranges of pieces.
#[derive(Default)]
struct Cuts(Vec<u64>);

impl Cuts {
    fn add(&mut self, from: u64, to: u64) {
        self.0.extend([from, to]);
    }

    fn seal(&mut self) {
        self.0.sort_unstable();
        self.0.dedup();
    }

    fn atoms(&self, from: u64, to: u64) -> Range<u32> {
        let at = |x: u64| self.0.partition_point(|&c| c < x) as u32;
        at(from)..at(to)
    }

    /// The piece that holds a byte.
    fn atom(&self, at: u64) -> u32 {
        self.0.partition_point(|&c| c <= at) as u32 - 1
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Ranges of bytes of an arena.
type Bytes = Vec<(u64, u64)>;

/// Byte ranges of a region of an exchange buffer: those of its own values, and the rest of the packets that it shares.
fn spans(plan: &Plan, touch: &Touch, phase: u64) -> (Bytes, Bytes) {
    let s = plan.schedule;
    let buffer = &s.program.buffers[touch.buffer.index()];
    if buffer.words {
        let base = s.placement[touch.buffer.index()].unwrap_or(0) + phase * phase_bytes(buffer);
        let own = word_spans(buffer, touch.row, touch.lo, touch.hi);
        return (own.iter().map(|(from, to)| (base + from, base + to)).collect(), vec![]);
    }
    let each = buffer.dtype.bytes() as u64;
    let per = 4 / each.min(4);
    let base = s.placement[touch.buffer.index()].unwrap_or(0)
        + phase * phase_bytes(buffer)
        + u64::from(touch.row) * row_bytes(buffer);
    let (lo, hi, cols) = (u64::from(touch.lo), u64::from(touch.hi), u64::from(buffer.cols));
    let (mut own, mut rest) = (vec![], vec![]);
    let (first, last) = (lo.div_ceil(per), if hi == cols { hi.div_ceil(per) } else { hi / per });
    // A packet of padding follows an odd number of packets.
    let end = if hi == cols { last.next_multiple_of(2) } else { last };
    if first < end {
        own.push((base + first * 8, base + end * 8));
    }
    let mut half = |packet: u64, from: u64, to: u64| {
        let at = base + packet * 8;
        own.extend([(at + from * each, at + to * each), (at + 4, at + 8)]);
        rest.extend([(at, at + from * each), (at + to * each, at + 4)].into_iter().filter(|r| r.0 < r.1));
    };
    if lo % per != 0 {
        let to = if lo / per == hi / per && hi != cols { hi % per } else { per };
        half(lo / per, lo % per, to);
    }
    if hi != cols && hi % per != 0 && (lo % per == 0 || lo / per != hi / per) {
        half(hi / per, 0, hi % per);
    }
    (own, rest)
}

impl Window {
    /// Lays out steps from position `from` on, the largest of the rows, with tables of the host.
    pub fn new(plan: &Plan, from: u32, steps: u32, draw: &Draw) -> Result<Window, Fault> {
        let s = plan.schedule;
        let k = s.machine.sms as usize;
        let from = from.max(draw.positions.iter().copied().max().unwrap_or(0));
        let positions: Vec<u32> = (from..s.program.context_max).take(steps.min(draw.steps) as usize).collect();
        // No task accesses rows that the launch does not have.
        let present = draw.positions.len() as u32;
        let regime_of: Vec<usize> = positions
            .iter()
            .map(|&p| s.regimes.iter().rposition(|r| r.from_position <= p).expect("the first starts at 0"))
            .collect();
        // By step: rows choose anew in each.
        let of_step = |(step, &r): (usize, &usize)| -> Vec<Foot> {
            let choices = |deal: &Deal| draw.choices(step, deal.parts, deal.slots);
            plan.feet[r].iter().map(|foot| foot.of_step(&draw.sequences, choices)).collect()
        };
        let feet: Vec<Vec<Foot>> = regime_of.iter().enumerate().map(of_step).collect();
        let regimes: Vec<&Regime> = regime_of.iter().map(|&r| &s.regimes[r]).collect();
        let phase = |buffer: BufferId, step: usize| {
            u64::from(positions[step] % s.program.buffers[buffer.index()].phases.max(1))
        };
        let before = |buffer: BufferId, step: usize| {
            let phases = s.program.buffers[buffer.index()].phases.max(1);
            u64::from((positions[step] + phases - 1) % phases)
        };

        // Instances, in the order of steps and tasks.
        let mut bases = vec![0u32];
        for regime in &regimes {
            bases.push(bases[bases.len() - 1] + regime.tasks.len() as u32);
        }
        if u64::from(bases[positions.len()]) * u64::from(IDS) > u64::from(u32::MAX / 2) {
            return Err(Fault::new(Kind::Malformed, "too many tasks for this judge"));
        }
        let grids = s.program.grids.len() as u32;
        let private_id = |step: usize, grid: Option<u32>| grid.map_or(u32::MAX, |g| step as u32 * grids + g + 1);
        let id = |step: usize, task: usize, write: usize| (bases[step] + task as u32 + 1) * IDS + 2 * write as u32;

        // Borders.
        let (mut cuts, mut privates, mut outputs, mut caches) =
            (Cuts::default(), Cuts::default(), Cuts::default(), Cuts::default());
        // A separate space for each buffer, if addresses are not shadowed by byte of an arena.
        let wide = |touch: &Touch| {
            let base = (touch.buffer.index() as u64) << 48 | u64::from(touch.row) << 32;
            (base + u64::from(touch.lo), base + u64::from(touch.hi))
        };
        for step in 0..regime_of.len() {
            for event in &regimes[step].events {
                for at in [phase(event.buffer, step), before(event.buffer, step)] {
                    let all = about(s, event, present).flat_map(|touch| spans(plan, &touch, at).0);
                    all.for_each(|r| cuts.add(r.0, r.1));
                }
            }
            for foot in &feet[step] {
                for touch in foot.writes.iter().chain(&foot.reads).chain(&foot.choices) {
                    for at in [phase(touch.buffer, step), before(touch.buffer, step)] {
                        let (own, rest) = spans(plan, touch, at);
                        own.iter().chain(&rest).for_each(|r| cuts.add(r.0, r.1));
                    }
                }
                for touch in foot.private_reads.iter().chain(&foot.private_writes) {
                    let (lo, hi) = wide(touch);
                    privates.add(lo, hi);
                }
                for touch in foot.appends.iter().chain(&foot.history) {
                    let (lo, hi) = wide(touch);
                    caches.add(lo, hi);
                }
                for touch in &foot.outputs {
                    let each = s.program.buffers[touch.buffer.index()].dtype.bytes() as u64;
                    let row = u64::from(touch.row) * u64::from(s.program.buffers[touch.buffer.index()].cols);
                    let base = s.placement[touch.buffer.index()].unwrap_or(0) + row * each;
                    outputs.add(base + u64::from(touch.lo) * each, base + u64::from(touch.hi) * each);
                }
            }
        }
        for c in [&mut cuts, &mut privates, &mut outputs, &mut caches] {
            c.seal();
        }

        // Writers of exchange buffers and of private ones, by step and buffer.
        let writers: Vec<Writers> = regimes.iter().zip(&feet).map(|(regime, feet)| Writers::of(regime, feet)).collect();

        let mut window = Window {
            poll: Poll::Counts,
            late: None,
            k,
            bulk: plan.bulk,
            slots: s.machine.ring.slots,
            instances: vec![],
            lanes: vec![vec![]; k],
            loads: vec![vec![]; k],
            firsts: vec![vec![0]; k],
            consumed: vec![vec![]; k],
            expects: vec![],
            events: vec![],
            readers: BTreeMap::new(),
            layout: Layout {
                at: 0,
                phase: 0,
                loaded: 0,
                signalled: 0,
                visible: 0,
                fenced: 0,
                gate: 0,
                shadow: 0,
                private: 0,
                outputs: 0,
                clocks: 0,
                late: 0,
                len: 0,
            },
            names: vec![],
        };

        // Events.
        let mut event_bases = vec![0u32];
        let mut clocks = 0u32;
        for (step, feet) in feet.iter().enumerate() {
            let regime = regimes[step];
            for (e, event) in regime.events.iter().enumerate() {
                let clock = orders_memory(event.mechanism).then(|| {
                    clocks += 1;
                    clocks - 1
                });
                let by = regime.tasks.iter().enumerate().filter(|(_, t)| t.signals.contains(&EventId(e as u32)));
                let by = by.map(|(t, _)| {
                    let mut atoms = vec![];
                    for (w, write) in feet[t].writes.iter().enumerate() {
                        let of_row = event.row.is_none_or(|row| row == write.row);
                        if write.buffer == event.buffer && of_row && write.lo < event.hi && event.lo < write.hi {
                            let part = Touch { lo: write.lo.max(event.lo), hi: write.hi.min(event.hi), ..*write };
                            let own = spans(plan, &part, phase(part.buffer, step)).0;
                            atoms.extend(own.iter().map(|r| (cuts.atoms(r.0, r.1), id(step, t, w))));
                        }
                    }
                    (bases[step] + t as u32, atoms)
                });
                let by = by.collect();
                window.events.push(EventAt { tagged: event.mechanism != Mechanism::Counter, clock, by });
            }
            event_bases.push(window.events.len() as u32);
        }

        // Pieces of regions, found once for each region, reader's grid and step.
        let mut known: BTreeMap<(usize, Touch, u32), u32> = BTreeMap::new();
        for (step, &r) in regime_of.iter().enumerate() {
            let regime = regimes[step];
            let owners = regime.owners();
            for (t, task) in regime.tasks.iter().enumerate() {
                let foot = &feet[step][t];
                let sm = owners[t].expect("every task is in a queue").index();
                let op = &s.program.grids[task.grid.index()].op;
                let after = regime.streams[sm].iter().find(|run| run.task.index() == t).and_then(|run| run.after);
                let count = after.map_or(0, |event| regime.events[event.index()].count);
                let loader = after.map(|event| Wait { event, count });
                let waits = task.waits.iter().copied().chain(loader).map(|wait| {
                    let event = &regime.events[wait.event.index()];
                    let orders = orders_memory(event.mechanism);
                    let words = event.mechanism == Mechanism::Words;
                    let of = if event.carried { step.checked_sub(1) } else { Some(step) };
                    let tags = of.filter(|_| event.mechanism != Mechanism::Counter).map(|of| {
                        let buffer = &s.program.buffers[event.buffer.index()];
                        if words {
                            // A task polls the words of its own part.
                            let at = phase(event.buffer, of);
                            let all = polled(s, event, present, foot, draw).into_iter();
                            let all = all.flat_map(|touch| spans(plan, &touch, at).0);
                            return (all.flat_map(|r| cuts.atoms(r.0, r.1)).collect(), of);
                        }
                        let per = u64::from(4 / buffer.dtype.bytes().min(4) as u32);
                        let base = s.placement[event.buffer.index()].unwrap_or(0)
                            + phase(event.buffer, of) * phase_bytes(buffer);
                        let mut atoms: Vec<u32> = vec![];
                        for touch in polled(s, event, present, foot, draw) {
                            let base = base + u64::from(touch.row) * row_bytes(buffer);
                            let packets = u64::from(touch.lo) / per..u64::from(touch.hi).div_ceil(per);
                            atoms.extend(packets.map(|p| cuts.atom(base + 8 * p + 4)));
                        }
                        atoms.dedup();
                        (atoms, of)
                    });
                    let mut on = WaitOn {
                        tags,
                        words,
                        event: Some(event_bases[step] + wait.event.0),
                        count: wait.count,
                        never: false,
                        orders,
                        proxy: event.proxy,
                    };
                    if event.carried {
                        on.event = None;
                        if step > 0 {
                            // The same object in the step before: by buffer and columns where the regime changes.
                            let earlier = regimes[step - 1];
                            let same = if regime_of[step - 1] == r {
                                Some(wait.event.index())
                            } else {
                                earlier.events.iter().position(|e| {
                                    let place = |e: &Event| (e.buffer, e.row, e.lo, e.hi);
                                    e.carried && place(e) == place(event)
                                })
                            };
                            match same {
                                Some(e) => {
                                    let other = &earlier.events[e];
                                    let tagged = |m: Mechanism| m != Mechanism::Counter;
                                    on.never = tagged(other.mechanism) != tagged(event.mechanism);
                                    on.orders = orders && orders_memory(other.mechanism);
                                    on.event = Some(event_bases[step - 1] + e as u32);
                                }
                                None => on.never = true,
                            }
                        }
                    }
                    on
                });
                let mut waits: Vec<WaitOn> = waits.collect();
                let after_on = if after.is_some() { waits.pop() } else { None };

                let mut reads = vec![];
                for touch in foot.reads.iter().chain(&foot.choices) {
                    let key = (step, *touch, task.grid.0);
                    let index = match known.get(&key) {
                        Some(&index) => index,
                        None => {
                            let mut pieces = vec![];
                            let found = writers[step].pieces(touch, Some(task.grid.0))?;
                            for (lo, hi, writer) in found {
                                let part = Touch { lo, hi, ..*touch };
                                let (from, at_phase, writer) = match writer {
                                    Some(w) => (step, phase(touch.buffer, step), Some(w)),
                                    // The step before; before the first there is a prompt.
                                    None if step == 0 && matches!(op, Op::Select) => continue,
                                    None if step == 0 => (0, 0, None),
                                    None => {
                                        let earlier = &writers[step - 1];
                                        for (lo, hi, writer) in earlier.pieces(&part, None)? {
                                            let part = Touch { lo, hi, ..part };
                                            let Some((t, w)) = writer else {
                                                return Err(unwritten(&part, t, positions[step]));
                                            };
                                            let own = spans(plan, &part, before(part.buffer, step)).0;
                                            pieces.extend(own.iter().map(|r| Piece {
                                                atoms: cuts.atoms(r.0, r.1),
                                                id: id(step - 1, t, w),
                                                lo,
                                                hi,
                                            }));
                                        }
                                        continue;
                                    }
                                };
                                let Some((w_task, w)) = writer else {
                                    return Err(unwritten(&part, t, positions[step]));
                                };
                                let own = spans(plan, &part, at_phase).0;
                                pieces.extend(own.iter().map(|r| Piece {
                                    atoms: cuts.atoms(r.0, r.1),
                                    id: id(from, w_task, w),
                                    lo,
                                    hi,
                                }));
                            }
                            window.expects.push(Expect { pieces });
                            let index = window.expects.len() as u32 - 1;
                            known.insert(key, index);
                            index
                        }
                    };
                    // Packets guarantee their own payload; a read without a wait, or after a counter, has no such guarantee.
                    let covers = |piece: &Piece| {
                        let mut at = piece.lo;
                        while at < piece.hi {
                            let waited = task.waits.iter().map(|w| w.event).chain(after);
                            let next = waited.map(|e| &regime.events[e.index()]).filter_map(|e| {
                                let tags = e.mechanism != Mechanism::Counter;
                                let here = e.buffer == touch.buffer && e.row.is_none_or(|row| row == touch.row);
                                (tags && here && e.lo <= at && at < e.hi).then_some(e.hi)
                            });
                            match next.max() {
                                Some(next) => at = next,
                                None => return false,
                            }
                        }
                        true
                    };
                    let vouched = window.expects[index as usize].pieces.iter().map(covers).collect();
                    for piece in &window.expects[index as usize].pieces {
                        let of = window.readers.entry(piece.id).or_default();
                        of.push((bases[step] + t as u32, piece.atoms.clone()));
                    }
                    reads.push((index, vouched));
                }

                // Each packet is a store of its own. What different events are about may land apart.
                let stores = foot.writes.iter().enumerate();
                let stores =
                    stores.flat_map(|(w, touch)| apart(s, regime, touch).into_iter().map(move |part| (w, part)));
                let writes = stores.map(|(w, touch)| {
                    let (own, rest) = spans(plan, &touch, phase(touch.buffer, step));
                    let own = own.iter().map(|r| (cuts.atoms(r.0, r.1), id(step, t, w)));
                    let rest = rest.iter().map(|r| (cuts.atoms(r.0, r.1), id(step, t, w) + 1));
                    own.chain(rest).collect()
                });
                // Words of the previous step are cleared for the next one. All clears of a task may land late together.
                let words = foot.writes.iter().filter(|touch| s.program.buffers[touch.buffer.index()].words);
                let cleared: Pieces = words
                    .flat_map(|touch| spans(plan, touch, before(touch.buffer, step)).0)
                    .map(|r| (cuts.atoms(r.0, r.1), id(step, t, 0) + CLEARED))
                    .collect();
                let cleared = (!cleared.is_empty()).then_some(cleared);
                let writes = writes.chain(cleared).collect();

                let mut private_reads = vec![];
                for touch in &foot.private_reads {
                    for (lo, hi, grid) in writers[step].private(touch, task.grid.0) {
                        let (a, b) = wide(&Touch { lo, hi, ..*touch });
                        private_reads.push((privates.atoms(a, b), private_id(step, grid)));
                    }
                }
                let ranges = |cuts: &Cuts, touches: &[Touch]| -> Vec<Range<u32>> {
                    touches.iter().map(wide).map(|(a, b)| cuts.atoms(a, b)).collect()
                };
                let output = |t: &Touch| {
                    let each = s.program.buffers[t.buffer.index()].dtype.bytes() as u64;
                    let row = u64::from(t.row) * u64::from(s.program.buffers[t.buffer.index()].cols);
                    let base = s.placement[t.buffer.index()].unwrap_or(0) + row * each;
                    outputs.atoms(base + u64::from(t.lo) * each, base + u64::from(t.hi) * each)
                };
                let choices = reads.split_off(foot.reads.len());
                let history = (!choices.is_empty()).then_some(History {
                    gated: false,
                    after: after_on,
                    choices,
                    ordinal: 0,
                    chunks: 0,
                    before: 0,
                    rows: vec![],
                });
                window.instances.push(Instance {
                    sm,
                    place: 0,
                    step,
                    waits,
                    signals: task.signals.iter().map(|e| event_bases[step] + e.0).collect(),
                    reads,
                    writes,
                    private_reads,
                    private_id: private_id(step, Some(task.grid.0)),
                    private_writes: ranges(&privates, &foot.private_writes),
                    outputs: foot.outputs.iter().map(output).collect(),
                    history,
                });
                window.names.push(format!("t{t} of r{r} at position {}", positions[step]));
            }
        }

        // Lanes, and what loaders bring in.
        for (step, regime) in regimes.iter().enumerate() {
            for (sm, queue) in regime.queues.iter().enumerate() {
                let mut runs = regime.streams[sm].iter();
                for task in queue {
                    let instance = bases[step] + task.0;
                    let lane = &mut window.lanes[sm];
                    window.instances[instance as usize].place = lane.len() as u32;
                    lane.push(instance);
                    let consumed = &mut window.consumed[sm];
                    let before = consumed.last().copied().unwrap_or(0);
                    let grid = &s.program.grids[regime.tasks[task.index()].grid.index()];
                    // Nothing is loaded for a row that the launch does not have.
                    let absent = grid.per_row && regime.tasks[task.index()].row >= present;
                    let chunks = match &grid.op {
                        Op::MatVec(m) => match runs.next().map(|r| r.source).filter(|_| !absent) {
                            Some(Source::Units { lo, hi, .. }) => {
                                let element = s.program.precision.weights.bytes() as u32;
                                let unit = m.k.div_ceil(64 / element * 8 / m.unit_rows) * m.slots;
                                let (units, ring) = (hi - lo, &s.machine.ring);
                                let granules = u64::from(unit) * u64::from(units);
                                let chunks = chunks(granules, units, ring.slot_bytes / 512, ring.arrivals);
                                if let Some(chosen) = &mut window.instances[instance as usize].history {
                                    (chosen.ordinal, chosen.before) = (window.loads[sm].len() as u32, before);
                                    chosen.chunks = chunks;
                                    window.loads[sm].push(instance);
                                }
                                chunks
                            }
                            _ => 0,
                        },
                        Op::Attention(a) => {
                            let rows = match runs.next().map(|r| r.source) {
                                Some(Source::History { rows }) => rows,
                                _ => 1,
                            };
                            let row = regime.tasks[task.index()].row as usize;
                            let (start, end) = match draw.positions.get(row) {
                                Some(position) => {
                                    let (at, past) = (position + step as u32, draw.past(row) + step as u32);
                                    share(a.window, a.splits, at, past, regime.tasks[task.index()].j)
                                }
                                None => (0, 0),
                            };
                            let chunks = 2 * (end - start).div_ceil(rows);
                            let mut found = vec![];
                            for touch in &feet[step][task.index()].history {
                                for past in start..end {
                                    let Some((at, by)) = appended(draw, row, past, step, positions.len())? else {
                                        continue;
                                    };
                                    // The tasks that append these columns of that row.
                                    let mut covered = touch.lo;
                                    while covered < touch.hi {
                                        let writer = feet[at].iter().enumerate().find_map(|(t, foot)| {
                                            let mut parts = foot.appends.iter();
                                            parts
                                                .find(|a| {
                                                    let place = a.buffer == touch.buffer && a.row as usize == by;
                                                    place && a.lo <= covered && covered < a.hi
                                                })
                                                .map(|a| (t, a.hi))
                                        });
                                        let Some((t, hi)) = writer else {
                                            let what = format!("{} reads a row that no task appends", *task);
                                            return Err(Fault::new(Kind::Unwritten, what));
                                        };
                                        let part = Touch { lo: covered, hi: hi.min(touch.hi), ..*touch };
                                        let (a, b) = wide(&part);
                                        found.push((caches.atoms(a, b), (bases[at] + t as u32) as usize));
                                        covered = hi;
                                    }
                                }
                            }
                            let ordinal = window.loads[sm].len() as u32;
                            window.loads[sm].push(instance);
                            window.instances[instance as usize].history = Some(History {
                                gated: true,
                                after: None,
                                choices: vec![],
                                ordinal,
                                chunks,
                                before,
                                rows: found,
                            });
                            chunks
                        }
                        _ => 0,
                    };
                    consumed.push(before + chunks);
                }
                let lane = window.lanes[sm].len() as u32;
                window.firsts[sm].push(lane);
            }
        }
        appended_twice(plan)?;
        in_place(s, draw, positions.len())?;
        window.layout = layout(&window, cuts.len(), privates.len(), outputs.len(), clocks as usize);
        Ok(window)
    }

    pub fn start(&self) -> State {
        State(vec![0; self.layout.len])
    }

    /// Movers: blocks, then loaders, then the store that lands late.
    pub fn movers(&self) -> usize {
        2 * self.k + 1
    }

    /// Stores that may land late: writes of exchange memory by tasks that release nothing themselves. Stores without a poll come
    /// first, because polled ones are noticed when they land.
    pub fn stores(&self) -> Vec<(usize, usize)> {
        let unreleased = |i: &&Instance| i.signals.iter().all(|&e| self.events[e as usize].clock.is_none());
        let instances = self.instances.iter().enumerate().filter(|(_, i)| unreleased(i));
        let mut stores: Vec<_> = instances.flat_map(|(at, i)| (0..i.writes.len()).map(move |w| (at, w))).collect();
        let read = |&(at, w): &(usize, usize)| {
            let mut pieces = self.instances[at].writes[w].iter();
            pieces.any(|(_, id)| self.readers.contains_key(id))
        };
        stores.sort_by_cached_key(read);
        stores
    }

    /// Whether all blocks have ended.
    pub fn over(&self, state: &State) -> bool {
        (0..self.k).all(|sm| state.0[self.layout.at + sm] as usize == self.lanes[sm].len())
    }

    /// Moves that a block has made, and all its moves.
    pub fn progress(&self, state: &State, sm: usize) -> (u32, u32) {
        let l = &self.layout;
        (state.0[l.at + sm] * 3 + state.0[l.phase + sm], self.lanes[sm].len() as u32 * 3)
    }

    /// Whether the store that is held back has been overtaken: its data are older than those in memory.
    pub fn overtaken(&self, state: &State) -> bool {
        let Some((at, write)) = self.late.filter(|_| state.0[self.layout.late] == PENDING) else { return false };
        let step = self.instances[at].step;
        let mut atoms = self.instances[at].writes[write].iter().flat_map(|(range, _)| range.clone());
        atoms.any(|atom| {
            let found = state.0[self.layout.shadow + atom as usize];
            found != NO_WRITER && self.instances[instance_of(found)].step > step
        })
    }

    fn current(&self, state: &State, sm: usize) -> Option<usize> {
        self.lanes[sm].get(state.0[self.layout.at + sm] as usize).map(|&i| i as usize)
    }

    fn done(&self, state: &State, instance: usize) -> bool {
        let i = &self.instances[instance];
        state.0[self.layout.at + i.sm] > i.place
    }

    /// Whether a mover can move.
    pub fn enabled(&self, state: &State, mover: usize) -> bool {
        if mover == 2 * self.k {
            return state.0[self.layout.late] == PENDING;
        }
        if mover >= self.k {
            return self.load_enabled(state, mover - self.k);
        }
        let Some(at) = self.current(state, mover) else { return false };
        let instance = &self.instances[at];
        match state.0[self.layout.phase + mover] {
            WAIT => instance.waits.iter().all(|w| self.satisfied(state, w)),
            READ => match &instance.history {
                // Its chunks are in the ring; with no rows there are none.
                Some(h) => h.chunks == 0 || state.0[self.layout.loaded + mover] > h.ordinal,
                None => true,
            },
            _ => true,
        }
    }

    fn satisfied(&self, state: &State, wait: &WaitOn) -> bool {
        if self.poll == Poll::Tags
            && let Some((atoms, step)) = &wait.tags
        {
            return atoms.iter().all(|atom| {
                let found = state.0[self.layout.shadow + *atom as usize];
                if wait.words {
                    return !is_cleared(found);
                }
                found != NO_WRITER && self.instances[instance_of(found)].step == *step
            });
        }
        if wait.never {
            return false;
        }
        let Some(e) = wait.event else { return true };
        if state.0[self.layout.signalled + e as usize] < wait.count {
            return false;
        }
        let event = &self.events[e as usize];
        if !event.tagged {
            return true;
        }
        // The poll looks at the packets: those that were published must still carry the tag.
        let intact =
            event.by.iter().filter(|(instance, _)| self.done(state, *instance as usize)).filter(|(_, atoms)| {
                atoms.iter().all(|(range, id)| range.clone().all(|a| state.0[self.layout.shadow + a as usize] == *id))
            });
        intact.count() >= wait.count.min(event.by.len() as u32) as usize
    }

    fn load_enabled(&self, state: &State, sm: usize) -> bool {
        let l = &self.layout;
        let Some(&next) = self.loads[sm].get(state.0[l.loaded + sm] as usize) else { return false };
        let instance = &self.instances[next as usize];
        let Some(h) = &instance.history else { return false };
        // Gate: the first task of the SM's queue in that step is done.
        let first = self.firsts[sm][instance.step];
        let at = state.0[l.at + sm];
        if h.gated && at <= first || h.after.as_ref().is_some_and(|after| !self.satisfied(state, after)) {
            return false;
        }
        // A free slot for its first chunk. Chunks of a task are freed one by one while it reads; weights stream through.
        let consumed = if at == 0 { 0 } else { self.consumed[sm][at as usize - 1] };
        let reading = at == instance.place;
        reading || h.before.saturating_sub(consumed) < self.slots
    }

    /// Makes the move of `mover`, which is enabled.
    pub fn apply(&self, state: &mut State, mover: usize) -> Result<(), Fault> {
        if mover == 2 * self.k {
            return self.land(state);
        }
        if mover >= self.k {
            return self.load(state, mover - self.k);
        }
        let Some(at) = self.current(state, mover) else { return Ok(()) };
        let l = &self.layout;
        let phase = state.0[l.phase + mover];
        match phase {
            WAIT => self.acquire(state, at),
            READ => self.read(state, at)?,
            _ => self.publish(state, at)?,
        }
        if phase == PUBLISH {
            state.0[l.phase + mover] = WAIT;
            state.0[l.at + mover] += 1;
        } else {
            state.0[l.phase + mover] = phase + 1;
        }
        Ok(())
    }

    fn acquire(&self, state: &mut State, at: usize) {
        let (l, k) = (&self.layout, self.k);
        let instance = &self.instances[at];
        let (visible, fenced) = (l.visible + instance.sm * k, l.fenced + instance.sm * k);
        let join = |state: &mut State, into: usize, from: usize| {
            for i in 0..k {
                state.0[into + i] = state.0[into + i].max(state.0[from + i]);
            }
        };
        for wait in instance.waits.iter().filter(|w| w.orders) {
            let Some(clock) = wait.event.and_then(|e| self.events[e as usize].clock) else { continue };
            join(state, visible, l.clocks + clock as usize * k);
        }
        // A fence counts only in the loader, which takes over from the first task of the queue.
        let first = instance.place == self.firsts[instance.sm][instance.step];
        if first && instance.waits.iter().any(|w| w.proxy) {
            join(state, fenced, visible);
        }
    }

    /// Reads of exchange memory, by a block or its loader. A loader may have acquired an event itself.
    fn look(&self, state: &State, at: usize, reads: &[(u32, Vec<bool>)], acquired: Option<u32>) -> Result<(), Fault> {
        let (l, k) = (&self.layout, self.k);
        let instance = &self.instances[at];
        for (expect, vouched) in reads {
            for (piece, vouched) in self.expects[*expect as usize].pieces.iter().zip(vouched) {
                for atom in piece.atoms.clone() {
                    let found = state.0[l.shadow + atom as usize];
                    if found != piece.id {
                        return Err(self.wrong(at, found, piece.id, "exchange memory"));
                    }
                }
                let writer = &self.instances[instance_of(piece.id)];
                let known = acquired.map_or(0, |clock| state.0[l.clocks + clock as usize * k + writer.sm]);
                if !vouched && state.0[l.visible + instance.sm * k + writer.sm].max(known) <= writer.place {
                    let what = format!("{} reads what {} wrote, unfenced", self.names[at], self.name(piece.id));
                    return Err(Fault::new(Kind::Invisible, what));
                }
            }
        }
        Ok(())
    }

    fn read(&self, state: &State, at: usize) -> Result<(), Fault> {
        let (l, instance) = (&self.layout, &self.instances[at]);
        self.look(state, at, &instance.reads, None)?;
        for (range, id) in &instance.private_reads {
            for atom in range.clone() {
                let found = state.0[l.private + instance.sm * self.private_len() + atom as usize];
                if found != *id {
                    let kind = if found == NO_WRITER { Kind::Unwritten } else { Kind::Stale };
                    let what = format!("{} reads shared memory of another task, step or SM", self.names[at]);
                    return Err(Fault::new(kind, what));
                }
            }
        }
        Ok(())
    }

    fn private_len(&self) -> usize {
        (self.layout.outputs - self.layout.private) / self.k
    }

    fn name(&self, id: Id) -> &str {
        &self.names[instance_of(id)]
    }

    fn wrong(&self, at: usize, found: Id, expected: Id, place: &str) -> Fault {
        let reader = &self.names[at];
        if is_cleared(found) {
            let what = format!("{reader} reads {place} that {} should have written", self.name(expected));
            return Fault::new(Kind::Unwritten, what);
        }
        let what = format!("{reader} reads {place} of {}, not of {}", self.name(found), self.name(expected));
        Fault::new(Kind::Stale, what)
    }

    /// The store that was held back reaches memory, and overwrites its current contents.
    fn land(&self, state: &mut State) -> Result<(), Fault> {
        state.0[self.layout.late] = LANDED;
        let Some((at, write)) = self.late else { return Ok(()) };
        self.store(state, at, &self.instances[at].writes[write])
    }

    fn publish(&self, state: &mut State, at: usize) -> Result<(), Fault> {
        let (l, k) = (&self.layout, self.k);
        let instance = &self.instances[at];
        if state.0[l.late] == PENDING
            && let Some((held, write)) = self.late
            && self.instances[held].sm == instance.sm
        {
            let releases = instance.signals.iter().any(|&e| self.events[e as usize].clock.is_some());
            let mut over = instance.writes.iter().flatten();
            let again = over.any(|(range, _)| {
                self.instances[held].writes[write].iter().any(|(r, _)| r.start < range.end && range.start < r.end)
            });
            if releases || again {
                self.land(state)?;
            }
        }
        for (w, pieces) in instance.writes.iter().enumerate() {
            if self.late == Some((at, w)) {
                state.0[l.late] = PENDING;
            } else {
                self.store(state, at, pieces)?;
            }
        }
        for range in &instance.private_writes {
            for atom in range.clone() {
                state.0[l.private + instance.sm * self.private_len() + atom as usize] = instance.private_id;
            }
        }
        for range in &instance.outputs {
            for atom in range.clone() {
                let cell = l.outputs + atom as usize;
                let old = state.0[cell];
                if old != NO_WRITER {
                    let writer = &self.instances[old as usize - 1];
                    if state.0[l.visible + instance.sm * k + writer.sm] <= writer.place && writer.sm != instance.sm {
                        let (new, old) = (&self.names[at], &self.names[old as usize - 1]);
                        let what = format!("{new} writes for the host over {old}, which may land later");
                        return Err(Fault::new(Kind::Invisible, what));
                    }
                }
                state.0[cell] = at as u32 + 1;
            }
        }
        // Its own writes are visible to itself, and to waiters of an event about them.
        let visible = l.visible + instance.sm * k;
        state.0[visible + instance.sm] = instance.place + 1;
        for &event in &instance.signals {
            state.0[l.signalled + event as usize] += 1;
            if let Some(clock) = self.events[event as usize].clock {
                let clock = l.clocks + clock as usize * k;
                for i in 0..k {
                    state.0[clock + i] = state.0[clock + i].max(state.0[visible + i]);
                }
            }
        }
        if instance.place == self.firsts[instance.sm][instance.step] {
            let from = if self.bulk { l.fenced } else { l.visible } + instance.sm * k;
            for i in 0..k {
                state.0[l.gate + instance.sm * k + i] = state.0[from + i];
            }
        }
        Ok(())
    }

    /// Pieces of exchange memory by one task.
    fn store(&self, state: &mut State, at: usize, pieces: &Pieces) -> Result<(), Fault> {
        let l = &self.layout;
        let mut seen = NO_WRITER;
        for (range, id) in pieces {
            for atom in range.clone() {
                let cell = l.shadow + atom as usize;
                let old = state.0[cell];
                state.0[cell] = *id;
                if old == NO_WRITER || old == seen || instance_of(old) == at {
                    continue;
                }
                seen = old;
                // A task that has yet to read the old value will not find it.
                let readers = self.readers.get(&old).into_iter().flatten();
                for (reader, atoms) in readers {
                    let unread = {
                        let r = &self.instances[*reader as usize];
                        let there = state.0[l.at + r.sm];
                        there < r.place || (there == r.place && state.0[l.phase + r.sm] <= READ)
                    };
                    if *reader as usize != at && unread && atoms.start < range.end && range.start < atoms.end {
                        let what = format!(
                            "{} overwrites what {} wrote before {} has read it",
                            self.names[at],
                            self.name(old),
                            self.names[*reader as usize]
                        );
                        return Err(Fault::new(Kind::Clobbered, what));
                    }
                }
            }
        }
        Ok(())
    }

    fn load(&self, state: &mut State, sm: usize) -> Result<(), Fault> {
        let (l, k) = (&self.layout, self.k);
        let load = state.0[l.loaded + sm] as usize;
        let at = self.loads[sm][load] as usize;
        if let Some(h) = &self.instances[at].history {
            let event = h.after.as_ref().filter(|after| after.orders).and_then(|after| after.event);
            self.look(state, at, &h.choices, event.and_then(|event| self.events[event as usize].clock))?;
            for (_, writer) in &h.rows {
                let w = &self.instances[*writer];
                // The loader sees what its block had acquired when it opened the gate.
                if state.0[l.gate + sm * k + w.sm] <= w.place {
                    let what =
                        format!("the loader of sm{sm} reads for {} a row of {}", self.names[at], self.names[*writer]);
                    return Err(Fault::new(Kind::Invisible, what));
                }
            }
        }
        state.0[l.loaded + sm] += 1;
        Ok(())
    }

    /// Describes which task waits for what in a state in which no task can move.
    pub fn hang(&self, state: &State) -> Fault {
        let mut who = vec![];
        for sm in 0..self.k {
            if let Some(at) = self.current(state, sm) {
                let what = if state.0[self.layout.phase + sm] == WAIT { "its events" } else { "its chunks" };
                who.push(format!("{} waits for {what}", self.names[at]));
            }
        }
        who.truncate(4);
        Fault::new(Kind::Hang, who.join("; "))
    }
}

fn unwritten(touch: &Touch, task: usize, position: u32) -> Fault {
    let Touch { buffer, row: _, lo, hi } = touch;
    let what = format!("t{task} reads columns {lo}..{hi} of {buffer} at position {position}, which no task writes");
    Fault::new(Kind::Unwritten, what)
}

/// Number of chunks of the granules of `units` units: whole units if a slot holds one, else parts of each unit, as equal as slots
/// allow, with the same number of granules for every warp.
fn chunks(granules: u64, units: u32, slot: u32, warps: u32) -> u32 {
    let (slot, warps) = (u64::from(slot.max(1)), u64::from(warps.max(1)));
    let unit = (granules / u64::from(units.max(1))).max(1);
    if unit <= slot {
        return granules.div_ceil(slot / unit * unit) as u32;
    }
    let most = (slot / warps * warps).max(1);
    let parts = unit.div_ceil(most);
    let part = unit.div_ceil(parts).next_multiple_of(warps).min(most);
    (unit.div_ceil(part) * u64::from(units)) as u32
}

/// The history that split `j` reads: rows below `past` of the window that is visible at the position, in splits of whole tiles.
pub(super) fn share(window: Option<u32>, splits: u32, position: u32, past: u32, j: u32) -> (u32, u32) {
    let first = window.map_or(0, |w| (position + 1).saturating_sub(w));
    let each = past.saturating_sub(first).div_ceil(splits).next_multiple_of(16);
    let start = (u64::from(first) + u64::from(j) * u64::from(each)).min(u64::from(past));
    let end = (start + u64::from(each)).min(u64::from(past));
    (start as u32, end as u32)
}

/// The rows of an event's columns that the launch has.
fn about<'a>(s: &'a Schedule, event: &'a Event, present: u32) -> impl Iterator<Item = Touch> + use<'a> {
    let rows = match event.row {
        Some(row) => row..(row + 1).min(present),
        None => 0..s.program.buffers[event.buffer.index()].rows.min(present),
    };
    rows.map(|row| Touch { buffer: event.buffer, row, lo: event.lo, hi: event.hi })
}

/// What a task polls of an event's columns: those of its part of the sequences, or of what is dealt to it.
fn polled(s: &Schedule, event: &Event, present: u32, foot: &Foot, draw: &Draw) -> Vec<Touch> {
    let about = about(s, event, present).filter(|touch| foot.takes(touch.row, &draw.sequences));
    // An event about what is dealt is about all of it, and a reader polls what it reads.
    let deals = |grid: &Grid| {
        let writes = |operand: &Operand| operand.access.writes() && operand.buffer == event.buffer;
        matches!(grid.second, Second::Dealt(_)) && grid.operands.iter().any(writes)
    };
    let whole = foot.deal.is_none() && !s.program.grids.iter().any(deals);
    if whole || foot.choices.iter().any(|choice| choice.buffer == event.buffer) {
        return about.collect();
    }
    let read = |touch: Touch| {
        let here = foot.reads.iter().filter(move |read| (read.buffer, read.row) == (touch.buffer, touch.row));
        here.map(move |read| Touch { lo: read.lo.max(touch.lo), hi: read.hi.min(touch.hi), ..touch })
    };
    about.flat_map(read).filter(|touch| touch.lo < touch.hi).collect()
}

/// The parts of a write between the borders of events, where these are between packets or words.
fn apart(s: &Schedule, regime: &Regime, touch: &Touch) -> Vec<Touch> {
    let per = 4 / s.program.buffers[touch.buffer.index()].dtype.bytes().clamp(2, 4) as u32;
    let about = regime.events.iter().filter(|event| event.buffer == touch.buffer);
    let inside = |col: &u32| touch.lo < *col && *col < touch.hi && col.is_multiple_of(per);
    let mut borders: Vec<u32> = about.flat_map(|event| [event.lo, event.hi]).filter(inside).collect();
    borders.extend([touch.lo, touch.hi]);
    borders.sort_unstable();
    borders.dedup();
    borders.windows(2).map(|pair| Touch { lo: pair[0], hi: pair[1], ..*touch }).collect()
}

/// The step of the window, and the row in it, that appended `past` for row `row` in step `step`; `None`: an earlier launch.
fn appended(draw: &Draw, row: usize, past: u32, step: usize, steps: usize) -> Result<Option<(usize, usize)>, Fault> {
    let rows = 0..draw.positions.len();
    let at = |by: usize, t: usize| draw.positions[by] + t as u32;
    let place = draw.place(row, past);
    let same = |by: usize, t: usize| draw.sequences[by] == draw.sequences[row] && at(by, t) == past;
    for (t, by) in (0..steps).flat_map(|t| rows.clone().map(move |by| (t, by))) {
        if draw.place(by, at(by, t)) == place && !same(by, t) {
            let what = format!("row {by} of the step writes over what row {row} reads of position {past}");
            return Err(Fault::new(Kind::Clobbered, what));
        }
    }
    let mut made = (0..=step).rev().flat_map(|t| rows.clone().map(move |by| (t, by)));
    match made.find(|&(t, by)| same(by, t)) {
        Some((t, by)) if t == step => {
            let what = format!("row {row} of the step reads what row {by} appends in it");
            Err(Fault::new(Kind::Invisible, what))
        }
        None if past >= draw.filled[row] => Err(Fault::new(
            Kind::Unwritten,
            format!("row {row} of the step reads position {past}, which no step wrote"),
        )),
        made => Ok(made),
    }
}

/// Rows of the cache are there, and no two rows of a step append to one.
fn in_place(s: &Schedule, draw: &Draw, steps: usize) -> Result<(), Fault> {
    let caches = s.program.buffers.iter().filter(|b| b.space == Space::Cache);
    let most = caches.map(|b| u64::from(b.rows)).min().unwrap_or(u64::MAX);
    for t in 0..steps {
        let mut places: Vec<u64> =
            (0..draw.positions.len()).map(|row| draw.place(row, draw.positions[row] + t as u32)).collect();
        places.sort_unstable();
        if places.windows(2).any(|w| w[0] == w[1]) {
            return Err(Fault::new(Kind::Clobbered, "two rows of a step append to one row of the cache"));
        }
        if places.iter().any(|place| *place >= most) {
            return Err(Fault::new(Kind::OutOfBounds, "a page beyond the cache"));
        }
    }
    Ok(())
}

/// A cache row with two writers in one step.
fn appended_twice(plan: &Plan) -> Result<(), Fault> {
    for feet in &plan.feet {
        let mut all: Vec<&Touch> = feet.iter().flat_map(|f| &f.appends).collect();
        all.sort();
        let one = |w: &&[&Touch]| (w[0].buffer, w[0].row) == (w[1].buffer, w[1].row);
        if let Some(w) = all.windows(2).filter(one).find(|w| w[1].lo < w[0].hi) {
            let what = format!("columns {}..{} of {} are appended twice", w[1].lo, w[0].hi, w[0].buffer);
            return Err(Fault::new(Kind::Clobbered, what));
        }
    }
    Ok(())
}

fn layout(w: &Window, shadow: usize, privates: usize, outputs: usize, clocks: usize) -> Layout {
    let k = w.k;
    let mut end = 0;
    let mut take = |n: usize| {
        end += n;
        end - n
    };
    let (at, phase, loaded) = (take(k), take(k), take(k));
    let signalled = take(w.events.len());
    let (visible, fenced, gate) = (take(k * k), take(k * k), take(k * k));
    let (shadow, private, outputs) = (take(shadow), take(privates * k), take(outputs));
    let (clocks, late) = (take(clocks * k), take(1));
    Layout { at, phase, loaded, signalled, visible, fenced, gate, shadow, private, outputs, clocks, late, len: end }
}

/// A writer's region: columns, grid, task, and which of its writes.
type Written = (u32, u32, u32, usize, usize);

/// The writers of each buffer in one regime.
struct Writers {
    exchange: BTreeMap<(BufferId, u32), Vec<Written>>,
    private: BTreeMap<(BufferId, u32), Vec<Written>>,
}

impl Writers {
    fn of(regime: &Regime, feet: &[Foot]) -> Writers {
        let mut writers = Writers { exchange: BTreeMap::new(), private: BTreeMap::new() };
        for (t, (task, foot)) in regime.tasks.iter().zip(feet).enumerate() {
            for (w, touch) in foot.writes.iter().enumerate() {
                let of = writers.exchange.entry((touch.buffer, touch.row)).or_default();
                of.push((touch.lo, touch.hi, task.grid.0, t, w));
            }
            for touch in &foot.private_writes {
                writers.private.entry((touch.buffer, touch.row)).or_default().push((
                    touch.lo,
                    touch.hi,
                    task.grid.0,
                    t,
                    0,
                ));
            }
        }
        writers
    }

    /// The parts of a region by their last writer before `grid` in program order; `None`: by the last writer of all.
    #[allow(clippy::type_complexity)] // Columns and a writer.
    fn pieces(&self, touch: &Touch, grid: Option<u32>) -> Result<Vec<(u32, u32, Option<(usize, usize)>)>, Fault> {
        let none = vec![];
        let all = self.exchange.get(&(touch.buffer, touch.row)).unwrap_or(&none);
        let of: Vec<&Written> =
            all.iter().filter(|w| w.0 < touch.hi && touch.lo < w.1 && grid.is_none_or(|grid| w.2 < grid)).collect();
        let mut pieces = vec![];
        for (lo, hi) in segments(touch, &of) {
            let here = of.iter().filter(|w| w.0 <= lo && hi <= w.1);
            let last = here.clone().max_by_key(|w| w.2);
            if let Some(last) = last
                && here.filter(|w| w.2 == last.2).count() > 1
            {
                let what = format!("columns {lo}..{hi} of {} have two producers", touch.buffer);
                return Err(Fault::new(Kind::Clobbered, what));
            }
            pieces.push((lo, hi, last.map(|w| (w.3, w.4))));
        }
        Ok(pieces)
    }

    /// The parts of a private region by the grid that writes them last before `grid`.
    fn private(&self, touch: &Touch, grid: u32) -> Vec<(u32, u32, Option<u32>)> {
        let none = vec![];
        let all = self.private.get(&(touch.buffer, touch.row)).unwrap_or(&none);
        let of: Vec<&Written> = all.iter().filter(|w| w.0 < touch.hi && touch.lo < w.1 && w.2 < grid).collect();
        let parts = segments(touch, &of).into_iter().map(|(lo, hi)| {
            let last = of.iter().filter(|w| w.0 <= lo && hi <= w.1).map(|w| w.2).max();
            (lo, hi, last)
        });
        parts.collect()
    }
}

/// A region cut at the borders of regions that overlap it.
fn segments(touch: &Touch, of: &[&Written]) -> Vec<(u32, u32)> {
    let mut borders = vec![touch.lo, touch.hi];
    borders.extend(of.iter().flat_map(|w| [w.0, w.1]).filter(|&b| touch.lo < b && b < touch.hi));
    borders.sort_unstable();
    borders.dedup();
    borders.windows(2).map(|w| (w[0], w[1])).collect()
}
