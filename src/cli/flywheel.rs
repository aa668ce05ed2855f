//! Owns `flywheel stats`, `best`, `export`, `rank`, `study` and `merge`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::Outcome;
use super::arguments::{Flywheel, FlywheelAction};
use super::session::{Session, Talk};
use crate::digest::Digest;
use crate::error::Fault;
use crate::flywheel::write_parquet;
use crate::flywheel::{BestTrial, BrokenRow, COLUMNS, Corpus, CorpusStats, Trial, best, encoded, merge, stats};
use crate::page::study_svg;
use crate::pipeline::status;
use crate::search::history::{Entry, History};
use crate::search::prior::{HeldOut, Ranked, held_out, ranked};
use crate::search::study::{Run, Study, caught_up, had_warm_starts, median_reached, median_share, studies};
use crate::search::{histories, lessons};
use crate::text::counted;

pub fn flywheel(session: &Session, asked: &Flywheel) -> Result<Outcome, Fault> {
    let (terminal, path) = (&session.terminal, &session.trials);
    if let FlywheelAction::Merge { inputs, json } = &asked.action {
        merge_told(session, inputs, *json)?;
        return Ok(Outcome::Done);
    }
    if let FlywheelAction::Study { inputs, warm, plots, json } = &asked.action {
        let read = |files: &[PathBuf]| -> Result<Vec<History>, Fault> {
            let corpus = Corpus::read(files)?;
            tell_broken(session, &corpus.broken);
            Ok(histories(&corpus.trials))
        };
        let (warm, cold) = match warm.is_empty() {
            true => read(inputs)?.into_iter().partition(had_warm_starts),
            false => (read(warm)?, read(inputs)?),
        };
        return study(session, &studies(&cold, &warm), plots.as_deref(), *json);
    }
    let corpus = if asked.own { Corpus::read(&[path])? } else { Corpus::known(path)? };
    match &asked.action {
        FlywheelAction::Merge { .. } | FlywheelAction::Study { .. } => {}
        FlywheelAction::Stats { json } => {
            let stats = stats(&corpus.trials);
            match json {
                true => terminal.print_json(&stats_json(&stats, &corpus.broken))?,
                false => {
                    let corpora = if asked.own { "" } else { " and the corpora" };
                    terminal.print(&format!("trials `{}`{corpora}\n{}", path.display(), stats_text(&stats)))?;
                    tell_broken(session, &corpus.broken);
                }
            }
        }
        FlywheelAction::Best { json } => {
            tell_broken(session, &corpus.broken);
            best_told(session, &best(&corpus.trials), *json)?;
        }
        FlywheelAction::Rank { manifests, held_out: asked, json } => {
            tell_broken(session, &corpus.broken);
            let ranked = ranked(&histories(&corpus.trials), Entry::log_predicted);
            let workspace = session.workspace(Talk::Nothing)?;
            let mut now = vec![];
            for manifest in manifests {
                let manifest = session.manifest(manifest, None)?;
                for target in &manifest.targets {
                    now.extend(status::ranked_now(&workspace, &manifest, target)?);
                }
            }
            let held = asked.then(|| held_out(&lessons(&corpus.trials).groups));
            match json {
                true => terminal.print_json(&rank_json(&ranked, &now, held.as_ref()))?,
                false => terminal.print(&rank_text(&ranked, &now, held.as_ref()))?,
            }
        }
        FlywheelAction::Export { target, verdict, share, out, parquet, json } => {
            tell_broken(session, &corpus.broken);
            let wanted = |trial: &&Trial| {
                target.as_ref().is_none_or(|target| trial.facts().machine.target == *target)
                    && verdict.as_ref().is_none_or(|verdict| trial.verdict().name() == verdict)
            };
            let wanted = corpus.trials.iter().filter(wanted);
            let rows: Vec<Cells> =
                if *share { shared(&corpus.trials, wanted) } else { wanted.map(Trial::cells).collect() };
            if let Some(folder) = parquet {
                let (files, count) = (write_parquet(folder, &rows)?, rows.len() as u64);
                let (rows, files) = (counted(count, "row"), counted(files.len() as u64, "file"));
                terminal.say(&format!("{rows} in {files} below `{}`", folder.display()));
                return Ok(Outcome::Done);
            }
            let text = if *json { json_text(&rows) } else { csv_text(&rows)? };
            export_text(session, &text, rows.len(), out.as_deref())?;
        }
    }
    Ok(Outcome::Done)
}

