//! Tests how far a shared cache is trusted, with and without a key, as cache/README.md says.

use std::fs;
use std::path::{Path, PathBuf};

use monobloc::digest::Digest;
use serde_json::Value;

use crate::cli_support::{Answer, Place};
use crate::support::{fixture, forge};

const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// The logits of a machine with an empty local cache, and its messages.
fn logits(shared: &Path, key: Option<&Path>) -> (Vec<u8>, String) {
    logits_with("", shared, key, 0)
}

/// The same with options, from a command that ends with `code`.
fn logits_with(options: &str, shared: &Path, key: Option<&Path>, code: i32) -> (Vec<u8>, String) {
    let place = Place::new();
    place.manifest(&fixture("variants/llama-defaults"), 8);
    let mut command = place.command(&format!("logits m.toml --ids 1,2,3 --out logits.safetensors {options}"));
    command.env("MONOBLOC_SHARED_CACHE", shared);
    if let Some(key) = key {
        command.env("MONOBLOC_CACHE_KEY_FILE", key);
    }
    let answer = Answer::of(&mut command).code(code);
    if code != 0 {
        return (vec![], answer.stderr);
    }
    (fs::read(place.path("logits.safetensors")).unwrap(), answer.stderr)
}

/// The entries of the schedules in a folder, by key: one of one row a step, and one of the rows in which prompts are decoded.
fn schedules(shared: &Path, bucket: &str) -> [PathBuf; 2] {
    let files = walkdir::WalkDir::new(shared.join(bucket)).into_iter().map(|file| file.unwrap().into_path());
    let mut found: Vec<PathBuf> = files.filter(|path| path.is_file() && path.extension().is_none()).collect();
    found.sort();
    found.try_into().unwrap_or_else(|found| panic!("{bucket}: {found:?}"))
}

/// The folder of a stage whose entries have a key.
fn keyed_bucket(shared: &Path, stage: &str) -> String {
    let names = fs::read_dir(shared).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.into_iter().find(|name| name.starts_with(&format!("{stage}-v1-k"))).expect("a folder of the key")
}

#[test]
fn a_forged_schedule_and_its_link_are_used_without_a_key_and_refused_with_one() {
    let place = Place::new();
    let shared = place.path("shared");
    fs::create_dir(&shared).unwrap();
    let (honest, _) = logits(&shared, None);

    // A writer of the folder replaces the schedule and its link. The schedule can be proven like any other, because the proof does
    // not know the model.
    let forgeries = schedules(&shared, "schedule-v1");
    for schedule in &forgeries {
        let forged = forge(&shared, schedule, |bytes| {
            let text = String::from_utf8(bytes.clone()).unwrap();
            *bytes = text.replacen("epilogue=logits scale=1", "epilogue=logits scale=2", 1).into_bytes();
        });
        let key = schedule.file_name().unwrap().to_str().unwrap();
        let link = Digest::of(format!("schedule {key}").as_bytes()).to_string();
        forge(&shared, &shared.join("link-v1").join(&link[..2]).join(&link), |bytes| {
            *bytes = format!("{forged}\n").into_bytes();
        });
    }
    let (_, said) = logits_with("", &shared, None, 70);
    assert!(said.contains("kernel `decode` of target `cpu`") && said.contains("the check failed"), "{said}");
    let (trusting, said) = logits_with("--unchecked", &shared, None, 0);
    assert!(trusting != honest, "the documented trust: {said}");

    // With a key, entries without one are not used, and a note names them.
    let key = place.write("key", KEY);
    let (signed, said) = logits(&shared, Some(&key));
    assert!(signed == honest, "{said}");
    assert!(said.contains("cached schedule") && said.contains("is not sealed with the key"), "{said}");
    assert!(said.contains("schedule-v1/") && said.contains("it is built again"), "{said}");

    // The next machine with the key uses these entries without a note.
    let (again, said) = logits(&shared, Some(&key));
    assert!(again == honest && !said.contains("note") && !said.contains("run schedule"), "{said}");

    // Puts the forged entries in the places of the signed ones.
    for (target, forged) in schedules(&shared, &keyed_bucket(&shared, "schedule")).iter().zip(&forgeries) {
        assert_eq!(target.file_name(), forged.file_name());
        fs::remove_file(target).unwrap();
        fs::copy(forged, target).unwrap();
    }
    let (safe, said) = logits(&shared, Some(&key));
    assert!(safe == honest, "{said}");
    assert!(said.contains("is damaged: the sealed line is damaged, cut, made without the right key"), "{said}");

    // A process with another key sees neither.
    let other = place.write("other", KEY.replace('0', "f"));
    assert!(logits(&shared, Some(&other)).0 == honest);
}

#[test]
fn a_key_that_cannot_be_used_stops_everything() {
    let place = Place::new();
    place.manifest(&fixture("variants/llama-defaults"), 8);
    for (text, expected) in [(Some("too short"), "expected 64 hex digits"), (None, "no-such-key")] {
        let path = match text {
            Some(text) => place.write("key", text),
            None => place.path("no-such-key"),
        };
        let mut command = place.command("build m.toml");
        command.env("MONOBLOC_CACHE_KEY_FILE", &path);
        Answer::of(&mut command).fault(3, &["the key of the cache in", expected, "MONOBLOC_CACHE_KEY_FILE"]);
        let mut command = place.command("doctor");
        command.env("MONOBLOC_CACHE_KEY_FILE", &path);
        assert!(Answer::of(&mut command).code(1).stdout.contains(expected));
    }
}

