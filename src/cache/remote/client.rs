//! Owns the connection to a remote cache: the store of an address, its credentials, how requests are sent, and what is told of failures.
//!
//! No text of a server and no URL reaches a message: a server could repeat credentials in its answer, and some URLs are signed.

use std::collections::BTreeMap;
use std::env;
use std::error::Error as _;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use hyper::header::{CONTENT_LENGTH, RANGE};
use hyper::{Method, Request, Response};
use opendal::layers::{HttpClientLayer, RetryLayer};
use opendal::raw::{HttpBody, HttpClient, HttpFetch};
use opendal::{Buffer, Error, ErrorKind, Operator};
use tokio::sync::mpsc;

use crate::address::{RemoteAddress, Service};

/// Longest time for a connection. A server that does not answer costs this time once for each try.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Tries after the first. With jitter, so that many machines do not come back at once; 0.2 to 6 s in all.
const RETRIES: usize = 4;
const RETRY_DELAY_MIN: Duration = Duration::from_millis(100);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(4);
/// A server that has a whole file may copy it to its place before it answers: this many bytes a second at least.
const COPIED_BYTES_PER_S_MIN: u64 = 64 << 20;
/// Longest `Retry-After` that is waited for; a longer one costs tries instead.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(4);
const S3_REGION_DEFAULT: &str = "us-east-1";
/// Longest answer to a request that names no range: servers list at most some thousand objects at once. Larger objects are asked for in parts.
const ANSWER_BYTES_MAX: u64 = 256 << 20;
/// Longest answer that says what went wrong.
const ERROR_BYTES_MAX: u64 = 1 << 20;
/// Bytes of a file that are read at a time, and pieces that are read ahead of those that are sent: the disk and the network work at the same
/// time, in 8 MiB of memory.
const PIECE_BYTES: usize = 1 << 20;
const PIECES_AHEAD: usize = 8;

/// Files that are bodies of requests, by the names of their objects. A request that writes such an object is sent the bytes of its file in
/// place of its own body: a file that is larger than the memory is written in one request.
#[derive(Clone, Default)]
pub struct Bodies(Arc<Mutex<BTreeMap<String, PathBuf>>>);

impl Bodies {
    /// Until it is taken away again, by [`Bodies::remove`].
    pub fn insert(&self, name: &str, file: PathBuf) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_string(), file);
    }

    pub fn remove(&self, name: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }

    fn of<B>(&self, request: &Request<B>) -> Option<PathBuf> {
        let files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Names of objects are letters, digits, `-` and `/`, which URLs have as they are.
        let is_of = |name: &str| request.uri().path().strip_suffix(name).is_some_and(|rest| rest.ends_with('/'));
        let found = files.iter().find(|(name, _)| request.method() == Method::PUT && is_of(name));
        found.map(|(_, file)| file.clone())
    }
}

/// The store of an address, whose bodies of large files are those in `bodies`.
///
/// # Errors
/// What the store lacks, in words without credentials.
pub fn operator(address: &RemoteAddress, bodies: Bodies) -> Result<Operator, String> {
    // The process has one; another part may have set the same before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let timeout = address.timeout();
    let client = client(timeout).read_timeout(timeout).build();
    let client = client.map_err(|error| format!("no HTTP client: {}", error.without_url()))?;
    let retries = RetryLayer::new()
        .with_max_times(RETRIES)
        .with_min_delay(RETRY_DELAY_MIN)
        .with_max_delay(RETRY_DELAY_MAX)
        .with_jitter();
    let store = store(address)?;
    Ok(store
        .layer(HttpClientLayer::new(HttpClient::with(Http { client, files: OnceLock::new(), timeout, bodies })))
        .layer(retries))
}

/// Reads the certificates of the machine, which takes 5 ms.
fn client(timeout: Duration) -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT.min(timeout))
        .user_agent(concat!("monobloc/", env!("CARGO_PKG_VERSION")))
}

