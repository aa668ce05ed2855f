//! Owns `.mkir` of wave kernels on its way in: a schedule, then the plans of its program. Syntax only: what is wrong with a plan is what
//! [`super::prove`] says. The grammar is what [`super::print`] writes.

use super::derive::{UNWRITTEN_MAX, usual};
use super::{
    Action, Division, DivisionId, Form, Input, Layout, Machine, NormOf, Over, Plan, Products, Ring, Share, Slots,
    Splits, Sum, Sums, Target, Tiling, Warps, Wave, Work, WorkId,
};
use crate::dtype::DType;
use crate::ir::parse::{DTYPES, Lines, ParseError, Parsed, Parser};
use crate::ir::schedule::Schedule;
use crate::ir::{BufferId, GridId, SmId};

/// How many more shares and SMs may follow from numbers, of a plan and of a text: the length of the text does not bound them.
struct Unwritten {
    plan: u64,
    text: u64,
}

/// Of a text: as many as some plans have.
const TEXT_MAX: u64 = 4 * UNWRITTEN_MAX;

/// A schedule with plans of its program, and where each is defined. The first line of a plan is the `program` of its lines.
#[derive(Debug, Clone, PartialEq)]
pub struct Text {
    pub schedule: Schedule,
    pub lines: Lines,
    pub plans: Vec<(Plan, Lines)>,
}

/// Reads a schedule and the plans after it, if there are some.
///
/// # Errors
/// The first place where the text is not `.mkir`.
pub fn parse(text: &str) -> Result<Text, ParseError> {
    let mut p = Parser::new(text);
    let program = p.program()?;
    let schedule = p.schedule(program)?;
    let lines = std::mem::take(&mut p.lines);
    let mut plans = vec![];
    let mut unwritten = Unwritten { plan: 0, text: TEXT_MAX };
    while p.eat("waves") {
        unwritten.plan = UNWRITTEN_MAX;
        let plan = p.plan(&mut unwritten)?;
        plans.push((plan, std::mem::take(&mut p.lines)));
    }
    p.end_of_text()?;
    Ok(Text { schedule, lines, plans })
}

