//! Owns golden outputs: results of another implementation for a checkpoint, and their comparison with ours.

use std::fmt;

use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};

use crate::dtype::{DType, Precision};

/// fp32 in another summation order moves the logits of small models by some 1e-5; a feature that is ignored moves them by
/// far more than this.
pub const FP32_ERROR_ABS_MAX: f64 = 3e-4;

/// Most error in bf16, as a multiple of the other implementation's own bf16 error: roundings differ.
const BF16_ERRORS_MAX: f64 = 1.5;

/// Most relative error in bf16 if the other implementation's own error is not given, and with a cache in fp8, which that one does not have.
const BF16_ERROR_REL_L2_MAX: f64 = 0.04;

/// Outputs of a checkpoint, from a safetensors file.
///
/// | tensor | shape | type |
/// | --- | --- | --- |
/// | `input_ids` | \[positions\] | i64, i32 or u32 |
/// | `logits` | \[positions, vocab\], row i after id i | fp32 |
/// | `logits_bf16` | the same, computed in bf16; may be absent | fp32, bf16 or fp16 |
/// | `greedy_ids` | \[steps\], the greedy continuation of the ids; may be absent | as `input_ids` |
/// | `greedy_margin` | \[steps\], difference of its logit to the second largest; may be absent | fp32 |
///
/// Other tensors are not read.
#[derive(Debug, Clone, PartialEq)]
pub struct Goldens {
    /// Tokens to give the model, one a position.
    pub input_ids: Vec<u32>,
    /// Logits of one position.
    pub vocab: u32,
    /// `[positions][vocab]`.
    logits: Vec<f32>,
    /// Relative error of the other implementation in bf16.
    bf16_error_rel_l2: Option<f64>,
    /// The greedy continuation of `input_ids`.
    pub greedy_ids: Vec<u32>,
    /// One for each step, or empty.
    greedy_margin: Vec<f32>,
}

