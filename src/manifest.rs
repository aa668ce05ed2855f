//! Owns `ManifestFile` (the typed form, with spans) and `Manifest` (the resolved form, every default filled in).
//!
//! ```toml
//! name = "llama-3.2-1b"        # default: the file's stem
//!
//! [model]
//! source = "path:checkpoint"   # hf:OWNER/NAME[:FILE], path:DIR, path:FILE.gguf, synthetic:CONFIG.json or builtin:tinystories
//! revision = "main"            # hf: only; default main
//! seed = 0                     # synthetic: only; default 0; from 4294967296 on it skews routers (docs/models.md)
//!
//! [precision]
//! weights = "bf16"             # fp32 or bf16; or rounded to int8, fp8, int4:128, int4:64, int4:32 or mxfp4
//! head = "bf16"                # default: as weights
//! experts = "mxfp4"            # matrices of experts; default: as weights
//! embed = "int8"               # default: as it is stored
//! layers.0 = "bf16"            # one layer; default: as weights
//! cache = "bf16"               # fp32, bf16 or fp8 (docs/formats.md); default: as weights, bf16 where they are rounded
//! activations = "bf16"         # fp32 or bf16; default: as weights, bf16 where they are rounded
//!
//! [decode]
//! context_max = 4096           # 1 to 1048576 positions
//! steps_per_launch = 32        # tokens per launch; default 32, or context_max if that is less
//! check_positions = [0, 31]    # default: 0, 1, 31, 200 and the last, as far as they are below context_max
//! time_positions = [32]        # default: 32, 1024 and context_max - steps_per_launch, as far as a launch fits
//! sequences_max = 8            # requests that `serve` decodes together, 1 to 256 (on a GPU 128); default 8
//! chunk_max = 16               # prompt tokens in one step, 1 to 256; default 16, and 8 in `serve`; `cpu` targets only
//! cache_pages = 1024           # pages of 16 positions; default: one context, and four in `serve`; `cpu` targets only
//! batch_invariant = false      # ask for the same bits alone and in any batch; on a GPU at a price; default false
//!
//! [search]                     # optional
//! trials = 0                   # candidates to measure beyond the default one; default 0, which builds only that one
//! minutes = 10                 # default 10
//! seed = 0                     # default 0
//! margin = 0.01                # a candidate replaces the best one only if it is faster by this fraction; default 0.01
//! kernel = "decode"            # whose knobs are searched: decode, wave:32, wave:64, wave:128 or chunk; default decode
//!
//! [cache]                      # optional; no part of any key
//! remote = "s3://bucket/prefix?region=eu-central-1"   # without credentials (docs/cache.md)
//! mode = "read-write"          # read-write, read or off; default read-write
//!
//! [[target]]                   # one or more
//! record = "cpu"               # a builtin name, or the path of a record
//! devices = 1                  # 1, 2, 4 or 8 of one host, which run the model together; default 1
//! candidate = "splits=12"      # knobs that differ from the default, as trials print them; optional
//! ```
//!
//! Relative paths follow [`crate::files::find`]: the manifest's own folder first, then the current directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use toml::Spanned;

use crate::address::{AddressError, RemoteAddress, RemoteMode, RemotePlace};
use crate::dtype::{DType, Precision};
use crate::error::Fault;
use crate::fields::{FILE_NAME_IN_WORDS, Fields, is_file_name, read_document};
use crate::files::{self, FileError, PATH_RULE};
use crate::format::{Code, Format, FormatPlan, NAMED};
use crate::target::{DEVICES, Measured, Target, TargetError, TargetKind, TargetRecord};
use crate::text::{Diagnostic, Rejection, Style, nearest, one_of};

/// Largest manifest that is read; a manifest is a screenful.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Largest context; queues, cache rows and proofs are sized for it.
pub const CONTEXT_MAX: u32 = 1 << 20;

/// Most positions: each is a prompt for the reference or a series of timed launches, which may take minutes.
const POSITIONS_COUNT_MAX: usize = 64;

const TARGETS_COUNT_MAX: usize = 64;
const TRIALS_MAX: u32 = 1_000_000;

/// Longest search: a week. To search longer, start it again.
const MINUTES_MAX: f64 = 7.0 * 24.0 * 60.0;

const STEPS_PER_LAUNCH_DEFAULT: u32 = 32;
/// Most rows of a step: every row has its own attention tasks.
pub const ROWS_MAX: u32 = 256;
/// Most pages of the cache: more than any memory holds.
const CACHE_PAGES_MAX: u32 = 1 << 24;
const REVISION_DEFAULT: &str = "main";
const SEARCH_DEFAULT: Search = Search { trials: 0, minutes: 10.0, seed: 0, margin: 0.01, kernel: SearchKernel::Decode };

/// Schemes of `model.source`; what follows the colon is read by the importer.
const SCHEMES: [&str; 4] = ["hf:", "path:", "synthetic:", "builtin:"];

const PRECISIONS: [(&str, DType); 2] = [("fp32", DType::F32), ("bf16", DType::Bf16)];
const CACHES: [(&str, DType); 3] = [("fp32", DType::F32), ("bf16", DType::Bf16), ("fp8", DType::E4m3)];

/// Largest random seed: TOML integers have a sign.
const SEED_MAX: u64 = i64::MAX as u64;

/// A manifest as it was typed: fields that were left out are absent.
#[derive(Debug, Clone)]
pub struct ManifestFile {
    pub name: Option<Spanned<String>>,
    pub model: ModelFile,
    pub precision: PrecisionFile,
    pub decode: DecodeFile,
    pub search: SearchFile,
    pub cache: Option<CacheFile>,
    pub targets: Vec<TargetFile>,
}

/// `[cache]` as it was typed.
#[derive(Debug, Clone)]
pub struct CacheFile {
    pub remote: Spanned<String>,
    pub mode: Option<RemoteMode>,
}

/// `[[target]]` as it was typed.
#[derive(Debug, Clone)]
pub struct TargetFile {
    pub record: Spanned<String>,
    pub devices: Option<Spanned<u32>>,
    pub candidate: Option<String>,
}

/// `[model]` as it was typed.
#[derive(Debug, Clone)]
pub struct ModelFile {
    pub source: Spanned<String>,
    pub revision: Option<Spanned<String>>,
    pub seed: Option<Spanned<u64>>,
}

/// `[precision]` as it was typed.
#[derive(Debug, Clone)]
pub struct PrecisionFile {
    pub weights: Format,
    pub head: Option<Format>,
    pub experts: Option<Format>,
    pub embed: Option<Format>,
    /// Formats of single layers, by number.
    pub layers: BTreeMap<u32, Format>,
    pub cache: Option<DType>,
    pub activations: Option<DType>,
}

/// `[decode]` as it was typed.
#[derive(Debug, Clone)]
pub struct DecodeFile {
    pub context_max: u32,
    pub steps_per_launch: Option<Spanned<u32>>,
    pub check_positions: Option<Spanned<Vec<Spanned<u32>>>>,
    pub time_positions: Option<Spanned<Vec<Spanned<u32>>>>,
    pub sequences_max: Option<Spanned<u32>>,
    pub chunk_max: Option<Spanned<u32>>,
    pub cache_pages: Option<Spanned<u32>>,
    pub batch_invariant: Option<Spanned<bool>>,
}

