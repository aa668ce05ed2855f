//! Owns `Stream` and `Event`: launching, waiting with a deadline, timing on the device.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    CUaccessPolicyWindow, CUaccessProperty, CUevent, CUevent_flags, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchConfig, CUstream, CUstream_flags,
};

use super::api::{ERROR_NOT_READY, call};
use super::driver::{Context, Device, DriverError};
use super::memory::{DeviceBuffer, MappedBuffer};
use super::module::Function;

/// How long a wait asks without pause before it starts to sleep: a decode step should not pay for a sleep.
const WAIT_SPIN: Duration = Duration::from_micros(300);
/// Sleep between two questions after that. The system may add as much.
const WAIT_SLEEP: Duration = Duration::from_micros(50);
/// Launches of a kernel mostly take as long as the one before: around that time a wait asks without pause again.
const WAIT_AROUND: Duration = Duration::from_micros(200);

/// How to wait for something that mostly takes as long as the time before.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// How long the last wait took that saw the end, in microseconds.
    last_us: AtomicU64,
}

impl Pace {
    /// Asks until the answer is yes, or for `timeout`. False: it was never yes.
    pub fn wait(
        &self,
        timeout: Duration,
        mut is_done: impl FnMut() -> Result<bool, DriverError>,
    ) -> Result<bool, DriverError> {
        let start = Instant::now();
        let expected = Duration::from_micros(self.last_us.load(Ordering::Relaxed));
        loop {
            let is_done = is_done()?;
            let waited = start.elapsed();
            if is_done {
                self.last_us.store(waited.as_micros() as u64, Ordering::Relaxed);
            }
            if is_done || waited >= timeout {
                return Ok(is_done);
            }
            let is_near = waited.abs_diff(expected) < WAIT_AROUND;
            if waited < WAIT_SPIN || is_near { std::hint::spin_loop() } else { std::thread::sleep(WAIT_SLEEP) }
        }
    }
}

/// An ordered queue of work on a device.
pub struct Stream {
    pub(super) context: Arc<Context>,
    handle: CUstream,
    /// The last wait timed out, and no wait has seen the end since.
    is_stuck: AtomicBool,
    pace: Pace,
}

// SAFETY: a stream may be used from any thread that has its context bound.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// How a wait with a deadline ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    Done,
    /// The work still runs. Until a later wait sees its end, nothing of this context is freed, because that would wait
    /// for it: set the abort word and wait again, or leave the process.
    TimedOut,
}

/// Size of a launch, one-dimensional, and what it asks of L2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks.
    pub grid: u32,
    /// Threads per block.
    pub block: u32,
    pub smem_dynamic_bytes: u32,
    /// Blocks per cluster; 1 for a launch without clusters.
    pub cluster: u32,
    /// What L2 keeps while the kernel runs.
    pub kept: Option<KeptRange>,
}

/// Memory whose lines L2 prefers to keep. It changes no result, and a device that cannot do it does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptRange {
    /// Device address.
    pub address: u64,
    /// At least one, and no more than the device allows.
    pub bytes: u64,
}

/// When the blocks of a kernel start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    /// After the kernel before it on the stream.
    AfterPrevious,
    /// The same, and all are resident at once.
    Together,
}

/// One kernel parameter, by value.
#[derive(Clone, Copy)]
pub enum Argument<'a> {
    /// Address of device memory.
    Buffer(&'a DeviceBuffer),
    /// Address of host memory as the device sees it.
    Mapped(&'a MappedBuffer),
    U32(u32),
    U64(u64),
    F32(f32),
    /// A structure, laid out as the kernel declares it.
    Struct(&'a [u8]),
}

impl Argument<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Argument::Buffer(buffer) => bytemuck::bytes_of(buffer.address_ref()),
            Argument::Mapped(buffer) => bytemuck::bytes_of(buffer.address_ref()),
            Argument::U32(value) => bytemuck::bytes_of(value),
            Argument::U64(value) => bytemuck::bytes_of(value),
            Argument::F32(value) => bytemuck::bytes_of(value),
            Argument::Struct(bytes) => bytes,
        }
    }
}

impl Device {
    /// A stream that does not wait for the default stream.
    pub fn stream(&self) -> Result<Stream, DriverError> {
        let api = self.context.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the call writes one handle.
        unsafe { call!(api, cuStreamCreate(&mut handle, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)) }?;
        let (is_stuck, pace) = (AtomicBool::new(false), Pace::default());
        Ok(Stream { context: self.context.clone(), handle, is_stuck, pace })
    }

    /// An event that keeps time.
    pub fn event(&self) -> Result<Event, DriverError> {
        let api = self.context.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the call writes one handle.
        unsafe { call!(api, cuEventCreate(&mut handle, CUevent_flags::CU_EVENT_DEFAULT as u32)) }?;
        Ok(Event { context: self.context.clone(), handle })
    }
}

impl Stream {
    pub(super) fn handle(&self) -> CUstream {
        self.handle
    }