/// Why a file holds no goldens.
#[derive(Debug, thiserror::Error)]
pub enum GoldensError {
    #[error("expected a safetensors file: {0}")]
    Format(#[from] SafeTensorError),
    #[error("expected `{tensor}` {expected}, found {found}")]
    Tensor { tensor: &'static str, expected: String, found: String },
    #[error("expected ids of `{tensor}` from 0 to below {vocab}, the vocabulary of `logits`, found {id}")]
    Id { tensor: &'static str, id: i64, vocab: u32 },
    #[error("expected finite values in `{tensor}`, found {value} at {index}")]
    NotFinite { tensor: &'static str, index: usize, value: f32 },
}

impl Goldens {
    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// No safetensors; a tensor that is missing, of another type or of a shape that does not fit the others; ids outside
    /// the vocabulary; values that are no numbers.
    pub fn parse(bytes: &[u8]) -> Result<Goldens, GoldensError> {
        let file = SafeTensors::deserialize(bytes)?;
        let ids_name = "input_ids";
        let shape = match file.tensor(ids_name) {
            Ok(ids) => ids.shape().to_vec(),
            Err(_) => return Err(wrong(ids_name, "[positions]", "none")),
        };
        let [positions] = shape[..] else { return Err(wrong(ids_name, "[positions]", format!("{shape:?}"))) };
        let vocab = match file.tensor("logits") {
            Ok(logits) if matches!(logits.shape(), [rows, cols] if *rows == positions && *cols > 0) => {
                u32::try_from(logits.shape()[1])
                    .map_err(|_| wrong("logits", format!("[{positions}, vocab]"), format!("{:?}", logits.shape())))?
            }
            Ok(logits) => {
                return Err(wrong("logits", format!("[{positions}, vocab]"), format!("{:?}", logits.shape())));
            }
            Err(_) => return Err(wrong("logits", format!("[{positions}, vocab]"), "none")),
        };
        if positions == 0 {
            return Err(wrong(ids_name, "with at least one token", "none"));
        }
        let logits_shape = [positions, vocab as usize];
        let logits = floats(&file, "logits", &logits_shape, &[Dtype::F32])?.unwrap_or_default();
        let in_bf16 = floats(&file, "logits_bf16", &logits_shape, &[Dtype::F32, Dtype::BF16, Dtype::F16])?;
        let steps = file.tensor("greedy_ids").map_or(0, |tensor| tensor.shape().iter().product());
        Ok(Goldens {
            input_ids: ids(&file, ids_name, positions, vocab)?,
            vocab,
            bf16_error_rel_l2: in_bf16.map(|found| rel_l2(&logits, &found)),
            logits,
            greedy_ids: if steps > 0 { ids(&file, "greedy_ids", steps, vocab)? } else { vec![] },
            greedy_margin: floats(&file, "greedy_margin", &[steps], &[Dtype::F32])?.unwrap_or_default(),
        })
    }

    /// Positions of a context that these goldens need.
    pub fn positions_needed(&self) -> usize {
        // The last token that is decided needs no position.
        self.input_ids.len() + self.greedy_ids.len().saturating_sub(1)
    }

    /// Compares computed results with the goldens: `logits` of `[positions][vocab]` and the tokens decided after
    /// them, in `precision`.
    pub fn compare(&self, logits: &[f32], greedy: &[u32], precision: Precision) -> Comparison {
        let cols = self.vocab as usize;
        let mut largest = Difference { position: 0, token: 0, expected: 0.0, found: 0.0 };
        for (at, (&expected, &found)) in self.logits.iter().zip(logits).enumerate() {
            let here = Difference { position: (at / cols) as u32, token: (at % cols) as u32, expected, found };
            // A NaN differs by more than any number.
            if here.abs() > largest.abs() || here.abs().is_nan() && !largest.abs().is_nan() {
                largest = here;
            }
        }
        let exact = [precision.weights, precision.cache, precision.wire].iter().all(|&dtype| dtype == DType::F32);
        let error_rel_l2 = if logits.len() == self.logits.len() { rel_l2(&self.logits, logits) } else { f64::INFINITY };
        let allowed = match self.bf16_error_rel_l2 {
            _ if exact => Allowed::Abs(FP32_ERROR_ABS_MAX),
            Some(own) if precision.cache != DType::E4m3 => Allowed::RelL2(BF16_ERRORS_MAX * own),
            _ => Allowed::RelL2(BF16_ERROR_REL_L2_MAX),
        };
        let error = match allowed {
            Allowed::Abs(_) => largest.abs(),
            Allowed::RelL2(_) => error_rel_l2,
        };
        // Two logits that are closer than twice the error may change their order; the texts differ from there on.
        let doubt = 2.0 * if exact { FP32_ERROR_ABS_MAX } else { largest.abs() };
        let close = self.greedy_margin.iter().position(|&margin| f64::from(margin) <= doubt);
        let sure = match (close, self.greedy_margin.is_empty()) {
            (Some(step), _) => Some(step),
            (None, false) => Some(self.greedy_ids.len()),
            // Without margins, every decision counts in fp32, and none in bf16.
            (None, true) => exact.then_some(self.greedy_ids.len()),
        };
        let agree = self.greedy_ids.iter().zip(greedy).take_while(|(expected, found)| expected == found).count();
        Comparison {
            positions: self.input_ids.len(),
            largest,
            error_rel_l2,
            allowed,
            steps: self.greedy_ids.len(),
            steps_sure: sure,
            steps_equal: agree,
            // Written with `<=`, so that NaN is no agreement.
            agrees: error <= allowed.limit() && logits.len() == self.logits.len() && agree >= sure.unwrap_or(0),
        }
    }
}

/// An expected logit, and the one that was found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    pub position: u32,
    pub token: u32,
    pub expected: f32,
    pub found: f32,
}

impl Difference {
    pub fn abs(&self) -> f64 {
        (f64::from(self.expected) - f64::from(self.found)).abs()
    }
}

/// The difference that is allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Allowed {
    /// fp32: for every logit.
    Abs(f64),
    /// bf16: norm of all differences divided by the norm of all logits.
    RelL2(f64),
}

impl Allowed {
    pub fn limit(self) -> f64 {
        match self {
            Allowed::Abs(limit) | Allowed::RelL2(limit) => limit,
        }
    }
}

/// Result of a comparison. Prints as one line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Rows of logits that were compared.
    pub positions: usize,
    /// The logit that differs most.
    pub largest: Difference,
    /// Norm of all differences divided by the norm of all expected logits.
    pub error_rel_l2: f64,
    pub allowed: Allowed,
    /// Tokens that should have been decided.
    pub steps: usize,
    /// Number of tokens, from the first on, that cannot change within the error; `None` without margins.
    pub steps_sure: Option<usize>,
    /// Number of equal tokens, from the first on.
    pub steps_equal: usize,
    pub agrees: bool,
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { position, token, expected, found } = self.largest;
        f.write_str(if self.agrees { "agrees" } else { "differs" })?;
        write!(f, " at {} position{}: ", self.positions, if self.positions == 1 { "" } else { "s" })?;
        match self.allowed {
            Allowed::Abs(limit) => write!(f, "largest difference {:.2e}, {limit:.0e} allowed", self.largest.abs())?,
            Allowed::RelL2(limit) => write!(f, "relative error {:.2e}, {limit:.2e} allowed", self.error_rel_l2)?,
        }
        if self.steps > 0 {
            write!(f, "; {} of {} greedy tokens", self.steps_equal, self.steps)?;
        }
        if let Some(sure) = self.steps_sure.filter(|&sure| sure < self.steps) {
            write!(f, ", {sure} beyond doubt")?;
        }
        if !self.agrees {
            write!(f, "; position {position}, token {token}: expected {expected}, found {found}")?;
        }
        Ok(())
    }
}

