//! Owns the pool of cache pages: which sequence holds which page. [`crate::rows::Guard`] checks its decisions.
//!
//! A page is a block of consecutive positions of one sequence, at the same place in every cache. Sequences are opened and closed
//! between launches without moving a byte: the pool only makes edits of the page table.

use crate::rows::{Edit, PageId, SequenceId, Shape};
use thiserror::Error;

/// Why the pool cannot do what it was asked for. The pool did not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PoolError {
    #[error("all {sequences} sequences are open")]
    Sequences { sequences: u32 },
    #[error("{sequence} is not open")]
    Closed { sequence: SequenceId },
    #[error("{needed} pages are needed, {free} are free")]
    Full { needed: u32, free: u32 },
    #[error("position {position} is beyond the context of {context_max}")]
    Context { position: u32, context_max: u32 },
    #[error("position {position} is inside a page of {page_rows}; only full pages can be shared")]
    PartialPage { position: u32, page_rows: u32 },
    #[error("{sequence} holds no page for positions before {position}")]
    Missing { sequence: SequenceId, position: u32 },
}

/// The pages of one open sequence.
#[derive(Debug, Clone, Default)]
struct Held {
    /// Blocks whose pages left the window.
    dropped: u32,
    /// Pages of the blocks after those.
    pages: Vec<PageId>,
}

impl Held {
    fn blocks(&self) -> u32 {
        self.dropped + self.pages.len() as u32
    }
}

/// The pages, their holders, and which are free.
#[derive(Debug, Clone)]
pub struct Pool {
    shape: Shape,
    /// Free pages, taken from the end.
    free: Vec<PageId>,
    /// For each page, the number of sequences that hold it.
    holders: Vec<u32>,
    sequences: Vec<Option<Held>>,
    /// For each page, whether it is kept for later sequences.
    kept: Vec<bool>,
    /// Kept pages that no open sequence holds.
    idle: u32,
    edits: Vec<Edit>,
}

impl Pool {
    pub fn new(shape: Shape) -> Pool {
        Pool {
            free: (0..shape.pages).rev().map(PageId).collect(),
            holders: vec![0; shape.pages as usize],
            sequences: vec![None; shape.sequences as usize],
            kept: vec![false; shape.pages as usize],
            idle: 0,
            edits: vec![],
            shape,
        }
    }

    /// A pool that can keep pages without an open sequence. Its last sequences, the keepers, are never opened. Each page has one
    /// entry in their rows of the page table while it is kept, so the guard knows its content.
    ///
    /// # Errors
    /// Fewer sequences than it takes to keep every page, and one to open.
    pub fn keeping(shape: Shape) -> Result<Pool, PoolError> {
        let keepers = Pool::keepers(&shape);
        if shape.sequences <= keepers {
            return Err(PoolError::Sequences { sequences: shape.sequences });
        }
        let mut pool = Pool::new(shape);
        pool.sequences.truncate((shape.sequences - keepers) as usize);
        Ok(pool)
    }

    /// Sequences that [`Pool::keeping`] does not open.
    pub fn keepers(shape: &Shape) -> u32 {
        shape.pages.div_ceil(shape.blocks().max(1))
    }

    /// Sequences that never have a row: the keepers. Their states are free for snapshots.
    pub fn slots(&self) -> impl Iterator<Item = SequenceId> + use<> {
        (self.open_max()..self.shape.sequences).map(SequenceId)
    }

    /// Sequences that can be open at a time.
    pub fn open_max(&self) -> u32 {
        self.sequences.len() as u32
    }

    /// Kept pages that no open sequence holds, so that each can be freed.
    pub fn idle_pages(&self) -> u32 {
        self.idle
    }

    /// Number of sequences that hold a page, plus one if it is kept.
    pub fn holders(&self, page: PageId) -> u32 {
        self.holders[page.index()]
    }

    /// The page of a block of an open sequence; `None`: it has none, or it left the window.
    pub fn page(&self, sequence: SequenceId, block: u32) -> Option<PageId> {
        let held = self.sequences.get(sequence.index())?.as_ref()?;
        held.pages.get(block.checked_sub(held.dropped)? as usize).copied()
    }

    /// Keeps a page, which an open sequence holds and no longer writes, beyond the end of that sequence. Returns false if it is kept
    /// already, or if this pool keeps nothing.
    pub fn keep(&mut self, page: PageId) -> bool {
        let Some(place) = self.keeper(page) else { return false };
        if std::mem::replace(&mut self.kept[page.index()], true) {
            return false;
        }
        self.holders[page.index()] += 1;
        self.edits.push(Edit { page: Some(page), ..place });
        true
    }

