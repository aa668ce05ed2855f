//! Integration tests: what a user sees, over fixtures.

mod families;
mod interp;
mod support;
