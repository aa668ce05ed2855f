//! Tests the kernels' ops against their formulas: the source of the kernels, compiled for this CPU. `ops.cc` has the cases of the decode
//! kernel, `rows_ops.cc` those of batch kernels, `waves_ops.cc` those of wave kernels, all with the formulas in double precision.
//!
//! Needs a C++ compiler, and says so where there is none.

use std::path::{Path, PathBuf};

use crate::sampling::compiled;
use crate::skipped;

/// Each case, and how often it runs, with different numbers or at different positions.
const CASES: [(&str, usize); 139] = [
    ("matvec-store-bias", 3),
    ("matvec-rms-ragged", 3),
    ("matvec-two-at-once", 3),
    ("matvec-layer-act", 3),
    ("matvec-gated", 3),
    ("matvec-gated-by", 3),
    ("matvec-residual-chunks", 3),
    ("matvec-logits", 3),
    ("head-in-text", 1),
    ("join", 6),
    ("join-bf16", 6),
    ("matvec-three-devices", 3),
    ("matvec-three-devices-gated-bf16", 3),
    ("matvec-three-devices-logits", 3),
    ("matvec-units-of-4", 3),
    ("matvec-units-of-2", 3),
    ("matvec-bf16", 3),
    ("matvec-tensor-bf16", 3),
    ("matvec-tensor-gated-bf16", 3),
    ("matvec-tensor-units-of-4-bf16", 3),
    ("matvec-tensor-chunks-bf16", 3),
    ("codes-int8-rows", 3),
    ("codes-e4m3-rows", 3),
    ("codes-e4m3-blocks", 3),
    ("codes-int8-zeros", 3),
    ("codes-int4-128", 3),
    ("codes-int4-64-zeros", 3),
    ("codes-int4-32-zeros", 3),
    ("codes-int4-32-minima", 3),
    ("codes-int8-32-minima", 3),
    ("codes-int4-32-six-bits", 3),
    ("codes-int8-32-six-bits", 3),
    ("codes-mxfp4", 3),
    ("codes-e2m1-both", 3),
    ("tensor-int8-rms-bf16", 3),
    ("tensor-int4-rms-bf16", 3),
    ("tensor-int8-rows", 3),
    ("tensor-int8-zeros", 3),
    ("tensor-int8-32", 3),
    ("tensor-e4m3-rows", 3),
    ("tensor-e4m3-blocks", 3),
    ("tensor-e4m3-32", 3),
    ("tensor-int4-128", 3),
    ("tensor-int4-64-zeros", 3),
    ("tensor-int4-32-zeros", 3),
    ("tensor-int4-32-minima", 3),
    ("tensor-int4-32-wide-minima", 3),
    ("tensor-int8-32-minima", 3),
    ("tensor-int4-32-six-bits", 3),
    ("tensor-int4-32-long-six-bits", 3),
    ("tensor-int8-32-six-bits", 3),
    ("tensor-mxfp4", 3),
    ("tensor-e2m1-both", 3),
    ("tensor-int8-ahead", 3),
    ("tensor-int4-ahead", 3),
    ("tensor-int4-ahead-minima", 3),
    ("tensor-int4-ahead-six-bits", 3),
    ("tensor-int8-gated-bf16", 3),
    ("tensor-int4-layer-bf16", 3),
    ("tensor-int8-logits", 3),
    ("tensor-e2m1-whole-chunks", 3),
    ("tensor-e4m3-batches", 3),
    ("tensor-int8-batches", 3),
    ("tensor-e2m1-logits", 3),
    ("scores", 3),
    ("scores-bf16", 3),
    ("scores-tensor", 3),
    ("scores-tensor-units-of-4", 3),
    ("matvec-clamped", 3),
    ("matvec-tensor-clamped-bf16", 3),
    ("chosen", 3),
    ("chosen-tensor-bf16", 3),
    ("chosen-units-of-4", 3),
    ("chosen-ragged-gated-bf16", 3),
    ("chosen-tensor-clamped-bf16", 3),
    ("weighed-tensor-gated-bf16", 3),
    ("weighed-clamped-bf16", 3),
    ("weighed-act", 3),
    ("chosen-int8-rows", 3),
    ("chosen-tensor-e4m3-rows-bf16", 3),
    ("chosen-tensor-mxfp4-bf16", 3),
    ("chosen-int4-both-bf16", 3),
    ("route", 4),
    ("route-odd-whole", 4),
    ("route-one", 4),
    ("route-128", 4),
    ("route-512-corrected", 4),
    ("route-all", 4),
    ("route-groups", 4),
    ("route-groups-of-two", 4),
    ("route-groups-of-one", 4),
    ("combine", 3),
    ("combine-shared-bf16", 3),
    ("combine-gated-stored-bf16", 3),
    ("combine-one-unpublished", 3),
    ("combine-31-bf16", 3),
    ("norm_add-owned", 3),
    ("norm_add-replicated", 3),
    ("norm_add-bf16", 3),
    ("attention-halves", 5),
    ("attention-pairs-partial", 5),
    ("attention-window", 5),
    ("attention-centred", 5),
    ("attention-splits", 5),
    ("attention-three-devices-splits", 5),
    ("attention-fp8-splits", 5),
    ("attention-fp8-window", 5),
    ("attention-tensor-bf16", 5),
    ("attention-tensor-fp8-bf16", 5),
    ("attention-tensor-fp8-splits-bf16", 5),
    ("attention-tensor-fp8-128-bf16", 5),
    ("attention-tensor-fp8-256-bf16", 5),
    ("attention-tensor-part-bf16", 5),
    ("attention-tensor-part-256-bf16", 5),
    ("attention-tensor-fp8-part-256-bf16", 5),
    ("attention-sinks-splits", 5),
    ("attention-gate", 5),
    ("attention-scaled", 5),
    ("attention-after-tensor-bf16", 5),
    ("attention-featured", 5),
    ("attention-featured-splits", 5),
    ("attention-featured-bf16", 5),
    ("attention-featured-tensor-bf16", 5),
    ("attention-featured-tensor-splits-bf16", 5),
    ("mix-parts", 7),
    ("mix-wide", 7),
    ("mix-128", 7),
    ("mix-12", 7),
    ("mix-bf16", 7),
    ("convolve", 7),
    ("convolve-bias", 7),
    ("convolve-two-bf16", 7),
    ("scan-parts", 7),
    ("scan-wide", 7),
    ("scan-64", 7),
    ("scan-bf16", 7),
    ("group_norm", 2),
    ("group_norm-gated", 2),
    ("group_norm-gated-bf16", 2),
];
const CASES_OF_ROWS: [(&str, usize); 153] = [
    ("matvec-8-bf16", 2),
    ("matvec-8-long-bf16", 2),
    ("matvec-8-even-bf16", 2),
    ("matvec-8-gated-bf16", 2),
    ("matvec-8-layer-bf16", 2),
    ("matvec-8-logits-bf16", 2),
    ("matvec-8-three-devices-bf16", 2),
    ("matvec-16-three-devices-gated-bf16", 2),
    ("matvec-three-devices-logits", 2),
    ("matvec-8-units-of-4-bf16", 2),
    ("matvec-8-units-of-2-bf16", 2),
    ("matvec-8-short-bf16", 2),
    ("matvec-16-bf16", 2),
    ("matvec-16-long-bf16", 2),
    ("matvec-16-odd-bf16", 2),
    ("matvec-16-gated-bf16", 2),
    ("matvec-16-layer-bf16", 2),
    ("matvec-16-logits-bf16", 2),
    ("matvec-16-units-of-4-bf16", 2),
    ("matvec-16-short-bf16", 2),
    ("matvec-16-moved-bf16", 2),
    ("matvec-16-moved-gated-bf16", 2),
    ("matvec-16-moved-even-bf16", 2),
    ("matvec-16-sharing-first-bf16", 2),
    ("matvec-16-sharing-second-bf16", 2),
    ("matvec-32-bf16", 2),
    ("matvec-32-long-bf16", 2),
    ("matvec-32-layer-bf16", 2),
    ("matvec-64-gated-bf16", 2),
    ("matvec-64-logits-bf16", 2),
    ("matvec-64-units-of-4-bf16", 2),
    ("matvec-32-narrow-bf16", 2),
    ("matvec-lanes", 2),
    ("matvec-lanes-layer", 2),
    ("matvec-lanes-gated", 2),
    ("matvec-lanes-gated-by", 2),
    ("matvec-lanes-residual", 2),
    ("codes-8-int8-rows", 2),
    ("codes-8-int8-32-zeros", 2),
    ("codes-8-int8-128", 2),
    ("codes-8-e4m3-rows", 2),
    ("codes-8-e4m3-64-both", 2),
    ("codes-8-int4-128", 2),
    ("codes-8-int4-64-zeros", 2),
    ("codes-8-int4-32-zeros", 2),
    ("codes-8-int4-32-minima", 2),
    ("codes-8-int8-32-minima", 2),
    ("codes-8-int4-32-six-bits", 2),
    ("codes-8-int8-32-six-bits", 2),
    ("codes-8-mxfp4", 2),
    ("codes-8-e2m1-both", 2),
    ("codes-16-int8-rows", 2),
    ("codes-16-int8-64-zeros", 2),
    ("codes-16-e4m3-128", 2),
    ("codes-16-int4-128-zeros", 2),
    ("codes-16-int4-32", 2),
    ("codes-16-int4-32-minima", 2),
    ("codes-16-int8-32-minima", 2),
    ("codes-16-int4-32-six-bits", 2),
    ("codes-16-int8-32-six-bits", 2),
    ("codes-16-mxfp4", 2),
    ("codes-16-moved-int8-rows", 2),
    ("codes-16-moved-e4m3-rows", 2),
    ("codes-16-moved-int4-128", 2),
    ("codes-16-moved-int4-32-zeros", 2),
    ("codes-16-moved-int4-32-minima", 2),
    ("codes-16-moved-int4-32-six-bits", 2),
    ("codes-16-moved-e2m1-both", 2),
    ("codes-8-gated-bf16", 2),
    ("codes-16-layer-bf16", 2),
    ("codes-16-logits-bf16", 2),
    ("codes-lanes-int8-rows", 2),
    ("codes-lanes-e4m3-both", 2),
    ("codes-lanes-int8-zeros", 2),
    ("codes-lanes-int4-128", 2),
    ("codes-lanes-int4-32-zeros", 2),
    ("codes-lanes-int4-32-minima", 2),
    ("codes-lanes-int4-32-six-bits", 2),
    ("codes-lanes-int8-32-six-bits", 2),
    ("codes-lanes-mxfp4", 2),
    ("norm_add", 1),
    ("norm_add-bf16", 1),
    ("embed", 1),
    ("norm_add-64-bf16", 1),
    ("embed-bf16", 1),
    ("embed-64-bf16", 1),
    ("embed-int8", 1),
    ("embed-fp8-bf16", 1),
    ("embed-int4-bf16", 1),
    ("embed-int4-zeros", 1),
    ("embed-int4-minima", 1),
    ("embed-mxfp4-bf16", 1),
    ("select", 1),
    ("select-64", 1),
    ("scores-bf16", 1),
    ("scores-odd-bf16", 1),
    ("scores-lanes", 1),
    ("route", 4),
    ("route-odd", 4),
    ("route-corrected", 4),
    ("route-groups", 4),
    ("combine", 2),
    ("combine-shared-bf16", 2),
    ("combine-gated-stored-bf16", 2),
    ("combine-unpublished-bf16", 2),
    ("chosen-8-gated-bf16", 1),
    ("chosen-8-slots-bf16", 1),
    ("chosen-16-clamped-bf16", 1),
    ("chosen-16-slots-bf16", 1),
    ("chosen-16-act-bf16", 1),
    ("chosen-lanes-slots", 1),
    ("chosen-lanes-gated", 1),
    ("chosen-8-e4m3-rows-bf16", 1),
    ("chosen-16-int4-32-bf16", 1),
    ("convolve", 3),
    ("convolve-bias-bf16", 3),
    ("convolve-two-bf16", 3),
    ("scan", 3),
    ("scan-bf16", 3),
    ("scan-64-bf16", 3),
    ("group_norm", 1),
    ("group_norm-gated-bf16", 1),
    ("group_norm-16-bf16", 1),
    ("attention-three-devices-bf16", 5),
    ("attention-halves-bf16", 5),
    ("attention-window-bf16", 5),
    ("attention-pairs-bf16", 5),
    ("attention-128-bf16", 5),
    ("attention-part-bf16", 5),
    ("attention-part-256-bf16", 5),
    ("attention-64-bf16", 5),
    ("attention-32-window-bf16", 5),
    ("attention-fp8-halves-bf16", 5),
    ("attention-fp8-window-bf16", 5),
    ("attention-fp8-pairs-128-bf16", 5),
    ("attention-fp8-256-bf16", 5),
    ("attention-fp8-64-bf16", 5),
    ("attention-fp8-lanes", 5),
    ("attention-lanes", 5),
    ("attention-64-lanes-bf16", 5),
    ("attention-lanes-window", 5),
    ("attention-lanes-centred", 5),
    ("attention-gate-bf16", 5),
    ("attention-featured-bf16", 5),
    ("attention-featured-fp8-bf16", 5),
    ("attention-featured-lanes", 5),
    ("attention-featured-64-lanes-bf16", 5),
    ("mix", 4),
    ("mix-2-parts", 4),
    ("mix-3-parts", 4),
    ("mix-16-3-parts-bf16", 4),
    ("mix-8-parts-bf16", 4),
    ("mix-64-5-parts-bf16", 4),
];
const CASES_OF_WAVES: [(&str, usize); 221] = [
    ("rows-embed", 1),
    ("rows-embed-bf16", 1),
    ("rows-branch", 1),
    ("rows-branch-bf16", 1),
    ("rows-layer-2-warps", 1),
    ("rows-layer-2-warps-bf16", 1),
    ("rows-embed-4-warps", 1),
    ("rows-embed-4-warps-bf16", 1),
    ("rows-8-warps", 1),
    ("rows-8-warps-bf16", 1),
    ("rows-slots", 1),
    ("rows-slots-bf16", 1),
    ("rows-slots-of-two", 1),
    ("rows-slots-of-two-bf16", 1),
    ("rows-of-one", 1),
    ("rows-of-one-bf16", 1),
    ("rows-as-they-are", 1),
    ("rows-as-they-are-bf16", 1),
    ("rows-sum-alone", 1),
    ("matmul-store-bf16", 1),
    ("matmul-store-operand-bf16", 1),
    ("matmul-act-bf16", 1),
    ("matmul-act-plain-bf16", 1),
    ("matmul-gated-bf16", 1),
    ("matmul-gated-bias-bf16", 1),
    ("matmul-residual", 1),
    ("matmul-residual-odd", 1),
    ("matmul-units-of-4-bf16", 1),
    ("matmul-units-of-2-bf16", 1),
    ("matmul-units-of-2-long-bf16", 1),
    ("wide-rows", 1),
    ("wide-rows-bf16", 1),
    ("shared-rows", 1),
    ("shared-rows-bf16", 1),
    ("shared-store-bf16", 1),
    ("shared-store-operand-bf16", 1),
    ("shared-act-bf16", 1),
    ("shared-gated-bf16", 1),
    ("shared-residual", 1),
    ("shared-sums", 1),
    ("shared-sums-bf16", 1),
    ("shared-sums-short", 1),
    ("shared-sums-short-bf16", 1),
    ("shared-factor-bf16", 1),
    ("shared-factor-gated-bf16", 1),
    ("wide-store-bf16", 1),
    ("wide-store-operand-bf16", 1),
    ("wide-act-bf16", 1),
    ("wide-gated-bf16", 1),
    ("wide-gated-bias-bf16", 1),
    ("wide-residual", 1),
    ("wide-residual-odd", 1),
    ("codes-int8-rows", 1),
    ("codes-int8-32-zeros", 1),
    ("codes-e4m3-rows", 1),
    ("codes-e4m3-64-both", 1),
    ("codes-int4-128", 1),
    ("codes-int4-64-zeros", 1),
    ("codes-int4-32-gated-bf16", 1),
    ("codes-mxfp4", 1),
    ("codes-e2m1-both", 1),
    ("wide-int8-rows", 1),
    ("wide-int8-32-zeros", 1),
    ("wide-e4m3-rows", 1),
    ("wide-e4m3-128-both-bf16", 1),
    ("wide-int4-128-gated-bf16", 1),
    ("wide-int4-64-zeros", 1),
    ("wide-int4-32-gated-bf16", 1),
    ("wide-mxfp4", 1),
    ("wide-e2m1-rows", 1),
    ("wide-attention-bf16", 1),
    ("shared-attention-bf16", 1),
    ("attention-halves-bf16", 3),
    ("attention-window-cap-bf16", 1),
    ("attention-pairs-3-bf16", 1),
    ("attention-3-bf16", 1),
    ("attention-2-of-6-bf16", 1),
    ("attention-8-bf16", 1),
    ("attention-128-bf16", 1),
    ("attention-192-bf16", 1),
    ("attention-256-bf16", 1),
    ("attention-part-256-bf16", 1),
    ("attention-gate-bf16", 1),
    ("attention-featured-bf16", 1),
    ("steps-embed", 1),
    ("steps-embed-bf16", 1),
    ("steps-embed-later", 1),
    ("steps-embed-later-bf16", 1),
    ("steps-addend", 1),
    ("steps-addend-bf16", 1),
    ("steps-parts-norm", 1),
    ("steps-parts-norm-bf16", 1),
    ("steps-addend-alone", 1),
    ("steps-branch", 1),
    ("steps-branch-bf16", 1),
    ("steps-slots", 1),
    ("steps-slots-bf16", 1),
    ("steps-slots-4", 1),
    ("steps-slots-4-bf16", 1),
    ("steps-taken", 1),
    ("steps-taken-bf16", 1),
    ("steps-embed-4", 1),
    ("steps-embed-4-bf16", 1),
    ("steps-addend-2", 1),
    ("steps-addend-2-bf16", 1),
    ("steps-branch-3", 1),
    ("steps-branch-3-bf16", 1),
    ("steps-8-groups-bf16", 1),
    ("steps-4-groups-bf16", 1),
    ("steps-gated-bf16", 1),
    ("steps-gated-64-bf16", 1),
    ("steps-residual", 1),
    ("steps-residual-odd", 1),
    ("steps-parts", 1),
    ("steps-parts-32", 1),
    ("steps-packets-32", 1),
    ("steps-packets-64", 1),
    ("steps-parts-3", 1),
    ("steps-units-of-4-parts", 1),
    ("steps-units-of-2-bf16", 1),
    ("steps-factor-8-groups-bf16", 1),
    ("steps-factor-gated-bf16", 1),
    ("steps-factor-parts", 1),
    ("steps-factor-logits", 1),
    ("steps-factor-int8", 1),
    ("steps-factor-20-bf16", 1),
    ("steps-held-bf16", 1),
    ("steps-held-gated-bf16", 1),
    ("steps-held-alike", 1),
    ("steps-held-long-bf16", 1),
    ("steps-held-all", 1),
    ("steps-held-units-of-4-bf16", 1),
    ("steps-held-factor-bf16", 1),
    ("steps-held-logits", 1),
    ("steps-held-logits-128", 1),
    ("steps-tiles-bf16", 1),
    ("steps-tiles-few-bf16", 1),
    ("steps-tiles-one-bf16", 1),
    ("steps-tiles-factor-bf16", 1),
    ("steps-tiles-32-bf16", 1),
    ("steps-tiles-int4-128-bf16", 1),
    ("steps-tiles-int4-128-zeros-bf16", 1),
    ("steps-tiles-int4-32-factor-bf16", 1),
    ("steps-tiles-int4-64-bf16", 1),
    ("steps-tiles-e4m3-rows-bf16", 1),
    ("steps-tiles-k-bf16", 1),
    ("steps-tiles-k-int4-128-bf16", 1),
    ("steps-tiles-two-bf16", 1),
    ("steps-tiles-parts", 1),
    ("steps-tiles-logits", 1),
    ("steps-to-tiles", 1),
    ("steps-to-tiles-bf16", 1),
    ("steps-to-tiles-4", 1),
    ("steps-to-tiles-4-bf16", 1),
    ("steps-factors-alike", 1),
    ("pairs-16", 1),
    ("pairs-16-bf16", 1),
    ("pairs-32", 1),
    ("pairs-32-bf16", 1),
    ("pairs-64", 1),
    ("pairs-64-bf16", 1),
    ("pairs-64-units", 1),
    ("pairs-64-units-bf16", 1),
    ("pairs-64-rounds", 1),
    ("pairs-64-rounds-bf16", 1),
    ("pairs-alone", 1),
    ("pairs-units-of-4", 1),
    ("pairs-units-of-4-bf16", 1),
    ("pairs-units-of-2", 1),
    ("pairs-units-of-2-bf16", 1),
    ("pairs-int8", 1),
    ("pairs-int8-bf16", 1),
    ("pairs-int4-64-zeros", 1),
    ("pairs-int4-64-zeros-bf16", 1),
    ("pairs-e4m3", 1),
    ("pairs-e4m3-bf16", 1),
    ("pairs-to-tiles-64", 1),
    ("pairs-to-tiles-64-bf16", 1),
    ("pairs-to-tiles-32", 1),
    ("pairs-to-tiles-32-bf16", 1),
    ("pairs-tiles", 1),
    ("pairs-tiles-bf16", 1),
    ("pairs-tiles-128", 1),
    ("pairs-tiles-128-bf16", 1),
    ("steps-logits", 1),
    ("steps-logits-8-groups", 1),
    ("steps-logits-32", 1),
    ("steps-logits-64", 1),
    ("steps-int8-rows", 1),
    ("steps-int8-32-zeros-parts", 1),
    ("steps-e4m3-rows", 1),
    ("steps-e4m3-64-both-parts", 1),
    ("steps-int4-128", 1),
    ("steps-int4-64-zeros-parts", 1),
    ("steps-int4-32-gated-bf16", 1),
    ("steps-mxfp4", 1),
    ("steps-e2m1-both", 1),
    ("steps-logits-int8", 1),
    ("steps-halves-bf16", 1),
    ("steps-packets-bf16", 1),
    ("steps-window-bf16", 1),
    ("steps-window-cap-bf16", 1),
    ("steps-128-bf16", 1),
    ("steps-128-of-8-bf16", 1),
    ("steps-256-bf16", 1),
    ("steps-16-of-16-bf16", 1),
    ("steps-part-bf16", 1),
    ("steps-sinks-bf16", 1),
    ("steps-gate-bf16", 1),
    ("steps-featured-bf16", 1),
    ("splits-halves-bf16", 1),
    ("splits-alike-bf16", 1),
    ("splits-window-bf16", 1),
    ("splits-window-cap-bf16", 1),
    ("splits-128-bf16", 1),
    ("splits-128-of-8-bf16", 1),
    ("splits-256-bf16", 1),
    ("splits-16-of-16-bf16", 1),
    ("splits-gate-bf16", 1),
    ("splits-featured-bf16", 1),
    ("splits-128-rows-bf16", 1),
];
const CASES_OF_BITS: [(&str, usize); 7] = [
    ("same-halves", 1),
    ("same-window", 1),
    ("same-128", 1),
    ("same-256", 1),
    ("same-splits", 1),
    ("same-splits-128", 1),
    ("same-splits-window", 1),
];
/// Tolerances, as largest difference divided by the largest value: for sums in fp32, for sums from which a larger offset was subtracted,
/// and for results rounded to bf16 (half of 2^-7 of a value).
const FP32: f64 = 1e-6;
const OFFSET: f64 = 1e-5;
const BF16: f64 = 4e-3;