fn wrong(tensor: &'static str, expected: impl Into<String>, found: impl Into<String>) -> GoldensError {
    GoldensError::Tensor { tensor, expected: expected.into(), found: found.into() }
}

/// A tensor of one of these types and this shape; `None` if there is none of that name.
fn tensor<'f>(
    file: &SafeTensors<'f>,
    name: &'static str,
    shape: &[usize],
    types: &[Dtype],
) -> Result<Option<TensorView<'f>>, GoldensError> {
    let Ok(tensor) = file.tensor(name) else { return Ok(None) };
    if !types.contains(&tensor.dtype()) {
        let expected: Vec<String> = types.iter().map(|dtype| format!("{dtype:?}")).collect();
        return Err(wrong(name, format!("of type {}", expected.join(" or ")), format!("{:?}", tensor.dtype())));
    }
    if tensor.shape() != shape {
        return Err(wrong(name, format!("{shape:?}"), format!("{:?}", tensor.shape())));
    }
    Ok(Some(tensor))
}

fn floats(
    file: &SafeTensors<'_>,
    name: &'static str,
    shape: &[usize],
    types: &[Dtype],
) -> Result<Option<Vec<f32>>, GoldensError> {
    let Some(tensor) = tensor(file, name, shape, types)? else { return Ok(None) };
    let data = tensor.data();
    let values: Vec<f32> = match tensor.dtype() {
        Dtype::BF16 => data.as_chunks().0.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect(),
        Dtype::F16 => data.as_chunks().0.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect(),
        _ => data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
    };
    match values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
        Some((index, &value)) => Err(GoldensError::NotFinite { tensor: name, index, value }),
        None => Ok(Some(values)),
    }
}

fn ids(file: &SafeTensors<'_>, name: &'static str, count: usize, vocab: u32) -> Result<Vec<u32>, GoldensError> {
    let Some(tensor) = tensor(file, name, &[count], &[Dtype::I64, Dtype::I32, Dtype::U32])? else { return Ok(vec![]) };
    let data = tensor.data();
    let values: Vec<i64> = match tensor.dtype() {
        Dtype::I64 => data.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
        Dtype::U32 => data.as_chunks().0.iter().map(|&bytes| i64::from(u32::from_le_bytes(bytes))).collect(),
        _ => data.as_chunks().0.iter().map(|&bytes| i64::from(i32::from_le_bytes(bytes))).collect(),
    };
    let checked = |&id: &i64| match u32::try_from(id) {
        Ok(token) if token < vocab => Ok(token),
        _ => Err(GoldensError::Id { tensor: name, id, vocab }),
    };
    values.iter().map(checked).collect()
}

