//! Owns rounding to nearest: a row of values to codes and scales, each scale the one with the least squared error that was tried.
//!
//! Nothing here knows what the weights are for. Checkpoints that were calibrated (GPTQ, AWQ, llm-compressor) are imported as they are.

use crate::format::{Code, E4M3_MAX, Format, FormatPlan, ScaleCode, name_of, to_e2m1, to_e4m3};
use crate::model::coded::CodedRow;
use crate::model::graph::{Linear, ModelGraph, Tensor, TensorId};
use crate::model::weights::Weights;

/// A plan that does not fit a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("`precision.layers` names layer {layer}, the model has {layers}")]
    Layer { layer: u32, layers: usize },
    #[error(
        "`precision` asks for {asked} of tensor `{tensor}`, which the checkpoint stores as {stored}: weights are computed as they \
         are stored, and are not rounded again; set `weights = \"bf16\"`"
    )]
    Stored { tensor: String, asked: String, stored: Format },
}

/// Gives the matrices of a model the formats that a plan asks for. Their values are rounded when they are read.
///
/// # Errors
/// A layer that is not there, or a matrix that the checkpoint stores in another format.
pub fn round_matrices(graph: &mut ModelGraph, weights: &mut Weights, plan: &FormatPlan) -> Result<(), PlanError> {
    let layers = graph.layers.len();
    if let Some((&layer, _)) = plan.layers.iter().find(|(layer, _)| **layer as usize >= layers) {
        return Err(PlanError::Layer { layer, layers });
    }
    if let Some(format) = plan.of(None) {
        let head = graph.head.weight.tensor;
        if head == graph.embed && !graph.formats.contains_key(&head) {
            // The embedding keeps its values: one row of it is read in a step.
            let Tensor { name, dtype, shape } = graph.tensor(head).clone();
            graph.head.weight.tensor = weights.rounded_copy(head, format);
            graph.tensors.push(Tensor { name, dtype, shape });
            graph.formats.insert(graph.head.weight.tensor, format);
        } else {
            round_tensor(graph, weights, head, format)?;
        }
    }
    for layer in 0..layers {
        let Some(format) = plan.of(Some(layer as u32)) else { continue };
        let tensors: Vec<TensorId> = linears(graph, layer).map(|linear| linear.weight.tensor).collect();
        for tensor in tensors {
            round_tensor(graph, weights, tensor, format)?;
        }
    }
    Ok(())
}

fn linears(graph: &ModelGraph, layer: usize) -> impl Iterator<Item = &Linear> {
    let (attn, mlp) = (&graph.layers[layer].attn, &graph.layers[layer].mlp);
    [&attn.q, &attn.k, &attn.v, &attn.o].into_iter().chain(&mlp.gate).chain([&mlp.up, &mlp.down])
}

fn round_tensor(graph: &mut ModelGraph, weights: &mut Weights, id: TensorId, format: Format) -> Result<(), PlanError> {
    match graph.formats.get(&id) {
        Some(stored) if *stored == format => Ok(()),
        Some(&stored) => {
            let (tensor, asked) = (graph.tensor(id).name.clone(), name_of(format));
            Err(PlanError::Stored { tensor, asked, stored })
        }
        None => {
            weights.round(id, format);
            graph.formats.insert(id, format);
            Ok(())
        }
    }
}

/// Scales that are tried, as fractions of the one that reaches the largest value: clipping it can make all others finer.
const FRACTIONS: [f32; 6] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.7];

/// Rounds a row to `format`: for each group, or for the whole row, the best of a few scales, refined to the least squares of its codes.
///
/// # Panics
/// If the format is plain, or has zero points or scales of both kinds, which this does not choose.
pub fn round_row(format: Format, values: &[f32], out: &mut CodedRow) {
    let Format { code, groups, row_scales } = format;
    assert!(!code.plain() && groups.is_some() != row_scales, "a format with scales of one kind");
    out.codes.clear();
    out.scales.clear();
    out.zeros.clear();
    out.row_scale = 1.0;
    match groups {
        None => out.row_scale = round_group(code, ScaleCode::F32, values, &mut out.codes),
        Some(groups) => {
            assert!(!groups.zeros, "no zero points");
            for values in values.chunks(groups.k as usize) {
                let scale = round_group(code, groups.scale, values, &mut out.codes);
                out.scales.push(scale);
            }
        }
    }
}

/// The codes of a group with its best scale, which is returned.
fn round_group(code: Code, scale_code: ScaleCode, values: &[f32], codes: &mut Vec<u8>) -> f32 {
    let (mut least, mut most) = (0.0f32, 0.0f32);
    for &value in values {
        (least, most) = (least.min(value), most.max(value));
    }
    let reach = most.max(-least);
    let first = codes.len();
    if reach == 0.0 || !reach.is_finite() {
        codes.extend(values.iter().map(|_| nearest(code, 0.0)));
        return 0.0;
    }
    let mut best = (f64::INFINITY, 0.0);
    let mut consider = |scale: f32| {
        let scale = scale_code.round(scale);
        if scale != 0.0 && scale.is_finite() {
            let (error, refined) = error_of(code, scale, values);
            if error < best.0 {
                best = (error, scale);
            }
            return refined;
        }
        scale
    };
    for scale in candidates(code, least, most) {
        // The scale that fits the codes best; with it the codes may change, so it is judged anew.
        let refined = consider(scale);
        consider(refined);
    }
    let scale = best.1;
    codes.extend(values.iter().map(|value| nearest(code, if scale == 0.0 { 0.0 } else { value / scale })));
    debug_assert_eq!(codes.len() - first, values.len());
    scale
}

