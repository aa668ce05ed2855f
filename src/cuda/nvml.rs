//! Owns clocks and throttling, read through NVML when it is there. Nothing depends on it: without it answers are `None`.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use serde::Serialize;

/// The state of the clocks at one moment. A figure that the device does not tell (a MIG slice) is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Clocks {
    pub sm_mhz: Option<u32>,
    pub sm_mhz_max: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub memory_mhz_max: Option<u32>,
    pub temperature_c: Option<u32>,
    pub power_mw: Option<u32>,
    /// Bits `nvmlClocksThrottleReason*` of `nvml.h`.
    pub throttle_bits: Option<u64>,
}

/// Bits of `nvml.h` and their names; idle (bit 0) is not throttling.
const THROTTLE_REASONS: [(u64, &str); 8] = [
    (0x02, "application clocks"),
    (0x04, "software power cap"),
    (0x08, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "hardware power brake"),
    (0x100, "display clocks"),
];

impl Clocks {
    /// Why the clocks are lower than they could be; empty if they are not, or if the reasons are unknown.
    pub fn throttle_reasons(&self) -> Vec<&'static str> {
        let bits = self.throttle_bits.unwrap_or(0);
        THROTTLE_REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect()
    }
}

type Status = c_int;
type Handle = *mut c_void;
type ClockCall = unsafe extern "C" fn(Handle, c_uint, *mut c_uint) -> Status;

const SUCCESS: Status = 0;
/// `NVML_CLOCK_SM`, `NVML_CLOCK_MEM` and `NVML_TEMPERATURE_GPU` of `nvml.h`.
const CLOCK_SM: c_uint = 1;
const CLOCK_MEMORY: c_uint = 2;
const TEMPERATURE_OF_CHIP: c_uint = 0;

struct Nvml {
    handle_by_uuid: unsafe extern "C" fn(*const c_char, *mut Handle) -> Status,
    driver_release: unsafe extern "C" fn(*mut c_char, c_uint) -> Status,
    clock: ClockCall,
    clock_max: ClockCall,
    temperature: Option<ClockCall>,
    power: unsafe extern "C" fn(Handle, *mut c_uint) -> Status,
    throttle: unsafe extern "C" fn(Handle, *mut c_ulonglong) -> Status,
}

impl Nvml {
    fn get() -> Option<&'static Nvml> {
        static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
        NVML.get_or_init(Nvml::load).as_ref()
    }

    fn load() -> Option<Nvml> {
        // SAFETY: opens the management library of the driver and runs its initialisers.
        let library = unsafe { Library::open(Some("libnvidia-ml.so.1"), RTLD_LAZY | RTLD_LOCAL) }.ok()?;
        let init: unsafe extern "C" fn() -> Status = symbol(&library, "nvmlInit_v2")?;
        let nvml = Nvml {
            handle_by_uuid: symbol(&library, "nvmlDeviceGetHandleByUUID")?,
            driver_release: symbol(&library, "nvmlSystemGetDriverVersion")?,
            clock: symbol(&library, "nvmlDeviceGetClockInfo")?,
            clock_max: symbol(&library, "nvmlDeviceGetMaxClockInfo")?,
            // Deprecated since 13.0, so the clocks must not depend on it.
            temperature: symbol(&library, "nvmlDeviceGetTemperature"),
            power: symbol(&library, "nvmlDeviceGetPowerUsage")?,
            // Renamed in driver 535; the old name still exists, and is used if the new one does not.
            throttle: symbol(&library, "nvmlDeviceGetCurrentClocksEventReasons")
                .or_else(|| symbol(&library, "nvmlDeviceGetCurrentClocksThrottleReasons"))?,
        };
        // SAFETY: takes no arguments; called once.
        if unsafe { init() } != SUCCESS {
            return None;
        }
        // The table holds its addresses for the rest of the process.
        let _ = library.into_raw();
        Some(nvml)
    }

    fn handle(&self, uuid: &str) -> Option<Handle> {
        let uuid = CString::new(uuid).ok()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a NUL-terminated string, and room for one handle.
        (unsafe { (self.handle_by_uuid)(uuid.as_ptr(), &mut handle) } == SUCCESS).then_some(handle)
    }
}

fn symbol<T: Copy>(library: &Library, name: &str) -> Option<T> {
    // SAFETY: `Nvml::load` gives each name the type that `nvml.h` declares for it.
    unsafe { library.get::<T>(name) }.ok().map(|symbol| *symbol)
}

/// Clocks of the device with this identifier (`GPU-...`).
pub(super) fn clocks(uuid: &str) -> Option<Clocks> {
    let nvml = Nvml::get()?;
    let handle = nvml.handle(uuid)?;
    let figure = |call: ClockCall, kind: c_uint| {
        let mut value = 0;
        // SAFETY: the handle is of this library, and the call writes one integer.
        (unsafe { call(handle, kind, &mut value) } == SUCCESS).then_some(value)
    };
    let (mut power_mw, mut bits) = (0, 0);
    // SAFETY: as above.
    let power = unsafe { (nvml.power)(handle, &mut power_mw) };
    // SAFETY: as above.
    let throttle = unsafe { (nvml.throttle)(handle, &mut bits) };
    Some(Clocks {
        sm_mhz: figure(nvml.clock, CLOCK_SM),
        sm_mhz_max: figure(nvml.clock_max, CLOCK_SM),
        memory_mhz: figure(nvml.clock, CLOCK_MEMORY),
        memory_mhz_max: figure(nvml.clock_max, CLOCK_MEMORY),
        temperature_c: nvml.temperature.and_then(|call| figure(call, TEMPERATURE_OF_CHIP)),
        power_mw: (power == SUCCESS).then_some(power_mw),
        throttle_bits: (throttle == SUCCESS).then_some(bits),
    })
}

/// Release of the installed driver: `580.95.05`.
pub(super) fn driver_release() -> Option<String> {
    let nvml = Nvml::get()?;
    let mut text = [0 as c_char; 96];
    // SAFETY: a buffer and its size.
    if unsafe { (nvml.driver_release)(text.as_mut_ptr(), text.len() as c_uint) } != SUCCESS {
        return None;
    }
    let text: Vec<u8> = text.iter().map(|byte| *byte as u8).collect();
    Some(CStr::from_bytes_until_nul(&text).ok()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_bits_have_names_and_idle_is_none_of_them() {
        let clocks = |throttle_bits| Clocks {
            sm_mhz: None,
            sm_mhz_max: None,
            memory_mhz: None,
            memory_mhz_max: None,
            temperature_c: None,
            power_mw: None,
            throttle_bits,
        };
        assert_eq!(clocks(Some(0x44)).throttle_reasons(), ["software power cap", "hardware thermal slowdown"]);
        assert!(clocks(Some(1)).throttle_reasons().is_empty());
        assert!(clocks(None).throttle_reasons().is_empty());
    }
}
