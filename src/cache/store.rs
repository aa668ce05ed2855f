//! Owns one cache folder: its layout, publishing, checked reading, collecting and verifying.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
#[cfg(feature = "remote")]
use std::os::unix::fs::PermissionsExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fmt, mem};

use tempfile::NamedTempFile;
#[cfg(feature = "remote")]
use tempfile::TempPath;

use super::error::CacheError;
use super::files::{Identity, Memory, TEMPORARY, hash_prefix, new_temporary, read_framed, replace};
use super::frame::{self, Damage, SEAL_BYTES};
use super::key::{self, Key};
use super::lock::{self, Holder, LockError, LockFile};
use crate::digest::Digest;
use crate::files;

/// Entries of this many bytes or more are not hashed again while their identity is unchanged. The reason: 64 MiB take 20 to
/// 40 ms to hash, a weight pack takes seconds, and a build with no work to do shall take at most 300 ms.
pub const LARGE_BYTES: u64 = 64 << 20;
/// Version of the layout of an entry, in every bucket name: another version is another bucket.
const BUCKET_VERSION: &str = "-v1";
/// Largest key text that is read; key texts have tens of lines.
const WHY_BYTES_MAX: u64 = 16 << 20;
/// At this age, half an entry, or a temporary file whose lock says nothing, counts as left by a dead process.
const REMAINS_AGE: Duration = Duration::from_secs(3600);
/// A temporary file is locked right after it was created; one that is still unlocked after this is a leftover.
const UNLOCKED_AGE: Duration = Duration::from_secs(60);
/// Begins the names of entries that arrive in parts.
const PARTIAL: &str = "part-";
/// An entry of which a part arrived is kept this long for a process that goes on with it.
const PARTIAL_AGE: Duration = Duration::from_secs(24 * 3600);
/// <https://bford.info/cachedir/>: backup programs skip a folder with this file.
const CACHEDIR_TAG: &str = "Signature: 8a477f597d28d172789f06886806bc55\n\
                            # Everything here can be built again; deleting it costs time only.\n";
/// Keeps the store out of the repository that it is in, except for a page about it.
const GITIGNORE: &str = "*\n!README.md\n";

/// What the cache holds under one key. The digest was checked when it was read.
#[derive(Debug)]
pub struct Entry {
    content: Digest,
    bytes: u64,
    path: PathBuf,
    data: Data,
}

#[derive(Debug)]
enum Data {
    Memory(Vec<u8>),
    /// An open file, so that a collector may remove the name meanwhile.
    File(File),
}

impl Entry {
    /// Digest of the content: what the next stage keys on.
    pub fn content(&self) -> Digest {
        self.content
    }

    /// Length of the content.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The file whose first [`Entry::len`] bytes are the content, from offset 0; a sealed line follows.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole content. Entries of [`LARGE_BYTES`] or more are read from disk here: prefer [`Entry::read_at`].
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>, CacheError> {
        match &self.data {
            Data::Memory(bytes) => Ok(Cow::Borrowed(bytes)),
            Data::File(_) => {
                let length = usize::try_from(self.bytes)
                    .map_err(|_| CacheError::io("read", &self.path, ErrorKind::OutOfMemory.into()))?;
                let mut bytes = vec![0; length];
                self.read_at(0, &mut bytes)?;
                Ok(Cow::Owned(bytes))
            }
        }
    }

    pub fn into_bytes(mut self) -> Result<Vec<u8>, CacheError> {
        match mem::replace(&mut self.data, Data::Memory(Vec::new())) {
            Data::Memory(bytes) => Ok(bytes),
            file => {
                self.data = file;
                self.bytes().map(Cow::into_owned)
            }
        }
    }

    /// Fills `buffer` with the content from `offset` on; reading past the end is an error.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), CacheError> {
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= self.bytes);
        let past_end = || CacheError::io("read", &self.path, ErrorKind::UnexpectedEof.into());
        let end = end.ok_or_else(past_end)?;
        match &self.data {
            Data::Memory(bytes) => {
                let range = usize::try_from(offset).ok().zip(usize::try_from(end).ok());
                let run = range.and_then(|(start, end)| bytes.get(start..end)).ok_or_else(past_end)?;
                buffer.copy_from_slice(run);
                Ok(())
            }
            Data::File(file) => {
                file.read_exact_at(buffer, offset).map_err(|source| CacheError::io("read", &self.path, source))
            }
        }
    }
}

/// What a look-up found.
pub(super) enum Found {
    Missing,
    Whole(Entry),
    Damaged(Damaged),
}

