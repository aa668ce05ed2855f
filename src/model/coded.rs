//! Owns matrices that are stored as codes and scales: rows of them in one form, whatever layout a file has, and their exact values.

use std::fmt;
use std::ops::Range;
use std::sync::OnceLock;

use crate::digest::{KeyPart, KeySink};
use crate::format::{Code, Format, ScaleCode, SixBits};

/// One row of a matrix as its [`Format`] wants it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CodedRow {
    /// One a column.
    pub codes: Vec<u8>,
    /// One for each group of the format.
    pub scales: Vec<f32>,
    /// As many, where the format has zero points.
    pub zeros: Vec<u8>,
    /// As many, where the format has minima.
    pub minima: Vec<f32>,
    /// As many, where the format has scales of six bits: what `scales` and `minima` are products of.
    pub six_bits: Vec<SixBits>,
    /// 1 where the format has no scales of rows.
    pub row_scale: f32,
}

impl CodedRow {
    /// The values of the row: each one product of fp32 numbers, or two with scales of groups and of rows.
    pub fn values(&self, format: Format, out: &mut [f32]) {
        let group_k = format.groups.map_or(usize::MAX, |groups| groups.k as usize);
        let of_codes = format.code.values();
        // Of 4 bits there are few, in one or two registers.
        let few: Option<&[f32; 16]> = of_codes.first_chunk().filter(|_| format.code.bits() == 4);
        for (group, (codes, out)) in self.codes.chunks(group_k).zip(out.chunks_mut(group_k)).enumerate() {
            let scale = self.scales.get(group).map_or(self.row_scale, |scale| scale * self.row_scale);
            if let Some(least) = self.minima.get(group) {
                codes.iter().zip(out).for_each(|(&code, out)| *out = scale * of_codes[usize::from(code)] + least);
                continue;
            }
            let zero = self.zeros.get(group).map_or(format.code.implied_zero(), |&zero| format.code.zero(zero));
            match few {
                Some(few) => {
                    codes.iter().zip(out).for_each(|(&code, out)| *out = scale * (few[usize::from(code & 15)] - zero));
                }
                None => {
                    codes.iter().zip(out).for_each(|(&code, out)| *out = scale * (of_codes[usize::from(code)] - zero));
                }
            }
        }
    }
}

/// Bytes of a tensor in one of the weight files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Component {
    pub file: usize,
    pub bytes: Range<usize>,
}

/// How codes lie in a tensor of `rows` x `cols` weights. Words are little-endian and of 32 bits, fields from the low end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeLayout {
    /// A byte each, row-major: signed integers, or floats of 8 bits.
    Bytes,
    /// Two in a byte, row-major, the first in the low half.
    Halves,
    /// Words along k, row-major; signed integers are stored with half their range added (compressed-tensors).
    WordsOfRow,
    /// Words along k, (K fields) x N (GPTQ).
    WordsOfColumn,
    /// Words along n, K x (N fields), the columns of eight in the order 0, 2, 4, 6, 1, 3, 5, 7 (AWQ).
    WordsAcross,
}

/// How scales lie in a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleLayout {
    One,
    /// One for each row.
    Rows,
    /// N x groups.
    RowGroups,
    /// Groups x N.
    GroupRows,
    /// Blocks of this number of rows by a group of k.
    Blocks {
        rows: u32,
    },
}

/// How zero points lie in a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroLayout {
    /// A signed byte each, N x groups.
    Bytes,
    /// (N fields) x groups, with half their range added (compressed-tensors).
    WordsOfColumn,
    /// Groups x (N fields); each word is one less in every field, by one subtraction over the whole word (GPTQ v1).
    WordsMinusOne,
    /// Groups x (N fields) (GPTQ v2).
    Words,
    /// The same with the columns of AWQ.
    WordsAcross,
}

/// A factor of all values of a matrix, beside its scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whole {
    Multiply,
    Divide,
}