/// `[search]` as it was typed.
#[derive(Debug, Clone, Default)]
pub struct SearchFile {
    pub trials: Option<u32>,
    pub minutes: Option<f64>,
    pub seed: Option<u64>,
    pub margin: Option<f64>,
    pub kernel: Option<SearchKernel>,
}

/// The kernel whose knobs a search turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SearchKernel {
    /// The decode kernel: steps of one row.
    #[default]
    Decode,
    /// The wave kernel that runs steps of up to this many rows.
    Wave { rows: u32 },
    /// The wave kernel that reads prompt chunks.
    Chunk,
}

impl SearchKernel {
    /// All of them. Steps of 16 rows, which mixtures of experts run wave by wave, are not searched.
    pub const ALL: [SearchKernel; 5] = [
        SearchKernel::Decode,
        SearchKernel::Wave { rows: 32 },
        SearchKernel::Wave { rows: 64 },
        SearchKernel::Wave { rows: 128 },
        SearchKernel::Chunk,
    ];

    /// Reads what `Display` writes.
    pub fn parse(text: &str) -> Option<SearchKernel> {
        SearchKernel::ALL.into_iter().find(|kernel| kernel.to_string() == text)
    }
}

impl fmt::Display for SearchKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SearchKernel::Decode => f.write_str("decode"),
            SearchKernel::Wave { rows } => write!(f, "wave:{rows}"),
            SearchKernel::Chunk => f.write_str("chunk"),
        }
    }
}

/// The model to build, the targets, and the search budget.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// Label of the build in paths and reports; no part of any key.
    pub name: String,
    /// `hf:OWNER/NAME`, `path:DIR`, `synthetic:CONFIG.json` or `builtin:NAME`; only the scheme was checked.
    pub source: String,
    /// Branch, tag or commit of an `hf:` source.
    pub revision: String,
    /// Seed of the weights of a `synthetic:` source.
    pub seed: u64,
    pub precision: Precision,
    /// Formats that weights are rounded to.
    pub formats: FormatPlan,
    pub decode: Decode,
    pub search: Search,
    /// One or more, of different names, in the order of the manifest.
    pub targets: Vec<Target>,
    /// By name of a target: knobs of its first candidate that differ from the default, `knob=value;...`. Only code that knows
    /// knobs can read it.
    pub candidates: BTreeMap<String, String>,
    /// By name of a target: the measured figures of its record.
    pub measured: BTreeMap<String, Measured>,
    /// Where other machines find what this one builds.
    pub remote: Option<RemotePlace>,
    /// Folder of the manifest, where its relative paths are looked up first.
    pub base_dir: PathBuf,
}

/// Limits of decoding, and the positions that are checked and timed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decode {
    /// Positions of the longest sequence, 1 to [`CONTEXT_MAX`].
    pub context_max: u32,
    /// Tokens that one launch decodes, 1 to `context_max`.
    pub steps_per_launch: u32,
    /// Positions whose logits are compared with the reference: ascending, each once, below `context_max`.
    pub check_positions: Vec<u32>,
    /// First positions of timed launches: ascending, each once, `position + steps_per_launch <= context_max`.
    pub time_positions: Vec<u32>,
    /// Requests that a server decodes together, 1 to [`ROWS_MAX`].
    pub sequences_max: Option<u32>,
    /// Tokens of a prompt in one step, 1 to [`ROWS_MAX`].
    pub chunk_max: Option<u32>,
    /// Pages of the cache for all sequences together.
    pub cache_pages: Option<u32>,
    /// Whether the bits of a row must not depend on other rows of its step, or on the chunks in which its prompt was read.
    pub batch_invariant: bool,
}

/// Budget of a search for a better candidate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Search {
    /// Candidates to measure beyond the default one; with 0 there is no search.
    pub trials: u32,
    /// Time after which no further trial starts; above 0.
    pub minutes: f64,
    pub seed: u64,
    /// A candidate replaces the best so far only if its latency is lower by this fraction, 0 up to 1.
    pub margin: f64,
    pub kernel: SearchKernel,
}

/// Why there is no manifest.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Invalid(#[from] Rejection),
    /// The text is not shown: it would have the credentials in it.
    #[error("`cache.remote` of `{}`: {error}", path.display())]
    Secret { path: PathBuf, error: AddressError },
    /// The manifest names a record that exists and is invalid.
    #[error(transparent)]
    Target(TargetError),
}

impl ManifestError {
    pub fn into_fault(self, style: Style) -> Fault {
        match self {
            ManifestError::File(error) => error.into(),
            ManifestError::Invalid(rejection) => Fault::input(rejection.render(style)),
            ManifestError::Secret { ref error, .. } => {
                let remedy = error.remedy();
                Fault::input(self.to_string()).with_remedy(remedy)
            }
            ManifestError::Target(error) => error.into_fault(style),
        }
    }
}

impl From<ManifestError> for Fault {
    fn from(error: ManifestError) -> Fault {
        error.into_fault(Style::Plain)
    }
}

impl ManifestFile {
    /// Reads the text of a manifest; names of targets are not looked up.
    ///
    /// # Errors
    /// Every fault: syntax, unknown and missing keys, wrong types, numbers out of their own range.
    pub fn parse(text: &str) -> Result<ManifestFile, Vec<Diagnostic>> {
        read_document(text, read_manifest)
    }
}

fn read_manifest(fields: &mut Fields<'_>) -> Option<ManifestFile> {
    let name = fields.file_name("name");
    let model = fields.required("model", |f, key| f.table(key, read_model));
    let precision = fields.required("precision", |f, key| f.table(key, read_precision));
    let decode = fields.required("decode", |f, key| f.table(key, read_decode));
    let search = fields.table("search", read_search);
    let cache = fields.table("cache", |f| {
        let (remote, mode) = (f.required("remote", Fields::text), f.choice("mode", &RemoteMode::NAMED));
        Some(CacheFile { remote: remote?, mode: mode.map(Spanned::into_inner) })
    });
    let targets = fields.required("target", |f, key| {
        f.tables(key, TARGETS_COUNT_MAX, |target| {
            let record = target.required("record", Fields::text);
            let devices = target.integer_u32("devices", 1..=DEVICES[DEVICES.len() - 1]);
            let candidate = target.text("candidate").map(Spanned::into_inner);
            Some(TargetFile { record: record?, devices, candidate })
        })
    });
    Some(ManifestFile {
        name,
        model: model?,
        precision: precision?,
        decode: decode?,
        search: search.unwrap_or_default(),
        cache,
        targets: targets?,
    })
}

fn read_model(fields: &mut Fields<'_>) -> Option<ModelFile> {
    let source = fields.required("source", Fields::text);
    let revision = fields.text("revision");
    let seed = fields.integer("seed", 0..=SEED_MAX);
    Some(ModelFile { source: source?, revision, seed })
}

