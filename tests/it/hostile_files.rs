//! Tests untrusted files: those that are no regular files, text with control characters, and numbers that no model has.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cli_support::{Answer, Place};

/// Puts a pipe without a writer in place of a file.
fn pipe(path: &Path) {
    let _ = fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn a_pipe_in_place_of_a_file_is_refused_at_once() {
    let sharded = "variants/olmo2-bias";
    for (fixture, file, command) in [
        ("tinystories-llama", "config.json", "import checkpoint --dry-run"),
        ("tinystories-llama", "model.safetensors", "import checkpoint --dry-run"),
        ("tinystories-llama", "generation_config.json", "import checkpoint --dry-run"),
        ("tinystories-llama", "generation_config.json", "build m.toml"),
        ("tinystories-llama", "tokenizer.json", "generate m.toml --prompt a"),
        ("tinystories-llama", "tokenizer_config.json", "generate m.toml --prompt a"),
        ("tinystories-llama", "chat_template.jinja", "generate m.toml --chat a"),
        (sharded, "model.safetensors.index.json", "import checkpoint --dry-run"),
        (sharded, "model-00002-of-00005.safetensors", "import checkpoint --dry-run"),
    ] {
        let place = Place::new();
        let checkpoint = place.checkpoint(fixture);
        place.manifest(&checkpoint, 32);
        pipe(&checkpoint.join(file));
        let mut command = place.command(command);
        command.timeout(Duration::from_secs(60));
        let answer = Answer::of(&mut command).code(2);
        let said = answer.stdout + &answer.stderr;
        assert!(said.contains("expected a regular file, found a pipe") && said.contains(file), "{file}: {said}");
    }
}

#[test]
fn trials_that_are_no_file_are_refused_at_once() {
    let place = Place::new();
    pipe(&place.path("trials.csv"));
    for (trials, found) in [("trials.csv", "a pipe"), ("/dev/zero", "a device")] {
        let mut command = place.command(&format!("flywheel stats --trials {trials}"));
        command.timeout(Duration::from_secs(60));
        Answer::of(&mut command).refused(&[&format!("expected a regular file, found {found}"), trials]);
    }
    // Also when a build appends its row.
    place.manifest(&place.checkpoint("variants/llama-defaults"), 8);
    let mut command = place.command("build m.toml --trials trials.csv");
    command.timeout(Duration::from_secs(120));
    Answer::of(&mut command).refused(&["expected a regular file, found a pipe"]);
}

/// The parent is killed while another process still holds its end of the pipe, so the child sees no end of input.
#[test]
fn a_tokenizer_ends_with_its_parent() {
    let place = Place::new();
    let checkpoint = place.checkpoint("tinystories-llama");
    let mut parent = Command::new("sh")
        .args(["-c", "exec 3<&0; \"$0\" tokens \"$1\" <&3 & echo $!; wait"])
        .arg(env!("CARGO_BIN_EXE_monobloc"))
        .arg(&checkpoint)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let held = parent.stdin.take().unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut line).unwrap();
    // Ended, or a zombie that its new parent has not reaped yet.
    let is_dead = || match fs::read_to_string(format!("/proc/{}/stat", line.trim())) {
        Ok(stat) => stat.rsplit_once(") ").unwrap().1.starts_with('Z'),
        Err(_) => true,
    };
    std::thread::sleep(Duration::from_secs(1));
    assert!(!is_dead(), "it waits for what it is asked");
    parent.kill().unwrap();
    parent.wait().unwrap();
    let begun = Instant::now();
    while !is_dead() {
        assert!(begun.elapsed() < Duration::from_secs(20), "the tokenizer outlives its parent");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(held);
}

/// All kinds of text that a terminal would interpret: an escape sequence, its one-byte form, a bell, and a mark that reverses the
/// direction of text.
const EVIL: &str = "e\u{1b}[31m\u{9b}2J\u{7}\u{202e}vil";

#[track_caller]
fn harmless(mut command: assert_cmd::Command) {
    let output = command.output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    let obeyed = |c: char| (c.is_control() && c != '\n' && c != '\t') || matches!(c, '\u{202a}'..='\u{202e}');
    assert!(!said.contains(obeyed), "{said:?}");
    // Escaped, not left out: as `\u{1b}` in text, as `\u001b` in JSON. clap removes the sequence and leaves its one-byte form.
    assert!(["\\u{1b}", "\\u001b", "\\u{9b}"].iter().any(|shown| said.contains(shown)), "{said}");
}

#[test]
fn no_text_of_a_checkpoint_reaches_the_terminal_raw() {
    type Change = fn(&mut Value);
    let changes: [(&str, Change); 4] = [
        ("a key", |config| config[EVIL] = json!(1)),
        ("a value", |config| config["hidden_act"] = json!(EVIL)),
        ("a neutral value", |config| config["is_encoder_decoder"] = json!({EVIL: EVIL})),
        ("a class", |config| config["architectures"] = json!([EVIL])),
    ];
    for (what, change) in changes {
        let place = Place::new();
        let checkpoint = place.checkpoint("variants/llama-defaults");
        place.manifest(&checkpoint, 8);
        let mut config: Value = serde_json::from_slice(&fs::read(checkpoint.join("config.json")).unwrap()).unwrap();
        change(&mut config);
        fs::write(checkpoint.join("config.json"), config.to_string()).unwrap();
        for command in ["import checkpoint --dry-run", "import checkpoint --dry-run --json", "build m.toml"] {
            println!("{what}: {command}");
            harmless(place.command(command));
        }
    }
}

#[test]
fn no_name_in_weight_files_reaches_the_terminal_raw() {
    let file = |name: &str, dtype: &str| {
        let header = json!({name: {"dtype": dtype, "shape": [2], "data_offsets": [0, 8]}}).to_string();
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 8]].concat()
    };
    let place = Place::new();
    let checkpoint = place.checkpoint("variants/llama-defaults");
    place.manifest(&checkpoint, 8);
    let commands = ["import checkpoint --dry-run", "import checkpoint --dry-run --json", "build m.toml"];
    for dtype in ["F32", EVIL] {
        fs::write(checkpoint.join("model.safetensors"), file(EVIL, dtype)).unwrap();
        commands.iter().for_each(|command| harmless(place.command(command)));
    }
    fs::remove_file(checkpoint.join("model.safetensors")).unwrap();
    for shard in [EVIL.to_string(), format!("{EVIL}.safetensors")] {
        let index = json!({"weight_map": {"t": shard}}).to_string();
        fs::write(checkpoint.join("model.safetensors.index.json"), index).unwrap();
        commands.iter().for_each(|command| harmless(place.command(command)));
    }
}

