//! Owns `SamplerSession`: the sampler on a device, which chooses tokens from the logits that another kernel leaves in memory.
//!
//! A token is the one that [`crate::sample::Request`] chooses from the same logits. Sums of integers decide, whose order does not matter,
//! or sums of fp32 where none of their errors can change the choice.
//!
//! All blocks are resident at once (a cooperative launch). A block tells its words before it waits for those of its row. What else blocks
//! share is read by the block that is counted last, or in a later launch.

use super::driver::{Device, DriverError};
use super::kernel::Watched;
use super::memory::{DeviceBuffer, MappedBuffer};
use super::module::{Function, Module};
use super::stream::{Argument, LaunchShape, Stream};
use crate::codegen::sampler::{
    BUCKETS, ENTRY_POINT, ENTRY_POINT_RIVALS, FIXED_BYTES, ID_BYTES, ID_BYTES_RIVALS, PART_ALIGN, PART_IDS_MIN,
    PARTS_MAX, PARTS_MAX_RIVALS, SAMPLE_BEGINS, SAMPLE_ROWS_MAX, SAMPLE_TOP_MAX, SampleAnswer, SampleBegin, SampleEdit,
    SampleRow, SampleTotals, SamplerParams, THREADS, TOLD_WORDS, TOP_P_MIN_RIVALS, flag, status,
};
use crate::sample::{Decided, Penalties, Request, SampleError, Sampler, TokenCounts, TokenSet};
use bytemuck::Zeroable;

/// How the tokens of one row of a launch are chosen.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Its row of the launch.
    pub row: u32,
    /// Position of the first token in its sequence.
    pub position: u32,
    pub sampler: &'a Sampler,
    /// What the request asks for beyond the sampler, and the tokens so far.
    pub request: Option<(&'a Request, &'a TokenCounts)>,
    /// The ids that may be chosen; `None`: all.
    pub allowed: Option<&'a TokenSet>,
}

/// The tables of a launch, as the sampler reads them.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleTables {
    pub rows: Vec<SampleRow>,
    /// For each row, its first entry; then the end of the last entry.
    pub begins: Vec<SampleBegin>,
    pub edits: Vec<SampleEdit>,
    /// A bit for each id of each row; empty where no row has a mask.
    pub masks: Vec<u32>,
}