    /// Ends keeping a page. It is free once no open sequence holds it.
    pub fn let_go(&mut self, page: PageId) {
        let Some(place) = self.keeper(page).filter(|_| self.kept[page.index()]) else { return };
        self.kept[page.index()] = false;
        if self.holders[page.index()] == 1 {
            self.idle -= 1;
        }
        self.unhold(page);
        self.edits.push(place);
    }

    /// The entry of a kept page in the page table.
    fn keeper(&self, page: PageId) -> Option<Edit> {
        let sequence = self.open_max() + page.0 / self.shape.blocks();
        let block = page.0 % self.shape.blocks();
        (sequence < self.shape.sequences).then_some(Edit { sequence: SequenceId(sequence), block, page: None })
    }

    /// Gives a sequence a kept page as its next block.
    ///
    /// # Errors
    /// The sequence is not open, the page is not kept, or the context is full.
    pub fn share(&mut self, sequence: SequenceId, page: PageId) -> Result<(), PoolError> {
        let Shape { context_max, page_rows, .. } = self.shape;
        let held = held(&mut self.sequences, sequence)?;
        let block = held.blocks();
        let position = block * page_rows;
        if position >= context_max {
            return Err(PoolError::Context { position, context_max });
        }
        if !self.kept[page.index()] {
            return Err(PoolError::Missing { sequence, position });
        }
        held.pages.push(page);
        if self.holders[page.index()] == 1 {
            self.idle -= 1;
        }
        self.holders[page.index()] += 1;
        self.edits.push(Edit { sequence, block, page: Some(page) });
        Ok(())
    }

    fn unhold(&mut self, page: PageId) {
        let holders = &mut self.holders[page.index()];
        *holders -= 1;
        match *holders {
            0 => self.free.push(page),
            1 if self.kept[page.index()] => self.idle += 1,
            _ => {}
        }
    }

    pub fn free_pages(&self) -> u32 {
        self.free.len() as u32
    }

    /// Edits since the last call, in order.
    pub fn take_edits(&mut self) -> Vec<Edit> {
        std::mem::take(&mut self.edits)
    }

    /// Opens a sequence without pages: the lowest that is closed. Tasks that divide sequences by their numbers (`part_of`) then
    /// have equally many, while no sequence stays open for long after its neighbours.
    ///
    /// # Errors
    /// All sequences are open.
    pub fn open(&mut self) -> Result<SequenceId, PoolError> {
        let closed = self.sequences.iter().position(Option::is_none);
        let s = closed.ok_or(PoolError::Sequences { sequences: self.shape.sequences })?;
        self.sequences[s] = Some(Held::default());
        Ok(SequenceId::from(s))
    }

    /// Gives a sequence pages for all positions below `positions`.
    ///
    /// # Errors
    /// The pool has too few free pages, or the context is shorter.
    pub fn reserve(&mut self, sequence: SequenceId, positions: u32) -> Result<(), PoolError> {
        let Shape { context_max, page_rows, .. } = self.shape;
        if positions > context_max {
            return Err(PoolError::Context { position: positions, context_max });
        }
        let held = held(&mut self.sequences, sequence)?;
        let first = held.blocks();
        let needed = positions.div_ceil(page_rows).saturating_sub(first);
        let kept = self.free.len().checked_sub(needed as usize);
        let kept = kept.ok_or(PoolError::Full { needed, free: self.free.len() as u32 })?;
        for (block, page) in (first..).zip(self.free.drain(kept..).rev()) {
            held.pages.push(page);
            self.holders[page.index()] += 1;
            self.edits.push(Edit { sequence, block, page: Some(page) });
        }
        Ok(())
    }

