//! Owns the requests to a hub: what a revision is, and the download of its files into the cache of the Python client.
//!
//! A hub answers with anything. So redirects are followed here and not by the HTTP client: the access token goes to the
//! origin (scheme, host and port) of the configured endpoint alone, and is not sent again after the first redirect away from it.
//! Every wait has a deadline, every answer has a bound on its size, and a name that becomes a path is checked first.
//!
//! Layout (`hf_hub::Cache`): `blobs/ETAG`, with `snapshots/COMMIT/NAME` links to it and `refs/REVISION`. A download is
//! written to `blobs/ETAG.part` under the lock `blobs/ETAG.lock`, checked, and renamed.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hf_hub::api::RepoInfo;
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use ureq::http::{Response, StatusCode, Uri, header};
use ureq::{Agent, Body};

use super::source::{Event, HubSettings, Resolved, SourceError, choose_gguf, is_commit, read_shards};
use super::weights::{INDEX_BYTES_MAX, INDEX_FILE, SINGLE_FILE};
use crate::gguf;
use crate::model::sha256;

/// Files read beside config and weights, where the repository has them.
const OPTIONAL_FILES: [&str; 6] = [
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
];

/// Most further chat templates that are fetched.
const TEMPLATES_MAX: usize = 32;

/// Whether a file is a further chat template, `additional_chat_templates/NAME.jinja`.
fn is_further_template(file: &str) -> bool {
    let name = file.strip_prefix("additional_chat_templates/").and_then(|name| name.strip_suffix(".jinja"));
    name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

/// A large file takes another process this long at most; then its lock is an error.
const LOCK_WAIT: Duration = Duration::from_secs(30 * 60);
/// Pause between two tries to take a lock.
const LOCK_LOOK: Duration = Duration::from_millis(200);
/// Pause between two reports that a lock is waited for.
const LOCK_TOLD: Duration = Duration::from_secs(5);
/// Redirects of one request. The hub sends one or two; the Python client stops at 30.
const REDIRECTS_MAX: usize = 10;
/// Attempts to go on with a download after a cut connection.
const RETRIES: u32 = 2;
const RETRY_PAUSE: Duration = Duration::from_millis(300);
/// Times that a request is repeated after an answer that says that the hub is busy.
const BUSY_RETRIES: u32 = 4;
/// The first pause after such an answer; each further one is twice as long, and up to half as long again at random.
const BUSY_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause that a hub may ask for; the Python client waits for less.
const BUSY_PAUSE_MAX: Duration = Duration::from_secs(60);
/// Bytes of a weight file that are read first: the headers of most.
const HEAD_BYTES: u64 = 128 << 10;
/// Largest header that the format allows.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Largest description of a repository that is read; one with ten thousand files has about 1 MiB.
const INFO_BYTES_MAX: u64 = 32 << 20;
/// Largest file beside weights and their index: that of a tokenizer.
const SMALL_BYTES_MAX: u64 = 256 << 20;
/// An answer that is no download has to be whole after this many times the longest silence.
const ANSWER_SILENCES_MAX: u32 = 4;

struct Hub<'a> {
    agent: Agent,
    cache: CacheRepo,
    repo: &'a str,
    settings: &'a HubSettings,
    endpoint: Uri,
}

/// What the hub says about a file before it is downloaded.
struct Metadata {
    etag: String,
    bytes: u64,
}

