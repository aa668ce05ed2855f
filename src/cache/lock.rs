//! Owns exclusive locks on files that other processes may replace or remove.
//!
//! `flock` locks an open file, not a name. If the file was removed or replaced meanwhile, its lock protects nothing. So every
//! lock is checked after it was taken, and taken again if the name has another file. The kernel releases a lock when its
//! holder dies. Locks are released by `unlock`, not by closing alone: from its fork to its exec, a child process holds a
//! copy of every descriptor, and with it the lock.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Pause between two tries; short compared with a build.
const PAUSE_MAX: Duration = Duration::from_millis(50);
/// Time between two calls of `on_wait`, after the first.
const REPORT_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub enum LockError {
    /// The lock file itself cannot be opened or created.
    Open { path: PathBuf, source: io::Error },
    /// The file system refuses locks.
    Lock { path: PathBuf, source: io::Error },
}

/// A file that this process has locked.
#[derive(Debug)]
pub struct Locked(File);

impl Deref for Locked {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// Locks an open file if no other process holds it.
pub fn try_lock(file: File) -> Result<Locked, TryLockError> {
    file.try_lock().map(|()| Locked(file))
}

/// How to wait for a lock that another process holds.
pub enum Wait<'a> {
    /// Waits in the kernel, which wakes waiters at once: for locks held for milliseconds.
    Silently,
    /// Tries again and again, and reports how long it has waited: for locks held during a build.
    Telling(&'a mut dyn FnMut(Duration)),
}

/// Opens `path` with `open` and locks it. On return the file is the one that `path` names.
pub fn lock_path(
    path: &Path,
    open: impl Fn(&Path) -> io::Result<File>,
    mut wait: Wait<'_>,
) -> Result<Locked, LockError> {
    loop {
        let file = open(path).map_err(|source| LockError::Open { path: path.to_path_buf(), source })?;
        let locked = match &mut wait {
            Wait::Silently => lock_silently(&file),
            Wait::Telling(on_wait) => lock_telling(&file, on_wait),
        };
        locked.map_err(|source| LockError::Lock { path: path.to_path_buf(), source })?;
        let locked = Locked(file);
        if is_at(&locked, path) {
            return Ok(locked);
        }
    }
}

fn lock_silently(file: &File) -> io::Result<()> {
    loop {
        match file.lock() {
            // A signal arrived; its handler decides whether the process continues.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn lock_telling(file: &File, on_wait: &mut dyn FnMut(Duration)) -> io::Result<()> {
    let start = Instant::now();
    let mut report_at = Duration::ZERO;
    let mut pause = Duration::from_millis(1);
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let waited = start.elapsed();
        if waited >= report_at {
            on_wait(waited);
            report_at = waited + REPORT_EVERY;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Whether `path` still names the open `file`.
pub fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => open.dev() == named.dev() && open.ino() == named.ino(),
        _ => false,
    }
}

/// A lock file that exists for its lock alone; it is removed when the lock is released.
#[derive(Debug)]
pub struct LockFile {
    path: PathBuf,
    /// Dropped last, so that the lock is released after the removal.
    _file: Locked,
}

impl LockFile {
    /// `on_wait` is called with the time waited for another process: at once, then about every second.
    pub fn acquire(path: PathBuf, on_wait: &mut dyn FnMut(Duration)) -> Result<LockFile, LockError> {
        let file = lock_path(&path, open_lock_file, Wait::Telling(on_wait))?;
        Ok(LockFile { path, _file: file })
    }

    /// The lock, unless another process holds it.
    ///
    /// # Errors
    /// A place that cannot be written, a file system without locks.
    pub fn take(path: &Path) -> io::Result<Option<LockFile>> {
        match try_lock(open_lock_file(path)?) {
            Ok(file) if is_at(&file, path) => Ok(Some(LockFile { path: path.to_path_buf(), _file: file })),
            // Its holder removes it at this moment.
            Ok(_) | Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // A waiter that has this file open gets its lock next, sees that the name is gone, and starts again.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes a lock file without a holder (its holder was killed). Returns whether it did.
pub fn remove_if_free(path: &Path) -> bool {
    let Some(locked) = File::open(path).ok().and_then(|file| try_lock(file).ok()) else { return false };
    is_at(&locked, path) && fs::remove_file(path).is_ok()
}

pub fn open_lock_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).open(path)
}

/// Whether a process is writing a file, as far as its lock tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    Free,
    Held,
    /// The file is gone, not ours to open, or the file system has no locks.
    Unknown,
}

/// Whether a process holds the lock. A file that was just created may not be locked yet, and looks free.
pub fn holder(path: &Path) -> Holder {
    let Ok(file) = File::open(path) else { return Holder::Unknown };
    match try_lock(file) {
        Ok(locked) if is_at(&locked, path) => Holder::Free,
        Err(TryLockError::WouldBlock) => Holder::Held,
        _ => Holder::Unknown,
    }
}
