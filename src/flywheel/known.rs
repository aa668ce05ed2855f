//! Owns the rows that a merge has seen: their ids and the digests of their cells, in a hash table on the disk, so that the memory of a
//! merge does not grow with the number of rows.
//!
//! A slot is an id and a digest of cells. Collisions go to the next free slot, and at most half of the slots are taken. A slot of
//! zeros is free: no digest of cells is zero. The file has no name, so nothing is left of it if the process is killed.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::digest::Digest;

const DIGEST_BYTES: usize = 32;
const SLOT_BYTES: usize = 2 * DIGEST_BYTES;
/// Slots of an empty table; a power of two.
const SLOTS_MIN: u64 = 1 << 10;
/// A full table gets this many times its slots.
const GROWTH: u64 = 4;
/// Slots that are read at a time while a table grows.
const SLOTS_AT_ONCE: u64 = 1 << 12;

/// What is known of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// No row has this id.
    New,
    /// A row with this id has the same cells.
    Same,
    /// A row with this id has other cells.
    Other,
}

/// Rows by their ids.
pub struct KnownRows {
    folder: PathBuf,
    file: File,
    /// A power of two.
    slots: u64,
    count: u64,
    /// Seeded at random: a file cannot choose ids that collide.
    hasher: RandomState,
}

impl KnownRows {
    /// No rows yet. The table grows in `folder`, 128 to 512 bytes a row.
    pub fn new_in(folder: &Path) -> io::Result<KnownRows> {
        let file = table(folder, SLOTS_MIN)?;
        Ok(KnownRows { folder: folder.to_path_buf(), file, slots: SLOTS_MIN, count: 0, hasher: RandomState::new() })
    }

    /// Number of different ids.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Adds a row, unless its id is known.
    pub fn add(&mut self, id: Digest, content: Digest) -> io::Result<Known> {
        if (self.count + 1) * 2 > self.slots {
            self.grow()?;
        }
        let known = put(&self.file, self.slots, &self.hasher, id.as_bytes(), content.as_bytes())?;
        self.count += u64::from(known == Known::New);
        Ok(known)
    }

    fn grow(&mut self) -> io::Result<()> {
        let slots = self.slots * GROWTH;
        let file = table(&self.folder, slots)?;
        let mut rows = vec![0; SLOT_BYTES * SLOTS_AT_ONCE.min(self.slots) as usize];
        for start in (0..self.slots).step_by(rows.len() / SLOT_BYTES) {
            self.file.read_exact_at(&mut rows, start * SLOT_BYTES as u64)?;
            for row in rows.chunks_exact(SLOT_BYTES) {
                let (id, content) = row.split_at(DIGEST_BYTES);
                if !is_free(content) {
                    put(&file, slots, &self.hasher, id, content)?;
                }
            }
        }
        (self.file, self.slots) = (file, slots);
        Ok(())
    }
}

/// A table of free slots: zeros that take no place on the disk until they are written.
fn table(folder: &Path, slots: u64) -> io::Result<File> {
    let file = tempfile::tempfile_in(folder)?;
    file.set_len(slots * SLOT_BYTES as u64)?;
    Ok(file)
}

fn is_free(content: &[u8]) -> bool {
    content.iter().all(|byte| *byte == 0)
}

/// Finds an id, or writes it into the first free slot from its own on.
fn put(file: &File, slots: u64, hasher: &RandomState, id: &[u8], content: &[u8]) -> io::Result<Known> {
    let mut at = hasher.hash_one(id) % slots;
    let mut slot = [0; SLOT_BYTES];
    loop {
        file.read_exact_at(&mut slot, at * SLOT_BYTES as u64)?;
        let (found, cells) = slot.split_at(DIGEST_BYTES);
        if is_free(cells) {
            file.write_all_at(&[id, content].concat(), at * SLOT_BYTES as u64)?;
            return Ok(Known::New);
        }
        if found == id {
            return Ok(if cells == content { Known::Same } else { Known::Other });
        }
        at = (at + 1) % slots;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stay_known_while_the_table_grows_and_no_file_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let mut rows = KnownRows::new_in(folder.path()).unwrap();
        let id = |n: u32| Digest::of(&n.to_le_bytes());
        // Grows four times.
        let count = 40_000;
        for n in 0..count {
            assert_eq!(rows.add(id(n), id(n + 1)).unwrap(), Known::New, "{n}");
        }
        for n in 0..count {
            assert_eq!(rows.add(id(n), id(n + 1)).unwrap(), Known::Same, "{n}");
            assert_eq!(rows.add(id(n), id(n + 2)).unwrap(), Known::Other, "{n}");
        }
        assert_eq!(rows.count(), u64::from(count));
        // Ids that were shortened differ in few bytes, and one may be zero.
        for n in 0..=255 {
            let mut short = [0; 32];
            short[7] = n;
            assert_eq!(rows.add(Digest::from_bytes(short), id(0)).unwrap(), Known::New, "{n}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
