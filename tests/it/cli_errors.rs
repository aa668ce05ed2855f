//! Tests bad input and failing machines end to end: each fault is reported with its place, and nothing is lost.

use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use safetensors::{SafeTensors, serialize};

use crate::cli_support::{Answer, Place, manifest_text};
use crate::skipped;
use crate::support::fixture;

const SMALL: &str = "families/llama-gqa";

/// Output of building a manifest of the small model, after one change of its text.
fn build_with(from: &str, to: &str) -> Answer {
    let place = Place::new();
    let text = manifest_text(&format!("path:{}", fixture(SMALL).display()), 32);
    assert!(text.contains(from), "{from}");
    place.write("m.toml", text.replace(from, to));
    let answer = place.run("build m.toml");
    assert!(!place.path("flywheel/trials.csv").exists(), "nothing was tried");
    answer
}

#[test]
fn a_typing_slip_in_a_manifest_has_a_caret() {
    let slip = build_with("context_max", "contxt_max").refused(&["unknown key `contxt_max`", "context_max"]);
    assert!(slip.stderr.contains("--> m.toml:6:1") && slip.stderr.contains("^^^^^^^^^^"), "{slip:#?}");
    build_with("[decode]", "[decode").refused(&["--> m.toml:5:"]);
    build_with("record = \"cpu\"", "record = \"cpuu\"").refused(&["unknown target `cpuu`", "cpu"]);
    build_with("record = \"cpu\"", "record = \"./none.toml\"").refused(&["./none.toml"]);
    build_with("weights = \"fp32\"", "weights = \"fp31\"").refused(&["--> m.toml:4:", "fp32"]);
    build_with("source = \"path:", "source = \"pth:").refused(&["--> m.toml:2:"]);
    build_with("source = \"path:", "source = \"path:none").refused(&["no such file or folder"]);
}

#[test]
fn impossible_sizes_are_refused() {
    build_with("context_max = 32", "context_max = 0").refused(&["--> m.toml:6:", "context_max"]);
    build_with("context_max = 32", "context_max = 99999999999").refused(&["--> m.toml:6:"]);
    build_with("steps_per_launch = 2", "steps_per_launch = 64").refused(&["--> m.toml:7:"]);
    build_with("trials = 0", "trials = 0\nminutes = 0").refused(&["minutes", "above 0"]);
    build_with("trials = 0", "trials = -1").refused(&["trials"]);
}

#[test]
fn arguments_are_checked() {
    let place = Place::new();
    place.manifest(&fixture(SMALL), 32);
    place.run("").code(2);
    place.run("biuld m.toml").refused(&["biuld", "build"]);
    place.run("build").refused(&["MANIFEST"]);
    place.run("build none.toml").refused(&["none.toml"]);
    place.run("build m.toml --target cpuu").refused(&["no target `cpuu`", "did you mean `cpu`?"]);
    place.run("build m.toml --target h200").refused(&["no target `h200`", "[[target]]"]);
    place.run("generate m.toml").refused(&["--prompt", "--chat", "--ids"]);
    place.run("generate m.toml --ids 1 --prompt a").refused(&["cannot be used with"]);
    place.run("generate m.toml --ids 1,x").refused(&["found `x`"]);
    place.run("generate m.toml --ids 1,320").refused(&["found 320 at index 1"]);
    place.run("generate m.toml --ids 1 --temperature -1").refused(&["temperature"]);
    place.run("generate m.toml --ids 1 --top-k 0").refused(&["top-k"]);
    place.run("generate m.toml --ids 1 --top-p 1.5").refused(&["top-p"]);
    place.run("generate m.toml --ids 1 --min-p 1.5").refused(&["min-p"]);
    place.run("generate m.toml --ids 1 --repetition-penalty 0").refused(&["repetition-penalty", "above 0"]);
    place.run("generate m.toml --ids 1 --presence-penalty -3").refused(&["presence-penalty", "-2 to 2"]);
    place.run("generate m.toml --ids 1 --logit-bias 5").refused(&["`42=-1.5`"]);
    place.run("generate m.toml --ids 1 --logit-bias 5=1 --logit-bias 5=2").refused(&["twice for id 5"]);
    place.run("generate m.toml --ids 1 --logit-bias 320=1").refused(&["below 320", "found 320"]);
    place.run("generate m.toml --ids 1 --min-tokens 9 --max-tokens 8").refused(&["`--min-tokens`", "found 9"]);
    place.run("generate m.toml --ids 1 --logprobs 2").refused(&["--json"]);
    place.run("generate m.toml --prompt Hello").refused(&["tokenizer.json", "--ids"]);
    place.run("logits m.toml --ids 1 --out none/l.safetensors").fault(3, &["none/l.safetensors"]);
    place.run("import none --dry-run").refused(&["`none`"]);
    place.run("import m.toml").refused(&["`m.toml` is a manifest", "monobloc build m.toml"]);
    place.run("cache stats --cache none").refused(&["no cache at `none`"]);
    assert!(!place.path("none").exists());
    place.run("cache gc --max-size 10X").refused(&["10G"]);
    place.run("targets none").refused(&["unknown target `none`"]);
    place.run("perplexity m.toml none.txt").refused(&["none.txt"]);
}

