//! Tests that the PTX of the kernels has the fences that docs/memory-model.md requires, on every path and for every
//! CUDA record. Kernels that lack a fence show that each rule finds its fault.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

use monobloc::candidate::Candidate;
use monobloc::codegen::KernelSource;
use monobloc::codegen::abi::Params;
use monobloc::codegen::emit::{ENTRY_POINT, Trace, emit};
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::dtype::Precision;
use monobloc::lower::lower;
use monobloc::model::config::import_config_only;
use monobloc::schedule::schedule;
use monobloc::target::{CopyMechanism, Target};
use monobloc::validate::validate;
use rayon::prelude::*;

use crate::nvrtc::nvrtc;
use crate::proof_support::{BF16, FP32};
use crate::ptx::{Function, Statement, edit, functions, rules};
use crate::support::fixture;

const CUDA_RECORDS: [&str; 10] = ["t4", "a100", "a10g", "l4", "l40s", "rtx4090", "rtx5090", "h100", "h200", "b200"];

/// The role of an instruction in the memory model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    /// Waits on the mbarrier of a slot.
    AwaitSlot,
    CopyInBulk,
    FenceSlot,
    FenceHistory,
    /// A fence between the consumers of SMs that acquires, releases, or does both.
    Acquire,
    Release,
    AcquireRelease,
    /// Loads a packet.
    Poll,
    /// Stores a packet.
    Publish,
    BlockBarrier,
    /// Hands the acquired step to the loader, and takes it over there.
    HandOver,
    TakeOver,
    StoreWeakly,
    Other,
}

fn does(statement: &Statement, waits: &[String]) -> Does {
    let op = statement.opcode.as_str();
    let starts = |all: &[&str]| all.iter().any(|begin| op.starts_with(begin));
    // A fence under a predicate does not count, because some threads skip it.
    match op {
        _ if statement.guarded && starts(&["fence.", "membar."]) => Does::Other,
        "fence.proxy.async.shared::cta" => Does::FenceSlot,
        "fence.proxy.async.global" => Does::FenceHistory,
        "fence.acquire.gpu" => Does::Acquire,
        "fence.release.gpu" => Does::Release,
        "fence.acq_rel.gpu" => Does::AcquireRelease,
        _ if starts(&["mbarrier.try_wait", "mbarrier.test_wait"]) => Does::AwaitSlot,
        _ if op.starts_with("call") && waits.iter().any(|name| statement.operands.contains(name.as_str())) => {
            Does::AwaitSlot
        }
        _ if starts(&["cp.async.bulk.shared"]) => Does::CopyInBulk,
        _ if starts(&["ld.relaxed.gpu.global"]) => Does::Poll,
        _ if starts(&["st.relaxed.gpu.global"]) => Does::Publish,
        _ if starts(&["bar.sync", "barrier.sync", "barrier.cta.sync"]) => Does::BlockBarrier,
        _ if starts(&["st.release.cta.shared"]) => Does::HandOver,
        _ if starts(&["ld.acquire.cta.shared"]) => Does::TakeOver,
        _ if op.starts_with("st.global") => Does::StoreWeakly,
        _ => Does::Other,
    }
}

/// Faults of a kernel's PTX, one on each line, beginning with the rule.
fn faults(ptx: &str, copy: CopyMechanism) -> Vec<String> {
    let functions = functions(ptx);
    let kernel = functions.iter().find(|f| f.name == ENTRY_POINT).expect("the entry point");
    let is_wait = |s: &Statement| does(s, &[]) == Does::AwaitSlot;
    let waits: Vec<String> =
        functions.iter().filter(|f| f.statements.iter().any(is_wait)).map(|f| f.name.clone()).collect();
    let kinds: Vec<Does> = kernel.statements.iter().map(|s| does(s, &waits)).collect();
    let mut found = vec![];
    for function in &functions {
        for statement in &function.statements {
            if statement.opcode == "fence.proxy.async" {
                found.push(
                    "unqualified: a `fence.proxy.async` without a state space waits for global stores".to_owned(),
                );
            }
        }
    }
    if copy == CopyMechanism::Bulk {
        found.extend(copies_in_bulk(kernel, &kinds));
        let elsewhere = functions.iter().filter(|f| f.name != ENTRY_POINT);
        if elsewhere.flat_map(|f| &f.statements).any(|s| does(s, &[]) == Does::CopyInBulk) {
            found.push("copies: a function copies in bulk that this test does not follow".to_owned());
        }
    }
    found.extend(steps(kernel, &kinds));
    found.extend(memory(&functions));
    found
}

