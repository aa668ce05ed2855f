//! Owns the streams of the process: stdout that may close, errors on stderr, colours, panics and interrupts.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::borrow::Cow;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::panic;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Outcome;
use super::arguments::Color;
use crate::error::{Fault, Tier};
use crate::pipeline::end_children;
use crate::text::{Style, printable, printable_json, printable_painted, printable_prose};

const RED_BOLD: &str = "\x1b[1;31m";
const GREEN_BOLD: &str = "\x1b[1;32m";
const CYAN_BOLD: &str = "\x1b[1;36m";
const RESET: &str = "\x1b[0m";
/// What to do about a fault of monobloc itself.
const REPORT: &str = "this is a fault of monobloc, not of the input: please report it with the command line";

/// Where a command prints.
pub struct Terminal {
    /// Style of stderr.
    pub style: Style,
    /// Style of stdout.
    pub stdout_style: Style,
    /// Whether errors are JSON.
    faults_are_json: bool,
    /// Whether the reader of stdout has closed it.
    closed: AtomicBool,
}

impl Terminal {
    pub fn new(color: Color, faults_are_json: bool) -> Terminal {
        let (style, stdout_style) = match color {
            Color::Always => (Style::Colour, Style::Colour),
            Color::Never => (Style::Plain, Style::Plain),
            Color::Auto => (Style::for_stderr(), style_for_stdout()),
        };
        // No colours within a text of JSON.
        let style = if faults_are_json { Style::Plain } else { style };
        Terminal { style, stdout_style, faults_are_json, closed: AtomicBool::new(false) }
    }

    /// Prints to stdout at once. Control characters are escaped, because text from files that are not trusted may be in it. If the
    /// reader has closed stdout (`| head`), nothing more is printed, and the command ends as usual.
    pub fn print(&self, text: &str) -> Result<(), Fault> {
        self.write(&safe(text, self.stdout_style))
    }

    /// Prints text that a model wrote: to a terminal with control characters escaped, to anything else unchanged.
    pub fn print_generated(&self, text: &str) -> Result<(), Fault> {
        if io::stdout().is_terminal() { self.write(&printable_prose(text)) } else { self.write(text) }
    }

    fn write(&self, text: &str) -> Result<(), Fault> {
        if self.is_closed() {
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.closed.store(true, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => Err(Fault::environment(format!("cannot write to stdout: {error}"))),
        }
    }

    /// Prints one JSON value and a line break.
    pub fn print_json(&self, value: &serde_json::Value) -> Result<(), Fault> {
        self.write(&printable_json(&format!("{value:#}\n")))
    }

    /// Prints one JSON value on a line of its own.
    pub fn print_json_line(&self, value: &serde_json::Value) -> Result<(), Fault> {
        self.write(&printable_json(&format!("{value}\n")))
    }

    /// Whether a person reads stdout.
    pub fn stdout_is_terminal(&self) -> bool {
        io::stdout().is_terminal()
    }

    /// Whether the reader of stdout has closed it, so that printing has no effect.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Prints a message that is no result to stderr.
    pub fn say(&self, text: &str) {
        say(text, self.style);
    }

    /// Prints an error to stderr; with `--json` as one line of JSON, so that a program finds it whatever stands before it.
    pub fn print_fault(&self, fault: &Fault) {
        match self.faults_are_json {
            true => print_fault_json(fault),
            false => self.say(&fault_text(fault, self.style)),
        }
    }

    /// `proven`, in green on a terminal.
    pub fn good(&self, word: &str) -> String {
        painted(word, GREEN_BOLD, self.stdout_style)
    }

    /// `rejected`, in red on a terminal.
    pub fn bad(&self, word: &str) -> String {
        painted(word, RED_BOLD, self.stdout_style)
    }
}

/// As [`Terminal::say`], for callers without a [`Terminal`].
pub fn say(text: &str, style: Style) {
    // If stderr cannot be written, there is no other place to report it.
    let _ = writeln!(io::stderr().lock(), "{}", safe(text, style));
}

/// As [`Terminal::print_fault`] with `--json`.
pub fn print_fault_json(fault: &Fault) {
    let line = fault_json(fault).to_string();
    let _ = writeln!(io::stderr().lock(), "{}", printable_json(&line));
}

/// An error for programs; `code` is the exit code that goes with it.
pub fn fault_json(fault: &Fault) -> serde_json::Value {
    let Fault { tier, message, remedy } = fault;
    let report = (*tier == Tier::Internal).then_some(REPORT);
    let remedies: Vec<&str> = remedy.as_deref().into_iter().chain(report).collect();
    let remedy = (!remedies.is_empty()).then(|| remedies.join("; "));
    serde_json::json!({ "code": tier.exit_code(), "message": message, "remedy": remedy })
}

/// Prints clap's text: help to stdout, errors to stderr. Escaped, because an error repeats what the user typed.
pub fn print_usage(error: &clap::Error) {
    let style = if error.use_stderr() { Style::for_stderr() } else { style_for_stdout() };
    let text = match style {
        Style::Plain => error.render().to_string(),
        Style::Colour => error.render().ansi().to_string(),
    };
    let text = safe(&text, style);
    let _ = match error.use_stderr() {
        true => io::stderr().lock().write_all(text.as_bytes()),
        false => io::stdout().lock().write_all(text.as_bytes()),
    };
}

/// Text with control characters escaped. All text for a stream passes through here, except that of a model.
fn safe(text: &str, style: Style) -> Cow<'_, str> {
    match style {
        Style::Plain => printable(text),
        Style::Colour => Cow::Owned(printable_painted(text)),
    }
}

