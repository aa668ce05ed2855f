//! Owns how a draft begins in the reference; see [`Joined`].

use super::{add_scaled, linear, norm};
use crate::model::graph::Joined;
use crate::model::weights::Weights;

/// `of_embedding(embedding_norm(embedded)) + of_given(given_norm(given))`, `[hidden]`.
pub fn join(weights: &Weights, op: &Joined, embedded: &[f64], given: &[f64]) -> Vec<f64> {
    let mut x = linear(weights, &op.of_embedding, &norm(weights, &op.embedding_norm, embedded));
    add_scaled(&mut x, 1.0, &linear(weights, &op.of_given, &norm(weights, &op.given_norm, given)));
    x
}
