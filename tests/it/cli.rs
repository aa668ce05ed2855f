//! Tests the command line end to end: what a user types and what is printed.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::cli_support::{Answer, Place, comma_separated, manifest_text};
use crate::skipped;
use crate::support::{Goldens, fixture, max_difference};

/// One place for the tests that only run the trained model: it is built once.
fn stories() -> &'static Place {
    static PLACE: OnceLock<Place> = OnceLock::new();
    PLACE.get_or_init(|| {
        let place = Place::new();
        place.manifest(&fixture("tinystories-llama"), 2048);
        place.run("build m.toml").code(0);
        place
    })
}

fn goldens() -> Value {
    serde_json::from_str(&fs::read_to_string(fixture("tinystories-llama").join("goldens.json")).unwrap()).unwrap()
}

fn ids_of(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

#[test]
fn the_second_build_has_no_work_to_do() {
    let place = Place::new();
    place.manifest(&fixture("families/llama-gqa"), 32);
    let first = place.run("build m.toml").code(0);
    assert_eq!(first.stdout, "", "progress is no result");
    assert!(first.stderr.lines().last().unwrap().starts_with("ran "), "{first:#?}");
    let rows = fs::read_to_string(place.path("flywheel/trials.csv")).unwrap();
    assert_eq!(rows.lines().count(), 2, "a header and one trial: {rows}");

    let second = place.run("build m.toml").code(0);
    assert!(second.stderr.lines().last().unwrap().starts_with("no work to do"), "{second:#?}");
    assert!(!second.stderr.contains("   run "), "{second:#?}");
    assert_eq!(fs::read_to_string(place.path("flywheel/trials.csv")).unwrap(), rows);

    let third = place.run("build m.toml --json").code(0);
    assert_eq!(third.stderr, "");
    assert_eq!((&third.json()["ran"], &third.json()["waiting"]), (&Value::from(0), &Value::from(Vec::<u8>::new())));
    let quiet = place.run("build m.toml --quiet").code(0);
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""));
    let quiet = place.run("generate m.toml --ids 1,2 --max-tokens 2 -q").code(0);
    assert_eq!((quiet.stdout.lines().count(), quiet.stderr.as_str()), (1, ""));
    assert!(place.run("cache verify").code(0).stdout.starts_with("sound: no problem in "));
}

#[test]
fn explain_names_what_changed_and_show_prints_every_stage() {
    let place = Place::new();
    let manifest = place.manifest(&fixture("families/llama-gqa"), 32);
    let before = place.run("explain m.toml").code(0);
    assert!(before.stdout.contains("not cached"), "{before:#?}");
    place.run("build m.toml").code(0);
    let built = place.run("explain m.toml").code(0);
    assert!(!built.stdout.contains("not cached") && built.stdout.ends_with("no work to do\n"), "{built:#?}");

    let text = fs::read_to_string(&manifest).unwrap().replace("context_max = 32", "context_max = 48");
    fs::write(&manifest, text).unwrap();
    let changed = place.run("explain m.toml").code(0);
    let lines: Vec<&str> = changed.stdout.lines().collect();
    assert!(lines.iter().any(|line| line.contains("context_max") && line.contains("48")), "{changed:#?}");
    assert!(lines.iter().any(|line| line.contains("cached")), "the import does not depend on it: {changed:#?}");
    let json = place.run("explain m.toml --json").code(0).json();
    assert!(json.as_array().unwrap().iter().any(|stage| stage["cached"] == Value::Bool(false)));

    let schedule = place.run("show schedule m.toml").code(0).stdout;
    place.write("mine.mkir", &schedule);
    let verdict = place.run("validate mine.mkir").code(0);
    assert!(verdict.stdout.starts_with("proven: "), "{verdict:#?}");
    place.run("show shcedule m.toml").refused(&["'shcedule'", "'schedule'"]);
}

