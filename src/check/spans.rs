//! Compares wave kernels that read the prompts of a mixture with recurrent states with the interpreter, which takes the experts that they have chosen.
//!
//! As in [`super::chunks`], only some rows of a chunk are executed. A row needs the states before it, and a device has those after the last row of a
//! launch alone. So the device reads the text again, in chunks of which the last one ends before that row. Its rows have the bits that they have in the
//! whole chunk, which is checked: sums of a row have one order, whatever comes after it (`waves::Sums`). What it leaves are the states before the row.
//!
//! An interpreter takes these states, and the keys and values before the row, and executes a *span*: a few rows from there on. Its choices, keys and
//! values are compared with those of the whole chunk, and after the last row of the chunk its states with those of the device. So every span is
//! judged by the arithmetic of its own rows. A state that is brought on wrongly within a chunk is found by the rows after it in a span. At the end of a chunk the state itself is compared.

use std::ops::Range;
use std::sync::Arc;

use super::beside::{Beside, Decodes, Launch};
use super::chunks::{ReadsChunks, open};
use super::rows::COST_MAX;
use super::states::States;
use super::waves::{CHUNKS, POSITIONS};
use super::{CheckError, Checked, check_ids};
use crate::cuda::rows::given;
use crate::cuda::waves::Last;
use crate::interp::{Pack, Taken};
use crate::pages::Pool;
use crate::rows::{Edit, Guard, Request, Row, SequenceId, Shape};
use crate::sample::argmax;
use crate::validate::Validated;

/// Rows of a span: more where they cost little.
const SPAN_MIN: u64 = 4;
const SPAN_MAX: u64 = 8;
/// From the begin of a span to that of the next one. Each block of 128 rows has one, spans have all places of a tile, and the second one has both
/// sides of a multiple of 32, where a state is carried on.
const STRIDE: u32 = 93;

/// Reads one text in chunks, each with a tail if there is one, and compares spans of its rows: choices, keys and values of every layer, and after a chunk its
/// recurrent states; after a tail its logits, and the token that it decides with their arg-max. A second interpreter rounds at random, and says how
/// far a row may be off. No more positions are read than the pages hold. `parameters` are those of the model.
///
/// # Errors
/// The first row that is out of tolerance, or has other bits in a shorter chunk; what interpreter or device refuse.
pub(super) fn check_spans(
    validated: &Validated,
    pack: Pack,
    parameters: u64,
    device: &mut dyn ReadsChunks,
) -> Result<Checked, CheckError> {
    let shape = *device.shape();
    let of_interp = Shape::of(&validated.schedule().program).expect("validate: a batch kernel has tables");
    let beside = Beside::new(validated, pack)?;
    let positions = (POSITIONS - 1).min(shape.context_max).min(shape.pages.saturating_mul(shape.page_rows));
    let mut chunks: Vec<Range<u32>> = vec![];
    for count in CHUNKS {
        let first = chunks.last().map_or(0, |chunk| chunk.end);
        chunks.push(first..(first + count).min(positions));
    }
    chunks.retain(|chunk| !chunk.is_empty());
    let spans = chunks.iter().map(|chunk| spans(chunk, SPAN_MAX as u32).len() as u64).sum::<u64>();
    let length = (COST_MAX / parameters.max(1) / spans.max(1)).clamp(SPAN_MIN, SPAN_MAX) as u32;
    let mut pool = Pool::new(of_interp);
    let [sequence, _] = open(&mut pool, &of_interp, positions);
    let mut check = Spans {
        shape,
        pool: Pool::new(shape),
        guard: Guard::new(shape),
        opened: [None; 2],
        of_interp: OfInterp {
            rows_max: of_interp.rows,
            edits: pool.take_edits(),
            sequence: sequence.expect("a sequence for the check"),
            pool,
            page_rows: of_interp.page_rows,
        },
        ids: check_ids(beside.vocab(), positions),
        length,
        beside,
        device,
    };
    let mut states = None;
    for at in 0..chunks.len() {
        states = Some(check.chunk(&chunks[..=at], states)?);
    }
    Ok(Checked { figures: check.beside.judge.figures })
}

