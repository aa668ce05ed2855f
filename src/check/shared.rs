//! Compares kernels for rows with logits that are computed once for all kernels of a model: they compute the same function.
//!
//! The logits are those after each token of a few short texts and of a longer one. A kernel decodes the short texts side by side, more than one
//! sequence may read the same text, and reads the long one in chunks beside them. So the reference takes the same time for any number of kernels and rows.

use super::codes;
use super::{
    CheckError, Checked, Figures, Judge, Noise, check_ids, check_selection, device_logits, inputs, noise_of, twice,
};
use crate::cuda::rows::{FirstToken, RowLauncher, given};
use crate::cuda::session::Session;
use crate::dtype::{DType, Precision};
use crate::interp::{Interp, Options, Pack};
use crate::pages::Pool;
use crate::rows::{Guard, Request, Row, SequenceId};
use crate::sample::argmax;
use crate::validate::Validated;
use std::ops::ControlFlow;

/// Multiplications of each of two interpreters: some seconds on a server.
const COST_MAX: u64 = 300_000_000_000;
/// Random seed of the one that rounds at random.
const LANE_SEED: u64 = 1;
/// Most readings of a text with random rounding: more than one where a row is out of tolerance. Trained weights are chaotic at some rows, where
/// some roundings change everything and others nothing, so that one reading may say too little (docs/numerics.md).
const LANES_MAX: u64 = 8;
/// Positions of all texts together, at least and at most. Each keeps the logits of a whole vocabulary.
const POSITIONS: [u64; 2] = [32, 120];
/// Short texts. Rows that are 8, 16, 32 or 64 apart have different ones.
const TEXTS: u32 = 8;
/// Rows of most chunks of prompts.
const CHUNK_ROWS: u32 = 32;
/// Steps of a launch that decodes without the host between two of them.
const STEPS: u32 = 3;

/// How many texts there are, and their positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextSizes {
    pub texts: u32,
    /// Positions of each of them.
    pub short: u32,
    /// Positions of one more text.
    pub long: u32,
}

impl TextSizes {
    /// Those for a model with so many parameters. `alone`: rows of a kernel whose pages hold one sequence, which reads the long text in one
    /// chunk; 0 without one.
    pub fn of(parameters: u64, context_max: u32, alone: u32) -> TextSizes {
        let all = (COST_MAX / parameters.max(1)).clamp(POSITIONS[0], POSITIONS[1]) as u32;
        // Chunks of prompts of one text have up to 32 rows, and mostly share the long text with all other kernels.
        let least = if all > POSITIONS[0] as u32 { CHUNK_ROWS + STEPS } else { 0 };
        let long = (all * 2 / 5).max(least).max(if alone > 0 { alone + STEPS } else { 0 });
        let short = all.saturating_sub(all * 2 / 5) / TEXTS;
        TextSizes { texts: TEXTS, short: short.max(2).min(context_max), long: long.min(context_max) }
    }

    /// Positions that the reference computes.
    pub fn positions(&self) -> u64 {
        u64::from(self.texts) * u64::from(self.short) + u64::from(self.long)
    }

    /// The ids of each text; the long one is the last.
    pub(super) fn ids(&self, vocab: u32) -> Vec<Vec<u32>> {
        let TextSizes { texts, short, long } = *self;
        let mut rest = check_ids(vocab, texts * short + long);
        let mut ids = vec![];
        for _ in 0..texts {
            let after = rest.split_off(short as usize);
            ids.push(std::mem::replace(&mut rest, after));
        }
        ids.push(rest);
        ids
    }
}

/// Words of [`Noise`] in an entry.
const NOISE_WORDS: usize = 3;

/// Texts, and the logits after each of their tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedTexts {
    vocab: u32,
    texts: Vec<Text>,
}

#[derive(Debug, Clone, PartialEq)]
struct Text {
    ids: Vec<u32>,
    /// Of each position, `[vocab]`.
    logits: Vec<Vec<f32>>,
    /// What rounding costs there.
    noise: Vec<Noise>,
}