/// The error of a command with `--json`: the last line of stderr, and the only one that is an object.
#[track_caller]
fn error_json(answer: &Answer) -> serde_json::Value {
    let objects: Vec<&str> = answer.stderr.lines().filter(|line| line.starts_with('{')).collect();
    assert!(objects.len() == 1 && answer.stderr.ends_with(&format!("{}\n", objects[0])), "{answer:#?}");
    assert!(answer.stderr.lines().all(|line| !line.starts_with("error: ")), "{answer:#?}");
    let error: serde_json::Value = serde_json::from_str(objects[0]).unwrap();
    assert_eq!(error.as_object().map(serde_json::Map::len), Some(3), "{error}");
    assert_eq!(error["code"], answer.code, "{error}");
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
    error
}

/// Names of commands in a `--help`.
fn commands_of(help: &str) -> Vec<&str> {
    let lines = help.lines().filter_map(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with([' ', '-']));
    let named = lines.take_while(|line| !line.starts_with("0 ")).filter_map(|line| line.split_once("  "));
    named.map(|(name, _)| name).filter(|name| *name != "help").collect()
}

#[test]
fn with_json_an_error_is_json() {
    let place = Place::new();
    place.manifest(&fixture(SMALL), 32);
    place.write("story.txt", "Once upon a time");
    place.write("typo.toml", "[model]\nsorce = \"builtin:tinystories\"\n");
    for line in [
        "init nowhere",
        "build nowhere.toml",
        "clean nowhere.toml",
        "generate nowhere.toml --ids 1",
        "perplexity nowhere.toml story.txt",
        "logits nowhere.toml --ids 1 --out logits.safetensors",
        "compare nowhere.toml --goldens goldens.safetensors",
        "export nowhere.toml --out nowhere.export",
        "bench nowhere.toml",
        "trace nowhere.toml",
        "calibrate nowhere",
        "validate nowhere.mkir",
        "show model nowhere.toml",
        "explain nowhere.toml",
        "plan nowhere.toml",
        "import nowhere",
        "targets nowhere",
        "tune nowhere.toml",
        "tune-op nowhere.toml qkv",
        "status nowhere.toml",
        "next nowhere.toml",
        "report nowhere.toml",
    ] {
        let error = error_json(&place.run(&format!("{line} --json")).code(2));
        assert!(error["message"].as_str().is_some_and(|message| message.contains("nowhere")), "{line}: {error}");
    }
    for line in ["generate m.toml --ids 99999 --jsonl", "generate m.toml --ids 99999 --json --color always"] {
        let error = error_json(&place.run(line).code(2));
        assert!(error["message"].as_str().is_some_and(|message| message.contains("99999")), "{error}");
    }
    let error = error_json(&place.run("flywheel merge nowhere.csv --json").code(3));
    assert!(error["remedy"].as_str().is_some_and(|remedy| remedy.contains("check that the path")), "{error}");
    let typo = error_json(&place.run("build typo.toml --json --color always").code(2));
    let message = typo["message"].as_str().unwrap();
    assert!(message.contains("typo.toml:2:1") && message.contains("did you mean `source`?"), "{message}");
    assert!(!message.contains('\u{1b}'), "{message:?}");
    // Without the option it stays text.
    place.run("build typo.toml").refused(&["did you mean `source`?"]);
}

