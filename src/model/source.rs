//! Owns where a model comes from: `hf:OWNER/NAME`, `path:DIR` or `synthetic:CONFIG.json`, made a local folder or file. A model in GGUF
//! is a file, or one of several files of a repository of the hub: `path:FILE.gguf`, `hf:OWNER/NAME:FILE.gguf`.
//!
//! A hub source that is already in the local cache is answered without a request, so a build repeats offline and does
//! not move when a branch does; the commit that was used is reported, and pinning it is the manifest's business. The
//! cache has the layout of the Python client and is shared with it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::Fault;
use crate::files::{self, FileError};
use crate::gguf;
#[cfg(feature = "hub")]
use crate::model::hub;
use crate::model::weights::{INDEX_BYTES_MAX, INDEX_FILE, SINGLE_FILE, shards_of};

/// A `[model] source` that was understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A model of the hub, at a branch, tag or commit; with `file` a GGUF file of it, by its name or a part of it (`Q4_K_M`).
    Hub { repo: String, revision: String, file: Option<String> },
    /// A checkpoint folder or a GGUF file, as written; see [`files::find`].
    Path(String),
    /// A config, as written, whose weights are a function of the seed.
    Synthetic { config: String, seed: u64 },
}

/// A source on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolved {
    /// A checkpoint folder or a GGUF file, and the commit it is of if it came from the hub.
    Checkpoint {
        dir: PathBuf,
        commit: Option<String>,
    },
    Synthetic {
        config: PathBuf,
        seed: u64,
    },
}

