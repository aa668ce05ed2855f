//! Owns `Peer`: another program that is timed beside ours, spoken to over its standard input and output.
//!
//! One JSON object a line in each direction; a program answers every line with one. `docs/bench.md` has the words. The
//! program stays loaded between two answers, so that both sides can take turns on one device: A B B A across processes.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use thiserror::Error;

use crate::error::Fault;

/// A line longer than this is no answer.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// The baseline that comes with monobloc; it runs in whatever `python3` is, so a virtual environment decides.
const TORCH_SCRIPT: &str = include_str!("../../tests/bench/torch_decode.py");

#[derive(Debug, Error)]
pub enum PeerError {
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

impl From<PeerError> for Fault {
    fn from(error: PeerError) -> Fault {
        let remedy = match &error {
            PeerError::Start { .. } => "the baseline `torch` needs `python3`; any other one is a command line",
            PeerError::Late { .. } => "give it longer with `--baseline-timeout`",
            PeerError::Said { .. } => "that is what the baseline itself says; what it printed is above",
            PeerError::Gone { .. } | PeerError::Unclear { .. } => {
                "what it printed is above; `docs/bench.md` says how a baseline answers"
            }
        };
        Fault::environment(format!("baseline {error}")).with_remedy(remedy)
    }
}

/// A running program that can be timed. Ends with this value.
pub(super) struct Peer {
    /// As the user named it.
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    timeout: Duration,
    _script: Option<tempfile::NamedTempFile>,
}

/// What a peer said about itself.
pub(super) struct Opened {
    /// `torch 2.9.0`.
    pub name: String,
    /// Ways in which it can decode, each compared on its own.
    pub variants: Vec<String>,
}

impl Peer {
    /// Starts PyTorch's decode step.
    pub fn torch(uuid: Option<&str>, timeout: Duration) -> Result<Peer, PeerError> {
        let start = |source| PeerError::Start { name: "torch".to_string(), source };
        let mut script = tempfile::Builder::new().prefix("monobloc-").suffix(".py").tempfile().map_err(start)?;
        script.write_all(TORCH_SCRIPT.as_bytes()).map_err(start)?;
        let mut command = Command::new("python3");
        command.arg("-u").arg(script.path());
        let mut peer = Peer::start("torch", command, uuid, timeout)?;
        peer._script = Some(script);
        Ok(peer)
    }

    /// Starts a command line, with the words that `sh` makes of it.
    pub fn command(line: &str, uuid: Option<&str>, timeout: Duration) -> Result<Peer, PeerError> {
        let mut command = Command::new("sh");
        // In place of the shell, so that ending the child ends the program.
        command.arg("-c").arg(format!("exec {line}"));
        Peer::start(line, command, uuid, timeout)
    }

    /// `uuid`: the device that both sides use; the program sees no other.
    fn start(name: &str, mut command: Command, uuid: Option<&str>, timeout: Duration) -> Result<Peer, PeerError> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        if let Some(uuid) = uuid {
            command.env("CUDA_VISIBLE_DEVICES", uuid);
        }
        let name = name.to_string();
        let mut child = command.spawn().map_err(|source| PeerError::Start { name: name.clone(), source })?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (sender, lines) = channel();
        // A thread of its own, because a pipe has no deadline. It ends with the program.
        if let Some(stdout) = stdout {
            thread::spawn(move || {
                let mut reader = BufReader::new(stdout);
                loop {
                    let mut line = String::new();
                    match std::io::Read::take(&mut reader, LINE_BYTES_MAX).read_line(&mut line) {
                        Ok(0) | Err(_) => return,
                        Ok(_) => {
                            if sender.send(line).is_err() {
                                return;
                            }
                        }
                    }
                }
            });
        }
        Ok(Peer { name, child, stdin, lines, timeout, _script: None })
    }

    fn ask(&mut self, question: Value) -> Result<Value, PeerError> {
        let asked = question["do"].as_str().unwrap_or_default().to_string();
        let name = self.name.clone();
        let gone = || PeerError::Gone { name: name.clone(), asked: asked.clone() };
        let stdin = self.stdin.as_mut().ok_or_else(gone)?;
        // A program that does not listen any more may have said why before it ended: its lines tell.
        let _ = writeln!(stdin, "{question}").and_then(|()| stdin.flush());
        let line = match self.lines.recv_timeout(self.timeout) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => return Err(gone()),
            Err(RecvTimeoutError::Timeout) => {
                // It may answer later, and that answer would be taken for one to the next question.
                self.end();
                return Err(PeerError::Late { name, asked, timeout: self.timeout });
            }
        };
        let answer: Value = serde_json::from_str(&line).map_err(|_| self.unclear(&asked, &line, "a JSON object"))?;
        match answer.get("error").and_then(Value::as_str) {
            Some(message) => Err(PeerError::Said { name, message: message.to_string() }),
            None => Ok(answer),
        }
    }

    fn unclear(&self, asked: &str, found: &str, expected: &'static str) -> PeerError {
        let found: String = found.trim().chars().take(200).collect();
        PeerError::Unclear { name: self.name.clone(), asked: asked.to_string(), found, expected }
    }

    /// Tells it the model: the folder's `config.json`, the type of weights, and the largest context.
    pub fn open(&mut self, config: &Path, dtype: &str, context_max: u32) -> Result<Opened, PeerError> {
        let answer = self.ask(json!({ "do": "open", "config": config, "dtype": dtype, "context_max": context_max }))?;
        let name = answer["name"].as_str().map(str::to_string);
        let variants = answer["variants"].as_array().map(|variants| {
            variants.iter().filter_map(|variant| variant.as_str().map(str::to_string)).collect::<Vec<_>>()
        });
        match (name, variants) {
            (Some(name), Some(variants)) if !variants.is_empty() => Ok(Opened { name, variants }),
            _ => Err(self.unclear("open", &answer.to_string(), "`name` and at least one of `variants`")),
        }
    }

    /// Makes it ready to decode the token behind `position` others in the cache.
    pub fn prepare(&mut self, variant: &str, position: u32) -> Result<(), PeerError> {
        self.ask(json!({ "do": "prepare", "variant": variant, "position": position })).map(|_| ())
    }

    /// Lets it decode `steps` tokens; microseconds per step.
    pub fn time(&mut self, steps: u32) -> Result<f64, PeerError> {
        let answer = self.ask(json!({ "do": "time", "steps": steps }))?;
        match answer["us_per_step"].as_f64() {
            Some(us) if us.is_finite() && us > 0.0 => Ok(us),
            _ => Err(self.unclear("time", &answer.to_string(), "a positive `us_per_step`")),
        }
    }

    fn end(&mut self) {
        self.stdin = None;
        // It has ended by itself, or is ended now; either way it is waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.end();
    }
}
