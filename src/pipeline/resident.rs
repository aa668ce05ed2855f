//! Owns the weights that a process has loaded: candidates of one model read one pack, so a search loads it once.

use std::sync::Arc;

use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::session::Session;
use crate::error::Fault;
use crate::interp::Pack;
use crate::pack::identity;

use super::chain::Chain;
use super::execute::load_session;
use super::stages::memory_pack;

/// A pack where it is executed from.
#[derive(Default)]
pub(super) struct Resident(Option<Loaded>);

struct Loaded {
    /// From [`identity`]. The packs of two candidates may differ, because the knob `unit_rows` changes them.
    id: [u8; 32],
    on: On,
}

enum On {
    Host(Pack),
    Device(Arc<DeviceBuffer>),
}

impl Resident {
    fn find(&self, id: [u8; 32]) -> Option<&On> {
        self.0.as_ref().filter(|loaded| loaded.id == id).map(|loaded| &loaded.on)
    }

    /// The pack of a candidate for the interpreter.
    pub fn pack(&mut self, chain: &Chain<'_>) -> Result<Pack, Fault> {
        let validated = chain.validated()?;
        let id = identity(validated.schedule());
        if let Some(On::Host(pack)) = self.find(id) {
            return Ok(pack.clone());
        }
        let pack = memory_pack(&chain.context, validated)?;
        self.0 = Some(Loaded { id, on: On::Host(pack.clone()) });
        Ok(pack)
    }

    /// A session of a candidate whose kernel was made.
    pub fn session(&mut self, chain: &Chain<'_>, device: &Device) -> Result<Session, Fault> {
        let (workspace, validated) = (chain.context.workspace, chain.validated()?);
        let cubin = chain.cubin()?.ok_or_else(|| Fault::internal("a candidate on a device has no cubin"))?;
        let (cubin, steps_max) = (&cubin.bytes, chain.context.manifest.decode.steps_per_launch);
        let id = identity(validated.schedule());
        if let Some(On::Device(pack)) = self.find(id) {
            let queues = workspace.queues(validated)?;
            return Ok(Session::load_sharing(device, &queues, cubin, Trace::Off, steps_max, pack.clone())?);
        }
        let pack = memory_pack(&chain.context, validated)?;
        let session = load_session(workspace, device, validated, cubin, &pack, Trace::Off, steps_max)?;
        self.0 = Some(Loaded { id, on: On::Device(session.pack()) });
        Ok(session)
    }
}
