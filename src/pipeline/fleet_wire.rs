//! Owns what a search on many machines and its workers say to each other: a line of JSON each, over TCP.
//!
//! A worker connects to the coordinator, says the token that it was started with and what it runs on, and answers candidates, one at a
//! time. It has a child process for them, so that a hang or a crash costs a trial and not the worker. A worker ends when its connection
//! does. Lines are bounded; a connection that says something else is closed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Workspace;
use super::arena::deadline;
use super::chain::Host;
use super::keys::{self, Hardware};
use super::trial::{Answer, Job};
use super::worker::{Done, Worker};
use crate::error::Fault;
use crate::target::Target;

/// The variable from which a worker has its token: command lines are seen by everyone on a host.
pub const TOKEN: &str = "MONOBLOC_FLEET_TOKEN";
/// The variable from which a worker has its name, unless Slurm names it.
const JOB: &str = "MONOBLOC_FLEET_JOB";
/// Longest line. Answers have times of a few launches at each position.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// Longest first line.
const HELLO_BYTES_MAX: u64 = 64 << 10;
/// Longest name of a host or of a job.
const NAME_CHARS_MAX: usize = 255;
/// Time for the first line.
const HELLO: Duration = Duration::from_secs(20);
/// Connections at a time.
const CONNECTIONS_MAX: usize = 4096;
/// Time for one try to connect, and for all of them.
const CONNECT: Duration = Duration::from_secs(10);
const CONNECT_ALL: Duration = Duration::from_secs(120);
/// Time for a worker to take a line.
const WRITE: Duration = Duration::from_secs(30);

/// A candidate for a worker.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    ticket: u64,
    job: Job,
    timeout: Option<Duration>,
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Said {
    Hello(Box<Hello>),
    Reply { ticket: u64, done: Done },
}

/// The first line of a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    token: String,
    /// Digest of the code that campaigns run.
    code: String,
    pub host: String,
    pub job: String,
    /// What it runs on, or why it cannot run.
    pub hardware: Result<Hardware, Fault>,
}

/// What the coordinator hears, with the number of a connection.
pub(super) enum Event {
    Joined(u64, Hello),
    Reply {
        from: u64,
        ticket: u64,
        done: Done,
    },
    /// With the reason.
    Gone(u64, String),
}

/// The coordinator's end: listens until it is dropped.
pub(super) struct Hub {
    /// Where workers connect.
    pub address: SocketAddr,
    pub token: String,
    pub events: Receiver<Event>,
    streams: Arc<Mutex<BTreeMap<u64, TcpStream>>>,
    ended: Arc<AtomicBool>,
}

