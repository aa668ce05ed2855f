//! Judges recurrent states: runs the launches that a host may make, and looks in which version each task finds its state.
//!
//! A state is plain memory, a row for each sequence, and no event is about it. What an SM wrote in a launch no other SM sees before the launch
//! ends. So this judge keeps, for the columns of each launch index of each row, which text wrote them last, at which position, on which SM and in
//! which launch. A task takes its rows of a step one after another. At position 0 it takes zeros, whatever lies there; at any later position it
//! must find what its own text left at the position before.
//!
//! The proof argues from the facts `at` and `consecutive`. This judge makes launches instead: some that keep both, and for each fact that is not
//! declared some that break it, because the host may make them.

use super::footprint::{Foot, Touch};
use super::{Fault, Kind};
use monobloc::ir::op::{Op, Role};
use monobloc::ir::schedule::Schedule;
use monobloc::ir::table::{Fact, Holds};
use std::collections::BTreeMap;

/// Most positions of a text.
const LONGEST: u32 = 64;

/// A launch: the sequence and the first position of each row, and its steps.
#[derive(Debug, Clone)]
struct Launch {
    rows: Vec<(u32, u32)>,
    steps: u32,
    /// Whether its rows begin texts, at whatever position. At position 0 they always do.
    begins: bool,
}

/// The last writer of the columns of a launch index.
#[derive(Debug, Clone, Copy)]
struct Version {
    end: u64,
    text: u32,
    position: u32,
    sm: usize,
    launch: usize,
}

/// Runs all launches of a schedule whose operands agree with the accesses of their ops.
pub fn judge(s: &Schedule, feet: &[Vec<Foot>]) -> Result<(), Fault> {
    if feet.iter().flatten().all(|foot| foot.states.is_empty()) {
        return Ok(());
    }
    for launches in histories(s) {
        Memory { s, feet, versions: BTreeMap::new(), texts: BTreeMap::new(), begun: 0 }.run(&launches)?;
    }
    Ok(())
}

/// What a host may launch, each list from memory without states.
fn histories(s: &Schedule) -> Vec<Vec<Launch>> {
    let p = &s.program;
    let table = |holds: Holds| p.tables.iter().find(|table| table.holds == holds);
    let declared = |holds: Holds, fact: Fact| table(holds).is_none_or(|table| table.facts.contains(&fact));
    let sequences = table(Holds::Sequences).map_or(1, |table| table.bound.max(1));
    let (rows, most) = (p.rows, p.context_max.min(LONGEST));
    let alone = |sequence, from: u32, steps: u32| Launch { rows: vec![(sequence, from)], steps, begins: false };
    // A text across all borders in one launch, and the next text in its place. Then one in two launches.
    let half = most / 2;
    let mut all =
        vec![vec![alone(0, 0, most), alone(0, 0, most.min(3)), alone(0, most.min(3), half.min(most - most.min(3)))]];
    all.push(vec![alone(sequences - 1, 0, half), alone(sequences - 1, half, most - half)]);
    if rows > 1 && sequences > 1 {
        let together = rows.min(sequences);
        // Rows change their places from launch to launch, and a sequence begins again among others.
        let turned = |turn: u32, position: u32| -> Vec<(u32, u32)> {
            (0..together).map(|row| ((row + turn) % together, position)).collect()
        };
        let of = |rows, steps| Launch { rows, steps, begins: false };
        let mut many: Vec<Launch> = (0..most.min(4)).map(|at| of(turned(at, at), 1)).collect();
        let next = most.min(4);
        if next < most {
            let again = |&(sequence, at): &(u32, u32)| (sequence, if sequence == 0 { 0 } else { at });
            many.push(of(turned(1, next).iter().map(again).collect(), most - next));
        }
        all.push(many);
        // Beside a text at its end, the others begin.
        let late = (0..together).map(|n| (n, if n == 0 { half } else { 0 })).collect();
        all.push(vec![alone(0, 0, half), of(late, (most - half).min(half.max(1)))]);
    }
    if rows > 1 {
        // A prompt in chunks, then one token at a time, then the next text.
        let chunk = |from: u32| {
            let rows = (from..(from + rows).min(most)).map(|position| (0, position)).collect();
            Launch { rows, steps: 1, begins: false }
        };
        let mut prompt = vec![chunk(0)];
        if rows < most {
            prompt.push(chunk(rows));
        }
        let read = (2 * rows).min(most);
        if read < most {
            prompt.push(alone(0, read, most - read));
        }
        prompt.push(chunk(0));
        all.push(prompt);
    }
    if !declared(Holds::Positions, Fact::At) && most > 2 {
        // Back without a snapshot, on without a step, and a text that begins where another one has ended, whose state is still there.
        all.push(vec![alone(0, 0, 2), alone(0, 1, 1)]);
        all.push(vec![alone(0, 0, 1), alone(0, 2, 1)]);
        all.push(vec![alone(0, 0, 2), Launch { begins: true, ..alone(0, 2, 1) }]);
    }
    if !declared(Holds::Sequences, Fact::Consecutive) && rows > 1 && most > 1 {
        all.push(vec![Launch { rows: vec![(0, 1), (0, 0)], steps: 1, begins: false }]);
    }
    for launches in &mut all {
        launches.retain(|launch| launch.steps > 0 && !launch.rows.is_empty());
    }
    all
}

