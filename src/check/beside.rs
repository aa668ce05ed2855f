//! Executes beside a device what the device executed, with an interpreter, and judges by it.
//!
//! A second interpreter, the lane, rounds at random. Its distance from the first one says how far a right device may be off. Both take what the
//! device stored, codes of fp8 and choices of experts, in place of their own, so that logits differ by the arithmetic alone. Whether the
//! device stored the right ones is judged apart, by what the interpreter would have stored.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::codes::{self, DeviceCaches, judge_choice, stores_codes};
use super::lanes::Routed;
use super::states::{DeviceStates, States};
use super::{CheckError, FACTOR, Judge, Noise, Tolerance, inputs, noise_of, worst};
use crate::dtype::DType;
use crate::interp::{FromDevice, Interp, Options, Pack, RouterShape, Taken};
use crate::reference::missed_by;
use crate::rows::{Edit, Guard, Request, SequenceId, Shape};
use crate::validate::Validated;

/// Rows whose cost of rounding counts for each other. Rows of one step differ in their tokens, and a single lane may be right by chance.
const NEIGHBOURS: usize = 16;
/// Random seed of the lane that rounds at random.
const LANE_SEED: u64 = 1;
/// Most lanes: more than one where a row is out of tolerance. Trained weights are chaotic at some rows, and one lane may say too little
/// (docs/numerics.md).
const LANES_MAX: u64 = 8;

/// One step of a device, or as many of its rows as the interpreter executes at a time.
#[derive(Clone)]
pub(super) struct Launch {
    pub decodes: Decodes,
    pub tokens: Vec<u32>,
    /// What the device stored.
    pub taken: Taken,
}

#[derive(Clone)]
pub(super) enum Decodes {
    Rows(Request),
    /// The same of some rows of a chunk, which are named by their positions.
    Chunk(Request),
    /// Rows that nothing executes, since they take what the device has written: of each, the values of every cache by column.
    Written {
        request: Request,
        rows: Arc<Vec<Vec<Vec<f32>>>>,
    },
    /// No rows: the recurrent states of a sequence before a position, as the device has them.
    States {
        sequence: SequenceId,
        position: u32,
        states: Arc<States>,
    },
    /// The next position of a text; position 0 begins another one.
    Text {
        position: u32,
    },
}

impl Decodes {
    fn into_edits(self) -> Vec<Edit> {
        match self {
            Decodes::Rows(request) | Decodes::Chunk(request) | Decodes::Written { request, .. } => request.edits,
            Decodes::States { .. } | Decodes::Text { .. } => vec![],
        }
    }
}

impl Launch {
    /// See [`Decodes::States`].
    pub fn of_states(sequence: SequenceId, position: u32, states: Arc<States>) -> Launch {
        let decodes = Decodes::States { sequence, position, states };
        Launch { decodes, tokens: vec![], taken: Taken::default() }
    }

    fn positions(&self) -> Vec<u32> {
        match &self.decodes {
            Decodes::Rows(request) | Decodes::Chunk(request) | Decodes::Written { request, .. } => {
                request.rows.iter().map(|row| row.position).collect()
            }
            Decodes::States { .. } => vec![],
            Decodes::Text { position } => vec![*position],
        }
    }

    fn wants_logits(&self) -> bool {
        match &self.decodes {
            Decodes::Rows(request) | Decodes::Chunk(request) => request.rows.iter().any(|row| row.wants_logits),
            Decodes::Written { .. } | Decodes::States { .. } => false,
            Decodes::Text { .. } => true,
        }
    }
}

/// An interpreter, and what judges its tables, if it has some.
struct Executor {
    interp: Interp,
    guard: Option<Guard>,
}

/// The logits of each row, and what the interpreter would have stored in place of what it took; `None`: it took nothing.
type Executed = (Vec<Vec<f32>>, Option<Arc<FromDevice>>);

impl Executor {
    /// `seed`: of random rounding; `None`: it rounds to the nearest.
    fn new(validated: &Validated, pack: Pack, seed: Option<u64>) -> Result<Executor, CheckError> {
        let schedule = validated.schedule();
        let mut interp = Interp::new(schedule, pack, Options::fast())?;
        seed.iter().for_each(|seed| interp.round_at_random(*seed, true));
        Ok(Executor { interp, guard: Shape::of(&schedule.program).map(Guard::new) })
    }

