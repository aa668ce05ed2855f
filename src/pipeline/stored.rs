//! Owns how a generated source and a cubin are kept, and reads what stages keep.
//!
//! The cache answers for every byte and a link for every part, so bytes that cannot be read are a fault of ours; whatever
//! they are, reading them ends in an answer.

use serde::{Deserialize, Serialize};

use super::attest::linked_content;
use super::keys;
use crate::check::{Checked, Expected};
use crate::codegen::KernelSource;
use crate::cuda::cubin::{self, Resources};
use crate::error::Fault;
use crate::measure::Measurement;

/// The generated source as the cache keeps it.
#[derive(Serialize, Deserialize)]
struct StoredSource {
    name: String,
    arch: String,
    text: String,
    headers: Vec<(String, String)>,
}

pub(super) fn source_bytes(source: KernelSource) -> Result<Vec<u8>, Fault> {
    let KernelSource { name, text, headers, arch } = source;
    serde_json::to_vec(&StoredSource { name, arch, text, headers })
        .map_err(|error| Fault::internal(format!("the source cannot be stored: {error}")))
}

/// Reads what [`source_bytes`] wrote; `place` is the file, for messages.
pub(super) fn source(bytes: &[u8], place: &str) -> Result<KernelSource, Fault> {
    let StoredSource { name, arch, text, headers } = serde_json::from_slice(bytes)
        .map_err(|error| Fault::internal(format!("`{place}` is no stored source: {error}")))?;
    Ok(KernelSource { name, text, headers, arch })
}

/// A cubin after the log of its compilation: the length of the log in 8 bytes, the log, the cubin.
pub(super) fn cubin_bytes(log: &str, cubin: &[u8]) -> Vec<u8> {
    [&(log.len() as u64).to_le_bytes()[..], log.as_bytes(), cubin].concat()
}

/// Reads what [`cubin_bytes`] wrote, and what the kernels of the cubin cost; `place` is the file, for messages.
pub(super) fn cubin<'b>(bytes: &'b [u8], place: &str) -> Result<(&'b [u8], Resources), Fault> {
    let broken = || Fault::internal(format!("`{place}` is no stored cubin"));
    let (length, rest) = bytes.split_first_chunk::<8>().ok_or_else(broken)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| broken())?;
    let (log, cubin) = rest.split_at_checked(length).ok_or_else(broken)?;
    let log = std::str::from_utf8(log).map_err(|_| broken())?;
    Ok((cubin, cubin::read(cubin, log)?))
}

/// Reads `bytes` as the content of an entry of `stage`, as the users of such an entry do, and tells only whether they
/// can be read. For tests with hostile bytes; schedules and candidates have parsers that are public.
///
/// # Errors
/// Bytes that no such entry has, and a stage that keeps something else.
pub fn read_stored(stage: &str, bytes: &[u8]) -> Result<(), Fault> {
    let place = "stored";
    let unreadable = || Fault::internal(format!("a result of `{stage}` cannot be read"));
    match stage {
        keys::SOURCE => source(bytes, place).map(drop),
        keys::COMPILE => cubin(bytes, place).map(drop),
        keys::CHECK => Checked::from_entry(bytes).map(drop).ok_or_else(unreadable),
        keys::MEASURE => Measurement::from_entry(bytes).map(drop).ok_or_else(unreadable),
        keys::EXPECT => Expected::from_entry(bytes).map(drop).ok_or_else(unreadable),
        keys::LINK => linked_content(bytes).map(drop).ok_or_else(unreadable),
        _ => Err(Fault::internal(format!("`{stage}` is no stage whose results are read here"))),
    }
}
