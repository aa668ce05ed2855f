//! Races in shared memory, as racecheck of the compute sanitizer looks for them.
//!
//! The tool tracks barriers and mbarriers from each thread that arrives to each that waits. The kernel hands memory over in three
//! other ways, which are sound by the memory model of PTX, but the tool reports each access after them:
//! - A warp gives a slot back by one arrival of its first lane, after a `__syncwarp` that orders the reads of the other
//!   lanes before it. Between lanes that have not diverged that is no instruction, so the tool sees one lane arrive.
//! - Plain copies count fills and releases in words of shared memory, with a fence before each count and after each look.
//! - `acquired_tag` is stored with release and loaded with acquire; `stop` is a volatile word that carries nothing but itself.
//!
//! So the tool runs a form of the kernel in which every lane arrives, slots are mbarriers with any copy mechanism, and these
//! words are atomics. A report about that form is another race, or a missing wait.

use std::process::Command;
use std::time::{Duration, Instant};

use monobloc::candidate::Candidate;
use monobloc::codegen::abi::Queues;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::cuda::session::Session;
use monobloc::dtype::{DType, Precision};
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import_config_only};
use monobloc::pack::pack;
use monobloc::sample::SampleSettings;
use monobloc::schedule::schedule;
use monobloc::target::{CopyMechanism, Spec, Target};
use monobloc::validate::{Validated, validate};
use rayon::prelude::*;

use crate::faults::{Edit, edited};
use crate::manners::sanitizer;
use crate::support::fixture;
use crate::{Gpu, quick_nvrtc, say};

const NAME: &str = "racecheck_finds_no_race_but_the_one_that_is_put_there";
const CHILD: &str = "MONOBLOC_TEST_CHILD";
/// Few blocks and steps: the tool keeps a record of every access. The history is split between blocks in the last of them.
const SMS: u32 = 4;
const STEPS: u32 = 10;
const SPLIT_FROM: u32 = 6;
/// RMS norms, norms of q and k, windows, soft caps and layer norms; heads that fill a tile and heads that do not.
const MODELS: [(&str, DType); 4] =
    [("llama-gqa", DType::Bf16), ("qwen3", DType::F32), ("gemma2", DType::Bf16), ("gpt-neox", DType::F32)];
/// The kernel is hundreds of times as slow.
const DEADLINE: Duration = Duration::from_secs(60);

const fn ring(from: &'static str, to: &'static str) -> Edit {
    Edit { header: "runtime/ring.cuh", from, to }
}
const fn context(from: &'static str, to: &'static str) -> Edit {
    Edit { header: "runtime/context.cuh", from, to }
}
const fn sync(from: &'static str, to: &'static str) -> Edit {
    Edit { header: "runtime/sync.cuh", from, to }
}
const fn kernel(from: &'static str, to: &'static str) -> Edit {
    Edit { header: "runtime/kernel.cuh", from, to }
}

const SLOW: &[Edit] = &[kernel("global_ns() + p.timeout_ns", "global_ns() + 60000000000ull")];
const LEGIBLE: &[Edit] = &[
    ring("constexpr bool RING_COUNTERS = M::COPY == Copy::PLAIN;", "constexpr bool RING_COUNTERS = false;"),
    ring(" * 32 : M::LOADER_WARPS)", " * 32 : M::LOADER_WARPS * 32)"),
    ring("if (c.lane() == 0) Slot<RING_COUNTERS<M>>::arrive", "Slot<RING_COUNTERS<M>>::arrive"),
    ring("if (tid % 32 == 0) Slot<RING_COUNTERS<M>>::arrive", "Slot<RING_COUNTERS<M>>::arrive"),
    kernel("init(&state.empty[i], M::WARPS);", "init(&state.empty[i], M::WARPS * 32);"),
    context(
        "template <class M>\nstruct State {",
        "struct AtomicWord {
  u32 word;
  __device__ __forceinline__ operator u32() { return atomicAdd(&word, 0u); }
  __device__ __forceinline__ void operator=(u32 to) { atomicExch(&word, to); }
};
template <class M>
struct State {",
    ),
    sync(
        "asm volatile(\"st.release.cta.shared.u32 [%0], %1;\" ::\"r\"(smem_address(to)), \"r\"(word) : \"memory\");",
        "atomicExch(to, word);",
    ),
    sync(
        "asm volatile(\"ld.acquire.cta.shared.u32 %0, [%1];\" : \"=r\"(word) : \"r\"(smem_address(from)) : \"memory\");",
        "word = atomicAdd(const_cast<u32*>(from), 0u);",
    ),
    context("volatile u32 stop;", "AtomicWord stop;"),
];
/// An entry of the queue is written once more, with the same value, while others read it.
const RACE: &[Edit] = &[kernel(
    "to[i] = from[i];\n  c.barrier();",
    "to[i] = from[i];\n  c.barrier();\n  if (c.tid() == 0 && count > 0) to[0] = from[0];",
)];