/// The level of programs with many cases, which take two or three times as long to optimise as to compile and run once.
const MANY: &str = "-O0";
/// The level of programs whose few cases run for long.
const FEW: &str = "-O1";

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// Name and largest difference of every run of the cases in `source`, in order. `None`: there is no compiler.
fn run(source: &Path, kernels: &Path, arguments: &[&str]) -> Option<Vec<(String, f64)>> {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [arguments, &["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it")]].concat();
    let output = compiled(source, &arguments, kernels, folder.path())?.output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, values, difference] = words[..] else { panic!("{line}") };
        assert!(values.parse::<usize>().unwrap() > 8, "{line}");
        (name.to_owned(), difference.parse().unwrap())
    });
    Some(lines.collect())
}

fn tolerance(name: &str) -> f64 {
    match name {
        _ if name.ends_with("bf16") => BF16,
        _ if name.starts_with("tensor") => OFFSET,
        _ => FP32,
    }
}

fn no_compiler(test: &str) {
    skipped(test, "C++ compiler", "`c++` compiles kernels for this CPU");
}

/// Asserts that every case of `source` ran as often as expected, and computed its formula.
fn holds(test: &str, source: &str, arguments: &[&str], cases: &[(&str, usize)]) {
    let Some(found) = run(Path::new(source), &kernels(), arguments) else { return no_compiler(test) };
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    let expected: Vec<&str> = cases.iter().flat_map(|&(name, runs)| std::iter::repeat_n(name, runs)).collect();
    assert_eq!(names, expected);
    for (name, difference) in &found {
        // Written with `<=`, so that NaN counts as a difference.
        assert!(*difference <= tolerance(name), "{name}: {difference:e}");
    }
}