    /// Opens a sequence that begins with the first `positions` positions of `sequence`, which are whole pages: both hold
    /// them. A fork inside a page is refused; its caller forks where the page begins and computes the rest again.
    ///
    /// # Errors
    /// `positions` ends inside a page, some of its pages were dropped, or all sequences are open.
    pub fn fork(&mut self, sequence: SequenceId, positions: u32) -> Result<SequenceId, PoolError> {
        let page_rows = self.shape.page_rows;
        if !positions.is_multiple_of(page_rows) {
            return Err(PoolError::PartialPage { position: positions, page_rows });
        }
        let source = held(&mut self.sequences, sequence)?;
        let blocks = (positions / page_rows) as usize;
        if source.dropped > 0 || source.pages.len() < blocks {
            return Err(PoolError::Missing { sequence, position: positions });
        }
        let pages = source.pages[..blocks].to_vec();
        let fork = self.open()?;
        for (block, &page) in (0..).zip(&pages) {
            self.holders[page.index()] += 1;
            self.edits.push(Edit { sequence: fork, block, page: Some(page) });
        }
        self.sequences[fork.index()] = Some(Held { dropped: 0, pages });
        Ok(fork)
    }

    /// Frees the pages that no row of `sequence` at `position` or later reads: those outside the widest window. Without
    /// windows there are none.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn drop_behind(&mut self, sequence: SequenceId, position: u32) -> Result<(), PoolError> {
        let Some(window) = self.shape.window else { return Ok(()) };
        let seen = (position + 1).saturating_sub(window) / self.shape.page_rows;
        let held = held(&mut self.sequences, sequence)?;
        let left = (seen.saturating_sub(held.dropped) as usize).min(held.pages.len());
        let (first, pages) = (held.dropped, held.pages.drain(..left).collect::<Vec<_>>());
        held.dropped += left as u32;
        self.give_back(sequence, first, &pages);
        Ok(())
    }

    /// Closes a sequence. Its pages are free, unless a fork holds them, too.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn close(&mut self, sequence: SequenceId) -> Result<(), PoolError> {
        let Held { dropped, pages } = std::mem::take(held(&mut self.sequences, sequence)?);
        self.sequences[sequence.index()] = None;
        self.give_back(sequence, dropped, &pages);
        Ok(())
    }

    fn give_back(&mut self, sequence: SequenceId, first: u32, pages: &[PageId]) {
        for (block, &page) in (first..).zip(pages) {
            self.unhold(page);
            self.edits.push(Edit { sequence, block, page: None });
        }
    }
}