#[test]
fn with_json_an_unknown_option_is_json_too() {
    let place = Place::new();
    let all = place.run("--help").code(0).stdout;
    let mut checked = vec![];
    for name in commands_of(&all) {
        let help = place.run(&format!("{name} --help")).code(0).stdout;
        let inner: Vec<String> = match name {
            "cache" | "flywheel" => commands_of(&help).iter().map(|inner| format!("{name} {inner}")).collect(),
            _ => vec![name.to_string()],
        };
        for name in inner {
            if !place.run(&format!("{name} --help")).code(0).stdout.contains("--json") {
                continue;
            }
            let error = error_json(&place.run(&format!("{name} --json --nonsense")).code(2));
            assert_eq!(error["message"], "unexpected argument '--nonsense' found", "{name}");
            assert!(error["remedy"].is_string(), "{name}: {error}");
            checked.push(name);
        }
    }
    let has = |name: &str| checked.iter().any(|checked| checked == name);
    assert!(checked.len() > 30 && has("init") && has("flywheel merge") && has("cache pull"), "{checked:?}");
    assert_eq!(
        error_json(&place.run("build --json").code(2))["remedy"].as_str().and_then(|usage| usage.split(' ').next()),
        Some("Usage:")
    );
    place.run("build --nonsense").refused(&["unexpected argument"]);
}

/// Output of building and of importing a damaged copy of the small model; both must refuse it.
fn damaged(expected: &[&str], damage: impl FnOnce(&Path)) {
    let place = Place::new();
    let checkpoint = place.checkpoint(SMALL);
    damage(&checkpoint);
    place.manifest(&checkpoint, 32);
    place.run("build m.toml").refused(expected);
    let import = place.run("import checkpoint --dry-run").code(2);
    expected.iter().for_each(|words| assert!(import.stdout.contains(words), "expected `{words}` in {import:#?}"));
    let json = place.run("import checkpoint --dry-run --json").code(2).json();
    assert!(json["reasons"].as_array().is_some_and(|reasons| !reasons.is_empty()), "{json}");
}

/// Writes the small model's tensors again, changed.
fn rewrite(checkpoint: &Path, change: impl FnOnce(&mut Vec<(String, Dtype, Vec<usize>, Vec<u8>)>)) {
    let path = checkpoint.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> =
        file.iter().map(|(name, t)| (name.to_string(), t.dtype(), t.shape().to_vec(), t.data().to_vec())).collect();
    change(&mut tensors);
    let views =
        tensors.iter().map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    serialize_to_file(views, None, &path).unwrap();
}

#[test]
fn a_damaged_checkpoint_is_refused_with_every_reason() {
    damaged(&["model.safetensors"], |checkpoint| {
        let path = checkpoint.join("model.safetensors");
        let whole = fs::metadata(&path).unwrap().len();
        OpenOptions::new().write(true).open(path).unwrap().set_len(whole - 100).unwrap();
    });
    damaged(&["model.safetensors"], |checkpoint| fs::remove_file(checkpoint.join("model.safetensors")).unwrap());
    damaged(&["`model.extra.weight`", "`model.norm.weight`"], |checkpoint| {
        rewrite(checkpoint, |tensors| {
            tensors.push(("model.extra.weight".to_string(), Dtype::F32, vec![1], vec![0; 4]));
            tensors.retain(|(name, ..)| name != "model.norm.weight");
        });
    });
    damaged(&["`model.norm.weight`", "shape"], |checkpoint| {
        rewrite(checkpoint, |tensors| {
            let norm = tensors.iter_mut().find(|(name, ..)| name == "model.norm.weight").unwrap();
            let count = norm.2[0];
            norm.2 = vec![count / 2, 2];
        });
    });
    damaged(&["`model.norm.weight`", "found"], |checkpoint| {
        rewrite(checkpoint, |tensors| {
            let norm = tensors.iter_mut().find(|(name, ..)| name == "model.norm.weight").unwrap();
            let count = norm.2[0];
            (norm.1, norm.3) = (Dtype::I8, vec![0; count]);
        });
    });
    damaged(&["model-00002-of-00002.safetensors"], |checkpoint| {
        let shard = "model-00001-of-00002.safetensors";
        fs::rename(checkpoint.join("model.safetensors"), checkpoint.join(shard)).unwrap();
        let bytes = fs::read(checkpoint.join(shard)).unwrap();
        let names: Vec<String> =
            SafeTensors::deserialize(&bytes).unwrap().names().into_iter().map(str::to_string).collect();
        let mut map: serde_json::Map<_, _> =
            names.into_iter().map(|name| (name, serde_json::Value::from(shard))).collect();
        map.insert("model.layers.9.weight".to_string(), "model-00002-of-00002.safetensors".into());
        let index = serde_json::json!({ "metadata": {}, "weight_map": map });
        fs::write(checkpoint.join("model.safetensors.index.json"), index.to_string()).unwrap();
    });
    damaged(&["model.safetensors"], |checkpoint| {
        // Offsets that overlap: legal JSON, two tensors of the same bytes.
        let data = [0u8; 8];
        let view = TensorView::new(Dtype::F32, vec![2], &data).unwrap();
        let mut bytes = serialize([("a", &view), ("b", &view)], None).unwrap();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let at = text.find("[8,16]").unwrap();
        bytes[at..at + 6].copy_from_slice(b"[4,12]");
        fs::write(checkpoint.join("model.safetensors"), bytes).unwrap();
    });
}

