//! Owns the output of a build while it runs: one line for each stage, progress inside a stage, and the summary.
//!
//! Everything goes to stderr, so that stdout has only results. A terminal shows the current stage and its progress in place. Otherwise
//! each stage is a plain line, whose text does not depend on the clock unless the stage takes more than a second.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::text::printable_line;

/// A stage that took less than this prints no line about its time.
const TIME_WORTH_TELLING: Duration = Duration::from_secs(1);

const SPINNER_TICK: Duration = Duration::from_millis(100);

/// Reports the progress of a build. Shared by reference between threads.
pub struct Report {
    writer: Mutex<Box<dyn Write + Send>>,
    /// On a terminal: the progress bars below the lines.
    bars: Option<MultiProgress>,
    /// Whether cached stages print a line.
    tells_cached: bool,
    /// Nothing but warnings is printed.
    is_quiet: bool,
    ran: AtomicUsize,
    cached: AtomicUsize,
}

impl Report {
    /// Shows bars if stderr is a terminal, else plain lines.
    pub fn to_stderr() -> Report {
        let bars = io::stderr().is_terminal().then(MultiProgress::new);
        Report::new(Box::new(io::stderr()), bars)
    }

    /// Plain lines into `writer`.
    pub fn to_writer(writer: Box<dyn Write + Send>) -> Report {
        Report::new(writer, None)
    }

    /// Prints nothing but counts stages: for `--json` and for tests.
    pub fn quiet() -> Report {
        Report { is_quiet: true, ..Report::new(Box::new(io::sink()), None) }
    }

    fn new(writer: Box<dyn Write + Send>, bars: Option<MultiProgress>) -> Report {
        let (ran, cached) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Report { writer: Mutex::new(writer), bars, tells_cached: true, is_quiet: false, ran, cached }
    }

    /// Counts cached stages, but prints no line for them: for commands whose result is not the build.
    pub fn without_cached(mut self) -> Report {
        self.tells_cached = false;
        self
    }

    /// Begins a stage that has work to do; `detail` distinguishes stages of one name and may be empty.
    ///
    /// The stage counts as run when [`Stage::done`] is called. If it is dropped before, it has failed and is not counted.
    pub fn stage(&self, name: &str, detail: &str) -> Stage<'_> {
        let title = if detail.is_empty() { plain(name) } else { format!("{}: {}", plain(name), plain(detail)) };
        let spinner = self.bars.as_ref().map(|bars| {
            let spinner = bars.add(ProgressBar::new_spinner());
            spinner.set_style(style("{spinner} {msg} {elapsed}"));
            spinner.set_message(title.clone());
            spinner.enable_steady_tick(SPINNER_TICK);
            spinner
        });
        if spinner.is_none() {
            self.line(&format!("   run {title}"));
        }
        Stage { report: self, title, started: Instant::now(), spinner }
    }

    /// Tells that a stage had nothing to do because its result was in the cache.
    pub fn cached(&self, name: &str) {
        self.cached.fetch_add(1, Ordering::Relaxed);
        if self.tells_cached {
            self.line(&format!("cached {}", plain(name)));
        }
    }

    /// Begins counting to `total` inside the current stage; `what` names the things counted, for example `trials`.
    ///
    /// Plain lines report each quarter. With a `total` of 0 the end is unknown, and only a terminal shows the count.
    pub fn progress(&self, what: &str, total: u64) -> Progress<'_> {
        self.count(what, total, true)
    }

    /// As [`Report::progress`], for work with its own lines or with a few long steps: only a terminal shows the count, with
    /// the remaining time.
    pub fn bar(&self, what: &str, total: u64) -> Progress<'_> {
        self.count(what, total, false)
    }

    fn count(&self, what: &str, total: u64, has_lines: bool) -> Progress<'_> {
        let bar = self.bars.as_ref().map(|bars| {
            let (bar, template) = if total > 0 {
                (ProgressBar::new(total), "  {wide_bar} {human_pos}/{human_len} {msg} {eta}")
            } else {
                (ProgressBar::new_spinner(), "  {spinner} {human_pos} {msg}")
            };
            let bar = bars.add(bar);
            bar.set_style(style(template));
            bar.set_message(plain(what));
            bar
        });
        Progress { report: self, what: plain(what), total, has_lines, done: AtomicU64::new(0), bar }
    }

    /// Prints a note that is neither a stage nor progress, for example that a check waits for a device.
    pub fn note(&self, text: &str) {
        self.line(&format!("  note {}", plain(text)));
    }

    /// Prints what the user has to know, also where nothing else is printed.
    pub fn warning(&self, text: &str) {
        let line = format!("warning: {}", plain(text));
        match self.is_quiet {
            true => drop(writeln!(io::stderr(), "{line}")),
            false => self.line(&line),
        }
    }

    /// Stages that did work.
    pub fn ran_count(&self) -> usize {
        self.ran.load(Ordering::Relaxed)
    }

    /// Stages whose result was in the cache.
    pub fn cached_count(&self) -> usize {
        self.cached.load(Ordering::Relaxed)
    }

    /// Whether stages that had nothing to do have a line each.
    pub fn tells_cached(&self) -> bool {
        self.tells_cached
    }

    /// The last line of a build: `ran 3 stages, 4 cached`, or `no work to do (7 stages cached)`.
    pub fn summary(&self) -> String {
        match (self.ran_count(), self.cached_count()) {
            (0, 0) => "no work to do".to_string(),
            (0, cached) => format!("no work to do ({} cached)", stages(cached)),
            (ran, 0) => format!("ran {}", stages(ran)),
            (ran, cached) => format!("ran {}, {cached} cached", stages(ran)),
        }
    }

    /// Prints the summary, and `more` after it.
    pub fn finish(&self, more: &str) {
        self.line(&format!("{}{}", self.summary(), plain(more)));
    }

    /// Prints a line above the bars. If it cannot be written, the build continues.
    fn line(&self, line: &str) {
        let write = || {
            let mut writer = self.writer.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let _ = writeln!(writer, "{line}").and_then(|()| writer.flush());
        };
        match &self.bars {
            // Not with `println` of the bars, which pads the line to the width of the terminal and does not end it.
            Some(bars) => bars.suspend(write),
            None => write(),
        }
    }
}