struct Memory<'a> {
    s: &'a Schedule,
    feet: &'a [Vec<Foot>],
    /// By the first byte in the arena.
    versions: BTreeMap<u64, Version>,
    /// The current text of each sequence.
    texts: BTreeMap<u32, u32>,
    begun: u32,
}

impl Memory<'_> {
    fn run(&mut self, launches: &[Launch]) -> Result<(), Fault> {
        for (nth, launch) in launches.iter().enumerate() {
            for step in 0..launch.steps {
                let rows: Vec<(u32, u32)> = launch.rows.iter().map(|&(s, position)| (s, position + step)).collect();
                for &(sequence, position) in &rows {
                    let begins = position == 0 || launch.begins && step == 0;
                    if begins || !self.texts.contains_key(&sequence) {
                        self.begun += 1;
                        self.texts.insert(sequence, self.begun);
                    }
                }
                self.step(nth, &rows)?;
            }
        }
        Ok(())
    }

    fn step(&mut self, launch: usize, rows: &[(u32, u32)]) -> Result<(), Fault> {
        let (s, feet) = (self.s, self.feet);
        let largest = rows.iter().map(|row| row.1).max().unwrap_or(0);
        let r = s.regimes.iter().rposition(|regime| regime.from_position <= largest).unwrap_or(0);
        let sequences: Vec<u32> = rows.iter().map(|row| row.0).collect();
        for (sm, queue) in s.regimes[r].queues.iter().enumerate() {
            for id in queue.iter().filter(|id| !feet[r][id.index()].states.is_empty()) {
                let grid = &s.program.grids[s.regimes[r].tasks[id.index()].grid.index()];
                let each = columns_of_index(&grid.op);
                for touch in feet[r][id.index()].of_rows(&sequences).states {
                    let (sequence, position) = rows[touch.row as usize];
                    for lo in (touch.lo..touch.hi).step_by(each as usize) {
                        let part = Touch { lo, hi: lo.saturating_add(each).min(touch.hi), ..touch };
                        let said = |kind, what: &str| {
                            Fault::new(
                                kind,
                                format!("{id} of r{r} on sm{sm}, {sequence} at position {position}: {what}"),
                            )
                        };
                        self.update(&part, (sequence, position), (sm, launch))
                            .map_err(|(kind, what)| said(kind, what))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads and writes the columns of an index in the row of a sequence.
    fn update(
        &mut self,
        part: &Touch,
        (sequence, position): (u32, u32),
        (sm, launch): (usize, usize),
    ) -> Result<(), (Kind, &'static str)> {
        let buffer = &self.s.program.buffers[part.buffer.index()];
        let row = if buffer.rows > 1 { sequence } else { 0 };
        let place = self.s.placement[part.buffer.index()].unwrap_or(0);
        let at = |col: u32| place + 4 * (u64::from(row) * u64::from(buffer.cols) + u64::from(col));
        let (begin, end) = (at(part.lo), at(part.hi));
        let text = self.texts[&sequence];
        if position > 0 {
            let Some(found) = self.versions.get(&begin).filter(|version| version.end == end) else {
                return Err((Kind::Unwritten, "no task has left these columns of its state"));
            };
            if found.text != text {
                return Err((Kind::Stale, "finds the state of another text"));
            }
            if found.position + 1 != position {
                return Err((Kind::Stale, "finds the state of another position"));
            }
            if found.launch == launch && found.sm != sm {
                return Err((Kind::Invisible, "finds a state that another SM wrote in this launch"));
            }
        }
        // Whatever these columns overlap is lost.
        let from = self.versions.range(..begin).next_back().filter(|(_, version)| version.end > begin);
        let from = from.map_or(begin, |(at, _)| *at);
        let lost: Vec<u64> = self.versions.range(from..end).map(|(at, _)| *at).collect();
        for at in lost {
            self.versions.remove(&at);
        }
        self.versions.insert(begin, Version { end, text, position, sm, launch });
        Ok(())
    }
}

/// Columns of a state that a launch index has.
fn columns_of_index(op: &Op) -> u32 {
    match op {
        Op::Convolve(convolve) => (8 * (convolve.kernel - 1)).max(1),
        // Tasks of these ops have one index.
        _ => u32::MAX,
    }
}

/// Whether some grid of the program keeps a state.
pub fn has_states(s: &Schedule) -> bool {
    s.program.grids.iter().any(|grid| grid.operand(Role::State).is_some())
}
