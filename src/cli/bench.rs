//! Owns `bench`: prints what was measured, as a table that grows line by line, or as one JSON object.

use std::io::BufRead;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::{Bench, Ids};
use super::session::{Session, Talk, pick_target};
use crate::abba::{Limits, Ratio, percentile};
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::measure::Timed;
use crate::pipeline::bench::{self, Baseline, Compared, Found, Own, Request, Subject, Versus};
use crate::pipeline::device_ragged::bench_ragged;
use crate::pipeline::device_rows::{self, FoundOfRows, RowsTimed, Took};
use crate::target::Target;
use crate::text::counted;

/// With fewer rounds a bootstrap interval means nothing.
const ROUNDS_MIN: usize = 3;

pub fn bench(session: &Session, asked: &Bench) -> Result<Outcome, Fault> {
    let mut manifest = session.manifest(&asked.manifest, asked.target.as_deref())?;
    let target = pick_target(&manifest, asked.target.as_deref())?;
    if asked.serve {
        let workspace = session.workspace(Talk::Nothing)?;
        let questions = std::io::stdin().lock().lines().map_while(Result::ok);
        bench::serve(&workspace, &manifest, &target, questions, |answer| {
            session.terminal.print(&format!("{answer}\n"))
        })?;
        return Ok(Outcome::Done);
    }
    if let Some(positions) = &asked.position {
        manifest.decode.time_positions = positions_of(&manifest, &positions.0)?;
    }
    if asked.rows.is_some() || asked.prompt.is_some() {
        return bench_rows(session, asked, &manifest, &target);
    }
    let request = request(asked);
    let workspace = session.workspace(if asked.json { Talk::Nothing } else { Talk::Work })?;
    let mut all = json!({ "manifest": manifest.name });
    let mut whole = true;
    let mut read_bytes_per_s = None;
    bench::bench(&workspace, &manifest, &target, &request, &mut |found| {
        match &found {
            Found::Subject(subject) => {
                read_bytes_per_s = subject.read_bytes_per_s;
                merge(&mut all, subject_json(subject));
                all["positions"] = json!([]);
            }
            Found::Own(own) => {
                whole &= own.is_ok();
                push(&mut all["positions"], own_json(own, read_bytes_per_s));
            }
            Found::Versus { versus, .. } => {
                whole &= versus.outcome.is_ok();
                if let Some(position) = all["positions"].as_array_mut().and_then(|list| list.last_mut()) {
                    push(&mut position["baselines"], versus_json(versus));
                }
            }
        }
        if asked.json { Ok(()) } else { session.terminal.print(&text(&found, read_bytes_per_s)) }
    })?;
    if asked.json {
        session.terminal.print_json(&all)?;
    }
    Ok(if whole { Outcome::Done } else { Outcome::No })
}

