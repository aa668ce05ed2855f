//! One binary for all targets; `READER=mkir` chooses one. So a machine without a compiler needs one file.
#![no_main]
#![feature(alloc_error_hook)]

mod budget;

use budget::Budget;
use libfuzzer_sys::fuzz_target;
use monobloc_fuzz::{Reader, reader};
use std::sync::OnceLock;

#[global_allocator]
static BUDGET: Budget = Budget::new();

/// The reader, and whether its memory and time are bounded here, because monobloc runs it in a bounded process.
static READER: OnceLock<(Reader, bool)> = OnceLock::new();

fuzz_target!(
    init: {
        let name = std::env::var("READER").unwrap_or_default();
        let chosen = reader(&name).unwrap_or_else(|| panic!("READER is `{name}`, expected a target of readers.rs"));
        READER.get_or_init(|| (chosen, matches!(name.as_str(), "tokenizer" | "gguf-tokens")));
        // Panics of a library that `tokenizer` catches are no findings; uncaught ones still end the run.
        std::panic::set_hook(Box::new(|_| {}));
        std::alloc::set_alloc_error_hook(|_| panic!("memory or time is spent"));
    },
    |data: &[u8]| match READER.get() {
        Some((read, true)) => BUDGET.spend(|| read(data)),
        Some((read, false)) => read(data),
        None => {}
    }
);
