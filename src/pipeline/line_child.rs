//! Owns a child process that answers lines: one goes in, one comes back before a deadline, or the child is ended.
//!
//! `worker` speaks it with the child that serves trials and with a program that proposes, `baseline` with a program that is
//! timed beside ours. A question and its answer are one JSON object each; those two decide what they say.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// A line longer than this is no answer.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// Pause between two looks at whether the user wants to stop.
const LOOK: Duration = Duration::from_millis(50);
/// Time for a child to end by itself after it closed its stdout.
const GRACE: Duration = Duration::from_secs(2);
/// How much of a child's stderr is kept for the message about its end.
const SAID_BYTES_MAX: usize = 4096;

/// Process groups of the children that run. An interrupt of the terminal is for this process alone, which ends them.
static GROUPS: Mutex<Vec<Pid>> = Mutex::new(vec![]);

/// Ends all children with the processes that they started, before this process ends without destructors.
pub(crate) fn end_children() {
    let groups = GROUPS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    groups.iter().for_each(|group| end_group(*group));
}

/// A group that has ended already is no fault.
fn end_group(group: Pid) {
    let _ = kill_process_group(group, Signal::KILL);
}

/// A running child, in a process group of its own. It ends with this value, and so do the processes that it started.
pub(super) struct LineChild {
    child: Child,
    /// `None` once it was ended.
    group: Option<Pid>,
    /// `None` once the child was ended.
    questions: Option<ChildStdin>,
    answers: Receiver<String>,
    /// The end of what it said to stderr, where the command pipes that.
    said: Option<Receiver<String>>,
}

/// Why there is no answer.
#[derive(Debug, PartialEq)]
pub(super) enum NoAnswer {
    /// The child ended; the text says how.
    Died(String),
    Late(Duration),
    Interrupted,
}

/// A command line that `sh` runs: any of its syntax, variables and pipes too.
pub(super) fn shell(line: &str) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(line);
    command
}