    fn execute(&mut self, launch: &Launch) -> Result<Executed, CheckError> {
        let Launch { decodes, tokens, taken } = launch;
        if let Decodes::Text { position: 0 } = decodes {
            self.interp.reset();
        }
        let own = (!taken.is_empty()).then(|| self.interp.take(tokens.len(), taken.clone()));
        let mut logits = vec![vec![]; tokens.len()];
        match (decodes, &mut self.guard) {
            (Decodes::Rows(request) | Decodes::Chunk(request), Some(guard)) => {
                let admitted = guard.admit(request).expect("pages of the pool keep all facts");
                self.interp.launch_rows(admitted, tokens, |step| logits[step.row] = step.logits.to_vec())?;
            }
            (Decodes::States { sequence, position, states }, Some(guard)) => {
                guard.state_is_before(*sequence, *position);
                self.interp.set_states_of(*sequence, *position, states);
            }
            (Decodes::Written { request, rows }, Some(guard)) => {
                // Nothing is executed that needs the states before these rows.
                request.rows.iter().rev().for_each(|row| guard.state_is_before(row.sequence, row.position));
                let admitted = guard.admit(request).expect("pages of the pool keep all facts");
                let page_rows = admitted.shape().page_rows;
                for (at, (row, caches)) in request.rows.iter().zip(rows.iter()).enumerate() {
                    let page =
                        admitted.pages(at).nth((row.position / page_rows) as usize).expect("a page of its block");
                    let cache_row = (page * page_rows + row.position % page_rows) as usize;
                    for (cache, values) in caches.iter().enumerate() {
                        self.interp.write_cache(cache, cache_row, values);
                    }
                }
                admitted.finish(1);
            }
            _ => self.interp.launch(&inputs(tokens), |step| {
                logits[step.row] = step.logits.to_vec();
                ControlFlow::Continue(())
            })?,
        }
        Ok((logits, own))
    }
}

/// Interpreters that execute the launches of a device.
pub(super) struct Beside<'a> {
    pub judge: Judge,
    validated: &'a Validated,
    pack: Pack,
    exact: Executor,
    /// `None` where everything is fp32.
    lane: Option<Executor>,
    caches: DeviceCaches,
    states: DeviceStates,
    /// Whether they have codes, which steps take.
    stores_codes: bool,
    routers: Vec<RouterShape>,
    /// What rounding cost the rows that were compared last.
    recent: VecDeque<Noise>,
    /// What rounding cost the scores of every choice.
    of_scores: Vec<f64>,
    /// What rounding cost the keys or the values of a layer at the rows that were compared last, by cache.
    of_caches: Vec<VecDeque<f64>>,
    /// What lanes executed, to let other ones execute it, too; the first launch of the current step; and the first one that nothing has settled.
    launches: Vec<Launch>,
    step: usize,
    unsettled: usize,
}

/// What the rows of a step are to compute.
pub(super) struct Expected {
    pub positions: Vec<u32>,
    /// Of each row; empty if none are wanted.
    pub logits: Vec<Vec<f32>>,
    /// What rounding costs them; `None` where everything is fp32.
    noise: Option<Noise>,
}

