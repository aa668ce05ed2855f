//! Replays every input in the corpora of the fuzzers, which include inputs that once caused a failure.

use std::fs;
use std::path::Path;

use crate::readers::{READERS, reader};

#[test]
fn no_reader_breaks_on_its_corpus() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for (name, _) in READERS {
        let read = reader(name).expect("a reader");
        let mut inputs: Vec<_> =
            fs::read_dir(root.join(name)).expect(name).map(|e| e.expect("an entry").path()).collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "no input for `{name}`");
        for input in inputs {
            let bytes = fs::read(&input).expect("an input");
            read(&bytes);
            // Each prefix is another input.
            for part in 1..8 {
                read(&bytes[..bytes.len() * part / 8]);
            }
        }
    }
}