#[test]
fn ops_compute_their_formulas() {
    holds("ops_compute_their_formulas", "ops.cc", &[MANY], &CASES);
}

#[test]
fn ops_of_rows_compute_their_formulas() {
    holds("ops_of_rows_compute_their_formulas", "rows_ops.cc", &[MANY], &CASES_OF_ROWS);
}

#[test]
fn ops_of_waves_compute_their_formulas() {
    holds("ops_of_waves_compute_their_formulas", "waves_ops.cc", &[MANY], &CASES_OF_WAVES);
}

/// Attention of a step in waves: alone, beside 1, 4, 15 and 32 other rows, and of a text in cuts of 1, 7, 16 and 64 rows.
#[test]
fn attention_of_waves_gives_a_row_the_bits_that_it_has_alone() {
    let test = "attention_of_waves_gives_a_row_the_bits_that_it_has_alone";
    holds(test, "waves_ops.cc", &[FEW, "-DSAME_BITS"], &CASES_OF_BITS);
}

/// A header, a text in it, its replacement, and the case that must differ.
type Edit = (&'static str, &'static str, &'static str, &'static str);

/// `source` without the cases that no edit names: compiling a case takes longer than running it.
fn with_cases_of(edits: &[Edit], source: &str) -> String {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it").join(source)).unwrap();
    let (before, main) = text.split_once("\nint main").expect("the cases");
    // A line of `main` that names cases is all that there is of them.
    let needed = |line: &&str| {
        let mut names = line.split('"').skip(1).step_by(2).peekable();
        names.peek().is_none() || names.any(|name| edits.iter().any(|(.., case)| *case == name))
    };
    let main: Vec<&str> = main.lines().filter(needed).collect();
    format!("{before}\nint main{}\n", main.join("\n"))
}

