//! The text of a plan, for people.

use super::{Action, Form, Input, Over, Plan, Products, Splits, Sum, Sums, Target, Tiling, Warps, WorkId};
use std::fmt;

fn write_gate(f: &mut fmt::Formatter<'_>, gate: Option<WorkId>) -> fmt::Result {
    gate.map_or(Ok(()), |gate| write!(f, " gate={gate}"))
}

fn write_target(f: &mut fmt::Formatter<'_>, target: Target) -> fmt::Result {
    let (role, to) = match target {
        Target::Out(to) => ("out", to),
        Target::Residual(to) => ("residual", to),
        Target::Best(to) => ("best", to),
    };
    write!(f, " {role}={to}")
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = &self.machine;
        writeln!(
            f,
            "waves {} rows={} target={} sms={} warps={}+{}{} registers={}/{}{} weights={}x{} inputs={}x{} scratch={}",
            match self.form {
                Form::Chunk => "chunk",
                Form::Steps => "steps",
                Form::Tail => "tail",
            },
            self.rows,
            m.target,
            m.sms,
            m.warps,
            m.loader_warps,
            match m.products {
                Products::Warps => "",
                Products::Warpgroups => " products=warpgroups",
                Products::Shared => " products=shared",
            },
            m.registers,
            m.loader_registers,
            if m.pairs { " pairs" } else { "" },
            m.weights.slots,
            m.weights.slot_bytes,
            m.inputs.slots,
            m.inputs.slot_bytes,
            m.scratch_bytes
        )?;
        for (id, work) in self.work.iter().enumerate() {
            writeln!(f, "a{id} {:?} {:?} cols={} at={}", work.name, work.layout, work.cols, work.place)?;
        }
        for (id, division) in self.divisions.iter().enumerate() {
            writeln!(f, "d{id} {}", division.over)?;
        }
        for (w, wave) in self.waves.iter().enumerate() {
            write!(f, "w{w} {} {} ", wave.grid, wave.division)?;
            match &wave.action {
                Action::Rows { residual, sum, out } => {
                    write!(f, "rows residual={residual}")?;
                    match sum {
                        Some(Sum::Embed { table, .. }) => write!(f, " embed={table}")?,
                        Some(Sum::Branch { branch, .. }) => write!(f, " branch={branch}")?,
                        Some(Sum::Taken) => write!(f, " taken")?,
                        None => {}
                    }
                    if let Some(out) = out {
                        write!(f, " out={}", out.to)?;
                        if let Some(squares) = out.squares {
                            write!(f, " squares={squares}")?;
                        }
                    }
                }
                Action::MatMul {
                    x,
                    squares,
                    target,
                    then,
                    pass,
                    chunk,
                    warps: Warps { rows, units, k },
                    tiles,
                    held,
                } => {
                    write!(f, "matmul x={x}")?;
                    if let Some(squares) = squares {
                        write!(f, " squares={squares}")?;
                    }
                    write_target(f, *target)?;
                    if let Some(Input { to, squares, .. }) = then {
                        write!(f, " then={to}")?;
                        if let Some(squares) = squares {
                            write!(f, " leaves={squares}")?;
                        }
                    }
                    write!(f, " pass={pass} chunk={chunk} warps={rows}x{units}x{k}")?;
                    f.write_str(if *tiles { " tiles" } else { "" })?;
                    if *held > 0 {
                        write!(f, " held={held}")?;
                    }
                }
                Action::NormHeads { x, out } => write!(f, "norm-heads x={x} out={out}")?,
                Action::Append { x, queries } => write!(f, "append x={x} queries={queries}")?,
                Action::Attend { queries, out, tile, gate } => {
                    write!(f, "attend queries={queries} out={out} tile={tile}")?;
                    write_gate(f, *gate)?;
                }
                Action::AttendRow { x, out, tile, splits } => {
                    write!(f, "attend-row x={x} out={out} tile={tile}")?;
                    if let Some(Splits { positions, most, left }) = splits {
                        write!(f, " split={positions} splits={most} left={left}")?;
                    }
                }
                Action::Merge { out, splits: Splits { positions, most, left }, gate } => {
                    write!(f, "merge left={left} out={out} split={positions} splits={most}")?;
                    write_gate(f, *gate)?;
                }
                Action::Scores { x, out } => write!(f, "scores x={x} out={out}")?,
                Action::Route { scores, choices, shares } => {
                    write!(f, "route scores={scores} choices={choices} shares={shares}")?;
                }
                Action::Gather { x, choices, groups, places, out } => {
                    write!(f, "gather x={x} choices={choices} groups={groups} places={places} out={out}")?;
                }
                Action::Places { choices, groups, places, sources } => {
                    write!(f, "places choices={choices} groups={groups} places={places} sources={sources}")?;
                }
                Action::Fill { x, groups, sources, out } => {
                    write!(f, "fill x={x} groups={groups} sources={sources} out={out}")?;
                }
                Action::Experts { x, groups, out, pass, chunk } => {
                    write!(f, "experts x={x} groups={groups} out={out} pass={pass} chunk={chunk}")?;
                }
                Action::Combine { x, places, shares, shared, gate, target } => {
                    write!(f, "combine x={x} places={places} shares={shares}")?;
                    shared.map_or(Ok(()), |shared| write!(f, " shared={shared}"))?;
                    write_gate(f, *gate)?;
                    write_target(f, *target)?;
                }
                Action::Convolve { x, scalars, out } => write!(f, "convolve x={x} scalars={scalars} out={out}")?,
                Action::Mix { turned, x, out } => write!(f, "mix turned={turned} x={x} out={out}")?,
                Action::Gated { mixed, x, out } => write!(f, "gated mixed={mixed} x={x} out={out}")?,
                Action::ShortConv { x, out } => write!(f, "short-conv x={x} out={out}")?,
                Action::MixRow { x, scalars, out } => write!(f, "mix-row x={x} scalars={scalars} out={out}")?,
            }
            f.write_str(if wave.meets { "" } else { " no-meeting" })?;
            writeln!(f, " order({})", wave.sums)?;
        }
        Ok(())
    }
}

