//! Owns the rule that what runs was checked: every kernel of a set is compared on a device of its kind before it gives a token, once.
//!
//! A check is a stage with a key, as that of the decode kernel is (`evaluate`). All kernels for steps are compared with the same texts, whose
//! logits the interpreter computes once; then those of several rows with each other over long histories, kernels that read prompts with
//! the first one for several rows, and the sampler with the host. Positions are limited, kernels are not.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use crate::check::{
    BothLogits, CheckError, Checked, SharedTexts, TextSizes, check_alike, check_decode, check_ids, check_ragged,
    check_rows, check_shared, check_texts, chooses_experts, compared_choices, expect_texts, read_at_random,
    takes_from_device,
};
use crate::cuda::rows::RowLauncher;
use crate::cuda::session::Session;
use crate::defaults::rows::STEP_ROWS;
use crate::digest::Digest;
use crate::dtype::Precision;
use crate::error::{Fault, Tier};
use crate::interp::Pack;
use crate::ir::print::print;
use crate::report::Report;
use crate::rows::Shape;
use crate::target::Target;
use crate::validate::Validated;

use super::Workspace;
use super::chain::Chain;
use super::device_rows::Decoding;
use super::device_sampler::check_choices;
use super::device_steps::{By, StepsKernel};
use super::device_waves::check_prompts;
use super::execute::hardware_of;
use super::kernels::{Does, Kernel, KernelSet, LoadedSet};
use super::keys::{self, Hardware, KernelCheckKey, Keyed, TextsKey, WeightsId};
use super::stages::BuildContext;
use crate::cuda::driver::DeviceIdentity;

/// Whether kernels are compared before they give a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checking {
    /// A kernel that was not compared on a device of its kind is compared now, or refused.
    Required,
    /// `--unchecked`.
    Skipped,
}

impl Checking {
    pub fn of(unchecked: bool) -> Checking {
        if unchecked { Checking::Skipped } else { Checking::Required }
    }

    /// Tells that nothing is compared, also where a report is quiet.
    pub fn warn(self, report: &Report) {
        if self == Checking::Skipped {
            report
                .warning("`--unchecked`: no check of this model's kernels was asked for, so its numbers may be wrong");
        }
    }
}

/// Most steps of a launch of a check.
pub(super) const STEPS_MAX: u32 = 4;
/// Positions of a history beyond two pages and two KV splits, for comparisons of kernels with each other.
const BEYOND_PAGES: u32 = 20;
/// Rows that the sampler chooses for.
const SAMPLER_ROWS: u32 = 8;
/// Positions of the reference after which the user is told how long the rest takes.
const TIMED_POSITIONS: u64 = 4;

/// A model whose kernels are checked on one kind of device.
pub struct Checks<'a> {
    pub workspace: &'a Workspace,
    /// What the user calls the model on its target.
    pub subject: String,
    pub target: &'a Target,
    pub precision: Precision,
    pub hardware: Hardware,
    pub graph: Digest,
    pub weights: WeightsId,
    pub parameters: u64,
    /// What the interpreter executes for the expected logits: a schedule over the same weights.
    pub reference: Arc<Validated>,
    pub pack: &'a dyn Fn() -> Result<Pack, Fault>,
    /// Computes the expected logits: [`by_interpreter`].
    pub expect: Expect,
}

/// Reads texts on a schedule and its weights, and calls the function for each position.
pub type Expect = fn(&Validated, Pack, TextSizes, &dyn Fn()) -> Result<SharedTexts, Fault>;

/// Reads texts with the interpreter.
///
/// # Errors
/// What the interpreter refuses.
pub fn by_interpreter(
    validated: &Validated,
    pack: Pack,
    sizes: TextSizes,
    on_position: &dyn Fn(),
) -> Result<SharedTexts, Fault> {
    Ok(expect_texts(validated, pack, sizes, on_position)?)
}

/// One comparison, with a key of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Kernel(Does),
    /// Rows of several kernels have the bits that they have alone.
    Alike,
}

impl Part {
    fn name(self) -> String {
        match self {
            Part::Kernel(does) => does.to_string(),
            Part::Alike => "alike".to_string(),
        }
    }