/// A proven schedule of one of [`MODELS`] on few blocks.
fn proven(record: &Target, copy: CopyMechanism, model: &str, weights: DType) -> (Imported, Validated, Target) {
    let text = std::fs::read_to_string(fixture("families").join(model).join("config.json")).unwrap();
    let imported = import_config_only(&text, 3).unwrap();
    let target = Target { spec: Spec { copy, ..record.spec.clone() }, ..record.clone() };
    let precision = Precision { weights, cache: weights, wire: weights };
    let default = Candidate::default_for(&imported.graph, &target, precision);
    let candidate = Candidate { sms: SMS, splits: 2, split_from: SPLIT_FROM, heads_per_task: 1, ..default };
    let program = lower(&imported.graph, model, precision, 64, &candidate).unwrap();
    let placed = schedule(program, &target, &candidate).unwrap();
    let validated = validate(placed, &target).unwrap_or_else(|rejected| panic!("{model}: {rejected}"));
    (imported, validated, target)
}

/// Runs the kernel of every model in one form, greedily and with sampling. They are compiled together first.
fn run_all(gpu: &Gpu, copy: CopyMechanism, edits: &[&[Edit]]) {
    let compiled = MODELS.par_iter().map(|&(model, weights)| {
        let (imported, validated, target) = proven(&gpu.record, copy, model, weights);
        let source = edits.iter().fold(emit(&validated, &target, Trace::Off), |source, edits| edited(source, edits));
        let cubin = gpu.nvrtc.compile(&source).unwrap_or_else(|error| panic!("{error}")).cubin;
        (imported, validated, cubin)
    });
    for ((model, weights), (imported, validated, cubin)) in MODELS.into_iter().zip(compiled.collect::<Vec<_>>()) {
        let packed = pack(validated.schedule(), &imported.graph, &imported.weights).unwrap();
        let queues = Queues::of(&validated);
        let mut session = Session::load(&gpu.device, &queues, &cubin, Trace::Off, STEPS, |stream, to| {
            Ok(to.upload(stream, 0, &packed)?)
        })
        .unwrap();
        let chance = SampleSettings { temperature: 1.0, top_k: Some(20), top_p: Some(0.9), seed: 1 };
        for settings in [SampleSettings::greedy(), chance] {
            session.sample(settings.resolve().unwrap());
            session.start(&[5, 7], &[]).unwrap();
            let begun = Instant::now();
            let timeout_ms = session.launch(0, STEPS, false).unwrap();
            while !session.is_done().unwrap() && begun.elapsed() < DEADLINE {
                std::thread::sleep(Duration::from_millis(5));
            }
            let launched = session.finish(timeout_ms).unwrap_or_else(|error| panic!("{model}: {error}"));
            assert_eq!(launched.decided, STEPS + 1, "{model}");
        }
        println!("ran {model} {weights} in {copy}");
    }
}

/// Needs NVRTC but no GPU: each form is still a kernel that compiles.
#[test]
fn every_form_for_racecheck_compiles() {
    let record = Target::builtin("h200").unwrap();
    let nvrtc = quick_nvrtc("every_form_for_racecheck_compiles");
    for copy in [CopyMechanism::Plain, CopyMechanism::CpAsync, CopyMechanism::Bulk] {
        for (model, weights) in MODELS {
            let (_, validated, target) = proven(&record, copy, model, weights);
            let source = emit(&validated, &target, Trace::Off);
            let forms = [SLOW, LEGIBLE, RACE].iter().fold(source, |source, edits| edited(source, edits));
            if let (Some(nvrtc), "llama-gqa") = (&nvrtc, model) {
                nvrtc.compile(&forms).unwrap_or_else(|error| panic!("{error}"));
            }
        }
    }
}

#[test]
fn racecheck_finds_no_race_but_the_one_that_is_put_there() {
    let Some(gpu) = Gpu::here(NAME) else { return };
    if let Ok(form) = std::env::var(CHILD) {
        let (copy, form) = form.split_once(' ').unwrap();
        let copy = gpu.copies().into_iter().find(|known| known.to_string() == copy).unwrap();
        return match form {
            "shipped" => run_all(&gpu, copy, &[SLOW]),
            "legible" => run_all(&gpu, copy, &[SLOW, LEGIBLE]),
            _ => run_all(&gpu, copy, &[SLOW, LEGIBLE, RACE]),
        };
    }
    let Some(sanitizer) = sanitizer(NAME) else { return };
    let last = *gpu.copies().last().unwrap();
    for (copy, form) in gpu.copies().into_iter().map(|copy| (copy, "legible")).chain([(last, "racing")]) {
        let output = Command::new(sanitizer)
            .args(["--tool", "racecheck", "--racecheck-report", "analysis", "--report-api-errors", "no"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", &format!("races::{NAME}"), "--nocapture"])
            .env(CHILD, format!("{copy} {form}"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(text.matches("ran ").count(), MODELS.len(), "{copy}, {form}: {text}");
        let verdict = text.lines().find(|line| line.contains("RACECHECK SUMMARY")).unwrap_or_else(|| panic!("{text}"));
        say(&format!("{copy}, {form}: {}", verdict.trim_start_matches('=').trim()));
        let clean = verdict.contains(": 0 hazards displayed (0 errors, 0 warnings)");
        assert_eq!(clean, form == "legible", "{copy}, {form}: {text}");
    }
}