impl SampleTables {
    /// Encodes the choices of a launch of `steps` steps, over `vocab` ids, for at most [`SAMPLE_ROWS_MAX`] rows.
    pub fn of(asked: &[Asked<'_>], steps: u32, vocab: u32) -> SampleTables {
        let words = vocab.div_ceil(32) as usize;
        debug_assert!(asked.len() <= SAMPLE_ROWS_MAX);
        let mut tables = SampleTables { rows: vec![], begins: vec![], edits: vec![], masks: vec![] };
        if asked.iter().any(|asked| asked.allowed.is_some()) {
            tables.masks = vec![0; asked.len() * words];
        }
        for (at, asked) in asked.iter().enumerate() {
            if let Some(allowed) = asked.allowed {
                let mask = tables.masks[at * words..].iter_mut().take(words);
                mask.zip(allowed.words()).for_each(|(to, word)| *to = *word);
            }
            tables.begins.push(SampleBegin { edits: tables.edits.len() as u32, row: asked.row });
            let row = row(asked, steps, &mut tables.edits);
            tables.rows.push(row);
        }
        tables.begins.push(SampleBegin { edits: tables.edits.len() as u32, row: 0 });
        tables
    }
}

/// A row of the table. Its entries are appended.
fn row(asked: &Asked<'_>, steps: u32, edits: &mut Vec<SampleEdit>) -> SampleRow {
    let Asked { row: _, position, sampler, request, allowed } = *asked;
    let [seed_low, seed_high] = sampler.key();
    let top_p_q32 = u32::try_from(sampler.top_p_q32()).ok();
    let is_greedy = sampler.is_greedy();
    let mut flags = 0;
    let mut set = |flag: u32, is_set: bool| flags |= if is_set { flag } else { 0 };
    set(flag::GREEDY, is_greedy);
    set(flag::TOP_K, !is_greedy && sampler.top_k() > 0);
    set(flag::TOP_P, !is_greedy && top_p_q32.is_some());
    set(flag::MASK, allowed.is_some());
    let mut encoded = SampleRow {
        position,
        top_k: sampler.top_k(),
        top_p_q32: top_p_q32.unwrap_or(0),
        inverse_temperature: sampler.inv_temperature(),
        seed_low,
        seed_high,
        ..SampleRow::zeroed()
    };
    if let Some((request, counts)) = request {
        let penalties = request.penalties();
        set(flag::MIN_P, !is_greedy && request.min_p() > 0.0);
        set(flag::PENALTIES, penalties != Penalties::OFF);
        set(flag::LOGPROBS, request.logprobs().is_some());
        let changes = request.adjustments(counts);
        encoded = SampleRow {
            min_p: request.min_p(),
            repetition: penalties.repetition,
            presence: penalties.presence,
            frequency: penalties.frequency,
            banned: changes.banned.len() as u32,
            biased: changes.bias.len() as u32,
            seen: changes.seen.len() as u32,
            banned_steps: changes.banned_for,
            top: request.logprobs().unwrap_or(0).min(SAMPLE_TOP_MAX as u32),
            ..encoded
        };
        edits.extend(changes.banned.iter().map(|&id| [id, 0]));
        edits.extend(changes.bias.iter().map(|&(id, bias)| [id, bias.to_bits()]));
        edits.extend(changes.seen.iter().map(|&(id, count)| [id, count]));
        if penalties != Penalties::OFF {
            // Each step may choose an id that was not seen before.
            edits.extend((0..steps).map(|_| [u32::MAX, 0]));
        }
    }
    SampleRow { flags, ..encoded }
}

/// Whether the row asks for nothing but temperature, penalties and a top-p that admits nearly all of the probability. Then one of its few best
/// sums of score and noise wins.
fn has_rivals(row: &SampleRow) -> bool {
    let has_top_p = row.flags & flag::TOP_P != 0;
    row.flags & !(flag::GREEDY | flag::TOP_P | flag::PENALTIES) == 0
        && row.banned + row.biased == 0
        && (!has_top_p || row.top_p_q32 >= TOP_P_MIN_RIVALS)
}

/// What an answer says of the token at `position`. Log-probabilities differ from those of [`crate::sample::Logprobs`] by less than
/// 1e-6: the sum of exponentials is one of weights in units of 2^-40.
///
/// # Errors
/// No logit is a number above -inf, or none that is allowed.
pub fn decided(
    answer: &SampleAnswer,
    position: u32,
    vocab: u32,
    logprobs: Option<u32>,
) -> Result<Decided, SampleError> {
    let vocab = vocab as usize;
    match answer.status {
        status::CHOSEN => {}
        status::NONE_ALLOWED => return Err(SampleError::NoneAllowed { position, vocab }),
        _ => return Err(SampleError::NoCandidate { position, vocab }),
    }
    let total = u64::from(answer.total_high) << 32 | u64::from(answer.total_low);
    let ln_sum = (total as f64 / (1u64 << 40) as f64).ln();
    let logprob = |logit: f32| {
        // Equal ones first: inf - inf would be NaN.
        let beyond = if logit == answer.logit_max { 0.0 } else { f64::from(logit) - f64::from(answer.logit_max) };
        beyond - ln_sum
    };
    let top = answer.top_ids.iter().zip(&answer.top_logits).take(answer.top as usize);
    let top = top.map(|(&id, &logit)| (id, logprob(logit))).collect();
    Ok(match logprobs {
        Some(_) => Decided { token: answer.token, logprob: Some(logprob(answer.logit)), top },
        None => Decided { token: answer.token, logprob: None, top: vec![] },
    })
}

/// The sampler on a device, with its memory.
pub struct SamplerSession {
    device: Device,
    /// For requests of any kind.
    any: Function,
    /// For the most usual ones: see [`has_rivals`].
    rivals: Function,
    blocks: Blocks,
    /// Copies tables while the kernel of a step runs on its own stream.
    copies: Stream,
    vocab: u32,
    rows_max: u32,
    steps_max: u32,
    list: DeviceBuffer,
    weights: DeviceBuffer,
    counts: DeviceBuffer,
    bests: DeviceBuffer,
    present: DeviceBuffer,
    parts_best: DeviceBuffer,
    told: DeviceBuffer,
    totals: DeviceBuffer,
    tops: DeviceBuffer,
    rows: DeviceBuffer,
    edits: DeviceBuffer,
    masks: DeviceBuffer,
    answers: MappedBuffer,
    /// Rows of the tables that were uploaded last.
    row_count: u32,
    begins: [SampleBegin; SAMPLE_BEGINS],
    /// Whether all of them are as [`has_rivals`] says.
    by_rivals: bool,
}

/// The blocks of a device that are resident at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Blocks {
    resident: u32,
    /// Most shared memory of each.
    shared_bytes: u32,
}

