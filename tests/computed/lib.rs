//! What tests compute with for long. It is a package of its own because CI optimises it, and not the tests.

pub mod executor;
#[path = "../../build/sources.rs"]
pub mod sources;