fn read_precision(fields: &mut Fields<'_>) -> Option<PrecisionFile> {
    let weights = fields.required("weights", |f, key| f.choice(key, &NAMED));
    let head = fields.choice("head", &NAMED);
    let experts = fields.choice("experts", &NAMED);
    let embed = fields.choice("embed", &NAMED);
    let layers = fields.table("layers", |f| Some(f.numbered_choices(&NAMED)));
    let cache = fields.choice("cache", &CACHES);
    let activations = fields.choice("activations", &PRECISIONS);
    Some(PrecisionFile {
        weights: weights?.into_inner(),
        head: head.map(Spanned::into_inner),
        experts: experts.map(Spanned::into_inner),
        embed: embed.map(Spanned::into_inner),
        layers: layers.unwrap_or_default(),
        cache: cache.map(Spanned::into_inner),
        activations: activations.map(Spanned::into_inner),
    })
}

fn read_decode(fields: &mut Fields<'_>) -> Option<DecodeFile> {
    let context_max = fields.required("context_max", |f, key| f.integer_u32(key, 1..=CONTEXT_MAX));
    let steps_per_launch = fields.integer_u32("steps_per_launch", 1..=CONTEXT_MAX);
    let check_positions = fields.integers_u32("check_positions", 0..=CONTEXT_MAX, POSITIONS_COUNT_MAX);
    let time_positions = fields.integers_u32("time_positions", 0..=CONTEXT_MAX, POSITIONS_COUNT_MAX);
    let sequences_max = fields.integer_u32("sequences_max", 1..=ROWS_MAX);
    let chunk_max = fields.integer_u32("chunk_max", 1..=ROWS_MAX);
    let cache_pages = fields.integer_u32("cache_pages", 1..=CACHE_PAGES_MAX);
    let batch_invariant = fields.flag("batch_invariant");
    Some(DecodeFile {
        context_max: context_max?.into_inner(),
        steps_per_launch,
        check_positions,
        time_positions,
        sequences_max,
        chunk_max,
        cache_pages,
        batch_invariant,
    })
}

/// The kernel whose knobs are searched.
fn read_kernel(fields: &mut Fields<'_>) -> Option<SearchKernel> {
    let text = fields.text("kernel")?;
    let kernel = SearchKernel::parse(text.get_ref());
    if kernel.is_none() {
        let all = SearchKernel::ALL.map(|kernel| kernel.to_string());
        let label = format!("expected {}, found `{}`", one_of(all.iter().map(String::as_str)), text.get_ref());
        fields.refuse(text.span(), "`search.kernel` names no kernel that can be searched", label);
    }
    kernel
}

fn read_search(fields: &mut Fields<'_>) -> Option<SearchFile> {
    Some(SearchFile {
        trials: fields.integer_u32("trials", 0..=TRIALS_MAX).map(Spanned::into_inner),
        minutes: fields.number("minutes", "a number above 0, up to 10080 (a week)", |minutes| {
            minutes > 0.0 && minutes <= MINUTES_MAX
        }),
        seed: fields.integer("seed", 0..=SEED_MAX).map(Spanned::into_inner),
        margin: fields
            .number("margin", "a fraction from 0 up to, but not including, 1", |margin| (0.0..1.0).contains(&margin)),
        kernel: read_kernel(fields),
    })
}

impl Manifest {
    /// Reads, parses and resolves the manifest at `path`.
    ///
    /// # Errors
    /// A file that cannot be read, every fault of its text, or a target record that is itself at fault.
    pub fn load(path: &Path) -> Result<Manifest, ManifestError> {
        let text = files::read_text(path, MANIFEST_BYTES_MAX)?;
        Manifest::parse(&text, path)
    }

    /// Parses and resolves the text of a manifest; `path` gives the default name, the folder and what errors call it.
    ///
    /// # Errors
    /// Every fault of the text, or a target record that is itself at fault.
    pub fn parse(text: &str, path: &Path) -> Result<Manifest, ManifestError> {
        let rejected = |faults| Rejection::new(path.display().to_string(), text, faults);
        let file = ManifestFile::parse(text).map_err(rejected)?;
        let mut faults = Vec::new();
        let manifest = resolve(&file, path, &mut faults)?;
        if !faults.is_empty() {
            return Err(rejected(faults).into());
        }
        Ok(manifest)
    }

    /// Name of its model: the last part of its source, without the ending of a config.
    pub fn model_name(&self) -> String {
        let last = self.source.rsplit([':', '/']).find(|part| !part.is_empty()).unwrap_or(&self.source);
        last.strip_suffix(".json").unwrap_or(last).to_string()
    }

    /// Figures measured on a device of the target's kind; all empty if its record has none.
    pub fn measured(&self, target: &Target) -> Measured {
        self.measured.get(&target.name).cloned().unwrap_or_default()
    }

    /// The manifest as text for hashing: one `name value` line for each field that can change what a build makes, the
    /// targets' [`Target::key_text`] at the end, each with its [`Measured::key_text`].
    ///
    /// Left out are `name`, a label, `remote`, a place, and `base_dir`: what a path leads to is keyed by the stage that reads it.
    pub fn key_text(&self) -> String {
        let Manifest {
            name: _,
            source,
            revision,
            seed,
            precision,
            formats,
            decode,
            search,
            targets,
            candidates,
            measured: _,
            remote: _,
            base_dir: _,
        } = self;
        let Precision { weights, cache, wire } = precision;
        let Decode {
            context_max,
            steps_per_launch,
            check_positions,
            time_positions,
            sequences_max,
            chunk_max,
            cache_pages,
            batch_invariant,
        } = decode;
        let Search { trials, minutes, seed: search_seed, margin, kernel } = search;
        let fields = [
            // Quoted, so that a line break in a source cannot pass for another line.
            ("model.source", format!("{source:?}")),
            ("model.revision", format!("{revision:?}")),
            ("model.seed", seed.to_string()),
            ("precision.weights", weights.to_string()),
            ("precision.cache", cache.to_string()),
            ("precision.activations", wire.to_string()),
            ("decode.context_max", context_max.to_string()),
            ("decode.steps_per_launch", steps_per_launch.to_string()),
            ("decode.check_positions", format!("{check_positions:?}")),
            ("decode.time_positions", format!("{time_positions:?}")),
            ("decode.sequences_max", format!("{sequences_max:?}")),
            ("decode.chunk_max", format!("{chunk_max:?}")),
            ("decode.cache_pages", format!("{cache_pages:?}")),
            ("decode.batch_invariant", batch_invariant.to_string()),
            ("search.trials", trials.to_string()),
            ("search.minutes", format!("{minutes:?}")),
            ("search.seed", search_seed.to_string()),
            ("search.margin", format!("{margin:?}")),
            ("search.kernel", kernel.to_string()),
        ];
        let own: String = fields.iter().map(|(field, value)| format!("{field} {value}\n")).collect();
        let candidates = candidates.iter().map(|(target, knobs)| format!("candidate {target} {knobs:?}\n"));
        own + &formats.key_text()
            + &candidates.collect::<String>()
            + &targets.iter().map(|target| target.key_text() + &self.measured(target).key_text()).collect::<String>()
    }
}

