//! Owns `Format`: how the weights of a matrix are coded, and the bytes of its granules. All code that writes, reads or sizes a matrix
//! asks this module; only the validator keeps arithmetic of its own.
//!
//! A weight is `row_scale * scale * (value(code) - zero)`: a code for each weight, a scale (and a zero point) for each group of
//! consecutive k of a row, and a scale for the whole row; or `scale * value(code) + minimum`, with a minimum for each group. A format
//! without scales stores the values themselves.
//!
//! A granule is 8 rows of 64 bytes of codes, one 16-byte load for each lane of a warp; the scales and zero points of its groups follow
//! them, row by row. A granule covers 64 of k with codes of 8 bits, 128 with codes of 4 bits. In each 32 of k of a row, lane `t` of
//! four has the eight from `8 t` on, in one or two words. A lane has the same columns of bf16 weights, so all formats use the same
//! layout of the input.

use crate::dtype::DType;
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::fmt;

/// Bytes of the codes of a granule: 8 rows of 64.
pub const CODE_BYTES: u32 = 512;
/// Bytes of the codes of one row of a granule.
pub const CODE_ROW_BYTES: u32 = 64;
/// Rows of a granule of codes.
const ROWS: u32 = 8;
/// Granules, and the scales after their codes, begin at multiples of this; bytes: a lane loads 16 bytes, and copies take as many.
const SCALES_ALIGN: u32 = 16;

/// How a matrix stores its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Format {
    pub code: Code,
    /// Scales along k; `None`: there are none.
    pub groups: Option<Groups>,
    /// A scale (fp32) for each row, after the units of the matrix.
    pub row_scales: bool,
}

/// The code of one weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Code {
    F32,
    Bf16,
    /// Two's complement.
    Int8,
    /// 0 to 15; the zero point is 8 if none is stored.
    Int4,
    /// OCP 8-bit float without infinities (`float8_e4m3fn`).
    E4m3,
    /// OCP 4-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    E2m1,
}

/// Scales of groups of consecutive k of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Groups {
    /// Weights of a group, a power of two of at least 16.
    pub k: u32,
    pub scale: ScaleCode,
    /// Whether each group has a zero point: a signed byte for `Int8`, an unsigned one for `Int4`.
    pub zeros: bool,
    /// Whether each group has a minimum, stored as its scale is. There is no zero point then, not even the one that is implied.
    pub minima: bool,
}

/// How a scale of a group is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScaleCode {
    F32,
    F16,
    Bf16,
    E4m3,
    /// A power of two: `2^(code - 127)`.
    E8m0,
    /// Six bits, times an fp16 number that the groups of a row of a granule share. Minima are made in the same way, of another number,
    /// and negated (`Q4_K`).
    F16x6,
}

/// What the scale and the minimum of a group are made of, where they have six bits each ([`ScaleCode::F16x6`]): a scale is
/// `f16(whole[0]) * part[0]`, a minimum `-(f16(whole[1]) * part[1])`. Both products are exact in fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SixBits {
    /// Bits of fp16.
    pub whole: [u16; 2],
    pub part: [u8; 2],
}

impl SixBits {
    /// Scale and minimum.
    pub fn values(self) -> (f32, f32) {
        let [scale, least] = [0, 1].map(|i| f16::from_bits(self.whole[i]).to_f32() * f32::from(self.part[i]));
        (scale, -least)
    }
}

