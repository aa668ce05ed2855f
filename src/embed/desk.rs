//! Owns a thread that takes jobs, and returns their answers.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use crate::error::Fault;

/// A thread that takes jobs in the order in which they are given. It ends when this is dropped and no job is left.
pub struct Desk<J> {
    jobs: Sender<J>,
}

/// The jobs of a desk, as its thread sees them.
pub struct Jobs<J>(Receiver<J>);

impl<J> Jobs<J> {
    /// Does jobs until the desk is dropped.
    pub fn run(self, mut job: impl FnMut(J)) {
        for next in self.0 {
            job(next);
        }
    }
}

impl<J: Send + 'static> Desk<J> {
    /// Starts a thread that runs `body`, which makes its own state and then takes jobs.
    ///
    /// # Errors
    /// A limit on threads.
    pub fn start(name: &str, body: impl FnOnce(Jobs<J>) + Send + 'static) -> Result<Desk<J>, Fault> {
        let (jobs, taken) = channel();
        let started = thread::Builder::new().name(name.to_string()).spawn(move || body(Jobs(taken)));
        match started {
            Ok(_) => Ok(Desk { jobs }),
            Err(error) => Err(Fault::environment(format!("cannot start a thread for `{name}`: {error}"))),
        }
    }

    /// Gives a job. If the thread has panicked, the job is dropped, and its caller gets a fault.
    pub fn give(&self, job: J) {
        let _ = self.jobs.send(job);
    }
}

/// The end of the channel into which a job gives its answer.
pub struct Answer<R>(Sender<Result<R, Fault>>);

impl<R> Answer<R> {
    /// Hands the answer over. A caller that has given up is no fault.
    pub fn give(self, answer: Result<R, Fault>) {
        let _ = self.0.send(answer);
    }
}

/// An answer that arrives later. Dropping it ends the wait, but not the job.
pub struct Waiting<R>(Receiver<Result<R, Fault>>);

impl<R> Waiting<R> {
    pub(super) fn new() -> (Answer<R>, Waiting<R>) {
        let (answer, waiting) = channel();
        (Answer(answer), Waiting(waiting))
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// The fault of the job; a thread that has ended.
    pub fn wait(self) -> Result<R, Fault> {
        self.0.recv().unwrap_or_else(|_| Err(lost()))
    }

    /// Waits for this time; `None`: there is no answer yet.
    pub fn wait_for(&self, time: Duration) -> Option<Result<R, Fault>> {
        match self.0.recv_timeout(time) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(lost())),
        }
    }
}

/// The fault for a thread that ended by a panic. The panic was printed already.
pub(super) fn lost() -> Fault {
    Fault::internal("the thread of the model has ended by a panic").with_remedy("load the model again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Tier;

    #[test]
    fn a_panic_is_answered_with_a_fault_now_and_later() {
        type Job = Box<dyn FnOnce(&mut u32) + Send>;
        let desk: Desk<Job> = Desk::start("counts", |jobs: Jobs<Job>| {
            let mut count = 0;
            jobs.run(|job| job(&mut count));
        })
        .expect("a thread");
        let ask = |job: fn(&mut u32) -> u32| {
            let (answer, waiting) = Waiting::new();
            desk.give(Box::new(move |count: &mut u32| answer.give(Ok(job(count)))));
            waiting.wait()
        };
        let add = |count: &mut u32| {
            *count += 1;
            *count
        };
        assert_eq!((ask(add), ask(add)), (Ok(1), Ok(2)));
        for _ in 0..2 {
            let fault = ask(|_| panic!("a test of a panic")).expect_err("it panicked");
            assert!(fault.tier == Tier::Internal && fault.message.contains("panic"), "{fault}");
        }
    }
}
