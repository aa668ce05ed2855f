//! Tests the code that calls the driver, on three machines: one without a driver, one with a fake driver, and a real device.
//!
//! The fake (`fake_cuda.c`) is built with the C compiler and loaded by a child process that runs the same test, because
//! a process loads one driver. Tests of a real device say so when there is none; with `MONOBLOC_REQUIRE_GPU=1` they fail.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use monobloc::cache::Cache;
use monobloc::candidate::{Candidate, WaveKnobs};
use monobloc::check::{ALIKE_SEQUENCES as SEQUENCES, SharedTexts, TextSizes, check_alike};
use monobloc::codegen::KernelSource;
use monobloc::codegen::abi::Queues;
use monobloc::codegen::emit::Trace;
use monobloc::cuda::driver::{Device, DriverError};
use monobloc::cuda::links::Link;
use monobloc::cuda::memory::DeviceBuffer;
use monobloc::cuda::one_row::OneRowSession;
use monobloc::cuda::rows::{FirstToken, RowInput, RowLauncher, RowsSession, given};
use monobloc::cuda::sampler::SamplerSession;
use monobloc::cuda::self_test::self_test;
use monobloc::cuda::session::{GivenWith, LeftNorm, Session, SessionError, left_of};
use monobloc::cuda::states::StateRows;
use monobloc::cuda::stream::{Argument, LaunchShape, Wait};
use monobloc::cuda::turns::TurnsSession;
use monobloc::cuda::waves::{Last, StepsSession, WavesSession};
use monobloc::defaults::rows::{Room, place_one_row, place_rows};
use monobloc::digest::Digest;
use monobloc::dtype::{DType, Precision};
use monobloc::engine::{
    After, Ask, Bounds, ChoiceId, DeviceStepper, DeviceSteps, Drafts, End, Engine, Event, Figures, Limits, Proposals,
    RequestId, Stepper, Stepwise, TextDraft,
};
use monobloc::error::{Fault, Tier};
use monobloc::grammar::{Grammar, Source, Vocabulary};
use monobloc::interp::Pack;
use monobloc::ir::BufferId;
use monobloc::ir::layout::{held, words_bytes};
use monobloc::ir::op::Role;
use monobloc::ir::parse::parse;
use monobloc::ir::program::Space;
use monobloc::lower::lower;
use monobloc::manifest::Manifest;
use monobloc::model::config::{import, import_config_only, import_draft};
use monobloc::model::graph::ModelGraph;
use monobloc::model::synthetic::given_value;
use monobloc::pages::Pool;
use monobloc::pipeline::checks::Checks;
use monobloc::pipeline::device_rows::Prefill;
use monobloc::pipeline::device_steps::By;
use monobloc::pipeline::device_waves::PromptCubins;
use monobloc::pipeline::kernels::{Code, Does, Kernel, KernelSet};
use monobloc::pipeline::speculative::{OneRow, Verifier, decide_on_device};
use monobloc::pipeline::text_steps::TextSteps;
use monobloc::pipeline::trial::{Answer, Job};
use monobloc::pipeline::wave_trial::{Bench, Ended, On};
use monobloc::pipeline::{
    AskedSizes, Checking, Exported, Hardware, Mtp, MtpDraft, Ready, Serving, WeightsId, Workspace, export,
};
use monobloc::random::Random;
use monobloc::report::Report;
use monobloc::rows::{Edit, Guard, PageId, Request, Row, SequenceId, Shape, StateCopy};
use monobloc::sample::{self, Penalties, RequestSettings, SampleSettings, TokenCounts, TokenSet, argmax};
use monobloc::schedule::schedule;
use monobloc::speculate::{Draft, Left, Speculated, Speculation};
use monobloc::target::{Measured, Target, TargetRecord};
use monobloc::trace::STAMP_WORDS;
use monobloc::validate::{Validated, validate};
use monobloc::waves::{
    Form, Layout, Proven, TAIL_ROWS, WithTail, derive, derive_alike, derive_split, prove, prove_alike, prove_tail,
};

use super::nvrtc::nvrtc;
use super::proof_support::{BF16, FP32};
use super::skipped;
use super::support::fixture;

const CHILD: &str = "MONOBLOC_TEST_CHILD";

/// Enough of a cubin for the fake, which looks kernels up by name.
const IMAGE: &[u8] = b"\x7fELF0";
/// The same for the kernel for one row.
const IMAGE_ONE_ROW: &[u8] = b"\x7fELF1";
/// The same for the kernel for one row over a pool of pages.
const IMAGE_PAGED: &[u8] = b"\x7fELF2";
/// The same for the decode kernel of two devices.
const IMAGE_DEVICES: &[u8] = b"\x7fELF3";
/// The same for a batch kernel that leaves something for a draft, and for the decode kernel of a draft.
const IMAGE_LEAVING: &[u8] = b"\x7fELF4";
const IMAGE_DRAFT: &[u8] = b"\x7fELF5";
/// The same for the decode kernel of two devices over a pool of pages, and for their batch kernels.
const IMAGE_PAGED_DEVICES: &[u8] = b"\x7fELF6";
const IMAGE_ROWS_DEVICES: &[u8] = b"\x7fELF7";
/// The same for their batch kernel of 16 rows, over a pack with the sizes of another one.
const IMAGE_ROWS16_DEVICES: &[u8] = b"\x7fELF9";
/// The same for their batch kernel that leaves something for a draft.
const IMAGE_LEAVING_DEVICES: &[u8] = b"\x7fELFA";
/// The same for their wave kernels.
const IMAGE_WAVES_DEVICES: &[u8] = b"\x7fELF8";
const ONE: LaunchShape = LaunchShape { grid: 1, block: 32, smem_dynamic_bytes: 0, cluster: 1, kept: None };

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// A folder with the fake as `libcuda.so` and `libnvidia-ml.so.1`; `None` without compilers for C and C++.
fn fake_driver(flag: &'static str) -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libcuda.so");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sampler = folder.path().join("sampler.o");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-c", "-fPIC", "-O1", "-ffp-contract=off", "-w", "-DLIBRARY", "-I"]);
    compiler.arg(root.join("kernels")).arg(root.join("tests/it/sampler.cc")).arg("-o").arg(&sampler);
    let output = compiler.output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-pthread", flag, "-o"]).arg(&library);
    compiler.arg(root.join("tests/it/fake_cuda.c")).arg(&sampler).args(["-lstdc++", "-lm"]);
    let output = compiler.output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::copy(&library, folder.path().join("libnvidia-ml.so.1")).unwrap();
    Some(folder)
}

/// [`with_fake_driver`], of a test that gives back what it takes of a device.
fn releasing(test: &str, mode: &str) -> Option<String> {
    let text = with_fake_driver(test, mode)?;
    assert!(text.contains("released with 0 blocks, 0 streams, 0 events, 0 modules left"), "{text}");
    Some(text)
}

/// Runs `test` again in a process that loads the fake; its output, which must be a success. `None` if it cannot be built.
fn with_fake_driver(test: &str, mode: &str) -> Option<String> {
    static NEW: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
    static OLD: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
    let folder = match mode {
        "old" => OLD.get_or_init(|| fake_driver("-DOLD")),
        _ => NEW.get_or_init(|| fake_driver("-DNEW")),
    };
    let Some(folder) = folder else {
        skipped(test, "C and C++ compilers", "`cc` and `c++` build the fake driver");
        return None;
    };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("driver::{test}"), "--nocapture"])
        .envs([(CHILD, "1"), ("FAKE_CUDA", mode)])
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    Some(text)
}

#[test]
fn without_a_driver_every_way_in_says_so() {
    let error = match Device::open(0) {
        Err(error @ DriverError::NoDriverLib) => error,
        _ => return skipped("without_a_driver_every_way_in_says_so", "machine without a driver", "one is installed"),
    };
    assert_eq!(Device::list().unwrap_err(), DriverError::NoDriverLib);
    let fault = Fault::from(error);
    assert_eq!(fault.tier, Tier::Environment);
    assert_eq!(
        fault.to_string(),
        "no NVIDIA driver: `libcuda.so.1` could not be loaded\n  help: check and measure need a GPU; \
         every other stage runs here, and its results are kept in the cache"
    );
}

#[test]
fn drivers_that_cannot_work_are_told_apart() {
    if is_child() {
        return println!("{}", Fault::from(Device::open(0).unwrap_err()));
    }
    for (mode, expected) in [
        ("no-device", "the NVIDIA driver sees no device\n  help: compare `nvidia-smi` and `CUDA_VISIBLE_DEVICES`"),
        ("stub", "`libcuda.so` is the stub of a toolkit, not a driver\n  help: remove the `stubs` folder"),
        ("old", "the NVIDIA driver is too old: it has no `cuLaunchKernelEx`\n  help: install driver 550 or later"),
    ] {
        let Some(text) = with_fake_driver("drivers_that_cannot_work_are_told_apart", mode) else { return };
        assert!(text.contains(expected), "{mode}: {text}");
    }
}

#[test]
fn the_self_test_keeps_the_contract_of_the_driver() {
    const NAME: &str = "the_self_test_keeps_the_contract_of_the_driver";
    let Some(nvrtc) = nvrtc(NAME) else { return };
    if is_child() {
        let found = self_test(&Device::open(0).unwrap(), nvrtc).unwrap();
        assert_eq!((found.grid, found.smem_dynamic_bytes, found.cluster), (4, 232_448, Some(2)));
        assert!(found.kernel_to_host_us > 0.0 && found.abort_us > 0.0 && found.upload_bytes_per_s > 0.0);
        let clocks = found.clocks.clone().unwrap();
        assert_eq!((clocks.sm_mhz, clocks.sm_mhz_max, clocks.power_mw), (Some(1200), Some(1980), None));
        assert_eq!(clocks.throttle_reasons(), ["software thermal slowdown"]);
        assert_eq!(found.device.driver_release.as_deref(), Some("580.00.01"));
        assert_eq!((found.device.driver_cuda.as_str(), found.device.sm_count), ("13.0", 4));
        return;
    }
    releasing(NAME, "");
}

#[test]
fn misuse_is_refused_before_it_reaches_the_driver() {
    const NAME: &str = "misuse_is_refused_before_it_reaches_the_driver";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let device = Device::open(0).unwrap();
    let stream = device.stream().unwrap();
    assert_eq!(Device::open(1).unwrap_err().to_string(), "expected a device ordinal below 1, found 1");

    let mut buffer = device.alloc(100).unwrap();
    buffer.upload(&stream, 4, &[1_u32; 24]).unwrap();
    assert_eq!(buffer.download::<u32>(&stream, 96, 1).unwrap(), [1]);
    let outside = |offset_bytes, range_bytes| DriverError::OutOfBounds { offset_bytes, range_bytes, buffer_bytes: 100 };
    assert_eq!(buffer.upload(&stream, 8, &[0_u32; 24]), Err(outside(8, 96)));
    assert_eq!(buffer.download::<u8>(&stream, u64::MAX, 2), Err(outside(u64::MAX, 2)));
    assert_eq!(buffer.download::<u64>(&stream, 0, usize::MAX), Err(outside(0, u64::MAX)));
    assert_eq!(device.lanes(16).unwrap().upload(&stream, &mut buffer, 50, &[0; 51]), Err(outside(50, 51)));
    let mut copy = device.alloc(100).unwrap();
    copy.copy_from(&stream, 0, &buffer, 0, buffer.bytes()).unwrap();
    assert_eq!(copy.download::<u32>(&stream, 4, 24).unwrap(), [1; 24]);
    assert_eq!(device.alloc(0).unwrap().download::<u8>(&stream, 0, 0).unwrap(), [0_u8; 0]);
    assert_eq!(
        device.alloc(u64::MAX).err().unwrap().to_string(),
        "device memory is exhausted: expected 18446744073709551615 bytes, found 536870912 free"
    );
    let mapped = device.alloc_mapped(3).unwrap();
    assert_eq!(mapped.snapshot(), [0, 0, 0]);
    assert!(mapped.store(2, 5).is_ok() && mapped.load(2) == Ok(5) && mapped.load(3).is_err());

    assert!(device.load(b"not a cubin").is_err());
    let module = device.load(IMAGE).unwrap();
    let refused = |name, smem| device.function(&module, name, smem).err().unwrap().to_string();
    assert_eq!(refused("missing", 0), "the module has no kernel `missing`");
    assert_eq!(
        refused("self_test_empty", 232_449),
        "kernel `self_test_empty` can have 232448 bytes of dynamic shared memory, found 232449"
    );
    let function = device.function(&module, "self_test_grid", 1024).unwrap();
    let arguments = [Argument::Buffer(&buffer), Argument::U32(1)];
    assert_eq!(
        stream.launch_cooperative(&function, &ONE, &arguments).unwrap_err().to_string(),
        "kernel `self_test_grid` expects parameters of [8, 8, 8, 4, 8] bytes, found [8, 4]"
    );
    let unfit = |shape| function.fits(&shape).unwrap_err().to_string();
    assert_eq!(
        unfit(LaunchShape { grid: 9, ..ONE }),
        "kernel `self_test_grid`: at most 8 blocks are resident at once, found a grid of 9"
    );
    assert_eq!(
        unfit(LaunchShape { grid: 6, cluster: 2, ..ONE }),
        "kernel `self_test_grid`: at most 4 blocks are resident at once, found a grid of 6"
    );
    assert_eq!(
        unfit(LaunchShape { grid: 3, cluster: 2, ..ONE }),
        "kernel `self_test_grid`: expected a grid that is a multiple of the cluster 2, found 3"
    );
    assert_eq!(
        unfit(LaunchShape { block: 2048, ..ONE }),
        "kernel `self_test_grid` can have 1024 threads per block, found 2048"
    );
    assert_eq!(
        unfit(LaunchShape { smem_dynamic_bytes: 2048, ..ONE }),
        "kernel `self_test_grid` can have 1024 bytes of dynamic shared memory, found 2048"
    );
    assert_eq!(
        unfit(LaunchShape { cluster: 0, ..ONE }),
        "kernel `self_test_grid`: expected a grid that is a multiple of the cluster 0, found 1"
    );
}

#[test]
fn a_kernel_that_crashes_is_an_error_and_everything_still_drops() {
    const NAME: &str = "a_kernel_that_crashes_is_an_error_and_everything_still_drops";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let device = Device::open(0).unwrap();
    let stream = device.stream().unwrap();
    let _buffer = device.alloc(64).unwrap();
    let module = device.load(IMAGE).unwrap();
    stream.launch_cooperative(&device.function(&module, "crash", 0).unwrap(), &ONE, &[]).unwrap();
    let error = stream.wait_timeout(Duration::from_secs(5)).unwrap_err();
    assert!(error.is_crash(), "{error}");
    assert_eq!(Fault::from(error).tier, Tier::Internal);
}

#[test]
fn a_kernel_that_hangs_blocks_neither_the_wait_nor_the_drops() {
    const NAME: &str = "a_kernel_that_hangs_blocks_neither_the_wait_nor_the_drops";
    if !is_child() {
        let start = Instant::now();
        with_fake_driver(NAME, "");
        assert!(start.elapsed() < Duration::from_secs(20));
        return;
    }
    let device = Device::open(0).unwrap();
    let stream = device.stream().unwrap();
    let _words = device.alloc_mapped(4).unwrap();
    let module = device.load(IMAGE).unwrap();
    stream.launch_cooperative(&device.function(&module, "hang", 0).unwrap(), &ONE, &[]).unwrap();
    assert_eq!(stream.wait_timeout(Duration::from_millis(20)).unwrap(), Wait::TimedOut);
    assert!(!stream.is_done().unwrap());
}

/// Steps of a launch of [`rows_session`].
const STEPS_MAX: u32 = 4;

/// A model whose kernels the fake replaces: only their sizes matter.
struct Model {
    graph: ModelGraph,
    precision: Precision,
}

impl Model {
    fn tiny() -> Model {
        Model { graph: import(&fixture("tinystories-llama")).unwrap().graph, precision: FP32 }
    }

    /// Layers with a recurrent state after one of attention, whose place in the cache has the tokens of the fake.
    fn with_states() -> Model {
        let mut graph = import(&fixture("hybrids/qwen35")).unwrap().graph;
        graph.layers.rotate_right(1);
        Model { graph, precision: FP32 }
    }

    /// Heads of 64 in bf16, which kernels of waves take.
    fn of_wide_heads() -> Model {
        let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2560, "intermediate_size": 256, "head_dim": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
            "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": true}"#;
        Model { graph: import_config_only(config, 0).unwrap().graph, precision: BF16 }
    }

    /// The same with experts, of which a row has three.
    fn of_experts() -> Model {
        let config = r#"{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 64,
            "head_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "num_experts": 6,
            "num_experts_per_tok": 3, "moe_intermediate_size": 128, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": false,
            "sliding_window": null, "use_sliding_window": false, "tie_word_embeddings": true}"#;
        Model { graph: import_config_only(config, 0).unwrap().graph, precision: BF16 }
    }

    /// The kernel for `rows`: contexts of four pages, six pages, four sequences beside those that keep pages.
    fn kernel(&self, rows: u32) -> Validated {
        self.kernel_of(rows, 4, &fake_target())
    }

    /// The same for a target of one device or of several.
    fn kernel_on(&self, rows: u32, target: &Target) -> Validated {
        self.kernel_of(rows, 4, target)
    }

    /// The same with contexts of `blocks` pages, and half as many pages more.
    fn kernel_of(&self, rows: u32, blocks: u32, target: &Target) -> Validated {
        let graph = &self.graph;
        let base = Candidate { sms: 4 * target.devices, ..Candidate::default_for(graph, target, self.precision) };
        let place =
            |context_max, room| place_rows(graph, "fake", self.precision, context_max, target, &base, room).unwrap();
        let page_rows =
            Shape::of(&place(1024, Room { rows: 8, sequences: 8, positions: 1024 }).program).unwrap().page_rows;
        let pages = blocks + blocks / 2;
        let (context_max, room) =
            (blocks * page_rows, Room { rows, sequences: 4 + 2, positions: u64::from(pages * page_rows) });
        let placed = match rows {
            1 => {
                let one = base.for_context(context_max);
                place_one_row(graph, "fake", self.precision, context_max, target, &one, room).unwrap()
            }
            _ => place(context_max, room),
        };
        let validated = validate(placed, target).unwrap();
        let shape = Shape::of(&validated.schedule().program).unwrap();
        assert_eq!((shape.blocks(), shape.pages, Pool::keepers(&shape)), (blocks, pages, 2));
        validated
    }
}

/// One text on the fake: the kernel for one row, kernels for 8 rows that verify and that read the prompt, with waves or without, one cache.
struct TextOnFake {
    one: Session,
    verifier: RowsSession,
    prefill: Prefill,
    vocab: u32,
    context_max: u32,
}

impl TextOnFake {
    fn new(device: &Device, model: &Model, waves: &[&[u8]]) -> TextOnFake {
        TextOnFake::with_rows(device, model, IMAGE, waves, if waves.is_empty() { 2 } else { 4 })
    }

