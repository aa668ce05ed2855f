//! Tests the library as a C program uses it: the header, an example that is compiled with `cc`, and the errors of wrong calls.

use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use monobloc::cache::Cache;
use monobloc::manifest::Manifest;
use monobloc::pipeline::{AskedSizes, Checking, Serving, Workspace, export};
use monobloc::report::Report;
use monobloc_c::*;

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_header_is_that_of_the_code() {
    let config = cbindgen::Config::from_file(here().join("cbindgen.toml")).expect("a config");
    let bindings = cbindgen::Builder::new().with_config(config).with_src(here().join("src/lib.rs")).generate();
    let mut written = vec![];
    bindings.expect("bindings").write(&mut written);
    let path = here().join("include/monobloc.h");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, &written).expect("written");
    }
    let found = fs::read(&path).unwrap_or_default();
    assert!(found == written, "`BLESS=1 cargo test -p monobloc-c` rewrites include/monobloc.h");
}

/// An export of the small trained model below `folder`.
fn exported(folder: &Path) -> PathBuf {
    exported_for(folder, 1)
}

/// The same for this number of devices, which run the model together.
fn exported_for(folder: &Path, devices: u32) -> PathBuf {
    let model = here().join("../../tests/fixtures/tinystories-llama");
    let text = format!(
        "[model]\nsource = \"path:{}\"\n[precision]\nweights = \"fp32\"\n[decode]\ncontext_max = 256\n\
         [[target]]\nrecord = \"cpu\"\ndevices = {devices}\n",
        model.display()
    );
    let manifest = Manifest::parse(&text, &folder.join("tiny.toml")).unwrap_or_else(|error| panic!("{error}"));
    let workspace = Workspace {
        cache: Cache::open(folder.join("cache")).expect("a cache"),
        report: Report::quiet(),
        trials: folder.join("trials.csv"),
    };
    let asked = AskedSizes::default();
    let serving = Serving { asked, running_max: 8, chunk_rows: 8, steps_max: 1, proposed: 0, cache_tokens: None };
    let out = folder.join("export");
    export(&workspace, &manifest, &out, &serving, Checking::Required, &|| false)
        .unwrap_or_else(|fault| panic!("{fault}"));
    out
}

/// The folder into which cargo puts the shared library: that of this test, or the one above.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("this program");
    let folders = test.ancestors().skip(1).take(2);
    let name = if cfg!(target_os = "macos") { "libmonobloc_c.dylib" } else { "libmonobloc_c.so" };
    folders.map(Path::to_path_buf).find(|folder| folder.join(name).exists()).expect("the shared library")
}

#[test]
fn the_example_continues_a_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let (program, library) = (folder.path().join("greedy"), library_folder());
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"])
        .arg(here().join("examples/greedy.c"))
        .arg("-I")
        .arg(here().join("include"))
        .arg("-L")
        .arg(&library)
        .args(["-lmonobloc_c", "-o"])
        .arg(&program)
        .output()
        .expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));

    let goldens = fs::read(here().join("../../tests/fixtures/tinystories-llama/goldens.json")).expect("goldens");
    let goldens: serde_json::Value = serde_json::from_slice(&goldens).expect("JSON");
    let ids = |key: &str| -> Vec<String> {
        goldens["prompts"][0][key].as_array().expect(key).iter().map(ToString::to_string).collect()
    };
    let run = |place: &Path| {
        let mut command = Command::new(&program);
        command.arg(place).arg("24").args(ids("ids"));
        command.env("LD_LIBRARY_PATH", &library).env("DYLD_LIBRARY_PATH", &library);
        command.env("CACHE", folder.path().join("cache")).output().expect("it runs")
    };
    let output = run(&exported(folder.path()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stdout).expect("text");
    assert_eq!(said.lines().collect::<Vec<_>>(), ids("greedy_ids")[..24]);

    let output = run(Path::new("nowhere.toml"));
    assert_eq!(output.status.code(), Some(monobloc_status::Input as i32));
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(said.starts_with("open: no such manifest: `nowhere.toml`\n  help: "), "{said}");
}

/// The message of a call that was refused.
#[track_caller]
fn refused(status: monobloc_status) -> String {
    assert_eq!(status, monobloc_status::Input);
    // SAFETY: a string of this thread.
    unsafe { CStr::from_ptr(monobloc_last_error()) }.to_str().expect("text").to_string()
}

