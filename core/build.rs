//! Tells the package `monobloc` where these sources lie and how they are optimised: keys of the cache name both.

use std::env::var;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for (name, variable) in [("root", "CARGO_MANIFEST_DIR"), ("opt_level", "OPT_LEVEL")] {
        println!("cargo::metadata={name}={}", var(variable).expect("cargo sets it"));
    }
}