/// Both proxy fences of the loader.
fn copies_in_bulk(kernel: &Function, kinds: &[Does]) -> Vec<String> {
    let mut found = vec![];
    // 0: a wait or a copy since the last fence.
    let slot = kernel.on_all_paths(0, |at, before| match kinds[at] {
        Does::FenceSlot => 1,
        Does::AwaitSlot | Does::CopyInBulk => 0,
        _ => before,
    });
    // 0: the history was taken over, without a fence since then.
    let history = kernel.on_all_paths(1, |at, before| match kinds[at] {
        Does::FenceHistory => 1,
        Does::TakeOver => 0,
        _ => before,
    });
    let copies: Vec<usize> = (0..kinds.len()).filter(|&at| kinds[at] == Does::CopyInBulk).collect();
    // Weights, keys and values.
    if copies.len() < 3 || !kinds.contains(&Does::TakeOver) || !kinds.contains(&Does::AwaitSlot) {
        found.push(format!(
            "copies: {} copies in bulk, expected those of weights and of history, and waits",
            copies.len()
        ));
    }
    for at in copies {
        if slot[at] == Some(0) {
            found.push(format!(
                "slot: a path from a wait to the copy of statement {at} has no `fence.proxy.async.shared::cta`"
            ));
        }
        if history[at] == Some(0) {
            found.push(format!(
                "history: a path from the acquired step to statement {at} has no `fence.proxy.async.global`"
            ));
        }
    }
    found
}

/// Release and acquire of a step.
fn steps(kernel: &Function, kinds: &[Does]) -> Vec<String> {
    let mut found = vec![];
    // 0: polled since the last acquire. 1: acquired. 2: acquired, and a block barrier after it.
    let acquired = kernel.on_all_paths(0, |at, before| match kinds[at] {
        Does::Poll => 0,
        Does::Acquire | Does::AcquireRelease => before.max(1),
        Does::BlockBarrier if before == 1 => 2,
        _ => before,
    });
    let hand_overs: Vec<usize> = (0..kinds.len()).filter(|&at| kinds[at] == Does::HandOver).collect();
    if hand_overs.is_empty() {
        found.push("acquire: the step is never handed to the loader".to_owned());
    }
    for at in hand_overs {
        if acquired[at].is_some_and(|state| state < 2) {
            found.push(format!(
                "acquire: a path from a poll to the hand-over of statement {at} has no acquire fence before a block barrier"
            ));
        }
    }
    // 0: a weak store to global memory since the last block barrier.
    let settled = kernel.on_all_paths(0, |at, before| match kinds[at] {
        Does::BlockBarrier => 1,
        Does::StoreWeakly => 0,
        _ => before,
    });
    let mut releases = 0;
    for at in (0..kinds.len()).filter(|&at| matches!(kinds[at], Does::Release | Does::AcquireRelease)) {
        let index =
            |s: &Statement| kernel.statements.iter().position(|other| std::ptr::eq(other, s)).expect("one of these");
        let (next, ends) = kernel.next_after(at, |s| {
            !matches!(kinds[index(s)], Does::Other | Does::HandOver | Does::TakeOver | Does::AwaitSlot)
        });
        if !ends && !next.is_empty() && next.iter().all(|&n| kinds[n] == Does::Publish) {
            releases += 1;
            if settled[at] == Some(0) {
                found
                    .push(format!("release: stores of other warps may follow the block barrier before statement {at}"));
            }
        } else if kinds[at] == Does::Release {
            found.push(format!("release: the fence of statement {at} is followed by something else than the packets"));
        }
    }
    if releases == 0 {
        found.push("release: no fence stands before the packets of a step".to_owned());
    }
    found
}