/// The spans of a chunk, of `length` rows at most: every [`STRIDE`] rows one, and one at the end.
fn spans(chunk: &Range<u32>, length: u32) -> Vec<Range<u32>> {
    let mut begins: Vec<u32> = chunk.clone().step_by(STRIDE as usize).collect();
    begins.push(chunk.end - length.min(chunk.len() as u32));
    begins.sort_unstable();
    let mut spans: Vec<Range<u32>> = vec![];
    for begin in begins {
        let first = begin.max(spans.last().map_or(0, |span| span.end));
        let end = (begin + length).min(chunk.end);
        if first < end {
            spans.push(first..end);
        }
    }
    spans
}

/// The sequence of the interpreters.
struct OfInterp {
    pool: Pool,
    sequence: SequenceId,
    /// Changes of the page table that they have not seen.
    edits: Vec<Edit>,
    rows_max: u32,
    page_rows: u32,
}

impl OfInterp {
    fn request(&mut self, positions: Range<u32>, last_wants_logits: bool) -> Request {
        let (sequence, end) = (self.sequence, positions.end);
        let row = |position| Row { sequence, position, wants_logits: last_wants_logits && position + 1 == end };
        Request { rows: positions.map(row).collect(), steps: 1, edits: std::mem::take(&mut self.edits) }
    }
}

struct Spans<'a> {
    /// Of the device, as are pool and guard. Each reading has a sequence of its own, and another one between whose pages its pages lie.
    shape: Shape,
    pool: Pool,
    guard: Guard,
    opened: [Option<SequenceId>; 2],
    of_interp: OfInterp,
    ids: Vec<u32>,
    /// Rows of a span.
    length: u32,
    beside: Beside<'a>,
    device: &'a mut dyn ReadsChunks,
}

/// What a device left of a chunk.
struct Read {
    rows: Range<u32>,
    /// Of each row and cache.
    written: Vec<Vec<Vec<u8>>>,
    /// Of each router and row of a span what it chose; nothing of one that the chunk has not.
    chosen: Vec<Vec<(u32, Vec<u32>)>>,
    states: Arc<States>,
    /// The logits after the last row, and the token that was decided.
    decided: Option<(Vec<f32>, Option<u32>)>,
}

