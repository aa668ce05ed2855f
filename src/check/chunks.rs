//! Compares wave kernels that read the prompts of a mixture of experts with the interpreter, which takes the experts that they have chosen.
//!
//! Two right kernels may choose different experts, so keys and values of a wave kernel are not those of another kernel. The check reads what rows of a
//! chunk have chosen, in every layer, and the keys and values that they have written. An interpreter executes some of the rows: with these choices, and
//! over the keys and values that the device has written for the rows before. So a row differs by the arithmetic of that row alone.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use super::beside::{Beside, Decodes, Launch};
use super::rows::COST_MAX;
use super::spans::check_spans;
use super::waves::{CHUNKS, POSITIONS};
use super::{CheckError, Checked, check_ids};
use crate::cuda::rows::given;
use crate::cuda::session::SessionError;
use crate::cuda::waves::{ChunkRead, Last, WavesSession};
use crate::interp::{Pack, Taken};
use crate::ir::BufferId;
use crate::pages::Pool;
use crate::rows::{Edit, Guard, Request, Row, SequenceId, Shape, Tables};
use crate::sample::argmax;
use crate::validate::Validated;

/// Least rows that are executed: some tens of a chunk, so that most experts and tiles have one.
const ROWS_MIN: u64 = 128;

/// What reads prompt chunks, as the check drives it.
pub trait ReadsChunks {
    fn shape(&self) -> &Shape;

    /// As [`WavesSession::decides`].
    fn decides(&self) -> bool;

    /// As [`WavesSession::read`].
    ///
    /// # Errors
    /// As [`WavesSession::read`].
    fn read(&mut self, tables: Tables<'_>, tokens: &[u32], last: Last<'_>) -> Result<ChunkRead, SessionError>;

    /// As [`WavesSession::logits`].
    ///
    /// # Errors
    /// As [`WavesSession::logits`].
    fn logits(&self) -> Result<Vec<f32>, SessionError>;

    /// As [`WavesSession::chosen`].
    ///
    /// # Errors
    /// As [`WavesSession::chosen`].
    fn chosen(&self, buffer: BufferId, row: u32, is_last: bool) -> Result<Vec<u32>, SessionError>;

    /// As [`WavesSession::poison_logits`].
    ///
    /// # Errors
    /// What the driver refuses.
    fn poison_logits(&mut self) -> Result<(), SessionError>;

    /// As [`WavesSession::read_cache`].
    ///
    /// # Errors
    /// What the driver refuses.
    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError>;
}

impl ReadsChunks for WavesSession {
    fn shape(&self) -> &Shape {
        self.shape()
    }

    fn decides(&self) -> bool {
        self.decides()
    }

    fn read(&mut self, tables: Tables<'_>, tokens: &[u32], last: Last<'_>) -> Result<ChunkRead, SessionError> {
        self.read(tables, tokens, last)
    }

    fn logits(&self) -> Result<Vec<f32>, SessionError> {
        self.logits()
    }

    fn chosen(&self, buffer: BufferId, row: u32, is_last: bool) -> Result<Vec<u32>, SessionError> {
        self.chosen(buffer, row, is_last)
    }

    fn poison_logits(&mut self) -> Result<(), SessionError> {
        self.poison_logits()
    }

    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        self.read_cache(at, bytes)
    }
}

