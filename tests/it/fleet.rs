//! Tests what docs/fleet.md says: builds in pieces on several machines, and several servers that a balancer unites.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cli_support::{Place, manifest_text};
use crate::http_client::{get, receive, request};
use crate::remote_servers::Nginx;
use crate::support::fixture;

/// The block of the page that begins with `language` and has `word` in it.
pub fn example(language: &str, word: &str) -> String {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/fleet.md")).unwrap();
    let fence = format!("```{language}\n");
    let mut blocks = page.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap());
    let block = blocks.find(|block| block.contains(word));
    block.unwrap_or_else(|| panic!("no {language} with `{word}`")).to_string()
}

/// A machine with the manifest `m.toml` for the CPU and for an H200, and the cache `shared`.
fn machine(shared: &Path) -> Place {
    let place = Place::new();
    let text = manifest_text(&format!("path:{}", fixture("variants/llama-defaults").display()), 8);
    place.write("m.toml", format!("{text}[[target]]\nrecord = \"h200\"\n"));
    fs::create_dir_all(shared).unwrap();
    place
}

/// The names of jobs: stage, target, needs, kernel.
fn named(job: &Value) -> String {
    let fields = ["stage", "target", "needs", "kernel"].map(|field| job[field].as_str().unwrap_or_default());
    fields.join(" ").trim_end().to_string()
}

fn at(place: &Place, shared: &Path, arguments: &str) -> assert_cmd::Command {
    let mut command = place.command(arguments);
    command.env("MONOBLOC_SHARED_CACHE", shared).env("MONOBLOC_NVRTC", place.path("none"));
    command
}

#[track_caller]
fn jobs(place: &Place, shared: &Path, arguments: &str) -> Vec<Value> {
    let output = at(place, shared, &format!("plan m.toml --json {arguments}")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let matrix: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(matrix.as_object().unwrap().keys().collect::<Vec<_>>(), ["include"], "GitHub takes other keys for axes");
    matrix["include"].as_array().unwrap().clone()
}

#[test]
fn a_plan_runs_piece_by_piece() {
    let folder = tempfile::tempdir().unwrap();
    let shared = folder.path().join("shared");
    let planner = machine(&shared);
    let planned = jobs(&planner, &shared, "");
    let names: Vec<String> = planned.iter().map(named).collect();
    assert_eq!(
        names,
        [
            "import  host",
            "schedule cpu host",
            "pack cpu host",
            "check cpu host",
            "measure cpu host",
            "schedule h200 host",
            "source h200 host",
            "compile h200 nvrtc",
            "pack h200 host",
            "check h200 gpu",
            "measure h200 gpu",
        ]
    );
    // Inputs are stages before it.
    for (at, job) in planned.iter().enumerate() {
        for input in job["inputs"].as_array().unwrap() {
            assert!(planned[..at].iter().any(|earlier| earlier["key"] == *input), "{job}");
        }
        assert_eq!(job["record"], if job["needs"] == "gpu" { json!("h200") } else { json!(null) });
    }

    // Each on a machine of its own that shares the cache.
    for job in planned.iter().filter(|job| job["needs"] == "host") {
        let worker = machine(&shared);
        let output =
            at(&worker, &shared, &format!("run m.toml --stage {}", job["key"].as_str().unwrap())).output().unwrap();
        assert!(output.status.success(), "{job}: {output:?}");
    }
    let left: Vec<String> = jobs(&machine(&shared), &shared, "").iter().map(named).collect();
    assert_eq!(left, ["compile h200 nvrtc", "check h200 gpu", "measure h200 gpu"]);
    let all = jobs(&machine(&shared), &shared, "--all");
    assert!(all.iter().map(|job| &job["key"]).eq(planned.iter().map(|job| &job["key"])), "keys stay as they are");
    assert!(all[1]["cached"] == true && all[1]["cache_key"].is_string());

    // What a machine lacks is a fault of the environment, and another key one of the input.
    let worker = machine(&shared);
    let compile = jobs(&worker, &shared, "--needs nvrtc").remove(0)["key"].as_str().unwrap().to_string();
    let output = at(&worker, &shared, &format!("run m.toml --stage {compile}")).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let output = at(&worker, &shared, &format!("run m.toml --stage {}", "0".repeat(64))).output().unwrap();
    assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("has no stage"));
}