/// A folder with the kernels after `edits`, and in it the cases of `source` that these name.
fn edited(source: &str, edits: &[Edit]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    for entry in walkdir::WalkDir::new(kernels()) {
        let entry = entry.unwrap();
        if !entry.file_type().is_file() {
            continue;
        }
        let path = entry.path().strip_prefix(kernels()).unwrap();
        let mut text = std::fs::read_to_string(entry.path()).unwrap();
        for (_, from, to, _) in edits.iter().filter(|(header, ..)| Path::new(header) == path) {
            assert_eq!(text.matches(from).count(), 1, "`{}` has changed: where is `{from}`?", path.display());
            text = text.replace(from, to);
        }
        let copy = folder.path().join(path);
        std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
        std::fs::write(copy, text).unwrap();
    }
    let cases = folder.path().join("cases.cc");
    std::fs::write(&cases, with_cases_of(edits, source)).unwrap();
    (folder, cases)
}

/// Asserts that each of `edits`, all made at once, changes its own case.
fn each_shows(test: &str, source: &str, edits: &[Edit]) {
    let (folder, cases) = edited(source, edits);
    let Some(found) = run(&cases, folder.path(), &[MANY]) else { return no_compiler(test) };
    for (.., case) in edits {
        let differs =
            |(name, difference): &(String, f64)| name == case && (*difference > tolerance(name) || difference.is_nan());
        assert!(found.iter().any(differs), "{case}");
    }
}

/// An op that computes something else differs in its own cases.
#[test]
fn an_op_that_computes_something_else_is_found() {
    let [matvec, formats, stage] = ["ops/matvec.cuh", "ops/matvec_formats.cuh", "runtime/stage.cuh"];
    let records = "ops/attention_records.cuh";
    // Edits of one program concern different cases.
    let [route, combine, join] = ["ops/route.cuh", "ops/combine.cuh", "ops/join.cuh"];
    let programs: [&[Edit]; 7] = [
        // The later one of equal experts, a group by its best, a sum without what is added to it, the factor of a gated shared expert, the
        // bias and the scales of the first part, a result that its share does not multiply.
        &[
            (route, "~warp_max(best == most ? ~mine : 0u)", "warp_max(best == most ? mine : 0u)", "route-128"),
            (route, "warp_sum(weight) + G::ADDED;", "warp_sum(weight);", "route-one"),
            (combine, "__fdividef(G::SHARED_SCALE, 1.f", "__fdividef(1.f, 1.f", "combine-gated-stored-bf16"),
            (matvec, "(int(e.part) + unit) * G::UNIT_ROWS", "unit * G::UNIT_ROWS", "chosen"),
            (matvec, "if constexpr (WEIGHED) return e.share * y;", "", "weighed-tensor-gated-bf16"),
            (matvec, "(int(e.part + e.lo) + local)", "(int(e.lo) + local)", "chosen-tensor-e4m3-rows-bf16"),
            // What is given in the first step, noise of a position of the cache, a residual that is not begun.
            (join, "u64(step) * G::HIDDEN", "0 * G::HIDDEN", "join"),
            (join, "c.position += ahead;", "", "head-in-text"),
            (join, "mine[1] = 0.f;", "", "join-bf16"),
        ],
        // A group by one of its experts, a choice that is not clamped, a slot more than its share, a limit on one side.
        &[
            (join, "goes_on ? p.eps : p.eps_of_model", "p.eps", "join"),
            (route, "second = max(second, min(best, key));", "second = best;", "route-groups-of-two"),
            (matvec, "min(part[0], u32(parts_of<G>(nullptr)) - 1u)", "part[0]", "chosen"),
            (combine, "const float own = __shfl_sync(~0u, share, s);", "const float own = share;", "combine-31-bf16"),
            (matvec, "gate = fminf(gate, G::LIMIT);", "", "matvec-clamped"),
        ],
        &[
            (join, "goes_on ? p.norm : p.norm_of_model", "p.norm", "join"),
            (formats, "ZERO = 8.f", "ZERO = 7.f", "codes-int4-128"),
            (formats, "<< (24 - i % 4 * 8)) >> 24", "<< (24 - i % 4 * 8) >> 24)", "codes-int8-rows"),
            (formats, "OFFSET = 128.f", "OFFSET = 127.f", "tensor-int8-rows"),
            (formats, "OPERAND_SHIFT = 8;", "OPERAND_SHIFT = 7;", "tensor-e4m3-rows"),
            (formats, "held.codes[block] = made_here(", "held.codes[0] = made_here(", "tensor-int8-ahead"),
            (matvec, "y.x *= factor, y.y *= factor;", "y.x *= factor;", "matvec-rms-ragged"),
            ("ops/norm_add.cuh", "own[i] += G::SCALE *", "own[i] += ", "norm_add-owned"),
            (
                "ops/attention.cuh",
                "l[h] = l[h] * shrink + warp_sum(s);",
                "l[h] = l[h] + warp_sum(s);",
                "attention-halves",
            ),
            // Values of even and of odd dimensions in each other's place.
            (
                "ops/attention_tensor.cuh",
                "permute(piece ? v.z : v.x, 0, 0x3120)",
                "permute(piece ? v.z : v.x, 0, 0x2031)",
                "attention-tensor-fp8-128-bf16",
            ),
            // A sink that the sum lacks, a gate that is not applied, queries that do not grow, a norm that is left out.
            (records, "exp_fast(sink - top) : 0.f;", "0.f : 0.f;", "attention-sinks-splits"),
            (records, "a *= by.x;", "", "attention-gate"),
            (records, "1.f + G::QUERY_BETA *", "1.f + 0.f *", "attention-scaled"),
            (
                "ops/attention_tensor.cuh",
                "if constexpr (NORM_AFTER_ROPE_OF<G>) norm(k, row, x);",
                "",
                "attention-after-tensor-bf16",
            ),
        ],
        &[
            (join, "p.left_row + step, col);\n        squares", "step, col);\n        squares", "join"),
            (stage, "round_up(K, PAD)) {", "round_up(K, 32)) {", "codes-mxfp4"),
            (matvec, "? own < n :", "? own < n && c.lane() < 4 :", "tensor-e2m1-logits"),
        ],
        &[
            (join, "u64(row / 8) * (SPANS * 512)", "0", "join-bf16"),
            (matvec, "u32 exponent = 266 -", "u32 exponent = 270 -", "tensor-e4m3-blocks"),
            (matvec, "sums[1] = c.lane() % 2 == 0 ? other : own;", "sums[1] = own;", "tensor-int4-32-zeros"),
        ],
        &[
            (join, "v.y *= both ? factor * weight[col + 1] : 0.f;", "v.y *= factor;", "join"),
            (
                stage,
                "shifted<SHIFT - SECOND>(x[j]), shifted<SHIFT - SECOND>(x[j + 1])",
                "shifted<SHIFT>(x[j]), shifted<SHIFT>(x[j + 1])",
                "tensor-int4-64-zeros",
            ),
            (stage, "SECOND != 0 && k / 2 % 2 != 0", "false", "tensor-int4-layer-bf16"),
            (matvec, "of_unit + (r + 4) % OPERAND_ROWS", "of_unit + r", "tensor-int8-gated-bf16"),
            (matvec, "((u - u0) * UNIT_GRANULES + i * M::WARPS)", "(i * M::WARPS)", "tensor-e2m1-whole-chunks"),
            (matvec, "if (u1 >= M::WARPS * AT_ONCE) scales =", "if (false) scales =", "tensor-int8-batches"),
            (matvec, "if (u0 + M::REDUCE_BATCH < units) scales =", "if (false) scales =", "tensor-e4m3-batches"),
        ],
        &[(matvec, "c.lane() % 4 < 2 ? d[0] : d[2]", "d[0]", "tensor-int4-128")],
    ];
    for edits in programs {
        each_shows("an_op_that_computes_something_else_is_found", "ops.cc", edits);
    }
}

