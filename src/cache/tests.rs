//! Tests what users of a cache see, also with several processes, kills, full disks and damaged bytes.

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use super::store::entry_name;
use super::*;
use crate::error::{Fault, Tier};

/// Set in the processes that these tests start: `MODE ARGUMENT` of the child below.
const CHILD: &str = "MONOBLOC_CACHE_TEST_CHILD";
const CHILD_ROOT: &str = "MONOBLOC_CACHE_TEST_ROOT";
const RACE_KEYS: u32 = 24;

fn key_of(number: u32) -> Digest {
    Digest::of(&number.to_le_bytes())
}

/// Content that differs by key; for some keys it is longer than a block of the file system.
fn content_of(number: u32) -> Vec<u8> {
    number.to_le_bytes().repeat(1 + (number as usize % 5) * 3000)
}

/// A cache whose notes are collected.
fn noted(places: &Places) -> (Cache, Arc<Mutex<Vec<Note>>>) {
    let notes = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&notes);
    let cache = Cache::open_places(places, move |note| sink.lock().unwrap().push(note.clone())).unwrap();
    (cache, notes)
}

fn local(root: &Path) -> Places {
    Places { root: root.to_path_buf(), shared: None, shared_read_only: false, key_file: None, remote: None }
}

/// Damages an entry on purpose; entries are read-only, so permissions change first.
fn damage(path: &Path, change: impl FnOnce(&File)) {
    fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    change(&OpenOptions::new().read(true).write(true).open(path).unwrap());
}

fn flip(path: &Path, at: u64) {
    damage(path, |file| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    });
}

fn age(path: &Path, seconds: u64) {
    let stamp = SystemTime::now() - Duration::from_secs(seconds);
    File::open(path).unwrap().set_times(FileTimes::new().set_modified(stamp)).unwrap();
}

fn build(cache: &Cache, number: u32) -> (Vec<u8>, Outcome) {
    let made = || Ok::<_, CacheError>(content_of(number));
    let (entry, outcome) = cache.get_or_build("program", &key_of(number), "n = 1\n", made).unwrap();
    (entry.into_bytes().unwrap(), outcome)
}

fn no_problems(cache: &Cache) {
    assert_eq!(cache.verify(&mut |_, _| {}).unwrap(), Vec::new());
}

#[test]
fn an_entry_is_built_once_and_then_cached() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path().join("cache")).unwrap();
    assert!(cache.get("program", &key_of(1)).unwrap().is_none());
    assert_eq!(build(&cache, 1), (content_of(1), Outcome::Built));
    assert_eq!(build(&cache, 1), (content_of(1), Outcome::Cached));

    let entry = cache.get("program", &key_of(1)).unwrap().unwrap();
    assert_eq!(entry.content(), Digest::of(&content_of(1)));
    assert_eq!(entry.len(), content_of(1).len() as u64);
    let mut middle = [0; 6];
    entry.read_at(2, &mut middle).unwrap();
    assert_eq!(middle, content_of(1)[2..8]);
    assert!(entry.read_at(entry.len() - 1, &mut middle).is_err());

    assert_eq!(fs::metadata(entry.path()).unwrap().mode() & 0o777, 0o444);
    assert!(fs::read(entry.path()).unwrap().starts_with(&content_of(1)), "content starts at offset 0");
    assert_eq!(cache.why("program", &key_of(1)).as_deref(), Some("n = 1\n"));
    assert_eq!(fs::read_to_string(cache.root().join(".gitignore")).unwrap(), "*\n!README.md\n");
    let tag = fs::read_to_string(cache.root().join("CACHEDIR.TAG")).unwrap();
    assert!(tag.starts_with("Signature: 8a477f597d28d172789f06886806bc55\n"));
    let stats = cache.stats().unwrap();
    assert_eq!((stats.stages[0].stage.as_str(), stats.stages[0].entries, stats.temporary), ("program", 1, 0));
    no_problems(&cache);
}

#[test]
fn the_first_of_two_unequal_results_wins() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let first = cache.put("program", &key_of(1), "", b"first").unwrap();
    assert_eq!(cache.put("program", &key_of(1), "", b"second").unwrap(), first);
    assert_eq!(first, Digest::of(b"first"));
}