impl Parser<'_> {
    /// From the word `waves` on.
    fn plan(&mut self, unwritten: &mut Unwritten) -> Parsed<Plan> {
        self.line_kind = "waves";
        let form = self.one_of(&Form::ALL, Form::name)?;
        let (rows, block_rows) = (self.attr_u32("rows")?, self.attr_u32("block_rows")?);
        let machine = self.wave_machine()?;
        let line = self.end_of_line()?;
        (self.lines.program, self.lines.machine) = (line.clone(), line);
        let mut plan = Plan { form, rows, block_rows, machine, work: vec![], waves: vec![], divisions: vec![] };
        self.next_line();
        while plan.divisions.is_empty()
            && plan.waves.is_empty()
            && self.eat_definition("a", "activations", plan.work.len())?
        {
            let work = self.work()?;
            plan.work.push(work);
            self.end_of_line()?;
            self.next_line();
        }
        while plan.waves.is_empty() && self.eat_definition("d", "division", plan.divisions.len())? {
            let division = self.division(&plan, unwritten)?;
            plan.divisions.push(division);
        }
        while self.eat_definition("w", "wave", plan.waves.len())? {
            let wave = self.wave()?;
            plan.waves.push(wave);
            let line = self.end_of_line()?;
            self.lines.waves.push(line);
            self.next_line();
        }
        Ok(plan)
    }

    fn wave_machine(&mut self) -> Parsed<Machine> {
        self.attr("target")?;
        let target = self.string()?;
        let sms = self.attr_u32("sms")?;
        let devices = self.optional_u32("devices")?.unwrap_or(1);
        let warps = self.attr_u32("warps")?;
        self.expect("+")?;
        let loader_warps = self.u32()?;
        let registers = self.attr_u32("registers")?;
        self.expect("/")?;
        let loader_registers = self.u32()?;
        let products =
            if self.eat_attr("products")? { self.one_of(&Products::ALL, Products::name)? } else { Products::Warps };
        let pairs = self.eat("pairs");
        let (weights, inputs) = (self.wave_ring("weights")?, self.wave_ring("inputs")?);
        let (scratch_bytes, state_bytes) = (self.attr_u32("scratch")?, self.attr_u32("state")?);
        Ok(Machine {
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
        })
    }

    fn wave_ring(&mut self, key: &'static str) -> Parsed<Ring> {
        let slots = self.attr_u32(key)?;
        self.expect("*")?;
        Ok(Ring { slots, slot_bytes: self.u32()? })
    }

    fn work(&mut self) -> Parsed<Work> {
        let names = [
            "rows", "operand", "tiles", "parts", "packets", "squares", "best", "splits", "groups", "sources",
            "grouped", "placed",
        ];
        let layout = match self.words(&names)? {
            "operand" => Layout::Operand,
            "tiles" => Layout::Tiles,
            "best" => Layout::Best,
            name => {
                self.expect(":")?;
                match name {
                    "rows" => Layout::Rows(self.one_of(&DTYPES, DType::name)?),
                    "parts" => Layout::Parts(self.u32()?),
                    "packets" => Layout::Packets(self.u32()?),
                    "squares" => {
                        let groups = self.u32()?;
                        self.expect("*")?;
                        Layout::Squares { groups, parts: self.u32()? }
                    }
                    "splits" => Layout::Splits(self.u32()?),
                    "groups" => Layout::Groups(self.tiling()?),
                    "sources" => Layout::Sources(self.tiling()?),
                    "grouped" => Layout::Grouped(self.tiling()?),
                    _ => Layout::Placed(self.tiling()?),
                }
            }
        };
        let cols = self.attr_u32("cols")?;
        self.attr("at")?;
        let place = self.u64()?;
        Ok(Work { layout, cols, place, everywhere: self.eat("everywhere"), name: self.string()? })
    }

    /// `16*40`
    fn tiling(&mut self) -> Parsed<Tiling> {
        let rows = self.u32()?;
        self.expect("*")?;
        Ok(Tiling { rows, most: self.u32()? })
    }

    /// With the lines of its shares. Shares without a line are those that derived plans have.
    fn division(&mut self, plan: &Plan, unwritten: &mut Unwritten) -> Parsed<Division> {
        let over = match self.words(&["rows", "sums", "units", "heads", "items", "states"])? {
            "sums" => Over::Sums { parts: self.attr_u32("parts")? },
            "rows" => Over::Rows { parts: self.attr_u32("parts")? },
            "units" => {
                let (n, parts) = (self.attr_u32("n")?, self.attr_u32("parts")?);
                Over::Units { n, parts, step: self.optional_u32("step")?.unwrap_or(1) }
            }
            "heads" => {
                let (n, rows) = (self.attr_u32("n")?, self.attr_u32("rows")?);
                Over::Heads { n, rows, kept: self.optional_u32("kept")?.unwrap_or(1) }
            }
            "items" => {
                let parts = self.attr_u32("parts")?;
                let (rows, most) = (self.attr_u32("rows")?, self.attr_u32("most")?);
                Over::Items { parts, tiling: Tiling { rows, most } }
            }
            _ => Over::States { n: self.attr_u32("n")? },
        };
        let written = self.optional_u32("blocks")?;
        let blocks = written.unwrap_or(plan.rows.checked_div(plan.block_rows).unwrap_or(0));
        let line = self.end_of_line()?;
        self.next_line();
        let mut shares: Vec<Vec<Vec<Share>>> = vec![];
        while (shares.len() as u64) < u64::from(blocks) {
            let of_blocks = shares.len() as u32 + 1;
            let start = self.at;
            if self.eat("shares") {
                self.line_kind = "shares";
                let number = self.u32()?;
                if number < of_blocks || number > blocks {
                    let label = format!("expected {of_blocks} to {blocks} blocks of rows, found {number}");
                    return Err(self.error(start..self.at, "shares out of order".to_string(), label, None));
                }
                while (shares.len() as u32) + 1 < number {
                    let of_sms = self.usual(plan, over, shares.len() as u32 + 1, line.clone(), unwritten)?;
                    shares.push(of_sms);
                }
                let of_sms = self.shares(unwritten)?;
                shares.push(of_sms);
                self.end_of_line()?;
                self.next_line();
            } else {
                let of_sms = self.usual(plan, over, of_blocks, line.clone(), unwritten)?;
                shares.push(of_sms);
            }
        }
        Ok(Division { over, shares })
    }

    fn usual(
        &mut self,
        plan: &Plan,
        over: Over,
        blocks: u32,
        line: std::ops::Range<usize>,
        unwritten: &mut Unwritten,
    ) -> Parsed<Vec<Vec<Share>>> {
        let usual = usual(plan, over, blocks);
        let left =
            |(cost, _): &(u64, _)| Some((unwritten.plan.checked_sub(*cost)?, unwritten.text.checked_sub(*cost)?));
        let left = usual.as_ref().and_then(left);
        let (Some((_, usual)), Some((of_plan, of_text))) = (usual, left) else {
            let label = format!("expected a line `shares {blocks}`: no derived plan has these numbers");
            return Err(self.error(line, "division without shares".to_string(), label, None));
        };
        *unwritten = Unwritten { plan: of_plan, text: of_text };
        Ok(usual())
    }

    /// `sms=2: sm0 0+128[0..1] sm1 0+128[1..2]`
    fn shares(&mut self, unwritten: &mut Unwritten) -> Parsed<Vec<Vec<Share>>> {
        let start = self.at;
        let sms = self.attr_u32("sms")?;
        let Some(left) = unwritten.text.checked_sub(sms.into()) else {
            let label = format!("expected at most {} SMs", unwritten.text);
            return Err(self.error(start..self.at, "too many SMs".to_string(), label, None));
        };
        unwritten.text = left;
        self.expect(":")?;
        let mut of_sms = vec![vec![]; sms as usize];
        loop {
            let start = self.at;
            let Some(sm) = self.eat_id(SmId::PREFIX)? else { return Ok(of_sms) };
            let Some(shares) = of_sms.get_mut(sm as usize) else {
                let label = format!("expected an SM below {sms}, found {sm}");
                return Err(self.error(start..self.at, "no such SM".to_string(), label, None));
            };
            while let Some(row) = self.optional_number()? {
                self.expect("+")?;
                let rows = self.u32()?;
                let (lo, hi) = self.range()?;
                shares.push(Share { row, rows, lo, hi });
            }
        }
    }

    fn wave(&mut self) -> Parsed<Wave> {
        let grid = GridId(self.id("g")?);
        let division = DivisionId(self.id("d")?);
        let action = self.action()?;
        let mut boxes = vec![];
        if let Some(first) = self.optional_u32("boxes")? {
            boxes.push(first);
            while self.eat("*") {
                boxes.push(self.u32()?);
            }
        }
        let meets = !self.eat("no-meeting");
        self.expect("order")?;
        self.expect("(")?;
        let sums = self.sums()?;
        self.expect(")")?;
        Ok(Wave { grid, action, division, sums, boxes, meets })
    }

    /// `key=a3`
    fn works<const N: usize>(&mut self, keys: [&'static str; N]) -> Parsed<[WorkId; N]> {
        let mut ids = [WorkId(0); N];
        for (id, key) in ids.iter_mut().zip(keys) {
            self.attr(key)?;
            *id = WorkId(self.id("a")?);
        }
        Ok(ids)
    }

    fn optional_work(&mut self, key: &'static str) -> Parsed<Option<WorkId>> {
        if self.eat_attr(key)? { Ok(Some(WorkId(self.id("a")?))) } else { Ok(None) }
    }

    fn optional_vector(&mut self, key: &'static str) -> Parsed<Option<BufferId>> {
        if self.eat_attr(key)? { Ok(Some(BufferId(self.id("b")?))) } else { Ok(None) }
    }

    fn optional_norm(&mut self) -> Parsed<Option<NormOf>> {
        if !self.eat_attr("norm")? {
            return Ok(None);
        }
        let norm = self.norm()?;
        Ok(Some(NormOf { norm, weight: self.optional_vector("weight")?, bias: self.optional_vector("bias")? }))
    }

    fn input(&mut self, names: [&'static str; 2]) -> Parsed<Option<Input>> {
        let Some(to) = self.optional_work(names[0])? else { return Ok(None) };
        let (norm, squares) = (self.optional_norm()?, self.optional_work(names[1])?);
        Ok(Some(Input { to, norm, squares, rows: self.optional_work("rows")? }))
    }

    fn wave_target(&mut self) -> Parsed<Target> {
        let role = self.words(&["out", "residual", "sums", "best"])?;
        self.expect("=")?;
        let to = WorkId(self.id("a")?);
        Ok(match role {
            "out" => Target::Out(to),
            "residual" => Target::Residual(to),
            "sums" => Target::Sums { branch: self.optional_work("branch")?, residual: to, shown: self.eat("shown") },
            _ => Target::Best(to),
        })
    }

    fn splits(&mut self) -> Parsed<Option<Splits>> {
        let Some(positions) = self.optional_u32("split")? else { return Ok(None) };
        let most = self.attr_u32("splits")?;
        let [left] = self.works(["left"])?;
        Ok(Some(Splits { positions, most, left }))
    }

    fn action(&mut self) -> Parsed<Action> {
        // A word that begins with another one comes first.
        let names = [
            "rows",
            "matmul",
            "norm-heads",
            "append",
            "attend-row",
            "attend",
            "merge",
            "scores",
            "route",
            "gather",
            "places",
            "fill",
            "experts",
            "combine",
            "convolve",
            "mix-row",
            "mix",
            "gated",
            "short-conv",
        ];
        match self.words(&names)? {
            "rows" => self.rows_wave(),
            "matmul" => self.matmul(),
            "norm-heads" => self.works(["x", "out"]).map(|[x, out]| Action::NormHeads { x, out }),
            "append" => self.works(["x", "queries"]).map(|[x, queries]| Action::Append { x, queries }),
            "attend" => {
                let [queries, out] = self.works(["queries", "out"])?;
                let (tile, wide) = (self.attr_u32("tile")?, self.eat("wide"));
                Ok(Action::Attend { queries, out, tile, wide, gate: self.optional_work("gate")? })
            }
            "attend-row" => {
                let [x, out] = self.works(["x", "out"])?;
                Ok(Action::AttendRow { x, out, tile: self.attr_u32("tile")?, splits: self.splits()? })
            }
            "merge" => {
                let [out] = self.works(["out"])?;
                let Some(splits) = self.splits()? else { return Err(self.unexpected()) };
                Ok(Action::Merge { out, splits, gate: self.optional_work("gate")? })
            }
            "scores" => self.works(["x", "out"]).map(|[x, out]| Action::Scores { x, out }),
            "route" => self.works(["scores", "choices", "shares"]).map(|[scores, choices, shares]| Action::Route {
                scores,
                choices,
                shares,
            }),
            "gather" => {
                let [x, choices, groups, places, out] = self.works(["x", "choices", "groups", "places", "out"])?;
                Ok(Action::Gather { x, choices, groups, places, out })
            }
            "places" => {
                let [choices, groups, places, sources] = self.works(["choices", "groups", "places", "sources"])?;
                Ok(Action::Places { choices, groups, places, sources })
            }
            "fill" => {
                let [x, groups, sources, out] = self.works(["x", "groups", "sources", "out"])?;
                Ok(Action::Fill { x, groups, sources, out })
            }
            "experts" => {
                let [x, groups, out] = self.works(["x", "groups", "out"])?;
                let (pass, chunk) = (self.attr_u32("pass")?, self.attr_u32("chunk")?);
                Ok(Action::Experts { x, groups, out, pass, chunk, tickets: self.eat("tickets") })
            }
            "combine" => {
                let slots = self.slots()?;
                let [out] = self.works(["out"])?;
                Ok(Action::Combine { slots, out })
            }
            "convolve" => {
                self.works(["x", "scalars", "out"]).map(|[x, scalars, out]| Action::Convolve { x, scalars, out })
            }
            "mix" => self.works(["turned", "x", "out"]).map(|[turned, x, out]| Action::Mix { turned, x, out }),
            "gated" => self.works(["mixed", "x", "out"]).map(|[mixed, x, out]| Action::Gated { mixed, x, out }),
            "mix-row" => {
                self.works(["x", "scalars", "out"]).map(|[x, scalars, out]| Action::MixRow { x, scalars, out })
            }
            _ => self.works(["x", "out"]).map(|[x, out]| Action::ShortConv { x, out }),
        }
    }

    fn rows_wave(&mut self) -> Parsed<Action> {
        let [residual] = self.works(["residual"])?;
        let sum = if let Some(table) = self.optional_vector("embed")? {
            Some(Sum::Embed { table, scale: self.attr_f32("scale")?, best: self.optional_work("best")? })
        } else if let Some(branch) = self.optional_work("branch")? {
            Some(Sum::Branch { branch, norm: self.optional_norm()?, scale: self.attr_f32("scale")? })
        } else if self.eat("slots") {
            Some(Sum::Slots(self.slots()?))
        } else {
            self.eat("taken").then_some(Sum::Taken)
        };
        Ok(Action::Rows { residual, sum, out: self.input(["out", "squares"])? })
    }

    fn slots(&mut self) -> Parsed<Slots> {
        let [x, places, shares] = self.works(["x", "places", "shares"])?;
        Ok(Slots { x, places, shares, shared: self.optional_work("shared")?, gate: self.optional_work("gate")? })
    }

    fn matmul(&mut self) -> Parsed<Action> {
        let [x] = self.works(["x"])?;
        let squares = self.optional_work("squares")?;
        let target = self.wave_target()?;
        let then = self.input(["then", "leaves"])?;
        let (pass, chunk) = (self.attr_u32("pass")?, self.attr_u32("chunk")?);
        let rows = self.attr_u32("warps")?;
        self.expect("*")?;
        let units = self.u32()?;
        self.expect("*")?;
        let warps = Warps { rows, units, k: self.u32()? };
        let tiles = self.eat("tiles");
        let held = self.optional_u32("held")?.unwrap_or(0);
        Ok(Action::MatMul { x, squares, target, then, pass, chunk, warps, tiles, held })
    }

    fn sums(&mut self) -> Parsed<Sums> {
        let names = ["row", "product", "heads", "history", "splits", "choice", "nothing", "experts", "slots", "state"];
        Ok(match self.words(&names)? {
            "row" => Sums::Row { parts: self.attr_u32("parts")? },
            "product" => Sums::Product {
                parts: self.attr_u32("parts")?,
                granules: self.attr_u32("granules")?,
                groups: self.attr_u32("groups")?,
                paired: self.eat("paired"),
                tiles: self.eat("tiles"),
                squares: self.optional_u32("squares")?.unwrap_or(0),
            },
            "heads" => Sums::Heads,
            "history" => Sums::History {
                tile: self.attr_u32("tile")?,
                heads: self.attr_u32("heads")?,
                scratch_bytes: self.attr_u32("scratch")?,
                split: self.optional_u32("split")?,
            },
            "splits" => Sums::Splits { positions: self.attr_u32("positions")? },
            "choice" => Sums::Choice,
            "nothing" => Sums::Nothing,
            "experts" => Sums::Experts { granules: self.attr_u32("granules")?, tile: self.attr_u32("tile")? },
            "slots" => Sums::Slots { slots: self.attr_u32("slots")?, shared: self.eat("shared") },
            _ => Sums::State { positions: self.attr_u32("positions")? },
        })
    }
}
