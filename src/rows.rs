//! Owns the tables that the host writes for a launch: its rows, and the pages of their sequences.
//!
//! The proof of a program with tables uses the facts that the tables declare ([`crate::ir::table`]), so they must hold
//! before a kernel reads them. A [`Request`] is plain data that any code can make. [`Guard`] judges it and gives out
//! [`Tables`], which only this module makes. The guard keeps what earlier launches established, so it looks at the rows of
//! a launch, the pages that it writes, and the entries that changed; never at a whole history.

use crate::define_id;
use crate::ir::op::Op;
use crate::ir::program::Program;
use crate::ir::table::{Fact, Holds};
use thiserror::Error;

define_id!(
    /// A sequence: a row of the page table.
    SequenceId, "seq"
);
define_id!(
    /// A page of the pool: the same block of rows in every cache.
    PageId, "page"
);

/// The entry of a block without a page.
const NO_PAGE: u32 = u32::MAX;

/// The bounds of the tables of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Most rows of a step.
    pub rows: u32,
    pub sequences: u32,
    /// Positions run from 0 to `context_max - 1`.
    pub context_max: u32,
    /// Positions of a page.
    pub page_rows: u32,
    /// Pages of the pool.
    pub pages: u32,
    /// Most positions that a row sees, its own included; `None`: all.
    pub window: Option<u32>,
    /// Whether sequences have recurrent states: then positions follow one another.
    pub has_state: bool,
}

impl Shape {
    /// The bounds of the tables of `program`; `None` if it has no tables.
    pub fn of(program: &Program) -> Option<Shape> {
        let (sequences, pages) = (program.table(Holds::Sequences)?.1, program.table(Holds::Pages)?.1);
        let page_rows = program.buffers.iter().find_map(|buffer| buffer.paging)?.rows;
        // One layer without a window needs every page.
        let windows = program.grids.iter().filter_map(|grid| match &grid.op {
            Op::Attention(attention) => Some(attention.window),
            _ => None,
        });
        let window = windows.reduce(|a, b| Some(a?.max(b?))).flatten();
        let has_state = program.has_state();
        let Program { rows, context_max, .. } = *program;
        Some(Shape { rows, sequences: sequences.bound, context_max, page_rows, pages: pages.bound, window, has_state })
    }

    /// Entries of the page table of one sequence.
    pub fn blocks(&self) -> u32 {
        self.context_max.div_ceil(self.page_rows.max(1))
    }
}

/// One row of a step: a token of a sequence at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub sequence: SequenceId,
    /// Position in the first step of the launch.
    pub position: u32,
    /// Whether the head runs for the row. In a launch of several steps it must, because each step needs the token that follows.
    pub wants_logits: bool,
}

/// Neighbouring rows of one sequence: a part of a prompt, or the one row of a sequence that decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Index of the first row in the step.
    pub first: usize,
    pub rows: u32,
    pub sequence: SequenceId,
    /// Position of the first row. The history of all rows ends here.
    pub position: u32,
}

/// The runs of a step's rows, in order. Rows of one run are neighbours at consecutive positions.
pub fn runs(rows: &[Row]) -> impl Iterator<Item = Run> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let &Row { sequence, position, .. } = rows.get(first)?;
        let next = |(row, at): (&Row, u32)| row.sequence == sequence && position.checked_add(at) == Some(row.position);
        let of = rows[first..].iter().zip(0..).take_while(|&at| next(at)).count();
        let run = Run { first, rows: of as u32, sequence, position };
        first += of;
        Some(run)
    })
}

/// A change of the page table: block `block` of a sequence lies in `page`, or nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edit {
    pub sequence: SequenceId,
    pub block: u32,
    pub page: Option<PageId>,
}

/// A copy of the recurrent state of one sequence to another. One of the two is a *slot*: a sequence that never has a row, and whose state is a
/// snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateCopy {
    pub from: SequenceId,
    pub to: SequenceId,
}

/// Copies of recurrent states before a launch, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StateCopies {
    /// To slots. They are done before the edits, which may give a sequence to another text.
    pub saves: Vec<StateCopy>,
    /// From slots. They are done after the edits and after the saves.
    pub restores: Vec<StateCopy>,
}

impl StateCopies {
    fn all(&self) -> impl Iterator<Item = &StateCopy> {
        self.saves.iter().chain(&self.restores)
    }
}

/// The tables that a caller asks for: one row or more, at most as many as the program has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Request {
    pub rows: Vec<Row>,
    /// Steps of the launch; a row moves to the next position in each.
    pub steps: u32,
    /// Changes of the page table since the previous launch, in order.
    pub edits: Vec<Edit>,
}

