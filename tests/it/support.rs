//! Owns helpers of several integration tests: fixtures, goldens, distances.

use std::fs;
use std::path::{Path, PathBuf};

use monobloc::digest::Digest;
use safetensors::SafeTensors;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The checkpoints of a folder of fixtures, as `folder/name`.
pub fn checkpoints(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(fixture(folder)).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names.iter().map(|name| format!("{folder}/{name}")).collect()
}

/// The configs of this repository.
pub fn configs() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/configs");
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Those without experts, which have wave kernels.
pub fn dense_configs() -> Vec<PathBuf> {
    configs().into_iter().filter(|path| !fs::read_to_string(path).unwrap().contains("experts")).collect()
}

pub struct Goldens(Vec<u8>);

impl Goldens {
    pub fn open(name: &str) -> Goldens {
        Goldens(std::fs::read(fixture(name).join("goldens.safetensors")).unwrap())
    }

    pub fn names(&self) -> Vec<String> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        tensors.names().into_iter().map(|name| name.to_string()).collect()
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

/// Edits an entry of a cache without a key and seals it, like an attacker who has read `src/cache/frame.rs`. Returns the digest
/// of the new content.
pub fn forge(cache: &Path, path: &Path, edit: impl FnOnce(&mut Vec<u8>)) -> Digest {
    let name = path.strip_prefix(cache).expect("a file of the cache").display().to_string();
    let mut bytes = fs::read(path).expect("an entry");
    let head = b"\n// monobloc v1 bytes=";
    let at = bytes.windows(head.len()).rposition(|window| window == head).expect("a sealed line");
    bytes.truncate(at);
    let before = bytes.clone();
    edit(&mut bytes);
    assert_ne!(bytes, before, "the edit changes something");
    let content = Digest::of(&bytes);
    let mut hasher = blake3::Hasher::new_derive_key("monobloc cache seal v1");
    for part in [b"entry".as_slice(), name.as_bytes(), content.as_bytes()] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    let seal = format!("\n// monobloc v1 bytes={:020} content={content} seal={}\n", bytes.len(), hasher.finalize());
    bytes.extend_from_slice(seal.as_bytes());
    // Entries are read-only.
    fs::remove_file(path).expect("the entry");
    fs::write(path, bytes).expect("the entry");
    content
}