#[test]
fn a_target_without_its_device_waits_and_the_others_are_built() {
    let place = Place::new();
    let manifest = place.manifest(&fixture("families/llama-gqa"), 32);
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, format!("{text}[[target]]\nrecord = \"b200\"\n")).unwrap();
    let doctor = place.run("doctor --json").code(0).json();
    let devices = doctor["devices"].as_array().cloned().unwrap_or_default();
    if devices.iter().any(|device| device["targets"].to_string().contains("b200")) {
        let name = "a_target_without_its_device_waits_and_the_others_are_built";
        return skipped(name, "machine without a B200", "its device is here");
    }
    let built = place.run("build m.toml").code(0);
    assert!(built.stderr.contains("note b200: ") && built.stderr.contains("wait for"), "{built:#?}");
    assert!(built.stderr.contains("measure cpu"), "{built:#?}");
    let waiting = place.run("build m.toml --json").code(0).json();
    assert_eq!(waiting["waiting"].as_array().unwrap().len(), 1, "{waiting}");
    let alone = place.run("build m.toml --json --target cpu").code(0).json();
    assert_eq!((&alone["waiting"], &alone["ran"]), (&Value::from(Vec::<u8>::new()), &Value::from(0)));
    place.run("generate m.toml --ids 1 --target b200").fault(3, &["b200"]);
    let beyond = "--min-p 0.1 --temperature 1 --repetition-penalty 1.2";
    place
        .run(&format!("generate m.toml --ids 1 --target b200 {beyond}"))
        .refused(&["target `b200` does not support `--min-p`, `--repetition-penalty`", "--target cpu"]);
    place.run(&format!("generate m.toml --ids 1 --target cpu --max-tokens 2 {beyond}")).code(0);
    assert!(place.run("show schedule m.toml --target b200").code(0).stdout.contains("machine \"b200\""));
    assert!(place.run("show source m.toml --target b200").code(0).stdout.contains("__global__"));
}

#[test]
fn greedy_ids_are_those_of_the_goldens() {
    let place = stories();
    for prompt in goldens()["prompts"].as_array().unwrap() {
        let name = prompt["name"].as_str().unwrap();
        let ids = comma_separated(&ids_of(&prompt["ids"]));
        let answer = place.run(&format!("generate m.toml --ids {ids} --max-tokens 64 --ignore-eos")).code(0);
        // fp32 on both sides differs by 1e-5, and the smallest margin of these prompts is 1.3e-3.
        assert_eq!(answer.stdout, comma_separated(&ids_of(&prompt["greedy_ids"])) + "\n", "{name}");
        assert!(answer.stderr.contains("tokens/s"), "{answer:#?}");
    }
}

#[test]
fn text_goes_through_the_tokenizer_and_the_chat_template() {
    let place = stories();
    for prompt in goldens()["prompts"].as_array().unwrap() {
        let (name, ids) = (prompt["name"].as_str().unwrap(), ids_of(&prompt["ids"]));
        let mut command = place.command("generate m.toml --json --max-tokens 8 --ignore-eos");
        match prompt["text"].as_str() {
            Some(text) => command.arg("--prompt").arg(text),
            None => command.arg("--chat").arg(prompt["messages"][0]["content"].as_str().unwrap()),
        };
        let answer = Answer::of(&mut command).code(0).json();
        assert_eq!(ids_of(&answer["prompt_ids"]), ids, "{name}");
        assert_eq!(ids_of(&answer["ids"]), ids_of(&prompt["greedy_ids"])[..8], "{name}");
        let text = answer["text"].as_str().unwrap();
        assert!(prompt["greedy_text"].as_str().unwrap().starts_with(text) && !text.is_empty(), "{name}: {text:?}");
        assert_eq!(answer["stop"], "length", "{name}");
    }
    let mut chat = place.command("generate m.toml --json --max-tokens 1 --system Short.");
    let with_system = Answer::of(chat.args(["--chat", "Hello."])).code(0).json();
    let without = place.run("generate m.toml --json --max-tokens 1 --chat Hello.").code(0).json();
    assert!(ids_of(&with_system["prompt_ids"]).len() > ids_of(&without["prompt_ids"]).len());
    let raw = place.run("generate m.toml --json --max-tokens 1 --raw --prompt Hello.").code(0).json();
    let begun = place.run("generate m.toml --json --max-tokens 1 --prompt Hello.").code(0).json();
    assert_eq!(ids_of(&begun["prompt_ids"])[0], 0, "the tokenizer begins a text");
    assert_eq!(ids_of(&begun["prompt_ids"])[1..], ids_of(&raw["prompt_ids"]));
}

#[test]
fn the_text_is_what_the_ids_decode_to() {
    let place = stories();
    let girl = &goldens()["prompts"][0];
    let mut command = place.command("generate m.toml --max-tokens 64 --prompt");
    let answer = Answer::of(command.arg(girl["text"].as_str().unwrap())).code(0);
    assert_eq!(answer.stdout, format!("{}\n", girl["greedy_text"].as_str().unwrap()));
}

