//! A place to run the real binary in: a folder with its own cache and trials, and checkpoints to damage.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::support::fixture;

/// Variables that would make a test depend on the machine.
const FOREIGN: [&str; 22] = [
    "XDG_CACHE_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "MONOBLOC_SHARED_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_HUB_DOWNLOAD_TIMEOUT",
    "MONOBLOC_CACHE_KEY_FILE",
    "MONOBLOC_REMOTE_CACHE",
    "MONOBLOC_REMOTE_CACHE_MODE",
    "NETRC",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "NO_COLOR",
    "RUST_BACKTRACE",
];

/// Where `.ci/install-clients.sh` puts the Python packages of tests.
pub fn python_packages() -> PathBuf {
    let named = std::env::var_os("MONOBLOC_CLIENTS").map(PathBuf::from);
    named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/clients"))
}

/// Copies the program to `to`, with `more` at its end. Another process writes the file: a child that another test starts meanwhile would hold it
/// open, and a file that is open for writing cannot be run.
pub fn copy_program(to: &Path, more: &str) {
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"cp "$0" "$1" && printf %s "$2" >> "$1""#, env!("CARGO_BIN_EXE_monobloc")]).arg(to).arg(more);
    assert!(shell.status().unwrap().success());
}

/// Skips a test that needs Python packages, or fails if this machine must have them.
pub fn without_packages(test: &str, missing: &str) {
    let required = std::env::var_os("MONOBLOC_REQUIRE_PYTHON").is_some_and(|value| value == "1");
    let reason = format!("`{}` has none: run .ci/install-clients.sh", python_packages().display());
    assert!(!required, "MONOBLOC_REQUIRE_PYTHON is set: {missing}: {reason}");
    crate::skipped(test, missing, &reason);
}

/// A folder in which commands run.
pub struct Place {
    folder: TempDir,
}

impl Place {
    /// A project with an empty corpus, so that its searches do not learn from measurements of other machines.
    pub fn new() -> Place {
        let place = Place { folder: tempfile::tempdir().unwrap() };
        fs::create_dir_all(place.path("flywheel/corpus")).unwrap();
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// Writes `m.toml` for a checkpoint folder, small enough to check and time in a moment.
    pub fn manifest(&self, checkpoint: &Path, context_max: u32) -> PathBuf {
        self.write("m.toml", manifest_text(&format!("path:{}", checkpoint.display()), context_max))
    }

    /// A copy of a fixture, to damage.
    pub fn checkpoint(&self, name: &str) -> PathBuf {
        let folder = self.path("checkpoint");
        fs::create_dir_all(&folder).unwrap();
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        folder
    }

    /// The binary with these arguments, divided at blanks, in this folder.
    pub fn command(&self, arguments: &str) -> assert_cmd::Command {
        let mut command = assert_cmd::Command::from_std(self.process(arguments));
        // A command that hangs shall fail under its own name.
        command.timeout(Duration::from_secs(300));
        command
    }

    /// As [`Place::command`], to be spawned.
    pub fn process(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_monobloc"));
        command.args(arguments.split_whitespace()).current_dir(self.folder.path()).stdin(Stdio::null());
        FOREIGN.iter().for_each(|name| {
            command.env_remove(name);
        });
        command.env("MONOBLOC_CACHE_DIR", "cache");
        // No credentials and no downloads of this user.
        command.env("HOME", self.folder.path());
        command
    }

    pub fn run(&self, arguments: &str) -> Answer {
        Answer::of(&mut self.command(arguments))
    }
}

pub fn manifest_text(source: &str, context_max: u32) -> String {
    format!(
        "[model]
source = \"{source}\"
[precision]
weights = \"fp32\"
[decode]
context_max = {context_max}
steps_per_launch = 2
check_positions = [0, 1, 5]
time_positions = [0]
[search]
trials = 0
[[target]]
record = \"cpu\"
"
    )
}

/// Output of a command.
#[derive(Debug)]
pub struct Answer {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Answer {
    pub fn of(command: &mut assert_cmd::Command) -> Answer {
        let output = command.output().unwrap();
        Answer {
            code: output.status.code().expect("no signal"),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The answer, if the exit code is `code`.
    #[track_caller]
    pub fn code(self, code: i32) -> Answer {
        assert_eq!(self.code, code, "{self:#?}");
        self
    }

    /// The answer to bad input: exit code 2, `error: ` first, and no internal details.
    #[track_caller]
    pub fn refused(self, expected: &[&str]) -> Answer {
        self.fault(2, expected)
    }

    #[track_caller]
    pub fn fault(self, code: i32, expected: &[&str]) -> Answer {
        let answer = self.code(code);
        let error = answer.stderr.lines().find(|line| line.starts_with("error: "));
        assert!(error.is_some_and(|error| error.len() > "error: ".len()), "{answer:#?}");
        for words in expected {
            assert!(answer.stderr.contains(words), "expected `{words}` in {answer:#?}");
        }
        for inside in ["panicked", "RUST_BACKTRACE", "src/", "fault of monobloc"] {
            assert!(!answer.stderr.contains(inside), "found `{inside}` in {answer:#?}");
        }
        answer
    }

    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

pub fn comma_separated(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}