#[test]
fn a_failed_build_stores_nothing_and_gives_the_lock_back() {
    #[derive(Debug)]
    struct Failed;
    impl From<CacheError> for Failed {
        fn from(error: CacheError) -> Self {
            panic!("{error}")
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    assert!(cache.get_or_build("program", &key_of(1), "", || Err(Failed)).is_err());
    let half_written = |file: &mut File| {
        file.write_all(b"half").unwrap();
        Err(Failed)
    };
    assert!(cache.get_or_build_file("program", &key_of(1), "", half_written).is_err());
    assert!(cache.get("program", &key_of(1)).unwrap().is_none());
    assert_eq!(cache.stats().unwrap().temporary, 0);
    assert_eq!(fs::read_dir(folder.path().join("locks")).unwrap().count(), 0);
    assert_eq!(build(&cache, 1).1, Outcome::Built);
}

#[test]
fn a_flipped_bit_or_a_cut_anywhere_is_set_aside_and_built_again() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, notes) = noted(&local(folder.path()));
    let path = folder.path().join(entry_name("", "program", &key_of(2)));
    build(&cache, 2);
    let whole = fs::read(&path).unwrap();
    // Every byte of the sealed line, and a sample of the content.
    let content = content_of(2).len();
    let places = (0..content).step_by(997).chain(content..whole.len());
    for at in places {
        for cut in [false, true] {
            if cut {
                damage(&path, |file| file.set_len(at as u64).unwrap())
            } else {
                flip(&path, at as u64)
            }
            let problems = cache.verify(&mut |_, _| {}).unwrap();
            assert_eq!(problems.iter().map(|problem| &problem.path).collect::<Vec<_>>(), [&path], "byte {at}");
            assert!(cache.get("program", &key_of(2)).unwrap().is_none(), "byte {at} of {}", whole.len());
            let note = notes.lock().unwrap().pop().unwrap();
            let Note::SetAside { moved_to: Some(moved_to), .. } = &note else { panic!("{note}") };
            assert!(moved_to.starts_with(folder.path().join("corrupt")) && moved_to.exists());
            assert!(note.to_string().contains("is damaged"), "{note}");
            assert_eq!(build(&cache, 2), (content_of(2), Outcome::Built));
        }
    }
    no_problems(&cache);
}

#[test]
fn damage_beside_an_entry_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    build(&cache, 1);
    build(&cache, 2);
    cache.set_latest("program", "manifests/tiny.toml", &key_of(1)).unwrap();
    // The checkpoint that comes with the program is no entry.
    fs::create_dir_all(folder.path().join("builtin/tinystories")).unwrap();
    fs::write(folder.path().join("builtin/tinystories/config.json"), "{}").unwrap();
    no_problems(&cache);
    let [first, second] = [1, 2].map(|number| folder.path().join(entry_name("", "program", &key_of(number))));
    let why = |entry: &Path| PathBuf::from(format!("{}.why", entry.display()));

    flip(&why(&first), 2);
    fs::remove_file(why(&second)).unwrap();
    fs::copy(&second, second.with_file_name("notes.txt")).unwrap();
    let subject = walkdir::WalkDir::new(folder.path().join("subjects")).into_iter().flatten().last().unwrap();
    flip(subject.path(), 3);

    assert_eq!(cache.why("program", &key_of(1)), None, "a damaged key text is not shown");
    assert_eq!(cache.latest_why("program", "manifests/tiny.toml"), None);
    let problems = cache.verify(&mut |_, _| {}).unwrap();
    let kinds: Vec<_> = problems.iter().map(|problem| std::mem::discriminant(&problem.kind)).collect();
    let damaged = std::mem::discriminant(&ProblemKind::Damaged(String::new()));
    let expected = [ProblemKind::WhyMissing, ProblemKind::Unknown].map(|kind| std::mem::discriminant(&kind));
    assert_eq!(kinds.iter().filter(|kind| **kind == damaged).count(), 2, "{problems:?}");
    assert!(expected.iter().all(|kind| kinds.contains(kind)) && kinds.len() == 4, "{problems:?}");
    assert_eq!(build(&cache, 2).1, Outcome::Cached, "an entry without its key text can be used");
}