#[test]
fn no_template_row_or_path_reaches_the_terminal_raw() {
    let place = Place::new();
    let checkpoint = place.checkpoint("tinystories-llama");
    place.manifest(&checkpoint, 32);
    fs::write(checkpoint.join("chat_template.jinja"), format!("{{{{ raise_exception('{EVIL}') }}}}")).unwrap();
    harmless(place.command("generate m.toml --chat a --max-tokens 1"));

    // A measured row with one changed field, and a header that names a column twice. The row has its own trial id: of two rows with
    // one id the first counts, which would be the built-in one.
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("flywheel/corpus/h200.csv.zst");
    let text = zstd::Decoder::new(fs::File::open(corpus).unwrap()).unwrap();
    let mut rows = csv::Reader::from_reader(text);
    let (header, row) = (rows.headers().unwrap().clone(), rows.records().next().unwrap().unwrap());
    let mut corpora = vec![format!("{EVIL},{EVIL}\n").into_bytes()];
    for column in ["verdict", "utc", "manifest"] {
        let changed = header.iter().zip(&row).map(|(name, cell)| match name {
            "trial_id" => "0123456789abcdef",
            _ if name == column => EVIL,
            _ => cell,
        });
        let mut writer = csv::Writer::from_writer(vec![]);
        writer.write_record(&header).unwrap();
        writer.write_record(changed).unwrap();
        corpora.push(writer.into_inner().unwrap());
    }
    for corpus in corpora {
        place.write("trials.csv", corpus);
        harmless(place.command("flywheel stats --trials trials.csv"));
    }
    for arguments in [
        vec!["import", EVIL, "--dry-run"],
        vec!["build", EVIL],
        vec!["validate", EVIL],
        vec!["perplexity", "m.toml", EVIL],
        vec!["build", "m.toml", "--target", EVIL],
        vec![EVIL],
        vec!["build", "--", "m.toml", EVIL],
    ] {
        let mut command = place.command("");
        command.args(arguments);
        harmless(command);
    }
}

/// Overwrites the first value of a tensor of a bf16 checkpoint.
fn spoil(checkpoint: &Path, tensor: &str, value: f32) {
    let path = checkpoint.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    assert_eq!(entries[tensor]["dtype"], "BF16", "{tensor}");
    let at = header + entries[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    // The upper half of an fp32 value.
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes()[2..]);
    fs::write(path, bytes).unwrap();
}

#[test]
fn weights_that_no_model_has_are_the_checkpoints_fault() {
    let tensor = "model.layers.0.mlp.down_proj.weight";
    for (value, found) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf"), (2f32.powi(100), "1.2676506e30")] {
        let place = Place::new();
        let checkpoint = place.checkpoint("variants/llama-defaults");
        place.manifest(&checkpoint, 8);
        spoil(&checkpoint, tensor, value);
        place.run("build m.toml").refused(&[
            &format!("tensor `{tensor}` has the weight {found} in row 0, column 0"),
            "fetch the checkpoint again",
        ]);
        // A fault of the checkpoint is no result of a candidate.
        let trials = fs::read_to_string(place.path("flywheel/trials.csv")).unwrap_or_default();
        assert!(trials.lines().count() < 2, "{trials}");
    }
}
