//! End-to-end tests: one crate, one module per stage.

mod filetests;
