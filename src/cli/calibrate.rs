//! Owns `calibrate`: prints or writes a target record with figures measured on a device of this machine.

use std::path::Path;

use super::Outcome;
use super::arguments::Calibrate;
use super::session::Session;
use super::targets::record_json;
use crate::cuda::calibrate;
use crate::cuda::driver::Device;
use crate::cuda::nvrtc::Nvrtc;
use crate::error::Fault;
use crate::target::{TargetKind, TargetRecord};

pub fn calibrate(session: &Session, asked: &Calibrate) -> Result<Outcome, Fault> {
    let record = TargetRecord::load(&asked.target, Path::new("."));
    let TargetRecord { target, .. } = record.map_err(|error| error.into_fault(session.terminal.style))?;
    if target.kind == TargetKind::Cpu {
        return Err(Fault::input(format!("target `{}` is no GPU, and has nothing to calibrate", target.name))
            .with_remedy("name a CUDA record: `monobloc targets` lists them"));
    }
    let devices = Device::list()?;
    let mut reason = "this machine has no device".to_string();
    let found = devices.iter().find(|device| match device.matches(&target) {
        Ok(()) => true,
        Err(mismatch) => {
            reason = mismatch.to_string();
            false
        }
    });
    let found = found.ok_or_else(|| {
        Fault::environment(format!("target `{}` has no device here: {reason}", target.name))
            .with_remedy("`monobloc doctor` says which record describes the device that is here")
    })?;
    let measured = calibrate::measure(&Device::open(found.ordinal)?, &Nvrtc::load()?, &target)?;
    let record = TargetRecord { target, measured };
    if asked.json {
        session.terminal.print_json(&record_json(&record)?)?;
        return Ok(Outcome::Done);
    }
    let text = record.to_toml();
    match &asked.out {
        None => session.terminal.print(&text)?,
        Some(path) => std::fs::write(path, text).map_err(|error| {
            Fault::environment(format!("cannot write `{}`: {error}", path.display()))
                .with_remedy("name another file with `--out`")
        })?,
    }
    Ok(Outcome::Done)
}