/// Scales to try for values from `least` to `most`.
fn candidates(code: Code, least: f32, most: f32) -> Vec<f32> {
    let reach = most.max(-least);
    match code {
        Code::Int8 => vec![reach / 127.0],
        Code::E4m3 => vec![reach / E4M3_MAX],
        // One more step on the negative side, which the larger end takes: the sign of a scale is free.
        Code::Int4 => {
            let far = if most >= -least { -most / 8.0 } else { least / -8.0 };
            FRACTIONS.iter().flat_map(|f| [far * f, reach / 7.0 * f]).collect()
        }
        // Powers of two have no finer choice than the next one.
        Code::E2m1 => vec![reach / 6.0, reach / 4.0, reach / 8.0],
        Code::F32 | Code::Bf16 => vec![],
    }
}

/// Squared error of values rounded with `scale`, and the scale with the least squared error for the same codes.
fn error_of(code: Code, scale: f32, values: &[f32]) -> (f64, f32) {
    let inverse = 1.0 / scale;
    let (mut error, mut both, mut square) = (0.0f64, 0.0f64, 0.0f64);
    for &value in values {
        let unit = code.value(nearest(code, value * inverse)) - code.implied_zero();
        let off = value - unit * scale;
        error += f64::from(off * off);
        both += f64::from(unit * value);
        square += f64::from(unit * unit);
    }
    (error, if square > 0.0 { (both / square) as f32 } else { scale })
}

/// The code nearest to `value`, in units of the scale.
fn nearest(code: Code, value: f32) -> u8 {
    match code {
        // -128 is left out: no scale needs it, and some kernels split sign and size.
        Code::Int8 => value.round_ties_even().clamp(-127.0, 127.0) as i8 as u8,
        Code::Int4 => (value.round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8,
        Code::E4m3 => to_e4m3(value),
        Code::E2m1 => to_e2m1(value),
        Code::F32 | Code::Bf16 => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn normal(random: &mut Random) -> f32 {
        ((0..12).map(|_| random.unit()).sum::<f64>() - 6.0) as f32
    }

    /// Relative error of a row of normal values, in percent.
    fn error(format: Format) -> f64 {
        let mut random = Random::new(7);
        let mut codes = CodedRow::default();
        let (mut off, mut all) = (0.0, 0.0);
        for _ in 0..16 {
            let values: Vec<f32> = (0..2048).map(|_| normal(&mut random)).collect();
            round_row(format, &values, &mut codes);
            let mut read = vec![0.0; 2048];
            codes.values(format, &mut read);
            off += values.iter().zip(&read).map(|(v, r)| f64::from((v - r) * (v - r))).sum::<f64>();
            all += values.iter().map(|v| f64::from(v * v)).sum::<f64>();
        }
        (off / all).sqrt() * 100.0
    }

    /// What was measured of these formats on normal weights, in percent of the output: int8 0.8, fp8 2.7, int4 11, 10 and 9.6 with
    /// groups of 128, 64 and 32, MXFP4 12.
    #[test]
    fn errors_are_those_of_the_formats() {
        let int4 = |k| Format::by_group(Code::Int4, k, ScaleCode::F16, false);
        for (format, least, most) in [
            (Format::by_row(Code::Int8), 0.5, 0.9),
            (Format::by_row(Code::E4m3), 2.0, 2.8),
            (int4(128), 8.0, 11.0),
            (int4(64), 7.0, 10.0),
            (int4(32), 6.0, 9.6),
            (Format::by_group(Code::E2m1, 32, ScaleCode::E8m0, false), 8.0, 12.5),
        ] {
            let error = error(format);
            assert!((least..most).contains(&error), "{format}: {error}");
        }
    }

    #[test]
    fn values_that_have_codes_keep_them() {
        for code in [Code::Int8, Code::Int4, Code::E4m3, Code::E2m1] {
            let format = if code == Code::E2m1 {
                Format::by_group(code, 32, ScaleCode::E8m0, false)
            } else {
                Format::by_row(code)
            };
            let codes: Vec<u8> = match code {
                Code::Int8 => (129..=255).chain(0..=127).collect(),
                Code::E4m3 => (0..=255).filter(|c| c & 0x7f != 0x7f).collect(),
                _ => (0..16).cycle().take(32).collect(),
            };
            let values: Vec<f32> = codes.iter().map(|&c| 0.25 * (code.value(c) - code.implied_zero())).collect();
            let (mut row, mut read) = (CodedRow::default(), vec![0.0; values.len()]);
            round_row(format, &values, &mut row);
            row.values(format, &mut read);
            assert_eq!(read, values, "{format}");
        }
        // No scale makes zeros anything else.
        let mut row = CodedRow::default();
        round_row(Format::by_row(Code::Int8), &[0.0; 5], &mut row);
        assert_eq!((row.codes, row.row_scale), (vec![0; 5], 0.0));
    }
}
