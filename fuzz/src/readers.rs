//! Owns all readers of untrusted bytes, as functions of bytes. Fuzzers call them, and a replay in `cargo test` does, too. None
//! may panic, or take memory or time out of proportion to its input.

use std::cell::{OnceCell, RefCell};
use std::fs;
use std::path::{Path, PathBuf};

use monobloc::cache::Cache;
use monobloc::candidate::Candidate;
use monobloc::cuda::cubin;
use monobloc::digest::Digest;
use monobloc::dtype::{DType, Precision};
use monobloc::error::Fault;
use monobloc::flywheel::{Corpus, best, stats};
use monobloc::gguf::Header;
use monobloc::ir::parse::{Lines, parse_program};
use monobloc::lower::lower;
use monobloc::manifest::Manifest;
use monobloc::model::config::{Imported, graph_text, import, import_config_only};
use monobloc::model::graph::TensorId;
use monobloc::pipeline::read_stored;
use monobloc::schedule::schedule;
use monobloc::target::{Target, TargetRecord};
use monobloc::text::Style;
use monobloc::tokenizer::{Message, Tokenizer};
use monobloc::validate::{Violation, check, line_of, validate};
use monobloc::waves;
use monobloc::waves::parse::{Text, parse};

/// Reads bytes and drops the result.
pub type Reader = fn(&[u8]);

/// What can be fuzzed, by the name of its corpus.
pub const READERS: [(&str, Reader); 9] = [
    ("manifest", manifest),
    ("config", config),
    ("weights", weights),
    ("mkir", mkir),
    ("trials", trials),
    ("artefact", artefact),
    ("tokenizer", tokenizer),
    ("gguf", gguf),
    ("gguf-tokens", gguf_tokens),
];

pub fn reader(name: &str) -> Option<Reader> {
    READERS.iter().find(|(n, _)| *n == name).map(|(_, reader)| *reader)
}

/// Longest input; longer ones would only take more time.
const BYTES_MAX: usize = 1 << 16;

thread_local! {
    static FOLDER: RefCell<Option<tempfile::TempDir>> = const { RefCell::new(None) };
}

/// The stage of the entry that is overwritten.
const STAGE: &str = "fuzz";

/// A cache of this thread with one sound entry. It is stored once, because storing waits for a disk and only reading is tested.
fn with_entry(work: impl FnOnce(&Cache, &Digest, &Path)) {
    thread_local! {
        static CACHE: OnceCell<(Cache, PathBuf)> = const { OnceCell::new() };
    }
    let key = Digest::of(b"fuzz");
    in_folder(|folder| {
        CACHE.with(|cache| {
            let (cache, path) = cache.get_or_init(|| {
                let cache = Cache::open(folder.join("cache")).expect("a cache");
                cache.put(STAGE, &key, "why\n", b"content").expect("an entry");
                cache.set_latest(STAGE, "fuzz", &key).expect("a subject");
                let entry = cache.get(STAGE, &key).expect("the cache").expect("the entry");
                let path = entry.path().to_path_buf();
                (cache, path)
            });
            work(cache, &key, path);
        });
    });
}

/// A folder of this thread, in memory if the machine has such a file system.
fn in_folder(work: impl FnOnce(&Path)) {
    FOLDER.with_borrow_mut(|folder| {
        let memory = Path::new("/dev/shm");
        let make = || if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let folder = folder.get_or_insert_with(|| make().expect("a temporary folder"));
        work(folder.path());
    });
}

fn put(folder: &Path, name: &str, bytes: &[u8]) {
    fs::write(folder.join(name), bytes).expect("a file in the temporary folder");
}

fn told(fault: Fault) {
    assert!(!fault.message.is_empty());
}

/// A manifest, and the same text as a target record.
fn manifest(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Err(error) = Manifest::parse(text, Path::new("no-such-folder/fuzz.toml")) {
        told(error.into_fault(Style::Plain));
    }
    if let Err(rejection) = TargetRecord::parse(text, "fuzz.toml") {
        assert!(!rejection.render(Style::Plain).is_empty());
    }
}

