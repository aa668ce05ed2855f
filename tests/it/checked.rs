//! Tests that no token comes from what was not checked, on the target `cpu`: the first run checks, later ones find that, `--unchecked` says so.
//! Kernels of a device have the same tests on the fake driver (`driver.rs`).

use std::fs;

use monobloc::digest::Digest;
use serde_json::Value;

use crate::cli_support::{Answer, Place};

const CHECK: &str = "run check cpu: 3 positions";

fn place() -> Place {
    let place = Place::new();
    place.manifest(&place.checkpoint("tinystories-llama"), 256);
    place
}

/// A command that computes logits or tokens checks before the first one.
#[test]
fn the_first_run_checks_and_a_second_one_does_not() {
    let place = place();
    let generate = "generate m.toml --ids 0,364 --max-tokens 3";
    let first = place.run(generate).code(0);
    assert!(first.stderr.contains(CHECK), "{}", first.stderr);
    for command in [generate, "logits m.toml --ids 0,364 --out l.safetensors", "export m.toml --out m.export"] {
        let later = place.run(command).code(0);
        assert!(!later.stderr.contains(CHECK), "{command}: {}", later.stderr);
    }
    let built = place.run("build m.toml").code(0);
    assert!(!built.stderr.contains(CHECK), "the check of a build is the same one: {}", built.stderr);
    let place = self::place();
    let logits = place.run("logits m.toml --ids 0,364 --out l.safetensors").code(0);
    assert!(logits.stderr.contains(CHECK), "{}", logits.stderr);
    let place = self::place();
    let chat = Answer::of(place.command("chat m.toml --max-tokens 3").write_stdin("Hello.\n")).code(0);
    assert!(chat.stderr.contains(CHECK), "{}", chat.stderr);
}

/// Without a check the user is warned, also where only JSON is asked for, and what is made says so.
#[test]
fn what_runs_unchecked_says_so() {
    let place = place();
    let warning = "warning: `--unchecked`: no check of this model's kernels was asked for";
    let ran = place.run("generate m.toml --ids 0,364 --max-tokens 3 --unchecked --json --quiet").code(0);
    assert!(ran.stderr.contains(warning) && !ran.stderr.contains(CHECK), "{}", ran.stderr);
    assert_eq!(ran.json()["unchecked"], true);
    let ran = place.run("generate m.toml --ids 0,364 --max-tokens 3 --json").code(0);
    assert_eq!(ran.json().get("unchecked"), None);

    let written = place.run("export m.toml --out unchecked.export --unchecked --json").code(0);
    assert!(written.stderr.contains(warning), "{}", written.stderr);
    assert_eq!(written.json()["unchecked"], serde_json::json!(["cpu"]));
    let index: Value = serde_json::from_slice(&fs::read(place.path("unchecked.export/export.json")).unwrap()).unwrap();
    assert_eq!((&index["unchecked"], &index["targets"][0]["checked"]), (&Value::Bool(true), &serde_json::json!({})));
    let ran = place.run("generate unchecked.export --ids 0,364 --max-tokens 3").code(0);
    assert!(ran.stderr.contains("warning: this export was made with `--unchecked`"), "{}", ran.stderr);
}

/// An export names what it was checked on. Elsewhere it is refused, unless the user says otherwise.
#[test]
fn an_export_runs_where_it_was_checked() {
    let place = place();
    let written = place.run("export m.toml --out m.export --json").code(0);
    assert_eq!(written.json()["unchecked"], serde_json::json!([]));
    let path = place.path("m.export/export.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let checked = index["targets"][0]["checked"].as_object().unwrap().clone();
    assert_eq!(checked[std::env::consts::ARCH], serde_json::json!(["cpu/text.mkir", "cpu/batch.mkir"]));
    let generate = "generate m.export --ids 0,364 --max-tokens 3";
    let ran = place.run(generate).code(0);
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);

    index["targets"][0]["checked"] = serde_json::json!({ "another": ["cpu/text.mkir", "cpu/batch.mkir"] });
    let text = index.to_string();
    fs::write(&path, &text).unwrap();
    fs::write(place.path("m.export/export.b3"), format!("{}\n", Digest::of(text.as_bytes()))).unwrap();
    place.run(generate).fault(3, &["the export does not say that its kernels were checked on ", "with `--unchecked`"]);
    let ran = place.run(&format!("{generate} --unchecked")).code(0);
    assert!(ran.stderr.contains("warning: `--unchecked`"), "{}", ran.stderr);
}

/// A build of several rows makes what a server of it needs.
#[test]
fn a_build_has_the_steps_of_its_server() {
    let place = place();
    let text = fs::read_to_string(place.path("m.toml")).unwrap();
    place.write("m.toml", text.replace("[search]", "sequences_max = 2\n[search]"));
    let built = place.run("build m.toml").code(0);
    assert!(built.stderr.contains("schedule cpu of 10 rows"), "{}", built.stderr);
    let again = place.run("build m.toml").code(0);
    assert!(again.stderr.contains("no work to do"), "{}", again.stderr);
}
