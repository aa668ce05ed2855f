//! Owns `flywheel stats`, `best`, `export`, `rank`, `study` and `merge`.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::Outcome;
use super::arguments::{Flywheel, FlywheelAction};
use super::session::{Session, Talk};
use super::units::counted;
use crate::error::Fault;
use crate::flywheel::{BestTrial, BrokenRow, COLUMNS, Corpus, CorpusStats, Trial, best, corpora, merge, stats};
use crate::page::study_svg;
use crate::pipeline::status;
use crate::search::history::{Entry, History};
use crate::search::prior::{HeldOut, Ranked, held_out, ranked};
use crate::search::study::{Run, Study, caught_up, had_seeds, median_reached, median_share, studies};
use crate::search::{histories, lessons};

pub fn flywheel(session: &Session, asked: &Flywheel) -> Result<Outcome, Fault> {
    let (terminal, path) = (&session.terminal, &session.trials);
    if let FlywheelAction::Merge { inputs } = &asked.action {
        let merged = merge(inputs, path)?;
        tell_broken(session, &merged.broken);
        let (added, known) = (counted(merged.rows_added, "row"), merged.duplicates);
        terminal.print(&format!("added {added} to `{}`; {known} were there already\n", path.display()))?;
        return Ok(Outcome::Done);
    }
    if let FlywheelAction::Study { inputs, warm, plots } = &asked.action {
        let read = |files: &[PathBuf]| -> Result<Vec<History>, Fault> {
            let corpus = Corpus::read(files)?;
            tell_broken(session, &corpus.broken);
            Ok(histories(&corpus.trials))
        };
        let (warm, cold) = match warm.is_empty() {
            true => read(inputs)?.into_iter().partition(had_seeds),
            false => (read(warm)?, read(inputs)?),
        };
        return study(session, &studies(&cold, &warm), plots.as_deref());
    }
    let corpus = Corpus::read(&[path])?;
    match &asked.action {
        FlywheelAction::Merge { .. } | FlywheelAction::Study { .. } => {}
        FlywheelAction::Stats { json } => {
            let stats = stats(&corpus.trials);
            match json {
                true => terminal.print_json(&stats_json(&stats, &corpus.broken))?,
                false => {
                    terminal.print(&format!("trials `{}`\n{}", path.display(), stats_text(&stats)))?;
                    tell_broken(session, &corpus.broken);
                }
            }
        }
        FlywheelAction::Best { json } => {
            tell_broken(session, &corpus.broken);
            best_told(session, &best(&corpus.trials), *json)?;
        }
        FlywheelAction::Rank { manifests, json } => {
            // As a search reads them: the corpora that lie beside the user's trials, too.
            let corpus = Corpus::read(&corpora(path))?;
            tell_broken(session, &corpus.broken);
            let ranked = ranked(&histories(&corpus.trials), Entry::log_predicted);
            let workspace = session.workspace(Talk::Nothing)?;
            let mut now = vec![];
            for manifest in manifests {
                let manifest = session.manifest(manifest)?;
                for target in &manifest.targets {
                    now.extend(status::ranked_now(&workspace, &manifest, target)?);
                }
            }
            let held = held_out(&lessons(&corpus.trials).groups);
            match json {
                true => terminal.print_json(&rank_json(&ranked, &now, &held))?,
                false => terminal.print(&rank_text(&ranked, &now, &held))?,
            }
        }
        FlywheelAction::Export { target, verdict } => {
            tell_broken(session, &corpus.broken);
            let wanted = |trial: &&Trial| {
                target.as_ref().is_none_or(|target| trial.facts().machine.target == *target)
                    && verdict.as_ref().is_none_or(|verdict| trial.verdict().name() == verdict)
            };
            terminal.print(&csv_text(corpus.trials.iter().filter(wanted))?)?;
        }
    }
    Ok(Outcome::Done)
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
        let floor = timing.floor_us.map(|floor| format!(", floor {floor:.1} us")).unwrap_or_default();
        terminal.print(&format!(
            "{} {} on {}{device}, position {}: {:.1} us{floor}, of {}\n    {} {}\n",
            facts.name(),
            facts.model.weights_dtype,
            facts.machine.target,
            timing.position,
            timing.latency_us_p50,
            counted(best.compared, "trial"),
            best.trial.trial_id().short(),
            facts.point.candidate
        ))?;
    }
    if best.is_empty() {
        terminal.say("no trial with the verdict `ok` yet");
    }
    Ok(())
}

