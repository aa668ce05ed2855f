//! Owns the content-addressed cache: results of stages, stored under a key of their inputs.
//!
//! ```text
//! cache/                            CACHEDIR.TAG, .gitignore
//!   schedule-v1/9f/9f3c…            what the stage made, then one sealed line
//!   schedule-v1/9f/9f3c….why        the key text: what it was made from; its mtime is the last use
//!   subjects/41…/schedule           the last key of one subject, for `explain`
//!   files/  verified/               digests of large files, remembered by (size, mtime, ctime, inode)
//!   tmp/  locks/  corrupt/          being written; being built; set aside
//! ```
//!
//! These hold even if a process is killed, a disk is full, a folder is shared, or bytes are damaged:
//! - An entry appears whole or not at all: temporary name in the same file system, fsync, rename that never replaces.
//! - Every read is checked against the seal. A damaged entry is set aside in `corrupt/`, and is a miss.
//!   Entries of [`LARGE_BYTES`] or more are hashed when they are first seen and after any change of their identity;
//!   [`Cache::verify`] reads every byte.
//! - A large entry of the shared folder is hashed, then used directly from the share and copied here in the
//!   background; only the end of the process waits for the copy. With a key it is copied first, and the copy is used.
//! - With a [`Key`], only holders of the key can make a seal, and an entry with another seal is a miss.
//! - Processes that want one entry build it once: a lock file per entry, released by the kernel when its holder dies.
//!   A process waits only for the build of the entry that it wants.
//!
//! Not promised: that an entry survives a power cut (folders are not synced; a lost rename is a miss), nor that two
//! builds of one key agree. The first to be published wins, and later ones get its digest.

mod error;
mod files;
mod frame;
mod key;
pub(crate) mod lock;
#[cfg(not(feature = "remote"))]
#[path = "no_remote.rs"]
mod remote;
#[cfg(feature = "remote")]
mod remote;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub use crate::digest::diff_why;
pub use error::CacheError;
pub use files::{FileDigest, FileDigests};
pub use key::Key;
pub use store::{Entry, GcReport, LARGE_BYTES, Problem, ProblemKind, StageStats, Stats};

use crate::address::{RemoteAddress, RemoteMode, RemotePlace};
use crate::digest::Digest;
use lock::LockError;
use remote::Remote;
use store::{Found, Store};

/// Where a cache lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    pub root: PathBuf,
    /// A folder that several machines mount: read on a miss, written after a build, never required.
    pub shared: Option<PathBuf>,
    /// Whether the shared folder is only read, for example because another machine is its one writer.
    pub shared_read_only: bool,
    /// A file with the [`Key`] that seals entries. Without one, every writer of a folder is trusted with its entries.
    pub key_file: Option<PathBuf>,
    /// A store of objects that several machines reach: asked last, written after a build, never required.
    pub remote: Option<RemoteText>,
}

/// A remote cache as the environment names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteText {
    /// A URL; docs/cache.md has its forms.
    pub address: String,
    /// `read-write` unless it says `read` or `off`.
    pub mode: Option<String>,
}

/// What a command moved between a folder and the remote cache, or removed there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    pub entries: u64,
    pub bytes: u64,
    /// What was there already, or stays.
    pub there: u64,
}

impl Places {
    /// Variable that names the folder of the cache. The cache reads these variables, and for a remote cache those of its store.
    pub const ROOT_VARIABLE: &'static str = "MONOBLOC_CACHE_DIR";
    /// Variable that names the shared folder.
    pub const SHARED_VARIABLE: &'static str = "MONOBLOC_SHARED_CACHE";
    /// Variable that makes the shared folder read-only: `1`.
    pub const READ_ONLY_VARIABLE: &'static str = "MONOBLOC_SHARED_CACHE_READ_ONLY";
    /// Variable that has the address of the remote cache.
    pub const REMOTE_VARIABLE: &'static str = "MONOBLOC_REMOTE_CACHE";
    /// Variable that says how the remote cache is used.
    pub const REMOTE_MODE_VARIABLE: &'static str = "MONOBLOC_REMOTE_CACHE_MODE";
    /// Variable that names the file of the key.
    pub const KEY_VARIABLE: &'static str = "MONOBLOC_CACHE_KEY_FILE";

