//! Owns the remote cache: the files of a cache folder as objects of a store that many machines reach.
//!
//! An object has the name and the bytes of the file, its sealed line included. So nothing of a server is trusted: an entry is used
//! after its seal and its digest hold, as from a folder, and an entry of [`PART_BYTES`] or more is hashed while its parts arrive.
//!
//! A remote never fails a build. What cannot be read is a miss, what cannot be written is left out. The first failure of reading
//! ends reading for this process, the first of writing ends writing, and each is told once.

mod client;
mod upload;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io::Write;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::{StreamExt, TryStreamExt, future, stream};
use opendal::{EntryMode, ErrorKind, Metadata, Operator};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use self::client::Bodies;
use self::upload::Upload;
use super::error::CacheError;
use super::frame::{self, Damage, SEAL_BYTES};
use super::store::{Entry, Found, Store};
use super::{Moved, Note};
use crate::address::{RemoteMode, RemotePlace};
use crate::digest::Digest;

/// Bytes of one request of a large entry, and the largest entry that is one request. S3 wants at least 5 MiB.
const PART_BYTES: u64 = 8 << 20;
/// Parts of a download on their way or waiting for their turn: 64 MiB, and 24 MiB more that are passed on, hashed and written.
const PARTS_READ: usize = 8;
/// Small entries that are sent, or listed ones that are looked at, at the same time.
const SMALL_AT_ONCE: usize = 8;
/// A transfer that is slower than this on average is given up: a build is faster.
const BYTES_PER_S_MIN: u64 = 4 << 20;
/// Time after which an entry that was missing is asked for again: every stage is looked up more than once.
const MISSING_FOR: Duration = Duration::from_secs(30);
/// Time between two notes about one large entry.
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// Largest key text that is read.
const WHY_BYTES_MAX: u64 = 16 << 20;

/// One file of a remote cache.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Object {
    /// `schedule-v1/9f/9f3c…`.
    name: String,
    bytes: u64,
    modified: Option<SystemTime>,
}

/// Why something of a remote is not used.
enum Failure {
    Missing,
    Damaged(Damage),
    /// The server, the network, or too little time.
    Remote(String),
    /// This machine's disk.
    Local(CacheError),
}

impl From<opendal::Error> for Failure {
    fn from(error: opendal::Error) -> Failure {
        match error.kind() {
            ErrorKind::NotFound => Failure::Missing,
            _ => Failure::Remote(client::reason(&error)),
        }
    }
}

impl From<CacheError> for Failure {
    fn from(error: CacheError) -> Failure {
        Failure::Local(error)
    }
}

pub(super) struct Remote {
    place: RemotePlace,
    /// Made when it is first needed: a build that finds everything here makes no connection.
    connection: OnceLock<Result<Connection, String>>,
    note: Arc<dyn Fn(&Note) + Send + Sync>,
    told: Arc<Mutex<BTreeSet<&'static str>>>,
    reading_ended: AtomicBool,
    writing_ended: Arc<AtomicBool>,
    /// Objects that are not what their name says. They are replaced by what is built.
    damaged: Mutex<BTreeSet<String>>,
    missing: Mutex<BTreeMap<String, Instant>>,
    /// Each is closed when an entry was sent.
    sending: Mutex<Vec<Receiver<()>>>,
}

struct Connection {
    operator: Operator,
    bodies: Bodies,
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    slots: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

/// Without waiting: a runtime that waits may not be dropped inside another one.
impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Connection {
    fn open(place: &RemotePlace) -> Result<Connection, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("remote cache")
            .enable_all()
            .build()
            .map_err(|error| format!("no threads for it: {error}"))?;
        let bodies = Bodies::default();
        let operator = client::operator(&place.address, bodies.clone())?;
        let (slots, large) = (Arc::new(Semaphore::new(SMALL_AT_ONCE)), Arc::new(Semaphore::new(1)));
        Ok(Connection { operator, bodies, runtime: Some(runtime), slots, large })
    }

    fn upload(&self) -> Upload {
        Upload { operator: self.operator.clone(), bodies: self.bodies.clone(), large: self.large.clone() }
    }

    fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Receiver<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        if let Some(runtime) = &self.runtime {
            runtime.spawn(async move {
                let _ = sender.send(work.await);
            });
        }
        receiver
    }

    /// Runs `work` on the threads of the remote, so that callers may be inside another runtime.
    fn wait<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T, Failure> {
        let work = async move { tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(too_slow(limit))) };
        self.spawn(work).recv().unwrap_or_else(|_| Err(Failure::Remote("its threads ended".to_string())))
    }
}