    /// The comparisons of a set in the order in which they are made.
    fn all(kernels: &[Does], is_alike: bool) -> Vec<Part> {
        // The first batch kernel comes first: others are compared with it.
        let order = |does: &Does| match *does {
            Does::Steps { rows: 1, .. } => (1, 1, false),
            Does::Steps { rows, by } => (0, rows, by == By::Splits),
            Does::Chunk => (2, 0, false),
            Does::Tail => (3, 0, false),
            Does::Sampler => (4, 0, false),
        };
        let mut kernels = kernels.to_vec();
        kernels.sort_by_key(order);
        kernels.into_iter().map(Part::Kernel).chain(is_alike.then_some(Part::Alike)).collect()
    }
}

/// What is compared of a set of kernels: the names of its checks, in their order.
pub(super) fn check_names(kernels: &[Does], is_alike: bool) -> Vec<String> {
    Part::all(kernels, is_alike).into_iter().map(Part::name).collect()
}

/// Sizes of the texts of a set. `kernels`: its kernels for steps; `context_max`: that of the reference.
pub(super) fn sizes_of(parameters: u64, context_max: u32, kernels: &[StepsKernel]) -> TextSizes {
    let largest = kernels.iter().max_by_key(|kernel| kernel.rows);
    let shape = largest.and_then(|kernel| Shape::of(&kernel.validated.schedule().program));
    let most = kernels.iter().map(StepsKernel::launch_rows).max().unwrap_or(0);
    let alone = shape.filter(|shape| shape.sequences == 1).map_or(0, |_| most);
    TextSizes::of(parameters, context_max, alone)
}

/// Names the logits that all kernels over the weights of `reference` have to reproduce.
pub(super) fn texts_keyed(reference: &Validated, graph: Digest, weights: &WeightsId, sizes: TextSizes) -> Keyed {
    let schedule = Digest::of(print(reference.schedule()).as_bytes());
    TextsKey { schedule, graph, weights, texts: &format!("{sizes:?}") }.keyed()
}

/// A set on a device, and what it is compared with; each is made when it is first needed.
struct Begun<'a> {
    load: &'a mut dyn FnMut() -> Result<LoadedSet, Fault>,
    loaded: Option<LoadedSet>,
    texts: Option<SharedTexts>,
    /// What the chunks of prompts, with their tail, were compared.
    prompts: Option<Checked>,
}

impl Begun<'_> {
    fn loaded(&mut self) -> Result<&mut LoadedSet, Fault> {
        if self.loaded.is_none() {
            self.loaded = Some((self.load)()?);
        }
        self.loaded.as_mut().ok_or_else(|| Fault::internal("kernels were loaded and are gone"))
    }
}

