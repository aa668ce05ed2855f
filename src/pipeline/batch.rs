//! Owns `Batched`: a prepared model whose steps have several rows, for the engine of a server.

use std::sync::Arc;

use crate::engine::CpuStepper;
use crate::error::Fault;
use crate::interp::{Options, Pack};
use crate::lower::{Batch, lower_batch};
use crate::schedule::schedule;
use crate::target::TargetKind;
use crate::validate::{Validated, validate};

use super::chain::{Host, NotMade};
use super::{Prepared, Workspace};

/// A proven schedule of several rows with its weights. It starts any number of steppers, one after another.
#[derive(Clone)]
pub struct Batched {
    validated: Arc<Validated>,
    pack: Pack,
}

impl Prepared {
    /// Lowers, schedules and proves steps of several rows, and packs the weights: the pack is that of one row.
    ///
    /// # Errors
    /// A target with a kernel, which has no steps of several rows yet; a batch that does not fit; a full disk.
    pub fn batched(&self, workspace: &Workspace, batch: &Batch) -> Result<Batched, Fault> {
        if self.target.kind != TargetKind::Cpu {
            return Err(Fault::input(format!("target `{}` has no steps of several rows yet", self.target.name))
                .with_remedy("name a target with `record = \"cpu\"` by `--target`"));
        }
        let Prepared { manifest, target, imported, candidate, .. } = self;
        let (precision, context_max) = (manifest.precision, manifest.decode.context_max);
        let lowered = lower_batch(&imported.graph, &manifest.name, precision, context_max, batch, candidate);
        let placed = lowered.and_then(|program| schedule(program, target, candidate)).map_err(NotMade::Infeasible)?;
        let validated = validate(placed, target).map_err(Fault::from)?;
        let host = Host::new(workspace);
        let pack = self.chain(workspace, &host).pack()?;
        Ok(Batched { validated: Arc::new(validated), pack })
    }
}

impl Batched {
    /// What runs it, with a cache of its own.
    ///
    /// # Errors
    /// A cache that is larger than this machine's memory.
    pub fn stepper(&self) -> Result<CpuStepper, Fault> {
        CpuStepper::new(self.validated.schedule(), self.pack.clone(), Options::fast())
    }
}
