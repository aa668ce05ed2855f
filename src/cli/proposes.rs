//! Owns which proposals `generate` verifies: those that `--lookup` finds in the text, those of `--draft`, or none.

use std::ops::ControlFlow;

use super::arguments::Generate;
use crate::error::Fault;
use crate::pipeline::{Answer, MtpDraft, Ready, Runner};
use crate::sample::{Decided, Request};
use crate::speculate::{Draft, NgramLookup, Speculated, Speculation};

/// What proposes tokens, and the most of a proposal.
pub enum Proposes {
    Nothing,
    Lookup(usize),
    Mtp(usize, Box<MtpDraft>),
}

impl Proposes {
    /// What the user asks for, for a text whose prompt has so many tokens.
    ///
    /// # Errors
    /// Why there is no draft.
    pub fn of(asked: &Generate, ready: &Ready, prompt: usize, request: &Request) -> Result<Proposes, Fault> {
        Ok(match (asked.lookup, asked.draft) {
            (_, Some(of)) => Proposes::Mtp(of.most as usize, Box::new(ready.mtp()?.of_text(prompt, request)?)),
            (Some(most), None) => Proposes::Lookup(most as usize),
            (None, None) => Proposes::Nothing,
        })
    }

    /// Most tokens of a proposal.
    pub fn most(&self) -> usize {
        match self {
            Proposes::Nothing => 0,
            Proposes::Lookup(most) | Proposes::Mtp(most, _) => *most,
        }
    }

    /// Continues a prompt, with what became of the proposals.
    ///
    /// # Errors
    /// As [`Runner::answer`] and [`Runner::speculate`]; what made the draft stop.
    pub fn answer(
        self,
        runner: &mut Runner<'_>,
        prompt: &[u32],
        tokens_max: usize,
        request: &Request,
        on_token: &mut dyn FnMut(&Decided) -> ControlFlow<()>,
    ) -> Result<(Answer, Option<Speculated>), Fault> {
        let most = self.most();
        let mut speculate = |draft: &mut dyn Draft, on_token: &mut dyn FnMut(&Decided) -> ControlFlow<()>| {
            let mut speculation = Speculation::new(draft, most);
            let answer = runner.speculate(prompt, tokens_max, request, &mut speculation, on_token)?;
            Ok((answer, Some(speculation.counts())))
        };
        match self {
            Proposes::Lookup(_) => speculate(&mut NgramLookup::new(), on_token),
            Proposes::Mtp(_, mut draft) => {
                let answer = speculate(draft.as_mut(), on_token);
                draft.failed().map_or(answer, Err)
            }
            Proposes::Nothing => Ok((runner.answer(prompt, tokens_max, request, on_token)?, None)),
        }
    }
}