/// Fills in defaults and compares fields with each other. Adds what is wrong to `faults`; the manifest that comes
/// back is good only if there are none.
fn resolve(file: &ManifestFile, path: &Path, faults: &mut Vec<Diagnostic>) -> Result<Manifest, ManifestError> {
    let ManifestFile { name, model, precision, decode, search, cache: shared, targets } = file;
    let base_dir = files::folder_of(path);
    let remote = resolve_cache(shared.as_ref(), path, faults)?;
    check_source(model, faults);
    let PrecisionFile { weights: asked, head, experts, embed, layers, cache, activations } = precision;
    let weights = if asked.code == Code::F32 { DType::F32 } else { DType::Bf16 };
    let (cache, activations) = (cache.unwrap_or(weights), activations.unwrap_or(weights));
    let weights_of_all = Some(*asked).filter(|f| !f.is_plain());
    let formats =
        FormatPlan { weights: weights_of_all, head: *head, experts: *experts, embed: *embed, layers: layers.clone() };
    let SearchFile { trials, minutes, seed, margin, kernel } = *search;
    let Targets { targets, candidates, measured } = resolve_targets(targets, &base_dir, faults)?;
    check_rows(decode, &targets, faults);
    Ok(Manifest {
        name: match name {
            Some(name) => name.get_ref().clone(),
            None => name_of(path, faults),
        },
        source: model.source.get_ref().clone(),
        revision: model.revision.as_ref().map_or(REVISION_DEFAULT.to_string(), |revision| revision.get_ref().clone()),
        seed: model.seed.as_ref().map_or(0, |seed| *seed.get_ref()),
        precision: Precision { weights, cache, wire: activations },
        formats,
        decode: resolve_decode(decode, faults),
        search: Search {
            trials: trials.unwrap_or(SEARCH_DEFAULT.trials),
            minutes: minutes.unwrap_or(SEARCH_DEFAULT.minutes),
            seed: seed.unwrap_or(SEARCH_DEFAULT.seed),
            margin: margin.unwrap_or(SEARCH_DEFAULT.margin),
            kernel: kernel.unwrap_or(SEARCH_DEFAULT.kernel),
        },
        targets,
        candidates,
        measured,
        remote,
        base_dir,
    })
}

fn resolve_cache(
    typed: Option<&CacheFile>,
    path: &Path,
    faults: &mut Vec<Diagnostic>,
) -> Result<Option<RemotePlace>, ManifestError> {
    let Some(CacheFile { remote, mode }) = typed else { return Ok(None) };
    match RemoteAddress::parse(remote.get_ref()) {
        Ok(address) => Ok(Some(RemotePlace { address, mode: mode.unwrap_or_default() })),
        Err(error @ AddressError::Credentials { .. }) => Err(ManifestError::Secret { path: path.to_path_buf(), error }),
        Err(error) => {
            let fault = Diagnostic::new("`cache.remote` is no address", remote.span(), error.to_string());
            faults.push(fault.with_help(error.remedy()));
            Ok(None)
        }
    }
}

fn name_of(path: &Path, faults: &mut Vec<Diagnostic>) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    if !is_file_name(&stem) {
        let title = format!("the manifest is called `{stem}`, which cannot be its `name`");
        let fault = Diagnostic::new(title, 0..0, format!("expected {FILE_NAME_IN_WORDS}"));
        faults.push(fault.with_help("give it a name of its own: name = \"...\""));
    }
    stem
}

fn check_source(model: &ModelFile, faults: &mut Vec<Diagnostic>) {
    let source = model.source.get_ref().as_str();
    let Some(scheme) = SCHEMES.into_iter().find(|scheme| source.starts_with(scheme)) else {
        let expected = "expected `hf:OWNER/NAME`, `path:DIR`, `synthetic:CONFIG.json` or `builtin:NAME`";
        let title = format!("`model.source` names no kind of source: `{source}`");
        let fault = Diagnostic::new(title, model.source.span(), expected);
        let written = source.split_once(':').map(|(scheme, _)| format!("{scheme}:"));
        let meant = written.and_then(|written| nearest(&written, SCHEMES));
        faults.push(match meant {
            Some(meant) => fault.with_help(format!("did you mean `{meant}`?")),
            None => fault.with_help(format!("a folder is named as `path:{source}`")),
        });
        return;
    };
    if source.len() == scheme.len() {
        let label = format!("expected something after `{scheme}`, found nothing");
        faults.push(Diagnostic::new("`model.source` is incomplete", model.source.span(), label));
    }
    if let Some(revision) = model.revision.as_ref().filter(|_| scheme != "hf:") {
        let title = "`model.revision` has no meaning here";
        faults.push(Diagnostic::new(
            title,
            revision.span(),
            format!("expected it with an `hf:` source, found `{scheme}`"),
        ));
    }
    if let Some(seed) = model.seed.as_ref().filter(|_| scheme != "synthetic:") {
        let title = "`model.seed` has no meaning here";
        let label = format!("expected it with a `synthetic:` source, found `{scheme}`");
        faults.push(Diagnostic::new(title, seed.span(), label));
    }
}

fn resolve_decode(decode: &DecodeFile, faults: &mut Vec<Diagnostic>) -> Decode {
    let DecodeFile {
        context_max,
        steps_per_launch,
        check_positions,
        time_positions,
        sequences_max,
        chunk_max,
        cache_pages,
        batch_invariant,
    } = decode;
    let context_max = *context_max;
    let steps = match steps_per_launch {
        Some(steps) if *steps.get_ref() > context_max => {
            let label = format!("expected 1 to `context_max`, {context_max}, found {}", steps.get_ref());
            faults.push(Diagnostic::new("`decode.steps_per_launch` is out of range", steps.span(), label));
            context_max
        }
        Some(steps) => *steps.get_ref(),
        None => STEPS_PER_LAUNCH_DEFAULT.min(context_max),
    };
    let last_check = context_max - 1;
    let last_time = context_max - steps;
    let check_positions = match check_positions {
        Some(positions) => {
            let limit = format!("below `context_max`, {context_max}");
            written_positions("decode.check_positions", positions, last_check, &limit, faults)
        }
        None => fitting_positions([0, 1, 31, 200, last_check], last_check),
    };
    // Rotary embedding is the identity at position 0 and softmax has one element: a check there alone proves little.
    if let (Some(written), [0], 1..) = (&decode.check_positions, check_positions.as_slice(), last_check) {
        let title = "`decode.check_positions` checks position 0 alone";
        let label =
            "expected another position too: at 0 the rotary embedding is the identity and attention sees one row";
        faults.push(Diagnostic::new(title, written.span(), label));
    }
    let time_positions = match time_positions {
        Some(positions) => {
            let limit = format!("at most {last_time}, which leaves room for the {steps} steps of a launch");
            written_positions("decode.time_positions", positions, last_time, &limit, faults)
        }
        None => fitting_positions([32, 1024, last_time], last_time),
    };
    Decode {
        context_max,
        steps_per_launch: steps,
        check_positions,
        time_positions,
        sequences_max: sequences_max.as_ref().map(|rows| *rows.get_ref()),
        chunk_max: chunk_max.as_ref().map(|rows| *rows.get_ref()),
        cache_pages: cache_pages.as_ref().map(|pages| *pages.get_ref()),
        batch_invariant: batch_invariant.as_ref().is_some_and(|flag| *flag.get_ref()),
    }
}

