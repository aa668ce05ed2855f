//! Owns the compile stage: which compiler there is, what was compiled before, and the cubins of all targets at once.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant, UNIX_EPOCH};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::cache::{CacheError, Entry, Outcome};
use crate::codegen::KernelSource;
use crate::cuda::arch::Arch;
use crate::cuda::cubin::{self, Resources};
use crate::cuda::nvrtc::{self, Nvrtc, NvrtcError, NvrtcVersion};
use crate::digest::Digest;
use crate::error::{Fault, Tier};

use super::Workspace;
use super::keys::{self, CubinKey, Keyed};
use super::stages::{Generated, Site};
use super::stored;

/// A compiled kernel and what the compiler said.
pub(super) struct Cubin {
    pub bytes: Vec<u8>,
    pub digest: Digest,
    pub resources: Resources,
    pub nvrtc: String,
    /// Of this build; `None` if it was in the cache.
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
        let why = missing.message.lines().nth(1).map(|tried| format!(":{tried}")).unwrap_or_default();
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

/// What stands between a source and its cubin.
pub(super) enum Compile {
    /// In the cache, or compiled just now.
    Done(Box<Cubin>),
    /// There is no compiler here, and no cubin of this source.
    Waits(Fault),
}

/// Entry, how it came about, and milliseconds.
type Compiled = (Entry, Outcome, f64);

/// Why there is no cubin.
enum Unmade {
    /// The compiler that is here does not know the architecture; another one may.
    Waits(Fault),
    Fault(Fault),
}

impl From<Fault> for Unmade {
    fn from(fault: Fault) -> Self {
        Unmade::Fault(fault)
    }
}

impl From<CacheError> for Unmade {
    fn from(error: CacheError) -> Self {
        Unmade::Fault(error.into())
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

/// Finds the cubin of a source; the inner error says that there is no compiler here, which only some callers mind.
/// Without a compiler, the one that was made last from the same source will do.
pub(super) fn find_cubin(
    site: &Site<'_>,
    compiler: &Compiler<'_>,
    source: &Generated,
) -> Result<Result<Found, Fault>, Fault> {
    let (workspace, cache) = (site.workspace, &site.workspace.cache);
    match compiler.version() {
        Ok(version) => {
            let keyed = cubin_key(&source.source, version)?;
            let entry = workspace.trusted(&keyed)?;
            Ok(Ok(Found { keyed, entry, nvrtc: version.to_string() }))
        }
        Err(missing) if missing.tier == Tier::Environment => {
            let Some((key, why)) = cache.latest_why(keys::COMPILE, &source_subject(source)) else {
                return Ok(Err(missing));
            };
            let nvrtc = why.lines().find_map(|line| line.strip_prefix("nvrtc = ")).unwrap_or_default().to_string();
            let keyed = Keyed { stage: keys::COMPILE, key, why };
            Ok(match workspace.trusted(&keyed)? {
                Some(entry) => Ok(Found { keyed, entry: Some(entry), nvrtc }),
                None => Err(missing),
            })
        }
        Err(fault) => Err(fault),
    }
}

fn source_subject(source: &Generated) -> String {
    format!("source {}", source.content)
}

/// Compiles the sources that are not in the cache, on all cores; answers in the order of the sites.
pub(super) fn compile(compiler: &Compiler<'_>, sites: &[(Site<'_>, &Generated)]) -> Result<Vec<Compile>, Fault> {
    let found = sites
        .iter()
        .map(|(site, source)| {
            let found = find_cubin(site, compiler, source)?;
            if let Ok(Found { entry: Some(_), .. }) = &found {
                site.workspace.report.cached(&site.title(keys::COMPILE));
            }
            // Announced in the order of the manifest, whichever ends first.
            let stage = match &found {
                Ok(Found { entry: None, .. }) => {
                    Some(site.workspace.report.stage(&site.title(keys::COMPILE), &source.source.arch))
                }
                _ => None,
            };
            Ok((found, stage))
        })
        .collect::<Result<Vec<_>, Fault>>()?;
    let missing: Vec<_> = found
        .iter()
        .zip(sites)
        .filter_map(|((found, _), (_, source))| match found {
            Ok(Found { keyed, entry: None, .. }) => Some((keyed, &source.source)),
            _ => None,
        })
        .collect();
    let workspace = sites.first().map(|(site, _)| site.workspace);
    let cache = workspace.map(|workspace| &workspace.cache);
    let progress = workspace.map(|workspace| workspace.report.progress("kernels compiled", missing.len() as u64));
    let compiled: Vec<Result<Compiled, Unmade>> = missing
        .par_iter()
        .map(|(keyed, source)| {
            let started = Instant::now();
            let cache = cache.ok_or_else(|| Unmade::Fault(Fault::internal("a compile without a site")))?;
            let made = cache.get_or_build(keyed.stage, &keyed.key, &keyed.why, || {
                let made = match compiler.nvrtc()?.compile(source) {
                    Err(error @ NvrtcError::ArchUnsupported { .. }) => return Err(Unmade::Waits(error.into())),
                    other => other.map_err(Fault::from)?,
                };
                // Read now, so that a cubin whose costs cannot be told is never stored.
                cubin::read(&made.cubin, &made.log).map_err(Fault::from)?;
                let bytes = stored::cubin_bytes(&made.log, &made.cubin);
                if let Some(workspace) = workspace {
                    workspace.vouch(keyed, Digest::of(&bytes))?;
                }
                Ok(bytes)
            });
            if let Some(progress) = &progress {
                progress.inc(1);
            }
            made.map(|(entry, outcome)| (entry, outcome, started.elapsed().as_secs_f64() * 1e3))
        })
        .collect();
    drop(progress);
    let mut compiled = compiled.into_iter();
    let mut results = vec![];
    for ((found, stage), (site, source)) in found.into_iter().zip(sites) {
        let Found { keyed, entry, nvrtc } = match found {
            Ok(found) => found,
            Err(missing) => {
                results.push(Compile::Waits(missing));
                continue;
            }
        };
        let (entry, compile_ms) = match (entry, stage.is_some().then(|| compiled.next()).flatten()) {
            (Some(entry), _) => (entry, None),
            (None, Some(Ok((entry, outcome, ms)))) => {
                match (stage, outcome) {
                    (Some(stage), Outcome::Built) => stage.done_in(Duration::from_secs_f64(ms / 1e3)),
                    _ => site.workspace.report.cached(&site.title(keys::COMPILE)),
                }
                (entry, (outcome == Outcome::Built).then_some(ms))
            }
            (None, Some(Err(Unmade::Waits(missing)))) => {
                results.push(Compile::Waits(missing));
                continue;
            }
            (None, Some(Err(Unmade::Fault(fault)))) => return Err(fault),
            (None, None) => return Err(Fault::internal("a compile gave no result")),
        };
        site.workspace.point(&keyed, &site.subject())?;
        site.workspace.point(&keyed, &source_subject(source))?;
        results.push(Compile::Done(Box::new(stored_cubin(&entry, nvrtc, compile_ms)?)));
    }
    Ok(results)
}

pub(super) fn stored_cubin(entry: &Entry, nvrtc: String, compile_ms: Option<f64>) -> Result<Cubin, Fault> {
    let bytes = entry.bytes()?;
    let (cubin, resources) = stored::cubin(&bytes, &entry.path().display().to_string())?;
    Ok(Cubin { digest: Digest::of(cubin), bytes: cubin.to_vec(), resources, nvrtc, compile_ms })
}
