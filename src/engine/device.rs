//! Owns the stepper of CUDA targets: a kernel for several rows on a device, with the guard of its tables.

use super::stepper::{Bounds, Launch, LaunchRow, Said, Stepper, Want, admit};
use crate::cuda::rows::{FirstToken, RowInput, RowsSession};
use crate::error::Fault;
use crate::rows::Guard;

/// Queues launches on a device. Greedy choice and temperature are the kernel's; every other choice gets logits.
pub struct DeviceStepper {
    session: RowsSession,
    guard: Guard,
    /// Wants of the launch that is queued or runs.
    wants: Vec<Want>,
}

impl DeviceStepper {
    /// A stepper over a session that nothing was launched on yet.
    pub fn new(session: RowsSession) -> DeviceStepper {
        DeviceStepper { guard: Guard::new(*session.shape()), session, wants: vec![] }
    }
}

impl Stepper for DeviceStepper {
    fn bounds(&self) -> Bounds {
        let shape = *self.session.shape();
        let (vocab, steps_max) = (self.session.vocab(), self.session.steps_max());
        Bounds { shape, chunk_max: shape.rows, vocab, launches: 1, steps_max }
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        let Launch { rows, steps, edits } = launch;
        self.wants = rows.iter().map(|row| row.want).collect();
        let with_logits = self.wants.contains(&Want::Logits);
        let inputs: Vec<RowInput> = rows.iter().map(|row| input(row, steps)).collect();
        let tables = admit(&mut self.guard, &rows, steps, edits)?;
        Ok(self.session.queue(tables, &inputs, with_logits)?)
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        let tokens = self.session.finish()?.tokens;
        let said = (0u32..).zip(&self.wants).map(|(row, want)| {
            Ok(match want {
                Want::Nothing => Said::Nothing,
                Want::Logits => Said::Logits(self.session.logits(row)?),
                // The first token of a launch was given.
                Want::Token(_) => Said::Tokens(tokens.iter().skip(1).map(|step| step[row as usize]).collect()),
            })
        });
        said.collect()
    }
}

fn input(row: &LaunchRow, steps: u32) -> RowInput {
    let (inverse_temperature, seed) = match row.want {
        Want::Token(sampler) if !sampler.is_greedy() => {
            let [low, high] = sampler.key();
            (sampler.inv_temperature(), u64::from(high) << 32 | u64::from(low))
        }
        _ => (0.0, 0),
    };
    RowInput { first: FirstToken::Given(row.token), steps, inverse_temperature, seed }
}
