//! Campaigns over a simulated machine: what is tried, kept and recorded.

use std::collections::BTreeMap;

use monobloc::abba::Round;
use monobloc::candidate::{Candidate, KNOB_NAMES};
use monobloc::digest::Digest;
use monobloc::dtype::{DType, Precision};
use monobloc::flywheel::{ModelShape, Proposer};
use monobloc::model::config::import_config_only;
use monobloc::random::Random;
use monobloc::search::prior::{Prior, Setting};
use monobloc::search::propose::Limits;
use monobloc::search::space::KNOBS;
use monobloc::search::*;
use monobloc::target::Target;

const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

pub fn space() -> Space {
    let config = include_str!("../../manifests/configs/llama-3.2-1b.json");
    let graph = import_config_only(config, 0).expect("a config of the repository").graph;
    let target = Target::builtin("h200").expect("a record");
    let space = Space::new(&graph, &target, BF16, 4096, Candidate::default_for(&graph, &target, BF16), |_| 30_000);
    assert_eq!(space.admits(space.default_candidate()), Ok(()));
    space
}

fn setting() -> Setting {
    let model = ModelShape {
        model_graph: Digest::of(b"model"),
        family: "LlamaForCausalLM".to_string(),
        layers: 16,
        hidden: 2048,
        intermediate: 8192,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        vocab: 128_256,
        parameters: 1,
        weights_dtype: "bf16".to_string(),
        cache_dtype: "bf16".to_string(),
        wire_dtype: "bf16".to_string(),
        kernel: "decode".to_string(),
    };
    Setting::new(&model, "h200", "cuda")
}

/// Latency divided by the default's: a valley whose bottom is some octaves away from the default in a few knobs.
pub fn landscape(candidate: &Candidate, default: &Candidate) -> f64 {
    let moves = monobloc::search::prior::moves(&candidate.values(), &default.values());
    let (mut cost, mut least) = (0.0, 0.0);
    for (at, best) in [(2, -0.4), (3, 0.9), (6, -0.8), (9, 1.0)] {
        cost += 0.05 * (moves[at] - best).powi(2);
        least += 0.05 * f64::powi(best, 2);
    }
    let rest: f64 = [0, 1, 4, 5, 7, 8].iter().map(|&at: &usize| 0.03 * moves[at].powi(2)).sum();
    1.0 + cost + rest - least
}

/// A simulated machine, on which one trial in `one_in` fails in some way.
struct MadeUp {
    default: Candidate,
    random: Random,
    one_in: usize,
    wrong: BTreeMap<String, &'static str>,
    recorded: Vec<(String, bool)>,
    stop_after: usize,
    disk_is_full: bool,
}

impl Arena for MadeUp {
    type Built = ();
    type Evidence = &'static str;
    type Fault = &'static str;

    fn make(&mut self, candidate: &Candidate, _: &[Candidate]) -> Result<BuildOutcome<()>, &'static str> {
        if *candidate != self.default && self.random.below(self.one_in) == 0 {
            return Ok(BuildOutcome::Infeasible("injected".to_string()));
        }
        Ok(BuildOutcome::Ready { artefact: Digest::of(candidate.to_string().as_bytes()), made: () })
    }

    fn run(
        &mut self,
        candidate: &Candidate,
        (): &(),
        incumbent: Option<&Candidate>,
    ) -> Result<RunOutcome<&'static str>, &'static str> {
        if let Some(incumbent) = incumbent {
            assert!(!self.wrong.contains_key(&incumbent.to_string()), "a wrong candidate became the incumbent");
            if *candidate != self.default && self.random.below(self.one_in) == 0 {
                let how = ["wrong result", "hang", "crash", "below the floor"][self.random.below(4)];
                self.wrong.insert(candidate.to_string(), how);
                return Ok(RunOutcome::Failed(how));
            }
        }
        let Some(incumbent) = incumbent else { return Ok(RunOutcome::Timed { rounds: vec![], evidence: "ok" }) };
        let times = [incumbent, candidate].map(|c| landscape(c, &self.default));
        let mut noisy = |us: f64| us * (0.998 + 0.004 * self.random.unit());
        let rounds = (0..7)
            .map(|_| Round { a: [noisy(times[0]), noisy(times[0])], b: [noisy(times[1]), noisy(times[1])] })
            .collect();
        Ok(RunOutcome::Timed { rounds: vec![Rounds { position: 32, rounds }], evidence: "ok" })
    }

    fn record(&mut self, settled: &TrialRecord<'_, (), &'static str>) -> Result<(), &'static str> {
        if self.disk_is_full {
            return Err("disk full");
        }
        let failed = matches!(settled.result, TrialResult::Failed { .. });
        self.recorded.push((settled.candidate.to_string(), failed));
        Ok(())
    }

    fn stop(&mut self) -> Option<Stop> {
        (self.recorded.len() >= self.stop_after).then_some(Stop::Interrupted)
    }

    fn floor_gap(&mut self) -> Option<f64> {
        None
    }
}

