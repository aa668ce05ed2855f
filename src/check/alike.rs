//! Compares the bits of rows with those that they have alone, on kernels that add up in one order.

use super::{CheckError, check_ids};
use crate::cuda::rows::{RowInput, RowLauncher, given};
use crate::pages::Pool;
use crate::rows::{Guard, Request, Row, SequenceId, Shape};
use serde::Serialize;

/// Logits of a row, and the tokens that its steps decided.
type Decided = (Vec<f32>, Vec<u32>);

/// Sequences that decode together. The last one has more rows than the smallest kernel.
const BATCHES: [usize; 4] = [2, 5, 16, 33];
/// Rows of the chunks that a text is cut into. A chunk with more rows than a kernel is several launches.
const CHUNKS: [usize; 4] = [1, 7, 16, 64];
/// Sequences of the check.
pub const SEQUENCES: u32 = 33;
/// Most positions of a sequence of the check: some tiles of attention, and the end of one.
pub const POSITIONS: u32 = 150;
/// Tokens that are given after a history, and then steps of one launch that go on by themselves.
const STEPS: u32 = 4;

/// What was compared with the same row alone, bit by bit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Alike {
    /// Rows of each kernel.
    pub kernels: Vec<u32>,
    pub batches: Vec<usize>,
    pub chunks: Vec<usize>,
    /// Rows of logits that were compared.
    pub compared: u64,
}

/// Compares the logits of rows, and the tokens that they decide, with those of the same rows alone: a text that is read row by row with the
/// same text in chunks, and sequences alone with several that decode together. Histories have many lengths, and a row changes its place
/// from step to step. `kernels` are ascending by rows, and share one cache; rows alone run on the first of them.
///
/// # Errors
/// The first row with other bits; what the device refuses.
pub fn check_alike(kernels: &mut [&mut dyn RowLauncher]) -> Result<Alike, CheckError> {
    let largest = kernels.last().expect("a kernel to check");
    let (shape, vocab): (Shape, u32) = (*largest.shape(), largest.vocab());
    let positions = POSITIONS.min(shape.context_max);
    // A pool may have room for fewer sequences: that of one text has room for one.
    let in_pool = shape.pages / positions.div_ceil(shape.page_rows.max(1)).max(1);
    let sequences = SEQUENCES.min(shape.sequences).min(in_pool);
    let batches: Vec<usize> = BATCHES.into_iter().filter(|batch| *batch <= sequences as usize).collect();
    let mut alike = Alike {
        kernels: kernels.iter().map(|kernel| kernel.shape().rows).collect(),
        batches: batches.clone(),
        chunks: CHUNKS.to_vec(),
        compared: 0,
    };
    let mut all = All { pool: Pool::new(shape), guard: Guard::new(shape), kernels };
    let text = check_ids(vocab, positions);
    let alone = all.cut(0, &text, 1)?;
    for kernel in 0..alike.kernels.len() {
        for chunk in CHUNKS {
            let found = all.cut(kernel, &text, chunk)?;
            for (position, (alone, found)) in (0..).zip(alone.iter().zip(&found)) {
                let what = || format!("chunks of {chunk} on the kernel for {} rows", alike.kernels[kernel]);
                compare(position, alone, found, what)?;
                alike.compared += 1;
            }
        }
    }
    let texts: Vec<Text> = (0..sequences).map(|n| Text::of(n, vocab, positions)).collect();
    let alone = texts.iter().map(|text| Ok(all.batch(0, std::slice::from_ref(text))?.remove(0)));
    let alone: Vec<Decoded> = alone.collect::<Result<_, CheckError>>()?;
    for kernel in 0..alike.kernels.len() {
        for &batch in &batches {
            let found = all.batch(kernel, &texts[..batch])?;
            for ((text, alone), found) in texts.iter().zip(&alone).zip(&found) {
                let what = || format!("a batch of {batch} on the kernel for {} rows", alike.kernels[kernel]);
                let first = text.history.len() as u32;
                for (position, (alone, found)) in (first..).zip(alone.logits.iter().zip(&found.logits)) {
                    compare(position, alone, found, what)?;
                    alike.compared += 1;
                }
                if alone.tokens != found.tokens {
                    let (position, vocab) = (first + STEPS, vocab as usize);
                    return Err(CheckError::NotAlike { position, what: what() + ", tokens", differ: 0, vocab });
                }
            }
        }
    }
    Ok(alike)
}

fn compare(position: u32, alone: &[f32], found: &[f32], what: impl Fn() -> String) -> Result<(), CheckError> {
    let differ = alone.iter().zip(found).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    if differ == 0 && alone.len() == found.len() {
        return Ok(());
    }
    Err(CheckError::NotAlike { position, what: what(), differ, vocab: alone.len() })
}

/// A history, and the tokens that are given after it.
struct Text {
    history: Vec<u32>,
    given: Vec<u32>,
}

