#![doc = include_str!("ARCHITECTURE.md")]

// Modules of the crate `core`, which are first in the order.
pub use monobloc_core::{
    abba, candidate, defaults, define_id, digest, dtype, error, fields, files, format, id, interp, ir, lower, model,
    pack, pages, random, reference, rows, sample, schedule, target, text, validate, waves,
};

// Pipeline order; a module uses only modules above it (tests/it/tidy.rs holds the exact matrix).
pub mod manifest;
pub mod tokenizer;

pub mod grammar;
pub mod speculate;

pub mod codegen;
pub mod trace;

pub mod check;
pub mod cuda;
pub mod engine;
pub mod goldens;
pub mod measure;

pub mod cache;
pub mod flywheel;
pub mod page;
pub mod report;
pub mod search;

pub mod pipeline;

pub mod serve;

pub mod cli;

pub mod embed;
