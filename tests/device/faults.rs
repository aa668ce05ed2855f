//! Tests faults that no proof can exclude. They are edited into the kernel's source before it is compiled. Each run ends within
//! the deadline, reports what waited for what, and leaves a device that works.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use monobloc::codegen::KernelSource;
use monobloc::codegen::abi::Queues;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::cuda::session::{Session, SessionError, StuckOn};
use monobloc::error::{Fault, Tier};
use monobloc::pipeline::Prepared;
use monobloc::target::Target;

use crate::support::Goldens;
use crate::{Gpu, Place, packed, prepared, quick_nvrtc, say};

pub const STEPS: u32 = 64;
/// A launch of [`STEPS`] gives up after 1.64 s; the host waits a second longer, and then gives up, too.
const ENDED_WITHIN: Duration = Duration::from_secs(6);

/// One edit of a header: replaces `from`, which occurs once, by `to`.
pub struct Edit {
    pub header: &'static str,
    pub from: &'static str,
    pub to: &'static str,
}

/// SM 3 publishes nothing in step 9.
const DROPPED_PUBLISH: &[Edit] = &[Edit {
    header: "runtime/sync.cuh",
    from: "  u64 word = (u64(tag) << 32) | payload;",
    to: "  if (blockIdx.x == 3 && tag == 9) return;\n  u64 word = (u64(tag) << 32) | payload;",
}];

/// SM 3 sleeps before its third task of step 9, for 50 ms or for 2.5 s.
const fn delay(to: &'static str) -> Edit {
    Edit { header: "runtime/kernel.cuh", from: "      D::run(c, now, queue.entry(c, i));", to }
}
const SHORT_DELAY: &[Edit] = &[delay(
    "      if (c.sm() == 3 && c.tag == 9 && i == 2)
        for (u64 until = global_ns() + 50000000ull; global_ns() < until;) __nanosleep(1000);
      D::run(c, now, queue.entry(c, i));",
)];
const LONG_DELAY: &[Edit] = &[delay(
    "      if (c.sm() == 3 && c.tag == 9 && i == 2)
        for (u64 until = global_ns() + 2500000000ull; global_ns() < until;) __nanosleep(1000);
      D::run(c, now, queue.entry(c, i));",
)];

/// Corrupts the queue of SM 2 in shared memory.
const fn corrupt(to: &'static str) -> Edit {
    Edit { header: "runtime/kernel.cuh", from: "to[i] = from[i];\n  c.barrier();", to }
}
/// The fifth entry names no op of the dispatch.
const UNKNOWN_OP: &[Edit] = &[corrupt(
    "to[i] = from[i];
  c.barrier();
  if (c.sm() == 2 && c.tid() == 0) c.queue()[4].op = 0x7fffffff;
  c.barrier();",
)];
/// It polls memory outside of every allocation.
const WILD_ADDRESS: &[Edit] = &[corrupt(
    "to[i] = from[i];
  c.barrier();
  if (c.sm() == 2 && c.tid() == 0)
    for (u32 k = 2; k < count; k++) c.queue()[k].x = 0xf0000000u;
  c.barrier();",
)];

pub fn edited(mut source: KernelSource, edits: &[Edit]) -> KernelSource {
    for Edit { header, from, to } in edits {
        let found = source.headers.iter_mut().find(|(name, _)| name == header);
        let (_, text) = found.unwrap_or_else(|| panic!("no header `{header}`"));
        assert_eq!(text.matches(from).count(), 1, "`{header}` has changed: where is `{from}`?");
        *text = text.replace(from, to);
    }
    source
}

pub fn session(gpu: &Gpu, prepared: &Prepared, edits: &[Edit]) -> Session {
    let source = edited(emit(&prepared.validated, &prepared.target, Trace::Off), edits);
    let cubin = gpu.nvrtc.compile(&source).unwrap_or_else(|error| panic!("{error}")).cubin;
    let pack = packed(prepared);
    Session::load(&gpu.device, &Queues::of(&prepared.validated), &cubin, Trace::Off, STEPS, |stream, to| {
        Ok(to.upload(stream, 0, (*pack).as_ref())?)
    })
    .unwrap_or_else(|error| panic!("{error}"))
}

/// The tokens that follow the first golden prompt, decided by one launch.
fn tokens(session: &mut Session) -> Result<Vec<u32>, SessionError> {
    let prompt = Goldens::open("tinystories-llama").ids("prompt_ids.0");
    session.start(&prompt, &[])?;
    session.run(0, STEPS, false)?;
    (prompt.len() as u32..=STEPS).map(|position| session.token(position)).collect()
}

/// Asserts that a launch still gives the tokens of the goldens.
fn is_well(gpu: &Gpu, prepared: &Prepared, after: &str) {
    let found = tokens(&mut session(gpu, prepared, &[])).unwrap_or_else(|error| panic!("after {after}: {error}"));
    assert_eq!(found, Goldens::open("tinystories-llama").ids("greedy_ids")[..found.len()], "after {after}");
}