fn made_up(space: &Space, seed: u64, one_in: usize) -> MadeUp {
    MadeUp {
        default: space.default_candidate().clone(),
        random: Random::stream(seed, "faults", 0),
        one_in,
        wrong: BTreeMap::new(),
        recorded: vec![],
        stop_after: usize::MAX,
        disk_is_full: false,
    }
}

pub fn search<'s>(space: &'s Space, trials: u32, seed: u64) -> Search<'s> {
    let prior = Prior::new(&[], setting(), space);
    Search::new(space, Limits { plateau: trials, ..Limits::of_budget(trials, seed) }, &[], prior, vec![], &|_| 0.0)
}

fn start() -> Start<'static, &'static str> {
    Start { past: vec![], margin: 0.01, external: None }
}

#[test]
fn sixty_trials_find_the_valley_and_a_seed_decides_them() {
    let space = space();
    let mut found = vec![];
    for seed in 0..8 {
        let run = || {
            let (mut arena, mut search) = (made_up(&space, seed, usize::MAX), search(&space, 60, seed));
            let driven = drive(&mut arena, &mut search, start(), 0).expect("no fault");
            (driven, arena.recorded)
        };
        let (driven, recorded) = run();
        let best = driven.best.clone().expect("measured");
        let ratio = landscape(&best, space.default_candidate());
        assert!(best == *space.default_candidate() || ratio < 0.99, "seed {seed}: {best}, {ratio}");
        found.push(ratio);
        if seed == 0 {
            assert_eq!((driven, recorded), run(), "the same seed asks the same");
        }
    }
    // The bottom is at 0.886; a few seeds come half way, and none ends worse than the default.
    found.sort_by(f64::total_cmp);
    assert!(found[4] < 0.92 && found[7] <= 1.0, "{found:?}");
}

#[test]
fn what_gained_too_little_alone_is_tried_together() {
    let space = space();
    let mut search = search(&space, 60, 3);
    let default = space.default_candidate().clone();
    search.tell(&default, Outcome::Timed { ratio: 1.0, kept: true, deep: None });
    let with = |changes: &str| Candidate::parse(changes, &default).expect("a candidate");
    for (changes, ratio) in
        [("heads_per_task=2", 0.994), ("splits=8", 0.995), ("heads_per_task=4", 0.997), ("hold_qkv=3", 1.01)]
    {
        assert_ne!(search.ask(), try_of(&with("heads_per_task=2;splits=8")), "before {changes}");
        search.tell(&with(changes), Outcome::Timed { ratio, kept: false, deep: None });
        if changes == "splits=8" {
            assert_eq!(search.ask(), try_of(&with("heads_per_task=2;splits=8")), "both, and each the best of its knob");
            search.tell(&with("heads_per_task=2;splits=8"), Outcome::Timed { ratio: 0.989, kept: true, deep: None });
        }
    }
}

fn try_of(candidate: &Candidate) -> Ask {
    Ask::Try { candidate: candidate.clone(), proposer: Proposer::Explore }
}

#[test]
fn of_a_thousand_injected_faults_none_becomes_the_incumbent_and_none_is_lost() {
    let space = space();
    let (mut faults, mut seed) = (0, 0);
    while faults < 1000 {
        let (mut arena, mut search) = (made_up(&space, seed, 2), search(&space, 100, seed));
        let driven = drive(&mut arena, &mut search, start(), 0).expect("no fault of the arena");
        let best = driven.best.expect("the default at least").to_string();
        assert!(!arena.wrong.contains_key(&best));
        for wrong in arena.wrong.keys() {
            assert!(arena.recorded.contains(&(wrong.clone(), true)), "{wrong} is not recorded as failed");
        }
        faults += arena.wrong.len();
        seed += 1;
    }
}

#[test]
fn a_trial_that_cannot_be_recorded_did_not_take_place() {
    let space = space();
    let (mut arena, mut search) = (made_up(&space, 1, usize::MAX), search(&space, 10, 1));
    arena.disk_is_full = true;
    assert_eq!(drive(&mut arena, &mut search, start(), 0), Err("disk full"));
    assert_eq!(search.incumbent(), None);
}

#[test]
fn knobs_are_those_that_a_candidate_prints_and_neighbours_are_legal() {
    let space = space();
    let default = space.default_candidate();
    let names: Vec<String> =
        default.to_string().split(';').map(|pair| pair.split('=').next().unwrap_or_default().to_string()).collect();
    let of_schedules: Vec<&str> = KNOBS.iter().filter(|knob| !knob.is_wave()).map(|knob| knob.name).collect();
    assert_eq!(names, of_schedules, "a candidate without choices of wave kernels prints none");
    assert_eq!(KNOB_NAMES, KNOBS.map(|knob| knob.name));
    let neighbours = space.neighbours(default);
    assert!(neighbours.len() > 10, "{}", neighbours.len());
    for neighbour in neighbours {
        assert_eq!(space.admits(&neighbour), Ok(()), "{neighbour}");
        assert!(Space::distance(&neighbour, default) >= 1);
    }
    assert!(space.knobs().all(|(knob, _)| knob.name != "mechanism"), "kernels have packets alone");
}
