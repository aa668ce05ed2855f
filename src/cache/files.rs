//! Owns `FileDigests`: content digests of large files, remembered as long as the file's metadata do not change.
//!
//! A file counts as unchanged while its path, size, mtime, ctime and inode are unchanged. The ctime is compared because a copy
//! can keep size and mtime (`cp -p` over the same file); the price is one more hash after a chmod. Not noticed: a change
//! that keeps all five, which needs access to the raw disk or a clock set back.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rayon::prelude::*;
use tempfile::NamedTempFile;

use super::error::CacheError;
use super::frame;
use super::key::{self, Key};
use crate::digest::Digest;
use crate::files;

/// Bytes read and hashed at a time: large enough for blake3 to use every core, small enough for the last-level cache.
const READ_BYTES: usize = 8 << 20;
/// Bytes that one thread reads at a time: a single reader copies from the page cache more slowly than all cores hash.
const PIECE_BYTES: usize = 1 << 20;
/// Largest record; a larger file is not ours.
const RECORD_BYTES_MAX: u64 = 64 << 10;
/// The folder of a cache in which files are written before they get their name.
pub(super) const TEMPORARY: &str = "tmp";

/// The digest of one file, and what it cost to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileDigest {
    pub digest: Digest,
    /// Length of the file.
    pub bytes: u64,
    /// Bytes read from it now: 0 when the digest was remembered.
    pub bytes_read: u64,
}

/// Digests of input files (weights, tokenizers), remembered in a cache folder.
#[derive(Debug, Clone)]
pub struct FileDigests {
    memory: Memory,
}

impl FileDigests {
    /// `root` is the folder of a cache. Nothing is created before there is something to remember.
    pub fn open(root: &Path, key: Option<&Key>) -> FileDigests {
        FileDigests { memory: Memory::open(root, "files", key) }
    }

    /// blake3 of the content of `path`; the remembered one if the file is unchanged. A record that cannot be written is not a
    /// failure: the next call reads the file again. A file that changes while it is read is an error.
    pub fn digest(&self, path: &Path) -> Result<FileDigest, CacheError> {
        let fault = |source| CacheError::io("read", path, source);
        // One name for a file and every link to it: hub snapshots are folders of links.
        let place = fs::canonicalize(path).map_err(fault)?;
        let file = files::open(&place).map_err(|error| fault(error.into()))?;
        let before = file.metadata().map_err(fault)?;
        let (name, identity, bytes) = (place.as_os_str().as_bytes(), Identity::of(&before), before.len());
        if let Some(digest) = self.memory.recall(name, &identity) {
            return Ok(FileDigest { digest, bytes, bytes_read: 0 });
        }
        let digest = hash_prefix(&file, bytes, &mut |_| {}).map_err(fault)?;
        let after = file.metadata().map_err(fault)?;
        if Identity::of(&after) != identity {
            return Err(fault(io::Error::other("the file changed while it was read")));
        }
        if identity.is_settled(SystemTime::now()) {
            let _ = self.memory.remember(name, &identity, &digest);
        }
        Ok(FileDigest { digest, bytes, bytes_read: bytes })
    }
}

/// blake3 of the first `bytes` bytes. Reads by position, so that a shared descriptor keeps its offset; ordinary reads
/// rather than a mapping, because a mapped file that shrinks kills the process. `progress` is called with each count of bytes.
pub(super) fn hash_prefix(file: &File, bytes: u64, progress: &mut dyn FnMut(u64)) -> io::Result<Digest> {
    Ok(Digest::from(hasher_of_prefix(file, bytes, progress)?.finalize()))
}

/// As [`hash_prefix`], to be continued.
pub(super) fn hasher_of_prefix(file: &File, bytes: u64, progress: &mut dyn FnMut(u64)) -> io::Result<blake3::Hasher> {
    let mut buffer = vec![0u8; READ_BYTES.min(usize::try_from(bytes).unwrap_or(READ_BYTES))];
    let mut hasher = blake3::Hasher::new();
    let mut at = 0;
    while at < bytes {
        let run = buffer.len().min(usize::try_from(bytes - at).unwrap_or(buffer.len()));
        let Some(run) = buffer.get_mut(..run) else { break };
        run.par_chunks_mut(PIECE_BYTES)
            .enumerate()
            .try_for_each(|(index, piece)| file.read_exact_at(piece, at + (index * PIECE_BYTES) as u64))?;
        hasher.update_rayon(run);
        at += run.len() as u64;
        progress(run.len() as u64);
    }
    Ok(hasher)
}

