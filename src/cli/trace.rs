//! Owns `trace`: writes the timeline to a file, and prints the table as text or JSON.

use serde_json::json;

use super::Outcome;
use super::arguments::Trace;
use super::session::{Session, Talk, pick_target};
use crate::error::Fault;
use crate::pipeline::trace::{Asked, Traced};
use crate::pipeline::{self};
use crate::trace::{OverSms, Row, perfetto};

pub fn trace(session: &Session, asked: &Trace) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest)?;
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
    let timeline = perfetto(&traced.spans, &name).to_string();
    std::fs::write(&asked.out, timeline).map_err(|error| {
        Fault::environment(format!("cannot write `{}`: {error}", asked.out.display()))
            .with_remedy("name another file with `--out`")
    })?;
    if asked.json {
        let mut all = serde_json::to_value(&traced.table).unwrap_or_default();
        all["hardware"] = json!(traced.hardware);
        all["position"] = json!(traced.position);
        all["steps"] = json!(traced.steps);
        all["device_step_us"] = json!(traced.step_us);
        all["bytes_per_step"] = json!(traced.bytes_per_step);
        all["floor_us"] = json!(traced.floor_us);
        all["memory_idle_us"] = json!(traced.memory_idle_us());
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

fn text(name: &str, traced: &Traced) -> String {
    let memory = match (traced.floor_us, traced.memory_idle_us()) {
        (Some(floor), Some(idle)) => format!(
            "memory: {:.3} GB need {floor:.1} µs at the read peak; idle for {idle:.1} µs of a step, {:.0} %\n",
            traced.bytes_per_step as f64 * 1e-9,
            idle / traced.step_us * 100.0
        ),
        _ => format!("memory: {:.3} GB a step; the read peak was not measured\n", traced.bytes_per_step as f64 * 1e-9),
    };
    let mut text = format!(
        "{name}: {:.1} µs a step with stamps, {} steps, {} SMs\n{memory}\nµs of a step and SM: mean (least to most)\n",
        traced.step_us, traced.steps, traced.sms
    );
    let heads = ["wait", "starved", "compute", "finish", "gap"];
    text.push_str(&format!("{:<18} {:>6}", "task", "tasks"));
    for head in heads {
        text.push_str(&format!(" {head:>22}"));
    }
    text.push_str("  waits for\n");
    for row in traced.table.rows.iter().chain([&traced.table.all]) {
        let Row { kind, waits_for, tasks, wait, starved, compute, finish, gap } = row;
        text.push_str(&format!("{kind:<18} {tasks:>6.0}"));
        for OverSms { mean_us, min_us, max_us } in [wait, starved, compute, finish, gap] {
            text.push_str(&format!(" {:>22}", format!("{mean_us:.1} ({min_us:.1} to {max_us:.1})")));
        }
        let waits_for = if std::ptr::eq(row, &traced.table.all) { String::new() } else { waits_for.join(", ") };
        text.push_str(format!("  {waits_for}").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Table;

    #[test]
    fn the_table_has_a_line_for_each_kind_and_one_for_all() {
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
        let table = Table { step_us: 10.0, rows: vec![row("qkv", &["x"])], all: row("all", &["x"]) };
        let traced = Traced {
            hardware: "NVIDIA H200".to_string(),
            sms: 132,
            position: 32,
            steps: 4,
            step_us: 10.0,
            bytes_per_step: 36_800_000,
            floor_us: Some(8.0),
            spans: vec![],
            table,
        };
        let said = text("tiny", &traced);
        assert!(said.contains("memory: 0.037 GB need 8.0 µs at the read peak; idle for 2.0 µs of a step, 20 %\n"));
        let lines: Vec<&str> = said.lines().rev().take(2).collect();
        assert!(lines[1].starts_with("qkv ") && lines[1].ends_with("  x") && lines[1].contains(" 2.0 (1.0 to 4.0) "));
        assert!(lines[0].starts_with("all ") && lines[0].ends_with("0.1 (0.1 to 0.2)"), "{said}");
        let unknown = text("tiny", &Traced { floor_us: None, ..traced });
        assert!(unknown.contains("the read peak was not measured"), "{unknown}");
    }
}
