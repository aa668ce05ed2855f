//! Owns element types and the precision of a build.

use std::fmt;

/// An element type that monobloc stores or reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    F32,
    Bf16,
    /// Read from checkpoints only; converted to the weight type of the precision when packed.
    F16,
    /// Token ids.
    I32,
    /// Cached keys and values only: OCP 8-bit floats without infinities (`float8_e4m3fn`), in units of a scale for each KV head.
    E4m3,
}

impl DType {
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::E4m3 => 1,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "fp32",
            DType::Bf16 => "bf16",
            DType::F16 => "fp16",
            DType::I32 => "i32",
            DType::E4m3 => "fp8",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::E4m3].into_iter().find(|d| d.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Element types of one build. Accumulation is always fp32; norm statistics and softmax are fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Precision {
    /// Linear weights and the embedding table: `F32` or `Bf16`.
    pub weights: DType,
    /// Key and value cache: `F32`, `Bf16` or `E4m3`.
    pub cache: DType,
    /// Activations that travel between SMs: `F32` or `Bf16`.
    pub wire: DType,
}