/// Fetches what is missing of a revision, all of it at one commit. If `file` names one, or there are no safetensors, it is a model in
/// GGUF.
pub(super) fn download(
    repo: &str,
    revision: &str,
    file: Option<&str>,
    settings: &HubSettings,
    progress: &mut dyn FnMut(Event),
) -> Result<Resolved, SourceError> {
    let named = Repo::with_revision(repo.to_string(), RepoType::Model, revision.to_string());
    let hub = Hub::new(repo, &named, settings)?;
    let info = hub.info(&named, progress)?;
    let listed = |name: &str| is_listed(&info, name);
    if is_gguf(&info, file) {
        let mut first = None;
        for part in choose_gguf(repo, &names_of(&info), file)? {
            let path = hub.fetch(&info.sha, &part, u64::MAX, progress)?;
            first.get_or_insert(path);
        }
        hub.name_commit(revision, &info.sha)?;
        return Ok(Resolved::Checkpoint { dir: first.unwrap_or_default(), commit: Some(info.sha) });
    }
    has_weights(repo, &info)?;
    let config = hub.fetch(&info.sha, "config.json", SMALL_BYTES_MAX, progress)?;
    for name in OPTIONAL_FILES.into_iter().filter(|name| listed(name)) {
        hub.fetch(&info.sha, name, SMALL_BYTES_MAX, progress)?;
    }
    let templates = info.siblings.iter().map(|sibling| sibling.rfilename.as_str());
    for name in templates.filter(|name| is_further_template(name)).take(TEMPLATES_MAX) {
        hub.fetch(&info.sha, name, SMALL_BYTES_MAX, progress)?;
    }
    if listed(SINGLE_FILE) {
        hub.fetch(&info.sha, SINGLE_FILE, u64::MAX, progress)?;
    } else {
        let path = hub.fetch(&info.sha, INDEX_FILE, INDEX_BYTES_MAX, progress)?;
        let no_index = |detail| SourceError::Answer { what: INDEX_FILE.to_string(), detail };
        for shard in read_shards(&path).map_err(no_index)? {
            hub.fetch(&info.sha, &shard, u64::MAX, progress)?;
        }
    }
    hub.name_commit(revision, &info.sha)?;
    let dir = config.parent().map(PathBuf::from).unwrap_or_default();
    Ok(Resolved::Checkpoint { dir, commit: Some(info.sha) })
}

/// Fills `dir` with what an import reads of a revision: configs, the index, and weight files that have their header and a hole
/// in the place of their weights. `false`: it is a model in GGUF, and one that is there.
pub(super) fn outline(
    repo: &str,
    revision: &str,
    file: Option<&str>,
    settings: &HubSettings,
    dir: &Path,
    progress: &mut dyn FnMut(Event),
) -> Result<bool, SourceError> {
    let named = Repo::with_revision(repo.to_string(), RepoType::Model, revision.to_string());
    let hub = Hub::new(repo, &named, settings)?;
    let info = hub.info(&named, progress)?;
    if is_gguf(&info, file) {
        choose_gguf(repo, &names_of(&info), file)?;
        return Ok(false);
    }
    has_weights(repo, &info)?;
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        fs::write(&path, bytes).map_err(|error| SourceError::Io { path, error })
    };
    write("config.json", &hub.small(&info.sha, "config.json", progress)?)?;
    if is_listed(&info, "generation_config.json") {
        write("generation_config.json", &hub.small(&info.sha, "generation_config.json", progress)?)?;
    }
    let shards = if is_listed(&info, SINGLE_FILE) {
        vec![SINGLE_FILE.to_string()]
    } else {
        write(INDEX_FILE, &hub.small(&info.sha, INDEX_FILE, progress)?)?;
        let no_index = |detail| SourceError::Answer { what: INDEX_FILE.to_string(), detail };
        read_shards(&dir.join(INDEX_FILE)).map_err(no_index)?
    };
    for shard in shards {
        let (header, bytes) = hub.header(&info.sha, &shard, progress)?;
        write(&shard, &header)?;
        let path = dir.join(&shard);
        let file = File::options().write(true).open(&path).and_then(|file| file.set_len(bytes));
        file.map_err(|error| SourceError::Io { path, error })?;
    }
    Ok(true)
}

/// Whether a model of a repository is one in GGUF: a file is named, or there are no safetensors.
fn is_gguf(info: &RepoInfo, file: Option<&str>) -> bool {
    let safetensors = is_listed(info, SINGLE_FILE) || is_listed(info, INDEX_FILE);
    file.is_some() || !safetensors && names_of(info).iter().any(|name| gguf::is_named(Path::new(name)))
}

fn names_of(info: &RepoInfo) -> Vec<String> {
    info.siblings.iter().map(|sibling| sibling.rfilename.clone()).collect()
}

fn is_listed(info: &RepoInfo, name: &str) -> bool {
    info.siblings.iter().any(|sibling| sibling.rfilename == name)
}

