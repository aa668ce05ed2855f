//! Owns what waves of gated delta nets have in common: how blocks share the columns of a state, and the memory that a block needs for its columns; and of
//! short convolutions the channels of a share.

use super::Form;
use crate::ir::op::Mix;

/// Channels of a short convolution that a share has: in a chunk so few that most SMs have some, in a step two for each lane of a warp.
pub fn group_channels(form: Form) -> u32 {
    if form == Form::Chunk { 16 } else { 64 }
}

/// Positions through which a chunk carries a state at once: a lane of a warp has one.
pub(super) const POSITIONS: u32 = 32;
/// Most columns of a state that a block has, and least if it may have fewer: a tile of products has eight.
const COLUMNS_MAX: u32 = 64;
const COLUMNS_MIN: u32 = 16;

/// Whether products of a chunk have whole tiles: 16 rows and 8 columns of a state in each of `parts` parts of its columns.
pub(super) fn has_tiles(mix: &Mix, parts: u32) -> bool {
    let columns = mix.value_dim / parts.max(1);
    let whole = mix.value_dim.is_multiple_of(parts.max(1)) && columns.is_multiple_of(8);
    parts > 0 && whole && (8..=COLUMNS_MAX).contains(&columns) && mix.key_dim > 0 && mix.key_dim.is_multiple_of(16)
}

/// Into how many parts a chunk divides the columns of a state: each is computed alone, and repeats what keys and queries are multiplied for. `None`: there are
/// no whole tiles.
pub(super) fn parts(mix: &Mix, sms: u32) -> Option<u32> {
    let whole = [1, 2, 4, 8, 16].into_iter().filter(|parts| has_tiles(mix, *parts));
    let fits = |parts: &u32| mix.value_heads * parts <= sms && mix.value_dim / parts >= COLUMNS_MIN;
    whole.clone().rfind(fits).or(whole.clone().next())
}

/// Bytes of shared memory of a block that has one of `parts` parts of the columns of a state (`WaveMix` of waves/mix.cuh): keys, queries, two squares of positions,
/// the state, two rows of values for each position, and four numbers of each.
pub(super) fn chunk_bytes(mix: &Mix, parts: u32) -> u32 {
    let columns = mix.value_dim / parts.max(1);
    // Distances at which rows of four lanes, and columns of eight, lie in different banks.
    let of_keys = mix.key_dim + (36 - mix.key_dim % 32) % 32;
    let of_values = columns + if columns % 16 == 8 { 0 } else { 8 };
    let squares = 2 * POSITIONS * (POSITIONS + 4);
    4 * (2 * POSITIONS * of_keys + squares + (mix.key_dim + 2 * POSITIONS) * of_values + 4 * POSITIONS)
}

/// Bytes of scratch of a block of `warps` warps that brings a state to the next position: q, k, v and the gate, beta and the decay, and two sums of each column for
/// each part of the rows.
pub(super) fn row_bytes(mix: &Mix, warps: u32) -> u32 {
    4 * (mix.channels() + mix.value_dim + 2 + 2 * mix.parts(warps * 32) * mix.value_dim)
}
