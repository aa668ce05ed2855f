//! Owns the text form of plans, which follows the schedule that they are plans of; [`super::parse`] reads it back.
//!
//! ```text
//! waves chunk rows=512 block_rows=128 target="h200" sms=132 warps=8+4 registers=216/72 weights=8*4096 inputs=6*16384 scratch=0 state=2048
//! a0 = rows:fp32 cols=128 at=0 "residual"
//! d1 = units n=80 parts=1
//!   shares 1 sms=132: sm0 0+128[0..1] sm1 0+128[1..2]
//! w1 = g3 d1 matmul x=a1 out=a2 pass=3 chunk=2 warps=2*4*1 order(product parts=1 granules=4 groups=1)
//! ```
//!
//! A share is `row+rows[lo..hi]`, and `shares 1` are those of launches of one block of rows. Shares that follow from the numbers of the plan alone
//! (those that every derived plan has) have no line, so a plan of an 8B model is as long as its waves are many.

use super::derive::{UNWRITTEN_MAX, usual};
use super::{
    Action, Division, Form, Input, Layout, NormOf, Over, Plan, Products, Ring, Share, Slots, Splits, Sum, Sums, Target,
    Tiling, Warps, Work,
};
use crate::ir::print::{NormText, Quoted, print as print_schedule};
use crate::ir::schedule::Schedule;
use std::fmt::{self, Formatter};

/// A schedule with plans of its program; [`super::parse::parse`] reads it back.
pub fn print<'a>(schedule: &Schedule, plans: impl IntoIterator<Item = &'a Plan>) -> String {
    plans.into_iter().fold(print_schedule(schedule), |text, plan| text + &plan.to_string())
}

impl Form {
    pub(super) const ALL: [Form; 3] = [Form::Chunk, Form::Steps, Form::Tail];

    pub(super) fn name(self) -> &'static str {
        match self {
            Form::Chunk => "chunk",
            Form::Steps => "steps",
            Form::Tail => "tail",
        }
    }
}

impl Products {
    pub(super) const ALL: [Products; 3] = [Products::Warps, Products::Warpgroups, Products::Shared];

    pub(super) fn name(self) -> &'static str {
        match self {
            Products::Warps => "warps",
            Products::Warpgroups => "warpgroups",
            Products::Shared => "shared",
        }
    }
}

fn flag(f: &mut Formatter<'_>, name: &str, set: bool) -> fmt::Result {
    if set { write!(f, " {name}") } else { Ok(()) }
}

fn optional<T: fmt::Display>(f: &mut Formatter<'_>, key: &str, value: Option<T>) -> fmt::Result {
    value.map_or(Ok(()), |value| write!(f, " {key}={value}"))
}

fn write_norm(f: &mut Formatter<'_>, norm: Option<NormOf>) -> fmt::Result {
    let Some(NormOf { norm, weight, bias }) = norm else { return Ok(()) };
    write!(f, " norm={}", NormText(&norm))?;
    optional(f, "weight", weight)?;
    optional(f, "bias", bias)
}

/// The input of the next product, with the names of its buffers.
fn write_input(f: &mut Formatter<'_>, names: [&str; 2], input: Option<Input>) -> fmt::Result {
    let Some(Input { to, norm, squares, rows }) = input else { return Ok(()) };
    optional(f, names[0], Some(to))?;
    write_norm(f, norm)?;
    optional(f, names[1], squares)?;
    optional(f, "rows", rows)
}

fn write_target(f: &mut Formatter<'_>, target: Target) -> fmt::Result {
    match target {
        Target::Out(to) => write!(f, " out={to}"),
        Target::Residual(to) => write!(f, " residual={to}"),
        Target::Best(to) => write!(f, " best={to}"),
        Target::Sums { branch, residual, shown } => {
            write!(f, " sums={residual}")?;
            optional(f, "branch", branch)?;
            flag(f, "shown", shown)
        }
    }
}

fn write_slots(f: &mut Formatter<'_>, Slots { x, places, shares, shared, gate }: Slots) -> fmt::Result {
    write!(f, " x={x} places={places} shares={shares}")?;
    optional(f, "shared", shared)?;
    optional(f, "gate", gate)
}