/// As [`Style::for_stderr`].
fn style_for_stdout() -> Style {
    if io::stdout().is_terminal() && !Style::is_refused() { Style::Colour } else { Style::Plain }
}

fn painted(word: &str, paint: &str, style: Style) -> String {
    match style {
        Style::Plain => word.to_string(),
        Style::Colour => format!("{paint}{word}{RESET}"),
    }
}

fn fault_text(fault: &Fault, style: Style) -> String {
    let Fault { tier, message, remedy } = fault;
    let mut text = format!("{}: {message}", painted("error", RED_BOLD, style));
    if let Some(remedy) = remedy {
        text.push_str(&format!("\n  {}: {remedy}", painted("help", CYAN_BOLD, style)));
    }
    if *tier == Tier::Internal {
        text.push_str(&format!("\n  {}: {REPORT}", painted("help", CYAN_BOLD, style)));
    }
    text
}

/// Message and place of the last panic.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Keeps panics from printing. One that a stage catches (a library's, over a file that is not trusted) does not concern the
/// user, and one that reaches [`super::run`] is reported as a fault.
pub fn catch_panics() {
    panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let said = payload.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message");
        let place = info.location().map(|place| format!(" at {}:{}", place.file(), place.line())).unwrap_or_default();
        // Captured only if the user asks for it with RUST_BACKTRACE.
        let trace = Backtrace::capture();
        let trace = match trace.status() {
            BacktraceStatus::Captured => format!("\n{trace}"),
            _ => String::new(),
        };
        let mut last = PANIC.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *last = Some(format!("{said}{place}{trace}"));
    }));
}

/// The fault for the last panic.
pub fn panicked() -> Fault {
    let said = PANIC.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
    Fault::internal(said.unwrap_or_else(|| "a panic without a message".to_string()))
}

/// Ends the process from any thread, without exit handlers: those of a driver's libraries would free memory that other
/// threads still use. The cache and the trials stay sound wherever a process ends.
pub fn end_at_once(outcome: Outcome) -> ! {
    end_children();
    // SAFETY: `_exit` takes a number and does not return.
    unsafe { libc::_exit(i32::from(outcome.exit_code())) }
}

pub mod interrupt {
    //! Owns Ctrl-C: it ends the process at once, unless a command has asked to finish by itself.
    //!
    //! Ending at once loses nothing: the cache and the trials stay sound wherever a process is killed.

