//! Owns one text over a program with tables: its tokens in prompt chunks, its pages, and its guard.

use super::{Input, Interp, InterpError, Options, Pack, StepResult};
use crate::ir::schedule::Schedule;
use crate::pages::Pool;
use crate::rows::{Guard, Request, Row, SequenceId, Shape, StateCopies, StateCopy};
use std::ops::ControlFlow;

/// The pages of one text, and snapshots of its recurrent state. Sequence 0 has the rows, and the others are slots for snapshots.
pub(super) struct Text {
    guard: Guard,
    pool: Pool,
    sequence: SequenceId,
    /// Copies before the next launch.
    copies: StateCopies,
    /// The position of the snapshot in each slot.
    kept: Vec<Option<u32>>,
    /// Where the state is to be kept, and in which slot.
    to_keep: Vec<(u32, usize)>,
}

impl Text {
    fn new(shape: Shape) -> Result<Text, InterpError> {
        let mut pool = Pool::new(shape);
        let sequence = pool.open()?;
        let slots = if shape.has_state { shape.sequences as usize - 1 } else { 0 };
        let (copies, kept) = (StateCopies::default(), vec![None; slots]);
        Ok(Text { guard: Guard::new(shape), pool, sequence, copies, kept, to_keep: vec![] })
    }

    /// Whether the recurrent states are those before `position`, or will be before the next launch.
    pub fn goes_on_at(&self, position: u32) -> bool {
        match self.copies.restores.last() {
            Some(copy) => self.kept[copy.from.index() - 1] == Some(position),
            None => self.guard.goes_on_at(self.sequence, position),
        }
    }

    /// Keeps the state before `position`, if that is wanted.
    fn keep_at(&mut self, position: u32) {
        // What is put back first is in a slot already.
        if !self.copies.restores.is_empty() {
            return;
        }
        // A text that begins has no state.
        let here = |&mut (at, _): &mut (u32, usize)| at == position && position > 0;
        for (_, slot) in self.to_keep.extract_if(.., here) {
            self.copies.saves.push(StateCopy { from: self.sequence, to: SequenceId::from(slot + 1) });
            self.kept[slot] = Some(position);
        }
    }

    /// Gives all pages back; positions begin at 0 again.
    pub fn reset(&mut self) {
        self.copies.restores.clear();
        self.to_keep.clear();
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

    /// Snapshots of its recurrent state that it can keep; 0 without such a state.
    pub fn snapshots_max(&self) -> usize {
        self.text.as_ref().map_or(0, |text| text.kept.len())
    }

    /// Keeps the recurrent state before `position` in a slot, once the text is there.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn keep_state(&mut self, position: u32, slot: usize) {
        let at = self.position;
        let Some(text) = &mut self.text else { panic!("a snapshot of a schedule without tables") };
        assert!(slot < text.kept.len(), "slot {slot} of {} snapshots", text.kept.len());
        text.kept[slot] = None;
        text.to_keep.retain(|(_, other)| *other != slot);
        text.to_keep.push((position, slot));
        text.keep_at(at);
    }

    /// Goes back to the position of a snapshot: the next step decodes it.
    ///
    /// # Errors
    /// Nothing was kept in the slot.
    pub fn go_back(&mut self, slot: usize) -> Result<(), InterpError> {
        let position = self.text.as_ref().and_then(|text| text.kept.get(slot).copied().flatten());
        let (Some(position), Some(text)) = (position, &mut self.text) else {
            return Err(InterpError::State { position: self.position });
        };
        text.copies.restores.push(StateCopy { from: SequenceId::from(slot + 1), to: text.sequence });
        self.seek(position)
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
            text.keep_at(position);
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
            let tables = text.guard.admit_after(&std::mem::take(&mut text.copies), &request)?;
            let (mut next, mut stopped) = (position, false);
            self.run_rows(tables, &tokens, &mut |step| {
                if !stopped {
                    next = step.position + 1;
                    stopped = on_step(step).is_break();
                }
            })?;
            (self.position, self.last_row) = (next, tokens.len() - 1);
            text.keep_at(position + tokens.len() as u32);
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
