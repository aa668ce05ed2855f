//! Shared by several integration tests: fixtures, goldens, distances.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The supported checkpoints of a folder of fixtures, as `folder/name`.
pub fn checkpoints(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(fixture(folder)).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    // There to be refused.
    names.retain(|name| name != "qwen3-moe");
    names.sort();
    names.iter().map(|name| format!("{folder}/{name}")).collect()
}

pub struct Goldens(Vec<u8>);

impl Goldens {
    pub fn open(name: &str) -> Goldens {
        Goldens(std::fs::read(fixture(name).join("goldens.safetensors")).unwrap())
    }

    pub fn bytes(&self, tensor: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.0).unwrap().tensor(tensor).unwrap().data().to_vec()
    }

    pub fn ids(&self, tensor: &str) -> Vec<u32> {
        self.bytes(tensor).as_chunks().0.iter().map(|b| u32::try_from(i64::from_le_bytes(*b)).unwrap()).collect()
    }

    pub fn floats(&self, tensor: &str) -> Vec<f32> {
        self.bytes(tensor).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // A NaN is the largest difference of all.
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, d| if d <= most { most } else { d })
}