impl Code {
    /// Names how the bits of codes lie in a granule, where they once lay otherwise: a pack of another version has the same places.
    pub fn layout(self) -> &'static [u8] {
        if self == Code::E2m1 { b"spread" } else { b"" }
    }

    /// Moves the bits of eight codes of e2m1 so that few instructions make operands of them; all in `bytes`, whole words.
    ///
    /// An operand is a pair of bf16 with the sign at bit 15 and the size from bit 6 on, so a shift and a mask make a pair whose bits lie as far apart. Of the pairs in the
    /// halves of a word the first has its size at bit 0 and its sign at bit 9; the second at 4 and 13; the third at 10, and its signs at bit 3 of the *other* half, which a
    /// rotation brings there; for the fourth the bits 14, 7, 8 and 15 are left.
    pub fn spread(self, bytes: &mut [u8]) {
        if self != Code::E2m1 {
            return;
        }
        for bytes in bytes.as_chunks_mut::<4>().0 {
            let w = u32::from_le_bytes(*bytes);
            let sizes = w & 0x0077_0077 | (w & 0x0700_0700) << 2 | (w & 0x1000_1000) << 2 | (w & 0x6000_6000) >> 6;
            let signs = (w & 0x0088_0088) << 6 | (w & 0x0800_0800).rotate_left(8) | w & 0x8000_8000;
            *bytes = (sizes | signs).to_le_bytes();
        }
    }

    /// Undoes [`Code::spread`] in a word.
    pub fn gathered(self, word: u32) -> u32 {
        if self != Code::E2m1 {
            return word;
        }
        let sizes = word & 0x0077_0077 | word >> 2 & 0x0700_0700 | word >> 2 & 0x1000_1000 | word << 6 & 0x6000_6000;
        let signs = word >> 6 & 0x0088_0088 | word.rotate_right(8) & 0x0800_0800 | word & 0x8000_8000;
        sizes | signs
    }

    pub const ALL: [Code; 6] = [Code::F32, Code::Bf16, Code::Int8, Code::Int4, Code::E4m3, Code::E2m1];

    pub fn name(self) -> &'static str {
        match self {
            Code::F32 => "fp32",
            Code::Bf16 => "bf16",
            Code::Int8 => "int8",
            Code::Int4 => "int4",
            Code::E4m3 => "e4m3",
            Code::E2m1 => "e2m1",
        }
    }

    pub fn bits(self) -> u32 {
        match self {
            Code::F32 => 32,
            Code::Bf16 => 16,
            Code::Int8 | Code::E4m3 => 8,
            Code::Int4 | Code::E2m1 => 4,
        }
    }

    /// Whether a weight is stored as its value.
    pub fn plain(self) -> bool {
        matches!(self, Code::F32 | Code::Bf16)
    }

    /// The value of a code of at most 8 bits; exact.
    pub fn value(self, code: u8) -> f32 {
        self.values()[usize::from(code)]
    }

    /// [`Code::value`] of every code.
    pub fn values(self) -> &'static [f32; 256] {
        static INT8: [f32; 256] = table(Code::Int8);
        static E4M3: [f32; 256] = table(Code::E4m3);
        static E2M1: [f32; 256] = table(Code::E2m1);
        static UNSIGNED: [f32; 256] = table(Code::Int4);
        match self {
            Code::Int8 => &INT8,
            Code::E4m3 => &E4M3,
            Code::E2m1 => &E2M1,
            Code::Int4 | Code::F32 | Code::Bf16 => &UNSIGNED,
        }
    }

    /// The zero point if none is stored.
    pub fn implied_zero(self) -> f32 {
        if self == Code::Int4 { 8.0 } else { 0.0 }
    }

    /// The value of a stored zero point.
    pub fn zero(self, byte: u8) -> f32 {
        if self == Code::Int8 { f32::from(byte as i8) } else { f32::from(byte) }
    }
}

/// Places of the parts of a row in a table of codes; bytes from the row's begin. Rows are looked up one by one, so each has its own
/// scales.
///
/// Codes lie in the order of the columns, two of 4 bits in a byte with the first in the low half. The scales of groups follow, then their
/// zero points, then the scale of the row (fp32).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRow {
    pub scales: u64,
    /// Of the zero points, or of the minima.
    pub zeros: u64,
    pub row_scale: u64,
    pub bytes: u64,
}

/// A row of a table begins at a multiple of these bytes.
const TABLE_ROW_ALIGN: u64 = 16;

impl ScaleCode {
    pub const ALL: [ScaleCode; 6] =
        [ScaleCode::F32, ScaleCode::F16, ScaleCode::Bf16, ScaleCode::E4m3, ScaleCode::E8m0, ScaleCode::F16x6];

