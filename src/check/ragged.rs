//! Compares a kernel that cuts long histories into KV splits with one that does not.

use super::codes::tolerance;
use super::{AFTER_FIRST, CheckError, Checked, Judge};
use crate::dtype::Precision;

/// Logits that two kernels have of the same row.
pub struct BothLogits {
    pub position: u32,
    pub expected: Vec<f32>,
    pub found: Vec<f32>,
}

/// Compares logits of rows, of which a kernel that was checked (`judged`) has the expected ones.
///
/// # Errors
/// The first row that is out of tolerance.
pub fn check_ragged(precision: Precision, judged: &Checked, rows: &[BothLogits]) -> Result<Checked, CheckError> {
    let mut judge = Judge::new(tolerance(precision).with_noise(judged.figures.noise[AFTER_FIRST]));
    for BothLogits { position, expected, found } in rows {
        judge.compare_row(expected.len() as u32, *position, expected, found)?;
    }
    Ok(Checked { figures: judge.figures })
}