#[test]
fn an_unknown_config_is_refused_by_key() {
    let config = |from: &'static str, to: &'static str| {
        move |checkpoint: &Path| {
            let path = checkpoint.join("config.json");
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(from));
            fs::write(path, text.replace(from, to)).unwrap();
        }
    };
    damaged(&["key `hidden_sizes`", "hidden_size"], config("\"hidden_size\"", "\"hidden_sizes\": 1, \"hidden_size\""));
    damaged(&["key `hidden_act`", "\"swish2\""], config("\"silu\"", "\"swish2\""));
    damaged(&["NovelForCausalLM"], config("LlamaForCausalLM", "NovelForCausalLM"));

    let place = Place::new();
    let checkpoint = place.checkpoint(SMALL);
    fs::write(checkpoint.join("config.json"), "{").unwrap();
    place.manifest(&checkpoint, 32);
    place.run("build m.toml").refused(&["config.json"]);
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let place = Place::new();
    let checkpoint = place.checkpoint(SMALL);
    fs::copy(fixture("tinystories-llama/tokenizer.json"), checkpoint.join("tokenizer.json")).unwrap();
    place.manifest(&checkpoint, 32);
    place.run("generate m.toml --prompt Hello").refused(&["belongs to another model", "below 320"]);
    place.run("generate m.toml --ids 1,2 --max-tokens 1").code(0);
    fs::write(checkpoint.join("tokenizer.json"), "{\"model\": 1}").unwrap();
    place.run("generate m.toml --prompt Hello").refused(&["not a usable tokenizer"]);
}

#[test]
fn a_prompt_that_does_not_fit_is_refused() {
    let place = Place::new();
    place.manifest(&fixture("tinystories-llama"), 16);
    let long = "Once upon a time there was a dog. ".repeat(20);
    let mut command = place.command("generate m.toml --prompt");
    Answer::of(command.arg(&long)).refused(&["at most 16 tokens", "context_max"]);
    Answer::of(place.command("generate m.toml --raw --prompt").arg("")).refused(&["no tokens"]);
}

#[test]
fn a_schedule_from_a_file_is_proven_and_never_trusted() {
    let place = Place::new();
    place.write("a.mkir", "mkir 2\nprogram \"x\" context_max=64 weights=bf16 cache=bf16 wire=fp33\n");
    place.run("validate a.mkir").refused(&["--> a.mkir:2:", "^"]);
    place.write("b.mkir", [0xff, 0xfe, 0x00]);
    place.run("validate b.mkir").refused(&["UTF-8"]);
    place.run("validate none.mkir").refused(&["none.mkir"]);
    let proven = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests/validate/proven-tiny.mkir");
    let text = fs::read_to_string(proven).unwrap();
    place.write("c.mkir", text.replace("\"cpu\"", "\"mine\"").replace("target=cpu", "target=mine"));
    let other = place.run("validate c.mkir").refused(&["`mine`", "--target"]);
    assert!(other.stderr.contains("--> c.mkir:"), "{other:#?}");
    place.run("validate c.mkir --target cpu").code(1);
}

/// A place with one row of trials.
fn tried() -> (Place, PathBuf, String) {
    let place = Place::new();
    place.manifest(&fixture(SMALL), 32);
    place.run("build m.toml").code(0);
    let path = place.path("flywheel/trials.csv");
    let text = fs::read_to_string(&path).unwrap();
    (place, path, text)
}