#[track_caller]
fn done(status: monobloc_status) {
    // SAFETY: a string of this thread.
    assert_eq!(status, monobloc_status::Ok, "{:?}", unsafe { CStr::from_ptr(monobloc_last_error()) });
}

/// A model of C that is closed at the end.
struct Opened(*mut monobloc_model);

impl Opened {
    fn of(place: &Path) -> Opened {
        let place = CString::new(place.display().to_string()).expect("no zero");
        let mut model = ptr::null_mut();
        // SAFETY: a string, no options, and room for the model.
        done(unsafe { monobloc_open(place.as_ptr(), ptr::null(), &mut model) });
        Opened(model)
    }

    fn vocab(&self) -> usize {
        // SAFETY: it is open.
        unsafe { monobloc_vocab(self.0) as usize }
    }

    fn sequence(&self) -> u64 {
        let mut sequence = 0;
        // SAFETY: it is open, and there is room.
        done(unsafe { monobloc_sequence_open(self.0, &mut sequence) });
        sequence
    }

    /// The next tokens of sequences with the logits after the last token of each, or why the step is refused.
    fn step(&self, parts: &[(u64, &[u32])]) -> Result<Vec<Vec<f32>>, String> {
        let row = |&(sequence, tokens): &(u64, &[u32])| {
            let logits = monobloc_logits_of::Last as u32;
            monobloc_row { sequence, tokens: tokens.as_ptr(), count: tokens.len(), logits }
        };
        let rows: Vec<monobloc_row> = parts.iter().map(row).collect();
        let mut logits = vec![0f32; rows.len() * self.vocab()];
        // SAFETY: rows with their tokens, and room for the logits.
        let status = unsafe { monobloc_step(self.0, rows.as_ptr(), rows.len(), logits.as_mut_ptr(), logits.len()) };
        match status {
            monobloc_status::Ok => Ok(logits.chunks(self.vocab()).map(<[f32]>::to_vec).collect()),
            status => Err(refused(status)),
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: it came from `monobloc_open`, and nothing uses it any more.
        unsafe { monobloc_close(self.0) };
    }
}

#[test]
fn sequences_fork_go_back_and_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = Opened::of(&exported(folder.path()));
    let tokens: Vec<u32> = (0..37).map(|i| 2 + i * 13 % 400).collect();
    let (one, mut logits) = (model.sequence(), vec![0f32; model.vocab()]);
    // SAFETY: the model is open in all of these calls, and every pointer has what the function expects.
    unsafe {
        done(monobloc_prefill(model.0, one, tokens.as_ptr(), 36, logits.as_mut_ptr(), logits.len()));
        let mut all = vec![0f32; 37 * model.vocab()];
        done(monobloc_logits(model.0, tokens.as_ptr(), 37, all.as_mut_ptr(), all.len()));
        assert_eq!(logits, all[35 * model.vocab()..36 * model.vocab()]);
        let mut fork = 0;
        done(monobloc_sequence_fork(model.0, one, &mut fork));
        done(monobloc_sequence_truncate(model.0, one, 20));
        // The fork has the tokens of the sequence, which then continues differently.
        let both = model.step(&[(one, &tokens[20..21]), (fork, &tokens[36..])]).expect("a step");
        assert_eq!(both[0], all[20 * model.vocab()..21 * model.vocab()]);
        assert_eq!(both[1], all[36 * model.vocab()..]);
        let mut length = 0;
        done(monobloc_sequence_length(model.0, one, &mut length));
        assert_eq!(length, 21);
        done(monobloc_sequence_free(model.0, one));
        done(monobloc_sequence_free(model.0, one));
        let said = model.step(&[(one, &[5])]).expect_err("it was freed");
        assert!(said.contains(&format!("sequence {one} is not open")), "{said}");
    }
}

#[test]
fn two_devices_give_the_bits_of_one() {
    let tokens: Vec<u32> = (0..20).map(|i| 2 + i * 13 % 400).collect();
    let bits = [1, 2].map(|devices| {
        let folder = tempfile::tempdir().expect("a folder");
        let model = Opened::of(&exported_for(folder.path(), devices));
        let (one, mut all) = (model.sequence(), vec![0f32; tokens.len() * model.vocab()]);
        // SAFETY: the model is open, and every pointer has what the function expects.
        unsafe { done(monobloc_logits(model.0, tokens.as_ptr(), tokens.len(), all.as_mut_ptr(), all.len())) };
        (all, model.step(&[(one, &tokens[..7])]).expect("a step"))
    });
    assert!(!bits[0].0.is_empty() && bits[0] == bits[1]);
}