impl SharedTexts {
    /// Reads every text with `logits_of`, which answers with the logits after each of its tokens.
    ///
    /// # Errors
    /// Those of `logits_of`.
    pub fn read<E>(
        sizes: TextSizes,
        vocab: u32,
        mut logits_of: impl FnMut(&[u32]) -> Result<Vec<Vec<f32>>, E>,
    ) -> Result<SharedTexts, E> {
        let text = |ids: Vec<u32>| {
            let logits = logits_of(&ids)?;
            Ok(Text { noise: vec![Noise::default(); logits.len()], logits, ids })
        };
        Ok(SharedTexts { vocab, texts: sizes.ids(vocab).into_iter().map(text).collect::<Result<_, E>>()? })
    }

    /// The bytes for the cache: what rounding costs each position, and its logits, little-endian. Ids follow from the sizes.
    pub(crate) fn to_entry(&self) -> Vec<u8> {
        let rows = self.texts.iter().flat_map(|text| text.noise.iter().zip(&text.logits));
        let words = rows.flat_map(|(noise, logits)| {
            let Noise { error_scaled, error_rel_l2, kl } = *noise;
            [error_scaled, error_rel_l2, kl].into_iter().chain(logits.iter().copied())
        });
        words.flat_map(f32::to_le_bytes).collect()
    }

    /// Reads the output of [`SharedTexts::to_entry`].
    pub(crate) fn from_entry(sizes: TextSizes, bytes: &[u8]) -> Option<SharedTexts> {
        let row_bytes = usize::try_from((bytes.len() as u64).checked_div(sizes.positions())?).ok()?;
        let vocab = (row_bytes / 4).checked_sub(NOISE_WORDS).filter(|vocab| *vocab > 0)?;
        if bytes.len() as u64 != sizes.positions() * 4 * (NOISE_WORDS + vocab) as u64 {
            return None;
        }
        let value = |word: &[u8]| f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        let mut rows = bytes.chunks_exact(row_bytes).map(|row| {
            let mut row: Vec<f32> = row.chunks_exact(4).map(value).collect();
            let logits = row.split_off(NOISE_WORDS);
            (Noise { error_scaled: row[0], error_rel_l2: row[1], kl: row[2] }, logits)
        });
        let text = |ids: Vec<u32>| {
            let (noise, logits) = (&mut rows).take(ids.len()).unzip();
            Text { noise, logits, ids }
        };
        let vocab = vocab as u32;
        Some(SharedTexts { vocab, texts: sizes.ids(vocab).into_iter().map(text).collect() })
    }

    /// What rounding costs, at worst, at the first positions of a text and at those after them. A single row that is rounded once may be right by
    /// chance.
    fn noise(&self) -> [Noise; 2] {
        let mut worst = [Noise::default(); 2];
        for text in &self.texts {
            for (position, noise) in (0..).zip(&text.noise) {
                let of = &mut worst[noise_of(position)];
                *of = of.or_worse(*noise);
            }
        }
        worst
    }

    /// Logits of a position.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    fn long(&self) -> usize {
        self.texts.len() - 1
    }
}

/// Computes the texts with the interpreter, and what rounding costs with another one that rounds at random. `validated` is a schedule of one row, or of
/// one text in chunks. `on_position` is called for each position.
///
/// # Errors
/// Faults of the interpreter.
pub fn expect_texts(
    validated: &Validated,
    pack: Pack,
    sizes: TextSizes,
    on_position: &dyn Fn(),
) -> Result<SharedTexts, CheckError> {
    let schedule = validated.schedule();
    let Precision { weights, cache, wire } = schedule.program.precision;
    let is_coarse = [weights, cache, wire] != [DType::F32; 3];
    let mut interp = Interp::of_text(schedule, pack.clone(), Options::fast())?;
    let mut lane = is_coarse.then(|| Interp::of_text(schedule, pack, Options::fast())).transpose()?;
    lane.iter_mut().for_each(|lane| lane.round_at_random(LANE_SEED, true));
    let vocab = interp.vocab() as u32;
    let mut texts = SharedTexts::read(sizes, vocab, |ids| read(&mut interp, ids, on_position))?;
    if let Some(lane) = &mut lane {
        for text in &mut texts.texts {
            let rounded = read(lane, &text.ids, &|| {})?;
            text.noise = text.logits.iter().zip(&rounded).map(|(exact, lane)| Noise::of(exact, [lane])).collect();
        }
    }
    Ok(texts)
}

