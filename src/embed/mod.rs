//! Owns the API for other programs: a loaded model. The Python package and the C library are built on it.
//!
//! A [`Model`] runs in its own thread, and its tokenizer in another one. Each does jobs in the order of the calls. So threads can
//! share a model, a caller can give up waiting, and a panic ends only the thread of the model: later jobs get a fault.
//!
//! A step that is refused changes no sequence, and no step writes a page that two sequences hold.

mod desk;
mod steps;
mod stream;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::cache::{Cache, Places};
use crate::cli::{places, session};
use crate::error::Fault;
use crate::manifest::{Manifest, ROWS_MAX};
use crate::pipeline::{AskedSizes, Checking, Given, Ready, Runner, Serving, Tokens, Workspace};
use crate::report::Report;
use crate::target::{Target, TargetKind};
use crate::text::Style;
use crate::tokenizer::{Chat, Message, check_ids};

use desk::{Desk, Jobs};
use steps::Steps;

pub use desk::Waiting;
pub use steps::{SequenceKey, StepPart, Wants};
pub use stream::{Asked, Piece, Stop, Stream};

/// Contexts that the cache of steps on a device holds by default. A server takes all free memory instead, but here the rest of
/// the program may need it.
const DEVICE_CONTEXTS: u32 = 4;

/// Makes the command of a tokenizer process; the folder of a checkpoint is added as its last argument.
pub type TokensProgram = Arc<dyn Fn() -> Command + Send + Sync>;

/// How a model is loaded. The sizes are those of steps; with `None`, they are those that the manifest or the export gives `serve`.
#[derive(Clone, Default)]
pub struct Options {
    /// Name of a target; `None`: the first one.
    pub target: Option<String>,
    /// Folder of the cache; `None`: as for the command line.
    pub cache: Option<PathBuf>,
    /// Sequences that are open at a time; 1 to 256.
    pub sequences_max: Option<u32>,
    /// Rows of a step beyond one for each sequence; 1 to 256.
    pub chunk_max: Option<u32>,
    /// Tokens that the cache holds for all sequences together.
    pub cache_tokens: Option<u32>,
    /// The program that runs the tokenizer, apart from this process because its files are not trusted; `None`: token ids only.
    pub tokens: Option<TokensProgram>,
    /// Prints to stderr what is built.
    pub verbose: bool,
    /// Runs kernels whose numbers were not compared on a device of this kind. Otherwise they are compared before the first token, once, and one
    /// that computes something else is refused.
    pub unchecked: bool,
}

/// Facts of a loaded model, which do not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Name of the manifest.
    pub name: String,
    pub target: String,
    /// Logits of a position; all token ids are below it.
    pub vocab: u32,
    /// Ids that end a text.
    pub eos: Vec<u32>,
    /// The id that begins a text.
    pub bos: Option<u32>,
    /// Positions run from 0 to `context_max - 1`.
    pub context_max: u32,
    /// Tokens of one step, at most.
    pub rows_max: u32,
    /// Sequences that are open at a time, at most.
    pub sequences_max: u32,
    /// Whether text can be turned into ids.
    pub has_tokenizer: bool,
    /// Whether kernels run that may not have been checked: [`Options::unchecked`], or an export that was made so.
    pub unchecked: bool,
}

/// A loaded model. When it is dropped, jobs that were given still finish; then everything is freed.
pub struct Model {
    facts: Facts,
    on: Desk<ModelJob>,
    /// `None`: token ids only.
    text: Option<Arc<Desk<TextJob>>>,
    /// Numbers of the texts that a tokenizer works on at the same time.
    texts: AtomicU64,
}

/// A job of the thread of a model.
type ModelJob = Box<dyn for<'a> FnOnce(&mut Loaded<'a>) + Send>;
/// A job of the thread of a tokenizer.
type TextJob = Box<dyn FnOnce(&mut Words) + Send>;

