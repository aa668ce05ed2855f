//! Tests searches whose trials run on other machines: `tune --on`, with workers that this test starts and kills.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

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

    fn worker(&mut self) -> Child {
        self.started += 1;
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).current_dir("/").env("MONOBLOC_FLEET_TOKEN", &self.token);
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

/// A machine with a model of 120 candidates.
fn place() -> Place {
    let place = Place::new();
    place.write("m.toml", manifest_text(&format!("path:{}", fixture("tinystories-llama").display()), 32));
    place
}

#[test]
fn killed_workers_cost_no_trial() {
    let mut search = Search::begin(place(), 5);
    let mut workers: Vec<Child> = (0..2).map(|_| search.worker()).collect();
    // Strangers, and workers that say nothing of use.
    let address = search.command.last().unwrap().clone();
    let mut stranger = TcpStream::connect(&address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(stranger.read(&mut [0; 16]).unwrap(), 0);
    wait("a trial", || (search.rows().len() > 1).then_some(()));
    let mut killed = workers.remove(0);
    killed.kill().unwrap();
    killed.wait().unwrap();
    workers.push(search.worker());
    search.end(&mut workers);
    search.each_once(5);
    let rows = search.rows();
    assert!(rows.iter().all(|row| !row[1].is_empty() && row[2] == "hands" && row[3].starts_with("job")), "{rows:?}");
    assert!(rows.iter().any(|row| row[3] != rows[0][3]), "one worker had all: {rows:?}");
    let status = search.place.run("status m.toml --trials trials.csv --json").code(0).json();
    assert_eq!(status[0]["campaigns"][0]["trials"], 5, "{status}");
}

#[test]
fn a_killed_coordinator_goes_on() {
    let mut search = Search::begin(place(), 4);
    let mut worker = search.worker();
    wait("trials", || (search.rows().len() > 1).then_some(()));
    search.child.kill().unwrap();
    search.child.wait().unwrap();
    wait("the worker's end", || worker.try_wait().unwrap());
    let before = search.rows();
    let mut search = Search::begin(search.place, 4);
    let mut workers: Vec<Child> = (0..2).map(|_| search.worker()).collect();
    search.end(&mut workers);
    assert_eq!(search.rows()[..before.len()], before);
    search.each_once(4);
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
