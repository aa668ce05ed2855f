//! Owns what is known of a manifest's campaigns without running one: their histories, and what the next trial would be.

use crate::candidate::Candidate;
use crate::error::Fault;
use crate::flywheel::{Corpus, Trial};
use crate::manifest::Manifest;
use crate::search::prior::{Opinion, Ranked, ranked};
use crate::search::{Ask, History, Limits, Prior, Search, Setting, cost, histories, lessons, past_trials, replay};
use crate::target::{Target, TargetKind};

use super::chain::Host;
use super::rows::shape;
use super::search_start::{guess, keep_kin, predicted_us, seeds_of_ops, space_of};
use super::stages::BuildContext;
use super::trace::Asked;
use super::{Prepared, Workspace, import_stage, prepare};

/// Steps of the launch that is traced to find the hottest region.
const TRACED_STEPS: u32 = 4;

/// Campaigns of one model on one target, the latest last.
pub struct Known {
    pub histories: Vec<History>,
    /// What a build takes now.
    pub built: Candidate,
    pub default: Candidate,
    /// Campaigns of the same graph on the same target that were of another context or precision.
    pub elsewhere: usize,
    /// Rows that could not be read, as text.
    pub broken: Vec<String>,
    /// All trials that were read, of any model.
    trials: Vec<Trial>,
}

/// Reads what the corpora say of this manifest's model on a target, on whatever hardware it ran.
///
/// # Errors
/// Faults of the import; a corpus that cannot be read.
pub fn known(workspace: &Workspace, manifest: &Manifest, target: &Target) -> Result<Known, Fault> {
    let model = import_stage(workspace, manifest)?;
    let context = BuildContext::new(workspace, manifest, target, &model)?;
    let corpus = Corpus::known(&workspace.trials)?;
    let own = shape(&context, &model.imported.graph, context.searched());
    let mut histories = histories(&corpus.trials);
    histories.retain(|history| history.model.kernel == own.kernel);
    histories.retain(|history| history.model.model_graph == own.model_graph && history.machine.target == target.name);
    let all = histories.len();
    histories.retain(|history| history.model == own && history.context_max == manifest.decode.context_max);
    let elsewhere = all - histories.len();
    let last = |history: &History| history.entries.last().map(|entry| entry.utc.clone());
    histories.sort_by_key(last);
    Ok(Known {
        histories,
        built: context.search_built(),
        default: context.search_default(),
        elsewhere,
        broken: corpus.broken.iter().map(ToString::to_string).collect(),
        trials: corpus.trials,
    })
}

/// How well today's cost model ranks the campaigns of a manifest on a target. The rows have the predictions of their own time.
///
/// # Errors
/// As [`known`].
pub fn ranked_now(workspace: &Workspace, manifest: &Manifest, target: &Target) -> Result<Vec<Ranked>, Fault> {
    let model = import_stage(workspace, manifest)?;
    let context = BuildContext::new(workspace, manifest, target, &model)?;
    let own = shape(&context, &model.imported.graph, context.searched());
    let mut histories = histories(&Corpus::known(&workspace.trials)?.trials);
    // Campaigns of any context, because a prediction is for one position.
    histories.retain(|history| history.model == own && history.machine.target == target.name);
    Ok(ranked(&histories, |entry| {
        let logs =
            entry.timed.iter().map(|row| Some(predicted_us(&context, &entry.candidate, row.timing.position)?.ln()));
        let logs: Vec<f64> = logs.collect::<Option<_>>()?;
        (!logs.is_empty()).then(|| logs.iter().sum::<f64>() / logs.len() as f64)
    }))
}

/// What a search would do now, and where a step's time goes.
pub struct Next {
    pub ask: Ask,
    pub default: Candidate,
    /// What the search thinks of the candidate that it would try.
    pub opinion: Option<Opinion>,
    /// Candidates measured so far beyond the default, of the last campaign.
    pub trials: u32,
    pub hot: Vec<Region>,
    /// Where `hot` comes from, or why there is none.
    pub source: String,
}

