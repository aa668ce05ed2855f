//! Owns `plan` and `run`: the stages of builds as jobs of a CI or a cluster, and one of them run.

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::{ForWord, NeedsWord, Plan, Run};
use super::session::{Session, Talk};
use crate::error::Fault;
use crate::pipeline::{self, Needs, Planned, Purpose};

fn word(needs: Needs) -> &'static str {
    match needs {
        Needs::Host => "host",
        Needs::Nvrtc => "nvrtc",
        Needs::Gpu => "gpu",
    }
}

pub fn plan(session: &Session, asked: &Plan) -> Result<Outcome, Fault> {
    let needs = asked.needs.map(|needs| match needs {
        NeedsWord::Host => Needs::Host,
        NeedsWord::Nvrtc => Needs::Nvrtc,
        NeedsWord::Gpu => Needs::Gpu,
    });
    let purpose = match asked.purpose {
        ForWord::Build => Purpose::Build,
        ForWord::Serve => Purpose::Serve,
        ForWord::Generate => Purpose::Generate,
    };
    let mut jobs: Vec<(String, Planned)> = vec![];
    for path in &asked.manifest {
        let manifest = session.manifest(path, [])?;
        let workspace = session.workspace(Talk::Nothing)?;
        for planned in pipeline::plan(&workspace, &manifest, purpose)? {
            let wanted = (asked.all || !planned.cached) && needs.is_none_or(|needs| needs == planned.needs);
            // Manifests of one model share its import.
            if wanted && jobs.iter().all(|(_, other)| other.key != planned.key) {
                jobs.push((path.display().to_string(), planned));
            }
        }
    }
    match asked.json {
        true => {
            let include: Vec<Value> = jobs.iter().map(|(manifest, planned)| job(manifest, planned)).collect();
            session.terminal.print_json(&json!({ "include": include }))?;
        }
        false => jobs.iter().try_for_each(|(manifest, Planned { target, stage, key, needs, kernel, .. })| {
            let target = if target.is_empty() { "-" } else { target };
            let kernel = kernel.as_ref().map(|kernel| format!(" {kernel}")).unwrap_or_default();
            session.terminal.print(&format!("{key} {stage:<8} {target:<12} {:<5} {manifest}{kernel}\n", word(*needs)))
        })?,
    }
    Ok(Outcome::Done)
}

fn job(manifest: &str, planned: &Planned) -> Value {
    let Planned { target, stage, kernel, key, cache_key, inputs, needs, cached } = planned;
    let inputs: Vec<String> = inputs.iter().map(ToString::to_string).collect();
    let record = (*needs == Needs::Gpu).then_some(target);
    json!({
        "key": key.to_string(),
        "manifest": manifest,
        "target": target,
        "stage": stage,
        "kernel": kernel,
        "needs": word(*needs),
        "record": record,
        "inputs": inputs,
        "cache_key": cache_key.map(|key| key.to_string()),
        "cached": cached,
    })
}

pub fn run(session: &Session, asked: &Run) -> Result<Outcome, Fault> {
    for path in &asked.manifest {
        let manifest = session.manifest(path, [])?;
        let workspace = session.workspace(Talk::Work)?;
        if pipeline::run_stage(&workspace, &manifest, &asked.stage)? {
            return Ok(Outcome::Done);
        }
    }
    let named = asked.manifest.iter().map(|path| format!("`{}`", path.display())).collect::<Vec<_>>().join(", ");
    Err(Fault::input(format!("{named} has no stage `{}`", asked.stage)).with_remedy(
        "`monobloc plan MANIFEST` lists the keys; they are those of the same manifest and version of monobloc, and of the same \
         `candidate` of each target",
    ))
}