/// A matrix in the files of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// How it is packed; fp32 if its groups are none that a format has.
    pub format: Format,
    pub code: Code,
    pub rows: u32,
    pub cols: u32,
    pub codes: (Component, CodeLayout),
    /// Consecutive k of a scale: all of a row, or a group.
    pub group_k: u32,
    pub scales: (Component, ScaleCode, ScaleLayout),
    pub zeros: Option<(Component, ZeroLayout)>,
    /// The group of each column, 32-bit integers; `None`: they follow each other.
    pub g_idx: Option<(Component, GroupIndex)>,
    /// The config says that every zero point is the middle of the range of codes.
    pub symmetric: bool,
    /// An fp32 number.
    pub whole: Option<(Component, Whole)>,
}

impl KeyPart for Component {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { file, bytes } = self;
        key.value("file", file);
        key.value("begin", bytes.start);
        key.value("end", bytes.end);
    }
}

/// With the bytes of the files it decides every value of the matrix.
impl KeyPart for Recipe {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { format, code, rows, cols, codes, group_k, scales, zeros, g_idx, symmetric, whole } = self;
        let ((codes, code_layout), (scales, scale, scale_layout)) = (codes, scales);
        key.text("format", &format!("{format:?}"));
        key.text("code", code.name());
        key.value("rows", rows);
        key.value("cols", cols);
        key.nested("codes", codes);
        key.text("code_layout", &format!("{code_layout:?}"));
        key.value("group_k", group_k);
        key.nested("scales", scales);
        key.text("scale", scale.name());
        key.text("scale_layout", &format!("{scale_layout:?}"));
        if let Some((zeros, layout)) = zeros {
            key.nested("zeros", zeros);
            key.text("zero_layout", &format!("{layout:?}"));
        }
        if let Some((g_idx, kind)) = g_idx {
            key.nested("g_idx", g_idx);
            key.text("g_idx_kind", &format!("{kind:?}"));
        }
        key.value("symmetric", symmetric);
        if let Some((factor, kind)) = whole {
            key.nested("whole", factor);
            key.text("whole_kind", &format!("{kind:?}"));
        }
    }
}

impl Recipe {
    /// How the stored bytes are read, for people: without their places and the extents of the matrix.
    pub fn reading(&self) -> String {
        let Self { format, code, rows: _, cols: _, codes, group_k, scales, zeros, g_idx, symmetric, whole } = self;
        let ((_, codes), (_, scale, scales)) = (codes, scales);
        let zeros = zeros.as_ref().map_or("none".to_string(), |(_, layout)| format!("{layout:?}"));
        let whole = whole.as_ref().map_or("none".to_string(), |(_, kind)| format!("{kind:?}"));
        let (code, scale) = (code.name(), scale.name());
        let indexed = g_idx.as_ref().map_or("none".to_string(), |(_, kind)| format!("{kind:?}"));
        format!(
            "{code} in {codes:?} as {format}, groups of {group_k}, scales {scale} in {scales:?}, zeros {zeros}, g_idx {indexed}, \
             symmetric {symmetric}, whole {whole}"
        )
    }
}

/// Order of columns in the fields of a word: field `i` holds column `AWQ_ORDER[i]`.
const AWQ_FIELD: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// What the groups of columns may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupIndex {
    /// GPTQ without `desc_act`: they follow each other.
    InOrder,
    /// GPTQ with `desc_act`.
    Any,
    /// compressed-tensors: where one is -1, they follow each other.
    AnyOrNone,
}

/// Values of a part of a matrix that contradict the config, or lead nowhere. The part is named without its module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartFault {
    Order {
        column: u32,
        group: i32,
    },
    Group {
        part: &'static str,
        column: u32,
        group: i32,
        groups: u32,
    },
    Zero {
        row: u32,
        group: u32,
        found: i32,
        middle: i32,
    },
    /// Every zero point is the middle of the other convention of GPTQ: stored as it is, or less one.
    OtherConvention {
        found: i32,
        minus_one: bool,
    },
}

impl PartFault {
    /// Name of the part.
    pub fn part(&self) -> &'static str {
        match self {
            PartFault::Order { .. } => "g_idx",
            PartFault::Group { part, .. } => part,
            PartFault::Zero { .. } | PartFault::OtherConvention { .. } => "qzeros",
        }
    }
}