#[test]
fn an_op_of_rows_that_computes_something_else_is_found() {
    let edits = [
        // A part of k that is not added, a phase that is not cleared, positions before the window that are seen, a row that
        // goes on after its last step.
        (
            "rows/matvec.cuh",
            "for (int k = 0; k < K_GROUPS<M>; k++) {\n        const float2",
            "for (int k = 1; k < K_GROUPS<M>; k++) {\n        const float2",
            "matvec-16-bf16",
        ),
        // The other op's epilogue where two share code.
        (
            "rows/matvec.cuh",
            "epilogue.template run<typename decltype(op)::Type>(",
            "epilogue.template run<G>(",
            "matvec-16-sharing-second-bf16",
        ),
        ("rows/words.cuh", "store_word(reinterpret_cast<u32*>(other + at), NO_WORD);", "", "embed"),
        // A table of codes: another row, a scale that is left out, the other half of a byte, zero point and scale of another group.
        ("ops/table.cuh", "u64(token) * G::ROW_BYTES", "0", "embed-int8"),
        ("ops/table.cuh", "return row_scale * (value", "return (value", "embed-fp8-bf16"),
        ("ops/table.cuh", ">> col % 2 * 4", ">> 4", "embed-int4-bf16"),
        ("ops/table.cuh", "row[G::ZEROS_AT + group]", "row[G::ZEROS_AT]", "embed-int4-zeros"),
        ("ops/table.cuh", "G::SCALES_AT + group * SCALE_BYTES;", "G::SCALES_AT;", "embed-mxfp4-bf16"),
        (
            "rows/attention.cuh",
            "start = window && position + 1 > window ? position + 1 - window : 0;",
            "start = 0;",
            "attention-window-bf16",
        ),
        ("rows/select.cuh", "step < r.steps &&", "", "select"),
        // Experts: scores of a row beside those of the one before, the share of another row, the factor of a gated shared expert, the output and the
        // input of the first slot, the bias of the first part, a choice that is not clamped.
        ("rows/matvec.cuh", "e.out + u32(row) * round_up(E::ROWS, 2)", "e.out + u32(row) * E::ROWS", "scores-odd-bf16"),
        ("rows/experts.cuh", "shares[row * INPUTS + s]", "shares[s]", "combine-shared-bf16"),
        ("rows/experts.cuh", "__fdividef(G::SHARED_SCALE, 1.f", "__fdividef(1.f, 1.f", "combine-gated-stored-bf16"),
        (
            "rows/matvec.cuh",
            "S::Slots::OUT_AT + int(slot) * S::Slots::OUT_STEP",
            "S::Slots::OUT_AT",
            "chosen-8-slots-bf16",
        ),
        ("rows/matvec.cuh", "(SLOT_BYTES > 0 ? of.slots[h] : 0)", "0", "chosen-16-slots-bf16"),
        (
            "rows/matvec.cuh",
            "int at = (int(part) + unit) * G::UNIT_ROWS",
            "int at = unit * G::UNIT_ROWS",
            "chosen-16-clamped-bf16",
        ),
        // A choice beyond the parts, a share without its last unit, another slot, words of a row that takes no part.
        ("rows/deal.cuh", "min(chosen[i], u32(PARTS - 1))", "chosen[i]", "chosen-8-e4m3-rows-bf16"),
        ("rows/deal.cuh", "all * (j + 1) / shares", "(all * (j + 1) - 1) / shares", "chosen-16-act-bf16"),
        ("rows/deal.cuh", "slot = choice[s] == part ? u32(s) : slot;", "slot = u32(s);", "chosen-8-slots-bf16"),
        ("rows/matvec.cuh", "mine = !takes_part<M>(row);", "mine = false;", "chosen-8-gated-bf16"),
        // The gate of the next two columns.
        ("rows/attention.cuh", "W::at(row, col + n * W::WORD_COLS)", "W::at(row, col + 2)", "attention-gate-bf16"),
        // Keys of the step where a row of codes has others.
        ("rows/attention.cuh", "(lane / 2 ^ swizzle_of<ROW>(of)) * 16", "lane / 2 * 16", "attention-fp8-halves-bf16"),
        // Codes: an offset, a bit that is moved to another place, x that is not divided by sixteen, scales of another row, scales of
        // rows that are left out, a zero point of another group.
        ("rows/matvec_codes.cuh", "OFFSET = 128;", "OFFSET = 127;", "codes-8-int8-rows"),
        ("rows/matvec_codes.cuh", "w << 4 & 0x07f007f0u", "w << 4 & 0x03f003f0u", "codes-16-e4m3-128"),
        ("rows/matvec_codes.cuh", "ROWS_X_SHIFT - 4", "ROWS_X_SHIFT", "codes-16-int4-32"),
        (
            "rows/matvec_codes.cuh",
            "c.lane() / 4 : c.lane() % 4 * 2;",
            "c.lane() / 4 : c.lane() % 4;",
            "codes-16-moved-int4-128",
        ),
        ("rows/matvec.cuh", "y.x *= scale.x, y.y *= scale.y;", "", "codes-16-moved-e2m1-both"),
        // Half of the squares, half of the products, the weights of the first turn, the norm of another granule.
        ("rows/matvec.cuh", "squares[0] + squares[4]", "squares[0]", "matvec-8-short-bf16"),
        ("rows/matvec.cuh", "d[i / 2][p][i % 2] += other[i / 2][p][i % 2];", ";", "matvec-8-short-bf16"),
        ("rows/matvec.cuh", "if constexpr (WEIGHTS_FIRST) multiply(first, x, 0, d);", "", "matvec-8-gated-bf16"),
        ("rows/matvec.cuh", "w = held.of[i / GROUPS];", "w = held.of[0];", "matvec-16-short-bf16"),
        (
            "rows/matvec_codes.cuh",
            "const int at = col * GROUPS + group;",
            "const int at = col * GROUPS;",
            "codes-8-int4-32-zeros",
        ),
        (
            "rows/matvec_codes.cuh",
            "scale = held.scale(0, g);",
            "scale = held.scale(0, 0);",
            "codes-lanes-int4-32-zeros",
        ),
        // A part of the rows of the launch, a state that other rows go on from, one that is there at position 0, inputs of the row before, words of
        // rows that take no part.
        ("rows/context.cuh", "sequence % parts == part", "row % parts == part", "mix-3-parts"),
        ("rows/mix.cuh", "!rest || then != sequence;", "!rest;", "mix-2-parts"),
        // States of the place in the launch.
        ("rows/convolve.cuh", "p.rows[row].slot", "p.rows[row].sequence", "convolve"),
        (
            "rows/mix.cuh",
            "u32 sequence = uniform(p.rows[row].slot);",
            "u32 sequence = uniform(p.rows[row].sequence);",
            "scan",
        ),
        ("rows/mix.cuh", "if (begins)\n", "if (false)\n", "mix"),
        ("rows/mix.cuh", "read(c, e, head, after, in);", "read(c, e, head, row, in);", "mix-16-3-parts-bf16"),
        ("rows/mix.cuh", "clear_pair<OP::OUT_COLS>(c, out, row, head * OP::HEAD_COLS + d);", ";", "mix-8-parts-bf16"),
    ];
    each_shows("an_op_of_rows_that_computes_something_else_is_found", "rows_ops.cc", &edits);
}

