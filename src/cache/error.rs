//! Owns `CacheError`: what the file system can refuse, and what to do about it.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::error::Fault;

/// A cache folder that cannot be used. A damaged entry is never an error: it is a miss with a note.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("cannot {action} `{}`: {source}", path.display())]
    Full { action: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot {action} `{}`: {source}", path.display())]
    Denied { action: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot {action} `{}`: expected a folder, found a file on the way", path.display())]
    NotAFolder { action: &'static str, path: PathBuf },
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// The entry was published and then removed or damaged before it could be read back.
    #[error("`{}` disappeared right after it was stored", path.display())]
    Vanished { path: PathBuf },
    #[error("the key of the cache in `{}` cannot be used: {reason}", path.display())]
    Key { path: PathBuf, reason: String },
    #[error("cannot {action} the remote cache `{address}`: {reason}")]
    Remote { action: &'static str, address: String, reason: String },
    #[error("the remote cache of `{variable}` cannot be used: {reason}")]
    RemoteAddress { variable: &'static str, reason: String, remedy: &'static str },
    #[error("there is no remote cache")]
    NoRemote,
    #[error("expected a stage name of lower-case letters, digits, `-` and `_`, found `{stage}`")]
    StageName { stage: String },
}

impl CacheError {
    /// Sorts an IO failure by what the user can do about it. `action` is a verb: `write`, `read`, `lock`.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> CacheError {
        let path = path.to_path_buf();
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                CacheError::Full { action, path, source }
            }
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => CacheError::Denied { action, path, source },
            ErrorKind::NotADirectory => CacheError::NotAFolder { action, path },
            // Creating a folder where a file stands.
            ErrorKind::AlreadyExists if action == "create" => CacheError::NotAFolder { action, path },
            _ => CacheError::Io { action, path, source },
        }
    }
}

impl From<CacheError> for Fault {
    fn from(error: CacheError) -> Fault {
        let message = error.to_string();
        match error {
            CacheError::Full { .. } => Fault::environment(message).with_remedy(
                "free space on that disk (`monobloc cache gc` removes what was used longest ago), raise the quota or \
                 file size limit, or set `MONOBLOC_CACHE_DIR` to a folder on a larger disk",
            ),
            CacheError::Denied { .. } => Fault::environment(message)
                .with_remedy("make the folder writable, or set `MONOBLOC_CACHE_DIR` to a folder that is"),
            CacheError::NotAFolder { .. } => {
                Fault::environment(message).with_remedy("move that file away, or set `MONOBLOC_CACHE_DIR` to a folder")
            }
            CacheError::Io { .. } => Fault::environment(message)
                .with_remedy("check the disk, or set `MONOBLOC_CACHE_DIR` to a folder on another one"),
            CacheError::Vanished { .. } => Fault::environment(message)
                .with_remedy("another program changes the cache folder, or the disk loses writes: run again"),
            CacheError::Key { .. } => Fault::environment(message).with_remedy(
                "make one with `openssl rand -hex 32`, or unset `MONOBLOC_CACHE_KEY_FILE` to use entries without a signature",
            ),
            CacheError::Remote { .. } => Fault::environment(message).with_remedy(
                "check the address, the credentials in the environment and the network; builds go on without it",
            ),
            CacheError::RemoteAddress { remedy, .. } => Fault::environment(message).with_remedy(remedy),
            CacheError::NoRemote => Fault::input(message).with_remedy(
                "set `MONOBLOC_REMOTE_CACHE`, such as `s3://BUCKET/PREFIX?region=REGION`; docs/cache.md has all forms",
            ),
            CacheError::StageName { .. } => Fault::internal(message),
        }
    }
}
