//! Owns the self-test of a device: it tries each promise of compiler and driver that a persistent kernel relies on.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::arch::{Arch, Portability};
use super::cubin::{self, CubinError};
use super::driver::{Device, DeviceIdentity, DriverError};
use super::memory::DeviceBuffer;
use super::module::Module;
use super::nvml::Clocks;
use super::nvrtc::{Nvrtc, NvrtcError};
use super::stream::{Argument, LaunchShape, Stream, Wait};
use crate::codegen::KernelSource;
use crate::error::Fault;

/// Result of the self-test. It exists only if every promise held.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SelfTest {
    pub device: DeviceIdentity,
    /// `13.0.88`.
    pub nvrtc: String,
    /// Architecture compiled for.
    pub arch: String,
    /// Blocks of the cooperative launch: one per SM, each with all the shared memory a block can have.
    pub grid: u32,
    pub smem_dynamic_bytes: u32,
    /// Device time of one cooperative launch of an empty kernel, one block per SM; median and fastest of `EMPTY_COUNT`.
    pub empty_launch_us_p50: f64,
    pub empty_launch_us_min: f64,
    /// From the launch until the host read a word that the running kernel wrote.
    pub kernel_to_host_us: f64,
    /// From the host's abort word until the kernel had left.
    pub abort_us: f64,
    /// Blocks per cluster that were launched; `None` where the device has no clusters.
    pub cluster: Option<u32>,
    /// Pinned, double-buffered upload, as weights take it.
    pub upload_bytes_per_s: f64,
    /// Clocks right after the launches; `None` without NVML.
    pub clocks: Option<Clocks>,
}