    /// `MONOBLOC_CACHE_DIR` in place of `default_root`, `MONOBLOC_SHARED_CACHE` as the folder to share, the key of
    /// `MONOBLOC_CACHE_KEY_FILE`, and `MONOBLOC_REMOTE_CACHE`. Empty means unset.
    pub fn from_environment(default_root: &Path) -> Places {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let text =
            |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(|v| v.to_string_lossy().into_owned());
        Places {
            root: variable(Self::ROOT_VARIABLE).unwrap_or_else(|| default_root.to_path_buf()),
            shared: variable(Self::SHARED_VARIABLE),
            shared_read_only: variable(Self::READ_ONLY_VARIABLE).is_some_and(|value| value.as_os_str() != "0"),
            key_file: variable(Self::KEY_VARIABLE),
            remote: text(Self::REMOTE_VARIABLE)
                .map(|address| RemoteText { address, mode: text(Self::REMOTE_MODE_VARIABLE) }),
        }
    }

    /// The remote cache of a manifest, unless the environment names one. `MONOBLOC_REMOTE_CACHE_MODE` says how it is used, too.
    pub fn with_remote_of(mut self, remote: Option<&RemotePlace>) -> Places {
        if let (None, Some(RemotePlace { address, mode })) = (&self.remote, remote) {
            let asked = std::env::var(Self::REMOTE_MODE_VARIABLE).ok().filter(|mode| !mode.is_empty());
            let mode = Some(asked.unwrap_or_else(|| mode.name().to_string()));
            self.remote = Some(RemoteText { address: address.to_string(), mode });
        }
        self
    }

    /// The remote cache, if it is in use.
    ///
    /// # Errors
    /// A text that is no address, or that has credentials in it.
    pub fn remote(&self) -> Result<Option<RemotePlace>, CacheError> {
        let Some(RemoteText { address, mode }) = &self.remote else { return Ok(None) };
        let mode = match mode.as_deref() {
            None => RemoteMode::default(),
            Some(mode) => RemoteMode::parse(mode).ok_or_else(|| CacheError::RemoteAddress {
                variable: Self::REMOTE_MODE_VARIABLE,
                reason: "expected `off`, `read` or `read-write`".to_string(),
                remedy: "unset it to read and write",
            })?,
        };
        let address = RemoteAddress::parse(address).map_err(|error| CacheError::RemoteAddress {
            variable: Self::REMOTE_VARIABLE,
            reason: error.to_string(),
            remedy: error.remedy(),
        })?;
        Ok((mode != RemoteMode::Off).then_some(RemotePlace { address, mode }))
    }
}

