//! Owns steps of several rows for programs with their own scheduler: which sequence has which pages, and which steps are refused.
//!
//! Shared pages are always the first ones of a sequence, and it owns the page into which its next token goes. So no step writes a page
//! that another sequence reads.
//!
//! With a recurrent state a sequence begins, and goes back, where a snapshot is: at the end of a page. Steps leave one wherever a sequence
//! ends at the end of a page, in sequences that are never opened; the one that was used longest ago makes room. What follows is computed again, all
//! of it where no snapshot is left.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::{Bounds, Chain, Launch, LaunchRow, Said, Snapshots, Stepper, Want};
use crate::error::Fault;
use crate::pages::{Pool, PoolError};
use crate::rows::{SequenceId, StateCopies, StateCopy};

/// Names a sequence. No other sequence of this process ever has the same name, so a name that was freed is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceKey(pub u64);

static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

impl SequenceKey {
    /// A new name. The caller takes it before the sequence is opened, and can therefore free the sequence even if it stops waiting.
    pub fn unique() -> SequenceKey {
        SequenceKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed))
    }
}

/// Which logits of a [`StepPart`] are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    Nothing,
    /// Those after its last token.
    Last,
    /// Those after each of its tokens.
    Every,
}

/// The next tokens of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepPart {
    pub sequence: SequenceKey,
    /// One for a sequence that decodes, several for a part of a prompt or for tokens that are to be verified.
    pub tokens: Vec<u32>,
    pub wants: Wants,
}

/// A sequence that is open.
#[derive(Debug)]
struct Open {
    id: SequenceId,
    /// Tokens whose keys and values the cache holds, from position 0 on.
    tokens: Vec<u32>,
}

/// A stepper with its sequences.
pub(super) struct Steps {
    stepper: Box<dyn Stepper>,
    bounds: Bounds,
    pool: Pool,
    open: BTreeMap<SequenceKey, Open>,
    snapshots: Snapshots,
    /// Copies of recurrent states before the next launch.
    copies: StateCopies,
    rows_max: usize,
    sequences_max: usize,
    /// A launch failed, so the content of pages is unknown.
    lost: bool,
}

impl Steps {
    /// Steps of at most `rows_max` rows and `sequences_max` open sequences.
    pub fn new(stepper: Box<dyn Stepper>, rows_max: u32, sequences_max: u32) -> Steps {
        let bounds = stepper.bounds();
        let rows_max = rows_max.min(bounds.shape.rows).min(bounds.chunk_max) as usize;
        let pool = Pool::new(bounds.shape);
        let sequences_max = sequences_max.min(bounds.shape.sequences) as usize;
        // One more than can be open takes the place of a sequence that goes back.
        let slots = (sequences_max as u32 + 1..bounds.shape.sequences).map(SequenceId);
        let snapshots = Snapshots::over(slots.filter(|_| bounds.shape.has_state));
        Steps {
            stepper,
            bounds,
            pool,
            open: BTreeMap::new(),
            snapshots,
            copies: StateCopies::default(),
            rows_max,
            sequences_max,
            lost: false,
        }
    }

    /// Whether a launch failed, so that every sequence is gone.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// Opens a sequence without tokens.
    pub fn open(&mut self, key: SequenceKey) -> Result<(), Fault> {
        self.check_room()?;
        let id = self.pool.open().map_err(ours)?;
        self.open.insert(key, Open { id, tokens: vec![] });
        Ok(())
    }

    /// Opens a sequence with the tokens of another one. Full pages are shared, with a recurrent state those up to a snapshot; tokens after them are
    /// computed again.
    pub fn fork(&mut self, sequence: SequenceKey, key: SequenceKey) -> Result<(), Fault> {
        self.check_room()?;
        let tokens = self.find(sequence)?.tokens.clone();
        let id = self.forked(sequence, tokens.len())?;
        self.open.insert(key, Open { id, tokens });
        Ok(())
    }

    /// Forgets the tokens of a sequence from `length` on.
    pub fn truncate(&mut self, sequence: SequenceKey, length: usize) -> Result<(), Fault> {
        let Open { id, tokens } = self.find(sequence)?;
        if length > tokens.len() {
            return Err(Fault::input(format!("the sequence has {} tokens, found a length of {length}", tokens.len()))
                .with_remedy("a sequence grows by the tokens of a step"));
        }
        if length == tokens.len() {
            return Ok(());
        }
        let (old, tokens) = (*id, tokens[..length].to_vec());
        let kept = self.reused(&tokens);
        let block = kept as u32 / self.bounds.shape.page_rows;
        let is_shared = self.pool.page(old, block).is_some_and(|page| self.pool.holders(page) > 1);
        if is_shared {
            let id = self.forked(sequence, length)?;
            self.pool.close(old).map_err(ours)?;
            self.find(sequence)?.id = id;
        } else if self.bounds.shape.has_state {
            self.compute_again(old, &tokens, kept)?;
        }
        self.find(sequence)?.tokens.truncate(length);
        Ok(())
    }