/// A `config.json`. An accepted one must be placed and proven, or be refused with a reason.
fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match import_config_only(text, 0) {
        Err(error) => told(error.into()),
        Ok(imported) => {
            let graph = imported.graph;
            // The rest is linear in layers, positions and vocabulary, so small ones suffice.
            if graph.layers.len() > 8 || graph.vocab > 1 << 16 || graph.hidden > 1 << 13 {
                return;
            }
            assert!(!graph_text(&graph).is_empty());
            let target = Target::builtin("h200").expect("a record");
            let precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
            let candidate = Candidate::default_for(&graph, &target, precision);
            let context_max = graph.positions_max.min(64);
            let placed = lower(&graph, "fuzz", precision, context_max, &candidate)
                .and_then(|program| schedule(program, &target, &candidate));
            if let Ok(placed) = placed {
                let violations = check(&placed, &target);
                assert!(violations.is_empty(), "{}", violations[0]);
            }
        }
    }
}

/// A safetensors file or the index of a checkpoint in shards, beside a config of a Llama.
fn weights(data: &[u8]) {
    let Some((&kind, data)) = data.split_first() else { return };
    in_folder(|folder| {
        put(folder, "config.json", LLAMA.as_bytes());
        let (single, index) = ("model.safetensors", "model.safetensors.index.json");
        let (name, other) = if kind % 2 == 0 { (single, index) } else { (index, single) };
        let _ = fs::remove_file(folder.join(other));
        put(folder, name, data);
        if kind % 2 == 1 {
            put(folder, "a.safetensors", b"\x02\0\0\0\0\0\0\0{}");
        }
        if let Err(error) = import(folder) {
            told(error.into());
        }
    });
}

const LLAMA: &str = r#"{"architectures":["LlamaForCausalLM"],"hidden_size":16,"intermediate_size":16,
    "num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,"vocab_size":16}"#;

/// A GGUF file: its header, and a model of its metadata and tensors.
fn gguf(data: &[u8]) {
    let read = Header::parse("m.gguf", data, data.len() as u64);
    in_folder(|folder| {
        put(folder, "m.gguf", data);
        match import(&folder.join("m.gguf")) {
            Err(error) => told(error.into()),
            Ok(Imported { graph, weights, .. }) => {
                assert!(read.is_ok() && !graph_text(&graph).is_empty());
                // Every value of a small tensor is there.
                for (id, tensor) in
                    (0..).map(TensorId).zip(&graph.tensors).filter(|(_, tensor)| tensor.count() < 1 << 12)
                {
                    let mut row = vec![0.0; weights.cols(id)];
                    (0..weights.rows(id)).for_each(|at| weights.read_row_f32(id, at, &mut row));
                    assert_eq!(tensor.count(), u64::from(weights.rows(id)) * row.len() as u64);
                }
            }
        }
    });
}

/// The vocabulary of a GGUF file, and a short text through it.
fn gguf_tokens(data: &[u8]) {
    if data.len() > BYTES_MAX {
        return;
    }
    in_folder(|folder| {
        put(folder, "t.gguf", data);
        match Tokenizer::load(&folder.join("t.gguf")) {
            Err(error) => told(error.into()),
            Ok(tokenizer) => {
                let _ = tokenizer.encode("ab ba\u{1f600}<s>", true);
                let _ = tokenizer.decode(&[0, 1, 2, u32::MAX], false);
                let _ = tokenizer.apply_chat(&[Message::new("user", "a")], true);
            }
        }
    });
}

/// A schedule's text, and plans after it. If it parses, its printed form must parse to the same, and it must get a verdict.
fn mkir(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match parse(text) {
        Err(error) => {
            assert!(!error.render("fuzz.mkir", text, Style::Plain).is_empty());
            let _ = parse_program(text);
        }
        Ok(Text { schedule, lines, plans }) => {
            let printed = waves::print(&schedule, plans.iter().map(|(plan, _)| plan));
            let again = parse(&printed).unwrap_or_else(|e| panic!("{}", e.render("", &printed, Style::Plain)));
            // NaN differs from itself; its text does not.
            let stable = waves::print(&again.schedule, again.plans.iter().map(|(plan, _)| plan)) == printed;
            assert!(stable, "printing is not stable");
            let told = |violations: Vec<Violation>, lines: &Lines| {
                for violation in violations {
                    let span = line_of(violation.entity, violation.rule, lines);
                    assert!(text.get(span.start..span.end).is_some() && !violation.to_string().is_empty());
                }
            };
            for name in ["cpu", "h200"] {
                let target = Target::builtin(name).expect("a record");
                match validate(schedule.clone(), &target) {
                    Err(rejected) => told(rejected.violations, &lines),
                    Ok(validated) => {
                        let of_plans = waves::check(plans.iter().map(|(plan, _)| plan.clone()), &validated, &target);
                        of_plans.into_iter().zip(&plans).for_each(|(found, (_, lines))| told(found, lines));
                    }
                }
            }
        }
    }
}