/// Weights decide whether the rest of a repository is worth a request.
fn has_weights(repo: &str, info: &RepoInfo) -> Result<(), SourceError> {
    if is_listed(info, SINGLE_FILE) || is_listed(info, INDEX_FILE) {
        return Ok(());
    }
    let of = |endings: &[&str]| {
        let named = |name: &str| endings.iter().any(|ending| name.ends_with(ending));
        info.siblings.iter().map(|sibling| sibling.rfilename.clone()).find(|name| named(name))
    };
    let repo = repo.to_string();
    Err(match (of(&[".gguf"]), of(&[".bin", ".pth"])) {
        (Some(file), _) => SourceError::GgufOnly { repo, file },
        (None, Some(file)) => SourceError::PickleOnly { repo, file },
        (None, None) => SourceError::NoWeights { repo },
    })
}

/// A client that follows no redirect by itself and waits for no byte longer than `silence`.
fn agent(silence: Duration) -> Agent {
    Agent::config_builder()
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        // A compressed answer has another length than the file.
        .accept_encoding("identity")
        .user_agent(concat!("monobloc/", env!("CARGO_PKG_VERSION")))
        .timeout_resolve(Some(silence))
        .timeout_connect(Some(silence))
        .timeout_send_request(Some(silence))
        .timeout_recv_response(Some(silence))
        .timeout_per_read(Some(silence))
        .build()
        .new_agent()
}

