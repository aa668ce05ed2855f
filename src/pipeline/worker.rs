//! Owns the parent's side of a child process: a job goes in, an answer comes back before a deadline, or the child is killed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::trial::{Answer, Job};
use crate::error::Fault;

/// Between two looks at whether the user wants to stop.
const LOOK: Duration = Duration::from_millis(50);
/// What of a child's stderr is kept for the row of its trial.
const SAID_BYTES_MAX: usize = 4096;

/// What became of a job.
#[derive(Debug, PartialEq)]
pub enum Done {
    Answer(Answer),
    /// The child died or spoke nonsense; the text says how.
    Died(String),
    Late(Duration),
    Interrupted,
}

/// What became of a line.
pub enum Reply {
    Line(String),
    Died(String),
    Late(Duration),
    Interrupted,
}

/// A child that answers jobs; started when the first job comes, and again after it was lost.
pub struct Worker<'a> {
    command: Box<dyn Fn() -> Command + 'a>,
    running: Option<Running>,
}

struct Running {
    child: Child,
    jobs: ChildStdin,
    answers: Receiver<String>,
    /// The end of what it said to stderr.
    said: Receiver<String>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl<'a> Worker<'a> {
    /// `command` makes the command of a child, which reads jobs from stdin and writes answers to stdout.
    pub fn new(command: impl Fn() -> Command + 'a) -> Worker<'a> {
        Worker { command: Box::new(command), running: None }
    }

    /// A command line, with the words that `sh` makes of it.
    pub fn shell(line: &str) -> Worker<'a> {
        let line = format!("exec {line}");
        Worker::new(move || {
            let mut command = Command::new("sh");
            // In place of the shell, so that ending the child ends the program.
            command.arg("-c").arg(&line);
            command
        })
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
            Reply::Line(line) => line,
            Reply::Died(text) => return Ok(Done::Died(text)),
            Reply::Late(after) => return Ok(Done::Late(after)),
            Reply::Interrupted => return Ok(Done::Interrupted),
        };
        let answer = serde_json::from_str(&line);
        let sound = match &answer {
            Ok(Answer::Timed { .. }) => true,
            Ok(Answer::Failed { verdict, .. }) => verdict == "fail",
            Ok(Answer::Fault { .. }) | Err(_) => false,
        };
        if !sound {
            // Whatever crashed or hung may have taken the context of the process with it.
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
    pub fn exchange(&mut self, text: &str, deadline: Duration, stop: &dyn Fn() -> bool) -> Result<Reply, Fault> {
        let mut running = match self.running.take() {
            Some(running) => running,
            None => self.start()?,
        };
        let started = Instant::now();
        // A child that is gone is noticed at its answer, which says more.
        let _ = writeln!(running.jobs, "{text}").and_then(|()| running.jobs.flush());
        loop {
            if stop() {
                return Ok(Reply::Interrupted);
            }
            let left = deadline.saturating_sub(started.elapsed());
            match running.answers.recv_timeout(LOOK.min(left)) {
                Ok(line) => {
                    self.running = Some(running);
                    return Ok(Reply::Line(line));
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Ok(Reply::Late(deadline)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(Reply::Died(running.obituary())),
            }
        }
    }

    fn start(&self) -> Result<Running, Fault> {
        let mut command = (self.command)();
        // A group of its own: an interrupt of the terminal is for the parent, which decides what becomes of the trial.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        let lost = |what: &str| Fault::internal(format!("the child process has no {what}"));
        let mut child = command.spawn().map_err(|error| {
            Fault::environment(format!("cannot start `{program}`: {error}"))
                .with_remedy("raise the limits of processes and memory of this user")
        })?;
        let jobs = child.stdin.take().ok_or_else(|| lost("stdin"))?;
        let stdout = child.stdout.take().ok_or_else(|| lost("stdout"))?;
        let stderr = child.stderr.take().ok_or_else(|| lost("stderr"))?;
        let (answer, answers) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if answer.send(line).is_err() {
                    return;
                }
            }
        });
        let (say, said) = channel();
        thread::spawn(move || {
            let mut kept = String::new();
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if kept.len() + line.len() < SAID_BYTES_MAX {
                    kept.push_str(line.trim());
                    kept.push(' ');
                }
            }
            let _ = say.send(kept);
        });
        Ok(Running { child, jobs, answers, said })
    }
}

impl Running {
    /// How a child that closed its stdout ended.
    fn obituary(&mut self) -> String {
        let status = self.child.wait();
        let how = match &status {
            Ok(status) => match (status.signal(), status.code()) {
                (Some(signal), _) => format!("was killed by signal {signal}"),
                (None, Some(code)) => format!("ended with exit code {code}"),
                (None, None) => "ended".to_string(),
            },
            Err(error) => format!("is lost: {error}"),
        };
        let said = self.said.recv_timeout(LOOK).unwrap_or_default();
        let said = said.trim();
        format!("the child process {how}{}{said}", if said.is_empty() { "" } else { ": " })
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
            ("read job; kill -SEGV $$", "was killed by signal 11"),
            ("echo no such luck >&2; exit 7", "ended with exit code 7: no such luck"),
            ("read job; echo '{\"answer\":'", "answered `{\"answer\":`"),
            ("read job; echo surprise", "answered `surprise`"),
            ("exec <&-", "ended with exit code 0"),
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