fn held(sequences: &mut [Option<Held>], sequence: SequenceId) -> Result<&mut Held, PoolError> {
    sequences.get_mut(sequence.index()).and_then(Option::as_mut).ok_or(PoolError::Closed { sequence })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::rows::{Guard, Request, Row};

    const SHAPE: Shape =
        Shape { rows: 1, sequences: 3, context_max: 32, page_rows: 4, pages: 10, window: None, has_state: false };

    #[test]
    fn sequences_take_and_give_back_pages() {
        let mut pool = Pool::new(SHAPE);
        let (a, b) = (pool.open().unwrap(), pool.open().unwrap());
        pool.reserve(a, 9).unwrap();
        pool.reserve(b, 1).unwrap();
        pool.reserve(a, 12).unwrap();
        assert_eq!(pool.free_pages(), 6);
        assert_eq!(pool.reserve(b, 32), Err(PoolError::Full { needed: 7, free: 6 }));
        assert_eq!(pool.reserve(b, 33), Err(PoolError::Context { position: 33, context_max: 32 }));
        pool.close(a).unwrap();
        pool.reserve(b, 32).unwrap();
        assert_eq!(pool.free_pages(), 2);
        assert_eq!(pool.close(a), Err(PoolError::Closed { sequence: a }));
        assert_eq!(pool.reserve(SequenceId(9), 1), Err(PoolError::Closed { sequence: SequenceId(9) }));
    }

    #[test]
    fn the_lowest_closed_sequence_opens() {
        let mut pool = Pool::new(SHAPE);
        let open: Vec<SequenceId> = (0..3).map(|_| pool.open().unwrap()).collect();
        assert_eq!(open, [0, 1, 2].map(SequenceId));
        pool.close(open[2]).unwrap();
        pool.close(open[0]).unwrap();
        assert_eq!([pool.open(), pool.open()], [Ok(open[0]), Ok(open[2])]);
    }

    #[test]
    fn a_fork_shares_full_pages() {
        let mut pool = Pool::new(SHAPE);
        let a = pool.open().unwrap();
        pool.reserve(a, 10).unwrap();
        assert_eq!(pool.fork(a, 10), Err(PoolError::PartialPage { position: 10, page_rows: 4 }));
        assert_eq!(pool.fork(a, 16), Err(PoolError::Missing { sequence: a, position: 16 }));
        let b = pool.fork(a, 8).unwrap();
        pool.reserve(b, 12).unwrap();
        assert_eq!(pool.free_pages(), 6);
        pool.close(a).unwrap();
        // The last page of the first sequence.
        assert_eq!(pool.free_pages(), 7);
        pool.close(b).unwrap();
        assert_eq!(pool.free_pages(), 10);
        pool.open().and_then(|_| pool.open()).and_then(|_| pool.open()).unwrap();
        assert_eq!(pool.open(), Err(PoolError::Sequences { sequences: 3 }));
    }

    #[test]
    fn windows_free_what_no_row_reads() {
        let mut pool = Pool::new(Shape { window: Some(5), ..SHAPE });
        let a = pool.open().unwrap();
        pool.reserve(a, 20).unwrap();
        // A row at position 11 sees positions from 7 on, one at position 12 from 8 on.
        for (position, free) in [(3, 5), (11, 6), (12, 7), (12, 7)] {
            pool.drop_behind(a, position).unwrap();
            assert_eq!(pool.free_pages(), free, "position {position}");
        }
        assert_eq!(pool.fork(a, 8), Err(PoolError::Missing { sequence: a, position: 8 }));
        pool.close(a).unwrap();
        assert_eq!(pool.free_pages(), 10);
    }

    #[test]
    fn a_kept_page_outlives_its_sequence() {
        // A sequence has 8 blocks, so ten pages need two keepers.
        let shape = Shape { sequences: 4, ..SHAPE };
        assert_eq!(Pool::keeping(SHAPE).map(|pool| pool.open_max()), Ok(1));
        assert_eq!(
            Pool::keeping(Shape { sequences: 2, ..SHAPE }).map(|_| ()),
            Err(PoolError::Sequences { sequences: 2 })
        );
        let mut pool = Pool::keeping(shape).unwrap();
        let a = pool.open().unwrap();
        pool.reserve(a, 8).unwrap();
        let page = pool.page(a, 1).unwrap();
        assert!(pool.keep(page) && !pool.keep(page));
        assert_eq!((pool.holders(page), pool.idle_pages()), (2, 0));
        pool.close(a).unwrap();
        assert_eq!((pool.free_pages(), pool.idle_pages()), (9, 1));
        let b = pool.open().unwrap();
        pool.share(b, page).unwrap();
        assert_eq!((pool.page(b, 0), pool.idle_pages()), (Some(page), 0));
        pool.let_go(page);
        assert_eq!((pool.free_pages(), pool.share(b, page)), (9, Err(PoolError::Missing { sequence: b, position: 4 })));
        pool.close(b).unwrap();
        assert_eq!((pool.free_pages(), pool.idle_pages()), (10, 0));
    }

    /// The guard admits all decisions of the pool, over random opens, forks and closes.
    #[test]
    fn the_guard_admits_what_the_pool_decides() {
        for window in [None, Some(7)] {
            let shape = Shape { window, ..SHAPE };
            let (mut pool, mut guard) = (Pool::new(shape), Guard::new(shape));
            let mut open: Vec<(SequenceId, u32)> = vec![];
            let mut random = Random::new(3);
            let (mut launches, mut forks) = (0, 0);
            for _ in 0..20_000 {
                match random.below(8) {
                    0 => open.extend(pool.open().ok().map(|sequence| (sequence, 0))),
                    1 if !open.is_empty() => {
                        let (sequence, _) = open.swap_remove(random.below(open.len()));
                        pool.close(sequence).unwrap();
                    }
                    2 if !open.is_empty() => {
                        let (sequence, filled) = open[random.below(open.len())];
                        let shared = filled / 4 * 4;
                        if let Ok(fork) = pool.fork(sequence, shared) {
                            open.push((fork, shared));
                            forks += u32::from(shared > 0);
                        }
                    }
                    _ if !open.is_empty() => {
                        let at = random.below(open.len());
                        let (sequence, position) = open[at];
                        let steps = 1 + random.below(3) as u32;
                        pool.drop_behind(sequence, position).unwrap();
                        if pool.reserve(sequence, position + steps).is_err() {
                            continue;
                        }
                        let rows = vec![Row { sequence, position, wants_logits: true }];
                        let request = Request { rows, steps, edits: pool.take_edits() };
                        guard.admit(&request).unwrap_or_else(|refused| panic!("{refused}")).finish(steps);
                        open[at].1 += steps;
                        launches += 1;
                    }
                    _ => {}
                }
            }
            assert!(launches > 5_000 && forks > 100, "{launches} launches, {forks} forks");
        }
    }
}