/// Loads around the caches are of constants; packets are accessed by relaxed operations of 8 bytes alone.
fn memory(functions: &[Function]) -> Vec<String> {
    let constants = offset_of!(Params, pack) as u32;
    let exchange = offset_of!(Params, exchange) as u32;
    let mut found = vec![];
    for function in functions {
        // Called functions get logits, lists and other structures.
        let pointers = if function.name == ENTRY_POINT { function.pointers() } else { BTreeMap::new() };
        for statement in &function.statements {
            let op = statement.opcode.as_str();
            let from = statement.address().and_then(|register| pointers.get(&register).cloned()).unwrap_or_default();
            if op.starts_with("ld.global.nc") && !(from.len() == 1 && from.contains(&constants)) {
                found.push(format!("nc: `{op} {}` in {}: from parameters {from:?}", statement.operands, function.name));
            }
            let access =
                ["ld.", "st.", "atom.", "red."].iter().any(|kind| op.starts_with(kind)) && !op.contains("param");
            let whole = ["ld.relaxed.gpu.global.u64", "ld.relaxed.gpu.global.v2.u64", "st.relaxed.gpu.global.u64"];
            if access && from.contains(&exchange) && !whole.contains(&op) {
                found.push(format!("width: `{op} {}` in {} accesses packets", statement.operands, function.name));
            }
        }
        if function.name == ENTRY_POINT && !pointers.values().any(|from| from.contains(&exchange)) {
            found.push("width: no address of a packet was recognised".to_owned());
        }
    }
    found
}

/// A kernel of one of the families below the fixtures, with a split regime.
fn source(family: &str, precision: Precision, target: &Target) -> KernelSource {
    let text = std::fs::read_to_string(fixture("families").join(family).join("config.json")).unwrap();
    let graph = import_config_only(&text, 3).unwrap().graph;
    let default = Candidate::default_for(&graph, target, precision);
    let candidate = Candidate { sms: 4, splits: 2, split_from: 6, heads_per_task: 1, ..default };
    let program = lower(&graph, family, precision, 64, &candidate).unwrap();
    let validated = validate(schedule(program, target, &candidate).unwrap(), target);
    emit(&validated.unwrap_or_else(|rejected| panic!("{family}: {rejected}")), target, Trace::Off)
}

fn judged(nvrtc: &Nvrtc, source: &KernelSource, target: &Target) -> Vec<String> {
    let ptx = nvrtc.ptx(source).unwrap_or_else(|error| panic!("{}: {error}", target.name));
    faults(&ptx, target.spec.copy)
}

#[test]
fn every_kernel_has_the_fences_that_the_memory_model_names() {
    let Some(nvrtc) = nvrtc("every_kernel_has_the_fences_that_the_memory_model_names") else { return };
    // LayerNorm and norm_add read packets again.
    let more =
        [("gpt-neox", "h200", FP32), ("gpt-neox", "t4", FP32), ("gemma2", "h200", BF16), ("gemma2", "a100", BF16)];
    let cases = CUDA_RECORDS.map(|record| ("llama-gqa", record, BF16)).into_iter().chain(more);
    // Kernels of as many SMs for two GPUs of one architecture may be the same code after a line that names the GPU.
    let mut seen = BTreeSet::new();
    let mut kernels = vec![];
    for (family, record, precision) in cases {
        let target = Target::builtin(record).unwrap();
        let source = source(family, precision, &target);
        let (_, code) = source.text.split_once('\n').expect("a line that names the GPU");
        if seen.insert((source.arch.clone(), code.to_owned())) {
            kernels.push((family, record, target, source));
        }
    }
    // Every architecture and every way to copy.
    assert!(kernels.len() >= 11, "{} kernels", kernels.len());
    kernels.par_iter().for_each(|(family, record, target, source)| {
        let found = judged(nvrtc, source, target);
        assert!(found.is_empty(), "{family} on {record}:\n{}", found.join("\n"));
    });
}