#[test]
fn a_lost_key_text_is_mended_or_its_entry_collected() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    (1..=3).for_each(|number| drop(build(&cache, number)));
    let entry = |number| folder.path().join(entry_name("", "program", &key_of(number)));
    let why = |number| PathBuf::from(format!("{}.why", entry(number).display()));
    fs::remove_file(why(1)).unwrap();
    flip(&why(2), 2);
    fs::remove_file(why(3)).unwrap();
    (1..=2).for_each(|number| cache.explain("program", &key_of(number), "n = 1\n"));
    assert_eq!(cache.why("program", &key_of(1)).as_deref(), Some("n = 1\n"));
    assert_eq!(cache.why("program", &key_of(2)).as_deref(), Some("n = 1\n"));
    let problems = cache.verify(&mut |_, _| {}).unwrap();
    assert_eq!(problems, [Problem { path: entry(3), kind: ProblemKind::WhyMissing }]);
    // No build uses the third again. It is removed once it is old enough, although there is room for it.
    assert_eq!(cache.gc(1 << 30, Duration::from_secs(100)).unwrap().unwrap().entries_removed, 0);
    age(&entry(3), 1000);
    assert_eq!(cache.gc(1 << 30, Duration::from_secs(100)).unwrap().unwrap().entries_removed, 1);
    no_problems(&cache);
    cache.explain("program", &key_of(3), "n = 1\n");
    assert!(!why(3).exists(), "no key text without its entry");
}

#[test]
fn a_pipe_in_the_cache_is_damage() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    build(&cache, 1);
    let path = folder.path().join(entry_name("", "program", &key_of(1)));
    let why = PathBuf::from(format!("{}.why", path.display()));
    for path in [&path, &why] {
        fs::remove_file(path).unwrap();
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }
    assert_eq!(cache.why("program", &key_of(1)), None);
    assert_eq!(build(&cache, 1).1, Outcome::Built);
}

#[test]
fn a_sound_entry_under_the_name_of_another_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    build(&cache, 1);
    build(&cache, 2);
    let [first, second] = [1, 2].map(|number| folder.path().join(entry_name("", "program", &key_of(number))));
    fs::remove_file(&second).unwrap();
    fs::copy(first, second).unwrap();
    assert_eq!(build(&cache, 2), (content_of(2), Outcome::Built));
}

#[test]
fn a_large_entry_is_hashed_once_and_again_after_any_change() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let fill = |file: &mut File| {
        // Sparse: one write near the end stands for a pack written out of order.
        file.set_len(LARGE_BYTES + 3).and_then(|()| file.write_all_at(b"tail", LARGE_BYTES - 9)).unwrap();
        Ok::<_, CacheError>(())
    };
    let (entry, outcome) = cache.get_or_build_file("pack", &key_of(1), "", fill).unwrap();
    assert_eq!((entry.len(), outcome), (LARGE_BYTES + 3, Outcome::Built));
    let mut tail = [0; 4];
    entry.read_at(LARGE_BYTES - 9, &mut tail).unwrap();
    assert_eq!(&tail, b"tail");

    let name = entry_name("", "pack", &key_of(1));
    let hashed = |trust_bytes| {
        let mut bytes = 0;
        let found = cache.store.read(&name, trust_bytes, &mut |run| bytes += run).unwrap();
        (matches!(found, store::Found::Whole(_)), bytes)
    };
    assert_eq!(hashed(LARGE_BYTES), (true, 0), "known since it was written");
    assert_eq!(cache.get("pack", &key_of(1)).unwrap().unwrap().content(), entry.content());
    assert_eq!(hashed(LARGE_BYTES), (true, 0), "a hit does not make it unknown");
    assert_eq!(hashed(u64::MAX), (true, LARGE_BYTES + 3), "verify reads every byte");

    for at in [0, LARGE_BYTES / 2, LARGE_BYTES + 2, LARGE_BYTES + 3, LARGE_BYTES + 150] {
        flip(&folder.path().join(&name), at);
        assert!(cache.get("pack", &key_of(1)).unwrap().is_none(), "byte {at}");
        assert_eq!(cache.get_or_build_file("pack", &key_of(1), "", fill).unwrap().1, Outcome::Built);
    }
    let gone = folder.path().join(&name);
    damage(&gone, |file| file.set_len(LARGE_BYTES + 1).unwrap());
    assert_eq!(cache.verify(&mut |_, _| {}).unwrap().len(), 1);
    assert!(cache.get("pack", &key_of(1)).unwrap().is_none());
}

