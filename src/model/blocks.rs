//! Owns tensors of GGUF files: rows of blocks of ggml as values, and as codes and scales where a format holds them.
//!
//! Layouts and formulas are those of `dequantize_row_*` in `ggml-quants.c`. Values are computed in fp32, in their order of operations:
//! a product of a scale and a code, and the sum with a minimum where blocks have one, which is the one operation that rounds.

use half::{bf16, f16};

use crate::digest::{KeyPart, KeySink};
use crate::dtype::DType;
use crate::format::{Code, Format, ScaleCode, SixBits, e2m1};
use crate::gguf::Kind;
use crate::model::coded::{CodedRow, Component, Files};

/// Values of the longest block.
const BLOCK_MAX: usize = 256;

/// A tensor of one or two extents in a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocks {
    pub kind: Kind,
    pub component: Component,
    pub rows: u32,
    pub cols: u32,
    /// Width of a head, where the file has the rows of each head in pairs: row `i` of the first half, then row `i` of the second. A
    /// tensor of one extent has its values in this order.
    pub paired: Option<u32>,
    /// Whether it is packed as values, though a format holds its codes.
    pub as_values: bool,
}

/// A block: a code for each value, and a scale and a minimum for each group of them.
struct Decoded {
    codes: [u8; BLOCK_MAX],
    groups: [(f32, f32); 16],
    /// What those of a type with scales of six bits are made of.
    six_bits: [SixBits; 8],
}

/// The codes of a type of blocks, and the values of a group.
struct Layout {
    code: Code,
    group: usize,
    /// Whether each group has a minimum.
    minima: bool,
}

fn layout(kind: Kind) -> Option<Layout> {
    let (code, group, minima) = match kind {
        Kind::Q4_0 => (Code::Int4, 32, false),
        Kind::Q4_1 => (Code::Int4, 32, true),
        Kind::Q5_0 | Kind::Q8_0 => (Code::Int8, 32, false),
        Kind::Q5_1 => (Code::Int8, 32, true),
        Kind::Q4K => (Code::Int4, 32, true),
        Kind::Q5K => (Code::Int8, 32, true),
        Kind::Q6K => (Code::Int8, 16, false),
        Kind::Mxfp4 => (Code::E2m1, 32, false),
        Kind::F32 | Kind::F16 | Kind::Bf16 | Kind::Other(_) => return None,
    };
    Some(Layout { code, group, minima })
}

