//! Owns how an entry is written to a store: its key text first, then its bytes, in parts or in one request.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use opendal::{Buffer, Operator};
use tokio::sync::Semaphore;

use super::client::Bodies;
use super::{BYTES_PER_S_MIN, Failure, PART_BYTES, too_slow};
use crate::cache::error::CacheError;

/// Parts of an upload on their way: 32 MiB.
const PARTS_WRITTEN: usize = 4;
/// Stores allow at most 10,000 parts.
const PARTS_MAX: u64 = 9_000;

/// Writes entries; large ones one after another.
pub(super) struct Upload {
    pub operator: Operator,
    pub bodies: Bodies,
    pub large: Arc<Semaphore>,
}

/// Bytes of a large entry, in parts or in one request.
struct Large<'a> {
    path: &'a Path,
    name: &'a str,
    file: File,
    bytes: u64,
}

fn fault(path: &Path) -> impl Fn(io::Error) -> Failure + '_ {
    move |source| Failure::Local(CacheError::io("read", path, source))
}

impl Upload {
    /// Sends the files of an entry, the key text first. With `replaced`, an object of that name is written over.
    pub async fn send(&self, path: &Path, name: &str, replaced: bool, timeout: Duration) -> Result<(), Failure> {
        let file = File::open(path).map_err(fault(path))?;
        let bytes = file.metadata().map_err(fault(path))?.len();
        let limit = timeout + Duration::from_secs(bytes / BYTES_PER_S_MIN);
        let work = async {
            if !replaced {
                match self.operator.stat(name).await.map_err(Failure::from) {
                    Ok(_) => return Ok(()),
                    Err(Failure::Missing) => {}
                    Err(failure) => return Err(failure),
                }
            }
            if let Ok(why) = fs::read(format!("{}.why", path.display())) {
                self.operator.write(&format!("{name}.why"), why).await?;
            }
            if bytes <= PART_BYTES {
                let content = fs::read(path).map_err(fault(path))?;
                self.operator.write(name, content).await?;
                return Ok(());
            }
            let _alone = self.large.acquire().await;
            let large = Large { path, name, file, bytes };
            match self.operator.info().native_capability().write_can_multi {
                true => self.send_parts(large).await,
                false => self.send_whole(large).await,
            }
        };
        tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(too_slow(limit)))
    }

    /// In one request, whose body is the file.
    async fn send_whole(&self, large: Large<'_>) -> Result<(), Failure> {
        self.bodies.insert(large.name, large.path.to_path_buf());
        let sent = self.operator.write(large.name, Buffer::new()).await;
        self.bodies.remove(large.name);
        Ok(sent.map(|_| ())?)
    }

    async fn send_parts(&self, large: Large<'_>) -> Result<(), Failure> {
        let Large { path, name, file, bytes } = large;
        let part = PART_BYTES.max(bytes.div_ceil(PARTS_MAX).next_multiple_of(1 << 20));
        let part = usize::try_from(part).map_err(|_| Failure::Remote("it is too large".to_string()))?;
        let mut writer = self.operator.writer_with(name).chunk(part).concurrent(PARTS_WRITTEN).await?;
        let sent = async {
            let mut left = bytes;
            while left > 0 {
                let mut piece = Vec::new();
                let read = (&file).take(part as u64).read_to_end(&mut piece).map_err(fault(path))?;
                if read == 0 {
                    return Err(Failure::Remote("the entry became shorter while it was sent".to_string()));
                }
                left = left.saturating_sub(read as u64);
                writer.write(piece).await?;
            }
            Ok::<(), Failure>(())
        };
        match sent.await {
            Ok(()) => {
                writer.close().await?;
                Ok(())
            }
            Err(failure) => {
                // Parts of an upload that is not completed cost their owner storage.
                let _ = writer.abort().await;
                Err(failure)
            }
        }
    }
}