/// A file that cannot be trusted.
pub(super) struct Damaged {
    pub path: PathBuf,
    pub reason: Damage,
    /// Open, to distinguish it from a sound file that another process publishes at its name meanwhile.
    file: File,
}

/// An entry that arrives in parts. It keeps its name, so that another process can go on where this one was interrupted.
#[cfg(feature = "remote")]
pub(super) struct Partial {
    file: File,
    path: PathBuf,
}

#[cfg(feature = "remote")]
impl Partial {
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// The hash and the length of what is there, at most `bytes_max`. What is written next follows it.
    pub fn begun(&mut self, bytes_max: u64) -> Result<(blake3::Hasher, u64), CacheError> {
        let fault = |source| CacheError::io("read", &self.path, source);
        let bytes = self.file.metadata().map_err(fault)?.len();
        if bytes > bytes_max {
            self.discard()?;
            return Ok((blake3::Hasher::new(), 0));
        }
        let hasher = super::files::hasher_of_prefix(&self.file, bytes, &mut |_| {}).map_err(fault)?;
        self.file.seek(SeekFrom::Start(bytes)).map_err(fault)?;
        Ok((hasher, bytes))
    }

    pub fn discard(&mut self) -> Result<(), CacheError> {
        let fault = |source| CacheError::io("write", &self.path, source);
        self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(fault)
    }
}

/// Numbers and sizes of files, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// By stage, in name order.
    pub stages: Vec<StageStats>,
    /// Damaged files kept in `corrupt/`.
    pub set_aside: u64,
    /// Files being written, or left by a process that was killed.
    pub temporary: u64,
    /// Everything in the folder.
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageStats {
    pub stage: String,
    pub entries: u64,
    /// Entries and their key texts.
    pub bytes: u64,
}

/// What a collection removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GcReport {
    pub entries_removed: u64,
    /// Temporary files, lock files and damaged files, all unused.
    pub remains_removed: u64,
    pub bytes_before: u64,
    pub bytes_after: u64,
}

