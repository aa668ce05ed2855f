//! Owns the servers of tests of remote caches: moto (S3), nginx (WebDAV and HTTP), and a proxy that injects faults.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use monobloc::random::Random;
use tempfile::TempDir;

/// Where `.ci/install-remotes.sh` puts them.
fn folder() -> PathBuf {
    let named = std::env::var_os("MONOBLOC_REMOTES").map(PathBuf::from);
    named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/remotes"))
}

fn without(test: &str, missing: &str) {
    let required = std::env::var_os("MONOBLOC_REQUIRE_REMOTES").is_some_and(|value| value == "1");
    let reason = format!("`{}` has none: run .ci/install-remotes.sh", folder().display());
    assert!(!required, "MONOBLOC_REQUIRE_REMOTES is set: {missing}: {reason}");
    crate::skipped(test, missing, &reason);
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Ends when its stdin is closed: with this process, if no test ends it.
struct Server {
    child: Child,
    stdin: Option<ChildStdin>,
    address: SocketAddr,
}

impl Server {
    fn start(mut command: Command, port: u16) -> Server {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("a server");
        let stdin = child.stdin.take();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(120), "{command:?} does not listen");
            assert!(child.try_wait().unwrap().is_none(), "{command:?} ended");
            thread::sleep(Duration::from_millis(20));
        }
        Server { child, stdin, address }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let _ = self.child.wait();
    }
}

/// An S3 server for all tests of this process, or nothing if this machine has none.
pub fn s3(test: &str) -> Option<SocketAddr> {
    static SERVER: OnceLock<Server> = OnceLock::new();
    let packages = folder().join("python");
    if !packages.join("moto").is_dir() {
        without(test, "S3 server");
        return None;
    }
    let server = SERVER.get_or_init(|| {
        let port = free_port();
        let program = "import os, sys, threading\n\
            threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()\n\
            from moto.server import main\n\
            main(['-H', '127.0.0.1', '-p', sys.argv[1]])";
        let mut command = Command::new("python3");
        command.args(["-c", program, &port.to_string()]).env("PYTHONPATH", &packages).stderr(Stdio::null());
        Server::start(command, port)
    });
    Some(server.address)
}

/// Makes a bucket of its own.
pub fn bucket(server: SocketAddr) -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("bucket-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let (status, _) = plain(server, "PUT", &format!("/{name}"), b"");
    assert_eq!(status, 200, "the bucket");
    name
}

/// Status and body of a request that nothing checks.
pub fn plain(server: SocketAddr, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
    let mut stream = TcpStream::connect(server).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = vec![];
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n").expect("a head") + 4;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), answer[end..].to_vec())
}

/// nginx with one server.
pub struct Nginx {
    server: Server,
    folder: TempDir,
}

impl Nginx {
    /// Serves a folder over WebDAV; below `/locked` it asks for the user `me` with the password `hunter2hunter2`.
    pub fn start(test: &str) -> Option<Nginx> {
        Nginx::start_with(test, |place, port| {
            let methods =
                "dav_methods PUT DELETE MKCOL COPY MOVE; dav_ext_methods PROPFIND OPTIONS; create_full_put_path on;";
            format!(
                "server {{\nlisten 127.0.0.1:{port};\nroot {place}/files;\nlocation / {{ {methods} }}\n\
                 location /locked/ {{ {methods} auth_basic locked; auth_basic_user_file {place}/users; }}\n}}\n"
            )
        })
    }

    /// As [`Nginx::start`], with what `servers` says of its folder and port.
    pub fn start_with(test: &str, servers: impl FnOnce(&str, u16) -> String) -> Option<Nginx> {
        let root = folder().join("nginx");
        let program = root.join("usr/sbin/nginx");
        if !program.is_file() {
            without(test, "nginx");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let (port, place) = (free_port(), folder.path().display().to_string());
        fs::create_dir_all(folder.path().join("files/locked")).unwrap();
        fs::write(folder.path().join("users"), "me:{PLAIN}hunter2hunter2\n").unwrap();
        let module = root.join("usr/lib/nginx/modules/ngx_http_dav_ext_module.so");
        let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
        let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {place}/{name};\n"))
            .concat();
        let text = format!(
            "{user}\nload_module {};\npid {place}/pid;\nerror_log {place}/error.log;\nworker_processes 1;\ndaemon off;\n\
             events {{ worker_connections 256; }}\nhttp {{\naccess_log off;\n{paths}client_max_body_size 0;\n{}}}\n",
            module.display(),
            servers(&place, port)
        );
        fs::write(folder.path().join("nginx.conf"), text).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "\"$0\" -c \"$1\" -p \"$2\" & nginx=$!; cat >/dev/null; kill \"$nginx\"; wait \"$nginx\""]);
        command.arg(&program).arg(folder.path().join("nginx.conf")).arg(folder.path());
        command.env("LD_LIBRARY_PATH", root.join("usr/lib/x86_64-linux-gnu"));
        let server = Server::start(command, port);
        Some(Nginx { server, folder })
    }

    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// What it serves.
    pub fn files(&self) -> PathBuf {
        self.folder.path().join("files")
    }
}

/// What a proxy does to one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    None,
    /// Waits before it passes the request on.
    Delay(u64),
    /// Takes so many MiB of the request a second.
    Slow(u64),
    /// Waits until so many requests in all were for objects with this in their names; after 20 s the answer is that there is no such object.
    Until(&'static str, usize),
    /// Answers with this status.
    Status(u16),
    /// Closes the connection after half of the answer.
    CutAnswer,
    /// Closes the connection after half of the request.
    CutRequest,
    /// Flips a bit of the answer's body.
    Flip,
    /// Accepts the request and never answers.
    Silence,
}

