//! Owns `cache stats`, `gc`, `verify`, `push` and `pull`.

use serde_json::json;

use super::Outcome;
use super::arguments::{Cache, CacheAction};
use super::session::Session;
use super::units::bytes_text;
use crate::cache::{CacheError, GcReport, Moved, Problem, ProblemKind, StageStats, Stats};
use crate::error::Fault;
use crate::report::Report;
use crate::text::counted;

/// A cache with fewer bytes is read before a user could see a progress bar.
const PROGRESS_BYTES_MIN: u64 = 1 << 30;

pub fn cache(session: &Session, asked: &Cache) -> Result<Outcome, Fault> {
    let (terminal, root) = (&session.terminal, &session.places.root);
    // Opening would create the folder, but a cache that does not exist is most likely a mistyped name.
    let brings = matches!(
        asked.action,
        CacheAction::Pull { .. } | CacheAction::Gc { remote: true, .. } | CacheAction::Verify { remote: true, .. }
    );
    if !root.is_dir() && !brings {
        return Err(Fault::input(format!("there is no cache at `{}`", root.display()))
            .with_remedy("name it with `--cache`; the first build makes it"));
    }
    let cache = session.open_cache()?;
    match asked.action {
        CacheAction::Stats { json } => {
            let stats = cache.stats()?;
            match json {
                true => terminal.print_json(&stats_json(&stats, root.display().to_string()))?,
                false => terminal.print(&format!("cache `{}`\n{}", root.display(), stats_text(&stats)))?,
            }
        }
        CacheAction::Gc { remote: true, older_than: Some(age), json, .. } => {
            let removed = cache.gc_remote(age)?;
            moved_told(session, "removed", "files stay", removed, json)?;
        }
        CacheAction::Gc { max_size, min_age, json, .. } => gc_told(session, cache.gc(max_size, min_age)?, json)?,
        CacheAction::Push { json } => {
            let moved = with_progress(json, |progress| cache.push(progress))?;
            moved_told(session, "sent", "were there", moved, json)?;
        }
        CacheAction::Pull { json } => {
            let moved = with_progress(json, |progress| cache.pull(progress))?;
            moved_told(session, "brought", "were here", moved, json)?;
        }
        CacheAction::Verify { remote: true, json } => return verify_remote(session, &cache, json),
        CacheAction::Verify { remote: false, json } => return verify(session, &cache, json),
    }
    Ok(Outcome::Done)
}

/// `done` is `None` where another process collects.
fn gc_told(session: &Session, done: Option<GcReport>, json: bool) -> Result<(), Fault> {
    let terminal = &session.terminal;
    let Some(GcReport { entries_removed, remains_removed, bytes_before, bytes_after }) = done else {
        return match json {
            true => terminal.print_json(&json!({ "collected": false })),
            false => terminal.print("another process is collecting\n"),
        };
    };
    match json {
        true => terminal.print_json(&json!({
            "collected": true,
            "entries_removed": entries_removed,
            "remains_removed": remains_removed,
            "bytes_before": bytes_before,
            "bytes_after": bytes_after,
        })),
        false => terminal.print(&format!(
            "removed {} and {}: {} before, {} after\n",
            counted(entries_removed, "entry"),
            counted(remains_removed, "remain"),
            bytes_text(bytes_before),
            bytes_text(bytes_after)
        )),
    }
}

/// Runs `work`, which calls its argument with (bytes done, bytes in all), with a bar if it takes long.
fn with_progress<T>(
    json: bool,
    work: impl FnOnce(&mut dyn FnMut(u64, u64)) -> Result<T, CacheError>,
) -> Result<T, CacheError> {
    let report = if json { Report::quiet() } else { Report::to_stderr() };
    let (mut bar, mut bytes_told) = (None, 0);
    work(&mut |done, all| {
        if all >= PROGRESS_BYTES_MIN {
            let bar = bar.get_or_insert_with(|| report.progress("MiB", all >> 20));
            let more = done.saturating_sub(bytes_told) >> 20;
            bar.inc(more);
            bytes_told += more << 20;
        }
    })
}

