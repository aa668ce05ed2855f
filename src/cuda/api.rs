//! Owns the table of driver calls: which symbols are needed, and how a status becomes an error.
//!
//! Library, types and signatures are those of `cudarc`; the calls are not. Its functions panic when an old driver lacks a
//! symbol, and return the status as an enum, which is undefined behaviour for a code that a newer driver added. Here all
//! symbols are looked up when the driver is first used, and a status is an integer.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_P2PAttribute, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUlaunchConfig, CUlimit, CUmodule, CUresult, CUstream, CUtensorMap, CUtensorMapDataType,
    CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle, CUuuid,
};

use super::driver::DriverError;

/// `CUresult` as the C interface has it.
pub(super) type Status = c_int;

pub(super) const SUCCESS: Status = 0;
pub(super) const ERROR_INVALID_VALUE: Status = 1;
pub(super) const ERROR_OUT_OF_MEMORY: Status = 2;
pub(super) const ERROR_STUB_LIBRARY: Status = 34;
pub(super) const ERROR_NO_DEVICE: Status = 100;
pub(super) const ERROR_NOT_FOUND: Status = 500;
pub(super) const ERROR_NOT_READY: Status = 600;
pub(super) const ERROR_PEER_ACCESS_ALREADY_ENABLED: Status = 704;

macro_rules! driver_calls {
    ($($symbol:ident($($argument:ty),* $(,)?);)*) => {
        /// Every driver call that monobloc makes, by its exported name.
        #[allow(non_snake_case)]
        pub(super) struct Api {
            $(pub(super) $symbol: unsafe extern "C" fn($($argument),*) -> Status,)*
            error_name: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
            error_string: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
        }

        // The signatures above are those of the binding, or this does not compile.
        $(const _: unsafe fn($($argument),*) -> CUresult = sys::$symbol;)*

        impl Api {
            fn load(library: &'static libloading::Library) -> Result<Api, DriverError> {
                Ok(Api {
                    $($symbol: symbol(library, stringify!($symbol))?,)*
                    error_name: symbol(library, "cuGetErrorName")?,
                    error_string: symbol(library, "cuGetErrorString")?,
                })
            }
        }
    };
}

driver_calls! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
    cuDeviceTotalMem_v2(*mut usize, CUdevice);
    cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDeviceGetP2PAttribute(*mut c_int, CUdevice_P2PAttribute, CUdevice, CUdevice);
    cuCtxEnablePeerAccess(CUcontext, c_uint);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxSetCurrent(CUcontext);
    cuCtxSetLimit(CUlimit, usize);
    cuCtxSynchronize();
    cuModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleUnload(CUmodule);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
    cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
    cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize);
    cuOccupancyMaxActiveClusters(*mut c_int, CUfunction, *const CUlaunchConfig);
    cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
    cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamDestroy_v2(CUstream);
    cuStreamQuery(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamSynchronize(CUstream);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuTensorMapEncodeTiled(
        *mut CUtensorMap, CUtensorMapDataType, c_uint, *mut c_void, *const u64, *const u64, *const c_uint,
        *const c_uint, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill,
    );
    cuEventElapsedTime(*mut f32, CUevent, CUevent);
}

fn symbol<T: Copy>(library: &'static libloading::Library, name: &'static str) -> Result<T, DriverError> {
    // SAFETY: the macro pairs each name with the type of its binding; the library stays loaded for ever.
    unsafe { library.get::<T>(name) }.map(|symbol| *symbol).map_err(|_| DriverError::TooOld { symbol: name })
}

impl Api {
    /// The driver, loaded and initialised once per process.
    pub(super) fn get() -> Result<&'static Api, DriverError> {
        static API: OnceLock<Result<Api, DriverError>> = OnceLock::new();
        let api = API.get_or_init(|| {
            // SAFETY: opens the driver library and runs its initialisers, which every CUDA program does.
            if !unsafe { sys::is_culib_present() } {
                return Err(DriverError::NoDriverLib);
            }
            // SAFETY: as above. It panics without a library, and there is one.
            let api = Api::load(unsafe { sys::culib() })?;
            // SAFETY: `cuInit` takes no pointers and may be called at any time.
            let status = unsafe { (api.cuInit)(0) };
            api.check("cuInit", status)?;
            Ok(api)
        });
        api.as_ref().map_err(Clone::clone)
    }

    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<(), DriverError> {
        match status {
            SUCCESS => Ok(()),
            ERROR_NO_DEVICE => Err(DriverError::NoDevice),
            ERROR_STUB_LIBRARY => Err(DriverError::StubLibrary),
            code => {
                let name = self.text(self.error_name, code);
                Err(DriverError::Call { call, code, name, meaning: self.text(self.error_string, code) })
            }
        }
    }

    fn text(&self, lookup: unsafe extern "C" fn(Status, *mut *const c_char) -> Status, code: Status) -> String {
        let mut text = ptr::null();
        // SAFETY: any code may be asked for; the call writes one pointer.
        let status = unsafe { lookup(code, &mut text) };
        if status != SUCCESS || text.is_null() {
            return "unknown error".to_owned();
        }
        // SAFETY: checked for null; the driver answers with a static NUL-terminated string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// Calls the driver and turns its status into a `Result`; to be used inside `unsafe`.
macro_rules! call {
    ($api:expr, $symbol:ident($($argument:expr),* $(,)?)) => {{
        let api: &'static $crate::cuda::api::Api = $api;
        api.check(stringify!($symbol), (api.$symbol)($($argument),*))
    }};
}
pub(super) use call;
