//! Owns the loop of a campaign on many workers: ask for as many candidates as workers are free, judge what comes back, record, tell.
//!
//! A worker times a candidate in turns with the incumbent of the moment in which it got the candidate. Results come back in any order. If
//! another candidate was kept meanwhile, a result cannot be kept: one that may be faster than the new incumbent runs again, in turns with
//! that; all others are recorded as reverted, with the incumbent that they were timed against. So each row compares two candidates of one
//! process on one device, as in [`drive`](super::drive).

use std::collections::{BTreeMap, VecDeque};

use crate::candidate::Candidate;
use crate::digest::Digest;
use crate::flywheel::{Decision, Proposer};

use super::drive::{BuildOutcome, Driven, Resumed, RunOutcome, Start, TrialRecord, TrialResult, asked, replay};
use super::judge::{Judged, Rounds, judge, judge_default};
use super::propose::{Ask, Outcome, Search, Stop};
use super::space::Space;

/// What became of a candidate, with the ticket under which it was sent.
pub type Answered<E> = (u64, RunOutcome<E>);

/// Builds candidates, and has workers that check and time them.
pub trait Fleet {
    /// A candidate that was built.
    type Built;
    /// What is recorded about a trial, besides its times.
    type Evidence;
    /// Names the rows of an incumbent.
    type Against: Clone;
    type Fault;

    /// Lowers, places and proves.
    ///
    /// # Errors
    /// Faults that end the campaign.
    fn make(&mut self, candidate: &Candidate) -> Result<BuildOutcome<Self::Built>, Self::Fault>;

    /// Workers that wait for a candidate.
    ///
    /// # Errors
    /// As [`Fleet::make`]: no worker is left, and none will come.
    fn free(&mut self) -> Result<usize, Self::Fault>;

    /// Gives a free worker a candidate, and what it takes turns with.
    ///
    /// # Errors
    /// As [`Fleet::make`].
    fn send(&mut self, ticket: u64, candidate: &Candidate, incumbent: Option<&Candidate>) -> Result<(), Self::Fault>;

    /// The next result, after a short wait at most. `Interrupted`: its worker was lost, and the candidate is to be sent again.
    ///
    /// # Errors
    /// As [`Fleet::make`].
    fn next(&mut self) -> Result<Option<Answered<Self::Evidence>>, Self::Fault>;

    /// The rows of the incumbent now.
    fn against(&self) -> Self::Against;

    /// Records a result before the search acts on it. `against`: the rows of what it was timed against.
    ///
    /// # Errors
    /// As [`Fleet::make`]: a trial that cannot be recorded did not take place.
    fn record(
        &mut self,
        record: &TrialRecord<'_, Self::Built, Self::Evidence>,
        against: &Self::Against,
    ) -> Result<(), Self::Fault>;

    /// As of [`super::Arena`].
    fn stop(&mut self) -> Option<Stop>;

    /// As of [`super::Arena`].
    fn floor_gap(&mut self) -> Option<f64>;
}

/// A candidate that a worker has, or that waits for one.
struct Sent<T, A> {
    candidate: Candidate,
    proposer: Proposer,
    made: T,
    against: Against<A>,
}

/// The incumbent that a candidate is timed against.
struct Against<A> {
    /// With its log ratio to the default; `None` for the default, which runs first.
    incumbent: Option<(Candidate, f64)>,
    rows: A,
}

impl<A> Against<A> {
    fn now<F: Fleet<Against = A>>(fleet: &F, search: &Search<'_>) -> Against<A> {
        Against { incumbent: search.incumbent().cloned(), rows: fleet.against() }
    }

    fn candidate(&self) -> Option<&Candidate> {
        self.incumbent.as_ref().map(|(candidate, _)| candidate)
    }
}

/// A campaign on workers.
struct Campaign<'c, 's, 'p, F: Fleet> {
    fleet: &'c mut F,
    search: &'c mut Search<'s>,
    start: Start<'p, F::Fault>,
    /// Number of the next trial that is recorded.
    number: u32,
    artefacts: BTreeMap<Digest, Candidate>,
    driven: Driven,
    tickets: u64,
    /// What workers have, by ticket.
    running: BTreeMap<u64, Sent<F::Built, F::Against>>,
    /// Sent before anything new.
    again: VecDeque<Sent<F::Built, F::Against>>,
}

