//! Owns finding and reading files that people name: the rule for relative paths, the limit on size, and the check for a regular
//! file.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::Fault;

/// Why a named file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("no such file or folder: `{}` (tried {})", .raw, tried_list(.tried))]
    Missing { raw: String, tried: Vec<PathBuf> },
    #[error("cannot read `{}`: {}", .path.display(), .cause)]
    Read { path: PathBuf, cause: io::Error },
    #[error("expected a regular file, found {} at `{}`", .found, .path.display())]
    NotRegular { path: PathBuf, found: &'static str },
    #[error("expected at most {bytes_max} bytes in `{}`, found more", .path.display())]
    TooLarge { path: PathBuf, bytes_max: u64 },
    #[error("expected UTF-8 text in `{}`, found other bytes after byte {}", .path.display(), .valid_bytes)]
    NotUtf8 { path: PathBuf, valid_bytes: usize },
}

fn tried_list(tried: &[PathBuf]) -> String {
    let quoted: Vec<String> = tried.iter().map(|path| format!("`{}`", path.display())).collect();
    quoted.join(" and ")
}

impl From<FileError> for Fault {
    fn from(error: FileError) -> Fault {
        let message = error.to_string();
        match error {
            FileError::Missing { .. } => Fault::input(message).with_remedy(PATH_RULE),
            FileError::Read { cause, .. } if cause.kind() == io::ErrorKind::NotFound => Fault::input(message),
            FileError::Read { .. } => Fault::environment(message),
            FileError::NotRegular { .. } | FileError::TooLarge { .. } | FileError::NotUtf8 { .. } => {
                Fault::input(message)
            }
        }
    }
}

/// For code that reads through `std`. An error that is no failure of the system is kept inside, and can be taken out again.
impl From<FileError> for io::Error {
    fn from(error: FileError) -> io::Error {
        match error {
            FileError::Read { cause, .. } => cause,
            other => io::Error::new(io::ErrorKind::InvalidInput, other),
        }
    }
}

/// The rule of [`find`] in one sentence, for errors and help texts.
pub const PATH_RULE: &str =
    "a relative path is looked up first in the folder of the file that names it, then in the current directory";

/// Finds the file or folder that `raw` names. An absolute path is taken as it is. A relative one is looked up in `base_dir`, the
/// folder of the file that names it, and then in the current directory.
///
/// The folder of the file comes first, so that a manifest means the same in any current directory. The current directory is for
/// paths that are typed on a command line.
///
/// # Errors
/// [`FileError::Missing`] with every place that was tried.
pub fn find(raw: &str, base_dir: &Path) -> Result<PathBuf, FileError> {
    let mut tried = vec![PathBuf::from(raw)];
    let beside = base_dir.join(raw);
    // Joining an absolute path gives that path, and "." is the current directory: such a place is tried once.
    if beside != tried[0] && base_dir != Path::new(".") {
        tried.insert(0, beside);
    }
    match tried.iter().find(|path| path.exists()) {
        Some(found) => Ok(found.clone()),
        None => Err(FileError::Missing { raw: raw.to_string(), tried }),
    }
}

/// The folder that holds `path`; `.` for a bare file name.
pub fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// Opens a regular file for reading. Anything else at the path is refused at once: a pipe without a writer would block its
/// reader for ever, and a device may have no end.
///
/// The file is opened first, without waiting, and its type is that of the open handle: no other file can take its place
/// between the two.
pub fn open(path: &Path) -> Result<File, FileError> {
    open_with(path, OpenOptions::new().read(true))
}

/// As [`open`], with options of the caller, for example to append.
pub fn open_with(path: &Path, options: &mut OpenOptions) -> Result<File, FileError> {
    let not_regular = |found| FileError::NotRegular { path: path.to_path_buf(), found };
    let failed = |cause: io::Error| match cause.raw_os_error() {
        // The error of a socket, and of a pipe that is opened for writing and has no reader.
        Some(libc::ENXIO) => not_regular("a socket, a pipe or a device"),
        Some(libc::EISDIR) => not_regular("a folder"),
        _ => FileError::Read { path: path.to_path_buf(), cause },
    };
    let file = options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).map_err(failed)?;
    let kind = file.metadata().map_err(failed)?.file_type();
    match kind {
        kind if kind.is_file() => Ok(file),
        kind if kind.is_dir() => Err(not_regular("a folder")),
        kind if kind.is_fifo() => Err(not_regular("a pipe")),
        kind if kind.is_socket() => Err(not_regular("a socket")),
        _ => Err(not_regular("a device")),
    }
}