/// How the rows of a step are shared among blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Division {
    /// Rows that are decided at the same time.
    at_once: u32,
    /// Blocks of a row.
    parts: u32,
    /// Ids of a block.
    part_ids: u32,
}

/// Where the launch after a step reads its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Next {
    /// Device address of the token of the first row.
    pub token: u64,
    /// Bytes from one row to the next.
    pub stride_bytes: u32,
}

impl Blocks {
    /// Fewest parts of a row.
    fn parts_min(self, vocab: u32) -> u32 {
        let ids_max = self.shared_bytes.saturating_sub(FIXED_BYTES) / ID_BYTES / PART_ALIGN * PART_ALIGN;
        vocab.div_ceil(ids_max.max(PART_ALIGN))
    }

    /// How blocks share `rows` rows, at least one: as many rows at a time as there are blocks, and an equal number of blocks for each row.
    fn division(self, rows: u32, vocab: u32) -> Division {
        let parts_min = self.parts_min(vocab);
        let rounds = rows.div_ceil((self.resident / parts_min).max(1));
        let at_once = rows.div_ceil(rounds);
        let parts = (self.resident / at_once).min(PARTS_MAX).min(vocab.div_ceil(PART_IDS_MIN)).max(parts_min);
        let part_ids = vocab.div_ceil(parts).next_multiple_of(PART_ALIGN);
        Division { at_once, parts: vocab.div_ceil(part_ids), part_ids }
    }
}

/// The sampler's kernel for any request, two blocks of it on each SM. If these are too small for the vocabulary, an SM has one. The other kernel
/// needs no more registers, and less shared memory, so as many of its blocks are resident.
///
/// # Errors
/// What the driver refuses; a device whose blocks cannot hold a row.
fn blocks(device: &Device, module: &Module, vocab: u32) -> Result<(Function, Blocks), DriverError> {
    let with = |of_sm: u32| {
        let identity = device.identity();
        // The driver keeps 1 KiB of a block for itself.
        let shared_bytes = (identity.smem_bytes_per_sm / of_sm - 1024).min(identity.smem_bytes_per_block_max);
        let function = device.function(module, ENTRY_POINT, shared_bytes)?;
        let shape = LaunchShape { grid: 1, block: THREADS, smem_dynamic_bytes: shared_bytes, cluster: 1, kept: None };
        let resident = function.resident_blocks(&shape)?;
        Ok::<_, DriverError>((function, Blocks { resident, shared_bytes }))
    };
    let (function, blocks) = with(2)?;
    if blocks.parts_min(vocab) <= blocks.resident {
        return Ok((function, blocks));
    }
    let (function, blocks) = with(1)?;
    let (grid, resident) = (blocks.parts_min(vocab), blocks.resident);
    if grid > resident {
        return Err(DriverError::GridTooLarge { kernel: ENTRY_POINT.to_owned(), grid, resident });
    }
    Ok((function, blocks))
}

impl SamplerSession {
    /// Loads the sampler for launches of up to `rows_max` rows and `steps_max` steps of a model with `vocab` ids.
    ///
    /// # Errors
    /// What the driver refuses; a device whose blocks cannot hold a row.
    pub fn load(
        device: &Device,
        cubin: &[u8],
        vocab: u32,
        rows_max: u32,
        steps_max: u32,
    ) -> Result<SamplerSession, DriverError> {
        let module = device.load(cubin)?;
        let (any, blocks) = blocks(device, &module, vocab)?;
        let rivals = device.function(&module, ENTRY_POINT_RIVALS, blocks.shared_bytes)?;
        let rows = u64::from(rows_max);
        let parts = u64::from(PARTS_MAX.max(blocks.parts_min(vocab)));
        let mut session = SamplerSession {
            any,
            rivals,
            blocks,
            copies: device.stream()?,
            vocab,
            rows_max,
            steps_max,
            list: device.alloc(rows * u64::from(vocab) * 8)?,
            weights: device.alloc(rows * u64::from(BUCKETS) * 8)?,
            counts: device.alloc(rows * u64::from(BUCKETS) * 4)?,
            bests: device.alloc(rows * u64::from(BUCKETS) * 8)?,
            present: device.alloc(rows * parts * u64::from(BUCKETS) / 8)?,
            parts_best: device.alloc(rows * parts * 16)?,
            told: device.alloc(rows * parts * u64::from(TOLD_WORDS) * 8)?,
            totals: device.alloc(rows * size_of::<SampleTotals>() as u64)?,
            tops: device.alloc(rows * parts * SAMPLE_TOP_MAX as u64 * 8)?,
            rows: device.alloc(rows * size_of::<SampleRow>() as u64)?,
            edits: device.alloc(rows * 1024 * size_of::<SampleEdit>() as u64)?,
            masks: device.alloc(rows * u64::from(vocab.div_ceil(32)) * 4)?,
            answers: device.alloc_mapped((rows_max * steps_max) as usize * size_of::<SampleAnswer>() / 4)?,
            device: device.clone(),
            row_count: 0,
            begins: [SampleBegin::zeroed(); SAMPLE_BEGINS],
            by_rivals: false,
        };
        for zero in [
            &mut session.weights,
            &mut session.counts,
            &mut session.bests,
            &mut session.parts_best,
            &mut session.told,
            &mut session.totals,
        ] {
            zero.zero(&session.copies)?;
        }
        session.copies.synchronize()?;
        Ok(session)
    }

