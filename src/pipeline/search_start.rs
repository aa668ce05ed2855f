//! Owns what a search of a target starts from: its space, what the corpora know, warm starts from single ops, and the cost model's
//! guess.

use std::collections::BTreeMap;

use crate::candidate::Candidate;
use crate::digest::Digest;
use crate::error::Fault;
use crate::flywheel::{Corpus, Trial};
use crate::lower::LayerOp;
use crate::manifest::{Manifest, SearchKernel};
use crate::schedule::schedule;
use crate::search::prior::Group;
use crate::search::{History, KNOBS, PastTrial, Space, cost, histories, lessons, past_trials};

use super::stages::{BuildContext, graph_alone};

/// What the corpora say, about this campaign and others.
pub(super) struct Known {
    pub groups: Vec<Group>,
    /// Warm starts: what was found for ops of this model alone.
    pub seeds: Vec<Candidate>,
    /// Rows of another space of knobs.
    pub stale: usize,
    /// Trials of this campaign.
    pub past: Vec<PastTrial>,
    /// Rows that could not be read, as text.
    pub broken: Vec<String>,
    /// Row of the incumbent at each position.
    pub incumbent_rows: BTreeMap<u32, Incumbent>,
    pub floor_gap: Option<f64>,
}

/// The latency that a candidate is compared with, at one position.
#[derive(Debug, Clone, Copy)]
pub(super) struct Incumbent {
    pub row: Digest,
    /// Its latency by the default's, chained.
    pub ratio_vs_default: f64,
}

impl Known {
    /// Reads the corpora.
    ///
    /// # Errors
    /// A corpus that cannot be read.
    pub fn read(context: &BuildContext<'_>, campaign: Digest) -> Result<Known, Fault> {
        let corpus = Corpus::known(&context.workspace.trials)?;
        let seeds = seeds_of_ops(context, &corpus.trials);
        let of_campaign = |trial: &Trial| trial.facts().point.campaign == Some(campaign);
        let (own, mut others): (Vec<Trial>, Vec<Trial>) = corpus.trials.into_iter().partition(of_campaign);
        keep_kin(context, &mut others);
        let lessons = lessons(&others);
        let mut known = Known {
            groups: lessons.groups,
            seeds,
            stale: lessons.stale,
            past: vec![],
            broken: corpus.broken.iter().map(ToString::to_string).collect(),
            incumbent_rows: BTreeMap::new(),
            floor_gap: None,
        };
        if let Some(history) = histories(&own).first() {
            if let Some(incumbent) = history.incumbent() {
                let is_default = incumbent.candidate == history.default;
                let incumbents = incumbent.timed.iter().map(|row| {
                    let ratio_vs_default = if is_default { 1.0 } else { row.log_ratio.exp() };
                    (row.timing.position, Incumbent { row: row.id, ratio_vs_default })
                });
                known.incumbent_rows = incumbents.collect();
                known.floor_gap = incumbent.floor_gap();
            }
            known.past = past_trials(history);
        }
        Ok(known)
    }
}

/// Leaves out trials that teach nothing here: a search of one op learns nothing from whole steps, nor the other way round, and a search of one kernel
/// nothing from another one.
pub(super) fn keep_kin(context: &BuildContext<'_>, trials: &mut Vec<Trial>) {
    let (op, kernel) = (context.op.map(LayerOp::name), context.searched().to_string());
    trials.retain(|trial| trial.facts().model.op() == op && trial.facts().model.kernel == kernel);
}

/// The default with the knobs that searches of single ops of this model kept: one candidate for each op, and one with all of them.
pub(super) fn seeds_of_ops(context: &BuildContext<'_>, trials: &[Trial]) -> Vec<Candidate> {
    if context.op.is_some() || context.searched() != SearchKernel::Decode {
        return vec![];
    }
    let default = context.default_candidate();
    let (mut all, mut seeds) = (default.values(), vec![]);
    let histories = histories(trials);
    for op in LayerOp::ALONE {
        let graph = graph_alone(context.graph, op, context.target);
        let last = histories.iter().rfind(|history| {
            history.model.model_graph == graph
                && history.machine.target == context.target.name
                && Space::contains(&history.space)
        });
        let Some(kept) = last.and_then(History::incumbent) else { continue };
        let (kept, mut own) = (kept.candidate.values(), default.values());
        let knobs = KNOBS.iter().enumerate().filter(|(_, knob)| knob.reaches(op, context.target.kind));
        for (at, _) in knobs {
            if let (Some(own), Some(all), Some(kept), Some(default)) =
                (own.get_mut(at), all.get_mut(at), kept.get(at), default.values().get(at))
                && kept != default
            {
                (*own, *all) = (*kept, *kept);
            }
        }
        seeds.push(Candidate::of_values(&own));
    }
    seeds.insert(0, Candidate::of_values(&all));
    seeds
}

/// The space of a context; shared memory beside the ring as schedules have it.
pub(super) fn space_of(context: &BuildContext<'_>) -> Space {
    let Manifest { precision, decode, .. } = context.manifest;
    let graph = &context.imported.graph;
    let default = context.search_default();
    let fixed = |consumer_warps: u32| {
        // The smallest ring that these warps can have, so that all else is what shared memory holds.
        let slot_bytes = consumer_warps * crate::ir::layout::GRANULE_BYTES * 4;
        let smallest = Candidate {
            consumer_warps,
            slot_bytes,
            ring_slots: 2,
            flight_high: 1,
            flight_low: 1,
            flight_free: 0,
            ..default.clone()
        };
        let placed = context.lower(&smallest).and_then(|program| schedule(program, context.target, &smallest));
        placed.map_or(0, |schedule| {
            let smem = &schedule.machine.smem;
            smem.iter()
                .filter(|part| part.kind != crate::ir::schedule::SmemKind::Ring)
                .map(|part| u64::from(part.bytes))
                .sum()
        })
    };
    let space = Space::new(graph, context.target, *precision, decode.context_max, default.clone(), fixed);
    match (context.op, context.searched()) {
        (Some(op), _) => space.of_op(op),
        (None, SearchKernel::Decode) => space,
        (None, SearchKernel::Wave { .. }) => space.of_waves(false),
        (None, SearchKernel::Chunk) => space.of_waves(true),
    }
}

/// The cost model's log ratio by the default, the mean of all timed positions; 0 where the target was not calibrated.
pub(super) fn guess(context: &BuildContext<'_>, default: &Candidate, candidate: &Candidate) -> f64 {
    let positions = &context.manifest.decode.time_positions;
    let logs = positions.iter().filter_map(|&position| {
        Some((predicted_us(context, candidate, position)? / predicted_us(context, default, position)?).ln())
    });
    logs.sum::<f64>() / positions.len().max(1) as f64
}

/// What the cost model expects of a candidate, µs of a step at a position; `None` where it cannot tell.
pub(super) fn predicted_us(context: &BuildContext<'_>, candidate: &Candidate, position: u32) -> Option<f64> {
    // The cost model is one of whole steps of the decode kernel.
    if context.op.is_some() || context.searched() != SearchKernel::Decode {
        return None;
    }
    let BuildContext { manifest, target, imported, .. } = context;
    let measured = manifest.measured(target);
    let predicted = cost::predict(&imported.graph, target, &measured, manifest.precision, candidate, position)?;
    Some(predicted.total_us()).filter(|us| us.is_finite() && *us > 0.0)
}