impl fmt::Display for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sums::Row { parts } => write!(f, "parts={parts}"),
            Sums::Product { parts, granules, groups, paired, squares, tiles } => {
                write!(f, "parts={parts} granules={granules} groups={groups}")?;
                f.write_str(if *paired { " paired" } else { "" })?;
                f.write_str(if *tiles { " tiles" } else { "" })?;
                if *squares > 0 { write!(f, " squares={squares}") } else { Ok(()) }
            }
            Sums::Heads => write!(f, "heads"),
            Sums::History { tile, heads, scratch_bytes, split } => {
                write!(f, "tile={tile} heads={heads} scratch={scratch_bytes}")?;
                split.map_or(Ok(()), |positions| write!(f, " split={positions}"))
            }
            Sums::Splits { positions } => write!(f, "splits={positions}"),
            Sums::Choice => write!(f, "choice"),
            Sums::Nothing => write!(f, "nothing"),
            Sums::Experts { granules, tile } => write!(f, "granules={granules} tile={tile}"),
            Sums::Slots { slots, shared } => {
                write!(f, "slots={slots}")?;
                f.write_str(if *shared { " shared" } else { "" })
            }
            Sums::State { positions } => write!(f, "positions={positions}"),
        }
    }
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Over::Rows { parts } => write!(f, "rows parts={parts}"),
            Over::Units { n, parts } => write!(f, "units n={n} parts={parts}"),
            Over::Heads { n, rows } => write!(f, "heads n={n} rows={rows}"),
            Over::Items { parts, tiling: Tiling { rows, most } } => {
                write!(f, "items parts={parts} rows={rows} most={most}")
            }
            Over::States { n } => write!(f, "states n={n}"),
        }
    }
}