/// Reads one text in chunks, each with a tail if there is one. Of some rows of each chunk it judges the choices, and compares the keys and values of every layer
/// with those of an interpreter that takes the choices; after a tail also its logits, and the token that it decides with their arg-max. The first and the
/// last row of a chunk are among them, and others at equal distances: all, if they cost no more than some seconds. A second interpreter rounds
/// at random, and says how far a row may be off. Of a mixture with recurrent states some neighbouring rows are executed from states that the device has left, and the states
/// after each chunk are compared, too (`spans`). No more positions are read than the pages hold. `parameters` are those of the model.
///
/// # Errors
/// The first row that is out of tolerance, or what interpreter or device refuse.
pub fn check_chunks(
    validated: &Validated,
    pack: Pack,
    parameters: u64,
    device: &mut dyn ReadsChunks,
) -> Result<Checked, CheckError> {
    let shape = *device.shape();
    if shape.has_state {
        return check_spans(validated, pack, parameters, device);
    }
    let of_interp = Shape::of(&validated.schedule().program).expect("validate: a batch kernel has tables");
    let beside = Beside::new(validated, pack)?;
    let positions = (POSITIONS - 1).min(shape.context_max).min(shape.pages.saturating_mul(shape.page_rows));
    let ids = check_ids(beside.vocab(), positions);
    let affordable = (COST_MAX / parameters.max(1)).clamp(ROWS_MIN, u64::from(positions).max(ROWS_MIN)) as u32;
    // Odd, so that rows have every place of a tile.
    let stride = positions.div_ceil(affordable) | 1;
    let (mut pool, guard) = (Pool::new(shape), Guard::new(shape));
    let [sequence, _] = open(&mut pool, &shape, positions);
    let edits = pool.take_edits();
    let mut chunks = Chunks {
        shape,
        pool,
        guard,
        sequence: sequence.expect("a sequence for the check"),
        rows_max: of_interp.rows,
        edits: [edits.clone(), edits],
        beside,
        device,
    };
    let mut first = 0;
    for count in CHUNKS {
        let rows = first..(first + count).min(positions);
        if rows.is_empty() {
            break;
        }
        first = rows.end;
        let mut compared: BTreeSet<u32> = rows.clone().step_by(stride as usize).collect();
        compared.insert(rows.end - 1);
        chunks.chunk(rows.clone(), &ids[rows.start as usize..rows.end as usize], &compared)?;
    }
    Ok(Checked { figures: chunks.beside.judge.figures })
}

/// A sequence with pages for `positions`, and, if there is room for as many others, another one whose pages lie between.
pub(super) fn open(pool: &mut Pool, shape: &Shape, positions: u32) -> [Option<SequenceId>; 2] {
    let sequence = pool.open().expect("a sequence for the check");
    let other = (shape.pages / 2 >= positions.div_ceil(shape.page_rows)).then(|| pool.open().ok()).flatten();
    let mut reserved = 0;
    while reserved < positions {
        reserved = (reserved + shape.page_rows).min(positions);
        for sequence in [Some(sequence), other].into_iter().flatten() {
            pool.reserve(sequence, reserved).expect("pages for the check");
        }
    }
    [Some(sequence), other]
}

struct Chunks<'a> {
    shape: Shape,
    pool: Pool,
    /// Of the device.
    guard: Guard,
    sequence: SequenceId,
    /// Rows of the interpreter.
    rows_max: u32,
    /// Changes of the page table that the device, and the interpreters, have not seen.
    edits: [Vec<Edit>; 2],
    beside: Beside<'a>,
    device: &'a mut dyn ReadsChunks,
}