/// The state of the thread of a model. Each part is loaded when it is first needed.
struct Loaded<'a> {
    ready: &'a Ready,
    serving: Serving,
    rows_max: u32,
    runner: Option<Runner<'a>>,
    steps: Option<Steps>,
}

impl<'a> Loaded<'a> {
    /// The runner, which decodes one text.
    fn runner(&mut self) -> Result<&mut Runner<'a>, Fault> {
        match &mut self.runner {
            Some(runner) => Ok(runner),
            none => Ok(none.insert(self.ready.runner()?)),
        }
    }

    /// Works with the sequences; they are gone if a step fails.
    fn with_steps<R>(&mut self, work: impl FnOnce(&mut Steps) -> Result<R, Fault>) -> Result<R, Fault> {
        let steps = match &mut self.steps {
            Some(steps) => steps,
            none => {
                let stepper = self.ready.batched(&self.serving)?.stepper()?;
                // A kernel with `rows_max` rows may not fit, so the engine may have fewer.
                let rows_max = self.rows_max.min(stepper.bounds().shape.rows);
                none.insert(Steps::new(stepper, rows_max, self.serving.running_max))
            }
        };
        let answer = work(steps);
        if steps.is_lost() {
            self.steps = None;
        }
        answer
    }
}

/// The state of the thread of a tokenizer.
struct Words {
    manifest: Manifest,
    program: TokensProgram,
    vocab: u32,
    /// `None` until it is first needed.
    tokens: Option<Tokens>,
}

impl Words {
    /// The tokenizer. One whose process has ended is started again.
    fn tokens(&mut self) -> Result<&mut Tokens, Fault> {
        match &mut self.tokens {
            Some(tokens) if !tokens.is_lost() => {}
            slot => {
                let program = self.program.clone();
                let mut tokens = session::tokenizer_of(move || program(), &self.manifest).map_err(in_a_program)?;
                tokens.check_vocab(self.vocab)?;
                *slot = Some(tokens);
            }
        }
        self.tokens.as_mut().ok_or_else(|| Fault::internal("a tokenizer was loaded and is gone"))
    }
}

/// Replaces a remedy that names an option of the command line, which a program does not have.
fn in_a_program(fault: Fault) -> Fault {
    match &fault.remedy {
        Some(remedy) if remedy.contains("`--ids`") => fault.with_remedy("pass token ids"),
        _ => fault,
    }
}

impl Model {
    /// Builds the model of a manifest up to the proof, or takes the folder of an export. Weights and devices are loaded when they are
    /// first needed.
    ///
    /// # Errors
    /// Those of the command `build` before it compiles anything; files of an export that were changed; sizes out of range.
    pub fn load(place: &Path, options: Options) -> Result<Model, Fault> {
        let Options { target, cache, sequences_max, chunk_max, cache_tokens, tokens, verbose, unchecked } = options;
        let mut places = Places::from_environment(&places::cache_root());
        places.root = cache.unwrap_or(places.root);
        let given = session::read_given(place, target.as_deref(), &places.root, Style::Plain)?;
        let target = session::choose_target(&given.manifest, target.as_deref())?;
        let serving = serving(&given.manifest, &target, sequences_max, chunk_max, cache_tokens)?;
        let has_tokenizer = tokens.is_some() && session::has_tokenizer(&given)?;
        let report = move || if verbose { Report::to_stderr().without_cached() } else { Report::quiet() };
        let Given { manifest, exported } = given;
        let places = places.with_remote_of(manifest.remote.as_ref());
        let open = move || {
            let cache = Cache::open_places(&places, |_| {})?;
            Ok(Workspace { cache, report: report(), trials: places::trials_file() })
        };
        let ready = match exported {
            Some(exported) => Ready::exported(report(), exported, &target)?.checks_in(Box::new(open)),
            None => Ready::built(open()?, &manifest, &target)?,
        };
        let ready = ready.checking(Checking::of(unchecked));
        let rows_max = ready.rows_max(&serving)?;
        let facts = Facts {
            name: manifest.name.clone(),
            target: target.name.clone(),
            vocab: ready.vocab,
            eos: ready.eos.clone(),
            bos: ready.bos,
            context_max: manifest.decode.context_max,
            rows_max,
            sequences_max: serving.running_max,
            has_tokenizer,
            unchecked: ready.is_unchecked(),
        };
        let vocab = facts.vocab;
        let on = Desk::start("monobloc-model", move |jobs: Jobs<ModelJob>| {
            let mut loaded = Loaded { ready: &ready, serving, rows_max, runner: None, steps: None };
            jobs.run(|job| job(&mut loaded));
        })?;
        let text = tokens.filter(|_| has_tokenizer).map(|program| {
            Desk::start("monobloc-tokenizer", move |jobs: Jobs<TextJob>| {
                let mut words = Words { manifest, program, vocab, tokens: None };
                jobs.run(|job| job(&mut words));
            })
        });
        let text = text.transpose()?.map(Arc::new);
        Ok(Model { facts, on, text, texts: AtomicU64::new(0) })
    }