impl<'a> Beside<'a> {
    /// # Errors
    /// A schedule that the interpreter refuses.
    pub fn new(validated: &'a Validated, pack: Pack) -> Result<Beside<'a>, CheckError> {
        let schedule = validated.schedule();
        let precision = schedule.program.precision;
        let is_coarse = [precision.weights, precision.cache, precision.wire] != [DType::F32; 3];
        let exact = Executor::new(validated, pack.clone(), None)?;
        let lane = is_coarse.then(|| Executor::new(validated, pack.clone(), Some(LANE_SEED))).transpose()?;
        Ok(Beside {
            judge: Judge::new(codes::tolerance(precision)),
            caches: DeviceCaches::new(schedule, &exact.interp),
            states: DeviceStates::of(schedule),
            stores_codes: stores_codes(precision),
            routers: exact.interp.routers().to_vec(),
            validated,
            pack,
            exact,
            lane,
            recent: VecDeque::new(),
            of_scores: vec![],
            of_caches: vec![],
            launches: vec![],
            step: 0,
            unsettled: 0,
        })
    }

    pub fn vocab(&self) -> u32 {
        self.exact.interp.vocab() as u32
    }

    pub fn caches(&self) -> &DeviceCaches {
        &self.caches
    }

    pub fn states(&self) -> &DeviceStates {
        &self.states
    }

    /// The caches of a device that stores codes.
    pub fn coded_caches(&self) -> Option<&DeviceCaches> {
        Some(&self.caches).filter(|_| self.stores_codes)
    }

    pub fn routers(&self) -> &[RouterShape] {
        &self.routers
    }

    /// Executes a step of the device in launches, whose rows follow one another, and judges what the device stored in it.
    ///
    /// # Errors
    /// Codes or choices that are wrong, of the first launch with some; what the interpreter refuses.
    pub fn step(&mut self, launches: Vec<Launch>) -> Result<Expected, CheckError> {
        self.step = self.launches.len();
        let (mut positions, mut expected, mut lanes, mut wants_logits) = (vec![], vec![], vec![], false);
        for launch in launches {
            let of_launch = launch.positions();
            wants_logits |= launch.wants_logits();
            let (logits, own) = self.exact.execute(&launch)?;
            let mut of_lane = None;
            if let Some(lane) = &mut self.lane {
                let (logits, own) = lane.execute(&launch)?;
                lanes.extend(logits);
                of_lane = own;
                self.launches.push(launch.clone());
            }
            if let Some(own) = own {
                self.judge_choices(&launch, &own, of_lane.as_deref(), positions.len())?;
                if self.stores_codes {
                    self.caches.compare(&mut self.judge, &own, &of_launch, of_lane.as_deref())?;
                }
            }
            expected.extend(logits);
            positions.extend(of_launch);
        }
        if !wants_logits {
            return Ok(Expected { positions, logits: vec![], noise: None });
        }
        let of_step: Vec<Noise> =
            expected.iter().zip(&lanes).map(|(expected, lane)| Noise::of(expected, [lane])).collect();
        for (position, noise) in positions.iter().zip(&of_step) {
            let worst = &mut self.judge.figures.noise[noise_of(*position)];
            *worst = worst.or_worse(*noise);
        }
        let noise = self.lane.is_some().then(|| self.noise(&of_step));
        Ok(Expected { positions, logits: expected, noise })
    }

    /// What rounding costs, at worst, the rows of a step and those before it.
    fn noise(&mut self, of_step: &[Noise]) -> Noise {
        self.recent.extend(of_step);
        while self.recent.len() > NEIGHBOURS.max(of_step.len()) {
            self.recent.pop_front();
        }
        self.recent.iter().copied().fold(Noise::default(), Noise::or_worse)
    }

    /// Compares a row of the current step. If it is out of tolerance, more lanes say what rounding costs it.
    ///
    /// # Errors
    /// Logits that are out of tolerance; what the interpreter refuses.
    pub fn compare(&mut self, step: &Expected, row: usize, found: &[f32]) -> Result<(), CheckError> {
        let (position, expected) = (step.positions[row], &step.logits[row]);
        let Some(mut noise) = step.noise else {
            let vocab = self.vocab();
            return self.judge.compare_row(vocab, position, expected, found);
        };
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
            let (of_step, _) = self.again(LANE_SEED + lanes)?;
            let logits: Vec<Vec<f32>> = of_step.into_iter().flat_map(|(of, _)| of).collect();
            noise = noise.or_worse(Noise::of(expected, [&logits[row]]));
        }
    }