#[derive(Debug, thiserror::Error)]
pub enum SelfTestError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
    #[error(transparent)]
    Cubin(#[from] CubinError),
    #[error("self-test `{test}`: expected {expected}, found {found} at index {index}")]
    Wrong { test: &'static str, index: usize, expected: u64, found: u64 },
    #[error("self-test `{test}`: the kernel did not {what} within {timeout:?}")]
    Late { test: &'static str, what: &'static str, timeout: Duration },
}

impl From<SelfTestError> for Fault {
    fn from(error: SelfTestError) -> Fault {
        match error {
            SelfTestError::Driver(error) => error.into(),
            SelfTestError::Nvrtc(error) => error.into(),
            SelfTestError::Cubin(error) => error.into(),
            error @ (SelfTestError::Wrong { .. } | SelfTestError::Late { .. }) => Fault::environment(error.to_string())
                .with_remedy("the device or its driver does not do what kernels rely on: try another driver"),
        }
    }
}

/// Timed launches of the empty kernel; the same number of warm-up launches comes first.
const EMPTY_COUNT: usize = 50;
/// The kernels leave by themselves after this, whatever the host does.
const DEVICE_DEADLINE: Duration = Duration::from_secs(2);
/// The host waits longer than the device, so that a kernel which keeps its deadline is never called late.
const HOST_TIMEOUT: Duration = Duration::from_secs(5);
/// Deadline of the kernel that is not aborted, and the length of the first wait for it.
const SHORT_DEADLINE: Duration = Duration::from_millis(100);
const SHORT_TIMEOUT: Duration = Duration::from_millis(10);
/// Uploaded in pieces: more than all lanes hold at once, so that halves are used again, and a part of one.
const UPLOAD_BYTES: usize = (24 << 20) + 12_345;
const PIECE_BYTES: usize = 256 << 10;
const BLOCK: u32 = 128;

/// Compiles trivial kernels for `device` and tries every promise; takes about a second.
pub fn self_test(device: &Device, nvrtc: &Nvrtc) -> Result<SelfTest, SelfTestError> {
    let identity = device.identity();
    let (major, minor) = identity.compute_capability;
    let arch = Arch { major, minor, portability: Portability::Baseline };
    let source = KernelSource {
        name: "self_test.cu".to_owned(),
        text: include_str!("self_test.cu").to_owned(),
        headers: vec![],
        arch: arch.to_string(),
    };
    let compiled = nvrtc.compile(&source)?;
    cubin::read(&compiled.cubin, &compiled.log)?;
    let module = device.load(&compiled.cubin)?;
    let stream = device.stream()?;

    let upload_bytes_per_s = test_upload(device, &stream)?;
    let smem_dynamic_bytes = test_grid(device, &module, &stream)?;
    let (empty_launch_us_min, empty_launch_us_p50) = time_empty(device, &module, &stream)?;
    let clocks = device.clocks();
    let (kernel_to_host_us, abort_us) = test_mapped(device, &module, &stream)?;
    test_deadline(device, &module, &stream)?;
    let cluster = if identity.launches_clusters { Some(test_cluster(device, &module, &stream)?) } else { None };
    Ok(SelfTest {
        device: identity.clone(),
        nvrtc: nvrtc.version().to_string(),
        arch: arch.to_string(),
        grid: identity.sm_count,
        smem_dynamic_bytes,
        empty_launch_us_p50,
        empty_launch_us_min,
        kernel_to_host_us,
        abort_us,
        cluster,
        upload_bytes_per_s,
        clocks,
    })
}

/// Bytes that pass through lanes arrive unchanged; returns bytes per second.
fn test_upload(device: &Device, stream: &Stream) -> Result<f64, SelfTestError> {
    let sent: Vec<u8> = (0..UPLOAD_BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut buffer = device.alloc(sent.len() as u64 + 1)?;
    buffer.poison(stream)?;
    stream.synchronize()?;
    let mut lanes = device.lanes(PIECE_BYTES)?;
    let start = Instant::now();
    // The last piece is shorter, and the destination is not aligned.
    lanes.upload(stream, &mut buffer, 1, &sent)?;
    let seconds = start.elapsed().as_secs_f64();
    let poison = [super::memory::POISON];
    let expected: Vec<u8> = poison.iter().chain(&sent).copied().collect();
    same("upload", &expected, &buffer.download(stream, 0, expected.len())?)?;
    Ok(sent.len() as f64 / seconds)
}

/// A barrier over one block per SM, each with all its shared memory: every block is resident. Returns those bytes.
fn test_grid(device: &Device, module: &Module, stream: &Stream) -> Result<u32, SelfTestError> {
    let grid = device.identity().sm_count;
    let smem_dynamic_bytes = device.identity().smem_bytes_per_block_max;
    let function = device.function(module, "self_test_grid", smem_dynamic_bytes)?;
    let shape = LaunchShape { grid, block: BLOCK, smem_dynamic_bytes, cluster: 1, kept: None };
    function.fits(&shape)?;

    let values: Vec<u32> = (0..grid).map(|block| block * block + 7).collect();
    let mut input = device.alloc(u64::from(grid) * 4)?;
    input.upload(stream, 0, &values)?;
    let mut scratch = device.alloc((u64::from(grid) + 1) * 4)?;
    scratch.zero(stream)?;
    let mut output = poisoned(device, stream, grid)?;
    let arguments = [
        Argument::Buffer(&input),
        Argument::Buffer(&scratch),
        Argument::Buffer(&output),
        Argument::U32(smem_dynamic_bytes / 4),
        Argument::U64(DEVICE_DEADLINE.as_nanos() as u64),
    ];
    stream.launch_cooperative(&function, &shape, &arguments)?;
    finish(stream, "grid barrier")?;
    let after = |block: u32| values[((block + 1) % grid) as usize];
    let expected: Vec<u32> = (0..grid).map(|block| after(block) * 3 + block).collect();
    same("grid barrier", &expected, &output.download(stream, 0, expected.len())?)?;

    // What a kernel did not write must be visible as such.
    output.poison(stream)?;
    same("poison", &vec![u32::MAX; grid as usize], &output.download(stream, 0, grid as usize)?)?;
    Ok(smem_dynamic_bytes)
}

/// Fastest and median device time of a cooperative launch that does nothing, in microseconds.
fn time_empty(device: &Device, module: &Module, stream: &Stream) -> Result<(f64, f64), SelfTestError> {
    let function = device.function(module, "self_test_empty", 0)?;
    let shape =
        LaunchShape { grid: device.identity().sm_count, block: BLOCK, smem_dynamic_bytes: 0, cluster: 1, kept: None };
    function.fits(&shape)?;
    let (start, end) = (device.event()?, device.event()?);
    let mut times_us = vec![];
    for launch in 0..2 * EMPTY_COUNT {
        start.record(stream)?;
        stream.launch_cooperative(&function, &shape, &[])?;
        end.record(stream)?;
        finish(stream, "empty launch")?;
        if launch >= EMPTY_COUNT {
            times_us.push(start.elapsed_us(&end)?);
        }
    }
    times_us.sort_by(f64::total_cmp);
    Ok((times_us[0], times_us[EMPTY_COUNT / 2]))
}

/// Words cross between a running kernel and the host, both ways. Returns the two delays in microseconds.
fn test_mapped(device: &Device, module: &Module, stream: &Stream) -> Result<(f64, f64), SelfTestError> {
    const TEST: &str = "mapped memory";
    let function = device.function(module, "self_test_mapped", 0)?;
    let words = device.alloc_mapped(3)?;
    let arguments = [Argument::Mapped(&words), Argument::U64(DEVICE_DEADLINE.as_nanos() as u64)];
    let launched = Instant::now();
    stream.launch_cooperative(&function, &SINGLE, &arguments)?;
    while words.load(0)? == 0 {
        if launched.elapsed() > HOST_TIMEOUT {
            return Err(SelfTestError::Late { test: TEST, what: "show a word to the host", timeout: HOST_TIMEOUT });
        }
    }
    let kernel_to_host_us = launched.elapsed().as_secs_f64() * 1e6;
    // The host saw the word while the kernel ran: its only reason to leave is the abort word that follows.
    let aborted = Instant::now();
    words.store(1, 1)?;
    finish(stream, TEST)?;
    let abort_us = aborted.elapsed().as_secs_f64() * 1e6;
    same(TEST, &[1], &[words.load(2)?])?;
    Ok((kernel_to_host_us, abort_us))
}

/// A kernel that is not aborted ends at its own deadline, and the host's wait ends before it.
fn test_deadline(device: &Device, module: &Module, stream: &Stream) -> Result<(), SelfTestError> {
    const TEST: &str = "deadline";
    let function = device.function(module, "self_test_mapped", 0)?;
    let words = device.alloc_mapped(3)?;
    let arguments = [Argument::Mapped(&words), Argument::U64(SHORT_DEADLINE.as_nanos() as u64)];
    stream.launch_cooperative(&function, &SINGLE, &arguments)?;
    let is_running = stream.wait_timeout(SHORT_TIMEOUT)? == Wait::TimedOut;
    same(TEST, &[u8::from(true)], &[u8::from(is_running)])?;
    finish(stream, TEST)?;
    same(TEST, &[2], &[words.load(2)?])
}

/// Pairs of blocks are launched as clusters, cooperatively. Returns the blocks per cluster.
fn test_cluster(device: &Device, module: &Module, stream: &Stream) -> Result<u32, SelfTestError> {
    const CLUSTER: u32 = 2;
    let function = device.function(module, "self_test_cluster", 0)?;
    let mut shape = LaunchShape { grid: CLUSTER, block: BLOCK, smem_dynamic_bytes: 0, cluster: CLUSTER, kept: None };
    let resident = function.resident_blocks(&shape)?;
    shape.grid = resident.min(device.identity().sm_count) / CLUSTER * CLUSTER;
    function.fits(&shape)?;
    let output = poisoned(device, stream, shape.grid)?;
    stream.launch_cooperative(&function, &shape, &[Argument::Buffer(&output)])?;
    finish(stream, "cluster")?;
    let expected: Vec<u32> = (0..shape.grid).map(|block| block % CLUSTER * 100 + CLUSTER).collect();
    same("cluster", &expected, &output.download(stream, 0, expected.len())?)?;
    Ok(CLUSTER)
}

/// One warp is enough to talk to the host.
const SINGLE: LaunchShape = LaunchShape { grid: 1, block: 1, smem_dynamic_bytes: 0, cluster: 1, kept: None };

fn poisoned(device: &Device, stream: &Stream, words: u32) -> Result<DeviceBuffer, DriverError> {
    let mut buffer = device.alloc(u64::from(words) * 4)?;
    buffer.poison(stream)?;
    Ok(buffer)
}

fn finish(stream: &Stream, test: &'static str) -> Result<(), SelfTestError> {
    match stream.wait_timeout(HOST_TIMEOUT)? {
        Wait::Done => Ok(()),
        Wait::TimedOut => Err(SelfTestError::Late { test, what: "end", timeout: HOST_TIMEOUT }),
    }
}

fn same<T: Copy + PartialEq + Into<u64>>(test: &'static str, expected: &[T], found: &[T]) -> Result<(), SelfTestError> {
    match expected.iter().zip(found).position(|(expected, found)| expected != found) {
        None => Ok(()),
        Some(index) => {
            let (expected, found) = (expected[index].into(), found[index].into());
            Err(SelfTestError::Wrong { test, index, expected, found })
        }
    }
}
