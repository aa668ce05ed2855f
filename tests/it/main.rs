//! End-to-end tests: one crate, one module per stage.

mod filetests;
mod proof;
mod proof_holes;
mod proof_real;
mod proof_support;