/// One edit of a header: file, text, and its replacement.
type Edit = (&'static str, &'static str, &'static str);

const RING: &str = "runtime/ring.cuh";
const SELECT: &str = "ops/select.cuh";
const SLOT_FENCE: &str = "if constexpr (M::COPY == Copy::BULK) fence_empty_slot();";
const ACQUIRE: &str = "    acquire_step();\n";
const WITHOUT_RELEASE: Lack = (&[("ops/matvec.cuh", "        release_step();\n", "")], &["release"]);

/// What a kernel lacks: edits, and the rules that find them.
type Lack = (&'static [Edit], &'static [&'static str]);

/// Kernels that lack something: family, record, and one lack of each of some rules. What is found must be exactly these rules.
const BROKEN: &[(&str, &str, &[Lack])] = &[
    (
        "llama-gqa",
        "h200",
        &[
            (&[(RING, SLOT_FENCE, "")], &["slot"]),
            (&[(RING, "if constexpr (M::COPY == Copy::BULK) fence_history();", "")], &["history"]),
            (&[(SELECT, ACQUIRE, "")], &["acquire"]),
            WITHOUT_RELEASE,
            (&[("ops/sampling.cuh", "__ldcg(logits + i)", "__ldg(logits + i)")], &["nc"]),
        ],
    ),
    (
        "llama-gqa",
        "h200",
        &[
            // Before the wait.
            (
                &[
                    (RING, SLOT_FENCE, ""),
                    (RING, "    if (at.use != 0 && !wait(", "    fence_empty_slot();\n    if (at.use != 0 && !wait("),
                ],
                &["slot"],
            ),
            // Executed by some of the threads that polled.
            (&[(SELECT, ACQUIRE, "    if (c.warp() == 0) acquire_step();\n")], &["acquire"]),
        ],
    ),
    (
        "llama-gqa",
        "h200",
        &[
            // A history needs the fence of its state space.
            (
                &[("runtime/sync.cuh", "\"fence.proxy.async.global;\"", "\"fence.proxy.async;\"")],
                &["unqualified", "history"],
            ),
            // Executed by the thread that hands the step over, after the barrier.
            (
                &[(SELECT, ACQUIRE, ""), (SELECT, "hand_over_step(", "acquire_step();\n        hand_over_step(")],
                &["acquire"],
            ),
        ],
    ),
    // On some paths.
    ("llama-gqa", "b200", &[(&[(RING, SLOT_FENCE, "if (at.slot != 1) fence_empty_slot();")], &["slot"])]),
    ("llama-gqa", "t4", &[(&[(SELECT, ACQUIRE, "")], &["acquire"]), WITHOUT_RELEASE]),
    (
        "gpt-neox",
        "h200",
        &[(
            &[("runtime/stage.cuh", "reread(packets + k / PER_PACKET)", "u32(__ldcg(packets + k / PER_PACKET))")],
            &["width"],
        )],
    ),
];

#[test]
fn a_kernel_without_one_of_the_fences_is_found() {
    let Some(nvrtc) = nvrtc("a_kernel_without_one_of_the_fences_is_found") else { return };
    BROKEN.par_iter().for_each(|&(family, record, lacks)| {
        let target = Target::builtin(record).unwrap();
        let mut source = source(family, if family == "gpt-neox" { FP32 } else { BF16 }, &target);
        for (header, from, to) in lacks.iter().flat_map(|(edits, _)| *edits) {
            edit(&mut source, header, from, to);
        }
        let found = judged(nvrtc, &source, &target);
        assert_eq!(
            rules(&found),
            lacks.iter().flat_map(|(_, rules)| *rules).copied().collect(),
            "{family} on {record}: {found:?}"
        );
    });
}
