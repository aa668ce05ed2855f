//! Owns the sampler of a device as commands use it: its source, its check against the host's choice, and the time that it adds to a step.

use crate::codegen::sampler::emit;
use crate::cuda::rows::RowLauncher;
use crate::cuda::sampler::{Asked, SamplerSession, decided};
use crate::digest::Digest;
use crate::error::Fault;
use crate::sample::{Penalties, Request, RequestSettings, SampleSettings, TokenCounts};
use crate::target::Target;

use super::device_rows::{Decoding, LAUNCHES, STEPS};
use super::stages::Generated;
use super::stored::source_bytes;

/// The source of a target's sampler, to compile.
pub(super) fn sampler_source(target: &Target) -> Generated {
    Generated::of(emit(target))
}

/// Digest of what an exported sampler was compiled from.
pub(super) fn sampler_digest(target: &Target) -> Result<Digest, Fault> {
    Ok(Digest::of(&source_bytes(emit(target))?))
}

/// Steps of a check, each with other settings.
const ROUNDS: u32 = 16;
/// Tokens that a request of a measurement has seen: some thousand ids are a long text.
const SEEN: u32 = 1000;

/// Temperature, top-p and penalties: what most clients set.
fn usual(seed: u64) -> RequestSettings {
    let sampling = SampleSettings { temperature: 0.8, top_k: None, top_p: Some(0.95), seed };
    let penalties = Penalties { repetition: 1.1, presence: 0.5, frequency: 0.2 };
    RequestSettings { penalties, ..RequestSettings::plain(sampling) }
}

/// Usual settings, by row: nothing but temperature, penalties and a top-p that admits nearly all of the probability.
fn usual_settings(row: u32) -> RequestSettings {
    let usual = usual(u64::from(row));
    let top_p = [Some(0.95), None, Some(0.86), Some(0.999)][row as usize % 4];
    let sampling = if row % 5 == 3 { SampleSettings::greedy() } else { SampleSettings { top_p, ..usual.sampling } };
    let penalties = if row % 3 == 2 { Penalties::OFF } else { usual.penalties };
    RequestSettings { sampling, penalties, ..usual }
}

/// Settings of every kind, by row.
fn settings(row: u32, vocab: u32) -> RequestSettings {
    let usual = usual(u64::from(row));
    let sampling = usual.sampling;
    match row % 8 {
        0 => usual,
        1 => RequestSettings { sampling: SampleSettings { top_k: Some(50), ..sampling }, ..usual },
        2 => RequestSettings { sampling: SampleSettings { top_p: None, ..sampling }, min_p: 0.05, ..usual },
        3 => RequestSettings { sampling: SampleSettings::greedy(), ..usual },
        4 => RequestSettings { penalties: Penalties::OFF, logprobs: Some(20), ..usual },
        5 => RequestSettings { logit_bias: [(vocab - 1, 5.0), (3, -100.0)].into(), ..usual },
        6 => RequestSettings { stop_ids: vec![2, 5], min_tokens: 10_000, logprobs: Some(0), ..usual },
        _ => RequestSettings {
            sampling: SampleSettings { temperature: 2.0, top_k: Some(vocab / 2), ..sampling },
            ..usual
        },
    }
}

/// Requests in the middle of a text, with what they have seen.
fn requests(rows: u32, vocab: u32, of: impl Fn(u32) -> RequestSettings) -> Result<Vec<(Request, TokenCounts)>, Fault> {
    let id = |n: u32| n.wrapping_mul(2_654_435_761) % vocab;
    let request = |row: u32| {
        let mut counts = TokenCounts::new(&(0..SEEN / 2).map(|n| id(n + row)).collect::<Vec<u32>>());
        (0..SEEN / 2).for_each(|n| counts.push(id(n * 3 + row)));
        Ok((of(row).resolve(vocab, &[])?, counts))
    };
    (0..rows).map(request).collect()
}

fn asked<'a>(requests: &'a [(Request, TokenCounts)]) -> Vec<Asked<'a>> {
    let of = |(row, (request, counts)): (u32, &'a (Request, TokenCounts))| Asked {
        row,
        position: counts.position(),
        sampler: request.sampler(),
        request: Some((request, counts)),
        allowed: None,
    };
    (0..).zip(requests).map(of).collect()
}

/// Compares the choices of the sampler with those of the host from the same logits, for every kind of setting: how many choices there were.
///
/// # Errors
/// Another token, or other log-probabilities; what the device refuses.
pub(super) fn check_choices(
    session: &mut dyn RowLauncher,
    sampler: &mut SamplerSession,
    decoding: &mut Decoding,
    position: u32,
) -> Result<u32, Fault> {
    let (vocab, rows) = (session.vocab(), decoding.rows());
    for round in 0..ROUNDS {
        // One kernel is for any settings, and one for those that most clients have.
        let of = |row| if round % 2 == 0 { settings(row, vocab) } else { usual_settings(row) };
        let requests = requests(rows, vocab, |row| of(row + round))?;
        decoding.give_tokens(|row| (row * 31 + round * 7) % vocab);
        let (tables, inputs) = decoding.launch(position, 1)?;
        session.queue_sampled(tables, inputs, sampler, &asked(&requests))?;
        session.finish()?;
        for (row, (request, counts)) in (0u32..).zip(&requests) {
            let expected = request.choose(&session.logits(row)?, counts, None)?;
            let found = decided(&sampler.answer(0, row)?, counts.position(), vocab, request.logprobs())?;
            let near = |(a, b): (Option<f64>, Option<f64>)| match (a, b) {
                (Some(a), Some(b)) => a == b || (a - b).abs() < 1e-6,
                (a, b) => a == b,
            };
            let tops = found.top.iter().zip(&expected.top);
            let same = found.token == expected.token
                && near((found.logprob, expected.logprob))
                && found.top.len() == expected.top.len()
                && tops.into_iter().all(|(a, b)| a.0 == b.0 && near((Some(a.1), Some(b.1))));
            if !same {
                return Err(Fault::internal(format!(
                    "the sampler chose {found:?} for row {row}, the host {expected:?}: {request:?}"
                )));
            }
        }
    }
    Ok(ROUNDS * rows)
}

/// Steps of `rows` sequences from `position` on, with top-p and penalties for each, after a comparison with the host's choices:
/// microseconds of a step of each launch, ascending.
///
/// # Errors
/// A choice that differs from that of the host; what the device refuses.
pub(super) fn time_sampled(
    session: &mut dyn RowLauncher,
    sampler: &mut SamplerSession,
    rows: u32,
    position: u32,
) -> Result<Vec<f64>, Fault> {
    let mut decoding = Decoding::at(session, rows, position, STEPS)?;
    check_choices(session, sampler, &mut decoding, position)?;
    let requests = requests(rows, session.vocab(), |row| usual(u64::from(row)))?;
    decoding.give_tokens(|row| row + 1);
    let mut step_us = vec![];
    for n in 0..LAUNCHES + 3 {
        let (tables, inputs) = decoding.launch(position, STEPS)?;
        session.queue_sampled(tables, inputs, sampler, &asked(&requests))?;
        let launched = session.finish()?;
        if n >= 3 {
            step_us.push(launched.device_us / f64::from(STEPS));
        }
    }
    step_us.sort_by(f64::total_cmp);
    Ok(step_us)
}