impl<'a> Checks<'a> {
    /// Those of the model of a chain, on a device.
    pub(super) fn of(
        chain: &'a Chain<'a>,
        device: &DeviceIdentity,
        pack: &'a dyn Fn() -> Result<Pack, Fault>,
    ) -> Result<Checks<'a>, Fault> {
        Checks::on(chain, hardware_of(device), pack)
    }

    /// As [`Checks::of`], on hardware that is known by name.
    pub(super) fn on(
        chain: &'a Chain<'a>,
        hardware: Hardware,
        pack: &'a dyn Fn() -> Result<Pack, Fault>,
    ) -> Result<Checks<'a>, Fault> {
        let BuildContext { workspace, manifest, target, imported, graph, .. } = chain.context;
        Ok(Checks {
            workspace,
            subject: chain.context.subject(),
            target,
            precision: manifest.precision,
            hardware,
            graph,
            weights: chain.context.weights_id()?,
            parameters: imported.graph.parameter_count(),
            reference: Arc::clone(chain.validated()?),
            pack,
            expect: by_interpreter,
        })
    }

    /// Makes sure that every kernel of a set was compared on a device of this kind. `load` loads the set where one was not.
    ///
    /// # Errors
    /// The first kernel that computes something else, by name; what the device refuses.
    pub fn ensure(&self, set: &KernelSet, load: &mut dyn FnMut() -> Result<LoadedSet, Fault>) -> Result<(), Fault> {
        self.ensure_parts(set, &|_| true, load)
    }

    /// As [`Checks::ensure`], of the one check that has this name, and of what it compares with.
    ///
    /// # Errors
    /// As [`Checks::ensure`].
    pub(super) fn ensure_one(
        &self,
        set: &KernelSet,
        name: &str,
        load: &mut dyn FnMut() -> Result<LoadedSet, Fault>,
    ) -> Result<(), Fault> {
        self.ensure_parts(set, &|part| part.name() == name, load)
    }

    /// Whether each check of a set is in the cache, by name.
    ///
    /// # Errors
    /// A cache that cannot be read.
    pub(super) fn stored(&self, set: &KernelSet) -> Result<Vec<(String, Keyed, bool)>, Fault> {
        let sizes = self.sizes(set);
        let stored = |part: Part| {
            let keyed = self.keyed(set, part, sizes);
            let is_stored = self.workspace.cache.get(keyed.stage, &keyed.key)?.is_some();
            Ok((part.name(), keyed, is_stored))
        };
        Part::all(&set.does(), set.is_alike()).into_iter().map(stored).collect()
    }

    fn ensure_parts(
        &self,
        set: &KernelSet,
        is_wanted: &dyn Fn(Part) -> bool,
        load: &mut dyn FnMut() -> Result<LoadedSet, Fault>,
    ) -> Result<(), Fault> {
        let sizes = self.sizes(set);
        let parts = Part::all(&set.does(), set.is_alike()).into_iter().enumerate();
        let parts: Vec<Part> = parts.filter(|(at, part)| *at == 0 || is_wanted(*part)).map(|(_, part)| part).collect();
        let keyed: Vec<(Part, Keyed)> = parts.into_iter().map(|part| (part, self.keyed(set, part, sizes))).collect();
        let missing = keyed.iter().map(|(_, Keyed { stage, key, .. })| self.workspace.cache.get(stage, key));
        let missing = missing.collect::<Result<Vec<_>, _>>()?.into_iter().filter(Option::is_none).count();
        if missing > 0 {
            let (target, kind) = (&self.target.name, &self.hardware.name);
            self.workspace.report.note(&format!(
                "{target}: {missing} of {} checks on {kind}, once for this kind of device",
                keyed.len()
            ));
        }
        let mut begun = Begun { load, loaded: None, texts: None, prompts: None };
        // Of the kernel that others are compared with.
        let mut judged = None;
        for (part, keyed) in &keyed {
            let name = part.name();
            let (subject, title) = (format!("{} {name}", self.subject), format!("check {} {name}", self.target.name));
            let (entry, _) = self.workspace.stage(keyed, &subject, &title, &self.hardware.name, || {
                let figures = self.check(set, *part, sizes, judged.as_ref(), &mut begun);
                let checked = figures.map_err(|fault| self.refused(&name, fault))?;
                Ok::<_, Fault>(checked.to_entry())
            })?;
            if let Part::Kernel(Does::Steps { rows, .. }) = part
                && (judged.is_none() && *rows > 1)
            {
                judged = Checked::from_entry(&entry.bytes()?);
            }
        }
        Ok(())
    }

    fn refused(&self, name: &str, fault: Fault) -> Fault {
        let message =
            format!("kernel `{name}` of target `{}` on {}: {}", self.target.name, self.hardware.name, fault.message);
        match fault.tier {
            Tier::Internal => Fault { message, ..fault }
                .with_remedy("no token was computed by it; report this with the output of `monobloc show schedule`"),
            _ => Fault { message, ..fault },
        }
    }

    fn sizes(&self, set: &KernelSet) -> TextSizes {
        let kernels: Vec<StepsKernel> = set.steps().into_iter().map(|(steps, _)| steps).collect();
        sizes_of(self.parameters, self.reference.schedule().program.context_max, &kernels)
    }

    fn keyed(&self, set: &KernelSet, part: Part, sizes: TextSizes) -> Keyed {
        let of: Vec<&Kernel> = match part {
            Part::Kernel(does) => set.get(does).into_iter().collect(),
            Part::Alike => set.all().iter().filter(|kernel| matches!(kernel.does, Does::Steps { .. })).collect(),
        };
        let schedule = |validated: &Arc<Validated>| Digest::of(print(validated.schedule()).as_bytes());
        let schedules: Vec<Digest> = of.iter().filter_map(|kernel| kernel.validated.as_ref()).map(schedule).collect();
        let cubins: Vec<Digest> = of.iter().map(|kernel| Digest::of(&kernel.code.bytes)).collect();
        KernelCheckKey {
            name: &part.name(),
            schedules: &schedules,
            cubins: &cubins,
            graph: self.graph,
            weights: &self.weights,
            target: self.target,
            hardware: &self.hardware,
            texts: &format!("{sizes:?}"),
        }
        .keyed()
    }

    /// Compares one kernel, or several with each other.
    fn check(
        &self,
        set: &KernelSet,
        part: Part,
        sizes: TextSizes,
        judged: Option<&Checked>,
        begun: &mut Begun<'_>,
    ) -> Result<Checked, Fault> {
        let lacks = || Fault::internal("a kernel that is to be checked is not loaded");
        match part {
            Part::Kernel(does @ Does::Steps { .. }) => {
                if begun.texts.is_none() && !takes_from_device(&self.reference.schedule().program) {
                    begun.texts = Some(self.texts(sizes)?);
                }
                let texts = begun.texts.take();
                let checked = self.check_steps(set, does, (texts.as_ref(), judged), begun.loaded()?);
                begun.texts = texts;
                checked
            }
            Part::Kernel(Does::Chunk | Does::Tail) => {
                // One comparison runs both.
                if let Some(checked) = &begun.prompts {
                    return Ok(checked.clone());
                }
                let LoadedSet { steps, waves, .. } = begun.loaded()?;
                let first = set.first_of_several().ok_or_else(lacks)?;
                let judged = judged.ok_or_else(lacks)?;
                let rows = several(steps).ok_or_else(lacks)?;
                let waves = waves.as_mut().ok_or_else(lacks)?;
                let checked = check_prompts(&first.validated, self.pack, self.parameters, judged, rows, waves)?;
                Ok(begun.prompts.insert(checked).clone())
            }
            Part::Kernel(Does::Sampler) => {
                let LoadedSet { steps, sampler, .. } = begun.loaded()?;
                let (rows, sampler) = (several(steps).ok_or_else(lacks)?, sampler.as_mut().ok_or_else(lacks)?);
                let Shape { rows: most, sequences, pages, context_max, .. } = *rows.shape();
                let position = 4.min(context_max.saturating_sub(2));
                let mut decoding = Decoding::at(rows, SAMPLER_ROWS.min(most).min(sequences).min(pages), position, 1)?;
                Ok(compared_choices(check_choices(rows, sampler, &mut decoding, position)?))
            }
            Part::Alike => {
                let LoadedSet { steps, .. } = begun.loaded()?;
                let mut sessions: Vec<&mut dyn RowLauncher> =
                    steps.iter_mut().map(|(_, session)| session.as_mut() as &mut dyn RowLauncher).collect();
                let alike = check_alike(&mut sessions)?;
                Ok(compared_choices(u32::try_from(alike.compared).unwrap_or(u32::MAX)))
            }
        }
    }

    /// Compares a kernel for steps: with the texts, and over a long history with the first kernel for several rows.
    fn check_steps(
        &self,
        set: &KernelSet,
        does: Does,
        (texts, judged): (Option<&SharedTexts>, Option<&Checked>),
        loaded: &mut LoadedSet,
    ) -> Result<Checked, Fault> {
        let lacks = || Fault::internal("a kernel that is to be checked is not loaded");
        let at = loaded.steps.iter().position(|(of, _)| *of == does).ok_or_else(lacks)?;
        let checked = match texts {
            Some(texts) => check_shared(texts, self.precision, loaded.steps[at].1.as_mut(), &mut self.at_random())?,
            // What is expected depends on the codes that a kernel stored, or on the experts that it chose.
            None => {
                let (of, _) = set.steps().into_iter().find(|(_, kernel)| kernel.does == does).ok_or_else(lacks)?;
                check_rows(&of.validated, (self.pack)()?, self.parameters, loaded.steps[at].1.as_mut())?
            }
        };
        let first = loaded.steps.iter().position(|(_, session)| session.shape().rows > 1);
        // Of a mixture, two right kernels may choose different experts: `check_rows` has a long history.
        let compares = !chooses_experts(&self.reference.schedule().program);
        if let Some(first) = first.filter(|first| *first != at && compares) {
            let [base, other] = loaded.steps.get_disjoint_mut([first, at]).map_err(|_| lacks())?;
            self.compare_histories(judged.ok_or_else(lacks)?, base.1.as_mut(), other.1.as_mut())?;
        }
        Ok(checked)
    }

    /// Compares the logits of two kernels over one cache, one of which has a long history.
    fn compare_histories(
        &self,
        judged: &Checked,
        base: &mut dyn RowLauncher,
        other: &mut dyn RowLauncher,
    ) -> Result<(), Fault> {
        let both = long_histories(base, other)?;
        check_ragged(self.precision, judged, &both)?;
        Ok(())
    }

    /// Reads a text once more with other roundings, where a row of a kernel is out of tolerance.
    pub(super) fn at_random(&self) -> impl FnMut(&[u32], u64) -> Result<Vec<Vec<f32>>, CheckError> + '_ {
        |ids, seed| {
            let pack = (self.pack)().map_err(CheckError::Pack)?;
            read_at_random(&self.reference, pack, ids, seed)
        }
    }

    /// What every kernel has to compute, from the cache or from the interpreter.
    pub(super) fn texts(&self, sizes: TextSizes) -> Result<SharedTexts, Fault> {
        let keyed = texts_keyed(&self.reference, self.graph, &self.weights, sizes);
        let positions = sizes.positions();
        let (subject, title) = (texts_of(&self.subject), format!("expect {}", self.target.name));
        let detail = format!("{positions} positions");
        let (entry, _) = self.workspace.stage(&keyed, &subject, &title, &detail, || {
            let report = &self.workspace.report;
            let progress = report.progress("positions of the reference", positions);
            let (begun, done) = (Instant::now(), Cell::new(0));
            let on_position = || {
                progress.inc(1);
                done.set(done.get() + 1);
                let rest = begun.elapsed().as_secs_f64() / TIMED_POSITIONS as f64 * (positions - done.get()) as f64;
                if done.get() == TIMED_POSITIONS && rest > 2.0 {
                    report.note(&format!(
                        "{}: about {rest:.0} s for the reference, and some for the kernels",
                        self.target.name
                    ));
                }
            };
            let texts = (self.expect)(&self.reference, (self.pack)()?, sizes, &on_position)?;
            Ok::<_, Fault>(texts.to_entry())
        })?;
        SharedTexts::from_entry(sizes, &entry.bytes()?)
            .ok_or_else(|| Fault::internal(format!("the stored result `{}` cannot be read", entry.path().display())))
    }

    /// Makes sure that the decode kernel was compared: as [`Checks::ensure`], for a kernel over a cache of its own. Its other check, of a
    /// build, has a key of its own.
    ///
    /// # Errors
    /// As [`Checks::ensure`].
    pub fn ensure_decode(
        &self,
        cubin: &[u8],
        load: &dyn Fn() -> Result<Session, Fault>,
        steps_max: u32,
    ) -> Result<(), Fault> {
        let program = &self.reference.schedule().program;
        let sizes = TextSizes::of(self.parameters, program.context_max, 0);
        let schedule = Digest::of(print(self.reference.schedule()).as_bytes());
        let keyed = KernelCheckKey {
            name: DECODE,
            schedules: &[schedule],
            cubins: &[Digest::of(cubin)],
            graph: self.graph,
            weights: &self.weights,
            target: self.target,
            hardware: &self.hardware,
            texts: &format!("{sizes:?}"),
        }
        .keyed();
        let (subject, title) = (format!("{} {DECODE}", self.subject), format!("check {} {DECODE}", self.target.name));
        self.workspace.stage(&keyed, &subject, &title, &self.hardware.name, || {
            // What is expected depends on the codes that a kernel stored, or on the experts that it chose.
            let texts = if takes_from_device(program) { None } else { Some(self.texts(sizes)?) };
            let checked = load().and_then(|mut session| match &texts {
                None => Ok(check_decode(&self.reference, (self.pack)()?, sizes, &mut session, steps_max)?),
                Some(texts) => {
                    let bounds = (steps_max, program.context_max);
                    Ok(check_texts(texts, self.precision, &mut session, bounds, &mut self.at_random())?)
                }
            });
            Ok::<_, Fault>(checked.map_err(|fault| self.refused(DECODE, fault))?.to_entry())
        })?;
        Ok(())
    }
}