/// What the file system says about a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    bytes: u64,
    inode: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl Identity {
    pub fn of(metadata: &Metadata) -> Identity {
        Identity {
            bytes: metadata.size(),
            inode: metadata.ino(),
            mtime: (metadata.mtime(), metadata.mtime_nsec()),
            ctime: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether a later write would get another time stamp. Within one tick of the file system's clock it would get the same one,
    /// and a remembered digest could be wrong. Kernel ticks take up to 10 ms; file systems that store whole seconds tick every
    /// 1 s or 2 s.
    fn is_settled(&self, now: SystemTime) -> bool {
        let tick = if self.mtime.1 == 0 { Duration::from_secs(2) } else { Duration::from_millis(20) };
        let newest = self.mtime.max(self.ctime);
        let Ok(since_epoch) = u64::try_from(newest.0) else { return true };
        let newest =
            SystemTime::UNIX_EPOCH + Duration::new(since_epoch, u32::try_from(newest.1).unwrap_or(999_999_999));
        // A stamp in the future never settles, so such a file is read every time.
        now.duration_since(newest).is_ok_and(|age| age > tick)
    }

    fn text(&self) -> String {
        let Identity { bytes, inode, mtime, ctime } = self;
        format!("bytes={bytes} inode={inode} mtime={}.{:09} ctime={}.{:09}", mtime.0, mtime.1, ctime.0, ctime.1)
    }
}

/// One small sealed file per remembered path. Writers replace whole records, so there is nothing to lock.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    folder: PathBuf,
    temporary: PathBuf,
    kind: &'static str,
    key: Option<Key>,
}

impl Memory {
    pub fn open(root: &Path, kind: &'static str, key: Option<&Key>) -> Memory {
        let folder = root.join(format!("{kind}{}", key::suffix(key)));
        Memory { folder, temporary: root.join(TEMPORARY), kind, key: key.cloned() }
    }

    fn record(&self, name: &[u8]) -> (PathBuf, String) {
        let id = Digest::of(name).to_string();
        (self.folder.join(&id), id)
    }

    /// The digest remembered for `name`, if its file is still the same. Anything unreadable is "not remembered".
    pub fn recall(&self, name: &[u8], identity: &Identity) -> Option<Digest> {
        let (path, id) = self.record(name);
        let text = read_framed(&path, self.key.as_ref(), self.kind, &id, RECORD_BYTES_MAX)?;
        let (found, digest) = text.lines().next()?.split_once(" digest=")?;
        if found == identity.text() { Digest::parse(digest).ok() } else { None }
    }

    pub fn remember(&self, name: &[u8], identity: &Identity, digest: &Digest) -> io::Result<()> {
        let (path, id) = self.record(name);
        // The name is for people, and for the collector; recall does not read it.
        let text = format!("{} digest={digest}\n{}", identity.text(), String::from_utf8_lossy(name));
        fs::create_dir_all(&self.folder)?;
        replace(&self.temporary, &path, &frame::wrap(self.key.as_ref(), self.kind, &id, text.as_bytes()))
    }

    pub fn forget(&self, name: &[u8]) {
        let _ = fs::remove_file(self.record(name).0);
    }

    /// Every record: its path, and if it is sound the name of the file that it is about.
    pub fn records(&self) -> Vec<(PathBuf, Option<String>)> {
        let Ok(folder) = fs::read_dir(&self.folder) else { return Vec::new() };
        let records = folder.flatten().map(|record| {
            let (path, id) = (record.path(), record.file_name());
            let text =
                id.to_str().and_then(|id| read_framed(&path, self.key.as_ref(), self.kind, id, RECORD_BYTES_MAX));
            let name = text.and_then(|text| text.split_once('\n').map(|(_, name)| name.to_string()));
            (path, name)
        });
        records.collect()
    }
}

/// The text of a small sealed file; `None` if it is missing, too large or damaged.
pub(super) fn read_framed(path: &Path, key: Option<&Key>, kind: &str, name: &str, bytes_max: u64) -> Option<String> {
    let file = files::open(path).ok()?;
    if file.metadata().ok()?.len() > bytes_max {
        return None;
    }
    let mut framed = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(&file, bytes_max), &mut framed).ok()?;
    let (text, _) = frame::unwrap(key, kind, name, framed).ok()?;
    String::from_utf8(text).ok()
}