impl Text {
    /// One of many lengths below `positions`.
    fn of(n: u32, vocab: u32, positions: u32) -> Text {
        let longest = positions.saturating_sub(2 * STEPS).max(1);
        let history = 1 + n * 37 % longest;
        let mut ids = check_ids(vocab, (n + 1) * 7 + history + STEPS).split_off((n as usize + 1) * 7);
        let given = ids.split_off(history as usize);
        Text { history: ids, given }
    }
}

/// What a sequence left after its history.
struct Decoded {
    /// After each token that was given, and after the last step of the launch that follows.
    logits: Vec<Vec<f32>>,
    /// What that launch decided.
    tokens: Vec<u32>,
}

struct All<'a, 'b> {
    pool: Pool,
    /// Of all kernels: they have one cache.
    guard: Guard,
    kernels: &'a mut [&'b mut dyn RowLauncher],
}

impl All<'_, '_> {
    fn rows_max(&self, kernel: usize) -> usize {
        self.kernels[kernel].shape().rows as usize
    }

    /// One launch: the logits of each row after its last step, and the tokens of each row in each step.
    fn launch(
        &mut self,
        kernel: usize,
        rows: &[(SequenceId, u32)],
        tokens: &[u32],
        steps: u32,
    ) -> Result<Vec<Decided>, CheckError> {
        for &(sequence, position) in rows {
            self.pool.reserve(sequence, position + steps).expect("pages for every position of the check");
        }
        let row = |&(sequence, position): &(SequenceId, u32)| Row { sequence, position, wants_logits: true };
        let request = Request { rows: rows.iter().map(row).collect(), steps, edits: self.pool.take_edits() };
        let tables = self.guard.admit(&request).expect("pages of the pool keep all facts");
        let inputs: Vec<RowInput> = given(tokens).into_iter().map(|input| RowInput { steps, ..input }).collect();
        let launcher = &mut self.kernels[kernel];
        let launched = launcher.run_whole(tables, &inputs, true)?;
        let of_row = |row: usize| {
            let decided = launched.tokens.iter().skip(1).map(|step| step[row]).collect();
            Ok((launcher.logits(row as u32)?, decided))
        };
        (0..rows.len()).map(of_row).collect()
    }

    /// The logits of each row of a text that is read in chunks.
    fn cut(&mut self, kernel: usize, text: &[u32], chunk: usize) -> Result<Vec<Vec<f32>>, CheckError> {
        let sequence = self.pool.open().expect("a sequence, none is open");
        let (mut logits, most) = (vec![], self.rows_max(kernel));
        for chunk in text.chunks(chunk).flat_map(|chunk| chunk.chunks(most)) {
            let first = logits.len() as u32;
            let rows: Vec<_> = (first..).zip(chunk).map(|(position, _)| (sequence, position)).collect();
            logits.extend(self.launch(kernel, &rows, chunk, 1)?.into_iter().map(|(logits, _)| logits));
        }
        self.pool.close(sequence).expect("an open sequence");
        Ok(logits)
    }

    /// Several texts together. Their histories are read one after another, as many rows at a time as there are; then all decode.
    fn batch(&mut self, kernel: usize, texts: &[Text]) -> Result<Vec<Decoded>, CheckError> {
        let sequences: Vec<SequenceId> = texts.iter().map(|_| self.pool.open().expect("a sequence for each")).collect();
        let most = self.rows_max(kernel);
        let histories = sequences.iter().zip(texts).rev().flat_map(|(&sequence, text)| {
            let row = move |(position, &token): (u32, &u32)| ((sequence, position), token);
            (0..).zip(&text.history).map(row)
        });
        let (rows, tokens): (Vec<_>, Vec<u32>) = histories.unzip();
        for (rows, tokens) in rows.chunks(most).zip(tokens.chunks(most)) {
            self.launch(kernel, rows, tokens, 1)?;
        }
        let mut decoded: Vec<Decoded> = texts.iter().map(|_| Decoded { logits: vec![], tokens: vec![] }).collect();
        for step in 0..=STEPS {
            // Other places in each step.
            let mut order: Vec<usize> = (0..texts.len()).collect();
            order.rotate_left(step as usize * 3 % texts.len());
            // In the last launch, the steps after the first take the tokens that the rows decided.
            let (steps, token) = if step < STEPS { (1, step) } else { (STEPS, STEPS - 1) };
            let at = |&n: &usize| (sequences[n], texts[n].history.len() as u32 + step);
            for part in order.chunks(most) {
                let rows: Vec<_> = part.iter().map(at).collect();
                let tokens: Vec<u32> = part.iter().map(|&n| texts[n].given[token as usize]).collect();
                for (&n, (logits, tokens)) in part.iter().zip(self.launch(kernel, &rows, &tokens, steps)?) {
                    decoded[n].logits.push(logits);
                    decoded[n].tokens = tokens;
                }
            }
        }
        sequences.into_iter().for_each(|sequence| self.pool.close(sequence).expect("an open sequence"));
        Ok(decoded)
    }
}
