//! The text of a plan, for people.

use super::{Action, Over, Plan, Sum, Target};
use std::fmt;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = &self.machine;
        writeln!(
            f,
            "waves rows={} target={} sms={} warps={}+{} registers={}/{} slots={}x{}",
            self.rows, m.target, m.sms, m.warps, m.loader_warps, m.registers, m.loader_registers, m.slots, m.slot_bytes
        )?;
        for (id, work) in self.work.iter().enumerate() {
            writeln!(f, "a{id} {:?} {:?} cols={} at={}", work.name, work.layout, work.cols, work.place)?;
        }
        for (id, division) in self.divisions.iter().enumerate() {
            match division.over {
                Over::Rows => writeln!(f, "d{id} rows")?,
                Over::Units { n } => writeln!(f, "d{id} units n={n}")?,
                Over::Heads { n, rows } => writeln!(f, "d{id} heads n={n} rows={rows}")?,
            }
        }
        for (w, wave) in self.waves.iter().enumerate() {
            write!(f, "w{w} {} {} ", wave.grid, wave.division)?;
            match &wave.action {
                Action::Rows { residual, sum, out } => {
                    write!(f, "rows residual={residual}")?;
                    match sum {
                        Some(Sum::Embed { table, .. }) => write!(f, " embed={table}")?,
                        Some(Sum::Branch { branch, .. }) => write!(f, " branch={branch}")?,
                        None => {}
                    }
                    if let Some(out) = out {
                        write!(f, " out={}", out.to)?;
                    }
                    writeln!(f)?;
                }
                Action::MatMul { x, target, pass } => {
                    let (role, to) = match target {
                        Target::Out(to) => ("out", to),
                        Target::Residual(to) => ("residual", to),
                    };
                    writeln!(f, "matmul x={x} {role}={to} pass={pass}")?;
                }
                Action::Append { x, queries } => writeln!(f, "append x={x} queries={queries}")?,
                Action::Attend { queries, out, tile } => {
                    writeln!(f, "attend queries={queries} out={out} tile={tile}")?;
                }
            }
        }
        Ok(())
    }
}
