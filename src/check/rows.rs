//! Compares kernels that run steps of several rows with the interpreter, which executes the schedule they were made of with the same rows.

use super::codes::{self, DeviceCaches, stores_codes};
use super::{CheckError, Checked, Judge, Noise, check_ids, noise_of};
use crate::cuda::rows::{RowLauncher, given};
use crate::dtype::DType;
use crate::interp::{Interp, Options, Pack, StepResult};
use crate::pages::Pool;
use crate::rows::{Guard, Request, Row, SequenceId, Shape};
use crate::sample::argmax;
use crate::validate::Validated;
use std::collections::VecDeque;

/// Multiplications that each of two interpreters may take: some seconds on a server.
const COST_MAX: u64 = 200_000_000_000;
/// Most positions that are compared of each sequence: beyond one tile of attention ...
const POSITIONS_MAX: u64 = 20;
/// ... and in steps of one row as many beyond this many pages: there a chunk of the history may lie in several.
const ONE_ROW_PAGES: u64 = 2;
/// Rows whose cost of rounding counts for each other. Rows of one step differ in their tokens, and a single lane may be right by chance.
const NEIGHBOURS: usize = 16;
/// Random seed of the lane that rounds at random.
const LANE_SEED: u64 = 1;
/// Most lanes: more than one where a row is out of tolerance. Trained weights are chaotic at some rows, and one lane may say too little
/// (docs/numerics.md).
const LANES_MAX: u64 = 8;

/// Compares the logits of every row of every step, and each token that the kernel decides with the arg-max of its logits. First each
/// row is a sequence of its own, decoded one position at a time with given tokens; in steps of one row two sequences take turns. Then a prompt is read in two chunks of all rows
/// and one of half of them. A second interpreter rounds at random, and the worst of its distances from the first at [`NEIGHBOURS`] rows says how far a
/// row may be off. Pages are taken from the pool as they come, so those of a sequence are not neighbours. A schedule of fewer rows
/// than the session has is executed several times for each of its steps: a row has the bits that it has alone. No more positions are compared
/// than the session's pages hold.
///
/// # Errors
/// The first row that is out of tolerance, or what interpreter or device refuse.
pub fn check_rows(
    validated: &Validated,
    pack: Pack,
    parameters: u64,
    session: &mut dyn RowLauncher,
) -> Result<Checked, CheckError> {
    let schedule = validated.schedule();
    let interp = Interp::new(schedule, pack.clone(), Options::fast())?;
    let shape = *session.shape();
    let precision = schedule.program.precision;
    let judge = Judge::new(codes::tolerance(precision));
    let is_coarse = [precision.weights, precision.cache, precision.wire] != [DType::F32; 3];
    let lane = is_coarse.then(|| Interp::new(schedule, pack.clone(), Options::fast())).transpose()?;
    let caches = stores_codes(precision).then(|| DeviceCaches::new(schedule, &interp));
    let vocab = interp.vocab() as u32;
    // Two sequences at least, so that the pages of one are no neighbours.
    let count = shape.rows.max(2).min(shape.sequences);
    let affordable = COST_MAX / parameters.max(1) / u64::from(count);
    let more = if shape.rows == 1 { ONE_ROW_PAGES * u64::from(shape.page_rows) } else { 0 };
    let in_pool = u64::from(shape.pages / count) * u64::from(shape.page_rows);
    let positions = affordable.clamp(2, POSITIONS_MAX + more).min(u64::from(shape.context_max)).min(in_pool) as u32;
    let of_interp = Shape::of(&schedule.program).expect("validate: a batch kernel has tables");
    let guards = [of_interp, shape].map(Guard::new);
    let lane = lane.map(|mut interp| {
        interp.round_at_random(LANE_SEED, true);
        Lane { interp, guard: Guard::new(of_interp), recent: VecDeque::new() }
    });
    let again = Again { validated, pack, launches: vec![], step: 0 };
    let mut both = Both { pool: Pool::new(shape), guards, interp, lane, again, caches, session, judge, vocab };
    let ids = check_ids(vocab, positions * count);
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
    Ok(Checked { figures: both.judge.figures })
}