#[test]
fn the_doctor_says_which_key_is_in_use() {
    let place = Place::new();
    let key = place.write("key", KEY);
    let doctor = |key: Option<&Path>, arguments: &str| {
        let mut command = place.command(arguments);
        command.env("MONOBLOC_SHARED_CACHE", place.path("shared"));
        if let Some(key) = key {
            command.env("MONOBLOC_CACHE_KEY_FILE", key);
        }
        Answer::of(&mut command).code(0)
    };
    let json = doctor(Some(&key), "doctor --json").json();
    let id = json["cache"]["key"].as_str().expect("an id").to_string();
    assert!(id.len() == 8 && !KEY.contains(&id), "{id}");
    let said = doctor(Some(&key), "doctor").stdout;
    assert!(said.contains(&format!("sealed with the key {id} of")), "{said}");
    assert_eq!(doctor(None, "doctor --json").json()["cache"]["key"], Value::Null);
    let said = doctor(None, "doctor").stdout;
    assert!(said.contains("no key (`MONOBLOC_CACHE_KEY_FILE`)"), "{said}");
}

#[test]
fn a_lost_key_text_is_written_again_by_the_next_build() {
    let place = Place::new();
    place.manifest(&fixture("variants/llama-defaults"), 8);
    place.run("build m.toml").code(0);
    let texts = || -> Vec<PathBuf> {
        let files = walkdir::WalkDir::new(place.path("cache")).into_iter().map(|file| file.unwrap().into_path());
        files.filter(|path| path.extension().is_some_and(|extension| extension == "why")).collect()
    };
    let before = texts();
    assert!(before.len() > 5, "{before:?}");
    // Lost, or replaced by a folder.
    for (at, path) in before.iter().enumerate() {
        fs::remove_file(path).unwrap();
        if at % 2 == 0 {
            fs::create_dir(path).unwrap();
        }
    }
    place.run("cache verify").code(1);
    assert!(place.run("build m.toml").code(0).stderr.contains("no work to do"));
    let verified = place.run("cache verify");
    assert_eq!(verified.code, 0, "{verified:#?}");
    assert_eq!(texts().len(), before.len());
}

#[test]
fn a_folder_in_place_of_a_subject_stops_no_command() {
    let place = Place::new();
    place.manifest(&fixture("variants/llama-defaults"), 8);
    let command = "logits m.toml --ids 1,2,3 --out logits.safetensors";
    place.run(command).code(0);
    for subject in walkdir::WalkDir::new(place.path("cache/subjects")).min_depth(2) {
        let path = subject.unwrap().into_path();
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), "x").unwrap();
    }
    place.run(command).code(0);
    // The same with a file in place of the folder of subjects.
    for folder in fs::read_dir(place.path("cache/subjects")).unwrap() {
        let path = folder.unwrap().path();
        fs::remove_dir_all(&path).unwrap();
        fs::write(&path, "x").unwrap();
    }
    place.run(command).code(0);
    place.run("cache verify").code(0);
    place.run("cache gc --min-age 0s").code(0);
    assert_eq!(fs::read_dir(place.path("cache/corrupt")).unwrap().count(), 0);
}

/// A build of a small model with a shared folder.
fn shared_build(place: &Place, shared: &Path, read_only: bool) -> Answer {
    place.manifest(&fixture("variants/llama-defaults"), 8);
    let mut command = place.command("build m.toml");
    command.env("MONOBLOC_SHARED_CACHE", shared);
    if read_only {
        command.env("MONOBLOC_SHARED_CACHE_READ_ONLY", "1");
    }
    Answer::of(&mut command).code(0)
}

/// Names of all files in a folder, in order.
fn names(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        walkdir::WalkDir::new(folder).into_iter().map(|file| file.unwrap().into_path()).collect();
    all.sort();
    all
}

#[test]
fn a_misspelt_share_is_told_once_and_not_made() {
    let place = Place::new();
    let built = shared_build(&place, &place.path("mispelt/share"), false);
    assert_eq!(built.stderr.matches("shared cache").count(), 1, "{built:#?}");
    assert!(built.stderr.contains("make it, mount it, or correct `MONOBLOC_SHARED_CACHE`"), "{built:#?}");
    assert!(!place.path("mispelt").exists());
}

#[test]
fn a_read_only_share_is_read_and_never_written() {
    let place = Place::new();
    let shared = place.path("shared");
    fs::create_dir(&shared).unwrap();
    shared_build(&Place::new(), &shared, true);
    assert_eq!(names(&shared), std::slice::from_ref(&shared), "nothing, not even a tag");
    shared_build(&Place::new(), &shared, false);
    let before = names(&shared);
    assert!(before.len() > 5);
    let second = shared_build(&Place::new(), &shared, true);
    assert!(!second.stderr.contains("run schedule") && !second.stderr.contains("shared cache"), "{second:#?}");
    assert_eq!(names(&shared), before);
}

#[test]
fn a_share_that_cannot_be_written_is_told_once() {
    let place = Place::new();
    let shared = place.path("shared");
    fs::create_dir(&shared).unwrap();
    // A file where each temporary file would be.
    fs::write(shared.join("tmp"), "").unwrap();
    let built = shared_build(&place, &shared, false);
    assert_eq!(built.stderr.matches("note shared cache: ").count(), 1, "{built:#?}");
    assert_eq!(built.stderr.matches("cannot ").count(), 1, "{built:#?}");
}
