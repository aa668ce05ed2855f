//! Owns `Measurement`: the time of whole launches of a schedule whose numbers were checked.
//!
//! Whole launches of many steps are timed, never single steps of a device, because users wait for launches. No step can take less time
//! than its bytes need at the measured bandwidth, so a lower latency is withheld.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::abba::percentile;
use crate::check::{Checked, FILL_SEED, check_ids, fill_device_cache};
use crate::cuda::driver::Device;
use crate::cuda::nvml::Clocks;
use crate::cuda::session::{Session, SessionError};
use crate::error::Fault;
use crate::interp::{Input, Interp, InterpError, Options, Pack};
use crate::ir::layout::streamed_bytes;
use crate::ir::op::Op;
use crate::model::config::step_cache_bytes;
use crate::model::graph::ModelGraph;
use crate::target::Target;
use crate::validate::Validated;

/// Time for all positions of one measurement together, on the CPU.
const CPU_BUDGET: Duration = Duration::from_secs(10);
/// Time for one position on a device: thousands of steps of any model that fits it.
const DEVICE_BUDGET: Duration = Duration::from_secs(3);
/// Warm-up launches, not counted: clocks rise, pages and caches fill.
const WARM_UP: u32 = 3;
/// Most and fewest samples. More do not change the median of a quiet machine; fewer than three have no spread.
const CPU_SAMPLES_MAX: usize = 20;
const DEVICE_SAMPLES_MAX: usize = 50;
const SAMPLES_MIN: usize = 3;

/// Times at one position, per step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    /// Tokens in the cache at the first timed step.
    pub position: u32,
    pub steps_per_launch: u32,
    /// Timed launches.
    pub samples: u32,
    pub latency_us_p10: f64,
    pub latency_us_p50: f64,
    pub latency_us_p90: f64,
    /// Bytes that a step has to move in the middle of the launch: weight streams, cache rows, one embedding row.
    pub bytes_per_step: u64,
    /// Time for those bytes at the target's measured bandwidth.
    pub floor_us: Option<f64>,
    pub clock_sm_mhz: Option<u32>,
    pub clock_mem_mhz: Option<u32>,
    /// Reasons for throttling; `none` if there was none, empty if they were not read.
    pub throttle: String,
}

/// A latency that cannot be true.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Withheld {
    pub position: u32,
    pub reason: String,
}

/// Times of a checked schedule, by position. Only the functions of this file make one.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    timed: Vec<Timed>,
    withheld: Vec<Withheld>,
}

/// The cached form. A separate type, so that not any JSON can become a `Measurement`.
#[derive(Serialize, Deserialize)]
struct Entry {
    timed: Vec<Timed>,
    withheld: Vec<Withheld>,
}

impl Measurement {
    /// By position, ascending.
    pub fn timed(&self) -> &[Timed] {
        &self.timed
    }

    /// Positions without a time, and why.
    pub fn withheld(&self) -> &[Withheld] {
        &self.withheld
    }

    /// The text for the cache.
    pub(crate) fn to_entry(&self) -> Vec<u8> {
        let Measurement { timed, withheld } = self.clone();
        serde_json::to_vec(&Entry { timed, withheld }).expect("numbers and names")
    }

    /// Reads the output of [`Measurement::to_entry`]; the cache guarantees the bytes and their key.
    pub(crate) fn from_entry(bytes: &[u8]) -> Option<Measurement> {
        let Entry { timed, withheld } = serde_json::from_slice(bytes).ok()?;
        Some(Measurement { timed, withheld })
    }
}

#[derive(Debug, Error)]
pub enum MeasureError {
    #[error(transparent)]
    Interp(#[from] InterpError),
    #[error(transparent)]
    Session(#[from] SessionError),
}

impl From<MeasureError> for Fault {
    fn from(error: MeasureError) -> Fault {
        match error {
            MeasureError::Interp(error) => error.into(),
            MeasureError::Session(error) => error.into(),
        }
    }
}

/// The subject of a measurement.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    pub validated: &'a Validated,
    pub graph: &'a ModelGraph,
    pub target: &'a Target,
    /// Read bandwidth of a device of the target's kind, if it was measured: no step is faster than its bytes arrive.
    pub read_bytes_per_s: Option<f64>,
    /// Positions to time, ascending; each leaves room for a launch.
    pub positions: &'a [u32],
    /// Steps of one launch, from the manifest; the CPU takes fewer if a launch would last too long.
    pub steps_per_launch: u32,
}

/// A checked schedule that is launched and timed, at one position after another.
pub struct Timer<'a> {
    subject: Subject<'a>,
    on: On<'a>,
    /// Time budget of all launches at one position.
    budget: Duration,
    position: u32,
    steps: u32,
    /// Rows of the cache that were generated. Launches overwrite some of them: the content of a row does not change the time.
    filled: Option<u32>,
}

