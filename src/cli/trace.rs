//! Owns `trace`: writes the timeline to a file, and prints the table as text or JSON.

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::Trace;
use super::session::{Session, Talk, pick_target};
use crate::error::Fault;
use crate::pipeline;
use crate::pipeline::trace::{Asked, Traced, TracedLaunch};
use crate::trace::{OverSms, Row, perfetto};

pub fn trace(session: &Session, asked: &Trace) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest, asked.target.as_deref())?;
    let target = pick_target(&manifest, asked.target.as_deref())?;
    let workspace = session.workspace(if asked.json { Talk::Nothing } else { Talk::Work })?;
    let position = asked.position.or(manifest.decode.time_positions.first().copied()).unwrap_or(0);
    let prepared = pipeline::prepare(&workspace, &manifest, &target)?;
    let traced = match asked.prompt {
        Some(tokens) => prepared.trace_prompt(&workspace, tokens, position)?,
        None => prepared.trace(&workspace, Asked { rows: asked.rows, position, steps: asked.steps })?,
    };
    let rows = match (asked.rows, asked.prompt) {
        (Some(rows), _) => format!(", {rows} rows"),
        (_, Some(tokens)) => format!(", a chunk of {tokens} tokens"),
        _ => String::new(),
    };
    let name = format!("{} on {}{rows}, from position {position}", manifest.name, traced.hardware);
    let timeline = perfetto(traced.spans(), &name).to_string();
    std::fs::write(&asked.out, timeline).map_err(|error| {
        Fault::environment(format!("cannot write `{}`: {error}", asked.out.display()))
            .with_remedy("name another file with `--out`")
    })?;
    if asked.json {
        let mut all = value(&traced);
        all["timeline"] = json!(asked.out);
        session.terminal.print_json(&all)?;
    } else {
        session.terminal.print(&text(&name, &traced))?;
        session
            .terminal
            .say(&format!("the timeline is in `{}`: open it in https://ui.perfetto.dev", asked.out.display()));
    }
    Ok(Outcome::Done)
}

/// The tables as one object: that of the launch, and below `tail` that of the launch after a prompt chunk.
fn value(traced: &Traced) -> Value {
    let of_launch = |launch: &TracedLaunch| {
        let mut all = serde_json::to_value(&launch.table).unwrap_or_default();
        all["steps"] = json!(launch.steps);
        all["device_step_us"] = json!(launch.step_us);
        all["bytes_per_step"] = json!(launch.bytes_per_step);
        all["floor_us"] = json!(launch.floor_us);
        all["memory_idle_us"] = json!(launch.memory_idle_us());
        all
    };
    let mut all = of_launch(&traced.launch);
    all["hardware"] = json!(traced.hardware);
    all["position"] = json!(traced.position);
    match &traced.tail {
        None => {}
        Some(Ok(tail)) => all["tail"] = of_launch(tail),
        Some(Err(refused)) => (all["tail"], all["no_tail"]) = (Value::Null, json!(refused.to_string())),
    }
    all
}

fn text(name: &str, traced: &Traced) -> String {
    let Traced { launch, sms, .. } = traced;
    match &traced.tail {
        None => {
            let time = format!("{:.1} µs a step with stamps, {} steps", launch.step_us, launch.steps);
            format!("{name}: {time}, {sms} SMs\n{}", launch_text(launch, "step"))
        }
        Some(tail) => {
            let time = format!("{:.1} µs with stamps", launch.step_us);
            let tail = match tail {
                Ok(tail) => {
                    let time = format!("{:.1} µs with stamps", tail.step_us);
                    format!("the tail, which decides the next token: {time}\n{}", launch_text(tail, "launch"))
                }
                Err(refused) => format!("there is no tail: {refused}\n"),
            };
            format!("{name}: {time}, {sms} SMs\n{}\n{tail}", launch_text(launch, "launch"))
        }
    }
}

