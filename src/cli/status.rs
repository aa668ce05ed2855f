//! Owns `status`, `next` and `report`: what campaigns came to, and whether another trial is worth its time.

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::{Next, Report, Status};
use super::session::{Session, Talk, pick_target};
use super::tune::TRIALS_DEFAULT;
use super::units::counted;
use crate::error::Fault;
use crate::flywheel::Timing;
use crate::manifest::Manifest;
use crate::page::page;
use crate::pipeline::status::{self, Known, Region};
use crate::search::space::changed;
use crate::search::{Ask, History};
use crate::target::Target;

fn targets(manifest: &Manifest, name: Option<&str>) -> Result<Vec<Target>, Fault> {
    match name {
        Some(_) => Ok(vec![pick_target(manifest, name)?]),
        None => Ok(manifest.targets.clone()),
    }
}

pub fn status(session: &Session, asked: &Status) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest)?;
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
        count(|entry| entry.is_kept()),
        count(|entry| entry.number.is_some() && entry.verdict != "ok"),
        count(|entry| entry.number.is_none()),
    ]
}

fn times(history: &History) -> Vec<(&Timing, &Timing)> {
    match (history.first(), history.incumbent()) {
        (Some(first), Some(best)) => {
            first.timed.iter().map(|row| &row.timing).zip(best.timed.iter().map(|row| &row.timing)).collect()
        }
        _ => vec![],
    }
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
        if let Some(best) = history.incumbent() {
            let speed = best.log_ratio().map_or(1.0, |log| (-log).exp());
            let knobs = changed(&best.candidate, &history.default);
            text.push_str(&format!("    best: {knobs}, {speed:.3} times as fast as the default\n"));
        }
        for (default, best) in times(history) {
            let floor = best.floor_us.map(|floor| format!(", floor {floor:.1} µs")).unwrap_or_default();
            text.push_str(&format!(
                "    position {}: {:.1} µs a step, default {:.1} µs{floor}\n",
                best.position, best.latency_us_p50, default.latency_us_p50
            ));
        }
    }
    text.push_str(&format!("  builds take: {}\n", changed(&known.built, &known.default)));
    text
}

fn status_json(target: &Target, known: &Known) -> Value {
    let campaigns: Vec<Value> = known
        .histories
        .iter()
        .map(|history| {
            let [trials, kept, failed, unfit] = counts(history);
            let best = history.incumbent();
            json!({
                "campaign": history.campaign.to_string(),
                "device": history.machine.device_name,
                "seed": history.seed,
                "trials": trials,
                "kept": kept,
                "failed": failed,
                "infeasible": unfit,
                "last_utc": history.entries.last().map(|entry| &entry.utc),
                "best": best.map(|best| best.candidate.to_string()),
                "best_by_default": best.and_then(|best| best.log_ratio()).map(f64::exp),
                "positions": times(history).iter().map(|(default, best)| json!({
                    "position": best.position,
                    "latency_us_p50": best.latency_us_p50,
                    "default_us_p50": default.latency_us_p50,
                    "floor_us": best.floor_us,
                })).collect::<Vec<_>>(),
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
    let manifest = session.manifest(&asked.manifest)?;
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
            "expected_by_default": next.opinion.map(|opinion| opinion.log_ratio.exp()),
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
            let thought = match next.opinion {
                Some(opinion) => format!(
                    "; expected at {:.3} of the default's time, give or take {:.3}",
                    opinion.log_ratio.exp(),
                    opinion.spread
                ),
                None => String::new(),
            };
            format!(
                "{}: go on, {} of {budget} trials are done\n  next: {candidate} ({proposer}){thought}\n",
                target.name, next.trials
            )
        }
        Ask::Stop(stop) => format!("{}: stop: {stop}\n", target.name),
    };
    let all: f64 = next.hot.iter().map(|region| region.us).sum();
    text.push_str(&format!("  where a step's time goes ({}):\n", next.source));
    for Region { name, us, wait_us } in next.hot.iter().take(5) {
        let waits = if *wait_us > 0.0 { format!(", of that {wait_us:.1} µs waiting") } else { String::new() };
        text.push_str(&format!("    {name:<22} {us:>8.1} µs, {:.0} %{waits}\n", us / all * 100.0));
    }
    text
}

pub fn report(session: &Session, asked: &Report) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest)?;
    let workspace = session.workspace(Talk::Nothing)?;
    let mut histories = vec![];
    for target in targets(&manifest, asked.target.as_deref())? {
        histories.extend(status::known(&workspace, &manifest, &target)?.histories);
    }
    if histories.is_empty() {
        return Err(Fault::input(format!("`{}` has no campaign yet", manifest.name))
            .with_remedy(format!("run `monobloc tune {}` first", asked.manifest.display())));
    }
    std::fs::write(&asked.out, page(&manifest.name, &histories)).map_err(|error| {
        Fault::environment(format!("cannot write `{}`: {error}", asked.out.display()))
            .with_remedy("name another file with `--out`")
    })?;
    let count = counted(histories.len() as u64, "campaign");
    session.terminal.say(&format!("{count} in `{}`: open it in a browser", asked.out.display()));
    Ok(Outcome::Done)
}
