//! Owns the seal: one line after the content that makes every damaged byte visible.
//!
//! ```text
//! <content>\n// monobloc v1 bytes=00000000000000041233 content=<64 hex> seal=<64 hex>\n
//! ```
//!
//! The seal is a hash over the file's kind and name, its length and the content digest; with a key, a keyed hash. It stands
//! after the content, so that content starts at offset 0: text stays readable, a cubin stays an ELF file, a pack can be
//! mapped page-aligned, and a file that was cut anywhere has no seal. A sound file under the wrong name is refused, too.

use std::fmt;

use super::key::Key;
use crate::digest::Digest;

/// Length of the sealed line, with both line breaks.
pub const SEAL_BYTES: usize = HEAD.len() + 20 + CONTENT.len() + 64 + SEAL.len() + 64 + 1;

const HEAD: &str = "\n// monobloc v1 bytes=";
const CONTENT: &str = " content=";
const SEAL: &str = " seal=";
const SEAL_CONTEXT: &str = "monobloc cache seal v1";

/// Why a file cannot be trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    TooShort { found_bytes: u64 },
    Seal,
    Content { expected: Digest, found: Digest },
    NotAFile,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Damage::TooShort { found_bytes } => {
                write!(f, "cut short: expected a sealed line of {SEAL_BYTES} bytes, found {found_bytes} bytes in all")
            }
            Damage::Seal => {
                f.write_str("the sealed line is damaged, cut, made without the right key, or belongs to another entry")
            }
            Damage::Content { expected, found } => {
                write!(f, "expected content {}, found {}", expected.short(), found.short())
            }
            Damage::NotAFile => f.write_str("expected a file, found something else"),
        }
    }
}

/// The sealed line for content of `bytes` bytes. `kind` and `name` say what the file is; they are not written.
pub fn seal(key: Option<&Key>, kind: &str, name: &str, bytes: u64, content: &Digest) -> String {
    let mut hasher = match key {
        None => blake3::Hasher::new_derive_key(SEAL_CONTEXT),
        Some(key) => {
            // Derived for seals alone, so that other uses of the secret do not share a key with them.
            let derived = blake3::Hasher::new_derive_key(SEAL_CONTEXT).update(key.bytes()).finalize();
            blake3::Hasher::new_keyed(derived.as_bytes())
        }
    };
    for part in [kind.as_bytes(), name.as_bytes(), content.as_bytes()] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.update(&bytes.to_le_bytes());
    format!("{HEAD}{bytes:020}{CONTENT}{content}{SEAL}{}\n", Digest::from(hasher.finalize()))
}

/// The content digest that a sealed line states, if every byte of the line is sound. The content is not checked.
pub fn unseal(key: Option<&Key>, kind: &str, name: &str, bytes: u64, line: &[u8]) -> Result<Digest, Damage> {
    let start = HEAD.len() + 20 + CONTENT.len();
    let stated = line.get(start..start + 64).and_then(|hex| std::str::from_utf8(hex).ok());
    let content = stated.and_then(|hex| Digest::parse(hex).ok()).ok_or(Damage::Seal)?;
    // There is one spelling: a sound line equals the line that we would write.
    if line == seal(key, kind, name, bytes, &content).as_bytes() { Ok(content) } else { Err(Damage::Seal) }
}

/// Content and its sealed line, for files that are written whole.
pub fn wrap(key: Option<&Key>, kind: &str, name: &str, content: &[u8]) -> Vec<u8> {
    let mut framed = content.to_vec();
    framed.extend_from_slice(seal(key, kind, name, content.len() as u64, &Digest::of(content)).as_bytes());
    framed
}

/// The content of a file that was read whole, and its digest.
pub fn unwrap(key: Option<&Key>, kind: &str, name: &str, mut framed: Vec<u8>) -> Result<(Vec<u8>, Digest), Damage> {
    let Some(length) = framed.len().checked_sub(SEAL_BYTES) else {
        return Err(Damage::TooShort { found_bytes: framed.len() as u64 });
    };
    let stated = unseal(key, kind, name, length as u64, framed.get(length..).unwrap_or_default())?;
    framed.truncate(length);
    let mut hasher = blake3::Hasher::new();
    hasher.update_rayon(&framed);
    let found = Digest::from(hasher.finalize());
    if found == stated { Ok((framed, found)) } else { Err(Damage::Content { expected: stated, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_and_every_cut_is_found() {
        let framed = wrap(None, "entry", "program/1", b"some content");
        assert_eq!(framed.len(), 12 + SEAL_BYTES);
        assert_eq!(
            unwrap(None, "entry", "program/1", framed.clone()).map(|(bytes, _)| bytes),
            Ok(b"some content".to_vec())
        );
        for at in 0..framed.len() {
            for bit in 0..8 {
                let mut damaged = framed.clone();
                damaged[at] ^= 1 << bit;
                assert!(unwrap(None, "entry", "program/1", damaged).is_err(), "byte {at} bit {bit}");
            }
            assert!(unwrap(None, "entry", "program/1", framed[..at].to_vec()).is_err(), "cut at {at}");
        }
        let mut longer = framed.clone();
        longer.push(b'\n');
        assert!(unwrap(None, "entry", "program/1", longer).is_err());
    }

    #[test]
    fn a_seal_of_one_key_is_none_of_another() {
        let folder = tempfile::tempdir().unwrap();
        let key = |digit: &str| {
            let path = folder.path().join(digit);
            std::fs::write(&path, digit.repeat(64)).unwrap();
            Key::read(&path).unwrap()
        };
        let keys = [None, Some(key("1")), Some(key("2"))];
        for made in &keys {
            let framed = wrap(made.as_ref(), "entry", "program/1", b"content");
            for read in &keys {
                let found = unwrap(read.as_ref(), "entry", "program/1", framed.clone());
                assert_eq!(
                    found.is_ok(),
                    made.as_ref().map(Key::id) == read.as_ref().map(Key::id),
                    "{made:?} {read:?}"
                );
            }
        }
    }

    #[test]
    fn a_sound_file_under_another_name_is_refused() {
        let framed = wrap(None, "entry", "program/1", b"content");
        assert_eq!(unwrap(None, "entry", "program/2", framed.clone()).unwrap_err(), Damage::Seal);
        assert_eq!(unwrap(None, "why", "program/1", framed).unwrap_err(), Damage::Seal);
    }
}
