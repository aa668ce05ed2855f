//! Tests that the text of wave kernels goes from `show` to `validate`, and that a wrong plan is marked on its line.

use std::fs;

use crate::cli_support::Place;
use crate::waves::{stored, wide};

/// A manifest for a model that has wave kernels.
fn place() -> (tempfile::TempDir, Place) {
    let (folder, _) = stored(&wide("families/qwen3"));
    let place = Place::new();
    let text = format!(
        "[model]\nsource = \"path:{}\"\n[precision]\nweights = \"bf16\"\nactivations = \"bf16\"\n[decode]\ncontext_max = 256\nsteps_per_launch = 2\n\
         [[target]]\nrecord = \"h200\"\n",
        folder.path().display()
    );
    place.write("m.toml", text);
    (folder, place)
}

#[test]
fn plans_that_are_shown_are_proven() {
    let (_folder, place) = place();
    let shown = [
        ("waves", "\nwaves chunk ", "; 2 plans of "),
        ("steps", "\nwaves steps rows=32 ", "; 1 plan of "),
        ("steps --rows 128", "\nwaves steps rows=128 ", "; 1 plan of "),
    ];
    for (stage, plan, said) in shown {
        let shown = place.run(&format!("show {stage} m.toml")).code(0).stdout;
        assert!(shown.starts_with("mkir 2\n") && shown.contains(plan), "{stage}: {shown}");
        fs::write(place.path("mine.mkir"), shown).unwrap();
        let verdict = place.run("validate mine.mkir").code(0);
        assert!(verdict.stdout.starts_with("proven: ") && verdict.stdout.contains(said), "{verdict:#?}");
    }
}

#[test]
fn rows_without_a_kernel_are_not_shown() {
    let (_folder, place) = place();
    place.run("show steps m.toml --rows 48").refused(&["no wave kernel for steps of 48 rows", "`32`, `64` or `128`"]);
    place
        .run("show waves m.toml --rows 64")
        .refused(&["`show waves` has no kernel for steps of several rows", "`steps`"]);
    place.run("show manifest m.toml --rows 64").refused(&["`show manifest` has no kernel for steps of several rows"]);
}

#[test]
fn a_wrong_plan_is_rejected_on_its_line() {
    let (_folder, place) = place();
    let shown = place.run("show steps m.toml").code(0).stdout;
    let at = shown.lines().position(|line| line.starts_with("w1 = ")).unwrap();
    let mut lines: Vec<String> = shown.lines().map(str::to_string).collect();
    lines[at] = lines[at].replace(" order(", " no-meeting order(");
    fs::write(place.path("mine.mkir"), lines.join("\n")).unwrap();
    let verdict = place.run("validate mine.mkir").code(1);
    assert!(verdict.stdout.contains("meeting: expected a meeting before a wave"), "{verdict:#?}");
    assert!(verdict.stdout.contains(&format!("mine.mkir:{}", at + 1)), "{verdict:#?}");
    let violations = place.run("validate mine.mkir --json").code(1).json()["violations"].clone();
    assert_eq!((&violations[0]["entity"], &violations[0]["line"]), (&"w1".into(), &(at + 1).into()), "{violations}");

    lines[at] = lines[at].replace("no-meeting", "no-meetings");
    fs::write(place.path("mine.mkir"), lines.join("\n")).unwrap();
    place.run("validate mine.mkir").refused(&["malformed wave line", "`no-meeting`"]);
}