/// The logits after each token of a text, with random rounding.
///
/// # Errors
/// Faults of the interpreter.
pub fn read_at_random(validated: &Validated, pack: Pack, ids: &[u32], seed: u64) -> Result<Vec<Vec<f32>>, CheckError> {
    let mut interp = Interp::of_text(validated.schedule(), pack, Options::fast())?;
    interp.round_at_random(seed, true);
    read(&mut interp, ids, &|| {})
}

/// Reads a text with random rounding, which the seed decides: [`read_at_random`].
pub type ReadAtRandom<'a> = &'a mut dyn FnMut(&[u32], u64) -> Result<Vec<Vec<f32>>, CheckError>;

fn read(interp: &mut Interp, ids: &[u32], on_position: &dyn Fn()) -> Result<Vec<Vec<f32>>, CheckError> {
    let mut rows = vec![];
    interp.reset();
    interp.launch(&inputs(ids), |step| {
        rows.push(step.logits.to_vec());
        on_position();
        ControlFlow::Continue(())
    })?;
    Ok(rows)
}

/// What rounding costs each row of the texts, from as many readings as a kernel needed.
struct Allowed<'a> {
    texts: &'a SharedTexts,
    noise: Vec<Vec<Noise>>,
    /// Readings of each text.
    lanes: Vec<u64>,
    /// Of all rows: the least that counts for one.
    median: Noise,
    at_random: ReadAtRandom<'a>,
}

impl<'a> Allowed<'a> {
    fn new(texts: &'a SharedTexts, at_random: ReadAtRandom<'a>) -> Allowed<'a> {
        let noise: Vec<Vec<Noise>> = texts.texts.iter().map(|text| text.noise.clone()).collect();
        let median = Noise::median(noise.iter().flatten().copied());
        Allowed { texts, noise, lanes: vec![1; texts.texts.len()], median, at_random }
    }

    /// Compares logits with a tolerance that follows from what rounding costs the row, or, where it costs nothing, with that of sums in
    /// another order.
    fn compare(&mut self, judge: &mut Judge, text: usize, position: u32, found: &[f32]) -> Result<(), CheckError> {
        let (of, at) = (&self.texts.texts[text], position as usize);
        if self.noise.iter().flatten().all(|noise| *noise == Noise::default()) {
            return judge.compare(position, &of.logits[at], found);
        }
        loop {
            let before = judge.figures;
            let compared =
                judge.compare_noisy(position, &of.logits[at], found, self.noise[text][at].or_worse(self.median));
            let wrong = matches!(compared, Err(CheckError::Wrong { .. } | CheckError::Argmax { .. }));
            if !wrong || self.lanes[text] >= LANES_MAX {
                return compared;
            }
            judge.figures = before;
            self.lanes[text] += 1;
            let lane = (self.at_random)(&of.ids, LANE_SEED + self.lanes[text])?;
            for ((noise, exact), lane) in self.noise[text].iter_mut().zip(&of.logits).zip(&lane) {
                *noise = noise.or_worse(Noise::of(exact, [lane]));
            }
        }
    }
}

