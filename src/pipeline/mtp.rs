//! Owns the draft of a checkpoint's own layer that predicts further tokens (MTP): how it is made, and what it proposes.
//!
//! The layer reads a token and what the final norm of the model left of the token before it, and predicts the token after. So row `i` of its cache
//! has token `i + 1` of the text and what the model left at position `i`. The token that it chooses, with what its own norm left, is its next
//! input. Rows of such tokens are written again when the text has gone on.
//!
//! On a device one launch reads the tokens that the text has got and proposes all that follow: the kernel goes on with the tokens that it chooses
//! and with what its own steps leave, and reads what the model left where the batch kernel left it. Where the host chooses, each proposed token is
//! a launch, because the host norms what is given.
//!
//! Each proposed token is the one that the request chooses from the draft's logits: with the same seed at the same position the choice has the same
//! noise as that of the model, so it is more often the same than the most probable token is.

use std::sync::Arc;

use crate::check::{HostNorm, check_left};
use crate::codegen::abi::Queues;
use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::session::{GivenWith, LeftNorm, Session};
use crate::digest::Digest;
use crate::engine::{After, Drafts, TextDraft};
use crate::error::Fault;
use crate::interp::{Interp, Options, Pack};
use crate::model::config::{Imported, graph_text, import_draft};
use crate::model::graph::NormKind;
use crate::model::rounding::round_matrices;
use crate::reference::norm_values;
use crate::sample::{Request, Sampler, TokenCounts};
use crate::speculate::{Draft, Left};
use crate::validate::Validated;

use super::chain::{Chain, Host};
use super::checks::Checking;
use super::evaluate::ensure_checked;
use super::execute::upload_pack;
use super::invariant;
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

    /// As kernels take it. `None`: they do not have it.
    fn on_device(&self, hidden: usize) -> Option<LeftNorm> {
        let FinalNorm { kind, eps, weight_offset, weight, bias } = self;
        if *kind != NormKind::Rms || bias.is_some() {
            return None;
        }
        let gains = |weight: &Vec<f32>| weight.iter().map(|value| value + weight_offset).collect();
        Some(LeftNorm { weight: weight.as_ref().map_or_else(|| vec![1.0; hidden], gains), eps: *eps })
    }
}

/// A proven and checked draft with its weights, for any number of texts.
#[derive(Clone)]
pub struct Mtp {
    validated: Arc<Validated>,
    place: Place,
    /// Of the model, and of the draft.
    norms: [FinalNorm; 2],
    hidden: usize,
}

/// Where a draft runs.
#[derive(Clone)]
enum Place {
    Cpu(Pack),
    /// The kernel with the weights. A launch has at most `steps_max` steps.
    Device {
        device: Device,
        cubin: Arc<[u8]>,
        pack: Arc<DeviceBuffer>,
        steps_max: u32,
    },
}

impl Prepared {
    /// Imports, lowers, proves, packs and checks the draft of the model.
    ///
    /// # Errors
    /// A target that no draft runs on; a checkpoint without a draft; a draft that computes something else.
    pub fn mtp(&self, workspace: &Workspace) -> Result<Mtp, Fault> {
        // Of several devices the first one runs the draft alone, as it runs that of a model on one.
        let target = &self.target.clone().one_of();
        if invariant::is_asked(&self.manifest, target) {
            let message =
                format!("`{OPTION}` reads what a batch kernel leaves, and with `batch_invariant` no batch kernel runs");
            let remedy = "leave out `decode.batch_invariant`, or propose with `--lookup`";
            return Err(Fault::input(message).with_remedy(remedy));
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
        let mtp = Mtp::new(chain.validated()?.clone(), Place::of(&chain)?, [&self.imported, &draft]);
        if self.checking == Checking::Required {
            mtp.check_left()?;
        }
        Ok(mtp)
    }
}

impl Place {
    /// Uploads the weights, if the draft has a kernel.
    fn of(chain: &Chain<'_>) -> Result<Place, Fault> {
        let BuildContext { workspace, manifest, target, .. } = chain.context;
        let (Some(cubin), Some(found)) = (chain.cubin()?, chain.host.device(target)?) else {
            return Ok(Place::Cpu(chain.pack()?));
        };
        let (validated, device) = (chain.validated()?, Device::open(found.ordinal)?);
        // Queues that differ from those of the first proof are refused here.
        workspace.queues(validated)?;
        let pack = upload_pack(&device, validated, &chain.pack()?)?;
        let steps_max = manifest.decode.steps_per_launch;
        Ok(Place::Device { device, cubin: cubin.bytes.as_slice().into(), pack, steps_max })
    }
}

impl Mtp {
    fn new(validated: Arc<Validated>, place: Place, [model, draft]: [&Imported; 2]) -> Mtp {
        let (norms, hidden) = ([FinalNorm::of(model), FinalNorm::of(draft)], draft.graph.hidden as usize);
        Mtp { validated, place, norms, hidden }
    }

