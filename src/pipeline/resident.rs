//! Owns how the weights of a candidate get to where it runs, beside candidates that are there.
//!
//! Each candidate has a pack of its own, in the order in which its streams read. Where a candidate that is loaded has the
//! same bytes in the same order they are shared; where it has them in another order a device copies them within itself;
//! else they are packed again.

use std::sync::Arc;

use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::session::{Session, SessionError};
use crate::error::Fault;
use crate::interp::Pack;
use crate::pack::{Move, identity, layout, moves};
use crate::validate::Validated;

use super::Workspace;
use super::chain::Chain;
use super::execute::load_session;
use super::stages::memory_pack;
use super::trial::On;

/// A candidate that is loaded: its schedule, and what runs it.
pub(super) type Resident<'a> = (&'a Validated, &'a On);

/// The pack of a candidate for the interpreter.
pub(super) fn pack(chain: &Chain<'_>, there: &[Resident<'_>]) -> Result<Pack, Fault> {
    let validated = chain.validated()?;
    match twin(validated, there)? {
        Some(On::Cpu(pack)) => Ok(pack.clone()),
        _ => memory_pack(&chain.context, validated),
    }
}

/// A session of a candidate whose kernel was made.
pub(super) fn session(chain: &Chain<'_>, device: &Device, there: &[Resident<'_>]) -> Result<Session, Fault> {
    let (workspace, validated) = (chain.context.workspace, chain.validated()?);
    let cubin = chain.cubin()?.ok_or_else(|| Fault::internal("a candidate on a device has no cubin"))?;
    let (cubin, steps_max) = (&cubin.bytes, chain.context.manifest.decode.steps_per_launch);
    if let Some(On::Device(twin)) = twin(validated, there)? {
        return load_session_sharing(workspace, device, validated, cubin, twin.pack(), steps_max);
    }
    for (other, on) in there {
        if let On::Device(session) = on
            && let Some(moves) = moves(other.schedule(), validated.schedule())?
        {
            let there = (&*session.pack(), moves.as_slice());
            return load_session_moving(workspace, device, validated, cubin, there, steps_max);
        }
    }
    let pack = memory_pack(&chain.context, validated)?;
    load_session(workspace, device, validated, cubin, &pack, Trace::Off, steps_max)
}

/// What runs a candidate whose pack has the same bytes in the same order.
fn twin<'a>(validated: &Validated, there: &[Resident<'a>]) -> Result<Option<&'a On>, Fault> {
    let wanted = identity(validated.schedule())?;
    for (other, on) in there {
        if identity(other.schedule())? == wanted {
            return Ok(Some(on));
        }
    }
    Ok(None)
}

/// Loads a kernel whose pack has the bytes of one that is there, in another order.
fn load_session_moving(
    workspace: &Workspace,
    device: &Device,
    validated: &Validated,
    cubin: &[u8],
    (there, moves): (&DeviceBuffer, &[Move]),
    steps_max: u32,
) -> Result<Session, Fault> {
    let layout = layout(validated.schedule());
    let queues = workspace.queues(validated)?;
    let session = Session::load(device, &queues, &layout, cubin, Trace::Off, steps_max, |stream, buffer| {
        buffer.zero(stream)?;
        for Move { from, to, bytes } in moves {
            buffer.copy_from(stream, *to, there, *from, *bytes)?;
        }
        Ok::<_, SessionError>(())
    })?;
    Ok(session)
}

/// Loads a kernel beside one whose weights it shares.
fn load_session_sharing(
    workspace: &Workspace,
    device: &Device,
    validated: &Validated,
    cubin: &[u8],
    pack: Arc<DeviceBuffer>,
    steps_max: u32,
) -> Result<Session, Fault> {
    let layout = layout(validated.schedule());
    let queues = workspace.queues(validated)?;
    Ok(Session::load_sharing(device, &queues, &layout, cubin, Trace::Off, steps_max, pack)?)
}
