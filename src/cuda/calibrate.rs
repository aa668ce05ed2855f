//! Owns the measured figures of a target record. Separate kernels, compiled on demand, take them on a device.

use std::time::Duration;

use super::cubin::{self, CubinError};
use super::driver::{Device, DriverError};
use super::memory::DeviceBuffer;
use super::module::{Function, Module};
use super::nvrtc::{Nvrtc, NvrtcError};
use super::stream::{Argument, LaunchShape, Stream, Wait};
use crate::codegen::KernelSource;
use crate::error::Fault;
use crate::target::{CopyMechanism, Measured, Target};

/// Bytes of a slot, as the default candidate has them.
const SLOT_BYTES: u32 = 16 << 10;
const SLOTS_MAX: u32 = 12;
/// Bytes that all SMs read together: many times any L2 cache.
const READ_BYTES: u64 = 4 << 30;
const READ_COUNT: usize = 9;
/// Packets of an exchange, and the bytes in flight on each SM, as [`Measured`] defines them.
const PACKETS: u32 = 1024;
const LOADED_BYTES: u32 = 32 << 10;
/// Exchanges of one launch: enough to make the cost of the launch negligible.
const ROUNDS: u32 = 2000;
const HOP_COUNT: usize = 5;
const EMPTY_COUNT: usize = 50;
/// Chunks that a loaded exchange goes round on each SM: 512 MiB over 128 SMs, more than any L2 cache.
const WRAP: u32 = 256;
/// A kernel leaves by itself after this; the host waits longer.
const DEVICE_DEADLINE: Duration = Duration::from_secs(2);
const HOST_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
    #[error(transparent)]
    Cubin(#[from] CubinError),
    #[error("calibration of {what}: the kernel did not end within {timeout:?}")]
    Late { what: &'static str, timeout: Duration },
    #[error("calibration of {what}: an SM gave up waiting")]
    GaveUp { what: &'static str },
}

impl From<CalibrateError> for Fault {
    fn from(error: CalibrateError) -> Fault {
        match error {
            CalibrateError::Driver(error) => error.into(),
            CalibrateError::Nvrtc(error) => error.into(),
            CalibrateError::Cubin(error) => error.into(),
            error @ (CalibrateError::Late { .. } | CalibrateError::GaveUp { .. }) => {
                Fault::environment(error.to_string())
                    .with_remedy("try the device with `monobloc doctor --device`, and see what else uses it")
            }
        }
    }
}

/// The kernels for one copy mechanism and one number of ring slots.
pub fn source(copy: CopyMechanism, arch: &str, slots: u32) -> KernelSource {
    let number = match copy {
        CopyMechanism::Plain => 0,
        CopyMechanism::CpAsync => 1,
        CopyMechanism::Bulk => 2,
    };
    let head = format!("#define COPY {number}\n#define SLOTS {slots}\n#define SLOT_BYTES {SLOT_BYTES}\n");
    KernelSource {
        name: "calibrate.cu".to_string(),
        text: head + include_str!("calibrate.cu"),
        headers: vec![],
        arch: arch.to_string(),
    }
}

struct Bench<'a> {
    device: &'a Device,
    module: Module,
    stream: Stream,
    smem_bytes: u32,
    sms: u32,
}

/// Takes every figure of [`Measured`]; `device` is one that `target` describes.
///
/// # Errors
/// Faults of driver and compiler; a kernel that did not end.
pub fn measure(device: &Device, nvrtc: &Nvrtc, target: &Target) -> Result<Measured, CalibrateError> {
    let identity = device.identity();
    // A kilobyte is the system's, and another holds the barriers.
    let slots = (target.spec.smem_bytes_per_block_max.saturating_sub(2048) / SLOT_BYTES).clamp(2, SLOTS_MAX);
    let compiled = nvrtc.compile(&source(target.spec.copy, &target.spec.arch, slots))?;
    cubin::read(&compiled.cubin, &compiled.log)?;
    let module = device.load(&compiled.cubin)?;
    let stream = device.stream()?;
    let bench = Bench { device, module, stream, smem_bytes: slots * SLOT_BYTES, sms: identity.sm_count };
    let launch_us = bench.empty()?;
    let (read_bytes_per_s, sm_bandwidth_min_ratio) = bench.read(launch_us)?;
    let hop_idle_us = bench.hop("an idle exchange", 0)?;
    let hop_loaded_us = bench.hop("a loaded exchange", LOADED_BYTES / SLOT_BYTES)?;
    let driver = identity.driver_release.clone().unwrap_or_else(|| format!("CUDA {}", identity.driver_cuda));
    let provenance = format!("monobloc calibrate on {}, driver {driver}, NVRTC {}", identity.name, nvrtc.version());
    Ok(Measured {
        provenance: Some(provenance),
        read_bytes_per_s: Some(rounded(read_bytes_per_s)),
        hop_idle_us: Some(rounded(hop_idle_us)),
        hop_loaded_us: Some(rounded(hop_loaded_us)),
        sm_bandwidth_min_ratio: Some(rounded(sm_bandwidth_min_ratio)),
    })
}

/// Three digits: two runs on one device differ in the next.
fn rounded(figure: f64) -> f64 {
    format!("{figure:.2e}").parse().unwrap_or(figure)
}

impl Bench<'_> {
    fn function(
        &self,
        name: &str,
        block: u32,
        smem_dynamic_bytes: u32,
    ) -> Result<(Function, LaunchShape), DriverError> {
        let function = self.device.function(&self.module, name, smem_dynamic_bytes)?;
        let shape = LaunchShape { grid: self.sms, block, smem_dynamic_bytes, cluster: 1, kept: None };
        function.fits(&shape)?;
        Ok((function, shape))
    }

    /// Device time of each of `count` launches in microseconds, after one that is not counted.
    fn launches(
        &self,
        what: &'static str,
        (function, shape): &(Function, LaunchShape),
        arguments: &[Argument<'_>],
        count: usize,
        mut after: impl FnMut() -> Result<(), CalibrateError>,
    ) -> Result<Vec<f64>, CalibrateError> {
        let (begin, end) = (self.device.event()?, self.device.event()?);
        let mut times_us = vec![];
        for launch in 0..=count {
            begin.record(&self.stream)?;
            self.stream.launch_cooperative(function, shape, arguments)?;
            end.record(&self.stream)?;
            if self.stream.wait_timeout(HOST_TIMEOUT)? == Wait::TimedOut {
                return Err(CalibrateError::Late { what, timeout: HOST_TIMEOUT });
            }
            if launch > 0 {
                times_us.push(begin.elapsed_us(&end)?);
                after()?;
            }
        }
        times_us.sort_by(f64::total_cmp);
        Ok(times_us)
    }

    fn took_ns(&self, what: &'static str, took: &DeviceBuffer) -> Result<Vec<u64>, CalibrateError> {
        let took: Vec<u64> = took.download(&self.stream, 0, self.sms as usize)?;
        if took.contains(&0) { Err(CalibrateError::GaveUp { what }) } else { Ok(took) }
    }

    /// Median of an empty cooperative launch.
    fn empty(&self) -> Result<f64, CalibrateError> {
        let kernel = self.function("calibrate_empty", 256, 0)?;
        let times_us = self.launches("an empty launch", &kernel, &[], EMPTY_COUNT, || Ok(()))?;
        Ok(times_us[times_us.len() / 2])
    }

    /// Bytes per second of all SMs, and the slowest SM's share of the mean. `launch_us`, what an empty launch takes, is no
    /// reading and is left out.
    fn read(&self, launch_us: f64) -> Result<(f64, f64), CalibrateError> {
        const WHAT: &str = "the read bandwidth";
        let free = self.device.memory_free_bytes()?;
        let chunk_bytes = u64::from(self.sms) * u64::from(SLOT_BYTES);
        let chunks = (READ_BYTES.min(free / 2) / chunk_bytes).max(1) as u32;
        let bytes = u64::from(chunks) * chunk_bytes;
        let mut data = self.device.alloc(bytes)?;
        data.zero(&self.stream)?;
        let took = self.device.alloc(u64::from(self.sms) * 8)?;
        let kernel = self.function("calibrate_read", 256, self.smem_bytes)?;
        let arguments = [
            Argument::Buffer(&data),
            Argument::U32(chunks),
            Argument::U64(DEVICE_DEADLINE.as_nanos() as u64),
            Argument::Buffer(&took),
        ];
        let mut ratios = vec![];
        let times_us = self.launches(WHAT, &kernel, &arguments, READ_COUNT, || {
            let took = self.took_ns(WHAT, &took)?;
            // Equal bytes: the bandwidth of an SM is one over its time.
            let speeds: Vec<f64> = took.iter().map(|&ns| 1.0 / ns as f64).collect();
            let mean = speeds.iter().sum::<f64>() / speeds.len() as f64;
            ratios.push(speeds.iter().copied().fold(f64::INFINITY, f64::min) / mean);
            Ok(())
        })?;
        ratios.sort_by(f64::total_cmp);
        Ok((bytes as f64 / ((times_us[times_us.len() / 2] - launch_us) * 1e-6), ratios[ratios.len() / 2]))
    }

    /// Microseconds of one exchange, as the mean over SMs of a launch, median of launches.
    fn hop(&self, what: &'static str, flight: u32) -> Result<f64, CalibrateError> {
        let mut buffers = self.device.alloc(u64::from(PACKETS) * 2 * 8)?;
        let mut data = self.device.alloc(u64::from(self.sms) * u64::from(WRAP) * u64::from(SLOT_BYTES))?;
        data.zero(&self.stream)?;
        let took = self.device.alloc(u64::from(self.sms) * 8)?;
        let kernel = self.function("calibrate_hop", 512, self.smem_bytes)?;
        let mut hops_us = vec![];
        for _ in 0..HOP_COUNT {
            // Packets of an earlier launch would be taken for those of this one.
            buffers.zero(&self.stream)?;
            let arguments = [
                Argument::Buffer(&buffers),
                Argument::U32(PACKETS),
                Argument::U32(ROUNDS),
                Argument::Buffer(&data),
                Argument::U32(WRAP),
                Argument::U32(flight),
                Argument::U64(DEVICE_DEADLINE.as_nanos() as u64),
                Argument::Buffer(&took),
            ];
            self.launches(what, &kernel, &arguments, 0, || Ok(()))?;
            let took = self.took_ns(what, &took)?;
            let mean_ns = took.iter().sum::<u64>() as f64 / took.len() as f64;
            hops_us.push(mean_ns / 1e3 / f64::from(ROUNDS));
        }
        hops_us.sort_by(f64::total_cmp);
        Ok(hops_us[hops_us.len() / 2])
    }
}