/// Reads a file of at most `bytes_max` bytes; a larger one is refused without being read to its end.
pub fn read_bytes(path: &Path, bytes_max: u64) -> Result<Vec<u8>, FileError> {
    let failed = |cause| FileError::Read { path: path.to_path_buf(), cause };
    let mut bytes = Vec::new();
    open(path)?.take(bytes_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > bytes_max {
        return Err(FileError::TooLarge { path: path.to_path_buf(), bytes_max });
    }
    Ok(bytes)
}

/// Reads a text, bounded as by [`read_bytes`].
pub fn read_text(path: &Path, bytes_max: u64) -> Result<String, FileError> {
    String::from_utf8(read_bytes(path, bytes_max)?)
        .map_err(|error| FileError::NotUtf8 { path: path.to_path_buf(), valid_bytes: error.utf8_error().valid_up_to() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Tier;

    #[test]
    fn a_relative_path_is_found_beside_the_file_that_names_it() {
        let folder = tempfile::tempdir().expect("temporary folder");
        std::fs::write(folder.path().join("near.toml"), "x").expect("write");
        assert_eq!(find("near.toml", folder.path()).expect("found"), folder.path().join("near.toml"));
        // Tests run in the root of the package, which has such a file, too.
        assert_eq!(find("Cargo.toml", folder.path()).expect("found"), Path::new("Cargo.toml"));
        std::fs::write(folder.path().join("Cargo.toml"), "x").expect("write");
        assert_eq!(find("Cargo.toml", folder.path()).expect("found"), folder.path().join("Cargo.toml"));
    }

    #[test]
    fn a_missing_path_names_every_place_once() {
        let tried = |raw: &str, base: &str| find(raw, Path::new(base)).expect_err("missing").to_string();
        assert_eq!(
            tried("no/such", "some/folder"),
            "no such file or folder: `no/such` (tried `some/folder/no/such` and `no/such`)"
        );
        assert_eq!(tried("no/such", "."), "no such file or folder: `no/such` (tried `no/such`)");
        assert_eq!(tried("/no/such", "some"), "no such file or folder: `/no/such` (tried `/no/such`)");
    }

    #[test]
    fn reading_is_bounded_and_says_why_it_failed() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("f");
        std::fs::write(&path, "abcd").expect("write");
        assert_eq!(read_text(&path, 4).expect("four bytes"), "abcd");
        assert!(matches!(read_text(&path, 3), Err(FileError::TooLarge { bytes_max: 3, .. })));
        std::fs::write(&path, b"ab\xff").expect("write");
        assert!(matches!(read_text(&path, 9), Err(FileError::NotUtf8 { valid_bytes: 2, .. })));
        let missing = read_text(&folder.path().join("none"), 9).expect_err("no such file");
        assert_eq!(Fault::from(missing).tier, Tier::Input);
        let is_folder = read_text(folder.path(), 9).expect_err("a folder is no text");
        assert!(is_folder.to_string().contains("expected a regular file, found a folder"), "{is_folder}");
        assert_eq!(Fault::from(is_folder).tier, Tier::Input);
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let (pipe, socket) = (folder.path().join("pipe"), folder.path().join("socket"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
        let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
        for (path, found) in [(pipe.as_path(), "a pipe"), (&socket, "a socket"), (Path::new("/dev/zero"), "a device")] {
            let error = read_bytes(path, 9).expect_err("no regular file");
            assert!(error.to_string().starts_with(&format!("expected a regular file, found {found}")), "{error}");
            assert_eq!(Fault::from(error).tier, Tier::Input);
        }
        let appended = open_with(&pipe, OpenOptions::new().append(true).read(true));
        assert!(matches!(appended, Err(FileError::NotRegular { .. })), "{appended:?}");
        let written = open_with(&pipe, OpenOptions::new().write(true));
        assert!(matches!(written, Err(FileError::NotRegular { .. })), "{written:?}");
    }

    #[test]
    fn the_folder_of_a_bare_name_is_the_current_directory() {
        assert_eq!(folder_of(Path::new("m.toml")), Path::new("."));
        assert_eq!(folder_of(Path::new("a/m.toml")), Path::new("a"));
        assert_eq!(folder_of(Path::new("/m.toml")), Path::new("/"));
    }
}
