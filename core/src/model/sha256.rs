//! Owns the SHA-256 of a file: the hub names large files by it, and hf-hub does not check what it downloaded.

use std::io::{self, Read};

use sha2::{Digest, Sha256};

/// Bytes that are read at once.
const BUFFER_BYTES: usize = 1 << 20;

/// The digest of everything `reader` yields, in lower-case hexadecimal.
///
/// # Errors
/// Those of the reader.
pub fn hex_digest(mut reader: impl Read) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => hasher.update(&buffer[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_agree_with_the_standard() {
        let million = vec![b'a'; 1_000_000];
        let cases: [(&[u8], &str); 4] = [
            (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
            (&million, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(hex_digest(bytes).unwrap(), expected);
        }
    }

    #[test]
    fn a_digest_does_not_depend_on_how_bytes_arrive() {
        struct Trickle(usize);
        impl Read for Trickle {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let n = buffer.len().min(self.0).min(977);
                buffer[..n].fill(b'a');
                self.0 -= n;
                Ok(n)
            }
        }
        let whole = vec![b'a'; 3_000_001];
        assert_eq!(hex_digest(Trickle(whole.len())).unwrap(), hex_digest(whole.as_slice()).unwrap());
    }
}