    /// A draft of a model by its compiled kernel, over weights that are on the device. A launch has at most `steps_max` steps.
    pub fn on_device(
        validated: Arc<Validated>,
        device: &Device,
        cubin: &[u8],
        pack: Arc<DeviceBuffer>,
        steps_max: u32,
        of: [&Imported; 2],
    ) -> Mtp {
        Mtp::new(validated, Place::Device { device: device.clone(), cubin: cubin.into(), pack, steps_max }, of)
    }

    /// Compares launches that go on by themselves with those of one step, on a device where there are such launches.
    ///
    /// # Errors
    /// Other logits; what the device refuses.
    pub fn check_left(&self) -> Result<(), Fault> {
        let Place::Device { device, steps_max, .. } = &self.place else { return Ok(()) };
        let Computes::Device { mut session, .. } = self.rows()?.computes else { return Ok(()) };
        if !session.goes_on() {
            return Ok(());
        }
        let precision = self.validated.schedule().program.precision;
        let norms: [HostNorm<'_>; 2] = [&|row| self.norms[0].apply(row), &|row| self.norms[1].apply(row)];
        check_left(device, &mut session, *steps_max, precision, self.hidden as u32, norms)?;
        Ok(())
    }

    /// The draft of one text: a prompt of `prompt` tokens, after which `request` chooses. Starts worker threads on a CPU.
    ///
    /// # Errors
    /// A cache that is larger than the memory; what the device refuses.
    pub fn of_text(&self, prompt: usize, request: &Request) -> Result<MtpDraft, Fault> {
        let mut rows = self.rows()?;
        rows.choose_by(request.beyond_kernels().is_empty().then(|| request.sampler()));
        Ok(MtpDraft { rows, prompt, request: request.clone(), counts: None, failed: None })
    }

    /// An empty cache of the draft, and what computes its rows.
    ///
    /// # Errors
    /// As [`Mtp::of_text`].
    fn rows(&self) -> Result<DraftRows, Fault> {
        let Mtp { validated, place, norms, hidden } = self;
        let context_max = validated.schedule().program.context_max as usize;
        let computes = match place {
            Place::Cpu(pack) => {
                let interp = Interp::new(validated.schedule(), pack.clone(), Options::fast())?;
                Computes::Cpu(Box::new(interp))
            }
            Place::Device { device, cubin, pack, steps_max } => {
                let (queues, pack) = (Queues::of(validated), Arc::clone(pack));
                let mut session = Session::load_sharing(device, &queues, cubin, Trace::Off, *steps_max, pack)?;
                let [of_model, own] = [&norms[0], &norms[1]].map(|norm| norm.on_device(*hidden));
                if let Some((of_model, own)) = of_model.zip(own) {
                    session.set_norms(device, &[of_model, own])?;
                }
                Computes::Device { session: Box::new(session), steps_max: *steps_max, chooses: false }
            }
        };
        let norms = norms.clone();
        Ok(DraftRows { computes, context_max, norms, first: None, seen: vec![], in_place: None, filled: 0 })
    }
}

/// What computes the rows of a draft.
enum Computes {
    Cpu(Box<Interp>),
    Device {
        session: Box<Session>,
        steps_max: u32,
        /// The kernel chooses the token after its last step.
        chooses: bool,
    },
}

impl Computes {
    /// Lets a kernel choose, or the host. With top-k or top-p the host chooses: a kernel takes noise there from positions of its cache.
    fn choose_by(&mut self, sampler: Option<&Sampler>) {
        if let Computes::Device { session, chooses, .. } = self {
            let sampler = sampler.filter(|sampler| !sampler.is_filtered());
            sampler.iter().for_each(|sampler| session.sample(**sampler));
            *chooses = sampler.is_some();
        }
    }