    pub fn name(self) -> &'static str {
        match self {
            ScaleCode::F32 => "fp32",
            ScaleCode::F16 => "fp16",
            ScaleCode::Bf16 => "bf16",
            ScaleCode::E4m3 => "e4m3",
            ScaleCode::E8m0 => "e8m0",
            ScaleCode::F16x6 => "fp16x6",
        }
    }

    /// Bytes of a scale. Six bits have none of their own ([`Groups::row_bytes`]).
    pub fn bytes(self) -> u32 {
        match self {
            ScaleCode::F32 => 4,
            ScaleCode::F16 | ScaleCode::Bf16 => 2,
            ScaleCode::E4m3 | ScaleCode::E8m0 => 1,
            ScaleCode::F16x6 => 0,
        }
    }

    /// The scale that little-endian `bytes` hold; exact.
    pub fn read(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (ScaleCode::F32, &[a, b, c, d, ..]) => f32::from_le_bytes([a, b, c, d]),
            (ScaleCode::F16, &[a, b, ..]) => f16::from_le_bytes([a, b]).to_f32(),
            (ScaleCode::Bf16, &[a, b, ..]) => bf16::from_le_bytes([a, b]).to_f32(),
            (ScaleCode::E4m3, &[a, ..]) => e4m3(a),
            (ScaleCode::E8m0, &[a, ..]) => e8m0(a),
            _ => f32::NAN,
        }
    }

    /// Writes a scale: exactly if [`ScaleCode::read`] gave it, else rounded to nearest.
    pub fn write(self, scale: f32, out: &mut [u8]) {
        match self {
            ScaleCode::F32 => out.copy_from_slice(&scale.to_le_bytes()),
            ScaleCode::F16 => out.copy_from_slice(&f16::from_f32(scale).to_le_bytes()),
            ScaleCode::Bf16 => out.copy_from_slice(&bf16::from_f32(scale).to_le_bytes()),
            ScaleCode::E4m3 => out[0] = to_e4m3(scale),
            ScaleCode::E8m0 => out[0] = to_e8m0(scale),
            ScaleCode::F16x6 => {}
        }
    }

    /// The scale after it was written and read.
    pub fn round(self, scale: f32) -> f32 {
        let mut bytes = [0; 4];
        let bytes = &mut bytes[..self.bytes() as usize];
        self.write(scale, bytes);
        self.read(bytes)
    }
}

impl Groups {
    /// Bytes of what `count` groups of a row have beside their codes. With six bits these are two fp16 numbers, and 24 bits for each two
    /// groups.
    pub fn row_bytes(self, count: u32) -> u32 {
        let Groups { k: _, scale, zeros, minima } = self;
        if scale == ScaleCode::F16x6 {
            return 4 + 3 * count.div_ceil(2);
        }
        count * (scale.bytes() + u32::from(zeros) + if minima { scale.bytes() } else { 0 })
    }
}

impl Format {
    /// Weights stored as their values.
    pub fn plain(dtype: DType) -> Format {
        let code = if dtype == DType::F32 { Code::F32 } else { Code::Bf16 };
        Format { code, groups: None, row_scales: false }
    }

    /// Codes with one scale for each row.
    pub fn by_row(code: Code) -> Format {
        Format { code, groups: None, row_scales: true }
    }

    /// Codes with a scale for each group of `k` weights of a row.
    pub fn by_group(code: Code, k: u32, scale: ScaleCode, zeros: bool) -> Format {
        Format { code, groups: Some(Groups { k, scale, zeros, minima: false }), row_scales: false }
    }

    /// Codes with a scale and a minimum for each group of `k` weights of a row.
    pub fn with_minima(code: Code, k: u32, scale: ScaleCode) -> Format {
        Format { code, groups: Some(Groups { k, scale, zeros: false, minima: true }), row_scales: false }
    }

    /// Whether groups have minima.
    pub fn has_minima(self) -> bool {
        self.groups.is_some_and(|groups| groups.minima)
    }

    /// Whether kernels subtract multiples of sums of the input: of offsets of integers, zero points and minima.
    pub fn takes_sums(self) -> bool {
        matches!(self.code, Code::Int8 | Code::Int4) || self.groups.is_some_and(|groups| groups.zeros || groups.minima)
    }

    pub fn is_plain(self) -> bool {
        self.code.plain() && self.groups.is_none() && !self.row_scales
    }

    /// Weights of a row of a granule.
    pub fn granule_k(self) -> u32 {
        CODE_ROW_BYTES * 8 / self.code.bits()
    }

    /// Groups that a row of a granule begins or lies in.
    pub fn granule_groups(self) -> u32 {
        self.groups.map_or(0, |groups| self.granule_k().div_ceil(groups.k.max(1)))
    }