/// What a download is doing, for progress reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// A file begins; its whole size.
    File { name: &'a str, bytes: u64 },
    /// So many more bytes of it are here; those of an earlier, interrupted download included.
    Received { bytes: u64 },
    /// The file is here and was checked.
    Done { name: &'a str },
    /// Another process downloads the same file.
    Waiting { name: &'a str },
    /// The hub answered that it is busy; the request is repeated after `wait`.
    Busy { status: u16, wait: Duration },
}

#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("source `{text}`: expected `hf:OWNER/NAME`, `path:DIR`, `path:FILE.gguf` or `synthetic:CONFIG.json`")]
    Scheme { text: String },
    #[error("source `hf:{repo}`: expected OWNER/NAME, or OWNER/NAME:FILE, of letters, digits, `-`, `_` and `.`")]
    RepoName { repo: String },
    #[error("revision `{revision}`: expected a branch, a tag or a commit")]
    RevisionName { revision: String },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("`{path}` is not a folder, and no GGUF file by its name")]
    NotAFolder { path: PathBuf },
    #[error("`{path}` is not a file")]
    NotAFile { path: PathBuf },
    #[error("`{repo}` at `{revision}` is not complete in the local cache `{cache}`, and {why}")]
    Offline { repo: String, revision: String, cache: PathBuf, why: &'static str },
    #[error("HF_ENDPOINT `{endpoint}` is no address: expected `https://HOST`")]
    Endpoint { endpoint: String },
    #[error("the hub at {endpoint} cannot be reached: {detail}")]
    Unreachable { endpoint: String, detail: String },
    #[error("the hub at {endpoint} was silent for {seconds} s when it was asked for `{what}`")]
    Silent { endpoint: String, what: String, seconds: u64 },
    #[error("access to `{repo}` was refused (status {status}): it is gated or private, or does not exist")]
    Refused { repo: String, status: u16, with_token: bool },
    #[error("`{what}` was not found on the hub")]
    NotFound { what: String },
    #[error("the hub answered `{what}` with status {status}")]
    Status { what: String, status: u16 },
    #[error("the hub's answer for `{what}` cannot be used: {detail}")]
    Answer { what: String, detail: String },
    #[error("the download of `{file}` was cut off: {detail}")]
    CutOff { file: String, detail: String },
    #[error("`{file}` arrived damaged: expected {expected}, found {found}")]
    Damaged { file: String, expected: String, found: String },
    #[error("`{repo}` has no safetensors weights, only `{file}` (a pickle file can run code)")]
    PickleOnly { repo: String, file: String },
    #[error("`{repo}` has no safetensors weights, only GGUF files such as `{file}`")]
    GgufOnly { repo: String, file: String },
    #[error("`{repo}` has no safetensors weights")]
    NoWeights { repo: String },
    #[error("`{repo}` has {} models in GGUF: {}", .files.len(), shortened(.files))]
    SeveralGguf { repo: String, files: Vec<String> },
    #[error("`{repo}` has no GGUF file `{file}`: {}", shortened(.files))]
    NoGguf { repo: String, file: String, files: Vec<String> },
    #[error("another process has held the lock of `{file}` for {minutes} minutes")]
    Locked { file: String, minutes: u64 },
    #[error("`{path}`: {error}")]
    Io { path: PathBuf, error: io::Error },
}

/// Names for a message.
fn shortened(files: &[String]) -> String {
    const SHOWN: usize = 12;
    let shown: Vec<String> = files.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
    let more = files.len().saturating_sub(SHOWN);
    match (files.is_empty(), more) {
        (true, _) => "it has none".to_string(),
        (false, 0) => shown.join(", "),
        (false, more) => format!("{} and {more} more", shown.join(", ")),
    }
}

impl From<SourceError> for Fault {
    fn from(error: SourceError) -> Fault {
        let message = error.to_string();
        match error {
            SourceError::File(error) => Fault::from(error),
            SourceError::RepoName { ref repo } => {
                let fault = Fault::input(message);
                match repo_meant(repo) {
                    Some(meant) => fault.with_remedy(meant),
                    None => fault,
                }
            }
            SourceError::SeveralGguf { repo, files } => {
                let file = files.into_iter().next().unwrap_or_default();
                Fault::input(message).with_remedy(format!("name one of them, as `hf:{repo}:{file}`"))
            }
            SourceError::NoGguf { .. } => Fault::input(message).with_remedy("check the name of the file"),
            SourceError::Scheme { .. }
            | SourceError::RevisionName { .. }
            | SourceError::NotAFolder { .. }
            | SourceError::NotAFile { .. }
            | SourceError::NoWeights { .. } => Fault::input(message),
            SourceError::GgufOnly { repo, file } => {
                Fault::input(message).with_remedy(format!("name one of them, as `hf:{repo}:{file}`"))
            }
            SourceError::PickleOnly { .. } => {
                Fault::input(message).with_remedy("convert it to safetensors, or name a converted copy")
            }
            SourceError::NotFound { .. } => Fault::input(message).with_remedy("check the name and the revision"),
            SourceError::Offline { .. } => {
                Fault::environment(message).with_remedy("download it where there is a network, into the same cache")
            }
            SourceError::Endpoint { .. } => Fault::environment(message).with_remedy("correct or unset HF_ENDPOINT"),
            SourceError::Silent { .. } => Fault::environment(message)
                .with_remedy("run the command again, or set HF_HUB_DOWNLOAD_TIMEOUT to more seconds"),
            SourceError::Unreachable { .. } => Fault::environment(message)
                .with_remedy("check the network and HF_ENDPOINT, or use `path:DIR` with a copy of the checkpoint"),
            SourceError::Refused { with_token: false, .. } => Fault::environment(message)
                .with_remedy("accept the model's terms on its page, then set HF_TOKEN to an access token"),
            SourceError::Refused { .. } => Fault::environment(message)
                .with_remedy("accept the model's terms on its page with the account that HF_TOKEN belongs to"),
            SourceError::CutOff { .. } => {
                Fault::environment(message).with_remedy("run the command again: the download resumes where it stopped")
            }
            SourceError::Damaged { .. } => {
                Fault::environment(message).with_remedy("run the command again: the damaged file was removed")
            }
            SourceError::Status { status: 429, .. } => Fault::environment(message).with_remedy(
                "this address has asked too often: wait some minutes, or set HF_TOKEN, which raises the limit",
            ),
            SourceError::Status { status: 500.., .. } => Fault::environment(message).with_remedy(
                "the hub has a fault of its own (https://status.huggingface.co): run the command again later",
            ),
            SourceError::Status { .. }
            | SourceError::Answer { .. }
            | SourceError::Locked { .. }
            | SourceError::Io { .. } => Fault::environment(message),
        }
    }
}

impl Source {
    /// Reads the manifest's `source`; `revision` speaks about `hf:`, `seed` about `synthetic:`.
    pub fn parse(text: &str, revision: &str, seed: u64) -> Result<Source, SourceError> {
        match text.split_once(':') {
            Some(("hf", text)) => {
                let (repo, file) = match text.split_once(':') {
                    Some((repo, file)) => (repo, Some(file)),
                    None => (text, None),
                };
                let named = |part: &str| !part.is_empty() && !part.contains("..") && part.chars().all(is_name_char);
                match repo.split_once('/') {
                    Some((owner, name)) if named(owner) && named(name) && file.is_none_or(named) => {}
                    _ => return Err(SourceError::RepoName { repo: text.to_string() }),
                }
                // The revision becomes part of a path in the cache.
                if !revision.split('/').all(named) {
                    return Err(SourceError::RevisionName { revision: revision.to_string() });
                }
                let (repo, revision) = (repo.to_string(), revision.to_string());
                Ok(Source::Hub { repo, revision, file: file.map(str::to_string) })
            }
            Some(("path", dir)) if !dir.is_empty() => Ok(Source::Path(dir.to_string())),
            Some(("synthetic", config)) if !config.is_empty() => {
                Ok(Source::Synthetic { config: config.to_string(), seed })
            }
            _ => Err(SourceError::Scheme { text: text.to_string() }),
        }
    }
}

/// What the user probably meant by `hf:REPO`, where REPO is no name of a model.
fn repo_meant(repo: &str) -> Option<String> {
    let owner_and_name = |text: &str| {
        let (owner, rest) = text.trim_start_matches('/').split_once('/')?;
        let name = rest.split(['/', '?', '#']).next().filter(|name| !name.is_empty())?;
        Some(format!("hf:{owner}/{name}")).filter(|named| Source::parse(named, "main", 0).is_ok())
    };
    if let Some(meant) = hub_page(repo) {
        return Some(format!("did you mean `{meant}`?"));
    }
    match (repo.contains('/'), owner_and_name(repo)) {
        (true, Some(meant)) => Some(format!("did you mean `{meant}`?")),
        (false, _) if !repo.is_empty() => Some(format!("the owner is a part of the name: `hf:OWNER/{repo}`")),
        _ => None,
    }
}

/// The source that the address of a page of the hub means: `hf:OWNER/NAME`.
pub fn hub_page(address: &str) -> Option<String> {
    let rest = address.strip_prefix("https://").or_else(|| address.strip_prefix("http://")).unwrap_or(address);
    let rest = ["huggingface.co/", "www.huggingface.co/", "hf.co/"].iter().find_map(|host| rest.strip_prefix(host))?;
    let mut parts = rest.split(['/', '?', '#']);
    let source = format!("hf:{}/{}", parts.next()?, parts.next()?);
    Source::parse(&source, "main", 0).is_ok().then_some(source)
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

/// Where the hub and its cache are, as the Python client reads the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSettings {
    /// HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub.
    pub cache: PathBuf,
    /// HF_ENDPOINT, without a slash at its end.
    pub endpoint: String,
    /// HF_TOKEN, else the file that `hf auth login` writes.
    pub token: Option<String>,
    /// HF_HUB_OFFLINE.
    pub offline: bool,
    /// HF_HUB_DOWNLOAD_TIMEOUT, in whole seconds: the longest wait for an answer, or for more of one.
    pub silence: Duration,
}

/// The Python client gives up after 10 s; a busy hub may take a little longer.
const SILENCE_DEFAULT: Duration = Duration::from_secs(30);
/// An access token is one line.
const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// The ref of a branch is a commit.
const REF_BYTES_MAX: u64 = 4 << 10;

impl HubSettings {
    pub fn from_env() -> HubSettings {
        HubSettings::from_lookup(|name| std::env::var(name).ok())
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> HubSettings {
        let get = |name: &str| lookup(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty());
        let path = |name: &str| get(name).map(PathBuf::from);
        let home = path("HF_HOME").unwrap_or_else(|| {
            let caches = path("XDG_CACHE_HOME");
            caches.unwrap_or_else(|| path("HOME").unwrap_or_default().join(".cache")).join("huggingface")
        });
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| home.join("hub"));
        let token = get("HF_TOKEN").or_else(|| get("HUGGING_FACE_HUB_TOKEN")).or_else(|| {
            let file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
            let text = files::read_text(&file, TOKEN_BYTES_MAX).ok();
            text.map(|text| text.trim().to_string()).filter(|token| !token.is_empty())
        });
        let endpoint = get("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
        let truthy = |v: String| matches!(v.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE");
        HubSettings {
            cache,
            endpoint: endpoint.trim_end_matches('/').to_string(),
            token,
            offline: get("HF_HUB_OFFLINE").is_some_and(truthy),
            silence: get("HF_HUB_DOWNLOAD_TIMEOUT")
                .and_then(|seconds| seconds.parse().ok())
                .filter(|seconds| *seconds > 0)
                .map_or(SILENCE_DEFAULT, Duration::from_secs),
        }
    }

    pub(super) fn repo_dir(&self, repo: &str) -> PathBuf {
        self.cache.join(format!("models--{}", repo.replace('/', "--")))
    }
}

/// Makes a source local. Relative paths are found by [`files::find`]; `base_dir` is the folder of the manifest.
///
/// # Errors
/// See [`SourceError`]; what was downloaded before an error stays and is not downloaded again.
pub fn resolve(source: &Source, base_dir: &Path, progress: &mut dyn FnMut(Event)) -> Result<Resolved, SourceError> {
    resolve_with(source, base_dir, &HubSettings::from_env(), progress)
}

/// [`resolve`] with the hub's settings given.
pub fn resolve_with(
    source: &Source,
    base_dir: &Path,
    settings: &HubSettings,
    progress: &mut dyn FnMut(Event),
) -> Result<Resolved, SourceError> {
    match source {
        Source::Path(dir) => {
            let path = files::find(dir, base_dir)?;
            if !path.is_dir() && !gguf::is_named(&path) {
                return Err(SourceError::NotAFolder { path });
            }
            Ok(Resolved::Checkpoint { dir: path, commit: None })
        }
        Source::Synthetic { config, seed } => {
            let path = files::find(config, base_dir)?;
            if !path.is_file() {
                return Err(SourceError::NotAFile { path });
            }
            Ok(Resolved::Synthetic { config: path, seed: *seed })
        }
        Source::Hub { repo, revision, file } => resolve_hub(repo, revision, file.as_deref(), settings, progress),
    }
}

fn resolve_hub(
    repo: &str,
    revision: &str,
    file: Option<&str>,
    settings: &HubSettings,
    progress: &mut dyn FnMut(Event),
) -> Result<Resolved, SourceError> {
    let cached = cached_commit(repo, revision, settings).map(|commit| {
        let dir = settings.repo_dir(repo).join("snapshots").join(&commit);
        let (completeness, dir) = completeness(dir, file);
        (completeness, Resolved::Checkpoint { dir, commit: Some(commit) })
    });
    let offline = |why| {
        let (repo, revision, cache) = (repo.to_string(), revision.to_string(), settings.cache.clone());
        Err(SourceError::Offline { repo, revision, cache, why })
    };
    match cached {
        Some((Completeness::Whole, resolved)) => Ok(resolved),
        // The repository may have no tokenizer.json, or other GGUF files; only the hub knows, and without it this has to do.
        Some((Completeness::Maybe, resolved)) if settings.offline || cfg!(not(feature = "hub")) => Ok(resolved),
        _ if settings.offline => offline("HF_HUB_OFFLINE is set"),
        #[cfg(not(feature = "hub"))]
        _ => {
            let _ = progress;
            offline("this build of monobloc has no hub support")
        }
        #[cfg(feature = "hub")]
        Some((Completeness::Maybe, resolved)) => match hub::download(repo, revision, file, settings, progress) {
            Err(SourceError::Unreachable { .. } | SourceError::Silent { .. }) => Ok(resolved),
            other => other,
        },
        #[cfg(feature = "hub")]
        _ => hub::download(repo, revision, file, settings, progress),
    }
}

/// A folder that can be imported and not run, because weight files may have a hole in the place of their weights.
pub struct Outline {
    /// `None`: a GGUF file of the hub, of which only the name was looked at.
    dir: Option<PathBuf>,
    /// Removes the folder at the end, if it was made for this.
    _made: Option<tempfile::TempDir>,
}

impl Outline {
    /// The folder, or a GGUF file that is here; `None` for one that the hub has. Its header has the vocabulary, which is most of what a look
    /// would fetch.
    pub fn place(&self) -> Option<&Path> {
        self.dir.as_deref()
    }
}

/// What an import reads of a model of the hub: from the local cache if it is whole there, else by requests for configs and
/// headers. Nothing is kept. `file` names a GGUF file.
///
/// # Errors
/// See [`SourceError`].
pub fn outline(
    repo: &str,
    revision: &str,
    file: Option<&str>,
    settings: &HubSettings,
    progress: &mut dyn FnMut(Event),
) -> Result<Outline, SourceError> {
    if let Some(commit) = cached_commit(repo, revision, settings) {
        let dir = settings.repo_dir(repo).join("snapshots").join(&commit);
        if let (Completeness::Whole | Completeness::Maybe, dir) = completeness(dir, file) {
            return Ok(Outline { dir: Some(dir), _made: None });
        }
    }
    let offline = |why| {
        let (repo, revision, cache) = (repo.to_string(), revision.to_string(), settings.cache.clone());
        Err(SourceError::Offline { repo, revision, cache, why })
    };
    if settings.offline {
        return offline("HF_HUB_OFFLINE is set");
    }
    #[cfg(not(feature = "hub"))]
    {
        let _ = progress;
        offline("this build of monobloc has no hub support")
    }
    #[cfg(feature = "hub")]
    {
        let made = tempfile::tempdir().map_err(|error| SourceError::Io { path: std::env::temp_dir(), error })?;
        let is_here = hub::outline(repo, revision, file, settings, made.path(), progress)?;
        Ok(Outline { dir: is_here.then(|| made.path().to_path_buf()), _made: Some(made) })
    }
}

/// The commit that the cache has for a revision.
fn cached_commit(repo: &str, revision: &str, settings: &HubSettings) -> Option<String> {
    if is_commit(revision) {
        return Some(revision.to_string());
    }
    let text = files::read_text(&settings.repo_dir(repo).join("refs").join(revision), REF_BYTES_MAX).ok()?;
    Some(text.trim().to_string()).filter(|commit| is_commit(commit))
}

pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

enum Completeness {
    Whole,
    /// Config and weights, no tokenizer; or a GGUF file, where none was named.
    Maybe,
    Partial,
}

/// Whether a snapshot has what a build reads, and where; another tool may have fetched only a part.
fn completeness(dir: PathBuf, file: Option<&str>) -> (Completeness, PathBuf) {
    let there = |name: &str| dir.join(name).is_file();
    let weights = there(SINGLE_FILE)
        || read_shards(&dir.join(INDEX_FILE)).is_ok_and(|shards| shards.iter().all(|shard| there(shard)));
    let found = match (there("config.json") && weights, there("tokenizer.json"), file) {
        (true, true, None) => Completeness::Whole,
        (true, false, None) => Completeness::Maybe,
        // Only a whole name says which file is meant.
        (_, _, Some(file)) if there(file) => {
            let path = dir.join(file);
            let whole = gguf::files_of(&path).is_ok_and(|parts| parts.is_some());
            return (if whole { Completeness::Whole } else { Completeness::Partial }, path);
        }
        _ => match gguf_there(&dir, file) {
            Some(path) => return (Completeness::Maybe, path),
            None => Completeness::Partial,
        },
    };
    (found, dir)
}

/// The first part of the one model in GGUF of a snapshot that `file` can mean, if all of it is there.
fn gguf_there(dir: &Path, file: Option<&str>) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let parts = choose_gguf("", &names, file).ok()?;
    let whole = parts.iter().all(|part| dir.join(part).is_file());
    parts.first().filter(|_| whole).map(|first| dir.join(first))
}

/// The parts of the model in GGUF that is meant, of the files of a repository.
///
/// # Errors
/// None of them, or several.
pub(super) fn choose_gguf(repo: &str, names: &[String], file: Option<&str>) -> Result<Vec<String>, SourceError> {
    let plain = |name: &&String| name.chars().all(is_name_char) && !name.contains("..");
    let model = |name: &&String| gguf::is_named(Path::new(name)) && !name.to_lowercase().starts_with("mmproj");
    let mut models: Vec<Vec<String>> = vec![];
    for name in names.iter().filter(plain).filter(model) {
        let parts = match gguf::part_of(name) {
            None => vec![name.clone()],
            Some((begin, count)) => (1..=count).map(|part| gguf::part_name(begin, part, count)).collect(),
        };
        if !models.contains(&parts) {
            models.push(parts);
        }
    }
    models.sort_unstable();
    let means = |parts: &Vec<String>| match file {
        None => true,
        Some(file) if gguf::is_named(Path::new(file)) => parts.iter().any(|part| part == file),
        Some(part) => parts[0].to_lowercase().contains(&part.to_lowercase()),
    };
    let first = |models: &[Vec<String>]| models.iter().map(|parts| parts[0].clone()).collect();
    let meant: Vec<Vec<String>> = models.iter().filter(|parts| means(parts)).cloned().collect();
    match meant.as_slice() {
        [parts] => Ok(parts.clone()),
        [] => {
            let (repo, file) = (repo.to_string(), file.unwrap_or_default().to_string());
            Err(SourceError::NoGguf { repo, file, files: first(&models) })
        }
        several => Err(SourceError::SeveralGguf { repo: repo.to_string(), files: first(several) }),
    }
}

/// File names in an index, each once. They are plain names or are not asked for: the weight reader refuses the index that
/// has others.
pub(super) fn read_shards(path: &Path) -> Result<Vec<String>, String> {
    let text = files::read_bytes(path, INDEX_BYTES_MAX).map_err(|error| error.to_string())?;
    let shards = shards_of(&text).map_err(|error| error.to_string())?;
    Ok(shards.into_iter().filter(|shard| shard.chars().all(is_name_char) && !shard.contains("..")).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::error::Tier;

    #[test]
    fn sources_parse_or_say_what_was_expected() {
        let parse = |text: &str| Source::parse(text, "main", 7);
        let (repo, revision) = ("org/Model-1.5_x".to_string(), "main".to_string());
        let hub = |file: Option<&str>| {
            let (repo, revision) = (repo.clone(), revision.clone());
            Source::Hub { repo, revision, file: file.map(str::to_string) }
        };
        assert_eq!(parse("hf:org/Model-1.5_x").unwrap(), hub(None));
        assert_eq!(parse("hf:org/Model-1.5_x:Q4_K_M").unwrap(), hub(Some("Q4_K_M")));
        assert_eq!(parse("path:a/b").unwrap(), Source::Path("a/b".to_string()));
        let synthetic = Source::Synthetic { config: "c.json".to_string(), seed: 7 };
        assert_eq!(parse("synthetic:c.json").unwrap(), synthetic);
        for bad in ["", "org/model", "path:", "synthetic:", "http://x", "HF:org/model"] {
            assert!(matches!(parse(bad), Err(SourceError::Scheme { .. })), "{bad}");
        }
        for bad in [
            "hf:",
            "hf:model",
            "hf:a/b/c",
            "hf:../b",
            "hf:a/..",
            "hf:a/b c",
            "hf:/b",
            "hf:a/b?x",
            "hf:a/b:",
            "hf:a/b:../c.gguf",
        ] {
            assert!(matches!(parse(bad), Err(SourceError::RepoName { .. })), "{bad}");
        }
        for bad in ["", "../x", "/x", "a//b", "a b", "x/"] {
            assert!(matches!(Source::parse("hf:a/b", bad, 0), Err(SourceError::RevisionName { .. })), "{bad}");
        }
        assert!(Source::parse("hf:a/b", "refs/pr/1", 0).is_ok());
    }

    #[test]
    fn settings_follow_the_python_client() {
        let with = |vars: &[(&str, &str)]| {
            let find = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
            HubSettings::from_lookup(find)
        };
        let plain = with(&[("HOME", "/nowhere")]);
        assert_eq!(plain.cache, Path::new("/nowhere/.cache/huggingface/hub"));
        assert_eq!((plain.endpoint.as_str(), plain.token, plain.offline), ("https://huggingface.co", None, false));
        assert_eq!(with(&[("XDG_CACHE_HOME", "/x")]).cache, Path::new("/x/huggingface/hub"));
        assert_eq!(with(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/h")]).cache, Path::new("/h/hub"));
        assert_eq!(with(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h")]).cache, Path::new("/c"));
        assert_eq!(with(&[("HF_ENDPOINT", "http://mirror/")]).endpoint, "http://mirror");
        assert!(with(&[("HF_HUB_OFFLINE", "true")]).offline);
        assert!(!with(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert_eq!(with(&[("HF_HUB_DOWNLOAD_TIMEOUT", "3")]).silence, Duration::from_secs(3));
        assert_eq!(with(&[("HF_HUB_DOWNLOAD_TIMEOUT", "soon")]).silence, SILENCE_DEFAULT);
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("token"), " hf_file \n").unwrap();
        let home = home.path().to_str().unwrap();
        assert_eq!(with(&[("HF_HOME", home)]).token.as_deref(), Some("hf_file"));
        assert_eq!(with(&[("HF_HOME", home), ("HF_TOKEN", "hf_env")]).token.as_deref(), Some("hf_env"));
    }

    #[test]
    fn local_sources_have_to_be_there() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("c.json"), "{}").unwrap();
        fs::create_dir(dir.path().join("ckpt")).unwrap();
        let at = |text: &str| resolve(&Source::parse(text, "main", 3).unwrap(), dir.path(), &mut |_| {});
        let ckpt = Resolved::Checkpoint { dir: dir.path().join("ckpt"), commit: None };
        assert_eq!(at("path:ckpt").unwrap(), ckpt);
        fs::write(dir.path().join("m.gguf"), "").unwrap();
        assert_eq!(at("path:m.gguf").unwrap(), Resolved::Checkpoint { dir: dir.path().join("m.gguf"), commit: None });
        let config = dir.path().join("c.json");
        assert_eq!(at("synthetic:c.json").unwrap(), Resolved::Synthetic { config, seed: 3 });
        for bad in ["path:c.json", "path:none", "synthetic:ckpt", "synthetic:none.json"] {
            let fault = Fault::from(at(bad).unwrap_err());
            assert!(fault.tier == Tier::Input && fault.message.contains(&bad[bad.len() - 4..]), "{fault}");
        }
    }

    #[cfg(feature = "hub")]
    mod with_hub {
        use std::collections::BTreeMap;
        use std::io::{BufRead, BufReader, Write};
        use std::net::{TcpListener, TcpStream};
        use std::sync::{Arc, Mutex};

        use super::*;
        use crate::model::sha256::hex_digest;

        const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

        /// How the fake hub behaves; shared with its thread, so that a test can mend it.
        #[derive(Default)]
        struct Behaviour {
            files: BTreeMap<String, Vec<u8>>,
            /// Answer every request with this status.
            status: Option<u16>,
            /// Refuse requests without this token.
            token: Option<String>,
            /// Send no byte of this file from this offset on.
            cut: Option<(String, usize)>,
            /// Flip a byte of this file.
            damage: Option<String>,
            requests: Vec<String>,
        }

        /// The three kinds of request that the client makes, on a local port.
        struct FakeHub {
            endpoint: String,
            behaviour: Arc<Mutex<Behaviour>>,
        }

        impl FakeHub {
            fn serve(files: &[(&str, &[u8])]) -> FakeHub {
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                let endpoint = format!("http://{}", listener.local_addr().unwrap());
                let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec())).collect();
                let behaviour = Arc::new(Mutex::new(Behaviour { files, ..Behaviour::default() }));
                let shared = Arc::clone(&behaviour);
                std::thread::spawn(move || {
                    for stream in listener.incoming() {
                        let _ = answer(stream.unwrap(), &shared);
                    }
                });
                FakeHub { endpoint, behaviour }
            }

            fn set(&self, change: impl FnOnce(&mut Behaviour)) {
                change(&mut self.behaviour.lock().unwrap());
            }

            fn requests(&self) -> Vec<String> {
                std::mem::take(&mut self.behaviour.lock().unwrap().requests)
            }
        }

        fn answer(mut stream: TcpStream, shared: &Mutex<Behaviour>) -> io::Result<()> {
            let mut lines = Vec::new();
            let mut reader = BufReader::new(stream.try_clone()?);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
                    break;
                }
                lines.push(line.trim().to_string());
            }
            let header = |name: &str| {
                let prefix = format!("{name}: ");
                lines.iter().find(|l| l.to_lowercase().starts_with(&prefix)).map(|l| l[prefix.len()..].to_string())
            };
            let path = lines.first().and_then(|l| l.split(' ').nth(1)).unwrap_or_default().to_string();
            let (range, token) = (header("range").unwrap_or_default(), header("authorization"));
            let mut hub = shared.lock().unwrap();
            hub.requests.push(format!("{path} {range}").trim_end().to_string());
            let mut plain = |status: u16, body: &str| {
                write!(
                    stream,
                    "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                    body.len()
                )
            };
            if let Some(status) = hub.status {
                return plain(status, "");
            }
            if hub.token.as_ref().is_some_and(|expected| token != Some(format!("Bearer {expected}"))) {
                return plain(401, "");
            }
            if path == "/api/models/org/m/revision/main" {
                let names: Vec<String> = hub.files.keys().map(|name| format!("{{\"rfilename\":\"{name}\"}}")).collect();
                return plain(200, &format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", names.join(",")));
            }
            let name = path.strip_prefix(&format!("/org/m/resolve/{COMMIT}/")).unwrap_or_default().to_string();
            let Some(mut bytes) = hub.files.get(&name).cloned() else { return plain(404, "") };
            let etag = match name.ends_with(".safetensors") {
                true => hex_digest(bytes.as_slice())?,
                false => format!("{:040x}", bytes.len()),
            };
            if hub.damage.as_ref() == Some(&name) {
                bytes[100] ^= 1;
            }
            let total = bytes.len();
            let (first, last) = range.trim_start_matches("bytes=").split_once('-').unwrap_or(("0", ""));
            let first: usize = first.parse().unwrap();
            let end = last.parse::<usize>().map_or(total, |last| last + 1).min(total);
            if first >= total {
                return plain(416, "");
            }
            write!(
                stream,
                "HTTP/1.1 206 X\r\nContent-Length: {}\r\nContent-Range: bytes {first}-{}/{total}\r\n\
                 ETag: \"{etag}\"\r\nx-repo-commit: {COMMIT}\r\nConnection: close\r\n\r\n",
                end - first,
                end - 1
            )?;
            let stop = hub.cut.as_ref().filter(|(cut, _)| *cut == name).map_or(end, |(_, at)| end.min(*at));
            if end - first > 1 {
                stream.write_all(&bytes[first.min(stop)..stop])
            } else {
                stream.write_all(&bytes[first..end])
            }
        }

        fn settings(hub: &FakeHub, cache: &Path) -> HubSettings {
            let (cache, endpoint) = (cache.to_path_buf(), hub.endpoint.clone());
            HubSettings { cache, endpoint, token: None, offline: false, silence: SILENCE_DEFAULT }
        }

        fn source() -> Source {
            Source::parse("hf:org/m", "main", 0).unwrap()
        }

        fn get(settings: &HubSettings) -> Result<Resolved, SourceError> {
            resolve_with(&source(), Path::new("."), settings, &mut |_| {})
        }

        fn model_files() -> Vec<(&'static str, Vec<u8>)> {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/llama-gqa");
            let read = |name: &str| fs::read(folder.join(name)).unwrap();
            vec![
                ("config.json", read("config.json")),
                ("tokenizer.json", b"{}".to_vec()),
                ("model.safetensors", read("model.safetensors")),
                ("README.md", b"not fetched".to_vec()),
            ]
        }

        fn model_hub() -> FakeHub {
            let files = model_files();
            FakeHub::serve(&files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect::<Vec<_>>())
        }

        #[test]
        fn a_model_is_fetched_once_and_then_answered_from_the_cache() {
            let (hub, cache) = (model_hub(), tempfile::tempdir().unwrap());
            let settings = settings(&hub, cache.path());
            let mut received = 0;
            let mut done = Vec::new();
            let resolved = resolve_with(&source(), Path::new("."), &settings, &mut |event| match event {
                Event::Received { bytes } => received += bytes,
                Event::Done { name } => done.push(name.to_string()),
                Event::File { .. } | Event::Waiting { .. } | Event::Busy { .. } => {}
            });
            let Resolved::Checkpoint { dir, commit } = resolved.unwrap() else { panic!() };
            assert_eq!(commit.as_deref(), Some(COMMIT));
            assert_eq!(done, ["config.json", "tokenizer.json", "model.safetensors"]);
            let bytes: usize = model_files()[..3].iter().map(|(_, bytes)| bytes.len()).sum();
            assert_eq!(received, bytes as u64);
            crate::model::config::import(&dir).unwrap();
            assert!(!hub.requests().is_empty());

            assert_eq!(get(&settings).unwrap(), Resolved::Checkpoint { dir: dir.clone(), commit: commit.clone() });
            let pinned = Source::parse("hf:org/m", COMMIT, 0).unwrap();
            let offline = HubSettings { offline: true, ..settings };
            for source in [source(), pinned] {
                let again = resolve_with(&source, Path::new("."), &offline, &mut |_| {}).unwrap();
                assert_eq!(again, Resolved::Checkpoint { dir: dir.clone(), commit: commit.clone() });
            }
            assert_eq!(hub.requests(), Vec::<String>::new());
        }

        #[test]
        fn a_snapshot_of_another_tool_is_used_without_a_request() {
            let (hub, cache) = (model_hub(), tempfile::tempdir().unwrap());
            let dir = cache.path().join("models--org--m/snapshots").join(COMMIT);
            fs::create_dir_all(&dir).unwrap();
            for (name, bytes) in model_files() {
                fs::write(dir.join(name), bytes).unwrap();
            }
            let pinned = Source::parse("hf:org/m", COMMIT, 0).unwrap();
            let settings = settings(&hub, cache.path());
            let resolved = resolve_with(&pinned, Path::new("."), &settings, &mut |_| {}).unwrap();
            assert_eq!(resolved, Resolved::Checkpoint { dir, commit: Some(COMMIT.to_string()) });
            assert_eq!(hub.requests(), Vec::<String>::new());
        }

        #[test]
        fn shards_are_fetched_by_their_index() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/variants/olmo2-bias");
            let files: Vec<(String, Vec<u8>)> = fs::read_dir(folder)
                .unwrap()
                .map(|e| e.unwrap())
                .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
                .filter(|(name, _)| name != "goldens.safetensors")
                .collect();
            let hub = FakeHub::serve(&files.iter().map(|(n, b)| (n.as_str(), b.as_slice())).collect::<Vec<_>>());
            let cache = tempfile::tempdir().unwrap();
            let Resolved::Checkpoint { dir, .. } = get(&settings(&hub, cache.path())).unwrap() else { panic!() };
            assert_eq!(crate::model::config::import(&dir).unwrap().weights.files().len(), 5);
        }

        #[test]
        fn refusals_of_the_hub_are_told_apart() {
            let (hub, cache) = (model_hub(), tempfile::tempdir().unwrap());
            let open = settings(&hub, cache.path());
            hub.set(|b| b.token = Some("hf_secret".to_string()));
            let fault = Fault::from(get(&open).unwrap_err());
            assert_eq!(fault.tier, Tier::Environment);
            assert!(fault.message.contains("`org/m`") && fault.message.contains("401"), "{fault}");
            assert!(fault.remedy.as_ref().unwrap().contains("HF_TOKEN"), "{fault}");
            hub.set(|b| b.status = Some(403));
            assert!(matches!(get(&open), Err(SourceError::Refused { status: 403, .. })));
            hub.set(|b| b.status = Some(404));
            let fault = Fault::from(get(&open).unwrap_err());
            assert!(fault.tier == Tier::Input && fault.message.contains("`org/m at main`"), "{fault}");
            hub.set(|b| b.status = Some(500));
            assert!(matches!(get(&open), Err(SourceError::Status { status: 500, .. })));
            hub.set(|b| b.status = None);
            get(&HubSettings { token: Some("hf_secret".to_string()), ..open }).unwrap();
        }

        #[test]
        fn an_unreachable_hub_is_named() {
            let cache = tempfile::tempdir().unwrap();
            // A port that was free a moment ago: no process listens.
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let endpoint = format!("http://127.0.0.1:{port}");
            let away = HubSettings {
                cache: cache.path().to_path_buf(),
                endpoint: endpoint.clone(),
                token: None,
                offline: false,
                silence: SILENCE_DEFAULT,
            };
            let fault = Fault::from(get(&away).unwrap_err());
            assert!(fault.tier == Tier::Environment && fault.message.contains(&endpoint), "{fault}");
            let fault = Fault::from(get(&HubSettings { offline: true, ..away }).unwrap_err());
            assert!(fault.message.contains("HF_HUB_OFFLINE"), "{fault}");
        }

        #[test]
        fn a_download_that_was_cut_off_resumes() {
            let (hub, cache) = (model_hub(), tempfile::tempdir().unwrap());
            let settings = settings(&hub, cache.path());
            hub.set(|b| b.cut = Some(("model.safetensors".to_string(), 300_000)));
            let error = get(&settings).unwrap_err();
            assert!(matches!(&error, SourceError::CutOff { file, .. } if file == "model.safetensors"), "{error}");
            hub.set(|b| b.cut = None);
            hub.requests();
            let Resolved::Checkpoint { dir, .. } = get(&settings).unwrap() else { panic!() };
            assert!(hub.requests().iter().any(|r| r.ends_with("model.safetensors bytes=300000-")));
            assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), model_files()[2].1);
        }

        #[test]
        fn damaged_content_is_not_kept() {
            let (hub, cache) = (model_hub(), tempfile::tempdir().unwrap());
            let settings = settings(&hub, cache.path());
            hub.set(|b| b.damage = Some("model.safetensors".to_string()));
            let error = get(&settings).unwrap_err();
            assert!(matches!(&error, SourceError::Damaged { expected, .. } if expected.contains("SHA-256")), "{error}");
            hub.set(|b| b.damage = None);
            // What a crash may leave: a part as long as the file, with other content.
            let (_, model) = &model_files()[2];
            let blobs = cache.path().join("models--org--m/blobs");
            fs::write(blobs.join(format!("{}.part", hex_digest(model.as_slice()).unwrap())), vec![0; model.len()])
                .unwrap();
            let Resolved::Checkpoint { dir, .. } = get(&settings).unwrap() else { panic!() };
            assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), *model);
        }

        #[test]
        fn a_shorter_part_of_other_content_is_replaced() {
            let (hub, cache) = (model_hub(), tempfile::tempdir().unwrap());
            let (_, model) = &model_files()[2];
            let blobs = cache.path().join("models--org--m/blobs");
            fs::create_dir_all(&blobs).unwrap();
            fs::write(blobs.join(format!("{}.part", hex_digest(model.as_slice()).unwrap())), vec![0; 1000]).unwrap();
            let Resolved::Checkpoint { dir, .. } = get(&settings(&hub, cache.path())).unwrap() else { panic!() };
            assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), *model);
        }

        #[test]
        fn a_lock_of_another_process_is_waited_for() {
            let (hub, cache) = (model_hub(), tempfile::tempdir().unwrap());
            let blobs = cache.path().join("models--org--m/blobs");
            fs::create_dir_all(&blobs).unwrap();
            let (_, model) = &model_files()[2];
            let lock = fs::File::create(blobs.join(format!("{}.lock", hex_digest(model.as_slice()).unwrap()))).unwrap();
            lock.lock().unwrap();
            let mut lock = Some(lock);
            let mut waited = 0;
            let resolved = resolve_with(&source(), Path::new("."), &settings(&hub, cache.path()), &mut |event| {
                if let Event::Waiting { .. } = event {
                    waited += 1;
                    lock.take();
                }
            });
            assert!(resolved.is_ok() && waited == 1, "{resolved:?} {waited}");
        }

        #[test]
        fn a_gguf_file_of_a_repository_is_fetched_alone() {
            let cache = tempfile::tempdir().unwrap();
            let names = ["m-Q4_0.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "mmproj-m.gguf"];
            let hub = FakeHub::serve(&names.map(|name| (name, name.as_bytes())));
            let open = settings(&hub, cache.path());
            let get = |source: &str, settings: &HubSettings| {
                resolve_with(&Source::parse(source, "main", 0).unwrap(), Path::new("."), settings, &mut |_| {})
            };
            let fault = Fault::from(get("hf:org/m", &open).unwrap_err());
            assert!(fault.message.contains("2 models in GGUF: `m-Q4_0.gguf`, `m-Q8_0-00001-of-00002.gguf`"), "{fault}");
            assert_eq!(fault.remedy.as_deref(), Some("name one of them, as `hf:org/m:m-Q4_0.gguf`"));
            let error = get("hf:org/m:Q6_K", &open).unwrap_err();
            assert!(matches!(&error, SourceError::NoGguf { files, .. } if files.len() == 2), "{error}");
            // A look at it asks which files there are.
            let look = |file| outline("org/m", "main", file, &open, &mut |_| {});
            assert!(look(Some("q8_0")).unwrap().place().is_none());
            assert!(matches!(look(Some("Q6_K")).err(), Some(SourceError::NoGguf { .. })));
            assert!(matches!(look(None).err(), Some(SourceError::SeveralGguf { .. })));
            assert!(!hub.requests().iter().any(|r| r.contains(".gguf")));
            let Resolved::Checkpoint { dir, commit } = get("hf:org/m:q8_0", &open).unwrap() else { panic!() };
            assert_eq!(look(Some("m-Q8_0-00001-of-00002.gguf")).unwrap().place(), Some(&*dir));
            hub.requests();
            assert!(dir.ends_with("m-Q8_0-00001-of-00002.gguf") && commit.is_some());
            assert!(dir.with_file_name("m-Q8_0-00002-of-00002.gguf").is_file());
            assert!(!hub.requests().iter().any(|r| r.contains("Q4_0") || r.contains("mmproj")));
            let offline = HubSettings { offline: true, ..open };
            for source in ["hf:org/m:m-Q8_0-00001-of-00002.gguf", "hf:org/m:Q8_0", "hf:org/m"] {
                let Resolved::Checkpoint { dir: again, .. } = get(source, &offline).unwrap() else { panic!() };
                assert_eq!(again, dir);
            }
        }

        #[test]
        fn repositories_without_safetensors_are_refused_by_name() {
            let cache = tempfile::tempdir().unwrap();
            let hub = FakeHub::serve(&[("config.json", b"{}"), ("pytorch_model.bin", b"x")]);
            let error = get(&settings(&hub, cache.path())).unwrap_err();
            assert!(error.to_string().contains("`pytorch_model.bin`"), "{error}");
            let hub = FakeHub::serve(&[("config.json", b"{}")]);
            let error = get(&settings(&hub, cache.path())).unwrap_err();
            assert!(matches!(error, SourceError::NoWeights { .. }), "{error}");
        }
    }
}