    /// How many of the tokens of a sequence need not be computed again when it goes back to them. With a recurrent state these are whole pages, up to
    /// a snapshot.
    fn reused(&self, tokens: &[u32]) -> usize {
        if !self.bounds.shape.has_state {
            return tokens.len();
        }
        let page_rows = self.bounds.shape.page_rows as usize;
        let chains = chains(tokens, page_rows);
        let last = chains.iter().rposition(|chain| self.snapshots.find(*chain).is_some());
        last.map_or(0, |block| (block + 1) * page_rows)
    }

    /// Computes tokens from position `from` on, after the snapshot there.
    fn compute_again(&mut self, id: SequenceId, tokens: &[u32], from: usize) -> Result<(), Fault> {
        let page_rows = self.bounds.shape.page_rows as usize;
        let chain = chains(&tokens[..from], page_rows).pop();
        let snapshot = chain.and_then(|chain| Some((chain, self.snapshots.find(chain)?)));
        if let Some((chain, slot)) = snapshot {
            self.snapshots.touch(chain);
            self.copies.restores.push(StateCopy { from: slot, to: id });
        }
        for (chunk, rest) in tokens[from..].chunks(self.rows_max).enumerate() {
            let first = (from + chunk * self.rows_max) as u32;
            let row =
                |(position, &token)| LaunchRow { sequence: id, position, token: Some(token), want: Want::Nothing };
            self.launch((first..).zip(rest).map(row).collect())?;
        }
        Ok(())
    }

    /// Keeps the state of a sequence that ends at the end of a page.
    fn keep_state(&mut self, sequence: SequenceKey) -> Result<(), Fault> {
        let page_rows = self.bounds.shape.page_rows as usize;
        if self.snapshots.most() == 0 {
            return Ok(());
        }
        let Open { id, tokens } = self.find(sequence)?;
        let (from, length) = (*id, tokens.len());
        let last = if length.is_multiple_of(page_rows) { chains(tokens, page_rows).pop() } else { None };
        if let Some(to) = last.and_then(|chain| self.snapshots.insert(chain)) {
            self.copies.saves.push(StateCopy { from, to });
        }
        Ok(())
    }

    /// Tokens that a sequence has.
    pub fn length(&mut self, sequence: SequenceKey) -> Result<u32, Fault> {
        Ok(self.find(sequence)?.tokens.len() as u32)
    }

    /// Ends a sequence, if it is open. Its pages are free unless a fork holds them, too.
    pub fn free(&mut self, sequence: SequenceKey) -> Result<(), Fault> {
        let Some(Open { id, .. }) = self.open.remove(&sequence) else { return Ok(()) };
        self.pool.close(id).map_err(ours)
    }

    /// Runs one step. Returns the logits that its parts want, `[wanted, vocab]` in their order.
    pub fn step(&mut self, parts: &[StepPart]) -> Result<Vec<f32>, Fault> {
        self.check(parts)?;
        let mut rows = vec![];
        for StepPart { sequence, tokens, wants } in parts {
            let Open { id, tokens: before } = self.find(*sequence)?;
            let (id, from) = (*id, before.len());
            self.pool.reserve(id, (from + tokens.len()) as u32).map_err(ours)?;
            let last = from + tokens.len() - 1;
            rows.extend((from..).zip(tokens).map(|(position, &token)| {
                let wanted = *wants == Wants::Every || (*wants == Wants::Last && position == last);
                let want = if wanted { Want::Logits } else { Want::Nothing };
                LaunchRow { sequence: id, position: position as u32, token: Some(token), want }
            }));
        }
        let said = self.launch(rows)?;
        for StepPart { sequence, tokens, .. } in parts {
            self.find(*sequence)?.tokens.extend(tokens);
            self.keep_state(*sequence)?;
        }
        let logits = said.into_iter().filter_map(|said| if let Said::Logits(row) = said { Some(row) } else { None });
        Ok(logits.flatten().collect())
    }

    /// Appends tokens to a sequence in as many steps as needed. Returns the logits after the last one, `[vocab]`.
    pub fn prefill(&mut self, sequence: SequenceKey, tokens: &[u32]) -> Result<Vec<f32>, Fault> {
        let all = StepPart { sequence, tokens: tokens.to_vec(), wants: Wants::Last };
        self.check_parts(std::slice::from_ref(&all))?;
        let (mut logits, mut rest) = (vec![], tokens);
        while !rest.is_empty() {
            let count = rest.len().min(self.rows_max).min(self.until_kept(sequence, rest.len())?);
            let (chunk, after) = rest.split_at(count);
            let wants = if after.is_empty() { Wants::Last } else { Wants::Nothing };
            logits = self.step(&[StepPart { sequence, tokens: chunk.to_vec(), wants }])?;
            rest = after;
        }
        Ok(logits)
    }

    /// Of `more` tokens of a sequence those before the end of the last page that they fill, where its state is kept; all without a state.
    fn until_kept(&mut self, sequence: SequenceKey, more: usize) -> Result<usize, Fault> {
        let page_rows = self.bounds.shape.page_rows as usize;
        let (before, keeps) = (self.find(sequence)?.tokens.len(), self.snapshots.most() > 0);
        let last = (before + more) / page_rows * page_rows;
        Ok(if keeps && last > before { last - before } else { more })
    }