#[test]
fn wrong_calls_are_refused_and_the_model_goes_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let export = exported(folder.path());
    let place = CString::new(export.display().to_string()).expect("no zero");
    let mut model = ptr::null_mut();
    let short = monobloc_options {
        size: 4,
        target: ptr::null(),
        cache: ptr::null(),
        sequences_max: 0,
        chunk_max: 0,
        cache_tokens: 0,
        unchecked: 0,
    };
    let sized = monobloc_options { size: size_of::<monobloc_options>(), ..short };
    // SAFETY: every pointer is NULL where that is allowed, or has what the function expects.
    unsafe {
        assert!(refused(monobloc_open(ptr::null(), ptr::null(), &mut model)).contains("`place` is NULL"));
        assert!(refused(monobloc_open(place.as_ptr(), ptr::null(), ptr::null_mut())).contains("`model` is NULL"));
        assert!(refused(monobloc_open(place.as_ptr(), &short, &mut model)).contains("`size` of the options is 4"));
        let options = monobloc_options { target: c"h200".as_ptr(), ..sized };
        assert!(refused(monobloc_open(place.as_ptr(), &options, &mut model)).contains("has no target `h200`"));
        let options = monobloc_options { sequences_max: 1000, ..sized };
        let said = refused(monobloc_open(place.as_ptr(), &options, &mut model));
        assert!(said.contains("`sequences_max` is 1000, expected 1 to 256"), "{said}");
        assert!(model.is_null());
        assert!(refused(monobloc_step(ptr::null(), ptr::null(), 0, ptr::null_mut(), 0)).contains("`model` is NULL"));
        assert_eq!((monobloc_vocab(ptr::null()), monobloc_context_max(ptr::null())), (0, 0));
        monobloc_close(ptr::null_mut());

        let model = Opened::of(&export);
        assert_eq!((monobloc_context_max(model.0), monobloc_rows_max(model.0)), (256, 16));
        assert_eq!(monobloc_sequences_max(model.0), 8);
        assert!(monobloc_is_eos(model.0, 1) && !monobloc_is_eos(model.0, 5));
        let (one, other) = (model.sequence(), model.sequence());
        let vocab = model.vocab() as u32;
        let out_of_vocab = [vocab];
        for (parts, expected) in [
            (&[][..], "a step has 1 to 16 tokens, found 0"),
            (&[(one, &[1; 17][..])], "a step has 1 to 16 tokens, found 17"),
            (&[(one, &[1]), (other, &[])], "part 1 of the step: expected a token or more, found none"),
            (&[(one, &[1]), (one, &[2])], "part 1 of the step: its sequence has a part before"),
            (&[(one, &out_of_vocab)], "is not below the vocabulary"),
            (&[(one, &[1]), (u64::MAX, &[1])], "is not open"),
        ] {
            let said = model.step(parts).expect_err(expected);
            assert!(said.contains(expected), "{said}");
        }
        let row = monobloc_row { sequence: one, tokens: ptr::null(), count: 1, logits: 0 };
        assert!(refused(monobloc_step(model.0, &row, 1, ptr::null_mut(), 0)).contains("`tokens` is NULL"));
        let row = monobloc_row { tokens: &vocab, logits: 3, ..row };
        assert!(refused(monobloc_step(model.0, &row, 1, ptr::null_mut(), 0)).contains("`logits` of a row is 3"));
        let row = monobloc_row { logits: 1, ..row };
        let said = refused(monobloc_step(model.0, &row, 1, ptr::null_mut(), 7));
        assert!(said.contains(&format!("expected room for {vocab} logits, found 7")), "{said}");
        let long = [1; 257];
        let said = refused(monobloc_prefill(model.0, one, long.as_ptr(), 257, ptr::null_mut(), 0));
        assert!(said.contains("0 tokens and 257 more are beyond the context of 256"), "{said}");
        // No refused call changed a sequence.
        assert_eq!(model.step(&[(one, &[5])]), model.step(&[(other, &[5])]));
    }
}
