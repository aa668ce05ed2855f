//! The importer and the reference against goldens of transformers, for every family.

use std::path::{Path, PathBuf};

use monobloc::model::config::{Imported, import};
use monobloc::reference::{Session, argmax, forward};
use safetensors::SafeTensors;

/// Recomputation in another summation order differs by up to 3e-5 (tests/fixtures/README.md); the features that a
/// fixture exercises move its logits by far more than this.
const LOGITS_TOLERANCE: f32 = 3e-4;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

struct Goldens(Vec<u8>);

impl Goldens {
    fn open(name: &str) -> Goldens {
        Goldens(std::fs::read(fixture(name).join("goldens.safetensors")).unwrap())
    }

    fn bytes(&self, tensor: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.0).unwrap().tensor(tensor).unwrap().data().to_vec()
    }

    fn ids(&self, tensor: &str) -> Vec<u32> {
        self.bytes(tensor).as_chunks().0.iter().map(|b| u32::try_from(i64::from_le_bytes(*b)).unwrap()).collect()
    }

    fn floats(&self, tensor: &str) -> Vec<f32> {
        self.bytes(tensor).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn greedy(imported: &Imported, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut session = Session::new(&imported.graph, &imported.weights);
    let mut logits = Vec::new();
    for &id in prompt {
        logits = session.step(id);
    }
    let mut ids = Vec::new();
    while ids.len() < count {
        ids.push(argmax(&logits));
        logits = session.step(ids[ids.len() - 1]);
    }
    ids
}

/// Compares every checkpoint of a fixture folder with its goldens; returns how many there were.
fn agree_with_transformers(folder: &str, skip: &[&str]) -> usize {
    let mut names: Vec<String> = std::fs::read_dir(fixture(folder))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !skip.contains(&name.as_str()))
        .collect();
    names.sort();
    let mut wrong = Vec::new();
    for name in &names {
        let goldens = Goldens::open(&format!("{folder}/{name}"));
        let imported = match import(&fixture(folder).join(name)) {
            Ok(imported) => imported,
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        let ids = goldens.ids("input_ids");
        let logits = forward(&imported.graph, &imported.weights, &ids).concat();
        let difference = max_difference(&logits, &goldens.floats("logits"));
        let expected = goldens.ids("greedy_ids");
        let same = greedy(&imported, &ids, expected.len()) == expected;
        println!("{name}: largest difference {difference:e}, greedy ids {}", if same { "equal" } else { "differ" });
        if difference > LOGITS_TOLERANCE || !same {
            wrong.push(format!("{name}: largest difference {difference}, greedy ids equal: {same}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    names.len()
}

#[test]
fn every_family_agrees_with_transformers() {
    assert_eq!(agree_with_transformers("families", &["qwen3-moe"]), 19);
}

/// Absent keys, both config layouts, other rotary kinds, shards: see tests/fixtures/make_variants.py.
#[test]
fn variants_agree_with_transformers() {
    assert_eq!(agree_with_transformers("variants", &[]), 23);
}

/// A trained model: last logits and greedy text of its prompts, and the loss of held-out text token by token.
#[test]
fn tinystories_agrees_with_transformers() {
    let goldens = Goldens::open("tinystories-llama");
    let imported = import(&fixture("tinystories-llama")).unwrap();
    let (graph, weights) = (&imported.graph, &imported.weights);
    let (last, greedy_ids) = (goldens.floats("logits_last"), goldens.ids("greedy_ids"));
    // The eighth prompt is long and close to ties; the held-out text covers long contexts.
    for prompt in 0..7 {
        let ids = goldens.ids(&format!("prompt_ids.{prompt}"));
        let logits = forward(graph, weights, &ids).pop().unwrap();
        let difference = max_difference(&logits, &last[prompt * 1024..(prompt + 1) * 1024]);
        assert!(difference < LOGITS_TOLERANCE, "prompt {prompt}: {difference}");
        // The narrowest greedy margin of the seven is 0.0013, four times the tolerance.
        let expected = &greedy_ids[prompt * 64..prompt * 64 + 32];
        assert_eq!(greedy(&imported, &ids, 32), expected, "prompt {prompt}");
    }
    let ids = goldens.ids("heldout.ids");
    let expected = goldens.floats("heldout.nll");
    let logits = forward(graph, weights, &ids);
    let difference = max_difference(&logits[..64].concat(), &goldens.floats("heldout.logits_first64"));
    assert!(difference < LOGITS_TOLERANCE, "held-out logits: {difference}");
    let nll: Vec<f32> = logits.iter().zip(&ids[1..]).map(|(logits, &next)| nll(logits, next)).collect();
    let difference = max_difference(&nll, &expected);
    assert!(difference < LOGITS_TOLERANCE, "held-out loss: {difference}");
    let perplexity = |nll: &[f32]| (nll.iter().map(|&l| f64::from(l)).sum::<f64>() / nll.len() as f64).exp();
    let (found, expected) = (perplexity(&nll), perplexity(&expected));
    assert!((found / expected - 1.0).abs() < 1e-5, "perplexity {found} against {expected}");
}

fn nll(logits: &[f32], next: u32) -> f32 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    (sum.ln() - f64::from(logits[next as usize] - max)) as f32
}
