//! Owns `perplexity --formats`: predicts one text with the weights in every format that they can be rounded to.

use std::path::Path;
use std::time::Instant;

use serde_json::json;

use super::windows;
use crate::cli::Outcome;
use crate::cli::session::Session;
use crate::error::Fault;
use crate::format::{FormatPlan, NAMED};
use crate::manifest::Manifest;
use crate::measure::step_bytes;
use crate::pipeline::{self, Checking, Prepared, Tokens, Workspace};
use crate::sample::{Logprobs, divergence};
use crate::target::Target;

/// Logits that are held in memory at a time, to compare predictions.
const HELD_VALUES: usize = 32 << 20;

/// The text that is predicted.
pub struct Text<'a> {
    pub file: &'a Path,
    pub text: &'a str,
}

/// The model that reads it.
pub struct Of<'a> {
    pub manifest: &'a Manifest,
    pub target: &'a Target,
    pub checking: Checking,
}

/// A row of the table.
struct Row {
    name: &'static str,
    bytes: u64,
    us_per_step: f64,
    ppl: f64,
    /// Mean Kullback-Leibler divergence from the first row, nats a token.
    kl: f64,
}

/// Prints bytes and time of a step, perplexity and divergence for each format; the first row has weights that are not rounded.
pub fn compare(
    session: &Session,
    workspace: &Workspace,
    Of { manifest, target, checking }: Of<'_>,
    tokenizer: &mut Tokens,
    text: &Text<'_>,
    as_json: bool,
) -> Result<Outcome, Fault> {
    let ids = tokenizer.encode(text.text, true)?;
    if ids.len() < 2 || manifest.decode.context_max < 3 {
        let (file, count) = (text.file.display(), ids.len());
        return Err(Fault::input(format!(
            "expected at least 2 tokens in `{file}`, and a `context_max` of at least 3, found {count} and {}",
            manifest.decode.context_max
        )));
    }
    // A candidate is for the weights that the manifest has; other formats have a default of their own.
    let with_formats = |formats: FormatPlan| {
        let mut other = Manifest { formats, ..manifest.clone() };
        if other.formats != manifest.formats {
            other.candidates.clear();
        }
        other
    };
    let plain = with_formats(FormatPlan::default());
    let own = if plain.precision.weights == crate::dtype::DType::F32 { "fp32" } else { "bf16" };
    let plain = pipeline::prepare(workspace, &plain, target)?.checking(checking);
    let mut exact = Runs::begin(workspace, &plain)?;
    tokenizer.check_vocab(exact.vocab)?;
    let context = (manifest.decode.context_max as usize).min((HELD_VALUES / exact.vocab.max(1) as usize).max(3));
    let read: Vec<Vec<u32>> = windows(ids.len(), context, false).map(|window| ids[window].to_vec()).collect();
    let first = exact.row(own, &read, None)?;
    let mut rows = vec![first];
    for (name, format) in NAMED.into_iter().filter(|(_, format)| !format.is_plain()) {
        let formats = FormatPlan { weights: Some(format), embed: manifest.formats.embed, ..FormatPlan::default() };
        let rounded = pipeline::prepare(workspace, &with_formats(formats), target)?.checking(checking);
        let mut runs = Runs::begin(workspace, &rounded)?;
        rows.push(runs.row(name, &read, Some(&mut exact))?);
    }
    if as_json {
        let rows: Vec<_> = rows
            .iter()
            .map(|row| {
                let Row { name, bytes, us_per_step, ppl, kl } = row;
                json!({ "format": name, "bytes": bytes, "us_per_step": us_per_step, "ppl": ppl, "kl": kl })
            })
            .collect();
        session.terminal.print_json(&json!({ "tokens": ids.len(), "target": target.name, "formats": rows }))?;
        return Ok(Outcome::Done);
    }
    let mut table = format!("{:<10} {:>12} {:>12} {:>10} {:>10}\n", "format", "bytes/step", "us/step", "ppl", "KL");
    for Row { name, bytes, us_per_step, ppl, kl } in &rows {
        table += &format!("{name:<10} {bytes:>12} {us_per_step:>12.1} {ppl:>10.5} {kl:>10.6}\n");
    }
    session.terminal.print(&table)?;
    Ok(Outcome::Done)
}

/// The runs of one model, once for each format.
struct Runs<'a> {
    runner: pipeline::Runner<'a>,
    vocab: u32,
    bytes: u64,
}

impl<'a> Runs<'a> {
    fn begin(workspace: &'a Workspace, prepared: &'a Prepared) -> Result<Runs<'a>, Fault> {
        let graph = &prepared.imported.graph;
        let (vocab, bytes) = (graph.vocab, step_bytes(&prepared.validated, graph, 1, 0));
        Ok(Runs { runner: prepared.runner(workspace)?, vocab, bytes })
    }

    /// Runs every window, and compares each prediction with that of `exact`.
    fn row(
        &mut self,
        name: &'static str,
        windows: &[Vec<u32>],
        mut exact: Option<&mut Runs<'_>>,
    ) -> Result<Row, Fault> {
        let (mut nll, mut kl, mut scored, mut seconds, mut steps) = (0.0, 0.0, 0u32, 0.0, 0usize);
        for ids in windows {
            let mut expected: Vec<Vec<f32>> = vec![];
            if let Some(exact) = &mut exact {
                exact.runner.logits(ids, &mut |_, row| expected.push(row.to_vec()))?;
            }
            let begun = Instant::now();
            self.runner.logits(ids, &mut |position, row| {
                if let Some(&next) = ids.get(position as usize + 1) {
                    nll -= Logprobs::of(row, next, 0).token;
                    kl += expected.get(position as usize).map_or(0.0, |expected| divergence(expected, row));
                    scored += 1;
                }
            })?;
            seconds += begun.elapsed().as_secs_f64();
            steps += ids.len();
        }
        let scored = f64::from(scored);
        let (us_per_step, ppl) = (seconds * 1e6 / steps as f64, (nll / scored).exp());
        Ok(Row { name, bytes: self.bytes, us_per_step, ppl, kl: kl / scored })
    }
}