    /// Bytes of a granule: its codes, the scales and zero points of its groups, and padding, so that each granule begins at a multiple of
    /// 16 bytes. Units need no more: a run of a stream says where in 256 bytes it begins.
    pub fn granule_bytes(self) -> u32 {
        let Some(groups) = self.groups else { return CODE_BYTES };
        CODE_BYTES + (ROWS * groups.row_bytes(self.granule_groups())).next_multiple_of(SCALES_ALIGN)
    }

    /// Where the code of column `k` of a granule lies in the 64 bytes of its row: byte, and bits from its lowest one.
    pub fn place(self, k: usize) -> (usize, u32) {
        let (block, lane, i) = (k / 32, k % 32 / 8, k % 8);
        match self.code.bits() {
            // A pair of neighbours lies 16 bits apart: one mask leaves both.
            4 => (lane * 16 + block * 4 + (i % 2) * 2 + i / 4, (i / 2 % 2 * 4) as u32),
            8 => (lane * 16 + block * 8 + i, 0),
            bits => (k * bits as usize / 8, 0),
        }
    }

    /// Where the scale of `group` of row `row` of a granule lies in it; bytes.
    pub fn scale_at(self, row: usize, group: usize) -> usize {
        let bytes = self.groups.map_or(0, |groups| groups.scale.bytes()) as usize;
        CODE_BYTES as usize + (row * self.granule_groups() as usize + group) * bytes
    }

    /// The same for its zero point.
    pub fn zero_at(self, row: usize, group: usize) -> usize {
        self.scale_at(ROWS as usize, 0) + row * self.granule_groups() as usize + group
    }

    /// The same for its minimum.
    pub fn minimum_at(self, row: usize, group: usize) -> usize {
        self.scale_at(ROWS as usize + row, group)
    }

    /// Where a row of a granule has what its scales and minima of six bits are made of: two fp16 numbers; then, for `group` and its
    /// neighbour, the low 16 and the high 8 of 24 bits. Of two pairs the numbers and the low bits are eight bytes, which a lane loads at once.
    fn six_bits_at(self, row: usize, group: usize) -> [usize; 3] {
        let (rows, pairs, pair) = (ROWS as usize, self.granule_groups() as usize / 2, group / 2);
        let begin = CODE_BYTES as usize;
        let (shared, low) = match pairs {
            2 => (begin + 8 * row, begin + 8 * row + 4 + 2 * pair),
            _ => (begin + 4 * row, begin + 4 * rows + 2 * (row * pairs + pair)),
        };
        [shared, low, begin + (4 + 2 * pairs) * rows + row * pairs + pair]
    }

    /// Writes them for one group. The 24 bits of a pair are its two scales, then its two minima.
    pub fn put_six_bits(self, granule: &mut [u8], row: usize, group: usize, of: SixBits) {
        let [shared, low, high] = self.six_bits_at(row, group);
        for (whole, out) in of.whole.iter().zip(granule[shared..shared + 4].chunks_exact_mut(2)) {
            out.copy_from_slice(&whole.to_le_bytes());
        }
        let shift = 6 * (group % 2);
        let bits = u32::from(of.part[0]) << shift | u32::from(of.part[1]) << (12 + shift);
        for (byte, at) in bits.to_le_bytes().iter().zip([low, low + 1, high]) {
            granule[at] |= byte;
        }
    }

    /// Reads them.
    pub fn six_bits(self, granule: &[u8], row: usize, group: usize) -> SixBits {
        let [shared, low, high] = self.six_bits_at(row, group);
        let half = |at: usize| u16::from_le_bytes([granule[at], granule[at + 1]]);
        let bits = (u32::from(half(low)) | u32::from(granule[high]) << 16) >> (6 * (group % 2));
        SixBits { whole: [half(shared), half(shared + 2)], part: [(bits & 63) as u8, (bits >> 12 & 63) as u8] }
    }

    /// The format of a table of such rows: in one, each group has its scale and its minimum by itself.
    pub fn of_table(self) -> Format {
        match self.groups {
            Some(groups) if groups.scale == ScaleCode::F16x6 => {
                Format { groups: Some(Groups { scale: ScaleCode::F32, ..groups }), ..self }
            }
            _ => self,
        }
    }

