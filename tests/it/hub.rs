//! Tests a hostile hub: which hosts get the access token, and how downloads fail.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::cli_support::{Answer, Place, manifest_text};
use crate::support::fixture;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_secret_of_this_test";

#[derive(Clone)]
struct Request {
    /// Path with the query.
    path: String,
    head: String,
}

impl Request {
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}

/// A server on its own port. It answers each request with the text that `answer` writes, and keeps the requests.
struct Server {
    port: u16,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn start(answer: impl Fn(&Request, &mut TcpStream) -> std::io::Result<()> + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (kept, answer) = (Arc::clone(&requests), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (kept, answer) = (Arc::clone(&kept), Arc::clone(&answer));
                std::thread::spawn(move || {
                    let mut stream = stream.unwrap();
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    let mut head = String::new();
                    while reader.read_line(&mut head).is_ok_and(|count| count > 2) {}
                    let path = head.split(' ').nth(1).unwrap_or_default().to_string();
                    let request = Request { path, head };
                    kept.lock().unwrap().push(request.clone());
                    let _ = answer(&request, &mut stream);
                });
            }
        });
        Server { port, requests }
    }
}

fn reply(stream: &mut TcpStream, status: u16, head: &str, body: &[u8]) -> std::io::Result<()> {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n{head}\r\n")?;
    stream.write_all(body)
}

fn files() -> BTreeMap<String, Vec<u8>> {
    let folder = fixture("families/llama-gqa");
    let read = |name: &str| (name.to_string(), fs::read(folder.join(name)).unwrap());
    [read("config.json"), read("model.safetensors"), ("tokenizer.json".to_string(), b"{}".to_vec())].into()
}

/// The description of the repository, or `None` for another path.
fn info(request: &Request, stream: &mut TcpStream) -> Option<std::io::Result<()>> {
    let names: Vec<String> = files().keys().map(|name| format!("{{\"rfilename\":\"{name}\"}}")).collect();
    let text = format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", names.join(","));
    (request.path == "/api/models/org/m/revision/main").then(|| reply(stream, 200, "", text.as_bytes()))
}

/// The wanted part of a file, with the headers of a hub.
fn part(request: &Request, bytes: &[u8], etag: &str, stream: &mut TcpStream) -> std::io::Result<()> {
    let range = request.header("range").unwrap_or("bytes=0-").trim_start_matches("bytes=").to_string();
    let (first, last) = range.split_once('-').unwrap();
    let first: usize = first.parse().unwrap();
    let end = last.parse().map_or(bytes.len(), |last: usize| (last + 1).min(bytes.len()));
    let range = format!("Content-Range: bytes {first}-{}/{}\r\n", end - 1, bytes.len());
    let head = format!("{range}ETag: \"{etag}\"\r\nx-repo-commit: {COMMIT}\r\n");
    reply(stream, 206, &head, &bytes[first..end])
}

/// Imports `hf:org/m` from a hub on that port, with the token set.
fn build(place: &Place, port: u16) -> Answer {
    place.write("hub.toml", manifest_text("hf:org/m", 8));
    let mut command = place.command("build hub.toml");
    command.env("HF_ENDPOINT", format!("http://127.0.0.1:{port}")).env("HF_TOKEN", TOKEN);
    command.env("HF_HUB_DOWNLOAD_TIMEOUT", "3").env("HF_HOME", place.path("hf"));
    command.env_remove("http_proxy").env_remove("HTTP_PROXY").env_remove("ALL_PROXY").env_remove("all_proxy");
    Answer::of(&mut command)
}

#[test]
fn the_token_stays_with_the_hub_when_files_are_elsewhere() {
    let place = Place::new();
    let storage = Server::start(|request, stream| {
        let name = request.path.trim_start_matches("/stored/").split('?').next().unwrap();
        part(request, &files()[name], "the-storage-has-tags-of-its-own", stream)
    });
    // Another port counts as another host, and so does another name of the same host; both are tried.
    let elsewhere = [format!("http://127.0.0.1:{}", storage.port), format!("http://localhost:{}", storage.port)];
    let hub = Server::start(move |request, stream| {
        if let Some(done) = info(request, stream) {
            return done;
        }
        let name = request.path.rsplit('/').next().unwrap();
        // A redirect within the hub first, as it does for repositories that were renamed.
        if request.path.starts_with("/org/m/") {
            let there = format!("Location: /renamed/resolve/{COMMIT}/{name}\r\n");
            return reply(stream, 307, &there, b"");
        }
        let to = &elsewhere[usize::from(name == "config.json")];
        let etag = blake3::hash(&files()[name]).to_hex();
        let said = format!("x-linked-etag: \"{}\"\r\nx-repo-commit: {COMMIT}\r\n", &etag[..40]);
        reply(stream, 302, &format!("Location: {to}/stored/{name}?signed=1\r\n{said}"), b"")
    });
    build(&place, hub.port).code(0);
    let (asked, stored) = (hub.requests.lock().unwrap(), storage.requests.lock().unwrap());
    assert!(asked.iter().all(|request| request.header("authorization") == Some(&format!("Bearer {TOKEN}"))));
    // The size and the content of every file came from the storage.
    assert_eq!(stored.len(), 2 * files().len());
    for request in stored.iter() {
        assert_eq!(request.header("authorization"), None, "{}", request.head);
        assert!(!request.head.contains(TOKEN), "{}", request.head);
    }
    // The layout is that of the Python client.
    let repo = place.path("hf/hub/models--org--m");
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    for (name, bytes) in files() {
        let pointer = repo.join("snapshots").join(COMMIT).join(&name);
        let blob = format!("../../blobs/{}", &blake3::hash(&bytes).to_hex()[..40]);
        assert_eq!(fs::read_link(&pointer).unwrap().to_str().unwrap(), blob);
        assert_eq!(fs::read(pointer).unwrap(), bytes);
    }
}