    /// With the image of the batch kernels, and contexts of this many pages.
    fn with_rows(device: &Device, model: &Model, image: &'static [u8], waves: &[&[u8]], blocks: u32) -> TextOnFake {
        let target = fake_target().on_devices(device.count());
        let (graph, precision) = (&model.graph, model.precision);
        let base = Candidate { sms: 4 * target.devices, ..Candidate::default_for(graph, &target, precision) };
        let placed = |context_max: u32| {
            let room = Room { rows: 8, sequences: 1, positions: u64::from(context_max) };
            place_rows(graph, "fake", precision, context_max, &target, &base, room).unwrap()
        };
        let context_max = blocks * Shape::of(&placed(1024).program).unwrap().page_rows;
        let rows = validate(placed(context_max), &target).unwrap();
        let shape = Shape::of(&rows.schedule().program).unwrap();
        assert_eq!((shape.pages, shape.blocks()), (blocks, blocks));
        let candidate = base.for_context(context_max);
        let program = lower(graph, "fake", precision, context_max, &candidate).unwrap();
        let one_row = validate(schedule(program, &target, &candidate).unwrap(), &target).unwrap();
        let vocab = graph.vocab;
        let program = &rows.schedule().program;
        let left = program.head_input().unwrap();
        let (at, of) = (rows.schedule().placement[left.index()].unwrap(), &program.buffers[left.index()]);
        let phase = words_bytes(of.rows, of.cols, of.dtype) as u32;
        let words = [shape.blocks(), shape.page_rows, shape.pages, shape.rows, vocab, at as u32, phase, of.cols];
        let (queues, pack) = (Queues::of(&one_row), on_each(device, &words));
        let one =
            Session::load_sharing(device, &queues, image_for(device, IMAGE_ONE_ROW), Trace::Off, 16, pack).unwrap();
        let (queues, image) = (Queues::of(&rows), image_for(device, image));
        let cache = Some(one.cache());
        let verifier = RowsSession::load(device, &queues, image, Trace::Off, 1, one.pack(), cache).unwrap();
        let waves =
            waves.first().map(|chunk| PromptCubins { chunk, tail: waves.get(1).copied(), knobs: WaveKnobs::default() });
        let prefill = Prefill::of(device, &target, &queues, image, waves, &one).unwrap();
        TextOnFake { one, verifier, prefill, vocab, context_max }
    }
}