impl Hub {
    /// Listens on `listen`, else on any port of all addresses of this machine.
    ///
    /// # Errors
    /// An address that is not of this machine, or is in use.
    pub fn open(listen: Option<SocketAddr>) -> Result<Hub, Fault> {
        let bound = listen.unwrap_or(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
        let failed = |error: io::Error| {
            Fault::environment(format!("cannot listen on {bound}: {error}"))
                .with_remedy("name an address and a port of this machine with `--listen`")
        };
        let listener = TcpListener::bind(bound).map_err(failed)?;
        let mut address = listener.local_addr().map_err(failed)?;
        if address.ip().is_unspecified() {
            address.set_ip(own_address().unwrap_or(Ipv4Addr::LOCALHOST).into());
        }
        let token = token()?;
        let (sender, events) = channel();
        let (streams, ended) = (Arc::<Mutex<BTreeMap<u64, TcpStream>>>::default(), Arc::new(AtomicBool::new(false)));
        let door = Door { token: token.clone(), sender, streams: Arc::clone(&streams), open: AtomicUsize::new(0) };
        let (door, stop) = (Arc::new(door), Arc::clone(&ended));
        thread::spawn(move || {
            for (number, stream) in (0..).zip(listener.incoming()) {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let door = Arc::clone(&door);
                match stream {
                    Ok(stream) if door.open.fetch_add(1, Ordering::Relaxed) < CONNECTIONS_MAX => {
                        thread::spawn(move || door.hear(number, stream));
                    }
                    _ => {
                        door.open.fetch_sub(1, Ordering::Relaxed);
                    }
                }
            }
        });
        Ok(Hub { address, token, events, streams, ended })
    }

    /// Gives a worker a candidate; `false` if it is gone.
    pub fn send(&self, to: u64, ticket: u64, job: &Job, timeout: Option<Duration>) -> bool {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let order = Order { ticket, job: job.clone(), timeout };
        streams.get(&to).is_some_and(|stream| say(stream, &order).is_ok())
    }

    /// Closes the connection of a worker, which ends it.
    pub fn close(&self, of: u64) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = streams.remove(&of) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // Wakes the thread that listens.
        let _ = TcpStream::connect_timeout(&self.address, CONNECT);
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, stream) in std::mem::take(&mut *streams) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// What every connection of a coordinator shares.
struct Door {
    token: String,
    sender: Sender<Event>,
    streams: Arc<Mutex<BTreeMap<u64, TcpStream>>>,
    open: AtomicUsize,
}

impl Door {
    /// Hears a worker to its end.
    fn hear(&self, number: u64, stream: TcpStream) {
        if let Some(reason) = self.heard(number, &stream) {
            let _ = self.sender.send(Event::Gone(number, reason));
        }
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// The reason for its end; `None` if it never joined.
    fn heard(&self, number: u64, stream: &TcpStream) -> Option<String> {
        stream.set_read_timeout(Some(HELLO)).ok()?;
        stream.set_write_timeout(Some(WRITE)).ok()?;
        let _ = stream.set_nodelay(true);
        let mut reader = BufReader::new(stream);
        let Ok(Said::Hello(hello)) = read(&mut reader, HELLO_BYTES_MAX) else { return None };
        if hello.token != self.token {
            return None;
        }
        let mut hello = *hello;
        hello.host = name(&hello.host);
        hello.job = name(&hello.job);
        if hello.code != keys::code_of_all().to_string() {
            hello.hardware = Err(Fault::input("its monobloc is of another version"));
        }
        stream.set_read_timeout(None).ok()?;
        let own = stream.try_clone().ok()?;
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).insert(number, own);
        self.sender.send(Event::Joined(number, hello)).ok()?;
        loop {
            match read(&mut reader, LINE_BYTES_MAX) {
                Ok(Said::Reply { ticket, done }) => {
                    self.sender.send(Event::Reply { from: number, ticket, done }).ok()?;
                }
                Ok(Said::Hello(_)) => return Some("it joined twice".to_string()),
                Err(error) => return Some(error.to_string()),
            }
        }
    }
}

/// Joins a search on many machines, and answers its candidates until it ends. `gone` is called when the coordinator is gone, from any state.
///
/// # Errors
/// A coordinator that cannot be reached, a candidate's child that cannot be started.
pub fn join(
    workspace: &Workspace,
    target: &Target,
    address: &str,
    child: &dyn Fn() -> Command,
    gone: impl FnOnce() + Send + 'static,
) -> Result<(), Fault> {
    let unreachable = |error: io::Error| {
        Fault::environment(format!("cannot reach the search at {address}: {error}"))
            .with_remedy("this command is started by `monobloc tune --on`")
    };
    let hardware = Host::new(workspace).hardware(target).map_err(Fault::from);
    let hello = Hello {
        token: std::env::var(TOKEN).unwrap_or_default(),
        code: keys::code_of_all().to_string(),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        job: job(),
        hardware,
    };
    let stream = connect(address).map_err(unreachable)?;
    let _ = stream.set_nodelay(true);
    say(&stream, &Said::Hello(Box::new(hello))).map_err(unreachable)?;
    let mut reader = BufReader::new(stream.try_clone().map_err(unreachable)?);
    let (sender, orders) = channel();
    thread::spawn(move || {
        while let Ok(order) = read::<Order>(&mut reader, LINE_BYTES_MAX) {
            if sender.send(order).is_err() {
                return;
            }
        }
        gone();
    });
    let (mut worker, mut slowest) = (Worker::new(child), Duration::ZERO);
    for Order { ticket, job, timeout } in orders {
        let started = Instant::now();
        let done = worker.run(&job, deadline(timeout, worker.is_warm(), slowest), &|| false)?;
        if let Done::Answer(Answer::Timed { .. }) = &done {
            slowest = slowest.max(started.elapsed());
        }
        say(&stream, &Said::Reply { ticket, done }).map_err(unreachable)?;
    }
    Ok(())
}

/// What a row can have of the name of a worker.
fn name(text: &str) -> String {
    let plain = text.chars().map(|c| if c.is_control() { '?' } else { c });
    plain.take(NAME_CHARS_MAX).collect()
}

/// What the engine calls this worker.
fn job() -> String {
    let named = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    match (named("SLURM_ARRAY_JOB_ID"), named("SLURM_ARRAY_TASK_ID")) {
        (Some(job), Some(task)) => format!("{job}_{task}"),
        _ => named(JOB).or_else(|| named("SLURM_JOB_ID")).unwrap_or_else(|| std::process::id().to_string()),
    }
}

/// Tries for as long as a coordinator may take to be reachable.
fn connect(address: &str) -> io::Result<TcpStream> {
    let begun = Instant::now();
    loop {
        let tried = address.to_socket_addrs().and_then(|mut all| {
            let address = all.next().ok_or_else(|| io::Error::other("no such address"))?;
            TcpStream::connect_timeout(&address, CONNECT)
        });
        match tried {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused || begun.elapsed() > CONNECT_ALL => {
                return Err(error);
            }
            Err(_) => thread::sleep(Duration::from_secs(1)),
            Ok(stream) => return Ok(stream),
        }
    }
}

/// The address of this machine on the way to others. Nothing is sent.
fn own_address() -> Option<Ipv4Addr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // TEST-NET-3 of RFC 5737: no host has it, and the default route leads there.
    socket.connect((Ipv4Addr::new(203, 0, 113, 1), 9)).ok()?;
    match socket.local_addr().ok()? {
        SocketAddr::V4(address) => Some(*address.ip()),
        SocketAddr::V6(_) => None,
    }
}