/// One thing wrong in a cache folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub path: PathBuf,
    pub kind: ProblemKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProblemKind {
    /// An entry or key text with a damaged byte; the text says which part.
    Damaged(String),
    /// An entry without its key text: it can be used, not explained.
    WhyMissing,
    /// A temporary file that no process is writing.
    Stray,
    /// A file name that the cache did not make.
    Unknown,
    /// The disk cannot read it.
    Unreadable(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: ", self.path.display())?;
        match &self.kind {
            ProblemKind::Damaged(reason) => write!(f, "damaged: {reason}"),
            ProblemKind::WhyMissing => f.write_str(
                "has no key text (`.why`): the next build that uses it writes it again, `monobloc cache gc` removes it",
            ),
            ProblemKind::Stray => f.write_str("left by a process that was killed"),
            ProblemKind::Unknown => f.write_str("not a file of the cache"),
            ProblemKind::Unreadable(reason) => write!(f, "cannot be read: {reason}"),
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Store {
    root: PathBuf,
    /// The key of all seals; names of folders end in its id.
    key: Option<Key>,
    /// Identities of large entries whose every byte was hashed.
    verified: Memory,
}

impl Store {
    pub fn open(root: &Path, key: Option<&Key>) -> Result<Store, CacheError> {
        fs::create_dir_all(root).map_err(|source| CacheError::io("create", root, source))?;
        for (name, text) in [("CACHEDIR.TAG", CACHEDIR_TAG), (".gitignore", GITIGNORE)] {
            let path = root.join(name);
            match File::create_new(&path).and_then(|mut file| file.write_all(text.as_bytes())) {
                Ok(()) => {}
                // It exists already; or this process may only read the folder, which suffices until something must be stored.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::AlreadyExists | ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
                    ) => {}
                Err(source) => return Err(CacheError::io("write", &path, source)),
            }
        }
        Ok(Store::at(root, key))
    }

    /// A folder that is there. Creates nothing in it.
    pub fn at(root: &Path, key: Option<&Key>) -> Store {
        let verified = Memory::open(root, "verified", key);
        Store { root: root.to_path_buf(), key: key.cloned(), verified }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// The name of an entry; its seal covers the name, too.
    pub fn entry_name(&self, stage: &str, key: &Digest) -> String {
        entry_name(&key::suffix(self.key()), stage, key)
    }

    pub fn entry_path(&self, stage: &str, key: &Digest) -> PathBuf {
        self.root.join(self.entry_name(stage, key))
    }

    /// The path of the unsealed entry, if this store has a key and that entry exists.
    pub fn unsigned(&self, stage: &str, key: &Digest) -> Option<PathBuf> {
        let path = self.root.join(entry_name("", stage, key));
        (self.key.is_some() && path.is_file()).then_some(path)
    }

    pub fn entry_in_memory(&self, stage: &str, key: &Digest, content: Digest, bytes: Vec<u8>) -> Entry {
        let length = bytes.len() as u64;
        Entry { content, bytes: length, path: self.entry_path(stage, key), data: Data::Memory(bytes) }
    }

    /// Looks an entry up and checks it. A hit sets the mtime of the key text to now, as the time of last use. Not that of the
    /// entry, because the mtime is part of the identity by which a large entry is known.
    pub fn find(&self, stage: &str, key: &Digest) -> Result<Found, CacheError> {
        check_stage(stage)?;
        let found = self.read(&self.entry_name(stage, key), LARGE_BYTES, &mut |_| {})?;
        if matches!(found, Found::Whole(_)) {
            // Fails in a read-only cache and on another user's file; the order of use is then that of creation.
            let _ = files::open(&self.why_path(stage, key))
                .map_err(io::Error::from)
                .and_then(|file| file.set_times(FileTimes::new().set_modified(SystemTime::now())));
        }
        Ok(found)
    }

    /// Reads and checks the entry called `name`. From `trust_bytes` on, a remembered identity replaces the hash.
    pub fn read(&self, name: &str, trust_bytes: u64, progress: &mut dyn FnMut(u64)) -> Result<Found, CacheError> {
        let path = self.root.join(name);
        // Opened without blocking: a pipe at this name is damage, and opening it would block.
        let file = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Missing),
            Err(source) => return Err(CacheError::io("read", &path, source)),
        };
        match read_checked(&file, self.key(), name, trust_bytes, &self.verified, progress) {
            Ok((content, bytes, data)) => {
                let data = data.map_or_else(|| Data::File(file), Data::Memory);
                Ok(Found::Whole(Entry { content, bytes, path, data }))
            }
            Err(ReadFault::Damage(reason)) => Ok(Found::Damaged(Damaged { path, reason, file })),
            Err(ReadFault::Io(source)) => Err(CacheError::io("read", &path, source)),
        }
    }

    /// Moves a damaged file into `corrupt/`, and returns its new path. If it cannot be moved it stays, and every read refuses it
    /// again.
    pub fn set_aside(&self, stage: &str, key: &Digest, damaged: &Damaged) -> Option<PathBuf> {
        self.verified.forget(self.entry_name(stage, key).as_bytes());
        // Another process may have set it aside and built it again since it was read.
        if !lock::is_at(&damaged.file, &damaged.path) {
            return None;
        }
        self.move_aside(&damaged.path, &format!("{stage}-{}", key.short())).ok()
    }

    /// Moves a file or folder into `corrupt/`, where the collector finds it, and returns its new path.
    fn move_aside(&self, path: &Path, called: &str) -> io::Result<PathBuf> {
        let folder = self.root.join("corrupt");
        fs::create_dir_all(&folder)?;
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let to = folder.join(format!("{called}-{}-{}", since_epoch.as_nanos(), std::process::id()));
        fs::rename(path, &to)?;
        Ok(to)
    }

    /// Replaces a small file as a whole. A folder at its name, or a file at the name of its folder, is moved aside: the cache did
    /// not make it, and a build must not fail because of it.
    fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        if let Some(folder) = path.parent()
            && let Err(error) = fs::create_dir_all(folder)
        {
            if !folder.is_file() {
                return Err(error);
            }
            self.move_aside(folder, "file")?;
            fs::create_dir_all(folder)?;
        }
        match replace(&self.root.join(TEMPORARY), path, bytes) {
            Err(_) if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) => {
                self.move_aside(path, "folder")?;
                replace(&self.root.join(TEMPORARY), path, bytes)
            }
            result => result,
        }
    }

    /// Removes an entry; its key text stays, for `explain`.
    pub fn remove(&self, stage: &str, key: &Digest) -> Result<(), CacheError> {
        check_stage(stage)?;
        self.verified.forget(self.entry_name(stage, key).as_bytes());
        let path = self.entry_path(stage, key);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != ErrorKind::NotFound => Err(CacheError::io("remove", &path, source)),
            _ => Ok(()),
        }
    }

    pub fn put(&self, stage: &str, key: &Digest, why: &str, bytes: &[u8]) -> Result<Digest, CacheError> {
        let path = self.entry_path(stage, key);
        self.put_file(stage, key, why, |file| {
            file.write_all(bytes).map_err(|source| CacheError::io("write", &path, source))
        })
    }

    /// Publishes what `fill` writes. The digest is taken from the file afterwards, so `fill` may write in any order.
    pub fn put_file<E: From<CacheError>>(
        &self,
        stage: &str,
        key: &Digest,
        why: &str,
        fill: impl FnOnce(&mut File) -> Result<(), E>,
    ) -> Result<Digest, E> {
        check_stage(stage)?;
        let name = self.entry_name(stage, key);
        let path = self.root.join(&name);
        let fault = |source| CacheError::io("write", &path, source);
        let temporary = self.root.join(TEMPORARY);
        let mut file = new_temporary(&temporary).map_err(fault)?;
        fill(file.as_file_mut())?;
        let bytes = file.as_file().metadata().map_err(fault)?.len();
        let content = hash_prefix(file.as_file(), bytes, &mut |_| {}).map_err(fault)?;
        let line = frame::seal(self.key(), "entry", &name, bytes, &content);
        file.seek(SeekFrom::Start(bytes)).and_then(|_| file.write_all(line.as_bytes())).map_err(fault)?;
        Ok(self.publish(stage, key, why, file, bytes, content)?)
    }

    /// Gives a sealed file its name; returns the digest of what the cache then holds.
    fn publish(
        &self,
        stage: &str,
        key: &Digest,
        why: &str,
        mut file: NamedTempFile,
        bytes: u64,
        content: Digest,
    ) -> Result<Digest, CacheError> {
        let name = self.entry_name(stage, key);
        let path = self.root.join(&name);
        let fault = |source| CacheError::io("write", &path, source);
        file.as_file().sync_data().map_err(fault)?;

        // The key text first, so that every visible entry can be explained.
        let why_path = self.why_path(stage, key);
        if let Some(bucket) = path.parent() {
            fs::create_dir_all(bucket).map_err(|source| CacheError::io("create", bucket, source))?;
        }
        let framed_why = frame::wrap(self.key(), "why", &format!("{name}.why"), why.as_bytes());
        self.replace(&why_path, &framed_why).map_err(|source| CacheError::io("write", &why_path, source))?;

        // The second try is for a damaged entry that was set aside, the third for a damaged one that was published again at once.
        for _ in 0..3 {
            let error = match file.persist_noclobber(&path) {
                Ok(published) => {
                    if bytes >= LARGE_BYTES
                        && let Ok(metadata) = published.metadata()
                    {
                        let _ = self.verified.remember(name.as_bytes(), &Identity::of(&metadata), &content);
                    }
                    return Ok(content);
                }
                Err(error) => error,
            };
            if error.error.kind() != ErrorKind::AlreadyExists {
                return Err(fault(error.error));
            }
            file = error.file;
            match self.read(&name, LARGE_BYTES, &mut |_| {})? {
                Found::Whole(entry) => return Ok(entry.content),
                Found::Missing => {}
                Found::Damaged(damaged) => {
                    self.set_aside(stage, key, &damaged);
                }
            }
        }
        Err(CacheError::Vanished { path })
    }

    /// Publishes a checked entry of another store here.
    pub fn copy_in(&self, stage: &str, key: &Digest, why: &str, entry: &Entry) -> Result<Digest, CacheError> {
        let path = self.entry_path(stage, key);
        if let Found::Whole(own) = self.read(&self.entry_name(stage, key), LARGE_BYTES, &mut |_| {})? {
            return Ok(own.content);
        }
        match &entry.data {
            Data::Memory(bytes) => self.put(stage, key, why, bytes),
            Data::File(from) => self.put_file(stage, key, why, |file| {
                let mut from = from.try_clone().map_err(|source| CacheError::io("read", &entry.path, source))?;
                // The descriptor is shared, but only this read uses its offset: all others are by position.
                from.rewind().map_err(|source| CacheError::io("read", &entry.path, source))?;
                io::copy(&mut from.take(entry.bytes), file).map_err(|source| CacheError::io("write", &path, source))?;
                Ok(())
            }),
        }
    }

    /// The file of an entry that arrives in parts, with what an interrupted process left of it if this one has the lock of the entry.
    #[cfg(feature = "remote")]
    pub fn partial(&self, name: &str, locked: bool) -> Result<Partial, CacheError> {
        let folder = self.root.join(TEMPORARY);
        fs::create_dir_all(&folder).map_err(|source| CacheError::io("create", &folder, source))?;
        let own = if locked { String::new() } else { format!("-{}", std::process::id()) };
        let path = folder.join(format!("{PARTIAL}{}{own}", Digest::of(name.as_bytes())));
        let fault = |source| CacheError::io("write", &path, source);
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(fault)?;
        Ok(Partial { file, path })
    }

    /// Publishes a file whose content was hashed while it was written; `line` is its seal.
    #[cfg(feature = "remote")]
    pub fn publish_partial(
        &self,
        (stage, key, why): (&str, &Digest, &str),
        partial: Partial,
        (bytes, content): (u64, Digest),
        line: &[u8],
    ) -> Result<Digest, CacheError> {
        let Partial { mut file, path } = partial;
        let fault = |source| CacheError::io("write", &path, source);
        file.seek(SeekFrom::Start(bytes)).and_then(|_| file.write_all(line)).map_err(fault)?;
        file.set_len(bytes + line.len() as u64).map_err(fault)?;
        file.set_permissions(fs::Permissions::from_mode(0o444)).map_err(fault)?;
        let file = NamedTempFile::from_parts(file, TempPath::try_from_path(&path).map_err(fault)?);
        self.publish(stage, key, why, file, bytes, content)
    }

    /// Stage and key of a file of this layout and key, and whether it is a key text.
    #[cfg(feature = "remote")]
    pub fn entry_of(&self, name: &str) -> Option<(String, Digest, bool)> {
        let (entry, is_why) = name.strip_suffix(".why").map_or((name, false), |entry| (entry, true));
        let mut parts = entry.split('/');
        let (bucket, _, key) = (parts.next()?, parts.next()?, Digest::parse(parts.next()?).ok()?);
        let stage = bucket.strip_suffix(&bucket_suffix(&key::suffix(self.key())))?;
        check_stage(stage).ok()?;
        // One spelling: other names are not ours.
        (self.entry_name(stage, &key) == entry).then(|| (stage.to_string(), key, is_why))
    }

    /// Names and sizes of all entries of this layout and key, without key texts.
    #[cfg(feature = "remote")]
    pub fn entries(&self) -> Result<Vec<(String, u64)>, CacheError> {
        let files = self.walk(&self.root)?.into_iter().filter_map(|(path, metadata)| {
            let name = path.strip_prefix(&self.root).ok()?.to_str()?.to_string();
            let is_entry = self.entry_of(&name).is_some_and(|(_, _, is_why)| !is_why);
            is_entry.then_some((name, metadata.len()))
        });
        Ok(files.collect())
    }

    /// Takes the lock to build one entry.
    pub fn lock_entry(
        &self,
        stage: &str,
        key: &Digest,
        on_wait: &mut dyn FnMut(Duration),
    ) -> Result<LockFile, LockError> {
        let folder = self.root.join("locks");
        fs::create_dir_all(&folder).map_err(|source| LockError::Open { path: folder.clone(), source })?;
        LockFile::acquire(folder.join(format!("{stage}-{key}")), on_wait)
    }

    fn why_path(&self, stage: &str, key: &Digest) -> PathBuf {
        self.root.join(format!("{}.why", self.entry_name(stage, key)))
    }

    pub fn why(&self, stage: &str, key: &Digest) -> Option<String> {
        check_stage(stage).ok()?;
        read_framed(
            &self.why_path(stage, key),
            self.key(),
            "why",
            &format!("{}.why", self.entry_name(stage, key)),
            WHY_BYTES_MAX,
        )
    }

    /// Writes the key text of an entry again if it was lost, damaged or not known.
    pub fn mend_why(&self, stage: &str, key: &Digest, why: &str) -> io::Result<()> {
        if self.why(stage, key).is_some_and(|why| !why.is_empty()) || !self.entry_path(stage, key).is_file() {
            return Ok(());
        }
        let name = format!("{}.why", self.entry_name(stage, key));
        self.replace(&self.why_path(stage, key), &frame::wrap(self.key(), "why", &name, why.as_bytes()))
    }

    /// `subjects/41…/schedule`. Hashed, because a subject may be any text: a path, a model name.
    fn subject_name(&self, stage: &str, subject: &str) -> String {
        format!("subjects{}/{}/{stage}", key::suffix(self.key()), Digest::of(subject.as_bytes()))
    }

    pub fn set_latest(&self, stage: &str, subject: &str, key: &Digest) -> Result<(), CacheError> {
        check_stage(stage)?;
        let name = self.subject_name(stage, subject);
        let path = self.root.join(&name);
        let text = format!("{key}\n{subject}");
        let fault = |source| CacheError::io("write", &path, source);
        self.replace(&path, &frame::wrap(self.key(), "subject", &name, text.as_bytes())).map_err(fault)
    }

    pub fn latest(&self, stage: &str, subject: &str) -> Option<Digest> {
        check_stage(stage).ok()?;
        let name = self.subject_name(stage, subject);
        let text = read_framed(&self.root.join(&name), self.key(), "subject", &name, WHY_BYTES_MAX)?;
        Digest::parse(text.lines().next()?).ok()
    }

    /// Every file of the folder with its size; one that disappears meanwhile is skipped.
    fn walk(&self, folder: &Path) -> Result<Vec<(PathBuf, fs::Metadata)>, CacheError> {
        let mut files = Vec::new();
        for item in walkdir::WalkDir::new(folder).sort_by_file_name() {
            let item = match item {
                Ok(item) => item,
                Err(error) if error.io_error().is_some_and(|error| error.kind() == ErrorKind::NotFound) => continue,
                Err(error) => {
                    let path = error.path().unwrap_or(folder).to_path_buf();
                    return Err(CacheError::io("read", &path, error.into()));
                }
            };
            if item.file_type().is_dir() {
                continue;
            }
            if let Ok(metadata) = item.metadata() {
                files.push((item.into_path(), metadata));
            }
        }
        Ok(files)
    }

    pub fn stats(&self) -> Result<Stats, CacheError> {
        let bucket_suffix = bucket_suffix(&key::suffix(self.key()));
        let mut stats = Stats::default();
        let mut stages: BTreeMap<String, StageStats> = BTreeMap::new();
        for (path, metadata) in self.walk(&self.root)? {
            stats.bytes += metadata.len();
            let Ok(name) = path.strip_prefix(&self.root) else { continue };
            let Some(top) = name.iter().next().and_then(|top| top.to_str()) else { continue };
            if name.iter().count() == 1 {
                continue;
            }
            match (top, top.strip_suffix(&bucket_suffix)) {
                ("corrupt", _) => stats.set_aside += 1,
                (TEMPORARY, _) => stats.temporary += 1,
                (_, Some(stage)) => {
                    let empty = StageStats { stage: stage.to_string(), entries: 0, bytes: 0 };
                    let stage = stages.entry(stage.to_string()).or_insert(empty);
                    stage.bytes += metadata.len();
                    stage.entries += u64::from(path.extension().is_none());
                }
                _ => {}
            }
        }
        stats.stages = stages.into_values().collect();
        Ok(stats)
    }

    pub fn gc(&self, bytes_max: u64, age_min: Duration) -> Result<Option<GcReport>, CacheError> {
        let locks = self.root.join("locks");
        fs::create_dir_all(&locks).map_err(|source| CacheError::io("create", &locks, source))?;
        let lock_path = locks.join("gc");
        let lock = lock::open_lock_file(&lock_path).map_err(|source| CacheError::io("lock", &lock_path, source))?;
        let _lock = match lock::try_lock(lock) {
            Ok(locked) => locked,
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(source)) => return Err(CacheError::io("lock", &lock_path, source)),
        };
        let now = SystemTime::now();
        let age = |stamp: SystemTime| now.duration_since(stamp).unwrap_or_default();
        let mut report = GcReport { bytes_before: self.stats()?.bytes, ..GcReport::default() };

        for (path, metadata) in self.walk(&self.root.join(TEMPORARY))? {
            let age = metadata.modified().map_or(Duration::ZERO, age);
            let partial = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PARTIAL));
            let left = match lock::holder(&path) {
                _ if partial => age >= PARTIAL_AGE,
                Holder::Free => age >= UNLOCKED_AGE,
                Holder::Held => false,
                Holder::Unknown => age >= REMAINS_AGE,
            };
            report.remains_removed += u64::from(left && fs::remove_file(&path).is_ok());
        }
        for (path, metadata) in self.walk(&self.root.join("corrupt"))? {
            let old = metadata.modified().is_ok_and(|stamp| age(stamp) >= age_min);
            report.remains_removed += u64::from(old && fs::remove_file(&path).is_ok());
        }
        // Removes folders that were moved there, except those that are not empty.
        for folder in fs::read_dir(self.root.join("corrupt")).into_iter().flatten().flatten() {
            if folder.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove_empty(&folder.path());
            }
        }
        for (path, _) in self.walk(&locks)? {
            report.remains_removed += u64::from(path != lock_path && lock::remove_if_free(&path));
        }

        // Oldest use first. All versions of the layout are collected, so that an old one does not stay for ever.
        let mut entries: BTreeMap<PathBuf, (SystemTime, u64, Vec<PathBuf>)> = BTreeMap::new();
        for (path, metadata) in self.walk(&self.root)? {
            let in_bucket = path.strip_prefix(&self.root).ok().filter(|name| name.iter().count() == 3);
            let bucket = in_bucket.and_then(|name| name.iter().next()).and_then(|bucket| bucket.to_str());
            if !bucket.is_some_and(is_bucket) {
                continue;
            }
            let stamp = metadata.modified().unwrap_or(now);
            let entry = entries.entry(path.with_extension("")).or_insert((stamp, 0, Vec::new()));
            entry.0 = entry.0.max(stamp);
            entry.1 += metadata.len();
            // The entry sorts before its key text and is removed first, so that every visible entry can be explained.
            entry.2.push(path);
        }
        let mut by_use: Vec<_> = entries.into_iter().collect();
        by_use.sort_by_key(|(_, (stamp, ..))| *stamp);
        let (mut bytes, goal) = (self.stats()?.bytes, bytes_max / 10 * 9);
        let over = bytes > bytes_max;
        for (entry, (stamp, size, files)) in by_use {
            // Half an entry may be one that is being published.
            let half = !files.contains(&entry);
            // Its key text was lost after it was published. A build that uses the entry writes the text again.
            let unexplained = !half && files.len() == 1;
            let unwanted = match half {
                true => age(stamp) > REMAINS_AGE,
                false => age(stamp) >= age_min && (unexplained || over && bytes > goal),
            };
            if unwanted && files.iter().all(|file| fs::remove_file(file).is_ok()) {
                report.entries_removed += u64::from(!half);
                report.remains_removed += u64::from(half);
                bytes = bytes.saturating_sub(size);
            }
        }
        self.forget_gone(&mut report);
        report.bytes_after = self.stats()?.bytes;
        Ok(Some(report))
    }

    /// Removes records about files that no longer exist.
    fn forget_gone(&self, report: &mut GcReport) {
        for memory in [Memory::open(&self.root, "files", self.key()), self.verified.clone()] {
            for (record, name) in memory.records() {
                // Names of entries are relative to the root; joining an absolute name keeps it.
                let gone = name.is_none_or(|name| !self.root.join(name).exists());
                report.remains_removed += u64::from(gone && fs::remove_file(record).is_ok());
            }
        }
    }

    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<Problem>, CacheError> {
        let mut files = self.walk(&self.root)?;
        files.retain(|(path, _)| path.parent() != Some(&self.root) && !path.starts_with(self.root.join("corrupt")));
        let total: u64 = files.iter().map(|(_, metadata)| metadata.len()).sum();
        let mut done = 0;
        let mut problems = Vec::new();
        for (path, metadata) in &files {
            let Some(name) = path.strip_prefix(&self.root).ok().and_then(Path::to_str) else { continue };
            let start = done;
            let kind = self.verify_one(name, path, &mut |bytes| {
                done += bytes;
                progress(done, total);
            });
            done = start + metadata.len();
            progress(done, total);
            problems.extend(kind.map(|kind| Problem { path: path.clone(), kind }));
        }
        Ok(problems)
    }

    fn verify_one(&self, name: &str, path: &Path, progress: &mut dyn FnMut(u64)) -> Option<ProblemKind> {
        let parts: Vec<&str> = name.split('/').collect();
        let suffix = key::suffix(self.key());
        let ours = |kind: &str, top: &str| top.strip_prefix(kind) == Some(&suffix);
        let foreign = |top: &str| {
            let kind = key::without_suffix(top);
            ["subjects", "files", "verified"].contains(&kind) && !ours(kind, top)
        };
        match parts.as_slice() {
            ["locks", _] => None,
            // Checkpoints that come with the program: it compares them at each use, and writes them again.
            ["builtin", _, _] => None,
            [TEMPORARY, _] => (lock::holder(path) == Holder::Free).then_some(ProblemKind::Stray),
            [top, _, _] if ours("subjects", top) => verify_framed(path, self.key(), "subject", name),
            [top, id] if ours("files", top) => verify_framed(path, self.key(), "files", id),
            [top, id] if ours("verified", top) => verify_framed(path, self.key(), "verified", id),
            [bucket, shard, file] if bucket.ends_with(&bucket_suffix(&suffix)) => {
                let (key, is_why) = file.strip_suffix(".why").map_or((*file, false), |key| (key, true));
                if Digest::parse(key).is_err() || !key.starts_with(shard) || shard.len() != 2 {
                    return Some(ProblemKind::Unknown);
                }
                if is_why {
                    return verify_framed(path, self.key(), "why", name);
                }
                match self.read(name, u64::MAX, progress) {
                    Ok(Found::Missing) => None,
                    Ok(Found::Whole(_)) => {
                        let why = self.root.join(format!("{name}.why"));
                        // If both are gone by now, another process collected them.
                        (!why.is_file() && path.exists()).then_some(ProblemKind::WhyMissing)
                    }
                    Ok(Found::Damaged(damaged)) => {
                        self.verified.forget(name.as_bytes());
                        Some(ProblemKind::Damaged(damaged.reason.to_string()))
                    }
                    Err(error) => Some(ProblemKind::Unreadable(error.to_string())),
                }
            }
            // Buckets of another version or another key are not checked.
            [bucket, ..] if is_bucket(bucket) => None,
            [top, ..] if foreign(top) => None,
            _ => Some(ProblemKind::Unknown),
        }
    }
}