pub fn prepare_small(record: &Target, place: &Place) -> Prepared {
    let manifest = place.manifest(record, record.spec.copy, "fp32", "context_max = 128\nsteps_per_launch = 64");
    prepared(&place.workspace(None), &manifest)
}

/// Needs NVRTC but no GPU: each fault is still a kernel that compiles.
#[test]
fn every_fault_is_a_kernel_that_compiles() {
    let place = Place::new();
    let record = Target::builtin("h200").unwrap();
    let prepared = prepare_small(&record, &place);
    let nvrtc = quick_nvrtc("every_fault_is_a_kernel_that_compiles");
    for edits in [DROPPED_PUBLISH, SHORT_DELAY, LONG_DELAY, UNKNOWN_OP, WILD_ADDRESS] {
        let sound = emit(&prepared.validated, &prepared.target, Trace::Off);
        let faulty = edited(sound.clone(), edits);
        assert_ne!(faulty.headers, sound.headers);
        if let Some(nvrtc) = &nvrtc {
            nvrtc.compile(&faulty).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

#[test]
fn a_wait_without_an_end_is_reported_and_the_device_still_works() {
    let Some(gpu) = Gpu::here("a_wait_without_an_end_is_reported_and_the_device_still_works") else { return };
    let place = Place::new();
    let prepared = prepare_small(&gpu.record, &place);
    is_well(&gpu, &prepared, "nothing");
    for (what, edits, sm) in
        [("a dropped publish", DROPPED_PUBLISH, 3), ("a long delay", LONG_DELAY, 3), ("an unknown op", UNKNOWN_OP, 2)]
    {
        let mut faulty = session(&gpu, &prepared, edits);
        let begun = Instant::now();
        let error = tokens(&mut faulty).expect_err(what);
        assert!(begun.elapsed() < ENDED_WITHIN, "{what} took {:?}", begun.elapsed());
        let SessionError::Hung { stuck, .. } = &error else { panic!("{what}: {error}") };
        let waiting: Vec<_> = stuck.iter().filter(|stuck| stuck.kind == StuckOn::Packet && stuck.sm.0 != sm).collect();
        assert!(!waiting.is_empty(), "{what}: {error}");
        assert!(waiting.iter().all(|stuck| stuck.task.is_some() && stuck.event.is_some()), "{what}: {error}");
        say(&format!("{what}, after {:.2} s: {error}", begun.elapsed().as_secs_f64()));
        // In the same process, and in the same session.
        is_well(&gpu, &prepared, what);
    }
}

#[test]
fn a_delay_within_the_deadline_changes_no_token() {
    let Some(gpu) = Gpu::here("a_delay_within_the_deadline_changes_no_token") else { return };
    let place = Place::new();
    let prepared = prepare_small(&gpu.record, &place);
    let found = tokens(&mut session(&gpu, &prepared, SHORT_DELAY)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(found, Goldens::open("tinystories-llama").ids("greedy_ids")[..found.len()]);
}

/// A wild address costs the process its context, so it happens in a process of its own, as trials do.
#[test]
fn a_wild_address_costs_one_process() {
    const NAME: &str = "a_wild_address_costs_one_process";
    const CHILD: &str = "MONOBLOC_TEST_CHILD";
    let Some(gpu) = Gpu::here(NAME) else { return };
    let place = Place::new();
    let prepared = prepare_small(&gpu.record, &place);
    if std::env::var_os(CHILD).is_some() {
        let error = tokens(&mut session(&gpu, &prepared, WILD_ADDRESS)).expect_err("a wild address");
        let fault = Fault::from(error);
        assert_ne!(fault.tier, Tier::Input);
        println!("found: {fault}");
        // The context is lost, so its resources cannot be freed in order.
        std::process::exit(7);
    }
    let begun = Instant::now();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("faults::{NAME}"), "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{text}");
    let found = text.lines().find_map(|line| line.split_once("found: ")).unwrap_or_else(|| panic!("{text}")).1;
    say(&format!("a wild address, after {:.2} s: {found}", begun.elapsed().as_secs_f64()));
    is_well(&gpu, &prepared, "a wild address in another process");
}

#[test]
fn a_process_killed_mid_launch_leaves_the_device_usable() {
    let Some(gpu) = Gpu::here("a_process_killed_mid_launch_leaves_the_device_usable") else { return };
    let place = Place::new();
    place.manifest(&gpu.record, gpu.record.spec.copy, "fp32", "context_max = 2048\nsteps_per_launch = 2048");
    let mut child = Command::new(env!("CARGO_BIN_EXE_monobloc"))
        .args(["generate", "m.toml", "--ids", "0,467,468", "--max-tokens", "2000", "--ignore-eos"])
        .current_dir(place.path(""))
        .env("HOME", place.path(""))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Its first token is out while the launch that decides 2000 of them runs.
    let mut first = [0u8; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let place = Place::new();
    is_well(&gpu, &prepare_small(&gpu.record, &place), "a process that was killed");
}
