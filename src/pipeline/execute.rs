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

/// The hardware of several devices: alike, and each by its own id.
pub(super) fn hardware_of_all(devices: &[&DeviceIdentity]) -> Option<Hardware> {
    let ids: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
    devices.first().map(|first| Hardware { uuid: ids.join("+"), ..hardware_of(first) })
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

    /// The first device that the target describes, or why there is none. There are as many alike as run the target's model together.
    pub fn find(&self, target: &Target) -> Result<&DeviceIdentity, String> {
        Ok(self.find_all(target)?[0])
    }

    /// The devices that run a target's model together: the first ones that the target describes and that are called alike.
    pub fn find_all(&self, target: &Target) -> Result<Vec<&DeviceIdentity>, String> {
        let devices = self.0.as_ref().map_err(Clone::clone)?;
        let mut reason = "this machine has no device".to_string();
        for device in devices {
            match device.matches(target) {
                Ok(()) => {
                    let alike: Vec<_> = alike(devices, device).take(target.devices as usize).collect();
                    if alike.len() == target.devices as usize {
                        return Ok(alike);
                    }
                    reason = format!("expected {} devices `{}`, found {}", target.devices, device.name, alike.len());
                }
                Err(mismatch) => reason = mismatch.to_string(),
            }
        }
        Err(reason)
    }
}

/// A device, and those after it that have its name.
fn alike<'a>(devices: &'a [DeviceIdentity], first: &'a DeviceIdentity) -> impl Iterator<Item = &'a DeviceIdentity> {
    let after = devices.iter().filter(|device| device.ordinal > first.ordinal && device.name == first.name);
    std::iter::once(first).chain(after)
}

/// The devices that run a model together with `first`, which comes first.
fn together(first: &Device, count: u32) -> Result<Vec<Device>, Fault> {
    if count == 1 {
        return Ok(vec![first.clone()]);
    }
    let devices = Device::list()?;
    let others = alike(&devices, first.identity()).skip(1).take(count as usize - 1);
    let others = others.map(|device| Device::open(device.ordinal)).collect::<Result<Vec<_>, _>>()?;
    Ok([vec![first.clone()], others].concat())
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

/// Loads a kernel with its weights, on `device` and those that run its schedule with it. `trace` is what the cubin was compiled with: of several
/// devices, off.
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
    let devices = together(device, validated.schedule().machine.devices)?;
    let packs = devices.iter().map(|device| upload_pack(device, validated, pack)).collect::<Result<Vec<_>, _>>()?;
    match packs.as_slice() {
        [pack] => Ok(Session::load_sharing(device, &queues, cubin, trace, steps_max, Arc::clone(pack))?),
        packs => Ok(Session::load_together(&devices, &queues, cubin, steps_max, packs)?),
    }
}
