//! Owns `Made`: what a search makes of a candidate before it runs, of the decode kernel or of a wave kernel.

use std::sync::{Arc, OnceLock};

use crate::candidate::Candidate;
use crate::check::WAVES_POSITIONS;
use crate::codegen::emit::Trace;
use crate::codegen::waves::tables_digest;
use crate::defaults::rows::Room;
use crate::digest::Digest;
use crate::error::{Fault, Tier};
use crate::manifest::SearchKernel;
use crate::validate::Validated;
use crate::waves::{Proven, Refused, derive_chosen, prove};

use super::chain::{Chain, Host, NotMade};
use super::compile::Cubin;
use super::device_rows::{STEPS, place_kernel, prove_kernel, room_of_each, rows_of};
use super::device_waves::{form_of, unproven, waves_source};
use super::stages::BuildContext;

/// A candidate that was proven and compiled.
pub(super) enum Made<'a> {
    Decode(Box<Chain<'a>>),
    Wave(Box<MadeWave<'a>>),
}

/// A candidate of a wave kernel.
pub(super) struct MadeWave<'a> {
    /// Of the schedule from which the plan is derived.
    pub chain: Chain<'a>,
    pub candidate: Candidate,
    /// Digest of all that the kernel walks.
    pub plan: Digest,
    pub source: Digest,
    pub cubin: Box<Cubin>,
    /// Dynamic shared memory of a block.
    pub smem_bytes: u32,
}

/// Why a candidate was not made.
pub(super) enum Unmade {
    /// It does not fit: ordinary feedback for a search.
    Infeasible(String),
    /// It was placed or derived, and is not proven: our bug.
    Unproven(Fault),
    Fault(Fault),
}

impl From<Fault> for Unmade {
    fn from(fault: Fault) -> Unmade {
        Unmade::Fault(fault)
    }
}

impl From<NotMade> for Unmade {
    fn from(not_made: NotMade) -> Unmade {
        Unmade::Fault(not_made.into())
    }
}

impl Made<'_> {
    /// Names what runs: two candidates with the same artefact are duplicates.
    pub fn artefact(&self) -> Result<Digest, Fault> {
        match self {
            Made::Decode(chain) => Ok(chain.schedule()?.content),
            Made::Wave(wave) => Ok(Digest::of(format!("{} {}", wave.plan, wave.source).as_bytes())),
        }
    }
}

/// Makes the candidates of a campaign.
pub(super) struct Maker<'a> {
    pub context: BuildContext<'a>,
    pub host: &'a Host<'a>,
    /// Whether decode kernels are compiled here. Workers elsewhere compile their own.
    pub compiles: bool,
    /// The schedule from which plans of waves are derived, made once.
    base: OnceLock<Result<Arc<Validated>, Fault>>,
}

impl<'a> Maker<'a> {
    pub fn new(context: BuildContext<'a>, host: &'a Host<'a>, compiles: bool) -> Maker<'a> {
        Maker { context, host, compiles, base: OnceLock::new() }
    }

    /// Lowers or derives, proves and compiles a candidate.
    ///
    /// # Errors
    /// A candidate that does not fit, or is not proven; what the compiler refuses.
    pub fn make(&self, candidate: &Candidate) -> Result<Made<'a>, Unmade> {
        match self.context.searched() {
            SearchKernel::Decode => self.decode(candidate).map(|chain| Made::Decode(Box::new(chain))),
            _ => self.wave(candidate).map(|wave| Made::Wave(Box::new(wave))),
        }
    }