/// Appends the rows of other files, and prints how many there were.
fn merge_told(session: &Session, inputs: &[PathBuf], json: bool) -> Result<(), Fault> {
    let (terminal, path) = (&session.terminal, &session.trials);
    let merged = merge(inputs, path)?;
    tell_broken(session, &merged.broken);
    let (added, known) = (merged.rows_added, merged.duplicates);
    if json {
        let broken: Vec<String> = merged.broken.iter().map(ToString::to_string).collect();
        let place = path.display().to_string();
        return terminal.print_json(&json!({ "trials": place, "added": added, "known": known, "broken": broken }));
    }
    let added = counted(added, "row");
    terminal.print(&format!("added {added} to `{}`; {known} were there already\n", path.display()))
}

/// Prints the text of some rows, or writes it to a file.
fn export_text(session: &Session, text: &str, rows: usize, out: Option<&Path>) -> Result<(), Fault> {
    let Some(out) = out else { return session.terminal.print(text) };
    encoded(out, text).and_then(|bytes| std::fs::write(out, bytes)).map_err(|error| {
        Fault::environment(format!("cannot write `{}`: {error}", out.display()))
            .with_remedy("name another file with `--out`")
    })?;
    session.terminal.say(&format!("{} in `{}`", counted(rows as u64, "row"), out.display()));
    Ok(())
}

/// The fastest checked trial of each model, target and position.
fn best_told(session: &Session, best: &[BestTrial<'_>], json: bool) -> Result<(), Fault> {
    let terminal = &session.terminal;
    if json {
        let rows = best.iter().map(|best| {
            let (facts, timing) = (best.trial.facts(), best.timing);
            json!({
                "trial_id": best.trial.trial_id().to_string(),
                "manifest": facts.manifest,
                "op": facts.model.op(),
                "kernel": facts.model.kernel,
                "weights_dtype": facts.model.weights_dtype,
                "target": facts.machine.target,
                "device_name": facts.machine.device_name,
                "position": timing.position,
                "latency_us_p50": timing.latency_us_p50,
                "floor_us": timing.floor_us,
                "candidate": facts.point.candidate,
                "compared": best.compared,
            })
        });
        return terminal.print_json(&rows.collect());
    }
    for best in best {
        let (facts, timing) = (best.trial.facts(), best.timing);
        let device = match facts.machine.device_name.as_str() {
            "" => String::new(),
            device => format!(" ({device})"),
        };
        let floor = timing.floor_us.map(|floor| format!(", floor {floor:.1} µs")).unwrap_or_default();
        terminal.print(&format!(
            "{} {} on {}{device}, position {}: {:.1} µs{floor}, of {}\n    {} {}\n",
            facts.name(),
            facts.model.weights_dtype,
            facts.machine.target,
            timing.position,
            timing.latency_us_p50,
            counted(best.compared, "trial"),
            best.trial.trial_id().short(),
            best.changed()
        ))?;
    }
    if best.len() > 1 || best.iter().any(|best| best.compared > 1) {
        session.tell(
            "latencies of different sessions are compared as they are; `monobloc status` has ratios of one session",
        );
    }
    if best.is_empty() {
        terminal.say("no trial with the verdict `ok` yet");
    }
    Ok(())
}

/// A table in Markdown for each model, and its plot.
fn study(session: &Session, studies: &[Study], plots: Option<&Path>, json: bool) -> Result<Outcome, Fault> {
    if studies.is_empty() {
        return Err(Fault::input("there are no cold and warm campaigns of one model in these files").with_remedy(
            "run `monobloc tune` with several seeds, with and without rows of other models in `corpus/`",
        ));
    }
    if json {
        session.terminal.print_json(&studies.iter().map(study_json).collect())?;
    }
    for study in studies {
        let Study { name, cold_best, cold, warm } = study;
        let reached = |run: Option<&Run>| match run {
            None => String::new(),
            Some(Run { reached: Some(trials), curve, .. }) => format!("{trials} of {}", curve.len() - 1),
            Some(Run { reached: None, curve, .. }) => format!("not in {}", curve.len() - 1),
        };
        let mut text =
            format!("{name}: the best of all cold campaigns takes {:.3} of the default's time\n\n", cold_best.exp());
        let ended = |run: Option<&Run>| {
            run.and_then(|run| run.curve.last()).map_or(String::new(), |log| format!("{:.3}", log.exp()))
        };
        text.push_str(
            "| pair | cold: trials until within 2 % of it | warm | cold ends at | warm ends at | trials until warm as fast as cold in the end |\n\
             | --- | --- | --- | --- | --- | --- |\n",
        );
        let mut caught = vec![];
        for at in 0..cold.len().max(warm.len()) {
            let (cold, warm) = (cold.get(at), warm.get(at));
            let caught = match (cold, warm) {
                (Some(cold), Some(warm)) => {
                    let found = caught_up(warm, cold);
                    caught.push(found);
                    found.map_or("never".to_string(), |(trials, of)| format!("{trials} trials of {of}"))
                }
                _ => String::new(),
            };
            let cells = [reached(cold), reached(warm), ended(cold), ended(warm), caught];
            text.push_str(&format!("| {} | {} |\n", at + 1, cells.join(" | ")));
        }
        let median = |runs: &[Run]| median_reached(runs).map_or("not reached".to_string(), |trials| trials.to_string());
        let share = median_share(&caught).map_or("never".to_string(), |share| format!("{:.0} %", share * 100.0));
        text.push_str(&format!("| median | {} | {} | | | {share} |\n\n", median(cold), median(warm)));
        if !json {
            session.terminal.print(&text)?;
        }
        if let (Some(folder), Some(svg)) = (plots, study_svg(study)) {
            let path = folder.join(format!("{}.svg", name.replace(' ', "-")));
            std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, svg)).map_err(|error| {
                Fault::environment(format!("cannot write `{}`: {error}", path.display()))
                    .with_remedy("name another folder with `--plots`")
            })?;
        }
    }
    Ok(Outcome::Done)
}