#[test]
fn an_op_of_waves_that_computes_something_else_is_found() {
    let attention = "waves/attention.cuh";
    let edits = [
        // Parts of k of other lanes, half a bias, a sum that is not scaled, a gate that is not activated, units of the share's first pass.
        (
            "waves/matmul.cuh",
            "if (K_PARTS > 1 && lane / 4 / G::UNIT_ROWS != p) w = make_uint4(0, 0, 0, 0);",
            "",
            "matmul-units-of-4-bf16",
        ),
        // Words of the other unit, products with the other half of k, sums that are not turned, chunks that the last granule of k does not fill.
        (
            "waves/matmul.cuh",
            "a[0].x, a[1].x, a[0].y, a[1].y, first",
            "a[1].x, a[0].x, a[1].y, a[0].y, first",
            "wide-store-bf16",
        ),
        // With both operands in shared memory: the other half of k, rows of the other warpgroup, units of the next box, columns in the order of registers.
        (
            "waves/matmul.cuh",
            "half * (2 * WarpgroupOperand::CORE_BYTES)",
            "half * WarpgroupOperand::CORE_BYTES",
            "shared-store-bf16",
        ),
        (
            "waves/matmul.cuh",
            "SwizzledOperand::at(w + span *",
            "SwizzledOperand::at(w + (1 - span) *",
            "shared-residual",
        ),
        (
            "waves/matmul.cuh",
            "old[i].x * gains[i / 2].x, old[i].y * gains[i / 2].y",
            "old[i].x, old[i].y",
            "shared-sums-bf16",
        ),
        ("waves/matmul.cuh", "part, block_row + row));", "part, row));", "shared-factor-bf16"),
        (
            "waves/matmul.cuh",
            "e.square_splits / PartsOfRows<M, 1>::blocks(c.p.row_count) <= 1",
            "e.square_splits < 1",
            "shared-factor-gated-bf16",
        ),
        (
            "waves/matmul.cuh",
            "row = int(share.row) + c.warp() * 16",
            "row = int(share.row) + c.warp() % 4 * 16",
            "shared-act-bf16",
        ),
        (
            "waves/matmul.cuh",
            "e.boxes, (passes.from + at) * 8, first + l.lane * BOX_UNITS",
            "e.boxes, (passes.from + at) * 8, first + l.lane",
            "shared-gated-bf16",
        ),
        ("waves/context.cuh", "t = SHARED ? col % 8 / 2 :", "t = false ? col % 8 / 2 :", "shared-store-operand-bf16"),
        ("waves/matmul.cuh", "WarpgroupOperand::next(first, 2 *", "WarpgroupOperand::next(first, 1 *", "wide-act-bf16"),
        (
            "waves/matmul.cuh",
            "transposed(d[n][4 * j + 2 * i], d[n][4 * j + 2 * i + 1])",
            "make_float2(d[n][4 * j + 2 * i], d[n][4 * j + 2 * i + 1])",
            "wide-gated-bf16",
        ),
        ("waves/matmul.cuh", "if (!exists) a[i] = make_uint4(0, 0, 0, 0);", "", "wide-residual"),
        // Of codes: sums that go on from the group before, scales of the other unit and of another group, a bit of the exponent that is
        // left, a zero point that is not taken, and one of another code.
        (
            "waves/matmul.cuh",
            "multiply_tile<true>(input + span * X::SPAN_BYTES, now, own);",
            "multiply_tile(input + span * X::SPAN_BYTES, now, own);",
            "wide-int4-64-zeros",
        ),
        ("waves/matmul.cuh", "held[k / 2 % 2].scale(0, run)", "held[k % 2].scale(0, run)", "wide-int4-128-gated-bf16"),
        ("waves/matmul.cuh", ".scale(0, run) * own[k]", ".scale(0, 0) * own[k]", "wide-mxfp4"),
        ("waves/warpgroup_codes.cuh", "(halves & 0x00800080u) |", "", "wide-int8-rows"),
        ("waves/warpgroup_codes.cuh", "ZEROS ? bf16_pair_sub(value, zero) : value", "value", "wide-int8-32-zeros"),
        (
            "waves/warpgroup_codes.cuh",
            "bf16_pair(128.f + point, 128.f + point)",
            "bf16_pair(136.f, 136.f)",
            "wide-int4-32-gated-bf16",
        ),
        ("waves/matmul.cuh", "y.x += b.x, y.y += b.y;", "y.x += b.x;", "matmul-store-bf16"),
        ("waves/matmul.cuh", "old.x + G::SCALE * y.x", "old.x + y.x", "matmul-residual"),
        ("waves/matmul.cuh", "activate_scaled<G>(y.x) * up.x", "y.x * up.x", "matmul-gated-bf16"),
        ("waves/matmul.cuh", "u64(first + unit) * UNIT_BYTES", "u64(unit) * UNIT_BYTES", "matmul-act-bf16"),
        // A branch and a token that are not scaled, statistics of another row.
        ("waves/rows.cuh", "x[i][k] += G::BRANCH_SCALE * y[i][k];", "x[i][k] += y[i][k];", "rows-branch"),
        ("waves/rows.cuh", "x[i][k] *= G::EMBED_SCALE;", "x[i][k] *= 1.f;", "rows-embed"),
        ("waves/rows.cuh", "stats[c.warp() / WARPS * WARPS + w]", "stats[w]", "steps-embed-later-bf16"),
        ("waves/rows.cuh", "stats[c.lane() % ROWS][", "stats[0][", "rows-slots-bf16"),
        (
            "waves/rows.cuh",
            "for (int o = 16; o >= ROWS; o /= 2)",
            "for (int o = 16; o > ROWS; o /= 2)",
            "rows-of-one-bf16",
        ),
        (
            "waves/rows.cuh",
            "rows[s] = c.template work<u32>(e.branch)[row * G::SLOTS + s]",
            "rows[s] = row * G::SLOTS + s",
            "rows-slots",
        ),
        // Positions before the window, sums of an older maximum, values that have not landed, a row of the cache in another order, a half
        // turned the other way, pairs the wrong way round.
        (
            attention,
            "return G::WINDOW && position + 1 > G::WINDOW ? position + 1 - G::WINDOW : 0; }",
            "return 0; }",
            "attention-window-cap-bf16",
        ),
        (attention, "r.l[h] *= shrink;", "", "attention-halves-bf16"),
        (attention, "if (there < STEP) {", "if (false) {", "attention-8-bf16"),
        (
            attention,
            "to + (at.lane ^ H::swizzled(at.position)) * 16) = piece;",
            "to + at.lane * 16) = piece;",
            "attention-256-bf16",
        ),
        (attention, "+ sign * other *", "+ other *", "attention-128-bf16"),
        (attention, "(!HALVES || at.lane < TURNED)", "true", "attention-part-256-bf16"),
        (attention, "by.x *= gate.x, by.y *= gate.y;", "", "attention-gate-bf16"),
        (attention, "One::rotate(y[k], y[k + 1],", "One::rotate(y[k + 1], y[k],", "attention-192-bf16"),
    ];
    each_shows("an_op_of_waves_that_computes_something_else_is_found", "waves_ops.cc", &edits);
}

