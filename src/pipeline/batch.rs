//! Owns `Batched`: a prepared model whose steps have several rows, for the engine of a server.

use std::sync::Arc;

use crate::engine::CpuStepper;
use crate::error::Fault;
use crate::interp::{Options, Pack};
use crate::lower::Batch;
use crate::target::TargetKind;
use crate::validate::Validated;

use super::chain::Host;
use super::stages::place_rows;
use super::{Prepared, Workspace};

/// Positions of a page of the interpreter's cache: a prefix is shared in whole pages, and a text wastes half a page.
pub const PAGE_ROWS: u32 = 16;

/// A proven schedule of several rows with its weights. It starts any number of steppers, one after another.
#[derive(Clone)]
pub struct Batched {
    validated: Arc<Validated>,
    pack: Pack,
}

impl Prepared {
    /// Makes or finds the proven schedule of steps of several rows, and packs the weights: the pack is that of one row.
    ///
    /// # Errors
    /// A CUDA target, which cannot be served yet; a batch that does not fit; a full disk.
    pub fn batched(&self, workspace: &Workspace, batch: &Batch) -> Result<Batched, Fault> {
        if self.target.kind != TargetKind::Cpu {
            return Err(Fault::input(format!("target `{}` cannot be served yet", self.target.name))
                .with_remedy("name a target with `record = \"cpu\"` by `--target`"));
        }
        let host = Host::new(workspace);
        let chain = self.chain(workspace, &host);
        let rows = place_rows(&chain.context, &self.candidate, batch)?;
        Ok(Batched { validated: rows.validated(&self.target)?.clone(), pack: chain.pack()? })
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