    use std::fs;
    use std::path::PathBuf;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::Outcome;
    use super::end_at_once;

    static DEFERRED: AtomicBool = AtomicBool::new(false);
    /// Time of the first interrupt since a command last began to defer them.
    static FIRST: Mutex<Option<Instant>> = Mutex::new(None);
    /// Interrupts within this time count as one: programs that pass signals on (`timeout`, a shell's job, a build tool) send the
    /// same one to the process and to its group.
    const ONE: Duration = Duration::from_secs(1);

    /// Handles interrupts from now on. If no handler can be installed, the signal ends the process as usual.
    pub fn install() {
        // The handler has a thread of its own, so it may lock.
        let _ = ctrlc::set_handler(|| {
            let mut first = FIRST.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let ends = match *first {
                Some(at) => at.elapsed() > ONE,
                None => !DEFERRED.load(Ordering::SeqCst),
            };
            first.get_or_insert_with(Instant::now);
            drop(first);
            if ends {
                remove();
                end_at_once(Outcome::Interrupted);
            }
        });
    }

    /// Folders that an interrupt removes: their folder, and how their names begin.
    static REMOVED: Mutex<Option<(PathBuf, String)>> = Mutex::new(None);
    /// Other threads still write while a folder is removed, and can add a file to it.
    const REMOVALS: usize = 20;
    const REMOVAL_PAUSE: Duration = Duration::from_millis(5);

    /// While this lives, an interrupt that ends the process also removes folders.
    pub struct Removed(());

    /// Removes the folders in `folder` whose names begin with `prefix`, if an interrupt ends the process.
    pub fn remove_at_end(folder: PathBuf, prefix: String) -> Removed {
        *REMOVED.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some((folder, prefix));
        Removed(())
    }

    impl Drop for Removed {
        fn drop(&mut self) {
            *REMOVED.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = None;
        }
    }

    fn remove() {
        let removed = REMOVED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Some((folder, prefix)) = removed.as_ref() else { return };
        for _ in 0..REMOVALS {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            let ours = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
            if ours.filter(|entry| fs::remove_dir_all(entry.path()).is_err()).count() == 0 {
                return;
            }
            thread::sleep(REMOVAL_PAUSE);
        }
    }

    /// While this lives, the first interrupt only makes [`asked`] true. A further one, more than a second later, ends the process.
    pub struct Deferred(());

    /// Begins to defer; interrupts before this are forgotten.
    pub fn defer() -> Deferred {
        *FIRST.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = None;
        DEFERRED.store(true, Ordering::SeqCst);
        Deferred(())
    }

    impl Drop for Deferred {
        fn drop(&mut self) {
            DEFERRED.store(false, Ordering::SeqCst);
        }
    }

    pub fn asked() -> bool {
        FIRST.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_prints_with_its_help_and_ours_says_so() {
        let fault = Fault::input("no such file").with_remedy("make it");
        assert_eq!(fault_text(&fault, Style::Plain), "error: no such file\n  help: make it");
        assert!(fault_text(&fault, Style::Colour).starts_with("\u{1b}[1;31merror\u{1b}[0m: no"));
        assert!(fault_text(&Fault::internal("broken"), Style::Plain).contains("please report it"));
    }

    const CHILD: &str = "MONOBLOC_PANIC_TEST_CHILD";

    /// In a process of its own: the panic hook belongs to the whole process, and would silence other tests.
    #[test]
    fn a_panic_is_told_as_our_fault() {
        if std::env::var_os(CHILD).is_some() {
            catch_panics();
            assert!(panic::catch_unwind(|| panic!("the sky fell")).is_err());
            Terminal::new(Color::Never, false).print_fault(&panicked());
            return;
        }
        let name = "cli::terminal::tests::a_panic_is_told_as_our_fault";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", name]).env(CHILD, "1").env_remove("RUST_BACKTRACE").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.starts_with("error: the sky fell at src/cli/terminal.rs:"), "{said}");
        assert!(said.contains("please report it") && !said.contains("panicked"), "{said}");
    }
}
