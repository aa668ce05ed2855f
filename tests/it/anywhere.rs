//! Tests commands outside of the repository: an installed binary in an empty folder, the user's folders, scripts and CI.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::cli_support::{Answer, Place, manifest_text};
use crate::nvrtc::nvrtc;
use crate::support::fixture;

/// A folder that is no project, and an empty home folder.
struct Away {
    folder: TempDir,
    home: TempDir,
}

impl Away {
    fn new() -> Away {
        Away { folder: tempfile::tempdir().unwrap(), home: tempfile::tempdir().unwrap() }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_monobloc"));
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        let foreign = ["MONOBLOC_CACHE_DIR", "MONOBLOC_SHARED_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME"];
        foreign.iter().for_each(|name| {
            command.env_remove(name);
        });
        command.env("HOME", self.home.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Answer {
        Answer::of(&mut assert_cmd::Command::from_std(self.command(arguments)))
    }

    fn home(&self, path: &str) -> PathBuf {
        let below = if cfg!(target_os = "macos") {
            path.replace(".cache", "Library/Caches").replace(".local/share", "Library/Application Support")
        } else {
            path.to_string()
        };
        self.home.path().join(below)
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

#[test]
fn an_empty_folder_is_two_commands_from_its_first_text() {
    let away = Away::new();
    let init = away.run(&["init"]).code(0);
    assert!(init.stderr.contains("next: monobloc generate monobloc.toml"), "{init:#?}");
    let told = away.run(&["generate", "monobloc.toml", "--prompt", "Once upon a time", "--max-tokens", "12"]).code(0);
    assert!(told.stdout.trim().len() > 20, "{told:#?}");
    assert_eq!(away.files(), ["monobloc.toml"], "the folder is the user's");
    assert!(away.home(".cache/monobloc/CACHEDIR.TAG").is_file());

    // The built-in manifest needs no file, and is the same model.
    let named = away.run(&["generate", "tinystories", "--prompt", "Once upon a time", "--max-tokens", "12"]).code(0);
    assert_eq!(named.stdout, told.stdout);
    away.run(&["build", "tinystories"]).code(0);
    assert!(away.home(".local/share/monobloc/trials.csv").is_file());
    assert_eq!(away.files(), ["monobloc.toml"]);
    away.run(&["init"]).refused(&["`monobloc.toml` is already there", "--force"]);
    let wrote = fs::read_to_string(away.folder.path().join("monobloc.toml")).unwrap();
    // The name and the source of the built-in model mean the same.
    for name in ["tinystories", "builtin:tinystories"] {
        away.run(&["init", name, "--force"]).code(0);
        assert_eq!(fs::read_to_string(away.folder.path().join("monobloc.toml")).unwrap(), wrote, "{name}");
    }
    away.run(&["init", "--force"]).code(0);
}

#[test]
fn what_cannot_be_built_creates_nothing() {
    let away = Away::new();
    away.run(&["build", "no.toml"]).refused(&["no such manifest: `no.toml`", "`monobloc init` writes one"]);
    away.run(&["build", "."]).refused(&["`.` is a folder, expected a manifest"]);
    fs::write(away.folder.path().join("m.toml"), manifest_text("path:no/checkpoint", 64)).unwrap();
    away.run(&["build", "m.toml"]).refused(&["no such file or folder: `no/checkpoint`"]);
    away.run(&["init", "builtin:tiny"]).refused(&["or the built-in model `tinystories`"]);
    // A number is taken for a bound of the search far more often than for a file.
    away.run(&["tune", "m.toml", "--trials", "20"]).refused(&["expected a file", "`--max-trials 20`"]);
    away.run(&["init", "some/thing"]).refused(&["a model of the hub is named as `hf:some/thing`"]);
    assert_eq!(away.files(), ["m.toml"]);
    assert_eq!(fs::read_dir(away.home.path()).unwrap().count(), 0, "no cache for what failed");
}

#[test]
fn a_manifest_means_the_same_from_every_folder() {
    let place = Place::new();
    place.checkpoint("families/llama-gqa");
    place.write("sub/m.toml", manifest_text("path:../checkpoint", 64));
    place.write("other/keep", "");
    place.run("build sub/m.toml").code(0);
    for (folder, path) in [("sub", "m.toml"), ("other", "../sub/m.toml")] {
        let mut command = place.command(&format!("build {path}"));
        command.current_dir(place.path(folder)).env("MONOBLOC_CACHE_DIR", place.path("cache"));
        let built = Answer::of(&mut command).code(0);
        assert!(built.stderr.starts_with("no work to do"), "{built:#?}");
    }
    // A project is found from its subfolders, by the cache that the first build marked and by `flywheel/`.
    let mut command = place.command("build m.toml");
    command.current_dir(place.path("sub")).env_remove("MONOBLOC_CACHE_DIR");
    assert!(Answer::of(&mut command).code(0).stderr.starts_with("no work to do"));
    assert!(!place.path("sub/cache").exists() && !place.path(".cache").exists());
}

#[test]
fn init_names_what_it_finds() {
    let place = Place::new();
    let checkpoint = place.checkpoint("families/llama-gqa");
    place.run("init checkpoint --target cpu --out new/m.toml").fault(3, &["cannot write `new/m.toml`"]);
    place.run("init checkpoint --target cpus").refused(&["did you mean `cpu`?"]);
    place.run("init checkpoint --target cpu --target l4").code(0);
    let text = fs::read_to_string(place.path("monobloc.toml")).unwrap();
    for needed in ["source = \"path:checkpoint\"", "context_max = 256", "record = \"cpu\"", "record = \"l4\""] {
        assert!(text.contains(needed), "{text}");
    }
    place.run("build monobloc.toml --target cpu").code(0);
    let config = checkpoint.join("config.json").display().to_string();
    place.run(&format!("init {config} --out s.toml --target cpu")).code(0);
    assert!(fs::read_to_string(place.path("s.toml")).unwrap().contains(&format!("source = \"synthetic:{config}\"")));
    let mut hub = place.command("init hf:some/model --out h.toml --target cpu");
    Answer::of(hub.env("HF_HUB_OFFLINE", "1")).code(0);
    assert!(fs::read_to_string(place.path("h.toml")).unwrap().contains("source = \"hf:some/model\""));
}

fn small() -> Place {
    let place = Place::new();
    let checkpoint = place.checkpoint("families/llama-gqa");
    place.manifest(&checkpoint, 64);
    place
}

#[test]
fn a_build_without_work_says_so_in_one_line_with_the_stored_latency() {
    let place = small();
    place.run("build m.toml").code(0);
    let again = place.run("build m.toml").code(0);
    assert_eq!(again.stderr.lines().count(), 1, "{again:#?}");
    assert!(again.stderr.starts_with("no work to do (5 stages cached); cpu: "), "{again:#?}");
    assert!(again.stderr.trim_end().ends_with(" µs at position 0 per token"), "{again:#?}");
    let told = place.run("build m.toml --verbose").code(0).stderr;
    assert_eq!(told.lines().filter(|line| line.starts_with("cached ")).count(), 5, "{told}");
    let json = place.run("build m.toml --json").code(0).json();
    let target = &json["targets"][0];
    assert!(target["positions"][0]["latency_us_p50"].as_f64().is_some_and(|us| us > 0.0), "{json}");
    assert_eq!((&target["complete"], &target["cubin"]), (&true.into(), &serde_json::Value::Null), "{json}");
}

#[test]
fn force_and_clean_run_everything_again_and_a_dry_run_nothing() {
    let place = small();
    let dry = place.run("build m.toml --dry-run").code(0);
    assert!(dry.stdout.contains("schedule  not cached"), "{dry:#?}");
    assert!(!place.path("flywheel/trials.csv").exists());
    place.run("build m.toml").code(0);
    assert!(place.run("build m.toml --dry-run").code(0).stdout.ends_with("no work to do\n"));
    assert!(place.run("build m.toml --force").code(0).stderr.ends_with("ran 5 stages\n"));
    assert!(place.run("clean m.toml").code(0).stderr.contains("removed 5 entries of `m`"));
    assert!(place.run("build m.toml").code(0).stderr.ends_with("ran 5 stages\n"));
}

#[test]
fn several_manifests_are_built_and_the_exit_code_is_of_the_first_fault() {
    let place = small();
    place.write("bad.toml", manifest_text("path:nowhere", 64));
    let stopped = place.run("build bad.toml m.toml").refused(&["`nowhere`"]);
    assert!(!stopped.stderr.contains("ran "), "{stopped:#?}");
    let all = place.run("build bad.toml m.toml --keep-going").code(2);
    assert!(all.stderr.contains("ran 5 stages") && all.stderr.contains("not every manifest was built"), "{all:#?}");
    let json = place.run("build m.toml m.toml --json").code(0).json();
    assert_eq!(json.as_array().map(Vec::len), Some(2));
    let kept = place.run("build bad.toml m.toml --keep-going --json").code(2).json();
    assert_eq!((&kept[0]["error"]["code"], &kept[1]["manifest"]), (&2.into(), &"m".into()), "{kept}");
}

#[test]
fn a_fault_of_one_target_stops_no_other_and_is_reported_at_the_end() {
    let place = small();
    let text = fs::read_to_string(place.path("m.toml")).unwrap();
    let two =
        text.replace("record = \"cpu\"", "record = \"cpu\"\ncandidate = \"sms=0\"\n[[target]]\nrecord = \"h200\"");
    place.write("two.toml", two);
    let built = place.run("build two.toml --no-search").code(2);
    assert!(built.stderr.contains("run source h200"), "{built:#?}");
    assert!(built.stderr.contains("target `cpu`: "), "{built:#?}");
    let json = place.run("build two.toml --no-search --json").code(2).json();
    assert_eq!((&json["targets"][0]["target"], &json["ran"]), (&"h200".into(), &0.into()), "{json}");
}

/// Runs without a compiler and a device; a machine with them would complete the build.
#[test]
fn what_waits_fails_only_if_completeness_is_asked_for() {
    let place = small();
    let text = fs::read_to_string(place.path("m.toml")).unwrap();
    place.write("gpu.toml", text.replace("record = \"cpu\"", "record = \"t4\""));
    let run = |arguments: &str, nvrtc: &str| {
        let mut command = place.command(arguments);
        command.env("MONOBLOC_NVRTC", nvrtc);
        Answer::of(&mut command)
    };
    let named = run("build gpu.toml", "/nowhere").code(3);
    assert!(named.stderr.contains("`MONOBLOC_NVRTC` is `/nowhere`"), "{named:#?}");
    assert!(named.stderr.contains("correct `MONOBLOC_NVRTC`"), "{named:#?}");
    let without = |arguments: &str| Answer::of(without_nvrtc(&mut place.command(arguments)));
    let told = without("build gpu.toml --require-complete").code(3);
    assert!(told.stderr.contains("error: not complete: 1 of 1 target (t4)"), "{told:#?}");
    assert_eq!(told.stderr.matches(" wait for NVRTC").count(), 1, "the reason is told once: {told:#?}");
    let quiet = without("build gpu.toml -q --require compile").code(3);
    assert!(quiet.stderr.starts_with("error: not compiled: 1 of 1 target (t4)\n  t4: compile, "), "{quiet:#?}");
    let json = without("build gpu.toml --json").code(0).json();
    assert_eq!(json["targets"][0]["missing"], serde_json::json!(["compile", "check", "measure"]));
    let failed = without("build gpu.toml --json --require compile").code(3);
    assert_eq!(failed.json(), json, "the result is printed although it is not enough");
    let error: serde_json::Value = serde_json::from_str(failed.stderr.lines().last().unwrap()).unwrap();
    assert!(
        error["message"].as_str().is_some_and(|text| text.starts_with("not compiled: 1 of 1 target (t4)")),
        "{error}"
    );
    without("build m.toml --require compile").code(0);
}

/// Hides the compiler of the places where it is looked for first.
fn without_nvrtc(command: &mut assert_cmd::Command) -> &mut assert_cmd::Command {
    for name in ["MONOBLOC_NVRTC", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
    command
}

#[test]
fn shared_cubins_are_found_without_a_compiler() {
    let test = "shared_cubins_are_found_without_a_compiler";
    let Some(nvrtc) = nvrtc(test) else { return };
    let (first, second) = (small(), small());
    let found = Answer::of(without_nvrtc(&mut second.command("doctor --json"))).json();
    if found["nvrtc"]["found"] == serde_json::Value::Bool(true) {
        return crate::skipped(test, "a machine without NVRTC", "it is found in a place of the system");
    }
    fs::create_dir(first.path("shared")).unwrap();
    let build = |place: &Place| {
        let text = fs::read_to_string(place.path("m.toml")).unwrap();
        place.write("gpu.toml", text.replace("record = \"cpu\"", "record = \"b200\""));
        let mut command = place.command("build gpu.toml --require compile");
        command.env("MONOBLOC_SHARED_CACHE", first.path("shared")).env("MONOBLOC_NVRTC", nvrtc.path());
        command
    };
    Answer::of(&mut build(&first)).code(0);
    let built = Answer::of(without_nvrtc(&mut build(&second))).code(0);
    assert!(built.stderr.contains("note b200: its cubin was compiled elsewhere, by NVRTC "), "{built:#?}");
    // The next build finds it here.
    let again = Answer::of(without_nvrtc(&mut build(&second))).code(0);
    assert!(again.stderr.starts_with("no work to do"), "{again:#?}");
}

#[test]
fn a_candidate_prints_as_it_parses() {
    let place = small();
    let text = fs::read_to_string(place.path("m.toml")).unwrap();
    let default = place.run("show candidate m.toml").code(0).stdout;
    let chosen = default.trim().replace("ring_slots=", "ring_slots=1");
    assert_ne!(default.trim(), chosen);
    place.write("c.toml", text.replace("record = \"cpu\"", &format!("record = \"cpu\"\ncandidate = \"{chosen}\"")));
    assert_eq!(place.run("show candidate c.toml").code(0).stdout.trim(), chosen);
    place.run("tune m.toml --max-trials 3").code(0);
    let status = place.run("status m.toml").code(0).stdout;
    let best = status.lines().find_map(|line| line.trim().strip_prefix("best: ")?.split(", ").next()).unwrap();
    if best != "default" {
        place.write("b.toml", text.replace("record = \"cpu\"", &format!("record = \"cpu\"\ncandidate = \"{best}\"")));
        place.run("show candidate b.toml").code(0);
    }
}

#[test]
fn a_prompt_comes_from_a_pipe_or_a_file_and_a_stop_text_ends_it() {
    let place = Place::new();
    place.manifest(&fixture("tinystories-llama"), 256);
    let whole = place.command("generate m.toml --max-tokens 40 --prompt").arg("Once upon a time").assert().success();
    let whole = String::from_utf8(whole.get_output().stdout.clone()).unwrap();
    place.write("prompt.txt", "Once upon a time");
    let file = place.run("generate m.toml --max-tokens 40 --prompt-file prompt.txt").code(0);
    assert_eq!(file.stdout, whole);
    let mut child = place.process("generate m.toml --max-tokens 40 --prompt -");
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Once upon a time").unwrap();
    assert_eq!(String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap(), whole);
    let echoed = place.run("generate m.toml --max-tokens 40 --echo --prompt-file prompt.txt").code(0);
    assert_eq!(echoed.stdout, format!("Once upon a time{whole}"));

    // A stop text that begins in the middle of a word.
    let at = whole.find(' ').unwrap() + 3;
    let stop = &whole[at..at + 5];
    let mut command = place.command("generate m.toml --max-tokens 40 --prompt-file prompt.txt --stop");
    let stopped = Answer::of(command.arg(stop)).code(0);
    assert_eq!(stopped.stdout.trim_end_matches('\n'), &whole[..whole.find(stop).unwrap()]);
    assert!(stopped.stderr.contains("stopped: a text of `--stop` was generated"), "{stopped:#?}");
    let mut command = place.command("generate m.toml --max-tokens 40 --prompt-file prompt.txt --json --stop");
    assert_eq!(Answer::of(command.arg(stop)).code(0).json()["stop"], "stop");

    let idle = place.run("generate m.toml --max-tokens 2 --top-k 5 --seed 7 --prompt-file prompt.txt").code(0);
    assert!(idle.stderr.contains("warning: `--top-k`, `--seed` have no effect at temperature 0"), "{idle:#?}");
}

#[test]
fn shells_and_man_are_told_of_every_command() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = place.run(&format!("completions {shell}")).code(0).stdout;
        assert!(["generate", "tune-op", "require-complete"].iter().all(|word| script.contains(word)), "{shell}");
    }
    assert!(place.run("man").code(0).stdout.contains(".TH monobloc"));
    place.run("man --out man").code(0);
    for page in ["monobloc.1", "monobloc-build.1", "monobloc-flywheel-export.1"] {
        assert!(place.path("man").join(page).is_file(), "{page}");
    }
}

#[test]
fn programs_read_what_commands_print() {
    let place = small();
    place.run("build m.toml").code(0);
    assert!(place.run("show schedule m.toml --json").code(0).json()["text"].as_str().unwrap().contains("regime"));
    let schema = place.run("schema --json").code(0).json();
    let llama =
        schema["families"].as_array().unwrap().iter().find(|family| family["class"] == "LlamaForCausalLM").unwrap();
    let theta = llama["keys"].as_array().unwrap().iter().find(|entry| entry["key"] == "rope_theta").unwrap();
    assert_eq!(theta["treatment"], "modelled");
    assert!(schema["every_family"].as_array().unwrap().iter().any(|entry| entry["treatment"] == "neutral"));
    let logits = place.run("logits m.toml --ids 1,2 --out l.safetensors --json").code(0).json();
    assert_eq!((&logits["positions"], &logits["target"]), (&2.into(), &"cpu".into()));
    let rows = place.run("flywheel export --json").code(0).json();
    assert_eq!(rows[0]["verdict"], "ok");
    let merged = place.run("flywheel merge flywheel/trials.csv --trials other.csv --json").code(0).json();
    assert_eq!((&merged["added"], &merged["known"]), (&1.into(), &0.into()));
    let tables = place.run("show tables m.toml").code(0).stdout;
    assert!(!tables.contains("Some("), "{tables}");
    assert!(Path::new(&place.path("l.safetensors")).is_file());
}