/// What memory has to read, and the table. `of` says what the times are of: a step, or a launch.
fn launch_text(launch: &TracedLaunch, of: &str) -> String {
    let gb = launch.bytes_per_step as f64 * 1e-9;
    let mut text = match (launch.floor_us, launch.memory_idle_us()) {
        (Some(floor), Some(idle)) => format!(
            "memory: {gb:.3} GB need {floor:.1} µs at the read peak; idle for {idle:.1} µs of a {of}, {:.0} %\n",
            idle / launch.step_us * 100.0
        ),
        _ => format!("memory: {gb:.3} GB a {of}; the read peak was not measured\n"),
    };
    text.push_str(&format!("\nµs of a {of} and SM: mean (least to most)\n"));
    let heads = ["wait", "starved", "compute", "finish", "gap"];
    text.push_str(&format!("{:<18} {:>6}", "task", "tasks"));
    for head in heads {
        text.push_str(&format!(" {head:>22}"));
    }
    text.push_str("  waits for\n");
    for row in launch.table.rows.iter().chain([&launch.table.all]) {
        let Row { kind, waits_for, tasks, wait, starved, compute, finish, gap } = row;
        text.push_str(&format!("{kind:<18} {tasks:>6.0}"));
        for OverSms { mean_us, min_us, max_us } in [wait, starved, compute, finish, gap] {
            text.push_str(&format!(" {:>22}", format!("{mean_us:.1} ({min_us:.1} to {max_us:.1})")));
        }
        let waits_for = if std::ptr::eq(row, &launch.table.all) { String::new() } else { waits_for.join(", ") };
        text.push_str(format!("  {waits_for}").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Table;
    use crate::waves::Refused;

    /// A launch that has tasks of one kind beside all.
    fn launch(kind: &str, floor_us: Option<f64>) -> TracedLaunch {
        let part = |mean_us| OverSms { mean_us, min_us: mean_us / 2.0, max_us: mean_us * 2.0 };
        let row = |kind: &str, waits_for: &[&str]| Row {
            kind: kind.to_string(),
            waits_for: waits_for.iter().map(|name| name.to_string()).collect(),
            tasks: 132.0,
            wait: part(2.0),
            starved: part(1.0),
            compute: part(4.0),
            finish: part(0.5),
            gap: part(0.1),
        };
        let table = Table { step_us: 10.0, rows: vec![row(kind, &["x"])], all: row("all", &["x"]) };
        TracedLaunch { steps: 4, step_us: 10.0, bytes_per_step: 36_800_000, floor_us, spans: vec![], table }
    }

    fn traced(floor_us: Option<f64>, tail: Option<Result<TracedLaunch, Refused>>) -> Traced {
        let launch = launch("qkv", floor_us);
        Traced { hardware: "NVIDIA H200".to_string(), sms: 132, position: 32, launch, tail }
    }

    #[test]
    fn the_table_has_a_line_for_each_kind_and_one_for_all() {
        let said = text("tiny", &traced(Some(8.0), None));
        assert!(said.starts_with("tiny: 10.0 µs a step with stamps, 4 steps, 132 SMs\n"), "{said}");
        assert!(said.contains("memory: 0.037 GB need 8.0 µs at the read peak; idle for 2.0 µs of a step, 20 %\n"));
        let lines: Vec<&str> = said.lines().rev().take(2).collect();
        assert!(lines[1].starts_with("qkv ") && lines[1].ends_with("  x") && lines[1].contains(" 2.0 (1.0 to 4.0) "));
        assert!(lines[0].starts_with("all ") && lines[0].ends_with("0.1 (0.1 to 0.2)"), "{said}");
        let unknown = text("tiny", &traced(None, None));
        assert!(unknown.contains("the read peak was not measured"), "{unknown}");
        assert_eq!(value(&traced(None, None)).get("tail"), None);
    }

    #[test]
    fn a_prompt_chunk_is_followed_by_its_tail() {
        let both = traced(Some(8.0), Some(Ok(TracedLaunch { step_us: 4.0, ..launch("head", Some(3.0)) })));
        let said = text("tiny", &both);
        let lines: Vec<&str> = said.lines().map(|line| line.split("  ").next().unwrap_or_default()).collect();
        let memory = |line: &str| line.split("; ").last().unwrap_or_default().to_string();
        assert_eq!(
            (lines[0], &*memory(lines[1])),
            ("tiny: 10.0 µs with stamps, 132 SMs", "idle for 2.0 µs of a launch, 20 %")
        );
        assert_eq!(lines[5..9], ["qkv", "all", "", "the tail, which decides the next token: 4.0 µs with stamps"]);
        assert_eq!(memory(lines[9]), "idle for 1.0 µs of a launch, 25 %");
        assert_eq!(lines[13..], ["head", "all"]);
        let json = value(&both);
        let of = |value: &Value| (value["rows"][0]["kind"].clone(), value["device_step_us"].clone());
        assert_eq!([of(&json), of(&json["tail"])], [(json!("qkv"), json!(10.0)), (json!("head"), json!(4.0))]);
    }

    #[test]
    fn a_chunk_without_a_tail_says_why() {
        let refused = Refused::Rows { rows: 3, most: 64 };
        let (reason, alone) = (refused.to_string(), traced(Some(8.0), Some(Err(refused))));
        assert!(text("tiny", &alone).ends_with(&format!("\n\nthere is no tail: {reason}\n")));
        assert_eq!((&value(&alone)["tail"], &value(&alone)["no_tail"]), (&Value::Null, &json!(reason)));
    }
}
