//! Owns `Device`: opening one, its properties, and whether a target record describes it.

use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute, CUlimit, CUuuid};
use serde::Serialize;

use super::api::{Api, ERROR_OUT_OF_MEMORY, Status, call};
use super::arch::{Arch, ArchError};
use super::nvml::{self, Clocks};
use crate::error::{Fault, Tier};
use crate::target::{Target, TargetKind};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    #[error("no NVIDIA driver: `libcuda.so.1` could not be loaded")]
    NoDriverLib,
    #[error("the NVIDIA driver is too old: it has no `{symbol}`")]
    TooOld { symbol: &'static str },
    #[error("`libcuda.so` is the stub of a toolkit, not a driver")]
    StubLibrary,
    #[error("the NVIDIA driver sees no device")]
    NoDevice,
    #[error("expected a device ordinal below {count}, found {ordinal}")]
    NoSuchDevice { ordinal: u32, count: u32 },
    #[error("`{call}` failed: {name} (code {code}), {meaning}")]
    Call { call: &'static str, code: i32, name: String, meaning: String },
    #[error("device memory is exhausted: expected {asked_bytes} bytes, found {free_bytes} free")]
    OutOfMemory { asked_bytes: u64, free_bytes: u64 },
    #[error("expected a range inside {buffer_bytes} bytes, found {range_bytes} bytes at {offset_bytes}")]
    OutOfBounds { offset_bytes: u64, range_bytes: u64, buffer_bytes: u64 },
    #[error("device {from} cannot exchange packets with device {to}: {lacks}")]
    NoLink { from: u32, to: u32, lacks: &'static str },
    #[error("the module has no kernel `{kernel}`")]
    NoSuchKernel { kernel: String },
    #[error("kernel `{kernel}` expects parameters of {expected:?} bytes, found {found:?}")]
    Arguments { kernel: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("kernel `{kernel}` can have {max_bytes} bytes of dynamic shared memory, found {asked_bytes}")]
    SmemTooLarge { kernel: String, asked_bytes: u32, max_bytes: u32 },
    #[error("kernel `{kernel}` can have {max} threads per block, found {asked}")]
    BlockTooLarge { kernel: String, asked: u32, max: u32 },
    #[error("kernel `{kernel}`: expected a grid that is a multiple of the cluster {cluster}, found {grid}")]
    GridUneven { kernel: String, grid: u32, cluster: u32 },
    #[error("kernel `{kernel}`: at most {resident} blocks are resident at once, found a grid of {grid}")]
    GridTooLarge { kernel: String, grid: u32, resident: u32 },
}

impl DriverError {
    /// Whether a kernel crashed: the context is lost, and only a new process can use the device again.
    ///
    /// Codes from `cuda.h` that are documented to leave "the process in an inconsistent state".
    pub fn is_crash(&self) -> bool {
        matches!(self, DriverError::Call { code: 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721, .. })
    }

    fn tier(&self) -> Tier {
        match self {
            DriverError::NoDriverLib
            | DriverError::TooOld { .. }
            | DriverError::StubLibrary
            | DriverError::NoDevice
            | DriverError::NoLink { .. }
            | DriverError::OutOfMemory { .. } => Tier::Environment,
            DriverError::NoSuchDevice { .. } => Tier::Input,
            // A refused value, image, handle or launch size is one that we made.
            DriverError::Call { code: 1 | 200 | 201 | 400 | 701 | 720, .. } => Tier::Internal,
            DriverError::Call { .. } if !self.is_crash() => Tier::Environment,
            DriverError::Call { .. }
            | DriverError::OutOfBounds { .. }
            | DriverError::NoSuchKernel { .. }
            | DriverError::Arguments { .. }
            | DriverError::SmemTooLarge { .. }
            | DriverError::BlockTooLarge { .. }
            | DriverError::GridUneven { .. }
            | DriverError::GridTooLarge { .. } => Tier::Internal,
        }
    }

    fn remedy(&self) -> Option<&'static str> {
        match self {
            DriverError::NoDriverLib => {
                Some("check and measure need a GPU; every other stage runs here, and its results are kept in the cache")
            }
            DriverError::TooOld { .. } => Some("install driver 550 or later"),
            DriverError::StubLibrary => Some("remove the `stubs` folder of the toolkit from `LD_LIBRARY_PATH`"),
            DriverError::NoDevice => Some("compare `nvidia-smi` and `CUDA_VISIBLE_DEVICES`"),
            DriverError::NoLink { .. } => {
                Some("take devices that NVLink connects (`nvidia-smi topo -m`), or leave out the target's `devices`")
            }
            DriverError::OutOfMemory { .. } => Some("see what else uses the device with `nvidia-smi`"),
            _ => None,
        }
    }
}

impl From<DriverError> for Fault {
    fn from(error: DriverError) -> Fault {
        let fault = Fault { tier: error.tier(), message: error.to_string(), remedy: None };
        error.remedy().into_iter().fold(fault, Fault::with_remedy)
    }
}

/// Bytes of L2 to set aside for lines that persist where launches keep a range of `range_bytes`: an eighth more than the range, but at least 2/5
/// and at most 7/15 of L2. Weights stream through the rest.
///
/// If a range is a little too large, whether its lines stay depends on where the driver places memory: a sampled step of 16 rows of Llama-3.2-1B took
/// 682 or 692 us on one H200 (docs/perf-log.md, entry 44). A range beyond half of L2 does not stay in any case. Then, and for small ranges, no larger
/// part is faster than 2/5; with 5/8, steps take 9 % longer (entry 39).
fn set_aside_for(range_bytes: u64, l2_bytes: u64) -> u64 {
    let (least, most) = (l2_bytes * 2 / 5, l2_bytes * 7 / 15);
    if range_bytes > l2_bytes / 2 { least } else { (range_bytes + range_bytes / 8).clamp(least, most) }
}

/// The context of a device, shared by everything that lives in it.
pub(super) struct Context {
    pub(super) api: &'static Api,
    device: CUdevice,
    pub(super) handle: CUcontext,
    l2_bytes: u64,
    /// Bytes of L2 that [`Context::keep`] has set aside so far.
    set_aside_bytes: Mutex<u64>,
    /// Streams whose last wait timed out. While there is one, nothing is freed: freeing waits for the device.
    pub(super) streams_stuck: AtomicU32,
    /// Contexts whose kernels access memory of this one.
    reached_by: Mutex<Vec<Weak<Context>>>,
}

// SAFETY: the driver's calls are thread-safe, and each one binds the context to its thread first.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Bytes of a range of `range_bytes` that launches may ask L2 to keep; 0: none, as where a device is divided.
    ///
    /// Sets aside as much of L2 as [`set_aside_for`] says, and never less than a call before did. Decode kernels, which keep nothing, lose
    /// up to 0.7 % by it (docs/perf-log.md, entry 42), so it waits until something is to be kept. A refusal is no error: what is kept is only faster.
    pub(super) fn keep(&self, range_bytes: u64) -> Result<u64, DriverError> {
        use CUdevice_attribute::*;
        let api = self.bind()?;
        let attribute = |which| attribute(api, self.device, which).map(u64::from);
        let bytes =
            set_aside_for(range_bytes, self.l2_bytes).min(attribute(CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE)?);
        let range_max = attribute(CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE)?;
        let mut set_aside = self.set_aside_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > *set_aside {
            // SAFETY: a context is bound.
            let set = unsafe { call!(api, cuCtxSetLimit(CUlimit::CU_LIMIT_PERSISTING_L2_CACHE_SIZE, bytes as usize)) };
            if set.is_ok() {
                *set_aside = bytes;
            }
        }
        Ok(if *set_aside > 0 { range_bytes.min(range_max) } else { 0 })
    }

    /// Makes this the context of the calling thread. Every call below goes through it.
    pub(super) fn bind(&self) -> Result<&'static Api, DriverError> {
        // SAFETY: the context was retained in `open` and is released only in `drop`.
        unsafe { call!(self.api, cuCtxSetCurrent(self.handle)) }?;
        Ok(self.api)
    }

    /// Binds for a destructor, after the device finished and those that access its memory; `None` when that would fail or wait without end.
    pub(super) fn bind_to_free(&self) -> Option<&'static Api> {
        let reached_by: Vec<Arc<Context>> = self.reached_by().iter().filter_map(Weak::upgrade).collect();
        let contexts = || reached_by.iter().map(Arc::as_ref).chain([self]);
        if contexts().any(|context| context.streams_stuck.load(Ordering::Acquire) > 0) {
            return None;
        }
        for context in contexts() {
            let api = context.bind().ok()?;
            // SAFETY: a context is bound. Memory may not be freed while a kernel that knows its address runs.
            unsafe { call!(api, cuCtxSynchronize()) }.ok()?;
        }
        Some(self.api)
    }

    /// Notes that kernels of `other` access memory of this context.
    pub(super) fn is_reached_by(&self, other: &Arc<Context>) {
        let mut known = self.reached_by();
        if !known.iter().any(|known| known.as_ptr() == Arc::as_ptr(other)) {
            known.push(Arc::downgrade(other));
        }
    }

    fn reached_by(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Context>>> {
        self.reached_by.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn memory_free_bytes(&self) -> Result<u64, DriverError> {
        let api = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the call writes two integers.
        unsafe { call!(api, cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(free as u64)
    }

    /// Gives an allocation failure the numbers that explain it.
    pub(super) fn explain(&self, error: DriverError, asked_bytes: u64) -> DriverError {
        const EXHAUSTED: Status = ERROR_OUT_OF_MEMORY;
        match (&error, self.memory_free_bytes()) {
            (DriverError::Call { code: EXHAUSTED, .. }, Ok(free_bytes)) => {
                DriverError::OutOfMemory { asked_bytes, free_bytes }
            }
            _ => error,
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.streams_stuck.load(Ordering::Acquire) == 0 {
            // SAFETY: balances the retain in `open`. A failure leaves the context to the end of the process.
            let _ = unsafe { call!(self.api, cuDevicePrimaryCtxRelease_v2(self.device)) };
        }
    }
}

/// Properties of a device, from the driver. Recorded with every measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceIdentity {
    pub ordinal: u32,
    /// `NVIDIA H200`.
    pub name: String,
    /// `GPU-` and 32 hexadecimal digits in groups of 8, 4, 4, 4, 12; `nvidia-smi -L` prints the same.
    pub uuid: String,
    /// Major and minor: (9, 0).
    pub compute_capability: (u32, u32),
    pub sm_count: u32,
    pub l2_bytes: u64,
    pub memory_bytes: u64,
    pub memory_bus_bits: u32,
    /// Largest shared memory of a block, static and dynamic, after opt-in.
    pub smem_bytes_per_block_max: u32,
    pub smem_bytes_per_sm: u32,
    pub registers_per_sm: u32,
    pub threads_per_block_max: u32,
    /// Highest clocks; `Clocks` has the present ones.
    pub sm_khz_max: u32,
    pub memory_khz_max: u32,
    /// Newest CUDA that the driver runs: `13.0`.
    pub driver_cuda: String,
    /// Release of the driver, `580.95.05`; `None` without NVML.
    pub driver_release: Option<String>,
    pub launches_cooperatively: bool,
    pub launches_clusters: bool,
}

/// Why a target record does not describe a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    #[error("target `{target}` is no CUDA device")]
    NotCuda { target: String },
    #[error("target `{target}`: {source}")]
    Arch { target: String, source: ArchError },
    #[error(
        "target `{target}` expects a device that runs `{expected}`, found `{device}` of compute capability {found}"
    )]
    ComputeCapability { target: String, device: String, expected: Arch, found: String },
    #[error("target `{target}` expects a device named {expected}, found `{device}`")]
    Name { target: String, device: String, expected: String },
    #[error("target `{target}` expects {expected} {what}, found {found} in `{device}`")]
    TooSmall { target: String, device: String, what: &'static str, expected: u64, found: u64 },
    #[error("target `{target}` expects cooperative launches, which `{device}` does not have")]
    NotCooperative { target: String, device: String },
}

impl From<Mismatch> for Fault {
    fn from(mismatch: Mismatch) -> Fault {
        let message = mismatch.to_string();
        match mismatch {
            Mismatch::NotCuda { .. } | Mismatch::Arch { .. } => Fault::input(message),
            _ => {
                Fault::environment(message).with_remedy("run this stage on a device of that kind, with the same cache")
            }
        }
    }
}

impl DeviceIdentity {
    /// Whether kernels compiled for `target` run on this device, and its figures speak about it.
    pub fn matches(&self, target: &Target) -> Result<(), Mismatch> {
        let (spec, name, device) = (&target.spec, || target.name.clone(), || self.name.clone());
        if target.kind != TargetKind::Cuda {
            return Err(Mismatch::NotCuda { target: name() });
        }
        let arch = Arch::parse(&spec.arch).map_err(|source| Mismatch::Arch { target: name(), source })?;
        let (major, minor) = self.compute_capability;
        if (arch.major, arch.minor) != (major, minor) {
            let found = format!("{major}.{minor}");
            return Err(Mismatch::ComputeCapability { target: name(), device: device(), expected: arch, found });
        }
        if !spec.device_names.is_empty() && !spec.device_names.iter().any(|part| self.name.contains(part)) {
            let expected = spec.device_names.iter().map(|part| format!("`{part}`")).collect::<Vec<_>>().join(" or ");
            return Err(Mismatch::Name { target: name(), device: device(), expected });
        }
        for (what, expected, found) in [
            ("SMs", u64::from(spec.sm_count), u64::from(self.sm_count)),
            (
                "bytes of shared memory per block",
                u64::from(spec.smem_bytes_per_block_max),
                u64::from(self.smem_bytes_per_block_max),
            ),
        ] {
            if found < expected {
                return Err(Mismatch::TooSmall { target: name(), device: device(), what, expected, found });
            }
        }
        if !self.launches_cooperatively {
            return Err(Mismatch::NotCooperative { target: name(), device: device() });
        }
        Ok(())
    }
}

/// An open device: its primary context. Cheap to clone; usable from any thread.
#[derive(Clone)]
pub struct Device {
    pub(super) context: Arc<Context>,
    identity: Arc<DeviceIdentity>,
    /// Those that run models together with it, which is the first of them.
    others: Arc<[Device]>,
}

impl Device {
    /// Opens a device by its ordinal (as `CUDA_VISIBLE_DEVICES` numbers them). Never panics without a driver.
    pub fn open(ordinal: u32) -> Result<Device, DriverError> {
        let api = Api::get()?;
        let device = device_handle(api, ordinal)?;
        let identity = Arc::new(identify(api, ordinal, device)?);
        let mut handle = ptr::null_mut();
        // SAFETY: the call writes one handle for a device that exists.
        unsafe { call!(api, cuDevicePrimaryCtxRetain(&mut handle, device)) }?;
        let (l2_bytes, set_aside_bytes) = (identity.l2_bytes, Mutex::new(0));
        let (streams_stuck, reached_by) = (AtomicU32::new(0), Mutex::new(vec![]));
        let context = Context { api, device, handle, l2_bytes, set_aside_bytes, streams_stuck, reached_by };
        context.bind()?;
        Ok(Device { context: Arc::new(context), identity, others: Arc::new([]) })
    }

    /// The same device, with others that run models together with it.
    pub(super) fn with(self, others: Vec<Device>) -> Device {
        Device { others: others.into(), ..self }
    }

    /// The devices that run models together with this one, which is the first of them.
    pub fn others(&self) -> &[Device] {
        &self.others
    }

    /// Devices that run a model together: this one and the others.
    pub fn count(&self) -> u32 {
        1 + self.others.len() as u32
    }

    /// Every visible device. An empty list is the error `NoDevice`.
    pub fn list() -> Result<Vec<DeviceIdentity>, DriverError> {
        let api = Api::get()?;
        (0..device_count(api)?).map(|ordinal| identify(api, ordinal, device_handle(api, ordinal)?)).collect()
    }

    pub fn identity(&self) -> &DeviceIdentity {
        &self.identity
    }

    /// Whether kernels compiled for `target` run on this device, and its figures speak about it.
    pub fn matches(&self, target: &Target) -> Result<(), Mismatch> {
        self.identity.matches(target)
    }

    /// Clocks and throttling at this moment; `None` without NVML.
    pub fn clocks(&self) -> Option<Clocks> {
        nvml::clocks(&self.identity.uuid)
    }

    /// Free memory; of several devices, that of the one with the least.
    pub fn memory_free_bytes(&self) -> Result<u64, DriverError> {
        let own = self.context.memory_free_bytes()?;
        self.others.iter().try_fold(own, |least, other| Ok(least.min(other.memory_free_bytes()?)))
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("identity", &self.identity).finish_non_exhaustive()
    }
}

fn device_count(api: &'static Api) -> Result<u32, DriverError> {
    let mut count = 0;
    // SAFETY: the call writes one integer.
    unsafe { call!(api, cuDeviceGetCount(&mut count)) }?;
    u32::try_from(count).ok().filter(|count| *count > 0).ok_or(DriverError::NoDevice)
}

pub(super) fn device_handle(api: &'static Api, ordinal: u32) -> Result<CUdevice, DriverError> {
    let count = device_count(api)?;
    let checked = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
    let ordinal = checked.ok_or(DriverError::NoSuchDevice { ordinal, count })?;
    let mut device = 0;
    // SAFETY: the call writes one handle.
    unsafe { call!(api, cuDeviceGet(&mut device, ordinal)) }?;
    Ok(device)
}

fn attribute(api: &'static Api, device: CUdevice, which: CUdevice_attribute) -> Result<u32, DriverError> {
    let mut value = 0;
    // SAFETY: the call writes one integer for a device that exists.
    unsafe { call!(api, cuDeviceGetAttribute(&mut value, which, device)) }?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn identify(api: &'static Api, ordinal: u32, device: CUdevice) -> Result<DeviceIdentity, DriverError> {
    use CUdevice_attribute::*;
    let attribute = |which| attribute(api, device, which);
    let mut name = [0 as c_char; 256];
    let mut uuid = CUuuid { bytes: [0; 16] };
    let (mut memory_bytes, mut driver_cuda) = (0, 0);
    // SAFETY: the calls write what they are given: a buffer with its size, a structure, two integers.
    unsafe {
        call!(api, cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device))?;
        call!(api, cuDeviceGetUuid_v2(&mut uuid, device))?;
        call!(api, cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
        call!(api, cuDriverGetVersion(&mut driver_cuda))?;
    }
    let name: Vec<u8> = name.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
    Ok(DeviceIdentity {
        ordinal,
        name: String::from_utf8_lossy(&name).into_owned(),
        uuid: uuid_text(uuid.bytes.map(|byte| byte as u8)),
        compute_capability: (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sm_count: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: u64::from(attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        memory_bytes: memory_bytes as u64,
        memory_bus_bits: attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
        smem_bytes_per_block_max: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        smem_bytes_per_sm: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        registers_per_sm: attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
        threads_per_block_max: attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        sm_khz_max: attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
        memory_khz_max: attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
        // 13000 stands for 13.0, 12080 for 12.8.
        driver_cuda: format!("{}.{}", driver_cuda / 1000, driver_cuda % 1000 / 10),
        driver_release: nvml::driver_release(),
        launches_cooperatively: attribute(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0,
        launches_clusters: attribute(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)? != 0,
    })
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::{CopyMechanism, DotMechanism, Spec};

    fn h200() -> DeviceIdentity {
        DeviceIdentity {
            ordinal: 0,
            name: "NVIDIA H200".into(),
            uuid: uuid_text([0; 16]),
            compute_capability: (9, 0),
            sm_count: 132,
            l2_bytes: 62_914_560,
            memory_bytes: 150_000_000_000,
            memory_bus_bits: 6144,
            smem_bytes_per_block_max: 232_448,
            smem_bytes_per_sm: 233_472,
            registers_per_sm: 65_536,
            threads_per_block_max: 1024,
            sm_khz_max: 1_980_000,
            memory_khz_max: 3_201_000,
            driver_cuda: "13.0".into(),
            driver_release: None,
            launches_cooperatively: true,
            launches_clusters: true,
        }
    }

    #[test]
    fn the_part_of_l2_that_persists_follows_what_steps_keep() {
        const MIB: u64 = 1 << 20;
        // Of an H200: (range, part).
        for (range, part) in [(0, 24), (21, 24), (22, 24), (25, 28), (30, 28), (31, 24), (72, 24)] {
            assert_eq!(set_aside_for(range * MIB, 60 * MIB) / MIB, part, "{range} MiB");
        }
        assert_eq!(set_aside_for(24 * MIB, 60 * MIB), 27 * MIB);
    }

    fn target() -> Target {
        Target {
            name: "h200".into(),
            kind: TargetKind::Cuda,
            devices: 1,
            spec: Spec {
                source: "data sheet".into(),
                arch: "sm_90a".into(),
                device_names: vec!["H200".into(), "GH200".into()],
                sm_count: 132,
                smem_bytes_per_block_max: 232_448,
                registers_per_sm: 65_536,
                threads_per_block_max: 1024,
                l2_bytes: 62_914_560,
                memory_bytes: 141_000_000_000,
                memory_bytes_per_s: 4.8e12,
                copy: CopyMechanism::Bulk,
                dot: DotMechanism::Mma,
                cluster_max: 8,
                register_reallocation: true,
                warpgroup_mma: true,
                fp8_cvt: true,
            },
        }
    }

    #[test]
    fn a_device_matches_its_own_record_only() {
        let (device, record) = (h200(), target());
        assert_eq!(device.matches(&record), Ok(()));

        let refused = |change: &dyn Fn(&mut DeviceIdentity, &mut Target)| {
            let (mut device, mut record) = (device.clone(), record.clone());
            change(&mut device, &mut record);
            device.matches(&record).unwrap_err().to_string()
        };
        assert_eq!(refused(&|_, target| target.kind = TargetKind::Cpu), "target `h200` is no CUDA device");
        assert_eq!(
            refused(&|device, _| device.compute_capability = (10, 0)),
            "target `h200` expects a device that runs `sm_90a`, found `NVIDIA H200` of compute capability 10.0"
        );
        assert_eq!(
            refused(&|device, _| device.name = "NVIDIA H100 80GB HBM3".into()),
            "target `h200` expects a device named `H200` or `GH200`, found `NVIDIA H100 80GB HBM3`"
        );
        // A slice of a device (MIG) has its name and fewer SMs.
        assert_eq!(
            refused(&|device, _| device.sm_count = 60),
            "target `h200` expects 132 SMs, found 60 in `NVIDIA H200`"
        );
        assert_eq!(
            refused(&|device, _| device.smem_bytes_per_block_max = 101_376),
            "target `h200` expects 232448 bytes of shared memory per block, found 101376 in `NVIDIA H200`"
        );
        assert_eq!(
            refused(&|_, target| target.spec.arch = "hopper".into()),
            "target `h200`: expected an architecture like `sm_90a`, found `hopper`"
        );
        assert_eq!(
            refused(&|device, _| device.launches_cooperatively = false),
            "target `h200` expects cooperative launches, which `NVIDIA H200` does not have"
        );
    }

    #[test]
    fn a_uuid_prints_like_nvidia_smi() {
        let bytes = std::array::from_fn(|index| 16 * index as u8 + 15 - index as u8);
        assert_eq!(uuid_text(bytes), "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0");
    }

    #[test]
    fn a_crash_is_told_from_a_refusal() {
        let failed = |code| DriverError::Call { call: "cuStreamQuery", code, name: "E".into(), meaning: "m".into() };
        assert!(failed(700).is_crash() && failed(719).is_crash());
        assert!(!failed(720).is_crash() && !failed(2).is_crash() && !DriverError::NoDevice.is_crash());
        assert_eq!(Fault::from(failed(700)).tier, Tier::Internal);
        assert_eq!(Fault::from(failed(802)).tier, Tier::Environment);
    }
}