#[test]
fn explain_names_what_changed_since_the_last_build_of_a_subject() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let subject = "manifests/tiny.toml";
    assert_eq!(cache.latest_why("program", subject), None);
    for (number, why) in [(1, "sm_count = 132\n"), (2, "sm_count = 114\n")] {
        cache.put("program", &key_of(number), why, b"x").unwrap();
        cache.set_latest("program", subject, &key_of(number)).unwrap();
    }
    let (key, old) = cache.latest_why("program", subject).unwrap();
    assert_eq!(key, key_of(2));
    assert_eq!(diff_why(&old, "sm_count = 148\n"), ["sm_count: 114 -> 148"]);
    assert_eq!(cache.latest_why("schedule", subject), None);
    assert_eq!(cache.latest_why("program", "manifests/other.toml"), None);
}

#[test]
fn collecting_removes_what_was_used_longest_ago() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let path = |number| folder.path().join(entry_name("", "program", &key_of(number)));
    for number in 0..10 {
        cache.put("program", &key_of(number), "", &vec![number as u8; 10_000]).unwrap();
        for path in [path(number), PathBuf::from(format!("{}.why", path(number).display()))] {
            age(&path, 1000 - u64::from(number));
        }
    }
    // The oldest is used again; a killed writer and an old damaged file are there too.
    assert_eq!(cache.get("program", &key_of(0)).unwrap().unwrap().len(), 10_000);
    for (name, seconds) in [("tmp/.tmpKilled", 100), ("tmp/.tmpYoung", 0), ("corrupt/old", 5000)] {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"remains").unwrap();
        age(&path, seconds);
    }
    let kept = || (0..10).filter(|number| path(*number).exists()).collect::<Vec<_>>();

    let nothing = cache.gc(1 << 30, Duration::ZERO).unwrap().unwrap();
    assert_eq!((nothing.entries_removed, nothing.remains_removed), (0, 2), "remains go, entries fit");
    assert!(folder.path().join("tmp/.tmpYoung").exists(), "its writer may be about to lock it");
    let protected = cache.gc(50_000, Duration::from_secs(5000)).unwrap().unwrap();
    assert_eq!((protected.entries_removed, kept().len()), (0, 10), "all are younger than the least age");

    let report = cache.gc(50_000, Duration::from_secs(60)).unwrap().unwrap();
    assert_eq!(kept(), [0, 7, 8, 9], "{report:?}");
    assert!(report.bytes_after <= 45_000 && report.bytes_before > 100_000, "{report:?}");
    assert_eq!(build(&cache, 1).1, Outcome::Built);

    let lock = File::open(folder.path().join("locks/gc")).unwrap();
    lock.lock().unwrap();
    assert_eq!(cache.gc(0, Duration::ZERO).unwrap(), None, "another process collects");
}

#[test]
fn a_reader_keeps_a_large_entry_that_is_collected_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path()).unwrap();
    let fill =
        |file: &mut File| file.set_len(LARGE_BYTES).map_err(|error| CacheError::io("write", folder.path(), error));
    let (entry, _) = cache.get_or_build_file("pack", &key_of(1), "", fill).unwrap();
    assert_eq!(cache.gc(0, Duration::ZERO).unwrap().unwrap().entries_removed, 1);
    assert!(!entry.path().exists());
    assert_eq!(Digest::of(&entry.bytes().unwrap()), entry.content());
    assert_eq!(fs::read_dir(folder.path().join("verified")).unwrap().count(), 0, "what is gone is forgotten");
}