#[test]
fn a_way_back_to_the_hub_carries_no_token() {
    let place = Place::new();
    let back = Arc::new(Mutex::new(String::new()));
    let target = Arc::clone(&back);
    let elsewhere = Server::start(move |_, stream| {
        reply(stream, 302, &format!("Location: {}/stolen\r\n", target.lock().unwrap()), b"")
    });
    let port = elsewhere.port;
    let hub = Server::start(move |request, stream| match info(request, stream) {
        Some(done) => done,
        None if request.path == "/stolen" => reply(stream, 200, "", b"x"),
        None => reply(stream, 302, &format!("Location: http://127.0.0.1:{port}/\r\n"), b""),
    });
    *back.lock().unwrap() = format!("http://127.0.0.1:{}", hub.port);
    build(&place, hub.port).fault(3, &["`config.json`"]);
    let asked = hub.requests.lock().unwrap();
    let stolen = asked.iter().find(|request| request.path == "/stolen").expect("the redirect was followed");
    assert_eq!(stolen.header("authorization"), None);
}

/// The message of a build against a hub that describes the repository well and answers for files with `answer`.
fn refused(
    answer: impl Fn(&Request, &mut TcpStream) -> std::io::Result<()> + Send + Sync + 'static,
    expected: &[&str],
) {
    let hub = Server::start(move |request, stream| info(request, stream).unwrap_or_else(|| answer(request, stream)));
    let begun = Instant::now();
    build(&Place::new(), hub.port).fault(3, expected);
    assert!(begun.elapsed() < Duration::from_secs(50), "{expected:?} took {:?}", begun.elapsed());
}

#[test]
fn redirects_that_lead_nowhere_are_reported() {
    refused(|_, stream| reply(stream, 302, "", b""), &["`config.json`", "redirect (status 302) without `location`"]);
    refused(
        |request, stream| reply(stream, 307, &format!("Location: {}\r\n", request.path), b""),
        &["`config.json`", "more than 10 redirects"],
    );
    refused(|_, stream| reply(stream, 301, "Location: file:///etc/passwd\r\n", b""), &["`file:///etc/passwd`"]);
    refused(|_, stream| reply(stream, 302, "Location: http://a b/\r\n", b""), &["which is no address"]);
}

#[test]
fn a_silent_hub_is_given_up() {
    let silent = |_: &Request, _: &mut TcpStream| {
        std::thread::sleep(Duration::from_secs(60));
        Ok(())
    };
    refused(silent, &["was silent for 3 s", "`config.json`", "HF_HUB_DOWNLOAD_TIMEOUT"]);
    // From the first request on.
    let hub = Server::start(silent);
    build(&Place::new(), hub.port).fault(3, &["was silent for 3 s", "`org/m at main`"]);
    // In the middle of a file.
    refused(
        |request, stream| {
            let bytes = &files()["config.json"];
            if request.header("range") == Some("bytes=0-0") {
                return part(request, bytes, "tag", stream);
            }
            write!(stream, "HTTP/1.1 200 X\r\nContent-Length: {}\r\n\r\n{{", bytes.len())?;
            stream.flush()?;
            std::thread::sleep(Duration::from_secs(60));
            Ok(())
        },
        &["the download of `config.json` was cut off"],
    );
    // An answer whose bytes arrive slowly.
    refused(
        |_, stream| {
            for byte in b"HTTP/1.1 200 X\r\nX-Long: ".iter().chain([b'x'; 200].iter()) {
                stream.write_all(&[*byte])?;
                std::thread::sleep(Duration::from_millis(400));
            }
            Ok(())
        },
        &["was silent for 3 s"],
    );
}

