//! Tests the check of mixtures of experts, with an interpreter in place of the device. A device whose router is nearly tied chooses other
//! experts than the reference, and passes; one that chooses wrong experts, or computes others than it says, is refused.

use std::fs;
use std::sync::Arc;

use half::bf16;
use monobloc::check::{CheckError, Checked, Subject, TextSizes, check_rows, compare_codes, compare_decode};
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Interp, Options, Pack};
use monobloc::ir::program::Buffer;
use monobloc::ir::schedule::Schedule;
use monobloc::model::config::{Imported, import, import_config_only};
use monobloc::model::graph::TensorId;
use monobloc::pack::pack;
use monobloc::target::Target;
use safetensors::tensor::TensorView;

use crate::check_codes::{Fake, Says, as_computed, place};

const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
const CACHE_FP8: Precision = Precision { cache: DType::E4m3, ..BF16 };
/// Four experts, of which a row has one.
const CONFIG: &str = r#"{"architectures":["MixtralForCausalLM"],"model_type":"mixtral","hidden_size":128,"intermediate_size":64,
    "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,"vocab_size":320,"rms_norm_eps":1e-5,
    "rope_theta":10000.0,"max_position_embeddings":256,"hidden_act":"silu","tie_word_embeddings":false,
    "num_local_experts":4,"num_experts_per_tok":1,"sliding_window":null}"#;
const IDS: [u32; 6] = [3, 77, 12, 140, 9, 300];
/// Rows of kernels: one over its own cache, as a build checks it; the same as an export checks it; one over pages; and eight.
const KERNELS: [Kernel; 4] = [Kernel::Built, Kernel::Exported, Kernel::Rows(1), Kernel::Rows(8)];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kernel {
    Built,
    Exported,
    Rows(u32),
}

/// Changes the rows of a router, one for each expert.
pub(crate) type Router = fn(&mut [Vec<f32>]);

/// The model with another router. Rows of the router that belong to experts 0 and 1, and to 2 and 3, are the same before the change.
pub(crate) fn model(change: Router) -> Imported {
    let Imported { graph, weights, .. } = import_config_only(CONFIG, 3).unwrap();
    let tensor = |(id, tensor): (usize, &monobloc::model::graph::Tensor)| {
        let id = TensorId(id as u32);
        let row = |row| {
            let mut values = vec![0.0; weights.cols(id)];
            weights.read_row_f32(id, row, &mut values);
            values
        };
        let mut rows: Vec<Vec<f32>> = (0..weights.rows(id)).map(row).collect();
        if tensor.name.ends_with("block_sparse_moe.gate.weight") {
            for twin in [1, 3] {
                rows[twin] = rows[twin - 1].clone();
            }
            change(&mut rows);
        }
        let bytes: Vec<u8> = rows.concat().into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect();
        (tensor.name.clone(), tensor.shape.iter().map(|&n| n as usize).collect::<Vec<usize>>(), bytes)
    };
    let tensors: Vec<_> = graph.tensors.iter().enumerate().map(tensor).collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), CONFIG).unwrap();
    fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    import(folder.path()).unwrap()
}

/// The last bit of some weights: the second expert of a pair is ahead where the first is behind.
pub(crate) fn one_ahead(rows: &mut [Vec<f32>]) {
    rows.iter_mut().skip(1).step_by(2).for_each(|row| nudge(row, 1));
}

pub(crate) fn other_ahead(rows: &mut [Vec<f32>]) {
    rows.iter_mut().skip(1).step_by(2).for_each(|row| nudge(row, -1));
}

fn nudge(row: &mut [f32], by: i16) {
    for value in row.iter_mut().take(4) {
        *value = bf16::from_bits((bf16::from_f32(*value).to_bits() as i16 + by) as u16).to_f32();
    }
}

pub(crate) fn other_pair(rows: &mut [Vec<f32>]) {
    one_ahead(rows);
    rows.rotate_left(2);
}

/// From position `from` on, the rotary angles of a pack become those of the next position.
pub(crate) fn turn(schedule: &Schedule, bytes: &mut [u8], from: usize) {
    let table = schedule.program.buffers.iter().position(|buffer| buffer.name == "rope.r0").expect("angles");
    let Buffer { rows, cols, dtype, .. } = schedule.program.buffers[table];
    let (at, row_bytes) = (schedule.placement[table].unwrap() as usize, cols as usize * dtype.bytes());
    bytes.copy_within(at + (from + 1) * row_bytes..at + rows as usize * row_bytes, at + from * row_bytes);
}

/// A device with this router, which says what it chose.
struct Device {
    router: Router,
    says: Says,
    turn: usize,
    /// From this position on, its rotary angles are those of the next one.
    turned_from: Option<usize>,
}

const RIGHT: Device = Device { router: other_ahead, says: |_, _| (), turn: usize::MAX, turned_from: None };