/// A model whose server has few kernels on a GPU.
fn server_manifest(sequences: &str, targets: &[&str]) -> String {
    let text = manifest_text(&format!("path:{}", fixture("tinystories-llama").display()), 512);
    let text = text.replace("[search]", &format!("{sequences}\n[search]")).replace("\"fp32\"", "\"bf16\"");
    let head = text.split("[[target]]").next().unwrap().to_string();
    targets.iter().fold(head, |text, target| format!("{text}[[target]]\nrecord = \"{target}\"\n"))
}

/// What `run` makes of a matrix is all that `build` would make on the machines of the matrix.
#[test]
fn a_matrix_leaves_nothing_to_build() {
    let test = "a_matrix_leaves_nothing_to_build";
    let folder = tempfile::tempdir().unwrap();
    let shared = folder.path().join("shared");
    fs::create_dir_all(&shared).unwrap();
    let nvrtc = crate::nvrtc::nvrtc(test).map(|nvrtc| nvrtc.path().to_path_buf());
    // Without the compiler, the interpreter alone.
    let targets: &[&str] = if nvrtc.is_some() { &["cpu", "h200"] } else { &["cpu"] };
    let machine = || {
        let place = Place::new();
        place.write("m.toml", server_manifest("sequences_max = 2", targets));
        place
    };
    let asked = |place: &Place, arguments: &str| {
        let mut command = at(place, &shared, arguments);
        if let Some(path) = &nvrtc {
            command.env("MONOBLOC_NVRTC", path);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{arguments}: {output:?}");
        output
    };
    let matrix = |arguments: &str| -> Vec<Value> {
        let output = asked(&machine(), &format!("plan m.toml --json {arguments}"));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["include"].as_array().unwrap().clone()
    };
    let planned = matrix("");
    let of = |target: &str| {
        let of_set = planned.iter().filter(|job| job["target"] == target && job["kernel"].is_string());
        of_set.map(|job| named(job).replace(target, "").replace("  ", " ")).collect::<Vec<_>>()
    };
    assert_eq!(of("cpu"), ["schedule host serve/rows-10"]);
    if nvrtc.is_some() {
        let kernels = ["sampler", "steps-1", "steps-8", "steps-16", "steps-32"];
        let compiled = kernels.map(|kernel| format!("compile nvrtc serve/{kernel}"));
        let checked = ["steps-8", "steps-16", "steps-32", "steps-1", "sampler"];
        let checked = checked.map(|kernel| format!("check gpu serve/{kernel}"));
        let texts = ["expect host serve/texts".to_string()];
        assert_eq!(of("h200"), [compiled.as_slice(), &texts, &checked].concat());
    }
    for job in planned.iter().filter(|job| job["needs"] != "gpu") {
        asked(&machine(), &format!("run m.toml --stage {}", job["key"].as_str().unwrap()));
    }
    let left = matrix("");
    assert!(left.iter().all(|job| job["needs"] == "gpu"), "{left:?}");
    let built = asked(&machine(), "build m.toml");
    let said = String::from_utf8_lossy(&built.stderr).into_owned();
    // What needs a GPU waits.
    assert!(!said.contains("   run "), "{said}");
    assert!(said.contains("no work to do"), "{said}");
}

/// `serve` and `generate` have kernels that `build` does not make.
#[test]
fn a_plan_is_for_the_command_that_is_named() {
    let place = Place::new();
    place.write("m.toml", server_manifest("", &["cpu"]));
    let shared = place.path("shared");
    fs::create_dir_all(&shared).unwrap();
    let kernels = |arguments: &str| -> Vec<String> {
        let all = jobs(&place, &shared, arguments);
        all.iter().filter(|job| job["kernel"].is_string()).map(named).collect()
    };
    assert!(kernels("").is_empty());
    assert_eq!(kernels("--for serve"), ["schedule cpu host serve/rows-16"]);
    assert_eq!(kernels("--for generate"), ["schedule cpu host generate/rows-16"]);
    // `run` finds the keys of all, and what it made is what the command needs.
    let planned = jobs(&place, &shared, "--for generate");
    let last = planned.iter().find(|job| job["kernel"].is_string()).unwrap()["key"].as_str().unwrap().to_string();
    for job in planned.iter().filter(|job| job["stage"] != "measure") {
        let output = at(&place, &shared, &format!("run m.toml --stage {}", job["key"].as_str().unwrap())).output();
        assert!(output.unwrap().status.success(), "{job}");
    }
    assert!(jobs(&place, &shared, "--for generate").iter().all(|job| job["key"] != *last));
    let output = at(&place, &shared, "generate m.toml --ids 1,2 --max-tokens 1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !said.contains("   run "), "{said}");
}

#[test]
fn the_line_for_slurm_runs_its_stage() {
    let folder = tempfile::tempdir().unwrap();
    let shared = folder.path().join("shared");
    let worker = machine(&shared);
    let text = at(&worker, &shared, "plan m.toml --needs host").output().unwrap().stdout;
    worker.write("plan.txt", &text);
    let line = example("sh", "sbatch");
    let job = line.split("--wrap '").nth(1).unwrap().split('\'').next().unwrap();
    let program = PathBuf::from(env!("CARGO_BIN_EXE_monobloc"));
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    // The second line is a schedule.
    let mut shell = Command::new("sh");
    shell.args(["-c", job]).current_dir(worker.path("")).env("PATH", path).env("SLURM_ARRAY_TASK_ID", "2");
    shell.env("MONOBLOC_CACHE_DIR", "cache").env("MONOBLOC_SHARED_CACHE", &shared).env("HOME", worker.path(""));
    let output = shell.output().unwrap();
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stderr).contains("run schedule cpu"),
        "{output:?}"
    );
}

