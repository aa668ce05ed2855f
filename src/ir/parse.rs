//! Owns `.mkir` on its way in: syntax only. Whether ids exist and numbers make sense is what `validate` says.
//!
//! Ids of definitions count up from 0 in the order of the lines, because an id is an index; ids that are referred to
//! may dangle. Memory is proportional to the text: nothing is reserved from a number that the text states.
//! The grammar is what [`super::print`] writes; blanks between tokens, blank lines, comments and CRLF are free.

use super::op::{
    Access, Attention, Combine, Convolve, Epilogue, GroupNorm, MatVec, Mix, NormAttr, Op, QkNormAttr, Role, Route,
    Scan, UNIT_ROWS,
};
use super::print::{VERSION, act_name, group_score_name, norm_name, score_name};
use super::program::{
    Buffer, Cols, Content, Grid, Home, LayerOp, Operand, Paging, Part, Program, Rows, Second, Site, Space, VectorPart,
};
use super::schedule::{
    Event, Machine, Mechanism, Regime, Ring, Run, Schedule, Scope, SmemKind, SmemPart, Source, Task, Wait,
};
use super::table::{Fact, Holds, Table, TableHome};
use super::variant::{AttentionVariant, MatVecVariant, Variant};
use super::{BufferId, EventId, GridId, LayerId, SmId, TableId, TaskId};
use crate::dtype::{DType, Precision};
use crate::error::Fault;
use crate::format::{CODE_BYTES, Code, Format, Groups, ScaleCode};
use crate::model::graph::{
    Act, ClampedSwiglu, ExpertGroups, GroupScore, NormKind, QkNormSpan, QueryScale, RopeId, RowView, Score, TensorId,
};
use crate::text::{Diagnostic, Span, Style, nearest};
use std::collections::BTreeMap;
use std::fmt;

/// The first place where a text is not `.mkir`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// Title: what could not be read. Label: what was expected there, then what was found.
    pub diagnostic: Diagnostic,
}

impl ParseError {
    /// The guilty line with carets, without a leading `error: `; `path` as the user called the file, `text` its
    /// content.
    pub fn render(&self, path: &str, text: &str, style: Style) -> String {
        self.diagnostic.render(path, text, style)
    }

    /// A fault of the input, rendered.
    pub fn into_fault(self, path: &str, text: &str, style: Style) -> Fault {
        Fault::input(self.render(path, text, style))
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Diagnostic { title, label, help, .. } = &self.diagnostic;
        write!(f, "line {}, column {}: {title}: {label}", self.line, self.column)?;
        help.as_ref().map_or(Ok(()), |help| write!(f, " ({help})"))
    }
}

impl std::error::Error for ParseError {}

impl From<ParseError> for Fault {
    fn from(error: ParseError) -> Self {
        Fault::input(error.to_string())
    }
}

/// Reads a schedule.
pub fn parse(text: &str) -> Result<Schedule, ParseError> {
    parse_with_lines(text).map(|(schedule, _)| schedule)
}

/// Reads a schedule and where each entity of it is defined.
pub fn parse_with_lines(text: &str) -> Result<(Schedule, Lines), ParseError> {
    let mut p = Parser::new(text);
    let program = p.program()?;
    let schedule = p.schedule(program)?;
    p.end_of_text()?;
    Ok((schedule, p.lines))
}

/// Reads a program alone.
pub fn parse_program(text: &str) -> Result<Program, ParseError> {
    let mut p = Parser::new(text);
    let program = p.program()?;
    p.end_of_text()?;
    Ok(program)
}

/// Where a text defines what: each line from its first token to its last, comments left out. Lists are by index.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lines {
    pub program: Span,
    pub tables: Vec<Span>,
    pub buffers: Vec<Span>,
    /// The line of the grid itself; its operands follow.
    pub grids: Vec<Span>,
    pub machine: Span,
    pub ring: Span,
    pub smem: Vec<Span>,
    pub regimes: Vec<RegimeLines>,
    /// Of a plan of waves, whose first line is in `program`.
    pub waves: Vec<Span>,
}

/// The lines of one regime.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RegimeLines {
    pub regime: Span,
    pub tasks: Vec<Span>,
    pub events: Vec<Span>,
    pub queues: Vec<Span>,
    pub streams: Vec<Span>,
}

const SCORES: [Score; 2] = [Score::Softmax, Score::Sigmoid];
const GROUP_SCORES: [GroupScore; 2] = [GroupScore::Max, GroupScore::SumOfTwo];
const ACTS: [Act; 5] = [Act::Silu, Act::GeluErf, Act::GeluTanh, Act::Relu, Act::SquaredRelu];
const NORMS: [NormKind; 2] = [NormKind::Rms, NormKind::Layer];
pub(crate) const DTYPES: [DType; 5] = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::E4m3];
const ACCESSES: [Access; 4] = [Access::Read, Access::Write, Access::Update, Access::Stream];

/// Characters of a token that an error quotes.
const FOUND_CHARS_MAX: usize = 32;

/// What could stand at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    /// This word or sign.
    Literal(&'static str),
    /// Something that has a name.
    Kind(&'static str),
}

/// Picks the list that a line of a regime belongs to.
type LineList = fn(&mut RegimeLines) -> &mut Vec<Span>;

pub(crate) type Parsed<T> = Result<T, ParseError>;

/// A cursor over the text. `eat_` functions move only when they find what they look for; `expect` functions fail.
pub(crate) struct Parser<'a> {
    text: &'a str,
    pub(crate) at: usize,
    pub(crate) lines: Lines,
    /// First byte of the line being read.
    line_start: usize,
    /// The kind of line being read, for the title of an error; empty while that is not known.
    pub(crate) line_kind: &'static str,
    /// What was looked for in vain at `tried_at`: the alternatives an error there offers.
    tried: Vec<Expected>,
    tried_at: usize,
}

