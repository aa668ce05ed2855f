//! Group 6: what asynchronous copies need: a fence between proxies, and rows on copy boundaries.

use super::{Entity, Found, Rule, Witness, note};
use crate::ir::op::{Op, Role};
use crate::ir::program::Program;
use crate::ir::{BufferId, GridId};
use crate::target::{CopyMechanism, Target, TargetKind};

/// Size and alignment of the pieces that a GPU copies: of `cp.async.bulk`, of the wide form of `cp.async`, and of the
/// vector loads that stand in for them, bytes.
const COPY_BYTES: u64 = 16;

/// An append is visible to ordinary loads of `sm`, not to its bulk copies: no proxy fence after it became visible.
pub(super) fn missing(
    at: Entity,
    sm: usize,
    buffer: BufferId,
    story: impl FnOnce() -> Vec<Witness>,
    found: &mut Found,
) {
    found.add_with(Rule::MissingProxy, at, || {
        let message = format!(
            "bulk copies of {buffer} on sm{sm} read an append without a proxy fence, expected `proxy` on a carried event that the SM's first task waits for"
        );
        (message, story())
    });
}

/// The loader copies the columns of one KV head, row by row.
pub(super) fn copies(program: &Program, target: &Target, found: &mut Found) {
    if target.kind == TargetKind::Cpu && target.spec.copy == CopyMechanism::Plain {
        return;
    }
    for (g, grid) in (0..).zip(&program.grids) {
        if !matches!(grid.op, Op::Attention(_)) {
            continue;
        }
        for operand in [Role::HistoryK, Role::HistoryV].into_iter().filter_map(|role| grid.operand(role)) {
            let buffer = &program.buffers[operand.buffer.index()];
            let bytes = buffer.dtype.bytes() as u64;
            let sizes = [operand.cols.stride, buffer.cols, operand.cols.base].map(|n| u64::from(n) * bytes);
            if sizes.iter().any(|size| size % COPY_BYTES != 0) {
                found.add_with(Rule::CopyAlignment, Entity::Grid(GridId(g)), || {
                    let [head, row, base] = sizes;
                    let message = format!(
                        "expected heads, rows and base in multiples of {COPY_BYTES} bytes, found {head}, {row} and {base}"
                    );
                    (message, vec![note(Entity::Buffer(operand.buffer), "holds the history")])
                });
            }
        }
    }
}