enum ReadFault {
    Damage(Damage),
    Io(io::Error),
}

impl From<io::Error> for ReadFault {
    fn from(error: io::Error) -> Self {
        // The file became shorter than its metadata said.
        if error.kind() == ErrorKind::UnexpectedEof { ReadFault::Damage(Damage::Seal) } else { ReadFault::Io(error) }
    }
}

/// Content digest, length, and the content itself if it is small enough to be held in memory.
fn read_checked(
    file: &File,
    key: Option<&Key>,
    name: &str,
    trust_bytes: u64,
    verified: &Memory,
    progress: &mut dyn FnMut(u64),
) -> Result<(Digest, u64, Option<Vec<u8>>), ReadFault> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(ReadFault::Damage(Damage::NotAFile));
    }
    let Some(bytes) = metadata.len().checked_sub(SEAL_BYTES as u64) else {
        return Err(ReadFault::Damage(Damage::TooShort { found_bytes: metadata.len() }));
    };
    if bytes < LARGE_BYTES {
        let mut framed = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
        // Bounded, because the file may grow while it is read.
        file.take(LARGE_BYTES + SEAL_BYTES as u64).read_to_end(&mut framed)?;
        let (content, digest) = frame::unwrap(key, "entry", name, framed).map_err(ReadFault::Damage)?;
        return Ok((digest, content.len() as u64, Some(content)));
    }
    let mut line = [0; SEAL_BYTES];
    file.read_exact_at(&mut line, bytes)?;
    let stated = frame::unseal(key, "entry", name, bytes, &line).map_err(ReadFault::Damage)?;
    let identity = Identity::of(&metadata);
    if bytes >= trust_bytes && verified.recall(name.as_bytes(), &identity) == Some(stated) {
        return Ok((stated, bytes, None));
    }
    let found = hash_prefix(file, bytes, progress)?;
    if found != stated {
        return Err(ReadFault::Damage(Damage::Content { expected: stated, found }));
    }
    let _ = verified.remember(name.as_bytes(), &identity, &stated);
    Ok((stated, bytes, None))
}

