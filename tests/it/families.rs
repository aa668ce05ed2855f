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