#[test]
fn generation_ends_at_the_end_of_the_text() {
    let place = stories();
    let bos_only = goldens()["prompts"].as_array().unwrap().iter().find(|p| p["name"] == "bos-only").unwrap().clone();
    let (ids, greedy) = (ids_of(&bos_only["ids"]), ids_of(&bos_only["greedy_ids"]));
    let end = bos_only["first_eos_step"].as_u64().unwrap() as usize;
    let ids = comma_separated(&ids);
    let answer = place.run(&format!("generate m.toml --ids {ids} --max-tokens 64")).code(0);
    assert_eq!(answer.stdout, comma_separated(&greedy[..=end]) + "\n");
    let json = place.run(&format!("generate m.toml --ids {ids} --max-tokens 64 --json")).code(0).json();
    assert_eq!((&json["stop"], &json["text"]), (&Value::from("eos"), &Value::Null));
}

#[test]
fn a_seed_gives_the_same_text_again() {
    let place = stories();
    let sampled = |seed: u32| {
        let line =
            format!("generate m.toml --ids 0 --max-tokens 16 --temperature 1.2 --top-k 50 --top-p 0.9 --seed {seed}");
        place.run(&line).code(0).stdout
    };
    assert_eq!(sampled(7), sampled(7));
    assert!((8..12).any(|seed| sampled(seed) != sampled(7)));
}

#[test]
fn penalties_biases_and_a_least_length_change_the_choice() {
    let place = stories();
    let ids = |options: &str| {
        let answer = place.run(&format!("generate m.toml --ids 0 --json {options}")).code(0).json();
        ids_of(&answer["ids"])
    };
    let plain = ids("--max-tokens 64");
    let repeated = |ids: &[u32]| ids.len() - ids.iter().collect::<std::collections::BTreeSet<_>>().len();
    assert!(repeated(&ids("--max-tokens 40 --ignore-eos")) > 0);
    assert_eq!(repeated(&ids("--max-tokens 40 --presence-penalty 2 --repetition-penalty 1e6 --ignore-eos")), 0);
    assert_eq!(ids("--max-tokens 5 --logit-bias 77=100 --ignore-eos"), [77; 5]);
    assert!(!ids(&format!("--max-tokens 64 --logit-bias {}=-100", plain[0])).contains(&plain[0]));
    // The model ends this text by itself, but not before `--min-tokens`.
    let end = plain.len();
    assert!(end < 59, "{plain:?}");
    let longer = ids(&format!("--max-tokens 64 --min-tokens {}", end + 5));
    assert!(longer.len() >= end + 5 && longer[..end - 1] == plain[..end - 1], "{longer:?}");
    // A temperature at which all tokens are possible, and a min-p that keeps only the most probable token.
    assert_eq!(ids("--temperature 5 --seed 3 --min-p 1 --max-tokens 12"), plain[..12]);
    assert_ne!(ids("--temperature 5 --seed 3 --max-tokens 12"), plain[..12]);
}

#[test]
fn each_token_is_a_line_of_json_with_its_log_probabilities() {
    let place = stories();
    let mut command = place.command("generate m.toml --max-tokens 20 --jsonl --logprobs 3 --prompt");
    let answer = Answer::of(command.arg("Once upon a time")).code(0);
    let events: Vec<Value> = answer.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (end, events) = events.split_last().unwrap();
    assert_eq!(events.len(), 20);
    let mut command = place.command("generate m.toml --max-tokens 20 --json --logprobs 3 --prompt");
    let whole = Answer::of(command.arg("Once upon a time")).code(0).json();
    let text: String = events.iter().chain([end]).map(|event| event["text"].as_str().unwrap()).collect();
    assert_eq!(text, whole["text"].as_str().unwrap());
    assert_eq!((&end["stop"], &end["ids"]), (&Value::from("length"), &whole["ids"]));
    for (event, (id, of_whole)) in
        events.iter().zip(ids_of(&whole["ids"]).into_iter().zip(whole["logprobs"].as_array().unwrap()))
    {
        assert_eq!(event["id"], id);
        let top = event["top"].as_array().unwrap();
        let logprobs: Vec<f64> = top.iter().map(|one| one["logprob"].as_f64().unwrap()).collect();
        assert!(logprobs.len() == 3 && logprobs.is_sorted_by(|a, b| a >= b) && logprobs[0] <= 0.0, "{event}");
        assert!(logprobs.iter().map(|logprob| logprob.exp()).sum::<f64>() <= 1.0 + 1e-9, "{event}");
        // Greedy: the chosen token is the most probable one.
        assert_eq!((&top[0]["id"], &top[0]["logprob"]), (&event["id"], &event["logprob"]));
        assert_eq!((&of_whole["id"], &of_whole["top"]), (&event["id"], &event["top"]));
    }
    let plain = place.run("generate m.toml --ids 0 --max-tokens 2 --jsonl").code(0).stdout;
    let first: Value = serde_json::from_str(plain.lines().next().unwrap()).unwrap();
    assert_eq!(first.as_object().unwrap().keys().collect::<Vec<_>>(), ["id"]);
}

