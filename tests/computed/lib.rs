//! What tests compute with for long. It is a package of its own because CI optimises it, and not the tests.

pub mod executor;
pub mod naive;
#[path = "../oracle/mod.rs"]
pub mod oracle;
pub mod proof_support;
#[path = "../../build/sources.rs"]
pub mod sources;