impl fmt::Display for PartFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PartFault::Order { column, group } => write!(
                f,
                "puts column {column} in group {group}, but the config says that groups follow each other; set `desc_act` to true in its \
                 `quantization_config`"
            ),
            PartFault::Group { column, group, groups, .. } => {
                write!(f, "puts column {column} in group {group}, expected a group from 0 to {}", groups - 1)
            }
            PartFault::Zero { row, group, found, middle } => write!(
                f,
                "has the zero point {found} for row {row} in group {group}, but the config says `sym: true`, which means {middle}; loaders \
                 differ here. Set `sym` to false in its `quantization_config` if the stored zero points count; `checkpoint_format` says \
                 whether they are stored less one"
            ),
            PartFault::OtherConvention { found, minus_one } => {
                let (says, other) = if *minus_one { ("gptq", "gptq_v2") } else { ("gptq_v2", "gptq") };
                write!(
                    f,
                    "has the zero point {found} everywhere, as a symmetric checkpoint of `{other}` that is read as `{says}`; set \
                     `checkpoint_format` to \"{other}\" in its `quantization_config`"
                )
            }
        }
    }
}

/// A matrix with its bytes.
#[derive(Debug)]
pub struct Stored {
    pub recipe: Recipe,
    fault: OnceLock<Option<PartFault>>,
    /// Whether a group index says that there is none.
    unordered: OnceLock<bool>,
}

/// Bytes of the weight files.
pub trait Files {
    fn bytes(&self, of: &Component) -> &[u8];
}