/// What `push`, `pull` or `gc --remote` did.
fn moved_told(session: &Session, verb: &str, rest: &str, moved: Moved, json: bool) -> Result<(), Fault> {
    let Moved { entries, bytes, there } = moved;
    match json {
        true => session.terminal.print_json(&json!({ "entries": entries, "bytes": bytes, "there": there })),
        false => {
            let entries = counted(entries, "entry");
            session.terminal.print(&format!("{verb} {entries}, {}; {there} {rest}\n", bytes_text(bytes)))
        }
    }
}

fn verify_remote(session: &Session, cache: &crate::cache::Cache, json: bool) -> Result<Outcome, Fault> {
    let (read, problems) = with_progress(json, |progress| cache.verify_remote(progress))?;
    let sound = problems.is_empty();
    let listed: Vec<String> = problems.iter().map(|(name, reason)| format!("`{name}`: damaged: {reason}")).collect();
    if json {
        session.terminal.print_json(&json!({
            "sound": sound, "entries": read.entries, "bytes": read.bytes, "problems": listed,
        }))?;
    } else {
        listed.iter().try_for_each(|line| session.terminal.print(&format!("{line}\n")))?;
        let (verdict, found) = match sound {
            true => (session.terminal.good("sound"), "no problem".to_string()),
            false => (session.terminal.bad("damaged"), counted(listed.len() as u64, "problem")),
        };
        let (entries, bytes) = (counted(read.entries, "entry"), bytes_text(read.bytes));
        session.terminal.print(&format!("{verdict}: {found} in {entries}, {bytes} read\n"))?;
    }
    Ok(if sound { Outcome::Done } else { Outcome::No })
}

fn verify(session: &Session, cache: &crate::cache::Cache, json: bool) -> Result<Outcome, Fault> {
    let terminal = &session.terminal;
    let mut bytes_read = 0;
    let found = with_progress(json, |progress| {
        cache.verify(&mut |read, all| {
            bytes_read = read;
            progress(read, all);
        })
    })?;
    // Leftovers of a killed process are never read as entries, so they are no damage.
    let (strays, problems): (Vec<Problem>, Vec<Problem>) =
        found.into_iter().partition(|problem| problem.kind == ProblemKind::Stray);
    let entries: u64 = cache.stats()?.stages.iter().map(|stage| stage.entries).sum();
    if json {
        let listed: Vec<String> = problems.iter().map(ToString::to_string).collect();
        terminal.print_json(&json!({
            "sound": problems.is_empty(), "entries": entries, "bytes": bytes_read, "problems": listed,
            "strays": strays.len(),
        }))?;
    } else {
        problems.iter().try_for_each(|problem| terminal.print(&format!("{problem}\n")))?;
        let (verdict, found) = match problems.is_empty() {
            true => (terminal.good("sound"), "no problem".to_string()),
            false => (terminal.bad("damaged"), counted(problems.len() as u64, "problem")),
        };
        let entries = counted(entries, "entry");
        terminal.print(&format!("{verdict}: {found} in {entries}, {} read\n", bytes_text(bytes_read)))?;
        if !strays.is_empty() {
            let strays = counted(strays.len() as u64, "file");
            terminal.print(&format!("{strays} of killed processes in `tmp/`, which `monobloc cache gc` removes\n"))?;
        }
    }
    Ok(if problems.is_empty() { Outcome::Done } else { Outcome::No })
}

fn stats_text(stats: &Stats) -> String {
    let Stats { stages, set_aside, temporary, bytes } = stats;
    let mut text = String::new();
    for StageStats { stage, entries, bytes } in stages {
        text.push_str(&format!("  {stage:<12} {:>12} {:>12}\n", counted(*entries, "entry"), bytes_text(*bytes)));
    }
    text.push_str(&format!("  {} in all\n", bytes_text(*bytes)));
    if *set_aside > 0 {
        text.push_str(&format!("  {} set aside in `corrupt/`\n", counted(*set_aside, "damaged file")));
    }
    if *temporary > 0 {
        text.push_str(&format!("  {} in `tmp/`\n", counted(*temporary, "file")));
    }
    text
}

fn stats_json(stats: &Stats, root: String) -> serde_json::Value {
    let Stats { stages, set_aside, temporary, bytes } = stats;
    let stages: serde_json::Map<_, _> = stages
        .iter()
        .map(|StageStats { stage, entries, bytes }| (stage.clone(), json!({ "entries": entries, "bytes": bytes })))
        .collect();
    json!({ "root": root, "bytes": bytes, "stages": stages, "set_aside": set_aside, "temporary": temporary })
}