fn token() -> Result<String, Fault> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| Fault::environment(format!("cannot read `/dev/urandom`: {error}")))?;
    Ok(bytes.map(|byte| format!("{byte:02x}")).concat())
}

fn say(mut stream: &TcpStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn read<T: DeserializeOwned>(reader: &mut impl BufRead, bytes_max: u64) -> io::Result<T> {
    let mut line = vec![];
    reader.by_ref().take(bytes_max).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Err(io::Error::other("the connection is closed")),
        Some(b'\n') => serde_json::from_slice(&line).map_err(|_| io::Error::other("it said what is no answer")),
        Some(_) => Err(io::Error::other("it said a line without an end")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(hub: &Hub, token: &str) -> Said {
        let hardware = Err(Fault::environment("none"));
        let code = keys::code_of_all().to_string();
        let _ = hub;
        Said::Hello(Box::new(Hello { token: token.to_string(), code, host: "n".into(), job: "1".into(), hardware }))
    }

    /// The next event, or `None` if nothing comes.
    fn event(hub: &Hub, seconds: u64) -> Option<Event> {
        hub.events.recv_timeout(Duration::from_secs(seconds)).ok()
    }

    #[test]
    fn strangers_never_join_a_search() {
        let hub = Hub::open(Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))).unwrap();
        for line in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\xff\n", b"{}\n", &[b'x'; 100_000]] {
            let mut stream = TcpStream::connect(hub.address).unwrap();
            let _ = stream.write_all(line);
            let mut rest = vec![];
            // Closed, without an answer.
            let _ = stream.read_to_end(&mut rest);
            assert!(rest.is_empty());
        }
        let stream = TcpStream::connect(hub.address).unwrap();
        say(&stream, &hello(&hub, "another token")).unwrap();
        assert!(event(&hub, 1).is_none());
        say(&TcpStream::connect(hub.address).unwrap(), &hello(&hub, &hub.token)).unwrap();
        assert!(matches!(event(&hub, 20), Some(Event::Joined(_, hello)) if hello.host == "n"));
    }

    #[test]
    fn garbage_ends_a_worker_alone() {
        let hub = Hub::open(Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))).unwrap();
        let mut stream = TcpStream::connect(hub.address).unwrap();
        say(&stream, &hello(&hub, &hub.token)).unwrap();
        let Some(Event::Joined(number, _)) = event(&hub, 20) else { panic!("it did not join") };
        stream.write_all(b"{\"reply\":{\"ticket\":1}}\n").unwrap();
        assert!(
            matches!(event(&hub, 20), Some(Event::Gone(of, reason)) if of == number && reason.contains("no answer"))
        );
        let job = Job { campaign: String::new(), candidate: String::new(), incumbent: None };
        let begun = Instant::now();
        while hub.send(number, 1, &job, None) {
            assert!(begun.elapsed() < Duration::from_secs(20), "a closed connection takes candidates");
        }
    }
}