#[test]
fn trials_that_were_edited_cut_or_are_newer_are_named_and_kept() {
    let (place, path, text) = tried();
    let (header, row) = text.split_once('\n').unwrap();
    let cells = |column: &str| header.split(',').position(|name| name == column).unwrap();
    let with = |column: &str, value: &str| {
        let mut cells_of: Vec<&str> = row.trim_end().split(',').collect();
        let at = cells(column);
        assert!(!row.contains('"'), "cells are plain, so that this test may divide at commas: {row}");
        cells_of[at] = value;
        cells_of.join(",")
    };
    for (damage, reason) in [
        (with("verdict", "good"), "verdict"),
        (with("schema", "999"), "schema"),
        (row.trim_end()[..row.len() / 2].to_string(), "line"),
        (with("layers", "two"), "layers"),
    ] {
        let damaged = format!("{header}\n{damage}\n{}\n", row.trim_end());
        fs::write(&path, &damaged).unwrap();
        let stats = place.run("flywheel stats").code(0);
        assert!(stats.stderr.contains("flywheel/trials.csv:2: "), "{reason}: {stats:#?}");
        assert_eq!(place.run("flywheel stats --json").code(0).json()["rows"], 1, "the sound row counts");
        place.run("build m.toml").code(0);
        assert!(fs::read_to_string(&path).unwrap().starts_with(&damaged), "{reason}: nothing is rewritten");
    }
    fs::write(&path, "this is,no corpus\n1,2\n").unwrap();
    place.run("build m.toml --cache other").refused(&["flywheel/trials.csv"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), "this is,no corpus\n1,2\n");
}

/// A hub that answers every request with this status.
fn hub(status: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut request = Vec::new();
            let mut buffer = [0; 1024];
            while !request.windows(4).any(|four| four == b"\r\n\r\n") {
                match stream.read(&mut buffer) {
                    Ok(0) | Err(_) => break,
                    Ok(n) => request.extend_from_slice(&buffer[..n]),
                }
            }
            let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        }
    });
    endpoint
}

#[test]
fn a_hub_that_refuses_or_is_not_there_is_named() {
    let place = Place::new();
    place.write("m.toml", manifest_text("hf:someone/something", 32));
    let ask = |endpoint: &str| Answer::of(place.command("build m.toml").env("HF_ENDPOINT", endpoint));
    ask(&hub("404 Not Found")).refused(&["not found on the hub", "someone/something"]);
    ask(&hub("401 Unauthorized")).fault(3, &["access to `someone/something` was refused (status 401)", "HF_TOKEN"]);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    ask(&format!("http://{closed}")).fault(3, &["cannot be reached", &closed.to_string()]);
    let mut offline = place.command("build m.toml");
    Answer::of(offline.env("HF_HUB_OFFLINE", "1")).fault(3, &["HF_HUB_OFFLINE", "someone/something"]);
}

