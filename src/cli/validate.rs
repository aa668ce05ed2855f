//! Owns `validate`: prints the verdict about a user's schedule, with each violation on its line.

use std::path::Path;

use serde_json::json;

use super::Outcome;
use super::arguments::Validate;
use super::session::Session;
use crate::error::Fault;
use crate::files::read_text;
use crate::ir::parse::{Lines, parse_with_lines};
use crate::ir::schedule::Schedule;
use crate::target::{Target, TargetRecord};
use crate::text::counted;
use crate::text::{Diagnostic, Style};
use crate::validate::{Entity, Rule, Violation, check, line_of};

/// Largest schedule that is read; a schedule of a million tasks has 200 MB.
const SCHEDULE_BYTES_MAX: u64 = 1 << 30;

/// Violations shown with their lines; `--json` has all.
const SHOWN_MAX: usize = 20;

pub fn validate(session: &Session, asked: &Validate) -> Result<Outcome, Fault> {
    let (terminal, name) = (&session.terminal, asked.file.display().to_string());
    let text = read_text(&asked.file, SCHEDULE_BYTES_MAX)?;
    let (schedule, lines) = parse_with_lines(&text).map_err(|error| error.into_fault(&name, &text, terminal.style))?;
    let target = match &asked.target {
        Some(name) => match Target::named(name) {
            Some(target) => target,
            None => {
                let record = TargetRecord::load(name, Path::new("."));
                record.map_err(|error| error.into_fault(terminal.style))?.target
            }
        },
        None => own_target(&schedule, &lines, &name, &text, terminal.style)?,
    };
    let violations = check(&schedule, &target);
    let place = Place { text: &text, lines: &lines };
    if asked.json {
        let listed: Vec<_> = violations.iter().map(|violation| place.json(violation)).collect();
        terminal.print_json(&json!({
            "proven": violations.is_empty(),
            "target": target.name,
            "tasks": schedule.task_count(),
            "events": event_count(&schedule),
            "sms": schedule.machine.sms,
            "regimes": schedule.regimes.len(),
            "violations": listed,
        }))?;
    } else if violations.is_empty() {
        terminal.print(&format!(
            "{}: {}, {}, {} in {}, for target `{}`\n",
            terminal.good("proven"),
            counted(schedule.task_count() as u64, "task"),
            counted(event_count(&schedule) as u64, "event"),
            counted(u64::from(schedule.machine.sms), "SM"),
            counted(schedule.regimes.len() as u64, "regime"),
            target.name
        ))?;
    } else {
        for violation in violations.iter().take(SHOWN_MAX) {
            let rendered = place.render(violation, &name, terminal.stdout_style);
            terminal.print(&format!("{}: {rendered}\n\n", terminal.bad("violation")))?;
        }
        if violations.len() > SHOWN_MAX {
            terminal.print(&format!("and {} more, which `--json` lists\n\n", violations.len() - SHOWN_MAX))?;
        }
        terminal.print(&format!(
            "{}: `{name}` is not proven for target `{}`: {}\n",
            terminal.bad("rejected"),
            target.name,
            counted(violations.len() as u64, "violation")
        ))?;
    }
    Ok(if violations.is_empty() { Outcome::Done } else { Outcome::No })
}

fn event_count(schedule: &Schedule) -> usize {
    schedule.regimes.iter().map(|regime| regime.events.len()).sum()
}

/// The builtin record that a schedule was placed for.
fn own_target(schedule: &Schedule, lines: &Lines, name: &str, text: &str, style: Style) -> Result<Target, Fault> {
    let target = &schedule.machine.target;
    Target::named(target).ok_or_else(|| {
        let title = format!("the schedule is for target `{target}`, which is no builtin record");
        let fault = Diagnostic::new(title, lines.machine.clone(), "named here");
        Fault::input(fault.render(name, text, style)).with_remedy("name the record's file with `--target`")
    })
}

/// Where entities stand in the file, to print violations on their lines.
struct Place<'a> {
    text: &'a str,
    lines: &'a Lines,
}

impl Place<'_> {
    /// The line of an entity, from 1.
    fn line(&self, entity: Entity, rule: Rule) -> usize {
        let start = line_of(entity, rule, self.lines).start.min(self.text.len());
        1 + self.text.as_bytes()[..start].iter().filter(|&&byte| byte == b'\n').count()
    }

    fn json(&self, violation: &Violation) -> serde_json::Value {
        let Violation { rule, entity, message, witness } = violation;
        let witness: Vec<_> = witness
            .iter()
            .map(|w| json!({ "entity": w.entity.to_string(), "line": self.line(w.entity, *rule), "note": w.note }))
            .collect();
        json!({
            "rule": rule.name(),
            "group": rule.group(),
            "entity": entity.to_string(),
            "line": self.line(*entity, *rule),
            "message": message,
            "witness": witness,
        })
    }

    fn render(&self, violation: &Violation, name: &str, style: Style) -> String {
        let Violation { rule, entity, message, witness } = violation;
        let span = line_of(*entity, *rule, self.lines);
        let mut text =
            Diagnostic::new(format!("{rule}: {message}"), span, entity.to_string()).render(name, self.text, style);
        for w in witness {
            let line = self.line(w.entity, *rule);
            text.push_str(&format!("\n  witness: {} (line {line}): {}", w.entity, w.note));
        }
        text
    }
}
