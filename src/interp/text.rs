//! Owns one text over a program with tables: its tokens in prompt chunks, its pages, and its guard.

use super::{Input, Interp, InterpError, Options, Pack, StepResult};
use crate::ir::schedule::Schedule;
use crate::pages::Pool;
use crate::rows::{Guard, Request, Row, SequenceId, Shape};
use std::ops::ControlFlow;

/// The pages of one text.
pub(super) struct Text {
    guard: Guard,
    pool: Pool,
    sequence: SequenceId,
}

impl Text {
    fn new(shape: Shape) -> Result<Text, InterpError> {
        let mut pool = Pool::new(shape);
        let sequence = pool.open()?;
        Ok(Text { guard: Guard::new(shape), pool, sequence })
    }

    /// Whether the recurrent states are those before `position`.
    pub fn goes_on_at(&self, position: u32) -> bool {
        self.guard.goes_on_at(self.sequence, position)
    }

    /// Gives all pages back; positions begin at 0 again.
    pub fn reset(&mut self) {
        // The sequence is open, and after it is closed there is room for one.
        let closed = self.pool.close(self.sequence).and_then(|()| self.pool.open());
        self.sequence = closed.unwrap_or(self.sequence);
    }
}

impl Interp {
    /// [`Interp::new`] for one text: a schedule with tables decodes tokens that are given in chunks of its rows, without
    /// tables of the caller. A schedule without tables is taken as it is.
    ///
    /// # Errors
    /// Those of [`Interp::new`].
    pub fn of_text(schedule: &Schedule, pack: Pack, options: Options) -> Result<Interp, InterpError> {
        let interp = Interp::new(schedule, pack, options)?;
        let text = Shape::of(&schedule.program).map(Text::new).transpose()?;
        Ok(Interp { text, ..interp })
    }

    /// What bounds the rows and the pages of its one text; `None`: its schedule has no tables, or the caller gives them.
    pub fn text_shape(&self) -> Option<&Shape> {
        self.text.as_ref().map(|text| text.guard.shape())
    }

    /// Inputs one position after another: tokens in a row are a prompt chunk, a choice is a step of its own.
    pub(super) fn decode_text(
        &mut self,
        text: &mut Text,
        inputs: &[Input],
        every: bool,
        on_step: &mut dyn FnMut(&StepResult<'_>) -> ControlFlow<()>,
    ) -> Result<(), InterpError> {
        let rows_max = text.guard.shape().rows as usize;
        let mut rest = inputs;
        while let Some(&first) = rest.first() {
            let token = |input: &Input| if let Input::Token(token) = *input { Some(token) } else { None };
            let tokens: Vec<u32> = match first {
                Input::Token(_) => rest.iter().map_while(token).take(rows_max).collect(),
                Input::Selected => vec![self.selected().ok_or(InterpError::NoToken)?],
            };
            let after = &rest[tokens.len()..];
            let position = self.position;
            // Pages that left the window are kept: the text may go on from any of its positions.
            text.pool.reserve(text.sequence, position + tokens.len() as u32)?;
            // The last one before a choice, or before the caller chooses.
            let chosen_after = after.first().is_none_or(|next| *next == Input::Selected);
            let row = |at: usize| Row {
                sequence: text.sequence,
                position: position + at as u32,
                wants_logits: every || (chosen_after && at + 1 == tokens.len()),
            };
            let rows = (0..tokens.len()).map(row).collect();
            let request = Request { rows, steps: 1, edits: text.pool.take_edits() };
            let tables = text.guard.admit(&request)?;
            let (mut next, mut stopped) = (position, false);
            self.run_rows(tables, &tokens, &mut |step| {
                if !stopped {
                    next = step.position + 1;
                    stopped = on_step(step).is_break();
                }
            })?;
            (self.position, self.last_row) = (next, tokens.len() - 1);
            // What is chosen follows the last row of the step.
            self.selectable = next as usize == position as usize + tokens.len();
            if stopped {
                return Ok(());
            }
            rest = after;
        }
        Ok(())
    }
}