/// Times steps of several rows and prompts in chunks; prints a line for each.
fn bench_rows(session: &Session, asked: &Bench, manifest: &Manifest, target: &Target) -> Result<Outcome, Fault> {
    let workspace = session.workspace(if asked.json { Talk::Nothing } else { Talk::Work })?;
    let numbers = |asked: &Option<Ids>| asked.as_ref().map_or(vec![], |ids| ids.0.clone());
    let (rows, prompts, chunks) = (numbers(&asked.rows), numbers(&asked.prompt), numbers(&asked.chunk));
    let context_max = manifest.decode.context_max;
    if let Some(wrong) = prompts.iter().find(|tokens| **tokens == 0 || **tokens > context_max) {
        return Err(Fault::input(format!(
            "a prompt of {wrong} tokens: expected 1 to {context_max}, `decode.context_max`"
        )));
    }
    let request = request(asked);
    if let Some(Baseline::Schedule(path)) = request.baselines.iter().find(|b| matches!(b, Baseline::Schedule(_))) {
        return Err(Fault::input(format!("baseline `{}`: a schedule decodes one sequence", path.display()))
            .with_remedy("leave out `--rows` and `--prompt`, or name `torch` or a program"));
    }
    let mut all = json!({ "manifest": manifest.name, "target": target.name, "rows": [], "gaps": [], "sampled": [], "prompts": [] });
    if asked.others.is_some() {
        all["ragged"] = json!([]);
    }
    if manifest.decode.batch_invariant {
        all["alike"] = json!([]);
    }
    let mut whole = true;
    // The list that has the last figure of our own kernel.
    let mut list = "rows";
    let asked_rows = device_rows::Asked { rows: &rows, prompts: &prompts, chunks: &chunks };
    let mut on_found = |found: FoundOfRows<'_>| {
        let line = match found {
            FoundOfRows::Own(timed) => {
                list = match timed.took {
                    Took::Steps(_) => "rows",
                    Took::Gaps { .. } => "gaps",
                    Took::Sampled(_) => "sampled",
                    Took::Ragged { .. } => "ragged",
                    Took::Prompt { .. } => "prompts",
                    Took::Alike(_) => "alike",
                };
                let (json, line) = rows_line(timed);
                push(&mut all[list], json);
                line
            }
            FoundOfRows::Versus(versus) => {
                whole &= versus.outcome.is_ok();
                if let Some(own) = all[list].as_array_mut().and_then(|list| list.last_mut()) {
                    push(&mut own["baselines"], versus_json(versus));
                }
                versus_line(versus)
            }
        };
        if asked.json { Ok(()) } else { session.terminal.print(&line) }
    };
    match asked.others {
        Some(others) => bench_ragged(&workspace, manifest, target, &rows, others, &mut on_found)?,
        None => device_rows::bench_rows(&workspace, manifest, target, asked_rows, &request, &mut on_found)?,
    }
    if asked.json {
        session.terminal.print_json(&all)?;
    }
    Ok(if whole { Outcome::Done } else { Outcome::No })
}

/// What to compare with, and for how long.
fn request(asked: &Bench) -> Request {
    Request {
        baselines: asked.baseline.iter().map(|word| baseline(word)).collect(),
        limits: Limits { rounds_min: ROUNDS_MIN, rounds_max: asked.rounds.max(ROUNDS_MIN), time_max: asked.time },
        baseline_timeout: asked.baseline_timeout,
    }
}

