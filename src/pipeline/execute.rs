//! Owns what runs a schedule: the interpreter on this CPU, or a kernel on a device of this machine.

use std::fs;
use std::sync::Arc;

use crate::codegen::emit::Trace;
use crate::cuda::driver::{Device, DeviceIdentity, DriverError};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::session::Session;
use crate::error::Fault;
use crate::interp::Pack;
use crate::ir::layout::pack_bytes;
use crate::target::Target;
use crate::text::counted;
use crate::validate::Validated;

use super::Workspace;
use super::keys::Hardware;

/// Half of the pinned memory that weights go through on their way to a device.
const STAGING_BYTES: usize = 8 << 20;

/// The CPU of this machine, as a key names it.
pub(super) fn host() -> Hardware {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    // Linux; elsewhere the architecture has to do.
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    let name = model.map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_string();
    Hardware { name, uuid: String::new(), driver: String::new(), threads }
}

/// Where the interpreter runs, for the user: `cpu interpreter on 2 threads`.
pub(super) fn cpu_place() -> String {
    format!("cpu interpreter on {}", counted(host().threads as u64, "thread"))
}

pub(super) fn hardware_of(device: &DeviceIdentity) -> Hardware {
    Hardware {
        name: device.name.clone(),
        uuid: device.uuid.clone(),
        driver: device.driver_release.clone().unwrap_or_else(|| format!("CUDA {}", device.driver_cuda)),
        threads: 0,
    }
}

/// The devices of this machine, or why the driver names none.
pub(super) struct Devices(Result<Vec<DeviceIdentity>, String>);

impl Devices {
    /// Asks the driver, which takes its time to start.
    pub fn list() -> Devices {
        Devices(Device::list().map_err(|error| error.to_string()))
    }

    /// The first device that the target describes, or why there is none.
    pub fn find(&self, target: &Target) -> Result<&DeviceIdentity, String> {
        let devices = self.0.as_ref().map_err(Clone::clone)?;
        let mut reason = "this machine has no device".to_string();
        for device in devices {
            match device.matches(target) {
                Ok(()) => return Ok(device),
                Err(mismatch) => reason = mismatch.to_string(),
            }
        }
        Err(reason)
    }
}

/// Uploads the weights of a schedule. Every kernel of the model reads the same bytes.
pub(super) fn upload_pack(
    device: &Device,
    validated: &Validated,
    pack: &Pack,
) -> Result<Arc<DeviceBuffer>, DriverError> {
    let stream = device.stream()?;
    let mut buffer = device.alloc(pack_bytes(validated.schedule()).max(16))?;
    device.staging(STAGING_BYTES)?.upload(&stream, &mut buffer, 0, (**pack).as_ref())?;
    Ok(Arc::new(buffer))
}

/// Loads a kernel with its weights. `trace` is what the cubin was compiled with.
pub(super) fn load_session(
    workspace: &Workspace,
    device: &Device,
    validated: &Validated,
    cubin: &[u8],
    pack: &Pack,
    trace: Trace,
    steps_max: u32,
) -> Result<Session, Fault> {
    let queues = workspace.queues(validated)?;
    let pack = upload_pack(device, validated, pack)?;
    Ok(Session::load_sharing(device, &queues, cubin, trace, steps_max, pack)?)
}