impl<'a> Hub<'a> {
    fn new(repo: &'a str, named: &Repo, settings: &'a HubSettings) -> Result<Hub<'a>, SourceError> {
        let cache = Cache::new(settings.cache.clone()).repo(named.clone());
        let endpoint =
            settings.endpoint.parse().ok().filter(|uri: &Uri| uri.scheme().is_some() && uri.host().is_some());
        let endpoint = endpoint.ok_or_else(|| SourceError::Endpoint { endpoint: settings.endpoint.clone() })?;
        Ok(Hub { agent: agent(settings.silence), cache, repo, settings, endpoint })
    }

    /// Lets a branch or tag name a commit in the cache. Last, so that a ref never names a snapshot that was not fetched whole.
    fn name_commit(&self, revision: &str, commit: &str) -> Result<(), SourceError> {
        if is_commit(revision) {
            return Ok(());
        }
        let fault = |error| SourceError::Io { path: self.settings.repo_dir(self.repo).join("refs"), error };
        self.cache.create_ref(commit).map_err(fault)
    }

    fn info(&self, named: &Repo, progress: &mut dyn FnMut(Event)) -> Result<RepoInfo, SourceError> {
        let what = format!("{} at {}", self.repo, named.revision());
        let url = format!("{}/api/{}", self.settings.endpoint, named.api_url());
        let text = self.whole(&what, &url, INFO_BYTES_MAX, progress)?;
        let answer = |detail| SourceError::Answer { what: what.clone(), detail };
        let info: RepoInfo = serde_json::from_slice(&text).map_err(|error| answer(error.to_string()))?;
        if !is_commit(&info.sha) {
            return Err(answer(format!("expected a commit of 40 digits, found `{}`", info.sha)));
        }
        Ok(info)
    }

    /// The whole answer for an address.
    fn whole(
        &self,
        what: &str,
        url: &str,
        bytes_max: u64,
        progress: &mut dyn FnMut(Event),
    ) -> Result<Vec<u8>, SourceError> {
        let mut response = self.accept(what, self.get(what, url, None, true, progress, &mut |_| {})?)?;
        let read = response.body_mut().with_config().limit(bytes_max).read_to_vec();
        read.map_err(|error| self.fault(what, error))
    }

    fn url(&self, commit: &str, name: &str) -> String {
        format!("{}/{}/resolve/{commit}/{name}", self.settings.endpoint, self.repo)
    }

    /// The content of a small file, which is not kept.
    fn small(&self, commit: &str, name: &str, progress: &mut dyn FnMut(Event)) -> Result<Vec<u8>, SourceError> {
        self.whole(name, &self.url(commit, name), INDEX_BYTES_MAX, progress)
    }

    /// The header of a safetensors file with the eight bytes of its length, and the length of the file.
    fn header(&self, commit: &str, name: &str, progress: &mut dyn FnMut(Event)) -> Result<(Vec<u8>, u64), SourceError> {
        let answer = |detail: String| SourceError::Answer { what: name.to_string(), detail };
        let url = self.url(commit, name);
        let mut head = vec![];
        let (mut wanted, mut total) = (HEAD_BYTES, 0);
        while (head.len() as u64) < wanted {
            let from = head.len() as u64;
            let range = format!("bytes={from}-{}", wanted - 1);
            let response = self.accept(name, self.get(name, &url, Some(range), true, progress, &mut |_| {})?)?;
            total = total_bytes(&response).ok_or_else(|| answer("expected its size in `content-range`".to_string()))?;
            if response.status() != StatusCode::PARTIAL_CONTENT {
                // The server ignored the range: this is the file from its beginning.
                head.clear();
            }
            wanted = wanted.min(total);
            let more = wanted.saturating_sub(head.len() as u64);
            let body = response.into_body().into_with_config().limit(u64::MAX).reader();
            let read = body.take(more).read_to_end(&mut head);
            read.map_err(|error| SourceError::CutOff { file: name.to_string(), detail: error.to_string() })?;
            let Some(length) = head.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes)) else {
                return Err(answer(format!("expected a safetensors file, found {} bytes", head.len())));
            };
            if length > HEADER_BYTES_MAX || length.saturating_add(8) > total {
                return Err(answer(format!("expected a safetensors header, found one of {length} bytes")));
            }
            if (head.len() as u64) < wanted {
                return Err(SourceError::CutOff {
                    file: name.to_string(),
                    detail: format!("{} of {wanted} bytes arrived", head.len()),
                });
            }
            if length + 8 <= wanted {
                head.truncate((length + 8) as usize);
                break;
            }
            wanted = length + 8;
        }
        Ok((head, total))
    }

    /// The local path of a file at a commit; fetched and checked if it is not there.
    fn fetch(
        &self,
        commit: &str,
        name: &str,
        bytes_max: u64,
        progress: &mut dyn FnMut(Event),
    ) -> Result<PathBuf, SourceError> {
        let path = self.cache.pointer_path(commit).join(name);
        if path.is_file() {
            return Ok(path);
        }
        match self.fetch_once(commit, name, bytes_max, progress) {
            // A part that an interrupted download left may be the damage: start over, once.
            Err(SourceError::Damaged { .. }) => self.fetch_once(commit, name, bytes_max, progress)?,
            other => other?,
        }
        Ok(path)
    }

    fn fetch_once(
        &self,
        commit: &str,
        name: &str,
        bytes_max: u64,
        progress: &mut dyn FnMut(Event),
    ) -> Result<(), SourceError> {
        let url = self.url(commit, name);
        let Metadata { etag, bytes } = self.metadata(commit, name, &url, progress)?;
        if bytes > bytes_max {
            let detail = format!("expected at most {bytes_max} bytes, found {bytes}");
            return Err(SourceError::Answer { what: name.to_string(), detail });
        }
        let blob = self.cache.blob_path(&etag);
        let io = |error| SourceError::Io { path: blob.clone(), error };
        fs::create_dir_all(blob.parent().unwrap_or(Path::new("."))).map_err(io)?;
        let lock = take_lock(&blob.with_extension("lock"), name, progress)?;
        progress(Event::File { name, bytes });
        // Another revision, or another process, may have brought the same content.
        if check(name, &blob, &etag, bytes).is_err() {
            let part = blob.with_extension("part");
            self.receive(name, &url, &part, bytes, progress)?;
            if let Err(fault) = check(name, &part, &etag, bytes) {
                let _ = fs::remove_file(&part);
                return Err(fault);
            }
            fs::rename(&part, &blob).map_err(io)?;
        }
        drop(lock);
        link(&etag, &self.cache.pointer_path(commit).join(name))?;
        progress(Event::Done { name });
        Ok(())
    }

    /// Asks for the first byte of a file. The answer names the tag, the commit and the size.
    fn metadata(
        &self,
        commit: &str,
        name: &str,
        url: &str,
        progress: &mut dyn FnMut(Event),
    ) -> Result<Metadata, SourceError> {
        let answer = |detail| SourceError::Answer { what: name.to_string(), detail };
        // Only what the endpoint says: a storage host that the answer leads to has tags of its own.
        let mut said = None;
        let response = self.get(name, url, Some("bytes=0-0".to_string()), true, progress, &mut |response| {
            let text = |name: &str| Some(response.headers().get(name)?.to_str().ok()?.to_string());
            let etag = text("x-linked-etag").or_else(|| text("etag"));
            said = etag.zip(text("x-repo-commit")).or_else(|| said.take());
        })?;
        let size = total_bytes(&response);
        if response.status() != StatusCode::RANGE_NOT_SATISFIABLE || size != Some(0) {
            self.accept(name, response)?;
        }
        let (etag, found) =
            said.ok_or_else(|| answer("expected `etag` and `x-repo-commit` in its head".to_string()))?;
        let etag = etag.replace('"', "");
        // The tag becomes a file name.
        if etag.is_empty() || !etag.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
            return Err(answer(format!("expected a plain tag, found `{etag}`")));
        }
        if found != commit {
            return Err(answer(format!("expected commit {commit}, found {found}")));
        }
        let bytes = size.ok_or_else(|| answer("expected its size in `content-range`".to_string()))?;
        Ok(Metadata { etag, bytes })
    }

    /// Fills `part` up to `bytes`, from where an earlier download stopped; goes on after a cut connection.
    fn receive(
        &self,
        name: &str,
        url: &str,
        part: &Path,
        bytes: u64,
        progress: &mut dyn FnMut(Event),
    ) -> Result<(), SourceError> {
        let io = |error| SourceError::Io { path: part.to_path_buf(), error };
        let mut file = File::options().create(true).truncate(false).write(true).open(part).map_err(io)?;
        // A part as long as the file was not renamed because its content is damaged, or because a process was killed.
        if file.metadata().map_err(io)?.len() >= bytes {
            file.set_len(0).map_err(io)?;
        }
        let mut told = 0;
        let mut attempt = 0;
        loop {
            let at = file.seek(SeekFrom::End(0)).map_err(io)?;
            let result = self.receive_rest(name, url, &mut file, at..bytes, &mut told, progress);
            match result {
                Err(SourceError::CutOff { .. }) if attempt < RETRIES => attempt += 1,
                Err(SourceError::Io { error, .. }) => return Err(io(error)),
                other => return other,
            }
            thread::sleep(RETRY_PAUSE);
        }
    }

    /// One request for the bytes from the start of the range on. `told` is the length of the file that `progress` was told of.
    fn receive_rest(
        &self,
        name: &str,
        url: &str,
        file: &mut File,
        Range { start: mut at, end: bytes }: Range<u64>,
        told: &mut u64,
        progress: &mut dyn FnMut(Event),
    ) -> Result<(), SourceError> {
        let cut_off = |detail: String| SourceError::CutOff { file: name.to_string(), detail };
        let failed = |error| SourceError::Io { path: PathBuf::new(), error };
        if at >= bytes {
            return Ok(());
        }
        let response = self.get(name, url, Some(format!("bytes={at}-")), false, progress, &mut |_| {})?;
        let response = self.accept(name, response)?;
        if response.status() != StatusCode::PARTIAL_CONTENT {
            // The server ignored the range: this is the file from its beginning.
            file.set_len(0).map_err(failed)?;
            at = file.seek(SeekFrom::Start(0)).map_err(failed)?;
        }
        let mut received = |now: u64| {
            let more = now.saturating_sub(*told);
            *told += more;
            progress(Event::Received { bytes: more });
        };
        received(at);
        let mut body = response.into_body().into_with_config().limit(u64::MAX).reader().take(bytes - at);
        let mut buffer = vec![0; 256 << 10];
        loop {
            let count = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(cut_off(error.to_string())),
            };
            file.write_all(&buffer[..count]).map_err(failed)?;
            at += count as u64;
            received(at);
        }
        match at == bytes {
            true => Ok(()),
            false => Err(cut_off(format!("{at} of {bytes} bytes arrived"))),
        }
    }

    /// As [`Hub::get_once`]. A hub that is busy is asked again after a pause: the one that it asks for, if it names one.
    fn get(
        &self,
        what: &str,
        url: &str,
        range: Option<String>,
        short: bool,
        progress: &mut dyn FnMut(Event),
        seen: &mut dyn FnMut(&Response<Body>),
    ) -> Result<Response<Body>, SourceError> {
        let mut pause = BUSY_PAUSE;
        for _ in 0..BUSY_RETRIES {
            let response = self.get_once(what, url, range.clone(), short, seen)?;
            let status = response.status().as_u16();
            if !matches!(status, 429 | 502 | 503 | 504) {
                return Ok(response);
            }
            let asked = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
            let asked = asked.and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs);
            // Clients that were refused together shall not come back together.
            let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
            let jitter = pause.mul_f64(0.5 * f64::from(clock % 1000) / 1000.0);
            let wait = asked.unwrap_or(pause).min(BUSY_PAUSE_MAX) + jitter;
            progress(Event::Busy { status, wait });
            thread::sleep(wait);
            pause *= 2;
        }
        self.get_once(what, url, range, short, seen)
    }

    /// Sends a request and follows redirects. `seen` is called with every answer of the endpoint itself. `short`: the answer is
    /// small, and all of it has one deadline.
    fn get_once(
        &self,
        what: &str,
        url: &str,
        range: Option<String>,
        short: bool,
        seen: &mut dyn FnMut(&Response<Body>),
    ) -> Result<Response<Body>, SourceError> {
        let answer = |detail| SourceError::Answer { what: what.to_string(), detail };
        let mut uri: Uri = url.parse().map_err(|_| answer(format!("`{url}` is no address")))?;
        let mut trusted = true;
        for _ in 0..=REDIRECTS_MAX {
            trusted = trusted && origin(&uri) == origin(&self.endpoint);
            let mut request = self.agent.get(&uri);
            if let Some(token) = self.settings.token.as_ref().filter(|_| trusted) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some(range) = &range {
                request = request.header(header::RANGE, range);
            }
            let request = match short {
                true => request.config().timeout_global(Some(self.settings.silence * ANSWER_SILENCES_MAX)).build(),
                false => request,
            };
            let response = request.call().map_err(|error| self.fault(what, error))?;
            if trusted {
                seen(&response);
            }
            if !is_redirect(response.status()) {
                return Ok(response);
            }
            let status = response.status().as_u16();
            let location = response.headers().get(header::LOCATION);
            let location = location
                .ok_or_else(|| answer(format!("a redirect (status {status}) without `location`")))?
                .to_str()
                .map_err(|_| answer(format!("a redirect (status {status}) with a `location` that is no text")))?;
            let next = join(&uri, location)
                .ok_or_else(|| answer(format!("a redirect (status {status}) to `{location}`, which is no address")))?;
            if uri.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
                return Err(answer(format!("a redirect from https to `{next}`")));
            }
            uri = next;
        }
        Err(answer(format!("more than {REDIRECTS_MAX} redirects")))
    }

    /// The answer, if its status says that it is one.
    fn accept(&self, what: &str, response: Response<Body>) -> Result<Response<Body>, SourceError> {
        let what = what.to_string();
        match response.status().as_u16() {
            200 | 206 => Ok(response),
            status @ (401 | 403) => Err(SourceError::Refused {
                repo: self.repo.to_string(),
                status,
                with_token: self.settings.token.is_some(),
            }),
            404 => Err(SourceError::NotFound { what }),
            status => Err(SourceError::Status { what, status }),
        }
    }

    /// A request that got no answer.
    fn fault(&self, what: &str, error: ureq::Error) -> SourceError {
        let endpoint = self.settings.endpoint.clone();
        match error {
            ureq::Error::Timeout(_) => {
                SourceError::Silent { endpoint, what: what.to_string(), seconds: self.settings.silence.as_secs() }
            }
            ureq::Error::Io(error) if error.kind() == ErrorKind::TimedOut => {
                SourceError::Silent { endpoint, what: what.to_string(), seconds: self.settings.silence.as_secs() }
            }
            ureq::Error::BodyExceedsLimit(limit) => {
                let detail = format!("expected at most {limit} bytes, found more");
                SourceError::Answer { what: what.to_string(), detail }
            }
            other => SourceError::Unreachable { endpoint, detail: other.to_string() },
        }
    }
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// Scheme, host and port of the server that a request goes to.
fn origin(uri: &Uri) -> Option<(String, String, u16)> {
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let port = uri.port_u16().or(match scheme.as_str() {
        "https" => Some(443),
        "http" => Some(80),
        _ => None,
    })?;
    Some((scheme, uri.host()?.to_ascii_lowercase(), port))
}

