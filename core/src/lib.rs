//! The part of monobloc that computes: what models, programs and schedules are, how they are made and proven, and the interpreter.
//!
//! A crate of its own, because tests need it optimised, and all that is around it takes longer to optimise than to run. The package
//! `monobloc` exports every module under its own name, and its documentation has the map of all of them.

// Pipeline order; a module uses only modules above it (tests/it/tidy.rs holds the exact matrix).
pub mod dtype;
pub mod error;
pub mod format;
pub mod id;

pub mod digest;
pub mod fields;
pub mod files;
pub mod random;
pub mod text;

pub mod model;
pub mod sample;
pub mod target;

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

pub mod abba;
