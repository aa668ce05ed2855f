//! Owns the key of a cache: a secret that seals entries, so that only holders of the key can make entries that are used.
//!
//! Without a key, a seal detects damage but no forgery, because everyone who may write the folder can seal an entry anew. With
//! a key, the seal is a keyed blake3. Sealed files are then in folders named after the key (`schedule-v1-k1a2b3c4d`), so a
//! process with another key, or with none, neither reads nor disturbs them.

use std::fmt;
use std::path::Path;

use super::error::CacheError;
use crate::files;

/// Largest key file that is read; a key is one short line.
const FILE_BYTES_MAX: u64 = 4096;
const ID_CONTEXT: &str = "monobloc cache key id v1";
/// Hex digits of the id. It distinguishes keys in names and messages; the strength of the seal does not depend on it.
const ID_DIGITS: usize = 8;

/// 32 secret bytes.
#[derive(Clone)]
pub struct Key {
    bytes: [u8; 32],
    id: String,
}

/// Prints the id alone: keys must not reach logs.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.id)
    }
}

impl Key {
    /// Reads a file with 64 hex digits.
    ///
    /// # Errors
    /// A file that cannot be read, or that holds anything else.
    pub fn read(path: &Path) -> Result<Key, CacheError> {
        let fault = |reason: String| CacheError::Key { path: path.to_path_buf(), reason };
        let text = files::read_text(path, FILE_BYTES_MAX).map_err(|error| fault(error.to_string()))?;
        // The message does not repeat the text: it may be a mistyped key.
        let expected = || fault("expected 64 hex digits on one line".to_string());
        let hash = blake3::Hash::from_hex(text.trim()).map_err(|_| expected())?;
        Ok(Key::new(*hash.as_bytes()))
    }

    fn new(bytes: [u8; 32]) -> Key {
        let digest = blake3::Hasher::new_derive_key(ID_CONTEXT).update(&bytes).finalize().to_hex();
        Key { bytes, id: digest.chars().take(ID_DIGITS).collect() }
    }

    /// Eight hex digits that tell this key from others, and nothing about its bytes.
    pub fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.bytes
    }
}

/// The end of the name of a folder whose files are sealed with this key.
pub(super) fn suffix(key: Option<&Key>) -> String {
    key.map(|key| format!("-k{}", key.id)).unwrap_or_default()
}

/// The name of a folder without the suffix of any key.
pub(super) fn without_suffix(name: &str) -> &str {
    match name.rsplit_once("-k") {
        Some((plain, id)) if id.len() == ID_DIGITS && id.bytes().all(|digit| digit.is_ascii_hexdigit()) => plain,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_64_hex_digits_and_tells_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Key::read(&path)
        };
        let digits = "00112233445566778899aabbccddeeff0123456789abcdef0123456789abcdef";
        let key = read(&format!("{digits}\n")).unwrap();
        assert_eq!(read(&digits.to_uppercase()).unwrap().id(), key.id());
        assert_ne!(read(&digits.replace("00", "01")).unwrap().id(), key.id());
        let said = format!("{key:?}");
        assert!(said == format!("Key({})", key.id()) && !digits.contains(key.id()), "{said}");
        for bad in ["", &digits[1..], &format!("{digits}0"), &digits.replace("00", "zz")] {
            let said = read(bad).unwrap_err().to_string();
            assert!(said.contains("expected 64 hex digits") && !said.contains("8899"), "{said}");
        }
        assert!(Key::read(&folder.path().join("none")).unwrap_err().to_string().contains("none"));
        assert_eq!(without_suffix(&format!("files{}", suffix(Some(&key)))), "files");
        assert_eq!((without_suffix("files"), without_suffix("files-kitten")), ("files", "files-kitten"));
    }
}
