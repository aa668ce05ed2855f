//! From a proven schedule to CUDA C++ and the bytes the kernel runs on. Prints and encodes; decides nothing.

pub mod abi;
pub mod emit;
mod kernel_struct;
pub mod sampler;
pub mod waves;

use std::fmt;

/// CUDA C++ of one kernel and every header it includes: the whole input of a compile, beside options and compiler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSource {
    /// File name shown in compiler messages.
    pub name: String,
    pub text: String,
    /// (name as included, text)
    pub headers: Vec<(String, String)>,
    /// `sm_90a`
    pub arch: String,
}

/// The kernel library, by the names that `#include` uses.
pub const HEADERS: [(&str, &str); 27] = [
    ("monobloc.cuh", include_str!("../../kernels/monobloc.cuh")),
    ("core/types.cuh", include_str!("../../kernels/core/types.cuh")),
    ("core/math.cuh", include_str!("../../kernels/core/math.cuh")),
    ("core/sample.cuh", include_str!("../../kernels/core/sample.cuh")),
    ("runtime/queue.cuh", include_str!("../../kernels/runtime/queue.cuh")),
    ("runtime/sync.cuh", include_str!("../../kernels/runtime/sync.cuh")),
    ("runtime/context.cuh", include_str!("../../kernels/runtime/context.cuh")),
    ("runtime/ring.cuh", include_str!("../../kernels/runtime/ring.cuh")),
    ("runtime/stage.cuh", include_str!("../../kernels/runtime/stage.cuh")),
    ("runtime/kernel.cuh", include_str!("../../kernels/runtime/kernel.cuh")),
    ("ops/sampling.cuh", include_str!("../../kernels/ops/sampling.cuh")),
    ("ops/select.cuh", include_str!("../../kernels/ops/select.cuh")),
    ("ops/matvec_formats.cuh", include_str!("../../kernels/ops/matvec_formats.cuh")),
    ("ops/table.cuh", include_str!("../../kernels/ops/table.cuh")),
    ("ops/embed.cuh", include_str!("../../kernels/ops/embed.cuh")),
    ("ops/matvec.cuh", include_str!("../../kernels/ops/matvec.cuh")),
    ("ops/attention_records.cuh", include_str!("../../kernels/ops/attention_records.cuh")),
    ("ops/attention_tensor.cuh", include_str!("../../kernels/ops/attention_tensor.cuh")),
    ("ops/attention.cuh", include_str!("../../kernels/ops/attention.cuh")),
    ("ops/attention_merge.cuh", include_str!("../../kernels/ops/attention_merge.cuh")),
    ("ops/norm_add.cuh", include_str!("../../kernels/ops/norm_add.cuh")),
    ("ops/route.cuh", include_str!("../../kernels/ops/route.cuh")),
    ("ops/combine.cuh", include_str!("../../kernels/ops/combine.cuh")),
    ("ops/mix.cuh", include_str!("../../kernels/ops/mix.cuh")),
    ("ops/convolve.cuh", include_str!("../../kernels/ops/convolve.cuh")),
    ("ops/scan.cuh", include_str!("../../kernels/ops/scan.cuh")),
    ("ops/group_norm.cuh", include_str!("../../kernels/ops/group_norm.cuh")),
];

/// The headers that only batch and wave kernels include.
pub const ROWS_HEADERS: [(&str, &str); 15] = [
    ("monobloc_rows.cuh", include_str!("../../kernels/monobloc_rows.cuh")),
    ("rows/context.cuh", include_str!("../../kernels/rows/context.cuh")),
    ("rows/words.cuh", include_str!("../../kernels/rows/words.cuh")),
    ("rows/deal.cuh", include_str!("../../kernels/rows/deal.cuh")),
    ("rows/ring.cuh", include_str!("../../kernels/rows/ring.cuh")),
    ("rows/select.cuh", include_str!("../../kernels/rows/select.cuh")),
    ("rows/matvec_codes.cuh", include_str!("../../kernels/rows/matvec_codes.cuh")),
    ("rows/matvec.cuh", include_str!("../../kernels/rows/matvec.cuh")),
    ("rows/attention.cuh", include_str!("../../kernels/rows/attention.cuh")),
    ("rows/experts.cuh", include_str!("../../kernels/rows/experts.cuh")),
    ("rows/mix.cuh", include_str!("../../kernels/rows/mix.cuh")),
    ("rows/convolve.cuh", include_str!("../../kernels/rows/convolve.cuh")),
    ("rows/scan.cuh", include_str!("../../kernels/rows/scan.cuh")),
    ("rows/group_norm.cuh", include_str!("../../kernels/rows/group_norm.cuh")),
    ("rows/kernel.cuh", include_str!("../../kernels/rows/kernel.cuh")),
];

