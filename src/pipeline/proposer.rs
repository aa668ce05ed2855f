//! Owns `Proposer`: a program of the user that proposes candidates to a search, one JSON object a line in each direction.

use std::time::Duration;

use serde_json::{Value, json};

use crate::candidate::Candidate;
use crate::error::Fault;
use crate::report::Report;
use crate::search::{Ask, Search};

use super::line_child::NoAnswer;
use super::worker::Worker;

/// A program that proposes may think this long.
const DEADLINE: Duration = Duration::from_secs(600);
/// Most characters of an answer that an error quotes.
const SHOWN_MAX: usize = 120;
/// Most characters of the reason why a candidate is refused.
const REASON_MAX: usize = 400;

/// The beginning of a text of the program, with `…` where it was cut.
fn shortened(text: &str, characters: usize) -> String {
    match text.char_indices().nth(characters) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}

/// A program that proposes candidates: one JSON object a line in each direction.
pub(super) struct Proposer<'a> {
    worker: Worker<'a>,
    line: String,
    stop: &'a dyn Fn() -> bool,
    refused: Option<String>,
}

impl<'a> Proposer<'a> {
    pub fn new(line: &str, stop: &'a dyn Fn() -> bool) -> Proposer<'a> {
        Proposer { worker: Worker::shell(line), line: line.to_string(), stop, refused: None }
    }

    /// Asks for the candidate of the next trial; `None` leaves it to the search.
    ///
    /// # Errors
    /// A program that cannot be started, gives no answer, or one that is no JSON.
    pub fn propose(&mut self, search: &Search<'_>, report: &Report) -> Result<Option<Candidate>, Fault> {
        let Some((incumbent, log)) = search.incumbent() else { return Ok(None) };
        let knobs: Vec<Value> = search
            .space()
            .knobs()
            .map(|(knob, values)| json!({ "name": knob.name, "meaning": knob.meaning, "values": values }))
            .collect();
        let own = match search.ask() {
            Ask::Try { candidate, .. } => Some(candidate.to_string()),
            Ask::Stop(_) => None,
        };
        let question = json!({
            "do": "propose",
            "trial": search.trials() + 1,
            "knobs": knobs,
            "default": search.default_candidate().to_string(),
            "incumbent": incumbent.to_string(),
            "incumbent_ratio": log.exp(),
            "tried": search.tried().map(|(log, candidate)| json!({ "candidate": candidate.to_string(), "ratio": log.exp() })).collect::<Vec<_>>(),
            "search_would_try": own,
            "refused": self.refused.take(),
        });
        let failed = |what: String| {
            Fault::environment(format!("proposer `{}` {what}", self.line))
                .with_remedy("it reads one JSON object a line, and answers `{\"candidate\": \"knob=value;...\"}` or `{\"candidate\": null}`")
        };
        let line = match self.worker.exchange(&question.to_string(), DEADLINE, self.stop)? {
            Ok(line) => line,
            Err(NoAnswer::Interrupted) => return Ok(None),
            Err(NoAnswer::Died(how)) => return Err(failed(format!("gave no answer: {how}"))),
            Err(NoAnswer::Late(after)) => return Err(failed(format!("gave no answer within {} s", after.as_secs()))),
        };
        let shown = shortened(&line, SHOWN_MAX);
        let answer: Value = serde_json::from_str(&line)
            .map_err(|error| failed(format!("answered `{shown}`, expected JSON: {error}")))?;
        let text = match answer.get("candidate") {
            Some(Value::String(text)) => text,
            Some(Value::Null) => return Ok(None),
            _ => return Err(failed(format!("answered `{shown}`, expected the key `candidate` with a text or null"))),
        };
        let proposed = Candidate::parse(text, incumbent)
            .and_then(|c| search.space().admits(&c).map(|()| c).map_err(|reason| reason.to_string()));
        match proposed {
            Ok(candidate) => Ok(Some(candidate)),
            Err(reason) => {
                // A reason quotes the knob that it refuses, so it has a bound of its own.
                let reason = shortened(&reason, REASON_MAX);
                report.note(&format!("proposer: `{}`: {reason}", shortened(text, SHOWN_MAX)));
                self.refused = Some(reason);
                Ok(None)
            }
        }
    }
}