#[test]
fn a_shared_folder_serves_a_second_machine_and_is_never_required() {
    let folder = tempfile::tempdir().unwrap();
    let shared = folder.path().join("shared");
    fs::create_dir(&shared).unwrap();
    let places = |name: &str| Places {
        root: folder.path().join(name),
        shared: Some(shared.clone()),
        shared_read_only: false,
        key_file: None,
        remote: None,
    };
    let (here, _) = noted(&places("here"));
    assert_eq!(build(&here, 1).1, Outcome::Built);
    let fill = |file: &mut File| file.set_len(LARGE_BYTES + 1).map_err(|error| CacheError::io("write", &shared, error));
    here.get_or_build_file("pack", &key_of(9), "", fill).unwrap();

    let (there, notes) = noted(&places("there"));
    assert_eq!(build(&there, 1), (content_of(1), Outcome::Cached));
    assert_eq!(there.why("program", &key_of(1)).as_deref(), Some("n = 1\n"));
    let large = there.get("pack", &key_of(9)).unwrap().unwrap();
    assert_eq!(large.len(), LARGE_BYTES + 1);
    assert!(large.path().starts_with(&shared), "a large entry is used directly from the share");
    drop(there);
    assert_eq!(*notes.lock().unwrap(), []);
    fs::rename(&shared, folder.path().join("gone")).unwrap();
    let (there, notes) = noted(&places("there"));
    assert_eq!(build(&there, 1).1, Outcome::Cached, "it was copied");
    let copy = there.get("pack", &key_of(9)).unwrap().expect("copied by the end of the first cache");
    assert_eq!((copy.content(), copy.path().starts_with(there.root())), (large.content(), true));
    assert_eq!(notes.lock().unwrap().len(), 1, "a share that is gone is told");
    // It was not made, which would fail here.
    fs::rename(folder.path().join("gone"), &shared).unwrap();
    let (there, notes) = noted(&places("there"));

    // An entry that is damaged in the share is refused, and built here.
    let (here, _) = noted(&places("here"));
    assert_eq!(build(&here, 2).1, Outcome::Built);
    flip(&shared.join(entry_name("", "program", &key_of(2))), 3);
    assert_eq!(build(&there, 2), (content_of(2), Outcome::Built));
    assert!(matches!(notes.lock().unwrap().as_slice(), [Note::Shared { .. }]));
    let (third, _) = noted(&places("third"));
    assert_eq!(build(&third, 2).1, Outcome::Cached, "written there again");

    // A share that is no folder gives a warning, and work continues.
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    let (alone, notes) = noted(&Places {
        root: folder.path().join("alone"),
        shared: Some(file),
        shared_read_only: false,
        key_file: None,
        remote: None,
    });
    assert_eq!(build(&alone, 1).1, Outcome::Built);
    let notes = notes.lock().unwrap();
    assert!(notes[0].to_string().starts_with("shared cache: cannot open it: no folder "), "{notes:?}");
}

#[test]
fn the_note_of_a_share_that_may_not_be_written_says_how_to_only_read_it() {
    let note = |kind: io::ErrorKind| {
        super::unwritten(&CacheError::io("write", Path::new("/share/a"), io::Error::from(kind))).to_string()
    };
    assert_eq!(
        note(io::ErrorKind::PermissionDenied),
        "shared cache: cannot write `/share/a`: permission denied; with `MONOBLOC_SHARED_CACHE_READ_ONLY=1` it is only read"
    );
    assert!(note(io::ErrorKind::ReadOnlyFilesystem).contains("READ_ONLY=1"));
    assert!(!note(io::ErrorKind::StorageFull).contains("READ_ONLY"));
}

#[test]
fn a_cache_that_cannot_be_is_the_fault_of_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    for root in [file.clone(), file.join("below")] {
        let fault = Fault::from(Cache::open(&root).err().unwrap());
        assert_eq!(fault.tier, Tier::Environment);
        assert!(fault.to_string().contains("expected a folder, found a file"), "{fault}");
        assert!(fault.to_string().contains("MONOBLOC_CACHE_DIR"), "{fault}");
    }
    let stage = Cache::open(folder.path()).unwrap().get("../x", &key_of(1)).unwrap_err();
    assert_eq!(Fault::from(stage).tier, Tier::Internal);
}

#[test]
fn a_waiter_is_told_and_gets_what_the_other_built() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, notes) = noted(&local(folder.path()));
    let (started, ready) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let slow = || {
                started.send(()).unwrap();
                let told = || notes.lock().unwrap().iter().any(|note| matches!(note, Note::Waiting { .. }));
                while !told() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok::<_, CacheError>(b"slow".to_vec())
            };
            let other = Cache::open(folder.path()).unwrap();
            assert_eq!(other.get_or_build("program", &key_of(1), "", slow).unwrap().1, Outcome::Built);
        });
        ready.recv().unwrap();
        let never = || -> Result<Vec<u8>, CacheError> { panic!("built twice") };
        let (entry, outcome) = cache.get_or_build("program", &key_of(1), "", never).unwrap();
        assert_eq!((entry.into_bytes().unwrap().as_slice(), outcome), (b"slow".as_slice(), Outcome::BuiltElsewhere));
    });
    let first = notes.lock().unwrap()[0].to_string();
    assert!(first.starts_with("waiting for another process to build program"), "{first}");
}

// Other processes. They run this test binary again, with the one test that does nothing in the parent.