fn verify_framed(path: &Path, key: Option<&Key>, kind: &str, name: &str) -> Option<ProblemKind> {
    match files::read_bytes(path, WHY_BYTES_MAX).map_err(io::Error::from) {
        Ok(framed) => {
            frame::unwrap(key, kind, name, framed).err().map(|damage| ProblemKind::Damaged(damage.to_string()))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => Some(ProblemKind::Unreadable(error.to_string())),
    }
}

/// `schedule-v1/9f/9f3c…`, relative to the root; `suffix` is that of a key.
pub(super) fn entry_name(suffix: &str, stage: &str, key: &Digest) -> String {
    let key = key.to_string();
    format!("{stage}{}/{}/{key}", bucket_suffix(suffix), &key[..2])
}

fn bucket_suffix(suffix: &str) -> String {
    format!("{BUCKET_VERSION}{suffix}")
}

/// Removes folders that hold nothing but folders.
fn remove_empty(folder: &Path) {
    for inner in fs::read_dir(folder).into_iter().flatten().flatten() {
        if inner.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&inner.path());
        }
    }
    let _ = fs::remove_dir(folder);
}

/// `NAME-vN`, of any key.
fn is_bucket(name: &str) -> bool {
    let version = key::without_suffix(name).rsplit_once("-v").map(|(_, version)| version);
    version.is_some_and(|version| !version.is_empty() && version.bytes().all(|digit| digit.is_ascii_digit()))
}

/// Checks that a stage's name can name a folder.
fn check_stage(stage: &str) -> Result<(), CacheError> {
    let sound = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-' || c == b'_';
    if !stage.is_empty() && stage.len() <= 64 && stage.bytes().all(sound) {
        Ok(())
    } else {
        Err(CacheError::StageName { stage: stage.chars().take(80).collect() })
    }
}