impl<'a> Parser<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Parser { text, at: 0, lines: Lines::default(), line_start: 0, line_kind: "", tried: vec![], tried_at: 0 }
    }

    // ---- lines

    pub(crate) fn program(&mut self) -> Parsed<Program> {
        self.version()?;
        self.next_line();
        self.line_kind = "program";
        self.expect("program")?;
        let name = self.string()?;
        let context_max = self.attr_u32("context_max")?;
        let rows = self.optional_u32("rows")?.unwrap_or(1);
        let mut dtype = |key| {
            self.attr(key)?;
            self.one_of(&DTYPES, DType::name)
        };
        let precision = Precision { weights: dtype("weights")?, cache: dtype("cache")?, wire: dtype("wire")? };
        self.lines.program = self.end_of_line()?;
        let mut program =
            Program { name, precision, context_max, rows, tables: vec![], buffers: vec![], grids: vec![] };
        loop {
            self.next_line();
            if program.buffers.is_empty() && self.eat_definition(TableId::PREFIX, "table", program.tables.len())? {
                program.tables.push(self.table()?);
            } else if self.eat_definition("b", "buffer", program.buffers.len())? {
                program.buffers.push(self.buffer()?);
            } else if self.eat_definition("g", "grid", program.grids.len())? {
                program.grids.push(self.grid()?);
            } else if let Some(grid) = program.grids.last_mut()
                && let Some(access) = self.eat_one_of(&ACCESSES, Access::name)
            {
                grid.operands.push(self.operand(access)?);
            } else {
                return Ok(program);
            }
        }
    }

    fn version(&mut self) -> Parsed<()> {
        self.next_line();
        self.line_kind = "version";
        self.expect("mkir")?;
        let (start, version) = (self.at, self.u32()?);
        if version != VERSION {
            let age = if version > VERSION { "newer" } else { "older" };
            let title = format!("`.mkir` version {version} is {age} than this build reads");
            let label = format!("expected version {VERSION}, found {version}");
            return Err(self.error(start..self.at, title, label, None));
        }
        self.end_of_line().map(|_| ())
    }

    fn table(&mut self) -> Parsed<Table> {
        let home = match self.words(&["host", "device"])? {
            "host" => TableHome::Host,
            _ => TableHome::Device(BufferId(self.id("b")?)),
        };
        let holds = self.one_of(&Holds::ALL, Holds::name)?;
        let (rows, cols) = self.extents()?;
        self.expect("<")?;
        let bound = self.u32()?;
        let name = self.string()?;
        let mut facts = vec![];
        while let Some(fact) = self.eat_one_of(&Fact::ALL, Fact::name) {
            facts.push(fact);
        }
        let line = self.end_of_line()?;
        self.lines.tables.push(line);
        Ok(Table { name, home, holds, rows, cols, bound, facts })
    }

    /// `[rows, cols]`
    fn extents(&mut self) -> Parsed<(u32, u32)> {
        self.expect("[")?;
        let rows = self.u32()?;
        self.expect(",")?;
        let cols = self.u32()?;
        self.expect("]")?;
        Ok((rows, cols))
    }

    fn buffer(&mut self) -> Parsed<Buffer> {
        let space = self.one_of(&Space::ALL, Space::name)?;
        let dtype = self.one_of(&DTYPES, DType::name)?;
        let (rows, cols) = self.extents()?;
        let coded = if self.eat_attr("code")? { Some(self.format()?) } else { None };
        let phases = if self.eat_attr("phases")? { self.u32()? } else { 1 };
        let words = self.eat("words");
        let paging = if self.eat_attr("pages")? {
            let table = TableId(self.id(TableId::PREFIX)?);
            self.expect(":")?;
            Some(Paging { table, rows: self.u32()? })
        } else {
            None
        };
        let home = if self.eat_attr("home")? { self.home()? } else { Home::of(space) };
        let name = self.string()?;
        let content = if self.eat("from") { Some(self.content()?) } else { None };
        let line = self.end_of_line()?;
        self.lines.buffers.push(line);
        Ok(Buffer { name, space, dtype, coded, rows, cols, phases, words, paging, home, content })
    }

    /// `int4 group=128:fp16 zeros row_scales`
    fn format(&mut self) -> Parsed<Format> {
        let code = self.one_of(&Code::ALL, Code::name)?;
        let groups = if self.eat_attr("group")? {
            let k = self.u32()?;
            self.expect(":")?;
            let scale = self.one_of(&ScaleCode::ALL, ScaleCode::name)?;
            Some(Groups { k, scale, zeros: self.eat("zeros"), minima: self.eat("minima") })
        } else {
            None
        };
        Ok(Format { code, groups, row_scales: self.eat("row_scales") })
    }

    fn home(&mut self) -> Parsed<Home> {
        Ok(match self.words(&["sm", "device", "everywhere", "divided"])? {
            "sm" => Home::Sm,
            "device" => {
                self.expect(":")?;
                Home::Device(self.u32()?)
            }
            "everywhere" => Home::Everywhere,
            _ => Home::Divided,
        })
    }

    fn content(&mut self) -> Parsed<Content> {
        if self.eat("rows") {
            let interleave = self.attr_u32("interleave")?;
            let mut parts = vec![];
            while let Some(tensor) = self.eat_id("w")? {
                let (view, rows) = self.view(tensor)?;
                parts.push(Part { view, rows });
            }
            Ok(Content::Rows { parts, interleave })
        } else if self.eat("vectors") {
            let offset = self.attr_f32("offset")?;
            let scale = self.optional_f32("scale")?.unwrap_or(1.0);
            let interleave = self.attr_u32("interleave")?;
            let mut parts = vec![];
            loop {
                if let Some(tensor) = self.eat_id("w")? {
                    let (view, len) = self.view(tensor)?;
                    parts.push(VectorPart { view: Some(view), len });
                } else if self.eat("zeros") {
                    self.expect("[")?;
                    self.expect("..+")?;
                    let len = self.u32()?;
                    self.expect("]")?;
                    parts.push(VectorPart { view: None, len });
                } else {
                    return Ok(Content::Vectors { parts, offset, scale, interleave });
                }
            }
        } else if self.eat("tensor") {
            Ok(Content::Tensor(TensorId(self.id("w")?)))
        } else if self.eat("rope") {
            Ok(Content::RopeTable(RopeId(self.id("r")?)))
        } else if self.eat("cache_scales") {
            Ok(Content::CacheScales(LayerId(self.id("l")?)))
        } else {
            Err(self.unexpected())
        }
    }

    /// `[first..+rows]` or `[first..+rows block B stride S]`, after the tensor's id.
    fn view(&mut self, tensor: u32) -> Parsed<(RowView, u32)> {
        self.expect("[")?;
        let first = self.u32()?;
        self.expect("..+")?;
        let rows = self.u32()?;
        let mut view = RowView::range(TensorId(tensor), first);
        if self.eat("block") {
            view.block = self.u32()?;
            self.expect("stride")?;
            view.stride = self.u32()?;
        }
        self.expect("]")?;
        Ok((view, rows))
    }

    fn second(&mut self) -> Result<Second, ParseError> {
        Ok(if self.eat_attr("axis")? {
            Second::Axis(self.u32()?)
        } else if self.eat_attr("dealt")? {
            Second::Dealt(self.u32()?)
        } else {
            Second::Ordinal(self.attr_u32("ordinal")?)
        })
    }

    fn grid(&mut self) -> Parsed<Grid> {
        let op_name = self.words(&[
            "select",
            "report",
            "route",
            "embed",
            "join",
            "matvec",
            "attention",
            "attention_merge",
            "norm_add",
            "combine",
            "mix",
            "convolve",
            "scan",
            "group_norm",
        ])?;
        let name = self.string()?;
        let n = self.attr_u32("n")?;
        let second = self.second()?;
        let site = if self.eat_attr("site")? { Some(self.site()?) } else { None };
        let per_row = self.eat("per_row");
        let op = match op_name {
            "select" => Op::Select,
            "report" => Op::Report,
            "route" => Op::Route(self.route()?),
            "combine" => Op::Combine(Combine {
                width: self.attr_u32("width")?,
                slots: self.attr_u32("slots")?,
                shared: self.optional_f32("shared")?,
                scale: self.attr_f32("scale")?,
                adds: self.eat("adds"),
            }),
            "mix" => Op::Mix(Mix {
                key_heads: self.attr_u32("key_heads")?,
                value_heads: self.attr_u32("value_heads")?,
                key_dim: self.attr_u32("key_dim")?,
                value_dim: self.attr_u32("value_dim")?,
                kernel: self.attr_u32("kernel")?,
                eps: self.attr_f32("eps")?,
                doubles: self.eat("doubles"),
            }),
            "convolve" => {
                Op::Convolve(Convolve { channels: self.attr_u32("channels")?, kernel: self.attr_u32("kernel")? })
            }
            "scan" => Op::Scan(Scan {
                heads: self.attr_u32("heads")?,
                head_dim: self.attr_u32("head_dim")?,
                groups: self.attr_u32("groups")?,
                state: self.attr_u32("state")?,
                kernel: self.attr_u32("kernel")?,
                scales: [
                    self.attr_f32("x_scale")?,
                    self.attr_f32("b_scale")?,
                    self.attr_f32("c_scale")?,
                    self.attr_f32("step_scale")?,
                ],
                gate: self.optional_f32("gate_scale")?,
            }),
            "group_norm" => Op::GroupNorm(GroupNorm {
                width: self.attr_u32("width")?,
                groups: self.attr_u32("groups")?,
                eps: self.attr_f32("eps")?,
                gate: self.optional_f32("gate_scale")?,
            }),
            "join" => Op::Join { scale: self.attr_f32("scale")? },
            "embed" => Op::Embed { scale: self.attr_f32("scale")?, everywhere: self.eat("everywhere") },
            "matvec" => Op::MatVec(self.matvec()?),
            "attention" => Op::Attention(self.attention()?),
            "attention_merge" => Op::AttentionMerge {
                head_dim: self.attr_u32("head_dim")?,
                splits: self.attr_u32("splits")?,
                heads_per_task: self.attr_u32("heads_per_task")?,
                gate: self.eat("gate"),
            },
            _ => {
                self.attr("norm")?;
                let (norm, width, scale) = (self.norm()?, self.attr_u32("width")?, self.attr_f32("scale")?);
                Op::NormAdd { norm, width, scale, everywhere: self.eat("everywhere") }
            }
        };
        let line = self.end_of_line()?;
        self.lines.grids.push(line);
        Ok(Grid { name, site, op, n, second, per_row, operands: vec![] })
    }

    /// `qkv.l0`, or `head`
    fn site(&mut self) -> Parsed<Site> {
        let op = self.one_of(&LayerOp::ALL, LayerOp::name)?;
        let layer = if self.eat(".") { Some(LayerId(self.id("l")?)) } else { None };
        Ok(Site { op, layer })
    }

    fn route(&mut self) -> Parsed<Route> {
        let (experts, top_k) = (self.attr_u32("experts")?, self.attr_u32("top_k")?);
        self.attr("score")?;
        let score = self.one_of(&SCORES, score_name)?;
        let mut groups = None;
        if let Some(count) = self.optional_u32("groups")? {
            let kept = self.attr_u32("kept")?;
            self.attr("by")?;
            groups = Some(ExpertGroups { count, kept, score: self.one_of(&GROUP_SCORES, group_score_name)? });
        }
        let normalise = self.optional_f32("normalise")?;
        Ok(Route { experts, top_k, score, groups, normalise, scale: self.attr_f32("scale")? })
    }

    fn matvec(&mut self) -> Parsed<MatVec> {
        let (rows, k) = (self.attr_u32("rows")?, self.attr_u32("k")?);
        let slots = self.optional_u32("slots")?.unwrap_or(1);
        let norm = if self.eat_attr("norm")? { Some(self.norm()?) } else { None };
        let own_input = self.eat("own_input");
        let unit_rows = self.optional_u32("unit_rows")?.unwrap_or(UNIT_ROWS);
        self.attr("epilogue")?;
        let words = ["store", "scores", "act", "gated", "gated_by", "clamped", "residual", "logits"];
        let epilogue = match self.words(&words)? {
            "store" => Epilogue::Store,
            "scores" => Epilogue::Scores,
            "clamped" => {
                Epilogue::Clamped(ClampedSwiglu { alpha: self.attr_f32("alpha")?, limit: self.attr_f32("limit")? })
            }
            "act" => Epilogue::Act(self.act()?),
            "gated" => Epilogue::Gated(self.act()?),
            "gated_by" => Epilogue::GatedBy { act: self.act()?, scale: self.attr_f32("scale")? },
            "residual" => Epilogue::Residual { scale: self.attr_f32("scale")? },
            _ => Epilogue::Logits { scale: self.attr_f32("scale")?, softcap: self.optional_f32("softcap")? },
        };
        Ok(MatVec { rows, k, slots, norm, own_input, epilogue, unit_rows })
    }

    fn act(&mut self) -> Parsed<Act> {
        self.expect(":")?;
        self.one_of(&ACTS, act_name)
    }

    pub(crate) fn norm(&mut self) -> Parsed<NormAttr> {
        let kind = self.one_of(&NORMS, norm_name)?;
        self.expect(":")?;
        Ok(NormAttr { kind, eps: self.f32()? })
    }

    fn attention(&mut self) -> Parsed<Attention> {
        let heads = self.attr_u32("heads")?;
        let group = self.attr_u32("group")?;
        let heads_per_task = self.attr_u32("heads_per_task")?;
        let head_dim = self.attr_u32("head_dim")?;
        let splits = self.attr_u32("splits")?;
        let scale = self.attr_f32("scale")?;
        let softcap = self.optional_f32("softcap")?;
        let window = self.optional_u32("window")?;
        let rotary = self.attr_u32("rotary")?;
        let interleaved = self.eat("interleaved");
        let mut qk_norm = |key| {
            if !self.eat_attr(key)? {
                return Ok(None);
            }
            let norm = self.norm()?;
            self.expect(":")?;
            Ok(Some(QkNormAttr { norm, span: self.one_of(&QkNormSpan::ALL, QkNormSpan::name)? }))
        };
        let (q_norm, k_norm) = (qk_norm("q_norm")?, qk_norm("k_norm")?);
        let norm_after_rope = self.eat("norm_after_rope");
        let query_scale = match self.eat_attr("query_scale")? {
            false => None,
            true => {
                let beta = self.f32()?;
                self.expect(":")?;
                Some(QueryScale { beta, original: self.u32()? })
            }
        };
        let (sinks, gate) = (self.eat("sinks"), self.eat("gate"));
        Ok(Attention {
            heads_per_task,
            group,
            heads,
            head_dim,
            scale,
            softcap,
            window,
            rotary,
            interleaved,
            q_norm,
            k_norm,
            splits,
            sinks,
            gate,
            query_scale,
            norm_after_rope,
        })
    }

    fn operand(&mut self, access: Access) -> Parsed<Operand> {
        self.line_kind = "operand";
        let role = self.one_of(&Role::ALL, Role::name)?;
        let buffer = BufferId(self.id("b")?);
        let rows = if self.eat("lookup") {
            self.expect(":")?;
            Rows::Lookup(TableId(self.id(TableId::PREFIX)?))
        } else {
            self.one_of(&Rows::ALL, Rows::name)?
        };
        let cols = self.cols()?;
        self.end_of_line()?;
        Ok(Operand { role, access, buffer, rows, cols })
    }

    /// `[base + stride*(i/div) + stride_j*j ..+len <limit] first only_j=J`; a term left out is 0. `[lo..hi]` for the
    /// same columns everywhere.
    fn cols(&mut self) -> Parsed<Cols> {
        let mut cols = Cols { base: 0, stride: 0, div: 1, stride_j: 0, len: 0, limit: 0, first: false, only_j: None };
        // Terms come in this order, each at most once.
        let mut next = 0;
        self.expect("[")?;
        loop {
            let (start, factor) = (self.at, self.u32()?);
            let term = if !self.eat("*") {
                cols.base = factor;
                1
            } else if self.eat("i") {
                cols.stride = factor;
                2
            } else if self.eat("(") {
                cols.stride = factor;
                self.expect("i")?;
                self.expect("/")?;
                cols.div = self.u32()?;
                self.expect(")")?;
                2
            } else {
                self.expect("j")?;
                cols.stride_j = factor;
                3
            };
            if term <= next {
                let label = "expected a constant, then a multiple of `i`, then a multiple of `j`, each at most once";
                return Err(self.error(start..self.at, self.malformed(), label.to_string(), None));
            }
            next = term;
            if self.eat("..+") {
                cols.len = self.u32()?;
                self.expect("<")?;
                cols.limit = self.u32()?;
                break;
            }
            if term == 1 && self.eat("..") {
                let start = self.at;
                cols.limit = self.u32()?;
                let Some(len) = cols.limit.checked_sub(cols.base) else {
                    let label = format!("expected at least {}, found {}", cols.base, cols.limit);
                    return Err(self.error(start..self.token_end(start), self.malformed(), label, None));
                };
                cols.len = len;
                break;
            }
            self.expect("+")?;
        }
        self.expect("]")?;
        cols.first = self.eat("first");
        cols.only_j = self.optional_u32("only_j")?;
        Ok(cols)
    }

    pub(crate) fn schedule(&mut self, program: Program) -> Parsed<Schedule> {
        // The line that ended the program is at the cursor.
        self.expect("machine")?;
        self.line_kind = "machine";
        let target = self.string()?;
        let sms = self.attr_u32("sms")?;
        let devices = self.optional_u32("devices")?.unwrap_or(1);
        let consumer_warps = self.attr_u32("consumer_warps")?;
        let loader_warps = self.attr_u32("loader_warps")?;
        let registers_per_thread = self.attr_u32("registers_per_thread")?;
        let loader_registers = self.optional_u32("loader_registers")?.unwrap_or(0);
        let reduce_batch = self.attr_u32("reduce_batch")?;
        let residual_cols = self.optional_u32("residual_cols")?.unwrap_or(0);
        self.lines.machine = self.end_of_line()?;
        self.next_line();
        self.line_kind = "ring";
        self.expect("ring")?;
        let ring = Ring {
            slots: self.attr_u32("slots")?,
            slot_bytes: self.attr_u32("slot_bytes")?,
            arrivals: self.attr_u32("arrivals")?,
            flight_high: self.attr_u32("flight_high")?,
            flight_low: self.attr_u32("flight_low")?,
            flight_free: self.attr_u32("flight_free")?,
            copiers: self.optional_u32("copiers")?.unwrap_or(1),
        };
        self.lines.ring = self.end_of_line()?;
        let mut smem = vec![];
        let mut variants = BTreeMap::new();
        let mut placement = vec![];
        let mut regimes: Vec<Regime> = vec![];
        loop {
            self.next_line();
            if let Some(regime) = regimes.last_mut()
                && let Some((kind, line)) = self.regime_line(regime)?
            {
                if let Some(lines) = self.lines.regimes.last_mut() {
                    kind(lines).push(line);
                }
                continue;
            }
            if regimes.is_empty() && self.eat("smem") {
                self.line_kind = "smem";
                smem.push(self.smem_part()?);
            } else if regimes.is_empty() && self.eat("variant") {
                self.line_kind = "variant";
                let (grid, variant) = self.variant(variants.keys().next_back().copied())?;
                variants.insert(grid, variant);
            } else if regimes.is_empty() && self.eat("place") {
                self.line_kind = "place";
                self.places(&mut placement)?;
            } else if self.eat("regime") {
                self.line_kind = "regime";
                self.index("r", "regime", regimes.len())?;
                self.expect("from")?;
                let from_position = self.u32()?;
                let line = self.end_of_line()?;
                self.lines.regimes.push(RegimeLines { regime: line, ..RegimeLines::default() });
                regimes.push(Regime { from_position, tasks: vec![], events: vec![], queues: vec![], streams: vec![] });
            } else {
                break;
            }
        }
        let machine = Machine {
            target,
            sms,
            devices,
            consumer_warps,
            loader_warps,
            registers_per_thread,
            loader_registers,
            reduce_batch,
            residual_cols,
            ring,
            smem,
        };
        Ok(Schedule { program, machine, variants, placement, regimes })
    }

    fn smem_part(&mut self) -> Parsed<SmemPart> {
        let kind = self.one_of(&SmemKind::ALL, SmemKind::name)?;
        let offset = self.u32()?;
        self.expect("..+")?;
        let bytes = self.u32()?;
        let line = self.end_of_line()?;
        self.lines.smem.push(line);
        Ok(SmemPart { kind, offset, bytes })
    }

    /// `g3 units=..`: a grid after `last`, and its variant.
    fn variant(&mut self, last: Option<GridId>) -> Parsed<(GridId, Variant)> {
        let start = self.at;
        let grid = GridId(self.id("g")?);
        if let Some(last) = last.filter(|last| *last >= grid) {
            let label = format!("expected a grid after `{last}`, found `{grid}`");
            return Err(self.error(start..self.token_end(start), "variant out of order".to_string(), label, None));
        }
        let variant = if self.eat_attr("units")? {
            Variant::MatVec(MatVecVariant {
                units: self.u32()?,
                chunk: self.attr_u32("chunk")?,
                block: self.attr_u32("block")?,
                units_per_warp: self.attr_u32("units_per_warp")?,
                poll_batch: self.attr_u32("poll_batch")?,
                granule: if self.eat_attr("granule")? { self.u32()? } else { CODE_BYTES },
                pass: if self.eat_attr("pass")? { self.u32()? } else { 0 },
                shared: self.eat("shared"),
            })
        } else {
            self.attr("warps_per_head")?;
            Variant::Attention(AttentionVariant {
                warps_per_head: self.u32()?,
                prefetch_v: self.attr_flag("prefetch_v")?,
                swizzled: self.attr_flag("swizzled")?,
                pitch: self.attr_u32("pitch")?,
            })
        };
        self.end_of_line()?;
        Ok((grid, variant))
    }

    /// `key=0` or `key=1`
    fn attr_flag(&mut self, key: &'static str) -> Parsed<bool> {
        self.attr(key)?;
        Ok(self.words(&["0", "1"])? == "1")
    }

    fn places(&mut self, placement: &mut Vec<Option<u64>>) -> Parsed<()> {
        loop {
            let start = self.at;
            let Some(id) = self.eat_id("b")? else { break };
            self.check_index(start, id, "b", "buffer", placement.len())?;
            self.expect("@")?;
            placement.push(if self.eat("-") { None } else { Some(self.u64()?) });
        }
        self.end_of_line().map(|_| ())
    }

    /// Reads a line that belongs to a regime, and says which list of lines it belongs to; `None` when it is another.
    fn regime_line(&mut self, regime: &mut Regime) -> Parsed<Option<(LineList, Span)>> {
        let list: LineList = if self.eat_definition("t", "task", regime.tasks.len())? {
            regime.tasks.push(self.task()?);
            |lines| &mut lines.tasks
        } else if self.eat_definition("e", "event", regime.events.len())? {
            regime.events.push(self.event()?);
            |lines| &mut lines.events
        } else if self.eat("queue") {
            self.line_kind = "queue";
            self.index(SmId::PREFIX, "queue", regime.queues.len())?;
            self.expect(":")?;
            let mut queue = vec![];
            while let Some(task) = self.eat_id("t")? {
                queue.push(TaskId(task));
            }
            regime.queues.push(queue);
            |lines| &mut lines.queues
        } else if self.eat("stream") {
            self.line_kind = "stream";
            self.index(SmId::PREFIX, "stream", regime.streams.len())?;
            self.expect(":")?;
            let mut stream = vec![];
            while let Some(task) = self.eat_id("t")? {
                self.expect("+")?;
                let source = if self.eat("hist") {
                    self.expect(":")?;
                    Source::History { rows: self.u32()? }
                } else {
                    let buffer = BufferId(self.id("b")?);
                    let (lo, hi) = self.range()?;
                    Source::Units { buffer, lo, hi }
                };
                let after = if self.eat("after") { Some(EventId(self.id("e")?)) } else { None };
                stream.push(Run { task: TaskId(task), source, after });
            }
            regime.streams.push(stream);
            |lines| &mut lines.streams
        } else {
            return Ok(None);
        };
        Ok(Some((list, self.end_of_line()?)))
    }

    fn task(&mut self) -> Parsed<Task> {
        let grid = GridId(self.id("g")?);
        let (lo, hi) = self.range()?;
        let j = self.optional_u32("j")?.unwrap_or(0);
        let row = self.optional_u32("row")?.unwrap_or(0);
        let mut task = Task { grid, lo, hi, j, row, waits: vec![], signals: vec![] };
        if self.eat("wait") {
            while let Some(event) = self.eat_id("e")? {
                self.expect(">=")?;
                task.waits.push(Wait { event: EventId(event), count: self.u32()? });
            }
        }
        if self.eat("signal") {
            while let Some(event) = self.eat_id("e")? {
                task.signals.push(EventId(event));
            }
        }
        Ok(task)
    }

    fn event(&mut self) -> Parsed<Event> {
        let buffer = BufferId(self.id("b")?);
        let (lo, hi) = self.range()?;
        let row = self.optional_u32("row")?;
        let count = self.attr_u32("count")?;
        let mechanism = self.one_of(&Mechanism::ALL, Mechanism::name)?;
        let scope = if self.eat_attr("scope")? { self.one_of(&Scope::ALL, Scope::name)? } else { Scope::Device };
        let (carried, proxy) = (self.eat("carried"), self.eat("proxy"));
        Ok(Event { buffer, row, lo, hi, count, mechanism, scope, carried, proxy })
    }

    /// `[lo..hi]`
    pub(crate) fn range(&mut self) -> Parsed<(u32, u32)> {
        self.expect("[")?;
        let lo = self.u32()?;
        self.expect("..")?;
        let hi = self.u32()?;
        self.expect("]")?;
        Ok((lo, hi))
    }

    // ---- definitions

    /// `b3 =` at the start of a line, where 3 is the number of buffers so far.
    pub(crate) fn eat_definition(&mut self, prefix: &'static str, kind: &'static str, index: usize) -> Parsed<bool> {
        let start = self.at;
        let Some(id) = self.eat_id(prefix)? else { return Ok(false) };
        self.line_kind = kind;
        self.check_index(start, id, prefix, kind, index)?;
        self.expect("=")?;
        Ok(true)
    }

    fn index(&mut self, prefix: &'static str, kind: &'static str, index: usize) -> Parsed<()> {
        let start = self.at;
        let id = self.id(prefix)?;
        self.check_index(start, id, prefix, kind, index)
    }

    fn check_index(&mut self, start: usize, id: u32, prefix: &str, kind: &str, index: usize) -> Parsed<()> {
        if id as usize == index {
            return Ok(());
        }
        let label = format!("expected `{prefix}{index}`, found `{prefix}{id}`");
        let help = "an id is an index: ids count up from 0 in the order of the lines";
        let title = format!("{kind} out of order");
        Err(self.error(start..self.token_end(start), title, label, Some(help.to_string())))
    }

    // ---- tokens

    /// Moves to the first token of the next line that has one.
    pub(crate) fn next_line(&mut self) {
        let bytes = self.text.as_bytes();
        loop {
            self.skip_blanks();
            match bytes.get(self.at) {
                Some(b'\n') => self.at += 1,
                Some(b';') => self.skip_comment(),
                _ => break,
            }
        }
        self.line_kind = "";
        self.line_start = self.at;
    }

    fn skip_blanks(&mut self) {
        while let Some(b' ' | b'\t' | b'\r') = self.text.as_bytes().get(self.at) {
            self.at += 1;
        }
    }

    fn skip_comment(&mut self) {
        self.at = self.text[self.at..].find('\n').map_or(self.text.len(), |end| self.at + end);
    }

    /// Ends the line and says where its tokens are.
    pub(crate) fn end_of_line(&mut self) -> Parsed<Span> {
        let tokens = self.text[self.line_start..self.at].trim_end();
        let line = self.line_start..self.line_start + tokens.len();
        match self.text.as_bytes().get(self.at) {
            Some(b';') => self.skip_comment(),
            None | Some(b'\n') => {}
            Some(_) => {
                self.miss(Expected::Kind("the end of the line"));
                return Err(self.unexpected());
            }
        }
        Ok(line)
    }

    pub(crate) fn end_of_text(&mut self) -> Parsed<()> {
        if self.at == self.text.len() {
            return Ok(());
        }
        self.miss(Expected::Kind("the end of the text"));
        Err(self.unexpected())
    }

    /// Moves over `token` and the blanks after it. A word matches whole words only.
    pub(crate) fn eat(&mut self, token: &'static str) -> bool {
        let rest = &self.text.as_bytes()[self.at..];
        let whole = |next: Option<&u8>| !next.is_some_and(|b| is_word_byte(*b));
        let is_word = token.bytes().next_back().is_some_and(is_word_byte);
        // Most tokens that are looked for are not there, and their first byte says so.
        let begins = rest.first() == token.as_bytes().first() && rest.starts_with(token.as_bytes());
        if begins && (!is_word || whole(rest.get(token.len()))) {
            self.advance(token.len());
            return true;
        }
        self.miss(Expected::Literal(token));
        false
    }

    pub(crate) fn expect(&mut self, token: &'static str) -> Parsed<()> {
        if self.eat(token) { Ok(()) } else { Err(self.unexpected()) }
    }

    /// `key=`
    pub(crate) fn eat_attr(&mut self, key: &'static str) -> Parsed<bool> {
        if !self.eat(key) {
            return Ok(false);
        }
        self.expect("=")?;
        Ok(true)
    }

    pub(crate) fn attr(&mut self, key: &'static str) -> Parsed<()> {
        if self.eat_attr(key)? { Ok(()) } else { Err(self.unexpected()) }
    }

    pub(crate) fn attr_u32(&mut self, key: &'static str) -> Parsed<u32> {
        self.attr(key)?;
        self.u32()
    }

    pub(crate) fn attr_f32(&mut self, key: &'static str) -> Parsed<f32> {
        self.attr(key)?;
        self.f32()
    }

    pub(crate) fn optional_u32(&mut self, key: &'static str) -> Parsed<Option<u32>> {
        if self.eat_attr(key)? { self.u32().map(Some) } else { Ok(None) }
    }

    fn optional_f32(&mut self, key: &'static str) -> Parsed<Option<f32>> {
        if self.eat_attr(key)? { self.f32().map(Some) } else { Ok(None) }
    }

    fn eat_one_of<T: Copy>(&mut self, all: &[T], name: fn(T) -> &'static str) -> Option<T> {
        all.iter().copied().find(|&value| self.eat(name(value)))
    }

    pub(crate) fn one_of<T: Copy>(&mut self, all: &[T], name: fn(T) -> &'static str) -> Parsed<T> {
        match self.eat_one_of(all, name) {
            Some(value) => Ok(value),
            None => Err(self.unexpected()),
        }
    }

    pub(crate) fn words(&mut self, all: &[&'static str]) -> Parsed<&'static str> {
        self.one_of(all, |word| word)
    }

    /// `t12`: the prefix and a number, as one word.
    pub(crate) fn eat_id(&mut self, prefix: &'static str) -> Parsed<Option<u32>> {
        let rest = &self.text.as_bytes()[self.at..];
        let digits = rest.strip_prefix(prefix.as_bytes()).map_or(0, digit_count);
        let len = prefix.len() + digits;
        if digits == 0 || rest.get(len).is_some_and(|b| is_word_byte(*b)) {
            self.miss(Expected::Kind(id_name(prefix)));
            return Ok(None);
        }
        let number = self.number(self.at + prefix.len(), len - prefix.len(), u32::MAX.into())?;
        self.advance(len);
        Ok(Some(number as u32))
    }

    pub(crate) fn id(&mut self, prefix: &'static str) -> Parsed<u32> {
        match self.eat_id(prefix)? {
            Some(id) => Ok(id),
            None => Err(self.unexpected()),
        }
    }

    pub(crate) fn u32(&mut self) -> Parsed<u32> {
        // At most `u32::MAX`, so the cast keeps the value.
        self.integer(u32::MAX.into()).map(|n| n as u32)
    }

    /// A number, if there is one.
    pub(crate) fn optional_number(&mut self) -> Parsed<Option<u32>> {
        let digits = self.text.as_bytes().get(self.at).is_some_and(u8::is_ascii_digit);
        if digits { self.u32().map(Some) } else { Ok(None) }
    }

    pub(crate) fn u64(&mut self) -> Parsed<u64> {
        self.integer(u64::MAX)
    }

    fn integer(&mut self, most: u64) -> Parsed<u64> {
        let rest = &self.text.as_bytes()[self.at..];
        let digits = digit_count(rest);
        if digits == 0 || rest.get(digits).is_some_and(|b| is_word_byte(*b)) {
            self.miss(Expected::Kind("a number"));
            return Err(self.unexpected());
        }
        let number = self.number(self.at, digits, most)?;
        self.advance(digits);
        Ok(number)
    }

    /// The number that `digits` digits at `start` write.
    fn number(&mut self, start: usize, digits: usize, most: u64) -> Parsed<u64> {
        let mut number = 0u64;
        for digit in self.text.as_bytes()[start..start + digits].iter().map(|b| u64::from(b - b'0')) {
            number = match number.checked_mul(10).and_then(|n| n.checked_add(digit)) {
                Some(n) if n <= most => n,
                _ => {
                    let label = format!("expected at most {most}");
                    return Err(self.error(start..start + digits, "number too large".to_string(), label, None));
                }
            };
        }
        Ok(number)
    }

    fn f32(&mut self) -> Parsed<f32> {
        let rest = &self.text[self.at..];
        let len = rest.bytes().take_while(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'+')).count();
        let token = &rest[..len];
        if token.is_empty() {
            self.miss(Expected::Kind("a number like `0.5`"));
            return Err(self.unexpected());
        }
        let Ok(value) = token.parse::<f32>() else {
            let label = format!("expected a number like `0.5`, found {}", quoted(token));
            return Err(self.error(self.at..self.at + len, "malformed number".to_string(), label, None));
        };
        if value.is_infinite() && token.bytes().any(|b| b.is_ascii_digit()) {
            let label = format!(
                "expected at most {} in \
                 magnitude, or `inf`",
                f32::MAX
            );
            return Err(self.error(self.at..self.at + len, "number too large".to_string(), label, None));
        }
        self.advance(len);
        Ok(value)
    }

    /// A name in double quotes, with `\"`, `\\` and `\u{hex}`.
    pub(crate) fn string(&mut self) -> Parsed<String> {
        let start = self.at;
        let Some(body) = self.text[start..].strip_prefix('"') else {
            self.miss(Expected::Kind("a name in double quotes"));
            return Err(self.unexpected());
        };
        let mut name = String::new();
        let mut rest = body;
        loop {
            let stop = rest.find(['"', '\\', '\n']).unwrap_or(rest.len());
            name.push_str(&rest[..stop]);
            rest = &rest[stop..];
            let at = self.text.len() - rest.len();
            if rest.starts_with('"') {
                self.advance(at + 1 - start);
                return Ok(name);
            }
            let Some(escape) = rest.strip_prefix('\\') else {
                let label = "expected `\"` before the end of the line".to_string();
                return Err(self.error(start..at, "unterminated name".to_string(), label, None));
            };
            let (c, len) = match escape.as_bytes().first() {
                Some(b'"') => (Some('"'), 1),
                Some(b'\\') => (Some('\\'), 1),
                _ => match escape.strip_prefix("u{").and_then(|code| code.split_once('}')) {
                    Some((hex, _)) if hex.len() <= 6 => {
                        (u32::from_str_radix(hex, 16).ok().and_then(char::from_u32), hex.len() + 3)
                    }
                    _ => (None, 0),
                },
            };
            let Some(c) = c else {
                let label = "expected `\\\"`, `\\\\` or `\\u{hex}`".to_string();
                return Err(self.error(at..at + 1, "unknown escape in a name".to_string(), label, None));
            };
            name.push(c);
            rest = &escape[len..];
        }
    }

    fn advance(&mut self, len: usize) {
        self.at += len;
        self.skip_blanks();
    }

    /// End of the word, or of the one character, at `start`.
    fn token_end(&self, start: usize) -> usize {
        let rest = &self.text[start..];
        let word = rest.bytes().take_while(|b| is_word_byte(*b)).count();
        let len = if word > 0 { word } else { rest.chars().next().map_or(0, char::len_utf8) };
        start + len
    }

    // ---- errors

    fn miss(&mut self, expected: Expected) {
        if self.tried_at != self.at {
            self.tried.clear();
            self.tried_at = self.at;
        }
        self.tried.push(expected);
    }

    /// The token at the cursor is none of those that were tried there.
    pub(crate) fn unexpected(&mut self) -> ParseError {
        let span = self.at..self.token_end(self.at);
        let token = &self.text[span.clone()];
        let found = match token {
            "" => "the end of the text".to_string(),
            "\n" | ";" => "the end of the line".to_string(),
            _ => quoted(token),
        };
        let mut alternatives: Vec<Expected> = vec![];
        for &expected in if self.tried_at == self.at { &self.tried[..] } else { &[] } {
            if !alternatives.contains(&expected) {
                alternatives.push(expected);
            }
        }
        let names: Vec<String> = alternatives
            .iter()
            .map(|expected| match expected {
                Expected::Literal(token) => format!("`{token}`"),
                Expected::Kind(name) => name.to_string(),
            })
            .collect();
        let expected = match names.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => "nothing".to_string(),
        };
        let words = alternatives.iter().filter_map(|expected| match expected {
            Expected::Literal(token) => Some(*token),
            Expected::Kind(_) => None,
        });
        let help = nearest(token, words).map(|word| format!("did you mean `{word}`?"));
        self.error(span, self.malformed(), format!("expected {expected}, found {found}"), help)
    }

    fn malformed(&self) -> String {
        match self.line_kind {
            "" => "unknown kind of line".to_string(),
            kind => format!("malformed {kind} line"),
        }
    }

    pub(crate) fn error(&self, span: Span, title: String, label: String, help: Option<String>) -> ParseError {
        let before = &self.text[..span.start];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.bytes().filter(|b| *b == b'\n').count() + 1;
        let column = before[line_start..].chars().count() + 1;
        ParseError { line, column, diagnostic: Diagnostic { title, span, label, help } }
    }
}