/// Why tables are refused: the bound or the fact that they break.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refused {
    #[error("the launch has {found} rows, expected 1 to {most}")]
    Rows { most: u32, found: usize },
    #[error("{sequence} is not below {bound}")]
    Sequence { sequence: SequenceId, bound: u32 },
    #[error("row {row} ends at position {end}, beyond the context of {context_max}")]
    Position { row: usize, end: u64, context_max: u32 },
    #[error("block {block} of {sequence} is not below {bound}")]
    Block { sequence: SequenceId, block: u32, bound: u32 },
    #[error("{page} is not below {bound}")]
    Page { page: PageId, bound: u32 },
    #[error("row {row} writes block {block} of {sequence}, which has no page")]
    NoPage { row: usize, sequence: SequenceId, block: u32 },
    #[error("row {row} wants no logits in a launch of {steps} steps, expected 1 step")]
    Logits { row: usize, steps: u32 },
    #[error(
        "`consecutive`: row {row} is at position {position} of {sequence}, which has another row in the launch; expected \
         neighbours at consecutive ascending positions"
    )]
    Consecutive { row: usize, sequence: SequenceId, position: u32 },
    #[error("`consecutive`: {sequence} has {rows} rows in a launch of {steps} steps, expected 1 step")]
    Steps { sequence: SequenceId, rows: u32, steps: u32 },
    #[error("`filled`: row {row} is at position {position} of {sequence}, which is written from {from} to {to}")]
    Filled { row: usize, sequence: SequenceId, position: u32, from: u32, to: u32 },
    #[error(
        "`at`: row {row} is at position {position} of {sequence}, whose recurrent state is {}; expected position 0, or the one after",
        state_of(.kept)
    )]
    At { row: usize, sequence: SequenceId, position: u32, kept: Option<u32> },
    #[error(
        "`at`: the recurrent state of {from} is copied, and it is {}; expected one that a launch or a copy left",
        state_of(.kept)
    )]
    Copy { from: SequenceId, kept: Option<u32> },
    #[error("`at`: the state of {from} is copied to {to}, expected a slot for snapshots and a sequence with rows")]
    Slot { from: SequenceId, to: SequenceId },
    #[error("`at`: row {row} is of {sequence}, whose state is a snapshot; expected a sequence that is no slot")]
    Snapshot { row: usize, sequence: SequenceId },
    #[error("`distinct`: row {row} writes {page}, which the launch already writes")]
    Distinct { row: usize, page: PageId },
    #[error("`unshared`: row {row} writes {page}, which {holders} blocks hold")]
    Unshared { row: usize, page: PageId, holders: u32 },
}

impl Refused {
    /// The fact that is broken; `None` if an entry is out of its bound.
    pub fn fact(&self) -> Option<Fact> {
        match self {
            Refused::Consecutive { .. } | Refused::Steps { .. } => Some(Fact::Consecutive),
            Refused::Filled { .. } => Some(Fact::Filled),
            Refused::At { .. } | Refused::Copy { .. } | Refused::Slot { .. } | Refused::Snapshot { .. } => {
                Some(Fact::At)
            }
            Refused::Distinct { .. } => Some(Fact::Distinct),
            Refused::Unshared { .. } => Some(Fact::Unshared),
            _ => None,
        }
    }
}

fn state_of(kept: &Option<u32>) -> String {
    kept.map_or("not known".to_string(), |position| format!("that before position {position}"))
}

/// The guard's knowledge of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Held {
    /// Positions below this are written ...
    filled: u32,
    /// ... except those in the first blocks, as many as this, whose pages left the window.
    dropped: u32,
}

/// Keeps the facts that launches established about the page table, and judges the next request.
#[derive(Debug, Clone)]
pub struct Guard {
    shape: Shape,
    /// The page of each block of each sequence, or [`NO_PAGE`].
    table: Vec<u32>,
    /// The last launch before each of these entries was set.
    given: Vec<u64>,
    sequences: Vec<Held>,
    /// For each sequence, the position before which its recurrent state is. `None`: it is not known, for a launch has not ended well.
    at: Vec<Option<u32>>,
    /// For each sequence, whether its state is a snapshot.
    is_slot: Vec<bool>,
    /// For each page, the number of blocks that hold it.
    holders: Vec<u32>,
    /// For each page, how many of its rows are written, from the first on.
    written: Vec<u32>,
    /// For each sequence, the last launch that wrote rows of it. Pages that it held before have the text of that time: beyond the rows
    /// that were written since, they do not count.
    ran: Vec<u64>,
    /// For each sequence, the last launch that had a row of it; for each page, the last one that wrote it.
    sequence_seen: Vec<u64>,
    page_seen: Vec<u64>,
    launch: u64,
    /// The entries that the edits of the current request replaced.
    journal: Vec<Replaced>,
    /// What the current request changed in `at` and `is_slot`, by sequence.
    states: Vec<(usize, Option<u32>, bool)>,
}

#[derive(Debug, Clone, Copy)]
struct Replaced {
    entry: usize,
    page: u32,
    given: u64,
    sequence: usize,
    held: Held,
    /// Rows of the page that lost its last holder.
    written: u32,
}

impl Guard {
    pub fn new(shape: Shape) -> Guard {
        let (sequences, pages) = (shape.sequences as usize, shape.pages as usize);
        Guard {
            table: vec![NO_PAGE; sequences * shape.blocks() as usize],
            given: vec![0; sequences * shape.blocks() as usize],
            ran: vec![0; sequences],
            sequences: vec![Held::default(); sequences],
            at: vec![Some(0); sequences],
            is_slot: vec![false; sequences],
            holders: vec![0; pages],
            written: vec![0; pages],
            sequence_seen: vec![0; sequences],
            page_seen: vec![0; pages],
            launch: 0,
            journal: vec![],
            states: vec![],
            shape,
        }
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Whether a row at `position` finds the recurrent state that it needs.
    pub fn goes_on_at(&self, sequence: SequenceId, position: u32) -> bool {
        let kept = self.at.get(sequence.index()).copied().flatten();
        !self.shape.has_state || position == 0 || kept == Some(position)
    }

    /// Tells that the recurrent state of a sequence is that before `position`. A timer may say so of any state.
    pub fn state_is_before(&mut self, sequence: SequenceId, position: u32) {
        self.at[sequence.index()] = Some(position);
    }

    /// Applies the edits of `request` and judges its rows. A refused request changes nothing.
    ///
    /// # Errors
    /// The first entry out of its bound, or the first fact that is broken.
    pub fn admit(&mut self, request: &Request) -> Result<Tables<'_>, Refused> {
        self.admit_after(&StateCopies::default(), request)
    }

