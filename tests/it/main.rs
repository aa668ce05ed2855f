//! End-to-end tests: what a user sees, over fixtures; one crate, one module per stage.

mod alone;
mod anywhere;
mod artefact;
mod bench;
mod build;
mod cache_fp8;
mod chat;
mod check_choices;
mod check_chunks;
mod check_codes;
mod check_mutants;
mod checked;
mod cli;
mod cli_errors;
mod cli_support;
mod clients;
mod code_keys;
mod config_keys;
mod corpus;
mod cycle;
mod default_fits;
mod devices;
mod distribution;
mod driver;
mod engine;
mod experts;
mod experts_proof;
mod export;
mod families;
mod features;
mod filetests;
#[cfg(feature = "remote")]
mod fleet;
mod formats;
mod fuzz_replay;
mod gguf;
mod gguf_mixers;
mod gguf_writer;
mod hostile_cache;
mod hostile_files;
mod http_client;
#[cfg(feature = "hub")]
mod hub;
mod interp;
mod kernels;
mod launcher;
mod mix;
mod mix_parts;
mod mtp;
mod nvrtc;
mod ops;
mod oracle_agrees;
mod proof;
mod proof_everywhere;
mod proof_holes;
mod proof_hostile;
mod proof_naive;
mod proof_real;
mod ptx;
#[path = "../../fuzz/src/readers.rs"]
mod readers;
mod real_model;
mod recurrent;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "remote")]
mod remote_servers;
mod ring_proxy;
mod rows;
mod sampler;
mod sampling;
#[cfg(feature = "remote")]
mod schedulers;
mod scripted;
mod search_drive;
mod search_fleet;
mod search_transfer;
mod serve;
mod snapshots;
mod stale_weights;
mod support;
mod tidy;
mod tokens;
mod tune;
mod tune_away;
mod unwritten;
mod waves;
mod waves_checked;
mod waves_convolve;
mod waves_devices;
mod waves_experts;
mod waves_knobs;
mod waves_mamba;
mod waves_nets;
mod waves_norms;
mod waves_pairs;
mod waves_text;
mod workflows;
mod wrappers;

use std::io::Write;

use computed::{oracle, proof_support};

/// Says on the terminal that `test` did not run: the test harness hides what passing tests print by `eprintln!`.
#[allow(clippy::explicit_write)]
fn skipped(test: &str, missing: &str, reason: &str) {
    let first = reason.lines().next().unwrap_or_default();
    writeln!(std::io::stderr(), "SKIPPED (no {missing}): {test}: {first}").unwrap();
}