fn write_splits(f: &mut Formatter<'_>, splits: Option<Splits>) -> fmt::Result {
    let Some(Splits { positions, most, left }) = splits else { return Ok(()) };
    write!(f, " split={positions} splits={most} left={left}")
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        // Destructured, so that a new field does not compile until it is printed.
        let Plan { form, rows, block_rows, machine, work, waves, divisions } = self;
        let super::Machine {
            target,
            sms,
            devices,
            warps,
            products,
            pairs,
            loader_warps,
            registers,
            loader_registers,
            weights,
            inputs,
            scratch_bytes,
            state_bytes,
        } = machine;
        write!(f, "waves {} rows={rows} block_rows={block_rows} target={}", form.name(), Quoted(target))?;
        write!(f, " sms={sms}")?;
        optional(f, "devices", (*devices != 1).then_some(devices))?;
        write!(f, " warps={warps}+{loader_warps} registers={registers}/{loader_registers}")?;
        optional(f, "products", (*products != Products::Warps).then(|| products.name()))?;
        flag(f, "pairs", *pairs)?;
        let ring = |ring: &Ring| format!("{}*{}", ring.slots, ring.slot_bytes);
        write!(f, " weights={} inputs={}", ring(weights), ring(inputs))?;
        writeln!(f, " scratch={scratch_bytes} state={state_bytes}")?;
        for (id, Work { name, layout, cols, place, everywhere }) in work.iter().enumerate() {
            write!(f, "a{id} = {layout} cols={cols} at={place}")?;
            flag(f, "everywhere", *everywhere)?;
            writeln!(f, " {}", Quoted(name))?;
        }
        let mut unwritten = UNWRITTEN_MAX;
        for (id, division) in divisions.iter().enumerate() {
            self.write_division(f, id, division, &mut unwritten)?;
        }
        for (w, wave) in waves.iter().enumerate() {
            write!(f, "w{w} = {} {} {}", wave.grid, wave.division, wave.action.name())?;
            wave.action.write(f)?;
            let boxes: Vec<String> = wave.boxes.iter().map(u32::to_string).collect();
            optional(f, "boxes", (!boxes.is_empty()).then(|| boxes.join("*")))?;
            flag(f, "no-meeting", !wave.meets)?;
            writeln!(f, " order({})", wave.sums)?;
        }
        Ok(())
    }
}