    /// Where a row of a table of `cols` columns has its parts.
    pub fn table_row(self, cols: u32) -> TableRow {
        let groups = self.groups.map_or(0, |groups| u64::from(cols.div_ceil(groups.k.max(1))));
        let scales = (u64::from(cols) * u64::from(self.code.bits())).div_ceil(8).next_multiple_of(4);
        let zeros = scales + groups * self.groups.map_or(0, |groups| u64::from(groups.scale.bytes()));
        let beside =
            self.groups.map_or(0, |groups| u64::from(groups.row_bytes(1).saturating_sub(groups.scale.bytes())));
        let row_scale = (zeros + groups * beside).next_multiple_of(4);
        let bytes = (row_scale + if self.row_scales { 4 } else { 0 }).next_multiple_of(TABLE_ROW_ALIGN);
        TableRow { scales, zeros, row_scale, bytes }
    }

    /// The values of columns from `first` on of a row of a table of codes of `cols` columns: products of fp32 numbers, as those of a matrix.
    pub fn table_values(self, row: &[u8], cols: u32, first: usize) -> impl Iterator<Item = f32> {
        let (at, code) = (self.table_row(cols), self.code);
        let row_scale = if self.row_scales { ScaleCode::F32.read(&row[at.row_scale as usize..]) } else { 1.0 };
        (first..cols as usize).map(move |col| {
            let stored = if code.bits() == 4 { row[col / 2] >> (col % 2 * 4) & 15 } else { row[col] };
            let Some(groups) = self.groups else { return row_scale * (code.value(stored) - code.implied_zero()) };
            let group = col / groups.k as usize;
            let scale = groups.scale.read(&row[at.scales as usize + group * groups.scale.bytes() as usize..]);
            if groups.minima {
                let least = groups.scale.read(&row[at.zeros as usize + group * groups.scale.bytes() as usize..]);
                return scale * code.value(stored) + least;
            }
            let zero = if groups.zeros { code.zero(row[at.zeros as usize + group]) } else { code.implied_zero() };
            (scale * row_scale) * (code.value(stored) - zero)
        })
    }

    /// Why no matrix can have this format; `None` if one can.
    pub fn refuses(self) -> Option<String> {
        let Format { code, groups, row_scales } = self;
        let scaled = groups.is_some() || row_scales;
        if code.plain() == scaled {
            let expected = if scaled { "none" } else { "some" };
            return Some(format!("{expected} with `{}`", code.name()));
        }
        let groups = groups?;
        if !groups.k.is_power_of_two() || groups.k < 16 {
            return Some(format!("groups of a power of two, at least 16, found {}", groups.k));
        }
        if groups.minima && (groups.zeros || row_scales) {
            return Some("nothing beside minima but scales of groups".to_string());
        }
        if groups.scale == ScaleCode::F16x6 && (!groups.minima || groups.k != 32) {
            return Some(format!("`{}` with minima, in groups of 32", groups.scale.name()));
        }
        let shifted = (groups.zeros || groups.minima) && !matches!(code, Code::Int8 | Code::Int4);
        let what = if groups.minima { "minima" } else { "zero points" };
        shifted.then(|| format!("no {what} with `{}`", code.name()))
    }

    /// Bytes of one weight and its share of scales, for estimates.
    pub fn bytes_per_weight(self) -> f64 {
        let groups = self.groups.map_or(0.0, |groups| {
            // As many groups as share something.
            let count = self.granule_groups().max(1);
            f64::from(groups.row_bytes(count)) / f64::from(count * groups.k)
        });
        f64::from(self.code.bits()) / 8.0 + groups
    }
}

/// What a manifest asks for: formats of matrices, by the names of [`NAMED`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FormatPlan {
    /// That of all linears and the head; `None`: as they are stored, values in the type of the precision.
    pub weights: Option<Format>,
    /// That of the head, if it differs; a plain one: as it is stored.
    pub head: Option<Format>,
    /// That of the matrices of experts, if it differs; as for the head. A shared expert is none of them.
    pub experts: Option<Format>,
    /// That of the embedding; `None`, or a plain one: as it is stored. `weights` does not apply to it.
    pub embed: Option<Format>,
    /// Those of single layers, for all linears of the layer; as for the head.
    pub layers: BTreeMap<u32, Format>,
}

impl FormatPlan {
    /// The format of a layer, or of the head; `None`: as it is stored.
    pub fn of(&self, layer: Option<u32>) -> Option<Format> {
        let own = layer.map_or(self.head, |layer| self.layers.get(&layer).copied());
        own.or(self.weights).filter(|format| !format.is_plain())
    }

