//! Compares kernels that run steps of several rows with the interpreter, which executes the schedule they were made of with the same rows.

use super::beside::{Beside, Decodes, Expected, Launch};
use super::codes::DeviceCaches;
use super::{CheckError, Checked, check_ids};
use crate::cuda::rows::{RowLauncher, given};
use crate::interp::{Pack, Taken};
use crate::pages::Pool;
use crate::rows::{Guard, Request, Row, SequenceId, Shape};
use crate::sample::argmax;
use crate::validate::Validated;
use std::sync::Arc;

/// Multiplications that each of two interpreters may take: some seconds on a server.
pub(super) const COST_MAX: u64 = 200_000_000_000;
/// Most positions that are compared of each sequence: beyond one tile of attention ...
const POSITIONS_MAX: u64 = 20;
/// ... and in steps of one row as many beyond this many pages: there a chunk of the history may lie in several.
const ONE_ROW_PAGES: u64 = 2;
/// Of a mixture, a row whose history is longer than two pages, and two KV splits, by this much.
const BEYOND_PAGES: u32 = 20;

/// Compares the logits of every row of every step, and each token that the kernel decides with the arg-max of its logits. First each
/// row is a sequence of its own, decoded one position at a time with given tokens; in steps of one row two sequences take turns. Then a prompt is read in two chunks of all rows
/// and one of half of them. A second interpreter rounds at random, and the worst of its distances from the first at neighbouring rows says how far a
/// row may be off. Both take the experts that the kernel has chosen, and each choice is judged apart; for a
/// mixture a step with a long history follows, since another kernel of it may choose other experts and tells nothing. Pages are taken from the pool as they come, so
/// those of a sequence are not neighbours. A schedule of fewer rows than the session has is executed several times for each of its steps: a row has the
/// bits that it has alone. No more positions are compared than the session's pages hold.
///
/// # Errors
/// The first row that is out of tolerance, or what interpreter or device refuse.
pub fn check_rows(
    validated: &Validated,
    pack: Pack,
    parameters: u64,
    session: &mut dyn RowLauncher,
) -> Result<Checked, CheckError> {
    let shape = *session.shape();
    // Two sequences at least, so that the pages of one are no neighbours.
    let count = shape.rows.max(2).min(shape.sequences);
    let affordable = COST_MAX / parameters.max(1) / u64::from(count);
    let more = if shape.rows == 1 { ONE_ROW_PAGES * u64::from(shape.page_rows) } else { 0 };
    let in_pool = u64::from(shape.pages / count) * u64::from(shape.page_rows);
    let positions = affordable.clamp(2, POSITIONS_MAX + more).min(u64::from(shape.context_max)).min(in_pool) as u32;
    let of_interp = Shape::of(&validated.schedule().program).expect("validate: a batch kernel has tables");
    let beside = Beside::new(validated, pack)?;
    let ids = check_ids(beside.vocab(), positions * count);
    let mut both =
        Both { pool: Pool::new(shape), guard: Guard::new(shape), rows_max: of_interp.rows as usize, beside, session };
    let sequences: Vec<SequenceId> = (0..count).map(|_| both.pool.open().expect("a sequence for each row")).collect();
    for (position, tokens) in (0..positions).zip(ids.chunks(count as usize)) {
        let row = |&sequence: &SequenceId| Row { sequence, position, wants_logits: true };
        let rows = shape.rows as usize;
        for (sequences, tokens) in sequences.chunks(rows).zip(tokens.chunks(rows)) {
            both.step(sequences.iter().map(row).collect(), tokens)?;
        }
    }
    for sequence in sequences {
        both.pool.close(sequence).expect("an open sequence");
    }
    let sequence = both.pool.open().expect("a sequence, all are closed");
    let mut first = 0;
    // Rows that leave and come back, and a chunk that only fills the cache.
    for (rows, wants_logits) in [(shape.rows, true), (1, true), (shape.rows, false), (shape.rows / 2, true)] {
        let rows = rows.min(shape.context_max - first);
        let tokens: Vec<u32> = ids.iter().rev().copied().cycle().skip(first as usize).take(rows as usize).collect();
        let row = |position| Row { sequence, position, wants_logits };
        both.step((first..first + rows).map(row).collect(), &tokens)?;
        first += rows;
    }
    both.pool.close(sequence).expect("an open sequence");
    if !both.beside.routers().is_empty() {
        both.long_history()?;
    }
    Ok(Checked { figures: both.beside.judge.figures })
}

