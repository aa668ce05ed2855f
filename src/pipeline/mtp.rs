//! Owns the draft of a checkpoint's own layer that predicts further tokens (MTP): how it is made, and what it proposes.
//!
//! The layer reads a token and what the final norm of the model left of the token before it, and predicts the token after. So row `i` of its cache
//! has token `i + 1` of the text and what the model left at position `i`. The token that it chooses, with what its own norm left, is its next
//! input. Rows of such tokens are written again when the text has gone on.
//!
//! Each proposed token is the one that the request chooses from the draft's logits: with the same seed at the same position the choice has the same
//! noise as that of the model, so it is more often the same than the most probable token is.

use std::sync::Arc;

use crate::digest::Digest;
use crate::error::Fault;
use crate::interp::{Interp, InterpError, Options, Pack};
use crate::ir::schedule::Schedule;
use crate::model::config::{Imported, graph_text, import_draft};
use crate::model::graph::NormKind;
use crate::model::rounding::round_matrices;
use crate::reference::norm_values;
use crate::sample::{Request, TokenCounts};
use crate::speculate::Draft;
use crate::target::TargetKind;
use crate::validate::Validated;

use super::chain::{Chain, Host};
use super::checks::Checking;
use super::evaluate::ensure_checked;
use super::stages::{BuildContext, checkpoint_folder};
use super::{Prepared, Workspace};

/// What a user asks for.
pub const OPTION: &str = "--draft mtp";

/// The final norm of a model or of its draft.
#[derive(Debug, Clone)]
struct FinalNorm {
    kind: NormKind,
    eps: f32,
    weight_offset: f32,
    weight: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

impl FinalNorm {
    fn of(imported: &Imported) -> FinalNorm {
        let norm = &imported.graph.final_norm;
        let values = |id| imported.weights.vector_f32(id);
        let (weight, bias) = (norm.weight.map(values), norm.bias.map(values));
        FinalNorm { kind: norm.kind, eps: norm.eps, weight_offset: norm.weight_offset, weight, bias }
    }

    fn apply(&self, x: &[f32]) -> Arc<[f32]> {
        let FinalNorm { kind, eps, weight_offset, weight, bias } = self;
        let x: Vec<f64> = x.iter().map(|&value| value.into()).collect();
        let normed = norm_values(*kind, *eps, *weight_offset, weight.as_deref(), bias.as_deref(), &x);
        normed.into_iter().map(|value| value as f32).collect()
    }
}

/// A proven and checked draft with its weights, for any number of texts.
#[derive(Clone)]
pub struct Mtp {
    validated: Arc<Validated>,
    pack: Pack,
    /// Of the model, and of the draft.
    norms: [FinalNorm; 2],
}

impl Prepared {
    /// Imports, lowers, proves, packs and checks the draft of the model.
    ///
    /// # Errors
    /// A target that no draft runs on; a checkpoint without a draft; a draft that computes something else.
    pub fn mtp(&self, workspace: &Workspace) -> Result<Mtp, Fault> {
        let target = &self.target;
        if target.kind != TargetKind::Cpu {
            let message = format!(
                "`{OPTION}` needs a target of kind `cpu`, found `{}`: no kernel of a device is a draft",
                target.name
            );
            return Err(Fault::input(message).with_remedy("take a target of kind `cpu`, or propose with `--lookup`"));
        }
        let Some(folder) = checkpoint_folder(workspace, &self.manifest)? else {
            let message = format!("`{OPTION}` needs a checkpoint, found a model with synthetic weights");
            return Err(Fault::input(message).with_remedy("take a checkpoint, or propose with `--lookup`"));
        };
        let mut draft = import_draft(&folder)?;
        round_matrices(&mut draft.graph, &mut draft.weights, &self.manifest.formats)
            .map_err(|error| Fault::input(error.to_string()))?;
        let graph = Digest::of(graph_text(&draft.graph).as_bytes());
        let context = BuildContext::of_draft(workspace, &self.manifest, target, &draft, graph);
        let host = Host::new(workspace);
        let chain = Chain::chosen(context, &host)?;
        if self.checking == Checking::Required {
            ensure_checked(&chain)?;
        }
        let norms = [FinalNorm::of(&self.imported), FinalNorm::of(&draft)];
        Ok(Mtp { validated: chain.validated()?.clone(), pack: chain.pack()?, norms })
    }
}

impl Mtp {
    /// The draft of one text: a prompt of `prompt` tokens, after which `request` chooses. Starts worker threads.
    ///
    /// # Errors
    /// A cache that is larger than this machine's memory.
    pub fn of_text(&self, prompt: usize, request: &Request) -> Result<MtpDraft, Fault> {
        let (request, rows) = (request.clone(), self.rows()?);
        Ok(MtpDraft { rows, prompt, request, counts: None, failed: None })
    }