/// Compares a kernel with the texts: the logits of every row, and each token that the kernel decides with the arg-max of its logits. First each row is a sequence
/// of its own, which reads a short text one position at a time, and then decides some tokens in one launch; in steps of one row two sequences take
/// turns. Then the long text is read in chunks, the first one beside short texts that fill the rows that are left. Pages are taken from the pool as they
/// come. No more is compared than the session's pages hold.
///
/// # Errors
/// The first row that is out of tolerance, or what the device refuses.
pub fn check_shared(
    texts: &SharedTexts,
    precision: Precision,
    session: &mut dyn RowLauncher,
    at_random: ReadAtRandom<'_>,
) -> Result<Checked, CheckError> {
    let shape = *session.shape();
    let mut judge = Judge::new(codes::tolerance(precision));
    judge.figures.noise = texts.noise();
    let allowed = Allowed::new(texts, at_random);
    let mut on = OnDevice { pool: Pool::new(shape), guard: Guard::new(shape), session, judge, texts, allowed };
    // Two sequences at least, so that the pages of one are no neighbours.
    let blocks_of = |positions: u32| positions.div_ceil(shape.page_rows.max(1)).max(1);
    let short = texts.texts[0].ids.len() as u32;
    let steps = STEPS.min(on.session.steps_max()).min(shape.context_max.saturating_sub(short));
    // A step more where none can be repeated.
    let in_pool = shape.pages / blocks_of(short + steps + u32::from(shape.has_state));
    let count = shape.rows.max(2).min(shape.sequences).min(in_pool.max(1));
    let sequences: Vec<(SequenceId, usize)> = (0..count).map(|n| (on.open(), text_of(n))).collect();
    for position in 0..short {
        for part in sequences.chunks(shape.rows as usize) {
            on.step(
                &part.iter().map(|&(sequence, text)| Reading { sequence, text, position }).collect::<Vec<_>>(),
                true,
            )?;
        }
    }
    // The same tokens again, with the first of a launch given and the others decided: each is what the logits after it say.
    if steps > 1 {
        for part in sequences.chunks(shape.rows as usize) {
            if shape.has_state {
                on.go_on(part, short, steps.min(shape.context_max.saturating_sub(short + 1)))?;
            } else {
                on.go_on(part, short - 1, steps)?;
            }
        }
    }
    sequences.into_iter().for_each(|(sequence, _)| on.pool.close(sequence).expect("an open sequence"));
    on.chunks()?;
    Ok(Checked { figures: on.judge.figures })
}

/// Compares the kernel for one row over its own cache with the texts, one after the other, and the tokens that it chooses with those that the host
/// chooses from the same logits. `steps_max` is what the session was loaded with.
///
/// # Errors
/// As [`check_shared`].
pub fn check_texts(
    texts: &SharedTexts,
    precision: Precision,
    session: &mut Session,
    (steps_max, context_max): (u32, u32),
    at_random: ReadAtRandom<'_>,
) -> Result<Checked, CheckError> {
    let mut judge = Judge::new(codes::tolerance(precision));
    judge.figures.noise = texts.noise();
    let mut allowed = Allowed::new(texts, at_random);
    for (n, text) in texts.texts.iter().enumerate() {
        let positions: Vec<u32> = (0..text.ids.len() as u32).collect();
        let read = |session: &mut Session| device_logits(session, &text.ids, 0, steps_max, texts.vocab, &positions);
        let found = twice(judge.figures, &positions, || read(session))?;
        for (position, found) in (0..).zip(&found) {
            allowed.compare(&mut judge, n, position, found)?;
        }
    }
    check_selection(session, texts.vocab, steps_max, context_max, judge.figures)?;
    Ok(Checked { figures: judge.figures })
}

/// The short text of a sequence. Sequences a power of two apart have different ones.
fn text_of(n: u32) -> usize {
    ((n + n / 8 + n / 64) % TEXTS) as usize
}

/// A row that reads a text.
#[derive(Clone, Copy)]
struct Reading {
    sequence: SequenceId,
    text: usize,
    position: u32,
}

struct OnDevice<'a> {
    pool: Pool,
    guard: Guard,
    session: &'a mut dyn RowLauncher,
    judge: Judge,
    texts: &'a SharedTexts,
    allowed: Allowed<'a>,
}

