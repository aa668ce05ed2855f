//! Owns the stepper of CUDA targets: kernels for several rows on a device, with the guard of their tables.

use super::stepper::{Alone, Bounds, Launch, LaunchRow, Said, Stepper, Want, admit};
use crate::cuda::rows::{FirstToken, RowInput, RowsSession};
use crate::cuda::waves::WavesSession;
use crate::error::Fault;
use crate::rows::{Guard, Shape};
use crate::waves::CHUNK_MIN;

/// Queues launches on a device. Greedy choice and temperature are the kernel's; every other choice gets logits.
pub struct DeviceStepper {
    /// Ascending by rows, over one cache.
    sessions: Vec<RowsSession>,
    /// Reads long chunks of one prompt into the same cache.
    waves: Option<WavesSession>,
    guard: Guard,
    /// Whose launch is queued or runs, and its wants.
    running: Kernel,
    wants: Vec<Want>,
}

#[derive(Debug, Clone, Copy)]
enum Kernel {
    Rows(usize),
    Waves,
}

impl DeviceStepper {
    /// A stepper over sessions that nothing was launched on yet, ascending by rows; all have the same cache. A launch runs on the first
    /// one that has as many rows, or on that of waves. `None`: there is no session.
    pub fn new(sessions: Vec<RowsSession>, waves: Option<WavesSession>) -> Option<DeviceStepper> {
        let of_rows = *sessions.last()?.shape();
        let rows = waves.as_ref().map_or(0, |waves| waves.shape().rows).max(of_rows.rows);
        let guard = Guard::new(Shape { rows, ..of_rows });
        Some(DeviceStepper { sessions, waves, guard, running: Kernel::Rows(0), wants: vec![] })
    }
}

impl Stepper for DeviceStepper {
    fn bounds(&self) -> Bounds {
        let largest = &self.sessions[self.sessions.len() - 1];
        let shape = *largest.shape();
        let (vocab, steps_max) = (largest.vocab(), largest.steps_max());
        let alone = self.waves.as_ref().map(|waves| Alone { least: CHUNK_MIN, most: waves.shape().rows });
        Bounds { shape, chunk_max: shape.rows, alone, vocab, launches: 1, steps_max }
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        let is_alone = self.bounds().alone.is_some_and(|alone| launch.is(alone));
        let Launch { rows, steps, edits } = launch;
        self.wants = rows.iter().map(|row| row.want).collect();
        let with_logits = self.wants.contains(&Want::Logits);
        let tables = admit(&mut self.guard, &rows, steps, edits)?;
        if let Some(waves) = self.waves.as_mut().filter(|_| is_alone) {
            self.running = Kernel::Waves;
            let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
            return Ok(waves.queue(tables, &tokens)?);
        }
        let inputs: Vec<RowInput> = rows.iter().map(|row| input(row, steps)).collect();
        let has_room = |session: &RowsSession| session.shape().rows as usize >= rows.len();
        // The guard has judged that the largest has.
        let smallest = self.sessions.iter().position(has_room).unwrap_or(self.sessions.len() - 1);
        self.running = Kernel::Rows(smallest);
        Ok(self.sessions[smallest].queue(tables, &inputs, with_logits)?)
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        let session = match (self.running, &mut self.waves) {
            (Kernel::Rows(session), _) => &mut self.sessions[session],
            (Kernel::Waves, Some(waves)) => {
                waves.finish()?;
                return Ok(vec![Said::Nothing; self.wants.len()]);
            }
            (Kernel::Waves, None) => return Err(Fault::internal("a launch of waves without their kernel")),
        };
        let tokens = session.finish()?.tokens;
        let said = (0u32..).zip(&self.wants).map(|(row, want)| {
            Ok(match want {
                Want::Nothing => Said::Nothing,
                Want::Logits => Said::Logits(session.logits(row)?),
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