/// A part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Region {
    pub name: String,
    /// Its time in a step, the mean over SMs.
    pub us: f64,
    /// The part of it that waits for other SMs.
    pub wait_us: f64,
}

/// Replays the last campaign and asks what comes next; traces the kernel where a device of the target is here, else asks the
/// cost model.
///
/// # Errors
/// As [`known`]; faults of the traced run.
pub fn next(workspace: &Workspace, manifest: &Manifest, target: &Target, trials: u32) -> Result<Next, Fault> {
    let Known { histories, trials: rows, .. } = known(workspace, manifest, target)?;
    let Prepared { imported, candidate, graph, .. } = &prepare(workspace, manifest, target)?;
    let context = BuildContext::of(workspace, manifest, target, imported, *graph);
    let space = space_of(&context);
    let default = space.default_candidate().clone();
    let last = histories.last();
    let mut others: Vec<Trial> =
        rows.into_iter().filter(|row| row.facts().point.campaign != last.map(|history| history.campaign)).collect();
    let seeds = seeds_of_ops(&context, &others);
    keep_kin(&context, &mut others);
    let groups = lessons(&others).groups;
    let guess = |candidate: &Candidate| guess(&context, &default, candidate);
    let setting = Setting::new(&shape(&context, &imported.graph, context.searched()), &target.name, target.kind.name());
    let prior = Prior::new(&groups, setting, &space);
    let limits = Limits::of_budget(trials, manifest.search.seed);
    let mut search = Search::new(&space, limits, &groups, prior, seeds, &guess);
    if let Some(history) = last {
        search.tell_floor(history.incumbent().and_then(|entry| entry.floor_gap()));
        replay(&mut search, &past_trials(history));
    }
    let ask = search.ask();
    let opinion = match &ask {
        Ask::Try { candidate, .. } => Some(search.opinion(candidate)),
        Ask::Stop(_) => None,
    };
    let position = manifest.decode.time_positions.first().copied().unwrap_or(0);
    let (hot, source) = hottest(workspace, &context, candidate, position)?;
    Ok(Next { ask, default: default.clone(), opinion, trials: search.trials(), hot, source })
}

/// The regions of a step of what is built now, the hottest first.
fn hottest(
    workspace: &Workspace,
    context: &BuildContext<'_>,
    candidate: &Candidate,
    position: u32,
) -> Result<(Vec<Region>, String), Fault> {
    let BuildContext { manifest, target, imported, .. } = *context;
    let mut regions: Vec<Region>;
    let source;
    if target.kind == TargetKind::Cpu {
        return Ok((vec![], "the target `cpu` has no trace".to_string()));
    }
    if Host::new(workspace).device(target).is_ok() {
        let traced = prepare(workspace, manifest, target)?
            .trace(workspace, Asked { rows: None, position, steps: TRACED_STEPS })?;
        regions = traced
            .launch
            .table
            .rows
            .iter()
            .map(|row| {
                let parts = [&row.wait, &row.starved, &row.compute, &row.finish, &row.gap];
                let us = parts.iter().map(|part| part.mean_us).sum();
                Region { name: row.kind.clone(), us, wait_us: row.wait.mean_us }
            })
            .collect();
        source = format!("traced on {} at position {position}", traced.hardware);
    } else if let Some(predicted) =
        cost::predict(&imported.graph, target, &manifest.measured(target), manifest.precision, candidate, position)
    {
        let part = |(name, us): (&str, f64)| Region { name: name.to_string(), us, wait_us: 0.0 };
        regions = predicted.parts().map(part).to_vec();
        source = format!("predicted at position {position}: no device of this target is here to trace");
    } else {
        return Ok((vec![], "no device of this target is here, and its record was not calibrated".to_string()));
    }
    regions.sort_by(|a, b| b.us.total_cmp(&a.us));
    Ok((regions, source))
}