/// The headers that only wave kernels include.
pub const WAVES_HEADERS: [(&str, &str); 9] = [
    ("monobloc_waves.cuh", include_str!("../../kernels/monobloc_waves.cuh")),
    ("waves/context.cuh", include_str!("../../kernels/waves/context.cuh")),
    ("waves/ring.cuh", include_str!("../../kernels/waves/ring.cuh")),
    ("waves/rows.cuh", include_str!("../../kernels/waves/rows.cuh")),
    ("waves/warpgroup.cuh", include_str!("../../kernels/waves/warpgroup.cuh")),
    ("waves/warpgroup_codes.cuh", include_str!("../../kernels/waves/warpgroup_codes.cuh")),
    ("waves/matmul.cuh", include_str!("../../kernels/waves/matmul.cuh")),
    ("waves/attention.cuh", include_str!("../../kernels/waves/attention.cuh")),
    ("waves/kernel.cuh", include_str!("../../kernels/waves/kernel.cuh")),
];

/// The header that only kernels of chunks include whose attention is done by warpgroups, after the master header.
pub const ATTEND_HEADERS: [(&str, &str); 1] = [("waves/attend.cuh", include_str!("../../kernels/waves/attend.cuh"))];

/// The headers that only wave kernels with experts include, after the master header; the second one only those with both operands in shared memory.
pub const EXPERTS_HEADERS: [(&str, &str); 2] = [
    ("waves/experts.cuh", include_str!("../../kernels/waves/experts.cuh")),
    ("waves/experts_shared.cuh", include_str!("../../kernels/waves/experts_shared.cuh")),
];

/// The header that only wave kernels with recurrent states include, after the master header.
pub const STATE_HEADERS: [(&str, &str); 1] = [("waves/state.cuh", include_str!("../../kernels/waves/state.cuh"))];

/// The header that only wave kernels with Mamba-2 include, after that of states.
pub const SCAN_HEADERS: [(&str, &str); 1] = [("waves/scan.cuh", include_str!("../../kernels/waves/scan.cuh"))];

/// The header that only wave kernels with gated delta nets include, after that of states.
pub const NET_HEADERS: [(&str, &str); 1] = [("waves/mix.cuh", include_str!("../../kernels/waves/mix.cuh"))];

/// The header that only wave kernels with short convolutions include, after that of states.
pub const CONVOLVE_HEADERS: [(&str, &str); 1] =
    [("waves/convolve.cuh", include_str!("../../kernels/waves/convolve.cuh"))];

/// The header that only decode kernels of drafts include, after the master header.
pub const JOIN_HEADERS: [(&str, &str); 1] = [("ops/join.cuh", include_str!("../../kernels/ops/join.cuh"))];

/// The headers that only the sampler includes.
pub const SAMPLER_HEADERS: [(&str, &str); 4] = [
    ("monobloc_sampler.cuh", include_str!("../../kernels/monobloc_sampler.cuh")),
    ("sample/table.cuh", include_str!("../../kernels/sample/table.cuh")),
    ("sample/sampler.cuh", include_str!("../../kernels/sample/sampler.cuh")),
    ("sample/rivals.cuh", include_str!("../../kernels/sample/rivals.cuh")),
];

/// A float as a C++ literal that reads back to the same bits.
pub(crate) struct Float(pub f32);

impl fmt::Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}f", self.0)
    }
}
