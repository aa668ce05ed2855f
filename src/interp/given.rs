//! Owns what a draft reads in addition to its token, and what both a draft and its model leave for the next one: the output of the last layer.

use super::{Input, Interp, InterpError};
use std::ops::ControlFlow;
use std::sync::Arc;

/// What the next step of a draft reads, and whether it computes logits.
#[derive(Debug)]
pub(super) struct Given {
    values: Arc<[f32]>,
    wants_logits: bool,
}

impl Given {
    /// What was given for a launch, which no later one has. A launch that was given nothing computes logits.
    pub(super) fn taken(given: &mut Option<Given>) -> (Option<Arc<[f32]>>, bool) {
        given.take().map_or((None, true), |given| (Some(given.values), given.wants_logits))
    }
}

impl Interp {
    /// Decodes `token` with what the program of a draft reads in addition to it, `[hidden]`. Returns the logits, unless they are not wanted.
    ///
    /// # Errors
    /// As [`Interp::step`].
    pub fn step_given(
        &mut self,
        token: u32,
        values: Arc<[f32]>,
        wants_logits: bool,
    ) -> Result<Option<Vec<f32>>, InterpError> {
        self.given = Some(Given { values, wants_logits });
        let mut logits = vec![];
        self.launch(&[Input::Token(token)], |step| {
            if wants_logits {
                step.logits.copy_to(&mut logits);
            }
            ControlFlow::Continue(())
        })?;
        Ok(wants_logits.then_some(logits))
    }

    /// What the last layer left of row `row` of the last step, before the final norm, `[hidden]`. `None`: every SM has it for itself.
    pub fn left(&self, row: usize) -> Option<Vec<f32>> {
        Some(self.exchanged(self.plan.head_input?, row)).filter(|left| !left.is_empty())
    }
}