/// Norm of the difference divided by the norm of the expected values.
fn rel_l2(expected: &[f32], found: &[f32]) -> f64 {
    let pairs = || expected.iter().zip(found).map(|(&e, &f)| (f64::from(e), f64::from(f)));
    let difference: f64 = pairs().map(|(e, f)| (e - f) * (e - f)).sum();
    let norm: f64 = pairs().map(|(e, _)| e * e).sum();
    if norm > 0.0 { (difference / norm).sqrt() } else { difference.sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::serialize;

    const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
    const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

    type Tensors = Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>;

    /// Two positions of a vocabulary of 3, and two steps.
    fn file(change: impl FnOnce(&mut Tensors)) -> Vec<u8> {
        let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let ids = |values: &[i64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let mut tensors = vec![
            ("input_ids", Dtype::I64, vec![2], ids(&[0, 2])),
            ("logits", Dtype::F32, vec![2, 3], floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
            ("logits_bf16", Dtype::F32, vec![2, 3], floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.1])),
            ("greedy_ids", Dtype::I64, vec![2], ids(&[2, 1])),
            ("greedy_margin", Dtype::F32, vec![2], floats(&[1.0, 0.1])),
        ];
        change(&mut tensors);
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor")));
        serialize(views, None).expect("a file")
    }

    fn goldens() -> Goldens {
        Goldens::parse(&file(|_| ())).expect("goldens")
    }

    #[test]
    fn fp32_is_held_to_every_logit_and_every_token() {
        let exact = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let text = |logits: &[f32], greedy: &[u32]| goldens().compare(logits, greedy, FP32).to_string();
        assert_eq!(
            text(&exact, &[2, 1]),
            "agrees at 2 positions: largest difference 0.00e0, 3e-4 allowed; 2 of 2 greedy tokens"
        );
        let mut off = exact;
        off[4] = 5.0004;
        assert_eq!(
            text(&off, &[2, 1]),
            "differs at 2 positions: largest difference 4.00e-4, 3e-4 allowed; 2 of 2 greedy tokens; \
             position 1, token 1: expected 5, found 5.0004"
        );
        assert!(text(&exact, &[2, 0]).starts_with("differs"));
        assert!(text(&exact, &[2]).starts_with("differs"));
        off[1] = f32::NAN;
        assert!(text(&off, &[2, 1]).ends_with("position 0, token 1: expected 2, found NaN"));
        assert!(text(&exact[..5], &[2, 1]).starts_with("differs"));
    }

    #[test]
    fn bf16_is_held_to_the_error_of_bf16_elsewhere() {
        let found = |last: f32, greedy: &[u32]| goldens().compare(&[1.0, 2.0, 3.0, 4.0, 5.0, last], greedy, BF16);
        assert!(found(6.149, &[2, 1]).agrees);
        assert!(!found(6.151, &[2, 1]).agrees);
        // The other implementation's error in bf16 does not count for a cache in fp8.
        let fp8 = Precision { cache: DType::E4m3, ..BF16 };
        let found_in_fp8 = |last: f32| goldens().compare(&[1.0, 2.0, 3.0, 4.0, 5.0, last], &[2, 1], fp8);
        assert!(found_in_fp8(6.3).agrees && !found_in_fp8(6.4).agrees);
        // With an error of 0.06, the second decision (margin 0.1) is in doubt; the first is not.
        let near = found(6.06, &[2, 0]);
        assert!(near.agrees && near.to_string().ends_with("; 1 of 2 greedy tokens, 1 beyond doubt"), "{near}");
        assert!(!found(6.06, &[1, 1]).agrees);
        let silent = file(|tensors| tensors.retain(|t| t.0 != "logits_bf16" && t.0 != "greedy_margin"));
        let compared = Goldens::parse(&silent).expect("goldens").compare(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.3], &[], BF16);
        assert!(compared.agrees, "{compared}");
        assert!(compared.to_string().contains("4.00e-2 allowed"), "{compared}");
    }

    #[test]
    fn a_context_needs_room_for_every_token_but_the_last() {
        assert_eq!(goldens().positions_needed(), 3);
        let none = Goldens::parse(&file(|tensors| tensors.truncate(3))).expect("goldens");
        assert_eq!(none.positions_needed(), 2);
    }

    #[test]
    fn a_file_that_does_not_fit_itself_is_refused() {
        let error = |change: fn(&mut Tensors)| Goldens::parse(&file(change)).expect_err("refused").to_string();
        assert_eq!(error(|t| drop(t.remove(0))), "expected `input_ids` [positions], found none");
        assert_eq!(error(|t| drop(t.remove(1))), "expected `logits` [2, vocab], found none");
        assert_eq!(error(|t| t[1].2 = vec![3, 2]), "expected `logits` [2, vocab], found [3, 2]");
        assert_eq!(error(|t| t[0].1 = Dtype::F64), "expected `input_ids` of type I64 or I32 or U32, found F64");
        assert_eq!(error(|t| t[2].2 = vec![6]), "expected `logits_bf16` [2, 3], found [6]");
        assert_eq!(
            error(|t| t[3].3[0] = 3),
            "expected ids of `greedy_ids` from 0 to below 3, the vocabulary of `logits`, found 3"
        );
        assert!(error(|t| t[0].3[7] = 0x80).ends_with("found -9223372036854775808"));
        assert_eq!(
            error(|t| t[1].3[..4].copy_from_slice(&f32::NAN.to_le_bytes())),
            "expected finite values in `logits`, found NaN at 0"
        );
        assert!(
            Goldens::parse(b"no such thing").expect_err("refused").to_string().starts_with("expected a safetensors")
        );
    }
}