    /// An empty cache of the draft, and what computes its rows.
    ///
    /// # Errors
    /// As [`Mtp::of_text`].
    pub(super) fn rows(&self) -> Result<DraftRows, Fault> {
        let schedule: &Schedule = self.validated.schedule();
        let interp = Interp::new(schedule, self.pack.clone(), Options::fast())?;
        Ok(DraftRows { interp, norms: self.norms.clone(), first: None, seen: vec![], filled: 0 })
    }
}

/// The cache of a draft for one text.
pub(super) struct DraftRows {
    interp: Interp,
    norms: [FinalNorm; 2],
    /// The position of the text that row 0 of its cache is of: the first one that it was shown. Rotary angles depend on distances alone.
    first: Option<usize>,
    /// What the model left, from row `filled` of the cache on.
    seen: Vec<Arc<[f32]>>,
    /// Rows of the cache that have tokens of the text.
    filled: usize,
}

impl DraftRows {
    /// Begins another text.
    pub fn reset(&mut self) {
        self.interp.reset();
        (self.first, self.filled) = (None, 0);
        self.seen.clear();
    }

    /// Forgets what it was shown of positions from `position` on: the text goes on differently there.
    pub fn go_back(&mut self, position: usize) {
        let known = position.saturating_sub(self.first.unwrap_or(position));
        if known == 0 {
            self.reset();
        }
        self.seen.truncate(known.saturating_sub(self.filled));
        self.filled = self.filled.min(known);
    }

    /// As [`Draft::see`], of rows that follow each other.
    pub fn see<'r>(&mut self, first: usize, rows: impl Iterator<Item = &'r [f32]>) {
        let base = *self.first.get_or_insert(first);
        let known = base + self.filled + self.seen.len();
        let norm = &self.norms[0];
        self.seen.extend(rows.skip(known.saturating_sub(first)).map(|row| norm.apply(row)));
    }

    /// At most `most` tokens after `sequence`, each as `choose` takes it from the draft's logits, which ends them with `None`. Of the sequence it
    /// reads the tokens after the positions that it was shown.
    pub fn chosen(
        &mut self,
        sequence: &[u32],
        most: usize,
        choose: &mut dyn FnMut(&[f32]) -> Option<u32>,
    ) -> Result<Vec<u32>, InterpError> {
        // The token after the last position that was shown has to be known.
        let Some(first) = self.first.filter(|first| first + self.filled + self.seen.len() + 1 == sequence.len()) else {
            return Ok(vec![]);
        };
        let room = (self.interp.context_max() as usize).saturating_sub(self.filled + self.seen.len());
        let (mut tokens, mut logits) = (vec![], None);
        self.interp.seek(self.filled as u32)?;
        let rows = std::mem::take(&mut self.seen);
        let last = rows.len().saturating_sub(1);
        for (at, given) in rows.into_iter().enumerate() {
            let token = sequence[first + self.filled + 1];
            logits = self.interp.step_given(token, given, at == last)?;
            self.filled += 1;
        }
        while let Some(token) = logits.take().and_then(|of_row: Vec<f32>| choose(&of_row)) {
            tokens.push(token);
            if tokens.len() < most.min(room + 1) {
                let Some(left) = self.interp.left(0) else { break };
                logits = self.interp.step_given(token, self.norms[1].apply(&left), true)?;
            }
        }
        Ok(tokens)
    }
}

/// The draft of one text.
pub struct MtpDraft {
    rows: DraftRows,
    /// Tokens of the prompt, and how those after it are chosen.
    prompt: usize,
    request: Request,
    /// Those of the sequence before, and its length.
    counts: Option<(TokenCounts, usize)>,
    failed: Option<Fault>,
}

impl MtpDraft {
    /// Why it stopped to propose.
    pub fn failed(&mut self) -> Option<Fault> {
        self.failed.take()
    }

    /// The counts of `sequence`, which has grown since the last call.
    fn counted(&mut self, sequence: &[u32]) -> TokenCounts {
        let prompt = self.prompt.min(sequence.len());
        let (counts, known) = self.counts.get_or_insert_with(|| (TokenCounts::new(&sequence[..prompt]), prompt));
        sequence[*known..].iter().for_each(|token| counts.push(*token));
        *known = sequence.len();
        counts.clone()
    }
}

impl Draft for MtpDraft {
    fn propose(&mut self, sequence: &[u32], most: usize) -> Vec<u32> {
        if self.failed.is_some() {
            return vec![];
        }
        let mut counts = self.counted(sequence);
        let request = &self.request;
        let mut choose = |logits: &[f32]| {
            let token = request.choose(logits, &counts, None).ok()?.token;
            counts.push(token);
            Some(token)
        };
        self.rows.chosen(sequence, most, &mut choose).unwrap_or_else(|error| {
            self.failed = Some(error.into());
            vec![]
        })
    }

    fn sees(&self) -> bool {
        true
    }

    fn see(&mut self, first: usize, rows: Vec<Vec<f32>>) {
        self.rows.see(first, rows.iter().map(Vec::as_slice));
    }
}
