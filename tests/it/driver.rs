//! The driver side, on three machines: one without a driver, one with a fake driver, and a real device.
//!
//! The fake (`fake_cuda.c`) is built with the C compiler and loaded by a child process that runs the same test, because
//! a process loads one driver. Tests of a real device say so when there is none; with `MONOBLOC_REQUIRE_GPU=1` they fail.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use monobloc::codegen::KernelSource;
use monobloc::cuda::driver::{Device, DriverError};
use monobloc::cuda::self_test::self_test;
use monobloc::cuda::stream::{Argument, LaunchShape, Wait};
use monobloc::error::{Fault, Tier};

use super::nvrtc::nvrtc;
use super::skipped;

const CHILD: &str = "MONOBLOC_TEST_CHILD";

/// Enough of a cubin for the fake, which looks kernels up by name.
const IMAGE: &[u8] = b"\x7fELF";
const ONE: LaunchShape = LaunchShape { grid: 1, block: 32, smem_dynamic_bytes: 0, cluster: 1 };

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// A folder with the fake as `libcuda.so` and `libnvidia-ml.so.1`; `None` without a C compiler.
fn fake_driver(flag: &'static str) -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libcuda.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/fake_cuda.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-pthread", flag, "-o"]).arg(&library).arg(source);
    let output = compiler.output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::copy(&library, folder.path().join("libnvidia-ml.so.1")).unwrap();
    Some(folder)
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
        skipped(test, "C compiler", "`cc` builds the fake driver");
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
    let Some(text) = with_fake_driver(NAME, "") else { return };
    assert!(text.contains("released with 0 blocks, 0 streams, 0 events, 0 modules left"), "{text}");
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
    assert_eq!(device.staging(16).unwrap().upload(&stream, &mut buffer, 50, &[0; 51]), Err(outside(50, 51)));
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