#[test]
fn a_step_of_waves_that_computes_something_else_is_found() {
    let (matmul, rows, attention) = ("waves/matmul.cuh", "waves/rows.cuh", "waves/attention.cuh");
    let edits = [
        // Groups of k that are not added up, weights and a bias of another part of k, the first step of a chunk again and again, the noise
        // of another token, and the last of equal logits.
        (matmul, "v = met[(tile * K_GROUPS + k) * 32];", "v = make_float4(0.f, 0.f, 0.f, 0.f);", "steps-8-groups-bf16"),
        (matmul, " + passes.from * GRANULE;", ";", "steps-units-of-4-parts"),
        (matmul, "t < PAIRS && part == 0", "t < PAIRS", "steps-parts-32"),
        // A packet with the tag of another wave, and one of another part of k.
        ("waves/context.cuh", "tag = tag_of(wave);", "tag = tag_of(0);", "steps-packets-32"),
        (
            attention,
            "u64(i / 4) * (M::BLOCK_ROWS * H::COLS) + from + i % 4 * 2",
            "from + i % 4 * 2",
            "steps-packets-bf16",
        ),
        // Boxes of another part of k, and of the first units again and again.
        (matmul, "(passes.from + at) * (GRANULE / 8)", "at * (GRANULE / 8)", "steps-parts-32"),
        (matmul, "(GRANULE / 8), first + l.lane * BOX_UNITS", "(GRANULE / 8), l.lane * BOX_UNITS", "steps-parts-32"),
        (matmul, "input = x.at + i % X_STEPS * (STEP / 2) * X::BLOCK_BYTES", "input = x.at", "steps-residual-odd"),
        (matmul, "i % W_STEPS * STEP_GRANULES * GRANULE", "0", "steps-int4-32-gated-bf16"),
        (matmul, "__ldg(&r->position) + c.step + 1", "__ldg(&r->position) + 1", "steps-logits-32"),
        (
            matmul,
            "argmax_take(most.score, most.id, v.score, v.id);",
            "if (v.score >= most.score) most = v;",
            "steps-logits",
        ),
        // Held words of the first step again and again, sums that go on from the pass before, and a factor that no row has.
        (matmul, "words[step * STEP_WORDS + i * MOST + n]", "words[i * MOST + n]", "steps-held-bf16"),
        (matmul, "d[m][n][0] = d[m][n][1] = d[m][n][2] = d[m][n][3] = 0.f;", "d[m][n][0] = 0.f;", "steps-held-alike"),
        (matmul, "squares, done > 0, d, no_pair", "squares, false, d, no_pair", "steps-held-factor-bf16"),
        // The first part of a branch alone, a token that another row decided, and one that is told in the place of the first step.
        (rows, "u64(s) * pitch + col", "col", "steps-addend"),
        (rows, "c.step > 0 ? u32(row) : __ldg(&r->from)", "u32(row)", "steps-embed"),
        (rows, "1 + c.step * M::BLOCK_ROWS + row] = token", "1 + row] = token", "steps-embed-later"),
        // Squares of one part, a factor of another row, and columns of the first part.
        (rows, "square_at(PARTS, u32(part), u32(row))", "square_at(PARTS, 0, u32(row))", "steps-embed-4"),
        (matmul, "all * (1.f / G::K) + G::NORM_EPS", "all * (1.f / G::K)", "steps-factor-gated-bf16"),
        (matmul, "factor = c.state().factors[row];", "factor = c.state().factors[0];", "steps-factor-parts"),
        (rows, "col = part * PART_COLS + at", "col = at", "steps-addend-2"),
        // What teams have is added up as if they had the same maximum, a team takes what is another's turn, the first part of heads alone,
        // and rows at the position of the first one of a share.
        (attention, "weight = exp_fast(of[0] - top);", "weight = 1.f;", "steps-256-bf16"),
        // A sink without weight, gates that are not applied.
        (attention, "r.l[h] = lane % 4 == 0 ? 1.f : 0.f;", "r.l[h] = 0.f;", "steps-sinks-bf16"),
        (attention, "a *= gate.x, b *= gate.y;", "", "steps-gate-bf16"),
        (attention, "x *= gate.x, y *= gate.y;", "", "splits-gate-bf16"),
        (
            attention,
            "sees = takes && (count == 1 || u32(at - begin) / STEP % TAKERS == place)",
            "sees = takes && (count == 1 || u32(at - begin) / STEP % TAKERS == 0)",
            "steps-16-of-16-bf16",
        ),
        (attention, "u64(i / 2) * (M::BLOCK_ROWS * H::COLS) + from", "from", "steps-128-of-8-bf16"),
        // Rows of one sequence that do not see each other, or see a later one; a key that is not appended.
        ("waves/context.cuh", "state.leads[row] = lead;", "state.leads[row] = 0;", "steps-halves-bf16"),
        (attention, "(is_new ? back : 0)", "(is_new ? back - 1 : 0)", "steps-halves-bf16"),
        (attention, "first_head % G::GROUP == 0", "first_head % G::GROUP == 1", "steps-halves-bf16"),
        (
            "waves/context.cuh",
            "wave_state<M>().positions[row] + step",
            "wave_state<M>().positions[0] + step",
            "steps-window-bf16",
        ),
    ];
    each_shows("a_step_of_waves_that_computes_something_else_is_found", "waves_ops.cc", &edits);
}

/// The same of KV splits. Each edit concerns one case.
#[test]
fn splits_that_compute_something_else_are_found() {
    let edits = [
        // The last split is not merged, those of a row share a place, one lacks its last position, each has the row's own position, the last one
        // is never taken, and a row with one split is merged.
        ("s < splits; s++", "s + (G::DIM == 256) < splits; s++", "splits-256-bf16"),
        ("* MOST + split)", "* MOST + (G::HEADS == 8 ? 0 : split))", "splits-128-of-8-bf16"),
        ("limit = begin + S::SPLIT;", "limit = begin + S::SPLIT - (G::WINDOW == 150);", "splits-window-bf16"),
        ("is_own && task.is_last", "is_own && (task.is_last || QUERIES == 16)", "splits-16-of-16-bf16"),
        ("count(position(row)) - 1};", "GROUPS == 16 ? 0 : count(position(row)) - 1};", "splits-alike-bf16"),
        ("if (splits > 1) merge", "if (splits > 1 || G::DIM * G::PARTS == 128) merge", "splits-halves-bf16"),
    ];
    let edits = edits.map(|(from, to, case)| ("waves/attention.cuh", from, to, case));
    each_shows("splits_that_compute_something_else_are_found", "waves_ops.cc", &edits);
}