    /// The format of the experts of a layer; `None`: as they are stored.
    pub fn of_experts(&self, layer: u32) -> Option<Format> {
        let own = self.layers.get(&layer).copied().or(self.experts);
        own.or(self.weights).filter(|format| !format.is_plain())
    }

    /// The format of the embedding; `None`: as it is stored.
    pub fn of_embed(&self) -> Option<Format> {
        self.embed.filter(|format| !format.is_plain())
    }

    /// As text for keys: one `name value` line each.
    pub fn key_text(&self) -> String {
        let FormatPlan { weights, head, experts, embed, layers } = self;
        let own = [("weights", weights), ("head", head), ("experts", experts), ("embed", embed)].into_iter();
        let own = own.filter_map(|(name, format)| Some(format!("precision.{name}.format {}\n", (*format)?)));
        let layers = layers.iter().map(|(layer, format)| format!("precision.layers.{layer}.format {format}\n"));
        own.chain(layers).collect()
    }
}

const fn int4(k: u32) -> Format {
    let groups = Groups { k, scale: ScaleCode::F16, zeros: false, minima: false };
    Format { code: Code::Int4, groups: Some(groups), row_scales: false }
}

/// Formats that a manifest can name: values, and codes to which weights are rounded here.
pub const NAMED: [(&str, Format); 8] = [
    ("fp32", Format { code: Code::F32, groups: None, row_scales: false }),
    ("bf16", Format { code: Code::Bf16, groups: None, row_scales: false }),
    ("int8", Format { code: Code::Int8, groups: None, row_scales: true }),
    ("fp8", Format { code: Code::E4m3, groups: None, row_scales: true }),
    ("int4:128", int4(128)),
    ("int4:64", int4(64)),
    ("int4:32", int4(32)),
    (
        "mxfp4",
        Format {
            code: Code::E2m1,
            groups: Some(Groups { k: 32, scale: ScaleCode::E8m0, zeros: false, minima: false }),
            row_scales: false,
        },
    ),
];

/// The name in [`NAMED`], or else a description of the format.
pub fn name_of(format: Format) -> String {
    NAMED.iter().find(|(_, named)| *named == format).map_or(format.to_string(), |(name, _)| name.to_string())
}

/// Bits of a code of the format with this name, as [`name_of`] gives it; `None` for an unknown name.
pub fn bits_of(name: &str) -> Option<u32> {
    let named = NAMED.iter().find(|(named, _)| *named == name).map(|(_, format)| format.code);
    let code = name.split(' ').next().unwrap_or_default();
    named.or(Code::ALL.into_iter().find(|of| of.name() == code)).map(Code::bits)
}

/// `bf16`, `int8 by row`, `int4 by 128 fp16 zeros`, `int4 by 32 fp16 minima`.
impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Format { code, groups, row_scales } = self;
        f.write_str(code.name())?;
        if let Some(Groups { k, scale, zeros, minima }) = groups {
            let (zeros, minima) = (if *zeros { " zeros" } else { "" }, if *minima { " minima" } else { "" });
            write!(f, " by {k} {}{zeros}{minima}", scale.name())?;
        }
        if *row_scales { f.write_str(" by row") } else { Ok(()) }
    }
}

const fn table(code: Code) -> [f32; 256] {
    let (mut values, mut byte) = ([0.0; 256], 0);
    while byte < 256 {
        values[byte] = match code {
            Code::Int8 => byte as u8 as i8 as f32,
            Code::E4m3 => e4m3(byte as u8),
            Code::E2m1 => e2m1(byte as u8),
            Code::Int4 | Code::F32 | Code::Bf16 => byte as f32,
        };
        byte += 1;
    }
    values
}

/// The value of an e4m3 code: sign, 4 bits of exponent with bias 7, 3 of mantissa; only the two codes of all ones are no numbers.
pub const fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (code as u32 >> 3 & 15, code as u32 & 7);
    let size = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// Largest value of e4m3.
pub const E4M3_MAX: f32 = 448.0;

/// The nearest e4m3 code, ties to the even one. Values beyond the largest become the largest.
pub fn to_e4m3(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let size = value.abs();
    if size.is_nan() {
        return 0x7f;
    }
    if size >= E4M3_MAX {
        return sign | 0x7e;
    }
    // Steps of the binade of the value: codes of one sign are consecutive integers.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(-6);
    let steps = (size * 2f32.powi(3 - exponent)).round_ties_even() as u8;
    sign | ((((exponent + 6) as u8) << 3) + steps)
}

