//! Owns what runs a schedule: the interpreter on this CPU, or a kernel on a device of this machine.

use std::fs;
use std::sync::Arc;

use crate::codegen::emit::Trace;
use crate::cuda::driver::{Device, DeviceIdentity, DriverError};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::session::Session;
use crate::error::Fault;
use crate::interp::Pack;
use crate::ir::layout::{held, pack_bytes};
use crate::target::Target;
use crate::text::counted;
use crate::validate::Validated;

use super::Workspace;
use super::keys::Hardware;

/// What of the weights goes through a piece of pinned memory at once.
const PIECE_BYTES: usize = 2 << 20;

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

/// Where the devices of a target run, for the user: `NVIDIA H200 (device 0)`.
pub(super) fn place_of(found: &DeviceIdentity, target: &Target) -> String {
    match target.devices {
        1 => format!("{} (device {})", found.name, found.ordinal),
        devices => format!("{devices} x {} (device {} and those after it)", found.name, found.ordinal),
    }
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

/// Opens a device that [`Devices::find`] found for a target, with those that run the target's model together with it.
///
/// # Errors
/// What the driver refuses; devices that cannot exchange packets.
pub(super) fn open(found: &DeviceIdentity, target: &Target) -> Result<Device, DriverError> {
    if target.devices == 1 {
        return Device::open(found.ordinal);
    }
    let devices = Device::list()?;
    let together = alike(&devices, found).take(target.devices as usize);
    Device::together(together.map(|device| Device::open(device.ordinal)).collect::<Result<_, _>>()?)
}

/// Uploads the weights of a schedule: to each device those that it holds. Every kernel of the model reads the same bytes.
pub(super) fn upload_pack(
    device: &Device,
    validated: &Validated,
    pack: &Pack,
) -> Result<Arc<DeviceBuffer>, DriverError> {
    let bytes: &[u8] = (**pack).as_ref();
    let upload = |(index, device): (u32, &Device)| {
        let (stream, held) = (device.stream()?, held(validated.schedule(), index));
        let (mut buffer, mut lanes) = (device.alloc(held.bytes.max(16))?, device.lanes(PIECE_BYTES)?);
        for (range, at) in held.ranges {
            lanes.upload(&stream, &mut buffer, at, &bytes[range.start as usize..range.end as usize])?;
        }
        Ok::<DeviceBuffer, DriverError>(buffer)
    };
    if device.others().is_empty() {
        let (stream, mut buffer) = (device.stream()?, device.alloc(pack_bytes(validated.schedule()).max(16))?);
        device.lanes(PIECE_BYTES)?.upload(&stream, &mut buffer, 0, bytes)?;
        return Ok(Arc::new(buffer));
    }
    let others = (1..).zip(device.others()).map(upload).collect::<Result<_, _>>()?;
    Ok(Arc::new(upload((0, device))?.with_others(others)))
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
    let (queues, pack) = (workspace.queues(validated)?, upload_pack(device, validated, pack)?);
    Ok(Session::load_sharing(device, &queues, cubin, trace, steps_max, pack)?)
}