#[test]
fn proposed_tokens_change_no_text() {
    let place = stories();
    let (mut proposed, mut accepted) = (0, 0);
    for options in [
        "--ignore-eos --max-tokens 300",
        "--ignore-eos --max-tokens 300 --temperature 0.5 --seed 3",
        "--ignore-eos --temperature 0.9 --top-k 40 --top-p 0.9 --seed 5",
        // Two tokens that become frequent.
        "--ignore-eos --temperature 0.7 --seed 3 --logit-bias 77=11 --logit-bias 15=11",
        "--ignore-eos --temperature 0.6 --seed 6 --min-p 0.05 --repetition-penalty 1.1 --frequency-penalty 0.2 --logprobs 2",
        "--min-tokens 50",
        "",
    ] {
        let answer = |more: &str| place.run(&format!("generate m.toml --ids 0 --json {options} {more}")).code(0).json();
        let (plain, found) = (answer(""), answer("--lookup 4"));
        for key in ["ids", "stop", "logprobs"] {
            assert_eq!(found[key], plain[key], "{options}: {key}");
        }
        assert_eq!(plain.get("proposed"), None);
        let count = |key: &str| found[key].as_u64().unwrap();
        assert!(count("accepted") <= count("proposed"), "{options}: {found}");
        proposed += count("proposed");
        accepted += count("accepted");
    }
    assert!(accepted > 20 && proposed > accepted, "{accepted} of {proposed}");

    // Texts with their stop reasons, while tokens are accepted.
    let text = |more: &str| {
        let mut command = place.command(&format!("generate m.toml --jsonl --max-tokens 24 {more} --stop jjjjjjjjjjjj"));
        let answer = Answer::of(command.args(["--logit-bias", "77=20", "--prompt", "Once upon a time"])).code(0);
        answer.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    let (plain, found) = (text(""), text("--lookup 4"));
    let (last, events) = found.split_last().unwrap();
    assert_eq!(last["stop"], "stop");
    assert_eq!(*events, plain[..plain.len() - 1]);
    assert!(last["accepted"].as_u64().unwrap() > 5, "{last}");
    let told = place.run("generate m.toml --ids 0 --max-tokens 24 --lookup 4").code(0).stderr;
    assert!(told.contains(" accepted; stopped: "), "{told}");
}

#[test]
fn proposals_need_rows_and_fit_into_the_pages() {
    let place = Place::new();
    let text = manifest_text(&format!("path:{}", fixture("families/llama-gqa").display()), 40);
    let ids = "1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8,1,2,3,4";
    let answer = |keys: &str, options: &str| {
        place.write("m.toml", text.replace("[search]", &format!("{keys}\n[search]")));
        place.run(&format!("generate m.toml --ids {ids} --ignore-eos {options}"))
    };
    let expected = answer("", "--max-tokens 13").code(0).stdout;
    for (keys, most) in [("", 15), ("chunk_max = 4", 3), ("cache_pages = 2", 8), ("batch_invariant = true", 4)] {
        let found = answer(keys, &format!("--max-tokens 13 --lookup {most}")).code(0);
        assert_eq!(found.stdout, expected, "{keys}");
    }
    // To the end of the context.
    let expected = answer("", "").code(0).stdout;
    assert_eq!(answer("", "--lookup 4").code(0).stdout, expected);
    answer("chunk_max = 4", "--lookup 4")
        .refused(&["`--lookup 4` needs steps of 5 rows, found steps of at most 4", "`decode.chunk_max`"]);
    answer("chunk_max = 1", "--lookup 1").refused(&["`--lookup 1` needs steps of 2 rows"]);
    answer("", "--lookup 0").refused(&["--lookup"]);
}

#[test]
fn generation_is_the_same_in_chunks_of_any_size_and_ends_where_the_pages_are_full() {
    let place = Place::new();
    let text = manifest_text(&format!("path:{}", fixture("families/llama-gqa").display()), 40);
    let answer = |keys: &str| {
        place.write("m.toml", text.replace("[search]", &format!("{keys}\n[search]")));
        let ids: Vec<String> = (1..21).map(|id| id.to_string()).collect();
        place.run(&format!("generate m.toml --ids {} --max-tokens 8 --ignore-eos", ids.join(",")))
    };
    let expected = answer("").code(0).stdout;
    for keys in ["chunk_max = 1", "chunk_max = 7", "chunk_max = 256", "batch_invariant = true", "cache_pages = 2"] {
        assert_eq!(answer(keys).code(0).stdout, expected, "{keys}");
    }
    // Positions 0 to 26 need two pages.
    answer("cache_pages = 1").refused(&["1 pages are needed", "decode.cache_pages"]);
}

#[test]
fn generation_ends_where_the_context_is_full() {
    let place = Place::new();
    place.manifest(&fixture("families/llama-gqa"), 8);
    let answer = place.run("generate m.toml --ids 1,2,3,4,5,6 --ignore-eos").code(0);
    // Positions 5, 6 and 7 each decide a token.
    assert_eq!(answer.stdout.split(',').count(), 3, "{answer:#?}");
    assert!(answer.stderr.contains("at most 3 of 128 tokens: `context_max` is 8"), "{answer:#?}");
    assert!(answer.stderr.contains("stopped: the context is full"), "{answer:#?}");
    let two = place.run("generate m.toml --ids 1,2,3,4,5,6 --ignore-eos --max-tokens 2").code(0);
    assert!(two.stderr.contains("stopped: `--max-tokens` is reached"), "{two:#?}");
    place.run("generate m.toml --ids 1,2,3,4,5,6,7,8,9").refused(&["at most 8 tokens", "found 9", "context_max"]);
    place.run("logits m.toml --ids 1,2,3,4,5,6,7,8,9 --out l.safetensors").refused(&["at most 8 ids", "found 9"]);
}

#[test]
fn logits_are_those_of_the_goldens() {
    let place = stories();
    let goldens = Goldens::open("tinystories-llama");
    let ids = comma_separated(&goldens.ids("heldout.ids")[..64]);
    place.run(&format!("logits m.toml --ids {ids} --out logits.safetensors")).code(0);
    let bytes = fs::read(place.path("logits.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let logits = tensors.tensor("logits").unwrap();
    assert_eq!((logits.shape(), tensors.len()), (&[64, 1024][..], 1));
    let found: Vec<f32> = logits.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let difference = max_difference(&found, &goldens.floats("heldout.logits_first64"));
    assert!(difference <= 3e-4, "{difference}");
}

#[test]
fn perplexity_is_that_of_the_goldens() {
    let place = stories();
    let file = fixture("tinystories-llama/heldout.txt");
    let answer = place.run(&format!("perplexity m.toml {} --json", file.display())).code(0).json();
    let golden = &goldens()["heldout"];
    let ratio = answer["ppl"].as_f64().unwrap() / golden["ppl"].as_f64().unwrap();
    assert!((ratio - 1.0).abs() <= 1e-4, "{answer}");
    assert_eq!((&answer["tokens"], &answer["scored"]), (&golden["n_ids"], &golden["n_scored"]));
}

/// For each format the smallest and largest allowed divergence from fp32, and the largest difference of perplexity. A format that is
/// computed wrongly is above its range; one that is not rounded, or rounded as another format, is below.
#[test]
fn perplexity_compares_formats() {
    const EXPECTED: [(&str, f64, [f64; 2], f64); 7] = [
        ("fp32", 4.0, [0.0, 0.0], 0.0),
        ("int8", 1.0, [1e-6, 4e-5], 0.005),
        ("fp8", 1.0, [5e-5, 6e-4], 0.005),
        ("int4:128", 0.516, [5e-4, 6e-3], 0.06),
        ("int4:64", 0.531, [3e-4, 5e-3], 0.06),
        ("int4:32", 0.5625, [2e-4, 4e-3], 0.06),
        ("mxfp4", 0.531, [8e-4, 9e-3], 0.06),
    ];
    let place = stories();
    let text = fs::read_to_string(fixture("tinystories-llama/heldout.txt")).unwrap();
    place.write("short.txt", &text[..300]);
    let answer = place.run("perplexity m.toml short.txt --formats --json").code(0).json();
    let rows = answer["formats"].as_array().unwrap();
    assert_eq!(rows.len(), EXPECTED.len(), "{answer}");
    let figure = |row: &Value, name: &str| row[name].as_f64().unwrap_or(f64::NAN);
    let bytes_a_value = figure(&rows[0], "bytes") / 4.0;
    for (row, (name, bytes, [least, most], ppl)) in rows.iter().zip(EXPECTED) {
        assert_eq!(row["format"], name);
        assert!((least..=most).contains(&figure(row, "kl")), "{row}");
        assert!((figure(row, "ppl") / figure(&rows[0], "ppl") - 1.0).abs() <= ppl, "{row}");
        // Norms, scales of rows, the row of the embedding and the cache are added.
        assert!((figure(row, "bytes") / bytes_a_value - bytes).abs() < 0.03, "{row}");
        assert!(figure(row, "us_per_step") > 0.0, "{row}");
    }
}

#[test]
fn a_long_text_is_read_in_windows() {
    let place = Place::new();
    place.manifest(&fixture("tinystories-llama"), 48);
    let text = fs::read_to_string(fixture("tinystories-llama/heldout.txt")).unwrap();
    place.write("short.txt", &text[..300]);
    let answer = place.run("perplexity m.toml short.txt").code(0).stdout;
    let figure = |name: &str| -> f64 {
        let line = answer.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{answer}"));
        line.trim().parse().unwrap()
    };
    assert!(figure("tokens ") > 48.0 && figure("scored ") == figure("tokens ") - 1.0, "{answer}");
    assert!((1.05..3.0).contains(&figure("ppl ")), "the model still predicts its own kind of text: {answer}");
}

#[test]
fn validate_prints_the_line_the_rule_and_the_witness() {
    let place = Place::new();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/filetests/validate");
    let proven = place.run(&format!("validate {}", folder.join("proven-tiny.mkir").display())).code(0);
    assert!(proven.stdout.starts_with("proven: "), "{proven:#?}");
    // One rule of each group; the filetests try every one.
    for rule in ["uncovered", "partial-join", "deadlock", "overwrite-unread", "smem-overlap", "missing-proxy"] {
        let path = folder.join(format!("{rule}.mkir"));
        let text = fs::read_to_string(&path).unwrap();
        let answer = place.run(&format!("validate {}", path.display())).code(1);
        let line = 1 + text.lines().position(|line| line.contains(&format!("; error: {rule}: "))).unwrap();
        assert!(answer.stdout.contains(&format!("violation: {rule}: ")), "{answer:#?}");
        assert!(answer.stdout.contains(&format!("{}:{line}:", path.display())), "{answer:#?}");
        assert!(answer.stdout.lines().last().unwrap().starts_with("rejected: "), "{answer:#?}");
    }

    let deadlock = place.run(&format!("validate {} --json", folder.join("deadlock.mkir").display())).code(1).json();
    assert_eq!(deadlock["proven"], Value::Bool(false));
    let violation = &deadlock["violations"][0];
    assert_eq!((&violation["rule"], &violation["group"]), (&Value::from("deadlock"), &Value::from(3)));
    assert!(violation["witness"].as_array().unwrap().len() >= 2 && violation["line"].as_u64().unwrap() > 1);
}

#[test]
fn import_says_what_a_checkpoint_is_and_doctor_what_a_machine_is() {
    let place = Place::new();
    let tiny = fixture("tinystories-llama");
    let said = place.run(&format!("import {} --dry-run", tiny.display())).code(0).stdout;
    for words in ["LlamaForCausalLM: 3.08M parameters, 4 layers", "a step in bf16 reads", "bytes of weight headers"] {
        assert!(said.contains(words), "{said}");
    }
    let json = place.run(&format!("import {} --dry-run --json", tiny.display())).code(0).json();
    assert_eq!((&json["parameters"], &json["layers"]), (&Value::from(3_082_496), &Value::from(4)));

    let doctor = place.run("doctor --json").code(0).json();
    assert_eq!(doctor["monobloc"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(doctor["cache"]["state"], "absent");
    assert!(!place.path("cache").exists(), "a doctor changes nothing");
    assert!(doctor["targets"].as_array().unwrap().len() >= 11 && doctor["nvrtc"]["found"].is_boolean());
    place.write("cache", "no folder");
    let sick = place.run("doctor").code(1);
    assert!(sick.stdout.contains("fault: "), "{sick:#?}");

    let targets = place.run("targets --json").code(0).json();
    assert_eq!(targets.as_array().unwrap().len(), doctor["targets"].as_array().unwrap().len());
    place.write("mine.toml", place.run("targets h200").code(0).stdout);
    assert_eq!(place.run("targets ./mine.toml").code(0).stdout, place.run("targets h200").code(0).stdout);
    assert!(place.run("schema").code(0).stdout.contains("rope_theta"));
    let version = place.run("--version").code(0).stdout;
    assert_eq!(version, format!("monobloc {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_flywheel_tells_exports_and_merges_trials() {
    let place = Place::new();
    place.manifest(&fixture("families/llama-gqa"), 32);
    place.run("build m.toml --trials a.csv").code(0);
    let best = place.run("flywheel best --own --trials a.csv").code(0).stdout;
    assert!(best.contains(" on cpu, position 0: ") && best.lines().nth(1).unwrap().ends_with(" default"), "{best}");
    let stats = place.run("flywheel stats --own --trials a.csv --json").code(0).json();
    assert_eq!((&stats["rows"], &stats["verdicts"]["ok"]), (&Value::from(1), &Value::from(1)));

    let merged = place.run("flywheel merge a.csv --trials b.csv").code(0);
    assert_eq!(merged.stdout, "added 1 row to `b.csv`; 0 were there already\n");
    let merged = place.run("flywheel merge a.csv --trials b.csv").code(0);
    assert_eq!(merged.stdout, "added 0 rows to `b.csv`; 1 were there already\n");
    let exported = place.run("flywheel export --own --trials b.csv").code(0).stdout;
    assert_eq!(exported, fs::read_to_string(place.path("b.csv")).unwrap());
    assert_eq!(place.run("flywheel export --own --trials b.csv --target h200").code(0).stdout.lines().count(), 1);
    place.run("flywheel merge none.csv --trials b.csv").fault(3, &["none.csv"]);
}

#[test]
fn an_interrupt_ends_generation_cleanly() {
    let place = stories();
    let mut child = place
        .process("generate m.toml --ids 0 --max-tokens 2000 --ignore-eos")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut first = Vec::new();
    stdout.read_until(b',', &mut first).unwrap();
    let interrupt = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &interrupt]).status().unwrap().success());
    let (mut rest, mut said) = (String::new(), String::new());
    stdout.read_to_string(&mut rest).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
    assert!(rest.ends_with('\n') && rest.split(',').count() < 1999, "the line is whole: {rest}");
    assert!(said.contains("tokens/s") && !said.contains("error"), "{said}");
}

#[test]
fn a_reader_that_leaves_and_a_full_disk_are_no_panic() {
    let place = Place::new();
    let shell = |line: &str| {
        let line = format!("{} {line}", env!("CARGO_BIN_EXE_monobloc"));
        let output = Command::new("sh").args(["-c", &line]).current_dir(place.path("")).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    for command in ["schema", "--help", "targets"] {
        // The reader closes stdout at once; the status is that of monobloc.
        let line = format!("{command} 2>err | true; cat err >&2");
        let (_, said) = shell(&line);
        assert_eq!(said, "", "{command}");
    }
    let mut child = place.process("schema").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    #[cfg(target_os = "linux")]
    {
        let (code, said) = shell("targets > /dev/full");
        assert_eq!((code, said.starts_with("error: cannot write to stdout: ")), (3, true), "{said}");
    }
}

#[test]
fn colours_are_where_they_are_asked_for() {
    let place = Place::new();
    assert!(!place.run("targets h20").code(2).stderr.contains('\u{1b}'), "no terminal");
    assert!(place.run("targets h20 --color always").code(2).stderr.contains("\u{1b}[1;31merror"));
    assert!(!place.run("targets h20 --color never").code(2).stderr.contains('\u{1b}'));
}

#[test]
fn goldens_are_compared_in_one_step_and_damage_is_seen() {
    let place = Place::new();
    let checkpoint = fixture("families/qwen3");
    place.manifest(&checkpoint, 48);
    let goldens = checkpoint.join("goldens.safetensors");
    // The built-in model, as docs/models.md has it.
    let own = fixture("tinystories-llama").join("compare.safetensors");
    let answer = place.run(&format!("compare tinystories --goldens {}", own.display())).code(0);
    // Its checkpoint lies in the cache.
    place.run("cache verify").code(0);
    assert!(answer.stdout.starts_with("agrees at 16 positions: largest difference "), "{answer:#?}");
    let answer = place.run(&format!("compare m.toml --goldens {}", goldens.display())).code(0);
    assert!(answer.stdout.starts_with("agrees at 24 positions: largest difference "), "{answer:#?}");
    assert!(answer.stdout.contains(" 3e-4 allowed; 16 of 16 greedy tokens (cpu interpreter on "), "{answer:#?}");

    // The same checkpoint in bf16 must keep the limit from the other implementation's bf16 error.
    let text = fs::read_to_string(place.path("m.toml")).unwrap().replace("fp32", "bf16");
    place.write("bf16.toml", text);
    let answer = place.run(&format!("compare bf16.toml --json --goldens {}", goldens.display())).code(0).json();
    let (error, allowed) = (answer["error_rel_l2"].as_f64().unwrap(), answer["error_rel_l2_allowed"].as_f64().unwrap());
    assert!(error > 1e-4 && error < allowed && allowed < 0.1, "{answer}");

    // One logit that is wrong, and goldens that the context or the model cannot hold.
    let mut bytes = fs::read(&goldens).unwrap();
    let start = |bytes: &[u8]| {
        let (header, metadata) = SafeTensors::read_metadata(bytes).unwrap();
        8 + header + metadata.info("logits").unwrap().data_offsets.0
    };
    let at = start(&bytes) + 4 * (320 * 7 + 5);
    let expected = f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    bytes[at..at + 4].copy_from_slice(&(expected + 0.001).to_le_bytes());
    place.write("off.safetensors", &bytes);
    let answer = place.run("compare m.toml --goldens off.safetensors").code(1);
    assert!(answer.stdout.starts_with("differs at ") && answer.stdout.contains("position 7, token 5: "), "{answer:#?}");
    place.manifest(&checkpoint, 38);
    place.run("compare m.toml --goldens off.safetensors").refused(&["needs 39 positions", "is 38", "context_max"]);
    place.manifest(&fixture("families/llama-untied"), 48);
    place.run("compare m.toml --goldens off.safetensors").refused(&["expected `logits` of 384 tokens", "found 320"]);
    place.run("compare m.toml --goldens m.toml").refused(&["m.toml", "expected a safetensors file"]);
}

#[test]
fn every_command_runs_on_a_target_that_is_here() {
    let place = Place::new();
    let text = manifest_text(&format!("path:{}", fixture("families/llama-gqa").display()), 32);
    place.write("m.toml", text.replace("record = \"cpu\"", "record = \"b200\"\n[[target]]\nrecord = \"cpu\""));
    for command in ["generate m.toml --ids 1 --max-tokens 1", "logits m.toml --ids 1 --out l.safetensors"] {
        place.run(command).code(0);
    }
}

#[test]
fn paths_that_are_no_text_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let odd = std::ffi::OsStr::from_bytes(b"m\xff.toml");
    Answer::of(place.command("build").arg(odd)).refused(&["expected UTF-8 text"]);
    Answer::of(place.command("targets").env("MONOBLOC_CACHE_DIR", odd)).refused(&["`MONOBLOC_CACHE_DIR` is not UTF-8"]);
}

#[test]
fn a_misspelt_key_is_one_fault() {
    let place = Place::new();
    let text = manifest_text("path:x", 32).replace("weights = ", "weigths = ");
    place.write("m.toml", text);
    let said = place.run("build m.toml").refused(&["unknown key `weigths`", "did you mean `weights`?"]).stderr;
    assert!(!said.contains("missing key"), "{said}");
}

#[test]
fn completions_offer_what_fits() {
    let place = Place::new();
    let script = place.run("completions bash").code(0).stdout;
    for hidden in ["monobloc__trials", "monobloc__tokens"] {
        assert!(!script.contains(hidden), "{hidden}");
    }
    // Names of records after `--target`, and no files.
    let after: Vec<&str> = script.lines().skip_while(|line| line.trim() != "--target)").take(3).collect();
    assert!(after.concat().contains("cpu t4 a100"), "{after:?}");
}
