//! Tests searches whose trials run on other machines: `tune --on`, with workers that this test starts and kills.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write, copy};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cli_support::{Place, manifest_text};
use crate::support::fixture;

const PATIENCE: Duration = Duration::from_secs(300);

#[track_caller]
fn wait<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = done() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "{what}: not after {PATIENCE:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A coordinator that waits for workers, and how they are started.
struct Search {
    place: Place,
    child: Child,
    token: String,
    command: Vec<String>,
    started: usize,
}

impl Search {
    fn begin(place: Place, trials: u32) -> Search {
        let said = place.path("said");
        fs::write(&said, "").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_monobloc"));
        command.args(["tune", "m.toml", "--on", "hands", "--listen", "127.0.0.1:0", "--trials", "trials.csv"]);
        command.args(["--max-trials", &trials.to_string()]).current_dir(place.path(""));
        command.env("MONOBLOC_CACHE_DIR", place.path("cache")).env("HOME", place.path(""));
        let child = command.stdout(Stdio::null()).stderr(fs::File::create(&said).unwrap()).spawn().unwrap();
        let line = wait("the command of a worker", || {
            let said = fs::read_to_string(&said).unwrap();
            let line =
                said.lines().find_map(|line| line.split_once("start workers by: ").map(|(_, line)| line.to_string()));
            line.filter(|_| said.ends_with('\n'))
        });
        let mut words = line.split(' ').map(str::to_string);
        let token = words.next().unwrap().strip_prefix("MONOBLOC_FLEET_TOKEN=").unwrap().to_string();
        Search { place, child, token, command: words.collect(), started: 0 }
    }

    fn said(&self) -> String {
        fs::read_to_string(self.place.path("said")).unwrap()
    }

    fn address(&self) -> String {
        self.command.last().unwrap().clone()
    }

    fn worker(&mut self) -> Child {
        self.worker_at(&self.address())
    }

