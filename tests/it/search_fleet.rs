//! Searches on many simulated workers: what is kept and recorded, how soon the best is found, and what the coordinator costs.

use std::collections::BTreeMap;
use std::path::Path;

use monobloc::abba::Round;
use monobloc::candidate::Candidate;
use monobloc::digest::Digest;
use monobloc::flywheel::Corpus;
use monobloc::random::Random;
use monobloc::search::fleet::Answered;
use monobloc::search::*;
use rustix::time::{ClockId, clock_gettime};

use crate::search_drive::{landscape, search, space};

/// A candidate on its way.
struct Running {
    ticket: u64,
    /// When its worker answers, seconds.
    end: f64,
    candidate: Candidate,
    incumbent: Option<Candidate>,
}

/// Workers of one kind of device; a trial takes as long as one of the corpus.
struct Simulated {
    default: Candidate,
    random: Random,
    seconds: Vec<f64>,
    clock: f64,
    free: usize,
    running: Vec<Running>,
    /// One in so many trials loses its worker, which another one replaces.
    lost_one_in: usize,
    lost: usize,
    /// The incumbent, and the number of the trial that made it one.
    kept: (Option<Candidate>, u32),
    recorded: Vec<(u32, String)>,
    /// Time and true ratio of each incumbent.
    found: Vec<(f64, f64)>,
    stop_after: usize,
}

impl Simulated {
    fn new(space: &Space, seconds: &[f64], workers: usize, lost_one_in: usize, seed: u64) -> Simulated {
        Simulated {
            default: space.default_candidate().clone(),
            random: Random::stream(seed, "fleet", workers as u64),
            seconds: seconds.to_vec(),
            clock: 0.0,
            free: workers,
            running: vec![],
            lost_one_in,
            lost: 0,
            kept: (None, 0),
            recorded: vec![],
            found: vec![],
            stop_after: usize::MAX,
        }
    }

    /// When the incumbent first took no more than `ratio` of the default's time.
    fn time_to(&self, ratio: f64) -> f64 {
        self.found.iter().find(|(_, found)| *found <= ratio).map_or(f64::INFINITY, |(time, _)| *time)
    }
}

impl Fleet for Simulated {
    type Built = ();
    type Evidence = Option<Candidate>;
    type Against = (Option<Candidate>, u32);
    type Fault = &'static str;

    fn make(&mut self, candidate: &Candidate) -> Result<BuildOutcome<()>, &'static str> {
        Ok(BuildOutcome::Ready { artefact: Digest::of(candidate.to_string().as_bytes()), made: () })
    }

    fn free(&mut self) -> Result<usize, &'static str> {
        Ok(self.free)
    }

    fn send(&mut self, ticket: u64, candidate: &Candidate, incumbent: Option<&Candidate>) -> Result<(), &'static str> {
        self.free -= 1;
        let seconds = self.seconds[self.random.below(self.seconds.len())];
        let (candidate, incumbent) = (candidate.clone(), incumbent.cloned());
        assert!(self.running.iter().all(|running| running.candidate != candidate), "{candidate} runs twice");
        self.running.push(Running { ticket, end: self.clock + seconds, candidate, incumbent });
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Answered<Option<Candidate>>>, &'static str> {
        let first = self.running.iter().enumerate().min_by(|a, b| a.1.end.total_cmp(&b.1.end));
        let Some((at, _)) = first else { return Ok(None) };
        let Running { ticket, end, candidate, incumbent } = self.running.swap_remove(at);
        self.clock = end;
        self.free += 1;
        if self.random.below(self.lost_one_in) == 0 {
            self.lost += 1;
            return Ok(Some((ticket, RunOutcome::Interrupted)));
        }
        let times = [incumbent.as_ref().unwrap_or(&self.default), &candidate].map(|c| landscape(c, &self.default));
        let mut noisy = |us: f64| us * (0.998 + 0.004 * self.random.unit());
        let rounds = (0..7)
            .map(|_| Round { a: [noisy(times[0]), noisy(times[0])], b: [noisy(times[1]), noisy(times[1])] })
            .collect();
        let rounds = vec![Rounds { position: 32, rounds }];
        Ok(Some((ticket, RunOutcome::Timed { rounds, evidence: incumbent })))
    }

    fn against(&self) -> (Option<Candidate>, u32) {
        self.kept.clone()
    }

    fn record(
        &mut self,
        record: &TrialRecord<'_, (), Option<Candidate>>,
        against: &(Option<Candidate>, u32),
    ) -> Result<(), &'static str> {
        let number = record.number.expect("every candidate fits");
        self.recorded.push((number, record.candidate.to_string()));
        let (evidence, kept) = match record.result {
            TrialResult::First { evidence, .. } => (evidence, true),
            TrialResult::Judged { evidence, judged, .. } => (evidence, judged.decision.is_kept()),
            _ => panic!("every candidate is timed"),
        };
        assert_eq!(*evidence, against.0, "a row names what its candidate took turns with");
        if kept {
            assert!(self.kept == *against, "only what was faster than the incumbent of now is kept");
            self.kept = (Some(record.candidate.clone()), number);
            self.found.push((self.clock, landscape(record.candidate, &self.default)));
        }
        Ok(())
    }

    fn stop(&mut self) -> Option<Stop> {
        (self.recorded.len() >= self.stop_after).then_some(Stop::Interrupted)
    }

    fn floor_gap(&mut self) -> Option<f64> {
        None
    }
}