    /// Decodes tokens from `position` on, each with what it is given: what is left after the last one. The text is `ahead` positions ahead.
    fn read(&mut self, position: usize, tokens: &[u32], given: &[Arc<[f32]>], ahead: usize) -> Result<After, Fault> {
        match self {
            Computes::Cpu(interp) => {
                interp.seek(position as u32)?;
                let mut logits = None;
                for (at, (token, given)) in (1..).zip(tokens.iter().zip(given)) {
                    logits = interp.step_given(*token, Arc::clone(given), at == tokens.len())?;
                }
                logits.map(After::Logits).ok_or_else(|| Fault::internal("a draft read no token"))
            }
            Computes::Device { session, steps_max, chooses } => {
                let (mut at, mut steps, end) = (position as u32, 0, (position + tokens.len()) as u32);
                let most = (*steps_max).max(1) as usize;
                for (tokens, given) in tokens.chunks(most).zip(given.chunks(most)) {
                    steps = tokens.len() as u32;
                    session.give(at, tokens, given, ahead as u32)?;
                    session.run(at, steps, !*chooses && at + steps == end)?;
                    at += steps;
                }
                Ok(match chooses {
                    true => After::Token(session.token(end)?),
                    false => After::Logits(session.logits_of_step(steps.saturating_sub(1))?),
                })
            }
        }
    }

    /// Whether a launch reads rows that a kernel left.
    fn reads(&self, left: &Left) -> bool {
        match self {
            Computes::Cpu(_) => false,
            Computes::Device { session, steps_max, chooses } => {
                *chooses && left.count <= *steps_max && session.reads_left(left)
            }
        }
    }

    /// As [`Computes::read`], and goes on with the tokens that the kernel chooses: at most `most` of them. `None`: the host has to choose.
    fn go_on(
        &mut self,
        position: usize,
        tokens: &[u32],
        given: &Given,
        ahead: usize,
        most: usize,
    ) -> Result<Option<Vec<u32>>, Fault> {
        let Computes::Device { session, steps_max, chooses: true } = self else { return Ok(None) };
        if !session.goes_on() {
            return Ok(None);
        }
        let (steps_max, ahead) = ((*steps_max).max(1) as usize, ahead as u32);
        // Launches that have no more steps than they may, the last of which goes on.
        let before = tokens.len().saturating_sub(1) / steps_max * steps_max;
        let mut at = position as u32;
        let (known, with) = match given {
            Given::Rows(rows) => {
                for (tokens, rows) in tokens[..before].chunks(steps_max).zip(rows.chunks(steps_max)) {
                    session.propose(at, tokens, &GivenWith::Rows(rows, ahead), 0, false)?;
                    at += tokens.len() as u32;
                }
                (&tokens[before..], GivenWith::Rows(&rows[before..], ahead))
            }
            Given::Left(left) => (tokens, GivenWith::Left(*left, ahead)),
        };
        let further = most.saturating_sub(1).min(steps_max.saturating_sub(known.len())) as u32;
        Ok(Some(session.propose(at, known, &with, further, false)?))
    }

    /// What the last layer left of the last row.
    fn left(&self) -> Result<Option<Vec<f32>>, Fault> {
        match self {
            Computes::Cpu(interp) => Ok(interp.left(0)),
            Computes::Device { session, .. } => Ok(session.left()?),
        }
    }
}

/// What a draft is given with the tokens that it reads.
enum Given {
    /// By the host, with the norm.
    Rows(Vec<Arc<[f32]>>),
    /// By a batch kernel, without it.
    Left(Left),
}

impl Given {
    fn count(&self) -> usize {
        match self {
            Given::Rows(rows) => rows.len(),
            Given::Left(left) => left.count as usize,
        }
    }
}

/// The cache of a draft for one text.
struct DraftRows {
    computes: Computes,
    context_max: usize,
    norms: [FinalNorm; 2],
    /// The position of the text that row 0 of its cache is of: the first one that it was shown. Rotary angles depend on distances alone.
    first: Option<usize>,
    /// What the model left, from row `filled` of the cache on.
    seen: Vec<Arc<[f32]>>,
    /// The same, where a kernel left it; then `seen` has nothing.
    in_place: Option<Left>,
    /// Rows of the cache that have tokens of the text.
    filled: usize,
}

impl TextDraft for DraftRows {
    fn reset(&mut self) {
        (self.first, self.filled, self.in_place) = (None, 0, None);
        self.seen.clear();
    }