fn rows_line(timed: &RowsTimed) -> (Value, String) {
    let RowsTimed { rows, kernel, position, checked, took } = timed;
    let of = |values: &[f64]| [0.1, 0.5, 0.9].map(|share| percentile(values, share));
    let within = format!("logits within {:.1e} of the norm", checked.error_rel_l2);
    match took {
        Took::Steps(step_us) | Took::Sampled(step_us) => {
            let how = if matches!(took, Took::Sampled(_)) { " with top-p and penalties" } else { "" };
            let [p10, p50, p90] = of(step_us);
            let tokens_per_s = f64::from(*rows) * 1e6 / p50;
            let json = json!({
                "rows": rows, "kernel_rows": kernel, "position": position, "checked": checked,
                "step_us_p10": p10, "step_us_p50": p50, "step_us_p90": p90, "tokens_per_s": tokens_per_s,
            });
            let line = format!(
                "{rows:>3} rows from position {position:>6}: {p50:>8.1} µs a step{how} (p10 {p10:.1}, p90 {p90:.1}), \
                 {tokens_per_s:>7.0} tokens/s; {within}\n"
            );
            (json, line)
        }
        Took::Ragged { others, splits, is_served, step_us } => {
            let [p10, p50, p90] = of(step_us);
            let json = json!({
                "rows": rows, "kernel_rows": kernel, "position": position, "others": others, "splits": splits,
                "served": is_served, "checked": checked, "step_us_p10": p10, "step_us_p50": p50, "step_us_p90": p90,
            });
            let cut = if *splits { " in KV splits" } else { "" };
            let served = if *is_served { "; a server takes this kernel" } else { "" };
            let line = format!(
                "{rows:>3} rows, one from position {position:>6} and others from {others}, on the kernel for {kernel} rows{cut}: \
                 {p50:>8.1} µs a step (p10 {p10:.1}, p90 {p90:.1}); {within}{served}\n"
            );
            (json, line)
        }
        Took::Gaps { waited_us, queued_us } => {
            let ([p10, p50, p90], [_, waited, _]) = (of(queued_us), of(waited_us));
            let json = json!({
                "rows": rows, "kernel_rows": kernel, "position": position,
                "queued_us_p10": p10, "queued_us_p50": p50, "queued_us_p90": p90, "waited_us_p50": waited,
            });
            let line = format!(
                "{rows:>3} rows from position {position:>6}: {p50:>8.1} µs between launches that are queued ahead \
                 (p10 {p10:.1}, p90 {p90:.1}), {waited:.1} between others\n"
            );
            (json, line)
        }
        Took::Alike(alike) => {
            let list = |numbers: &mut dyn Iterator<Item = String>| numbers.collect::<Vec<_>>().join(", ");
            let line = format!(
                "{} rows have the bits that they have alone: batches of {}, chunks of {}; kernels for {} rows\n",
                alike.compared,
                list(&mut alike.batches.iter().map(usize::to_string)),
                list(&mut alike.chunks.iter().map(usize::to_string)),
                list(&mut alike.kernels.iter().map(u32::to_string)),
            );
            (json!(alike), line)
        }
        Took::Prompt { tokens, ms } => {
            let [p10, p50, p90] = of(ms);
            let json = json!({
                "tokens": tokens, "chunk": rows, "checked": checked, "ms_p10": p10, "ms_p50": p50, "ms_p90": p90,
            });
            let line = format!(
                "prompt of {tokens:>5} tokens in chunks of {rows}: {p50:>8.2} ms (p10 {p10:.2}, p90 {p90:.2}); {within}\n"
            );
            (json, line)
        }
    }
}

fn baseline(word: &str) -> Baseline {
    match word {
        "torch" => Baseline::Torch,
        path if path.ends_with(".mkir") && !path.contains(char::is_whitespace) => {
            Baseline::Schedule(PathBuf::from(path))
        }
        line => Baseline::Command(line.to_string()),
    }
}

/// The asked positions under the rules of the manifest's own: ascending, each once, each with room for a launch.
fn positions_of(manifest: &Manifest, asked: &[u32]) -> Result<Vec<u32>, Fault> {
    let decode = &manifest.decode;
    let last = decode.context_max - decode.steps_per_launch;
    let mut positions = asked.to_vec();
    positions.sort_unstable();
    positions.dedup();
    match positions.iter().find(|&&position| position > last) {
        None => Ok(positions),
        Some(position) => Err(Fault::input(format!(
            "position {position} leaves no room for a launch of {} steps in a context of {}: expected at most {last}",
            decode.steps_per_launch, decode.context_max
        ))
        .with_remedy("raise `decode.context_max`, or lower `decode.steps_per_launch`")),
    }
}

fn merge(all: &mut Value, more: Value) {
    if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
        all.extend(more);
    }
}

fn push(list: &mut Value, item: Value) {
    match list {
        Value::Array(items) => items.push(item),
        other => *other = Value::Array(vec![item]),
    }
}

fn subject_json(subject: &Subject) -> Value {
    let Subject { target, hardware, driver, precision, checked, read_bytes_per_s } = subject;
    json!({
        "target": target,
        "hardware": hardware,
        "driver": driver,
        "precision": precision,
        "checked": checked,
        "read_bytes_per_s": read_bytes_per_s,
    })
}

fn own_json(own: &Own, read_bytes_per_s: Option<f64>) -> Value {
    match own {
        Ok(timed) => {
            let mut all = serde_json::to_value(timed).unwrap_or_default();
            all["of_read_peak"] = json!(of_peak(timed, read_bytes_per_s));
            all["baselines"] = json!([]);
            all
        }
        Err(withheld) => json!({ "position": withheld.position, "withheld": withheld.reason }),
    }
}