/// The format that a type of blocks is packed in; `None`: values, for no format that kernels read holds its codes.
pub fn format_of(kind: Kind) -> Option<Format> {
    match kind {
        Kind::Q4_0 => Some(Format::by_group(Code::Int4, 32, ScaleCode::F16, false)),
        Kind::Q8_0 | Kind::Q5_0 => Some(Format::by_group(Code::Int8, 32, ScaleCode::F16, false)),
        Kind::Mxfp4 => Some(Format::by_group(Code::E2m1, 32, ScaleCode::E8m0, false)),
        Kind::Q4_1 => Some(Format::with_minima(Code::Int4, 32, ScaleCode::F16)),
        Kind::Q5_1 => Some(Format::with_minima(Code::Int8, 32, ScaleCode::F16)),
        Kind::Q4K => Some(Format::with_minima(Code::Int4, 32, ScaleCode::F16x6)),
        Kind::Q5K => Some(Format::with_minima(Code::Int8, 32, ScaleCode::F16x6)),
        _ => None,
    }
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The two halves of bytes: the low ones, then the high ones.
fn halves(bytes: &[u8], out: &mut [u8]) {
    let (low, high) = out.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// Scale and minimum of group `group` of a super-block, 6 bits each (`get_scale_min_k4`).
fn parts_of(scales: &[u8], group: usize) -> [u8; 2] {
    if group < 4 {
        return [scales[group] & 63, scales[group + 4] & 63];
    }
    let (both, low, high) = (scales[group + 4], scales[group - 4] >> 6, scales[group] >> 6);
    [both & 15 | low << 4, both >> 4 | high << 4]
}

impl Decoded {
    fn new() -> Decoded {
        let none = SixBits { whole: [0; 2], part: [0; 2] };
        Decoded { codes: [0; BLOCK_MAX], groups: [(0.0, 0.0); 16], six_bits: [none; 8] }
    }

    /// Reads a block of a type that has codes.
    fn read(&mut self, kind: Kind, block: &[u8]) {
        let Decoded { codes, groups, six_bits } = self;
        match kind {
            Kind::Q4_0 => {
                groups[0] = (f16_at(block, 0), 0.0);
                halves(&block[2..18], &mut codes[..32]);
            }
            Kind::Q4_1 => {
                groups[0] = (f16_at(block, 0), f16_at(block, 2));
                halves(&block[4..20], &mut codes[..32]);
            }
            Kind::Q5_0 | Kind::Q5_1 => {
                let (high, offset) = if kind == Kind::Q5_0 { (2, 16) } else { (4, 0) };
                groups[0] = (f16_at(block, 0), if kind == Kind::Q5_0 { 0.0 } else { f16_at(block, 2) });
                halves(&block[high + 4..high + 20], &mut codes[..32]);
                for (i, code) in codes[..32].iter_mut().enumerate() {
                    let bit = block[high + i / 8] >> (i % 8) & 1;
                    *code = (*code | bit << 4).wrapping_sub(offset);
                }
            }
            Kind::Q8_0 => {
                groups[0] = (f16_at(block, 0), 0.0);
                codes[..32].copy_from_slice(&block[2..34]);
            }
            Kind::Q4K | Kind::Q5K => {
                let whole = [0, 2].map(|at| u16::from_le_bytes([block[at], block[at + 1]]));
                for (group, (own, out)) in six_bits.iter_mut().zip(groups).enumerate() {
                    *own = SixBits { whole, part: parts_of(&block[4..16], group) };
                    *out = own.values();
                }
                let low = if kind == Kind::Q4K { 16 } else { 48 };
                for (bytes, out) in block[low..low + 128].chunks(32).zip(codes.chunks_mut(64)) {
                    halves(bytes, out);
                }
                if kind == Kind::Q5K {
                    for (i, code) in codes.iter_mut().enumerate() {
                        *code |= (block[16 + i % 32] >> (i / 32) & 1) << 4;
                    }
                }
            }
            Kind::Q6K => {
                let scale = f16_at(block, 208);
                for (group, out) in groups.iter_mut().enumerate() {
                    *out = (scale * f32::from(block[192 + group] as i8), 0.0);
                }
                for (i, code) in codes.iter_mut().enumerate() {
                    // Each 128 values have 64 bytes of low halves and 32 bytes of pairs of bits.
                    let (part, quarter, l) = (i / 128, i % 128 / 32, i % 32);
                    let low = block[64 * part + 32 * (quarter % 2) + l] >> (quarter / 2 * 4) & 15;
                    let high = block[128 + 32 * part + l] >> (2 * quarter) & 3;
                    *code = (low | high << 4).wrapping_sub(32);
                }
            }
            Kind::Mxfp4 => {
                groups[0] = (ScaleCode::E8m0.read(&block[..1]), 0.0);
                halves(&block[1..17], &mut codes[..32]);
            }
            Kind::F32 | Kind::F16 | Kind::Bf16 | Kind::Other(_) => {}
        }
    }
}

/// The values of `row`, whole blocks.
fn values(kind: Kind, row: &[u8], out: &mut [f32]) {
    let Some(Layout { code, group, minima }) = layout(kind) else {
        match kind {
            Kind::F32 => row.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = f32::from_le_bytes(*b)),
            Kind::F16 => row.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = f16::from_le_bytes(*b).to_f32()),
            _ => row.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = bf16::from_le_bytes(*b).to_f32()),
        }
        return;
    };
    let mut decoded = Decoded::new();
    let blocks = row.chunks_exact(kind.block_bytes() as usize).zip(out.chunks_exact_mut(kind.block() as usize));
    for (block, out) in blocks {
        decoded.read(kind, block);
        let groups = decoded.codes.chunks(group).zip(out.chunks_mut(group)).zip(decoded.groups);
        for ((codes, out), (scale, least)) in groups {
            for (code_of, out) in codes.iter().zip(out) {
                let value = match code {
                    Code::Int8 => f32::from(*code_of as i8),
                    // ggml has no negative zero.
                    Code::E2m1 => e2m1(*code_of) + 0.0,
                    _ if minima => f32::from(*code_of),
                    _ => f32::from(*code_of) - code.implied_zero(),
                };
                let product = scale * value;
                *out = if minima { product + least } else { product };
            }
        }
    }
}

/// With the bytes of the file it decides every value of the tensor.
impl KeyPart for Blocks {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { kind, component, rows, cols, paired, as_values } = self;
        key.text("kind", kind.name());
        key.nested("blocks", component);
        key.value("rows", rows);
        key.value("cols", cols);
        key.list("paired", paired);
        key.value("as_values", as_values);
    }
}

impl Blocks {
    /// How the stored bytes are read, for people: without their place and the extents of the tensor.
    pub fn reading(&self) -> String {
        let Self { kind, component: _, rows: _, cols: _, paired, as_values: _ } = self;
        let format = self.format().map_or("values".to_string(), |format| format.to_string());
        format!("blocks of {kind} as {format}{}", if paired.is_some() { ", rows in pairs" } else { "" })
    }

    /// How it is packed; `None`: as values.
    pub fn format(&self) -> Option<Format> {
        format_of(self.kind).filter(|_| !self.as_values)
    }

    /// The type of its values.
    pub fn dtype(&self) -> DType {
        match self.kind {
            Kind::F16 => DType::F16,
            Kind::Bf16 => DType::Bf16,
            _ => DType::F32,
        }
    }