/// Interpreter and device, which are given the same launches.
struct Both<'a> {
    pool: Pool,
    /// Of the interpreter, and of the device.
    guards: [Guard; 2],
    interp: Interp,
    /// `None` where everything is fp32.
    lane: Option<Lane>,
    again: Again<'a>,
    /// The caches of a device that stores codes, which the interpreter takes.
    caches: Option<DeviceCaches>,
    session: &'a mut dyn RowLauncher,
    judge: Judge,
    vocab: u32,
}

/// An interpreter that rounds at random.
struct Lane {
    interp: Interp,
    guard: Guard,
    /// What rounding cost the rows that were compared last.
    recent: VecDeque<Noise>,
}

impl Lane {
    /// The logits of rows that the interpreter has executed, too.
    fn logits(&mut self, request: &Request, tokens: &[u32]) -> Result<Vec<Vec<f32>>, CheckError> {
        let admitted = self.guard.admit(request).expect("pages of the pool keep all facts");
        let mut logits = vec![vec![]; tokens.len()];
        self.interp.launch_rows(admitted, tokens, |step| logits[step.row] = step.logits.to_vec())?;
        Ok(logits)
    }

    /// What rounding costs, at worst, the rows of a step and those before it.
    fn noise(&mut self, of_step: &[Noise]) -> Noise {
        self.recent.extend(of_step);
        while self.recent.len() > NEIGHBOURS.max(of_step.len()) {
            self.recent.pop_front();
        }
        self.recent.iter().copied().fold(Noise::default(), Noise::or_worse)
    }
}

/// What lanes executed, to let other ones execute it, too.
struct Again<'a> {
    validated: &'a Validated,
    pack: Pack,
    launches: Vec<Launched>,
    /// The first launch of the current step.
    step: usize,
}

struct Launched {
    request: Request,
    tokens: Vec<u32>,
    codes: Option<Vec<Vec<u8>>>,
}

impl Again<'_> {
    /// The logits of the rows of the current step, with other random numbers.
    fn logits(&self, seed: u64) -> Result<Vec<Vec<f32>>, CheckError> {
        let schedule = self.validated.schedule();
        let mut interp = Interp::new(schedule, self.pack.clone(), Options::fast())?;
        interp.round_at_random(seed, true);
        let shape = Shape::of(&schedule.program).expect("validate: a batch kernel has tables");
        let mut lane = Lane { interp, guard: Guard::new(shape), recent: VecDeque::new() };
        let mut logits = vec![];
        for (at, Launched { request, tokens, codes }) in self.launches.iter().enumerate() {
            if let Some(codes) = codes {
                lane.interp.take_codes(tokens.len(), codes.clone());
            }
            let of_launch = lane.logits(request, tokens)?;
            if at >= self.step {
                logits.extend(of_launch);
            }
        }
        Ok(logits)
    }
}