    fn go_back(&mut self, position: usize) {
        let known = position.saturating_sub(self.first.unwrap_or(position));
        if known == 0 {
            self.reset();
        }
        let rows = known.saturating_sub(self.filled);
        self.seen.truncate(rows);
        self.in_place = self.in_place.map(|left| Left { count: left.count.min(rows as u32), ..left });
        self.filled = self.filled.min(known);
    }

    fn see(&mut self, first: usize, rows: &[Vec<f32>]) {
        let again = self.begin_at(first);
        let norm = &self.norms[0];
        self.seen.extend(rows.iter().skip(again).map(|row| norm.apply(row)));
    }

    fn see_in_place(&mut self, first: usize, left: Left) -> bool {
        if !self.seen.is_empty() || !self.computes.reads(&left) {
            return false;
        }
        let again = (self.begin_at(first) as u32).min(left.count);
        self.in_place = Some(Left { first: left.first + again, count: left.count - again, ..left });
        true
    }

    fn choose_by(&mut self, sampler: Option<&Sampler>) {
        self.computes.choose_by(sampler);
    }

    fn chosen(
        &mut self,
        sequence: &[u32],
        most: usize,
        choose: &mut dyn FnMut(After) -> Option<u32>,
    ) -> Result<Vec<u32>, Fault> {
        // The token after the last position that was shown has to be known.
        let Some(first) = self.first.filter(|_| self.known().is_some_and(|known| known + 1 == sequence.len())) else {
            return Ok(vec![]);
        };
        let given = match self.in_place.take() {
            Some(left) => Given::Left(left),
            None => Given::Rows(std::mem::take(&mut self.seen)),
        };
        let count = given.count();
        if count == 0 {
            return Ok(vec![]);
        }
        let most = most.min(self.context_max.saturating_sub(self.filled + count) + 1).max(1);
        let (position, ahead) = (self.filled, first + 1);
        let known = &sequence[first + position + 1..];
        self.filled += count;
        if let Some(tokens) = self.computes.go_on(position, known, &given, ahead, most)? {
            return Ok(tokens.into_iter().map_while(|token| choose(After::Token(token))).collect());
        }
        let Given::Rows(rows) = given else { return Ok(vec![]) };
        let (mut tokens, mut after) = (vec![], Some(self.computes.read(position, known, &rows, ahead)?));
        while let Some(token) = after.take().and_then(&mut *choose) {
            tokens.push(token);
            if tokens.len() < most {
                let Some(left) = self.computes.left()? else { break };
                let given = self.norms[1].apply(&left);
                after = Some(self.computes.read(self.filled + tokens.len() - 1, &[token], &[given], ahead)?);
            }
        }
        Ok(tokens)
    }
}

impl DraftRows {
    /// The first position after those that it was shown.
    fn known(&self) -> Option<usize> {
        let seen = self.in_place.map_or(self.seen.len(), |left| left.count as usize);
        Some(self.first? + self.filled + seen)
    }

    /// Prepares for rows from position `first` on. It forgets what lies before a gap. How many of the rows it was shown before.
    fn begin_at(&mut self, first: usize) -> usize {
        // Of rows that it was shown in place and did not read, nothing is left.
        if self.in_place.is_some() || self.known().is_some_and(|known| first > known) {
            self.reset();
        }
        self.first.get_or_insert(first);
        self.known().unwrap_or(first).saturating_sub(first)
    }
}

impl Drafts for Mtp {
    fn begin(&self) -> Result<Box<dyn TextDraft>, Fault> {
        Ok(Box::new(self.rows()?))
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
        let mut choose = |after: After| {
            let token = after.token(|logits| Some(request.choose(logits, &counts, None).ok()?.token))?;
            counts.push(token);
            Some(token)
        };
        self.rows.chosen(sequence, most, &mut choose).unwrap_or_else(|fault| {
            self.failed = Some(fault);
            vec![]
        })
    }

    fn sees(&self) -> bool {
        true
    }

    fn see(&mut self, first: usize, rows: Vec<Vec<f32>>) {
        self.rows.see(first, &rows);
    }

    fn see_in_place(&mut self, first: usize, left: Left) -> bool {
        self.rows.see_in_place(first, left)
    }
}