/// Refuses sizes of steps on GPUs, where the kernels fix the number of rows.
fn check_rows(decode: &DecodeFile, targets: &[Target], faults: &mut Vec<Diagnostic>) {
    let Some(target) = targets.iter().find(|target| target.kind == TargetKind::Cuda) else { return };
    let DecodeFile { chunk_max, cache_pages, .. } = decode;
    let numbers = [("chunk_max", chunk_max), ("cache_pages", cache_pages)].into_iter();
    for (key, span) in numbers.filter_map(|(key, number)| Some((key, number.as_ref()?.span()))) {
        let label = format!("expected it with `cpu` targets alone, found `{}`, a GPU", target.name);
        let fault = Diagnostic::new(format!("`decode.{key}` has no meaning here"), span, label);
        faults.push(fault.with_help("leave it out, or give the `cpu` target a manifest of its own"));
    }
}

/// Positions that a person wrote: those above `last` are faults.
fn written_positions(
    field: &str,
    positions: &Spanned<Vec<Spanned<u32>>>,
    last: u32,
    limit: &str,
    faults: &mut Vec<Diagnostic>,
) -> Vec<u32> {
    if positions.get_ref().is_empty() {
        let title = format!("`{field}` is empty");
        faults.push(Diagnostic::new(title, positions.span(), "expected at least one position"));
    }
    let mut ascending = BTreeSet::new();
    for position in positions.get_ref() {
        let value = *position.get_ref();
        if value > last {
            let title = format!("`{field}` is out of range");
            faults.push(Diagnostic::new(title, position.span(), format!("expected a position {limit}, found {value}")));
        }
        ascending.insert(value);
    }
    ascending.into_iter().collect()
}

/// Default positions, as far as the context reaches.
fn fitting_positions<const N: usize>(positions: [u32; N], last: u32) -> Vec<u32> {
    BTreeSet::from(positions).into_iter().filter(|position| *position <= last).collect()
}

/// The contents of the `[[target]]` tables.
#[derive(Default)]
struct Targets {
    targets: Vec<Target>,
    candidates: BTreeMap<String, String>,
    measured: BTreeMap<String, Measured>,
}

