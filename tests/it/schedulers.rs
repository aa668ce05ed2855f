//! Tests the searches of docs/fleet.md by real engines, Slurm and Ray, whose jobs and nodes are killed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::cli_support::{Place, manifest_text};
use crate::fleet::example;
use crate::remote_servers::free_port;
use crate::support::fixture;

const PATIENCE: Duration = Duration::from_secs(400);

/// Where `.ci/install-schedulers.sh` puts them.
fn folder() -> PathBuf {
    let named = std::env::var_os("MONOBLOC_SCHEDULERS").map(PathBuf::from);
    named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/schedulers"))
}

fn without(test: &str, missing: &str) {
    let required = std::env::var_os("MONOBLOC_REQUIRE_SCHEDULERS").is_some_and(|value| value == "1");
    let reason = format!("`{}` has none: run .ci/install-schedulers.sh", folder().display());
    assert!(!required, "MONOBLOC_REQUIRE_SCHEDULERS is set: {missing}: {reason}");
    crate::skipped(test, missing, &reason);
}

#[track_caller]
fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not after {PATIENCE:?}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// A machine with the manifest `m.toml`.
fn machine(model: &str, context_max: u32) -> Place {
    let place = Place::new();
    place.write("m.toml", manifest_text(&format!("path:{}", fixture(model).display()), context_max));
    fs::create_dir_all(place.path("trials")).unwrap();
    place
}

/// As a user's shell has it: `monobloc` and the programs in `bin` are found by name.
fn shell(place: &Place, line: &str, bin: &Path) -> Command {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_monobloc"));
    let path = std::env::var("PATH").unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", line]).current_dir(place.path("")).stdin(Stdio::null());
    command.env("PATH", format!("{}:{}:{path}", program.parent().unwrap().display(), bin.display()));
    command.env("MONOBLOC_CACHE_DIR", place.path("cache")).env("HOME", place.path(""));
    command
}

#[track_caller]
fn succeed(command: &mut Command) -> String {
    let output: Output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_string()
}

fn lines(file: &Path) -> usize {
    fs::read_to_string(file).map_or(0, |text| text.lines().count())
}

/// Rows of a file: seed, trial, id.
fn rows(file: &Path) -> Vec<(String, Option<u32>, String)> {
    let mut reader = csv::Reader::from_path(file).unwrap();
    let header = reader.headers().unwrap().clone();
    let at = |name: &str| header.iter().position(|column| column == name).unwrap();
    let (seed, trial, id) = (at("seed"), at("trial"), at("trial_id"));
    let rows = reader.records().map(|row| row.expect("a whole row"));
    rows.map(|row| (row[seed].to_string(), row[trial].parse().ok(), row[id].to_string())).collect()
}

/// Every trial of the campaigns of these seeds is one row of the merged trials, and merging once more appends nothing.
#[track_caller]
fn each_trial_once(place: &Place, seeds: u32, trials: u32) {
    let merged = place.path("flywheel/trials.csv");
    let found = rows(&merged);
    let mut ids: Vec<&String> = found.iter().map(|(_, _, id)| id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), found.len(), "a row is there twice");
    let mut counts: BTreeMap<(&str, u32), usize> = BTreeMap::new();
    for (seed, trial, _) in &found {
        trial.iter().for_each(|trial| *counts.entry((seed, *trial)).or_default() += 1);
    }
    for seed in 1..=seeds {
        let seed = seed.to_string();
        // The default candidate is trial 0.
        for trial in 0..=trials {
            assert_eq!(counts.get(&(seed.as_str(), trial)), Some(&1), "trial {trial} of seed {seed}: {counts:?}");
        }
        for (_, _, id) in rows(&place.path(&format!("trials/{seed}.csv"))) {
            assert!(ids.contains(&&id), "{id} is lost");
        }
    }
    let before = fs::read(&merged).unwrap();
    place.run("flywheel merge trials/1.csv trials/2.csv --trials flywheel/trials.csv").code(0);
    assert_eq!(fs::read(&merged).unwrap(), before);
}