/// The address that `location` names in an answer from `base` (RFC 3986, section 5.2, without `.` and `..`).
fn join(base: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next().unwrap_or_default();
    let (scheme, authority) = (base.scheme_str()?, base.authority()?.as_str());
    let absolute = if location.contains("://") {
        location.to_string()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{scheme}://{rest}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else if location.starts_with('?') {
        format!("{scheme}://{authority}{}{location}", base.path())
    } else {
        let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    };
    let uri: Uri = absolute.parse().ok()?;
    (matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|host| !host.is_empty()))
        .then_some(uri)
}

/// The size of the whole file: after the slash of `content-range`, or `content-length` if the server ignored the range.
fn total_bytes(response: &Response<Body>) -> Option<u64> {
    let text = |name| response.headers().get(name)?.to_str().ok();
    match text(header::CONTENT_RANGE) {
        Some(range) => range.rsplit_once('/')?.1.trim().parse().ok(),
        None if response.status() == StatusCode::OK => text(header::CONTENT_LENGTH)?.trim().parse().ok(),
        None => None,
    }
}

/// Takes the lock that hf-hub takes, too; released when the file is dropped.
fn take_lock(path: &Path, name: &str, progress: &mut dyn FnMut(Event)) -> Result<File, SourceError> {
    let io = |error| SourceError::Io { path: path.to_path_buf(), error };
    let lock = File::options().create(true).truncate(false).write(true).open(path).map_err(io)?;
    let begun = Instant::now();
    let mut told = None;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => return Ok(lock),
            Err(TryLockError::Error(error)) => return Err(io(error)),
            Err(TryLockError::WouldBlock) if begun.elapsed() > LOCK_WAIT => {
                let minutes = LOCK_WAIT.as_secs() / 60;
                return Err(SourceError::Locked { file: name.to_string(), minutes });
            }
            Err(TryLockError::WouldBlock) => {
                if told.is_none_or(|told: Instant| told.elapsed() > LOCK_TOLD) {
                    told = Some(Instant::now());
                    progress(Event::Waiting { name });
                    continue;
                }
                thread::sleep(LOCK_LOOK);
            }
        }
    }
}