    /// Compares the keys and values of rows of the current step with those that the device has written, by row and cache. `rows` are their
    /// positions, and where they lie in a cache. If one is out of tolerance, more lanes say what rounding costs it.
    ///
    /// # Errors
    /// Keys or values that are out of tolerance; what the interpreter refuses.
    pub fn compare_written(&mut self, rows: &[(u32, usize)], written: &[Vec<Vec<u8>>]) -> Result<(), CheckError> {
        let count = self.caches.count();
        let of_interp = |caches: &DeviceCaches, of: &Executor| -> Vec<Vec<f32>> {
            let of_row = |&(_, row): &(u32, usize)| {
                (0..count).map(move |cache| caches.by_column(cache, &of.interp.read_cache(cache, row)))
            };
            rows.iter().flat_map(of_row).collect()
        };
        // By row, then by cache.
        let expected = of_interp(&self.caches, &self.exact);
        let away = |caches: &DeviceCaches, found: &[Vec<f32>]| -> Vec<f64> {
            let all = expected.iter().zip(found).enumerate();
            all.map(|(at, (expected, found))| caches.distance(at % count, expected, found)).collect()
        };
        let caches = &self.caches;
        let found: Vec<Vec<f32>> = written
            .iter()
            .flat_map(|of_row| of_row.iter().enumerate().map(|(cache, bytes)| caches.by_column(cache, bytes)))
            .collect();
        let found = away(caches, &found);
        let figures = &mut self.judge.figures;
        figures.error_rel_l2 = found.iter().copied().fold(figures.error_rel_l2, worst);
        let mut noise = self.lane.as_ref().map(|lane| away(caches, &of_interp(caches, lane)));
        let mut lanes = 1;
        loop {
            self.of_caches.resize(count, VecDeque::new());
            let recent = self.of_caches.clone();
            for (at, &noise) in noise.iter().flatten().enumerate() {
                let of_cache = &mut self.of_caches[at % count];
                of_cache.push_back(noise);
                if of_cache.len() > NEIGHBOURS.max(rows.len()) {
                    of_cache.pop_front();
                }
            }
            let before = self.judge.figures;
            let judged = found.iter().enumerate().try_for_each(|(at, &found)| {
                let allowed = match self.of_caches[at % count].iter().copied().reduce(worst) {
                    Some(noise) => worst(Tolerance::least(true).error_rel_l2, FACTOR * noise),
                    None => self.judge.tolerance.error_rel_l2,
                };
                let (layer, what) = self.caches.of(at % count);
                self.judge.cached(rows[at / count].0, (layer, what), allowed, found)
            });
            let Some(noise) = noise.as_mut().filter(|_| judged.is_err() && lanes < LANES_MAX) else {
                return judged;
            };
            (self.judge.figures, self.of_caches) = (before, recent);
            lanes += 1;
            let (_, lane) = self.again(LANE_SEED + lanes)?;
            let more = away(&self.caches, &of_interp(&self.caches, &lane));
            noise.iter_mut().zip(more).for_each(|(noise, more)| *noise = worst(*noise, more));
        }
    }

    /// Compares the recurrent states of a sequence with those that a device has after `position`, the last one of the current step. If they are out of
    /// tolerance, more lanes say what rounding costs them.
    ///
    /// # Errors
    /// States that are out of tolerance; what the interpreter refuses.
    pub fn compare_states(
        &mut self,
        (sequence, position): (SequenceId, u32),
        found: &States,
    ) -> Result<(), CheckError> {
        let expected = self.exact.interp.states_of(sequence);
        let away = |of: &DeviceStates, other: &States| of.distances(&expected, other);
        let found = away(&self.states, found);
        let figures = &mut self.judge.figures;
        figures.error_rel_l2 = found.iter().map(|(_, away)| *away).fold(figures.error_rel_l2, worst);
        let mut noise = self.lane.as_ref().map(|lane| away(&self.states, &lane.interp.states_of(sequence)));
        let mut lanes = 1;
        loop {
            let before = self.judge.figures;
            let judged = found.iter().enumerate().try_for_each(|(at, &(layer, found))| {
                let allowed = match &noise {
                    Some(noise) => worst(Tolerance::least(true).error_rel_l2, FACTOR * noise[at].1),
                    None => self.judge.tolerance.error_rel_l2,
                };
                self.judge.cached(position, (layer, "recurrent states"), allowed, found)
            });
            let Some(noise) = noise.as_mut().filter(|_| judged.is_err() && lanes < LANES_MAX) else {
                return judged;
            };
            self.judge.figures = before;
            lanes += 1;
            let (_, lane) = self.again(LANE_SEED + lanes)?;
            let more = away(&self.states, &lane.interp.states_of(sequence));
            noise.iter_mut().zip(more).for_each(|((_, noise), (_, more))| *noise = worst(*noise, more));
        }
    }