    /// Launches with the promise that all blocks are resident at once, as kernels that wait for each other need.
    ///
    /// Returns when the work is queued. The kernel is trusted with every address it is given: only what was validated
    /// may come here. Buffers may be dropped while it runs, because that waits for its end.
    pub fn launch_cooperative(
        &self,
        function: &Function,
        shape: &LaunchShape,
        arguments: &[Argument<'_>],
    ) -> Result<(), DriverError> {
        self.enqueue(function, shape, arguments, Start::Together)
    }

    /// Launches without that promise; otherwise as `launch_cooperative`.
    pub fn launch(
        &self,
        function: &Function,
        shape: &LaunchShape,
        arguments: &[Argument<'_>],
    ) -> Result<(), DriverError> {
        self.enqueue(function, shape, arguments, Start::AfterPrevious)
    }

    fn enqueue(
        &self,
        function: &Function,
        shape: &LaunchShape,
        arguments: &[Argument<'_>],
        start: Start,
    ) -> Result<(), DriverError> {
        let values: Vec<&[u8]> = arguments.iter().map(Argument::bytes).collect();
        // The driver reads as many bytes as the kernel declares: a difference would read past an argument.
        if !values.iter().map(|value| value.len()).eq(function.parameter_bytes().iter().copied()) {
            return Err(DriverError::Arguments {
                kernel: function.name().to_owned(),
                expected: function.parameter_bytes().to_vec(),
                found: values.iter().map(|value| value.len()).collect(),
            });
        }
        let mut pointers: Vec<*mut c_void> = values.iter().map(|value| value.as_ptr().cast_mut().cast()).collect();
        let mut attributes = attributes(shape, start);
        let config = config(shape, self.handle, &mut attributes);
        let api = self.context.bind()?;
        // SAFETY: stream and function are live and of the bound context; `pointers` has one pointer per declared
        // parameter, each to as many bytes as declared, and the driver copies them before it returns. `config` points
        // into `attributes`. What the kernel does with its addresses is the caller's promise.
        unsafe { call!(api, cuLaunchKernelEx(&config, function.handle, pointers.as_mut_ptr(), ptr::null_mut())) }
    }

    /// Whether all queued work is done. Never waits. The error of a kernel that crashed comes out here.
    pub fn is_done(&self) -> Result<bool, DriverError> {
        let api = self.context.bind()?;
        // SAFETY: a live stream.
        let status = unsafe { (api.cuStreamQuery)(self.handle) };
        if status == ERROR_NOT_READY {
            return Ok(false);
        }
        api.check("cuStreamQuery", status)?;
        self.set_stuck(false);
        Ok(true)
    }

    /// Waits until all queued work is done, or for `timeout`, whichever comes first.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<Wait, DriverError> {
        self.wait(timeout, || self.is_done())
    }

    /// Waits until the device has passed `event`, which was recorded on this stream, or for `timeout`. Work that was queued after the
    /// event may go on.
    pub(super) fn wait_event(&self, event: &Event, timeout: Duration) -> Result<Wait, DriverError> {
        self.wait(timeout, || event.is_done())
    }

    fn wait(&self, timeout: Duration, is_done: impl FnMut() -> Result<bool, DriverError>) -> Result<Wait, DriverError> {
        let is_done = self.pace.wait(timeout, is_done)?;
        self.set_stuck(!is_done);
        Ok(if is_done { Wait::Done } else { Wait::TimedOut })
    }

    /// Waits without a deadline: for copies and for kernels that are known to end.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let api = self.context.bind()?;
        // SAFETY: a live stream.
        unsafe { call!(api, cuStreamSynchronize(self.handle)) }
    }

    /// Lets the work that is queued from now on wait for `event`, which may be of another stream, and of another device.
    pub(super) fn follow(&self, event: &Event) -> Result<(), DriverError> {
        let api = self.context.bind()?;
        // SAFETY: live handles, the stream's of the bound context.
        unsafe { call!(api, cuStreamWaitEvent(self.handle, event.handle, 0)) }
    }

    fn set_stuck(&self, is_stuck: bool) {
        match (self.is_stuck.swap(is_stuck, Ordering::AcqRel), is_stuck) {
            (false, true) => drop(self.context.streams_stuck.fetch_add(1, Ordering::AcqRel)),
            (true, false) => drop(self.context.streams_stuck.fetch_sub(1, Ordering::AcqRel)),
            _ => {}
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(api) = self.context.bind_to_free() {
            // SAFETY: the handle came from `cuStreamCreate`, its work is done, and it is destroyed once.
            let _ = unsafe { call!(api, cuStreamDestroy_v2(self.handle)) };
        }
    }
}

impl Function {
    /// Whether a cooperative launch of this shape is possible: block and shared memory within the limits of the kernel,
    /// and all blocks resident at once. Asks the driver, so it belongs before a timed section.
    pub fn fits(&self, shape: &LaunchShape) -> Result<(), DriverError> {
        let kernel = || self.name().to_owned();
        if shape.block > self.threads_per_block_max {
            let (asked, max) = (shape.block, self.threads_per_block_max);
            return Err(DriverError::BlockTooLarge { kernel: kernel(), asked, max });
        }
        if shape.smem_dynamic_bytes > self.smem_dynamic_bytes_max {
            let (asked_bytes, max_bytes) = (shape.smem_dynamic_bytes, self.smem_dynamic_bytes_max);
            return Err(DriverError::SmemTooLarge { kernel: kernel(), asked_bytes, max_bytes });
        }
        if !shape.grid.is_multiple_of(shape.cluster) {
            return Err(DriverError::GridUneven { kernel: kernel(), grid: shape.grid, cluster: shape.cluster });
        }
        let resident = self.resident_blocks(shape)?;
        if shape.grid > resident {
            return Err(DriverError::GridTooLarge { kernel: kernel(), grid: shape.grid, resident });
        }
        Ok(())
    }

    /// Most blocks of this shape that are resident on the device at once; the grid of `shape` does not matter.
    pub fn resident_blocks(&self, shape: &LaunchShape) -> Result<u32, DriverError> {
        let api = self.context().bind()?;
        let (block, smem_bytes) = (shape.block as i32, shape.smem_dynamic_bytes as usize);
        let mut count = 0;
        if shape.cluster == 1 {
            // SAFETY: a live function, and the call writes one integer.
            unsafe {
                call!(api, cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut count, self.handle, block, smem_bytes))
            }?;
            return Ok(u32::try_from(count).unwrap_or(0).saturating_mul(self.sm_count()));
        }
        // The grid does not reach the answer, but one that is no multiple of the cluster is refused.
        let shape = LaunchShape { grid: shape.cluster, kept: None, ..*shape };
        let mut attributes = attributes(&shape, Start::AfterPrevious);
        let config = config(&shape, ptr::null_mut(), &mut attributes);
        // SAFETY: a live function; `config` points into `attributes`; the call writes one integer.
        unsafe { call!(api, cuOccupancyMaxActiveClusters(&mut count, self.handle, &config)) }?;
        Ok(u32::try_from(count).unwrap_or(0).saturating_mul(shape.cluster))
    }
}

/// The attributes of a launch.
fn attributes(shape: &LaunchShape, start: Start) -> Vec<CUlaunchAttribute> {
    let attribute = |id| {
        // SAFETY: a C structure of integers, unions of integers and arrays, for which zero is a value.
        let mut attribute: CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = id;
        attribute
    };
    let mut attributes = vec![];
    if start == Start::Together {
        let mut cooperative = attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
        cooperative.value.cooperative = 1;
        attributes.push(cooperative);
    }
    if let Some(KeptRange { address, bytes }) = shape.kept {
        let mut window = attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW);
        window.value.accessPolicyWindow = CUaccessPolicyWindow {
            base_ptr: address as *mut c_void,
            num_bytes: bytes as usize,
            hitRatio: 1.0,
            hitProp: CUaccessProperty::CU_ACCESS_PROPERTY_PERSISTING,
            missProp: CUaccessProperty::CU_ACCESS_PROPERTY_STREAMING,
        };
        attributes.push(window);
    }
    if shape.cluster > 1 {
        let mut clusters = attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
        clusters.value.clusterDim.x = shape.cluster;
        clusters.value.clusterDim.y = 1;
        clusters.value.clusterDim.z = 1;
        attributes.push(clusters);
    }
    attributes
}

