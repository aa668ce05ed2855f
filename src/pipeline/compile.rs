//! Owns the compile stage: which compiler there is, what was compiled before, and the cubins of all targets at once.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant, UNIX_EPOCH};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::cache::{Entry, Outcome};
use crate::codegen::KernelSource;
use crate::cuda::arch::Arch;
use crate::cuda::cubin::{self, Resources};
use crate::cuda::nvrtc::{self, Nvrtc, NvrtcError, NvrtcVersion};
use crate::digest::Digest;
use crate::error::{Fault, Tier};
use crate::report::Stage;

use super::Workspace;
use super::chain::NotMade;
use super::keys::{self, CubinKey, Keyed};
use super::stages::{BuildContext, Generated};
use super::stored;

/// A compiled kernel and what the compiler said.
pub(super) struct Cubin {
    /// Key and content of its entry.
    pub entry: (Digest, Digest),
    pub bytes: Vec<u8>,
    pub digest: Digest,
    pub resources: Resources,
    pub nvrtc: String,
    /// Time that this build took for it; `None` if it was in the cache.
    pub compile_ms: Option<f64>,
}

/// The compiler of this machine: found once, loaded only when something is compiled.
pub(super) struct Compiler<'a> {
    workspace: &'a Workspace,
    loaded: OnceLock<Result<Nvrtc, Fault>>,
    version: OnceLock<Result<NvrtcVersion, Fault>>,
}

/// What is remembered of the library that was found last.
#[derive(Serialize, Deserialize, PartialEq)]
struct Remembered {
    path: PathBuf,
    size_bytes: u64,
    modified_ns: u64,
    major: u32,
    minor: u32,
    patch: Option<u32>,
}