fn versus_json(versus: &Versus) -> Value {
    let Versus { baseline, variant, outcome } = versus;
    let mut all = json!({ "baseline": baseline, "variant": variant });
    merge(
        &mut all,
        match outcome {
            Err(reason) => json!({ "error": reason }),
            Ok(Compared { latency_us_p10, latency_us_p50, latency_us_p90, ratio }) => {
                let Ratio { ratio, low, high, rounds } = ratio;
                json!({
                    "latency_us_p10": latency_us_p10,
                    "latency_us_p50": latency_us_p50,
                    "latency_us_p90": latency_us_p90,
                    "ratio": ratio,
                    "ratio_low": low,
                    "ratio_high": high,
                    "rounds": rounds,
                })
            }
        },
    );
    all
}

/// The bandwidth of a step's bytes, as a share of the read peak.
fn of_peak(timed: &Timed, read_bytes_per_s: Option<f64>) -> Option<f64> {
    read_bytes_per_s.map(|peak| timed.bytes_per_step as f64 / (timed.latency_us_p50 * 1e-6) / peak)
}

fn text(found: &Found<'_>, read_bytes_per_s: Option<f64>) -> String {
    match found {
        Found::Subject(subject) => {
            let Subject { target, hardware, driver, precision, checked, read_bytes_per_s } = subject;
            let driver = if driver.is_empty() { String::new() } else { format!(", driver {driver}") };
            let peak = match read_bytes_per_s {
                Some(peak) => format!("read peak {:.2} TB/s", peak * 1e-12),
                None => "read peak not measured".to_string(),
            };
            format!(
                "{target} on {hardware}{driver}; {precision}; {peak}\n\
                 checked: {}, error {:.1e} of the norm, most likely token equal at {}\n",
                counted(checked.positions as u64, "position"),
                checked.error_rel_l2,
                checked.argmax_agree
            )
        }
        Found::Own(Err(withheld)) => format!("position {:>6}  withheld: {}\n", withheld.position, withheld.reason),
        Found::Own(Ok(timed)) => {
            let bandwidth = timed.bytes_per_step as f64 / timed.latency_us_p50 * 1e-3;
            let share = of_peak(timed, read_bytes_per_s);
            let share = share.map(|share| format!(", {:.1} % of read peak", share * 100.0)).unwrap_or_default();
            let clock = |mhz: Option<u32>, what: &str| mhz.map(|mhz| format!("; {what} {mhz} MHz")).unwrap_or_default();
            let throttle = match timed.throttle.as_str() {
                "" => String::new(),
                reasons => format!("; throttling: {reasons}"),
            };
            format!(
                "position {:>6}  {:>9.1} µs a step (p10 {:.1}, p90 {:.1}; {} launches of {})  {:.3} GB, {bandwidth:.0} GB/s{share}{}{}{throttle}\n",
                timed.position,
                timed.latency_us_p50,
                timed.latency_us_p10,
                timed.latency_us_p90,
                timed.samples,
                timed.steps_per_launch,
                timed.bytes_per_step as f64 * 1e-9,
                clock(timed.clock_sm_mhz, "SM"),
                clock(timed.clock_mem_mhz, "memory"),
            )
        }
        Found::Versus { versus, .. } => versus_line(versus),
    }
}

fn versus_line(Versus { baseline, variant, outcome }: &Versus) -> String {
    match outcome {
        Err(reason) => format!("    {baseline} {variant}: no figure: {reason}\n"),
        Ok(Compared { latency_us_p10, latency_us_p50, latency_us_p90, ratio }) => format!(
            "    {baseline} {variant}: {latency_us_p50:.1} µs (p10 {latency_us_p10:.1}, p90 {latency_us_p90:.1}), \
             {:.3}x ({:.3} to {:.3}, {} rounds)\n",
            ratio.ratio, ratio.low, ratio.high, ratio.rounds
        ),
    }
}