/// The same of pairs of blocks, and of the sums of squares that they leave. Each edit concerns one case.
#[test]
fn pairs_that_compute_something_else_are_found() {
    let edits = [
        // Halves of rows the wrong way round, own sums twice, a residual that is not added, rows of the first block in both, a bias in half of the
        // rows, and groups of k that are left out.
        (
            "part == 0 ? high : low, paired_of_peer",
            "(part == 0) != (G::ROWS == 120) ? high : low, paired_of_peer",
            "pairs-32",
        ),
        ("own[r][n].x + sent.x", "own[r][n].x + (G::ROWS == 74 ? own[r][n].x : sent.x)", "pairs-64"),
        ("ends.old[r][n].x + G::SCALE", "(G::UNIT_ROWS == 4 ? 0.f : ends.old[r][n].x) + G::SCALE", "pairs-units-of-4"),
        ("* 16 + int(part) * 8 +", "* 16 + (G::UNIT_ROWS == 2 ? 0 : int(part) * 8) +", "pairs-units-of-2"),
        (
            "settled(c, e, 0, first + to.unit",
            "settled(c, e, G::K == 200 && G::ROWS == 72 ? part : 0, first + to.unit",
            "pairs-alone",
        ),
        (
            "n * K_GROUPS + at.k_at) * PAIR_SUMS + k) * 32]",
            "n * K_GROUPS + at.k_at) * PAIR_SUMS + (G::K == 200 && G::ROWS == 72 ? 0 : k)) * 32]",
            "pairs-alone",
        ),
        ("if (adds) {", "if (adds && G::ROWS != 44) {", "pairs-int8"),
        // Squares in the rows of the other block, and without those of a unit; an input whose weight is left out.
        ("blockIdx.x % 2 * 8", "(blockIdx.x + (M::BLOCK_ROWS == 16)) % 2 * 8", "pairs-16"),
        ("unit = 0; unit < MOST * UNIT_GROUPS;", "unit = G::ROWS == 150; unit < MOST * UNIT_GROUPS;", "pairs-64-units"),
        (
            "x.y * ends.gain[r][n].y",
            "G::K == 712 && G::ROWS == 72 ? x.y : x.y * ends.gain[r][n].y",
            "pairs-int4-64-zeros-bf16",
        ),
        // Squares that a factor leaves out, and sums whose order is that of the rows of a block.
        ("part < parts &&", "part + (G::NORM_PARTS == 20) < parts &&", "steps-factor-20-bf16"),
        (
            "all += __shfl_xor_sync(~0u, all, o);",
            "all += __shfl_xor_sync(~0u, all, M::BLOCK_ROWS == 16 ? 4 / o : o);",
            "steps-factors-alike",
        ),
    ];
    let edits = edits.map(|(from, to, case)| ("waves/matmul.cuh", from, to, case));
    each_shows("pairs_that_compute_something_else_are_found", "waves_ops.cc", &edits);
}

/// The same of tiles that warpgroups of a step multiply. Each edit concerns one case.
#[test]
fn tiles_that_compute_something_else_are_found() {
    let edits = [
        // The first chunk of weights of each chunk of the input again and again, the unit beside, words of the chunk before, and no factor.
        (
            "x.at, i % X_STEPS * STEP +",
            "x.at, (G::K == 320 && !G::FACTOR ? 0 : i % X_STEPS) * STEP +",
            "steps-tiles-bf16",
        ),
        (
            "w + unit_of_tile(at, n, i) * UNIT_PITCH",
            "w + (unit_of_tile(at, n, i) ^ (G::PASS == 5)) * UNIT_PITCH",
            "steps-tiles-few-bf16",
        ),
        ("tiles[(i + 1) % 2].take", "tiles[(i + (G::K != 448)) % 2].take", "steps-tiles-32-bf16"),
        (
            "best, squares, s == 0 && i == 0);",
            "best, squares, s == (G::TILES && G::K == 320) && i == 0);",
            "steps-tiles-factor-bf16",
        ),
        // Sums of the second tile in the first, a zero point of the other unit, scales of the first group, sums of other rows, and a factor of
        // warps.
        (
            "(&to)[4] = sums[m][2 * n + i]",
            "(&to)[4] = sums[m][2 * (G::K == 328 && !G::FACTOR ? 0 : n) + i]",
            "steps-tiles-int4-128-bf16",
        ),
        (
            "of[n][i].zero(0, run)",
            "of[n][G::GROUP_K == 128 ? 1 - i : i].zero(0, run)",
            "steps-tiles-int4-128-zeros-bf16",
        ),
        (
            "of[n][k / 2 % 2].scale(0, run)",
            "of[n][k / 2 % 2].scale(0, G::GROUP_K == 32 ? 0 : run)",
            "steps-tiles-int4-32-factor-bf16",
        ),
        (
            "turned(at.lane, d[n][8 * m + 2 * i]",
            "turned(at.lane, d[n][8 * (Codes::CODED && ROW_TILES == 4 ? m % 2 : m) + 2 * i]",
            "steps-tiles-int4-64-bf16",
        ),
        (
            "M::WARPGROUPS || G::TILES ? 1.f",
            "M::WARPGROUPS || (G::TILES && !G::ROW_SCALES) ? 1.f",
            "steps-tiles-e4m3-rows-bf16",
        ),
        // One half of k twice, a chunk that has nothing for the second half, and another last unit.
        (
            "k_at(G::TILES ? c.warp() / UNIT_GROUPS :",
            "k_at(G::TILES ? c.warp() / UNIT_GROUPS % (G::K == 704 ? 1 : 2) :",
            "steps-tiles-k-bf16",
        ),
        (
            "left > at.k_at * TILE_GRANULES",
            "left + (G::K == 640) > at.k_at * TILE_GRANULES",
            "steps-tiles-k-int4-128-bf16",
        ),
        ("here - 1) * UNIT_PITCH", "here - 1 - (G::K == 1352)) * UNIT_PITCH", "pairs-tiles"),
        // Of 128 rows: gates with the other unit's ups, a part in the place of the first one, the best of the last pass alone, and lanes at the row of their
        // neighbour.
        ("given = has_gates ? z : y", "given = has_gates == (ROW_TILES < 8) ? z : y", "steps-tiles-two-bf16"),
        (
            "(u64(part) * M::BLOCK_ROWS + row) * G::ROWS + col);\n    const u32 rows",
            "u64(row) * G::ROWS + col);\n    const u32 rows",
            "steps-tiles-parts",
        ),
        ("leave_best(c, at, m, score, id, true)", "leave_best(c, at, m, score, id, false)", "steps-tiles-logits"),
        ("lane % 4 * 2 + lane / 4 % 2", "lane % 4 * 2 + (G::K == 1216 ? 0 : lane / 4 % 2)", "pairs-tiles-128"),
        // The input of warps.
        (
            "OutPlace<M, G, G::ROWS>::at(",
            "OperandPlace<G::ROWS, M::BLOCK_ROWS, M::WARPGROUPS || (G::OUT_TILES && G::ROWS != 74)>::at(",
            "pairs-to-tiles-64-bf16",
        ),
    ];
    let of_rows = ("OutPlace<M, G, H>", "WaveOperand<M, H>", "steps-to-tiles-bf16");
    let of_lanes = ("if (left < more[i])", "if (ROWS > 2 || left < more[i])", "splits-128-rows-bf16");
    let mut edits = edits.map(|(from, to, case)| ("waves/matmul.cuh", from, to, case)).to_vec();
    edits.push(("waves/rows.cuh", of_rows.0, of_rows.1, of_rows.2));
    edits.push(("waves/attention.cuh", of_lanes.0, of_lanes.1, of_lanes.2));
    each_shows("tiles_that_compute_something_else_are_found", "waves_ops.cc", &edits);
}

/// An exchange that is not whole ends the program with what is wrong with it.
#[test]
fn an_exchange_that_is_not_whole_is_found() {
    let test = "an_exchange_that_is_not_whole_is_found";
    let broken = [
        "other bytes are sent than are awaited",
        "sums are sent to one place twice",
        "sums are sent out of scratch",
        "sums are sent before a fence",
        "no fence after the wait",
    ];
    // All in one program, because to compile it takes longer than to run it.
    let edits = [
        (
            "send_to_peer(inbox_of_peer + place(to) * 8,",
            "if (mutant != 1 || to.unit > 0) send_to_peer(inbox_of_peer + \
             (mutant == 2 ? at.lane * 8 : (mutant == 3 ? M::SCRATCH_BYTES : 0) + place(to) * 8),",
        ),
        ("    fence_before_sending();\n", "    if (mutant != 4) fence_before_sending();\n"),
        ("    fence_sent();\n", "    if (mutant != 5) fence_sent();\n"),
    ];
    let (folder, cases) = edited("waves_ops.cc", &edits.map(|(from, to)| ("waves/matmul.cuh", from, to, "pairs-16")));
    let arguments = [MANY, "-I", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it")];
    let build = tempfile::tempdir().unwrap();
    let Some(mut program) = compiled(&cases, &arguments, folder.path(), build.path()) else {
        return no_compiler(test);
    };
    let mut ends = |mutant: usize| {
        let output = program.env("MUTANT", mutant.to_string()).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(ends(0), (true, String::new()), "the exchange without an edit is whole");
    for (n, what) in broken.into_iter().enumerate() {
        let (is_whole, text) = ends(n + 1);
        assert!(!is_whole && text.contains(what), "expected `{what}`, found `{text}`");
    }
}