/// The variable by which a user names the library, or its folder.
const NAMED: &str = "MONOBLOC_NVRTC";
/// Variables that decide where a library is looked for.
const PLACES: [&str; 7] = [NAMED, "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "HOME", "PATH"];

impl<'a> Compiler<'a> {
    pub fn new(workspace: &'a Workspace) -> Compiler<'a> {
        Compiler { workspace, loaded: OnceLock::new(), version: OnceLock::new() }
    }

    /// The version, without loading the library where the one that was found last is still the same file.
    ///
    /// Loading takes a fifth of a second, which a build with no work to do does not have. Not noticed: a library that
    /// was installed since in a place that is tried earlier; the next compile finds it.
    pub fn version(&self) -> Result<NvrtcVersion, Fault> {
        let version = self.version.get_or_init(|| match self.remembered() {
            Some(version) => Ok(version),
            None => self.nvrtc().map(Nvrtc::version),
        });
        version.clone()
    }

    pub fn nvrtc(&self) -> Result<&Nvrtc, Fault> {
        let loaded = self.loaded.get_or_init(|| {
            let nvrtc = Nvrtc::load()?;
            self.remember(&nvrtc);
            Ok(nvrtc)
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    /// What is wrong with the library that the user named; `None` if nothing is, or if none was named.
    pub fn misnamed(&self) -> Option<Fault> {
        let named = std::env::var(NAMED).ok().filter(|named| !named.is_empty())?;
        let missing = self.version().err()?;
        let why = missing.message.lines().nth(1).map(|tried| format!(": {}", tried.trim())).unwrap_or_default();
        Some(
            Fault::environment(format!("`{NAMED}` is `{named}`, and no NVRTC can be loaded from there{why}"))
                .with_remedy(format!("correct `{NAMED}`, or unset it to look in the usual places")),
        )
    }

    fn subject() -> String {
        let value = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        PLACES.map(|name| format!("{name}={:?}", value(name))).join(" ")
    }

    fn remembered(&self) -> Option<NvrtcVersion> {
        let (key, _) = self.workspace.cache.latest_why(keys::NVRTC, &Compiler::subject())?;
        let entry = self.workspace.cache.get(keys::NVRTC, &key).ok()??;
        let Remembered { path, size_bytes, modified_ns, major, minor, patch } =
            serde_json::from_slice(&entry.bytes().ok()?).ok()?;
        let metadata = fs::metadata(&path).ok()?;
        let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos() as u64;
        (metadata.len() == size_bytes && modified == modified_ns).then_some(NvrtcVersion { major, minor, patch })
    }

    /// A cache that cannot be written costs the next build the time of loading.
    fn remember(&self, nvrtc: &Nvrtc) {
        let identity = nvrtc.identity();
        let NvrtcVersion { major, minor, patch } = identity.version;
        let (path, size_bytes, modified_ns) = (identity.path, identity.size_bytes, identity.modified_ns as u64);
        let remembered = Remembered { path, size_bytes, modified_ns, major, minor, patch };
        if let Ok(bytes) = serde_json::to_vec(&remembered) {
            let key = Digest::of(&bytes);
            let why = format!("the compiler {} at {}\n", identity.version, remembered.path.display());
            let cache = &self.workspace.cache;
            let _ = cache
                .put(keys::NVRTC, &key, &why, &bytes)
                .and_then(|_| cache.set_latest(keys::NVRTC, &Compiler::subject(), &key));
        }
    }
}

/// The key of a compile by a version.
pub(super) fn cubin_key(source: &KernelSource, version: NvrtcVersion) -> Result<Keyed, Fault> {
    let arch = Arch::parse(&source.arch).map_err(NvrtcError::from)?;
    Ok(CubinKey { source, options: &nvrtc::options(version, arch), nvrtc: &version.to_string() }.keyed())
}

/// A cubin that is in the cache, or the key under which it belongs there.
pub(super) struct Found {
    pub keyed: Keyed,
    pub entry: Option<Entry>,
    /// Version of the compiler.
    pub nvrtc: String,
}

/// Finds the cubin of a source. Without a compiler, the one that was made last from the same source will do.
///
/// # Errors
/// [`NotMade::NoCompiler`] if there is neither; some callers can go on without a cubin.
pub(super) fn find_cubin(
    context: &BuildContext<'_>,
    compiler: &Compiler<'_>,
    source: &Generated,
) -> Result<Found, NotMade> {
    let (workspace, cache) = (context.workspace, &context.workspace.cache);
    match compiler.version() {
        Ok(version) => {
            let keyed = cubin_key(&source.source, version)?;
            let entry = workspace.trusted(&keyed)?;
            Ok(Found { keyed, entry, nvrtc: version.to_string() })
        }
        Err(missing) if missing.tier == Tier::Environment => {
            let here = cache.latest_why(keys::COMPILE, &source_subject(source));
            let published = if here.is_none() { published(workspace, source)? } else { None };
            let Some((key, why)) = here.or(published) else {
                return Err(NotMade::NoCompiler(missing));
            };
            let nvrtc = why.lines().find_map(|line| line.strip_prefix("nvrtc = ")).unwrap_or_default().to_string();
            let keyed = Keyed { stage: keys::COMPILE, key, why };
            match workspace.trusted(&keyed)? {
                Some(entry) => Ok(Found { keyed, entry: Some(entry), nvrtc }),
                None => Err(NotMade::NoCompiler(missing)),
            }
        }
        Err(fault) => Err(fault.into()),
    }
}

/// Whether this cache had no cubin of a source yet.
fn entry_is_new_here(workspace: &Workspace, subject: &str) -> bool {
    workspace.cache.latest_why(keys::COMPILE, subject).is_none()
}

fn source_subject(source: &Generated) -> String {
    format!("source {}", source.content)
}

/// Names the entry that says by which compiler a source was compiled.
fn published_key(source: &Generated) -> Digest {
    Digest::of(format!("compiler of {}", source_subject(source)).as_bytes())
}

/// Key text of that entry.
fn published_why(source: &Generated) -> String {
    format!("source = {}\n", source.content)
}

/// Lets machines without a compiler, which share this cache, find the cubin of a source: the version is a part of its key. The
/// first version stays, because any cubin of the same source will do.
fn publish(workspace: &Workspace, source: &Generated, nvrtc: &str) -> Result<(), Fault> {
    let (cache, key) = (&workspace.cache, published_key(source));
    if cache.get(keys::COMPILER, &key)?.is_none() {
        cache.put(keys::COMPILER, &key, &published_why(source), nvrtc.as_bytes())?;
    }
    Ok(())
}

/// Stores here what [`publish`] stored elsewhere.
pub(super) fn keep_published(workspace: &Workspace, source: &Generated, nvrtc: NvrtcVersion) -> Result<(), Fault> {
    let (key, why) = (published_key(source), published_why(source));
    Ok(workspace.cache.keep(keys::COMPILER, &key, &why, nvrtc.to_string().as_bytes())?)
}

/// Key and key text of the cubin by the compiler that [`publish`] named. The key is computed here, so that it is one of this source.
fn published(workspace: &Workspace, source: &Generated) -> Result<Option<(Digest, String)>, Fault> {
    let known = workspace.cache.get_known(keys::COMPILER, &published_key(source), &published_why(source))?;
    let Some(entry) = known else { return Ok(None) };
    let bytes = entry.bytes()?;
    let Some(version) = std::str::from_utf8(&bytes).ok().and_then(NvrtcVersion::parse) else { return Ok(None) };
    let Keyed { key, why, .. } = cubin_key(&source.source, version)?;
    Ok(Some((key, why)))
}

/// A source on its way to a cubin.
struct Pending<'a> {
    context: BuildContext<'a>,
    source: &'a Generated,
    found: Result<Found, NotMade>,
    /// The entry of the report while something is compiled.
    stage: Option<Stage<'a>>,
}

/// Entry, how it came about, and milliseconds.
type Compiled = (Entry, Outcome, f64);

impl<'a> Pending<'a> {
    /// Looks the cubin up, and announces the compile where there is none.
    fn begin(
        compiler: &Compiler<'_>,
        context: BuildContext<'a>,
        source: &'a Generated,
    ) -> Result<Pending<'a>, NotMade> {
        let found = match find_cubin(&context, compiler, source) {
            Err(NotMade::NoCompiler(missing)) => Err(NotMade::NoCompiler(missing)),
            other => Ok(other?),
        };
        let (report, title) = (&context.workspace.report, context.title(keys::COMPILE));
        let stage = match &found {
            Ok(Found { entry: Some(_), .. }) => {
                report.cached(&title);
                None
            }
            Ok(Found { entry: None, .. }) => Some(report.stage(&title, &source.source.arch)),
            Err(_) => None,
        };
        Ok(Pending { context, source, found, stage })
    }

    fn is_missing(&self) -> bool {
        matches!(self.found, Ok(Found { entry: None, .. }))
    }

    /// Compiles what was not found; `None` where there is nothing to compile.
    fn compile(&self, compiler: &Compiler<'_>) -> Option<Result<Compiled, NotMade>> {
        let Ok(Found { keyed, entry: None, .. }) = &self.found else { return None };
        let workspace = self.context.workspace;
        let started = Instant::now();
        let made = workspace.cache.get_or_build(keyed.stage, &keyed.key, &keyed.why, || {
            let made = match compiler.nvrtc()?.compile(&self.source.source) {
                // Another compiler may know the architecture.
                Err(error @ NvrtcError::ArchUnsupported { .. }) => return Err(NotMade::NoCompiler(error.into())),
                other => other.map_err(Fault::from)?,
            };
            // Read now, so that a cubin whose costs cannot be told is never stored.
            cubin::read(&made.cubin, &made.log).map_err(Fault::from)?;
            let bytes = stored::cubin_bytes(&made.log, &made.cubin);
            workspace.attest(keyed, Digest::of(&bytes))?;
            Ok(bytes)
        });
        Some(made.map(|(entry, outcome)| (entry, outcome, started.elapsed().as_secs_f64() * 1e3)))
    }

    /// Tells how it went, and remembers what the subject was built from.
    fn end(self, compiled: Option<Result<Compiled, NotMade>>) -> Result<Box<Cubin>, NotMade> {
        let Pending { context, source, found, stage } = self;
        let Found { keyed, entry, nvrtc } = found?;
        let (entry, compile_ms) = match (entry, compiled.transpose()?) {
            (_, Some((entry, outcome, ms))) => {
                match (stage, outcome) {
                    (Some(stage), Outcome::Built) => stage.done_in(Duration::from_secs_f64(ms / 1e3)),
                    _ => context.workspace.report.cached(&context.title(keys::COMPILE)),
                }
                (entry, (outcome == Outcome::Built).then_some(ms))
            }
            (Some(entry), None) => (entry, None),
            (None, None) => return Err(Fault::internal("a cubin that was not found was not compiled").into()),
        };
        context.workspace.point(&keyed, &context.subject())?;
        let here = source_subject(source);
        if entry_is_new_here(context.workspace, &here) && compile_ms.is_none() {
            let (target, report) = (&context.target.name, &context.workspace.report);
            report.note(&format!("{target}: its cubin was compiled elsewhere, by NVRTC {nvrtc}"));
        }
        context.workspace.point(&keyed, &here)?;
        publish(context.workspace, source, &nvrtc)?;
        Ok(Box::new(stored_cubin(&entry, keyed.key, nvrtc, compile_ms)?))
    }
}

/// Compiles a source that is not in the cache.
pub(super) fn compile(
    compiler: &Compiler<'_>,
    context: &BuildContext<'_>,
    source: &Generated,
) -> Result<Box<Cubin>, NotMade> {
    let pending = Pending::begin(compiler, *context, source)?;
    let compiled = pending.compile(compiler);
    pending.end(compiled)
}

/// Compiles the sources that are not in the cache, on all cores; answers in their order.
pub(super) fn compile_each(
    compiler: &Compiler<'_>,
    sources: &[(BuildContext<'_>, &Generated)],
) -> Vec<Result<Box<Cubin>, NotMade>> {
    // Announced in the order of the manifest, whichever ends first.
    let pending: Vec<_> = sources.iter().map(|(context, source)| Pending::begin(compiler, *context, source)).collect();
    let missing = pending.iter().flatten().filter(|pending| pending.is_missing()).count() as u64;
    let progress = sources.first().map(|(context, _)| context.workspace.report.progress("kernels compiled", missing));
    let compile = |pending: &Pending<'_>| {
        let compiled = pending.compile(compiler);
        if let (Some(progress), true) = (&progress, compiled.is_some()) {
            progress.inc(1);
        }
        compiled
    };
    let compiled: Vec<_> = pending.par_iter().map(|pending| pending.as_ref().ok().and_then(compile)).collect();
    drop(progress);
    pending.into_iter().zip(compiled).map(|(pending, compiled)| pending?.end(compiled)).collect()
}

/// Reads the entry under `key`.
pub(super) fn stored_cubin(entry: &Entry, key: Digest, nvrtc: String, compile_ms: Option<f64>) -> Result<Cubin, Fault> {
    let bytes = entry.bytes()?;
    let (cubin, resources) = stored::cubin(&bytes, &entry.path().display().to_string())?;
    let (entry, digest) = ((key, entry.content()), Digest::of(cubin));
    Ok(Cubin { entry, digest, bytes: cubin.to_vec(), resources, nvrtc, compile_ms })
}
