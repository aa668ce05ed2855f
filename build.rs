//! Embeds the digest of the code of each stage, which is a part of the cache's keys: see `build/sources.rs`.

use std::path::PathBuf;
use std::process::Command;

#[allow(dead_code)] // Tests ask which files a stage reaches.
#[path = "build/sources.rs"]
mod sources;

fn main() {
    for path in ["build.rs", "build", "src", "kernels", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the package is"));
    let codes = sources::digests(&root, &compiler()).unwrap_or_else(|reason| panic!("{reason}"));
    for code in codes {
        println!("cargo::rustc-env=MONOBLOC_CODE_{}={}", code.stage.to_uppercase(), code.digest);
    }
}

/// Everything that decides the machine code of this build, because figures of the interpreter depend on it.
fn compiler() -> String {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let version = Command::new(variable("RUSTC")).arg("-vV").output().map(|output| output.stdout).unwrap_or_default();
    let names = ["TARGET", "OPT_LEVEL", "CARGO_CFG_TARGET_FEATURE", "CARGO_ENCODED_RUSTFLAGS"];
    let asserts = std::env::var_os("CARGO_CFG_DEBUG_ASSERTIONS").is_some();
    format!("{} {:?} {asserts}", String::from_utf8_lossy(&version), names.map(variable))
}