    fn decode(&self, candidate: &Candidate) -> Result<Chain<'a>, Unmade> {
        let chain = Chain::new(self.context, self.host, candidate.clone());
        match chain.schedule() {
            Ok(_) if self.compiles => chain.make_kernel()?,
            Ok(_) => {}
            Err(NotMade::Infeasible(reason)) => return Err(Unmade::Infeasible(reason.to_string())),
            Err(NotMade::Fault(fault)) if fault.tier == Tier::Internal => return Err(Unmade::Unproven(fault)),
            Err(other) => return Err(other.into()),
        }
        Ok(chain)
    }

    fn wave(&self, candidate: &Candidate) -> Result<MadeWave<'a>, Unmade> {
        let base = self.base(&candidate.without_waves())?;
        let proven = self.proven(&base, candidate)?;
        let source = waves_source(&self.context, &proven, Trace::Off);
        let chain = Chain::new(self.context, self.host, candidate.without_waves());
        let cubin = chain.compile(&source).map_err(|not_made| match not_made {
            // A source of our own that no compiler takes is our bug, too.
            NotMade::Fault(fault) if fault.tier == Tier::Internal => Unmade::Unproven(fault),
            other => other.into(),
        })?;
        Ok(MadeWave {
            chain,
            candidate: candidate.clone(),
            plan: tables_digest(&proven),
            source: source.content,
            cubin,
            smem_bytes: proven.plan().smem_bytes(),
        })
    }

    /// The plan of a candidate of a wave kernel over `base`, proven.
    ///
    /// # Errors
    /// As [`Maker::make`].
    pub fn proven<'v>(&self, base: &'v Validated, candidate: &Candidate) -> Result<Proven<'v>, Unmade> {
        let target = self.context.target;
        let Some((form, rows)) = form_of(self.context.searched(), &base.schedule().program) else {
            return Err(Fault::internal("the decode kernel has no plan of waves").into());
        };
        let derived = derive_chosen(base.schedule(), target, form, rows, &candidate.waves);
        let plan = derived.map_err(|refused| Unmade::Infeasible(refused.to_string()))?;
        prove(plan, base, target).map_err(|violations| Unmade::Unproven(unproven(violations)))
    }

    /// The schedule of the smallest batch kernel of `candidate`, with room for what a trial checks and times. Plans of waves have its pack, caches and
    /// pages, and are compared with its kernel.
    ///
    /// # Errors
    /// A target or a model without batch kernels.
    pub fn base(&self, candidate: &Candidate) -> Result<Arc<Validated>, Fault> {
        let make = || {
            let schedule = place_kernel(&self.context, candidate, self.room(candidate)?)?;
            prove_kernel(&self.context, schedule).map(Arc::new)
        };
        self.base.get_or_init(make).clone()
    }

    fn room(&self, candidate: &Candidate) -> Result<Room, Fault> {
        let context = &self.context;
        let none = || Fault::internal("a target without kernels for rows");
        let smallest = *rows_of(context).first().ok_or_else(none)?;
        let timed = context.manifest.decode.time_positions.last().copied().unwrap_or(0) + STEPS + 1;
        // The check of chunks has two sequences.
        let checked = 2 * WAVES_POSITIONS.next_multiple_of(256);
        let (sequences, last) = match context.searched() {
            SearchKernel::Wave { rows } => (rows, timed),
            _ => (smallest, prompt_lengths(context)?.into_iter().fold(checked, u32::max).div_ceil(smallest)),
        };
        let positions = u64::from(sequences) * room_of_each(context, candidate, last.max(timed));
        Ok(Room { rows: smallest, sequences, positions })
    }
}

/// Tokens of the prompts that are timed: a chunk of few blocks of rows, and a whole one, as far as the context has room.
const PROMPTS: [u32; 2] = [512, 2048];

/// Tokens of the prompts that a search of the kernel of chunks times, ascending.
///
/// # Errors
/// A context that is shorter than a chunk.
pub(super) fn prompt_lengths(context: &BuildContext<'_>) -> Result<Vec<u32>, Fault> {
    let most = context.manifest.decode.context_max;
    let least = PROMPTS[0];
    if most < least {
        let message = format!("a search of `chunk` reads prompts of {least} tokens, `decode.context_max` is {most}");
        return Err(Fault::input(message).with_remedy(format!("set `decode.context_max` to {least} or more")));
    }
    Ok(PROMPTS.into_iter().filter(|tokens| *tokens <= most).collect())
}