fn config(shape: &LaunchShape, stream: CUstream, attributes: &mut [CUlaunchAttribute]) -> CUlaunchConfig {
    CUlaunchConfig {
        gridDimX: shape.grid,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: shape.block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shape.smem_dynamic_bytes,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}

/// A moment in a stream, as the device sees it.
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: an event may be used from any thread that has its context bound.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Marks the point that `stream` reached; recording again moves the mark.
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        let api = self.context.bind()?;
        // SAFETY: live handles of the bound context.
        unsafe { call!(api, cuEventRecord(self.handle, stream.handle)) }
    }

    /// Whether the device passed the mark. Never waits.
    pub fn is_done(&self) -> Result<bool, DriverError> {
        let api = self.context.bind()?;
        // SAFETY: a live event.
        match unsafe { (api.cuEventQuery)(self.handle) } {
            ERROR_NOT_READY => Ok(false),
            status => api.check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Microseconds from `self` to `end`, both passed; the driver's resolution is about 0.5 µs.
    pub fn elapsed_us(&self, end: &Event) -> Result<f64, DriverError> {
        let api = self.context.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: live events of the bound context, and the call writes one float.
        unsafe { call!(api, cuEventElapsedTime(&mut milliseconds, self.handle, end.handle)) }?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(api) = self.context.bind() {
            // SAFETY: the handle came from `cuEventCreate` and is destroyed once; a pending one is kept by the driver.
            let _ = unsafe { call!(api, cuEventDestroy_v2(self.handle)) };
        }
    }
}
