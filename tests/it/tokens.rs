//! Tests tokenizers and chat templates that would take all memory or all time: each is refused, and the message names its file.

use std::fs;

use serde_json::{Value, json};

use crate::cli_support::Place;

/// The error of `generate` for a checkpoint with this file replaced.
fn refused(file: &str, text: &str, input: &str) -> String {
    let place = Place::new();
    let checkpoint = place.checkpoint("tinystories-llama");
    fs::write(checkpoint.join(file), text).unwrap();
    place.manifest(&checkpoint, 32);
    let answer = place.run(&format!("generate m.toml {input} --max-tokens 2"));
    assert_eq!(answer.code, 2, "{text}: {}{}", answer.stdout, answer.stderr);
    assert!(answer.stderr.contains(&format!("{file}` takes more than 2 GiB of memory")), "{}", answer.stderr);
    answer.stderr
}

#[test]
fn a_template_that_doubles_a_string_is_refused() {
    for grows in [
        // No output and few instructions, so neither bound of the template engine applies.
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        // Captured text is not output.
        "{% set text %}{% for i in range(100000) %}{{ 'x' * 1000000 }}{% endfor %}{% endset %}",
    ] {
        let said = refused("chat_template.jinja", grows, "--chat hello");
        assert!(said.contains("plain prompt"), "{said}");
    }
}

#[test]
fn a_normaliser_that_multiplies_a_letter_is_refused() {
    let place = Place::new();
    let file = place.checkpoint("tinystories-llama").join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let multiplies = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(4096)});
    tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": vec![multiplies; 3]});
    let said = refused("tokenizer.json", &tokenizer.to_string(), "--prompt a");
    assert!(said.contains("`--ids`"), "{said}");
}
