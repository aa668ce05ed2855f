//! Owns the steps of the interpreter.

use super::stepwise::{After, Asks, Steps};
use crate::error::Fault;
use crate::interp::{Interp, Options, Pack};
use crate::ir::schedule::Schedule;
use crate::rows::{Shape, Tables};

/// Steps of the interpreter, on threads of this process.
#[derive(Debug)]
pub struct CpuSteps {
    interp: Interp,
    shape: Shape,
}

impl CpuSteps {
    /// Prepares a validated schedule of several rows with its pack. Starts the worker threads.
    ///
    /// # Errors
    /// A schedule without tables, or one whose cache is larger than this machine's memory.
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