/// Mean correlations of the cost model for each name of what ran, weighted by the number of trials.
fn by_name(ranked: &[Ranked]) -> Vec<(&str, usize, usize, Option<f64>)> {
    let mut groups: BTreeMap<&str, Vec<&Ranked>> = BTreeMap::new();
    for one in ranked {
        groups.entry(one.name.as_str()).or_default().push(one);
    }
    let sum = |of: &[&Ranked]| {
        let known = of.iter().filter_map(|one| Some((one.trials as f64, one.predicted?)));
        let (weight, all) =
            known.fold((0.0, 0.0), |(weight, all), (trials, rank)| (weight + trials, all + trials * rank));
        (weight > 0.0).then(|| all / weight)
    };
    let trials = |of: &[&Ranked]| of.iter().map(|one| one.trials).sum();
    groups.into_iter().map(|(name, of)| (name, of.len(), trials(&of), sum(&of))).collect()
}

fn rank_text(before: &[Ranked], now: &[Ranked], held: Option<&HeldOut>) -> String {
    let figure = |found: Option<f64>| found.map_or("   -  ".to_string(), |rank| format!("{rank:>6.2}"));
    let mut text = "rank correlation of predicted and measured latency (1: the same order, 0: unrelated)\n".to_string();
    for (what, ranked) in [("predictions stored with the trials", before), ("predictions of today's code", now)] {
        if !ranked.is_empty() {
            text.push_str(&format!("  cost model, {what}; mean of the campaigns, `--json` lists each:\n"));
        }
        for (name, campaigns, trials, rank) in by_name(ranked) {
            let (campaigns, trials) = (counted(campaigns as u64, "campaign"), counted(trials as u64, "trial"));
            text.push_str(&format!("    {} {name}, {campaigns}, {trials}\n", figure(rank)));
        }
    }
    let Some(held) = held else {
        text.push_str(
            "  learned models: not tested; `--held-out` tests them on each campaign, trained on the others\n",
        );
        return text;
    };
    if held.campaigns == 0 {
        text.push_str("  learned models: cannot be tested, because no kind of target has two campaigns\n");
        return text;
    }
    text.push_str(&format!(
        "  learned models, tested on each of {} with {} and trained on the others:\n",
        counted(held.campaigns as u64, "campaign"),
        counted(held.trials as u64, "trial")
    ));
    text.push_str(&format!("    {} nearest neighbours\n", figure(Some(held.nearest))));
    text.push_str(&format!("    {} ridge regression\n", figure(Some(held.linear))));
    text.push_str(&format!("    {} additive Gaussian process (searches use this one)\n", figure(Some(held.additive))));
    text
}

fn rank_json(before: &[Ranked], now: &[Ranked], held: Option<&HeldOut>) -> serde_json::Value {
    let campaigns_of = |ranked: &[Ranked]| {
        let one = |Ranked { name, trials, predicted }: &Ranked| json!({ "campaign": name, "trials": trials, "rank_correlation": predicted });
        ranked.iter().map(one).collect::<serde_json::Value>()
    };
    let held = held.map(|HeldOut { campaigns, trials, nearest, linear, additive }| {
        json!({ "campaigns": campaigns, "trials": trials, "nearest_neighbours": nearest,
            "ridge_regression": linear, "additive": additive })
    });
    json!({ "cost_model": campaigns_of(before), "cost_model_now": campaigns_of(now), "held_out": held })
}