/// Something worth telling the user that is not a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// An entry is damaged. It is a miss, and will be built again.
    SetAside { stage: String, key: Digest, reason: String, moved_to: Option<PathBuf> },
    /// Another process builds the entry. Sent at once, then about every second.
    Waiting { stage: String, key: Digest, waited: Duration },
    /// The file system has no locks: two processes may both build the entry; both results are sound.
    NoLocks { path: PathBuf, reason: String },
    /// A key is in use, and the only entry there is was made without it.
    Unsigned { stage: String, key: Digest, path: PathBuf },
    /// The shared folder could not be used; the build continues without it.
    Shared { action: &'static str, reason: String },
    /// The remote cache could not be used; the build continues without it. Told once for each action.
    Remote { action: &'static str, reason: String },
    /// A large entry arrives from the remote cache. Sent about every ten seconds.
    Fetching { stage: String, key: Digest, bytes: u64, bytes_all: u64 },
    /// The process waits until its entries are in the remote cache.
    Sending,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::SetAside { stage, key, reason, moved_to } => {
                write!(f, "cached {stage} {} is damaged ({reason}); it is built again", key.short())?;
                match moved_to {
                    Some(path) => write!(f, ", the damaged file is `{}`", path.display()),
                    None => Ok(()),
                }
            }
            Note::Waiting { stage, key, waited } => {
                write!(f, "waiting for another process to build {stage} {} ({} s)", key.short(), waited.as_secs())
            }
            Note::NoLocks { path, reason } => {
                write!(f, "no locks at `{}` ({reason}); processes may build the same entry twice", path.display())
            }
            Note::Unsigned { stage, key, path } => write!(
                f,
                "cached {stage} {} is not used: `{}` is not sealed with the key of `{}`; it is built again",
                key.short(),
                path.display(),
                Places::KEY_VARIABLE
            ),
            // An error of the file system says itself what cannot be done.
            Note::Shared { reason, .. } if reason.starts_with("cannot ") => write!(f, "shared cache: {reason}"),
            Note::Shared { action, reason } => write!(f, "shared cache: cannot {action}: {reason}"),
            Note::Remote { action, reason } => write!(f, "remote cache: cannot {action}: {reason}"),
            Note::Fetching { stage, key, bytes, bytes_all } => {
                let (mib, mib_all) = (bytes >> 20, bytes_all >> 20);
                write!(f, "{stage} {} arrives from the remote cache: {mib} of {mib_all} MiB", key.short())
            }
            Note::Sending => f.write_str("waiting until the new entries are in the remote cache"),
        }
    }
}

/// The note of an entry that cannot be written to the shared folder. A folder that may not be written is often one to read.
fn unwritten(error: &CacheError) -> Note {
    let advice = match error {
        CacheError::Denied { .. } => format!("; with `{}=1` it is only read", Places::READ_ONLY_VARIABLE),
        _ => String::new(),
    };
    Note::Shared { action: "write", reason: format!("{error}{advice}") }
}

/// Where an entry came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was there, here or in the shared folder.
    Cached,
    /// This call built it.
    Built,
    /// Another process built it while this one waited.
    BuiltElsewhere,
}

/// The cache of one user or project, with an optional shared folder.
pub struct Cache {
    store: Store,
    shared: Option<Store>,
    shared_read_only: bool,
    remote: Option<Remote>,
    key_file: Option<PathBuf>,
    /// Entries without the seal of our key that were reported already.
    unsigned: Mutex<BTreeSet<PathBuf>>,
    note: Arc<dyn Fn(&Note) + Send + Sync>,
    /// Threads that copy large entries from the shared folder, by stage and key.
    copies: Mutex<BTreeMap<(String, Digest), JoinHandle<()>>>,
}

/// Waits for the copies, so that a process that ends normally completes them.
impl Drop for Cache {
    fn drop(&mut self) {
        let copies = std::mem::take(self.copies.get_mut().unwrap_or_else(PoisonError::into_inner));
        for copy in copies.into_values() {
            let _ = copy.join();
        }
        if let Some(remote) = &self.remote {
            remote.finish();
        }
    }
}

impl Cache {
    /// Opens or creates the cache in `root`. A folder that cannot be written is an error only when something must be stored.
    pub fn open(root: impl Into<PathBuf>) -> Result<Cache, CacheError> {
        let (shared, key_file, remote) = (None, None, None);
        Cache::open_places(&Places { root: root.into(), shared, shared_read_only: false, key_file, remote }, |_| {})
    }

