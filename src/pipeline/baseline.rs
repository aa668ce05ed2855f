//! Owns `BaselineProgram`: another program that is timed beside ours, spoken to over its standard input and output.
//!
//! One JSON object a line in each direction; a program answers every line with one. `docs/bench.md` has the words. The
//! program stays loaded between two answers, so that both sides can take turns on one device: A B B A across processes.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use thiserror::Error;

use super::line_child::{LineChild, NoAnswer, shell};
use crate::error::Fault;

/// The baseline that comes with monobloc. It runs in the `python3` of the environment.
const TORCH_SCRIPT: &str = include_str!("torch_decode.py");

#[derive(Debug, Error)]
pub enum BaselineError {
    #[error("`{name}` could not be started: {source}")]
    Start { name: String, source: std::io::Error },
    #[error("`{name}` ended without an answer to `{asked}`")]
    Gone { name: String, asked: String },
    #[error("`{name}` did not answer `{asked}` within {} s", .timeout.as_secs())]
    Late { name: String, asked: String, timeout: Duration },
    #[error("`{name}` answered `{asked}` with `{found}`, expected {expected}")]
    Unclear { name: String, asked: String, found: String, expected: &'static str },
    #[error("`{name}`: {message}")]
    Said { name: String, message: String },
}

impl From<BaselineError> for Fault {
    fn from(error: BaselineError) -> Fault {
        let remedy = match &error {
            BaselineError::Start { .. } => "the baseline `torch` needs `python3`; any other one is a command line",
            BaselineError::Late { .. } => "give it longer with `--baseline-timeout`",
            BaselineError::Said { .. } => "that is what the baseline itself says; what it printed is above",
            BaselineError::Gone { .. } | BaselineError::Unclear { .. } => {
                "what it printed is above; `docs/bench.md` says how a baseline answers"
            }
        };
        Fault::environment(format!("baseline {error}")).with_remedy(remedy)
    }
}

/// A running program that can be timed. Ends with this value.
pub(super) struct BaselineProgram {
    /// As the user named it.
    name: String,
    child: LineChild,
    timeout: Duration,
    _script: Option<tempfile::NamedTempFile>,
}

/// What both sides do in turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Decode the token after `position` others in the cache, of `rows` sequences at a time.
    Step { rows: u32, position: u32 },
    /// Read a prompt of this many tokens into an empty cache, up to the logits after the last one.
    Prompt { tokens: u32 },
}

impl std::fmt::Display for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Work::Step { rows: 1, position } => write!(f, "position {position}"),
            Work::Step { rows, position } => write!(f, "{rows} rows at position {position}"),
            Work::Prompt { tokens } => write!(f, "a prompt of {tokens} tokens"),
        }
    }
}

/// What a baseline said about itself.
pub(super) struct Opened {
    /// `torch 2.9.0`.
    pub name: String,
    /// Ways in which it can decode, each compared on its own.
    pub variants: Vec<String>,
}

impl BaselineProgram {
    /// Starts PyTorch's decode step.
    pub fn torch(uuid: Option<&str>, timeout: Duration) -> Result<BaselineProgram, BaselineError> {
        let start = |source| BaselineError::Start { name: "torch".to_string(), source };
        let mut script = tempfile::Builder::new().prefix("monobloc-").suffix(".py").tempfile().map_err(start)?;
        script.write_all(TORCH_SCRIPT.as_bytes()).map_err(start)?;
        let mut command = Command::new("python3");
        command.arg("-u").arg(script.path());
        let mut baseline = BaselineProgram::start("torch", command, uuid, timeout)?;
        baseline._script = Some(script);
        Ok(baseline)
    }

    /// Starts a command line that `sh` runs.
    pub fn command(line: &str, uuid: Option<&str>, timeout: Duration) -> Result<BaselineProgram, BaselineError> {
        BaselineProgram::start(line, shell(line), uuid, timeout)
    }

    /// `uuid`: the device that both sides use; the program sees no other. What it says to stderr is for the user.
    fn start(
        name: &str,
        mut command: Command,
        uuid: Option<&str>,
        timeout: Duration,
    ) -> Result<BaselineProgram, BaselineError> {
        if let Some(uuid) = uuid {
            command.env("CUDA_VISIBLE_DEVICES", uuid);
        }
        let name = name.to_string();
        let child = LineChild::start(command).map_err(|source| BaselineError::Start { name: name.clone(), source })?;
        Ok(BaselineProgram { name, child, timeout, _script: None })
    }

    fn ask(&mut self, question: Value) -> Result<Value, BaselineError> {
        let asked = question["do"].as_str().unwrap_or_default().to_string();
        let name = self.name.clone();
        let line = match self.child.ask(&question.to_string(), self.timeout, &|| false) {
            Ok(line) => line,
            Err(NoAnswer::Late(timeout)) => return Err(BaselineError::Late { name, asked, timeout }),
            Err(NoAnswer::Died(_) | NoAnswer::Interrupted) => return Err(BaselineError::Gone { name, asked }),
        };
        let answer: Value = serde_json::from_str(&line).map_err(|_| self.unclear(&asked, &line, "a JSON object"))?;
        match answer.get("error").and_then(Value::as_str) {
            Some(message) => Err(BaselineError::Said { name, message: message.to_string() }),
            None => Ok(answer),
        }
    }

    fn unclear(&self, asked: &str, found: &str, expected: &'static str) -> BaselineError {
        let found: String = found.trim().chars().take(200).collect();
        BaselineError::Unclear { name: self.name.clone(), asked: asked.to_string(), found, expected }
    }

    /// Tells it the model: the folder's `config.json`, the type of weights, the format of experts if they have one of their own, and the
    /// largest context.
    pub fn open(
        &mut self,
        config: &Path,
        dtype: &str,
        experts: Option<&str>,
        context_max: u32,
    ) -> Result<Opened, BaselineError> {
        let mut question = json!({ "do": "open", "config": config, "dtype": dtype, "context_max": context_max });
        if let Some(experts) = experts {
            question["experts"] = experts.into();
        }
        let answer = self.ask(question)?;
        let name = answer["name"].as_str().map(str::to_string);
        let variants = answer["variants"].as_array().map(|variants| {
            variants.iter().filter_map(|variant| variant.as_str().map(str::to_string)).collect::<Vec<_>>()
        });
        match (name, variants) {
            (Some(name), Some(variants)) if !variants.is_empty() => Ok(Opened { name, variants }),
            _ => Err(self.unclear("open", &answer.to_string(), "`name` and at least one of `variants`")),
        }
    }

    /// Makes it ready to do `work`.
    pub fn prepare(&mut self, variant: &str, work: Work) -> Result<(), BaselineError> {
        let question = match work {
            Work::Step { rows: 1, position } => json!({ "do": "prepare", "variant": variant, "position": position }),
            Work::Step { rows, position } => {
                json!({ "do": "prepare", "variant": variant, "position": position, "rows": rows })
            }
            Work::Prompt { tokens } => json!({ "do": "prepare", "variant": variant, "prompt": tokens }),
        };
        self.ask(question).map(|_| ())
    }

    /// Lets it do `steps` of what it is ready for; microseconds of one.
    pub fn time(&mut self, steps: u32) -> Result<f64, BaselineError> {
        let answer = self.ask(json!({ "do": "time", "steps": steps }))?;
        match answer["us_per_step"].as_f64() {
            Some(us) if us.is_finite() && us > 0.0 => Ok(us),
            _ => Err(self.unclear("time", &answer.to_string(), "a positive `us_per_step`")),
        }
    }
}
