//! Embeds the digest of the code of each stage, which the keys of the cache name: see `build/sources.rs`.

use std::path::PathBuf;
use std::process::Command;

#[allow(dead_code)] // Tests ask which files a stage reaches.
#[path = "build/sources.rs"]
mod sources;

fn main() {
    for path in ["build.rs", "build", "src", "kernels", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let path = |name: &str| PathBuf::from(std::env::var_os(name).expect("cargo says where the packages are"));
    let [root, core] = ["CARGO_MANIFEST_DIR", "DEP_MONOBLOC_CORE_ROOT"].map(path);
    println!("cargo::rerun-if-changed={}", core.join("src").display());
    let codes = sources::digests(sources::Roots { monobloc: &root, core: &core }, &compiler())
        .unwrap_or_else(|reason| panic!("{reason}"));
    for code in codes {
        println!("cargo::rustc-env=MONOBLOC_CODE_{}={}", code.stage.to_uppercase(), code.digest);
    }
}

/// What decides the machine code of this build: figures of the interpreter depend on it.
fn compiler() -> String {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let version = Command::new(variable("RUSTC")).arg("-vV").output().map(|output| output.stdout).unwrap_or_default();
    // The interpreter is in the other package, which may be optimised in another way.
    let levels = ["OPT_LEVEL", "DEP_MONOBLOC_CORE_OPT_LEVEL"].map(variable);
    let names = ["TARGET", "CARGO_CFG_TARGET_FEATURE", "CARGO_ENCODED_RUSTFLAGS"];
    let asserts = std::env::var_os("CARGO_CFG_DEBUG_ASSERTIONS").is_some();
    format!("{} {:?} {levels:?} {asserts}", String::from_utf8_lossy(&version), names.map(variable))
}