/// A table in Markdown for each model, and its plot.
fn study(session: &Session, studies: &[Study], plots: Option<&Path>) -> Result<Outcome, Fault> {
    if studies.is_empty() {
        return Err(Fault::input("there are no cold and warm campaigns of one model in these files").with_remedy(
            "run `monobloc tune` with several seeds, with and without rows of other models in `corpus/`",
        ));
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
            "| pair | cold: trials until within 2 % of it | warm | cold ends at | warm ends at | warm as fast as cold in the end behind |\n\
             | --- | --- | --- | --- | --- | --- |\n",
        );
        let mut caught = vec![];
        for at in 0..cold.len().max(warm.len()) {
            let (cold, warm) = (cold.get(at), warm.get(at));
            let behind = match (cold, warm) {
                (Some(cold), Some(warm)) => {
                    let found = caught_up(warm, cold);
                    caught.push(found);
                    found.map_or("never".to_string(), |(trials, of)| format!("{trials} trials of {of}"))
                }
                _ => String::new(),
            };
            let cells = [reached(cold), reached(warm), ended(cold), ended(warm), behind];
            text.push_str(&format!("| {} | {} |\n", at + 1, cells.join(" | ")));
        }
        let median = |runs: &[Run]| median_reached(runs).map_or("not reached".to_string(), |trials| trials.to_string());
        let share = median_share(&caught).map_or("never".to_string(), |share| format!("{:.0} %", share * 100.0));
        text.push_str(&format!("| median | {} | {} | | | {share} |\n\n", median(cold), median(warm)));
        session.terminal.print(&text)?;
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

fn rank_text(before: &[Ranked], now: &[Ranked], held: &HeldOut) -> String {
    let figure = |found: Option<f64>| found.map_or("   -  ".to_string(), |rank| format!("{rank:>6.2}"));
    let mut text = "rank correlation with measured latency: 1 is the same order, 0 none\n".to_string();
    for (what, ranked) in [("as it was when the trials ran", before), ("of today", now)] {
        if !ranked.is_empty() {
            text.push_str(&format!("  cost model {what}, by campaign:\n"));
        }
        for Ranked { name, trials, predicted } in ranked {
            text.push_str(&format!("    {} {name}, {}\n", figure(*predicted), counted(*trials as u64, "trial")));
        }
    }
    if held.campaigns == 0 {
        text.push_str("  learned models: there are no two campaigns of one kind of target to hold one out of\n");
        return text;
    }
    text.push_str(&format!(
        "  learned from the other campaigns, {} held out in turn, {}:\n",
        held.campaigns,
        counted(held.trials as u64, "trial")
    ));
    text.push_str(&format!("    {} nearest neighbours\n", figure(Some(held.nearest))));
    text.push_str(&format!("    {} ridge regression\n", figure(Some(held.linear))));
    text.push_str(&format!("    {} additive Gaussian process, which a search asks\n", figure(Some(held.additive))));
    text
}

fn rank_json(before: &[Ranked], now: &[Ranked], held: &HeldOut) -> serde_json::Value {
    let campaigns_of = |ranked: &[Ranked]| {
        let one = |Ranked { name, trials, predicted }: &Ranked| json!({ "campaign": name, "trials": trials, "rank_correlation": predicted });
        ranked.iter().map(one).collect::<serde_json::Value>()
    };
    let HeldOut { campaigns, trials, nearest, linear, additive } = held;
    json!({
        "cost_model": campaigns_of(before),
        "cost_model_now": campaigns_of(now),
        "held_out": { "campaigns": campaigns, "trials": trials, "nearest_neighbours": nearest,
            "ridge_regression": linear, "additive": additive },
    })
}

fn tell_broken(session: &Session, broken: &[BrokenRow]) {
    broken.iter().for_each(|row| session.terminal.say(&format!("warning: skipped {row}")));
}

fn csv_text<'a>(trials: impl Iterator<Item = &'a Trial>) -> Result<String, Fault> {
    let failed = |error: csv::Error| Fault::internal(format!("rows of a corpus are no CSV: {error}"));
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(COLUMNS.map(|column| column.name)).map_err(failed)?;
    for trial in trials {
        writer.write_record(trial.cells().iter().map(|(_, cell)| cell)).map_err(failed)?;
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