fn word(bytes: &[u8], index: usize) -> u32 {
    bytes.get(4 * index..4 * index + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

/// Field `index` of a row of words, of `bits`.
fn field(word: u32, index: u32, bits: u32) -> u8 {
    (word >> (index * bits)) as u8 & ((1u32 << bits) - 1) as u8
}

/// An unsigned field of 8 bits as two's complement around the middle of its range.
fn signed(field: u8, bits: u32) -> u8 {
    if bits == 8 { field ^ 0x80 } else { field }
}

impl Stored {
    pub fn new(recipe: Recipe) -> Stored {
        Stored { recipe, fault: OnceLock::new(), unordered: OnceLock::new() }
    }

    fn groups(&self) -> usize {
        self.recipe.cols.div_ceil(self.recipe.group_k.max(1)) as usize
    }

    /// The first value of a part that cannot be, or that the config denies.
    pub fn fault(&self, files: &impl Files) -> Option<PartFault> {
        *self.fault.get_or_init(|| self.group_fault(files).or_else(|| self.zero_fault(files)))
    }

    fn group_fault(&self, files: &impl Files) -> Option<PartFault> {
        let (_, kind) = self.recipe.g_idx.as_ref()?;
        let g_idx = self.group_index(files)?;
        let groups = self.groups() as u32;
        (0..self.recipe.cols).find_map(|column| {
            let group = word(g_idx, column as usize) as i32;
            let is_there = u32::try_from(group).is_ok_and(|group| group < groups);
            match kind {
                GroupIndex::Any | GroupIndex::AnyOrNone if is_there => None,
                GroupIndex::Any => Some(PartFault::Group { part: "g_idx", column, group, groups }),
                GroupIndex::AnyOrNone => Some(PartFault::Group { part: "weight_g_idx", column, group, groups }),
                GroupIndex::InOrder => (i64::from(group) != i64::from(column / self.recipe.group_k))
                    .then_some(PartFault::Order { column, group }),
            }
        })
    }

    fn zero_fault(&self, files: &impl Files) -> Option<PartFault> {
        let Recipe { code, rows, symmetric, .. } = &self.recipe;
        let middle = code.implied_zero();
        // As unsigned fields.
        let shown = |zero: f32| (zero - middle) as i32 + (1 << (code.bits() - 1));
        if !symmetric {
            return self
                .other_convention(files)
                .map(|(zero, minus_one)| PartFault::OtherConvention { found: shown(zero), minus_one });
        }
        (0..*rows).find_map(|row| {
            (0..self.groups()).find_map(|group| {
                let zero = code.zero(self.zero(files, row, group)?);
                let fault = PartFault::Zero { row, group: group as u32, found: shown(zero), middle: shown(middle) };
                (zero != middle).then_some(fault)
            })
        })
    }

    /// The one zero point of a matrix of GPTQ, if it is next to the middle on the side on which the other convention has the middle. Measured
    /// zero points differ from each other.
    fn other_convention(&self, files: &impl Files) -> Option<(f32, bool)> {
        /// So many equal zero points do not come from weights.
        const ZEROS_MIN: usize = 64;
        let Recipe { code, rows, zeros, .. } = &self.recipe;
        let (minus_one, side) = match zeros.as_ref()?.1 {
            ZeroLayout::WordsMinusOne => (true, 1.0),
            ZeroLayout::Words => (false, -1.0),
            _ => return None,
        };
        let zero = code.implied_zero() + side;
        let is_there = |(row, group)| self.zero(files, row, group).is_some_and(|found| code.zero(found) == zero);
        let mut places = (0..*rows).flat_map(|row| (0..self.groups()).map(move |group| (row, group)));
        (*rows as usize * self.groups() >= ZEROS_MIN && places.all(is_there)).then_some((zero, minus_one))
    }

    /// The bytes of the group of each column; `None`: they follow each other.
    fn group_index<'a>(&self, files: &'a impl Files) -> Option<&'a [u8]> {
        let (component, kind) = self.recipe.g_idx.as_ref()?;
        let bytes = files.bytes(component);
        let none = || *kind == GroupIndex::AnyOrNone && bytes.as_chunks::<4>().0.contains(&[0xff; 4]);
        (!self.unordered.get_or_init(none)).then_some(bytes)
    }

    fn codes(&self, files: &impl Files, row: u32, out: &mut Vec<u8>) {
        let Recipe { code, rows, cols, codes: (component, layout), .. } = &self.recipe;
        let (bytes, row, rows, cols) = (files.bytes(component), row as usize, *rows as usize, *cols as usize);
        let bits = code.bits();
        let fields = (32 / bits) as usize;
        out.clear();
        match layout {
            CodeLayout::Bytes => out.extend_from_slice(&bytes[row * cols..(row + 1) * cols]),
            CodeLayout::Halves => {
                let own = &bytes[row * cols.div_ceil(2)..(row + 1) * cols.div_ceil(2)];
                out.extend(own.iter().flat_map(|b| [b & 15, b >> 4]).take(cols));
            }
            CodeLayout::WordsOfRow => {
                let words = cols.div_ceil(fields);
                let code = |k: usize| field(word(bytes, row * words + k / fields), (k % fields) as u32, bits);
                out.extend((0..cols).map(|k| signed(code(k), bits)));
            }
            CodeLayout::WordsOfColumn => {
                for first in (0..cols).step_by(fields) {
                    let word = word(bytes, first / fields * rows + row);
                    let left = fields.min(cols - first) as u32;
                    out.extend((0..left).map(|i| signed(field(word, i, bits), bits)));
                }
            }
            CodeLayout::WordsAcross => {
                let (words, at) = (rows / fields, AWQ_FIELD[row % 8]);
                out.extend((0..cols).map(|k| field(word(bytes, k * words + row / fields), at, bits)));
            }
        }
    }

    fn scale(&self, files: &impl Files, row: u32, group: usize) -> f32 {
        let Recipe { rows, scales: (component, code, layout), .. } = &self.recipe;
        let (row, rows, groups) = (row as usize, *rows as usize, self.groups());
        let index = match *layout {
            ScaleLayout::One => 0,
            ScaleLayout::Rows => row,
            ScaleLayout::RowGroups => row * groups + group,
            ScaleLayout::GroupRows => group * rows + row,
            ScaleLayout::Blocks { rows } => row / rows.max(1) as usize * groups + group,
        };
        code.read(&files.bytes(component)[index * code.bytes() as usize..])
    }

    /// The zero point of a group, as [`Code::zero`] reads it.
    fn zero(&self, files: &impl Files, row: u32, group: usize) -> Option<u8> {
        let Recipe { code, rows, zeros, .. } = &self.recipe;
        let (component, layout) = zeros.as_ref()?;
        let (bytes, row, rows, groups) = (files.bytes(component), row as usize, *rows as usize, self.groups());
        let bits = code.bits();
        let fields = (32 / bits) as usize;
        let of_group = || word(bytes, group * rows.div_ceil(fields) + row / fields);
        let own = (row % fields) as u32;
        Some(match layout {
            ZeroLayout::Bytes => bytes[row * groups + group],
            ZeroLayout::WordsOfColumn => signed(field(word(bytes, row / fields * groups + group), own, bits), bits),
            ZeroLayout::WordsMinusOne => {
                let ones = if bits == 4 { 0x1111_1111 } else { 0x0101_0101 };
                signed(field(of_group().wrapping_add(ones), own, bits), bits)
            }
            ZeroLayout::Words => signed(field(of_group(), own, bits), bits),
            ZeroLayout::WordsAcross => field(of_group(), AWQ_FIELD[row % 8], bits),
        })
    }

    /// The factor beside the scales of groups: of the whole matrix, or of the row.
    fn row_scale(&self, files: &impl Files, row: u32) -> f32 {
        let whole = match self.whole(files) {
            None => 1.0,
            Some((factor, Whole::Multiply)) => factor,
            Some((factor, Whole::Divide)) => 1.0 / factor,
        };
        let of_row = matches!(self.recipe.scales.2, ScaleLayout::One | ScaleLayout::Rows);
        if of_row && self.recipe.format.groups.is_none() { whole * self.scale(files, row, 0) } else { whole }
    }

    /// Row `row` as the format of the matrix has it.
    ///
    /// # Panics
    /// If the format is fp32: there are no codes of it.
    pub fn read_coded(&self, files: &impl Files, row: u32, out: &mut CodedRow) {
        let Recipe { format, cols, group_k, .. } = &self.recipe;
        assert!(!format.is_plain(), "a matrix of codes");
        self.codes(files, row, &mut out.codes);
        out.row_scale = self.row_scale(files, row);
        out.scales.clear();
        out.zeros.clear();
        out.minima.clear();
        out.six_bits.clear();
        let Some(groups) = format.groups else { return };
        for group in 0..cols.div_ceil(groups.k) {
            let stored = (group * groups.k / group_k) as usize;
            out.scales.push(self.scale(files, row, stored));
            out.zeros.extend(self.zero(files, row, stored));
        }
    }

    /// The values of row `row`: each the product of its scale and its code less its zero point, in fp32.
    pub fn read_values(&self, files: &impl Files, row: u32, out: &mut [f32]) {
        let Recipe { code, group_k, .. } = &self.recipe;
        let mut codes = vec![];
        self.codes(files, row, &mut codes);
        let whole = self.whole(files);
        let groups: Vec<(f32, f32)> = (0..self.groups())
            .map(|group| {
                let zero = self.zero(files, row, group).map_or(code.implied_zero(), |zero| code.zero(zero));
                let scale = self.scale(files, row, group);
                // In the order of the libraries that own the formats.
                let scale = match whole {
                    None => scale,
                    Some((factor, Whole::Multiply)) => scale * factor,
                    Some((factor, Whole::Divide)) => scale / factor,
                };
                (scale, zero)
            })
            .collect();
        let g_idx = self.group_index(files);
        for (k, (out, code_of)) in out.iter_mut().zip(codes).enumerate() {
            let group = g_idx.map_or(k / *group_k as usize, |bytes| word(bytes, k) as usize);
            // A group that is not there has no value.
            *out = groups.get(group).map_or(f32::NAN, |(scale, zero)| scale * (code.value(code_of) - zero));
        }
    }

    fn whole(&self, files: &impl Files) -> Option<(f32, Whole)> {
        let (component, whole) = self.recipe.whole.as_ref()?;
        Some((ScaleCode::F32.read(files.bytes(component)), *whole))
    }
}
