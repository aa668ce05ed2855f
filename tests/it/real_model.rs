//! Tests a trained model that people use, SmolLM2-135M-Instruct, as the GGUF file that it comes in, on `cpu`, against outputs of transformers:
//! logits, greedy tokens, chat.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::cli_support::Place;
use crate::serve::Server;
use crate::support::fixture;

/// fp32 against fp32 in another order (tests/fixtures/README.md).
const TOLERANCE: f64 = 3e-4;
/// The goldens have five or six digits after the point.
const ROUNDED: f64 = 1e-5;

/// Where `.ci/install-real-model.sh` puts the model; `None`: the test is skipped.
fn model(test: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/real-model");
    let file = folder.join("model.gguf");
    if file.exists() {
        return Some(file);
    }
    let required = std::env::var_os("MONOBLOC_REQUIRE_REAL_MODEL").is_some_and(|value| value == "1");
    let reason = format!("`{}` is not there: run .ci/install-real-model.sh", folder.display());
    assert!(!required, "MONOBLOC_REQUIRE_REAL_MODEL is set: {reason}");
    crate::skipped(test, "real model", &reason);
    None
}

fn ids_of(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as usize).collect()
}

/// `ln(sum(exp(logits)))`
fn logsumexp(logits: &[f64]) -> f64 {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    most + logits.iter().map(|logit| (logit - most).exp()).sum::<f64>().ln()
}

/// The 16 largest logits of a golden and their sum at several positions; the probability of each token of the prompt.
fn check_logits(place: &Place, case: &Value) {
    let ids = ids_of(&case["ids"]);
    let listed: Vec<String> = ids.iter().map(usize::to_string).collect();
    place.run(&format!("logits tiny.toml --ids {} --out logits", listed.join(","))).code(0);
    let file = fs::read(place.path("logits")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let tensor = tensors.tensor("logits").unwrap();
    let values: Vec<f64> = tensor.data().as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    let rows: Vec<&[f64]> = values.chunks(tensor.shape()[1]).collect();
    assert_eq!(rows.len(), ids.len());
    let (name, mut compared) = (&case["name"], 0);
    for (at, top) in case["top16"].as_object().unwrap() {
        let row = rows[at.parse::<usize>().unwrap()];
        let near = |found: f64, expected: &Value| {
            let off = (found - expected.as_f64().unwrap()).abs();
            assert!(off <= TOLERANCE + ROUNDED, "{name} at {at}: {found} differs from {expected} by {off}");
        };
        let top: Vec<(usize, &Value)> =
            top.as_array().unwrap().iter().map(|pair| (pair[0].as_u64().unwrap() as usize, &pair[1])).collect();
        top.iter().for_each(|(id, expected)| near(row[*id], expected));
        let least = top.iter().map(|(id, _)| row[*id]).fold(f64::INFINITY, f64::min);
        let others = (0..row.len()).filter(|id| top.iter().all(|(of_top, _)| of_top != id));
        assert!(others.map(|id| row[id]).all(|logit| logit <= least + TOLERANCE), "{name} at {at}: another id");
        near(logsumexp(row), &case["logsumexp"][at]);
        compared += top.len();
    }
    assert!(compared >= 48, "{name}: {compared}");
    let nll = rows.iter().zip(&ids[1..]).map(|(row, next)| logsumexp(row) - row[*next]);
    let mean = nll.sum::<f64>() / (ids.len() - 1) as f64;
    let expected = case["mean_nll"].as_f64().unwrap();
    assert!((mean - expected).abs() < TOLERANCE, "{name}: {mean} nats a token, expected {expected}");
}

#[test]
fn a_real_model_agrees_with_transformers() {
    let Some(file) = model("a_real_model_agrees_with_transformers") else { return };
    let goldens = fs::read(fixture("real/smollm2-135m-instruct.json")).unwrap();
    let goldens: Value = serde_json::from_slice(&goldens).unwrap();
    let cases = goldens["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 3);
    let manifest = format!(
        "[model]\nsource = \"path:{}\"\n[precision]\nweights = \"fp32\"\ncache = \"fp32\"\nactivations = \"fp32\"\n\
         [decode]\ncontext_max = 128\nsequences_max = 3\n[[target]]\nrecord = \"cpu\"\n",
        file.display()
    );
    let place = Place::new();
    place.write("tiny.toml", &manifest);
    cases.iter().for_each(|case| check_logits(&place, case));

    // All at once, in steps of several rows. Texts go through the tokenizer, and the conversation through its chat template.
    let server = Server::start_of_manifest(place, &manifest, "", |_| {});
    let ask = |case: &Value| {
        let (path, key) = match case["prompt"].is_string() {
            true => ("/v1/completions", "prompt"),
            false => ("/v1/chat/completions", "messages"),
        };
        let body = json!({
            key: case["prompt"], "max_tokens": 32, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
            "skip_special_tokens": false,
        });
        (key, server.ok(path, &body))
    };
    let ask = &ask;
    let answers: Vec<(&str, Value)> = thread::scope(|scope| {
        let asked: Vec<_> = cases.iter().map(|case| scope.spawn(move || ask(case))).collect();
        asked.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (case, (key, answer)) in cases.iter().zip(answers) {
        let name = &case["name"];
        let choice = &answer["choices"][0];
        let (prompt, text) = match key {
            "prompt" => (&choice["prompt_token_ids"], &choice["text"]),
            _ => (&answer["prompt_token_ids"], &choice["message"]["content"]),
        };
        assert_eq!(prompt, &case["ids"], "{name}");
        assert_eq!(choice["token_ids"], case["greedy_ids"], "{name}");
        assert_eq!(text, &case["greedy_text"], "{name}");
    }
}