impl Spans<'_> {
    /// Compares spans of the last one of `chunks`. `before`: the states before it. Returns those after it.
    fn chunk(&mut self, chunks: &[Range<u32>], before: Option<Arc<States>>) -> Result<Arc<States>, CheckError> {
        let (rows, earlier) = chunks.split_last().expect("a chunk");
        let spans = spans(rows, self.length);
        let whole = self.read_whole(chunks, &spans)?;
        let mut settled = rows.start;
        for span in spans {
            self.settle(settled..span.start, &whole)?;
            let states = if span.start == rows.start {
                before.clone()
            } else {
                let part = rows.start..span.start;
                self.read(&[earlier, std::slice::from_ref(&part)].concat(), Last::Nothing)?;
                let written = self.written(part.clone())?;
                if let Some(at) = written.iter().zip(&whole.written).position(|(part, whole)| part != whole) {
                    let figures = self.beside.judge.figures;
                    return Err(CheckError::CutsDiffer { position: part.start + at as u32, end: part.end, figures });
                }
                Some(self.states()?)
            };
            self.span(&span, &whole, states)?;
            self.settle(span.clone(), &whole)?;
            settled = span.end;
        }
        Ok(whole.states)
    }

    /// Reads the text in chunks, and what the last one leaves.
    fn read_whole(&mut self, chunks: &[Range<u32>], spans: &[Range<u32>]) -> Result<Read, CheckError> {
        let rows = chunks.last().expect("a chunk").clone();
        let decides = self.device.decides();
        let row = given(&self.ids[rows.end as usize - 1..rows.end as usize]).pop();
        let last = row.filter(|_| decides).map_or(Last::Nothing, |row| Last::Token { row, with_logits: true });
        let token = self.read(chunks, last)?;
        let of_router = |buffer, fills| {
            let asked = spans.iter().cloned().flatten().filter(|row| fills || decides && row + 1 == rows.end);
            let of_row =
                |row: u32| Ok((row, self.device.chosen(buffer, row - rows.start, decides && row + 1 == rows.end)?));
            asked.map(of_row).collect::<Result<_, CheckError>>()
        };
        let routers = self.beside.routers().iter();
        let chosen = routers.map(|router| of_router(router.buffer, router.fills)).collect::<Result<_, _>>()?;
        let decided = if decides { Some((self.device.logits()?, token)) } else { None };
        Ok(Read { written: self.written(rows.clone())?, states: self.states()?, rows, chosen, decided })
    }

    /// The device reads the text from its beginning in chunks, of which the last one has `last`. Returns the token that it decided.
    fn read(&mut self, chunks: &[Range<u32>], last: Last<'_>) -> Result<Option<u32>, CheckError> {
        for sequence in std::mem::take(&mut self.opened).into_iter().flatten() {
            self.pool.close(sequence).expect("an open sequence");
        }
        self.opened = open(&mut self.pool, &self.shape, chunks.last().map_or(0, |chunk| chunk.end));
        let [Some(sequence), _] = self.opened else { panic!("a sequence for the check") };
        self.device.poison_logits()?;
        let mut token = None;
        let mut last = Some(last);
        for (at, chunk) in chunks.iter().enumerate() {
            let is_last = at + 1 == chunks.len();
            let last = last.take_if(|_| is_last).unwrap_or(Last::Nothing);
            let wants = matches!(last, Last::Token { .. });
            let row = |position| Row { sequence, position, wants_logits: wants && position + 1 == chunk.end };
            let request = Request { rows: chunk.clone().map(row).collect(), steps: 1, edits: self.pool.take_edits() };
            let tables = self.guard.admit(&request).expect("pages of the pool keep all facts");
            token = self.device.read(tables, &self.ids[chunk.start as usize..chunk.end as usize], last)?.token;
        }
        Ok(token)
    }

    /// Compares a span of a chunk with what interpreters make of it from `states` on.
    fn span(&mut self, span: &Range<u32>, whole: &Read, states: Option<Arc<States>>) -> Result<(), CheckError> {
        let ends = span.end == whole.rows.end;
        let decided = whole.decided.as_ref().filter(|_| ends);
        let sequence = self.of_interp.sequence;
        let mut launches: Vec<Launch> =
            states.into_iter().map(|states| Launch::of_states(sequence, span.start, states)).collect();
        // A row with logits is a step of its own.
        let alone = span.end - u32::from(decided.is_some())..span.end;
        launches.extend(self.launches(span.start..alone.start, whole, false));
        self.beside.step(launches)?;
        self.compare_written(span.start..alone.start, whole)?;
        if let Some((logits, token)) = decided {
            let launches = self.launches(alone.clone(), whole, true);
            let expected = self.beside.step(launches)?;
            self.compare_written(alone, whole)?;
            self.beside.compare(&expected, 0, logits)?;
            if *token != argmax(logits) {
                let (position, figures) = (span.end - 1, self.beside.judge.figures);
                let (expected, found) = (argmax(logits).unwrap_or(0), token.unwrap_or(0));
                return Err(CheckError::Argmax { position, expected, found, figures });
            }
        }
        if ends {
            self.beside.compare_states((sequence, span.end - 1), &whole.states)?;
        }
        Ok(())
    }

    /// Launches of the interpreters, which take what the device has chosen.
    fn launches(&mut self, positions: Range<u32>, whole: &Read, wants_logits: bool) -> Vec<Launch> {
        let (rows_max, mut launches) = (self.of_interp.rows_max, vec![]);
        for first in positions.clone().step_by(rows_max as usize) {
            let rows = first..(first + rows_max).min(positions.end);
            let of_router = |chosen: &Vec<(u32, Vec<u32>)>| {
                chosen.iter().filter(|(row, _)| rows.contains(row)).map(|(_, ids)| ids.clone()).collect()
            };
            let choices = whole
                .chosen
                .iter()
                .zip(self.beside.routers())
                .map(|(chosen, router)| if router.fills || wants_logits { of_router(chosen) } else { vec![] });
            let taken = Taken { choices: choices.collect(), ..Taken::default() };
            let tokens = self.ids[rows.start as usize..rows.end as usize].to_vec();
            let request = self.of_interp.request(rows, wants_logits);
            launches.push(Launch { decodes: Decodes::Chunk(request), tokens, taken });
        }
        launches
    }

    fn compare_written(&mut self, positions: Range<u32>, whole: &Read) -> Result<(), CheckError> {
        let OfInterp { pool, sequence, page_rows, .. } = &self.of_interp;
        let at = |position| (position, cache_row(pool, *sequence, *page_rows, position) as usize);
        let rows: Vec<(u32, usize)> = positions.clone().map(at).collect();
        self.beside.compare_written(&rows, whole.of(positions))
    }

    /// The interpreters take what the device has written for rows.
    fn settle(&mut self, positions: Range<u32>, whole: &Read) -> Result<(), CheckError> {
        for first in positions.clone().step_by(self.of_interp.rows_max as usize) {
            let rows = first..(first + self.of_interp.rows_max).min(positions.end);
            let caches = self.beside.caches();
            let by_column = |of_row: &Vec<Vec<u8>>| {
                of_row.iter().enumerate().map(|(cache, bytes)| caches.by_column(cache, bytes)).collect()
            };
            let written = Arc::new(whole.of(rows.clone()).iter().map(by_column).collect());
            let decodes = Decodes::Written { request: self.of_interp.request(rows, false), rows: written };
            self.beside.settle(Launch { decodes, tokens: vec![], taken: Taken::default() })?;
        }
        Ok(())
    }

    /// What the last reading has written for rows: by row and cache.
    fn written(&self, positions: Range<u32>) -> Result<Vec<Vec<Vec<u8>>>, CheckError> {
        let [Some(sequence), _] = self.opened else { panic!("a reading") };
        let page_rows = self.shape.page_rows;
        let (mut written, mut at) = (vec![], positions.start);
        while at < positions.end {
            let end = (at / page_rows + 1).saturating_mul(page_rows).min(positions.end);
            let first = cache_row(&self.pool, sequence, page_rows, at);
            let read = |at, bytes| self.device.read_cache(at, bytes);
            written.extend(self.beside.caches().read_run(first, at..end, &read)?);
            at = end;
        }
        Ok(written)
    }

    /// The states that the last reading has left.
    fn states(&self) -> Result<Arc<States>, CheckError> {
        let [Some(sequence), _] = self.opened else { panic!("a reading") };
        Ok(Arc::new(self.beside.states().read(sequence, &|at, bytes| self.device.read_cache(at, bytes))?))
    }
}