/// The logits of two kernels over one cache, after histories of which one is long, and beyond pages and KV splits.
///
/// # Errors
/// What the device refuses; a launch that gave up.
pub(super) fn long_histories(
    base: &mut dyn RowLauncher,
    other: &mut dyn RowLauncher,
) -> Result<Vec<BothLogits>, Fault> {
    let shape = *base.shape();
    let page_rows = shape.page_rows;
    let two = other.shape().rows > 1 && shape.sequences > 1 && shape.pages > 1;
    let pages = if two { shape.pages - 1 } else { shape.pages };
    let most = pages.saturating_mul(page_rows).min(shape.context_max);
    let several = 2 * page_rows.max(other.split_max());
    let position = (several + BEYOND_PAGES).min(most.saturating_sub(3));
    let others = if two { (position / 3).min(page_rows.saturating_sub(3)) } else { position };
    let rows = if two { 2 } else { 1 };
    let ids = check_ids(base.vocab(), rows);
    let mut decoding = Decoding::with_others(base, rows, (position, others), 1)?;
    decoding.give_tokens(|row| ids[row as usize]);
    let logits = |decoding: &mut Decoding, session: &mut dyn RowLauncher| -> Result<Vec<Vec<f32>>, Fault> {
        let (tables, inputs) = decoding.launch(position, 1)?;
        session.poison_logits()?;
        session.run_whole(tables, inputs, true)?;
        (0..rows).map(|row| Ok(session.logits(row)?)).collect()
    };
    let expected = logits(&mut decoding, base)?;
    if shape.has_state {
        // The step has moved the states on.
        decoding = Decoding::with_others(base, rows, (position, others), 1)?;
        decoding.give_tokens(|row| ids[row as usize]);
    }
    let found = logits(&mut decoding, other)?;
    let at = [position, others];
    let both = expected.into_iter().zip(found).zip(at);
    Ok(both.map(|((expected, found), position)| BothLogits { position, expected, found }).collect())
}

/// What a cache may keep of the kernels of `subject`: stages, and how their results are called.
pub(super) fn kept(subject: &str) -> Vec<(&'static str, String)> {
    let rows = [1].into_iter().chain(STEP_ROWS);
    let steps = rows.flat_map(|rows| [By::Words, By::Splits].map(|by| Does::Steps { rows, by }));
    let all = steps.chain([Does::Chunk, Does::Tail, Does::Sampler]).map(Part::Kernel).chain([Part::Alike]);
    let checks = all.map(|part| part.name()).chain([DECODE.to_string()]);
    let checks = checks.map(|name| (keys::CHECK, format!("{subject} {name}")));
    checks.chain([(keys::EXPECT, texts_of(subject))]).collect()
}

/// How the expected logits of a model are called.
fn texts_of(subject: &str) -> String {
    format!("{subject} texts")
}

/// The decode kernel, in keys and messages.
const DECODE: &str = "decode";

/// The first session for several rows.
fn several(steps: &mut [(Does, Box<dyn RowLauncher>)]) -> Option<&mut dyn RowLauncher> {
    let (_, session) = steps.iter_mut().find(|(_, session)| session.shape().rows > 1)?;
    Some(session.as_mut())
}
