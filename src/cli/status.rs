//! Owns `status`, `next` and `report`: print the results of campaigns, and whether another trial is worth its time.

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::{Next, Report, Status};
use super::session::{Session, Talk, pick_target};
use super::tune::{NO_DUEL, TRIALS_DEFAULT, ratio_json, speed_text};
use crate::error::Fault;
use crate::flywheel::Proposer;
use crate::manifest::Manifest;
use crate::page::page;
use crate::pipeline::status::{self, Known, Region};
use crate::search::history::HeadlineRow;
use crate::search::space::changed;
use crate::search::{Ask, History};
use crate::target::Target;
use crate::text::counted;

fn targets(manifest: &Manifest, name: Option<&str>) -> Result<Vec<Target>, Fault> {
    match name {
        Some(_) => Ok(vec![pick_target(manifest, name)?]),
        None => Ok(manifest.targets.clone()),
    }
}

pub fn status(session: &Session, asked: &Status) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest, asked.target.as_deref())?;
    let workspace = session.workspace(Talk::Nothing)?;
    let mut all = vec![];
    for (at, target) in targets(&manifest, asked.target.as_deref())?.iter().enumerate() {
        let known = status::known(&workspace, &manifest, target)?;
        if at == 0 {
            known.broken.iter().for_each(|row| session.terminal.say(&format!("warning: skipped {row}")));
        }
        match asked.json {
            true => all.push(status_json(target, &known)),
            false => session.terminal.print(&status_text(&manifest, target, &known))?,
        }
    }
    if asked.json {
        session.terminal.print_json(&Value::Array(all))?;
    }
    Ok(Outcome::Done)
}

fn counts(history: &History) -> [usize; 4] {
    let count =
        |of: fn(&crate::search::history::Entry) -> bool| history.entries.iter().filter(|entry| of(entry)).count();
    [
        history.trials(),
        count(|entry| entry.is_kept() && entry.proposer != Proposer::Default),
        count(|entry| entry.number.is_some() && entry.proposer != Proposer::Default && entry.verdict != "ok"),
        count(|entry| entry.number.is_none()),
    ]
}

fn status_text(manifest: &Manifest, target: &Target, known: &Known) -> String {
    let mut text =
        format!("{} on {}: {}\n", manifest.name, target.name, { counted(known.histories.len() as u64, "campaign") });
    for history in &known.histories {
        let [trials, kept, failed, unfit] = counts(history);
        let when = history.entries.last().map(|entry| entry.utc.as_str()).unwrap_or_default();
        let device = match history.machine.device_name.as_str() {
            "" => String::new(),
            device => format!(" on {device}"),
        };
        text.push_str(&format!(
            "  {}{device}, seed {}: {}, {kept} kept, {failed} failed, {unfit} did not fit; last at {when}\n",
            history.campaign.short(),
            history.seed,
            counted(trials as u64, "trial"),
        ));
        let Some(headline) = history.headline() else { continue };
        let knobs = changed(&headline.best.candidate, &history.default);
        let found = match headline.speed() {
            _ if headline.is_default => "no candidate beat it".to_string(),
            Some(speed) => speed_text(speed),
            None => NO_DUEL.to_string(),
        };
        text.push_str(&format!("    best: {knobs}, {found}\n"));
        for HeadlineRow { position, default_us, best_us, floor_us, .. } in &headline.positions {
            let floor = floor_us.map(|floor| format!(", floor {floor:.1} µs")).unwrap_or_default();
            let default = if headline.is_default { String::new() } else { format!(", default {default_us:.1} µs") };
            text.push_str(&format!("    position {position}: {best_us:.1} µs a step{default}{floor}\n"));
        }
        if let Some(width) = history.too_noisy() {
            text.push_str(&format!("    {}\n", noise_text(width)));
        }
    }
    text.push_str(&format!("  builds take: {}\n", changed(&known.built, &known.default)));
    if known.built != known.default {
        text.push_str(&format!(
            "  to fix it in the manifest: candidate = \"{}\"\n",
            changed(&known.built, &known.default)
        ));
    }
    if known.elsewhere > 0 {
        let others = counted(known.elsewhere as u64, "campaign");
        text.push_str(&format!("  {others} of this model at other settings of `context_max` or `precision`\n"));
    }
    text
}

/// What a reader has to know of a campaign whose intervals are this wide, as a fraction.
pub fn noise_text(width: f64) -> String {
    format!(
        "this machine was too busy: the median interval of a ratio is {:.0} % wide, so small effects are noise",
        width * 100.0
    )
}

