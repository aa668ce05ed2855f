//! Owns the default places of the cache and the trials: those of the project, else those of the user.
//!
//! A project is a folder with a `cache/` of monobloc (its CACHEDIR.TAG or its README.md says so), or with a `flywheel/` of trials.
//! The current folder and those above it are searched. Outside of a project, the user has one cache and one file of trials:
//! `$XDG_CACHE_HOME/monobloc` and `$XDG_DATA_HOME/monobloc`. The history of chats is always the user's: `$XDG_STATE_HOME/monobloc`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::cache::Places;
use crate::error::Fault;

const CACHE: &str = "cache";
const TRIALS: &str = "flywheel/trials.csv";

/// Refuses paths in variables that are no text: parts of manifests and messages are made of them.
///
/// # Errors
/// The first such variable.
pub fn check_variables() -> Result<(), Fault> {
    for name in [Places::ROOT_VARIABLE, Places::SHARED_VARIABLE, Places::KEY_VARIABLE] {
        if env::var_os(name).is_some_and(|value| value.to_str().is_none()) {
            return Err(
                Fault::input(format!("the path in `{name}` is not UTF-8 text")).with_remedy("rename the folder")
            );
        }
    }
    Ok(())
}

/// The project's cache, or the user's.
pub fn cache_root() -> PathBuf {
    let says = |file: PathBuf, words: &str| fs::read_to_string(file).is_ok_and(|text| text.contains(words));
    // The tag that every cache writes into its folder, or the page that a repository may track there.
    let is_cache = |folder: &Path| {
        says(folder.join("CACHEDIR.TAG"), "deleting it costs time only")
            || says(folder.join("README.md"), "monobloc cache gc")
    };
    in_project(CACHE, is_cache)
        .or_else(|| Some(user_folder(&USER_CACHE)?.join("monobloc")))
        .unwrap_or_else(|| PathBuf::from(CACHE))
}

/// The project's trials, or the user's.
pub fn trials_file() -> PathBuf {
    let is_trials = |file: &Path| file.is_file() || file.with_file_name("corpus").is_dir();
    in_project(TRIALS, is_trials)
        .or_else(|| Some(user_folder(&USER_DATA)?.join("monobloc/trials.csv")))
        .unwrap_or_else(|| PathBuf::from(TRIALS))
}

/// The file of lines that the user typed into chats, one for all projects; `None` without a home folder.
pub fn chat_history() -> Option<PathBuf> {
    Some(user_folder(&USER_STATE)?.join("monobloc/chat-history"))
}

/// `name` in the nearest folder, from the current one upward, in which `is` accepts it; relative if that is the current folder.
fn in_project(name: &str, is: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    if is(Path::new(name)) {
        return Some(PathBuf::from(name));
    }
    let current = env::current_dir().ok()?;
    current.ancestors().skip(1).map(|folder| folder.join(name)).find(|path| is(path))
}

/// A folder of the user: the variable that names it, and its place below the home folder if the variable is not set.
struct UserFolder {
    variable: &'static str,
    below_home: &'static str,
}

const USER_CACHE: UserFolder = UserFolder {
    variable: "XDG_CACHE_HOME",
    below_home: if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" },
};
const USER_DATA: UserFolder = UserFolder {
    variable: "XDG_DATA_HOME",
    below_home: if cfg!(target_os = "macos") { "Library/Application Support" } else { ".local/share" },
};

const USER_STATE: UserFolder = UserFolder {
    variable: "XDG_STATE_HOME",
    below_home: if cfg!(target_os = "macos") { "Library/Application Support" } else { ".local/state" },
};

fn user_folder(folder: &UserFolder) -> Option<PathBuf> {
    // The specification of these variables ignores relative paths.
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(folder.variable).or_else(|| Some(absolute("HOME")?.join(folder.below_home)))
}