fn store(address: &RemoteAddress) -> Result<Operator, String> {
    opendal::init_default_registry();
    let root = format!("/{}", address.prefix);
    let mut options = vec![("root".to_string(), root)];
    let mut set = |name: &str, value: &str| options.push((name.to_string(), value.to_string()));
    let scheme = match address.service {
        Service::S3 => {
            set("bucket", &address.host);
            let variable = |name| env::var(name).ok().filter(|region: &String| !region.is_empty());
            let region = address.option("region").map(str::to_string);
            let region = region.or_else(|| variable("AWS_REGION")).or_else(|| variable("AWS_DEFAULT_REGION"));
            set("region", &region.unwrap_or_else(|| S3_REGION_DEFAULT.to_string()));
            address.option("endpoint").into_iter().for_each(|endpoint| set("endpoint", endpoint));
            if address.option("anonymous") == Some("true") {
                set("skip_signature", "true");
                set("disable_config_load", "true");
                set("disable_ec2_metadata", "true");
            }
            "s3"
        }
        Service::Gcs => {
            set("bucket", &address.host);
            address.option("endpoint").into_iter().for_each(|endpoint| set("endpoint", endpoint));
            if address.option("anonymous") == Some("true") {
                set("skip_signature", "true");
            }
            "gcs"
        }
        Service::Azure => {
            set("container", &address.host);
            let account = address.option("account").map(str::to_string);
            let account = account.or_else(|| env::var("AZURE_STORAGE_ACCOUNT_NAME").ok());
            let endpoint = address.option("endpoint").map(str::to_string);
            let endpoint = endpoint.or_else(|| Some(format!("https://{}.blob.core.windows.net", account.as_ref()?)));
            set("endpoint", &endpoint.ok_or("no account: add `?account=NAME`, or set `AZURE_STORAGE_ACCOUNT_NAME`")?);
            account.iter().for_each(|account| set("account_name", account));
            "azblob"
        }
        Service::Webdav | Service::Http => {
            set("endpoint", &address.http_endpoint());
            if let Some((user, password)) = netrc(&address.host) {
                set("username", &user);
                set("password", &password);
            }
            if address.service == Service::Webdav { "webdav" } else { "http" }
        }
    };
    Operator::via_iter(scheme, options).map_err(|error| match error.kind() {
        ErrorKind::Unsupported => {
            "this monobloc was built without that store: build it with `--features remote-azure,remote-gcs`".to_string()
        }
        _ => reason(&error),
    })
}

/// User and password of a host in `$NETRC` or `~/.netrc`, as curl reads them.
fn netrc(host: &str) -> Option<(String, String)> {
    let named = env::var_os("NETRC").filter(|path| !path.is_empty()).map(PathBuf::from);
    let path = named.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".netrc")))?;
    let host = host
        .rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()))
        .map_or(host, |(host, _)| host);
    netrc_entry(&fs::read_to_string(path).ok()?, host)
}

fn netrc_entry(text: &str, host: &str) -> Option<(String, String)> {
    let mut words = text.lines().filter(|line| !line.trim_start().starts_with('#')).flat_map(str::split_whitespace);
    let (mut ours, mut user, mut password) = (false, None, None);
    while let Some(word) = words.next() {
        match word {
            "machine" | "default" => {
                if ours && user.is_some() {
                    break;
                }
                ours = word == "default" || words.next() == Some(host);
            }
            "login" if ours => user = words.next(),
            "password" if ours => password = words.next(),
            "login" | "password" | "account" => {
                words.next();
            }
            _ => {}
        }
    }
    Some((user?.to_string(), password.unwrap_or_default().to_string()))
}

/// Sends requests, and answers alike for all stores if a server wants fewer of them or is out of order.
struct Http {
    client: reqwest::Client,
    /// For requests whose body is a file: the timeout of the other one counts from the begin of a request, however long its body takes.
    /// Made when it is first needed.
    files: OnceLock<reqwest::Client>,
    /// Longest time in which nothing is read or taken.
    timeout: Duration,
    bodies: Bodies,
}