impl Read {
    /// What rows of the chunk have written.
    fn of(&self, positions: Range<u32>) -> &[Vec<Vec<u8>>] {
        &self.written[(positions.start - self.rows.start) as usize..(positions.end - self.rows.start) as usize]
    }
}

/// The row of a cache that has a position of a sequence.
fn cache_row(pool: &Pool, sequence: SequenceId, page_rows: u32, position: u32) -> u64 {
    let page = pool.page(sequence, position / page_rows).expect("a page that was reserved");
    u64::from(page.0) * u64::from(page_rows) + u64::from(position % page_rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_reach_all_blocks_tiles_and_ends() {
        let mut first = 0;
        let (mut places, mut carried) = (vec![0; 8], 0);
        for count in CHUNKS {
            let chunk = first..first + count;
            first = chunk.end;
            let spans = spans(&chunk, SPAN_MIN as u32);
            assert_eq!((spans[0].start, spans[spans.len() - 1].end), (chunk.start, chunk.end));
            assert!(spans.windows(2).all(|two| two[0].end <= two[1].start), "{spans:?}");
            for block in chunk.clone().step_by(128) {
                let rows = block..(block + 128).min(chunk.end);
                assert!(spans.iter().any(|span| rows.contains(&span.start)), "{rows:?} of {chunk:?}");
            }
            for row in spans.iter().cloned().flatten() {
                places[((row - chunk.start) % 128 / 16) as usize] += 1;
            }
            let crosses = |span: &&Range<u32>| (span.start - chunk.start) / 32 < (span.end - 1 - chunk.start) / 32;
            carried += spans.iter().filter(crosses).count();
        }
        assert!(places.iter().all(|rows| *rows > 0) && carried > 4, "{places:?}, {carried}");
    }
}