fn child(root: &Path, mode: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "cache::tests::child_process", "--nocapture", "--test-threads=1"]);
    command.env(CHILD, mode).env(CHILD_ROOT, root).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn finish(child: Child) {
    let output = child.wait_with_output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("child did its work"), "{text}");
}

/// Waits until a child has written `line` to its standard output.
fn wait_for(child: &mut Child, line: &str) {
    let mut seen = Vec::new();
    let stdout = child.stdout.as_mut().unwrap();
    let mut byte = [0];
    while !String::from_utf8_lossy(&seen).contains(line) {
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "the child ended: {}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
}

#[test]
fn child_process() {
    let Ok(mode) = std::env::var(CHILD) else { return };
    let root = PathBuf::from(std::env::var_os(CHILD_ROOT).unwrap());
    let say = |text: &str| {
        println!("{text}");
        std::io::stdout().flush().unwrap();
    };
    let hang = || std::thread::sleep(Duration::from_secs(600));
    match mode.split_once(' ').unwrap_or((&mode, "")) {
        ("race", start) => {
            let cache = Cache::open(&root).unwrap();
            let start: u32 = start.parse().unwrap();
            for step in 0..RACE_KEYS {
                let number = (start + step) % RACE_KEYS;
                let built = || {
                    // One write of one line: who built what.
                    let mut log = OpenOptions::new().append(true).open(root.join("../built.log")).unwrap();
                    log.write_all(format!("{number}\n").as_bytes()).unwrap();
                    std::thread::sleep(Duration::from_millis(2));
                    Ok::<_, CacheError>(content_of(number))
                };
                let (entry, _) = cache.get_or_build("race", &key_of(number), "n = 1\n", built).unwrap();
                assert_eq!(entry.into_bytes().unwrap(), content_of(number));
                // Every process also publishes one key without a lock, which damages nothing.
                cache.put("free", &key_of(number), "", &content_of(number)).unwrap();
            }
        }
        ("killed-in-put", _) => {
            let cache = Cache::open(&root).unwrap();
            let fill = |file: &mut File| -> Result<(), CacheError> {
                file.write_all(&content_of(1)).unwrap();
                say("half written");
                hang();
                Ok(())
            };
            cache.get_or_build_file("program", &key_of(1), "", fill).unwrap();
        }
        ("full", _) => {
            let cache = Cache::open(&root).unwrap();
            build(&cache, 0);
            let error = cache.put("program", &key_of(1), "", &[7; 100_000]).unwrap_err();
            assert!(matches!(error, CacheError::Full { .. }), "{error}");
            let fault = Fault::from(error);
            assert!(fault.tier == Tier::Environment && fault.to_string().contains("monobloc cache gc"), "{fault}");
            let result = cache.get_or_build("program", &key_of(2), "", || Ok::<_, CacheError>(vec![7; 100_000]));
            assert!(matches!(result.unwrap_err(), CacheError::Full { .. }));
            assert_eq!(build(&cache, 0).1, Outcome::Cached);
        }
        ("read-only", _) => {
            let cache = Cache::open(&root).unwrap();
            assert_eq!(build(&cache, 1), (content_of(1), Outcome::Cached));
            let never = || -> Result<Vec<u8>, CacheError> { panic!("built what cannot be stored") };
            let fault = Fault::from(cache.get_or_build("program", &key_of(2), "", never).unwrap_err());
            assert!(
                fault.tier == Tier::Environment && fault.to_string().contains("make the folder writable"),
                "{fault}"
            );
            let error = cache.put("program", &key_of(2), "", b"x").unwrap_err();
            assert!(matches!(error, CacheError::Denied { .. }), "{error}");
            // A damaged entry that cannot be moved away is still refused.
            assert!(cache.get("program", &key_of(3)).unwrap().is_none());
            no_new_folder(&root);
        }
        other => panic!("unknown mode {other:?}"),
    }
    say("child did its work");
}

fn no_new_folder(root: &Path) {
    let error = Cache::open(root.join("new")).err().unwrap();
    assert!(matches!(error, CacheError::Denied { .. }), "{error}");
}

#[test]
fn eight_processes_build_each_entry_once() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("cache");
    fs::write(folder.path().join("built.log"), b"").unwrap();
    fs::create_dir(&root).unwrap();
    // Two processes start at each entry, so they meet at once; the others meet them later.
    let children: Vec<Child> = (0..8).map(|n| child(&root, &format!("race {}", n / 2 * 6)).spawn().unwrap()).collect();
    children.into_iter().for_each(finish);

    let mut built = BTreeMap::new();
    for line in fs::read_to_string(folder.path().join("built.log")).unwrap().lines() {
        *built.entry(line.parse::<u32>().unwrap()).or_insert(0) += 1;
    }
    assert_eq!(built, (0..RACE_KEYS).map(|number| (number, 1)).collect());
    let cache = Cache::open(&root).unwrap();
    no_problems(&cache);
    let stats = cache.stats().unwrap();
    assert_eq!(stats.stages.iter().map(|stage| stage.entries).collect::<Vec<_>>(), [24, 24]);
    assert_eq!((stats.temporary, stats.set_aside), (0, 0));
    assert_eq!(fs::read_dir(root.join("locks")).unwrap().count(), 0);
}