/// Runs a campaign on many workers to its end, from where `start.past` left it. At the end the default is timed in turns with the best.
///
/// # Errors
/// The first fault of the fleet. What was recorded before stays recorded.
pub fn drive_fleet<F: Fleet>(
    fleet: &mut F,
    search: &mut Search<'_>,
    start: Start<'_, F::Fault>,
) -> Result<Driven, F::Fault> {
    let Resumed { number, artefacts, compared } = replay(search, &start.past);
    let driven = Driven { best: None, stop: Stop::Interrupted, ran: 0, duplicates: vec![] };
    let (running, again) = (BTreeMap::new(), VecDeque::new());
    let mut campaign = Campaign { fleet, search, start, number, artefacts, driven, tickets: 0, running, again };
    campaign.run()?;
    campaign.close(compared)?;
    campaign.driven.best = campaign.search.incumbent().map(|(candidate, _)| candidate.clone());
    Ok(campaign.driven)
}

impl<F: Fleet> Campaign<'_, '_, '_, F> {
    fn run(&mut self) -> Result<(), F::Fault> {
        loop {
            let stop = self.fleet.stop();
            if stop == Some(Stop::Interrupted) {
                // What runs has no row, and is tried again by the next run.
                return Ok(());
            }
            let gap = self.fleet.floor_gap();
            self.search.tell_floor(gap);
            let end = match stop {
                Some(stop) => {
                    self.resend()?;
                    Some(stop)
                }
                None => self.hand_out()?,
            };
            if let Some(stop) = end
                && self.running.is_empty()
                && self.again.is_empty()
            {
                self.driven.stop = stop;
                return Ok(());
            }
            if let Some((ticket, outcome)) = self.fleet.next()?
                && let Some(sent) = self.running.remove(&ticket)
            {
                self.settle(sent, outcome)?;
            }
        }
    }

    fn resend(&mut self) -> Result<(), F::Fault> {
        while self.fleet.free()? > 0
            && let Some(sent) = self.again.pop_front()
        {
            self.send(sent)?;
        }
        Ok(())
    }

    /// Gives candidates to free workers; why the search stops, once nothing that runs can change that.
    fn hand_out(&mut self) -> Result<Option<Stop>, F::Fault> {
        self.resend()?;
        while self.fleet.free()? > 0 {
            // Before the default was timed there is nothing to compare with.
            if self.search.incumbent().is_none() && !self.running.is_empty() {
                return Ok(None);
            }
            let (candidate, proposer) = match asked(self.search, &mut self.start.external)? {
                // What still runs may open it again.
                Ask::Stop(stop) => return Ok(self.running.is_empty().then_some(stop)),
                Ask::Try { candidate, proposer } => (candidate, proposer),
            };
            let (artefact, made) = match self.fleet.make(&candidate)? {
                BuildOutcome::Ready { artefact, made } => (artefact, made),
                BuildOutcome::Infeasible(reason) => {
                    let result = TrialResult::Infeasible(&reason);
                    let record = TrialRecord { number: None, candidate: &candidate, proposer, result };
                    let rows = self.fleet.against();
                    self.fleet.record(&record, &rows)?;
                    self.search.tell(&candidate, Outcome::Infeasible);
                    continue;
                }
            };
            if let Some(other) = self.artefacts.get(&artefact) {
                self.driven.duplicates.push((candidate.clone(), other.clone()));
                self.search.tell(&candidate, Outcome::Duplicate);
                continue;
            }
            self.artefacts.insert(artefact, candidate.clone());
            self.search.reserve(&candidate);
            let against = Against::now(self.fleet, self.search);
            self.send(Sent { candidate, proposer, made, against })?;
        }
        Ok(None)
    }

    fn send(&mut self, sent: Sent<F::Built, F::Against>) -> Result<(), F::Fault> {
        self.tickets += 1;
        self.fleet.send(self.tickets, &sent.candidate, sent.against.candidate())?;
        self.running.insert(self.tickets, sent);
        Ok(())
    }

    /// Judges and records a result, or sends the candidate again.
    fn settle(&mut self, sent: Sent<F::Built, F::Against>, outcome: RunOutcome<F::Evidence>) -> Result<(), F::Fault> {
        let Sent { candidate, proposer, made, against } = &sent;
        let record = |result| TrialRecord { number: Some(self.number), candidate, proposer: *proposer, result };
        let told = match outcome {
            RunOutcome::Interrupted => {
                self.again.push_front(sent);
                return Ok(());
            }
            RunOutcome::Failed(evidence) => {
                self.fleet.record(&record(TrialResult::Failed { made, evidence: &evidence }), &against.rows)?;
                Outcome::Failed
            }
            RunOutcome::Timed { evidence, .. } if against.incumbent.is_none() => {
                self.fleet.record(&record(TrialResult::First { made, evidence: &evidence }), &against.rows)?;
                Outcome::Timed { ratio: 1.0, kept: true, deep: None }
            }
            RunOutcome::Timed { rounds, evidence } => {
                let Some((judged, told)) = self.judged(&sent, &rounds) else {
                    let against = Against::now(self.fleet, self.search);
                    self.again.push_back(Sent { against, ..sent });
                    return Ok(());
                };
                let result = TrialResult::Judged { made, evidence: &evidence, judged: &judged };
                self.fleet.record(&record(result), &against.rows)?;
                told
            }
        };
        self.search.tell(&sent.candidate, told);
        self.number += 1;
        self.driven.ran += 1;
        Ok(())
    }

    /// The decision about a candidate, and what the search learns of it. `None`: it may be faster than an incumbent that it was not timed
    /// against.
    fn judged(&self, sent: &Sent<F::Built, F::Against>, rounds: &[Rounds]) -> Option<(Judged, Outcome)> {
        let (then, now) = (sent.against.incumbent.as_ref()?, self.search.incumbent()?);
        let is_stale = then.0 != now.0;
        let default = self.search.default_candidate();
        let from_default = |candidate: &Candidate| Space::distance(candidate, default);
        let simpler = !is_stale && from_default(&sent.candidate) < from_default(&then.0);
        let mut judged = judge(rounds, self.start.margin, simpler);
        let Some(overall) = &judged.overall else { return Some((judged, Outcome::Failed)) };
        if !is_stale {
            let kept = judged.decision != Decision::Reverted;
            let told = Outcome::Timed { ratio: overall.ratio, kept, deep: judged.deep() };
            return Some((judged, told));
        }
        // Log ratio to the incumbent of now, by what both are to the default.
        let log = then.1 + overall.ratio.ln() - now.1;
        if judged.decision == Decision::Faster && log < 0.0 {
            return None;
        }
        judged.decision = Decision::Reverted;
        Some((judged, Outcome::Timed { ratio: log.exp(), kept: false, deep: None }))
    }

    /// Times the default in turns with the best candidate, which stays only if it is certainly faster.
    fn close(&mut self, compared: Option<u32>) -> Result<(), F::Fault> {
        let default = self.search.default_candidate().clone();
        let best = self.search.incumbent().map(|(candidate, _)| candidate.clone());
        let Some(best) = best.filter(|best| *best != default) else { return Ok(()) };
        if self.driven.stop == Stop::Interrupted || compared.is_some_and(|at| at + 1 >= self.number) {
            return Ok(());
        }
        let BuildOutcome::Ready { made, .. } = self.fleet.make(&default)? else { return Ok(()) };
        let rows = self.fleet.against();
        let mut ticket = None;
        let outcome = loop {
            if self.fleet.stop() == Some(Stop::Interrupted) {
                return Ok(());
            }
            if ticket.is_none() && self.fleet.free()? > 0 {
                self.tickets += 1;
                self.fleet.send(self.tickets, &default, Some(&best))?;
                ticket = Some(self.tickets);
            }
            match self.fleet.next()? {
                Some((of, outcome)) if ticket == Some(of) => match outcome {
                    RunOutcome::Interrupted => ticket = None,
                    outcome => break outcome,
                },
                _ => {}
            }
        };
        let record = |result| TrialRecord {
            number: Some(self.number),
            candidate: &default,
            proposer: Proposer::Default,
            result,
        };
        match outcome {
            RunOutcome::Interrupted => return Ok(()),
            RunOutcome::Failed(evidence) => {
                self.fleet.record(&record(TrialResult::Failed { made: &made, evidence: &evidence }), &rows)?;
                self.search.settle(&default, Outcome::Failed);
            }
            RunOutcome::Timed { rounds, evidence } => {
                let judged = judge_default(&rounds, self.start.margin);
                let result = TrialResult::Judged { made: &made, evidence: &evidence, judged: &judged };
                self.fleet.record(&record(result), &rows)?;
                let kept = judged.decision.is_kept();
                let ratio = judged.overall.as_ref().map_or(1.0, |overall| overall.ratio);
                self.search.settle(&default, Outcome::Timed { ratio, kept, deep: None });
            }
        }
        self.driven.ran += 1;
        Ok(())
    }
}
