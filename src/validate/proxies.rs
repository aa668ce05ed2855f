//! Group 6: what asynchronous copies need: a fence between proxies. That heads of a cache row start where a copy may
//! start is part of their shape (`operands`).

use super::{Entity, Found, Rule, Witness};
use crate::ir::BufferId;

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
            "bulk copies of {buffer} on sm{sm} read an append without a proxy fence, \
             expected `proxy` on a carried event that the SM's first task waits for"
        );
        (message, story())
    });
}