    /// A worker whose search is at this address.
    fn worker_at(&mut self, address: &str) -> Child {
        self.started += 1;
        let mut command = Command::new(&self.command[0]);
        let arguments = &self.command[1..self.command.len() - 1];
        command.args(arguments).arg(address).current_dir("/").env("MONOBLOC_FLEET_TOKEN", &self.token);
        command.env("MONOBLOC_FLEET_JOB", format!("job{}", self.started)).env("HOME", self.place.path(""));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Rows of trials: number, host, engine, job, decision.
    fn rows(&self) -> Vec<[String; 5]> {
        let Ok(mut reader) = csv::Reader::from_path(self.place.path("trials.csv")) else { return vec![] };
        let header = reader.headers().unwrap().clone();
        let at = ["trial", "host", "engine", "job", "decision"]
            .map(|name| header.iter().position(|column| column == name).unwrap());
        reader.records().map(|row| at.map(|at| row.as_ref().expect("a whole row")[at].to_string())).collect()
    }

    #[track_caller]
    fn end(&mut self, workers: &mut [Child]) {
        let status = wait("the end of the search", || self.child.try_wait().unwrap());
        assert!(status.success(), "{}", self.said());
        workers.iter_mut().for_each(|worker| wait("a worker's end", || worker.try_wait().unwrap().map(|_| ())));
    }

    /// Numbers of the trials, each once: the default, the others, and a closing duel if the best is another one.
    #[track_caller]
    fn each_once(&self, trials: u32) {
        let mut numbers: Vec<u32> = self.rows().iter().map(|row| row[0].parse().unwrap()).collect();
        numbers.sort_unstable();
        let last = numbers.len() as u32;
        assert!(last == trials + 1 || last == trials + 2, "{numbers:?}");
        assert_eq!(numbers, (0..last).collect::<Vec<_>>());
    }
}

/// What a wire does with a line of a worker.
enum Act {
    Pass,
    /// These bytes in its place.
    Say(Vec<u8>),
    /// The worker is heard no more, and its search is still heard.
    Hold,
}

/// Stands between a worker and its search: `on` decides about each line of the worker, of which the first is number 0. Its address, and the
/// numbers of lines that were held.
fn wire(search: &Search, mut on: impl FnMut(usize, &str) -> Act + Send + 'static) -> (String, Receiver<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, upstream) = (listener.local_addr().unwrap().to_string(), search.address());
    let (sender, held) = channel();
    thread::spawn(move || {
        let worker = listener.accept().unwrap().0;
        let search = TcpStream::connect(upstream).unwrap();
        let (mut from, mut to) = (search.try_clone().unwrap(), worker.try_clone().unwrap());
        thread::spawn(move || {
            let _ = copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
        for (number, line) in BufReader::new(worker).split(b'\n').map_while(Result::ok).enumerate() {
            let mut line = String::from_utf8(line).unwrap();
            line.push('\n');
            let said = match on(number, &line) {
                Act::Pass => (&search).write_all(line.as_bytes()),
                Act::Say(bytes) => (&search).write_all(&bytes),
                Act::Hold => sender.send(number).map_err(std::io::Error::other),
            };
            if said.is_err() {
                break;
            }
        }
        let _ = search.shutdown(Shutdown::Both);
    });
    (address, held)
}

/// A worker that answers one candidate, and is never heard about its second one: the search cannot end before it is lost.
fn worker_that_is_held(search: &mut Search) -> Child {
    let (address, held) = wire(search, |number, _| if number < 2 { Act::Pass } else { Act::Hold });
    let worker = search.worker_at(&address);
    assert_eq!(held.recv_timeout(PATIENCE).expect("a second answer"), 2);
    worker
}

/// A machine with a model of 120 candidates.
fn place() -> Place {
    let place = Place::new();
    place.write("m.toml", manifest_text(&format!("path:{}", fixture("tinystories-llama").display()), 32));
    place
}

#[test]
fn killed_workers_cost_no_trial() {
    let mut search = Search::begin(place(), 5);
    // Strangers, and workers that say nothing of use.
    let mut stranger = TcpStream::connect(search.address()).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(stranger.read(&mut [0; 16]).unwrap(), 0);
    let mut killed = worker_that_is_held(&mut search);
    let status = search.place.run("status m.toml --trials trials.csv --json").code(0).json();
    assert_eq!(status[0]["campaigns"][0]["trials"], 0, "the default is none: {status}");
    killed.kill().unwrap();
    killed.wait().unwrap();
    let mut workers = [search.worker()];
    search.end(&mut workers);
    search.each_once(5);
    assert!(
        search.said().contains("was lost (the connection is closed): its candidate runs again"),
        "{}",
        search.said()
    );
    let rows = search.rows();
    assert!(rows.iter().all(|row| !row[1].is_empty() && row[2] == "hands"), "{rows:?}");
    assert!(rows[0][3] == "job1" && rows[1..].iter().all(|row| row[3] == "job2"), "{rows:?}");
    let status = search.place.run("status m.toml --trials trials.csv --json").code(0).json();
    assert_eq!(status[0]["campaigns"][0]["trials"], 5, "{status}");
}

#[test]
fn a_killed_coordinator_goes_on() {
    let mut search = Search::begin(place(), 4);
    let mut worker = worker_that_is_held(&mut search);
    search.child.kill().unwrap();
    search.child.wait().unwrap();
    wait("the worker's end", || worker.try_wait().unwrap());
    let before = search.rows();
    assert_eq!(before.len(), 1);
    let mut search = Search::begin(search.place, 4);
    let mut workers: Vec<Child> = (0..2).map(|_| search.worker()).collect();
    search.end(&mut workers);
    assert_eq!(search.rows()[..before.len()], before);
    search.each_once(4);
}

type Garbage = Box<dyn Fn(&str) -> Vec<u8> + Send>;

/// What it is, what the search says of it, and how it is made of an answer.
fn garbage() -> Vec<(&'static str, &'static str, Garbage)> {
    let changed = |path: &[&str], value: Value| -> Garbage {
        let path: Vec<String> = path.iter().map(|key| key.to_string()).collect();
        Box::new(move |line: &str| {
            let mut said: Value = serde_json::from_str(line).unwrap();
            *path.iter().fold(&mut said, |at, key| &mut at[key.as_str()]) = value.clone();
            format!("{said}\n").into_bytes()
        })
    };
    let (done, answer) = (["reply", "done"], ["reply", "done", "answer"]);
    let of = |key: &'static str| [&answer[..], &[key]].concat();
    vec![
        ("an endless line", "a line without an end", Box::new(|_| vec![b'x'; 5 << 20])),
        ("half a line", "no answer", Box::new(|line| [&line.as_bytes()[..line.len() / 2], b"\n"].concat())),
        ("no text", "no answer", Box::new(|_| b"\xff\xfe\0\n".to_vec())),
        ("depth", "no answer", Box::new(|_| [vec![b'['; 1 << 20], vec![b'\n']].concat())),
        ("another ticket", "connection is closed", changed(&["reply", "ticket"], json!(77))),
        ("no times", "it timed the positions []", changed(&of("timed"), json!([]))),
        ("a huge time", "that no step takes", changed(&of("rounds"), json!([[8, [[1e308, 1e308, 1e308, 1e308]]]]))),
        ("a time below zero", "below zero", changed(&of("measure_ms"), json!(-1.0))),
        ("a crash without a reason", "expected a reason", changed(&done, json!({ "died": " " }))),
        ("no trial", "did not try", changed(&done, json!("interrupted"))),
    ]
}

#[test]
fn garbage_of_a_worker_costs_no_trial() {
    // Three losses make a candidate a row, the verdict of which is `crash`: three of these, and two trials of the last worker.
    let mut search = Search::begin(place(), 5);
    // The first times the default. So each of the others has one candidate.
    let mut first = worker_that_is_held(&mut search);
    first.kill().unwrap();
    first.wait().unwrap();
    for (what, expected, garbage) in garbage() {
        let (address, _held) = wire(&search, move |number, line| match number {
            1 => Act::Say(garbage(line)),
            _ => Act::Pass,
        });
        let mut worker = search.worker_at(&address);
        let name = format!("(job{})", search.started);
        let lines = wait(what, || {
            let said = search.said();
            let of = |line: &&str| line.contains(&name) && (line.contains("lost") || line.contains("given up"));
            let lines: Vec<&str> = said.lines().filter(of).collect();
            lines.iter().any(|line| line.contains("lost")).then(|| lines.join("\n"))
        });
        assert!(lines.contains(expected), "{what}: {lines}");
        wait("its end", || worker.try_wait().unwrap());
    }
    let mut workers = [search.worker()];
    search.end(&mut workers);
    search.each_once(5);
}

#[test]
fn two_searches_of_one_campaign_take_turns() {
    let mut first = Search::begin(place(), 3);
    let mut held = worker_that_is_held(&mut first);
    let mut command = Command::new(env!("CARGO_BIN_EXE_monobloc"));
    command.args(["tune", "m.toml", "--trials", "trials.csv", "--max-trials", "3"]).current_dir(first.place.path(""));
    command.env("MONOBLOC_CACHE_DIR", first.place.path("cache")).env("HOME", first.place.path(""));
    let said = first.place.path("second");
    let file = fs::File::create(&said).unwrap();
    let mut second = command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
    let text = || fs::read_to_string(&said).unwrap();
    wait("the second search", || text().contains("another process searches this campaign").then_some(()));
    held.kill().unwrap();
    held.wait().unwrap();
    let mut workers = [first.worker()];
    first.end(&mut workers);
    let status = wait("the second search", || second.try_wait().unwrap());
    assert!(status.success() && text().contains("the budget of 3 trials is spent"), "{}", text());
    first.each_once(3);
    let locks = fs::read_dir(first.place.path("")).unwrap().flatten();
    assert!(locks.map(|entry| entry.file_name()).all(|name| !name.to_string_lossy().ends_with(".lock")));
}

#[test]
fn workers_that_cannot_join_say_why() {
    let place = place();
    let failed = place.run("trials m.toml --target cpu --join 127.0.0.1:9").code(3);
    assert!(failed.stderr.contains("cannot reach the search at 127.0.0.1:9"), "{failed:#?}");
    for (arguments, expected) in [
        ("tune m.toml --on kubernetes", "expected `slurm`, `ray`, `ray://HOST:PORT` or `hands`"),
        ("tune m.toml --workers 3", "--on <ENGINE>"),
        ("tune m.toml --on slurm --proposer cat", "cannot be used with"),
    ] {
        let failed = place.run(arguments).code(2);
        assert!(failed.stderr.contains(expected), "{failed:#?}");
    }
    let failed = place.command("tune m.toml --on slurm").env("PATH", "/nowhere").output().unwrap();
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(failed.status.code() == Some(3) && said.contains("cannot start `sbatch`"), "{said}");
}