struct Replica {
    child: Child,
    address: std::net::SocketAddr,
    _place: Place,
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn replica() -> Replica {
    let place = Place::new();
    place.write("tiny.toml", manifest_text(&format!("path:{}", fixture("tinystories-llama").display()), 256));
    let mut child =
        place.process("serve tiny.toml --port 0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("serving `tiny` at http://").expect("an address").parse().unwrap();
    let begun = Instant::now();
    while get(address, "/health").status != 200 {
        assert!(begun.elapsed() < Duration::from_secs(300), "no server");
        thread::sleep(Duration::from_millis(50));
    }
    Replica { child, address, _place: place }
}

fn counted(address: std::net::SocketAddr) -> f64 {
    let metrics = get(address, "/metrics").body;
    let line = metrics.lines().find(|line| line.starts_with("vllm:generation_tokens_total"));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("a count")
}

#[test]
fn a_balancer_loses_no_request_with_a_server() {
    let test = "a_balancer_loses_no_request_with_a_server";
    let mut replicas: Option<(Replica, Replica)> = None;
    let nginx = Nginx::start_with(test, |_, port| {
        let (a, b) = (replica(), replica());
        let text = example("nginx", "upstream")
            .replace("127.0.0.1:8000", &a.address.to_string())
            .replace("127.0.0.1:8001", &b.address.to_string())
            .replace("127.0.0.1:8080", &format!("127.0.0.1:{port}"));
        replicas = Some((a, b));
        text
    });
    let (Some(nginx), Some((mut a, b))) = (nginx, replicas) else { return };
    let body = json!({ "model": "tiny", "prompt": "Once upon a time", "max_tokens": 48, "temperature": 0 }).to_string();
    let ask = |session: &str| {
        let headers = format!("Content-Type: application/json\r\nX-Session: {session}\r\n");
        let mut stream = crate::http_client::connect(nginx.address());
        std::io::Write::write_all(&mut stream, request("POST", "/v1/completions", &headers, &body).as_bytes()).unwrap();
        let reply = receive(stream);
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json()["choices"][0]["text"].as_str().unwrap().to_string()
    };
    // A session stays with its server.
    let before = [counted(a.address), counted(b.address)];
    let alone = ask("one");
    assert!((0..2).all(|_| ask("one") == alone));
    let after = [counted(a.address), counted(b.address)];
    assert_eq!((0..2).filter(|&at| after[at] > before[at]).count(), 1, "{before:?} {after:?}");

    // One server dies in the middle of the load of both.
    let answers = Mutex::new(vec![]);
    thread::scope(|scope| {
        for client in 0..6 {
            let (ask, answers) = (&ask, &answers);
            scope.spawn(move || {
                for round in 0..4 {
                    let answer = ask(&format!("{client}-{round}"));
                    answers.lock().unwrap().push(answer);
                }
            });
        }
        let begun = Instant::now();
        while answers.lock().unwrap().len() < 6 && begun.elapsed() < Duration::from_secs(300) {
            thread::sleep(Duration::from_millis(10));
        }
        a.child.kill().unwrap();
    });
    let answers = answers.into_inner().unwrap();
    assert_eq!(answers.len(), 24);
    assert!(answers.iter().all(|answer| *answer == alone), "{answers:?}");
    assert!(get(b.address, "/health").status == 200);
}