/// Why a wave kernel of a context cannot be searched, before anything runs: its default plan is refused.
///
/// # Errors
/// The reason.
pub(super) fn refuse_wave(maker: &Maker<'_>, default: &Candidate) -> Result<(), Fault> {
    let (kernel, target) = (maker.context.searched(), &maker.context.target.name);
    if kernel == SearchKernel::Decode {
        return Ok(());
    }
    let base = maker.base(default)?;
    let Some((form, rows)) = form_of(kernel, &base.schedule().program) else { return Ok(()) };
    let derived = derive_chosen(base.schedule(), maker.context.target, form, rows, &default.waves);
    derived.map(drop).map_err(|refused: Refused| {
        Fault::input(format!("`{kernel}` of target `{target}` cannot be searched: {refused}"))
            .with_remedy("set `kernel = \"decode\"` in `[search]`")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::candidate::WaveKnobs;
    use crate::manifest::Manifest;
    use crate::pipeline::device_steps::StepsKernels;
    use crate::pipeline::device_waves::chosen_knobs;
    use crate::pipeline::{Workspace, import_stage, keys, show};
    use crate::report::Report;
    use std::path::Path;

    /// A manifest of two layers of SmolLM2-135M for an H200, in a folder.
    fn manifest(folder: &Path, kernel: &str) -> Manifest {
        let config = include_str!("../../manifests/configs/smollm2-135m.json");
        let config = config.replace("\"num_hidden_layers\": 30", "\"num_hidden_layers\": 2");
        std::fs::write(folder.join("config.json"), config).expect("a folder");
        let text = format!(
            "[model]\nsource = \"synthetic:config.json\"\n[precision]\nweights = \"bf16\"\n[decode]\n\
             context_max = 1024\ntime_positions = [32]\n[search]\nkernel = \"{kernel}\"\n[[target]]\nrecord = \"h200\"\n"
        );
        Manifest::parse(&text, &folder.join("m.toml")).expect("a manifest")
    }

    fn workspace(folder: &Path) -> Workspace {
        let cache = Cache::open(folder.join("cache")).expect("a cache");
        Workspace { cache, report: Report::quiet(), trials: folder.join("trials.csv") }
    }

    #[test]
    fn builds_take_the_knobs_that_a_search_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let (workspace, manifest) = (workspace(folder.path()), manifest(folder.path(), "chunk"));
        let target = &manifest.targets[0];
        let model = import_stage(&workspace, &manifest).expect("a model");
        let context = BuildContext::new(&workspace, &manifest, target, &model).expect("a context");
        let shown = |stage: &str| show(&workspace, &manifest, target, stage, None).expect("a plan");
        let defaults = ["waves", "steps", "candidate"].map(shown);
        let found = |kernel, text: &str| {
            let key = Digest::of(text.as_bytes());
            workspace.cache.put(keys::TUNED, &key, "found", text.as_bytes()).expect("a cache");
            workspace.cache.set_latest(keys::TUNED, &context.tuned_subject(kernel), &key).expect("a cache");
        };
        let wave = SearchKernel::Wave { rows: 32 };
        found(SearchKernel::Chunk, "wave_pass=8;wave_input_slots=3");
        found(wave, "wave_parts=1");
        let [waves, steps, candidate] = ["waves", "steps", "candidate"].map(shown);
        assert!(waves != defaults[0] && steps != defaults[1]);
        assert_eq!(candidate, format!("{}wave:32: wave_parts=1\nchunk: wave_pass=8;wave_input_slots=3\n", defaults[2]));
        assert_eq!(context.search_built().waves, WaveKnobs::parse("wave_pass=8;wave_input_slots=3").expect("knobs"));

        let base = context.candidate();
        let mut kernels = StepsKernels::new(&context, &base);
        let rows = |rows| Room { rows, sequences: rows, positions: u64::from(rows) * 1024 };
        assert_eq!(kernels.of(rows(32)).expect("steps").knobs.to_string(), "wave_parts=1");
        assert_eq!(kernels.of(rows(64)).expect("steps").knobs, WaveKnobs::default(), "another kernel");

        // What the plan refuses leaves the choice to the rules.
        found(SearchKernel::Chunk, "wave_slots=12");
        assert_eq!(shown("waves"), defaults[0]);
        let base = Maker::new(context, &Host::new(&workspace), true).base(&base).expect("a batch kernel");
        assert_eq!(chosen_knobs(&context, SearchKernel::Chunk, base.schedule()), WaveKnobs::default());
    }

    #[test]
    fn a_candidate_of_a_wave_kernel_is_proven_or_infeasible() {
        let folder = tempfile::tempdir().expect("a folder");
        let workspace = workspace(folder.path());
        for kernel in ["chunk", "wave:64"] {
            let manifest = manifest(folder.path(), kernel);
            let model = import_stage(&workspace, &manifest).expect("a model");
            let target = &manifest.targets[0];
            let context = BuildContext::new(&workspace, &manifest, target, &model).expect("a context");
            let (host, default) = (Host::new(&workspace), context.search_default());
            let maker = Maker::new(context, &host, true);
            refuse_wave(&maker, &default).expect("a wave kernel");
            let base = maker.base(&default).expect("a batch kernel");
            let with = |text: &str| Candidate::parse(text, &default).expect("knobs");
            for text in ["", "wave_pass=8", "wave_slots=2"] {
                assert!(maker.proven(&base, &with(text)).is_ok(), "{kernel}: {text}");
            }
            match maker.proven(&base, &with("wave_slots=12;wave_input_slots=8")) {
                Err(Unmade::Infeasible(reason)) => assert!(reason.starts_with("`wave_slots` is 12"), "{reason}"),
                _ => panic!("{kernel}: twelve slots do not fit"),
            }
        }
    }

    #[test]
    fn a_context_shorter_than_a_chunk_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let (workspace, mut manifest) = (workspace(folder.path()), manifest(folder.path(), "chunk"));
        let model = import_stage(&workspace, &manifest).expect("a model");
        let lengths = |manifest: &Manifest| {
            let context = BuildContext::new(&workspace, manifest, &manifest.targets[0], &model).expect("a context");
            prompt_lengths(&context).map_err(|fault| fault.message)
        };
        assert_eq!(lengths(&manifest), Ok(vec![512]));
        manifest.decode.context_max = 4096;
        assert_eq!(lengths(&manifest), Ok(vec![512, 2048]));
        manifest.decode.context_max = 256;
        let refused = "a search of `chunk` reads prompts of 512 tokens, `decode.context_max` is 256";
        assert_eq!(lengths(&manifest), Err(refused.to_string()));
    }
}