impl Http {
    /// Sends a request whose body is a file, of which a piece at a time is in memory.
    async fn send_file(&self, request: Request<Buffer>, file: File) -> Result<Response<HttpBody>, Error> {
        let failed = |what: &'static str| {
            move |error: reqwest::Error| {
                Error::new(ErrorKind::Unexpected, what).set_temporary().set_source(error.without_url())
            }
        };
        let bytes =
            file.metadata().map_err(|error| Error::new(ErrorKind::Unexpected, "a file").set_source(error))?.len();
        let (mut parts, _) = request.into_parts();
        parts.headers.insert(CONTENT_LENGTH, bytes.into());
        let mut arriving = pieces(file.take(bytes));
        let taken = Arc::new(AtomicU64::new(0));
        let count = taken.clone();
        let pieces = stream::poll_fn(move |context| {
            let piece = arriving.poll_recv(context);
            if let Poll::Ready(Some(Ok(piece))) = &piece {
                count.fetch_add(piece.len() as u64, Ordering::Relaxed);
            }
            piece
        });
        let files = match self.files.get() {
            Some(files) => files,
            None => {
                let made = client(self.timeout).build().map_err(failed("make an HTTP client"))?;
                self.files.get_or_init(|| made)
            }
        };
        let sent = files.request(parts.method, parts.uri.to_string()).headers(parts.headers);
        let answered = async {
            let sent = sent.body(reqwest::Body::wrap_stream(pieces)).send().await.map_err(failed("send a file"))?;
            let (status, headers) = (sent.status(), sent.headers().clone());
            let answer = sent.bytes().await.map_err(failed("read an answer"))?;
            Ok::<_, Error>((status, headers, answer))
        };
        let (status, headers, answer) = tokio::select! {
            answered = answered => answered?,
            late = self.stalled(&taken, bytes) => {
                return Err(Error::new(ErrorKind::Unexpected, "send a file").set_temporary().set_source(late));
            }
        };
        let mut response = Response::builder().status(status);
        response.headers_mut().into_iter().for_each(|of_response| of_response.clone_from(&headers));
        let length = u64::try_from(answer.len()).ok();
        let body = HttpBody::new(stream::iter([Ok(Buffer::from(answer))]), length);
        response.body(body).map_err(|_| Error::new(ErrorKind::Unexpected, "an answer"))
    }

    /// Ends when nothing of a body was taken for the timeout, or when all of it was and no answer came.
    async fn stalled(&self, taken: &AtomicU64, bytes: u64) -> Late {
        let mut before = None;
        loop {
            let now = taken.load(Ordering::Relaxed);
            if before == Some(now) {
                return Late;
            }
            before = Some(now);
            let copied = if now < bytes { 0 } else { bytes / COPIED_BYTES_PER_S_MIN };
            tokio::time::sleep(self.timeout + Duration::from_secs(copied)).await;
        }
    }
}

/// A server that took too long.
#[derive(Debug, thiserror::Error)]
#[error("the server did not answer in time")]
struct Late;

/// The pieces of a file, read by a thread of its own. It ends with its file, or when no one wants more of it.
fn pieces(mut file: io::Take<File>) -> mpsc::Receiver<io::Result<Bytes>> {
    let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
    tokio::task::spawn_blocking(move || {
        loop {
            let mut piece = Vec::with_capacity(PIECE_BYTES);
            let read = file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece);
            let ends = !matches!(read, Ok(1..));
            if !matches!(read, Ok(0)) && sender.blocking_send(read.map(|_| Bytes::from(piece))).is_err() || ends {
                return;
            }
        }
    });
    receiver
}

