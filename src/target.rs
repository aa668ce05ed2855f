//! Owns `Target`: one GPU (or the CPU) as data. Never asks a live device.

use serde::{Deserialize, Serialize};

/// A target record, `manifests/targets/NAME.toml`. Vendor figures and measured figures never share a field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Name of the record: `h200`, `cpu`.
    pub name: String,
    pub kind: TargetKind,
    pub spec: Spec,
    /// Written by `monobloc calibrate`; every field is empty until it was measured.
    #[serde(default)]
    pub measured: Measured,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TargetKind {
    /// Runs the schedule with the interpreter; worker threads stand in for SMs.
    Cpu,
    Cuda,
}

/// What the vendor states, with its source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Where the figures come from (document and section).
    pub source: String,
    /// `sm_90a`; empty for the CPU.
    pub arch: String,
    /// Device names (as the driver reports them, compared by substring) that this record describes.
    #[serde(default)]
    pub device_names: Vec<String>,
    /// SMs; for the CPU, the workers that stand in for them.
    pub sm_count: u32,
    /// Largest dynamic shared memory of one block, after opt-in.
    pub smem_bytes_per_block_max: u32,
    pub registers_per_sm: u32,
    pub threads_per_block_max: u32,
    pub l2_bytes: u64,
    pub memory_bytes: u64,
    /// Peak memory bandwidth by the data sheet.
    pub memory_bytes_per_s: f64,
    /// How weights reach shared memory.
    pub copy: CopyMechanism,
    /// How a bf16 dot product is computed.
    pub dot: DotMechanism,
    /// Largest portable thread-block cluster; 1 where the hardware has none.
    pub cluster_max: u32,
    /// Whether warps may move registers between them (`setmaxnreg`).
    pub register_reallocation: bool,
}

/// How bytes reach shared memory; chosen by the record, never by a test of the architecture in code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyMechanism {
    /// Ordinary loads and shared stores (sm_75; the CPU).
    Plain,
    /// `cp.async` with 16 bytes a thread (sm_80 to sm_89, sm_120).
    CpAsync,
    /// `cp.async.bulk` completing on an mbarrier (sm_90 on).
    Bulk,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DotMechanism {
    /// fp32 FMA on widened operands.
    Fma,
    /// `mma.sync.m16n8k16` bf16 with fp32 accumulation (sm_80 on).
    Mma,
}

/// What `monobloc calibrate` found on a device of this kind.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Device name, driver and date of the measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provenance: Option<String>,
    /// Read bandwidth through the copy mechanism of the record, all SMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_s: Option<f64>,
    /// One all-to-all exchange of 1024 tagged packets, nothing else in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hop_idle_us: Option<f64>,
    /// The same while every SM keeps 32 KiB of copies in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hop_loaded_us: Option<f64>,
    /// Launch to first instruction, and last instruction to event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch_us: Option<f64>,
    /// Slowest SM's share of the mean bandwidth, 1.0 when all are equal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_bandwidth_min_ratio: Option<f64>,
}