/// A corpus of trials.
fn trials(data: &[u8]) {
    in_folder(|folder| {
        put(folder, "trials.csv", data);
        match Corpus::read(&[folder.join("trials.csv")]) {
            Err(error) => told(error.into()),
            Ok(corpus) => {
                let _ = (stats(&corpus.trials), best(&corpus.trials));
                for trial in &corpus.trials {
                    assert!(!trial.cells().is_empty());
                }
            }
        }
    });
}

/// A sound cubin, after a byte that chooses the reader.
const CUBIN: &[u8] = include_bytes!("../corpus/artefact/cubin");

/// The parts of an artefact: the file of an entry, a cubin and its log, a candidate's line, and the content of entries whose
/// seal is sound.
fn artefact(data: &[u8]) {
    let Some((&kind, data)) = data.split_first() else { return };
    match kind % 4 {
        0 => with_entry(|cache, key, path| {
            let root = cache.root();
            // Damaged files are set aside; they must not pile up from input to input.
            let (why, aside) = (path.with_extension("why"), root.join("corrupt"));
            for old in [path, &why] {
                let _ = fs::remove_file(old);
            }
            fs::write(path, data).expect("the entry's file");
            fs::write(&why, data).expect("its why");
            if let Ok(Some(entry)) = cache.get(STAGE, key) {
                let _ = entry.bytes();
            }
            let _ = (cache.why(STAGE, key), cache.latest_why(STAGE, "fuzz"));
            let _ = fs::remove_dir_all(aside);
        }),
        1 => {
            let _ = (cubin::read(data, ""), cubin::tool_note(data));
            // A log is read once the cubin is sound.
            if let (Ok(log), Some((_, cubin))) = (std::str::from_utf8(data), CUBIN.split_first()) {
                let _ = cubin::read(cubin, log);
            }
        }
        3 => {
            let Some((&stage, content)) = data.split_first() else { return };
            let stages = ["source", "compile", "check", "measure", "expect", "link"];
            let _ = read_stored(stages[usize::from(stage) % stages.len()], content);
        }
        _ => {
            let Ok(text) = std::str::from_utf8(data) else { return };
            let base =
                Candidate { sms: 1, consumer_warps: 8, ring_slots: 4, slot_bytes: 16_384, ..Candidate::of_first(64) };
            let Ok(candidate) = Candidate::parse(text, &base) else { return };
            assert_eq!(Candidate::parse(&candidate.to_string(), &base), Ok(candidate.clone()));
            // Any numbers give a schedule or a reason.
            let graph = import_config_only(LLAMA, 0).expect("a model").graph;
            let target = Target::builtin("h200").expect("a record");
            let precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
            let placed = lower(&graph, "fuzz", precision, 64, &candidate)
                .and_then(|program| schedule(program, &target, &candidate));
            if let Ok(placed) = placed {
                let _ = check(&placed, &target);
            }
        }
    }
}

/// `tokenizer.json`, `tokenizer_config.json` or a chat template, and a short text through the result.
fn tokenizer(data: &[u8]) {
    let Some((&kind, data)) = data.split_first() else { return };
    if data.len() > BYTES_MAX {
        return;
    }
    in_folder(|folder| {
        let (tokens, settings, template) = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja");
        put(folder, tokens, TOKENS.as_bytes());
        for name in [settings, template] {
            let _ = fs::remove_file(folder.join(name));
        }
        put(folder, [tokens, settings, template][usize::from(kind % 3)], data);
        match Tokenizer::load(folder) {
            Err(error) => told(error.into()),
            Ok(tokenizer) => {
                let _ = tokenizer.check_vocab(16);
                let _ = tokenizer.encode("ab ba\u{1f600}", true);
                let _ = tokenizer.decode(&[0, 1, 2, u32::MAX], false);
                let mut stream = tokenizer.stream(monobloc::tokenizer::Specials::Hidden);
                for id in 0..4 {
                    let _ = stream.push(id);
                }
                let _ = stream.finish();
                let said = [Message::new("system", "be"), Message::new("user", "a")];
                let _ = tokenizer.apply_chat(&said, true);
            }
        }
    });
}

const TOKENS: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
    "pre_tokenizer":null,"post_processor":null,"decoder":null,"model":{"type":"BPE","dropout":null,"unk_token":null,
    "continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,
    "vocab":{"a":0,"b":1," ":2,"ab":3},"merges":["a b"]}}"#;