impl Chunks<'_> {
    /// Reads a chunk of `rows` with `tokens`, and compares some of its rows.
    fn chunk(&mut self, rows: Range<u32>, tokens: &[u32], compared: &BTreeSet<u32>) -> Result<(), CheckError> {
        let decides = self.device.decides();
        let request = self.request(0, rows.clone(), decides);
        let tables = self.guard.admit(&request).expect("pages of the pool keep all facts");
        self.device.poison_logits()?;
        let last = match given(&tokens[tokens.len() - 1..]).pop() {
            Some(row) if decides => Last::Token { row, with_logits: true },
            _ => Last::Nothing,
        };
        let read = self.device.read(tables, tokens, last)?;
        let mut at = rows.start;
        while at < rows.end {
            let end = self.run_end(at, &rows, compared);
            let tokens = &tokens[(at - rows.start) as usize..(end - rows.start) as usize];
            let is_last = end == rows.end;
            let written = self.written(at..end)?;
            if compared.contains(&at) {
                let found = if is_last && decides { Some((self.device.logits()?, read.token)) } else { None };
                self.compare((at..end, rows.start), tokens, &written, found)?;
            }
            self.settle(at..end, &written)?;
            at = end;
        }
        Ok(())
    }

    /// Where a run of rows ends that the interpreter executes, or takes, at a time. The last row of a chunk is alone.
    fn run_end(&self, at: u32, rows: &Range<u32>, compared: &BTreeSet<u32>) -> u32 {
        let is_compared = compared.contains(&at);
        let alike = |&next: &u32| compared.contains(&next) == is_compared && next + 1 < rows.end;
        let most = rows.end.min(at + self.rows_max);
        (at + 1..most).find(|next| !alike(next)).unwrap_or(most)
    }

    /// A step of rows of the sequence, with the changes of the page table that the device (0) or the interpreters (1) have not seen.
    fn request(&mut self, of: usize, positions: Range<u32>, last_wants_logits: bool) -> Request {
        let (sequence, end) = (self.sequence, positions.end);
        let row = |position| Row { sequence, position, wants_logits: last_wants_logits && position + 1 == end };
        Request { rows: positions.map(row).collect(), steps: 1, edits: std::mem::take(&mut self.edits[of]) }
    }

    /// Compares rows of the chunk that begins at `first`. `found`: the logits after them, and the token that was decided.
    fn compare(
        &mut self,
        (positions, first): (Range<u32>, u32),
        tokens: &[u32],
        written: &[Vec<Vec<u8>>],
        found: Option<(Vec<f32>, Option<u32>)>,
    ) -> Result<(), CheckError> {
        let decides = found.is_some();
        let of_row = |buffer, position: u32| self.device.chosen(buffer, position - first, decides);
        let routers = self.beside.routers().iter().map(|router| {
            let rows = positions.clone().filter(|_| router.fills || decides);
            rows.map(|position| of_row(router.buffer, position)).collect::<Result<Vec<_>, _>>()
        });
        let taken = Taken { choices: routers.collect::<Result<_, _>>()?, ..Taken::default() };
        let request = self.request(1, positions.clone(), decides);
        let launch = Launch { decodes: Decodes::Chunk(request), tokens: tokens.to_vec(), taken };
        let expected = self.beside.step(vec![launch])?;
        let rows: Vec<(u32, usize)> =
            positions.clone().map(|position| (position, self.cache_row(position) as usize)).collect();
        self.beside.compare_written(&rows, written)?;
        let Some((logits, token)) = found else { return Ok(()) };
        self.beside.compare(&expected, positions.len() - 1, &logits)?;
        if token != argmax(&logits) {
            let (position, figures) = (positions.end - 1, self.beside.judge.figures);
            let (expected, found) = (argmax(&logits).unwrap_or(0), token.unwrap_or(0));
            return Err(CheckError::Argmax { position, expected, found, figures });
        }
        Ok(())
    }

    /// The interpreters take what the device has written for rows.
    fn settle(&mut self, positions: Range<u32>, written: &[Vec<Vec<u8>>]) -> Result<(), CheckError> {
        let request = self.request(1, positions, false);
        let caches = self.beside.caches();
        let by_column = |of_row: &Vec<Vec<u8>>| {
            of_row.iter().enumerate().map(|(cache, bytes)| caches.by_column(cache, bytes)).collect()
        };
        let rows = Arc::new(written.iter().map(by_column).collect());
        let decodes = Decodes::Written { request, rows };
        self.beside.settle(Launch { decodes, tokens: vec![], taken: Taken::default() })
    }

    /// What the device has written for neighbouring rows: by row and cache.
    fn written(&self, positions: Range<u32>) -> Result<Vec<Vec<Vec<u8>>>, CheckError> {
        let page_rows = self.shape.page_rows;
        let mut written = vec![];
        let mut at = positions.start;
        while at < positions.end {
            let end = (at / page_rows + 1).saturating_mul(page_rows).min(positions.end);
            let read = |at, bytes| self.device.read_cache(at, bytes);
            written.extend(self.beside.caches().read_run(self.cache_row(at), at..end, &read)?);
            at = end;
        }
        Ok(written)
    }

    /// The row of a cache that has a position.
    fn cache_row(&self, position: u32) -> u64 {
        let page_rows = self.shape.page_rows;
        let page = self.pool.page(self.sequence, position / page_rows).expect("a page that was reserved");
        u64::from(page.0) * u64::from(page_rows) + u64::from(position % page_rows)
    }
}
