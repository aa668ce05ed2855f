//! Owns `targets`: the records that a manifest can name.

use std::path::Path;

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::Targets;
use super::session::Session;
use crate::error::Fault;
use crate::target::{Target, TargetRecord};

pub fn targets(session: &Session, asked: &Targets) -> Result<Outcome, Fault> {
    let terminal = &session.terminal;
    if let Some(name) = &asked.name {
        let record = TargetRecord::load(name, Path::new(".")).map_err(|error| error.into_fault(terminal.style))?;
        match asked.json {
            true => terminal.print_json(&record_json(&record)?)?,
            false => terminal.print(&record.to_toml())?,
        }
        return Ok(Outcome::Done);
    }
    let all: Vec<TargetRecord> = Target::builtin_names().filter_map(TargetRecord::builtin).collect();
    if asked.json {
        let all: Result<Vec<Value>, Fault> = all.iter().map(record_json).collect();
        terminal.print_json(&json!(all?))?;
        return Ok(Outcome::Done);
    }
    let mut text = format!(
        "{:<8} {:<5} {:<8} {:>4} {:>10} {:>10} {:>10}\n",
        "name", "kind", "arch", "SMs", "memory", "GB/s", "measured"
    );
    for TargetRecord { target: Target { name, kind, devices: _, spec }, measured } in &all {
        let gigabytes = |bytes_per_s: f64| format!("{:.0}", bytes_per_s / 1e9);
        let measured = measured.read_bytes_per_s.map_or("-".to_string(), gigabytes);
        let (arch, memory) = (if spec.arch.is_empty() { "-" } else { &spec.arch }, spec.memory_bytes / 1_000_000_000);
        text.push_str(&format!(
            "{name:<8} {:<5} {arch:<8} {:>4} {:>10} {:>10} {measured:>10}\n",
            kind.name(),
            spec.sm_count,
            format!("{memory} GB"),
            gigabytes(spec.memory_bytes_per_s)
        ));
    }
    terminal.print(&text)?;
    Ok(Outcome::Done)
}

/// A record as JSON, with the names and the structure of its TOML.
pub fn record_json(record: &TargetRecord) -> Result<Value, Fault> {
    let name = &record.target.name;
    toml::from_str(&record.to_toml()).map_err(|error| Fault::internal(format!("record `{name}`: {error}")))
}