/// Makes `snapshots/COMMIT/NAME` a link to the blob. Names are plain, so the way there is always the same.
fn link(etag: &str, pointer: &Path) -> Result<(), SourceError> {
    let io = |error| SourceError::Io { path: pointer.to_path_buf(), error };
    fs::create_dir_all(pointer.parent().unwrap_or(Path::new("."))).map_err(io)?;
    let target = Path::new("../../blobs").join(etag);
    match std::os::unix::fs::symlink(&target, pointer) {
        // A link to a blob that was removed, or one that another process has just made.
        Err(error) if error.kind() == ErrorKind::AlreadyExists && !pointer.is_file() => {
            fs::remove_file(pointer).and_then(|()| std::os::unix::fs::symlink(&target, pointer)).map_err(io)
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(io),
    }
}

/// Length, and for large files, whose tag is their SHA-256, content.
fn check(name: &str, path: &Path, etag: &str, bytes: u64) -> Result<(), SourceError> {
    let io = |error| SourceError::Io { path: path.to_path_buf(), error };
    let damaged = |expected, found| Err(SourceError::Damaged { file: name.to_string(), expected, found });
    let found = fs::metadata(path).map_err(io)?.len();
    if found != bytes {
        return damaged(format!("{bytes} bytes"), format!("{found}"));
    }
    if etag.len() == 64 && etag.bytes().all(|b| b.is_ascii_hexdigit()) {
        let found = sha256::hex_digest(File::open(path).map_err(io)?).map_err(io)?;
        if found != etag.to_ascii_lowercase() {
            return damaged(format!("SHA-256 {etag}"), found);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_joined_as_a_browser_does() {
        let base: Uri = "https://hub.example:8443/a/b?x=1".parse().expect("an address");
        for (location, expected) in [
            ("https://cdn.example/f?sig=1", Some("https://cdn.example/f?sig=1")),
            ("//cdn.example/f", Some("https://cdn.example/f")),
            ("/c/d", Some("https://hub.example:8443/c/d")),
            ("c", Some("https://hub.example:8443/a/c")),
            ("?y=2", Some("https://hub.example:8443/a/b?y=2")),
            ("/c#part", Some("https://hub.example:8443/c")),
            ("file:///etc/passwd", None),
            ("https://", None),
            ("http://a b/", None),
        ] {
            assert_eq!(join(&base, location).map(|uri| uri.to_string()).as_deref(), expected, "{location}");
        }
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let of = |text: &str| origin(&text.parse().expect("an address"));
        assert_eq!(of("https://hub.example/a"), of("https://HUB.example:443/b"));
        for other in
            ["http://hub.example", "https://hub.example:444", "https://hub.example.org", "https://x.hub.example"]
        {
            assert_ne!(of("https://hub.example"), of(other), "{other}");
        }
    }
}