fn too_slow(limit: Duration) -> Failure {
    Failure::Remote(format!("it took longer than {} s", limit.as_secs()))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The beginning of an object.
enum First {
    Whole(Vec<u8>),
    /// More than a part; its length.
    Large(u64),
}

/// Reads an object that fits into a part with one request, and otherwise finds its length.
async fn first(operator: &Operator, name: &str) -> Result<First, Failure> {
    let reader = operator.reader(name).await?;
    let mut arriving = reader.clone().into_stream(..).await?;
    let mut bytes = Vec::new();
    while let Some(buffer) = arriving.try_next().await? {
        let stated = reader.metadata().map_or(0, Metadata::content_length);
        if stated.max((bytes.len() + buffer.len()) as u64) > PART_BYTES {
            drop(arriving);
            let stated = if stated > PART_BYTES { stated } else { operator.stat(name).await?.content_length() };
            return Ok(First::Large(stated));
        }
        // At once: what grows is copied.
        bytes.reserve_exact(usize::try_from(stated).unwrap_or(0).saturating_sub(bytes.len()));
        for piece in buffer {
            bytes.extend_from_slice(&piece);
        }
    }
    Ok(First::Whole(bytes))
}

/// Reads a part of an object into `bytes`, which is empty. In one piece: the pieces of an answer keep the buffers that they were read
/// into, which are up to twice as large.
async fn part(operator: &Operator, name: &str, range: Range<u64>, mut bytes: Vec<u8>) -> Result<Vec<u8>, Failure> {
    bytes.reserve_exact(usize::try_from(range.end - range.start).unwrap_or(0));
    let mut arriving = operator.reader(name).await?.into_stream(range).await?;
    while let Some(buffer) = arriving.try_next().await? {
        for piece in buffer {
            bytes.extend_from_slice(&piece);
        }
    }
    Ok(bytes)
}

impl Remote {
    pub fn open(place: RemotePlace, note: Arc<dyn Fn(&Note) + Send + Sync>) -> Option<Remote> {
        let remote = Remote {
            place,
            connection: OnceLock::new(),
            note,
            told: Arc::default(),
            reading_ended: AtomicBool::new(false),
            writing_ended: Arc::default(),
            damaged: Mutex::default(),
            missing: Mutex::default(),
            sending: Mutex::default(),
        };
        Some(remote)
    }

    pub fn place(&self) -> &RemotePlace {
        &self.place
    }

    fn connection(&self) -> Result<&Connection, Failure> {
        let connection = self.connection.get_or_init(|| Connection::open(&self.place));
        connection.as_ref().map_err(|reason| Failure::Remote(reason.clone()))
    }

    /// Time for `bytes`, all tries together.
    fn limit(&self, bytes: u64) -> Duration {
        self.place.address.timeout() + Duration::from_secs(bytes / BYTES_PER_S_MIN)
    }

    fn tell(&self, action: &'static str, reason: String) {
        tell(&self.told, &self.note, action, reason);
    }

    pub fn reads(&self) -> bool {
        self.place.mode != RemoteMode::Off && !self.reading_ended.load(Ordering::Relaxed)
    }

    fn writes(&self) -> bool {
        self.place.mode == RemoteMode::ReadWrite && !self.writing_ended.load(Ordering::Relaxed)
    }

    /// Brings an entry here, and its key text unless the caller knows that. Any failure is a note and a miss.
    pub fn fetch(&self, to: &Store, stage: &str, key: &Digest, why: Option<&str>) -> Option<Entry> {
        let name = to.entry_name(stage, key);
        let missed = locked(&self.missing).get(&name).is_some_and(|since| since.elapsed() < MISSING_FOR);
        if !self.reads() || missed || locked(&self.damaged).contains(&name) {
            return None;
        }
        match self.fetched(to, stage, key, &name, why) {
            Ok(entry) => return Some(entry),
            Err(Failure::Missing) => {
                locked(&self.missing).insert(name, Instant::now());
            }
            Err(Failure::Damaged(damage)) => {
                self.tell("use an entry", format!("`{name}` is damaged: {damage}; it is built again"));
                locked(&self.damaged).insert(name);
            }
            Err(Failure::Remote(reason)) => {
                self.reading_ended.store(true, Ordering::Relaxed);
                self.tell("read", reason);
            }
            Err(Failure::Local(error)) => self.tell("store an entry here", error.to_string()),
        }
        None
    }

    fn fetched(
        &self,
        to: &Store,
        stage: &str,
        key: &Digest,
        name: &str,
        known: Option<&str>,
    ) -> Result<Entry, Failure> {
        let connection = self.connection()?;
        // A second time for bytes that were damaged on their way.
        let mut tries = 2;
        loop {
            tries -= 1;
            let (operator, entry) = (connection.operator.clone(), name.to_string());
            let why = known.is_none().then(|| format!("{name}.why"));
            let both = async move {
                let why = async { Some(first(&operator, why.as_deref()?).await) };
                let (entry, why) = future::join(first(&operator, &entry), why).await;
                Ok((entry?, why))
            };
            let (entry, why) = connection.wait(self.limit(PART_BYTES), both)?;
            let why = match why {
                Some(Ok(First::Whole(framed))) => frame::unwrap(to.key(), "why", &format!("{name}.why"), framed).ok(),
                _ => None,
            };
            let why = why.and_then(|(text, _)| String::from_utf8(text).ok());
            let why = why.as_deref().or(known).unwrap_or_default();
            let damage = match entry {
                First::Large(bytes) => return self.fetch_large(to, stage, key, why, bytes),
                First::Whole(framed) => match frame::unwrap(to.key(), "entry", name, framed) {
                    Ok((bytes, content)) => {
                        if let Err(error) = to.put(stage, key, why, &bytes) {
                            // The entry is sound, so a full or read-only disk does not force a build.
                            self.tell("store an entry here", error.to_string());
                        }
                        return Ok(to.entry_in_memory(stage, key, content, bytes));
                    }
                    Err(damage) => damage,
                },
            };
            if tries == 0 {
                return Err(Failure::Damaged(damage));
            }
        }
    }

    /// Brings a large entry here in parts. A part of it that an interrupted process left is used after it was hashed with the rest.
    fn fetch_large(&self, to: &Store, stage: &str, key: &Digest, why: &str, bytes: u64) -> Result<Entry, Failure> {
        let name = to.entry_name(stage, key);
        // One process fetches; others wait for it as for a build. Without locks they fetch beside each other, each into its own file.
        let note = &self.note;
        let mut waiting = |waited| note(&Note::Waiting { stage: stage.to_string(), key: *key, waited });
        let lock = to.lock_entry(stage, key, &mut waiting).ok();
        if let Found::Whole(entry) = to.find(stage, key)? {
            return Ok(entry);
        }
        let content_bytes = bytes.checked_sub(SEAL_BYTES as u64).ok_or(Failure::Damaged(Damage::Seal))?;
        let mut line = Vec::new();
        self.parts(&name, content_bytes..bytes, &mut |part| {
            line.extend_from_slice(part);
            Ok(())
        })?;
        let stated = frame::unseal(to.key(), "entry", &name, content_bytes, &line).map_err(Failure::Damaged)?;
        let mut partial = to.partial(&name, lock.is_some())?;
        loop {
            let (mut hasher, begun) = partial.begun(content_bytes)?;
            let (mut done, mut told) = (begun, Instant::now());
            let path = partial.path().to_path_buf();
            self.parts(&name, begun..content_bytes, &mut |part| {
                hasher.update_rayon(part);
                let fault = |source| CacheError::io("write", &path, source);
                partial.file().write_all(part).map_err(fault)?;
                done += part.len() as u64;
                if told.elapsed() >= TOLD_EVERY {
                    told = Instant::now();
                    note(&Note::Fetching {
                        stage: stage.to_string(),
                        key: *key,
                        bytes: done,
                        bytes_all: content_bytes,
                    });
                }
                Ok(())
            })?;
            let found = Digest::from(hasher.finalize());
            if found == stated {
                break;
            }
            partial.discard()?;
            // What was left may have been of another object.
            if begun == 0 {
                return Err(Failure::Damaged(Damage::Content { expected: stated, found }));
            }
        }
        to.publish_partial((stage, key, why), partial, (content_bytes, stated), &line)?;
        drop(lock);
        match to.find(stage, key)? {
            Found::Whole(entry) => Ok(entry),
            _ => Err(Failure::Local(CacheError::Vanished { path: to.entry_path(stage, key) })),
        }
    }

    /// Calls `sink` with all bytes of a range, in order.
    fn parts(
        &self,
        name: &str,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), CacheError>,
    ) -> Result<(), Failure> {
        let connection = self.connection()?;
        let limit = self.limit(range.end - range.start);
        let (sender, receiver) = mpsc::sync_channel::<Result<Vec<u8>, Failure>>(1);
        // Used again: the memory of a part that one thread frees is not that of the next part of another thread.
        let unused = Arc::new(Mutex::new(Vec::new()));
        let (operator, buffers, name, mut missing) =
            (connection.operator.clone(), unused.clone(), name.to_string(), range.end - range.start);
        let _running = connection.spawn(async move {
            let starts = (range.start..range.end).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
            let ranges = starts.map(|start| start..range.end.min(start + PART_BYTES));
            let all = async {
                let (operator, name, buffers) = (&operator, &name, &buffers);
                let requests = ranges.map(|range| async move {
                    let buffer = locked(buffers).pop().unwrap_or_default();
                    part(operator, name, range, buffer).await
                });
                let mut arriving = stream::iter(requests).buffered(PARTS_READ);
                while let Some(part) = arriving.next().await {
                    let failed = part.is_err();
                    if tokio::task::block_in_place(|| sender.send(part)).is_err() || failed {
                        return;
                    }
                }
            };
            if tokio::time::timeout(limit, all).await.is_err() {
                let _ = sender.try_send(Err(too_slow(limit)));
            }
        });
        for part in receiver {
            let mut part = part?;
            missing = missing.saturating_sub(part.len() as u64);
            sink(&part)?;
            part.clear();
            locked(&unused).push(part);
        }
        match missing {
            0 => Ok(()),
            _ => Err(Failure::Remote(format!(
                "it ended {missing} bytes early, or took longer than {} s",
                limit.as_secs()
            ))),
        }
    }

    /// Sends an entry in the background.
    pub fn send(&self, from: &Store, stage: &str, key: &Digest) {
        if !self.writes() {
            return;
        }
        let name = from.entry_name(stage, key);
        locked(&self.missing).remove(&name);
        let connection = match self.connection() {
            Ok(connection) => connection,
            Err(failure) => return self.end_writing(failure),
        };
        let replaced = locked(&self.damaged).contains(&name);
        let (told, note, ended) = (self.told.clone(), self.note.clone(), self.writing_ended.clone());
        let (slots, upload) = (connection.slots.clone(), connection.upload());
        let (path, timeout) = (from.root().join(&name), self.place.address.timeout());
        let done = connection.spawn(async move {
            let _slot = slots.acquire_owned().await;
            if ended.load(Ordering::Relaxed) {
                return;
            }
            if let Err(Failure::Remote(reason)) = upload.send(&path, &name, replaced, timeout).await
                && !ended.swap(true, Ordering::Relaxed)
            {
                tell(&told, &note, "write", reason);
            }
        });
        let mut sending = locked(&self.sending);
        sending.retain(|one| !matches!(one.try_recv(), Ok(()) | Err(mpsc::TryRecvError::Disconnected)));
        sending.push(done);
    }

    fn end_writing(&self, failure: Failure) {
        if let Failure::Remote(reason) = failure
            && !self.writing_ended.swap(true, Ordering::Relaxed)
        {
            self.tell("write", reason);
        }
    }

    /// Waits until everything was sent or given up.
    pub fn finish(&self) {
        let sending = std::mem::take(&mut *locked(&self.sending));
        let mut told = false;
        for one in sending {
            while let Err(RecvTimeoutError::Timeout) = one.recv_timeout(TOLD_EVERY) {
                if !std::mem::replace(&mut told, true) {
                    (self.note)(&Note::Sending);
                }
            }
        }
    }

    /// Removes an entry. It is not read again by this process: it may be one that only others may remove.
    pub fn remove(&self, of: &Store, stage: &str, key: &Digest) {
        let name = of.entry_name(stage, key);
        locked(&self.damaged).insert(name.clone());
        if !self.writes() {
            return;
        }
        let removed = self.connection().and_then(|connection| {
            let operator = connection.operator.clone();
            connection.wait(self.limit(0), async move { Ok(operator.delete(&name).await?) })
        });
        if let Err(failure) = removed {
            self.end_writing(failure);
        }
    }

    fn fault(&self, action: &'static str, failure: Failure) -> CacheError {
        let reason = match failure {
            Failure::Local(error) => return error,
            Failure::Remote(reason) => reason,
            Failure::Missing => "not found".to_string(),
            Failure::Damaged(damage) => damage.to_string(),
        };
        CacheError::Remote { action, address: self.place.address.to_string(), reason }
    }

    /// All files of entries that have the seal of our key, or none, in order of their names.
    ///
    /// # Errors
    /// A server that cannot be reached, or that lists nothing, as one of plain HTTP.
    fn list(&self, of: &Store) -> Result<Vec<Object>, CacheError> {
        let listed = self.connection().and_then(|connection| {
            let operator = connection.operator.clone();
            // Servers list at least 1,000 objects in one answer.
            let limit = self.place.address.timeout() * 100;
            connection.wait(limit, async move {
                let mut objects = Vec::new();
                let mut listing = operator.lister_with("/").recursive(true).await?;
                while let Some(entry) = listing.try_next().await? {
                    if entry.metadata().mode() == EntryMode::FILE {
                        let modified = entry.metadata().last_modified().map(SystemTime::from);
                        objects.push(Object {
                            name: entry.path().trim_start_matches('/').to_string(),
                            bytes: entry.metadata().content_length(),
                            modified,
                        });
                    }
                }
                Ok(objects)
            })
        });
        let mut objects = match listed {
            // A folder that nobody has written to yet.
            Err(Failure::Missing) => Vec::new(),
            listed => listed.map_err(|failure| self.fault("list", failure))?,
        };
        objects.retain(|object| of.entry_of(&object.name).is_some());
        objects.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(objects)
    }

    /// Sends all entries of a folder that the remote lacks. `progress` is called with (bytes done, bytes in all).
    ///
    /// # Errors
    /// The first failure of the server or of the disk.
    pub fn push(&self, from: &Store, progress: &mut dyn FnMut(u64, u64)) -> Result<Moved, CacheError> {
        let there: BTreeSet<String> = self.list(from)?.into_iter().map(|object| object.name).collect();
        let mut moved = Moved::default();
        let mut wanted = Vec::new();
        for (name, bytes) in from.entries()? {
            match there.contains(&name) {
                true => moved.there += 1,
                false => wanted.push((name, bytes)),
            }
        }
        let all: u64 = wanted.iter().map(|(_, bytes)| bytes).sum();
        let connection = self.connection().map_err(|failure| self.fault("write", failure))?;
        let timeout = self.place.address.timeout();
        let mut running: Vec<(u64, Receiver<Result<(), Failure>>)> = Vec::new();
        let mut finish = |(bytes, one): (u64, Receiver<Result<(), Failure>>), moved: &mut Moved| {
            let sent = one.recv().unwrap_or_else(|_| Err(Failure::Remote("its threads ended".to_string())));
            sent.map_err(|failure| self.fault("write", failure))?;
            moved.entries += 1;
            moved.bytes += bytes;
            progress(moved.bytes, all);
            Ok::<(), CacheError>(())
        };
        for (name, bytes) in wanted {
            let Some((stage, key, false)) = from.entry_of(&name) else { continue };
            // Sends nothing that is damaged here.
            if !matches!(from.find(&stage, &key)?, Found::Whole(_)) {
                continue;
            }
            if running.len() >= SMALL_AT_ONCE {
                finish(running.remove(0), &mut moved)?;
            }
            let (upload, path) = (connection.upload(), from.root().join(&name));
            let sent = connection.spawn(async move { upload.send(&path, &name, false, timeout).await });
            running.push((bytes, sent));
        }
        running.into_iter().try_for_each(|one| finish(one, &mut moved))?;
        Ok(moved)
    }

    /// Brings all entries here that a folder lacks. Damaged ones are left out, each with a note.
    ///
    /// # Errors
    /// As [`Remote::push`].
    pub fn pull(&self, to: &Store, progress: &mut dyn FnMut(u64, u64)) -> Result<Moved, CacheError> {
        let mut moved = Moved::default();
        let mut wanted = Vec::new();
        for object in self.list(to)? {
            match to.entry_of(&object.name) {
                Some((_, _, false)) if to.root().join(&object.name).is_file() => moved.there += 1,
                Some((stage, key, false)) => wanted.push((stage, key, object)),
                _ => {}
            }
        }
        let all: u64 = wanted.iter().map(|(.., object)| object.bytes).sum();
        let mut done = 0;
        for (stage, key, Object { name, bytes, .. }) in wanted {
            match self.fetched(to, &stage, &key, &name, None) {
                Ok(_) => {
                    moved.entries += 1;
                    moved.bytes += bytes;
                }
                Err(Failure::Damaged(damage)) => {
                    (self.note)(&Note::Remote {
                        action: "use an entry",
                        reason: format!("`{name}` is damaged: {damage}"),
                    });
                }
                // Removed meanwhile.
                Err(Failure::Missing) => {}
                Err(failure) => return Err(self.fault("read", failure)),
            }
            done += bytes;
            progress(done, all);
        }
        Ok(moved)
    }

    /// Reads every byte of every entry; returns the entries, and the names of damaged ones with what is wrong.
    ///
    /// # Errors
    /// As [`Remote::push`].
    pub fn verify(
        &self,
        of: &Store,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Moved, Vec<(String, String)>), CacheError> {
        let objects = self.list(of)?;
        let all: u64 = objects.iter().map(|object| object.bytes).sum();
        let (mut read, mut problems) = (Moved::default(), Vec::new());
        for Object { name, bytes, .. } in objects {
            let is_why = of.entry_of(&name).is_some_and(|(_, _, is_why)| is_why);
            let kind = if is_why { "why" } else { "entry" };
            match self.verify_one(of, kind, &name, bytes) {
                Ok(()) | Err(Failure::Missing) => {}
                Err(Failure::Damaged(damage)) => problems.push((name, damage.to_string())),
                Err(failure) => return Err(self.fault("read", failure)),
            }
            read.entries += u64::from(!is_why);
            read.bytes += bytes;
            progress(read.bytes, all);
        }
        Ok((read, problems))
    }

    fn verify_one(&self, of: &Store, kind: &str, name: &str, bytes: u64) -> Result<(), Failure> {
        let Some(content_bytes) = bytes.checked_sub(SEAL_BYTES as u64) else {
            return Err(Failure::Damaged(Damage::TooShort { found_bytes: bytes }));
        };
        if kind == "why" && bytes > WHY_BYTES_MAX {
            return Err(Failure::Damaged(Damage::Seal));
        }
        let (mut hasher, mut at, mut line) = (blake3::Hasher::new(), 0, Vec::new());
        self.parts(name, 0..bytes, &mut |part| {
            let content = part.len().min(usize::try_from(content_bytes.saturating_sub(at)).unwrap_or(usize::MAX));
            let (content, rest) = part.split_at(content);
            hasher.update_rayon(content);
            line.extend_from_slice(rest);
            at += part.len() as u64;
            Ok(())
        })?;
        let stated = frame::unseal(of.key(), kind, name, content_bytes, &line).map_err(Failure::Damaged)?;
        let found = Digest::from(hasher.finalize());
        if found == stated { Ok(()) } else { Err(Failure::Damaged(Damage::Content { expected: stated, found })) }
    }

    /// Removes entries that were written longer than `age` ago. Stores know no last use.
    ///
    /// # Errors
    /// As [`Remote::push`].
    pub fn gc(&self, of: &Store, age: Duration) -> Result<Moved, CacheError> {
        let now = SystemTime::now();
        let objects = self.list(of)?;
        let old = |object: &&Object| {
            object.modified.is_some_and(|stamp| now.duration_since(stamp).is_ok_and(|since| since >= age))
        };
        let old: Vec<Object> = objects.iter().filter(old).cloned().collect();
        let mut removed = Moved { there: (objects.len() - old.len()) as u64, ..Moved::default() };
        let connection = self.connection().map_err(|failure| self.fault("write", failure))?;
        // Names sort an entry before its key text: every visible entry can be explained.
        for Object { name, bytes, .. } in old {
            let is_entry = of.entry_of(&name).is_some_and(|(_, _, is_why)| !is_why);
            let operator = connection.operator.clone();
            let deleted = connection.wait(self.limit(0), async move { Ok(operator.delete(&name).await?) });
            deleted.map_err(|failure| self.fault("remove from", failure))?;
            removed.entries += u64::from(is_entry);
            removed.bytes += bytes;
        }
        Ok(removed)
    }
}

fn tell(
    told: &Mutex<BTreeSet<&'static str>>,
    note: &Arc<dyn Fn(&Note) + Send + Sync>,
    action: &'static str,
    reason: String,
) {
    if locked(told).insert(action) {
        note(&Note::Remote { action, reason });
    }
}