fn id_name(prefix: &str) -> &'static str {
    match prefix {
        "b" => "a buffer like `b3`",
        "v" => "a table like `v0`",
        "g" => "a grid like `g2`",
        "t" => "a task like `t12`",
        "e" => "an event like `e7`",
        "sm" => "an SM like `sm4`",
        "l" => "a layer like `l2`",
        "w" => "a tensor like `w5`",
        "a" => "activations like `a0`",
        "d" => "a division like `d0`",
        _ => "an id like `r0`",
    }
}

/// A token as an error quotes it.
fn quoted(token: &str) -> String {
    format!("`{}`", token.chars().take(FOUND_CHARS_MAX).flat_map(char::escape_debug).collect::<String>())
}

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn digit_count(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|b| b.is_ascii_digit()).count()
}

#[cfg(test)]
mod tests {
    use super::super::print::{print, print_program};
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const SAMPLE: &str = r#"mkir 2
program "tiny \"q\" \u{a}" context_max=64 weights=bf16 cache=fp32 wire=fp32
b0 = exchange i32 [1, 4] phases=2 "candidates"
b1 = weight bf16 [96, 32] "qkv.0.weight" from rows interleave=1 w2[0..+32] w3[0..+32 block 16 stride 48]
b2 = constant fp32 [1, 96] "qkv.0.bias" from vectors offset=1 interleave=4 w4[0..+32] zeros[..+64]
b3 = constant bf16 [512, 32] "embed" from tensor w0
b4 = constant fp32 [64, 16] "rope.r0" from rope r0
g0 = select "select" n=2 axis=1
  read candidates b0 one [0..4] ; candidates
  write token b9 one [3..+1 <1]
g1 = embed "embed" n=4 axis=1 scale=1
g2 = matvec "qkv.0" n=12 axis=1 site=qkv.l0 rows=96 k=32 norm=layer:0.00001 epilogue=store
  stream weight b1 units [1*i..+1 <12] ; qkv.0.weight
g3 = matvec "down.0" n=4 axis=1 rows=32 k=96 epilogue=residual scale=0.5
g4 = matvec "gate_up.0" n=24 axis=1 rows=192 k=32 norm=rms:0.000001 epilogue=gated:gelu_tanh
g5 = matvec "up.0" n=24 axis=1 rows=192 k=32 epilogue=act:relu
g6 = matvec "head" n=64 ordinal=2 site=head rows=512 k=32 epilogue=logits scale=1 softcap=30
  write candidates b0 one [2*j..+2 <4] ; candidates
g7 = attention "attn.0" n=2 axis=3 heads=4 group=2 heads_per_task=2 head_dim=8 splits=3 scale=0.35355338 \
softcap=50 window=16 rotary=8 interleaved q_norm=rms:0.000001:head k_norm=rms:0.000001:projection norm_after_rope \
query_scale=0.1:8192 sinks gate
  stream history_k b8 history [8 + 16*(i/2) + 66*j..+8 <24] first only_j=2
g8 = attention_merge "merge.0" n=4 axis=1 head_dim=8 splits=3 heads_per_task=2 gate
g9 = norm_add "add.0" n=4 axis=1 norm=rms:0.000001 width=32 scale=-inf
g10 = report "report" n=1 axis=1
machine "cpu" sms=2 consumer_warps=1 loader_warps=4 registers_per_thread=24 reduce_batch=8
ring slots=12 slot_bytes=16384 arrivals=1 flight_high=4 flight_low=2 flight_free=8
smem ring 0..+196608
smem stage 196608..+128
variant g2 units=6 chunk=32 block=6 units_per_warp=6 poll_batch=4 ; qkv.0
variant g7 warps_per_head=1 prefetch_v=1 swizzled=0 pitch=8 ; attn.0
place b0@0 b1@- b2@- b3@18446744073709551615
regime r0 from 0
  e0 = b0[0..4] count=2 fenced carried proxy ; candidates
  e1 = b77[3..1] count=0 packets
  t0 = g0[0..1] wait e0>=2 ; select
  t1 = g2[0..6] j=1 wait e1>=1 e7>=0 signal e0 e1 ; matvec qkv.0
  t2 = g99[0..0]
  queue sm0: t0 t2
  queue sm1:
  stream sm0: t4+b1[0..6] t9+hist:128
  stream sm1:
regime r1 from 32
"#;