#[test]
fn a_process_killed_while_it_writes_leaves_nothing_trusted_and_no_lock() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = child(folder.path(), "killed-in-put").spawn().unwrap();
    wait_for(&mut writer, "half written");
    let (cache, notes) = noted(&local(folder.path()));
    assert!(cache.get("program", &key_of(1)).unwrap().is_none());
    no_problems(&cache);
    assert_eq!(cache.gc(0, Duration::ZERO).unwrap().unwrap().remains_removed, 0, "a live writer keeps its files");

    // The waiter starts while the writer lives, and builds as soon as it is dead.
    let start = Instant::now();
    let outcome = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| build(&cache, 1));
        while notes.lock().unwrap().is_empty() {
            assert!(start.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(1));
        }
        writer.kill().unwrap();
        writer.wait().unwrap();
        waiter.join().unwrap()
    });
    assert_eq!(outcome, (content_of(1), Outcome::Built));

    let problems = cache.verify(&mut |_, _| {}).unwrap();
    assert_eq!(problems.iter().map(|problem| &problem.kind).collect::<Vec<_>>(), [&ProblemKind::Stray]);
    age(&problems[0].path, 100);
    assert_eq!(cache.gc(1 << 30, Duration::ZERO).unwrap().unwrap().remains_removed, 1);
    no_problems(&cache);
    assert_eq!(build(&cache, 1).1, Outcome::Cached);
}

#[test]
fn a_full_disk_is_named_and_leaves_the_cache_sound() {
    let folder = tempfile::tempdir().unwrap();
    // A limit on file size fails a write half way, as a full disk does, and needs no mount. 40 blocks of 512 or 1024 B.
    let mut shell = Command::new("sh");
    let inner = child(folder.path(), "full");
    shell.args(["-c", "trap '' XFSZ; ulimit -f 40; exec \"$0\" \"$@\""]).arg(inner.get_program());
    shell.args(inner.get_args()).env(CHILD, "full").env(CHILD_ROOT, folder.path());
    finish(shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let cache = Cache::open(folder.path()).unwrap();
    no_problems(&cache);
    assert_eq!(cache.stats().unwrap().temporary, 0, "what could not be finished is gone");
    assert_eq!(build(&cache, 1).1, Outcome::Built);
}

#[test]
fn a_read_only_cache_serves_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("cache");
    let cache = Cache::open(&root).unwrap();
    build(&cache, 1);
    build(&cache, 3);
    flip(&root.join(entry_name("", "program", &key_of(3))), 0);
    let folders =
        || walkdir::WalkDir::new(folder.path()).into_iter().flatten().filter(|item| item.file_type().is_dir());
    let mode =
        |mode| folders().for_each(|item| fs::set_permissions(item.path(), Permissions::from_mode(mode)).unwrap());
    // Permissions do not bind root. So as root, the child runs as another user, with a binary that this user can reach.
    let mut reader = child(&root, "read-only");
    if fs::metadata(folder.path()).unwrap().uid() == 0 {
        let binary = folder.path().join("tests");
        fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
        let inner = reader;
        reader = Command::new(binary);
        reader.args(inner.get_args()).env(CHILD, "read-only").env(CHILD_ROOT, &root).uid(65534).gid(65534);
        reader.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    mode(0o555);
    let reader = reader.spawn();
    let output = reader.map(Child::wait_with_output);
    mode(0o755);
    let output = output.unwrap().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("child did its work"), "{text}");
}
