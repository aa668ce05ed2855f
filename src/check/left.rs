//! Compares launches of a draft that read what a batch kernel left, and go on with what its own steps leave, with launches that the host gives
//! the same.

use std::sync::Arc;

use super::{CheckError, Figures, Judge, Tolerance, check_ids};
use crate::cuda::driver::Device;
use crate::cuda::session::{GivenWith, Session, SessionError, left_of};
use crate::dtype::Precision;
use crate::model::synthetic::given_value;

/// Steps, at most: half of them read what a batch kernel left.
const STEPS: u32 = 4;

/// The final norm of a model or of a draft, as the host computes it.
pub type HostNorm<'a> = &'a dyn Fn(&[f32]) -> Arc<[f32]>;

/// Compares the logits of the steps, with the norms of the model and of the draft. `steps_max` is what the session was loaded with.
///
/// # Errors
/// Logits that differ by more than the same steps may on a device; what the device refuses.
pub fn check_left(
    device: &Device,
    session: &mut Session,
    steps_max: u32,
    precision: Precision,
    hidden: u32,
    [of_model, own]: [HostNorm<'_>; 2],
) -> Result<Figures, CheckError> {
    let (vocab, steps) = (session.vocab(), STEPS.min(steps_max.max(1)));
    let known = steps.div_ceil(2);
    let mut tokens = check_ids(vocab, known);
    // The upper half of their bits: what bf16 has, too.
    let value = |position, column| f32::from_bits(given_value(position, column).to_bits() & 0xffff_0000);
    let rows: Vec<Vec<f32>> =
        (0..known).map(|position| (0..hidden).map(|column| value(position, column)).collect()).collect();
    let (_words, left) = left_of(device, &rows, precision.wire)?;
    session.poison_logits()?;
    tokens.extend(session.propose(0, &tokens, &GivenWith::Left(left, 0), steps - known, true)?);
    // The steps before only read, and have no logits; or they are part of the launch.
    let found = session.logits(if session.only_reads() { steps - known + 1 } else { steps })?;

    let mut judge = Judge::new(Tolerance::of_device(precision));
    let rows_found = found.chunks_exact(vocab.max(1) as usize);
    let mut found = rows_found.clone().skip(rows_found.len() - (steps - known + 1) as usize);
    let mut compare = |judge: &mut Judge, position: u32, expected: &[f32]| {
        judge.compare(position, expected, found.next().unwrap_or(&[]))
    };
    let given: Vec<Arc<[f32]>> = rows.iter().map(|row| of_model(row)).collect();
    session.give(0, &tokens[..known as usize], &given, 0)?;
    session.run(0, known, true)?;
    compare(&mut judge, known - 1, &session.logits_of_step(known - 1)?)?;
    for position in known..steps {
        let left = session.left()?.ok_or(SessionError::NothingLeft { row: 0 })?;
        session.give(position, &tokens[position as usize..=position as usize], &[own(&left)], 0)?;
        session.run(position, 1, true)?;
        compare(&mut judge, position, &session.logits_of_step(0)?)?;
    }
    Ok(judge.figures)
}