/// slurmctld and two slurmd, without munge and without root.
struct Slurm {
    folder: TempDir,
    user: String,
    daemons: Vec<Child>,
}

impl Slurm {
    fn start(test: &str) -> Option<Slurm> {
        let root = folder().join("slurm");
        if !root.join("usr/sbin/slurmctld-wlm").is_file() {
            without(test, "Slurm");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display().to_string();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let host = host.trim().split('.').next().unwrap();
        let user = succeed(Command::new("id").arg("-un"));
        let mut plugins =
            fs::read_dir(root.join("usr/lib")).unwrap().map(|entry| entry.unwrap().path().join("slurm-wlm"));
        let plugins = plugins.find(|path| path.is_dir()).expect("the plugins of Slurm");
        let [controller, first, second] = [(); 3].map(|()| free_port());
        let node = |name: &str, port: u16| {
            format!("NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1\n")
        };
        fs::write(
            folder.path().join("slurm.conf"),
            format!(
                "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}\n\
                 SlurmUser={user}\nSlurmdUser={user}\nAuthType=auth/none\nCredType=cred/none\nAuthInfo=cred_expire=2\n\
                 PluginDir={}\nStateSaveLocation={place}/state\nSlurmdSpoolDir={place}/spool-%n\n\
                 SlurmctldPidFile={place}/slurmctld.pid\nSlurmdPidFile={place}/slurmd-%n.pid\n\
                 ProctrackType=proctrack/pgid\nTaskPlugin=task/none\nSwitchType=switch/none\nMpiDefault=none\n\
                 JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n\
                 SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nReturnToService=2\n\
                 SlurmdParameters=config_overrides\n{}{}\
                 PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n",
                plugins.display(),
                node("node1", first),
                node("node2", second),
            ),
        )
        .unwrap();
        fs::create_dir(folder.path().join("state")).unwrap();
        let mut slurm = Slurm { folder, user, daemons: vec![] };
        let sbin = root.join("usr/sbin").display().to_string();
        let nodes = ["node1", "node2"].map(|node| format!("{sbin}/slurmd-wlm -D -N {node} -d {sbin}/slurmstepd-wlm"));
        for daemon in [format!("{sbin}/slurmctld-wlm -D")].into_iter().chain(nodes) {
            // Ends when its stdin is closed: with this process, if no test ends it.
            let mut command = Command::new("sh");
            command.args(["-c", &format!("{daemon} >> {place}/log 2>&1 < /dev/null & pid=$!; cat; kill -9 $pid")]);
            slurm.with_variables(&mut command).stdin(Stdio::piped()).stdout(Stdio::null());
            slurm.daemons.push(command.spawn().unwrap());
        }
        let mut idle = Command::new(slurm.bin().join("sinfo"));
        slurm.with_variables(idle.args(["--noheader", "--states=idle", "--format=%D"]));
        let log = || fs::read_to_string(format!("{place}/log")).unwrap_or_default();
        wait(&log(), || idle.output().is_ok_and(|output| output.stdout.starts_with(b"2")));
        Some(slurm)
    }

    fn bin(&self) -> PathBuf {
        folder().join("slurm/usr/bin")
    }

    fn with_variables<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let libraries = fs::read_dir(folder().join("slurm/usr/lib")).unwrap().map(|entry| entry.unwrap().path());
        let libraries = libraries.filter(|path| path.is_dir()).flat_map(|path| [path.clone(), path.join("slurm-wlm")]);
        let libraries: Vec<String> = libraries.map(|path| path.display().to_string()).collect();
        command.env("LD_LIBRARY_PATH", libraries.join(":")).env("SLURM_CONF", self.folder.path().join("slurm.conf"))
    }

