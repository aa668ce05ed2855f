//! Owns the steppers of the `cpu` target: the interpreter, with the guard of its tables, and its steps for one that verifies proposals.

use super::drafted::{After, Asks, Steps};
use super::stepper::{Bounds, Launch, Queue, Said, Stepper, Want, admit};
use crate::error::Fault;
use crate::interp::{Interp, Options, Pack};
use crate::ir::schedule::Schedule;
use crate::rows::{Guard, Shape, Tables};
use crate::sample::TokenSet;

/// Runs launches on threads of this process, each when it is collected.
#[derive(Debug)]
pub struct CpuStepper {
    interp: Interp,
    guard: Guard,
    bounds: Bounds,
    queued: Queue,
}

impl CpuStepper {
    /// Prepares a validated schedule of several rows with its pack. Starts the worker threads.
    ///
    /// # Errors
    /// A schedule without tables, or one whose cache is larger than this machine's memory.
    pub fn new(schedule: &Schedule, pack: Pack, options: Options) -> Result<CpuStepper, Fault> {
        let CpuSteps { interp, shape } = CpuSteps::new(schedule, pack, options)?;
        let (chunk_max, vocab) = (shape.rows, interp.vocab() as u32);
        let bounds = Bounds { shape, chunk_max, alone: None, vocab, steps_max: 1, choices: Some(u32::MAX) };
        Ok(CpuStepper { interp, guard: Guard::new(shape), bounds, queued: Queue::default() })
    }
}

impl Stepper for CpuStepper {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        self.queued.submit(launch);
        Ok(())
    }

    fn allow(&mut self, allowed: Vec<Option<TokenSet>>) -> Result<(), Fault> {
        self.queued.allow(allowed);
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        let Some((launch, allowed)) = self.queued.take() else { return Ok(vec![]) };
        let tokens = launch.tokens()?;
        let Launch { rows, steps, edits, copies } = launch;
        let tables = admit(&mut self.guard, &rows, steps, edits, &copies)?;
        let mut said = vec![Said::Nothing; rows.len()];
        let mut logits = vec![];
        self.interp.launch_rows(tables, &tokens, |result| match rows[result.row].want {
            Want::Nothing => {}
            Want::Logits => said[result.row] = Said::Logits(result.logits.to_vec()),
            Want::Choice(ref chooser) => {
                result.logits.copy_to(&mut logits);
                let allowed = allowed.get(result.row).and_then(Option::as_ref);
                let choice = chooser.request().choose(&logits, chooser.counts(), allowed);
                said[result.row] = Said::Choices(vec![choice]);
            }
            Want::Token(sampler) => {
                result.logits.copy_to(&mut logits);
                let token = sampler.choose(&logits, result.position + 1);
                said[result.row] = Said::Tokens(token.into_iter().collect());
            }
        })?;
        Ok(said)
    }
}

/// Steps of the interpreter.
#[derive(Debug)]
pub struct CpuSteps {
    interp: Interp,
    shape: Shape,
}

impl CpuSteps {
    /// As [`CpuStepper::new`].
    ///
    /// # Errors
    /// As [`CpuStepper::new`].
    pub fn new(schedule: &Schedule, pack: Pack, options: Options) -> Result<CpuSteps, Fault> {
        let shape =
            Shape::of(&schedule.program).ok_or_else(|| Fault::internal("a schedule of one row cannot be batched"))?;
        Ok(CpuSteps { interp: Interp::new(schedule, pack, options)?, shape })
    }
}

impl Steps for CpuSteps {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn vocab(&self) -> u32 {
        self.interp.vocab() as u32
    }

    fn leaves_with_token(&self) -> bool {
        false
    }

    fn run(
        &mut self,
        tables: Tables<'_>,
        rows: &[(u32, Asks)],
        after: &mut dyn FnMut(usize, After),
    ) -> Result<(), Fault> {
        let tokens: Vec<u32> = rows.iter().map(|(token, _)| *token).collect();
        self.interp.launch_rows(tables, &tokens, |result| {
            if rows[result.row].1 != Asks::Nothing {
                after(result.row, After::Logits(result.logits.to_vec()));
            }
        })?;
        Ok(())
    }

    fn left(&self, rows: usize) -> Result<Vec<Vec<f32>>, Fault> {
        let none = || Fault::internal("a schedule that publishes no last sum");
        (0..rows).map(|row| self.interp.left(row).ok_or_else(none)).collect()
    }
}