/// The targets, with the contents of their records and of the manifest's tables.
fn resolve_targets(
    files: &[TargetFile],
    base_dir: &Path,
    faults: &mut Vec<Diagnostic>,
) -> Result<Targets, ManifestError> {
    let Targets { mut targets, mut candidates, mut measured } = Targets::default();
    let mut first_record: BTreeMap<String, &str> = BTreeMap::new();
    for TargetFile { record, devices, candidate } in files {
        let written = record.get_ref();
        let TargetRecord { target, measured: figures } = match TargetRecord::load(written, base_dir) {
            Ok(record) => record,
            Err(TargetError::Unknown { name, nearest }) => {
                let label = format!("expected {}, or the path of a record", one_of(Target::builtin_names()));
                let fault = Diagnostic::new(format!("unknown target `{name}`"), record.span(), label);
                faults.push(match nearest {
                    Some(meant) => fault.with_help(format!("did you mean `{meant}`?")),
                    None => fault,
                });
                continue;
            }
            Err(TargetError::File(error @ FileError::Missing { .. })) => {
                let fault = Diagnostic::new(error.to_string(), record.span(), "expected the path of a record");
                faults.push(fault.with_help(PATH_RULE));
                continue;
            }
            Err(error) => return Err(ManifestError::Target(error)),
        };
        let target = match devices {
            Some(devices) if !DEVICES.contains(devices.get_ref()) => {
                let label = format!("expected 1, 2, 4 or 8 devices, found {}", devices.get_ref());
                faults.push(Diagnostic::new("`target.devices` is out of range", devices.span(), label));
                continue;
            }
            Some(devices) => target.on_devices(*devices.get_ref()),
            None => target,
        };
        match first_record.get(&target.name) {
            Some(first) => {
                let title = format!("duplicate target `{}`", target.name);
                let label = format!("expected a name that no other target has, found that of `{first}`");
                faults.push(Diagnostic::new(title, record.span(), label));
            }
            None => {
                first_record.insert(target.name.clone(), written);
                candidates.extend(candidate.clone().map(|knobs| (target.name.clone(), knobs)));
                measured.insert(target.name.clone(), figures.of_devices(target.devices));
                targets.push(target);
            }
        }
    }
    Ok(Targets { targets, candidates, measured })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Tier;

    const MINIMAL: &str = "[model]
source = \"path:ckpt\"

[precision]
weights = \"fp32\"

[decode]
context_max = 64

[[target]]
record = \"cpu\"
";

    fn parse(text: &str) -> Result<Manifest, ManifestError> {
        Manifest::parse(text, Path::new("some/tiny.toml"))
    }

    fn accepted(text: &str) -> Manifest {
        parse(text).unwrap_or_else(|error| panic!("{error}"))
    }

    fn refusal(text: &str) -> String {
        match parse(text) {
            Ok(manifest) => panic!("accepted: {manifest:?}"),
            Err(error) => Fault::from(error).to_string(),
        }
    }

    /// The minimal manifest with one line replaced.
    fn with(line: &str, replacement: &str) -> String {
        assert!(MINIMAL.contains(line), "{line} is not in the minimal manifest");
        MINIMAL.replace(line, replacement)
    }

    /// The minimal manifest with lines added after `context_max`.
    fn decode(context_max: u32, lines: &str) -> String {
        with("context_max = 64", &format!("context_max = {context_max}\n{lines}"))
    }

    #[test]
    fn a_minimal_manifest_has_every_default() {
        assert_eq!(
            accepted(MINIMAL),
            Manifest {
                name: "tiny".to_string(),
                source: "path:ckpt".to_string(),
                revision: "main".to_string(),
                seed: 0,
                precision: Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 },
                formats: FormatPlan::default(),
                decode: Decode {
                    context_max: 64,
                    steps_per_launch: 32,
                    check_positions: vec![0, 1, 31, 63],
                    time_positions: vec![32],
                    sequences_max: None,
                    chunk_max: None,
                    cache_pages: None,
                    batch_invariant: false,
                },
                search: SEARCH_DEFAULT,
                targets: vec![Target::builtin("cpu").expect("builtin")],
                candidates: BTreeMap::new(),
                measured: BTreeMap::from([("cpu".to_string(), Measured::default())]),
                remote: None,
                base_dir: PathBuf::from("some"),
            }
        );
    }

    #[test]
    fn a_gpu_takes_no_sizes_of_the_interpreter() {
        accepted(&decode(64, "sequences_max = 2").replace("\"cpu\"", "\"h200\""));
        for key in ["chunk_max = 4", "cache_pages = 9"] {
            let text = decode(64, key).replace("\"cpu\"", "\"h200\"");
            let found = refusal(&text);
            let name = key.split(' ').next().expect("a key");
            assert!(found.starts_with(&format!("`decode.{name}` has no meaning here\n")), "{found}");
            assert!(found.contains("expected it with `cpu` targets alone, found `h200`, a GPU"), "{found}");
            accepted(&decode(64, key));
        }
    }

    #[test]
    fn any_target_may_be_asked_for_the_bits_of_rows_alone() {
        for record in ["cpu", "h200"] {
            for (key, expected) in [("", false), ("batch_invariant = false", false), ("batch_invariant = true", true)] {
                let text = decode(64, key).replace("\"cpu\"", &format!("\"{record}\""));
                assert_eq!(accepted(&text).decode.batch_invariant, expected, "{record}: {key}");
            }
        }
    }

    #[test]
    fn every_field_can_be_written() {
        let text = "name = \"other\"
[model]
source = \"synthetic:c.json\"
seed = 7
[precision]
weights = \"bf16\"
cache = \"fp32\"
activations = \"fp32\"
[decode]
context_max = 4096
steps_per_launch = 8
check_positions = [200, 5, 5]
time_positions = [4088, 0]
[search]
trials = 12
minutes = 0.5
seed = 3
margin = 0
kernel = \"wave:64\"
[[target]]
record = \"h200\"
[[target]]
record = \"cpu\"
";
        let manifest = accepted(text);
        assert_eq!(manifest.name, "other");
        assert_eq!((manifest.source.as_str(), manifest.seed), ("synthetic:c.json", 7));
        assert_eq!(manifest.precision, Precision { weights: DType::Bf16, cache: DType::F32, wire: DType::F32 });
        assert_eq!(
            manifest.decode,
            Decode {
                context_max: 4096,
                steps_per_launch: 8,
                check_positions: vec![5, 200],
                time_positions: vec![0, 4088],
                sequences_max: None,
                chunk_max: None,
                cache_pages: None,
                batch_invariant: false,
            }
        );
        let rows = decode(64, "sequences_max = 8\nchunk_max = 4\ncache_pages = 99\nbatch_invariant = true");
        let Decode { sequences_max, chunk_max, cache_pages, batch_invariant, .. } = accepted(&rows).decode;
        assert_eq!((sequences_max, chunk_max, cache_pages, batch_invariant), (Some(8), Some(4), Some(99), true));
        let kernel = SearchKernel::Wave { rows: 64 };
        assert_eq!(manifest.search, Search { trials: 12, minutes: 0.5, seed: 3, margin: 0.0, kernel });
        assert_eq!(manifest.targets.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["h200", "cpu"]);
        let hub = accepted(&with("source = \"path:ckpt\"", "source = \"hf:a/b\"\nrevision = \"v2\""));
        assert_eq!((hub.source.as_str(), hub.revision.as_str()), ("hf:a/b", "v2"));
    }

    #[test]
    fn default_positions_are_those_that_fit() {
        let positions = |context_max| {
            let decode = accepted(&decode(context_max, "")).decode;
            (decode.steps_per_launch, decode.check_positions, decode.time_positions)
        };
        assert_eq!(positions(1), (1, vec![0], vec![0]));
        assert_eq!(positions(2), (2, vec![0, 1], vec![0]));
        assert_eq!(positions(33), (32, vec![0, 1, 31, 32], vec![1]));
        assert_eq!(positions(2048), (32, vec![0, 1, 31, 200, 2047], vec![32, 1024, 2016]));
        assert_eq!(positions(1 << 20).2, vec![32, 1024, (1 << 20) - 32]);
    }

    #[test]
    fn an_unknown_key_is_pointed_at() {
        assert_eq!(
            refusal(&with("context_max = 64", "contxt_max = 64\ncontext_max = 64")),
            "unknown key `contxt_max` in `decode`
 --> some/tiny.toml:8:1
  |
8 | contxt_max = 64
  | ^^^^^^^^^^ expected `batch_invariant`, `cache_pages`, `check_positions`, `chunk_max`, `context_max`, `sequences_max`, \
             `steps_per_launch` or `time_positions`
  |
  = help: did you mean `context_max`?"
        );
    }

    #[test]
    fn a_wrong_type_is_pointed_at() {
        assert_eq!(
            refusal(&with("context_max = 64", "context_max = \"64\"")),
            "wrong type for `decode.context_max`
 --> some/tiny.toml:8:15
  |
8 | context_max = \"64\"
  |               ^^^^ expected an integer, found a string"
        );
        assert_eq!(
            refusal(&with("[[target]]", "[target]")),
            "wrong type for `target`
  --> some/tiny.toml:10:1
   |
10 | [target]
   | ^^^^^^^^ expected an array of tables `[[target]]`, found a table"
        );
    }

    #[test]
    fn broken_toml_is_pointed_at() {
        let found = refusal(&with("source = \"path:ckpt\"", "source = path:ckpt"));
        assert!(found.starts_with("not valid TOML\n --> some/tiny.toml:2:10\n"), "{found}");
        let found = refusal(&with("[decode]", "[model]"));
        assert!(found.starts_with("not valid TOML\n --> some/tiny.toml:7:2\n"), "{found}");
    }

    #[test]
    fn an_unknown_target_is_pointed_at() {
        assert_eq!(
            refusal(&with("\"cpu\"", "\"h20\"")),
            "unknown target `h20`
  --> some/tiny.toml:11:10
   |
11 | record = \"h20\"
   |          ^^^^^ expected `cpu`, `t4`, `a100`, `a10g`, `l4`, `l40s`, `rtx4090`, `rtx5090`, `h100`, `h200` or `b200`, \
             or the path of a record
   |
   = help: did you mean `h200`?"
        );
    }

    #[test]
    fn a_duplicate_target_is_pointed_at() {
        assert_eq!(
            refusal(&with(
                "record = \"cpu\"",
                "record = \"cpu\"\n\n[[target]]\nrecord = \"manifests/targets/cpu.toml\""
            )),
            "duplicate target `cpu`
  --> some/tiny.toml:14:10
   |
14 | record = \"manifests/targets/cpu.toml\"
   |          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^ expected a name that no other target has, found that of `cpu`"
        );
    }

    #[test]
    fn missing_keys_are_all_reported() {
        assert_eq!(
            refusal("[model]\n[precision]\n[decode]\n[[target]]\n"),
            "missing key `source` in `model`
 --> some/tiny.toml:1:1
  |
1 | [model]
  | ^^^^^^^ expected a key `source` here

error: missing key `weights` in `precision`
 --> some/tiny.toml:2:1
  |
2 | [precision]
  | ^^^^^^^^^^^ expected a key `weights` here

error: missing key `context_max` in `decode`
 --> some/tiny.toml:3:1
  |
3 | [decode]
  | ^^^^^^^^ expected a key `context_max` here

error: missing key `record` in `target`
 --> some/tiny.toml:4:1
  |
4 | [[target]]
  | ^^^^^^^^^^ expected a key `record` here"
        );
        let found = refusal("");
        for key in ["model", "precision", "decode", "target"] {
            assert!(found.contains(&format!("missing key `{key}`\n")), "{key}: {found}");
        }
        assert_eq!(found.matches("missing key").count(), 4, "{found}");
        let without_targets = MINIMAL.replace("[[target]]\nrecord = \"cpu\"\n", "");
        assert!(refusal(&format!("target = []\n{without_targets}")).starts_with("`target` is empty\n"));
    }

    #[test]
    fn numbers_of_decode_are_kept_in_their_ranges() {
        for (text, title, label) in [
            (decode(0, ""), "`decode.context_max` is out of range", "expected 1 to 1048576, found 0"),
            (decode(1_048_577, ""), "`decode.context_max` is out of range", "expected 1 to 1048576, found 1048577"),
            (
                with("context_max = 64", "context_max = -64"),
                "`decode.context_max` is out of range",
                "expected 1 to 1048576, found -64",
            ),
            (
                with("context_max = 64", "context_max = 99999999999999999999"),
                "`decode.context_max` is out of range",
                "expected 1 to 1048576, found 99999999999999999999",
            ),
            (
                decode(64, "steps_per_launch = 0"),
                "`decode.steps_per_launch` is out of range",
                "expected 1 to 1048576, found 0",
            ),
            (
                decode(64, "steps_per_launch = 65"),
                "`decode.steps_per_launch` is out of range",
                "expected 1 to `context_max`, 64, found 65",
            ),
            (
                decode(64, "check_positions = [1, 64]"),
                "`decode.check_positions` is out of range",
                "expected a position below `context_max`, 64, found 64",
            ),
            (decode(64, "sequences_max = 0"), "`decode.sequences_max` is out of range", "expected 1 to 256, found 0"),
            (decode(64, "chunk_max = 257"), "`decode.chunk_max` is out of range", "expected 1 to 256, found 257"),
            (decode(64, "cache_pages = 0"), "`decode.cache_pages` is out of range", "expected 1 to 16777216, found 0"),
            (
                decode(64, "batch_invariant = 1"),
                "wrong type for `decode.batch_invariant`",
                "expected `true` or `false`",
            ),
            (decode(64, "check_positions = []"), "`decode.check_positions` is empty", "expected at least one position"),
            (
                decode(64, "check_positions = [0]"),
                "`decode.check_positions` checks position 0 alone",
                "expected another position too",
            ),
            (
                decode(64, "time_positions = [33]"),
                "`decode.time_positions` is out of range",
                "expected a position at most 32, which leaves room for the 32 steps of a launch, found 33",
            ),
            (decode(64, "time_positions = []"), "`decode.time_positions` is empty", "expected at least one position"),
            (
                decode(64, "check_positions = [-1]"),
                "`decode.check_positions` is out of range",
                "expected 0 to 1048576, found -1",
            ),
        ] {
            let found = refusal(&text);
            assert!(
                found.starts_with(&format!("{title}\n")) && found.contains(label),
                "expected {title}: {label}\n{found}"
            );
        }
    }

    #[test]
    fn numbers_of_a_search_are_kept_in_their_ranges() {
        for (line, title, label) in [
            (
                "minutes = 0",
                "`search.minutes` is out of range",
                "expected a number above 0, up to 10080 (a week), found 0",
            ),
            ("minutes = -1.5", "`search.minutes` is out of range", "found -1.5"),
            ("minutes = inf", "`search.minutes` is out of range", "found inf"),
            ("trials = -1", "`search.trials` is out of range", "expected 0 to 1000000, found -1"),
            (
                "margin = 1",
                "`search.margin` is out of range",
                "expected a fraction from 0 up to, but not including, 1, found 1",
            ),
            ("margin = -0.1", "`search.margin` is out of range", "found -0.1"),
            ("margin = nan", "`search.margin` is out of range", "found nan"),
            ("seed = -1", "`search.seed` is out of range", "expected 0 or more, found -1"),
            (
                "kernel = \"wave:16\"",
                "`search.kernel` names no kernel that can be searched",
                "expected `decode`, `wave:32`, `wave:64`, `wave:128` or `chunk`, found `wave:16`",
            ),
            ("kernel = \"batch:8\"", "`search.kernel` names no kernel that can be searched", "found `batch:8`"),
            ("kernel = 8", "wrong type for `search.kernel`", "found 8"),
            (
                "budget = 3",
                "unknown key `budget` in `search`",
                "expected `kernel`, `margin`, `minutes`, `seed` or `trials`",
            ),
        ] {
            let found = refusal(&format!("{MINIMAL}\n[search]\n{line}\n"));
            assert!(
                found.starts_with(&format!("{title}\n")) && found.contains(label),
                "expected {title}: {label}\n{found}"
            );
        }
    }

    #[test]
    fn precision_names_formats() {
        let found = refusal(&with("\"fp32\"", "\"f16\""));
        assert!(found.starts_with("unknown value for `precision.weights`\n"), "{found}");
        let names = "`fp32`, `bf16`, `int8`, `fp8`, `int4:128`, `int4:64`, `int4:32` or `mxfp4`";
        assert!(found.contains(&format!("expected {names}, found `f16`\n")), "{found}");
        assert!(found.ends_with("= help: did you mean `bf16`?"), "{found}");
        let found = refusal(&with("weights = \"fp32\"", "weights = \"fp32\"\ncache = \"i32\""));
        assert!(found.starts_with("unknown value for `precision.cache`\n"), "{found}");
        let found = refusal(&with("weights = \"fp32\"", "weights = \"int8\"\nlayers.x = \"bf16\"\nlayers.1 = 3"));
        assert!(found.contains("`precision.layers.x` is no number\n"), "{found}");
        assert!(found.contains("unknown value for `precision.layers.1`\n"), "{found}");

        let mixed =
            accepted(&with("weights = \"fp32\"", "weights = \"int4:64\"\nhead = \"int8\"\nlayers.0 = \"bf16\""));
        assert_eq!(mixed.precision, Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 });
        assert_eq!(mixed.formats.of_embed(), None);
        let embed = accepted(&with("weights = \"fp32\"", "weights = \"bf16\"\nembed = \"int4:32\"")).formats;
        assert_eq!((embed.of_embed().map(crate::format::name_of), embed.of(None)), (Some("int4:32".into()), None));
        let of = |layer| mixed.formats.of(layer).map(crate::format::name_of);
        assert_eq!((of(None), of(Some(0)), of(Some(1))), (Some("int8".into()), None, Some("int4:64".into())));
        assert!(mixed.key_text().contains("precision.layers.0.format bf16\n"), "{}", mixed.key_text());
    }

    #[test]
    fn a_source_has_a_scheme_and_only_its_own_fields() {
        for (lines, title, rest) in [
            ("source = 'ckpt'", "`model.source` names no kind of source: `ckpt`", "a folder is named as `path:ckpt`"),
            ("source = 'paht:ckpt'", "`model.source` names no kind of source: `paht:ckpt`", "did you mean `path:`?"),
            ("source = 'HF:a/b'", "`model.source` names no kind of source: `HF:a/b`", "did you mean `hf:`?"),
            ("source = 'path:'", "`model.source` is incomplete", "expected something after `path:`, found nothing"),
            (
                "source = 'path:x'\nrevision = 'main'",
                "`model.revision` has no meaning here",
                "expected it with an `hf:` source, found `path:`",
            ),
            (
                "source = 'hf:a/b'\nseed = 1",
                "`model.seed` has no meaning here",
                "expected it with a `synthetic:` source, found `hf:`",
            ),
            ("source = 3", "wrong type for `model.source`", "expected a string, found 3"),
        ] {
            let found = refusal(&with("source = \"path:ckpt\"", lines));
            assert!(
                found.starts_with(&format!("{title}\n")) && found.contains(rest),
                "expected {title}: {rest}\n{found}"
            );
        }
    }

    #[test]
    fn faults_of_different_fields_are_reported_together() {
        let found = refusal(
            &decode(64, "check_positions = [64]").replace("\"cpu\"", "\"gpu\"").replace("\"path:ckpt\"", "\"ckpt\""),
        );
        let titles: Vec<&str> = found.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(found.starts_with("`model.source` names no kind of source"), "{found}");
        assert_eq!(titles, ["error: `decode.check_positions` is out of range", "error: unknown target `gpu`"]);
    }

    #[test]
    fn a_name_can_be_a_file_name() {
        let found = Manifest::parse(MINIMAL, Path::new("my model.toml")).expect_err("a blank").to_string();
        assert!(found.starts_with("the manifest is called `my model`, which cannot be its `name`\n"), "{found}");
        let named = format!("name = 'mine'\n{MINIMAL}");
        assert_eq!(Manifest::parse(&named, Path::new("my model.toml")).expect("has a name").name, "mine");
        assert!(refusal(&format!("name = 'a/b'\n{MINIMAL}")).starts_with("`name` cannot be part of a file name\n"));
    }

    #[test]
    fn a_record_is_found_beside_the_manifest_and_blamed_for_its_own_faults() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("m.toml");
        std::fs::write(&path, with("\"cpu\"", "\"own.toml\"")).expect("write");
        let missing = Fault::from(Manifest::load(&path).expect_err("no record yet"));
        assert_eq!(missing.tier, Tier::Input);
        assert!(missing.message.contains("/own.toml` and `own.toml`)"), "{missing}");
        assert!(missing.message.contains("m.toml:11:10\n"), "{missing}");
        let record = TargetRecord::builtin("cpu").expect("builtin").to_toml();
        std::fs::write(folder.path().join("own.toml"), record.replace("\"cpu\"", "\"gpu\"")).expect("write");
        let faulty = Manifest::load(&path).expect_err("a faulty record").to_string();
        assert!(faulty.starts_with("unknown value for `kind`\n") && faulty.contains("own.toml:2:8\n"), "{faulty}");
        std::fs::write(folder.path().join("own.toml"), record.replace("sm_count = 4", "sm_count = 2")).expect("write");
        let manifest = Manifest::load(&path).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((manifest.targets[0].spec.sm_count, manifest.base_dir.as_path()), (2, folder.path()));
    }

    #[test]
    fn a_manifest_that_is_not_there_is_an_input_fault() {
        let fault = Fault::from(Manifest::load(Path::new("no/such.toml")).expect_err("missing"));
        assert_eq!(fault.tier, Tier::Input);
        assert!(fault.message.starts_with("cannot read `no/such.toml`: "), "{fault}");
    }

    #[test]
    fn the_key_turns_with_every_field_that_matters_and_with_no_other() {
        let manifest = accepted(MINIMAL);
        let key = manifest.key_text();
        assert!(key.starts_with("model.source \"path:ckpt\"\nmodel.revision \"main\"\n"), "{key}");
        assert!(key.contains("decode.check_positions [0, 1, 31, 63]\n"), "{key}");
        assert!(key.contains("target.spec.sm_count 4\n"), "{key}");
        let turned = |change: fn(&mut Manifest)| {
            let mut other = manifest.clone();
            change(&mut other);
            other.key_text() != key
        };
        let matters: [fn(&mut Manifest); 24] = [
            |m| m.formats.experts = Some(NAMED[2].1),
            |m| m.formats.head = Some(NAMED[2].1),
            |m| m.formats.embed = Some(NAMED[2].1),
            |m| m.source.push('x'),
            |m| m.revision.push('x'),
            |m| m.seed += 1,
            |m| m.precision.weights = DType::Bf16,
            |m| m.precision.cache = DType::Bf16,
            |m| m.precision.wire = DType::Bf16,
            |m| m.decode.context_max += 1,
            |m| m.decode.steps_per_launch += 1,
            |m| m.decode.check_positions.push(40),
            |m| m.decode.time_positions.push(40),
            |m| m.decode.sequences_max = Some(2),
            |m| m.decode.chunk_max = Some(2),
            |m| m.decode.cache_pages = Some(7),
            |m| m.decode.batch_invariant = true,
            |m| m.search.trials += 1,
            |m| m.search.minutes += 1.0,
            |m| m.search.seed += 1,
            |m| m.search.margin += 0.01,
            |m| m.search.kernel = SearchKernel::Chunk,
            |m| m.targets.push(m.targets[0].clone()),
            |m| m.measured.get_mut("cpu").expect("a record").hop_idle_us = Some(1.0),
        ];
        for (i, change) in matters.into_iter().enumerate() {
            assert!(turned(change), "change {i} did not turn the key");
        }
        assert!(!turned(|m| m.name.push('x')));
        assert!(!turned(|m| m.base_dir.push("x")));
    }

    #[test]
    fn a_damaged_manifest_is_refused_or_read_but_never_a_panic() {
        for at in 0..MINIMAL.len() {
            for damage in ["", "\u{0}", "[", "]", "\"", "=", "\n", "9", "-", "é", "[[target]]\n"] {
                let damaged = format!("{}{damage}{}", &MINIMAL[..at], &MINIMAL[at + 1..]);
                for text in [damaged.as_str(), &MINIMAL[..at]] {
                    if let Err(error) = parse(text) {
                        assert!(!error.to_string().is_empty(), "refused without a word: {text}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_manifests_of_this_repository_are_valid() {
        let mut seen = 0;
        for entry in std::fs::read_dir("manifests").expect("the manifests") {
            let path = entry.expect("an entry").path();
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            let manifest = Manifest::load(&path).unwrap_or_else(|error| panic!("{error}"));
            if let Some(config) = manifest.source.strip_prefix("synthetic:") {
                let config = files::find(config, &manifest.base_dir).unwrap_or_else(|error| panic!("{error}"));
                let text = files::read_text(&config, 1 << 20).unwrap_or_else(|error| panic!("{error}"));
                let config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
                let positions = config["max_position_embeddings"].as_u64().expect("a number");
                assert!(u64::from(manifest.decode.context_max) <= positions, "{}: context_max", path.display());
            }
            seen += 1;
        }
        assert!(seen >= 9, "found {seen} manifests");
        let all = Manifest::load(Path::new("manifests/llama-3.2-1b-all-gpus.toml")).expect("valid");
        let gpus: Vec<&str> = all.targets.iter().map(|target| target.name.as_str()).collect();
        assert_eq!(gpus, Target::builtin_names().filter(|name| *name != "cpu").collect::<Vec<_>>());
        let llama = Manifest::load(Path::new("manifests/llama-3.2-1b-synthetic.toml")).expect("valid");
        assert!(llama.decode.time_positions.contains(&2048) && llama.decode.time_positions.contains(&16384));
    }
}