impl OnDevice<'_> {
    fn open(&mut self) -> SequenceId {
        self.pool.open().expect("a sequence of the check")
    }

    /// One step of rows, whose logits are compared if they are wanted.
    fn step(&mut self, rows: &[Reading], wants_logits: bool) -> Result<(), CheckError> {
        for row in rows {
            self.pool.reserve(row.sequence, row.position + 1).expect("pages for every position of the check");
        }
        let token = |row: &Reading| self.texts.texts[row.text].ids[row.position as usize];
        let tokens: Vec<u32> = rows.iter().map(token).collect();
        let row = |row: &Reading| Row { sequence: row.sequence, position: row.position, wants_logits };
        let request = Request { rows: rows.iter().map(row).collect(), steps: 1, edits: self.pool.take_edits() };
        self.session.poison_logits()?;
        let admitted = self.guard.admit(&request).expect("pages of the pool keep all facts");
        let launched = self.session.run_whole(admitted, &given(&tokens), wants_logits)?;
        if !wants_logits {
            return Ok(());
        }
        for (n, row) in (0u32..).zip(rows) {
            let found = self.session.logits(n)?;
            self.allowed.compare(&mut self.judge, row.text, row.position, &found)?;
            let decided = launched.tokens.last().map(|tokens| tokens[n as usize]);
            self.is_best(row.position, &found, decided)?;
        }
        Ok(())
    }

    /// A launch of several steps from `position` of each short text on, or from the one after the text: the first token that a row decides is the arg-max
    /// of the logits that one step leaves there, and the last one that of the last logits. A step that moves recurrent states on is not repeated: the
    /// launch goes on after it with what it decided.
    fn go_on(&mut self, sequences: &[(SequenceId, usize)], position: u32, steps: u32) -> Result<(), CheckError> {
        for &(sequence, _) in sequences {
            let more = u32::from(self.session.shape().has_state);
            self.pool.reserve(sequence, position + steps + more).expect("pages for every position of the check");
        }
        let token = |&(_, text): &(SequenceId, usize)| {
            let ids = &self.texts.texts[text].ids;
            ids[position as usize % ids.len()]
        };
        let tokens: Vec<u32> = sequences.iter().map(token).collect();
        let has_state = self.session.shape().has_state;
        let mut launch = |from: u32, steps: u32| {
            let row = |&(sequence, _): &(SequenceId, usize)| Row { sequence, position: from, wants_logits: true };
            let request = Request { rows: sequences.iter().map(row).collect(), steps, edits: self.pool.take_edits() };
            let admitted = self.guard.admit(&request).expect("pages of the pool keep all facts");
            let mut inputs = given(&tokens);
            for (row, input) in (0..).zip(&mut inputs) {
                input.steps = steps;
                if from > position {
                    input.first = FirstToken::Decided(row);
                }
            }
            let launched = self.session.run_whole(admitted, &inputs, true)?;
            let logits: Vec<Vec<f32>> =
                (0..sequences.len() as u32).map(|row| self.session.logits(row)).collect::<Result<_, _>>()?;
            Ok::<_, CheckError>((launched.tokens, logits))
        };
        let (decided_first, first) = launch(position, 1)?;
        let from = if has_state { position + 1 } else { position };
        let (decided, last) = launch(from, steps)?;
        for row in 0..sequences.len() {
            let of = |of: &[Vec<u32>], step: u32| of.get(step as usize).and_then(|tokens| tokens.get(row)).copied();
            self.is_best(position, &first[row], of(if has_state { &decided_first } else { &decided }, 1))?;
            self.is_best(from + steps - 1, &last[row], of(&decided, steps))?;
        }
        Ok(())
    }

    /// Whether the kernel decided the arg-max of its own logits.
    fn is_best(&self, position: u32, logits: &[f32], decided: Option<u32>) -> Result<(), CheckError> {
        let chosen = argmax(logits);
        if decided == chosen {
            return Ok(());
        }
        let (expected, found, figures) = (chosen.unwrap_or(0), decided.unwrap_or(0), self.judge.figures);
        Err(CheckError::Argmax { position, expected, found, figures })
    }

    /// Reads the long text: many rows of it, one, many that only fill the cache, and some.
    fn chunks(&mut self) -> Result<(), CheckError> {
        let shape = *self.session.shape();
        let long = self.texts.long();
        let in_pool = shape.pages.saturating_mul(shape.page_rows);
        let length = (self.texts.texts[long].ids.len() as u32).min(in_pool);
        let sequence = self.open();
        // What comes after the first chunk needs three positions.
        let first = shape.rows.min(length.saturating_sub(3).max(1));
        let mut at = 0;
        for (rows, wants_logits) in [(first, true), (1, true), (shape.rows, false), (shape.rows / 2, true)] {
            let left = length - at;
            // A chunk that only fills leaves a position for the logits after it.
            let rows = rows.max(1).min(if wants_logits { left } else { left.saturating_sub(1) });
            let reading = |position| Reading { sequence, text: long, position };
            let mut step: Vec<Reading> = (at..at + rows).map(reading).collect();
            let mut beside = vec![];
            if at == 0 {
                beside = self.beside(shape.rows - rows, length);
                let all = beside.iter().flat_map(|&(sequence, text, count)| {
                    (0..count).map(move |position| Reading { sequence, text, position })
                });
                step.extend(all);
            }
            if !step.is_empty() {
                self.step(&step, wants_logits)?;
            }
            at += rows;
            beside.into_iter().for_each(|(sequence, ..)| self.pool.close(sequence).expect("an open sequence"));
        }
        Ok(())
    }

    /// Sequences that fill `rows` rows with the beginnings of short texts: text, and rows of each. `kept`: positions for which the pool keeps pages.
    fn beside(&mut self, rows: u32, kept: u32) -> Vec<(SequenceId, usize, u32)> {
        let shape = *self.session.shape();
        let short = self.texts.texts[0].ids.len() as u32;
        let page_rows = shape.page_rows.max(1);
        let pages = shape.pages.saturating_sub(kept.div_ceil(page_rows));
        let sequences = (pages / short.div_ceil(page_rows)).min(shape.sequences - 1);
        let mut left = rows;
        let mut all = vec![];
        for n in 0..sequences {
            if left == 0 {
                break;
            }
            let count = short.min(left);
            all.push((self.open(), text_of(n + 1), count));
            left -= count;
        }
        all
    }
}