/// The image of a kernel for a device that runs models together with another one, by that for one device.
fn image_for(device: &Device, of_one: &'static [u8]) -> &'static [u8] {
    let several = [
        (IMAGE, IMAGE_ROWS_DEVICES),
        (IMAGE_ONE_ROW, IMAGE_DEVICES),
        (IMAGE_PAGED, IMAGE_PAGED_DEVICES),
        (IMAGE_LEAVING, IMAGE_LEAVING_DEVICES),
    ];
    let found = several.into_iter().find(|(of, _)| *of == of_one && device.count() > 1);
    found.map_or(of_one, |(_, of_several)| of_several)
}

/// The first two devices of the fake, which run models together.
fn two_devices() -> Result<Device, DriverError> {
    Device::together(vec![Device::open(0)?, Device::open(1)?])
}

/// Words on a device and on those that run models together with it.
fn on_each(device: &Device, words: &[u32]) -> Arc<DeviceBuffer> {
    let upload = |device: &Device| {
        let mut buffer = device.alloc(4 * words.len() as u64).unwrap();
        buffer.upload(&device.stream().unwrap(), 0, words).unwrap();
        buffer
    };
    Arc::new(upload(device).with_others(device.others().iter().map(upload).collect()))
}

/// A text on two devices of the fake.
fn on_two_devices(device: &Device) -> Result<Session, SessionError> {
    let (model, target) = (Model::tiny(), fake_target().on_devices(2));
    let candidate = Candidate { sms: 8, ..Candidate::default_for(&model.graph, &target, model.precision) };
    let candidate = candidate.for_context(64);
    let program = lower(&model.graph, "fake", model.precision, 64, &candidate).unwrap();
    let proven = validate(schedule(program, &target, &candidate).unwrap(), &target).unwrap();
    let pack = on_each(device, &[4, 16, 4, 1, model.graph.vocab]);
    Session::load_sharing(device, &Queues::of(&proven), IMAGE_DEVICES, Trace::Off, 8, pack)
}

#[test]
fn two_devices_decode_one_text() {
    const NAME: &str = "two_devices_decode_one_text";
    if !is_child() {
        releasing(NAME, "two devices");
        return;
    }
    assert!(Link::among(&[0, 1]).unwrap().iter().all(|link| link.lacks().is_none()));
    let refused = on_two_devices(&Device::open(0).unwrap()).err().unwrap().to_string();
    assert_eq!(refused, "the kernel is for 2 devices, found 1");
    let mut session = on_two_devices(&two_devices().unwrap()).unwrap();
    let vocab = Model::tiny().graph.vocab;
    let greedy = RequestSettings::plain(SampleSettings::greedy()).resolve(vocab, &[]).unwrap();
    for aged in [false, true] {
        let mut text = vec![1, 40, 7];
        session.start(&text, &[]).unwrap();
        if aged {
            // Tags begin anew on both devices.
            session.age(u32::MAX);
        }
        for position in [0, 8, 16] {
            assert_eq!(session.run(position, 8, false).unwrap().decided, position + 9);
            while text.len() < position as usize + 9 {
                let next = next_of_fake(&text, &greedy, &TokenCounts::new(&text), None, vocab);
                assert_eq!(session.token(text.len() as u32).unwrap(), next, "token {}", text.len());
                text.push(next);
            }
        }
        // A token that the host chooses reaches both devices.
        session.go_on(24, 5).unwrap();
        text.truncate(24);
        text.push(5);
        session.run(24, 1, true).unwrap();
        let logits = session.logits(1).unwrap();
        assert_eq!(argmax(&logits), Some(next_of_fake(&text, &greedy, &TokenCounts::new(&text), None, vocab)));
    }
    let bytes: Vec<u8> = (0..session.cache_bytes()).map(|at| at as u8).collect();
    session.upload_cache(0, &bytes).unwrap();
}

#[test]
fn devices_without_a_link_are_refused() {
    const NAME: &str = "devices_without_a_link_are_refused";
    if !is_child() {
        with_fake_driver(NAME, "two without links");
        return;
    }
    let fault = Fault::from(two_devices().err().unwrap());
    assert_eq!(fault.message, "device 0 cannot exchange packets with device 1: no peer access");
    assert!(fault.tier == Tier::Environment && fault.remedy.unwrap().contains("NVLink"));
}

#[test]
fn a_device_that_stops_ends_the_other() {
    const NAME: &str = "a_device_that_stops_ends_the_other";
    if !is_child() {
        let start = Instant::now();
        with_fake_driver(NAME, "one of two hangs");
        assert!(start.elapsed() < Duration::from_secs(20));
        return;
    }
    let mut session = on_two_devices(&two_devices().unwrap()).unwrap();
    session.start(&[1, 2, 3], &[]).unwrap();
    let SessionError::Hung { stuck, .. } = session.run(0, 4, false).unwrap_err() else { panic!("it ran") };
    let told: Vec<String> = stuck.iter().map(|stuck| stuck.to_string()).collect();
    assert!(told.iter().any(|line| line.starts_with("device 0, sm0: step ")), "{told:?}");
}

/// Proposes the tokens that the fake will choose, some of them wrong, and sometimes none.
struct Knowing {
    text: Vec<u32>,
    random: Random,
    /// The positions whose rows it was shown, if it is shown any.
    shown: Option<Range<usize>>,
}

impl Draft for Knowing {
    fn propose(&mut self, sequence: &[u32], most: usize) -> Vec<u32> {
        assert_eq!(sequence, &self.text[..sequence.len()]);
        let count = self.random.below(most + 1);
        let mut tokens: Vec<u32> = self.text[sequence.len()..].iter().copied().take(count).collect();
        if let Some(token) = tokens.get_mut(self.random.below(2 * most)) {
            *token = (*token + 1) % 100;
        }
        // Of all tokens but the last one it knows what the model left.
        assert!(self.shown.as_ref().is_none_or(|shown| shown.end + 1 == sequence.len()), "{:?}", self.shown);
        tokens
    }

    fn sees(&self) -> bool {
        self.shown.is_some()
    }

    fn see(&mut self, first: usize, rows: Vec<Vec<f32>>) {
        let shown = self.shown.as_mut().unwrap();
        if shown.end == 0 {
            *shown = first..first;
        }
        assert!(shown.contains(&first) || first == shown.end, "{first} after {shown:?}");
        shown.end = shown.end.max(first + rows.len());
        for (row, end) in rows.iter().zip(first + 1..) {
            let hash = hash_of_fake(&self.text[..end]);
            let expected: Vec<f32> = (0..row.len() as u64).map(|column| left_of_fake(hash, column)).collect();
            assert_eq!(*row, expected, "position {}", end - 1);
        }
    }
}

/// Tokens, ends and counts of a text whose steps verify proposals, through guard, sessions and driver calls. The fake notices a cache row of
/// a token that was not accepted.
#[test]
fn proposed_tokens_on_a_device_change_no_token() {
    const NAME: &str = "proposed_tokens_on_a_device_change_no_token";
    if !is_child() {
        let Some(text) = releasing(NAME, "") else { return };
        // Long prompts are decided after a chunk. Some have a rest of a few tokens, which a kernel for rows reads before it decides.
        let (chunks, tails) = (text.matches("a chunk of ").count(), text.matches("a tail").count());
        assert!(chunks > 8 && tails > 4 && tails <= chunks, "{chunks} chunks, {tails} tails");
        return;
    }
    let device = Device::open(0).unwrap();
    let on = TextOnFake::new(&device, &Model::tiny(), &[]);
    let mut on = texts_with_proposals(on, 12, 60, 3);
    let mut draft = Knowing { text: vec![1], random: Random::new(0), shown: None };
    let mut speculation = Speculation::new(&mut draft, 8);
    let one = OneRow { session: &mut on.one, steps_max: 16, ends: &[] };
    let verifier = Verifier { rows: &mut on.verifier, sampler: sample::Sampler::greedy() };
    let refused = decide_on_device(one, verifier, None, &[1], 4, &mut speculation, &mut |_| ControlFlow::Continue(()));
    let expected = "`--lookup 8` needs steps of 9 rows, found steps of at most 8";
    assert_eq!(refused.unwrap_err().message, expected);
    let on = TextOnFake::new(&device, &Model::of_wide_heads(), &[IMAGE, IMAGE]);
    let longest = on.context_max as usize * 3 / 4;
    let mut on = texts_with_proposals(on, 24, longest, 4);
    // Top-k is left to the kernel for one row, with the last token.
    let sampling = SampleSettings { temperature: 0.7, top_k: Some(5), ..SampleSettings::greedy() };
    let request = RequestSettings::plain(sampling).resolve(on.vocab, &[]).unwrap();
    let prompt: Vec<u32> = (0..longest as u32).map(|at| at * 7 % 100).collect();
    assert_eq!(on.prefill.decide(&prompt, request.sampler()).unwrap(), None);
    let greedy = RequestSettings::plain(SampleSettings::greedy()).resolve(on.vocab, &[]).unwrap();
    let expected = next_of_fake(&prompt, &greedy, &TokenCounts::new(&prompt), None, on.vocab);
    assert_eq!(on.prefill.decide(&prompt, greedy.sampler()).unwrap(), Some(expected));
}

/// The same on two devices: proposals of texts, with and without waves and states, and those of a draft, which is shown what the model left, also in
/// a server.
#[test]
fn two_devices_verify_proposals() {
    const NAME: &str = "two_devices_verify_proposals";
    if !is_child() {
        let Some(text) = releasing(NAME, "two devices") else { return };
        assert!(text.matches("a chunk of ").count() > 8 && text.matches("a tail").count() > 4, "{text}");
        return;
    }
    let device = two_devices().unwrap();
    texts_with_proposals(TextOnFake::new(&device, &Model::tiny(), &[]), 12, 60, 3);
    texts_with_proposals(TextOnFake::new(&device, &Model::with_states(), &[]), 24, 60, 3);
    let on = TextOnFake::new(&device, &Model::of_wide_heads(), &[IMAGE_WAVES_DEVICES, IMAGE_WAVES_DEVICES]);
    let longest = on.context_max as usize * 3 / 4;
    texts_with_proposals(on, 24, longest, 4);
    let leaving = TextOnFake::with_rows(&device, &Model::with_states(), IMAGE_LEAVING, &[], 2);
    texts_with_draft(leaving, 24, 60, 3, Some(256));
    let (stepper, seen) = drafted(&device, &Model::with_states(), 4, 2, false);
    let figures = requests_alone_and_together(stepper, 5, 60);
    let Proposals { proposed, accepted, .. } = figures.proposals;
    assert!(accepted > 60 && proposed > accepted && seen.get() > 100, "{figures:?}, {} rows seen", seen.get());
}

/// The same with recurrent states: sessions and guard know the position of each state, which goes back where a token is not chosen.
#[test]
fn proposed_tokens_on_a_device_leave_no_wrong_state() {
    const NAME: &str = "proposed_tokens_on_a_device_leave_no_wrong_state";
    if !is_child() {
        releasing(NAME, "");
        return;
    }
    let device = Device::open(0).unwrap();
    let mut on = texts_with_proposals(TextOnFake::new(&device, &Model::with_states(), &[]), 24, 60, 3);
    // Memory of a snapshot is that of the text.
    assert_eq!(on.one.kept(1), None);
    assert_eq!(on.one.go_back(1).unwrap_err().to_string(), "no recurrent state was kept in slot 1");
    on.one.decode_again(&[1, 2, 3]).unwrap();
    on.one.keep_state(1).unwrap();
    on.one.decode_again(&[1, 2, 3, 4, 5]).unwrap();
    assert_eq!((on.one.kept(1), on.one.finds_state(5), on.one.finds_state(3)), (Some(3), true, false));
    assert_eq!((on.one.go_back(1).unwrap(), on.one.finds_state(5), on.one.finds_state(3)), (3, false, true));
}

/// A draft is shown what the model left of every token of the text, also where states go back, and of no other token.
#[test]
fn a_draft_on_a_device_sees_what_the_model_left() {
    const NAME: &str = "a_draft_on_a_device_sees_what_the_model_left";
    if !is_child() {
        let Some(text) = releasing(NAME, "") else { return };
        assert!(!text.contains("steps of one row"), "a step of which nothing is left");
        return;
    }
    let device = Device::open(0).unwrap();
    let leaving = |model: Model, blocks| TextOnFake::with_rows(&device, &model, IMAGE_LEAVING, &[], blocks);
    texts_with_draft(leaving(Model::with_states(), 2), 24, 60, 3, Some(256));
    let on = leaving(Model::tiny(), 8);
    let longest = on.context_max as usize * 3 / 4;
    assert!(longest > 300, "{longest}");
    let mut on = texts_with_draft(on, 12, longest, 4, Some(256));
    let mut draft = Knowing { text: vec![1], random: Random::new(0), shown: Some(0..0) };
    let mut speculation = Speculation::new(&mut draft, 8);
    let one = OneRow { session: &mut on.one, steps_max: 16, ends: &[] };
    let verifier = Verifier { rows: &mut in_turns(&device, 9), sampler: sample::Sampler::greedy() };
    let refused = decide_on_device(one, verifier, None, &[1], 4, &mut speculation, &mut |_| ControlFlow::Continue(()));
    assert_eq!(
        refused.unwrap_err().message,
        "`--draft mtp:8` needs one batch kernel for steps of 9 rows, and the target has none"
    );
}

/// Drafts that know the logits of the fake, and take wrong ones at times.
struct Guessing {
    vocab: u32,
    /// Rows that were what the model leaves.
    seen: Rc<Cell<usize>>,
}

struct Guess {
    vocab: u32,
    counted: Rc<Cell<usize>>,
    random: Random,
    first: usize,
    rows: Vec<Vec<f32>>,
    /// Of these it was seen that the model left them.
    judged: usize,
}

impl Drafts for Guessing {
    fn begin(&self) -> Result<Box<dyn TextDraft>, Fault> {
        let (vocab, counted) = (self.vocab, Rc::clone(&self.seen));
        Ok(Box::new(Guess { vocab, counted, random: Random::new(1), first: 0, rows: vec![], judged: 0 }))
    }
}

impl TextDraft for Guess {
    fn reset(&mut self) {
        self.go_back(0);
    }

    fn go_back(&mut self, position: usize) {
        self.rows.truncate(position.saturating_sub(self.first));
        self.judged = self.judged.min(self.rows.len());
    }

    fn see(&mut self, first: usize, rows: &[Vec<f32>]) {
        let known = self.first + self.rows.len();
        if self.rows.is_empty() || first > known {
            self.reset();
            self.first = first;
        }
        let again = (self.first + self.rows.len()).saturating_sub(first);
        self.rows.extend(rows.iter().skip(again).cloned());
    }

    fn choose_by(&mut self, _: Option<&sample::Sampler>) {}

    fn chosen(
        &mut self,
        sequence: &[u32],
        most: usize,
        choose: &mut dyn FnMut(After) -> Option<u32>,
    ) -> Result<Vec<u32>, Fault> {
        if self.rows.is_empty() {
            return Ok(vec![]);
        }
        assert_eq!(self.first + self.rows.len() + 1, sequence.len(), "shown from {} on", self.first);
        // Of a text whose beginning was found in pages, its tokens are unknown.
        if self.first == 0 || sequence[..self.first].iter().any(|token| *token > 0) {
            for (row, end) in self.rows.iter().zip(self.first + 1..).skip(self.judged) {
                let hash = hash_of_fake(&sequence[..end]);
                let expected: Vec<f32> = (0..row.len() as u64).map(|column| left_of_fake(hash, column)).collect();
                assert_eq!(*row, expected, "position {}", end - 1);
                self.counted.set(self.counted.get() + 1);
            }
            self.judged = self.rows.len();
        }
        let (mut text, mut tokens) = (sequence.to_vec(), vec![]);
        while tokens.len() < most {
            let of = if self.random.below(4) == 0 { &text[1..] } else { &text[..] };
            let Some(token) = choose(After::Logits(logits_of_fake(of, self.vocab))) else { break };
            text.push(token);
            tokens.push(token);
        }
        Ok(tokens)
    }
}

/// A stepper that verifies proposals by a batch kernel of the fake, and what counts the rows that its drafts were shown.
fn drafted(device: &Device, model: &Model, blocks: u32, most: usize, waves: bool) -> (Stepwise, Rc<Cell<usize>>) {
    let target = fake_target().on_devices(device.count());
    let validated = model.kernel_of(8, blocks, &target);
    let schedule = validated.schedule();
    let left = schedule.program.head_input().unwrap();
    let (at, of) = (schedule.placement[left.index()].unwrap(), &schedule.program.buffers[left.index()]);
    let (shape, vocab) = (Shape::of(&schedule.program).unwrap(), model.graph.vocab);
    let phase = words_bytes(of.rows, of.cols, of.dtype) as u32;
    let words = [shape.blocks(), shape.page_rows, shape.pages, shape.rows, vocab, at as u32, phase, of.cols];
    let (queues, pack) = (Queues::of(&validated), on_each(device, &words));
    let image = image_for(device, IMAGE_LEAVING);
    let session = RowsSession::load(device, &queues, image, Trace::Off, 1, pack, None).unwrap();
    let waves = waves.then(|| {
        let proven = with_tail(&validated, &target);
        let cubins = [IMAGE, IMAGE];
        WavesSession::load_with_tail(device, &proven, cubins, Trace::Off, session.pack(), session.cache()).unwrap()
    });
    let steps = DeviceSteps::new(Box::new(session), waves, StateRows::of(schedule)).unwrap();
    let seen = Rc::new(Cell::new(0));
    let drafts = Guessing { vocab, seen: Rc::clone(&seen) };
    (Stepwise::drafted(Box::new(steps), Box::new(drafts), most).unwrap(), seen)
}

/// Requests of all kinds whose steps verify what drafts propose get the tokens that they have alone; drafts are shown what the model left, also where
/// states go back.
#[test]
fn a_server_on_a_device_verifies_proposals() {
    const NAME: &str = "a_server_on_a_device_verifies_proposals";
    if !is_child() {
        releasing(NAME, "");
        return;
    }
    let device = Device::open(0).unwrap();
    for (model, most) in [(Model::tiny(), 3), (Model::with_states(), 2), (Model::with_states(), 7)] {
        let (stepper, seen) = drafted(&device, &model, 4, most, false);
        let steps_max = stepper.bounds().steps_max;
        assert_eq!(steps_max, most as u32 + 1);
        let figures = requests_alone_and_together(stepper, 5, 60);
        let Proposals { proposed, accepted, steps } = figures.proposals;
        assert!(accepted > 60 && proposed > accepted && steps > 30, "{figures:?}");
        assert!(figures.prefix_hits > 0 && seen.get() > 100, "{figures:?}, {} rows seen", seen.get());
    }
}

/// Long prompts are read by waves, and drafts are shown what follows.
#[test]
fn a_draft_begins_after_what_waves_read() {
    const NAME: &str = "a_draft_begins_after_what_waves_read";
    if !is_child() {
        let Some(text) = with_fake_driver(NAME, "") else { return };
        assert!(text.contains("a chunk of "), "{text}");
        return;
    }
    let device = Device::open(0).unwrap();
    let (stepper, seen) = drafted(&device, &Model::of_wide_heads(), 16, 3, true);
    let Bounds { vocab, shape, .. } = stepper.bounds();
    assert!(shape.context_max > 800, "{}", shape.context_max);
    let limits = Limits { running_max: 4, waiting_max: 9, chunk_rows: 512, steps_max: STEPS_MAX };
    let mut engine = Engine::new(stepper, limits).unwrap();
    let greedy = RequestSettings::plain(SampleSettings::greedy()).resolve(vocab, &[]).unwrap();
    let prompts: Vec<Vec<u32>> =
        [600, 20, 700].map(|length| (0..length).map(|at| 1 + (at * 7 + length) % 97).collect()).into();
    let mut asked = vec![];
    for prompt in &prompts {
        let settings = RequestSettings { ignore_eos: true, ..RequestSettings::plain(SampleSettings::greedy()) };
        let choices = vec![settings.resolve(vocab, &[]).unwrap()];
        let ask = Ask {
            prompt: prompt.clone(),
            tokens_max: 120,
            choices,
            scores_prompt: None,
            grammar: None,
            deadline: None,
        };
        asked.push(engine.submit(ask).unwrap());
    }
    let mut events = vec![];
    while !engine.is_idle() {
        engine.turn(Duration::ZERO, &mut events).unwrap();
    }
    for (request, prompt) in asked.into_iter().zip(prompts) {
        let mut text = prompt.clone();
        for _ in 0..120 {
            text.push(next_of_fake(&text, &greedy, &TokenCounts::new(&text), None, vocab));
        }
        let decided = events.iter().filter_map(|event| match event {
            Event::Token { id, decided } if id.request == request => Some(decided.token),
            _ => None,
        });
        assert_eq!(decided.collect::<Vec<_>>(), text[prompt.len()..], "{} tokens", prompt.len());
    }
    let accepted = engine.figures().proposals.accepted;
    assert!(accepted > 50 && (600..900).contains(&seen.get()), "{accepted}, {} rows seen", seen.get());
}

/// A draft reads a vector with each token, which the host gives or which follows from the position.
#[test]
fn a_draft_on_a_device_is_given_a_vector_for_each_step() {
    const NAME: &str = "a_draft_on_a_device_is_given_a_vector_for_each_step";
    if !is_child() {
        releasing(NAME, "");
        return;
    }
    let (device, target) = (Device::open(0).unwrap(), fake_target());
    let graph = import_draft(&fixture("mtp/qwen35")).unwrap().graph;
    let candidate = Candidate { sms: 4, ..Candidate::default_for(&graph, &target, FP32) }.for_context(64);
    let program = lower(&graph, "fake", FP32, 64, &candidate).unwrap();
    let proven = validate(schedule(program, &target, &candidate).unwrap(), &target).unwrap();
    let left = proven.schedule().program.head_input().unwrap();
    let (hidden, at) = (graph.hidden, proven.schedule().placement[left.index()].unwrap() as u32);
    let mut sizes = device.alloc(16).unwrap();
    sizes.upload(&device.stream().unwrap(), 0, &[64, hidden, graph.vocab, at]).unwrap();
    let queues = Queues::of(&proven);
    let mut session = Session::load_sharing(&device, &queues, IMAGE_DRAFT, Trace::Off, 4, Arc::new(sizes)).unwrap();
    let decides = |token: u32, row: &[f32], ahead: u32| {
        let begun = hash_of_fake(&[token]).wrapping_add(u64::from(ahead));
        (row.iter().fold(begun, |h, value| mixed(h ^ u64::from(value.to_bits()))) % u64::from(graph.vocab)) as u32
    };
    let row = |of: u32| -> Arc<[f32]> { (0..hidden).map(|column| (of * 100 + column) as f32).collect() };
    let rows: Vec<Arc<[f32]>> = (0..3).map(row).collect();
    session.give(2, &[5, 6, 7], &rows, 9).unwrap();
    session.run(2, 3, false).unwrap();
    let mut token = session.token(5).unwrap();
    assert_eq!((session.token(4).unwrap(), token), (7, decides(7, &rows[2], 9)));
    assert_eq!(session.left().unwrap().unwrap(), *rows[2]);
    // Goes on with the token that it chose, then with another one.
    for (position, given) in [(5, token), (6, 3)] {
        session.give(position, &[given], &rows[..1], 9).unwrap();
        session.run(position, 1, false).unwrap();
        token = session.token(position + 1).unwrap();
        assert_eq!(token, decides(given, &rows[0], 9));
    }
    // As in a check.
    session.start(&[1, 2, 3, 4], &[]).unwrap();
    session.run(0, 4, false).unwrap();
    let follows: Vec<f32> = (0..hidden).map(|column| given_value(3, column)).collect();
    assert_eq!(session.token(4).unwrap(), decides(4, &follows, 0));
    // Without norms every step is given a row.
    session.give(4, &[1], &rows[..1], 9).unwrap();
    assert!(matches!(session.run(4, 2, false), Err(SessionError::Given { .. })));
    assert!(!session.goes_on());
    goes_on_with_what_it_left(&device, &mut session, hidden, &decides);
    // What does not fit is refused.
    let wrong = session.give(4, &[1], &[row(0)[1..].into()], 0).unwrap_err().to_string();
    assert_eq!(wrong, format!("a draft is given rows of {hidden} values, found {}", hidden - 1));
    session.give(4, &[1, 2], &rows[..2], 0).unwrap();
    assert!(matches!(session.run(4, 1, false), Err(SessionError::Given { .. })));
    assert!(matches!(session.give(63, &[1, 2], &rows[..2], 0), Err(SessionError::Range { .. })));
    let mut model = TextOnFake::new(&device, &Model::tiny(), &[]).one;
    assert!(matches!(model.give(0, &[1], &rows[..1], 0), Err(SessionError::Given { .. })));
}

/// Steps that are given nothing go on with what the step before left, and the first ones read what a batch kernel left of rows, each with its norm.
fn goes_on_with_what_it_left(
    device: &Device,
    session: &mut Session,
    hidden: u32,
    decides: &dyn Fn(u32, &[f32], u32) -> u32,
) {
    let norm = |of: u32| LeftNorm { weight: (0..hidden).map(|at| (at % 5 + of) as f32 / 4.0).collect(), eps: 0.25 };
    let norms = [norm(1), norm(3)];
    session.set_norms(device, &norms).unwrap();
    let normed = |norm: &LeftNorm, row: &[f32]| -> Vec<f32> {
        let squares: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        let mean = (squares / f64::from(hidden) + f64::from(norm.eps)).sqrt();
        row.iter().zip(&norm.weight).map(|(x, w)| (f64::from(*x) / mean * f64::from(*w)) as f32).collect()
    };
    let rows: Vec<Vec<f32>> =
        (0..11).map(|row| (0..hidden).map(|at| (row * 31 + at * 7) as f32 / 8.0).collect()).collect();
    let (_words, left) = left_of(device, &rows, DType::F32).unwrap();
    let of_host: Vec<Arc<[f32]>> = rows[..3].iter().map(|row| row.as_slice().into()).collect();
    assert!(session.reads_left(&left) && !session.reads_left(&Left { cols: hidden + 1, ..left }));
    assert!(session.only_reads());
    for in_place in [false, true] {
        // The last row of the first eight, and those after it.
        let known = [9, 5, 11];
        let (with, given): (_, Vec<Vec<f32>>) = match in_place {
            true => {
                let left = Left { first: 7, count: 3, ..left };
                (GivenWith::Left(left, 6), rows[7..10].iter().map(|row| normed(&norms[0], row)).collect())
            }
            false => (GivenWith::Rows(&of_host, 6), rows[..3].to_vec()),
        };
        for (from, further) in [(0, 1), (2, 3), (1, 0)] {
            let with = match &with {
                GivenWith::Rows(rows, ahead) => GivenWith::Rows(&rows[from..], *ahead),
                GivenWith::Left(left, ahead) => {
                    let (first, count) = (left.first + from as u32, left.count - from as u32);
                    GivenWith::Left(Left { first, count, ..*left }, *ahead)
                }
            };
            let found = session.propose(4, &known[from..], &with, further, false).unwrap();
            let mut row = given[2].clone();
            let mut expected = vec![decides(known[2], &row, 6)];
            for at in 0..further as usize {
                row = normed(&norms[1], &row);
                expected.push(decides(expected[at], &row, 6));
            }
            assert_eq!(found, expected, "{in_place}: {from}");
        }
    }
    let wrong = session.propose(4, &[1], &GivenWith::Left(left, 0), 0, false).unwrap_err().to_string();
    assert_eq!(wrong, "a draft is given rows of 1 values, found 11");
    assert!(matches!(
        session.propose(62, &[9, 5], &GivenWith::Rows(&of_host[..2], 0), 1, false),
        Err(SessionError::Range { .. })
    ));
}

/// A draft on the fake, whose proposals are replaced by tokens that are right, but for the last one of every third.
struct Right {
    inner: MtpDraft,
    text: Vec<u32>,
    rounds: usize,
}

impl Draft for Right {
    fn propose(&mut self, sequence: &[u32], most: usize) -> Vec<u32> {
        println!("a round begins");
        assert_eq!(self.inner.propose(sequence, most).len(), most);
        assert!(self.inner.failed().is_none());
        println!("it proposed");
        let mut tokens = self.text[sequence.len()..][..most].to_vec();
        self.rounds += 1;
        if self.rounds.is_multiple_of(3) {
            tokens[most - 1] = (tokens[most - 1] + 1) % 60;
        }
        tokens
    }

    fn sees(&self) -> bool {
        true
    }

    fn see(&mut self, first: usize, rows: Vec<Vec<f32>>) {
        self.inner.see(first, rows);
    }

    fn see_in_place(&mut self, first: usize, left: Left) -> bool {
        self.inner.see_in_place(first, left)
    }
}

/// What a user pays for a round with a draft on a device: the draft reads all tokens but the last one, it reads that one and proposes, and the model
/// verifies. Tokens and tables are a small copy each, nothing goes to the host, and no wait is one for a copy. Where a proposal was wrong, states
/// go back by a copy on the device.
#[test]
fn a_round_with_a_draft_is_three_launches() {
    const NAME: &str = "a_round_with_a_draft_is_three_launches";
    if !is_child() {
        let Some(text) = with_fake_driver(NAME, "calls") else { return };
        let rounds: Vec<&str> = text.split("a round begins").collect();
        // Before the first one the prompt is read, and the first proposal reads it, too; the last one may propose less.
        let rounds = &rounds[2..rounds.len() - 1];
        assert!(rounds.len() > 8, "{text}");
        let mut back = 0;
        for round in rounds {
            let count = |call: &str| round.matches(&format!("driver: {call} of")).count();
            let calls = ["launch", "wait", "copy to the device", "copy to the host"].map(count);
            assert_eq!(calls, [3, 0, 2, 0], "{round}");
            let (proposes, verifies) = round.split_once("it proposed").unwrap();
            let launches = [proposes, verifies].map(|part| part.matches("driver: launch").count());
            assert_eq!(launches, [2, 1], "{round}");
            let copies = count("copy on the device");
            assert!(copies <= 2, "{round}");
            back += usize::from(copies == 2);
        }
        assert!(back > 2 && back < rounds.len() - 2, "{back} of {}", rounds.len());
        return;
    }
    let device = Device::open(0).unwrap();
    let [imported, of_draft] = [import(&fixture("mtp/qwen35")).unwrap(), import_draft(&fixture("mtp/qwen35")).unwrap()];
    let mut graph = imported.graph.clone();
    graph.layers.rotate_left(1);
    let mut on = TextOnFake::with_rows(&device, &Model { graph, precision: FP32 }, IMAGE_LEAVING, &[], 4);
    let (target, graph) = (fake_target(), &of_draft.graph);
    let candidate = Candidate { sms: 4, ..Candidate::default_for(graph, &target, FP32) }.for_context(on.context_max);
    let program = lower(graph, "fake", FP32, on.context_max, &candidate).unwrap();
    let proven = validate(schedule(program, &target, &candidate).unwrap(), &target).unwrap();
    let left = proven.schedule().program.head_input().unwrap();
    let at = proven.schedule().placement[left.index()].unwrap() as u32;
    let mut sizes = device.alloc(16).unwrap();
    sizes.upload(&device.stream().unwrap(), 0, &[on.context_max, graph.hidden, graph.vocab, at]).unwrap();
    let mtp = Mtp::on_device(Arc::new(proven), &device, IMAGE_DRAFT, Arc::new(sizes), 16, [&imported, &of_draft]);
    let request = RequestSettings::plain(SampleSettings::greedy()).resolve(on.vocab, &[]).unwrap();
    let prompt: Vec<u32> = (0..12).map(|at| 2 + at * 7 % 50).collect();
    let mut text = prompt.clone();
    let count = 60;
    for _ in 0..count + 8 {
        text.push(next_of_fake(&text, &request, &TokenCounts::new(&text), None, on.vocab));
    }
    let inner = mtp.of_text(prompt.len(), &request).unwrap();
    let mut draft = Right { inner, text: text.clone(), rounds: 0 };
    let mut speculation = Speculation::new(&mut draft, 3);
    on.one.sample(*request.sampler());
    let one = OneRow { session: &mut on.one, steps_max: 16, ends: &[] };
    let verifier = Verifier { rows: &mut on.verifier, sampler: *request.sampler() };
    let go_on = &mut |_: &_| ControlFlow::Continue(());
    let tokens = decide_on_device(one, verifier, None, &prompt, count, &mut speculation, go_on).unwrap();
    assert_eq!(tokens, text[prompt.len()..][..count]);
    let Speculated { accepted, steps, .. } = speculation.counts();
    assert!(accepted > 2 * steps, "{accepted} in {steps} steps");
}

/// Requests that begin alike, on a kernel with recurrent states: the guard knows the position of each.
#[test]
fn requests_on_a_device_go_on_from_snapshots() {
    const NAME: &str = "requests_on_a_device_go_on_from_snapshots";
    if !is_child() {
        releasing(NAME, "");
        return;
    }
    let device = Device::open(0).unwrap();
    let validated = Model::with_states().kernel(8);
    let states = StateRows::of(validated.schedule());
    let with = |states: Option<StateRows>| {
        let session = session_of(&device, &validated, None).unwrap();
        let stepper = DeviceStepper::new(vec![Box::new(session)], None, None).unwrap();
        match states {
            Some(states) => stepper.with_states(states),
            None => stepper,
        }
    };
    let stepper = with(Some(states));
    let figures = requests_alone_and_together(stepper, 5, 60);
    assert!(figures.prefix_hits > 0 && figures.snapshots_max == 2, "{figures:?}");
    // A stepper that does not know where states lie copies none, and says so.
    let mut engine =
        Engine::new(with(None), Limits { running_max: 1, waiting_max: 2, chunk_rows: 8, steps_max: 1 }).unwrap();
    let request = RequestSettings::plain(SampleSettings::greedy()).resolve(engine.bounds().vocab, &[]).unwrap();
    let page_rows = engine.bounds().shape.page_rows as usize;
    let ask = Ask {
        prompt: vec![1; page_rows + 1],
        tokens_max: 2,
        choices: vec![request],
        scores_prompt: None,
        grammar: None,
        deadline: None,
    };
    engine.submit(ask).unwrap();
    let mut events = vec![];
    let fault = (0..100).find_map(|_| engine.turn(Duration::ZERO, &mut events).err()).unwrap();
    assert_eq!(fault.message, "states are copied, and it is not known where they lie");
}

#[test]
fn states_are_copied_between_the_rows_of_sequences() {
    const NAME: &str = "states_are_copied_between_the_rows_of_sequences";
    if !is_child() {
        releasing(NAME, "");
        return;
    }
    let device = Device::open(0).unwrap();
    let validated = Model::with_states().kernel(8);
    let (schedule, stream) = (validated.schedule(), device.stream().unwrap());
    let rows = StateRows::of(schedule);
    let bytes = schedule.arena_bytes(Space::Cache);
    let mut cache = device.alloc(bytes).unwrap();
    // The arena with a value of its own for each sequence of each state, and none elsewhere.
    let mut expected = vec![0u32; bytes as usize / 4];
    let mut all = 0;
    for (layer, buffer) in schedule.program.states() {
        let (at, cols) = (schedule.placement[buffer.index()].unwrap(), schedule.program.buffers[buffer.index()].cols);
        for sequence in 0..schedule.program.buffers[buffer.index()].rows {
            let first = at as usize / 4 + (sequence * cols) as usize;
            expected[first..first + cols as usize].fill(1 + layer.0 * 100 + sequence);
        }
        all += u64::from(cols) * 4;
    }
    assert_eq!(rows.bytes(), all);
    cache.upload(&stream, 0, &expected).unwrap();
    let kept = device.alloc(rows.kept_bytes()).unwrap();
    let copy = |from, to| StateCopy { from: SequenceId(from), to: SequenceId(to) };
    rows.copy(&stream, &cache, &[copy(1, 4), copy(4, 2), copy(3, 1)]).unwrap();
    rows.save(&stream, &cache, &kept).unwrap();
    rows.copy(&stream, &cache, &[copy(5, 0)]).unwrap();
    rows.restore(&stream, &cache, &kept).unwrap();
    let of = |word: u32| match word % 100 {
        5 | 3 => word - word % 100 + 2,
        2 => word - word % 100 + 4,
        _ => word,
    };
    // Sequence 4 has the state of 1, and so has 2; 1 has that of 3.
    let want: Vec<u32> = expected.iter().map(|&word| if word == 0 { 0 } else { of(word) }).collect();
    assert_eq!(cache.download::<u32>(&stream, 0, expected.len()).unwrap(), want);
    assert!(
        rows.copy(&stream, &cache, &[copy(1, 1)]).is_err() && rows.copy(&stream, &cache, &[copy(0, 1 << 30)]).is_err()
    );
}

/// Decides `cases` texts with prompts of up to `longest` tokens, and compares each token.
fn texts_with_proposals(on: TextOnFake, cases: u64, longest: usize, seed: u64) -> TextOnFake {
    texts_with_draft(on, cases, longest, seed, None)
}

/// As [`texts_with_proposals`]; `seen`: a draft is shown what the model left, from a position on that is at most so far from the end of the prompt.
fn texts_with_draft(mut on: TextOnFake, cases: u64, longest: usize, seed: u64, seen: Option<usize>) -> TextOnFake {
    let mut random = Random::new(seed);
    let (mut all, mut ended) = (Speculated::default(), 0);
    for case in 0..cases {
        let prompt: Vec<u32> = (0..1 + random.below(longest)).map(|_| random.below(100) as u32).collect();
        let room = on.context_max as usize - prompt.len() + 1;
        // The last text fills the context.
        let count = if case + 1 == cases { room } else { (1 + random.below(60)).min(room) };
        let temperature = random.below(2) as f32 * 0.7;
        let sampling = SampleSettings { temperature, seed: random.below(1000) as u64, ..SampleSettings::greedy() };
        let request = RequestSettings::plain(sampling).resolve(on.vocab, &[]).unwrap();
        let (mut text, mut counts) = (prompt.clone(), TokenCounts::new(&prompt));
        for _ in 0..count {
            let next = next_of_fake(&text, &request, &counts, None, on.vocab);
            text.push(next);
            counts.push(next);
        }
        let mut expected = text[prompt.len()..].to_vec();
        // A kernel ends some texts at a token, and the host ends others.
        let ends = if case % 3 == 0 { vec![expected[random.below(count)]] } else { vec![] };
        let host_ends = if case % 3 == 1 { vec![expected[random.below(count)]] } else { ends.clone() };
        let length = expected.iter().position(|token| host_ends.contains(token)).map_or(count, |at| at + 1);
        expected.truncate(length);
        ended += usize::from(length < count);
        let mut draft = Knowing { text, random: Random::new(case), shown: seen.map(|_| 0..0) };
        let mut speculation = Speculation::new(&mut draft, 5);
        on.one.sample(*request.sampler());
        let one = OneRow { session: &mut on.one, steps_max: 16, ends: &ends };
        let verifier = Verifier { rows: &mut on.verifier, sampler: *request.sampler() };
        let prefill = (prompt.len() > 32).then_some(&mut on.prefill);
        let mut told = vec![];
        let tokens = decide_on_device(one, verifier, prefill, &prompt, count, &mut speculation, &mut |decided| {
            told.push(decided.token);
            if host_ends.contains(&decided.token) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(tokens.unwrap_or_else(|fault| panic!("{case}: {fault}")), expected, "{case}");
        assert_eq!(told, expected, "{case}");
        let Speculated { proposed, accepted, .. } = speculation.counts();
        (all.proposed, all.accepted) = (all.proposed + proposed, all.accepted + accepted);
        if let (Some(seen), Some(shown)) = (seen, &draft.shown) {
            assert_eq!(shown.start, prompt.len().saturating_sub(seen), "{case}");
        }
    }
    assert!(all.accepted > 100 && all.proposed > all.accepted && ended > 2, "{all:?}, {ended} ended");
    on
}

/// As many SMs as the fake has.
fn fake_target() -> Target {
    let mut target = Target::builtin("h200").unwrap();
    target.spec.sm_count = 4;
    target
}

/// The pack of the fake: sizes of its model, of a kernel for `rows` rows.
fn sizes(device: &Device, validated: &Validated, rows: u32, vocab: u32) -> Arc<DeviceBuffer> {
    let shape = Shape::of(&validated.schedule().program).unwrap();
    on_each(device, &[shape.blocks(), shape.page_rows, shape.pages, rows, vocab])
}

/// The pack that the fake's kernels read, and the ids of the vocabulary.
fn sizes_of(device: &Device, validated: &Validated) -> (Arc<DeviceBuffer>, u32) {
    let program = &validated.schedule().program;
    let shape = Shape::of(program).unwrap();
    let vocab = program.grids.iter().find_map(|grid| grid.operand(Role::Logits)).unwrap();
    let vocab = program.buffers[vocab.buffer.index()].cols;
    // Rows of a step as kernels lay them out.
    let padded = shape.rows.next_multiple_of(8);
    (sizes(device, validated, padded, vocab), vocab)
}

/// A kernel of the fake, over `cache` if it is given.
fn session_of(
    device: &Device,
    validated: &Validated,
    cache: Option<Arc<DeviceBuffer>>,
) -> Result<RowsSession, SessionError> {
    let (sizes, vocab) = sizes_of(device, validated);
    let (queues, image) = (Queues::of(validated), image_for(device, IMAGE));
    let session = RowsSession::load(device, &queues, image, Trace::Off, STEPS_MAX, sizes, cache)?;
    assert_eq!(session.vocab(), vocab);
    Ok(session)
}

/// The kernel for two rows of the fake, for launches of `rows` rows.
fn in_turns(device: &Device, rows: u32) -> TurnsSession {
    let validated = Model::tiny().kernel(2);
    let (sizes, vocab) = sizes_of(device, &validated);
    let queues = Queues::of(&validated);
    let session = TurnsSession::load(device, &queues, IMAGE, (rows, STEPS_MAX), sizes, None).unwrap();
    assert_eq!((session.vocab(), session.shape().rows), (vocab, rows));
    session
}

/// The kernel for one row of the fake, over the pages of `other`.
fn one_row_beside(device: &Device, model: &Model, other: &dyn RowLauncher) -> OneRowSession {
    let validated = model.kernel(1);
    let (queues, pack, cache) = (Queues::of(&validated), other.pack(), Some(other.cache()));
    OneRowSession::load(device, &queues, IMAGE_PAGED, STEPS_MAX, pack, cache).unwrap()
}

fn rows_session(device: &Device, rows: u32, cache: Option<Arc<DeviceBuffer>>) -> Result<RowsSession, SessionError> {
    session_of(device, &Model::tiny().kernel(rows), cache)
}

fn mixed(x: u64) -> u64 {
    let x = (x ^ x >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^ x >> 33
}

/// What a request chooses after `tokens` from the fake's logits.
fn next_of_fake(
    tokens: &[u32],
    request: &sample::Request,
    counts: &TokenCounts,
    allowed: Option<&TokenSet>,
    vocab: u32,
) -> u32 {
    request.choose(&logits_of_fake(tokens, vocab), counts, allowed).unwrap().token
}

fn hash_of_fake(tokens: &[u32]) -> u64 {
    let step = |h: u64, &token: &u32| (h ^ u64::from(token + 1)).wrapping_mul(0x100_0000_01b3);
    tokens.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// What the last layer of the fake leaves in a column.
fn left_of_fake(hash: u64, column: u64) -> f32 {
    (mixed(hash.wrapping_add(column)) % 200) as f32
}

/// The fake's logits after `tokens`.
fn logits_of_fake(tokens: &[u32], vocab: u32) -> Vec<f32> {
    let h = hash_of_fake(tokens);
    let logit = |id: u64| mixed(h ^ id.wrapping_mul(0x9e37_79b9_7f4a_7c15)) % 4000;
    let mut logits: Vec<f32> = (0..u64::from(vocab)).map(|id| logit(id) as f32 / 500.0).collect();
    logits[vocab as usize - 1] = -1000.0;
    logits
}

/// Requests of all kinds over a cache that is too small for them, through engine, guard, session and driver calls.
#[test]
fn requests_on_a_device_get_the_tokens_that_they_have_alone() {
    const NAME: &str = "requests_on_a_device_get_the_tokens_that_they_have_alone";
    if !is_child() {
        releasing(NAME, "");
        return;
    }
    let device = Device::open(0).unwrap();
    // Launches of up to 8 rows run on one kernel, larger ones on the other; each sees the cache rows of the other.
    let session = rows_session(&device, 8, None).unwrap();
    let larger = rows_session(&device, 16, Some(session.cache())).unwrap();
    let stepper = DeviceStepper::new(vec![Box::new(session), Box::new(larger)], None, None).unwrap();
    assert_eq!(stepper.bounds().choices, None);
    let decided_max = 2 * stepper.bounds().shape.page_rows;
    let figures = requests_alone_and_together(stepper, 5, decided_max as usize);
    assert!(figures.preemptions > 0 && figures.prefix_hits > 0 && figures.steps > figures.launches, "{figures:?}");
}

/// The same on two devices, with the decode kernel, without and with the sampler. The fake refuses a kernel that starts on one device before the
/// other one has ended the kernel before.
#[test]
fn two_devices_give_requests_the_tokens_of_one() {
    const NAME: &str = "two_devices_give_requests_the_tokens_of_one";
    if !is_child() {
        let Some(text) = releasing(NAME, "two devices") else { return };
        assert!(text.contains("steps of one row") && text.contains("step 3 of a sampler for 2 rows"), "{text}");
        return;
    }
    let (device, target, model) = (two_devices().unwrap(), fake_target().on_devices(2), Model::tiny());
    for is_sampled in [false, true] {
        let [one, several, most] = [1, 8, 16].map(|rows| model.kernel_on(rows, &target));
        let shape = Shape::of(&several.schedule().program).unwrap();
        let words = [shape.blocks(), shape.page_rows, shape.pages, 8, model.graph.vocab];
        let of = |validated, image, rows: u32, cache| {
            let pack = on_each(&device, &[words[0], words[1], words[2], rows, words[4]]);
            RowsSession::load(&device, &Queues::of(validated), image, Trace::Off, STEPS_MAX, pack, cache).unwrap()
        };
        let session = of(&several, IMAGE_ROWS_DEVICES, 8, None);
        let larger = of(&most, IMAGE_ROWS_DEVICES, 16, Some(session.cache()));
        let (queues, pack, cache) = (Queues::of(&one), session.pack(), Some(session.cache()));
        let one = OneRowSession::load(&device, &queues, IMAGE_PAGED_DEVICES, STEPS_MAX, pack, cache).unwrap();
        let sampler = SamplerSession::load(&device, IMAGE, session.vocab(), 16, STEPS_MAX).unwrap();
        let sessions: Vec<Box<dyn RowLauncher>> = vec![Box::new(one), Box::new(session), Box::new(larger)];
        let stepper = DeviceStepper::new(sessions, None, is_sampled.then_some(sampler)).unwrap();
        let decided_max = 2 * stepper.bounds().shape.page_rows;
        let figures = requests_alone_and_together(stepper, 5, decided_max as usize);
        assert!(figures.steps > figures.launches, "{figures:?}");
    }
    let refused = of_one(&device, &model);
    assert_eq!(refused, "the kernel is for 1 devices, found 2");
}

/// The same with wave kernels: long chunks, tails and steps of 32 rows, without and with the sampler.
#[test]
fn two_devices_read_prompts_and_step_in_waves() {
    const NAME: &str = "two_devices_read_prompts_and_step_in_waves";
    if !is_child() {
        let Some(text) = releasing(NAME, "two devices") else { return };
        for (launch, least) in [("a chunk of ", 20), ("a tail", 2), (" rows in waves", 8)] {
            assert!(text.matches(launch).count() > least, "{launch}: {text}");
        }
        return;
    }
    let (device, target, model) = (two_devices().unwrap(), fake_target().on_devices(2), Model::of_wide_heads());
    for is_sampled in [false, true] {
        let validated = model.kernel_on(8, &target);
        let shape = Shape::of(&validated.schedule().program).unwrap();
        let words = [shape.blocks(), shape.page_rows, shape.pages, 8, model.graph.vocab];
        let (queues, off) = (Queues::of(&validated), Trace::Off);
        let pack = on_each(&device, &words);
        let session =
            RowsSession::load(&device, &queues, IMAGE_ROWS_DEVICES, off, STEPS_MAX, pack.clone(), None).unwrap();
        let cache = session.cache();
        let prompts = with_tail(&validated, &target);
        let images = [IMAGE_WAVES_DEVICES, IMAGE_WAVES_DEVICES];
        let waves = WavesSession::load_with_tail(&device, &prompts, images, off, pack, cache.clone()).unwrap();
        let steps = derive(validated.schedule(), &target, Form::Steps, 32).unwrap();
        let steps = prove(steps, &validated, &target).unwrap();
        let pack = on_each(&device, &[words[0], words[1], words[2], 32, words[4]]);
        let stepping = || {
            StepsSession::load(&device, &steps, IMAGE_WAVES_DEVICES, off, STEPS_MAX, pack.clone(), Some(cache.clone()))
        };
        let alone = Arc::new(device.alloc(64).unwrap());
        let refused = WavesSession::load(&device, prompts.chunk(), IMAGE, off, alone, cache.clone()).err().unwrap();
        assert_eq!(refused.to_string(), "the kernel is for 2 devices, found 1");
        let sampler = SamplerSession::load(&device, IMAGE, session.vocab(), 32, STEPS_MAX).unwrap();
        let sessions: Vec<Box<dyn RowLauncher>> = vec![Box::new(session), Box::new(stepping().unwrap())];
        let stepper = DeviceStepper::new(sessions, Some(waves), is_sampled.then_some(sampler)).unwrap();
        let figures = requests_alone_and_together(stepper, 100, 60);
        assert!(figures.steps > 0, "{figures:?}");
    }
}

/// An export of a model for two devices of the fake. Its cubins are replaced by images of the fake.
struct ExportOnFake {
    folder: tempfile::TempDir,
    target: Target,
}

/// Requests that a server of [`ExportOnFake`] has.
const OF_EXPORT: Serving = Serving {
    asked: AskedSizes { running_max: None, chunk_rows: None },
    running_max: 4,
    chunk_rows: 5,
    steps_max: STEPS_MAX,
    proposed: 0,
    cache_tokens: Some(1536),
};

impl ExportOnFake {
    fn new() -> ExportOnFake {
        let folder = tempfile::tempdir().unwrap();
        let mut record = fake_target();
        (record.name, record.spec.device_names) = ("fake".to_string(), vec!["Fake GPU".to_string()]);
        let record = TargetRecord { target: record, measured: Measured::default() };
        std::fs::write(folder.path().join("fake.toml"), record.to_toml()).unwrap();
        let model = fixture("tinystories-llama").display().to_string();
        let text = format!(
            "[model]\nsource = \"path:{model}\"\n[precision]\nweights = \"fp32\"\n[decode]\ncontext_max = 1024\n\
             steps_per_launch = 4\n[[target]]\nrecord = \"fake.toml\"\ndevices = 2\n"
        );
        let manifest = Manifest::parse(&text, &folder.path().join("m.toml")).unwrap_or_else(|error| panic!("{error}"));
        let workspace = Workspace {
            cache: Cache::open(folder.path().join("cache")).unwrap(),
            report: Report::quiet(),
            trials: folder.path().join("trials.csv"),
        };
        let out = folder.path().join("export");
        let written = export(&workspace, &manifest, &out, &OF_EXPORT, Checking::Skipped, &|| false);
        assert!(written.unwrap_or_else(|fault| panic!("{fault}")).is_some());
        let made = ExportOnFake { folder, target: manifest.targets[0].clone() };
        for (file, image) in [
            ("text", IMAGE_DEVICES),
            ("prompt", IMAGE_ROWS16_DEVICES),
            ("serve-1", IMAGE_PAGED_DEVICES),
            ("serve-8", IMAGE_ROWS_DEVICES),
            ("serve-16", IMAGE_ROWS16_DEVICES),
            ("sampler", IMAGE),
        ] {
            made.replace(&format!("fake-x2/{file}.cubin"), image);
        }
        made
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join("export").join(name)
    }

    /// Replaces a file, and its digest in the index.
    fn replace(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path(name), bytes).unwrap();
        let index = std::fs::read(self.path("export.json")).unwrap();
        let mut index: serde_json::Value = serde_json::from_slice(&index).unwrap();
        index["files"][name] = serde_json::json!({ "bytes": bytes.len(), "digest": Digest::of(bytes).to_string() });
        let text = index.to_string();
        std::fs::write(self.path("export.json"), &text).unwrap();
        std::fs::write(self.path("export.b3"), format!("{}\n", Digest::of(text.as_bytes()))).unwrap();
    }

    /// Writes the sizes of a kernel of the export where the part of each device begins, and loads it.
    fn with_sizes_of(&self, kernel: &str) -> Ready {
        let text = std::fs::read_to_string(self.path(&format!("fake-x2/{kernel}.mkir"))).unwrap();
        let validated = validate(parse(&text).unwrap(), &self.target).unwrap();
        let (schedule, shape) = (validated.schedule(), Shape::of(&validated.schedule().program).unwrap());
        let vocab = schedule.program.grids.iter().find_map(|grid| grid.operand(Role::Logits)).unwrap();
        let vocab = schedule.program.buffers[vocab.buffer.index()].cols;
        let words = [shape.blocks(), shape.page_rows, shape.pages, shape.rows, vocab];
        let files = std::fs::read_dir(self.path("")).unwrap().map(|file| file.unwrap().file_name());
        let pack = files.map(|file| file.into_string().unwrap()).find(|file| file.ends_with(".pack")).unwrap();
        let mut bytes = std::fs::read(self.path(&pack)).unwrap();
        for device in [0, 1] {
            let held = held(schedule, device);
            let (first, _) = held.ranges.iter().find(|(_, at)| *at == 0).unwrap();
            assert!(held.bytes < bytes.len() as u64 && first.end - first.start >= 20);
            bytes[first.start as usize..][..20].copy_from_slice(bytemuck::cast_slice(&words));
        }
        self.replace(&pack, &bytes);
        let exported = Exported::open(&self.path("")).unwrap_or_else(|fault| panic!("{fault}"));
        assert_eq!(exported.manifest().targets, std::slice::from_ref(&self.target));
        Ready::exported(Report::quiet(), exported, &self.target).unwrap().checking(Checking::Skipped)
    }
}

/// A text, its prompt and the requests of a server get their tokens from an export of two devices, each of which loads its part.
#[test]
fn an_export_of_two_devices_runs_on_both() {
    const NAME: &str = "an_export_of_two_devices_runs_on_both";
    if nvrtc(NAME).is_none() {
        return;
    }
    if !is_child() {
        let Some(text) = releasing(NAME, "two devices") else { return };
        for launch in
            ["4 steps of one row", "1 steps of 16 rows", "1 steps of 6 rows", "step 1 of a sampler for 3 rows"]
        {
            assert!(text.contains(launch), "{launch}: {text}");
        }
        return;
    }
    let export = ExportOnFake::new();
    let ready = export.with_sizes_of("prompt");
    let mut runner = ready.runner().unwrap_or_else(|fault| panic!("{fault}"));
    assert_eq!(runner.place(), "2 x Fake GPU (device 0 and those after it)");
    let request = RequestSettings::plain(SampleSettings::greedy()).resolve(ready.vocab, &[]).unwrap();
    for length in [3, 90] {
        let prompt: Vec<u32> = (0..length).map(|at| at * 7 % 100).collect();
        let mut text = prompt.clone();
        for _ in 0..9 {
            text.push(next_of_fake(&text, &request, &TokenCounts::new(&text), None, ready.vocab));
        }
        let answer = runner.answer(&prompt, 9, &request, &mut |_| ControlFlow::Continue(()));
        assert_eq!(answer.unwrap_or_else(|fault| panic!("{fault}")).tokens, text[length as usize..]);
        for (most, expected) in [
            (8, Ok(&text[length as usize..])),
            (
                16,
                Err(
                    "no kernel can verify proposed tokens: no kernel of 2 devices runs 17 rows of this model, at most 16",
                ),
            ),
        ] {
            let mut draft = Knowing { text: text.clone(), random: Random::new(3), shown: None };
            let mut speculation = Speculation::new(&mut draft, most);
            let answer = runner.speculate(&prompt, 9, &request, &mut speculation, &mut |_| ControlFlow::Continue(()));
            let found = answer.as_ref().map(|answer| &answer.tokens[..]).map_err(|fault| fault.message.as_str());
            assert_eq!(found, expected);
        }
    }
    drop(runner);
    let batched = export.with_sizes_of("serve-8").batched(&OF_EXPORT).unwrap_or_else(|fault| panic!("{fault}"));
    let stepper = batched.stepper().unwrap_or_else(|fault| panic!("{fault}"));
    let figures = requests_alone_and_together(stepper, 5, 40);
    assert!(figures.steps > figures.launches, "{figures:?}");
}

/// Why a kernel of one device is not loaded on several.
fn of_one(device: &Device, model: &Model) -> String {
    let validated = model.kernel(8);
    let pack = on_each(device, &[0; 5]);
    let refused = RowsSession::load(device, &Queues::of(&validated), IMAGE, Trace::Off, STEPS_MAX, pack, None);
    refused.err().unwrap().to_string()
}

/// Steps with more rows than the kernel has are several launches of it. Later launches read the cache rows of earlier ones. Without and
/// with the sampler.
#[test]
fn steps_of_more_rows_than_the_kernel_has_are_several_launches() {
    const NAME: &str = "steps_of_more_rows_than_the_kernel_has_are_several_launches";
    if !is_child() {
        let Some(text) = releasing(NAME, "") else { return };
        for launch in ["4 steps of 2 rows", "1 steps of 2 rows", " of a sampler for 3 rows"] {
            assert!(text.matches(launch).count() > 3, "{launch}: {text}");
        }
        assert!(!text.contains("steps of 3 rows"), "{text}");
        return;
    }
    let device = Device::open(0).unwrap();
    for is_sampled in [false, true] {
        let session = in_turns(&device, 20);
        let sampler = SamplerSession::load(&device, IMAGE, session.vocab(), 20, STEPS_MAX).unwrap();
        let stepper = DeviceStepper::new(vec![Box::new(session)], None, is_sampled.then_some(sampler)).unwrap();
        assert_eq!(stepper.bounds().shape.rows, 20);
        let decided_max = 2 * stepper.bounds().shape.page_rows;
        let figures = requests_alone_and_together(stepper, 16, decided_max as usize);
        assert!(figures.steps > figures.launches, "{figures:?}");
    }
}

/// The same with the sampler: launches have several steps with any settings of their rows, and no logits are copied to the host.
#[test]
fn the_sampler_of_a_device_chooses_what_requests_choose() {
    const NAME: &str = "the_sampler_of_a_device_chooses_what_requests_choose";
    if !is_child() {
        let Some(text) = releasing(NAME, "") else { return };
        // The last step of the longest launch, and launches of one row and of several.
        // Both kernels: one is for usual settings.
        for step in ["step 3 of a sampler for 2 rows", "step 0 of a sampler for 1 rows\n", " for 1 rows, by rivals\n"] {
            assert!(text.contains(step), "{text}");
        }
        return;
    }
    let device = Device::open(0).unwrap();
    let session = rows_session(&device, 8, None).unwrap();
    let larger = rows_session(&device, 16, Some(session.cache())).unwrap();
    let sampler = SamplerSession::load(&device, IMAGE, session.vocab(), 16, STEPS_MAX).unwrap();
    let stepper = DeviceStepper::new(vec![Box::new(session), Box::new(larger)], None, Some(sampler)).unwrap();
    assert_eq!(stepper.bounds().choices, Some(20));
    let decided_max = 2 * stepper.bounds().shape.page_rows;
    let figures = requests_alone_and_together(stepper, 5, decided_max as usize);
    assert!(figures.preemptions > 0 && figures.steps > figures.launches, "{figures:?}");
}

/// A separate kernel reads long chunks of prompts, into the same pages.
#[test]
fn long_prompts_on_a_device_are_read_alone() {
    const NAME: &str = "long_prompts_on_a_device_are_read_alone";
    if !is_child() {
        let Some(text) = releasing(NAME, "") else { return };
        assert!(text.matches("a chunk of ").count() >= 24, "{text}");
        assert!(text.matches("a tail").count() > 12, "{text}");
        // After a tail alone: the sampler chooses its token.
        assert!(text.contains("a tail\nstep 0 of a sampler for 1 rows"), "{text}");
        return;
    }
    let device = Device::open(0).unwrap();
    for (has_tail, is_sampled) in [(false, false), (true, false), (true, true)] {
        let figures = requests_alone_and_together(stepper_with_waves(&device, has_tail, is_sampled), 100, 60);
        assert!(figures.prefix_hits > 0, "{figures:?}");
    }
    for is_sampled in [false, true] {
        lone_prompts(stepper_with_waves(&device, true, is_sampled));
    }
}

/// Long prompts of lone requests with all kinds of settings: each gets the tokens that the fake decides for it.
fn lone_prompts(stepper: DeviceStepper) {
    let vocab = stepper.bounds().vocab;
    let limits = Limits { running_max: 4, waiting_max: 100, chunk_rows: 512, steps_max: STEPS_MAX };
    let mut engine = Engine::new(stepper, limits).unwrap();
    let warm = SampleSettings { temperature: 0.7, seed: 7, ..SampleSettings::greedy() };
    let plain = |sampling| RequestSettings { ignore_eos: true, ..RequestSettings::plain(sampling) };
    let penalties = Penalties { repetition: 1.2, presence: 0.0, frequency: 0.3 };
    for (at, (settings, grammar)) in (0..).zip([
        (plain(SampleSettings::greedy()), None),
        (plain(warm), None),
        (plain(SampleSettings { top_k: Some(5), ..warm }), None),
        (RequestSettings { penalties, ..plain(warm) }, None),
        (RequestSettings { logprobs: Some(2), ..plain(warm) }, None),
        (plain(SampleSettings::greedy()), Some(lists(vocab))),
    ]) {
        let prompt: Vec<u32> = (0..90 + at).map(|i| (i * i + at * 3) % 100).collect();
        let request = settings.resolve(vocab, &[]).unwrap();
        let mut guide = grammar.as_ref().map(Grammar::begin);
        let (choices, mut events) = (vec![request.clone()], vec![]);
        let ask = Ask { prompt: prompt.clone(), tokens_max: 3, choices, scores_prompt: None, grammar, deadline: None };
        engine.submit(ask).unwrap();
        while !engine.is_idle() {
            engine.turn(Duration::ZERO, &mut events).unwrap_or_else(|fault| panic!("{fault}"));
        }
        let (mut tokens, mut counts) = (prompt.clone(), TokenCounts::new(&prompt));
        for _ in 0..3 {
            let allowed = guide.as_mut().map(|guide| guide.allowed().unwrap());
            let next = next_of_fake(&tokens, &request, &counts, allowed, vocab);
            tokens.push(next);
            counts.push(next);
            if guide.as_mut().is_some_and(|guide| guide.push(next).unwrap()) {
                break;
            }
        }
        let decided = events.iter().filter_map(|event| match event {
            Event::Token { decided, .. } => Some(decided.token),
            _ => None,
        });
        assert_eq!(decided.collect::<Vec<_>>(), tokens[prompt.len()..], "request {at}");
    }
}

/// Kernels of waves that read chunks and decide after the last one, over the pages of `small`.
fn with_tail<'a>(small: &'a Validated, target: &Target) -> WithTail<'a> {
    let [chunk, tail] = [(Form::Chunk, 512), (Form::Tail, TAIL_ROWS)]
        .map(|(form, rows)| derive(small.schedule(), target, form, rows).unwrap());
    prove_tail(tail, prove(chunk, small, target).unwrap(), target).unwrap()
}

/// A stepper on the fake for a model with wide heads: kernels for 1, 8 and 16 rows, and one for long chunks, maybe with a tail.
fn stepper_with_waves(device: &Device, has_tail: bool, is_sampled: bool) -> DeviceStepper {
    let (model, target) = (Model::of_wide_heads(), fake_target());
    let [small, large] = [8, 16].map(|rows| model.kernel(rows));
    let proven = with_tail(&small, &target);
    let session = session_of(device, &small, None).unwrap();
    let larger = session_of(device, &large, Some(session.cache())).unwrap();
    let (pack, cache, off) = (session.pack(), session.cache(), Trace::Off);
    let waves = match has_tail {
        true => WavesSession::load_with_tail(device, &proven, [IMAGE, IMAGE], off, pack, cache),
        false => WavesSession::load(device, proven.chunk(), IMAGE, off, pack, cache),
    };
    let one = one_row_beside(device, &model, &session);
    let sampler = SamplerSession::load(device, IMAGE, session.vocab(), 16, STEPS_MAX).unwrap();
    let sessions: Vec<Box<dyn RowLauncher>> = vec![Box::new(one), Box::new(session), Box::new(larger)];
    DeviceStepper::new(sessions, Some(waves.unwrap()), is_sampled.then_some(sampler)).unwrap()
}

/// A lone request runs on the kernel for one row, also after it ran beside others: without and with the sampler.
#[test]
fn one_row_on_a_device_has_its_own_kernel() {
    const NAME: &str = "one_row_on_a_device_has_its_own_kernel";
    if !is_child() {
        let Some(text) = releasing(NAME, "") else { return };
        for (launch, least) in
            [(" steps of one row", 20), (" steps of 2 rows", 5), ("step 3 of a sampler for 1 rows", 2)]
        {
            assert!(text.matches(launch).count() > least, "{launch}: {text}");
        }
        assert!(!text.contains(" steps of 1 rows"), "{text}");
        return;
    }
    let device = Device::open(0).unwrap();
    for is_sampled in [false, true] {
        let session = rows_session(&device, 8, None).unwrap();
        let larger = rows_session(&device, 16, Some(session.cache())).unwrap();
        let one = one_row_beside(&device, &Model::tiny(), &session);
        let sampler = SamplerSession::load(&device, IMAGE, session.vocab(), 16, STEPS_MAX).unwrap();
        let sessions: Vec<Box<dyn RowLauncher>> = vec![Box::new(one), Box::new(session), Box::new(larger)];
        let stepper = DeviceStepper::new(sessions, None, is_sampled.then_some(sampler)).unwrap();
        let decided_max = 2 * stepper.bounds().shape.page_rows;
        let figures = requests_alone_and_together(stepper, 5, decided_max as usize);
        assert!(figures.preemptions > 0 && figures.prefix_hits > 0, "{figures:?}");
    }
}

/// The launches before the first token of a lone request are those of its prompt; each has one step.
#[test]
fn a_first_token_waits_for_the_launches_of_its_prompt_alone() {
    const NAME: &str = "a_first_token_waits_for_the_launches_of_its_prompt_alone";
    if !is_child() {
        let Some(text) = with_fake_driver(NAME, "") else { return };
        let launch = |line: &str| {
            let of_prompt = line.find("a chunk of ").or_else(|| line.find("a tail"));
            let at = of_prompt.or_else(|| line.find(" steps of ").map(|at| at - 1))?;
            Some(line[at..].to_string())
        };
        let found: Vec<String> = text.lines().filter_map(launch).collect();
        let of_16 = "1 steps of 16 rows";
        let expected = [
            vec![of_16],
            vec![of_16; 4],
            vec!["a chunk of 99", "1 steps of one row"],
            vec!["a chunk of 199", "1 steps of one row"],
            // A second token: a launch that is queued while the first one is decided, and the rest.
            vec!["a chunk of 69", "1 steps of one row", "3 steps of one row", "1 steps of one row"],
            // With a tail, the last token of a prompt is no step.
            vec![of_16, "a chunk of 64", "a tail", "a chunk of 100", "a tail", "a chunk of 200", "a tail"],
            vec!["a chunk of 70", "a tail", "4 steps of one row"],
        ];
        assert_eq!(found, expected.concat(), "{text}");
        return;
    }
    for has_tail in [false, true] {
        let stepper = stepper_with_waves(&Device::open(0).unwrap(), has_tail, false);
        let vocab = stepper.bounds().vocab;
        let limits = Limits { running_max: 4, waiting_max: 100, chunk_rows: 512, steps_max: STEPS_MAX };
        let mut engine = Engine::new(stepper, limits).unwrap();
        let settings = RequestSettings { ignore_eos: true, ..RequestSettings::plain(SampleSettings::greedy()) };
        let request = settings.resolve(vocab, &[]).unwrap();
        for (prompt, tokens_max) in [(16, 1), (64, 1), (100, 1), (200, 1), (70, 5)] {
            let prompt: Vec<u32> = (0..prompt).map(|at| (at * at + prompt) % 100).collect();
            let (choices, mut events) = (vec![request.clone()], vec![]);
            let ask = Ask { prompt, tokens_max, choices, scores_prompt: None, grammar: None, deadline: None };
            engine.submit(ask).unwrap();
            while !engine.is_idle() {
                engine.turn(Duration::ZERO, &mut events).unwrap_or_else(|fault| panic!("{fault}"));
            }
        }
    }
}

/// Launches that the kernel for one row refuses, and launches with tokens that it decided itself.
#[test]
fn one_row_over_pages_judges_its_launches() {
    const NAME: &str = "one_row_over_pages_judges_its_launches";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let device = Device::open(0).unwrap();
    let session = rows_session(&device, 8, None).unwrap();
    let mut one = one_row_beside(&device, &Model::tiny(), &session);
    let shape = Shape { rows: 8, ..*one.shape() };
    assert_eq!((one.shape().rows, shape), (1, *session.shape()));
    let mut guard = Guard::new(shape);
    let page = |sequence, block, page| Edit { sequence: SequenceId(sequence), block, page: Some(PageId(page)) };
    let mut edits = vec![page(0, 0, 5), page(0, 1, 2), page(1, 0, 3)];
    let mut request = |rows: &[(u32, u32)], steps, wants_logits| Request {
        rows: rows.iter().map(|&(s, position)| Row { sequence: SequenceId(s), position, wants_logits }).collect(),
        steps,
        edits: std::mem::take(&mut edits),
    };
    let input = |first| RowInput { first, steps: 4, inverse_temperature: 0.0, seed: 0 };
    let (given, decided) = (|token| [input(FirstToken::Given(token))], [input(FirstToken::Decided(0))]);
    let two = [given(1)[0], given(1)[0]];
    let refused = |error: Result<(), SessionError>, expected: &str| {
        let error = error.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    refused(one.queue(guard.admit(&request(&[(0, 0), (1, 0)], 1, true)).unwrap(), &two, false), "do not fit");
    refused(one.queue(guard.admit(&request(&[(0, 0)], 1, true)).unwrap(), &decided, false), "decided no token");
    refused(one.queue(guard.admit(&request(&[(0, 0)], 1, false)).unwrap(), &given(1), true), "want no logits");
    refused(one.queue(guard.admit(&request(&[(0, 0)], 5, true)).unwrap(), &given(1), false), "do not fit");
    refused(one.queue(guard.admit(&request(&[(0, 0)], 1, true)).unwrap(), &given(1 << 20), false), "vocabulary");
    assert!(matches!(one.finish(), Err(SessionError::NotQueued)));
    let settings = RequestSettings::plain(SampleSettings::greedy()).resolve(one.vocab(), &[]).unwrap();
    let next = |tokens: &[u32], vocab| next_of_fake(tokens, &settings, &TokenCounts::new(tokens), None, vocab);
    let mut text = vec![7];
    for _ in 0..9 {
        text.push(next(&text, one.vocab()));
    }
    // A launch continues where the previous one ended: with the token that the host read, or with the one that the device keeps.
    one.queue(guard.admit(&request(&[(0, 0)], 4, true)).unwrap(), &given(7), true).unwrap();
    refused(one.queue(guard.admit(&request(&[(0, 4)], 1, true)).unwrap(), &given(1), false), "not waited for");
    assert!(matches!(one.logits(0), Err(SessionError::NotFinished)));
    let launched = one.finish().unwrap();
    assert_eq!((launched.steps, launched.tokens.concat()), (4, text[..5].to_vec()));
    assert_eq!(sample::argmax(&one.logits(0).unwrap()), Some(text[4]));
    for (position, first) in [(4, input(FirstToken::Given(text[4]))), (5, decided[0])] {
        let tables = guard.admit(&request(&[(0, position)], 1, true)).unwrap();
        let launched = one.run_whole(tables, &[first], false).unwrap();
        assert_eq!(launched.tokens.concat(), text[position as usize..][..2], "{position}");
    }
    // Another sequence, whose only token is the same; and back, with a token that was not decided.
    let launched = one.run_whole(guard.admit(&request(&[(1, 0)], 1, true)).unwrap(), &given(7), false).unwrap();
    assert_eq!(launched.tokens.concat(), text[..2]);
    let launched = one.run_whole(guard.admit(&request(&[(0, 6)], 1, true)).unwrap(), &given(9), false).unwrap();
    let other = [&text[..6], &[9]].concat();
    assert_eq!(launched.tokens.concat(), [9, next(&other, one.vocab())]);
    // A row that only fills the cache decides nothing.
    let launched = one.run_whole(guard.admit(&request(&[(0, 7)], 1, false)).unwrap(), &given(3), false).unwrap();
    assert_eq!(launched.tokens, Vec::<Vec<u32>>::new());
    refused(one.queue(guard.admit(&request(&[(0, 8)], 1, true)).unwrap(), &decided, false), "decided no token");
}

/// Steps that run wave by wave, without and with the sampler, over the cache of a kernel that has words.
#[test]
fn steps_in_waves_have_the_tokens_of_requests_alone() {
    const NAME: &str = "steps_in_waves_have_the_tokens_of_requests_alone";
    if !is_child() {
        let Some(text) = releasing(NAME, "") else { return };
        // Lines of the fake and of the test are mixed.
        for launch in [" rows in waves", "a chunk of ", " of a sampler for "] {
            assert!(text.matches(launch).count() > 20, "{launch}: {text}");
        }
        return;
    }
    let device = Device::open(0).unwrap();
    let (model, target) = (Model::of_wide_heads(), fake_target());
    let large = model.kernel(16);
    let proven = prove(derive(large.schedule(), &target, Form::Steps, 16).unwrap(), &large, &target).unwrap();
    assert!(proven.plan().work.iter().any(|work| matches!(work.layout, Layout::Packets(_))));
    for is_sampled in [false, true] {
        let words = session_of(&device, &large, None).unwrap();
        let (pack, cache) = (words.pack(), Some(words.cache()));
        let mut steps = StepsSession::load(&device, &proven, IMAGE, Trace::Off, STEPS_MAX, pack, cache).unwrap();
        // Tags of packets begin anew after some launches.
        steps.age(u32::MAX - 1000);
        let sampler = SamplerSession::load(&device, IMAGE, steps.vocab(), 16, STEPS_MAX).unwrap();
        let stepper = DeviceStepper::new(vec![Box::new(steps)], None, is_sampled.then_some(sampler)).unwrap();
        let figures = requests_alone_and_together(stepper, 12, 60);
        assert!(figures.prefix_hits > 0 && figures.steps > figures.launches, "{figures:?}");
    }
}

/// A long history beside a short one goes over to the kernel that cuts it, as soon as that gains; short ones alone never do. On a slow
/// device launches are queued ahead before and after.
#[test]
fn a_long_history_beside_a_short_one_is_cut() {
    const NAME: &str = "a_long_history_beside_a_short_one_is_cut";
    let (model, target) = (Model::of_wide_heads(), fake_target());
    let validated = model.kernel(16);
    let plans =
        [derive(validated.schedule(), &target, Form::Steps, 16), derive_split(validated.schedule(), &target, 16, 64)];
    let [whole, cut] = plans.map(|plan| prove(plan.unwrap(), &validated, &target).unwrap());
    if !is_child() {
        for (mode, cuts) in [("slow", true), ("", false)] {
            let Some(text) = releasing(NAME, mode) else { return };
            let launches = |proven: &Proven<'_>| {
                text.matches(&format!("of 2 rows in waves ({} a step)", proven.plan().waves.len())).count()
            };
            assert!(launches(&whole) > 4 && (launches(&cut) > 4) == cuts, "{mode}: {text}");
            assert!(cuts || launches(&cut) == 0, "{mode}: {text}");
        }
        return;
    }
    let device = Device::open(0).unwrap();
    let words = session_of(&device, &validated, None).unwrap();
    let sessions = [&whole, &cut].map(|proven| {
        let pack = sizes(&device, &validated, 16, words.vocab());
        let session = StepsSession::load(&device, proven, IMAGE, Trace::Off, STEPS_MAX, pack, Some(words.cache()));
        Box::new(session.unwrap()) as Box<dyn RowLauncher>
    });
    let stepper = DeviceStepper::new(sessions.into(), None, None).unwrap();
    let vocab = words.vocab();
    let limits = Limits { running_max: 2, waiting_max: 2, chunk_rows: 12, steps_max: STEPS_MAX };
    let mut engine = Engine::new(stepper, limits).unwrap();
    // At 184 positions beside one at 39 the long history is two splits above the average of four SMs.
    let is_short = std::env::var("FAKE_CUDA").is_ok_and(|mode| mode.is_empty());
    let request = RequestSettings::plain(SampleSettings::greedy()).resolve(vocab, &[]).unwrap();
    let (mut asked, mut events) = (BTreeMap::new(), vec![]);
    for (i, length) in [if is_short { 10 } else { 155 }, 10].into_iter().enumerate() {
        let mut text: Vec<u32> = (0..length).map(|at| (at * 7 + i as u32 * 31) % 100).collect();
        let prompt = text.clone();
        for _ in 0..56 {
            text.push(next_of_fake(&text, &request, &TokenCounts::new(&text), None, vocab));
        }
        let choices = vec![request.clone()];
        let ask = Ask { prompt, tokens_max: 56, choices, scores_prompt: None, grammar: None, deadline: None };
        asked.insert(engine.submit(ask).unwrap(), text.split_off(length as usize));
    }
    while !engine.is_idle() {
        engine.turn(Duration::ZERO, &mut events).unwrap_or_else(|fault| panic!("{fault}"));
    }
    assert_decided(&asked, &events);
    let figures = engine.figures();
    assert!(is_short || figures.queued_ahead > 5, "{figures:?}");
}

/// Kernels with one order of sums: a launch with more rows than the larger kernel has runs in parts, some on the smaller one, without and with the sampler.
#[test]
fn launches_in_parts_have_the_tokens_of_requests_alone() {
    const NAME: &str = "launches_in_parts_have_the_tokens_of_requests_alone";
    if !is_child() {
        let Some(text) = releasing(NAME, "") else { return };
        for launch in [" rows in waves", " of a sampler for "] {
            assert!(text.matches(launch).count() > 20, "{launch}: {text}");
        }
        // Whole parts, and no launch of more rows than a kernel has.
        assert!(text.matches(" of 32 rows in waves").count() > 5, "{text}");
        return;
    }
    let device = Device::open(0).unwrap();
    let (model, target) = (Model::of_wide_heads(), fake_target());
    let large = model.kernel(16);
    for is_sampled in [false, true] {
        let words = session_of(&device, &large, None).unwrap();
        let stepper = stepper_in_one_order(&device, &large, &target, &words, is_sampled).with_rows(72);
        assert_eq!(stepper.bounds().shape.rows, 72);
        let figures = requests_alone_and_together(stepper, 68, 60);
        assert!(figures.prefix_hits > 0 && figures.steps > figures.launches, "{figures:?}");
    }
}

/// Kernels of waves in one order for 16 and 32 rows, over the cache of `words`.
fn stepper_in_one_order(
    device: &Device,
    validated: &Validated,
    target: &Target,
    words: &RowsSession,
    is_sampled: bool,
) -> DeviceStepper {
    let sampler = SamplerSession::load(device, IMAGE, words.vocab(), 32, STEPS_MAX).unwrap();
    let sessions = sessions_in_one_order(device, validated, target, words);
    let sessions = sessions.into_iter().map(|session| Box::new(session) as Box<dyn RowLauncher>).collect();
    DeviceStepper::new(sessions, None, is_sampled.then_some(sampler)).unwrap()
}

fn sessions_in_one_order(
    device: &Device,
    validated: &Validated,
    target: &Target,
    words: &RowsSession,
) -> Vec<StepsSession> {
    let plans = derive_alike(validated.schedule(), target, &[16, 32]).unwrap();
    let alike = prove_alike(plans, validated, target).unwrap();
    let image = if device.others().is_empty() { IMAGE } else { IMAGE_WAVES_DEVICES };
    let load = |proven: &Proven<'_>| {
        let pack = sizes(device, validated, proven.plan().rows, words.vocab());
        let cache = Some(words.cache());
        StepsSession::load(device, proven, image, Trace::Off, STEPS_MAX, pack, cache).unwrap()
    };
    alike.plans().iter().map(load).collect()
}

/// One text by kernels with one order of sums: with and without proposals, with prompts in chunks, with choices of kernels and of the host.
#[test]
fn a_text_by_kernels_in_one_order_has_the_tokens_that_its_request_chooses() {
    const NAME: &str = "a_text_by_kernels_in_one_order_has_the_tokens_that_its_request_chooses";
    if !is_child() {
        let Some(text) = releasing(NAME, "") else { return };
        for launch in ["a chunk of 32", "4 steps of 1 rows in waves", "1 steps of 6 rows in waves"] {
            assert!(text.contains(launch), "{launch}: {text}");
        }
        return;
    }
    text_in_one_order(&Device::open(0).unwrap(), &fake_target());
}

/// Texts on a device and those that run models together with it.
fn text_in_one_order(device: &Device, target: &Target) {
    let validated = Model::of_wide_heads().kernel_on(8, target);
    let words = session_of(device, &validated, None).unwrap();
    let sessions = sessions_in_one_order(device, &validated, target, &words);
    let (vocab, context_max) = (words.vocab(), validated.schedule().program.context_max as usize);
    let sessions = sessions.into_iter().map(|session| Box::new(session) as Box<dyn RowLauncher>).collect();
    let mut steps = TextSteps::new(sessions, STEPS_MAX).unwrap();
    let mut random = Random::new(7);
    let (mut all, mut before) = (Speculated::default(), vec![]);
    for case in 0..24 {
        let sampling =
            SampleSettings { temperature: random.below(2) as f32 * 0.7, seed: case, ..SampleSettings::greedy() };
        let mut settings = RequestSettings::plain(sampling);
        match case % 4 {
            0 => settings.sampling.top_p = Some(0.8),
            1 => settings.penalties.presence = 0.5,
            _ => {}
        }
        let request = settings.resolve(vocab, &[]).unwrap();
        // Some begin like the previous text.
        let reused = if case % 3 == 0 { before.len() / 2 } else { 0 };
        let more = (0..1 + random.below(90)).map(|_| random.below(100) as u32);
        let prompt: Vec<u32> = before[..reused].iter().copied().chain(more).collect();
        let count = (1 + random.below(60)).min(context_max - prompt.len() + 1);
        let (mut text, mut counts) = (prompt.clone(), TokenCounts::new(&prompt));
        for _ in 0..count {
            let next = next_of_fake(&text, &request, &counts, None, vocab);
            text.push(next);
            counts.push(next);
        }
        let mut draft = Knowing { text: text.clone(), random: Random::new(case), shown: None };
        let mut speculation = Speculation::new(&mut draft, 5);
        let proposes = (case % 2 == 0).then_some(&mut speculation);
        let mut told = vec![];
        let tokens = steps.decide(&prompt, reused, count, &request, proposes, &mut |decided| {
            told.push(decided.token);
            ControlFlow::Continue(())
        });
        let tokens = tokens.unwrap_or_else(|fault| panic!("{case}: {fault}"));
        assert_eq!((&tokens[..], &told[..]), (&text[prompt.len()..], &text[prompt.len()..]), "{case}");
        let Speculated { proposed, accepted, .. } = speculation.counts();
        (all.proposed, all.accepted) = (all.proposed + proposed, all.accepted + accepted);
        text.pop();
        before = if text.len() < context_max / 2 { text } else { vec![] };
    }
    assert!(all.accepted > 50 && all.proposed > all.accepted, "{all:?}");
    let mut draft = Knowing { text: vec![1], random: Random::new(0), shown: None };
    let mut speculation = Speculation::new(&mut draft, 32);
    let greedy = RequestSettings::plain(SampleSettings::greedy()).resolve(vocab, &[]).unwrap();
    let refused = steps.decide(&[1], 0, 4, &greedy, Some(&mut speculation), &mut |_| ControlFlow::Continue(()));
    let expected = "`--lookup 32` needs steps of 33 rows, found steps of at most 32";
    assert_eq!(refused.unwrap_err().message, expected);
}

/// An image whose kernels are for so many rows and do this (`enum Does` of the fake); `wrong`: they compute something else.
fn image(rows: u32, does: u8, wrong: bool) -> Code {
    let bytes = [b"\x7fELFK".as_slice(), &[rows as u8, does, u8::from(wrong)]].concat();
    Code { bytes, nvrtc: "0.0".to_string() }
}

/// The kernels of a server on the fake: for 1, 8 and 16 rows by words and 32 by waves, for chunks and their tail, and the sampler.
struct ServerOnFake {
    workspace: Workspace,
    device: Device,
    target: Target,
    kernels: Vec<Kernel>,
    _folder: tempfile::TempDir,
}

impl ServerOnFake {
    fn new() -> ServerOnFake {
        let (folder, model) = (tempfile::tempdir().unwrap(), Model::of_wide_heads());
        let workspace = Workspace {
            cache: Cache::open(folder.path().join("cache")).unwrap(),
            report: Report::quiet(),
            trials: folder.path().join("trials.csv"),
        };
        let [one, small, large] = [1, 8, 16].map(|rows| Arc::new(model.kernel(rows)));
        let steps = |rows, by| Does::Steps { rows, by };
        let knobs = WaveKnobs::default();
        let kernel = |does, validated: &Arc<Validated>, code| {
            let validated = Some(validated.clone());
            Kernel { does, validated, knobs, code }
        };
        let kernels = vec![
            kernel(steps(1, By::Words), &one, image(1, 1, false)),
            kernel(steps(8, By::Words), &small, image(8, 0, false)),
            kernel(steps(16, By::Words), &large, image(16, 0, false)),
            kernel(steps(32, By::Waves), &small, image(32, 0, false)),
            kernel(Does::Chunk, &small, image(1, 3, false)),
            kernel(Does::Tail, &small, image(1, 4, false)),
            Kernel { does: Does::Sampler, validated: None, knobs, code: image(1, 0, false) },
        ];
        let device = Device::open(0).unwrap();
        ServerOnFake { workspace, device, target: fake_target(), kernels, _folder: folder }
    }

    /// Makes sure that the kernels were checked on a kind of device: how often they were loaded for that.
    fn ensure(&self, kernels: &[Kernel], kind: &str) -> Result<u32, Fault> {
        let set = KernelSet::new(false, kernels.to_vec())?;
        let mut loads = 0;
        self.with_checks(&set, kind, |checks, pack| {
            checks.ensure(&set, &mut || {
                loads += 1;
                set.load(&self.device, &self.target, STEPS_MAX, pack, None)
            })
        })?;
        Ok(loads)
    }

    /// Runs something with the checks of a set on a kind of device, and with its weights.
    fn with_checks<T>(&self, set: &KernelSet, kind: &str, run: impl FnOnce(&Checks<'_>, &Arc<DeviceBuffer>) -> T) -> T {
        let reference = set.first_of_several().unwrap().validated;
        let pack = || Ok(Arc::new(vec![]) as Pack);
        let hardware = Hardware { name: kind.to_string(), uuid: "1".to_string(), driver: "2".to_string(), threads: 0 };
        let (pack_on_device, _) = sizes_of(&self.device, &reference);
        let checks = Checks {
            workspace: &self.workspace,
            subject: "fake".to_string(),
            target: &self.target,
            precision: BF16,
            hardware,
            graph: Digest::of(b"graph"),
            weights: WeightsId::Synthetic { seed: 0 },
            parameters: 1_000_000,
            reference,
            pack: &pack,
            expect: by_hash,
        };
        run(&checks, &pack_on_device)
    }

    /// The kernels with another image for one of them.
    fn with(&self, does: Does, code: Code) -> Vec<Kernel> {
        let mut kernels = self.kernels.clone();
        kernels.iter_mut().find(|kernel| kernel.does == does).unwrap().code = code;
        kernels
    }

    fn code(&self, does: Does) -> Code {
        self.kernels.iter().find(|kernel| kernel.does == does).unwrap().code.clone()
    }
}

/// What every kernel of the fake computes.
fn by_hash(validated: &Validated, _: Pack, sizes: TextSizes, _: &dyn Fn()) -> Result<SharedTexts, Fault> {
    let program = &validated.schedule().program;
    let logits = program.grids.iter().find_map(|grid| grid.operand(Role::Logits)).unwrap();
    let vocab = program.buffers[logits.buffer.index()].cols;
    SharedTexts::read(sizes, vocab, |ids| Ok((1..=ids.len()).map(|n| logits_of_fake(&ids[..n], vocab)).collect()))
}

/// A check is made once for a kind of device, by the name of the device and not by its number or driver.
#[test]
fn a_second_start_runs_no_check() {
    const NAME: &str = "a_second_start_runs_no_check";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let server = ServerOnFake::new();
    let ensure = |kernels: &[Kernel], kind| server.ensure(kernels, kind).unwrap_or_else(|fault| panic!("{fault}"));
    assert_eq!(ensure(&server.kernels, "Fake GPU"), 1);
    let ran = server.workspace.report.ran_count();
    assert_eq!(ran, 8, "each kernel is checked, and its logits are computed once");
    assert_eq!(ensure(&server.kernels, "Fake GPU"), 0);
    assert_eq!(server.workspace.report.ran_count(), ran);
    // A part of the kernels, and other ones.
    assert_eq!(ensure(&server.kernels[..3], "Fake GPU"), 0);
    assert_eq!(ensure(&server.kernels, "Another GPU"), 1);
    assert_eq!(server.workspace.report.ran_count(), ran + 7, "the expected logits are those of any device");
    let other = Code { bytes: [image(8, 0, false).bytes, vec![0]].concat(), nvrtc: String::new() };
    assert_eq!(ensure(&server.with(Does::Steps { rows: 8, by: By::Words }, other), "Fake GPU"), 1);
    assert_eq!(server.workspace.report.ran_count(), ran + 8);
}

/// Loads the kernels of a set over `cache`: that of 8 rows, steps of 32 by waves, and chunks.
fn loaded(
    server: &ServerOnFake,
    set: &KernelSet,
    pack: &Arc<DeviceBuffer>,
    cache: Option<Arc<DeviceBuffer>>,
) -> (Box<dyn RowLauncher>, On, On) {
    let mut loaded = set.load(&server.device, &server.target, TRIAL_STEPS, pack, cache).unwrap();
    let mut of = |does| {
        let at = loaded.steps.iter().position(|(of, _)| *of == does).unwrap();
        loaded.steps.remove(at).1
    };
    let rows = of(Does::Steps { rows: 8, by: By::Words });
    let steps = of(Does::Steps { rows: 32, by: By::Waves });
    (rows, On::Steps(steps), On::Chunk(Box::new(loaded.waves.unwrap())))
}

/// Steps of a launch of a trial.
const TRIAL_STEPS: u32 = 16;

/// Candidates of a search over a wave kernel share a cache: each is compared once, a wrong one is a verdict, and two take turns.
#[test]
fn candidates_of_wave_kernels_take_turns() {
    const NAME: &str = "candidates_of_wave_kernels_take_turns";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let server = ServerOnFake::new();
    let right = KernelSet::new(false, server.kernels.clone()).unwrap();
    let wrong = |does, rows, kind| KernelSet::new(false, server.with(does, image(rows, kind, true))).unwrap();
    let wrong = [wrong(Does::Steps { rows: 32, by: By::Waves }, 32, 0), wrong(Does::Chunk, 1, 3)];
    let job = |candidate: &str, incumbent: Option<&str>| Job {
        campaign: String::new(),
        candidate: candidate.to_string(),
        incumbent: incumbent.map(str::to_string),
    };
    let limits = (Duration::from_millis(50), 0.01);
    server.with_checks(&right, "Fake GPU", |checks, pack| {
        for is_chunk in [false, true] {
            let of = |(rows, steps, chunk)| (rows, if is_chunk { chunk } else { steps });
            let (rows, a) = of(loaded(&server, &right, pack, None));
            let cache = rows.cache();
            let mut bench = Bench::new(checks, right.first_of_several().unwrap().validated, rows).unwrap();
            let (_, b) = of(loaded(&server, &right, pack, Some(cache.clone())));
            let (_, c) = of(loaded(&server, &wrong[usize::from(is_chunk)], pack, Some(cache)));
            [("a", a), ("b", b), ("c", c)].into_iter().for_each(|(knobs, on)| bench.sit(knobs, on));
            for (knobs, ran) in [("a", true), ("a", false), ("b", true)] {
                let (figures, now) = bench.check(checks, knobs).unwrap();
                assert!(figures.positions > 0 && now == ran, "{knobs}");
            }
            match bench.check(checks, "c") {
                Err(Ended::Verdict(answer)) => assert!(matches!(*answer, Answer::Failed { .. }), "{answer:?}"),
                other => panic!("{other:?}"),
            }
            assert!(!bench.has("c"), "a wrong kernel is not launched again");

            // Positions of steps, or lengths of prompts.
            let (at, rows) = if is_chunk { ([80, 100], 1) } else { ([3, 20], 4) };
            for position in at {
                bench.keep(&job("a", Some("b")));
                let (samples, rounds) = bench.time(&job("b", Some("a")), (position, rows), limits).unwrap();
                let rounds = rounds.expect("an incumbent");
                assert!(rounds.len() >= 5 && samples.len() == 2 * rounds.len(), "{} rounds", rounds.len());
                assert!(bench.has("a") && bench.has("b"));
            }
            bench.keep(&job("a", None));
            let (samples, rounds) = bench.time(&job("a", None), (at[1], rows), limits).unwrap();
            assert!(!bench.has("b") && rounds.is_none() && samples.len() > 10);
        }
    });
}

/// Each kernel of a server is compared, whatever it does.
#[test]
fn a_served_kernel_with_a_wrong_number_is_refused() {
    const NAME: &str = "a_served_kernel_with_a_wrong_number_is_refused";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let server = ServerOnFake::new();
    for Kernel { does, code, .. } in &server.kernels {
        let [rows, kind] = [code.bytes[5], code.bytes[6]];
        let fault = server.ensure(&server.with(*does, image(u32::from(rows), kind, true)), "Fake GPU");
        let fault = fault.expect_err(&does.to_string());
        let named = format!("kernel `{does}` of target `h200` on Fake GPU: ");
        // A tail is compared together with the chunks that it follows.
        let with_chunk = "kernel `chunk` of target `h200` on Fake GPU: ".to_string();
        let found =
            fault.message.starts_with(&named) || (*does == Does::Tail && fault.message.starts_with(&with_chunk));
        assert!(found && fault.tier == Tier::Internal, "{does}: {fault}");
    }
    assert_eq!(server.ensure(&server.kernels, "Fake GPU").unwrap_or_else(|fault| panic!("{fault}")), 1);
}

/// Cubins that were mistaken for each other: one that takes other parameters, and one that takes the same.
#[test]
fn swapped_cubins_are_noticed() {
    const NAME: &str = "swapped_cubins_are_noticed";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let server = ServerOnFake::new();
    server.ensure(&server.kernels, "Fake GPU").unwrap_or_else(|fault| panic!("{fault}"));
    let [one, eight] = [1, 8].map(|rows| Does::Steps { rows, by: By::Words });
    for (a, b, expected) in [
        (Does::Chunk, Does::Tail, "kernel `chunk` of target `h200` on Fake GPU: the check failed: position 1"),
        (one, eight, "kernel `monobloc_decode` expects parameters of "),
    ] {
        let mut swapped = server.with(a, server.code(b));
        swapped.iter_mut().find(|kernel| kernel.does == b).unwrap().code = server.code(a);
        let fault = server.ensure(&swapped, "Fake GPU").unwrap_err();
        assert!(fault.message.contains(expected), "{fault}");
    }
}

/// The decode kernel of an export is compared in the same way.
#[test]
fn a_decode_kernel_with_a_wrong_number_is_refused() {
    const NAME: &str = "a_decode_kernel_with_a_wrong_number_is_refused";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let server = ServerOnFake::new();
    let (device, model, target) = (&server.device, Model::of_wide_heads(), fake_target());
    let base = Candidate { sms: 4, ..Candidate::default_for(&model.graph, &target, model.precision) };
    let candidate = base.for_context(256);
    let program = lower(&model.graph, "fake", model.precision, 256, &candidate).unwrap();
    let one_row = Arc::new(validate(schedule(program, &target, &candidate).unwrap(), &target).unwrap());
    let mut pack_on_device = device.alloc(20).unwrap();
    pack_on_device.upload(&device.stream().unwrap(), 0, &[1, 256, 1, 1, model.graph.vocab]).unwrap();
    let pack_on_device = Arc::new(pack_on_device);
    let pack = || Ok(Arc::new(vec![]) as Pack);
    let checks = Checks {
        workspace: &server.workspace,
        subject: "fake".to_string(),
        target: &target,
        precision: BF16,
        hardware: Hardware { name: "Fake GPU".to_string(), uuid: String::new(), driver: String::new(), threads: 0 },
        graph: Digest::of(b"graph"),
        weights: WeightsId::Synthetic { seed: 0 },
        parameters: 1_000_000,
        reference: one_row.clone(),
        pack: &pack,
        expect: by_hash,
    };
    let code = image(1, 2, true);
    let load = || {
        let (queues, pack) = (Queues::of(&one_row), pack_on_device.clone());
        Ok(Session::load_sharing(device, &queues, &code.bytes, Trace::Off, STEPS_MAX, pack)?)
    };
    let fault = checks.ensure_decode(&code.bytes, &load, STEPS_MAX).unwrap_err();
    let expected = "kernel `decode` of target `h200` on Fake GPU: the check failed: position 0: ";
    assert!(fault.message.starts_with(expected), "{fault}");
}

/// The comparison of bits finds a row that shows its chunk, or its neighbours.
#[test]
fn a_row_that_shows_that_it_is_not_alone_is_found() {
    const NAME: &str = "a_row_that_shows_that_it_is_not_alone_is_found";
    if !is_child() {
        for (mode, expected) in [
            ("", "Ok(Alike { kernels: [16, 32], batches: [2, 5, 16, 33], chunks: [1, 7, 16, 64], compared: "),
            ("shows cuts", "position 1: chunks of 7 on the kernel for 16 rows: 1 of 512 logits have other bits"),
            ("shows others", "a batch of 5 on the kernel for 16 rows: 1 of 512 logits have other bits"),
        ] {
            let Some(text) = with_fake_driver(NAME, mode) else { return };
            assert!(text.contains(expected), "{mode}: {text}");
        }
        return;
    }
    tell_whether_alike(&Device::open(0).unwrap(), &fake_target());
}

/// Prints what the comparison of bits says of kernels in one order.
fn tell_whether_alike(device: &Device, target: &Target) {
    let model = Model::of_wide_heads();
    let base = Candidate { sms: 4 * target.devices, ..Candidate::default_for(&model.graph, target, model.precision) };
    let room = Room { rows: 8, sequences: SEQUENCES, positions: u64::from(SEQUENCES) * 256 };
    let placed = place_rows(&model.graph, "fake", model.precision, 256, target, &base, room).unwrap();
    let validated = validate(placed, target).unwrap();
    let words = session_of(device, &validated, None).unwrap();
    let mut sessions = sessions_in_one_order(device, &validated, target, &words);
    let mut launchers: Vec<&mut dyn RowLauncher> =
        sessions.iter_mut().map(|session| session as &mut dyn RowLauncher).collect();
    match check_alike(&mut launchers) {
        Ok(alike) => println!("{:?}", Ok::<_, ()>(alike)),
        Err(error) => println!("{error}"),
    }
}

/// Kernels in one order on two devices: texts with proposals, requests of a server, and the comparison of their bits.
#[test]
fn two_devices_in_one_order_give_rows_the_bits_that_they_have_alone() {
    const NAME: &str = "two_devices_in_one_order_give_rows_the_bits_that_they_have_alone";
    if !is_child() {
        let Some(text) = releasing(NAME, "two devices") else { return };
        for expected in [
            "Ok(Alike { kernels: [16, 32], batches: [2, 5, 16, 33], chunks: [1, 7, 16, 64], compared: ",
            "1 steps of 6 rows in waves",
            " of a sampler for ",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        return;
    }
    let (device, target) = (two_devices().unwrap(), fake_target().on_devices(2));
    text_in_one_order(&device, &target);
    tell_whether_alike(&device, &target);
    let large = Model::of_wide_heads().kernel_on(16, &target);
    for is_sampled in [false, true] {
        let words = session_of(&device, &large, None).unwrap();
        let stepper = stepper_in_one_order(&device, &large, &target, &words, is_sampled).with_rows(72);
        let figures = requests_alone_and_together(stepper, 68, 60);
        assert!(figures.steps > figures.launches, "{figures:?}");
    }
}

/// Requests that a kernel of waves refuses: tables that are no chunk of one sequence, tokens beyond the vocabulary, a third chunk before the
/// first was waited for.
#[test]
fn chunks_that_waves_cannot_read_are_refused() {
    const NAME: &str = "chunks_that_waves_cannot_read_are_refused";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let device = Device::open(0).unwrap();
    let (small, target) = (Model::of_wide_heads().kernel(8), fake_target());
    let proven = prove(derive(small.schedule(), &target, Form::Chunk, 512).unwrap(), &small, &target).unwrap();
    let session = session_of(&device, &small, None).unwrap();
    let mut waves = WavesSession::load(&device, &proven, IMAGE, Trace::Off, session.pack(), session.cache()).unwrap();
    let (mut pool, mut guard) = (Pool::new(*waves.shape()), Guard::new(*waves.shape()));
    let [a, b] = [(); 2].map(|()| pool.open().unwrap());
    for sequence in [a, b] {
        pool.reserve(sequence, 200).unwrap();
    }
    let mut edits = pool.take_edits();
    let mut request = |rows: Vec<(SequenceId, u32)>, wants_logits, steps| Request {
        rows: rows.into_iter().map(|(sequence, position)| Row { sequence, position, wants_logits }).collect(),
        steps,
        edits: std::mem::take(&mut edits),
    };
    let chunk = |sequence, count| (0..count).map(|position| (sequence, position)).collect::<Vec<_>>();
    let both = [chunk(a, 64), chunk(b, 64)].concat();
    let ids: Vec<u32> = (0..128).collect();
    let mut refused = |request: &Request, tokens: &[u32], expected: &str| {
        let error = waves.read(guard.admit(request).unwrap(), tokens, Last::Nothing).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    refused(&request(both, false, 1), &ids, "do not fit");
    refused(&request(chunk(a, 128), false, 1), &ids[1..], "do not fit");
    refused(&request(chunk(a, 128), true, 1), &ids, "want no logits");
    refused(&request(chunk(a, 1), true, 2), &ids[..1], "do not fit");
    refused(&request(chunk(a, 128), false, 1), &[512; 128], "token 512 is not below the vocabulary of 512");
    for sequence in [a, b] {
        waves.queue(guard.admit(&request(chunk(sequence, 128), false, 1)).unwrap(), &ids, Last::Nothing).unwrap();
    }
    let error = waves.queue(guard.admit(&request(chunk(b, 128), false, 1)).unwrap(), &ids, Last::Nothing).unwrap_err();
    assert!(matches!(error, SessionError::NotFinished), "{error}");
    waves.finish().and_then(|_| waves.finish()).unwrap();
    assert!(matches!(waves.finish(), Err(SessionError::NotQueued)));
    // Without a tail no token is decided after a chunk.
    let [row] = given(&[0])[..] else { unreachable!() };
    let last = || Last::Token { row, with_logits: true };
    let ends = |request: Request| {
        let last = request.rows.len() - 1;
        let row = |(at, row): (usize, &Row)| Row { wants_logits: at == last, ..*row };
        Request { rows: request.rows.iter().enumerate().map(row).collect(), ..request }
    };
    let error = waves.read(guard.admit(&ends(request(chunk(b, 128), false, 1))).unwrap(), &ids, last()).unwrap_err();
    assert!(matches!(error, SessionError::NoLogits), "{error}");
    let proven = with_tail(&small, &target);
    let (pack, cache) = (session.pack(), session.cache());
    let mut waves = WavesSession::load_with_tail(&device, &proven, [IMAGE, IMAGE], Trace::Off, pack, cache).unwrap();
    // Only the last row may ask for a decision.
    for (request, last) in [
        (request(chunk(b, 128), true, 1), last()),
        (request(chunk(b, 128), false, 1), last()),
        (ends(request(chunk(b, 128), false, 1)), Last::Nothing),
    ] {
        let error = waves.read(guard.admit(&request).unwrap(), &ids, last).unwrap_err();
        assert!(matches!(error, SessionError::NoLogits), "{error}");
    }
    // Tails share the memory of logits: only one can be in flight, and its logits cannot be read meanwhile.
    waves.queue(guard.admit(&ends(request(chunk(a, 128), false, 1))).unwrap(), &ids, last()).unwrap();
    let tables = guard.admit(&ends(request(chunk(b, 128), false, 1))).unwrap();
    assert!(matches!(waves.queue(tables, &ids, last()), Err(SessionError::NotFinished)));
    assert!(matches!(waves.logits(), Err(SessionError::NotFinished)));
    waves.queue(guard.admit(&request(chunk(b, 128), false, 1)).unwrap(), &ids, Last::Nothing).unwrap();
    let (first, second) = (waves.finish().unwrap(), waves.finish().unwrap());
    assert_eq!((first.token, second.token), (argmax(&waves.logits().unwrap()), None));
    assert!(first.token.is_some());
}

/// The check reads what every row chose in every layer, from the places that the proof names: of a chunk, its tail, and a step. What no launch
/// wrote is no expert.
#[test]
fn wave_kernels_tell_what_rows_chose() {
    const NAME: &str = "wave_kernels_tell_what_rows_chose";
    if !is_child() {
        with_fake_driver(NAME, "numbers");
        return;
    }
    let device = Device::open(0).unwrap();
    let (small, target) = (Model::of_experts().kernel(8), fake_target());
    let session = session_of(&device, &small, None).unwrap();
    let steps = prove(derive(small.schedule(), &target, Form::Steps, 32).unwrap(), &small, &target).unwrap();
    let prompts = with_tail(&small, &target);
    let (pack, cache, off) = (session.pack(), session.cache(), Trace::Off);
    let mut waves =
        WavesSession::load_with_tail(&device, &prompts, [IMAGE, IMAGE], off, pack.clone(), cache.clone()).unwrap();
    let mut stepping = StepsSession::load(&device, &steps, IMAGE, off, 1, pack, Some(cache)).unwrap();
    let buffers: Vec<BufferId> = steps.choices().keys().copied().collect();
    let of_chunk = |buffer: &BufferId| prompts.chunk().choices().contains_key(buffer);
    assert_eq!((buffers.len(), buffers.iter().filter(|buffer| of_chunk(buffer)).count()), (3, 2));
    // Three ids a row.
    let ids = |proven: &Proven<'_>, buffer: &BufferId, row: u32, more: u32| {
        let place = proven.plan().work[proven.choices()[buffer].index()].place as u32;
        (0..3).map(|slot| place + 4 * (3 * row + slot) + more).collect::<Vec<u32>>()
    };
    let bits = |found: Vec<f32>| found.into_iter().map(f32::to_bits).collect::<Vec<u32>>();

    let (mut pool, mut guard) = (Pool::new(*waves.shape()), Guard::new(*waves.shape()));
    let sequence = pool.open().unwrap();
    pool.reserve(sequence, 100).unwrap();
    let mut edits = pool.take_edits();
    let mut request = |count: u32, wants: &dyn Fn(u32) -> bool| Request {
        rows: (0..count).map(|position| Row { sequence, position, wants_logits: wants(position) }).collect(),
        steps: 1,
        edits: std::mem::take(&mut edits),
    };
    let tokens: Vec<u32> = (0..100).collect();
    let [row] = given(&[0])[..] else { unreachable!() };
    let last = Last::Token { row, with_logits: true };
    waves.queue(guard.admit(&request(100, &|position| position == 99)).unwrap(), &tokens, last).unwrap();
    assert!(matches!(waves.chosen(buffers[0], 0, false), Err(SessionError::NotFinished)));
    waves.finish().unwrap();
    for buffer in &buffers {
        for (row, is_last) in [(0, false), (41, false), (99, true)] {
            let expected = match (of_chunk(buffer), is_last) {
                (true, _) => ids(prompts.chunk(), buffer, row, 0),
                (false, true) => ids(prompts.tail(), buffer, 0, 1),
                (false, false) => vec![],
            };
            assert_eq!(waves.chosen(*buffer, row, is_last).unwrap(), expected, "{buffer}, row {row}");
        }
    }
    assert!(waves.chosen(BufferId(0), 0, true).unwrap().is_empty());
    waves.poison_logits().unwrap();
    assert!(
        buffers.iter().filter(|buffer| of_chunk(buffer)).all(|b| waves.chosen(*b, 7, false).unwrap() == [u32::MAX; 3])
    );
    assert_eq!(waves.chosen(buffers[2], 99, true).unwrap(), [u32::MAX; 3]);

    stepping.run_whole(guard.admit(&request(20, &|_| true)).unwrap(), &given(&tokens[..20]), true).unwrap();
    for (buffer, row) in buffers.iter().flat_map(|buffer| [0, 19].map(|row| (buffer, row))) {
        assert_eq!(bits(stepping.exchanged(*buffer, row).unwrap()), ids(&steps, buffer, row, 0), "{buffer}, row {row}");
    }
    stepping.poison_logits().unwrap();
    assert!(buffers.iter().all(|buffer| bits(stepping.exchanged(*buffer, 31).unwrap()) == [u32::MAX; 3]));
    assert!(stepping.exchanged(buffers[0], 32).unwrap().is_empty());
}

/// A chunk and its tail are two launches: each has stamps and a device time of its own.
#[test]
fn a_chunk_and_its_tail_are_traced() {
    const NAME: &str = "a_chunk_and_its_tail_are_traced";
    if !is_child() {
        with_fake_driver(NAME, "stamps");
        return;
    }
    let device = Device::open(0).unwrap();
    let (small, target) = (Model::of_wide_heads().kernel(8), fake_target());
    let proven = with_tail(&small, &target);
    let session = session_of(&device, &small, None).unwrap();
    let (pack, cache) = (session.pack(), session.cache());
    let mut waves = WavesSession::load_with_tail(&device, &proven, [IMAGE, IMAGE], Trace::On, pack, cache).unwrap();
    let (mut pool, mut guard) = (Pool::new(*waves.shape()), Guard::new(*waves.shape()));
    let sequence = pool.open().unwrap();
    pool.reserve(sequence, 100).unwrap();
    let mut edits = pool.take_edits();
    let ids: Vec<u32> = (0..100).collect();
    let [row] = given(&[0])[..] else { unreachable!() };
    for (ends, last) in [(false, Last::Nothing), (true, Last::Token { row, with_logits: false })] {
        let row = |position| Row { sequence, position, wants_logits: ends && position == 99 };
        let request = Request { rows: (0..100).map(row).collect(), steps: 1, edits: std::mem::take(&mut edits) };
        let read = waves.read(guard.admit(&request).unwrap(), &ids, last).unwrap();
        assert!(read.chunk_us > 0.0);
        assert_eq!((read.tail_us > 0.0, read.token.is_some()), (ends, ends));
    }
    let stamps = [waves.stamps().unwrap(), waves.tail_stamps().unwrap().unwrap()];
    let plans = [proven.chunk(), proven.tail()].map(Proven::plan);
    // The clock of the fake has no gaps: the tail begins when the chunk has ended.
    let begun = stamps.each_ref().map(|stamps| stamps[0]);
    assert_eq!(begun[1] - begun[0], 10 * plans[0].waves.len() as u64);
    for (stamps, plan) in stamps.iter().zip(plans) {
        assert_eq!(stamps.len(), 4 * plan.waves.len() * STAMP_WORDS);
        assert_eq!(stamps[stamps.len() - STAMP_WORDS + 3] - stamps[0], 10 * plan.waves.len() as u64);
    }
}

/// Lists of numbers, over a vocabulary in which few ids have bytes.
fn lists(vocab: u32) -> Grammar {
    let mut tokens = vec![vec![]; vocab as usize];
    for (id, text) in (10..).zip(["[", "]", ",", "1", "2", "0", " ", "[]", "],", "12", "1,", "x"]) {
        tokens[id] = text.as_bytes().to_vec();
    }
    let schema = serde_json::json!({ "type": "array", "maxItems": 20, "items": { "type": ["integer", "array"] } });
    let source = Source::Json(schema.to_string());
    Vocabulary::new(&tokens, &[3, 9]).unwrap().compile(&source).unwrap()
}

/// Random requests, with at most `more` prompt tokens beside those that decode. Each gets the tokens that the fake decides for it alone.
fn requests_alone_and_together(stepper: impl Stepper, more: usize, decided_max: usize) -> Figures {
    let Bounds { vocab, shape, .. } = stepper.bounds();
    let page_rows = shape.page_rows as usize;
    let limits = Limits { running_max: 4, waiting_max: 100, chunk_rows: more as u32, steps_max: STEPS_MAX };
    let mut engine = Engine::new(stepper, limits).unwrap();
    let lists = lists(vocab);
    let mut random = Random::new(5);
    let mut asks: BTreeMap<RequestId, Ask> = BTreeMap::new();
    let mut events = vec![];
    let beginning: Vec<u32> = (0..2 * page_rows as u32).map(|i| i % 100).collect();
    while asks.len() < 24 || !engine.is_idle() {
        if asks.len() < 24 && random.below(3) == 0 {
            // Some begin alike, by more than a page.
            let shared = random.below(2) * random.below(beginning.len());
            let own = (0..1 + random.below(page_rows)).map(|_| random.below(100) as u32);
            let prompt: Vec<u32> = beginning[..shared].iter().copied().chain(own).collect();
            let temperature = random.below(2) as f32 * 0.7;
            let sampling = SampleSettings { temperature, seed: random.below(1000) as u64, ..SampleSettings::greedy() };
            let mut settings = RequestSettings { ignore_eos: true, ..RequestSettings::plain(sampling) };
            match random.below(7) {
                0 => settings.penalties.presence = 0.5,
                1 => settings.logprobs = Some(2),
                2 => settings.sampling.top_k = Some(5),
                3 => settings.sampling.top_p = Some(0.8),
                4 => settings.penalties = Penalties { repetition: 1.2, presence: 0.0, frequency: 0.3 },
                _ => {}
            }
            let choices = vec![settings.resolve(vocab, &[]).unwrap()];
            let tokens_max = (1 + random.below(decided_max)).min(4 * page_rows - prompt.len()) as u32;
            let grammar = (random.below(5) == 0).then(|| lists.clone());
            let ask = Ask { prompt, tokens_max, choices, scores_prompt: None, grammar, deadline: None };
            asks.insert(engine.submit(ask.clone()).unwrap(), ask);
        }
        engine.turn(Duration::ZERO, &mut events).unwrap_or_else(|fault| panic!("{fault}"));
    }
    for (&request, ask) in &asks {
        let (mut tokens, mut counts) = (ask.prompt.clone(), TokenCounts::new(&ask.prompt));
        let mut guide = ask.grammar.as_ref().map(Grammar::begin);
        let mut end = End::Length;
        for _ in 0..ask.tokens_max {
            let allowed = guide.as_mut().map(|guide| guide.allowed().unwrap());
            let next = next_of_fake(&tokens, &ask.choices[0], &counts, allowed, vocab);
            tokens.push(next);
            counts.push(next);
            if guide.as_mut().is_some_and(|guide| guide.push(next).unwrap()) {
                end = End::Stop;
                break;
            }
        }
        let decided = events.iter().filter_map(|event| match event {
            Event::Token { id, decided } if id.request == request => Some(decided.token),
            _ => None,
        });
        assert_eq!(decided.collect::<Vec<_>>(), tokens[ask.prompt.len()..], "{request:?}: {:?}", ask.choices);
        let end = Event::Ended { id: ChoiceId { request, choice: 0 }, end };
        assert!(events.contains(&end), "{request:?}");
    }
    let guided = asks.values().filter(|ask| ask.grammar.is_some()).count();
    assert!(guided > 1, "{guided} requests with a grammar");
    let figures = engine.figures();
    println!("{figures:?}");
    figures
}

/// A launch is queued while the previous one runs, on each kind of kernel, also decoding while a prompt is read. Requests get the same
/// tokens as alone, although rows end at tokens that the host did not foresee.
#[test]
fn launches_are_queued_while_others_run() {
    const NAME: &str = "launches_are_queued_while_others_run";
    if !is_child() {
        let Some(text) = releasing(NAME, "slow") else { return };
        let of_line = |line: &str| line.strip_suffix(" launches queued after one that ran")?.parse::<u32>().ok();
        let queued = text.lines().find_map(of_line).expect("a count");
        assert!(queued > 30, "{queued}: {text}");
        for kernel in [" steps of one row", " steps of 3 rows\n", " steps of 3 rows in waves"] {
            assert!(text.contains(&format!("3{kernel}")), "{kernel}: {text}");
        }
        return;
    }
    let device = Device::open(0).unwrap();
    let (model, target) = (Model::of_wide_heads(), fake_target());
    let [small, large] = [8, 16].map(|rows| model.kernel(rows));
    let proven = prove(derive(large.schedule(), &target, Form::Steps, 16).unwrap(), &large, &target).unwrap();
    let words = || session_of(&device, &small, None).unwrap();
    let other = words();
    let pack = sizes(&device, &large, proven.plan().rows, other.vocab());
    let waves = StepsSession::load(&device, &proven, IMAGE, Trace::Off, STEPS_MAX, pack, Some(other.cache())).unwrap();
    let one = one_row_beside(&device, &model, &other);
    let kernels: [(Vec<Box<dyn RowLauncher>>, u32); 3] =
        [(vec![Box::new(words())], 3), (vec![Box::new(waves)], 3), (vec![Box::new(one), Box::new(other)], 1)];
    for (sessions, running_max) in kernels {
        let stepper = DeviceStepper::new(sessions, None, None).unwrap();
        let figures = plain_requests_come_and_go(stepper, running_max, 12);
        assert!(figures.queued_ahead > 10, "{figures:?}");
    }
    let figures = plain_requests_come_and_go(stepper_with_waves(&device, false, false), 2, 150);
    assert!(figures.queued_ahead > 10, "{figures:?}");
}

/// Asserts that each request that was asked got exactly its tokens, in order.
#[track_caller]
fn assert_decided(asked: &BTreeMap<RequestId, Vec<u32>>, events: &[Event]) {
    for (request, expected) in asked {
        let decided = events.iter().filter_map(|event| match event {
            Event::Token { id, decided } if id.request == *request => Some(decided.token),
            _ => None,
        });
        assert_eq!(decided.collect::<Vec<_>>(), *expected, "{request:?}");
    }
}

/// At most `running_max` requests at a time, some of which end at a token. Each gets the tokens that the fake decides for it alone.
fn plain_requests_come_and_go(stepper: DeviceStepper, running_max: u32, prompt_max: usize) -> Figures {
    let vocab = stepper.bounds().vocab;
    let limits = Limits { running_max, waiting_max: 100, chunk_rows: prompt_max as u32, steps_max: STEPS_MAX };
    let mut engine = Engine::new(stepper, limits).unwrap();
    let (mut random, mut asked, mut events) = (Random::new(9), BTreeMap::new(), vec![]);
    while asked.len() < 9 || !engine.is_idle() {
        let is_free = engine.figures().running + engine.figures().waiting < running_max as usize;
        if asked.len() < 9 && is_free && (engine.is_idle() || random.below(8) == 0) {
            let mut text: Vec<u32> = (0..1 + random.below(prompt_max)).map(|_| random.below(100) as u32).collect();
            let (prompt, tokens_max) = (text.clone(), 20 + random.below(25));
            let temperature = random.below(2) as f32 * 0.7;
            let sampling = SampleSettings { temperature, seed: random.below(1000) as u64, ..SampleSettings::greedy() };
            let settings = RequestSettings::plain(sampling);
            let request = settings.resolve(vocab, &[]).unwrap();
            for _ in 0..tokens_max {
                text.push(next_of_fake(&text, &request, &TokenCounts::new(&text), None, vocab));
            }
            let mut decided = text[prompt.len()..].to_vec();
            let ends: Vec<u32> = (asked.len() % 3 > 0).then(|| decided[10 + asked.len()]).into_iter().collect();
            let until = decided.iter().position(|token| ends.contains(token)).map_or(tokens_max, |at| at + 1);
            decided.truncate(until);
            let choices = vec![settings.resolve(vocab, &ends).unwrap()];
            let tokens_max = tokens_max as u32;
            let ask = Ask { prompt, tokens_max, choices, scores_prompt: None, grammar: None, deadline: None };
            asked.insert(engine.submit(ask).unwrap(), decided);
        }
        engine.turn(Duration::ZERO, &mut events).unwrap_or_else(|fault| panic!("{fault}"));
    }
    assert_decided(&asked, &events);
    engine.figures()
}

/// A context that is lost ends the engine with an error, and everything still drops.
#[test]
fn an_engine_whose_device_dies_says_so() {
    const NAME: &str = "an_engine_whose_device_dies_says_so";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let session = rows_session(&Device::open(0).unwrap(), 8, None).unwrap();
    let vocab = session.vocab();
    let limits = Limits { running_max: 4, waiting_max: 100, chunk_rows: 5, steps_max: STEPS_MAX };
    let mut engine = Engine::new(DeviceStepper::new(vec![Box::new(session)], None, None).unwrap(), limits).unwrap();
    let choices = vec![RequestSettings::plain(SampleSettings::greedy()).resolve(vocab, &[]).unwrap()];
    // The last id crashes the fake.
    let deadly =
        Ask { prompt: vec![1, vocab - 1], tokens_max: 2, choices, scores_prompt: None, grammar: None, deadline: None };
    engine.submit(deadly).unwrap();
    let fault = (0..3).find_map(|_| engine.turn(Duration::ZERO, &mut vec![]).err()).expect("a fault");
    assert!(fault.message.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{fault}");
}

/// Refused, because warps would wait for ever for registers that the block does not have.
#[test]
fn a_kernel_with_fewer_registers_than_its_warps_share_is_refused() {
    const NAME: &str = "a_kernel_with_fewer_registers_than_its_warps_share_is_refused";
    if !is_child() {
        with_fake_driver(NAME, "few registers");
        return;
    }
    let refused = rows_session(&Device::open(0).unwrap(), 8, None).err().expect("a refusal").to_string();
    assert_eq!(refused, "the warps of a block share 64512 registers, and the compiled kernel gives it 61440");
}

/// Tokens that stay on the device from one launch to the next, and rows that end in the middle of a launch.
#[test]
fn a_launch_goes_on_with_what_the_one_before_decided() {
    const NAME: &str = "a_launch_goes_on_with_what_the_one_before_decided";
    if !is_child() {
        // On a device that keeps memory in L2, and on one that does not.
        for mode in ["", "keeps nothing"] {
            with_fake_driver(NAME, mode);
        }
        return;
    }
    let mut session = rows_session(&Device::open(0).unwrap(), 8, None).unwrap();
    let (shape, vocab) = (*session.shape(), session.vocab());
    let request = RequestSettings::plain(SampleSettings::greedy()).resolve(vocab, &[]).unwrap();
    let mut expected = vec![7];
    while expected.len() < 12 {
        expected.push(next_of_fake(&expected, &request, &TokenCounts::new(&expected), None, vocab));
    }
    let mut guard = Guard::new(shape);
    let sequence = SequenceId(2);
    let edits = vec![Edit { sequence, block: 0, page: Some(PageId(5)) }];
    let at =
        |position, steps| Request { rows: vec![Row { sequence, position, wants_logits: true }], steps, edits: vec![] };
    let input = |first, steps| [RowInput { first, steps, inverse_temperature: 0.0, seed: 0 }];
    let first = guard.admit(&Request { edits, ..at(0, 3) }).unwrap();
    let launched = session.run(first, &input(FirstToken::Given(7), 3), &[], false).unwrap();
    assert_eq!(launched.tokens.concat(), expected[..4]);
    // While a launch is queued, no other one is taken, and no logits are read.
    session.queue(guard.admit(&at(3, 4)).unwrap(), &input(FirstToken::Decided(0), 4), true).unwrap();
    let refused = session.queue(guard.admit(&at(7, 1)).unwrap(), &input(FirstToken::Decided(0), 1), true);
    assert_eq!(refused.unwrap_err().to_string(), "a launch was not waited for");
    assert_eq!(session.logits(0).unwrap_err().to_string(), "a launch was not waited for");
    assert_eq!(session.finish().unwrap().tokens.concat(), expected[3..8]);
    assert_eq!(session.finish().unwrap_err().to_string(), "a launch was waited for, and none is queued");
    assert_eq!(sample::argmax(&session.logits(0).unwrap()), Some(expected[7]));
    // The row ends in the second step, so no launch can continue it.
    let eos = [expected[9]];
    let tables = guard.admit(&at(7, 4)).unwrap();
    let launched = session.run(tables, &input(FirstToken::Given(expected[7]), 4), &eos, false).unwrap();
    let until = expected[8..].iter().position(|token| *token == eos[0]).unwrap();
    assert_eq!(launched.tokens.concat(), expected[7..9 + until]);
    let position = 8 + until as u32;
    let refused = session.run(guard.admit(&at(position, 1)).unwrap(), &input(FirstToken::Decided(0), 1), &[], false);
    assert_eq!(refused.unwrap_err().to_string(), "row 0 decided no token in the step before this launch");
}

/// Rows of several launches of a kernel continue with the tokens that they decided, in any order, also if some rows ended.
#[test]
fn launches_of_a_kernel_for_fewer_rows_go_on_with_what_they_decided() {
    const NAME: &str = "launches_of_a_kernel_for_fewer_rows_go_on_with_what_they_decided";
    if !is_child() {
        with_fake_driver(NAME, "");
        return;
    }
    let mut session = in_turns(&Device::open(0).unwrap(), 5);
    let (vocab, shape) = (session.vocab(), *session.shape());
    let request = RequestSettings::plain(SampleSettings::greedy()).resolve(vocab, &[]).unwrap();
    let text = |first: u32| -> Vec<u32> {
        let mut text = vec![first];
        while text.len() < 10 {
            text.push(next_of_fake(&text, &request, &TokenCounts::new(&text), None, vocab));
        }
        text
    };
    let texts: Vec<Vec<u32>> = (0..5).map(text).collect();
    let mut guard = Guard::new(shape);
    let page = |s: u32| Edit { sequence: SequenceId(s), block: 0, page: Some(PageId(s)) };
    let mut edits: Vec<Edit> = (0..5).map(page).collect();
    let mut launch = |rows: &[(u32, FirstToken)], position: u32, steps: u32| {
        let row = |&(s, _): &(u32, FirstToken)| Row { sequence: SequenceId(s), position, wants_logits: true };
        let request = Request { rows: rows.iter().map(row).collect(), steps, edits: std::mem::take(&mut edits) };
        let input = |&(_, first): &(u32, FirstToken)| RowInput { first, steps, inverse_temperature: 0.0, seed: 0 };
        let inputs: Vec<RowInput> = rows.iter().map(input).collect();
        let launched = session.run_whole(guard.admit(&request).unwrap(), &inputs, true)?;
        let logits: Vec<Vec<f32>> = (0..rows.len() as u32).map(|row| session.logits(row).unwrap()).collect();
        for (row, (s, _)) in rows.iter().enumerate() {
            let found: Vec<u32> = launched.tokens.iter().map(|step| step[row]).collect();
            let all = &texts[*s as usize][position as usize..][..=steps as usize];
            assert_eq!((found.as_slice(), sample::argmax(&logits[row])), (all, all.last().copied()), "{s}");
        }
        Ok::<u32, SessionError>(launched.steps)
    };
    let given: Vec<_> = (0..5).map(|s| (s, FirstToken::Given(s))).collect();
    assert_eq!(launch(&given, 0, 3).unwrap(), 3);
    let decided = |from: &[(u32, u32)]| from.iter().map(|&(s, row)| (s, FirstToken::Decided(row))).collect::<Vec<_>>();
    assert_eq!(launch(&decided(&[(4, 4), (0, 0), (3, 3), (2, 2)]), 3, 2).unwrap(), 2);
    // One launch, after several; and two rows of one launch.
    assert_eq!(launch(&decided(&[(2, 3), (4, 0)]), 5, 1).unwrap(), 1);
    assert_eq!(launch(&decided(&[(4, 1)]), 6, 2).unwrap(), 2);
    let refused = launch(&decided(&[(4, 0), (2, 1), (0, 2)]), 5, 1);
    assert!(matches!(refused, Err(SessionError::Undecided { row: 1 })), "{refused:?}");
}

/// The device of this machine, or `None` and a line that says so.
fn device(test: &str) -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error) if std::env::var_os("MONOBLOC_REQUIRE_GPU").is_some_and(|value| value == "1") => {
            panic!("`MONOBLOC_REQUIRE_GPU` is set, but {}", Fault::from(error))
        }
        Err(error) => {
            skipped(test, "GPU", &error.to_string());
            None
        }
    }
}

#[test]
fn the_self_test_passes_on_this_device() {
    const NAME: &str = "the_self_test_passes_on_this_device";
    let (Some(device), Some(nvrtc)) = (device(NAME), nvrtc(NAME)) else { return };
    let found = self_test(&device, nvrtc).unwrap_or_else(|error| panic!("{}", Fault::from(error)));
    println!("{found:#?}");
    assert_eq!(found.grid, device.identity().sm_count);
    assert!(found.empty_launch_us_min > 0.0 && found.empty_launch_us_p50 < 1000.0, "{found:?}");
}

#[test]
fn driver_and_cubin_agree_about_a_kernel_on_this_device() {
    const NAME: &str = "driver_and_cubin_agree_about_a_kernel_on_this_device";
    let (Some(device), Some(nvrtc)) = (device(NAME), nvrtc(NAME)) else { return };
    let (major, minor) = device.identity().compute_capability;
    let text = r#"
struct Sizes { unsigned long long a; int b[5]; };
extern "C" __global__ void __launch_bounds__(96) agree(int* p, int k, Sizes s) {
    __shared__ int words[123];
    int local[32];
    for (int i = 0; i < 32; i++) local[i] = p[i];
    words[threadIdx.x] = local[k & 31] + s.b[k & 3];
    __syncthreads();
    p[threadIdx.x] = words[(threadIdx.x + 1) % 96];
}"#;
    let source = KernelSource {
        name: "agree.cu".into(),
        text: text.into(),
        headers: vec![],
        arch: format!("sm_{}", major * 10 + minor),
    };
    let compiled = nvrtc.compile(&source).unwrap();
    let report = monobloc::cuda::cubin::read(&compiled.cubin, &compiled.log).unwrap();
    let function = device.function(&device.load(&compiled.cubin).unwrap(), "agree", 0).unwrap();
    let expected = &report.kernels["agree"];
    assert_eq!(function.registers, expected.registers);
    // From sm_90 on the driver keeps 1024 bytes for itself, and may count them.
    assert!([0, 1024].contains(&(function.smem_static_bytes - expected.smem_static_bytes)), "{expected:?}");
    assert_eq!(Some(function.threads_per_block_max), expected.threads_max);
    assert!(function.local_bytes >= expected.stack_bytes, "{} {expected:?}", function.local_bytes);
    let stream = device.stream().unwrap();
    let buffer = device.alloc(4 * 96).unwrap();
    let wrong =
        stream.launch(&function, &ONE, &[Argument::Buffer(&buffer), Argument::U32(0), Argument::Struct(&[0; 24])]);
    let expected = "kernel `agree` expects parameters of [8, 4, 32] bytes, found [8, 4, 24]";
    assert_eq!(wrong.unwrap_err().to_string(), expected);
}
