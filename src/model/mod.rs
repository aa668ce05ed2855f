//! From a checkpoint to a `ModelGraph`: the closed-schema importer, and the weights.

pub mod blocks;
pub mod cache_scales;
pub mod coded;
pub mod config;
pub mod graph;
#[cfg(feature = "hub")]
mod hub;
pub mod rounding;
pub mod sha256;
pub mod source;
pub mod synthetic;
pub mod weights;
