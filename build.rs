//! Embeds the digest of the code of each stage, which is a part of the cache's keys: see `build/sources.rs`. Compresses the weights of the built-in
//! model: 1.4 MB of the program.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

#[allow(dead_code)] // Tests ask which files a stage reaches.
#[path = "build/sources.rs"]
mod sources;

/// Weights of the built-in model.
const WEIGHTS: &str = "tests/fixtures/tinystories-llama/model.safetensors";
/// Level of `zstd`. Numbers in bf16 get no smaller with a higher one.
const LEVEL: i32 = 3;

fn main() {
    for path in ["build.rs", "build", "src", "kernels", "Cargo.lock", WEIGHTS] {
        println!("cargo::rerun-if-changed={path}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the package is"));
    let codes = sources::digests(&root, &compiler()).unwrap_or_else(|reason| panic!("{reason}"));
    for code in codes {
        println!("cargo::rustc-env=MONOBLOC_CODE_{}={}", code.stage.to_uppercase(), code.digest);
    }
    compress_weights(&root.join(WEIGHTS)).unwrap_or_else(|error| panic!("`{WEIGHTS}`: {error}"));
}

/// Writes the weights for `src/cli/builtin.rs`, and names their digest: a copy on disk is compared without decompressing.
fn compress_weights(from: &Path) -> std::io::Result<()> {
    let weights = fs::read(from)?;
    println!("cargo::rustc-env=MONOBLOC_BUILTIN_WEIGHTS={}", blake3::hash(&weights));
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write"));
    fs::write(folder.join("model.safetensors.zst"), zstd::encode_all(weights.as_slice(), LEVEL)?)
}

/// Everything that decides the machine code of this build, because figures of the interpreter depend on it.
fn compiler() -> String {
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let version = Command::new(variable("RUSTC")).arg("-vV").output().map(|output| output.stdout).unwrap_or_default();
    let names = ["TARGET", "OPT_LEVEL", "CARGO_CFG_TARGET_FEATURE", "CARGO_ENCODED_RUSTFLAGS"];
    let asserts = env::var_os("CARGO_CFG_DEBUG_ASSERTIONS").is_some();
    format!("{} {:?} {asserts}", String::from_utf8_lossy(&version), names.map(variable))
}
