//! Owns `Ahead`: threads that make candidates before a search asks for them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::candidate::Candidate;

use super::made::{Made, Maker};

/// Candidates that are made before the search asks for them.
#[derive(Default)]
pub(super) struct Ahead<'a> {
    queue: Mutex<Queue<'a>>,
    more: Condvar,
}

#[derive(Default)]
struct Queue<'a> {
    waiting: VecDeque<Candidate>,
    /// By knobs: nothing is made twice.
    states: BTreeMap<String, State<'a>>,
    ended: bool,
}

enum State<'a> {
    Making,
    Made(Made<'a>),
    /// Handed out, dropped, or not to be made: the next request builds it, mostly from the cache, and gets its faults.
    Gone,
}

/// A thread that builds a candidate; when it ends, in any way, waiting for it ends.
struct Making<'m, 'a> {
    ahead: &'m Ahead<'a>,
    knobs: String,
    made: Option<Made<'a>>,
}

impl Drop for Making<'_, '_> {
    fn drop(&mut self) {
        let state = self.made.take().map_or(State::Gone, State::Made);
        self.ahead.lock().states.insert(self.knobs.clone(), state);
        self.ahead.more.notify_all();
    }
}

impl<'a> Ahead<'a> {
    /// The candidate, if a thread made it or is making it. `candidates` will probably be asked for next: what was waiting is
    /// dropped, and so is what was made and is not among them.
    pub fn take(&self, candidate: &Candidate, candidates: &[Candidate]) -> Option<Made<'a>> {
        let knobs = candidate.to_string();
        let mut queue = self.lock();
        let next: Vec<String> = candidates.iter().map(ToString::to_string).collect();
        for (at, state) in &mut queue.states {
            if matches!(state, State::Made(_)) && *at != knobs && !next.contains(at) {
                *state = State::Gone;
            }
        }
        let fresh = candidates.iter().zip(&next).filter(|(_, at)| **at != knobs && !queue.states.contains_key(*at));
        queue.waiting = fresh.map(|(candidate, _)| candidate.clone()).collect();
        self.more.notify_all();
        while let Some(State::Making) = queue.states.get(&knobs) {
            queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        match queue.states.insert(knobs, State::Gone) {
            Some(State::Made(made)) => Some(made),
            _ => None,
        }
    }

    /// Ends the threads that make.
    pub fn end(&self) {
        self.lock().ended = true;
        self.more.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue<'a>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes what is waiting until the campaign ends.
    pub fn work(&self, maker: &Maker<'a>) {
        loop {
            let mut queue = self.lock();
            let candidate = loop {
                if queue.ended {
                    return;
                }
                match queue.waiting.pop_front() {
                    Some(candidate) => break candidate,
                    None => queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            let knobs = candidate.to_string();
            queue.states.insert(knobs.clone(), State::Making);
            drop(queue);
            let mut making = Making { ahead: self, knobs, made: None };
            making.made = maker.make(&candidate).ok();
        }
    }
}
