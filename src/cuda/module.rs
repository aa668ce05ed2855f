//! Owns `Module` and `Function`: a cubin loaded into a device, and a kernel of it with what it may use.

use std::ffi::{CString, c_int};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};

use super::api::{Api, ERROR_INVALID_VALUE, ERROR_NOT_FOUND, SUCCESS, call};
use super::driver::{Context, Device, DriverError};

/// A loaded cubin. Cheap to clone; unloaded with its last `Function`.
#[derive(Clone)]
pub struct Module {
    inner: Arc<Inner>,
}

struct Inner {
    context: Arc<Context>,
    handle: CUmodule,
}

// SAFETY: a module handle may be used from any thread that has its context bound.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(api) = self.context.bind_to_free() {
            // SAFETY: the handle came from `cuModuleLoadData`, nothing of it runs, and it is unloaded once.
            let _ = unsafe { call!(api, cuModuleUnload(self.handle)) };
        }
    }
}

/// A kernel that can be launched, and the resources that the driver gives it.
pub struct Function {
    pub(super) handle: CUfunction,
    module: Module,
    name: String,
    /// Size of each parameter, in order.
    parameter_bytes: Vec<usize>,
    pub registers: u32,
    /// Local memory per thread.
    pub local_bytes: u32,
    pub smem_static_bytes: u32,
    /// Largest dynamic shared memory that a launch may ask for.
    pub smem_dynamic_bytes_max: u32,
    pub threads_per_block_max: u32,
    sm_count: u32,
}

// SAFETY: a function handle may be used from any thread that has its context bound.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Device {
    /// Loads a cubin that was compiled for this device.
    pub fn load(&self, cubin: &[u8]) -> Result<Module, DriverError> {
        let api = self.context.bind()?;
        // The driver finds the end of an image by itself: it reads the ELF header, or text up to a NUL byte.
        let image = [cubin, &[0]].concat();
        let mut handle = ptr::null_mut();
        // SAFETY: the image is complete and NUL-terminated, and outlives the call, which copies it.
        unsafe { call!(api, cuModuleLoadData(&mut handle, image.as_ptr().cast())) }?;
        Ok(Module { inner: Arc::new(Inner { context: self.context.clone(), handle }) })
    }

    /// A kernel of `module`, allowed to use `smem_dynamic_bytes` of dynamic shared memory per block.
    pub fn function(&self, module: &Module, name: &str, smem_dynamic_bytes: u32) -> Result<Function, DriverError> {
        use CUfunction_attribute::*;
        let api = module.inner.context.bind()?;
        let missing = || DriverError::NoSuchKernel { kernel: name.to_owned() };
        let symbol = CString::new(name).map_err(|_| missing())?;
        let mut handle = ptr::null_mut();
        // SAFETY: a live module and a NUL-terminated name.
        match unsafe { call!(api, cuModuleGetFunction(&mut handle, module.inner.handle, symbol.as_ptr())) } {
            Err(DriverError::Call { code: ERROR_NOT_FOUND, .. }) => return Err(missing()),
            result => result?,
        }
        let smem_static_bytes = attribute(api, handle, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        // The driver decides what fits beside static shared memory, because it knows what it keeps for itself.
        let asked = smem_dynamic_bytes.min(i32::MAX as u32) as c_int;
        // SAFETY: a live function; the value is checked by the driver.
        match unsafe { call!(api, cuFuncSetAttribute(handle, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, asked)) }
        {
            Err(DriverError::Call { code: ERROR_INVALID_VALUE, .. }) => {
                let max_bytes = self.identity().smem_bytes_per_block_max.saturating_sub(smem_static_bytes);
                let (kernel, asked_bytes) = (name.to_owned(), smem_dynamic_bytes);
                return Err(DriverError::SmemTooLarge { kernel, asked_bytes, max_bytes });
            }
            result => result?,
        }
        if self.identity().launches_clusters {
            // Clusters of more than 8 blocks are refused without it; smaller ones do not change.
            // SAFETY: as above.
            unsafe { call!(api, cuFuncSetAttribute(handle, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)) }?;
        }
        Ok(Function {
            handle,
            module: module.clone(),
            name: name.to_owned(),
            parameter_bytes: parameter_bytes(api, handle),
            registers: attribute(api, handle, CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: attribute(api, handle, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            smem_static_bytes,
            smem_dynamic_bytes_max: smem_dynamic_bytes,
            threads_per_block_max: attribute(api, handle, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            sm_count: self.identity().sm_count,
        })
    }
}

fn attribute(api: &'static Api, function: CUfunction, which: CUfunction_attribute) -> Result<u32, DriverError> {
    let mut value = 0;
    // SAFETY: a live function, and the call writes one integer.
    unsafe { call!(api, cuFuncGetAttribute(&mut value, which, function)) }?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// Sizes of the parameters. The driver ends the list with an error.
fn parameter_bytes(api: &'static Api, function: CUfunction) -> Vec<usize> {
    // Parameters take 32 KiB at most, each at least a byte.
    let sizes = (0..32 * 1024).map_while(|index| {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: a live function, and the call writes two integers.
        let status = unsafe { (api.cuFuncGetParamInfo)(function, index, &mut offset, &mut size) };
        (status == SUCCESS).then_some(size)
    });
    sizes.collect()
}

impl Function {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.module.inner.context
    }

    pub(super) fn parameter_bytes(&self) -> &[usize] {
        &self.parameter_bytes
    }

    pub(super) fn sm_count(&self) -> u32 {
        self.sm_count
    }
}