    /// A line of a user's shell on a node.
    #[track_caller]
    fn run(&self, place: &Place, line: &str) -> String {
        succeed(self.with_variables(&mut shell(place, line, &self.bin())))
    }

    /// Waits until no job is left.
    #[track_caller]
    fn drain(&self, place: &Place) {
        wait("jobs of Slurm", || self.run(place, "squeue --noheader").is_empty());
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        let mut cancel = Command::new(self.bin().join("scancel"));
        let _ = self.with_variables(cancel.args(["--signal=KILL", "--full", "--user", &self.user])).output();
        for daemon in &mut self.daemons {
            drop(daemon.stdin.take());
            let _ = daemon.wait();
        }
    }
}

/// Sends a signal to a process.
#[track_caller]
fn signal(process: &str, name: &str) {
    succeed(Command::new("kill").args([name, process]));
}

/// Kills one worker of a search that another machine coordinates; `false` if there is none.
fn kill_worker(place: &Place) -> bool {
    let cache = place.path("cache").display().to_string();
    let found = fs::read_dir("/proc").unwrap().flatten().find(|entry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        line.contains(" trials ") && line.contains("--join") && line.contains(&cache) && !line.contains("sh -c")
    });
    let Some(entry) = found else { return false };
    Command::new("kill").args(["-9", entry.file_name().to_str().unwrap()]).output().is_ok()
}

/// One search whose workers an engine starts, and two of whose workers or nodes are killed: it is interrupted, goes on, and each trial is a row,
/// once. `tune` makes the command for a budget of trials.
#[track_caller]
fn one_search(place: &Place, tune: impl Fn(u32) -> Command, engine: &str, mut kill: impl FnMut()) {
    let said = place.path("said");
    let file = place.path("trials/one.csv");
    let text = || fs::read_to_string(&said).unwrap();
    let begin = |trials| tune(trials).stderr(fs::File::create(&said).unwrap()).stdout(Stdio::null()).spawn().unwrap();
    // A budget that no machine spends before the kills.
    let mut child = begin(100);
    let coordinator = child.id().to_string();
    let mut rows_after = |count: usize| {
        wait("rows", || {
            assert!(child.try_wait().unwrap().is_none(), "{}", text());
            lines(&file) > count
        });
    };
    rows_after(2);
    let status = place.run("status m.toml --trials trials/one.csv --json").code(0).json();
    assert!(status[0]["campaigns"][0]["trials"].as_u64() >= Some(1), "{status}");
    for killed in 0..2 {
        rows_after(3 + killed);
        // The search stands still meanwhile: a node takes longer to die than a fast machine to try a candidate.
        signal(&coordinator, "-STOP");
        kill();
        signal(&coordinator, "-CONT");
    }
    rows_after(lines(&file));
    signal(&coordinator, "-INT");
    assert_eq!(child.wait().unwrap().code(), Some(130), "{}", text());

    let before = fs::read(&file).unwrap();
    let trials = numbers(&file).len() as u32 + 1;
    let mut child = begin(trials);
    let mut status = None;
    wait("the search", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.unwrap().success() && fs::read(&file).unwrap().starts_with(&before), "{}", text());
    let numbers = numbers(&file);
    let last = numbers.len() as u32;
    assert!(last == trials + 1 || last == trials + 2, "{numbers:?}: {}", text());
    assert_eq!(numbers, (0..last).collect::<Vec<_>>(), "{}", text());
    let mut reader = csv::Reader::from_path(&file).unwrap();
    let header = reader.headers().unwrap().clone();
    let at = ["engine", "host", "job", "trial"].map(|name| header.iter().position(|column| column == name).unwrap());
    for row in reader.records() {
        let [by, host, job, trial] = at.map(|at| row.as_ref().unwrap()[at].to_string());
        // A candidate that does not fit is no trial, and no worker had it.
        assert!(trial.is_empty() || by == engine && !host.is_empty() && !job.is_empty(), "{by} {host} {job}");
    }
    // No job is left.
    wait("workers", || !kill_worker(place));
}