    fn sample() -> String {
        SAMPLE.replace("\\\n", "")
    }

    #[test]
    fn every_construct_is_printed_as_it_was_read() {
        let schedule = parse(&sample()).unwrap();
        assert_eq!(print(&schedule), sample());
        assert_eq!(schedule.program.name, "tiny \"q\" \n");
        assert_eq!(schedule.placement[3], Some(u64::MAX));
        assert_eq!(schedule.regimes[0].streams[0][1].source, Source::History { rows: 128 });
        let program = print_program(&schedule.program);
        assert!(sample().starts_with(&program));
        assert_eq!(parse_program(&program).unwrap(), schedule.program);
    }

    #[test]
    fn blanks_comments_and_crlf_are_free() {
        let loose = sample().replace('\n', " ; note\r\n\r\n; alone\n\t");
        assert_eq!(print(&parse(&loose).unwrap()), sample());
        let spaced = sample().replace("t0 = g0[0..1] wait e0>=2", "t0=g0 [ 0 .. 1 ]  wait e0 >= 2");
        assert_eq!(print(&parse(&spaced).unwrap()), sample());
    }

    #[test]
    fn lines_are_where_things_are_defined() {
        let text = sample().replace("t1 = g2", "t1  =  g2");
        let (schedule, lines) = parse_with_lines(&text).unwrap();
        let regime = &lines.regimes[0];
        for (span, expected) in [
            (&lines.buffers[4], r#"b4 = constant fp32 [64, 16] "rope.r0" from rope r0"#),
            (&lines.grids[10], r#"g10 = report "report" n=1 axis=1"#),
            (&lines.smem[0], "smem ring 0..+196608"),
            (&regime.tasks[1], "t1  =  g2[0..6] j=1 wait e1>=1 e7>=0 signal e0 e1"),
            (&regime.queues[1], "queue sm1:"),
            (&lines.regimes[1].regime, "regime r1 from 32"),
        ] {
            assert_eq!(&text[span.clone()], expected);
        }
        assert!(text[lines.program.clone()].starts_with("program "));
        assert!(text[lines.machine.clone()].starts_with("machine "));
        assert!(text[lines.ring.clone()].starts_with("ring "));
        assert_eq!(lines.buffers.len(), schedule.program.buffers.len());
        assert_eq!((regime.tasks.len(), regime.events.len(), regime.streams.len()), (3, 2, 2));
    }

    /// Replaces `old` in the sample and returns the error of the result.
    fn broken(old: &str, new: &str) -> String {
        let text = sample();
        assert!(text.contains(old), "{old}");
        let text = text.replacen(old, new, 1);
        match parse(&text) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("`{new}` was read"),
        }
    }

    #[test]
    fn errors_name_the_place_then_what_was_expected_and_found() {
        let cases = [
            (
                "mkir 2",
                "mkir 3",
                "line 1, column 6: `.mkir` version 3 is newer than this build reads: expected version 2, found 3",
            ),
            ("mkir 2", "", "line 2, column 1: malformed version line: expected `mkir`, found `program`"),
            (
                "queue sm0",
                "quee sm0",
                "line 37, column 3: unknown kind of line: expected a task like `t12`, an event like `e7`, `queue`, \
                 `stream`, `regime` or the end of the text, found `quee` (did you mean `queue`?)",
            ),
            (
                "t1 = g2",
                "t3 = g2",
                "line 35, column 3: task out of order: expected `t1`, found `t3` \
                 (an id is an index: ids count up from 0 in the order of the lines)",
            ),
            ("g2[0..6]", "g2[0,6]", "line 35, column 12: malformed task line: expected `..`, found `,`"),
            ("g2[0..6]", "g2[0..]", "line 35, column 14: malformed task line: expected a number, found `]`"),
            ("g2[0..6]", "g2[0..4294967296]", "line 35, column 14: number too large: expected at most 4294967295"),
            ("e7>=0", "e99999999999>=0", "line 35, column 33: number too large: expected at most 4294967295"),
            (
                "softcap=30",
                "softcpa=30",
                "line 17, column 83: malformed grid line: expected `softcap` or the end of the line, found `softcpa` \
                 (did you mean `softcap`?)",
            ),
            (
                "scale=0.5",
                "scale=1e39",
                "line 14, column 70: number too large: expected at most 340282350000000000000000000000000000000 in \
                 magnitude, or `inf`",
            ),
            (
                "scale=0.5",
                "scale=0.5.1",
                "line 14, column 70: malformed number: expected a number like `0.5`, found `0.5.1`",
            ),
            ("\"add.0\"", "\"add.0", "line 22, column 15: unterminated name: expected `\"` before the end of the line"),
            (
                "\"add.0\"",
                "\"ad\\x.0\"",
                "line 22, column 18: unknown escape in a name: expected `\\\"`, `\\\\` or `\\u{hex}`",
            ),
            (
                "smem stage",
                "smem stages",
                "line 27, column 6: malformed smem line: expected `ring`, `stage`, `reduce`, `heads`, `residual`, \
                 `queue` or `state`, found `stages` (did you mean `stage`?)",
            ),
            (
                "variant g7",
                "variant g2",
                "line 29, column 9: variant out of order: expected a grid after `g2`, found `g2`",
            ),
            (
                "[2*j..+2 <4]",
                "[2*j + 1*i..+2 <4]",
                "line 18, column 34: malformed operand line: expected a constant, then a multiple of `i`, then a \
                 multiple of `j`, each at most once",
            ),
            (
                "machine",
                "; machine",
                "line 25, column 1: unknown kind of line: expected a buffer like `b3`, a grid like `g2`, `read`, \
                 `write`, `update`, `stream` or `machine`, found `ring`",
            ),
        ];
        for (old, new, expected) in cases {
            assert_eq!(broken(old, new), expected);
        }
    }

    #[test]
    fn a_fault_shows_the_guilty_line() {
        let text = sample().replace("e7>=0", "e7>0");
        let error = parse(&text).unwrap_err();
        assert_eq!(
            error.into_fault("a.mkir", &text, Style::Plain).to_string(),
            "malformed task line
  --> a.mkir:35:34
   |
35 |   t1 = g2[0..6] j=1 wait e1>=1 e7>0 signal e0 e1 ; matvec qkv.0
   |                                  ^ expected `>=`, found `>`"
        );
    }

    #[test]
    fn a_text_cut_off_anywhere_or_with_a_byte_changed_never_panics() {
        let text = sample();
        for at in 0..text.len() {
            let cut = parse(&text[..at]);
            // Only a cut between whole regimes, or inside trailing lists, leaves a schedule.
            if at < text.find("ring slots").unwrap() {
                assert!(cut.is_err(), "{}", &text[..at]);
            }
            for swap in ["\0", "9", "\"", "é", "\n", "["] {
                let changed = format!("{}{swap}{}", &text[..at], &text[at + 1..]);
                if let Err(error) = parse(&changed) {
                    error.render("x", &changed, Style::Plain);
                }
            }
        }
    }

    #[test]
    fn memory_follows_the_text_not_its_numbers() {
        let text = "mkir 2\nprogram \"\" context_max=4294967295 weights=fp32 cache=fp32 wire=fp32\n\
                    machine \"\" sms=4294967295 consumer_warps=1 loader_warps=4 registers_per_thread=1 reduce_batch=1\n\
                    ring slots=4294967295 slot_bytes=4294967295 arrivals=1 flight_high=1 flight_low=1 \
                    flight_free=1\nregime r0 from 0\nqueue sm0: t4294967295\n";
        let schedule = parse(text).unwrap();
        assert_eq!(schedule.regimes[0].queues, vec![vec![TaskId(u32::MAX)]]);
        let dangling = parse(&text.replace("sm0:", "sm4294967295:")).unwrap_err();
        assert!(dangling.to_string().contains("expected `sm0`, found `sm4294967295`"), "{dangling}");
    }

    fn names() -> impl Strategy<Value = String> {
        prop_oneof!["[a-z.0-9_]{0,12}", any::<String>()]
    }

    /// Any float but NaN, which no comparison finds again.
    fn floats() -> impl Strategy<Value = f32> {
        use proptest::num::f32::{INFINITE, NEGATIVE, NORMAL, POSITIVE, SUBNORMAL, ZERO};
        POSITIVE | NEGATIVE | NORMAL | SUBNORMAL | ZERO | INFINITE
    }

    fn numbers() -> impl Strategy<Value = u32> {
        prop_oneof![0..10u32, any::<u32>()]
    }

    fn views() -> impl Strategy<Value = RowView> {
        let strided = prop_oneof![Just((1, 1)), (numbers(), numbers())];
        (numbers(), numbers(), strided).prop_map(|(t, first, (block, stride))| RowView {
            tensor: TensorId(t),
            first,
            block,
            stride,
        })
    }

    fn contents() -> impl Strategy<Value = Content> {
        let parts = vec((views(), numbers()).prop_map(|(view, rows)| Part { view, rows }), 0..3);
        let vectors =
            vec((prop::option::of(views()), numbers()).prop_map(|(view, len)| VectorPart { view, len }), 0..3);
        prop_oneof![
            (parts, numbers()).prop_map(|(parts, interleave)| Content::Rows { parts, interleave }),
            (vectors, floats(), floats(), numbers()).prop_map(|(parts, offset, scale, interleave)| Content::Vectors {
                parts,
                offset,
                scale,
                interleave
            }),
            numbers().prop_map(|t| Content::Tensor(TensorId(t))),
            numbers().prop_map(|r| Content::RopeTable(RopeId(r))),
            numbers().prop_map(|l| Content::CacheScales(LayerId(l))),
        ]
    }

    fn tables() -> impl Strategy<Value = Table> {
        let homes = prop_oneof![Just(TableHome::Host), numbers().prop_map(|b| TableHome::Device(BufferId(b)))];
        let holds = prop::sample::select(&Holds::ALL[..]);
        let facts = vec(prop::sample::select(&Fact::ALL[..]), 0..3);
        (names(), homes, holds, [numbers(), numbers(), numbers()], facts).prop_map(
            |(name, home, holds, [rows, cols, bound], facts)| Table { name, home, holds, rows, cols, bound, facts },
        )
    }

    fn formats() -> impl Strategy<Value = Format> {
        let groups = (numbers(), prop::sample::select(&ScaleCode::ALL[..]), any::<bool>(), any::<bool>());
        let groups = prop::option::of(groups.prop_map(|(k, scale, zeros, minima)| Groups { k, scale, zeros, minima }));
        (prop::sample::select(&Code::ALL[..]), groups, any::<bool>()).prop_map(|(code, groups, row_scales)| Format {
            code,
            groups,
            row_scales,
        })
    }

    fn buffers() -> impl Strategy<Value = Buffer> {
        let dtypes = prop::sample::select(&DTYPES[..]);
        let kind = (prop::sample::select(&Space::ALL[..]), dtypes, prop::option::of(formats()));
        let paging = (numbers(), numbers()).prop_map(|(table, rows)| Paging { table: TableId(table), rows });
        let homes =
            prop_oneof![Just(Home::Sm), numbers().prop_map(Home::Device), Just(Home::Everywhere), Just(Home::Divided)];
        let places = (prop::option::of(paging), homes);
        (names(), kind, ([numbers(), numbers(), numbers()], any::<bool>()), places, prop::option::of(contents()))
            .prop_map(|(name, (space, dtype, coded), ([rows, cols, phases], words), (paging, home), content)| Buffer {
                name,
                space,
                dtype,
                coded,
                rows,
                cols,
                phases,
                words,
                paging,
                home,
                content,
            })
    }

    fn norms() -> impl Strategy<Value = NormAttr> {
        (prop::sample::select(&NORMS[..]), floats()).prop_map(|(kind, eps)| NormAttr { kind, eps })
    }

    fn ops() -> impl Strategy<Value = Op> {
        let acts = || prop::sample::select(&ACTS[..]);
        let epilogues = prop_oneof![
            Just(Epilogue::Store),
            Just(Epilogue::Scores),
            (floats(), floats()).prop_map(|(alpha, limit)| Epilogue::Clamped(ClampedSwiglu { alpha, limit })),
            acts().prop_map(Epilogue::Act),
            acts().prop_map(Epilogue::Gated),
            (acts(), floats()).prop_map(|(act, scale)| Epilogue::GatedBy { act, scale }),
            floats().prop_map(|scale| Epilogue::Residual { scale }),
            (floats(), prop::option::of(floats())).prop_map(|(scale, softcap)| Epilogue::Logits { scale, softcap }),
        ];
        let qk_norms = || {
            let spans = prop::sample::select(&QkNormSpan::ALL[..]);
            prop::option::of((norms(), spans).prop_map(|(norm, span)| QkNormAttr { norm, span }))
        };
        let attention = (
            [numbers(), numbers(), numbers(), numbers(), numbers(), numbers()],
            (floats(), prop::option::of(floats()), prop::option::of(numbers()), any::<bool>()),
            (qk_norms(), qk_norms()),
            (any::<[bool; 3]>(), prop::option::of((floats(), numbers()))),
        )
            .prop_map(|(n, (scale, softcap, window, interleaved), (q_norm, k_norm), (flags, query_scale))| {
                let [sinks, gate, norm_after_rope] = flags;
                let query_scale = query_scale.map(|(beta, original)| QueryScale { beta, original });
                let [heads_per_task, group, heads, head_dim, rotary, splits] = n;
                Op::Attention(Attention {
                    heads_per_task,
                    group,
                    heads,
                    head_dim,
                    scale,
                    softcap,
                    window,
                    rotary,
                    interleaved,
                    q_norm,
                    k_norm,
                    splits,
                    sinks,
                    gate,
                    query_scale,
                    norm_after_rope,
                })
            });
        let ways = (numbers(), any::<bool>());
        let gates = || prop::option::of(floats());
        prop_oneof![
            Just(Op::Select),
            Just(Op::Report),
            routes(),
            ([numbers(), numbers()], floats(), (prop::option::of(floats()), any::<bool>())).prop_map(
                |([width, slots], scale, (shared, adds))| Op::Combine(Combine { width, slots, shared, scale, adds })
            ),
            ([numbers(), numbers(), numbers(), numbers(), numbers()], floats(), any::<bool>()).prop_map(
                |([key_heads, value_heads, key_dim, value_dim, kernel], eps, doubles)| {
                    Op::Mix(Mix { key_heads, value_heads, key_dim, value_dim, kernel, eps, doubles })
                }
            ),
            [numbers(), numbers()].prop_map(|[channels, kernel]| Op::Convolve(Convolve { channels, kernel })),
            (
                [numbers(), numbers(), numbers(), numbers(), numbers()],
                [floats(), floats(), floats(), floats()],
                gates()
            )
                .prop_map(|([heads, head_dim, groups, state, kernel], scales, gate)| {
                    Op::Scan(Scan { heads, head_dim, groups, state, kernel, scales, gate })
                }),
            ([numbers(), numbers()], floats(), gates())
                .prop_map(|([width, groups], eps, gate)| Op::GroupNorm(GroupNorm { width, groups, eps, gate })),
            floats().prop_map(|scale| Op::Join { scale }),
            (floats(), any::<bool>()).prop_map(|(scale, everywhere)| Op::Embed { scale, everywhere }),
            ([numbers(), numbers(), numbers()], prop::option::of(norms()), epilogues, ways).prop_map(
                |([rows, k, slots], norm, epilogue, (unit_rows, own_input))| {
                    Op::MatVec(MatVec { rows, k, slots, norm, own_input, epilogue, unit_rows })
                }
            ),
            attention,
            ([numbers(), numbers(), numbers()], any::<bool>()).prop_map(
                |([head_dim, splits, heads_per_task], gate)| {
                    Op::AttentionMerge { head_dim, splits, heads_per_task, gate }
                }
            ),
            (norms(), numbers(), floats(), any::<bool>()).prop_map(|(norm, width, scale, everywhere)| Op::NormAdd {
                norm,
                width,
                scale,
                everywhere
            }),
        ]
    }

    fn routes() -> impl Strategy<Value = Op> {
        let groups = ([numbers(), numbers()], prop::sample::select(&GROUP_SCORES[..]));
        let groups = groups.prop_map(|([count, kept], score)| ExpertGroups { count, kept, score });
        let scores = prop::sample::select(&SCORES[..]);
        let weights = (prop::option::of(floats()), floats());
        ([numbers(), numbers()], scores, prop::option::of(groups), weights).prop_map(
            |([experts, top_k], score, groups, (normalise, scale))| {
                Op::Route(Route { experts, top_k, score, groups, normalise, scale })
            },
        )
    }

    fn operands() -> impl Strategy<Value = Operand> {
        let cols = (
            [numbers(), numbers(), numbers(), numbers(), numbers(), numbers()],
            any::<bool>(),
            prop::option::of(numbers()),
        )
            .prop_map(|([base, stride, div, stride_j, len, limit], first, only_j)| Cols {
                base,
                stride,
                div,
                stride_j,
                len,
                limit,
                first,
                only_j,
            });
        let kind = (
            prop::sample::select(&Role::ALL[..]),
            prop::sample::select(&ACCESSES[..]),
            prop_oneof![prop::sample::select(&Rows::ALL[..]), numbers().prop_map(|table| Rows::Lookup(TableId(table)))],
        );
        (kind, numbers(), cols).prop_map(|((role, access, rows), b, cols)| Operand {
            role,
            access,
            buffer: BufferId(b),
            rows,
            cols,
        })
    }

    fn grids() -> impl Strategy<Value = Grid> {
        let second = prop_oneof![
            numbers().prop_map(Second::Axis),
            numbers().prop_map(Second::Ordinal),
            numbers().prop_map(Second::Dealt)
        ];
        let sites = (prop::sample::select(&LayerOp::ALL[..]), prop::option::of(numbers().prop_map(LayerId)))
            .prop_map(|(op, layer)| Site { op, layer });
        let labels = (names(), prop::option::of(sites));
        (labels, ops(), numbers(), (second, any::<bool>()), vec(operands(), 0..4)).prop_map(
            |((name, site), op, n, (second, per_row), operands)| Grid { name, site, op, n, second, per_row, operands },
        )
    }

    fn programs() -> impl Strategy<Value = Program> {
        let dtypes = || prop::sample::select(&DTYPES[..]);
        let precision =
            (dtypes(), dtypes(), dtypes()).prop_map(|(weights, cache, wire)| Precision { weights, cache, wire });
        let lists = (vec(tables(), 0..3), vec(buffers(), 0..6), vec(grids(), 0..6));
        (names(), precision, numbers(), numbers(), lists).prop_map(
            |(name, precision, context_max, rows, (tables, buffers, grids))| Program {
                name,
                precision,
                context_max,
                rows,
                tables,
                buffers,
                grids,
            },
        )
    }

    fn machines() -> impl Strategy<Value = Machine> {
        let ring = [numbers(), numbers(), numbers(), numbers(), numbers(), numbers(), numbers()].prop_map(
            |[slots, slot_bytes, arrivals, flight_high, flight_low, flight_free, copiers]| Ring {
                slots,
                slot_bytes,
                arrivals,
                flight_high,
                flight_low,
                flight_free,
                copiers,
            },
        );
        let kinds = prop::sample::select(&SmemKind::ALL[..]);
        let smem = (kinds, numbers(), numbers()).prop_map(|(kind, offset, bytes)| SmemPart { kind, offset, bytes });
        let counts = [numbers(), numbers(), numbers(), numbers(), numbers(), numbers(), numbers(), numbers()];
        (names(), counts, ring, vec(smem, 0..4)).prop_map(
            |(
                target,
                [sms, devices, consumer_warps, loader_warps, registers, loader_registers, reduce_batch, residual_cols],
                ring,
                smem,
            )| Machine {
                target,
                sms,
                devices,
                consumer_warps,
                loader_warps,
                registers_per_thread: registers,
                loader_registers,
                reduce_batch,
                residual_cols,
                ring,
                smem,
            },
        )
    }

    fn regimes() -> impl Strategy<Value = Regime> {
        let waits = (numbers(), numbers()).prop_map(|(e, count)| Wait { event: EventId(e), count });
        let signals = vec(numbers().prop_map(EventId), 0..3);
        let tasks = ([numbers(), numbers(), numbers(), numbers(), numbers()], vec(waits, 0..3), signals)
            .prop_map(|([g, lo, hi, j, row], waits, signals)| Task { grid: GridId(g), lo, hi, j, row, waits, signals });
        let scopes = prop::sample::select(&Scope::ALL[..]);
        let kind = (prop::sample::select(&Mechanism::ALL[..]), scopes, any::<bool>(), any::<bool>());
        let events = ([numbers(), numbers(), numbers(), numbers()], prop::option::of(numbers()), kind).prop_map(
            |([b, lo, hi, count], row, (mechanism, scope, carried, proxy))| Event {
                buffer: BufferId(b),
                row,
                lo,
                hi,
                count,
                mechanism,
                scope,
                carried,
                proxy,
            },
        );
        let source = prop_oneof![
            [numbers(), numbers(), numbers()].prop_map(|[b, lo, hi]| Source::Units { buffer: BufferId(b), lo, hi }),
            numbers().prop_map(|rows| Source::History { rows }),
        ];
        let after = prop::option::of(numbers().prop_map(EventId));
        let runs = (numbers(), source, after).prop_map(|(t, source, after)| Run { task: TaskId(t), source, after });
        let queues = vec(vec(numbers().prop_map(TaskId), 0..4), 0..3);
        (numbers(), vec(tasks, 0..6), vec(events, 0..4), queues, vec(vec(runs, 0..4), 0..3)).prop_map(
            |(from_position, tasks, events, queues, streams)| Regime { from_position, tasks, events, queues, streams },
        )
    }

    fn variants() -> impl Strategy<Value = Variant> {
        let of = [numbers(), numbers(), numbers(), numbers(), numbers(), numbers(), numbers()];
        let matvec = (of, any::<bool>()).prop_map(
            |([units, chunk, block, units_per_warp, poll_batch, granule, pass], shared)| {
                let of = MatVecVariant { units, chunk, block, units_per_warp, poll_batch, granule, pass, shared };
                Variant::MatVec(of)
            },
        );
        let attention =
            (numbers(), any::<[bool; 2]>(), numbers()).prop_map(|(warps_per_head, [prefetch_v, swizzled], pitch)| {
                Variant::Attention(AttentionVariant { warps_per_head, prefetch_v, swizzled, pitch })
            });
        prop_oneof![matvec, attention]
    }

    /// Schedules of any structure: every field any value, every reference dangling.
    fn schedules() -> impl Strategy<Value = Schedule> {
        let placement = vec(prop::option::of(any::<u64>()), 0..20);
        let variants = prop::collection::btree_map(numbers().prop_map(GridId), variants(), 0..4);
        (programs(), machines(), variants, placement, vec(regimes(), 0..3)).prop_map(
            |(program, machine, variants, placement, regimes)| Schedule {
                program,
                machine,
                variants,
                placement,
                regimes,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

        #[test]
        fn what_is_printed_is_read_back(schedule in schedules()) {
            let text = print(&schedule);
            let read = parse(&text).map_err(|error| TestCaseError::fail(error.render("x", &text, Style::Plain)))?;
            prop_assert_eq!(&read, &schedule);
            prop_assert_eq!(print(&read), text);
            let program = print_program(&schedule.program);
            prop_assert_eq!(parse_program(&program).unwrap(), schedule.program);
        }

        #[test]
        fn text_of_any_kind_never_panics(noise in any::<String>(), at in any::<prop::sample::Index>()) {
            let text = sample();
            let at = at.index(text.len());
            for text in [noise.clone(), format!("{}{noise}{}", &text[..at], &text[at..])] {
                match parse(&text) {
                    Ok(schedule) => prop_assert_eq!(parse(&print(&schedule)).unwrap(), schedule),
                    Err(error) => drop(error.render("x", &text, Style::Plain)),
                }
            }
        }
    }

    #[test]
    fn nan_survives_in_print() {
        let text = sample().replace("scale=0.5", "scale=NaN");
        assert_eq!(print(&parse(&text).unwrap()), text);
    }
}