impl Both<'_> {
    /// Compares a row of the current step. If it is out of tolerance, more lanes say what rounding costs it.
    fn compare(
        &mut self,
        (row, position): (usize, u32),
        expected: &[f32],
        found: &[f32],
        mut noise: Noise,
    ) -> Result<(), CheckError> {
        let mut lanes = 1;
        loop {
            let before = self.judge.figures;
            let compared = self.judge.compare_noisy(position, expected, found, noise);
            let wrong = matches!(compared, Err(CheckError::Wrong { .. } | CheckError::Argmax { .. }));
            if !wrong || lanes >= LANES_MAX {
                return compared;
            }
            self.judge.figures = before;
            lanes += 1;
            let lane = self.again.logits(LANE_SEED + lanes)?;
            noise = noise.or_worse(Noise::of(expected, [&lane[row]]));
        }
    }

    /// One step of `rows` with `tokens`.
    fn step(&mut self, rows: Vec<Row>, tokens: &[u32]) -> Result<(), CheckError> {
        if rows.is_empty() {
            return Ok(());
        }
        for row in &rows {
            self.pool.reserve(row.sequence, row.position + 1).expect("pages for every position of the check");
        }
        let wants_logits = rows.iter().any(|row| row.wants_logits);
        let positions: Vec<u32> = rows.iter().map(|row| row.position).collect();
        let request = Request { rows, steps: 1, edits: self.pool.take_edits() };
        self.session.poison_logits()?;
        let admitted = self.guards[1].admit(&request).expect("pages of the pool keep all facts");
        let launched = self.session.run_whole(admitted, &given(tokens), wants_logits)?;
        let (expected, lanes) = self.expected(&request, tokens)?;
        if !wants_logits {
            return Ok(());
        }
        let of_step: Vec<Noise> =
            expected.iter().zip(&lanes).map(|(expected, lane)| Noise::of(expected, [lane])).collect();
        for (position, noise) in positions.iter().zip(&of_step) {
            let worst = &mut self.judge.figures.noise[noise_of(*position)];
            *worst = worst.or_worse(*noise);
        }
        let noise = self.lane.as_mut().map(|lane| lane.noise(&of_step));
        for (row, (expected, position)) in (0u32..).zip(expected.iter().zip(positions)) {
            let found = self.session.logits(row)?;
            match noise {
                Some(noise) => self.compare((row as usize, position), expected, &found, noise)?,
                None => self.judge.compare_row(self.vocab, position, expected, &found)?,
            }
            let (decided, chosen) = (launched.tokens.last().map(|tokens| tokens[row as usize]), argmax(&found));
            if decided != chosen {
                let (expected, found, figures) = (chosen.unwrap_or(0), decided.unwrap_or(0), self.judge.figures);
                return Err(CheckError::Argmax { position, expected, found, figures });
            }
        }
        Ok(())
    }

    /// The interpreter's logits for a step that the device has executed, of each row that wants them, and those of the lane.
    #[allow(clippy::type_complexity)] // The same twice.
    fn expected(&mut self, request: &Request, tokens: &[u32]) -> Result<(Vec<Vec<f32>>, Vec<Vec<f32>>), CheckError> {
        let most = self.guards[0].shape().rows as usize;
        let mut expected: Vec<Vec<f32>> = vec![vec![]; tokens.len()];
        let mut lanes = vec![];
        let mut edits = request.edits.clone();
        self.again.step = self.again.launches.len();
        for (part, (rows, tokens)) in request.rows.chunks(most).zip(tokens.chunks(most)).enumerate() {
            let codes = match &self.caches {
                Some(caches) => Some(self.interp.take_codes(rows.len(), self.codes_of(caches, rows)?)),
                None => None,
            };
            let request = Request { rows: rows.to_vec(), steps: 1, edits: std::mem::take(&mut edits) };
            let mut codes_of_lane = None;
            if let Some(lane) = &mut self.lane {
                let taken: Option<Vec<Vec<u8>>> = codes.as_ref().map(|codes| {
                    let of = |cache| (0..rows.len()).flat_map(|row| codes.codes(cache, row).to_vec()).collect();
                    (0..self.interp.caches().len()).map(of).collect()
                });
                codes_of_lane = taken.clone().map(|codes| lane.interp.take_codes(rows.len(), codes));
                lanes.extend(lane.logits(&request, tokens)?);
                let request = request.clone();
                self.again.launches.push(Launched { request, tokens: tokens.to_vec(), codes: taken });
            }
            let admitted = self.guards[0].admit(&request).expect("pages of the pool keep all facts");
            let keep = |step: &StepResult<'_>| {
                expected[part * most + step.row] = step.logits.to_vec();
            };
            self.interp.launch_rows(admitted, tokens, keep)?;
            if let (Some(caches), Some(codes)) = (&self.caches, codes) {
                let positions: Vec<u32> = rows.iter().map(|row| row.position).collect();
                caches.compare(&mut self.judge, &codes, &positions, codes_of_lane.as_deref())?;
            }
        }
        Ok((expected, lanes))
    }

    /// What the device stored for rows: of each cache their codes, one row after another.
    fn codes_of(&self, caches: &DeviceCaches, rows: &[Row]) -> Result<Vec<Vec<u8>>, CheckError> {
        let page_rows = self.session.shape().page_rows;
        let mut all: Vec<Vec<u8>> = self.interp.caches().iter().map(|_| vec![]).collect();
        for row in rows {
            let page = self.pool.page(row.sequence, row.position / page_rows).expect("a page that was reserved");
            let at = u64::from(page.0) * u64::from(page_rows) + u64::from(row.position % page_rows);
            let codes = caches.read(at, row.position, &|at, bytes| self.session.read_cache(at, bytes))?;
            all.iter_mut().zip(codes).for_each(|(all, codes)| all.extend(codes));
        }
        Ok(all)
    }
}