/// Numbers of the trials of a file, in order.
fn numbers(file: &Path) -> Vec<u32> {
    let mut numbers: Vec<u32> = rows(file).into_iter().filter_map(|(_, trial, _)| trial).collect();
    numbers.sort_unstable();
    numbers
}

/// The search in the folder of `place` whose command line has `word`.
fn search_of(place: &Place, word: &str) -> Option<String> {
    let mut found = None;
    let folder = fs::canonicalize(place.path("")).unwrap();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let is_here = fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd == folder);
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if is_here && line.starts_with("monobloc tune") && line.contains(word) {
            found = Some(entry.file_name().into_string().unwrap());
        }
    }
    found
}

#[test]
fn slurm_searches_and_goes_on_after_kills() {
    let Some(slurm) = Slurm::start("slurm_searches_and_goes_on_after_kills") else { return };
    // Eight trials take seconds, so jobs are mostly killed while they measure. Its space has twelve points.
    let place = machine("tinystories-llama", 32);
    // Nodes of this cluster have no GPUs.
    let page = |word| example("sh", word).replace(" --gres=gpu:1", "");
    place.write("search.sh", page("#SBATCH").replace("=1-8", "=1-2").replace("--max-trials 40", "--max-trials 8"));
    let submit = page("search=$(sbatch").replace("--max-trials 8", "--max-trials 1");

    let job = slurm.run(&place, "sbatch --parsable search.sh");
    let file = |seed: u32| place.path(&format!("trials/{seed}.csv"));
    // One is started again by Slurm, one is killed. Each stands still until then, as soon as it has two rows.
    let mut running = vec![1, 2];
    wait("trials", || {
        running.retain(|seed| {
            let search = search_of(&place, &format!("trials/{seed}.csv")).filter(|_| lines(&file(*seed)) > 2);
            search.iter().for_each(|search| signal(search, "-STOP"));
            search.is_none()
        });
        running.is_empty()
    });
    signal(&search_of(&place, "trials/2.csv").unwrap(), "-9");
    let first = search_of(&place, "trials/1.csv").unwrap();
    slurm.run(&place, &format!("scontrol requeue {job}_1"));
    // Slurm asks it to end, which it hears only now; Slurm may have killed it already.
    let _ = Command::new("kill").args(["-CONT", &first]).output();
    slurm.drain(&place);
    let said = fs::read_to_string(place.path(&format!("slurm-{job}_1.out"))).unwrap();
    assert!(said.contains("the budget of 8 trials is spent"), "{said}");

    // The same file again, and what follows it.
    slurm.run(&place, &submit);
    slurm.drain(&place);
    each_trial_once(&place, 2, 8);
    let best = place.run("status m.toml --trials flywheel/trials.csv --json").code(0).json();
    assert_eq!(best[0]["campaigns"].as_array().unwrap().len(), 3, "{best}");
}

#[test]
fn slurm_starts_the_workers_of_a_search() {
    let Some(slurm) = Slurm::start("slurm_starts_the_workers_of_a_search") else { return };
    let place = machine("tinystories-llama", 512);
    let tune = |trials| {
        let line = format!(
            "exec monobloc tune m.toml --on slurm --workers 2 --listen 127.0.0.1:0 --max-trials {trials} \
             --trials trials/one.csv"
        );
        let mut tune = shell(&place, &line, &slurm.bin());
        slurm.with_variables(&mut tune);
        tune
    };
    one_search(&place, tune, "slurm", || wait("a worker", || kill_worker(&place)));
    slurm.drain(&place);
}