/// A comparison of choices or bits alone, all of which agree: how many there were.
pub fn compared_choices(count: u32) -> Checked {
    Checked { figures: Figures { positions: count, argmax_agree: count, ..Figures::default() } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_a_power_of_two_apart_read_different_texts() {
        for apart in [1, 2, 4, 8, 16, 32, 64] {
            for n in 0..128 {
                assert_ne!(text_of(n), text_of(n + apart), "{n} and {apart} more");
            }
        }
    }

    /// A model of any size has texts of two positions, and one that is longer than the chunks of 16 rows.
    #[test]
    fn texts_take_about_the_same_time_for_every_model() {
        let of = |parameters, context_max, alone| {
            let TextSizes { texts, short, long } = TextSizes::of(parameters, context_max, alone);
            (texts, short, long)
        };
        assert_eq!(of(260_000, 256, 0), (8, 9, 48));
        assert_eq!(of(1_240_000_000, 8192, 0), (8, 9, 48));
        assert_eq!(of(8_030_000_000, 8192, 0), (8, 2, 35));
        assert_eq!(of(8_030_000_000, 8192, 32), (8, 2, 35));
        assert_eq!(of(70_000_000_000, 8192, 0), (8, 2, 12));
        assert_eq!(of(8_030_000_000, 8192, 128), (8, 2, 131));
        assert_eq!(of(260_000, 8, 16), (8, 8, 8));
    }

    #[test]
    fn texts_are_read_as_they_were_stored() {
        let sizes = TextSizes { texts: 2, short: 2, long: 3 };
        let logits = |ids: &[u32]| Ok::<_, ()>(ids.iter().map(|id| vec![*id as f32, 0.5, -1.0, 2.0, 9.0]).collect());
        let texts = SharedTexts::read(sizes, 5, logits).unwrap();
        let bytes = texts.to_entry();
        assert_eq!(bytes.len(), 7 * (3 + 5) * 4);
        assert_eq!(SharedTexts::from_entry(sizes, &bytes), Some(texts));
        assert_eq!(SharedTexts::from_entry(sizes, &bytes[4..]), None);
        assert_eq!(SharedTexts::from_entry(sizes, &[]), None);
    }
}
