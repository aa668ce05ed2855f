//! One binary for all targets: `READER=mkir` chooses. One build to ship to a machine that has no compiler.
#![no_main]

use libfuzzer_sys::fuzz_target;
use monobloc_fuzz::{Reader, reader};
use std::sync::OnceLock;

static READER: OnceLock<Reader> = OnceLock::new();

fuzz_target!(
    init: {
        let name = std::env::var("READER").unwrap_or_default();
        let chosen = reader(&name).unwrap_or_else(|| panic!("READER is `{name}`, expected a target of readers.rs"));
        READER.get_or_init(|| chosen);
        // Panics of a library that `tokenizer` catches are no findings; those that nobody catches end the run all the same.
        std::panic::set_hook(Box::new(|_| {}));
    },
    |data: &[u8]| {
        if let Some(read) = READER.get() {
            read(data);
        }
    }
);