    /// Where the file has row `row`.
    fn stored_row(&self, row: u32) -> u32 {
        let Some(dim) = self.paired.filter(|dim| *dim >= 2) else { return row };
        let (head, at, half) = (row / dim, row % dim, dim / 2);
        head * dim + 2 * (at % half) + at / half
    }

    fn row_bytes(&self) -> usize {
        (u64::from(self.cols) / self.kind.block() * self.kind.block_bytes()) as usize
    }

    fn row<'a>(&self, files: &'a impl Files, row: u32) -> &'a [u8] {
        let bytes = self.row_bytes();
        let first = self.stored_row(row) as usize * bytes;
        &files.bytes(&self.component)[first..first + bytes]
    }

    /// The values of row `row`.
    pub fn read_values(&self, files: &impl Files, row: u32, out: &mut [f32]) {
        if self.rows > 1 || self.paired.is_none() {
            return values(self.kind, self.row(files, row), out);
        }
        // A bias: each value belongs to a row of its matrix.
        let mut stored = vec![0.0; out.len()];
        values(self.kind, &files.bytes(&self.component)[..self.row_bytes()], &mut stored);
        for (i, out) in (0u32..).zip(out) {
            *out = stored[self.stored_row(i) as usize];
        }
    }

    /// Row `row` as the format of the tensor has it.
    ///
    /// # Panics
    /// If it has none.
    pub fn read_coded(&self, files: &impl Files, row: u32, out: &mut CodedRow) {
        let Some(Layout { group, minima, .. }) = layout(self.kind) else { panic!("blocks of codes") };
        out.codes.clear();
        out.scales.clear();
        out.zeros.clear();
        out.minima.clear();
        out.six_bits.clear();
        out.row_scale = 1.0;
        let shares = format_of(self.kind).and_then(|of| of.groups).is_some_and(|of| of.scale == ScaleCode::F16x6);
        let mut decoded = Decoded::new();
        let block = self.kind.block() as usize;
        for bytes in self.row(files, row).chunks_exact(self.kind.block_bytes() as usize) {
            decoded.read(self.kind, bytes);
            out.codes.extend_from_slice(&decoded.codes[..block]);
            let groups = &decoded.groups[..block / group];
            out.scales.extend(groups.iter().map(|(scale, _)| scale));
            out.minima.extend(groups.iter().map(|(_, least)| least).filter(|_| minima));
            if shares {
                out.six_bits.extend(decoded.six_bits);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::gguf::read_parts;
    use crate::model::graph::{Tensor, TensorId};
    use crate::model::weights::Checkpoint;

    /// Random blocks against the values that the `gguf` package reads (tests/fixtures/make_gguf.py): the same bits.
    #[test]
    fn blocks_have_the_values_of_ggml() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/types.gguf");
        let checkpoint = Checkpoint::of_gguf(&read_parts(&[path]).unwrap()).unwrap();
        let (rows, cols) = (3, 512);
        let mut tensors = vec![];
        let mut blocks = std::collections::BTreeMap::new();
        for kind in Kind::READ {
            let of = |name: &str| Tensor { name: name.to_string(), dtype: DType::F32, shape: vec![rows, cols] };
            let component = checkpoint.tensors()[kind.name()].component();
            let own = Blocks { kind, component, rows, cols, paired: None, as_values: false };
            blocks.insert(TensorId::from(tensors.len()), own);
            tensors.extend([of(kind.name()), of(&format!("{}.values", kind.name()))]);
        }
        let weights = checkpoint
            .bind(&tensors, std::collections::BTreeMap::new(), blocks, &std::collections::BTreeSet::new())
            .unwrap();
        let (mut found, mut expected, mut coded) = (vec![0.0f32; 512], vec![0.0f32; 512], CodedRow::default());
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for (i, kind) in Kind::READ.into_iter().enumerate() {
            let id = TensorId::from(2 * i);
            for row in 0..rows {
                weights.read_row_f32(id, row, &mut found);
                weights.read_row_f32(TensorId::from(2 * i + 1), row, &mut expected);
                assert_eq!(bits(&found), bits(&expected), "{kind} row {row}");
                if let Some(format) = format_of(kind) {
                    weights.read_row_coded(id, row, &mut coded);
                    coded.values(format, &mut found);
                    assert_eq!(found, expected, "codes of {kind}, row {row}");
                }
            }
        }
    }

    #[test]
    fn rows_in_pairs_are_put_back_into_halves() {
        let component = Component { file: 0, bytes: 0..0 };
        let of = |paired| Blocks {
            kind: Kind::F32,
            component: component.clone(),
            rows: 8,
            cols: 1,
            paired,
            as_values: false,
        };
        let stored: Vec<u32> = (0..8).map(|row| of(Some(4)).stored_row(row)).collect();
        assert_eq!(stored, [0, 2, 1, 3, 4, 6, 5, 7]);
        assert_eq!(of(None).stored_row(5), 5);
    }
}