fn tell_broken(session: &Session, broken: &[BrokenRow]) {
    broken.iter().for_each(|row| session.terminal.say(&format!("warning: skipped {row}")));
}

/// A study as JSON; ratios are latencies divided by the default's.
fn study_json(study: &Study) -> serde_json::Value {
    let Study { name, cold_best, cold, warm } = study;
    let runs = |runs: &[Run]| -> serde_json::Value {
        let one = |Run { reached, curve, .. }: &Run| json!({ "trials_until_near_best": reached, "ratios": curve.iter().map(|log| log.exp()).collect::<Vec<_>>() });
        runs.iter().map(one).collect()
    };
    json!({ "model": name, "cold_best_ratio": cold_best.exp(), "cold": runs(cold), "warm": runs(warm) })
}

/// One row, column by column.
type Cells = Vec<(&'static str, String)>;

/// The rows as a corpus shares them: devices are numbered in the order of their first row.
fn shared<'a>(all: &[Trial], wanted: impl Iterator<Item = &'a Trial>) -> Vec<Cells> {
    let mut ratios: BTreeMap<Digest, f64> = BTreeMap::new();
    for history in histories(all) {
        for entry in &history.entries {
            let is_default = entry.candidate == history.default;
            let ratio = |log: f64| if is_default { 1.0 } else { log.exp() };
            ratios.extend(entry.timed.iter().map(|row| (row.id, ratio(row.log_ratio))));
        }
    }
    let mut devices: Vec<&str> = vec![];
    let mut rows = vec![];
    for trial in wanted {
        let facts = trial.facts();
        let uuid = facts.machine.device_uuid.as_str();
        let number = devices.iter().position(|known| *known == uuid).unwrap_or_else(|| {
            devices.push(uuid);
            devices.len() - 1
        });
        let device = if uuid.is_empty() { String::new() } else { format!("device-{:02}", number + 1) };
        let model = if facts.model_name.is_empty() { &facts.manifest } else { &facts.model_name };
        rows.push(trial.cells_to_share(&device, model, ratios.get(&trial.trial_id()).copied()));
    }
    rows
}

fn json_text(rows: &[Cells]) -> String {
    let row = |cells: &Cells| cells.iter().map(|(name, cell)| (name.to_string(), json!(cell))).collect();
    let rows: Vec<serde_json::Value> = rows.iter().map(|cells| serde_json::Value::Object(row(cells))).collect();
    format!("{:#}\n", serde_json::Value::Array(rows))
}

fn csv_text(rows: &[Cells]) -> Result<String, Fault> {
    let failed = |error: csv::Error| Fault::internal(format!("rows of a corpus are no CSV: {error}"));
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(COLUMNS.map(|column| column.name)).map_err(failed)?;
    for cells in rows {
        writer.write_record(cells.iter().map(|(_, cell)| cell)).map_err(failed)?;
    }
    let bytes = writer.into_inner().map_err(|error| Fault::internal(error.to_string()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn stats_text(stats: &CorpusStats) -> String {
    let CorpusStats { rows, verdicts, targets, manifests, models, candidates, devices, utc } = stats;
    let mut text =
        format!("  {}, {}, {}\n", counted(*rows, "row"), counted(*models, "model"), counted(*candidates, "candidate"));
    let mut line = |name: &str, counts: Vec<String>| {
        if !counts.is_empty() {
            text.push_str(&format!("  {name:<10} {}\n", counts.join(", ")));
        }
    };
    line("verdicts", verdicts.iter().map(|(name, count)| format!("{count} {name}")).collect());
    line("targets", targets.iter().map(|(name, count)| format!("{count} {name}")).collect());
    line("manifests", manifests.iter().map(|(name, count)| format!("{count} {name}")).collect());
    line("devices", devices.iter().cloned().collect());
    line("time", utc.iter().map(|(first, last)| format!("{first} to {last}")).collect());
    text
}

fn stats_json(stats: &CorpusStats, broken: &[BrokenRow]) -> serde_json::Value {
    let CorpusStats { rows, verdicts, targets, manifests, models, candidates, devices, utc } = stats;
    json!({
        "rows": rows,
        "verdicts": verdicts,
        "targets": targets,
        "manifests": manifests,
        "models": models,
        "candidates": candidates,
        "devices": devices,
        "first_utc": utc.as_ref().map(|(first, _)| first),
        "last_utc": utc.as_ref().map(|(_, last)| last),
        "broken": broken.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}