fn status_json(target: &Target, known: &Known) -> Value {
    let campaigns: Vec<Value> = known
        .histories
        .iter()
        .map(|history| {
            let [trials, kept, failed, unfit] = counts(history);
            let headline = history.headline();
            let positions = headline.iter().flat_map(|headline| &headline.positions).map(|row| {
                let HeadlineRow { position, default_us, best_us, ratio, floor_us, .. } = row;
                json!({
                    "position": position,
                    "best_us": best_us,
                    "default_us": default_us,
                    "ratio_against_default": ratio_json(*ratio),
                    "floor_us": floor_us,
                })
            });
            json!({
                "campaign": history.campaign.to_string(),
                "device": history.machine.device_name,
                "seed": history.seed,
                "trials": trials,
                "kept": kept,
                "failed": failed,
                "infeasible": unfit,
                "last_utc": history.entries.last().map(|entry| &entry.utc),
                "interval_width_p50": history.interval_width(),
                "best": headline.as_ref().map(|headline| headline.best.candidate.to_string()),
                "best_is_default": headline.as_ref().map(|headline| headline.is_default),
                "ratio_against_default": ratio_json(headline.as_ref().and_then(|headline| headline.ratio)),
                "positions": positions.collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "target": target.name,
        "campaigns": campaigns,
        "built": known.built.to_string(),
        "built_is_default": known.built == known.default,
    })
}

pub fn next(session: &Session, asked: &Next) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest, asked.target.as_deref())?;
    let target = pick_target(&manifest, asked.target.as_deref())?;
    let workspace = session.workspace(if asked.json { Talk::Nothing } else { Talk::Work })?;
    let trials = match (asked.max_trials, manifest.search.trials) {
        (Some(trials), _) => trials,
        (None, 0) => TRIALS_DEFAULT,
        (None, trials) => trials,
    };
    let next = status::next(&workspace, &manifest, &target, trials)?;
    let goes_on = matches!(next.ask, Ask::Try { .. });
    if asked.json {
        let (candidate, proposer, stop) = match &next.ask {
            Ask::Try { candidate, proposer } => (Some(candidate.to_string()), Some(proposer.name()), None),
            Ask::Stop(stop) => (None, None, Some(stop.to_string())),
        };
        let regions = next.hot.iter().map(|region| {
            let Region { name, us, wait_us } = region;
            json!({ "region": name, "us": us, "wait_us": wait_us })
        });
        session.terminal.print_json(&json!({
            "target": target.name,
            "go_on": goes_on,
            "stop": stop,
            "candidate": candidate,
            "proposer": proposer,
            "expected_ratio_against_default": next.opinion.map(|opinion| opinion.log_ratio.exp()),
            "trials": next.trials,
            "regions": regions.collect::<Vec<_>>(),
            "regions_from": next.source,
        }))?;
    } else {
        session.terminal.print(&next_text(&target, trials, &next))?;
    }
    Ok(if goes_on { Outcome::Done } else { Outcome::No })
}

fn next_text(target: &Target, budget: u32, next: &status::Next) -> String {
    let mut text = match &next.ask {
        Ask::Try { candidate, proposer } => {
            let head =
                format!("{}: another trial is worth its time; {} of {budget} are done\n", target.name, next.trials);
            let what = match next.opinion {
                // Two standard deviations each way.
                Some(opinion) if *candidate != next.default => format!(
                    "  next candidate (by {proposer}): {}\n  its latency is expected at {:.3} to {:.3} of the default's\n",
                    changed(candidate, &next.default),
                    (opinion.log_ratio - 2.0 * opinion.spread).exp(),
                    (opinion.log_ratio + 2.0 * opinion.spread).exp()
                ),
                _ if *candidate != next.default => {
                    format!("  next candidate (by {proposer}): {}\n", changed(candidate, &next.default))
                }
                _ => "  next candidate: the default, because every other one is compared with it\n".to_string(),
            };
            head + &what
        }
        Ask::Stop(stop) => format!("{}: stop: {stop}\n", target.name),
    };
    if next.hot.is_empty() {
        text.push_str(&format!("  no times of the parts of a step: {}\n", next.source));
        return text;
    }
    let all: f64 = next.hot.iter().map(|region| region.us).sum();
    text.push_str(&format!("  time of a step by part ({}):\n", next.source));
    for Region { name, us, wait_us } in next.hot.iter().take(5) {
        let waits = if *wait_us > 0.0 { format!(", {wait_us:.1} µs of it waiting") } else { String::new() };
        text.push_str(&format!("    {name:<22} {us:>8.1} µs, {:.0} %{waits}\n", us / all * 100.0));
    }
    text
}

pub fn report(session: &Session, asked: &Report) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest, asked.target.as_deref())?;
    let workspace = session.workspace(Talk::Nothing)?;
    let (mut histories, mut all, mut elsewhere) = (vec![], vec![], 0);
    for target in targets(&manifest, asked.target.as_deref())? {
        let known = status::known(&workspace, &manifest, &target)?;
        all.push(status_json(&target, &known));
        elsewhere += known.elsewhere;
        histories.extend(known.histories);
    }
    if asked.json {
        session.terminal.print_json(&Value::Array(all))?;
        return Ok(Outcome::Done);
    }
    if histories.is_empty() {
        let others = match elsewhere {
            0 => String::new(),
            count => {
                format!("; {} of its model had another `context_max` or precision", counted(count as u64, "campaign"))
            }
        };
        return Err(Fault::input(format!("`{}` has no campaign yet{others}", manifest.name))
            .with_remedy(format!("run `monobloc tune {}` first", asked.manifest.display())));
    }
    let host =
        ["/proc/sys/kernel/hostname", "/etc/hostname"].iter().find_map(|file| std::fs::read_to_string(file).ok());
    let host = host.map(|host| format!(" on {}", host.trim())).unwrap_or_default();
    let (version, shown) = (env!("CARGO_PKG_VERSION"), asked.manifest.display());
    let target = asked.target.iter().map(|name| format!(" --target {name}")).collect::<String>();
    let made = format!("Written by monobloc {version}{host}: monobloc report {shown}{target}");
    std::fs::write(&asked.out, page(&manifest.name, &made, &histories)).map_err(|error| {
        Fault::environment(format!("cannot write `{}`: {error}", asked.out.display()))
            .with_remedy("name another file with `--out`")
    })?;
    let count = counted(histories.len() as u64, "campaign");
    session.terminal.say(&format!("{count} in `{}`: open it in a browser", asked.out.display()));
    Ok(Outcome::Done)
}