    /// Lets the interpreters take what the device has written in place of the rows of all steps since they took some, or in place of rows that nothing executed.
    ///
    /// # Errors
    /// What the interpreter refuses.
    pub fn settle(&mut self, written: Launch) -> Result<(), CheckError> {
        let replaced: Vec<Launch> = self.launches.drain(self.unsettled..).collect();
        self.step(vec![written]).map(drop)?;
        // Other lanes see all changes of the page table, too.
        let mut edits: Vec<Edit> = replaced.into_iter().flat_map(|launch| launch.decodes.into_edits()).collect();
        if let Some(Launch { decodes: Decodes::Written { request, .. }, .. }) = self.launches.last_mut() {
            edits.append(&mut request.edits);
            request.edits = edits;
        }
        // What follows is a step of its own.
        self.step = self.launches.len();
        self.unsettled = self.step;
        Ok(())
    }

    /// Judges each choice of a launch by the scores of the interpreter. If one is out of tolerance, more lanes say what rounding costs its scores.
    fn judge_choices(
        &mut self,
        launch: &Launch,
        own: &FromDevice,
        of_lane: Option<&FromDevice>,
        first_row: usize,
    ) -> Result<(), CheckError> {
        let mut routed = self.routed(launch, own);
        let widen = |routed: &mut [(usize, Routed)], lane: &FromDevice| {
            for (router, of) in routed {
                let both = own.scores(*router, of.text).into_iter().zip(lane.scores(*router, of.text));
                of.noise = both.map(|(a, b)| f64::from((a - b).abs())).fold(of.noise, worst);
            }
        };
        of_lane.iter().for_each(|lane| widen(&mut routed, lane));
        self.of_scores.extend(routed.iter().map(|(_, of)| of.noise));
        let middle = codes::median(&self.of_scores);
        // Where a row of a text is the only one, it has no number.
        let row = |of: &Routed| matches!(launch.decodes, Decodes::Rows(_)).then(|| (first_row + of.text) as u32);
        let mut lanes = 1;
        loop {
            let before = self.judge.figures;
            let judge = &mut self.judge;
            let judged =
                routed.iter().try_for_each(|(_, of)| judge_choice(judge, of, row(of), middle, Tolerance::least(true)));
            let may_pass = matches!(judged, Err(CheckError::Routed { found, .. }) if found.is_finite());
            if !may_pass || self.lane.is_none() || lanes >= LANES_MAX {
                return judged;
            }
            self.judge.figures = before;
            lanes += 1;
            if let Some((_, Some(lane))) = self.again(LANE_SEED + lanes)?.0.last() {
                widen(&mut routed, lane);
            }
        }
    }

    /// What a device chose for the rows of a launch, row by row; each with its router, and its row as the number of the text.
    fn routed(&self, launch: &Launch, own: &FromDevice) -> Vec<(usize, Routed)> {
        let positions = launch.positions();
        let of_router = |row: usize, (router, shape): (usize, &RouterShape)| {
            let said = own.said(router, row)?;
            let scores: Vec<f64> = own.scores(router, row).into_iter().map(f64::from).collect();
            let corrections = shape.correction.iter().map(|&c| f64::from(c)).chain(std::iter::repeat(0.0));
            let choice: Vec<f64> = scores.iter().zip(corrections).map(|(score, c)| score + c).collect();
            let missed = missed_by(&choice, shape.op.top_k, shape.op.groups, said);
            let most = scores.iter().copied().fold(0.0, f64::max);
            let (position, layer) = (positions[row], shape.layer.index());
            Some((router, Routed { text: row, position, layer, missed, noise: 0.0, most }))
        };
        let of_row = |row| self.routers.iter().enumerate().filter_map(move |router| of_router(row, router));
        (0..positions.len()).flat_map(of_row).collect()
    }

    /// What a lane with other random numbers makes of the launches of the current step, and that lane.
    fn again(&self, seed: u64) -> Result<(Vec<Executed>, Executor), CheckError> {
        let mut lane = Executor::new(self.validated, self.pack.clone(), Some(seed))?;
        let mut of_step = vec![];
        for (at, launch) in self.launches.iter().enumerate() {
            let executed = lane.execute(launch)?;
            if at >= self.step {
                of_step.push(executed);
            }
        }
        Ok((of_step, lane))
    }
}