/// One request that a proxy saw.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub range: Option<String>,
    pub fault: Fault,
}

type Choice = Box<dyn FnMut(&Seen) -> Fault + Send>;

/// Passes requests on to a server, with faults.
pub struct Proxy {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Proxy {
    pub fn start(upstream: SocketAddr, choose: impl FnMut(&Seen) -> Fault + Send + 'static) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, seen) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(vec![])));
        let (choose, log): (Arc<Mutex<Choice>>, _) = (Arc::new(Mutex::new(Box::new(choose))), seen.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let (choose, log) = (choose.clone(), log.clone());
                // A connection that was cut is what this is for.
                thread::spawn(move || client.map(|client| pass(client, upstream, &choose, &log)));
            }
        });
        Proxy { address, seen }
    }

    /// As [`Proxy::start`], with a fault in each `one_in` requests.
    pub fn random(upstream: SocketAddr, seed: u64, one_in: u32) -> Proxy {
        let mut random = Random::new(seed);
        let mut upto = move |n: u64| random.word() % n;
        Proxy::start(upstream, move |_| match upto(u64::from(one_in)) {
            0 => match upto(7) {
                0 => Fault::Delay(upto(400)),
                1 => Fault::Status(429),
                2 => Fault::Status(503),
                3 => Fault::Status(500),
                4 => Fault::CutAnswer,
                5 => Fault::CutRequest,
                _ => Fault::Flip,
            },
            _ => Fault::None,
        })
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// How often each fault was injected.
    pub fn faults(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for seen in self.seen() {
            let name = format!("{:?}", seen.fault).split('(').next().unwrap().to_string();
            *counts.entry(name).or_default() += 1;
        }
        counts
    }
}

/// Whether so many requests come for objects with `within` in their names.
fn comes(log: &Mutex<Vec<Seen>>, within: &str, count: usize) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        if log.lock().unwrap().iter().filter(|seen| seen.path.contains(within)).count() >= count {
            return true;
        }
        thread::sleep(Duration::from_millis(5));
    }
    false
}

fn pass(
    mut client: TcpStream,
    upstream: SocketAddr,
    choose: &Mutex<Choice>,
    log: &Mutex<Vec<Seen>>,
) -> std::io::Result<()> {
    let mut request = vec![];
    let mut buffer = vec![0; 64 << 10];
    let head_end = loop {
        if let Some(at) = request.windows(4).position(|w| w == b"\r\n\r\n") {
            break at + 4;
        }
        match client.read(&mut buffer)? {
            0 => return Ok(()),
            n => request.extend_from_slice(&buffer[..n]),
        }
    };
    let head = String::from_utf8_lossy(&request[..head_end]).into_owned();
    let header = |name: &str| {
        let line = head.lines().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}: ")));
        line.and_then(|line| line.split_once(": ")).map(|(_, value)| value.trim().to_string())
    };
    let mut words = head.split(' ');
    let (method, path) = (words.next().unwrap().to_string(), words.next().unwrap().to_string());
    let seen = Seen { method: method.clone(), path, range: header("range"), fault: Fault::None };
    let fault = (choose.lock().unwrap())(&seen);
    log.lock().unwrap().push(Seen { fault, ..seen });

    let length: usize = header("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
    let upto = if fault == Fault::CutRequest { length / 2 } else { length };
    let begun = Instant::now();
    while request.len() < head_end + upto {
        match client.read(&mut buffer)? {
            0 => return Ok(()),
            n => request.extend_from_slice(&buffer[..n]),
        }
        if let Fault::Slow(mib_per_s) = fault {
            let due = Duration::from_secs_f64(request.len() as f64 / (mib_per_s << 20) as f64);
            thread::sleep(due.saturating_sub(begun.elapsed()));
        }
    }
    let status = match fault {
        Fault::Status(status) => Some(status),
        Fault::Until(within, count) if !comes(log, within, count) => Some(404),
        _ => None,
    };
    if let Some(status) = status {
        let answer = format!("HTTP/1.1 {status} Fault\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        return client.write_all(answer.as_bytes());
    }
    match fault {
        Fault::Silence => {
            // Until the client gives up.
            while client.read(&mut buffer)? > 0 {}
            return Ok(());
        }
        Fault::Delay(ms) => thread::sleep(Duration::from_millis(ms)),
        _ => {}
    }
    let mut server = TcpStream::connect(upstream)?;
    let kept: String = head
        .lines()
        .filter(|line| !line.is_empty() && !line.to_ascii_lowercase().starts_with("connection:"))
        .map(|line| format!("{line}\r\n"))
        .collect();
    server.write_all(format!("{kept}Connection: close\r\n\r\n").as_bytes())?;
    server.write_all(&request[head_end..])?;
    if fault == Fault::CutRequest {
        return Ok(());
    }
    let mut answer = vec![];
    server.read_to_end(&mut answer)?;
    let body = answer.windows(4).position(|w| w == b"\r\n\r\n").map_or(answer.len(), |at| at + 4);
    match fault {
        Fault::CutAnswer => answer.truncate(body + (answer.len() - body) / 2),
        Fault::Flip if body < answer.len() => {
            let at = body + (answer.len() - body) / 3;
            answer[at] ^= 4;
        }
        _ => {}
    }
    client.write_all(&answer)
}