    /// As [`Model::load`], in its own thread, so that the caller can do something else meanwhile.
    ///
    /// # Errors
    /// A limit on threads.
    pub fn load_apart(place: PathBuf, options: Options) -> Result<Waiting<Model>, Fault> {
        let (answer, waiting) = Waiting::new();
        let desk: Desk<()> = Desk::start("monobloc-load", move |_| answer.give(Model::load(&place, options)))?;
        drop(desk);
        Ok(waiting)
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Ids of a text; `special`: with the tokens that the tokenizer puts around a text.
    pub fn encode(&self, text: &str, special: bool) -> Waiting<Vec<u32>> {
        let text = text.to_string();
        self.ask_text(move |words| words.tokens()?.encode(&text, special))
    }

    /// Text of ids; `skip_special`: without special tokens.
    pub fn decode(&self, ids: Vec<u32>, skip_special: bool) -> Waiting<String> {
        let vocab = self.facts.vocab;
        self.ask_text(move |words| {
            check_ids(&ids, vocab)?;
            Ok(words.tokens()?.decode(vec![ids], skip_special)?.concat())
        })
    }

    /// Ids of a conversation in the chat template of the checkpoint; `reply`: with the tokens that begin the model's answer.
    pub fn encode_chat(&self, messages: Vec<Message>, reply: bool) -> Waiting<Vec<u32>> {
        self.ask_text(move |words| Ok(words.tokens()?.encode_chat(Chat { reply, ..Chat::new(messages) })?.ids))
    }

    /// Logits after each of `ids`, which begin at position 0: `[ids, vocab]`, row by row. No sequence is changed.
    pub fn logits(&self, ids: Vec<u32>) -> Waiting<Vec<f32>> {
        let vocab = self.facts.vocab;
        self.ask(move |loaded| {
            check_ids(&ids, vocab)?;
            let mut all = Vec::with_capacity(ids.len() * vocab as usize);
            loaded.runner()?.logits(&ids, &mut |_, row| all.extend_from_slice(row))?;
            Ok(all)
        })
    }

    /// Opens a sequence without tokens, for [`Model::step`]; `key` is [`SequenceKey::unique`]. Refused if [`Facts::sequences_max`]
    /// sequences are open.
    pub fn open(&self, key: SequenceKey) -> Waiting<()> {
        self.ask(move |loaded| loaded.with_steps(|steps| steps.open(key)))
    }

    /// Opens the sequence `key` with the tokens of another one. They share full pages of the cache; tokens after the last full page
    /// are computed again.
    pub fn fork(&self, sequence: SequenceKey, key: SequenceKey) -> Waiting<()> {
        self.ask(move |loaded| loaded.with_steps(|steps| steps.fork(sequence, key)))
    }

    /// Forgets the tokens of a sequence from `length` on.
    pub fn truncate(&self, sequence: SequenceKey, length: usize) -> Waiting<()> {
        self.ask(move |loaded| loaded.with_steps(|steps| steps.truncate(sequence, length)))
    }

    /// Tokens that a sequence has.
    pub fn length(&self, sequence: SequenceKey) -> Waiting<u32> {
        self.ask(move |loaded| loaded.with_steps(|steps| steps.length(sequence)))
    }

    /// Ends a sequence and frees its pages. One that is not open is no fault.
    pub fn free(&self, sequence: SequenceKey) -> Waiting<()> {
        // Without loading steps: then no sequence is open.
        self.ask(move |loaded| loaded.steps.as_mut().map_or(Ok(()), |steps| steps.free(sequence)))
    }

    /// Runs one step with the next tokens of several sequences. Returns the logits that its parts want, `[wanted, vocab]` in their order.
    ///
    /// The logits of a part do not depend on the other parts of its step: in no bit on the target `cpu` and with `batch_invariant`,
    /// otherwise up to rounding. No token is chosen. All parts together have at most [`Facts::rows_max`] tokens, and a sequence has
    /// one part. A step that is refused changes no sequence.
    pub fn step(&self, parts: Vec<StepPart>) -> Waiting<Vec<f32>> {
        self.ask(move |loaded| loaded.with_steps(|steps| steps.step(&parts)))
    }

    /// Appends tokens to a sequence in as many steps as needed. Returns the logits after the last one, `[vocab]`.
    pub fn prefill(&self, sequence: SequenceKey, tokens: Vec<u32>) -> Waiting<Vec<f32>> {
        self.ask(move |loaded| loaded.with_steps(|steps| steps.prefill(sequence, &tokens)))
    }

    /// Gives a job to the thread of the model.
    fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Loaded<'_>) -> Result<R, Fault> + Send + 'static,
    ) -> Waiting<R> {
        let (answer, waiting) = Waiting::new();
        self.on.give(Box::new(move |loaded| answer.give(job(loaded))));
        waiting
    }