impl HttpFetch for Http {
    async fn fetch(&self, request: Request<Buffer>) -> Result<Response<HttpBody>, Error> {
        let asked = range_bytes(&request).unwrap_or(ANSWER_BYTES_MAX);
        let response = match self.bodies.of(&request).map(File::open) {
            None => self.client.fetch(request).await?,
            Some(Ok(file)) => self.send_file(request, file).await?,
            Some(Err(error)) => return Err(Error::new(ErrorKind::Unexpected, "a file").set_source(error)),
        };
        let status = response.status().as_u16();
        if !matches!(status, 429 | 500 | 502 | 503 | 504) {
            let bytes_max = if status < 400 { asked } else { ERROR_BYTES_MAX };
            return Ok(response.map(|body| bounded(body, bytes_max)));
        }
        let after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        if let Some(after) = after.map(Duration::from_secs).filter(|after| *after <= RETRY_AFTER_MAX) {
            tokio::time::sleep(after).await;
        }
        let kind = if matches!(status, 429 | 503) { ErrorKind::RateLimited } else { ErrorKind::Unexpected };
        Err(Error::new(kind, format!("status: {status}")).set_temporary())
    }
}

/// Bytes of the range that a request asks for, if it has an end.
fn range_bytes<B>(request: &Request<B>) -> Option<u64> {
    let (first, last) = request.headers().get(RANGE)?.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
    last.parse::<u64>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
}

/// A body that ends with an error where it gets longer than what was asked for: a server that knows no ranges sends all of an object for each
/// part of it, and the parts are in memory.
fn bounded(body: HttpBody, bytes_max: u64) -> HttpBody {
    let mut bytes = 0;
    body.map_inner(move |pieces| {
        Box::new(pieces.map(move |piece| {
            let piece = piece?;
            bytes += piece.len() as u64;
            match bytes <= bytes_max {
                true => Ok(piece),
                false => Err(Error::new(ErrorKind::RangeNotSatisfied, "the answer is longer than what was asked for")),
            }
        }))
    })
}

/// What went wrong, in our own words and those of the operating system.
pub fn reason(error: &Error) -> String {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(system) = inner.downcast_ref::<io::Error>()
            && system.raw_os_error().is_some()
        {
            return system.to_string();
        }
        if inner.is::<Late>() || inner.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_timeout) {
            return Late.to_string();
        }
        cause = inner.source();
    }
    // The context of an error has the status of the answer.
    let text = error.to_string();
    let status = text.split_once("status: ").map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect());
    let status = status.filter(|digits: &String| digits.len() == 3);
    let what = match (error.kind(), status.as_deref()) {
        (ErrorKind::PermissionDenied, _) | (_, Some("401" | "403")) => "access denied; check the credentials",
        (ErrorKind::RateLimited, _) => "the server is overloaded or wants fewer requests",
        (_, Some("507" | "413")) => "the server has no space",
        (ErrorKind::ConfigInvalid, _) => "no such bucket, or its address lacks something",
        (ErrorKind::NotFound, _) => "not found",
        (ErrorKind::Unsupported, _) => "the server cannot do this",
        (ErrorKind::RangeNotSatisfied, _) => "the server sent another part than it was asked for",
        (_, Some(_)) => "the server failed",
        (_, None) if text.contains("credential") => "no credentials were found",
        (_, None) => "the connection failed, or the answer cannot be read",
    };
    match status {
        Some(status) => format!("{what} (status {status})"),
        None => what.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_netrc_names_the_user_of_a_host() {
        let text = "# ours\nmachine other login a password b\nmachine host\n  login me\n  password secret\ndefault login x password y\n";
        let found = |host| netrc_entry(text, host);
        assert_eq!(found("host"), Some(("me".to_string(), "secret".to_string())));
        assert_eq!(found("other"), Some(("a".to_string(), "b".to_string())));
        assert_eq!(found("third"), Some(("x".to_string(), "y".to_string())));
        assert_eq!(netrc_entry("machine host login me", "elsewhere"), None);
    }

    #[test]
    fn answers_of_servers_are_not_repeated() {
        let error = Error::new(ErrorKind::PermissionDenied, "AKIASECRET hunter2")
            .with_context("response", "Parts { status: 403, headers: {\"x\": \"hunter2\"} }")
            .with_context("url", "https://host/?sig=hunter2");
        assert_eq!(reason(&error), "access denied; check the credentials (status 403)");
    }
}
