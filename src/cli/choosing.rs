//! Owns the options that say how tokens are chosen: turns them into the settings of a request.

use std::collections::BTreeMap;

use super::arguments::Choosing;
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::sample::{Penalties, RequestSettings, SampleSettings};
use crate::target::{Target, TargetKind};

/// The settings of a request. Ranges are checked here, so that a wrong value is reported before a model is built.
///
/// # Errors
/// A number out of its range, an id with two biases.
pub fn settings(asked: &Choosing) -> Result<RequestSettings, Fault> {
    let Choosing {
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        ref logit_bias,
        min_tokens,
    } = *asked;
    let mut biases = BTreeMap::new();
    for &(id, bias) in logit_bias {
        if biases.insert(id, bias).is_some() {
            return Err(Fault::input(format!("`--logit-bias` is given twice for id {id}")).with_remedy("give it once"));
        }
    }
    let settings = RequestSettings {
        min_p: min_p.unwrap_or(0.0),
        penalties: Penalties {
            repetition: repetition_penalty,
            presence: presence_penalty,
            frequency: frequency_penalty,
        },
        logit_bias: biases,
        min_tokens,
        ..RequestSettings::plain(SampleSettings { temperature, top_k, top_p, seed: seed.unwrap_or(0) })
    };
    // The vocabulary is not known yet; ids are compared with it later.
    settings.resolve(u32::MAX, &[])?;
    Ok(settings)
}

/// Refuses settings that the kernels of a target do not support. With `batch_invariant` the host supports them instead.
///
/// # Errors
/// Such a setting, on a target that is not a CPU.
pub fn refuse_on_kernels(settings: &RequestSettings, manifest: &Manifest, target: &Target) -> Result<(), Fault> {
    let beyond: Vec<String> = settings.beyond_kernels().iter().map(|name| format!("`--{name}`")).collect();
    if target.kind == TargetKind::Cpu || manifest.decode.batch_invariant || beyond.is_empty() {
        return Ok(());
    }
    let message =
        format!("target `{}` does not support {}: its kernel does not have it", target.name, beyond.join(", "));
    Err(Fault::input(message).with_remedy(
        "run on a target of kind `cpu` (`--target cpu`), or use `--temperature`, `--top-k` and `--top-p` alone",
    ))
}

/// Warnings about options that have no effect.
pub fn without_effect(asked: &Choosing) -> Option<String> {
    let given = [
        ("--top-k", asked.top_k.is_some()),
        ("--top-p", asked.top_p.is_some()),
        ("--min-p", asked.min_p.is_some()),
        ("--seed", asked.seed.is_some()),
    ];
    let names: Vec<String> = given.iter().filter(|(_, given)| *given).map(|(name, _)| format!("`{name}`")).collect();
    (asked.temperature == 0.0 && !names.is_empty()).then(|| {
        let verb = if names.len() == 1 { "has" } else { "have" };
        let names = names.join(", ");
        format!("warning: {names} {verb} no effect at temperature 0, which takes the most probable token")
    })
}