fn start() -> Start<'static, &'static str> {
    Start { past: vec![], margin: 0.01, external: None }
}

/// Seconds of the trials on H200s that come with monobloc.
fn seconds() -> Vec<f64> {
    let corpus = Corpus::known(Path::new("no-such-folder/trials.csv")).expect("the shipped corpus");
    let costs = corpus.trials.iter().map(|trial| &trial.facts().cost);
    let all = costs.filter_map(|cost| Some((cost.compile_ms.unwrap_or(0.0) + cost.check_ms? + cost.measure_ms?) / 1e3));
    let all: Vec<f64> = all.filter(|seconds| *seconds > 0.0).collect();
    assert!(all.len() > 1000, "{}", all.len());
    all
}

/// Processor time of this thread, ms.
fn processor_ms() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}

#[test]
fn many_workers_find_the_best_sooner() {
    let (space, seconds) = (space(), seconds());
    let mut times: BTreeMap<usize, f64> = BTreeMap::new();
    let mut table = vec![];
    for workers in [1, 8, 50, 200] {
        let (mut hours, mut cost, mut ratios) = (0.0, 0.0, 0.0);
        let seeds = 4;
        for seed in 0..seeds {
            let mut fleet = Simulated::new(&space, &seconds, workers, 20, seed);
            let mut search = search(&space, 300, seed);
            let begun = processor_ms();
            let driven = drive_fleet(&mut fleet, &mut search, start()).expect("no fault");
            cost += (processor_ms() - begun) / f64::from(driven.ran);
            // The default, 300 trials and the closing duel, each once.
            let mut numbers: Vec<u32> = fleet.recorded.iter().map(|(number, _)| *number).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, (0..302).collect::<Vec<_>>());
            assert!(fleet.lost > 5, "{}", fleet.lost);
            let best = driven.best.expect("measured");
            ratios += landscape(&best, space.default_candidate());
            hours += fleet.time_to(0.95);
        }
        let [hours, cost, ratio] = [hours, cost, ratios].map(|sum| sum / seeds as f64);
        table.push(format!(
            "{workers} workers: {hours:.0} s to 0.95 of the default's time, best {ratio:.3}, {cost:.2} ms a trial"
        ));
        times.insert(workers, hours);
        assert!(ratio < 0.95, "{table:?}");
        // The bar of an optimised build is 5 ms.
        assert!(cost < 25.0, "{table:?}");
    }
    eprintln!("{}", table.join("\n"));
    assert!(times[&8] < times[&1] / 2.0 && times[&50] < times[&8] && times[&200] <= times[&50] * 1.5, "{table:?}");
}

#[test]
fn an_interrupted_fleet_records_what_it_knows() {
    let (space, seconds) = (space(), seconds());
    let mut fleet = Simulated { stop_after: 20, ..Simulated::new(&space, &seconds, 8, usize::MAX, 1) };
    let mut search = search(&space, 300, 1);
    let driven = drive_fleet(&mut fleet, &mut search, start()).expect("no fault");
    assert_eq!((driven.stop, fleet.recorded.len()), (Stop::Interrupted, 20));
    assert_eq!(search.trials(), 19);
}