impl Plan {
    /// `unwritten`: how many more shares may be left out.
    fn write_division(
        &self,
        f: &mut Formatter<'_>,
        id: usize,
        Division { over, shares }: &Division,
        unwritten: &mut u64,
    ) -> fmt::Result {
        write!(f, "d{id} = {over}")?;
        let blocks = self.rows.checked_div(self.block_rows).unwrap_or(0);
        optional(f, "blocks", (shares.len() as u64 != u64::from(blocks)).then_some(shares.len()))?;
        writeln!(f)?;
        for (blocks, of_sms) in (1..).zip(shares) {
            let usual = usual(self, *over, blocks).filter(|(cost, _)| cost <= unwritten);
            if let Some((cost, usual)) = usual
                && usual() == *of_sms
            {
                *unwritten -= cost;
                continue;
            }
            write!(f, "  shares {blocks} sms={}:", of_sms.len())?;
            for (sm, shares) in of_sms.iter().enumerate().filter(|(_, shares)| !shares.is_empty()) {
                write!(f, " sm{sm}")?;
                for Share { row, rows, lo, hi } in shares {
                    write!(f, " {row}+{rows}[{lo}..{hi}]")?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Action {
    /// What follows its name.
    fn write(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Rows { residual, sum, out } => {
                write!(f, " residual={residual}")?;
                match sum {
                    Some(Sum::Embed { table, scale, best }) => {
                        write!(f, " embed={table} scale={scale}")?;
                        optional(f, "best", best)?;
                    }
                    Some(Sum::Branch { branch, norm, scale }) => {
                        write!(f, " branch={branch}")?;
                        write_norm(f, norm)?;
                        write!(f, " scale={scale}")?;
                    }
                    Some(Sum::Slots(slots)) => {
                        f.write_str(" slots")?;
                        write_slots(f, slots)?;
                    }
                    Some(Sum::Taken) => flag(f, "taken", true)?,
                    None => {}
                }
                write_input(f, ["out", "squares"], out)
            }
            Action::MatMul { x, squares, target, then, pass, chunk, warps: Warps { rows, units, k }, tiles, held } => {
                write!(f, " x={x}")?;
                optional(f, "squares", squares)?;
                write_target(f, target)?;
                write_input(f, ["then", "leaves"], then)?;
                write!(f, " pass={pass} chunk={chunk} warps={rows}*{units}*{k}")?;
                flag(f, "tiles", tiles)?;
                optional(f, "held", (held > 0).then_some(held))
            }
            Action::NormHeads { x, out } | Action::ShortConv { x, out } => write!(f, " x={x} out={out}"),
            Action::Append { x, queries } => write!(f, " x={x} queries={queries}"),
            Action::Attend { queries, out, tile, wide, gate } => {
                write!(f, " queries={queries} out={out} tile={tile}")?;
                flag(f, "wide", wide)?;
                optional(f, "gate", gate)
            }
            Action::AttendRow { x, out, tile, splits } => {
                write!(f, " x={x} out={out} tile={tile}")?;
                write_splits(f, splits)
            }
            Action::Merge { out, splits, gate } => {
                write!(f, " out={out}")?;
                write_splits(f, Some(splits))?;
                optional(f, "gate", gate)
            }
            Action::Scores { x, out } => write!(f, " x={x} out={out}"),
            Action::Route { scores, choices, shares } => {
                write!(f, " scores={scores} choices={choices} shares={shares}")
            }
            Action::Gather { x, choices, groups, places, out } => {
                write!(f, " x={x} choices={choices} groups={groups} places={places} out={out}")
            }
            Action::Places { choices, groups, places, sources } => {
                write!(f, " choices={choices} groups={groups} places={places} sources={sources}")
            }
            Action::Fill { x, groups, sources, out } => {
                write!(f, " x={x} groups={groups} sources={sources} out={out}")
            }
            Action::Experts { x, groups, out, pass, chunk, tickets } => {
                write!(f, " x={x} groups={groups} out={out} pass={pass} chunk={chunk}")?;
                flag(f, "tickets", tickets)
            }
            Action::Combine { slots, out } => {
                write_slots(f, slots)?;
                write!(f, " out={out}")
            }
            Action::Convolve { x, scalars, out } | Action::MixRow { x, scalars, out } => {
                write!(f, " x={x} scalars={scalars} out={out}")
            }
            Action::Mix { turned, x, out } => write!(f, " turned={turned} x={x} out={out}"),
            Action::Gated { mixed, x, out } => write!(f, " mixed={mixed} x={x} out={out}"),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut tiled = |name: &str, Tiling { rows, most }: Tiling| write!(f, "{name}:{rows}*{most}");
        match *self {
            Layout::Groups(tiling) => tiled("groups", tiling),
            Layout::Sources(tiling) => tiled("sources", tiling),
            Layout::Grouped(tiling) => tiled("grouped", tiling),
            Layout::Placed(tiling) => tiled("placed", tiling),
            Layout::Rows(dtype) => write!(f, "rows:{dtype}"),
            Layout::Operand => f.write_str("operand"),
            Layout::Tiles => f.write_str("tiles"),
            Layout::Parts(parts) => write!(f, "parts:{parts}"),
            Layout::Packets(parts) => write!(f, "packets:{parts}"),
            Layout::Squares { groups, parts } => write!(f, "squares:{groups}*{parts}"),
            Layout::Best => f.write_str("best"),
            Layout::Splits(most) => write!(f, "splits:{most}"),
        }
    }
}

impl fmt::Display for Sums {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match *self {
            Sums::Row { parts } => write!(f, "row parts={parts}"),
            Sums::Product { parts, granules, groups, paired, squares, tiles } => {
                write!(f, "product parts={parts} granules={granules} groups={groups}")?;
                flag(f, "paired", paired)?;
                flag(f, "tiles", tiles)?;
                optional(f, "squares", (squares > 0).then_some(squares))
            }
            Sums::Heads => f.write_str("heads"),
            Sums::History { tile, heads, scratch_bytes, split } => {
                write!(f, "history tile={tile} heads={heads} scratch={scratch_bytes}")?;
                optional(f, "split", split)
            }
            Sums::Splits { positions } => write!(f, "splits positions={positions}"),
            Sums::Choice => f.write_str("choice"),
            Sums::Nothing => f.write_str("nothing"),
            Sums::Experts { granules, tile } => write!(f, "experts granules={granules} tile={tile}"),
            Sums::Slots { slots, shared } => {
                write!(f, "slots slots={slots}")?;
                flag(f, "shared", shared)
            }
            Sums::State { positions } => write!(f, "state positions={positions}"),
        }
    }
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Over::Rows { parts } => write!(f, "rows parts={parts}"),
            Over::Sums { parts } => write!(f, "sums parts={parts}"),
            Over::Units { n, parts, step } => {
                write!(f, "units n={n} parts={parts}")?;
                optional(f, "step", (*step != 1).then_some(step))
            }
            Over::Heads { n, rows, kept } => {
                write!(f, "heads n={n} rows={rows}")?;
                optional(f, "kept", (*kept != 1).then_some(kept))
            }
            Over::Items { parts, tiling: Tiling { rows, most } } => {
                write!(f, "items parts={parts} rows={rows} most={most}")
            }
            Over::States { n } => write!(f, "states n={n}"),
        }
    }
}