/// The value of an e2m1 code, of its low four bits.
pub const fn e2m1(code: u8) -> f32 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code as usize & 7];
    if code & 8 == 0 { size } else { -size }
}

/// The nearest e2m1 code, ties to the even one.
pub fn to_e2m1(value: f32) -> u8 {
    let size = value.abs();
    // Midpoints between neighbours. A tie goes to the even code: down after an even one, up after an odd one.
    let steps = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let code =
        (0u8..).zip(steps).filter(|&(i, step)| if i % 2 == 0 { size > step } else { size >= step }).count() as u8;
    if value.is_sign_negative() { code | 8 } else { code }
}

/// `2^(code - 127)`; 255 is no number.
fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// The code of the nearest power of two of a positive scale.
fn to_e8m0(scale: f32) -> u8 {
    if scale < f32::MIN_POSITIVE {
        return u8::from(scale > f32::from_bits(3 << 21));
    }
    // Halves of the next power and more round up.
    let bits = scale.to_bits();
    let up = u32::from(bits & 0x7f_ffff > 0x40_0000);
    ((bits >> 23) + up).min(254) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_follow_from_the_name_of_a_format() {
        for code in Code::ALL {
            let plain = Format { code, groups: None, row_scales: !code.plain() };
            for format in [plain, Format::by_group(code, 128, ScaleCode::F16, true)] {
                assert_eq!(bits_of(&name_of(format)), Some(code.bits()), "{format}");
            }
        }
        assert_eq!((bits_of("mxfp4"), bits_of("int4:64"), bits_of("f8"), bits_of("")), (Some(4), Some(4), None, None));
    }

    #[test]
    fn every_code_reads_back() {
        for code in 0..=255u8 {
            if code & 0x7f != 0x7f {
                assert_eq!(to_e4m3(e4m3(code)), code, "{code:#x}");
            }
            assert_eq!(to_e2m1(e2m1(code)), code & 15);
            if code != 255 {
                assert_eq!(to_e8m0(e8m0(code)), code);
            }
        }
        assert!(e4m3(0x7f).is_nan() && e8m0(255).is_nan());
        assert_eq!((e4m3(0x7e), e4m3(0x01), e4m3(0x88), e2m1(15)), (448.0, 0.001953125, -0.015625, -6.0));
    }

    /// Against the definition: no other code is nearer, and of two as near the even one is taken.
    #[test]
    fn rounding_takes_the_nearest_code() {
        let mut random = crate::random::Random::new(3);
        let nearest = |values: &dyn Fn(u8) -> f32, codes: u8, value: f32, found: u8| {
            let distance = |code: u8| (f64::from(values(code)) - f64::from(value)).abs();
            for code in (0..codes).filter(|&code| !values(code).is_nan()) {
                let (own, other) = (distance(found), distance(code));
                assert!(
                    own < other || own == other && (found.is_multiple_of(2) || values(code) == values(found)),
                    "{value} {code}"
                );
            }
        };
        for i in 0..4000 {
            let size = 2f32.powi(i % 20 - 11);
            let value = size * (1.0 + (random.word() % 1024) as f32 / 1024.0);
            nearest(&e4m3, 127, value.min(448.0), to_e4m3(value));
            nearest(&e2m1, 8, value, to_e2m1(value));
        }
    }

    #[test]
    fn every_column_of_a_granule_has_a_place_of_its_own() {
        for code in Code::ALL {
            let format = Format { code, groups: None, row_scales: !code.plain() };
            let mut seen = std::collections::BTreeSet::new();
            for k in 0..format.granule_k() as usize {
                let (byte, shift) = format.place(k);
                assert!(byte < 64 && shift < 8 && seen.insert((byte, shift)), "{format} {k}");
                // A lane has eight consecutive columns of each 32.
                if code.bits() < 32 {
                    let lane = if code == Code::Bf16 { k / 8 } else { k % 32 / 8 };
                    assert_eq!(byte / 16, lane, "{format} {k}");
                }
            }
        }
    }

    #[test]
    fn codes_of_a_word_are_read_back() {
        let mut random = crate::random::Random::new(3);
        for code in [Code::Int4, Code::E2m1] {
            for word in [0, u32::MAX]
                .into_iter()
                .chain((0..32).map(|bit| 1 << bit))
                .chain((0..1000).map(|_| random.word() as u32))
            {
                let mut bytes = word.to_le_bytes();
                code.spread(&mut bytes);
                assert_eq!(code.gathered(u32::from_le_bytes(bytes)), word, "{code:?}");
            }
        }
    }

    #[test]
    fn granules_have_codes_scales_and_little_padding() {
        for (code, group, scale, zeros) in [
            (Code::Int4, 128, ScaleCode::F16, false),
            (Code::Int4, 128, ScaleCode::F16, true),
            (Code::Int4, 32, ScaleCode::Bf16, true),
            (Code::Int8, 64, ScaleCode::F32, true),
            (Code::E4m3, 128, ScaleCode::F32, false),
            (Code::E2m1, 16, ScaleCode::E4m3, false),
            (Code::E2m1, 32, ScaleCode::E8m0, false),
        ] {
            let format = Format::by_group(code, group, scale, zeros);
            let bytes = format.granule_bytes() as usize;
            assert_eq!((format.refuses(), bytes % 16), (None, 0), "{format}");
            let last = format.granule_groups() as usize - 1;
            let end =
                if zeros { format.zero_at(7, last) + 1 } else { format.scale_at(7, last) + scale.bytes() as usize };
            assert!(end <= bytes && bytes < end + 16, "{format}");
        }
        // The size that was measured: 528 bytes for 128 of k with a group of 128.
        assert_eq!(Format::by_group(Code::Int4, 128, ScaleCode::F16, false).granule_bytes(), 528);
        assert_eq!(Format::by_row(Code::Int8).granule_bytes(), 512);
    }

    /// Nothing of a group lies where another group, or a code, has its bits.
    #[test]
    fn six_bits_of_every_group_read_back() {
        for (code, bytes, weight) in [(Code::Int4, 592, 0.578125), (Code::Int8, 576, 1.109375)] {
            let format = Format::with_minima(code, 32, ScaleCode::F16x6);
            assert_eq!((format.refuses(), format.granule_bytes()), (None, bytes));
            assert_eq!(format.bytes_per_weight(), weight);
            let mut random = crate::random::Random::new(7);
            let mut granule = vec![0; bytes as usize];
            let mut written = vec![];
            for row in 0..8 {
                let whole = [random.word() as u16 & 0x7bff, random.word() as u16 & 0x7bff];
                for group in 0..format.granule_groups() as usize {
                    let part = [random.word() as u8 & 63, random.word() as u8 & 63];
                    let of = SixBits { whole, part };
                    format.put_six_bits(&mut granule, row, group, of);
                    written.push((row, group, of));
                }
            }
            for (row, group, of) in written {
                assert_eq!(format.six_bits(&granule, row, group), of, "{format} {row} {group}");
            }
            assert!(granule[..CODE_BYTES as usize].iter().all(|&byte| byte == 0));
        }
        let of = SixBits { whole: [0x3c01, 0x4200], part: [63, 5] };
        assert_eq!(of.values(), (63.0 * (1.0 + 1.0 / 1024.0), -15.0));
    }

    #[test]
    fn formats_that_mean_nothing_are_refused() {
        let by = |code, k, zeros| Format::by_group(code, k, ScaleCode::F16, zeros).refuses();
        assert_eq!(by(Code::Int4, 128, true), None);
        for (refused, why) in [
            (by(Code::Int4, 96, false), "groups of a power of two, at least 16, found 96"),
            (by(Code::E4m3, 128, true), "no zero points with `e4m3`"),
            (by(Code::Bf16, 128, false), "none with `bf16`"),
            (Format { code: Code::Int8, groups: None, row_scales: false }.refuses(), "some with `int8`"),
            (Format::with_minima(Code::E2m1, 32, ScaleCode::F16).refuses(), "no minima with `e2m1`"),
            (
                Format { row_scales: true, ..Format::with_minima(Code::Int4, 32, ScaleCode::F16) }.refuses(),
                "nothing beside minima but scales of groups",
            ),
            (
                Format::by_group(Code::Int4, 32, ScaleCode::F16x6, false).refuses(),
                "`fp16x6` with minima, in groups of 32",
            ),
            (Format::with_minima(Code::Int8, 64, ScaleCode::F16x6).refuses(), "`fp16x6` with minima, in groups of 32"),
        ] {
            assert_eq!(refused.as_deref(), Some(why));
        }
    }
}