#[test]
fn slurm_runs_a_plan_as_an_array() {
    let Some(slurm) = Slurm::start("slurm_runs_a_plan_as_an_array") else { return };
    let place = machine("variants/llama-defaults", 8);
    fs::create_dir_all(place.path("manifests")).unwrap();
    fs::rename(place.path("m.toml"), place.path("manifests/m.toml")).unwrap();
    // Nodes of this cluster have no GPUs.
    let lines = example("sh", "sbatch --array").replace("--needs gpu", "--needs host").replace(" --gres=gpu:1", "");
    slurm.run(&place, &lines);
    slurm.drain(&place);
    let left = place.run("plan manifests/m.toml --json").code(0).json();
    assert_eq!(left["include"], serde_json::json!([]), "{left}");
}

/// A cluster of three nodes.
struct Ray {
    child: Child,
    answers: BufReader<ChildStdout>,
    address: String,
}

impl Ray {
    fn start(test: &str, place: &Place) -> Option<Ray> {
        let packages = folder().join("python");
        if !packages.join("ray").is_dir() {
            without(test, "Ray");
            return None;
        }
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/ray_cluster.py");
        let mut command = shell(place, &format!("exec python3 {}", program.display()), Path::new("/"));
        with_ray(&mut command).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut ray = Ray { child, answers, address: String::new() };
        ray.address = ray.answer();
        Some(ray)
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the cluster has ended");
        line.trim().to_string()
    }

    /// Kills a node, and starts another one.
    fn kill_node(&mut self) {
        writeln!(self.child.stdin.as_ref().unwrap(), "kill").unwrap();
        assert_eq!(self.answer(), "killed");
    }

    /// Starts `search.py`.
    fn search(&self, place: &Place, arguments: &str) -> Child {
        let mut command = shell(place, &format!("exec python3 search.py {arguments}"), Path::new("/"));
        command.env("RAY_ADDRESS", &self.address).stderr(fs::File::create(place.path("said")).unwrap());
        with_ray(&mut command).stdout(Stdio::null()).spawn().unwrap()
    }
}

fn with_ray(command: &mut Command) -> &mut Command {
    command.env("PYTHONPATH", folder().join("python")).env("RAY_USAGE_STATS_ENABLED", "0")
}

impl Drop for Ray {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[test]
fn ray_searches_and_goes_on_after_kills() {
    let place = machine("variants/llama-defaults", 8);
    let Some(mut ray) = Ray::start("ray_searches_and_goes_on_after_kills", &place) else { return };
    place.write("search.py", example("python", "import ray"));
    let mut search = ray.search(&place, "2 2 1");
    wait("rows", || (1..=2).any(|seed| place.path(&format!("trials/{seed}.csv")).exists()));
    search.kill().unwrap();
    search.wait().unwrap();

    let mut search = ray.search(&place, "2 2 1");
    let mut status = None;
    // In the middle of a campaign, unless the machine is so fast that all have ended.
    wait("a campaign", || {
        status = search.try_wait().unwrap();
        status.is_some() || search_of(&place, "--seed").is_some()
    });
    ray.kill_node();
    wait("the searches", || {
        status = search.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.unwrap().success(), "{}", fs::read_to_string(place.path("said")).unwrap());
    each_trial_once(&place, 2, 2);
}

#[test]
fn ray_starts_the_workers_of_a_search() {
    let place = machine("tinystories-llama", 512);
    let Some(mut ray) = Ray::start("ray_starts_the_workers_of_a_search", &place) else { return };
    let address = ray.address.clone();
    let tune = |trials| {
        let line = format!(
            "exec monobloc tune m.toml --on ray://{address} --workers 2 --listen 127.0.0.1:0 --max-trials {trials} \
             --trials trials/one.csv"
        );
        let mut tune = shell(&place, &line, Path::new("/"));
        with_ray(&mut tune);
        tune
    };
    let mut first = true;
    one_search(&place, tune, "ray", || {
        // A node, then a worker.
        match first {
            true => ray.kill_node(),
            false => wait("a worker", || kill_worker(&place)),
        }
        first = false;
    });
}