/// Replaces a small file as a whole. Not synced: the content of these files can be computed again.
pub(super) fn replace(temporary: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = new_temporary(temporary)?;
    io::Write::write_all(&mut file, bytes)?;
    file.persist(path).map(|_| ()).map_err(|error| error.error)
}

/// A file under a temporary name, locked so that a collector can tell it from the remains of a killed process.
pub(super) fn new_temporary(folder: &Path) -> io::Result<NamedTempFile> {
    fs::create_dir_all(folder)?;
    // Read-only for everyone, the owner too: nothing in a cache is edited in place. The descriptor still writes.
    let file = tempfile::Builder::new().permissions(Permissions::from_mode(0o444)).tempfile_in(folder)?;
    // Without locks, the collector keeps the file for an hour instead.
    let _ = file.as_file().lock();
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::FileTimes;

    fn settle(path: &Path) {
        let past = SystemTime::now() - Duration::from_secs(60);
        File::options().write(true).open(path).unwrap().set_times(FileTimes::new().set_modified(past)).unwrap();
        // The ctime cannot be set, so wait for the next tick.
        std::thread::sleep(Duration::from_millis(40));
    }

    #[test]
    fn an_unchanged_file_is_read_once_and_a_changed_one_again() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("weights"), folder.path().join("link"));
        let content = vec![3u8; (READ_BYTES * 2) + 5];
        fs::write(&path, &content).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        settle(&path);
        let digests = FileDigests::open(folder.path(), None);
        let first = digests.digest(&path).unwrap();
        let bytes = content.len() as u64;
        assert_eq!(first, FileDigest { digest: Digest::of(&content), bytes, bytes_read: bytes });
        assert_eq!(digests.digest(&path).unwrap().bytes_read, 0);
        assert_eq!(
            FileDigests::open(folder.path(), None).digest(&link).unwrap().bytes_read,
            0,
            "links share the memory"
        );

        // Same size, same inode, same mtime: only the ctime tells.
        let mtime = fs::metadata(&path).unwrap().modified().unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"x", 9).unwrap();
        file.set_times(FileTimes::new().set_modified(mtime)).unwrap();
        std::thread::sleep(Duration::from_millis(40));
        let changed = digests.digest(&path).unwrap();
        assert_ne!(changed.digest, first.digest);
        assert_eq!(changed.bytes_read, bytes);
        assert_eq!(digests.digest(&path).unwrap(), FileDigest { bytes_read: 0, ..changed });
    }

    #[test]
    fn a_file_of_this_very_moment_is_not_remembered() {
        let stamp = |nanoseconds| Identity { bytes: 1, inode: 1, mtime: (1_000, nanoseconds), ctime: (1_000, 5) };
        let at = |milliseconds: u64| SystemTime::UNIX_EPOCH + Duration::from_millis(1_000_000 + milliseconds);
        assert!(!stamp(5).is_settled(at(10)));
        assert!(stamp(5).is_settled(at(30)));
        assert!(!stamp(0).is_settled(at(1_500)), "whole seconds: the file system may tick in seconds");
        assert!(!stamp(5).is_settled(SystemTime::UNIX_EPOCH), "a stamp in the future");
    }

    #[test]
    fn a_damaged_record_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        fs::write(&path, b"content").unwrap();
        settle(&path);
        let digests = FileDigests::open(folder.path(), None);
        let first = digests.digest(&path).unwrap();
        let record = digests.memory.records().remove(0);
        assert_eq!(record.1.as_deref(), fs::canonicalize(&path).unwrap().to_str());
        let mut framed = fs::read(&record.0).unwrap();
        let at = framed.windows(7).position(|run| run == b"digest=").unwrap() + 7;
        framed[at] = if framed[at] == b'0' { b'1' } else { b'0' };
        fs::write(&record.0, framed).unwrap();
        assert_eq!(digests.digest(&path).unwrap(), first, "hashed again, not the forged digest");
    }

    #[test]
    fn a_missing_file_and_a_folder_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let digests = FileDigests::open(folder.path(), None);
        let missing = digests.digest(&folder.path().join("nowhere")).unwrap_err().to_string();
        assert!(missing.contains("nowhere"), "{missing}");
        assert!(
            digests.digest(folder.path()).unwrap_err().to_string().contains("expected a regular file, found a folder")
        );
    }
}
