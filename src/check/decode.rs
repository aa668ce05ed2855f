//! Compares the decode kernel over a cache of its own with the interpreter, where there is no reference: in an export, whose model is gone.

use super::beside::{Beside, Decodes, Launch};
use super::codes::{OnDevice, OneRow};
use super::shared::TextSizes;
use super::{CheckError, Checked, check_selection};
use crate::cuda::session::Session;
use crate::interp::{Pack, Taken};
use crate::validate::Validated;

/// Compares a kernel that stores codes or chooses experts with the interpreter, which takes them, over texts, and the tokens that it chooses
/// with those that the host chooses from the same logits. `steps_max` is what the session was loaded with.
///
/// # Errors
/// The first position that is out of tolerance, or what interpreter or device refuse.
pub fn check_decode(
    validated: &Validated,
    pack: Pack,
    sizes: TextSizes,
    session: &mut Session,
    steps_max: u32,
) -> Result<Checked, CheckError> {
    let schedule = validated.schedule();
    let checked = compare_decode(validated, pack, sizes, &mut OnDevice { schedule, outputs: &[], session, steps_max })?;
    check_selection(session, session.vocab(), steps_max, schedule.program.context_max, checked.figures)?;
    Ok(checked)
}

/// Compares what a decode kernel computes after each token of the texts of `sizes`, what it stores, and what it chooses.
///
/// # Errors
/// As [`check_decode`].
pub fn compare_decode(
    validated: &Validated,
    pack: Pack,
    sizes: TextSizes,
    device: &mut dyn OneRow,
) -> Result<Checked, CheckError> {
    let mut beside = Beside::new(validated, pack)?;
    let has_routers = !beside.routers().is_empty();
    for ids in sizes.ids(beside.vocab()) {
        let positions: Vec<u32> = (0..ids.len() as u32).collect();
        let found = device.decode(beside.judge.figures, &ids, 0, &positions)?;
        let codes = |caches| positions.iter().map(|&position| device.codes(caches, position)).collect();
        let codes: Vec<Vec<Vec<u8>>> = beside.coded_caches().map(codes).transpose()?.unwrap_or_default();
        let choices = if has_routers { device.choices(&ids, 0)? } else { vec![] };
        let (mut codes, mut choices) = (codes.into_iter(), choices.into_iter());
        for ((position, &id), found) in (0..).zip(&ids).zip(&found) {
            let of_row = |of_router| vec![of_router];
            let taken = Taken {
                codes: codes.next().unwrap_or_default(),
                choices: choices.next().unwrap_or_default().into_iter().map(of_row).collect(),
            };
            let launch = Launch { decodes: Decodes::Text { position }, tokens: vec![id], taken };
            let expected = beside.step(vec![launch])?;
            beside.compare(&expected, 0, found)?;
        }
    }
    Ok(Checked { figures: beside.judge.figures })
}
