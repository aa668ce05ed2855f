//! Tests that keys follow the code of their stage: an edited line changes the keys of the stages that use it, and no others.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use tempfile::TempDir;

use crate::cli_support::{Answer, Place, copy_program};
use computed::sources::{STAGES, digests};

/// A copy of the package's code, to edit.
fn copy() -> TempDir {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    fs::copy(root.join("Cargo.lock"), folder.path().join("Cargo.lock")).unwrap();
    for part in ["src", "kernels"] {
        for entry in walkdir::WalkDir::new(root.join(part)) {
            let entry = entry.unwrap();
            let to = folder.path().join(entry.path().strip_prefix(root).unwrap());
            match entry.file_type().is_dir() {
                true => fs::create_dir_all(to).unwrap(),
                false => drop(fs::copy(entry.path(), to).unwrap()),
            }
        }
    }
    folder
}

fn codes(root: &Path) -> BTreeMap<&'static str, String> {
    digests(root, "compiler").unwrap().into_iter().map(|code| (code.stage, code.digest)).collect()
}

/// Stages whose digest changes with an edit of one file.
fn changed(path: &str, edit: impl Fn(&str) -> String) -> Vec<&'static str> {
    // The same for all tests: what is copied.
    static BEFORE: OnceLock<BTreeMap<&'static str, String>> = OnceLock::new();
    let folder = copy();
    let before = BEFORE.get_or_init(|| codes(folder.path()));
    let file = folder.path().join(path);
    let text = fs::read_to_string(&file).unwrap();
    let edited = edit(&text);
    assert!(text != edited, "{path}: the edit found nothing");
    fs::write(&file, edited).unwrap();
    let after = codes(folder.path());
    STAGES.iter().map(|stage| stage.name).filter(|stage| before[stage] != after[stage]).collect()
}

fn with_a_line(text: &str) -> String {
    format!(
        "{}\nconst EDITED: u32 = 1;\n{}",
        &text[..text.find("\nuse ").unwrap()],
        &text[text.find("\nuse ").unwrap()..]
    )
}

#[test]
fn a_changed_line_changes_the_keys_of_what_it_reaches() {
    let lower = changed("src/lower.rs", with_a_line);
    assert!(lower.contains(&"schedule") && lower.contains(&"campaign"), "{lower:?}");
    assert!(lower.contains(&"pack") && !lower.contains(&"import") && !lower.contains(&"source"), "{lower:?}");
    let validate = changed("src/validate/races.rs", with_a_line);
    assert!(validate.contains(&"schedule") && !validate.contains(&"import"), "{validate:?}");
    let interp = changed("src/interp/threads.rs", with_a_line);
    assert_eq!(interp, ["check", "measure", "expect", "campaign"]);
    assert_eq!(changed("src/search/propose.rs", with_a_line), ["campaign"]);
    let families = changed("src/model/config/families.rs", with_a_line);
    assert!(families.contains(&"import") && !families.contains(&"schedule"), "{families:?}");
    let kernel = changed("kernels/ops/norm_add.cuh", |text| format!("{text}\n// More.\n"));
    assert!(kernel.contains(&"source") && !kernel.contains(&"schedule"), "{kernel:?}");
}

#[test]
fn a_changed_line_elsewhere_changes_no_key() {
    let none: [&str; 0] = [];
    assert_eq!(
        changed("src/cli/arguments.rs", |text| text.replace("Compiles a decoder model", "Builds a model")),
        none
    );
    for path in ["src/cli/build.rs", "src/cli/generate.rs", "src/report.rs", "src/page.rs", "src/cuda/calibrate.rs"] {
        assert_eq!(changed(path, with_a_line), none, "{path}");
    }
    assert_eq!(changed("src/lower.rs", |text| text.replacen("\nuse ", "\n// A word.\n/* Two. */\nuse ", 1)), none);
    let test = "#[cfg(test)]\nmod tests {";
    assert_eq!(changed("src/pack.rs", |text| text.replacen(test, &format!("{test}\n    const A: u8 = 1;"), 1)), none);
}

#[test]
fn a_dependency_in_another_version_changes_the_keys_of_what_uses_it() {
    let raised = |package: &str, text: &str| {
        let at = text.find(&format!("name = \"{package}\"\nversion = \"")).expect("a locked package");
        let rest = &text[at..];
        let end = rest.find("\"\nsource").unwrap();
        text.replacen(&rest[..end], &format!("{}9", &rest[..end]), 1)
    };
    let by_half = changed("Cargo.lock", |text| raised("half", text));
    assert!(by_half.contains(&"pack") && by_half.contains(&"check"), "{by_half:?}");
    let by_driver = changed("Cargo.lock", |text| raised("cudarc", text));
    assert!(by_driver.contains(&"check") && !by_driver.contains(&"schedule"), "{by_driver:?}");
}

#[test]
fn figures_of_compiled_code_depend_on_the_compiler_and_results_do_not() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let [one, other] = ["rustc 1", "rustc 2"].map(|compiler| digests(root, compiler).unwrap());
    let differ: Vec<&str> =
        one.iter().zip(&other).filter(|(a, b)| a.digest != b.digest).map(|(a, _)| a.stage).collect();
    assert_eq!(differ, ["check", "measure", "expect", "campaign"]);
}

/// The lists of `build/sources.rs` are written by hand; these files must be reached from them.
#[test]
fn a_stage_reaches_the_code_that_makes_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let codes: BTreeMap<_, _> = digests(root, "").unwrap().into_iter().map(|code| (code.stage, code)).collect();
    for (stage, file) in [
        ("import", "src/model/config/rope.rs"),
        ("schedule", "src/lower/alone.rs"),
        ("schedule", "src/validate/proxies.rs"),
        ("schedule", "src/ir/op.rs"),
        ("source", "kernels/runtime/sync.cuh"),
        ("pack", "src/model/synthetic.rs"),
        ("check", "src/codegen/abi.rs"),
        ("check", "src/interp/kernel.rs"),
        ("measure", "src/abba.rs"),
        ("pack", "src/ir/layout.rs"),
        ("expect", "src/pipeline/trial.rs"),
    ] {
        assert!(codes[stage].files.contains(file), "{stage} does not reach {file}: {:?}", codes[stage].files);
    }
    assert!(codes.values().all(|code| !code.files.iter().any(|file| file.starts_with("src/cli/"))));
    assert!(codes["pack"].packages.iter().any(|package| package.starts_with("half ")));
}

#[test]
fn keys_name_the_digest_of_their_code_and_binaries_that_differ_elsewhere_share_a_cache() {
    let place = Place::new();
    let checkpoint = place.checkpoint("families/llama-gqa");
    place.manifest(&checkpoint, 64);
    place.run("build m.toml").code(0);
    let why = place.run("show why m.toml").code(0).stdout;
    let codes = codes(Path::new(env!("CARGO_MANIFEST_DIR")));
    for stage in ["import", "schedule", "pack"] {
        let section = why.split(&format!("[{stage}] ")).nth(1).unwrap_or_default();
        let line = section.lines().find(|line| line.starts_with("code = ")).unwrap_or_default();
        assert_eq!(line, format!("code = {}", codes[stage]), "{stage}");
    }
    // Another executable whose stages are the same.
    let other = place.path("other");
    copy_program(&other, "more");
    let mut command = std::process::Command::new(&other);
    command.args(["build", "m.toml"]).current_dir(place.path(".")).env("MONOBLOC_CACHE_DIR", "cache");
    let built = Answer::of(&mut assert_cmd::Command::from_std(command)).code(0);
    assert!(built.stderr.contains("no work to do"), "{built:#?}");
}