#[test]
fn processes_build_into_one_cache_at_once() {
    let place = Place::new();
    let manifest = |name: &str, fixture_name: &str, context_max| {
        place.write(name, manifest_text(&format!("path:{}", fixture(fixture_name).display()), context_max));
    };
    manifest("a.toml", SMALL, 32);
    manifest("b.toml", SMALL, 48);
    manifest("c.toml", "families/llama-bias", 32);
    let children: Vec<_> = ["a.toml", "a.toml", "b.toml", "c.toml"]
        .iter()
        .map(|name| {
            let mut command = place.process(&format!("build {name}"));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    for name in ["a.toml", "b.toml", "c.toml"] {
        let again = place.run(&format!("build {name}")).code(0);
        assert!(again.stderr.lines().last().unwrap().starts_with("no work to do"), "{again:#?}");
    }
    place.run("cache verify").code(0);
    let stats = place.run("flywheel stats --json").code(0).json();
    assert_eq!((stats["rows"].as_u64(), &stats["broken"]), (Some(3), &serde_json::json!([])), "each trial once");
}

#[test]
fn a_flipped_byte_is_found_set_aside_and_built_again() {
    let place = Place::new();
    place.manifest(&fixture(SMALL), 32);
    place.run("build m.toml").code(0);
    let mut entries: Vec<PathBuf> = walkdir::WalkDir::new(place.path("cache"))
        .into_iter()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().is_file() && entry.path().components().any(|c| is_stage(c.as_os_str())))
        .map(walkdir::DirEntry::into_path)
        .filter(|path| path.extension().is_none())
        .collect();
    entries.sort();
    assert!(entries.len() >= 3, "{entries:?}");
    for entry in &entries {
        let mut file = OpenOptions::new().read(true).write(true).open(entry).unwrap();
        let middle = file.metadata().unwrap().len() / 2;
        let mut byte = [0];
        file.seek(SeekFrom::Start(middle)).unwrap();
        file.read_exact(&mut byte).unwrap();
        file.seek(SeekFrom::Start(middle)).unwrap();
        file.write_all(&[byte[0] ^ 0x10]).unwrap();
    }
    let found = place.run("cache verify").code(1);
    assert_eq!(found.stdout.matches("damaged: ").count(), entries.len() + 1, "{found:#?}");
    let rebuilt = place.run("build m.toml").code(0);
    assert!(rebuilt.stderr.contains("is damaged (") && rebuilt.stderr.contains("built again"), "{rebuilt:#?}");
    place.run("cache verify").code(0);
    assert!(place.run("build m.toml").code(0).stderr.contains("no work to do"));
}

/// `schedule-v1`.
fn is_stage(name: &std::ffi::OsStr) -> bool {
    name.to_str().and_then(|name| name.rsplit_once("-v")).is_some_and(|(_, version)| version.parse::<u32>().is_ok())
}

#[test]
fn a_cache_that_cannot_be_written_is_a_clear_error() {
    let place = Place::new();
    place.manifest(&fixture(SMALL), 32);
    place.write("file", "no folder");
    place.run("build m.toml --cache file").fault(3, &["`file`"]);
    place.run("build m.toml --cache file/below").fault(3, &["file/below"]);
    place.run("build m.toml --trials file/t.csv").fault(3, &["file"]);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let root = place.path("frozen");
        fs::create_dir(&root).unwrap();
        fs::set_permissions(&root, fs::Permissions::from_mode(0o555)).unwrap();
        if fs::write(root.join("probe"), "").is_ok() {
            return skipped(
                "a_cache_that_cannot_be_written_is_a_clear_error",
                "ordinary user",
                "permissions bind no root",
            );
        }
        place.run("build m.toml --cache frozen").fault(3, &["frozen"]);
    }
}

#[test]
fn a_killed_build_leaves_nothing_that_a_later_one_trusts() {
    let place = Place::new();
    place.manifest(&fixture(SMALL), 32);
    // A build takes some 200 ms: these die at different stages.
    for delay_ms in [5, 20, 40, 80, 120] {
        let mut child = place.process("build m.toml --quiet").spawn().unwrap();
        thread::sleep(Duration::from_millis(delay_ms));
        // It may have ended by now.
        let _ = child.kill();
        child.wait().unwrap();
        if place.path("cache").is_dir() {
            place.run("cache verify").code(0);
        }
    }
    place.run("build m.toml").code(0);
    assert!(place.run("build m.toml").code(0).stderr.contains("no work to do"));
    let fresh = Place::new();
    fresh.manifest(&fixture(SMALL), 32);
    let generate = "generate m.toml --ids 1,2,3 --max-tokens 8 --ignore-eos";
    assert_eq!(place.run(generate).code(0).stdout, fresh.run(generate).code(0).stdout);
}

#[test]
fn what_has_no_kernel_cannot_be_traced() {
    let place = Place::new();
    place.manifest(&fixture("families/llama-gqa"), 24);
    place.run("trace m.toml").refused(&["target `cpu` has no kernel to trace", "--target"]);
    let text = fs::read_to_string(place.path("m.toml")).unwrap().replace("\"cpu\"", "\"h200\"");
    place.write("gpu.toml", text);
    place.run("trace gpu.toml --position 22").refused(&["4 steps from position 22 do not fit a context of 24"]);
}

#[test]
fn what_is_no_gpu_cannot_be_calibrated() {
    let place = Place::new();
    place.run("calibrate cpu").refused(&["target `cpu` is no GPU", "monobloc targets"]);
    place.run("calibrate h2000").refused(&["unknown target `h2000`", "h200"]);
    place.write("mine.toml", "name = 3\n");
    place.run("calibrate mine.toml").refused(&["mine.toml"]);
}