/// A device, and interpreters that are given the same launches.
struct Both<'a> {
    pool: Pool,
    /// Of the device.
    guard: Guard,
    /// Rows of the interpreter.
    rows_max: usize,
    beside: Beside<'a>,
    session: &'a mut dyn RowLauncher,
}

impl Both<'_> {
    /// One step of `rows` with `tokens`.
    fn step(&mut self, rows: Vec<Row>, tokens: &[u32]) -> Result<(), CheckError> {
        if rows.is_empty() {
            return Ok(());
        }
        for row in &rows {
            self.pool.reserve(row.sequence, row.position + 1).expect("pages for every position of the check");
        }
        let wants_logits = rows.iter().any(|row| row.wants_logits);
        let request = Request { rows, steps: 1, edits: self.pool.take_edits() };
        self.session.poison_logits()?;
        let decided = self.launch(&request, tokens)?;
        let logits = (0..tokens.len() as u32).filter(|_| wants_logits).map(|row| self.session.logits(row));
        let found: Vec<Vec<f32>> = logits.collect::<Result<_, _>>()?;
        let expected = self.expected(&request, tokens)?;
        for (row, found) in found.iter().enumerate() {
            self.beside.compare(&expected, row, found)?;
            let (decided, chosen) = (decided.get(row).copied(), argmax(found));
            if decided != chosen {
                let (position, figures) = (expected.positions[row], self.beside.judge.figures);
                let (expected, found) = (chosen.unwrap_or(0), decided.unwrap_or(0));
                return Err(CheckError::Argmax { position, expected, found, figures });
            }
        }
        Ok(())
    }

    /// A step of a row with a history of several pages and, if the device cuts histories, KV splits, beside one with a shorter one if there is
    /// room. The interpreters take the histories, and the recurrent states after them, as the device has written them.
    fn long_history(&mut self) -> Result<(), CheckError> {
        let shape = *self.session.shape();
        let two = shape.rows > 1 && shape.sequences > 1 && shape.pages > 1;
        let pages = if two { shape.pages - 1 } else { shape.pages };
        let most = pages.saturating_mul(shape.page_rows).min(shape.context_max);
        let several = 2 * shape.page_rows.max(self.session.split_max());
        let long = (several + BEYOND_PAGES).min(most.saturating_sub(1));
        let short = (long / 3).min(shape.page_rows.saturating_sub(1));
        let ids = check_ids(self.beside.vocab(), long + 1);
        let mut rows = vec![];
        for position in if two { vec![long, short] } else { vec![long] } {
            let sequence = self.pool.open().expect("a sequence, all are closed");
            let before: Vec<u32> = (0..position).collect();
            for positions in before.chunks(shape.rows as usize) {
                let row = |&position: &u32| Row { sequence, position, wants_logits: false };
                let tokens: Vec<u32> = positions.iter().map(|&position| ids[position as usize]).collect();
                self.write(positions.iter().map(row).collect(), &tokens)?;
            }
            rows.push(Row { sequence, position, wants_logits: true });
        }
        if shape.has_state {
            let states = rows.iter().map(|row| {
                let read = |at, bytes| self.session.read_cache(at, bytes);
                let states = self.beside.states().read(row.sequence, &read)?;
                Ok(Launch::of_states(row.sequence, row.position, Arc::new(states)))
            });
            let states = states.collect::<Result<Vec<_>, CheckError>>()?;
            self.beside.step(states)?;
        }
        let tokens: Vec<u32> = rows.iter().map(|row| ids[row.position as usize]).collect();
        self.step(rows, &tokens)
    }

    /// A step of which nothing is compared: the device executes it, and the interpreters take what it writes.
    fn write(&mut self, rows: Vec<Row>, tokens: &[u32]) -> Result<(), CheckError> {
        for row in &rows {
            self.pool.reserve(row.sequence, row.position + 1).expect("pages for every position of the check");
        }
        let request = Request { rows, steps: 1, edits: self.pool.take_edits() };
        self.launch(&request, tokens)?;
        let mut edits = request.edits.clone();
        let mut launches = vec![];
        for rows in request.rows.chunks(self.rows_max) {
            let caches = self.beside.caches();
            let by_column = |row: &Row| {
                let written = self.written(caches, row)?;
                Ok(written.iter().enumerate().map(|(cache, bytes)| caches.by_column(cache, bytes)).collect())
            };
            let written = rows.iter().map(by_column).collect::<Result<Vec<_>, CheckError>>()?;
            let request = Request { rows: rows.to_vec(), steps: 1, edits: std::mem::take(&mut edits) };
            let decodes = Decodes::Written { request, rows: Arc::new(written) };
            launches.push(Launch { decodes, tokens: vec![], taken: Taken::default() });
        }
        self.beside.step(launches).map(drop)
    }

    /// The tokens that rows decide on the device.
    fn launch(&mut self, request: &Request, tokens: &[u32]) -> Result<Vec<u32>, CheckError> {
        let wants_logits = request.rows.iter().any(|row| row.wants_logits);
        let admitted = self.guard.admit(request).expect("pages of the pool keep all facts");
        let mut launched = self.session.run_whole(admitted, &given(tokens), wants_logits)?;
        Ok(launched.tokens.pop().unwrap_or_default())
    }

    /// What a step that the device has executed is to compute. What the device stored in it is judged.
    fn expected(&mut self, request: &Request, tokens: &[u32]) -> Result<Expected, CheckError> {
        let codes = match self.beside.coded_caches() {
            Some(caches) => request.rows.iter().map(|row| self.written(caches, row)).collect::<Result<_, _>>()?,
            None => vec![],
        };
        let choices = self.choices_of(request, tokens)?;
        let mut edits = request.edits.clone();
        let (mut launches, mut first) = (vec![], 0);
        for (rows, tokens) in request.rows.chunks(self.rows_max).zip(tokens.chunks(self.rows_max)) {
            let of_launch = first..first + rows.len();
            first = of_launch.end;
            let taken = Taken {
                codes: by_cache(codes.get(of_launch.clone()).unwrap_or(&[])),
                choices: choices.iter().map(|of| of.get(of_launch.clone()).unwrap_or(&[]).to_vec()).collect(),
            };
            let request = Request { rows: rows.to_vec(), steps: 1, edits: std::mem::take(&mut edits) };
            launches.push(Launch { decodes: Decodes::Rows(request), tokens: tokens.to_vec(), taken });
        }
        self.beside.step(launches)
    }

    /// The experts that rows of a step chose on the device, by router, row and slot. None of a router that the launch left out, because no cache
    /// is filled after it.
    fn choices_of(&mut self, request: &Request, tokens: &[u32]) -> Result<Vec<Vec<Vec<u32>>>, CheckError> {
        let wants_logits = request.rows.iter().any(|row| row.wants_logits);
        let asked = self.beside.routers().iter().map(|router| (router.fills || wants_logits).then_some(router.buffer));
        let asked: Vec<_> = asked.collect();
        let mut choices = vec![vec![]; asked.len()];
        let kept = self.session.rows_kept() as usize;
        for (rows, tokens) in request.rows.chunks(kept).zip(tokens.chunks(kept)) {
            if asked.is_empty() {
                break;
            }
            if rows.len() < request.rows.len() {
                // The exchange has only the rows of its last turn, so each turn is executed once more.
                self.launch(&Request { rows: rows.to_vec(), steps: 1, edits: vec![] }, tokens)?;
            }
            for (buffer, choices) in asked.iter().zip(&mut choices) {
                for row in (0..rows.len() as u32).filter(|_| buffer.is_some()) {
                    let ids = buffer.map(|buffer| self.session.exchanged(buffer, row)).transpose()?;
                    choices.push(ids.unwrap_or_default().into_iter().map(f32::to_bits).collect());
                }
            }
        }
        Ok(choices)
    }

    /// What the device wrote for a row: the bytes of each cache.
    fn written(&self, caches: &DeviceCaches, row: &Row) -> Result<Vec<Vec<u8>>, CheckError> {
        let page_rows = self.session.shape().page_rows;
        let page = self.pool.page(row.sequence, row.position / page_rows).expect("a page that was reserved");
        let at = u64::from(page.0) * u64::from(page_rows) + u64::from(row.position % page_rows);
        Ok(caches.read(at, row.position, &|at, bytes| self.session.read_cache(at, bytes))?)
    }
}

/// Of each cache the codes of all rows, one row after another, from those of each row.
fn by_cache(rows: &[Vec<Vec<u8>>]) -> Vec<Vec<u8>> {
    let caches = rows.first().map_or(0, Vec::len);
    (0..caches).map(|cache| rows.iter().flat_map(|row| row[cache].iter().copied()).collect()).collect()
}