/// A stage at work.
#[must_use = "a stage counts as failed unless `done` is called"]
pub struct Stage<'r> {
    report: &'r Report,
    title: String,
    started: Instant,
    spinner: Option<ProgressBar>,
}

impl Stage<'_> {
    /// Ends the stage with success.
    pub fn done(self) {
        let took = self.started.elapsed();
        self.done_in(took);
    }

    /// As [`Stage::done`], for work that began later than the stage, and took this long.
    pub fn done_in(self, took: Duration) {
        self.report.ran.fetch_add(1, Ordering::Relaxed);
        let time = format!("{:.1} s", took.as_secs_f64());
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
            self.report.line(&format!("   ran {} ({time})", self.title));
        } else if took >= TIME_WORTH_TELLING {
            self.report.line(&format!("  took {time} for {}", self.title));
        }
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }
}

/// A count that grows inside a stage. Shared by reference between threads.
pub struct Progress<'r> {
    report: &'r Report,
    what: String,
    total: u64,
    /// Whether plain lines report it.
    has_lines: bool,
    done: AtomicU64,
    bar: Option<ProgressBar>,
}

impl Progress<'_> {
    /// Begins with `done` things of an earlier run, which do not count for the remaining time.
    pub fn resume(self, done: u64) -> Self {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            bar.reset_eta();
        }
        self.done.store(done, Ordering::Relaxed);
        self
    }

    /// Counts `more` things as done.
    pub fn inc(&self, more: u64) {
        let before = self.done.fetch_add(more, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.inc(more);
        } else if self.total > 1 && self.has_lines {
            let now = before.saturating_add(more).min(self.total);
            if self.quarter(now) > self.quarter(before.min(self.total)) {
                self.report.line(&format!("       {now} of {} {}", self.total, self.what));
            }
        }
    }

    /// Quarters of the total that `count` completes; 128 bits, because the total may be any number of bytes.
    fn quarter(&self, count: u64) -> u128 {
        u128::from(count) * 4 / u128::from(self.total)
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn stages(count: usize) -> String {
    if count == 1 { "1 stage".to_string() } else { format!("{count} stages") }
}

/// A name with control characters escaped, because names come from files.
fn plain(text: &str) -> String {
    printable_line(text).into_owned()
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a literal template; the tests draw with each")
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::ProgressDrawTarget;
    use std::sync::Arc;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panic while writing").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn with_bars(bars: Option<MultiProgress>) -> (Report, impl Fn() -> String) {
        let shared = Shared::default();
        let read = shared.clone();
        let written = move || String::from_utf8(read.0.lock().expect("no panic").clone()).expect("UTF-8");
        (Report::new(Box::new(shared), bars), written)
    }

    fn lines() -> (Report, impl Fn() -> String) {
        with_bars(None)
    }

    #[test]
    fn a_build_without_a_terminal_is_plain_lines() {
        let (report, written) = lines();
        report.cached("import");
        let lower = report.stage("lower", "tiny on cpu");
        let progress = report.progress("grids", 8);
        for _ in 0..8 {
            progress.inc(1);
        }
        lower.done();
        report.stage("schedule", "").done();
        report.note("check waits for a device of kind `h200`");
        report.finish("");
        assert_eq!(
            written(),
            "cached import
   run lower: tiny on cpu
       2 of 8 grids
       4 of 8 grids
       6 of 8 grids
       8 of 8 grids
   run schedule
  note check waits for a device of kind `h200`
ran 2 stages, 1 cached
"
        );
    }

    #[test]
    fn the_summary_counts_what_was_done() {
        let summary = |ran: usize, cached: usize| {
            let report = Report::quiet();
            (0..ran).for_each(|_| report.stage("s", "").done());
            (0..cached).for_each(|_| report.cached("s"));
            assert_eq!((report.ran_count(), report.cached_count()), (ran, cached));
            report.summary()
        };
        assert_eq!(summary(0, 0), "no work to do");
        assert_eq!(summary(0, 1), "no work to do (1 stage cached)");
        assert_eq!(summary(0, 7), "no work to do (7 stages cached)");
        assert_eq!(summary(1, 0), "ran 1 stage");
        assert_eq!(summary(3, 4), "ran 3 stages, 4 cached");
    }

    #[test]
    fn a_stage_that_failed_is_not_counted() {
        let (report, written) = lines();
        drop(report.stage("compile", "h200"));
        report.finish("");
        assert_eq!(written(), "   run compile: h200\nno work to do\n");
    }

    #[test]
    fn progress_survives_any_count_from_any_thread() {
        let (report, written) = lines();
        let progress = report.progress("bytes", u64::MAX);
        progress.inc(u64::MAX);
        progress.inc(u64::MAX);
        assert_eq!(written(), format!("       {0} of {0} bytes\n", u64::MAX));
        report.progress("files", 0).inc(3);
        report.bar("trials", 4).resume(1).inc(3);
        assert_eq!(written().lines().count(), 1, "an unknown total has no quarters, and a bar no lines");
        let resumed = report.progress("parts", 4).resume(2);
        resumed.inc(1);
        assert!(written().ends_with("       3 of 4 parts\n"), "{}", written());
        let (report, written) = lines();
        let progress = report.progress("trials", 100);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..25).for_each(|_| progress.inc(1)));
            }
        });
        assert_eq!(written().lines().count(), 4, "{}", written());
    }

    #[test]
    fn control_characters_of_a_name_do_not_reach_the_terminal() {
        let (report, written) = lines();
        report.stage("lower", "a\u{1b}[31m\nb").done();
        assert_eq!(written(), "   run lower: a\\u{1b}[31m\\u{a}b\n");
    }

    #[test]
    fn on_a_terminal_lines_tell_what_was_done_and_bars_draw_the_rest() {
        let (report, written) = with_bars(Some(MultiProgress::with_draw_target(ProgressDrawTarget::hidden())));
        let stage = report.stage("lower", "x");
        report.progress("grids", 4).inc(4);
        report.progress("files", 0).inc(1);
        report.bar("trials", 4).resume(1).inc(3);
        stage.done();
        drop(report.stage("compile", ""));
        report.note("n");
        report.finish("");
        let lines = written();
        assert!(lines.starts_with("   ran lower: x (") && lines.ends_with(" s)\n  note n\nran 1 stage\n"), "{lines}");
    }
}