    /// Opens both folders. `note` is called on damage, waiting, and failures of the shared folder; it may be called by the thread
    /// of any call below, and by the cache's own threads.
    pub fn open_places(places: &Places, note: impl Fn(&Note) + Send + Sync + 'static) -> Result<Cache, CacheError> {
        let &Places { ref root, ref shared, shared_read_only, ref key_file, remote: _ } = places;
        let note: Arc<dyn Fn(&Note) + Send + Sync> = Arc::new(note);
        let remote = places.remote()?.and_then(|place| Remote::open(place, Arc::clone(&note)));
        let key = key_file.as_deref().map(Key::read).transpose()?;
        let store = Store::open(root, key.as_ref())?;
        // Not made here: the folder of a misspelt name, or of a disk that is not mounted, would be filled and never read.
        let open = |shared: &Path| match (shared.is_dir(), shared_read_only) {
            (false, _) => Err(format!(
                "no folder `{}`: make it, mount it, or correct `{}`",
                shared.display(),
                Places::SHARED_VARIABLE
            )),
            (true, true) => Ok(Store::at(shared, key.as_ref())),
            (true, false) => Store::open(shared, key.as_ref()).map_err(|error| error.to_string()),
        };
        let shared = match shared.as_deref().map(open) {
            Some(Ok(shared)) => Some(shared),
            Some(Err(fault)) => {
                note(&Note::Shared { action: "open it", reason: fault });
                None
            }
            None => None,
        };
        let (unsigned, copies) = (Mutex::default(), Mutex::default());
        Ok(Cache { store, shared, shared_read_only, remote, key_file: key_file.clone(), unsigned, note, copies })
    }

    pub fn root(&self) -> &Path {
        self.store.root()
    }

    /// The places of this cache, for another process that shall use the same ones.
    pub fn places(&self) -> Places {
        Places {
            root: self.root().to_path_buf(),
            shared: self.shared.as_ref().map(|shared| shared.root().to_path_buf()),
            shared_read_only: self.shared_read_only,
            key_file: self.key_file.clone(),
            remote: self.remote.as_ref().map(|remote| {
                let RemotePlace { address, mode } = remote.place();
                RemoteText { address: address.to_string(), mode: Some(mode.name().to_string()) }
            }),
        }
    }

    /// The remembered digests of large input files, which are kept in this cache.
    pub fn file_digests(&self) -> FileDigests {
        FileDigests::open(self.store.root(), self.store.key())
    }

    /// The checked entry under `key`, or `None` when there is none that can be trusted.
    pub fn get(&self, stage: &str, key: &Digest) -> Result<Option<Entry>, CacheError> {
        self.look_up(stage, key, None)
    }

    /// As [`Cache::get`], by a caller who knows the key text: a remote is not asked for it, and it is written again if it was lost.
    /// An empty one is written by the next call that knows more.
    pub fn get_known(&self, stage: &str, key: &Digest, why: &str) -> Result<Option<Entry>, CacheError> {
        let found = self.look_up(stage, key, Some(why))?;
        if found.is_some() {
            self.explain(stage, key, why);
        }
        Ok(found)
    }

    fn look_up(&self, stage: &str, key: &Digest, why: Option<&str>) -> Result<Option<Entry>, CacheError> {
        if let Some(entry) = self.get_own(stage, key)? {
            return Ok(Some(entry));
        }
        let found = self.get_shared(stage, key).or_else(|| self.get_remote(stage, key, why));
        if found.is_none() {
            self.tell_unsigned(stage, key);
        }
        Ok(found)
    }

    /// Whether an entry under `key` may come from a remote, because this machine's folder has none.
    pub fn may_bring(&self, stage: &str, key: &Digest) -> bool {
        self.remote.as_ref().is_some_and(Remote::reads) && !self.store.entry_path(stage, key).exists()
    }