    /// Gives a job to the thread of the tokenizer.
    fn ask_text<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Words) -> Result<R, Fault> + Send + 'static,
    ) -> Waiting<R> {
        let (answer, waiting) = Waiting::new();
        match &self.text {
            Some(text) => text.give(Box::new(move |words| answer.give(job(words)))),
            None => answer
                .give(Err(Fault::input("this model has no tokenizer, or was loaded without one")
                    .with_remedy("pass token ids"))),
        }
        waiting
    }
}

/// The sizes of steps: those that the manifest gives `serve`, replaced by those of the options.
fn serving(
    manifest: &Manifest,
    target: &Target,
    sequences_max: Option<u32>,
    chunk_max: Option<u32>,
    cache_tokens: Option<u32>,
) -> Result<Serving, Fault> {
    for (name, found) in [("sequences_max", sequences_max), ("chunk_max", chunk_max)] {
        if let Some(found) = found.filter(|found| !(1..=ROWS_MAX).contains(found)) {
            return Err(Fault::input(format!("`{name}` is {found}, expected 1 to {ROWS_MAX}")));
        }
    }
    if cache_tokens == Some(0) {
        return Err(Fault::input("`cache_tokens` is 0, expected a token or more"));
    }
    // A caller may have prompt tokens together with other rows in a step, on a device, too. So the sizes are those of kind `cpu`.
    let sizes = Serving::of_manifest(manifest, TargetKind::Cpu, 1);
    let contexts = || manifest.decode.context_max.saturating_mul(DEVICE_CONTEXTS);
    let asked = AskedSizes {
        running_max: sequences_max.map(|_| "sequences_max").or(sizes.asked.running_max),
        chunk_rows: chunk_max.map(|_| "chunk_max").or(sizes.asked.chunk_rows),
    };
    Ok(Serving {
        asked,
        running_max: sequences_max.unwrap_or(sizes.running_max),
        chunk_rows: chunk_max.unwrap_or(sizes.chunk_rows),
        steps_max: 1,
        proposed: 0,
        cache_tokens: cache_tokens.or_else(|| (target.kind != TargetKind::Cpu).then(contexts)),
    })
}