    /// A new sequence of the pool with the first `length` tokens of `sequence`. It shares full pages that need not be computed again, and owns the
    /// page after them.
    fn forked(&mut self, sequence: SequenceKey, length: usize) -> Result<SequenceId, Fault> {
        let page_rows = self.bounds.shape.page_rows as usize;
        let Open { id: from, tokens } = self.find(sequence)?;
        let (from, tokens) = (*from, tokens[..length].to_vec());
        let shared = self.reused(&tokens) / page_rows * page_rows;
        self.check_pages((length - shared).div_ceil(page_rows) as u32)?;
        let id = self.pool.fork(from, shared as u32).map_err(ours)?;
        self.pool.reserve(id, length as u32).map_err(ours)?;
        self.compute_again(id, &tokens, shared)?;
        Ok(id)
    }

    fn launch(&mut self, rows: Vec<LaunchRow>) -> Result<Vec<Said>, Fault> {
        let copies = std::mem::take(&mut self.copies);
        let launch = Launch { rows, steps: 1, edits: self.pool.take_edits(), copies };
        let said = self.stepper.submit(launch).and_then(|()| self.stepper.collect());
        self.lost = said.is_err();
        said
    }

    fn find(&mut self, sequence: SequenceKey) -> Result<&mut Open, Fault> {
        self.open.get_mut(&sequence).ok_or_else(|| closed(sequence))
    }

    fn check_room(&self) -> Result<(), Fault> {
        let most = self.sequences_max;
        if self.open.len() < most {
            return Ok(());
        }
        Err(Fault::input(format!("all {most} sequences are open"))
            .with_remedy("free a sequence, or load the model with a larger `sequences_max`"))
    }

    fn check_pages(&self, needed: u32) -> Result<(), Fault> {
        let free = self.pool.free_pages();
        if needed <= free {
            return Ok(());
        }
        let page_rows = self.bounds.shape.page_rows;
        Err(Fault::input(format!("{needed} pages of {page_rows} tokens are needed, {free} are free"))
            .with_remedy("free a sequence, or load the model with a larger `cache_tokens`"))
    }

    /// Refuses a step before anything is changed.
    fn check(&mut self, parts: &[StepPart]) -> Result<(), Fault> {
        let (rows, most) = (parts.iter().map(|part| part.tokens.len()).sum::<usize>(), self.rows_max);
        if rows == 0 || rows > most {
            let remedy = match rows {
                0 => "give a sequence with at least one token",
                _ => "divide the tokens, or load the model with a larger `chunk_max`",
            };
            return Err(Fault::input(format!("a step has 1 to {most} tokens, found {rows}")).with_remedy(remedy));
        }
        self.check_parts(parts)
    }

    /// Refuses tokens that do not fit, however many steps they take.
    fn check_parts(&self, parts: &[StepPart]) -> Result<(), Fault> {
        let Bounds { vocab, shape, .. } = self.bounds;
        let mut pages = 0;
        for (at, StepPart { sequence, tokens, .. }) in parts.iter().enumerate() {
            let refuse = |what: String| Err(Fault::input(format!("part {at} of the step: {what}")));
            let open = self.open.get(sequence).ok_or_else(|| closed(*sequence))?;
            if parts[..at].iter().any(|part| part.sequence == *sequence) {
                return refuse("its sequence has a part before; give all tokens of a sequence in one part".to_string());
            }
            if tokens.is_empty() {
                return refuse("expected a token or more, found none".to_string());
            }
            if let Some(token) = tokens.iter().find(|&&token| token >= vocab) {
                return refuse(format!("token {token} is not below the vocabulary of {vocab}"));
            }
            let end = open.tokens.len() + tokens.len();
            if end > shape.context_max as usize {
                let (before, more, context_max) = (open.tokens.len(), tokens.len(), shape.context_max);
                return refuse(format!("{before} tokens and {more} more are beyond the context of {context_max}"));
            }
            let held = (0..shape.blocks()).take_while(|&block| self.pool.page(open.id, block).is_some()).count();
            pages += (end as u32).div_ceil(shape.page_rows).saturating_sub(held as u32);
        }
        self.check_pages(pages)
    }
}

/// The names of the full pages of a text.
fn chains(tokens: &[u32], page_rows: usize) -> Vec<Chain> {
    let next = |before: &mut Option<Chain>, page: &[u32]| {
        *before = Some(Chain::of(*before, page));
        *before
    };
    tokens.chunks_exact(page_rows).scan(None, next).collect()
}

fn closed(sequence: SequenceKey) -> Fault {
    let SequenceKey(key) = sequence;
    Fault::input(format!("sequence {key} is not open"))
        .with_remedy("it was freed, is of another model, or was lost with a step that failed; open a new one")
}

/// The fault for a state that earlier checks exclude.
fn ours(error: PoolError) -> Fault {
    Fault::internal(error.to_string())
}
