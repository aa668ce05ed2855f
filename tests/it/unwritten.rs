//! Tests commands that are given a model in place of a manifest, and what `init` and `import` say of names.

use std::fs;

use crate::cli_support::{Answer, Place};
use crate::support::fixture;

#[test]
fn a_checkpoint_folder_needs_no_manifest() {
    let place = Place::new();
    place.checkpoint("tinystories-llama");
    let text = "generate WHAT --prompt Hello --max-tokens 8 --target cpu";
    let named = place.run(&text.replace("WHAT", "checkpoint")).code(0);
    assert!(named.stdout.trim().len() > 5, "{named:#?}");
    assert!(!place.path("monobloc.toml").exists(), "no manifest is written");

    // Every stage that the unwritten manifest ran is cached for the written one, and the text is the same.
    place.run("init checkpoint --target cpu").code(0);
    let written = place.run(&text.replace("WHAT", "monobloc.toml")).code(0);
    assert_eq!(written.stdout, named.stdout);
    assert!(!written.stderr.contains("run "), "{written:#?}");
    place.run("build checkpoint/ --target cpu --no-search").code(0);
    assert!(place.run("build monobloc.toml").code(0).stderr.starts_with("no work to do"));
    // From another folder it is the same model, for `explain` too.
    place.write("other/keep", "");
    let mut command = place.command("explain ../checkpoint --target cpu");
    command.current_dir(place.path("other")).env("MONOBLOC_CACHE_DIR", place.path("cache"));
    assert!(Answer::of(&mut command).code(0).stdout.ends_with("no work to do\n"));
    place.run("show source checkpoint --target h200").code(0);
    place.run("build checkpoint --target h2000").refused(&["unknown target `h2000`", "did you mean `h200`?"]);
    // A folder with both is asked about.
    fs::rename(place.path("monobloc.toml"), place.path("checkpoint/monobloc.toml")).unwrap();
    place.run("build checkpoint").refused(&["did you mean `checkpoint/monobloc.toml`?"]);
}

#[test]
fn a_search_runs_without_a_manifest() {
    let place = Place::new();
    let checkpoint = place.checkpoint("families/llama-gqa");
    fs::rename(&checkpoint, place.path("my model")).unwrap();
    let mut command = place.command("tune --max-trials 1 --target cpu");
    Answer::of(command.arg("my model")).code(0);
    let status = Answer::of(place.command("status --target cpu").arg("my model")).code(0);
    assert!(status.stdout.starts_with("my-model on cpu: 1 campaign\n"), "{status:#?}");
}

#[test]
fn a_config_alone_is_no_model_to_run() {
    let place = Place::new();
    place.checkpoint("families/llama-gqa");
    place
        .run("generate checkpoint/config.json --ids 1")
        .refused(&["is a config, expected a manifest", "name its folder"]);
}

#[test]
fn gguf_files_are_named_and_explained() {
    let place = Place::new();
    let bytes = [b"GGUF\x03\0\0\0".as_slice(), &[0; 2 << 20]].concat();
    place.write("model.gguf", &bytes);
    place.write("no-suffix", &bytes);
    place.write("folder/a-00001-of-00002.gguf", &bytes);
    place.write("m.toml", crate::cli_support::manifest_text("path:model.gguf", 32));
    for (command, expected) in [
        ("init model.gguf", "key `general.architecture` is missing"),
        ("generate model.gguf --ids 1", "key `general.architecture` is missing"),
        ("chat model.gguf", "key `general.architecture` is missing"),
        ("build m.toml", "key `general.architecture` is missing"),
        ("import model.gguf", "cannot be imported, for 1 reason"),
        ("serve no-suffix", "let its name end in `.gguf`"),
        ("import no-suffix", "let its name end in `.gguf`"),
        ("build folder", "`a-00002-of-00002.gguf` is not there"),
        ("init folder", "`a-00002-of-00002.gguf` is not there"),
    ] {
        place.run(command).refused(&[expected]);
    }
    assert!(!place.path("monobloc.toml").exists());
}

#[test]
fn init_refuses_bad_names_before_it_writes() {
    let place = Place::new();
    place.checkpoint("families/llama-gqa");
    for (arguments, expected) in [
        ("init hf:foo", "`hf:OWNER/foo`"),
        ("init hf:https://huggingface.co/o/n/tree/main", "did you mean `hf:o/n`?"),
        ("init https://huggingface.co/o/n", "is named as `hf:o/n`"),
        ("build https://huggingface.co/o/n/tree/main", "is named as `hf:o/n`"),
        ("serve o/n", "is named as `hf:o/n`"),
        ("init tinystorie", "did you mean `tinystories`?"),
        ("init checkpoint --target h2000", "did you mean `h200`?"),
        ("import hf:foo", "`hf:OWNER/foo`"),
        ("generate hf:foo --prompt x", "`hf:OWNER/foo`"),
    ] {
        place.run(arguments).refused(&[expected]);
    }
    Answer::of(place.command("init").arg("hf:o/n ame"))
        .refused(&["expected OWNER/NAME, or OWNER/NAME:FILE, of letters"]);
    assert!(!place.path("monobloc.toml").exists());
    // A file name that is no legal name of a manifest.
    let wrote = Answer::of(place.command("init checkpoint --target cpu --out").arg("my manifest.toml")).code(0);
    assert!(wrote.stderr.contains("next: monobloc generate 'my manifest.toml'") || wrote.stderr.contains("build 'my"));
    assert!(fs::read_to_string(place.path("my manifest.toml")).unwrap().starts_with("name = \"my-manifest\"\n"));
    Answer::of(place.command("build").arg("my manifest.toml")).code(0);
}

#[test]
fn import_needs_no_option() {
    let place = Place::new();
    let folder = fixture("tinystories-llama").display().to_string();
    let said = place.run(&format!("import {folder}")).code(0).stdout;
    assert_eq!(place.run(&format!("import {folder} --dry-run")).code(0).stdout, said);
}