    /// Most probable ids that an answer may have.
    pub fn logprobs_max(&self) -> u32 {
        SAMPLE_TOP_MAX as u32
    }

    /// Copies the tables of a launch of `steps` steps to the device, and waits only for the copies. No step of the sampler may run.
    ///
    /// # Errors
    /// What the driver refuses.
    pub(super) fn upload(&mut self, asked: &[Asked<'_>], steps: u32) -> Result<(), DriverError> {
        let SampleTables { rows, begins, edits, masks } = SampleTables::of(asked, steps, self.vocab);
        let edit_bytes = (edits.len() * size_of::<SampleEdit>()) as u64;
        if edit_bytes > self.edits.bytes() {
            self.edits = self.device.alloc(edit_bytes.next_power_of_two())?;
        }
        self.rows.upload(&self.copies, 0, &rows)?;
        self.edits.upload(&self.copies, 0, &edits)?;
        self.masks.upload(&self.copies, 0, &masks)?;
        self.row_count = rows.len() as u32;
        self.begins[..begins.len()].copy_from_slice(&begins);
        let is_large = self.blocks.parts_min(self.vocab) > PARTS_MAX_RIVALS;
        self.by_rivals = self.vocab.is_multiple_of(4) && !is_large && rows.iter().all(has_rivals);
        Ok(())
    }

    /// Queues step `step` of the launch whose tables were uploaded, after the kernel that leaves `logits`. The tokens go to the launch
    /// that follows, too.
    ///
    /// # Errors
    /// A step beyond those that there is room for; what the driver refuses.
    pub(super) fn queue(
        &self,
        kernel: &Watched,
        logits: u64,
        step: u32,
        next: Option<Next>,
    ) -> Result<(), DriverError> {
        let answer_bytes = u64::from(self.rows_max) * size_of::<SampleAnswer>() as u64;
        if step >= self.steps_max {
            let (offset_bytes, buffer_bytes) = (u64::from(step) * answer_bytes, self.answers.words() as u64 * 4);
            return Err(DriverError::OutOfBounds { offset_bytes, range_bytes: answer_bytes, buffer_bytes });
        }
        if self.row_count == 0 {
            return Ok(());
        }
        let Division { at_once, parts, part_ids } = self.blocks.division(self.row_count, self.vocab);
        let params = SamplerParams {
            logits,
            list: self.list.address(),
            weights: self.weights.address(),
            counts: self.counts.address(),
            bests: self.bests.address(),
            present: self.present.address(),
            parts_best: self.parts_best.address(),
            told: self.told.address(),
            totals: self.totals.address(),
            tops: self.tops.address(),
            rows: self.rows.address(),
            edits: self.edits.address(),
            masks: self.masks.address(),
            answers: self.answers.address() + u64::from(step) * answer_bytes,
            next: next.map_or(0, |next| next.token),
            next_stride: next.map_or(0, |next| next.stride_bytes / 4),
            vocab: self.vocab,
            step,
            row_count: self.row_count,
            at_once,
            parts,
            part_ids,
            parts_inverse_q31: (1u32 << 31).div_ceil(parts),
            begins: self.begins,
        };
        let (function, id_bytes) = if self.by_rivals { (&self.rivals, ID_BYTES_RIVALS) } else { (&self.any, ID_BYTES) };
        let shape = LaunchShape {
            grid: at_once * parts,
            block: THREADS,
            smem_dynamic_bytes: FIXED_BYTES + part_ids * id_bytes,
            cluster: 1,
            kept: kernel.shape.kept,
        };
        kernel.stream.launch_cooperative(function, &shape, &[Argument::Struct(bytemuck::bytes_of(&params))])
    }

    /// What was chosen for row `at` of the tables in a step, after the stream of the launch was waited for.
    ///
    /// # Errors
    /// A step or a row that there is no room for.
    pub fn answer(&self, step: u32, at: u32) -> Result<SampleAnswer, DriverError> {
        let words = size_of::<SampleAnswer>() / 4;
        let first = (step * self.rows_max + at) as usize * words;
        let words: Vec<u32> = (first..first + words).map(|word| self.answers.load(word)).collect::<Result<_, _>>()?;
        Ok(*bytemuck::from_bytes(bytemuck::cast_slice(&words)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{RequestSettings, SampleSettings};

    /// Shared memory of half an SM of an H200, of half of one of compute capability 7.5, and of the whole of that.
    const SHARED: [u32; 3] = [115_712, 31_744, 64_512];

    #[test]
    fn usual_requests_have_rivals_and_no_others_do() {
        let usual = SampleSettings { temperature: 0.8, top_k: None, top_p: Some(0.95), seed: 7 };
        let penalties = Penalties { repetition: 1.1, presence: 0.0, frequency: 0.2 };
        let plain = |sampling| RequestSettings { penalties, ..RequestSettings::plain(sampling) };
        let rivals = |settings: RequestSettings, allowed: Option<&TokenSet>| {
            let request = settings.resolve(100, &[]).unwrap();
            let counts = TokenCounts::new(&[3, 4, 3]);
            let asked =
                Asked { row: 0, position: 3, sampler: request.sampler(), request: Some((&request, &counts)), allowed };
            has_rivals(&SampleTables::of(&[asked], 2, 100).rows[0])
        };
        for usual in [
            usual,
            SampleSettings { top_p: None, ..usual },
            SampleSettings { top_p: Some(0.86), temperature: 0.001, ..usual },
            SampleSettings::greedy(),
        ] {
            assert!(rivals(plain(usual), None), "{usual:?}");
        }
        for other in [SampleSettings { top_p: Some(0.84), ..usual }, SampleSettings { top_k: Some(50), ..usual }] {
            assert!(!rivals(plain(other), None), "{other:?}");
        }
        for other in [
            RequestSettings { min_p: 0.1, ..plain(usual) },
            RequestSettings { logprobs: Some(0), ..plain(usual) },
            RequestSettings { logit_bias: [(5, 1.0)].into(), ..plain(usual) },
            RequestSettings { stop_ids: vec![9], min_tokens: 5, ..plain(usual) },
        ] {
            assert!(!rivals(other.clone(), None), "{other:?}");
        }
        assert!(!rivals(plain(usual), Some(&(0..50).collect())));
    }

    #[test]
    fn blocks_that_wait_for_each_other_are_resident_and_have_all_ids() {
        for (shared_bytes, resident) in [(SHARED[0], 264), (SHARED[0], 20), (SHARED[1], 80), (SHARED[2], 40)] {
            let blocks = Blocks { resident, shared_bytes };
            for vocab in [17, 2_000, 32_000, 128_256, 151_936, 262_144] {
                if blocks.parts_min(vocab) > resident {
                    continue;
                }
                for rows in 1..=128 {
                    let Division { at_once, parts, part_ids } = blocks.division(rows, vocab);
                    let context = format!("{rows} rows of {vocab} ids on {blocks:?}");
                    assert!(at_once * parts <= resident && (1..=rows).contains(&at_once), "{context}");
                    assert!(part_ids.is_multiple_of(PART_ALIGN), "{context}");
                    assert!(FIXED_BYTES + part_ids * ID_BYTES <= shared_bytes, "{context}");
                    assert!((parts - 1) * part_ids < vocab && vocab <= parts * part_ids, "{context}");
                }
            }
        }
        let blocks = Blocks { resident: 264, shared_bytes: SHARED[0] };
        assert_eq!(blocks.division(16, 128_256), Division { at_once: 16, parts: 16, part_ids: 8_016 });
        assert_eq!(blocks.division(64, 128_256), Division { at_once: 32, parts: 8, part_ids: 16_032 });
    }
}
