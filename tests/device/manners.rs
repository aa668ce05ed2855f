//! Tests what users notice besides numbers: streamed tokens, a short time to the first one, clean memory accesses.

use std::ops::ControlFlow;
use std::process::Command;
use std::time::{Duration, Instant};

use monobloc::check::check_ids;
use monobloc::codegen::abi::Queues;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::cuda::session::Session;
use monobloc::pipeline::build;
use monobloc::sample::SampleSettings;

use crate::support::Goldens;
use crate::{Gpu, Place, packed, prepared, runner, say};

/// Tokens arrive one by one while the launch that decides all of them still runs.
#[test]
fn tokens_stream_out_of_a_running_launch() {
    let Some(gpu) = Gpu::here("tokens_stream_out_of_a_running_launch") else { return };
    let place = Place::new();
    let workspace = place.workspace(None);
    let manifest =
        place.manifest(&gpu.record, gpu.record.spec.copy, "fp32", "context_max = 2048\nsteps_per_launch = 2048");
    let prepared = prepared(&workspace, &manifest);
    let mut device = runner(&workspace, &prepared);
    let prompt = Goldens::open("tinystories-llama").ids("prompt_ids.0");
    let mut seen = vec![];
    let settings = SampleSettings::greedy();
    let tokens = device
        .generate(&prompt, 2000, &[], &settings, &mut |_| {
            seen.push(Instant::now());
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!((tokens.len(), seen.len()), (2000, 2000));
    let moments = 1 + seen.windows(2).filter(|pair| pair[1] - pair[0] > Duration::from_micros(20)).count();
    say(&format!("2000 tokens of one launch arrived at {moments} moments over {:?}", seen[1999] - seen[0]));
    assert!(moments > 20, "all tokens of a launch arrived at {moments} moments");
}

/// Prints the time from a launch to its first token, without the step that decides it.
#[test]
fn the_way_to_the_first_token_is_measured() {
    let Some(gpu) = Gpu::here("the_way_to_the_first_token_is_measured") else { return };
    let place = Place::new();
    let workspace = place.workspace(None);
    let prepared =
        prepared(&workspace, &place.manifest(&gpu.record, gpu.record.spec.copy, "bf16", "context_max = 512"));
    let source = emit(&prepared.validated, &prepared.target, Trace::Off);
    let cubin = gpu.nvrtc.compile(&source).unwrap().cubin;
    let pack = packed(&prepared);
    let mut session =
        Session::load(&gpu.device, &Queues::of(&prepared.validated), &cubin, Trace::Off, 256, |stream, to| {
            Ok(to.upload(stream, 0, (*pack).as_ref())?)
        })
        .unwrap();
    let ids = check_ids(prepared.imported.graph.vocab, 1);
    let (mut over_us, mut step_us) = (vec![], vec![]);
    for _ in 0..50 {
        session.start(&ids, &[]).unwrap();
        let begun = Instant::now();
        let timeout_ms = session.launch(0, 256, false).unwrap();
        // The token of position 0 is the prompt's; that of position 1 is the first decided one.
        while session.decided().unwrap() < 2 && !session.is_done().unwrap() {
            std::hint::spin_loop();
        }
        let first_us = begun.elapsed().as_secs_f64() * 1e6;
        let launched = session.finish(timeout_ms).unwrap();
        assert_eq!(launched.decided, 257);
        step_us.push(launched.device_us / 256.0);
        over_us.push(first_us - launched.device_us / 256.0);
    }
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let (over, step) = (median(&mut over_us), median(&mut step_us));
    say(&format!("first token of a warm launch: {over:.1} us over a step of {step:.1} us (median of 50)"));
    assert!(over.is_finite() && step > 0.0);
}

/// A machine with only the shared cache runs no stage, and gives the same tokens.
#[test]
fn a_new_machine_loads_everything_from_the_shared_cache() {
    let Some(gpu) = Gpu::here("a_new_machine_loads_everything_from_the_shared_cache") else { return };
    let (builder, shared) = (Place::new(), tempfile::tempdir().unwrap());
    let copy = gpu.record.spec.copy;
    let manifest = builder.manifest(&gpu.record, copy, "bf16", "context_max = 512");
    let workspace = builder.workspace(Some(shared.path()));
    build(&workspace, &manifest).unwrap_or_else(|fault| panic!("{fault}"));
    let prompt = Goldens::open("tinystories-llama").ids("prompt_ids.1");
    let settings = SampleSettings::greedy();
    let first = prepared(&workspace, &manifest);
    let built =
        runner(&workspace, &first).generate(&prompt, 8, &[], &settings, &mut |_| ControlFlow::Continue(())).unwrap();

    let new = Place::new();
    let begun = Instant::now();
    let workspace = new.workspace(Some(shared.path()));
    let prepared = prepared(&workspace, &manifest);
    let mut device = runner(&workspace, &prepared);
    let loaded = begun.elapsed();
    let found = device.generate(&prompt, 8, &[], &settings, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(found, built);
    assert_eq!(workspace.report.ran_count(), 0, "nothing is built where everything is shared");
    say(&format!("loaded from the shared cache in {:.0} ms", loaded.as_secs_f64() * 1e3));
}

/// The path of the sanitizer, if a toolkit is installed; else a line that says so.
pub fn sanitizer(test: &str) -> Option<&'static str> {
    let installed = ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"];
    let works =
        |program: &&str| Command::new(program).arg("--version").output().is_ok_and(|said| said.status.success());
    let found = installed.into_iter().find(works);
    if found.is_none() {
        say(&format!("SKIPPED (no compute-sanitizer): {test}: it comes with the CUDA toolkit"));
    }
    found
}

/// memcheck of the compute sanitizer, if a toolkit is installed, with every copy mechanism.
#[test]
fn the_compute_sanitizer_finds_nothing() {
    let Some(gpu) = Gpu::here("the_compute_sanitizer_finds_nothing") else { return };
    let Some(sanitizer) = sanitizer("the_compute_sanitizer_finds_nothing") else { return };
    for copy in gpu.copies() {
        let place = Place::new();
        // Few steps in a launch: the sanitizer makes each many times as long, but the deadline stays the same.
        place.manifest(&gpu.record, copy, "bf16", "context_max = 64\nsteps_per_launch = 4");
        for sampling in [&[][..], &["--temperature", "1", "--top-k", "20", "--top-p", "0.9"]] {
            let mut command = Command::new(sanitizer);
            // Failing API calls are not reported, because monobloc asks for the sizes of parameters until a call fails.
            command.args(["--report-api-errors", "no", "--tool", "memcheck", "--error-exitcode", "86"]);
            command.arg(env!("CARGO_BIN_EXE_monobloc")).args(["generate", "m.toml", "--ids", "0,467,468"]);
            command.args(["--max-tokens", "12", "--ignore-eos"]).args(sampling);
            let output = command.current_dir(place.path("")).env("HOME", place.path("")).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{copy}: {text}");
            let verdict =
                text.lines().find(|line| line.contains("ERROR SUMMARY")).unwrap_or_else(|| panic!("{copy}: {text}"));
            say(&format!("{copy}, memcheck: {verdict}"));
        }
    }
}
