//! Owns `Worker`: the child that serves the trials of a campaign, started when it is needed and again after it was lost.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::line_child::{LineChild, NoAnswer, shell};
use super::rows::Failure;
use super::trial::{Answer, Job};
use crate::error::Fault;

/// What became of a job.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Done {
    Answer(Answer),
    /// The child died or spoke nonsense; the text says how.
    Died(String),
    Late(Duration),
    Interrupted,
}

/// A child that answers jobs; started when the first job comes, and again after it was lost.
pub struct Worker<'a> {
    command: Box<dyn Fn() -> Command + 'a>,
    running: Option<LineChild>,
}

impl<'a> Worker<'a> {
    /// `command` makes the command of a child, which reads jobs from stdin and writes answers to stdout.
    pub fn new(command: impl Fn() -> Command + 'a) -> Worker<'a> {
        Worker { command: Box::new(command), running: None }
    }

    /// A command line that `sh` runs.
    pub fn shell(line: &str) -> Worker<'a> {
        let line = line.to_string();
        Worker::new(move || shell(&line))
    }

    /// Whether the next job finds a child that has answered before.
    pub fn is_warm(&self) -> bool {
        self.running.is_some()
    }

    /// Hands a job over and waits for its answer, `stop` permitting.
    ///
    /// # Errors
    /// A child that cannot be started.
    pub fn run(&mut self, job: &Job, deadline: Duration, stop: &dyn Fn() -> bool) -> Result<Done, Fault> {
        let text = serde_json::to_string(job).map_err(|error| Fault::internal(format!("a job is no JSON: {error}")))?;
        let line = match self.exchange(&text, deadline, stop)? {
            Ok(line) => line,
            Err(NoAnswer::Died(text)) => return Ok(Done::Died(text)),
            Err(NoAnswer::Late(after)) => return Ok(Done::Late(after)),
            Err(NoAnswer::Interrupted) => return Ok(Done::Interrupted),
        };
        let answer = serde_json::from_str(&line);
        let sound = matches!(&answer, Ok(Answer::Timed { .. } | Answer::Failed { failure: Failure::Fail, .. }));
        if !sound {
            // A kernel that crashed or hung may have destroyed the context of the process.
            self.running = None;
        }
        Ok(answer.map_or_else(
            |error| {
                let line: String = line.chars().take(80).collect();
                Done::Died(format!("the child process answered `{line}`: {error}"))
            },
            Done::Answer,
        ))
    }

    /// Hands a line over and waits for the line that answers it. A child that gives none is ended.
    ///
    /// # Errors
    /// As [`Worker::run`].
    pub fn exchange(
        &mut self,
        text: &str,
        deadline: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<Result<String, NoAnswer>, Fault> {
        let mut running = match self.running.take() {
            Some(running) => running,
            None => self.start()?,
        };
        let answer = running.ask(text, deadline, stop);
        if answer.is_ok() {
            self.running = Some(running);
        }
        Ok(answer)
    }

    fn start(&self) -> Result<LineChild, Fault> {
        let mut command = (self.command)();
        command.stderr(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        LineChild::start(command).map_err(|error| {
            Fault::environment(format!("cannot start `{program}`: {error}"))
                .with_remedy("raise the limits of processes and memory of this user")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Job {
        Job { campaign: String::new(), candidate: "sms=1".to_string(), incumbent: None }
    }

    fn shell(script: &'static str) -> Worker<'static> {
        Worker::new(move || {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        })
    }

    const FAILED: &str = r#"{"answer":"failed","verdict":"VERDICT","detail":"x","figures":null,"check_ms":null}"#;

    #[test]
    fn an_answer_comes_back() {
        for (verdict, kept) in [("fail", true), ("crash", false), ("timeout", false)] {
            let mut worker = Worker::new(move || {
                let mut command = Command::new("sh");
                command.args(["-c", &format!("read job; echo '{}'; read more", FAILED.replace("VERDICT", verdict))]);
                command
            });
            let done = worker.run(&job(), Duration::from_secs(60), &|| false).unwrap();
            assert!(matches!(done, Done::Answer(Answer::Failed { .. })), "{done:?}");
            assert_eq!(worker.is_warm(), kept, "{verdict}: a lost context is not used again");
        }
    }

    #[test]
    fn whatever_ends_a_child_is_an_obituary() {
        for (script, expected) in [
            ("exit 7", "ended with exit code 7"),
            ("read job; echo '{\"answer\":'", "answered `{\"answer\":`"),
            ("read job; echo surprise", "answered `surprise`"),
        ] {
            let done = shell(script).run(&job(), Duration::from_secs(60), &|| false).unwrap();
            let Done::Died(text) = done else { panic!("{script}: {done:?}") };
            assert!(text.contains(expected), "{script}: {text}");
        }
    }

    #[test]
    fn a_late_child_is_killed_and_an_interrupt_is_heard() {
        let mut worker = shell("read job; sleep 1000");
        let deadline = Duration::from_millis(100);
        assert_eq!(worker.run(&job(), deadline, &|| false).unwrap(), Done::Late(deadline));
        assert!(!worker.is_warm());
        assert_eq!(worker.run(&job(), Duration::from_secs(60), &|| true).unwrap(), Done::Interrupted);
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let fault = Worker::new(|| Command::new("/no/such/program")).run(&job(), Duration::from_secs(1), &|| false);
        assert!(fault.unwrap_err().message.contains("cannot start `/no/such/program`: "));
    }
}
