#![doc = include_str!("ARCHITECTURE.md")]

// In the order of the pipeline: a module uses only modules above it. tests/it/tidy.rs has the exact matrix.
pub mod dtype;
pub mod error;
pub mod format;
pub mod id;

pub mod address;
pub mod digest;
pub mod fields;
pub mod files;
pub mod gguf;
pub mod random;
pub mod text;

pub mod manifest;
pub mod model;
pub mod sample;
pub mod target;
pub mod tokenizer;

pub mod grammar;
pub mod speculate;

pub mod candidate;
pub mod ir;
pub mod pages;
pub mod rows;

pub mod defaults;
pub mod interp;
pub mod lower;
pub mod pack;
pub mod reference;
pub mod schedule;
pub mod validate;
pub mod waves;

pub mod codegen;
pub mod trace;

pub mod abba;
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