#[test]
fn answers_that_no_hub_gives_are_refused() {
    let huge = |head: String| move |_: &Request, stream: &mut TcpStream| reply(stream, 206, &head, b"x");
    let said = format!("ETag: \"tag\"\r\nx-repo-commit: {COMMIT}\r\n");
    refused(
        huge(format!("Content-Range: bytes 0-0/1152921504606846976\r\n{said}")),
        &["`config.json`", "expected at most 268435456 bytes, found 1152921504606846976"],
    );
    refused(huge(format!("Content-Range: bytes 0-0/-1\r\n{said}")), &["expected its size in `content-range`"]);
    refused(huge("Content-Range: bytes 0-0/9\r\n".to_string()), &["expected `etag` and `x-repo-commit`"]);
    let tag = format!("Content-Range: bytes 0-0/9\r\nETag: \"../../up\"\r\nx-repo-commit: {COMMIT}\r\n");
    refused(huge(tag), &["expected a plain tag, found `../../up`"]);
    refused(|_, stream| stream.write_all(b"\x00\xff no HTTP\r\n\r\n"), &["cannot be reached"]);
}

/// A hub whose files are those of [`files`], after `busy` answers with that status.
fn sound(busy: usize, status: u16, head: &'static str) -> Server {
    let left = Mutex::new(busy);
    Server::start(move |request, stream| {
        let mut left = left.lock().unwrap();
        if *left > 0 {
            *left -= 1;
            return reply(stream, status, head, b"");
        }
        info(request, stream).unwrap_or_else(|| match files().get(request.path.rsplit('/').next().unwrap()) {
            Some(bytes) => part(request, bytes, &blake3::hash(bytes).to_hex()[..40], stream),
            None => reply(stream, 404, "", b""),
        })
    })
}

fn ask(place: &Place, port: u16, arguments: &str) -> Answer {
    let mut command = place.command(arguments);
    command.env("HF_ENDPOINT", format!("http://127.0.0.1:{port}")).env("HF_HOME", place.path("hf"));
    command.env_remove("http_proxy").env_remove("HTTP_PROXY").env_remove("ALL_PROXY").env_remove("all_proxy");
    Answer::of(&mut command)
}

#[test]
fn a_busy_hub_is_asked_again() {
    let place = Place::new();
    let built = build(&place, sound(2, 503, "Retry-After: 0\r\n").port).code(0);
    assert!(built.stderr.contains("the hub is busy (status 503): asking again in 0."), "{built:#?}");
    // Not for ever.
    let refused = build(&Place::new(), sound(99, 429, "Retry-After: 0\r\n").port);
    refused.fault(3, &["with status 429", "HF_TOKEN"]);
}

#[test]
fn init_and_import_look_at_the_hub_and_fetch_no_weights() {
    let place = Place::new();
    let hub = sound(0, 0, "");
    let said = ask(&place, hub.port, "import hf:org/m").code(0);
    assert!(said.stdout.starts_with("LlamaForCausalLM: "), "{said:#?}");
    ask(&place, hub.port, "init hf:org/m --target cpu").code(0);
    // The context is that of the model.
    assert!(fs::read_to_string(place.path("monobloc.toml")).unwrap().contains("context_max = 256\n"));
    let whole = files()["model.safetensors"].len();
    let asked = hub.requests.lock().unwrap().clone();
    let ranges = asked.iter().filter(|request| request.path.ends_with("model.safetensors"));
    for range in ranges.map(|request| request.header("range").unwrap()) {
        assert!(range.starts_with("bytes=0-") && range != "bytes=0-", "{range} of {whole}");
    }
    assert!(!place.path("hf/hub").exists(), "nothing is kept");

    // One that is not there is not written, and one that cannot be asked for is written with a warning.
    ask(&place, hub.port, "init hf:org/other --out other.toml").refused(&["was not found on the hub"]);
    assert!(!place.path("other.toml").exists());
    let mut offline = place.command("init hf:org/other --out other.toml --target cpu");
    let warned = Answer::of(offline.env("HF_HUB_OFFLINE", "1")).code(0);
    assert!(warned.stderr.contains("warning: `hf:org/other` was not looked at"), "{warned:#?}");
}

#[test]
fn a_model_of_the_hub_runs_without_a_manifest() {
    let place = Place::new();
    let hub = sound(0, 0, "");
    let text = ask(&place, hub.port, "generate hf:org/m --ids 1,2 --max-tokens 3 --target cpu").code(0);
    assert_eq!(text.stdout.trim().split(',').count(), 3, "{text:#?}");
    let requests = hub.requests.lock().unwrap().len();
    let again = ask(&place, hub.port, "generate hf:org/m --ids 1,2 --max-tokens 3 --target cpu").code(0);
    assert_eq!(again.stdout, text.stdout);
    assert_eq!(hub.requests.lock().unwrap().len(), requests, "the second run asks for nothing");
    place.run("init hf:org/m --target cpu --out h.toml").code(0);
}