fn checked(precision: Precision, kernel: Kernel, device: &Device) -> Result<Checked, CheckError> {
    let target = Target::builtin("h200").unwrap();
    let (reference, other) = (model(one_ahead), model(device.router));
    let rows = if let Kernel::Rows(rows) = kernel { rows } else { 0 };
    let validated = place(&reference, &target, precision, rows, 1024);
    let schedule = validated.schedule();
    let [pack, mut of_device] = [&reference, &other].map(|of| pack(schedule, &of.graph, &of.weights).unwrap());
    if let Some(from) = device.turned_from {
        turn(schedule, &mut of_device, from);
    }
    let pack: Pack = Arc::new(pack);
    let shapes = Interp::new(schedule, pack.clone(), Options::fast()).unwrap();
    let mut fake = Fake::new(schedule, schedule, Arc::new(of_device), &shapes, Options::fast(), as_computed);
    (fake.says, fake.turn) = (device.says, device.turn);
    let Imported { graph, weights, .. } = &reference;
    match kernel {
        Kernel::Rows(_) => check_rows(&validated, pack, graph.parameter_count(), &mut fake),
        Kernel::Exported => compare_decode(&validated, pack, TextSizes { texts: 2, short: 4, long: 12 }, &mut fake),
        Kernel::Built => {
            let positions = &[0, 1, 9, 40];
            let subject =
                Subject { validated: &validated, target: &target, graph, weights, pack, positions, alone: None };
            compare_codes(&subject, &mut fake, &|| {})
        }
    }
}

/// How far the first logits of two packs are from each other, norm by norm.
fn distance(a: &Imported, b: &Imported, precision: Precision) -> f32 {
    let validated = place(a, &Target::builtin("h200").unwrap(), precision, 0, 1024);
    let [a, b] = [a, b].map(|of| {
        let pack = pack(validated.schedule(), &of.graph, &of.weights).unwrap();
        let mut interp = Interp::new(validated.schedule(), Arc::new(pack), Options::fast()).unwrap();
        interp.logits(&IDS).unwrap().concat()
    });
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / norm(&mut a.iter().copied())
}

#[test]
fn a_nearly_tied_router_passes_whatever_it_chose() {
    for precision in [BF16, CACHE_FP8] {
        let away = distance(&model(one_ahead), &model(other_ahead), precision);
        assert!(away > 0.2, "{precision:?}: the device has other experts: {away}");
        for kernel in KERNELS {
            let found = checked(precision, kernel, &RIGHT);
            let figures = found.unwrap_or_else(|error| panic!("{kernel:?}, {precision:?}: {error}")).figures();
            assert!(figures.positions >= 4 && figures.error_rel_l2 < 0.02, "{kernel:?}, {precision:?}: {figures:?}");
        }
    }
}

/// Everything is fp32: a right device has the same choices, within sums in another order.
#[test]
fn a_router_in_fp32_has_the_same_choices() {
    for kernel in KERNELS {
        let found = checked(FP32, kernel, &Device { router: one_ahead, ..RIGHT });
        let figures = found.unwrap_or_else(|error| panic!("{kernel:?}: {error}")).figures();
        assert!(figures.error_rel_l2 < 1e-5, "{kernel:?}: {figures:?}");
    }
}

/// A launch of more rows than the kernel has is several launches, whose exchange is one.
#[test]
fn choices_of_every_turn_of_a_launch_are_read() {
    for turn in [1, 3, 4] {
        checked(BF16, Kernel::Rows(8), &Device { turn, ..RIGHT }).unwrap_or_else(|error| panic!("{turn}: {error}"));
    }
}

/// Two right kernels may choose different experts, so a long history is not compared between them, as it is of other models.
#[test]
fn a_batch_kernel_of_experts_is_checked_at_deep_positions() {
    for precision in [BF16, CACHE_FP8, FP32] {
        let device = Device { router: one_ahead, turned_from: Some(40), ..RIGHT };
        let error = checked(precision, Kernel::Rows(8), &device).expect_err("other angles");
        // One row of the step has a history of 127 positions, the other one of 42.
        let is_deep = ["position 127", "position 42"].iter().any(|of| error.to_string().starts_with(of));
        assert!(is_deep, "{precision:?}: {error}");
    }
}

#[test]
fn wrong_experts_are_refused_and_their_row_is_named() {
    for precision in [BF16, CACHE_FP8, FP32] {
        for kernel in KERNELS {
            let error = checked(precision, kernel, &Device { router: other_pair, ..RIGHT }).expect_err("other experts");
            assert!(matches!(error, CheckError::Routed { position: 0, layer: 0, .. }), "{kernel:?}: {error}");
        }
        // The other pair, an expert that there is not, and no expert.
        let says: [Says; 2] = [
            |row, ids| ids.iter_mut().filter(|_| row == 5).for_each(|id| *id ^= 2),
            |row, ids| ids.iter_mut().filter(|_| row == 5).for_each(|id| *id += 4),
        ];
        for says in says {
            let error = checked(precision, Kernel::Rows(8), &Device { router: one_ahead, says, ..RIGHT });
            let error = error.expect_err("another expert");
            assert!(matches!(error, CheckError::Routed { row: Some(5), .. }), "{error}");
            assert!(error.to_string().starts_with("position 0, row 5 of the step: layer 0: experts"), "{error}");
        }
    }
}

#[test]
fn a_device_that_computes_other_experts_than_it_says_is_refused() {
    let twin: Says = |row, ids| ids.iter_mut().filter(|_| row % 8 == 0).for_each(|id| *id ^= 1);
    for precision in [BF16, CACHE_FP8] {
        for kernel in KERNELS {
            let error = checked(precision, kernel, &Device { says: twin, ..RIGHT }).expect_err("other experts");
            // The choice itself is right. What follows from it is not: logits, keys and values, and the scores of the next layer.
            let wrong = match error {
                CheckError::Routed { layer, .. } => layer == 1,
                _ => matches!(error, CheckError::Wrong { .. } | CheckError::Argmax { .. } | CheckError::Cached { .. }),
            };
            assert!(wrong, "{kernel:?}, {precision:?}: {error}");
        }
    }
}
