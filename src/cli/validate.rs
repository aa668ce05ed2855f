//! Owns `validate`: prints the verdict about a user's schedule and the plans of waves after it, with each violation on its line.

use std::path::Path;

use serde_json::json;

use super::Outcome;
use super::arguments::Validate;
use super::session::Session;
use crate::error::Fault;
use crate::files::read_text;
use crate::ir::parse::Lines;
use crate::ir::schedule::Schedule;
use crate::target::{Target, TargetRecord};
use crate::text::counted;
use crate::text::{Diagnostic, Style};
use crate::validate::{Entity, Rule, Violation, line_of, validate as validate_schedule};
use crate::waves::parse::{Text, parse};
use crate::waves::{Plan, check};

/// Largest schedule that is read; a schedule of a million tasks has 200 MB.
const SCHEDULE_BYTES_MAX: u64 = 1 << 30;

/// Violations shown with their lines; `--json` has all.
const SHOWN_MAX: usize = 20;

pub fn validate(session: &Session, asked: &Validate) -> Result<Outcome, Fault> {
    let (terminal, name) = (&session.terminal, asked.file.display().to_string());
    let text = read_text(&asked.file, SCHEDULE_BYTES_MAX)?;
    let Text { schedule, lines, plans } =
        parse(&text).map_err(|error| error.into_fault(&name, &text, terminal.style))?;
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
    let (tasks, events) = (schedule.task_count(), event_count(&schedule));
    let (sms, regimes) = (schedule.machine.sms, schedule.regimes.len());
    let violations = judged(schedule, &lines, &plans, &target);
    let places: Vec<_> =
        violations.iter().map(|(lines, violation)| (Place { text: &text, lines }, violation)).collect();
    if asked.json {
        let listed: Vec<_> = places.iter().map(|(place, violation)| place.json(violation)).collect();
        terminal.print_json(&json!({
            "proven": violations.is_empty(),
            "target": target.name,
            "tasks": tasks,
            "events": events,
            "sms": sms,
            "regimes": regimes,
            "plans": plans.len(),
            "violations": listed,
        }))?;
    } else if violations.is_empty() {
        let waves: usize = plans.iter().map(|(plan, _)| plan.waves.len()).sum();
        let waves = match plans.as_slice() {
            [] => String::new(),
            plans => format!("; {} of {}", counted(plans.len() as u64, "plan"), counted(waves as u64, "wave")),
        };
        terminal.print(&format!(
            "{}: {}, {}, {} in {}{waves}, for target `{}`\n",
            terminal.good("proven"),
            counted(tasks as u64, "task"),
            counted(events as u64, "event"),
            counted(u64::from(sms), "SM"),
            counted(regimes as u64, "regime"),
            target.name
        ))?;
    } else {
        for (place, violation) in places.iter().take(SHOWN_MAX) {
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

/// What keeps a schedule from a proof; else what keeps plans of its program from theirs. Each with the lines of what it is about.
fn judged<'a>(
    schedule: Schedule,
    lines: &'a Lines,
    plans: &'a [(Plan, Lines)],
    target: &Target,
) -> Vec<(&'a Lines, Violation)> {
    let validated = match validate_schedule(schedule, target) {
        Ok(validated) => validated,
        Err(rejected) => return rejected.violations.into_iter().map(|violation| (lines, violation)).collect(),
    };
    let of_plans = check(plans.iter().map(|(plan, _)| plan.clone()), &validated, target);
    let of_plan = |(lines, violations): (&'a Lines, Vec<Violation>)| violations.into_iter().map(move |of| (lines, of));
    plans.iter().map(|(_, lines)| lines).zip(of_plans).flat_map(of_plan).collect()
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
