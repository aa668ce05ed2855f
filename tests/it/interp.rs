//! The interpreter over schedules that lowering makes: goldens of every family, both arithmetics, hostile orders.

use std::ops::ControlFlow;
use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Arithmetic, Input, Interp, InterpError, Options, Order, Pack};
use monobloc::ir::schedule::{Mechanism, Schedule};
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import};
use monobloc::pack::pack;
use monobloc::reference;
use monobloc::schedule::schedule;
use monobloc::target::{CopyMechanism, DotMechanism, Measured, Spec, Target, TargetKind};

use crate::support::{Goldens, fixture, max_difference};

/// fp32 against fp32 in another summation order (tests/fixtures/README.md).
const LOGITS_TOLERANCE: f32 = 3e-4;
const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

/// A GPU large enough for any candidate of these tests.
fn target(sms: u32) -> Target {
    Target {
        name: "test".to_string(),
        kind: TargetKind::Cuda,
        spec: Spec {
            source: "none".to_string(),
            arch: "sm_90a".to_string(),
            device_names: vec![],
            sm_count: sms,
            smem_bytes_per_block_max: 232_448,
            registers_per_sm: 65_536,
            threads_per_block_max: 1024,
            l2_bytes: 1 << 25,
            memory_bytes: 1 << 36,
            memory_bytes_per_s: 1e12,
            copy: CopyMechanism::Bulk,
            dot: DotMechanism::Mma,
            cluster_max: 1,
            register_reallocation: true,
        },
        measured: Measured::default(),
    }
}

/// How a test places a model.
#[derive(Clone)]
struct Plan {
    precision: Precision,
    sms: u32,
    heads_per_task: u32,
    splits: u32,
    split_from: u32,
    slot_bytes: u32,
    mechanism: Mechanism,
}

const SMALL: Plan = Plan {
    precision: FP32,
    sms: 3,
    heads_per_task: 1,
    splits: 1,
    split_from: 0,
    slot_bytes: 4096,
    mechanism: Mechanism::Packets,
};

fn place(imported: &Imported, plan: &Plan, context_max: u32) -> Schedule {
    let target = target(plan.sms);
    let candidate = Candidate {
        consumer_warps: 4,
        groups: 2,
        ring_slots: 4,
        slot_bytes: plan.slot_bytes,
        flight_high: 2,
        flight_low: 1,
        flight_free: 2,
        sms: plan.sms,
        heads_per_task: plan.heads_per_task,
        splits: plan.splits,
        split_from: plan.split_from,
        mechanism: plan.mechanism,
    };
    let program = lower(&imported.graph, "test", plan.precision, context_max, &candidate).unwrap();
    schedule(program, &target, &candidate).unwrap()
}

fn packed(imported: &Imported, schedule: &Schedule) -> Pack {
    Arc::new(pack(schedule, &imported.graph, &imported.weights).unwrap().bytes)
}

fn family(name: &str) -> Imported {
    import(&fixture("families").join(name)).unwrap()
}

fn threads(n: usize) -> Options {
    Options { arithmetic: Arithmetic::Fast, order: Order::Threads(n) }
}

fn bits(logits: &[Vec<f32>]) -> Vec<u32> {
    logits.iter().flatten().map(|v| v.to_bits()).collect()
}

/// All families that import, with the candidates that exercise every op and every role.
fn plans(group: u32) -> Vec<Plan> {
    vec![
        SMALL,
        Plan { sms: 1, heads_per_task: group, mechanism: Mechanism::Counter, ..SMALL },
        Plan { sms: 7, splits: 3, split_from: 5, mechanism: Mechanism::Fenced, ..SMALL },
        Plan { sms: 5, splits: 2, split_from: 0, slot_bytes: 8192, ..SMALL },
    ]
}

#[test]
fn every_family_agrees_with_transformers_through_lower_and_schedule() {
    let mut folders: Vec<_> = std::fs::read_dir(fixture("families")).unwrap().map(|e| e.unwrap().path()).collect();
    folders.sort();
    let mut tested = 0;
    let mut wrong = vec![];
    for folder in folders {
        let name = folder.file_name().unwrap().to_str().unwrap().to_string();
        if name == "qwen3-moe" {
            continue;
        }
        let imported = import(&folder).unwrap();
        let goldens = Goldens::open(&format!("families/{name}"));
        let ids = goldens.ids("input_ids");
        let want = goldens.floats("logits");
        let attn = &imported.graph.layers[0].attn;
        for (p, plan) in plans(attn.heads / attn.kv_heads).into_iter().enumerate() {
            let schedule = place(&imported, &plan, 64);
            let mut interp = Interp::new(&schedule, packed(&imported, &schedule), threads(2)).unwrap();
            let logits = interp.logits(&ids).unwrap();
            let difference = max_difference(&logits.concat(), &want);
            let greedy = interp.greedy(&ids, 16, |_| ControlFlow::Continue(())).unwrap();
            if difference > LOGITS_TOLERANCE || greedy != goldens.ids("greedy_ids") {
                wrong.push(format!("{name}, plan {p}: largest difference {difference}, greedy {greedy:?}"));
            }
        }
        tested += 1;
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(tested >= 19, "{tested}");
}
