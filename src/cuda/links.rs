//! Owns `Link`: whether a device stores to the memory of another one, as kernels of several devices do.

use super::api::{ERROR_PEER_ACCESS_ALREADY_ENABLED, call};
use super::driver::{Device, DriverError, device_handle};

use cudarc::driver::sys::CUdevice_P2PAttribute;
use serde::Serialize;

/// How a device reaches the memory of another one. Links of a pair may differ by direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Link {
    pub from: u32,
    pub to: u32,
    /// Kernels may access the memory.
    pub accesses: bool,
    /// Accesses of 8 bytes are atomic there: the CUDA memory model promises it where atomics of the link are native.
    pub is_atomic: bool,
}

impl Link {
    /// Between two devices, by their ordinals.
    pub fn between(from: u32, to: u32) -> Result<Link, DriverError> {
        let api = super::api::Api::get()?;
        let (source, target) = (device_handle(api, from)?, device_handle(api, to)?);
        let (mut accesses, mut atomic) = (0, 0);
        let which = CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        // SAFETY: each call writes one integer for two devices that exist.
        unsafe {
            call!(api, cuDeviceCanAccessPeer(&mut accesses, source, target))?;
            call!(api, cuDeviceGetP2PAttribute(&mut atomic, which, source, target))?;
        }
        Ok(Link { from, to, accesses: accesses != 0, is_atomic: atomic != 0 })
    }

    /// The links between these devices, in both directions.
    pub fn among(ordinals: &[u32]) -> Result<Vec<Link>, DriverError> {
        let pairs = ordinals.iter().flat_map(|from| ordinals.iter().map(move |to| (*from, *to)));
        pairs.filter(|(from, to)| from != to).map(|(from, to)| Link::between(from, to)).collect()
    }

    /// Why kernels cannot run a step over it; `None`: they can.
    pub fn lacks(&self) -> Option<&'static str> {
        match self {
            Link { accesses: false, .. } => Some("no peer access"),
            Link { is_atomic: false, .. } => Some("no native atomics, so a packet may arrive in halves"),
            _ => None,
        }
    }
}

impl Device {
    /// These devices as one, the first, with the others. Kernels of each access the memory of all.
    ///
    /// # Errors
    /// No device; a pair that cannot exchange packets.
    pub fn together(devices: Vec<Device>) -> Result<Device, DriverError> {
        for (from, to) in devices.iter().flat_map(|from| devices.iter().map(move |to| (from, to))) {
            if from.identity().ordinal != to.identity().ordinal {
                from.reach(to)?;
            }
        }
        let mut devices = devices.into_iter();
        let first = devices.next().ok_or(DriverError::NoDevice)?;
        Ok(first.with(devices.collect()))
    }

    /// Lets kernels of this device access the memory of `other`.
    ///
    /// # Errors
    /// A link over which kernels cannot exchange packets.
    fn reach(&self, other: &Device) -> Result<(), DriverError> {
        let (from, to) = (self.identity().ordinal, other.identity().ordinal);
        if let Some(lacks) = Link::between(from, to)?.lacks() {
            return Err(DriverError::NoLink { from, to, lacks });
        }
        other.context.is_reached_by(&self.context);
        let api = self.context.bind()?;
        // SAFETY: both contexts are retained by their devices. Access ends with the contexts.
        match unsafe { call!(api, cuCtxEnablePeerAccess(other.context.handle, 0)) } {
            Err(DriverError::Call { code: ERROR_PEER_ACCESS_ALREADY_ENABLED, .. }) => Ok(()),
            other => other,
        }
    }
}