    /// Reports once for each entry that it exists without the seal of our key.
    fn tell_unsigned(&self, stage: &str, key: &Digest) {
        let stores = [Some(&self.store), self.shared.as_ref()];
        let Some(path) = stores.into_iter().flatten().find_map(|store| store.unsigned(stage, key)) else { return };
        if self.unsigned.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone()) {
            (self.note)(&Note::Unsigned { stage: stage.to_string(), key: *key, path });
        }
    }

    /// Writes the key text of an entry again if it was lost: an entry without one can be used but not explained. A folder that
    /// cannot be written stays as it is.
    fn explain(&self, stage: &str, key: &Digest, why: &str) {
        let _ = self.store.mend_why(stage, key, why);
    }

    /// The key in use.
    pub fn key(&self) -> Option<&Key> {
        self.store.key()
    }

    /// Removes the entry under `key`, here and in the shared folder; the next process that needs it builds it.
    pub fn remove(&self, stage: &str, key: &Digest) -> Result<(), CacheError> {
        if let Some(shared) = self.shared.as_ref().filter(|_| !self.shared_read_only)
            && let Err(error) = shared.remove(stage, key)
        {
            (self.note)(&Note::Shared { action: "remove an entry", reason: error.to_string() });
        }
        if let Some(remote) = &self.remote {
            remote.remove(&self.store, stage, key);
        }
        self.store.remove(stage, key)
    }

    /// Stores `bytes` and returns the digest of what the cache now holds under `key`. It differs from that of `bytes` only if the
    /// stage is not deterministic and another process stored its result first.
    pub fn put(&self, stage: &str, key: &Digest, why: &str, bytes: &[u8]) -> Result<Digest, CacheError> {
        let content = self.store.put(stage, key, why, bytes)?;
        self.write_through(stage, key, why);
        Ok(content)
    }

    /// Stores `bytes` that a remote need not get, unless there is an entry.
    pub fn keep(&self, stage: &str, key: &Digest, why: &str, bytes: &[u8]) -> Result<(), CacheError> {
        if !self.store.entry_path(stage, key).exists() {
            self.store.put(stage, key, why, bytes)?;
            self.write_shared(stage, key, why);
        }
        Ok(())
    }

    /// Like [`Cache::put`] for content that does not fit in memory: `fill` writes the file, in any order.
    pub fn put_file<E: From<CacheError>>(
        &self,
        stage: &str,
        key: &Digest,
        why: &str,
        fill: impl FnOnce(&mut File) -> Result<(), E>,
    ) -> Result<Digest, E> {
        let content = self.store.put_file(stage, key, why, fill)?;
        self.write_through(stage, key, why);
        Ok(content)
    }

    /// The entry under `key`; `build` runs in at most one process at a time, and only if there is none.
    pub fn get_or_build<E: From<CacheError>>(
        &self,
        stage: &str,
        key: &Digest,
        why: &str,
        build: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<(Entry, Outcome), E> {
        self.get_or(stage, key, why, || {
            let bytes = build()?;
            let content = self.put(stage, key, why, &bytes)?;
            if content == Digest::of(&bytes) {
                return Ok(Some(self.store.entry_in_memory(stage, key, content, bytes)));
            }
            Ok(self.get_own(stage, key)?)
        })
    }

    /// Like [`Cache::get_or_build`] for content that does not fit in memory.
    pub fn get_or_build_file<E: From<CacheError>>(
        &self,
        stage: &str,
        key: &Digest,
        why: &str,
        build: impl FnOnce(&mut File) -> Result<(), E>,
    ) -> Result<(Entry, Outcome), E> {
        self.get_or(stage, key, why, || {
            self.put_file(stage, key, why, build)?;
            Ok(self.get_own(stage, key)?)
        })
    }

    fn get_or<E: From<CacheError>>(
        &self,
        stage: &str,
        key: &Digest,
        why: &str,
        build: impl FnOnce() -> Result<Option<Entry>, E>,
    ) -> Result<(Entry, Outcome), E> {
        if let Some(entry) = self.get_known(stage, key, why)? {
            return Ok((entry, Outcome::Cached));
        }
        let mut waiting = |waited| (self.note)(&Note::Waiting { stage: stage.to_string(), key: *key, waited });
        let lock = match self.store.lock_entry(stage, key, &mut waiting) {
            Ok(lock) => Some(lock),
            Err(LockError::Lock { path, source }) => {
                (self.note)(&Note::NoLocks { path, reason: source.to_string() });
                None
            }
            Err(LockError::Open { path, source }) => return Err(CacheError::io("lock", &path, source).into()),
        };
        if let Some(entry) = self.get_own(stage, key)? {
            return Ok((entry, Outcome::BuiltElsewhere));
        }
        let built = build()?;
        drop(lock);
        let entry = built.ok_or_else(|| CacheError::Vanished { path: self.store.entry_path(stage, key) })?;
        Ok((entry, Outcome::Built))
    }

    fn get_own(&self, stage: &str, key: &Digest) -> Result<Option<Entry>, CacheError> {
        match self.store.find(stage, key)? {
            Found::Missing => Ok(None),
            Found::Whole(entry) => Ok(Some(entry)),
            Found::Damaged(damaged) => {
                let reason = damaged.reason.to_string();
                let moved_to = self.store.set_aside(stage, key, &damaged);
                (self.note)(&Note::SetAside { stage: stage.to_string(), key: *key, reason, moved_to });
                Ok(None)
            }
        }
    }

    /// A hit in the shared folder, copied here: at once, or in the background if it is large. Any failure is a note and a miss.
    fn get_shared(&self, stage: &str, key: &Digest) -> Option<Entry> {
        let shared = self.shared.as_ref()?;
        let fault = |action, reason: String| (self.note)(&Note::Shared { action, reason });
        let entry = match shared.find(stage, key) {
            Ok(Found::Missing) => return None,
            Ok(Found::Whole(entry)) => entry,
            Ok(Found::Damaged(damaged)) => {
                if !self.shared_read_only {
                    shared.set_aside(stage, key, &damaged);
                }
                fault("use an entry", format!("`{}` is damaged: {}", damaged.path.display(), damaged.reason));
                return None;
            }
            Err(error) => {
                fault("read", error.to_string());
                return None;
            }
        };
        let large = entry.len() >= LARGE_BYTES;
        // Used in place only if the writers of the folder are trusted: they could change the file after it was hashed.
        if large && self.key().is_none() {
            self.copy_meanwhile(shared, stage, key);
            return Some(entry);
        }
        let why = shared.why(stage, key).unwrap_or_default();
        match self.store.copy_in(stage, key, &why, &entry) {
            Ok(content) if content == entry.content() => self.get_own(stage, key).ok().flatten().or(Some(entry)),
            Ok(_) if large => {
                // The copy has our seal, but its content was not sealed by a holder of the key.
                let _ = self.store.remove(stage, key);
                fault("copy an entry here", format!("`{}` changed while it was copied", entry.path().display()));
                None
            }
            Ok(_) => self.get_own(stage, key).ok().flatten(),
            Err(error) => {
                // The entry itself is sound, so a full or read-only local disk does not force a build.
                fault("copy an entry here", error.to_string());
                (!large).then_some(entry)
            }
        }
    }

    /// A hit in the remote cache, copied here and to the shared folder. Any failure is a note and a miss.
    fn get_remote(&self, stage: &str, key: &Digest, why: Option<&str>) -> Option<Entry> {
        let entry = self.remote.as_ref()?.fetch(&self.store, stage, key, why)?;
        let why = self.store.why(stage, key).unwrap_or_default();
        self.write_shared(stage, key, &why);
        Some(entry)
    }

    /// Copies an entry of the shared folder here in the background, unless a thread does so already.
    fn copy_meanwhile(&self, shared: &Store, stage: &str, key: &Digest) {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.entry((stage.to_string(), *key)).or_insert_with(|| {
            let (store, shared, note) = (self.store.clone(), shared.clone(), Arc::clone(&self.note));
            let (stage, key) = (stage.to_string(), *key);
            thread::spawn(move || {
                let why = shared.why(&stage, &key).unwrap_or_default();
                if let Err(error) = copy(&shared, &store, &stage, &key, &why) {
                    note(&Note::Shared { action: "copy an entry here", reason: error.to_string() });
                }
            })
        });
    }

    fn write_through(&self, stage: &str, key: &Digest, why: &str) {
        self.write_shared(stage, key, why);
        if let Some(remote) = &self.remote {
            remote.send(&self.store, stage, key);
        }
    }

    fn write_shared(&self, stage: &str, key: &Digest, why: &str) {
        let Some(shared) = self.shared.as_ref().filter(|_| !self.shared_read_only) else { return };
        if let Err(error) = copy(&self.store, shared, stage, key, why) {
            (self.note)(&unwritten(&error));
        }
    }

    /// The key text an entry was stored with.
    pub fn why(&self, stage: &str, key: &Digest) -> Option<String> {
        self.store.why(stage, key)
    }

    /// Remembers `key` as the latest of `subject` (a manifest, a prompt: whatever the user asked about).
    pub fn set_latest(&self, stage: &str, subject: &str, key: &Digest) -> Result<(), CacheError> {
        self.store.set_latest(stage, subject, key)
    }

    /// Key and key text of the last build of `subject`; compare with [`diff_why`]. `None` when it was never built, or
    /// when what it built was collected.
    pub fn latest_why(&self, stage: &str, subject: &str) -> Option<(Digest, String)> {
        let key = self.store.latest(stage, subject)?;
        Some((key, self.store.why(stage, &key)?))
    }

    pub fn stats(&self) -> Result<Stats, CacheError> {
        self.store.stats()
    }

    /// Removes what was used longest ago until the cache holds at most nine tenths of `bytes_max`; nothing happens
    /// below `bytes_max`. Entries used within `age_min` stay. One process collects at a time: `None` says that another
    /// one does.
    pub fn gc(&self, bytes_max: u64, age_min: Duration) -> Result<Option<GcReport>, CacheError> {
        self.store.gc(bytes_max, age_min)
    }

    /// Reads every byte and reports all problems. Changes nothing, except that a large entry found damaged is no longer
    /// remembered as good. `progress` is called with (bytes read, bytes in all).
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<Problem>, CacheError> {
        self.store.verify(progress)
    }

    fn remote(&self) -> Result<&Remote, CacheError> {
        self.remote.as_ref().ok_or(CacheError::NoRemote)
    }

    /// Sends the entries of this folder that the remote cache lacks. `progress` is called with (bytes done, bytes in all).
    ///
    /// # Errors
    /// No remote cache, or the first failure of it.
    pub fn push(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<Moved, CacheError> {
        self.remote()?.push(&self.store, progress)
    }

    /// Brings the entries of the remote cache here that this folder lacks.
    ///
    /// # Errors
    /// As [`Cache::push`].
    pub fn pull(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<Moved, CacheError> {
        self.remote()?.pull(&self.store, progress)
    }

    /// Reads every byte of the remote cache; returns what was read, and names of damaged files with what is wrong.
    ///
    /// # Errors
    /// As [`Cache::push`].
    pub fn verify_remote(
        &self,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Moved, Vec<(String, String)>), CacheError> {
        self.remote()?.verify(&self.store, progress)
    }

    /// Removes entries of the remote cache that were written longer than `age` ago.
    ///
    /// # Errors
    /// As [`Cache::push`].
    pub fn gc_remote(&self, age: Duration) -> Result<Moved, CacheError> {
        self.remote()?.gc(&self.store, age)
    }
}

#[cfg(test)]
mod tests;

/// Copies an entry from one folder to another, unless it was removed or damaged since it was found.
fn copy(from: &Store, to: &Store, stage: &str, key: &Digest, why: &str) -> Result<(), CacheError> {
    if let Found::Whole(entry) = from.find(stage, key)? {
        to.copy_in(stage, key, why, &entry)?;
    }
    Ok(())
}