impl LineChild {
    /// Starts a child. Its stderr goes where `command` says; a pipe is read here, for [`NoAnswer::Died`].
    ///
    /// # Errors
    /// A program that is not there, a limit of processes.
    pub fn start(mut command: Command) -> io::Result<LineChild> {
        let mut groups = GROUPS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut child = command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let group = Some(Pid::from_child(&child));
        groups.extend(group);
        drop(groups);
        let (questions, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (answer, answers) = channel();
        // A thread of its own, because a pipe has no deadline. It ends with the child.
        if let Some(stdout) = stdout {
            thread::spawn(move || {
                let mut reader = BufReader::new(stdout);
                while let Some(line) = next_line(&mut reader) {
                    if answer.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        let said = stderr.map(|stderr| {
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
            said
        });
        Ok(LineChild { child, group, questions, answers, said })
    }

    /// Hands a line over and waits for the line that answers it. A child that gives none is ended: it may answer later, and
    /// that answer would be taken for one to the next question.
    ///
    /// # Errors
    /// A child that died or is late; `stop` said that the user wants to stop.
    pub fn ask(&mut self, question: &str, deadline: Duration, stop: &dyn Fn() -> bool) -> Result<String, NoAnswer> {
        let started = Instant::now();
        // A process that the ended child started may still hold its stdout open, so no end of it can be waited for.
        let Some(questions) = &mut self.questions else { return Err(NoAnswer::Died(self.obituary())) };
        // A child that is gone is noticed at its answer, which may still say why.
        let _ = writeln!(questions, "{question}").and_then(|()| questions.flush());
        let answer = loop {
            if stop() {
                break Err(NoAnswer::Interrupted);
            }
            let left = deadline.saturating_sub(started.elapsed());
            match self.answers.recv_timeout(LOOK.min(left)) {
                Ok(line) => break Ok(line),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => break Err(NoAnswer::Late(deadline)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break Err(NoAnswer::Died(self.obituary())),
            }
        };
        if answer.is_err() {
            self.end();
        }
        answer
    }

    /// How a child that closed its stdout ended.
    fn obituary(&mut self) -> String {
        self.questions = None;
        let started = Instant::now();
        let how = loop {
            match self.child.try_wait() {
                Ok(None) if started.elapsed() >= GRACE => break "closed its output".to_string(),
                Ok(None) => thread::sleep(LOOK / 10),
                Ok(Some(status)) => match (status.signal(), status.code()) {
                    (Some(signal), _) => break format!("was killed by signal {signal}"),
                    (None, Some(code)) => break format!("ended with exit code {code}"),
                    (None, None) => break "ended".to_string(),
                },
                Err(error) => break format!("is lost: {error}"),
            }
        };
        let said = self.said.as_ref().and_then(|said| said.recv_timeout(LOOK).ok()).unwrap_or_default();
        let said = said.trim();
        format!("the child process {how}{}{said}", if said.is_empty() { "" } else { ": " })
    }

    fn end(&mut self) {
        self.questions = None;
        // It has ended by itself, or is ended now; either way it is waited for. Its number is taken until then, so the group is still its own.
        if let Some(group) = self.group.take() {
            end_group(group);
            GROUPS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).retain(|other| *other != group);
        }
        let _ = self.child.wait();
    }
}

impl Drop for LineChild {
    fn drop(&mut self) {
        self.end();
    }
}

/// The next line without its end; `None` at the end of the text, or where it is no text.
fn next_line(reader: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    match reader.by_ref().take(LINE_BYTES_MAX).read_line(&mut line) {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(line.trim_end_matches(['\n', '\r']).to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn child(script: &str) -> LineChild {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stderr(Stdio::piped());
        LineChild::start(command).expect("a shell")
    }

    #[test]
    fn a_child_answers_line_by_line() {
        let mut child = child(r#"while read -r line; do echo "heard $line"; done"#);
        for question in ["one", "two"] {
            assert_eq!(child.ask(question, PATIENCE, &|| false), Ok(format!("heard {question}")));
        }
    }

    #[test]
    fn whatever_ends_a_child_is_an_obituary() {
        for (script, expected) in [
            ("read job; kill -SEGV $$", "the child process was killed by signal 11"),
            ("echo no such luck >&2; exit 7", "the child process ended with exit code 7: no such luck"),
            ("exec <&-", "the child process ended with exit code 0"),
            ("exec >&-; exec sleep 1000", "the child process closed its output"),
        ] {
            let died = NoAnswer::Died(expected.to_string());
            assert_eq!(child(script).ask("job", PATIENCE, &|| false), Err(died), "{script}");
        }
    }

    #[test]
    fn a_command_line_has_all_syntax_of_sh() {
        for line in [
            "ANSWER=yes sh -c 'read q; echo $ANSWER $q'",
            "while read -r q; do echo \"yes $q\"; done",
            "read q && echo yes $q | cat; sleep 1000",
        ] {
            let mut child = LineChild::start(shell(line)).expect("a shell");
            assert_eq!(child.ask("or no", PATIENCE, &|| false), Ok("yes or no".to_string()), "{line}");
        }
    }

    /// What a shell started ends with it, though the shell did not wait for it.
    #[test]
    fn the_whole_group_of_a_child_ends() {
        let mut parent = LineChild::start(shell("sleep 1000 & echo $!; read q; sleep 1000")).expect("a shell");
        let started = parent.ask("begin", PATIENCE, &|| false).expect("the number of a process");
        let runs = || {
            let state = std::fs::read_to_string(format!("/proc/{started}/stat")).unwrap_or_default();
            // A zombie has ended, and waits for somebody to ask.
            state.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with('Z') && !rest.is_empty())
        };
        assert!(runs(), "{started}");
        drop(parent);
        let begun = Instant::now();
        while runs() && begun.elapsed() < PATIENCE {
            thread::sleep(LOOK);
        }
        assert!(!runs(), "{started}");
    }

    #[test]
    fn a_late_child_is_ended_and_an_interrupt_is_heard() {
        let mut late = child("read job; sleep 1000");
        let deadline = Duration::from_millis(100);
        assert_eq!(late.ask("job", deadline, &|| false), Err(NoAnswer::Late(deadline)));
        let ended = NoAnswer::Died("the child process was killed by signal 9".to_string());
        assert_eq!(late.ask("job", PATIENCE, &|| false), Err(ended));
        assert_eq!(child("sleep 1000").ask("job", PATIENCE, &|| true), Err(NoAnswer::Interrupted));
    }
}