    /// As [`Guard::admit`], of a launch before which recurrent states are copied.
    ///
    /// # Errors
    /// As [`Guard::admit`]; a copy of a state that is not known, or between sequences of which not one is a slot.
    pub fn admit_after(&mut self, copies: &StateCopies, request: &Request) -> Result<Tables<'_>, Refused> {
        self.journal.clear();
        self.states.clear();
        let judged = copies
            .saves
            .iter()
            .try_for_each(|copy| self.save(copy))
            .and_then(|()| request.edits.iter().try_for_each(|edit| self.edit(edit)))
            .and_then(|()| copies.restores.iter().try_for_each(|copy| self.restore(copy)))
            .and_then(|()| self.judge(request));
        if let Err(refused) = judged {
            self.undo();
            return Err(refused);
        }
        let copies: Vec<StateCopy> = copies.all().copied().collect();
        let left = copies.iter().map(|copy| (copy.to, self.at[copy.to.index()])).collect();
        // Not known before the copies and the launch are queued.
        copies.iter().for_each(|copy| self.at[copy.to.index()] = None);
        request.rows.iter().for_each(|row| self.at[row.sequence.index()] = None);
        Ok(Tables { rows: request.rows.clone(), steps: request.steps, copies, left, guard: self })
    }

    fn save(&mut self, &StateCopy { from, to }: &StateCopy) -> Result<(), Refused> {
        self.in_bound(from)?;
        self.in_bound(to)?;
        if from == to || self.is_slot[from.index()] || self.ran[to.index()] > 0 {
            return Err(Refused::Slot { from, to });
        }
        self.copy(from, to, true)
    }

    fn restore(&mut self, &StateCopy { from, to }: &StateCopy) -> Result<(), Refused> {
        self.in_bound(from)?;
        self.in_bound(to)?;
        if !self.is_slot[from.index()] || self.is_slot[to.index()] {
            return Err(Refused::Slot { from, to });
        }
        self.copy(from, to, false)
    }

    fn copy(&mut self, from: SequenceId, to: SequenceId, is_slot: bool) -> Result<(), Refused> {
        let kept = self.at[from.index()];
        if !self.shape.has_state || kept.is_none_or(|position| position == 0) {
            return Err(Refused::Copy { from, kept });
        }
        self.set_state(to.index(), kept, is_slot);
        Ok(())
    }

    fn set_state(&mut self, sequence: usize, at: Option<u32>, is_slot: bool) {
        self.states.push((sequence, self.at[sequence], self.is_slot[sequence]));
        (self.at[sequence], self.is_slot[sequence]) = (at, is_slot);
    }

    fn edit(&mut self, edit: &Edit) -> Result<(), Refused> {
        let &Edit { sequence, block, page } = edit;
        self.in_bound(sequence)?;
        let (blocks, page_rows) = (self.shape.blocks(), self.shape.page_rows);
        if block >= blocks {
            return Err(Refused::Block { sequence, block, bound: blocks });
        }
        if let Some(page) = page.filter(|page| page.0 >= self.shape.pages) {
            return Err(Refused::Page { page, bound: self.shape.pages });
        }
        let (entry, s) = (sequence.index() * blocks as usize + block as usize, sequence.index());
        let old = self.table[entry];
        let (given, held) = (self.given[entry], self.sequences[s]);
        let mut replaced = Replaced { entry, page: old, given, sequence: s, held, written: 0 };
        if old != NO_PAGE {
            let holders = &mut self.holders[old as usize];
            *holders -= 1;
            if *holders == 0 {
                // The page still holds rows of this sequence, which count for no other one.
                replaced.written = std::mem::take(&mut self.written[old as usize]);
            }
        }
        self.journal.push(replaced);
        self.table[entry] = page.map_or(NO_PAGE, |page| page.0);
        self.given[entry] = self.launch;
        let begin = block * page_rows;
        // Positions that the state has seen are those of another text now. The entries of a slot are not those of its snapshot.
        if page.is_some() && !self.is_slot[s] && self.at[s].is_some_and(|at| begin < at) {
            self.set_state(s, None, false);
        }
        let held = &mut self.sequences[s];
        match page {
            None if block == held.dropped && begin + page_rows <= held.filled => held.dropped += 1,
            None if block < held.dropped => {}
            None => held.filled = held.filled.min(begin),
            Some(page) => {
                self.holders[page.index()] += 1;
                *held = if block < held.dropped {
                    Held::default()
                } else {
                    Held { filled: held.filled.min(begin), ..*held }
                };
                self.extend(s);
            }
        }
        Ok(())
    }

    /// Extends the filled part of a sequence over the written rows of the pages that follow it, as far as they were given to it since it
    /// ran.
    fn extend(&mut self, s: usize) {
        let (blocks, page_rows) = (self.shape.blocks() as usize, self.shape.page_rows);
        let held = &mut self.sequences[s];
        while held.filled.is_multiple_of(page_rows) {
            let block = (held.filled / page_rows) as usize;
            let since = block < blocks && self.given[s * blocks + block] >= self.ran[s];
            let page = if since { self.table[s * blocks + block] } else { NO_PAGE };
            let rows = if page == NO_PAGE { 0 } else { self.written[page as usize] };
            held.filled += rows;
            if rows < page_rows {
                break;
            }
        }
    }

    fn undo(&mut self) {
        while let Some(Replaced { entry, page, given, sequence, held, written }) = self.journal.pop() {
            let new = std::mem::replace(&mut self.table[entry], page);
            self.given[entry] = given;
            if new != NO_PAGE {
                self.holders[new as usize] -= 1;
            }
            if page != NO_PAGE {
                self.holders[page as usize] += 1;
                self.written[page as usize] += written;
            }
            self.sequences[sequence] = held;
        }
        while let Some((sequence, at, is_slot)) = self.states.pop() {
            (self.at[sequence], self.is_slot[sequence]) = (at, is_slot);
        }
    }

    fn in_bound(&self, sequence: SequenceId) -> Result<(), Refused> {
        let bound = self.shape.sequences;
        if sequence.0 < bound { Ok(()) } else { Err(Refused::Sequence { sequence, bound }) }
    }

    fn judge(&mut self, request: &Request) -> Result<(), Refused> {
        let Shape { rows: most, context_max, page_rows, window, .. } = self.shape;
        let (found, steps) = (request.rows.len(), request.steps);
        if found == 0 || found > most as usize {
            return Err(Refused::Rows { most, found });
        }
        self.launch += 1;
        for Run { first: row, rows, sequence, position } in runs(&request.rows) {
            self.in_bound(sequence)?;
            let end = u64::from(position) + u64::from(rows) - 1 + u64::from(steps);
            if end > u64::from(context_max) || steps == 0 {
                return Err(Refused::Position { row: row + rows as usize - 1, end, context_max });
            }
            if std::mem::replace(&mut self.sequence_seen[sequence.index()], self.launch) == self.launch {
                return Err(Refused::Consecutive { row, sequence, position });
            }
            if rows > 1 && steps > 1 {
                return Err(Refused::Steps { sequence, rows, steps });
            }
            let unwanted = |row: &usize| steps > 1 && !request.rows[*row].wants_logits;
            if let Some(row) = (row..row + rows as usize).find(unwanted) {
                return Err(Refused::Logits { row, steps });
            }
            let Held { filled, dropped } = self.sequences[sequence.index()];
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            if position > filled || (first < position && first / page_rows < dropped) {
                return Err(Refused::Filled { row, sequence, position, from: dropped * page_rows, to: filled });
            }
        }
        if self.shape.has_state {
            for Run { first: row, sequence, position, .. } in runs(&request.rows) {
                let kept = self.at[sequence.index()];
                if self.is_slot[sequence.index()] {
                    return Err(Refused::Snapshot { row, sequence });
                }
                if !self.goes_on_at(sequence, position) {
                    return Err(Refused::At { row, sequence, position, kept });
                }
            }
        }
        // Checked before `unshared`, because two rows that write one page share it, too, and this error says more.
        for (row, page) in self.written_pages(request) {
            let page = page?;
            if std::mem::replace(&mut self.page_seen[page.index()], self.launch) == self.launch {
                return Err(Refused::Distinct { row, page });
            }
        }
        for (row, page) in self.written_pages(request) {
            let page = page?;
            let holders = self.holders[page.index()];
            if holders != 1 {
                return Err(Refused::Unshared { row, page, holders });
            }
        }
        Ok(())
    }

    /// The pages that each run of a launch writes, with its first row.
    fn written_pages<'a>(
        &self,
        request: &'a Request,
    ) -> impl Iterator<Item = (usize, Result<PageId, Refused>)> + use<'a> {
        let (blocks, page_rows) = (self.shape.blocks(), self.shape.page_rows);
        // Collected, because the caller changes the guard meanwhile. A launch writes few pages.
        let mut pages = Vec::with_capacity(request.rows.len());
        for Run { first: row, rows, sequence, position } in runs(&request.rows) {
            for block in position / page_rows..=(position + (rows - 1) + (request.steps - 1)) / page_rows {
                let page = self.table[sequence.index() * blocks as usize + block as usize];
                let missing = Refused::NoPage { row, sequence, block };
                pages.push((row, if page == NO_PAGE { Err(missing) } else { Ok(PageId(page)) }));
            }
        }
        pages.into_iter()
    }
}

