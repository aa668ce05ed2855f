//! End-to-end tests: one crate, one module per stage.

mod proof;
mod proof_holes;
mod proof_hostile;
mod proof_naive;
mod proof_real;
mod proof_support;