enum On<'a> {
    Cpu(Box<Interp>),
    Device { device: &'a Device, session: &'a mut Session },
}

impl<'a> Timer<'a> {
    /// Times the interpreter's fast path by wall clock.
    ///
    /// # Errors
    /// Faults of the interpreter.
    pub fn cpu(subject: Subject<'a>, _checked: &Checked, pack: Pack) -> Result<Timer<'a>, MeasureError> {
        let interp = Interp::new(subject.validated.schedule(), pack, Options::fast())?;
        let budget = CPU_BUDGET / subject.positions.len().max(1) as u32;
        Ok(Timer { subject, on: On::Cpu(Box::new(interp)), budget, position: 0, steps: 1, filled: None })
    }

    /// Times a device with events around each launch.
    pub fn cuda(subject: Subject<'a>, _checked: &Checked, device: &'a Device, session: &'a mut Session) -> Timer<'a> {
        let on = On::Device { device, session };
        Timer { subject, on, budget: DEVICE_BUDGET, position: 0, steps: 1, filled: None }
    }

    /// Uses the first `rows` rows of the cache as they are: an earlier timer generated them.
    pub fn with_filled(self, rows: Option<u32>) -> Timer<'a> {
        Timer { filled: rows, ..self }
    }

    /// Rows of the cache that were generated.
    pub fn filled(&self) -> Option<u32> {
        self.filled
    }

    /// Generates a cache of `position` tokens, decides the number of steps of a launch, and warms up.
    ///
    /// # Errors
    /// Faults of interpreter or session; a session that hung is lost.
    pub fn prepare(&mut self, position: u32) -> Result<(), MeasureError> {
        self.position = position;
        self.steps = self.subject.steps_per_launch;
        let fill = self.filled.is_none_or(|rows| rows < position);
        if fill {
            self.filled = Some(position);
        }
        match &mut self.on {
            On::Cpu(interp) => {
                if fill {
                    interp.reset();
                    interp.fill_cache(FILL_SEED, position)?;
                }
                // The first step pays for pages that were never touched; the second shows how many steps fit the budget.
                self.steps = 1;
                self.launch()?;
                let step_us = self.launch()?.max(1e-3);
                let affordable = (self.budget.as_secs_f64() * 1e6 / step_us / (SAMPLES_MIN as f64 + 1.0)) as u32;
                self.steps = self.subject.steps_per_launch.min(affordable.max(1));
                self.launch()?;
            }
            On::Device { session, .. } => {
                if fill {
                    let Subject { validated, .. } = &self.subject;
                    fill_device_cache(session, validated.schedule(), FILL_SEED, position)?;
                }
                session.start(&check_ids(self.subject.graph.vocab, position + 1), &[])?;
                for _ in 0..WARM_UP {
                    self.launch()?;
                }
            }
        }
        Ok(())
    }

    /// One launch from the prepared position on; microseconds per step.
    ///
    /// # Errors
    /// As [`Timer::prepare`].
    pub fn launch(&mut self) -> Result<f64, MeasureError> {
        let (position, steps) = (self.position, self.steps);
        let launch_us = match &mut self.on {
            On::Cpu(interp) => {
                let first = check_ids(self.subject.graph.vocab, 1).first().copied().unwrap_or(0);
                let mut inputs = vec![Input::Selected; steps.max(1) as usize];
                inputs[0] = Input::Token(first);
                interp.seek(position)?;
                interp.state_is_before(position);
                let started = Instant::now();
                interp.launch(&inputs, |_| ControlFlow::Continue(()))?;
                started.elapsed().as_secs_f64() * 1e6
            }
            On::Device { session, .. } => {
                // The time of a step does not depend on the values of its states.
                session.state_is_before(position);
                session.run(position, steps, false)?.device_us
            }
        };
        Ok(launch_us / f64::from(steps))
    }

    /// Steps of one launch at the prepared position.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Statistics of samples of [`Timer::launch`] at the prepared position, with the present clocks.
    ///
    /// # Errors
    /// A median below the floor of the bytes, which cannot be true.
    pub fn timed(&self, samples_us: Vec<f64>) -> Result<Timed, Withheld> {
        let clocks = match &self.on {
            On::Cpu(_) => None,
            On::Device { device, .. } => device.clocks(),
        };
        timed_rows(&self.subject, 1, (self.position, self.steps), samples_us, clocks)
    }

    /// Times every position of the subject; `on_position` is called after each.
    ///
    /// # Errors
    /// As [`Timer::prepare`].
    pub fn measure(mut self, on_position: &dyn Fn()) -> Result<Measurement, MeasureError> {
        let samples_max = match &self.on {
            On::Cpu(_) => CPU_SAMPLES_MAX,
            On::Device { .. } => DEVICE_SAMPLES_MAX,
        };
        let mut measurement = Measurement { timed: vec![], withheld: vec![] };
        for &position in self.subject.positions {
            self.prepare(position)?;
            let started = Instant::now();
            let mut samples_us = vec![];
            while samples_us.len() < SAMPLES_MIN || (samples_us.len() < samples_max && started.elapsed() < self.budget)
            {
                samples_us.push(self.launch()?);
            }
            match self.timed(samples_us) {
                Ok(timed) => measurement.timed.push(timed),
                Err(withheld) => measurement.withheld.push(withheld),
            }
            on_position();
        }
        Ok(measurement)
    }
}

/// Bytes that a step of `rows` sequences has to move with `history` tokens of each in the cache: weight streams, and for each sequence
/// its cache rows and one row of the embedding.
pub fn step_bytes(validated: &Validated, graph: &ModelGraph, rows: u32, history: u32) -> u64 {
    let schedule = validated.schedule();
    let precision = schedule.program.precision;
    let streams: u64 = streamed_bytes(schedule).iter().sum();
    let row = match graph.formats.get(&graph.embed).filter(|format| !format.is_plain()) {
        Some(format) => format.of_table().table_row(graph.hidden).bytes,
        None => u64::from(graph.hidden) * precision.weights.bytes() as u64,
    };
    // An op alone may be one that reads no history.
    let attends = schedule.program.grids.iter().any(|grid| matches!(grid.op, Op::Attention(_)));
    let cache = if attends { step_cache_bytes(graph, precision, history) } else { 0 };
    streams + u64::from(rows) * (cache + row)
}

/// Statistics of samples of whole launches of steps of `rows` rows, in µs per step. Each launch has `steps` steps from `position` on.
///
/// # Errors
/// A median below the floor of the bytes, which cannot be true.
pub fn timed_rows(
    subject: &Subject<'_>,
    rows: u32,
    (position, steps): (u32, u32),
    mut samples_us: Vec<f64>,
    clocks: Option<Clocks>,
) -> Result<Timed, Withheld> {
    samples_us.sort_by(f64::total_cmp);
    let bytes_per_step = step_bytes(subject.validated, subject.graph, rows, position + steps / 2);
    let floor = |bytes: u64| subject.read_bytes_per_s.map(|per_s| bytes as f64 / per_s * 1e6);
    let median = percentile(&samples_us, 0.5);
    let l2_bytes = subject.target.spec.l2_bytes * u64::from(subject.target.devices);
    // Bytes that fit the L2 cache may stay there from one step to the next, and are then not read again.
    let least = floor(bytes_per_step.saturating_sub(l2_bytes)).unwrap_or(0.0);
    if median < least || median <= 0.0 {
        let reason = format!("{median:.2} µs per step at position {position} is below the floor of {least:.2} µs");
        return Err(Withheld { position, reason });
    }
    let throttle = clocks.as_ref().map(|clocks| clocks.throttle_reasons()).map(|reasons| match reasons.is_empty() {
        true => "none".to_string(),
        false => reasons.join(", "),
    });
    Ok(Timed {
        position,
        steps_per_launch: steps,
        samples: samples_us.len() as u32,
        latency_us_p10: percentile(&samples_us, 0.1),
        latency_us_p50: median,
        latency_us_p90: percentile(&samples_us, 0.9),
        bytes_per_step,
        floor_us: floor(bytes_per_step),
        clock_sm_mhz: clocks.as_ref().and_then(|clocks| clocks.sm_mhz),
        clock_mem_mhz: clocks.as_ref().and_then(|clocks| clocks.memory_mhz),
        throttle: throttle.unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_reads_back_as_it_was() {
        let timed = Timed {
            position: 32,
            steps_per_launch: 8,
            samples: 20,
            latency_us_p10: 0.1,
            latency_us_p50: 1.0 / 3.0,
            latency_us_p90: 1e9,
            bytes_per_step: u64::MAX,
            floor_us: Some(0.25),
            clock_sm_mhz: Some(1980),
            clock_mem_mhz: None,
            throttle: "none".to_string(),
        };
        let withheld = Withheld { position: 64, reason: "too fast".to_string() };
        let measurement = Measurement { timed: vec![timed], withheld: vec![withheld] };
        assert_eq!(Measurement::from_entry(&measurement.to_entry()), Some(measurement));
        assert_eq!(Measurement::from_entry(b"{}"), None);
    }
}