/// The tables of one launch, with their facts established. Only [`Guard::admit`] makes them, and they cannot change.
#[derive(Debug)]
pub struct Tables<'a> {
    guard: &'a mut Guard,
    rows: Vec<Row>,
    steps: u32,
    copies: Vec<StateCopy>,
    /// The position before which each copied state is.
    left: Vec<(SequenceId, Option<u32>)>,
}

impl Tables<'_> {
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Copies of recurrent states, to be done in this order before the launch.
    pub fn copies(&self) -> &[StateCopy] {
        &self.copies
    }

    pub fn shape(&self) -> &Shape {
        &self.guard.shape
    }

    /// The pages of row `row`'s sequence, by block, as a kernel reads them: entries without a page are clamped.
    pub fn pages(&self, row: usize) -> impl Iterator<Item = u32> {
        let blocks = self.guard.shape.blocks() as usize;
        let first = self.rows[row].sequence.index() * blocks;
        let most = self.guard.shape.pages.saturating_sub(1);
        self.guard.table[first..first + blocks].iter().map(move |&page| page.min(most))
    }

    /// Records that the copies were done and `steps` steps of the launch ran, so that their positions are written now.
    pub fn finish(self, steps: u32) {
        let Tables { guard, rows, steps: most, copies: _, left } = self;
        let (blocks, page_rows) = (guard.shape.blocks(), guard.shape.page_rows);
        left.into_iter().for_each(|(sequence, at)| guard.at[sequence.index()] = at);
        for Run { rows, sequence, position, .. } in runs(&rows) {
            guard.ran[sequence.index()] = guard.launch;
            let ran = steps.min(most);
            let end = position + if ran == 0 { 0 } else { rows - 1 + ran };
            guard.at[sequence.index()] = Some(end);
            let held = &mut guard.sequences[sequence.index()];
            let before = std::mem::replace(&mut held.filled, end);
            for block in position / page_rows..before.max(end).div_ceil(page_rows) {
                let page = guard.table[sequence.index() * blocks as usize + block as usize];
                if page != NO_PAGE && guard.holders[page as usize] == 1 {
                    guard.written[page as usize] = end.saturating_sub(block * page_rows).min(page_rows);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn shape(rows: u32) -> Shape {
        Shape { rows, sequences: 4, context_max: 32, page_rows: 4, pages: 16, window: None, has_state: false }
    }

    fn page(sequence: u32, block: u32, page: u32) -> Edit {
        Edit { sequence: SequenceId(sequence), block, page: Some(PageId(page)) }
    }

    fn none(sequence: u32, block: u32) -> Edit {
        Edit { sequence: SequenceId(sequence), block, page: None }
    }

    fn request(rows: &[(u32, u32)], steps: u32, edits: &[Edit]) -> Request {
        let row = |&(s, position)| Row { sequence: SequenceId(s), position, wants_logits: true };
        let rows = rows.iter().map(row).collect();
        Request { rows, steps, edits: edits.to_vec() }
    }

    /// Sequence 0 with 6 positions in pages 9 and 2, sequence 1 with 3 positions in page 5.
    fn two() -> Guard {
        let mut guard = Guard::new(shape(2));
        let first = request(&[(0, 0), (1, 0)], 3, &[page(0, 0, 9), page(0, 1, 2), page(1, 0, 5)]);
        guard.admit(&first).unwrap().finish(3);
        let mut alone = Guard { shape: shape(1), ..guard };
        alone.admit(&request(&[(0, 3)], 3, &[])).unwrap().finish(3);
        Guard { shape: shape(2), ..alone }
    }

    #[track_caller]
    fn refused(guard: &mut Guard, request: &Request) -> Refused {
        let before = (
            guard.table.clone(),
            guard.given.clone(),
            guard.sequences.clone(),
            guard.holders.clone(),
            guard.written.clone(),
            (guard.at.clone(), guard.is_slot.clone()),
        );
        let refused = guard.admit(request).map(|_| ()).unwrap_err();
        let after = (
            guard.table.clone(),
            guard.given.clone(),
            guard.sequences.clone(),
            guard.holders.clone(),
            guard.written.clone(),
            (guard.at.clone(), guard.is_slot.clone()),
        );
        assert_eq!(before, after, "a refusal changes nothing");
        refused
    }

    #[test]
    fn rows_find_the_pages_of_their_sequences() {
        let mut guard = two();
        let tables = guard.admit(&request(&[(1, 3), (0, 6)], 1, &[])).unwrap();
        assert_eq!(tables.pages(0).take(2).collect::<Vec<_>>(), [5, 15]);
        assert_eq!(tables.pages(1).take(2).collect::<Vec<_>>(), [9, 2]);
    }

    #[test]
    fn an_entry_out_of_its_bound_is_refused() {
        let edit = |edit: Edit| request(&[(0, 6), (1, 3)], 1, &[edit]);
        for (request, expected) in [
            (request(&[], 1, &[]), "the launch has 0 rows, expected 1 to 2"),
            (request(&[(0, 6), (1, 3), (2, 0)], 1, &[]), "the launch has 3 rows, expected 1 to 2"),
            (request(&[(0, 31), (0, 32)], 1, &[]), "row 1 ends at position 33, beyond the context of 32"),
            (request(&[(0, 6), (4, 0)], 1, &[]), "seq4 is not below 4"),
            (request(&[(0, 6), (1, 3)], 27, &[]), "row 0 ends at position 33, beyond the context of 32"),
            (request(&[(0, u32::MAX), (1, 3)], 1, &[]), "row 0 ends at position 4294967296, beyond the context of 32"),
            (edit(page(0, 8, 1)), "block 8 of seq0 is not below 8"),
            (edit(page(4, 0, 1)), "seq4 is not below 4"),
            (edit(page(0, 2, 16)), "page16 is not below 16"),
            // The second step of sequence 1 begins a block.
            (request(&[(0, 6), (1, 3)], 2, &[]), "row 1 writes block 1 of seq1, which has no page"),
        ] {
            let refused = refused(&mut two(), &request);
            assert_eq!((refused.to_string().as_str(), refused.fact()), (expected, None));
        }
    }

    fn copies(saves: &[(u32, u32)], restores: &[(u32, u32)]) -> StateCopies {
        let all = |of: &[(u32, u32)]| {
            let copy = |&(from, to): &(u32, u32)| StateCopy { from: SequenceId(from), to: SequenceId(to) };
            of.iter().map(copy).collect()
        };
        StateCopies { saves: all(saves), restores: all(restores) }
    }

    /// Sequence 0 at position 8, whose two pages sequence 3 keeps with the state of position 4.
    fn with_snapshot() -> Guard {
        let mut guard = Guard::new(Shape { has_state: true, ..shape(4) });
        guard.admit(&request(&[(0, 0)], 4, &[page(0, 0, 9), page(0, 1, 2)])).unwrap().finish(4);
        let save = copies(&[(0, 3)], &[]);
        let tables = guard.admit_after(&save, &request(&[(0, 4)], 4, &[])).unwrap();
        assert_eq!(tables.copies(), save.saves);
        tables.finish(4);
        guard.admit(&request(&[(1, 0)], 1, &[page(1, 0, 5), page(3, 0, 9), page(3, 1, 2)])).unwrap().finish(1);
        guard
    }

    #[test]
    fn a_sequence_goes_on_from_a_snapshot() {
        let mut guard = with_snapshot();
        let restore = copies(&[], &[(3, 2)]);
        let go_on = request(&[(2, 4)], 2, &[page(2, 0, 9), page(2, 1, 6)]);
        guard.admit_after(&restore, &go_on).unwrap().finish(2);
        assert!(guard.goes_on_at(SequenceId(2), 6) && !guard.goes_on_at(SequenceId(2), 8));
        // The same sequence for another text, which begins with the same page.
        let again = request(&[(2, 4)], 1, &[none(2, 0), none(2, 1), page(2, 0, 9), page(2, 1, 7)]);
        guard.admit_after(&restore, &again).unwrap().finish(1);
        // A save beside the edits that give its sequence away is of the text before.
        let both = StateCopies { saves: copies(&[(0, 3)], &[]).saves, restores: copies(&[], &[(3, 0)]).restores };
        let given_away = request(&[(0, 8)], 1, &[none(0, 0), none(0, 1), page(0, 0, 9), page(0, 1, 2), page(0, 2, 8)]);
        guard.admit_after(&both, &given_away).unwrap().finish(1);
    }

    /// Each is one way to lose which state a slot or a sequence has.
    #[test]
    fn a_state_of_another_text_or_position_is_refused() {
        let go_on = |position| request(&[(2, position)], 1, &[page(2, 0, 9), page(2, 1, 6)]);
        let given_away = [none(0, 0), none(0, 1), page(0, 0, 9), page(0, 1, 2), page(0, 2, 6)];
        for (copies, request, expected) in [
            // Pages that were found, and no state.
            (
                copies(&[], &[]),
                go_on(4),
                "`at`: row 0 is at position 4 of seq2, whose recurrent state is that before position 0",
            ),
            // The sequence has the state of the text before, at the very position.
            (
                copies(&[], &[]),
                request(&[(0, 8)], 1, &given_away),
                "`at`: row 0 is at position 8 of seq0, whose recurrent state is not known",
            ),
            (copies(&[], &[(3, 2)]), go_on(5), "`filled`: row 0 is at position 5 of seq2"),
            (
                copies(&[], &[(3, 2)]),
                go_on(3),
                "`at`: row 0 is at position 3 of seq2, whose recurrent state is that before position 4",
            ),
            // A slot that a sequence runs in, a snapshot that runs, a slot of a slot, and a sequence that is no slot.
            (copies(&[(0, 1)], &[]), request(&[(1, 1)], 1, &[]), "`at`: the state of seq0 is copied to seq1"),
            (copies(&[], &[]), request(&[(3, 0)], 1, &[]), "`at`: row 0 is of seq3, whose state is a snapshot"),
            (copies(&[(3, 2)], &[]), request(&[(1, 1)], 1, &[]), "`at`: the state of seq3 is copied to seq2"),
            (copies(&[(0, 0)], &[]), request(&[(1, 1)], 1, &[]), "`at`: the state of seq0 is copied to seq0"),
            (copies(&[], &[(0, 2)]), go_on(4), "`at`: the state of seq0 is copied to seq2"),
            (
                copies(&[(2, 3)], &[]),
                request(&[(1, 1)], 1, &[]),
                "`at`: the recurrent state of seq2 is copied, and it is that before position 0",
            ),
            (copies(&[(0, 4)], &[]), request(&[(1, 1)], 1, &[]), "seq4 is not below 4"),
        ] {
            let mut guard = with_snapshot();
            let before = (guard.at.clone(), guard.is_slot.clone(), guard.table.clone(), guard.sequences.clone());
            let refused = guard.admit_after(&copies, &request).map(|_| ()).unwrap_err();
            assert!(refused.to_string().starts_with(expected), "{refused}");
            let after = (guard.at.clone(), guard.is_slot.clone(), guard.table.clone(), guard.sequences.clone());
            assert_eq!(before, after, "a refusal changes nothing: {refused}");
        }
        // Of a launch that did not end, no copy is known.
        let mut guard = with_snapshot();
        let _ = guard.admit_after(&copies(&[(0, 3)], &[]), &request(&[(1, 1)], 1, &[])).unwrap();
        let refused = guard.admit_after(&copies(&[], &[(3, 2)]), &go_on(4)).map(|_| ()).unwrap_err();
        assert_eq!((refused, refused.fact()), (Refused::Copy { from: SequenceId(3), kept: None }, Some(Fact::At)));
    }

    #[test]
    fn rows_of_one_sequence_are_neighbours_at_consecutive_positions() {
        let guard = || Guard { shape: shape(4), ..two() };
        for rows in [[(0, 6), (0, 5)], [(0, 6), (0, 6)], [(0, 4), (0, 6)]] {
            let refused = refused(&mut guard(), &request(&rows, 1, &[]));
            assert_eq!(refused, Refused::Consecutive { row: 1, sequence: SequenceId(0), position: rows[1].1 });
        }
        // Another sequence lies between.
        let apart = request(&[(0, 6), (1, 3), (0, 7)], 1, &[]);
        let expected = "`consecutive`: row 2 is at position 7 of seq0, which has another row in the launch; expected \
                        neighbours at consecutive ascending positions";
        assert_eq!(refused(&mut guard(), &apart).to_string(), expected);
        let steps = refused(&mut guard(), &request(&[(1, 3), (0, 5), (0, 6)], 2, &[page(1, 1, 1)]));
        assert_eq!(steps.to_string(), "`consecutive`: seq0 has 2 rows in a launch of 2 steps, expected 1 step");
        assert_eq!([steps.fact(), steps_refused().fact()], [Some(Fact::Consecutive), None]);
        let chunk = request(&[(0, 6), (0, 7), (0, 8), (1, 3)], 1, &[page(0, 2, 1)]);
        guard().admit(&chunk).unwrap().finish(1);
    }

    /// A launch of two steps with a row without logits.
    fn steps_refused() -> Refused {
        let mut request = request(&[(0, 6), (1, 2)], 2, &[]);
        request.rows[1].wants_logits = false;
        let refused = refused(&mut two(), &request);
        assert_eq!(refused, Refused::Logits { row: 1, steps: 2 });
        refused
    }

    #[test]
    fn a_chunk_is_written_whole_and_read_below_its_first_row() {
        let mut guard = Guard { shape: shape(4), ..two() };
        // Its last row is beyond what is written, its first is not.
        let chunk = |s, from| request(&[(s, from), (s, from + 1), (s, from + 2)], 1, &[]);
        let pages = [page(0, 2, 1), page(1, 1, 3)];
        guard.admit(&Request { edits: pages.to_vec(), ..chunk(0, 6) }).unwrap().finish(1);
        assert_eq!(guard.sequences[0].filled, 9);
        assert_eq!(refused(&mut guard, &chunk(1, 4)).fact(), Some(Fact::Filled));
        // It writes block 1, which the launch before gave a page, and block 2, which has none.
        let missing = Refused::NoPage { row: 0, sequence: SequenceId(1), block: 2 };
        let four = request(&[(1, 3), (1, 4), (1, 5), (1, 6)], 1, &[]);
        guard.admit(&four).unwrap().finish(1);
        assert_eq!(refused(&mut guard, &chunk(1, 6)), missing);
        // One page in two blocks of a chunk is written twice.
        let twice = Request { edits: vec![page(1, 2, 3)], ..chunk(1, 6) };
        assert_eq!(refused(&mut guard, &twice), Refused::Distinct { row: 0, page: PageId(3) });
    }

    #[test]
    fn a_row_beyond_what_is_written_is_refused() {
        let refused_at = |position| refused(&mut two(), &request(&[(0, 6), (1, position)], 1, &[page(1, 1, 3)]));
        assert_eq!(refused_at(4).fact(), Some(Fact::Filled));
        // Positions that were written may be written again; what they held is gone.
        let mut guard = two();
        guard.admit(&request(&[(0, 2), (1, 3)], 1, &[])).unwrap().finish(1);
        assert_eq!(refused(&mut guard, &request(&[(0, 4), (1, 3)], 1, &[])).fact(), Some(Fact::Filled));
    }

    /// A sequence begins a second text. Its second page has rows of the first one, which `edits` of the launch that begins it leave there.
    #[test]
    fn rows_of_a_text_before_a_rewind_do_not_count() {
        let sharing = [page(1, 1, 1)];
        let leaving = [none(0, 0), page(2, 0, 5)];
        for (between, edits) in [(None, &[][..]), (None, &sharing), (Some(&leaving[..]), &[page(0, 0, 0)])] {
            let mut guard = Guard::new(shape(8));
            let at = |positions: std::ops::Range<u32>| positions.map(|p| (0, p)).collect::<Vec<_>>();
            let first = request(&at(0..8), 1, &[page(0, 0, 0), page(0, 1, 1)]);
            guard.admit(&first).unwrap().finish(1);
            if let Some(between) = between {
                guard.admit(&request(&[(2, 0)], 1, between)).unwrap().finish(1);
            }
            guard.admit(&request(&at(0..4), 1, edits)).unwrap().finish(1);
            let beyond = refused(&mut guard, &request(&[(0, 8)], 1, &[page(0, 2, 2)]));
            let expected = Refused::Filled { row: 0, sequence: SequenceId(0), position: 8, from: 0, to: 4 };
            assert_eq!(beyond, expected, "{edits:?}");
            // A page that is given now counts, whatever the sequence had there.
            let again = [page(0, 1, 1), page(0, 2, 2)];
            let admitted = guard.admit(&request(&[(0, 8)], 1, &again)).map(|tables| tables.finish(1));
            assert_eq!(admitted.is_ok(), edits.len() == 1 && between.is_none(), "{edits:?}");
        }
    }

    #[test]
    fn a_page_of_somebody_else_is_not_filled() {
        // Page 5 goes from sequence 1 to sequence 0, without what was in it.
        let edits = [none(1, 0), page(0, 1, 5), page(1, 0, 2)];
        let refused = refused(&mut two(), &request(&[(0, 5), (1, 0)], 1, &edits));
        let expected = Refused::Filled { row: 0, sequence: SequenceId(0), position: 5, from: 0, to: 4 };
        assert_eq!(refused, expected);
    }

    #[test]
    fn two_rows_that_write_one_page_are_refused() {
        let refused = refused(&mut two(), &request(&[(0, 6), (2, 0)], 1, &[page(2, 0, 2)]));
        assert_eq!(refused, Refused::Distinct { row: 1, page: PageId(2) });
    }

    #[test]
    fn a_shared_page_is_read_and_not_written() {
        // Sequence 2 begins with the first page of sequence 0.
        let edits = [page(2, 0, 9), page(2, 1, 7)];
        let mut guard = two();
        guard.admit(&request(&[(0, 6), (2, 4)], 1, &edits)).unwrap().finish(1);
        assert_eq!(refused(&mut guard, &request(&[(1, 3), (2, 3)], 1, &[])).fact(), Some(Fact::Unshared));
        // The same page twice in one sequence is no better.
        let twice = [page(1, 1, 5)];
        assert_eq!(refused(&mut guard, &request(&[(0, 7), (1, 3)], 1, &twice)).fact(), Some(Fact::Unshared));
    }

    #[test]
    fn pages_behind_a_window_are_not_missed() {
        let windowed = |window| Guard { shape: Shape { window, ..shape(2) }, ..two() };
        let left_window = |guard: &mut Guard| guard.admit(&request(&[(0, 6), (1, 3)], 1, &[none(0, 0)])).map(|_| ());
        // Positions 4 and 5, and its own.
        assert_eq!(left_window(&mut windowed(Some(3))), Ok(()));
        for window in [None, Some(4)] {
            assert_eq!(left_window(&mut windowed(window)).unwrap_err().fact(), Some(Fact::Filled), "{window:?}");
        }
    }

    #[test]
    fn a_launch_that_did_not_run_wrote_nothing() {
        let mut guard = two();
        drop(guard.admit(&request(&[(0, 6), (1, 3)], 1, &[])).unwrap());
        assert_eq!(refused(&mut guard, &request(&[(0, 7), (1, 3)], 1, &[])).fact(), Some(Fact::Filled));
    }

    /// Whether `request` keeps all facts: over the page table after its edits, the pages without a holder between two of them, and
    /// what was written to each row of each page.
    fn sound(request: &Request, table: &[[Option<PageId>; 8]], freed: &[u32], memory: &[Option<u32>]) -> bool {
        request.rows.iter().enumerate().all(|(r, row)| {
            let (s, p) = (row.sequence.index(), row.position);
            let blocks = p / 4..=(p + request.steps - 1) / 4;
            let own: Vec<Option<PageId>> = blocks.map(|block| table[s][block as usize]).collect();
            let written = |page: PageId, at: u32| memory[page.index() * 4 + at as usize % 4].is_some();
            let reads =
                |at: u32| table[s][at as usize / 4].is_some_and(|page| !freed.contains(&page.0) && written(page, at));
            // The rows of the sequence before this one: they must end just below it, and the step has their keys.
            let before: Vec<usize> = (0..r).filter(|&other| request.rows[other].sequence == row.sequence).collect();
            let consecutive = before.last().is_none_or(|&last| last + 1 == r && request.rows[last].position + 1 == p);
            let past = p.saturating_sub(before.len() as u32);
            consecutive
                && (before.is_empty() || request.steps == 1)
                && (p.saturating_sub(5)..past).all(reads)
                && own
                    .iter()
                    .all(|page| page.is_some() && table.iter().flatten().filter(|other| *other == page).count() == 1)
        })
    }

    /// A judge that looks at everything agrees with the guard, over random launches of which many are forged.
    #[test]
    fn the_guard_agrees_with_a_judge_that_looks_at_everything() {
        let shape = Shape { window: Some(6), ..shape(3) };
        let mut guard = Guard::new(shape);
        // Of each page and row: the sequence and position that were written last.
        let mut memory: Vec<Option<u32>> = vec![None; 64];
        let mut table: Vec<[Option<PageId>; 8]> = vec![[None; 8]; 4];
        let mut random = Random::new(7);
        let (mut admitted, mut chunks, mut broken) = (0, 0, std::collections::BTreeSet::new());
        for _ in 0..200_000 {
            let mut below = |n: usize| random.below(n) as u32;
            let edits: Vec<Edit> = (0..below(3))
                .map(|_| {
                    let page = below(24);
                    let page = (page < 16).then_some(PageId(page));
                    Edit { sequence: SequenceId(below(4)), block: below(4), page }
                })
                .collect();
            let filled = |s: usize| guard.sequences[s].filled;
            let mut rows: Vec<(u32, u32)> = vec![];
            for _ in 0..1 + below(3) {
                let s = below(4);
                let next = rows.last().filter(|_| below(3) == 0).map(|&(s, p)| (s, p + 1));
                rows.push(next.unwrap_or((s, if below(4) == 0 { below(10) } else { filled(s as usize) })));
            }
            let request = request(&rows, 1 + below(2), &edits);
            let mut edited = table.clone();
            let mut freed: Vec<u32> = vec![];
            for edit in &edits {
                let old = std::mem::replace(&mut edited[edit.sequence.index()][edit.block as usize], edit.page);
                // A page without a holder between two edits loses what was in it.
                let held = |page: PageId| edited.iter().flatten().any(|other| *other == Some(page));
                freed.extend(old.filter(|old| !held(*old)).map(|old| old.0));
            }
            let sound = sound(&request, &edited, &freed, &memory);
            match guard.admit(&request) {
                Ok(tables) => {
                    assert!(sound, "{request:?}");
                    admitted += 1;
                    chunks += u32::from(runs(tables.rows()).any(|run| run.rows > 1));
                    for row in tables.rows() {
                        for at in row.position..row.position + request.steps {
                            let page = tables.guard.table[row.sequence.index() * 8 + at as usize / 4] as usize;
                            freed.retain(|other| *other as usize != page);
                            memory[page * 4 + at as usize % 4] = Some(at);
                        }
                    }
                    tables.finish(request.steps);
                    table = edited;
                    for page in freed {
                        memory[page as usize * 4..][..4].fill(None);
                    }
                }
                Err(refused) => {
                    broken.insert(refused.fact());
                }
            }
        }
        assert!(admitted > 1_000, "{admitted} admitted");
        assert!(chunks > 500, "{chunks} chunks");
        assert_eq!(broken.len(), 5, "every fact was broken: {broken:?}");
    }
}
