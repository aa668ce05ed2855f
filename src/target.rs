//! Owns `Target`: one GPU (or the CPU) as data, and its record format. Never asks a live device.
//!
//! Measured figures stand in the record, beside the target. Passes are given the target alone, so that no schedule, proof or kernel
//! can depend on a measurement.

use std::fmt;
use std::path::Path;

use crate::error::Fault;
use crate::fields::{Fields, read_document};
use crate::files::{self, FileError};
use crate::text::{Rejection, Style, nearest, one_of};

/// Records inside the binary, in the order in which lists show them.
const BUILTIN_RECORDS: [(&str, &str); 11] = [
    ("cpu", include_str!("../manifests/targets/cpu.toml")),
    ("t4", include_str!("../manifests/targets/t4.toml")),
    ("a100", include_str!("../manifests/targets/a100.toml")),
    ("a10g", include_str!("../manifests/targets/a10g.toml")),
    ("l4", include_str!("../manifests/targets/l4.toml")),
    ("l40s", include_str!("../manifests/targets/l40s.toml")),
    ("rtx4090", include_str!("../manifests/targets/rtx4090.toml")),
    ("rtx5090", include_str!("../manifests/targets/rtx5090.toml")),
    ("h100", include_str!("../manifests/targets/h100.toml")),
    ("h200", include_str!("../manifests/targets/h200.toml")),
    ("b200", include_str!("../manifests/targets/b200.toml")),
];

/// Largest record that is read; a record is a screenful.
const RECORD_BYTES_MAX: u64 = 64 << 10;

const DEVICE_NAMES_MAX: usize = 32;

/// The device that a kernel is made for: the part of a record that passes are given.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Name of the record: `h200`, `cpu`; with several devices also their number: `h200-x2`.
    pub name: String,
    pub kind: TargetKind,
    /// Devices of one host that run a model together, one of [`DEVICES`]. A manifest says it; the record is of one device.
    pub devices: u32,
    /// Of one device.
    pub spec: Spec,
}

/// Numbers of devices that run a model together.
pub const DEVICES: [u32; 4] = [1, 2, 4, 8];

/// A target record, `manifests/targets/NAME.toml`. Vendor figures and measured figures never share a field.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetRecord {
    pub target: Target,
    /// Written by `monobloc calibrate`; every field is empty until it was measured.
    pub measured: Measured,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetKind {
    /// Runs the schedule with the interpreter; worker threads stand in for SMs.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// The vendor's figures, with their source.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Where the figures come from (document and section).
    pub source: String,
    /// `sm_90a`; empty for the CPU.
    pub arch: String,
    /// Device names, whole and as the driver reports them, that this record describes; see [`Target::describes`].
    pub device_names: Vec<String>,
    /// SMs; for the CPU, the workers that stand in for them.
    pub sm_count: u32,
    /// Largest dynamic shared memory of one block, after opt-in.
    pub smem_bytes_per_block_max: u32,
    pub registers_per_sm: u32,
    pub threads_per_block_max: u32,
    pub l2_bytes: u64,
    /// Device memory by the data sheet, with a GB of 10^9 bytes. Good enough to estimate whether a model fits: a driver reports a
    /// few percent more or less.
    pub memory_bytes: u64,
    /// Peak memory bandwidth by the data sheet.
    pub memory_bytes_per_s: f64,
    /// How weights reach shared memory.
    pub copy: CopyMechanism,
    /// How a bf16 dot product is computed.
    pub dot: DotMechanism,
    /// Largest portable thread-block cluster, in blocks; 1 if the hardware has no clusters.
    pub cluster_max: u32,
    /// Whether the consumer warps of batch kernels take registers from the loader warps (`setmaxnreg`). sm_120a has the instruction,
    /// too, but there NVRTC 13.0 spills more in kernels that use it: 160 bytes a thread at Llama-3.2-1B, none without.
    pub register_reallocation: bool,
    /// Whether four warps multiply together (`wgmma`), which only sm_90a has.
    pub warpgroup_mma: bool,
    /// Whether one instruction converts two codes of e4m3 to fp16, or two fp32 to e4m3 (sm_89 on). Otherwise kernels move bits.
    pub fp8_cvt: bool,
}

impl Measured {
    /// The figures of `devices` that run a model together: each reads from its own memory.
    pub fn of_devices(self, devices: u32) -> Measured {
        Measured { read_bytes_per_s: self.read_bytes_per_s.map(|each| each * f64::from(devices)), ..self }
    }

    /// The figures as text for hashing, as [`Target::key_text`]; `provenance` says where they come from, and is left out.
    pub fn key_text(&self) -> String {
        let Measured { provenance: _, read_bytes_per_s, hop_idle_us, hop_loaded_us, sm_bandwidth_min_ratio } = self;
        let fields = [
            ("read_bytes_per_s", read_bytes_per_s),
            ("hop_idle_us", hop_idle_us),
            ("hop_loaded_us", hop_loaded_us),
            ("sm_bandwidth_min_ratio", sm_bandwidth_min_ratio),
        ];
        let written = |value: &Option<f64>| value.map_or("unmeasured".to_string(), |value| format!("{value:?}"));
        fields.iter().map(|(field, value)| format!("target.measured.{field} {}\n", written(value))).collect()
    }
}

/// How bytes reach shared memory; chosen by the record, never by a test of the architecture in code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyMechanism {
    /// Ordinary loads and shared stores (sm_75; the CPU).
    Plain,
    /// `cp.async` with 16 bytes a thread (sm_80 on).
    CpAsync,
    /// `cp.async.bulk` completing on an mbarrier (sm_90 on).
    Bulk,
}

/// How a bf16 dot product is computed; chosen by the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DotMechanism {
    /// fp32 FMA on widened operands.
    Fma,
    /// `mma.sync.m16n8k16` bf16 with fp32 accumulation (sm_80 on).
    Mma,
}

/// Figures that `monobloc calibrate` measured on a device of this kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measured {
    /// How it was measured: device name, driver, compiler.
    pub provenance: Option<String>,
    /// Read bandwidth through the copy mechanism of the record, all SMs; of several devices, all of them.
    pub read_bytes_per_s: Option<f64>,
    /// One all-to-all exchange of 1024 tagged packets, nothing else in flight.
    pub hop_idle_us: Option<f64>,
    /// The same while every SM keeps 32 KiB of copies in flight.
    pub hop_loaded_us: Option<f64>,
    /// Slowest SM's share of the mean bandwidth, 1.0 when all are equal.
    pub sm_bandwidth_min_ratio: Option<f64>,
}

impl TargetKind {
    const NAMES: [(&'static str, TargetKind); 2] = [("cpu", TargetKind::Cpu), ("cuda", TargetKind::Cuda)];

    pub fn name(self) -> &'static str {
        match self {
            TargetKind::Cpu => "cpu",
            TargetKind::Cuda => "cuda",
        }
    }
}

impl CopyMechanism {
    const NAMES: [(&'static str, CopyMechanism); 3] =
        [("plain", CopyMechanism::Plain), ("cp_async", CopyMechanism::CpAsync), ("bulk", CopyMechanism::Bulk)];

    pub fn name(self) -> &'static str {
        match self {
            CopyMechanism::Plain => "plain",
            CopyMechanism::CpAsync => "cp_async",
            CopyMechanism::Bulk => "bulk",
        }
    }
}

impl DotMechanism {
    const NAMES: [(&'static str, DotMechanism); 2] = [("fma", DotMechanism::Fma), ("mma", DotMechanism::Mma)];

    pub fn name(self) -> &'static str {
        match self {
            DotMechanism::Fma => "fma",
            DotMechanism::Mma => "mma",
        }
    }
}

impl fmt::Display for TargetKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for CopyMechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for DotMechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why there is no target.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The word names no builtin record and does not look like a path.
    #[error("unknown target `{name}`: expected {}, or the path of a record", one_of(Target::builtin_names()))]
    Unknown { name: String, nearest: Option<&'static str> },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Invalid(#[from] Rejection),
}

impl TargetError {
    pub fn into_fault(self, style: Style) -> Fault {
        match self {
            TargetError::Unknown { nearest: Some(meant), .. } => {
                Fault::input(self.to_string()).with_remedy(format!("did you mean `{meant}`?"))
            }
            TargetError::Unknown { nearest: None, .. } => Fault::input(self.to_string()),
            TargetError::File(error) => error.into(),
            TargetError::Invalid(rejection) => Fault::input(rejection.render(style)),
        }
    }
}

impl From<TargetError> for Fault {
    fn from(error: TargetError) -> Fault {
        error.into_fault(Style::Plain)
    }
}

impl Target {
    /// Names of the records inside the binary, the CPU first.
    pub fn builtin_names() -> impl Iterator<Item = &'static str> + Clone {
        BUILTIN_RECORDS.iter().map(|(name, _)| *name)
    }

    /// The target of the record `name` inside the binary.
    pub fn builtin(name: &str) -> Option<Target> {
        TargetRecord::builtin(name).map(|record| record.target)
    }

    /// The target of a name: that of a record inside the binary, or of several devices of one (`h200-x2`).
    pub fn named(name: &str) -> Option<Target> {
        let of_one = Target::builtin(name);
        let several = || {
            let (record, devices) = name.rsplit_once("-x")?;
            let devices = devices.parse().ok().filter(|devices| *devices > 1 && DEVICES.contains(devices))?;
            Some(Target::builtin(record)?.on_devices(devices))
        };
        of_one.or_else(several)
    }

    /// The same device, of which a host has `devices` that run a model together.
    pub fn on_devices(self, devices: u32) -> Target {
        if devices == 1 {
            return self;
        }
        Target { name: format!("{}-x{devices}", self.name), devices, ..self }
    }

    /// One of the devices of [`Target::on_devices`].
    pub fn one_of(self) -> Target {
        match self.name.strip_suffix(&format!("-x{}", self.devices)) {
            Some(name) if self.devices > 1 => Target { name: name.to_string(), devices: 1, ..self },
            _ => Target { devices: 1, ..self },
        }
    }

    /// SMs of all devices.
    pub fn sms(&self) -> u32 {
        self.spec.sm_count.saturating_mul(self.devices.max(1))
    }

    /// Whether this record describes the device that the driver calls `device_name`.
    ///
    /// Names are compared whole: by substring, `NVIDIA L4` would describe an L40S, and a record for the whole GPU would
    /// describe its MIG slices. The CPU record describes no device.
    pub fn describes(&self, device_name: &str) -> bool {
        self.spec.device_names.iter().any(|name| name == device_name.trim())
    }

    /// The target as text for hashing: one `name value` line for each field that can change what a build makes.
    ///
    /// Left out are `spec.source` and `spec.device_names`: they say where figures come from and which device may run the
    /// result, not what the result is.
    pub fn key_text(&self) -> String {
        let Target { name, kind, devices, spec } = self;
        let Spec {
            source: _,
            arch,
            device_names: _,
            sm_count,
            smem_bytes_per_block_max,
            registers_per_sm,
            threads_per_block_max,
            l2_bytes,
            memory_bytes,
            memory_bytes_per_s,
            copy,
            dot,
            cluster_max,
            register_reallocation,
            warpgroup_mma,
            fp8_cvt,
        } = spec;
        let fields = [
            ("name", name.clone()),
            ("kind", kind.to_string()),
            ("devices", devices.to_string()),
            ("spec.arch", arch.clone()),
            ("spec.sm_count", sm_count.to_string()),
            ("spec.smem_bytes_per_block_max", smem_bytes_per_block_max.to_string()),
            ("spec.registers_per_sm", registers_per_sm.to_string()),
            ("spec.threads_per_block_max", threads_per_block_max.to_string()),
            ("spec.l2_bytes", l2_bytes.to_string()),
            ("spec.memory_bytes", memory_bytes.to_string()),
            ("spec.memory_bytes_per_s", format!("{memory_bytes_per_s:?}")),
            ("spec.copy", copy.to_string()),
            ("spec.dot", dot.to_string()),
            ("spec.cluster_max", cluster_max.to_string()),
            ("spec.register_reallocation", register_reallocation.to_string()),
            ("spec.warpgroup_mma", warpgroup_mma.to_string()),
            ("spec.fp8_cvt", fp8_cvt.to_string()),
        ];
        fields.iter().map(|(field, value)| format!("target.{field} {value}\n")).collect()
    }
}

impl TargetRecord {
    /// The record of one device that a target with these figures is made of ([`Target::on_devices`], [`Measured::of_devices`]).
    pub fn of_one_device(target: Target, measured: Measured) -> TargetRecord {
        // Exact, because the numbers of devices are powers of two.
        let each = measured.read_bytes_per_s.map(|all| all / f64::from(target.devices.max(1)));
        TargetRecord { target: target.one_of(), measured: Measured { read_bytes_per_s: each, ..measured } }
    }

    /// The record `name` inside the binary.
    pub fn builtin(name: &str) -> Option<TargetRecord> {
        let (name, text) = BUILTIN_RECORDS.iter().find(|(known, _)| *known == name)?;
        Some(TargetRecord::parse(text, name).expect("a builtin record is valid: the tests of this file parse each"))
    }

    /// Loads a builtin record by name, or any record by path: a word with a `/`, or one that ends in `.toml`.
    ///
    /// A relative path follows [`files::find`] with `base_dir`, the folder of the manifest that names it.
    ///
    /// # Errors
    /// An unknown name, a file that is not there or cannot be read, or a record that [`TargetRecord::parse`] refuses.
    pub fn load(name_or_path: &str, base_dir: &Path) -> Result<TargetRecord, TargetError> {
        if let Some(record) = TargetRecord::builtin(name_or_path) {
            return Ok(record);
        }
        let is_path = name_or_path.contains(['/', '\\']) || name_or_path.ends_with(".toml");
        if !is_path {
            let nearest = nearest(name_or_path, Target::builtin_names());
            return Err(TargetError::Unknown { name: name_or_path.to_string(), nearest });
        }
        let path = files::find(name_or_path, base_dir)?;
        let text = files::read_text(&path, RECORD_BYTES_MAX)?;
        Ok(TargetRecord::parse(&text, &path.display().to_string())?)
    }

    /// Reads a record; `path` is what errors call it.
    ///
    /// # Errors
    /// Every fault of the record: syntax, types, ranges, unknown and missing keys, and figures that contradict each other.
    pub fn parse(text: &str, path: &str) -> Result<TargetRecord, Rejection> {
        read_document(text, read_record).map_err(|faults| Rejection::new(path, text, faults))
    }

    /// Writes the record, so that [`TargetRecord::parse`] reads the same record. The records of this repository have exactly
    /// this form, so that `calibrate` changes only the lines that it measured.
    pub fn to_toml(&self) -> String {
        let TargetRecord { target: Target { name, kind, devices: _, spec }, measured } = self;
        let Spec {
            source,
            arch,
            device_names,
            sm_count,
            smem_bytes_per_block_max,
            registers_per_sm,
            threads_per_block_max,
            l2_bytes,
            memory_bytes,
            memory_bytes_per_s,
            copy,
            dot,
            cluster_max,
            register_reallocation,
            warpgroup_mma,
            fp8_cvt,
        } = spec;
        let device_names: Vec<String> = device_names.iter().map(|name| quoted(name)).collect();
        let mut lines = vec![
            format!("name = {}", quoted(name)),
            format!("kind = \"{kind}\""),
            String::new(),
            "[spec]".to_string(),
            format!("source = {}", quoted(source)),
            format!("arch = {}", quoted(arch)),
            format!("device_names = [{}]", device_names.join(", ")),
            format!("sm_count = {sm_count}"),
            format!("smem_bytes_per_block_max = {}", grouped(u64::from(*smem_bytes_per_block_max))),
            format!("registers_per_sm = {}", grouped(u64::from(*registers_per_sm))),
            format!("threads_per_block_max = {threads_per_block_max}"),
            format!("l2_bytes = {}", grouped(*l2_bytes)),
            format!("memory_bytes = {}", grouped(*memory_bytes)),
            format!("memory_bytes_per_s = {}", figure(*memory_bytes_per_s)),
            format!("copy = \"{copy}\""),
            format!("dot = \"{dot}\""),
            format!("cluster_max = {cluster_max}"),
            format!("register_reallocation = {register_reallocation}"),
            format!("warpgroup_mma = {warpgroup_mma}"),
            format!("fp8_cvt = {fp8_cvt}"),
        ];
        let Measured { provenance, read_bytes_per_s, hop_idle_us, hop_loaded_us, sm_bandwidth_min_ratio } = measured;
        if *measured != Measured::default() {
            lines.extend([String::new(), "[measured]".to_string()]);
        }
        lines.extend(provenance.iter().map(|text| format!("provenance = {}", quoted(text))));
        for (key, value) in [
            ("read_bytes_per_s", read_bytes_per_s),
            ("hop_idle_us", hop_idle_us),
            ("hop_loaded_us", hop_loaded_us),
            ("sm_bandwidth_min_ratio", sm_bandwidth_min_ratio),
        ] {
            lines.extend(value.iter().map(|value| format!("{key} = {}", figure(*value))));
        }
        lines.join("\n") + "\n"
    }
}

fn read_record(fields: &mut Fields<'_>) -> Option<TargetRecord> {
    let name = fields.required("name", Fields::file_name);
    let kind = fields.required("kind", |f, key| f.choice(key, &TargetKind::NAMES));
    let kind_read = kind.as_ref().map(|kind| *kind.get_ref());
    let spec = fields.required("spec", |f, key| f.table(key, |spec| read_spec(spec, kind_read)));
    let measured = fields.table("measured", read_measured);
    let target = Target { name: name?.into_inner(), kind: kind?.into_inner(), devices: 1, spec: spec? };
    Some(TargetRecord { target, measured: measured.unwrap_or_default() })
}

fn read_spec(fields: &mut Fields<'_>, kind: Option<TargetKind>) -> Option<Spec> {
    let source = fields.required("source", Fields::text);
    let arch = fields.required("arch", Fields::text);
    let device_names = fields.texts("device_names", DEVICE_NAMES_MAX);
    // 1024 SMs is several times the largest GPU; queues and proofs are sized by this number.
    let sm_count = fields.required("sm_count", |f, key| f.integer_u32(key, 1..=1024));
    let smem = fields.required("smem_bytes_per_block_max", |f, key| f.integer_u32(key, (16 << 10)..=(16 << 20)));
    let registers_per_sm = fields.required("registers_per_sm", |f, key| f.integer_u32(key, 0..=(1 << 20)));
    let threads = fields.required("threads_per_block_max", |f, key| f.integer_u32(key, 1..=1024));
    let l2_bytes = fields.required("l2_bytes", |f, key| f.integer(key, 0..=(1 << 40)));
    let memory_bytes = fields.required("memory_bytes", |f, key| f.integer(key, (1 << 20)..=(1 << 50)));
    let bandwidth = fields.required("memory_bytes_per_s", positive);
    let copy = fields.required("copy", |f, key| f.choice(key, &CopyMechanism::NAMES));
    let dot = fields.required("dot", |f, key| f.choice(key, &DotMechanism::NAMES));
    let cluster_max = fields.required("cluster_max", |f, key| f.integer_u32(key, 1..=16));
    let reallocation = fields.required("register_reallocation", Fields::flag);
    let warpgroup = fields.required("warpgroup_mma", Fields::flag);
    let fp8_cvt = fields.required("fp8_cvt", Fields::flag);

    let (source, arch, copy, dot, cluster_max) = (source?, arch?, copy?, dot?, cluster_max?);
    if source.get_ref().trim().is_empty() {
        fields.refuse(source.span(), "`spec.source` is empty", "expected the document that the figures come from");
    }
    let sm = read_sm(fields, kind?, &arch)?;
    let found = if sm == 0 { "the CPU".to_string() } else { format!("`{}`", arch.get_ref()) };
    let mut needs = |span, what: &str, sm_min: u32| {
        if sm < sm_min {
            fields.refuse(
                span,
                format!("{what} needs more than {found} has"),
                format!("expected `sm_{sm_min}` or later for {what}"),
            );
        }
    };
    // What the instruction sets allow (PTX ISA, "Target ISA Notes" of cp.async, cp.async.bulk, mma, setmaxnreg,
    // barrier.cluster and cvt). A record that claims more would fail in NVRTC, or hang on a device.
    match copy.get_ref() {
        CopyMechanism::Plain => {}
        CopyMechanism::CpAsync => needs(copy.span(), "`cp_async`", 80),
        CopyMechanism::Bulk => needs(copy.span(), "`bulk`", 90),
    }
    match dot.get_ref() {
        DotMechanism::Fma => {}
        DotMechanism::Mma => needs(dot.span(), "`mma`", 80),
    }
    if *cluster_max.get_ref() > 1 {
        needs(cluster_max.span(), "a cluster", 90);
    }
    let fp8_cvt = fp8_cvt?;
    if *fp8_cvt.get_ref() {
        needs(fp8_cvt.span(), "`fp8_cvt`", 89);
    }
    let register_reallocation = reallocation?.into_inner();
    if register_reallocation && !arch.get_ref().ends_with(['a', 'f']) {
        let label = "expected an architecture that ends in `a` or `f`, which `register_reallocation` needs";
        fields.refuse(arch.span(), format!("no register reallocation on {found}"), label);
    }
    let warpgroup_mma = warpgroup?.into_inner();
    if warpgroup_mma && arch.get_ref() != "sm_90a" {
        let label = "expected `sm_90a`, which `warpgroup_mma` needs";
        fields.refuse(arch.span(), format!("no products by warpgroups on {found}"), label);
    }
    Some(Spec {
        source: source.into_inner(),
        arch: arch.into_inner(),
        device_names: device_names.unwrap_or_default(),
        sm_count: sm_count?.into_inner(),
        smem_bytes_per_block_max: smem?.into_inner(),
        registers_per_sm: registers_per_sm?.into_inner(),
        threads_per_block_max: threads?.into_inner(),
        l2_bytes: l2_bytes?.into_inner(),
        memory_bytes: memory_bytes?.into_inner(),
        memory_bytes_per_s: bandwidth?,
        copy: copy.into_inner(),
        dot: dot.into_inner(),
        cluster_max: cluster_max.into_inner(),
        register_reallocation,
        warpgroup_mma,
        fp8_cvt: fp8_cvt.into_inner(),
    })
}

/// The number in `sm_90a`; 0 for a CPU.
fn read_sm(fields: &mut Fields<'_>, kind: TargetKind, arch: &toml::Spanned<String>) -> Option<u32> {
    match kind {
        TargetKind::Cpu if arch.get_ref().is_empty() => Some(0),
        TargetKind::Cpu => {
            let label = format!("expected an empty string, found `{}`", arch.get_ref());
            fields.refuse(arch.span(), "a target of kind `cpu` has no architecture", label);
            None
        }
        TargetKind::Cuda => match sm_number(arch.get_ref()) {
            Some(sm) => Some(sm),
            None => {
                let label =
                    format!("expected `sm_` and a number, as in `sm_89` or `sm_90a`, found `{}`", arch.get_ref());
                fields.refuse(arch.span(), "not a CUDA architecture", label);
                None
            }
        },
    }
}

fn read_measured(fields: &mut Fields<'_>) -> Option<Measured> {
    Some(Measured {
        provenance: fields.text("provenance").map(|text| text.into_inner()),
        read_bytes_per_s: positive(fields, "read_bytes_per_s"),
        hop_idle_us: positive(fields, "hop_idle_us"),
        hop_loaded_us: positive(fields, "hop_loaded_us"),
        sm_bandwidth_min_ratio: fields
            .number("sm_bandwidth_min_ratio", "a number above 0, up to 1", |ratio| ratio > 0.0 && ratio <= 1.0),
    })
}

fn positive(fields: &mut Fields<'_>, key: &'static str) -> Option<f64> {
    fields.number(key, "a number above 0", |value| value > 0.0)
}

/// The number of a CUDA architecture: 90 of `sm_90a`. An `a` (this GPU only) may follow from sm_90 on, an `f` (its
/// family) from sm_100 on; NVRTC knows no others.
fn sm_number(arch: &str) -> Option<u32> {
    let written = arch.strip_prefix("sm_")?;
    let (digits, number_min) = match (written.strip_suffix('a'), written.strip_suffix('f')) {
        (Some(digits), _) => (digits, 90),
        (None, Some(digits)) => (digits, 100),
        (None, None) => (written, 10),
    };
    // `parse` alone would accept a sign.
    let plain = digits.len() <= 3 && digits.bytes().all(|digit| digit.is_ascii_digit());
    digits.parse().ok().filter(|number| plain && *number >= number_min)
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// 232448 as `232_448`, because the digits of `141000000000` are hard to count.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    if digits.len() < 5 {
        return digits;
    }
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push('_');
        }
        out.push(digit);
    }
    out
}

/// A float that reads back as the same bits: `4.8e12`, `0.98`.
fn figure(value: f64) -> String {
    if value.abs() >= 1e6 { format!("{value:e}") } else { format!("{value:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h200_with(line: &str, replacement: &str) -> String {
        let text = BUILTIN_RECORDS[9].1;
        assert!(text.contains(line), "{line} is not in the record");
        text.replace(line, replacement)
    }

    fn refusal(text: &str) -> String {
        match TargetRecord::parse(text, "r.toml") {
            Ok(target) => panic!("accepted: {target:?}"),
            Err(rejection) => rejection.to_string(),
        }
    }

    #[test]
    fn builtin_records_are_canonical_and_named_as_their_files() {
        for (name, text) in BUILTIN_RECORDS {
            let record = TargetRecord::parse(text, name).unwrap_or_else(|rejection| panic!("{rejection}"));
            assert_eq!(record.target.name, name);
            assert_eq!(record.to_toml(), text, "{name}.toml is not in the form that to_toml writes");
            assert_eq!(TargetRecord::builtin(name), Some(record));
        }
        assert_eq!(TargetRecord::builtin("h300"), None);
    }

    #[test]
    fn every_record_file_is_built_in() {
        let files =
            std::fs::read_dir("manifests/targets").expect("the records").map(|file| file.expect("an entry").path());
        let mut stems: Vec<String> =
            files.map(|path| path.file_stem().expect("a stem").to_string_lossy().into()).collect();
        let mut names: Vec<&str> = Target::builtin_names().collect();
        stems.sort();
        names.sort();
        assert_eq!(stems, names);
    }

    #[test]
    fn records_say_what_the_tables_of_the_programming_guide_say() {
        for name in Target::builtin_names().filter(|name| *name != "cpu") {
            let spec = Target::builtin(name).expect("builtin").spec;
            let smem_kib = match spec.arch.as_str() {
                "sm_75" => 64,
                "sm_80" => 163,
                "sm_86" | "sm_89" | "sm_120a" => 99,
                "sm_90a" | "sm_100a" => 227,
                other => panic!("no row for {other}"),
            };
            assert_eq!(spec.smem_bytes_per_block_max, smem_kib << 10, "{name}");
            assert_eq!((spec.registers_per_sm, spec.threads_per_block_max), (65536, 1024), "{name}");
            assert!(!spec.device_names.is_empty(), "{name}");
        }
    }

    #[test]
    fn measured_figures_survive_being_written() {
        let mut record = TargetRecord::builtin("l4").expect("builtin");
        let TargetRecord { target, measured } = &mut record;
        target.spec.source = "a \"quoted\" path C:\\x, a tab\t, a line\nbreak and µs".to_string();
        target.spec.device_names = vec!["A".into(), "B \"b\"".into()];
        *measured = Measured {
            provenance: Some("NVIDIA L4, driver 580, 2025-01-01".to_string()),
            read_bytes_per_s: Some(2.7123456789e11),
            hop_idle_us: Some(0.1 + 0.2),
            hop_loaded_us: Some(5e-324),
            sm_bandwidth_min_ratio: Some(f64::MIN_POSITIVE),
        };
        let text = record.to_toml();
        let read = TargetRecord::parse(&text, "r.toml").unwrap_or_else(|rejection| panic!("{rejection}"));
        assert_eq!(read, record);
        assert_eq!(read.to_toml(), text);
    }

    #[test]
    fn an_unknown_key_names_its_neighbour() {
        assert_eq!(
            refusal(&h200_with("sm_count = 132", "sm_cont = 132")),
            "unknown key `sm_cont` in `spec`
 --> r.toml:8:1
  |
8 | sm_cont = 132
  | ^^^^^^^ expected `arch`, `cluster_max`, `copy`, `device_names`, `dot`, `fp8_cvt`, `l2_bytes`, `memory_bytes`, \
             `memory_bytes_per_s`, `register_reallocation`, `registers_per_sm`, `sm_count`, \
             `smem_bytes_per_block_max`, `source`, `threads_per_block_max` or `warpgroup_mma`
  |
  = help: did you mean `sm_count`?"
        );
    }

    #[test]
    fn figures_are_checked() {
        for (line, replacement, expected) in [
            ("sm_count = 132", "sm_count = 0", "`spec.sm_count` is out of range|expected 1 to 1024, found 0"),
            ("sm_count = 132", "sm_count = 1025", "expected 1 to 1024, found 1025"),
            (
                "= 232_448",
                "= 1024",
                "`spec.smem_bytes_per_block_max` is out of range|expected 16384 to 16777216, found 1024",
            ),
            ("= 4.8e12", "= 0", "`spec.memory_bytes_per_s` is out of range|expected a number above 0, found 0"),
            ("= 4.8e12", "= nan", "expected a number above 0, found nan"),
            ("= 4.6e12", "= -1.0", "`measured.read_bytes_per_s` is out of range|expected a number above 0, found -1.0"),
            ("hop_idle_us = 0.98", "hop_idle = 0.98", "did you mean `hop_idle_us`?"),
            (
                "\"sm_90a\"",
                "\"hopper\"",
                "not a CUDA architecture|expected `sm_` and a number, as in `sm_89` or `sm_90a`, found `hopper`",
            ),
            ("\"sm_90a\"", "\"sm_90b\"", "not a CUDA architecture"),
            ("\"sm_90a\"", "\"sm_89a\"", "not a CUDA architecture"),
            ("\"sm_90a\"", "\"sm_+90\"", "not a CUDA architecture"),
            ("\"sm_90a\"", "\"sm_\"", "not a CUDA architecture"),
            ("\"sm_90a\"", "\"\"", "not a CUDA architecture"),
            ("\"sm_90a\"", "\"sm_90\"", "no register reallocation on `sm_90`"),
            ("\"sm_90a\"", "\"sm_100a\"", "no products by warpgroups on `sm_100a`"),
            ("\"sm_90a\"", "\"sm_80\"", "`bulk` needs more than `sm_80` has|expected `sm_90` or later for `bulk`"),
            ("\"sm_90a\"", "\"sm_80\"", "a cluster needs more than `sm_80` has"),
            ("\"sm_90a\"", "\"sm_75\"", "`mma` needs more than `sm_75` has"),
            ("\"bulk\"", "\"tma\"", "expected `plain`, `cp_async` or `bulk`, found `tma`"),
            (
                "\"cuda\"",
                "\"cpu\"",
                "a target of kind `cpu` has no architecture|expected an empty string, found `sm_90a`",
            ),
            ("\"cuda\"", "\"rocm\"", "unknown value for `kind`|expected `cpu` or `cuda`, found `rocm`"),
            ("cluster_max = 8", "cluster_max = 17", "`spec.cluster_max` is out of range|expected 1 to 16, found 17"),
            ("[spec]\nsource = ", "[spec]\nsource = ''\nnote = ", "`spec.source` is empty"),
            ("\"h200\"", "\"../h200\"", "`name` cannot be part of a file name"),
        ] {
            let found = refusal(&h200_with(line, replacement));
            for part in expected.split('|') {
                assert!(found.contains(part), "{replacement}: expected {part} in\n{found}");
            }
        }
        let cpu = TargetRecord::builtin("cpu").expect("builtin").to_toml();
        for claim in [("\"plain\"", "\"bulk\""), ("\"fma\"", "\"mma\""), ("cluster_max = 1", "cluster_max = 2")] {
            assert!(refusal(&cpu.replace(claim.0, claim.1)).contains("needs more than the CPU has"), "{claim:?}");
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = TargetRecord::load("h20", Path::new(".")).expect_err("no such record");
        assert_eq!(
            Fault::from(error).to_string(),
            "unknown target `h20`: expected `cpu`, `t4`, `a100`, `a10g`, `l4`, `l40s`, `rtx4090`, `rtx5090`, `h100`, `h200` \
             or `b200`, or the path of a record\n  help: did you mean `h200`?"
        );
    }

    #[test]
    fn several_devices_have_a_name_of_their_own() {
        let two = Target::named("h200-x2").expect("two of a record");
        assert_eq!((two.name.as_str(), two.devices, two.sms()), ("h200-x2", 2, 264));
        let one = TargetRecord::builtin("h200").expect("a record").measured.read_bytes_per_s.expect("measured");
        assert_eq!(
            Measured { read_bytes_per_s: Some(one), ..Measured::default() }.of_devices(2).read_bytes_per_s,
            Some(2.0 * one)
        );
        assert_eq!(Target::named("h200").map(|t| t.devices), Some(1));
        for devices in DEVICES {
            let record = TargetRecord::builtin("h200").expect("a record");
            let several = (record.target.clone().on_devices(devices), record.measured.clone().of_devices(devices));
            assert_eq!(TargetRecord::of_one_device(several.0, several.1), record);
        }
        for none in ["h200-x1", "h200-x3", "h200-x", "gpu-x2", "h200-x2-x2"] {
            assert_eq!(Target::named(none), None, "{none}");
        }
    }

    #[test]
    fn a_path_loads_a_record_of_ones_own() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let text = h200_with("\"h200\"", "\"mine\"");
        std::fs::write(folder.path().join("mine.toml"), text).expect("write");
        assert_eq!(TargetRecord::load("mine.toml", folder.path()).expect("loads").target.name, "mine");
        assert_eq!(TargetRecord::load("./mine.toml", folder.path()).expect("loads").target.name, "mine");
        let missing = TargetRecord::load("h200.toml", folder.path()).expect_err("no such file").to_string();
        let beside = folder.path().join("h200.toml");
        let expected = format!("no such file or folder: `h200.toml` (tried `{}` and `h200.toml`)", beside.display());
        assert!(missing.starts_with(&expected), "{missing}");
    }

    #[test]
    fn a_device_is_described_by_its_whole_name() {
        let l4 = Target::builtin("l4").expect("builtin");
        assert!(l4.describes("NVIDIA L4"));
        assert!(!l4.describes("NVIDIA L40S"));
        assert!(!l4.describes(""));
        assert!(!Target::builtin("h100").expect("builtin").describes("NVIDIA H100 80GB HBM3 MIG 1g.10gb"));
        assert!(!Target::builtin("cpu").expect("builtin").describes("NVIDIA L4"));
    }

    #[test]
    fn the_key_turns_with_every_field_that_matters_and_with_no_other() {
        let target = Target::builtin("h200").expect("builtin");
        let key = target.key_text();
        let turned = |change: fn(&mut Target)| {
            let mut other = target.clone();
            change(&mut other);
            other.key_text() != key
        };
        let matters: [fn(&mut Target); 16] = [
            |t| t.name.push('x'),
            |t| t.kind = TargetKind::Cpu,
            |t| t.devices = 2,
            |t| t.spec.arch.push('x'),
            |t| t.spec.sm_count += 1,
            |t| t.spec.smem_bytes_per_block_max += 1,
            |t| t.spec.registers_per_sm += 1,
            |t| t.spec.threads_per_block_max += 1,
            |t| t.spec.l2_bytes += 1,
            |t| t.spec.memory_bytes += 1,
            |t| t.spec.memory_bytes_per_s += 1.0,
            |t| t.spec.copy = CopyMechanism::Plain,
            |t| t.spec.dot = DotMechanism::Fma,
            |t| t.spec.cluster_max += 1,
            |t| t.spec.register_reallocation = false,
            |t| t.spec.warpgroup_mma = false,
        ];
        for (i, change) in matters.into_iter().enumerate() {
            assert!(turned(change), "change {i} did not turn the key");
        }
        assert!(!turned(|t| t.spec.source.push('x')));
        assert!(!turned(|t| t.spec.device_names.clear()));
    }

    #[test]
    fn the_key_of_measured_figures_turns_with_each_of_them() {
        let TargetRecord { measured, .. } = TargetRecord::builtin("h200").expect("builtin");
        let turned = |change: fn(&mut Measured)| {
            let mut other = measured.clone();
            change(&mut other);
            other.key_text() != measured.key_text()
        };
        assert!(turned(|m| m.read_bytes_per_s = None));
        assert!(turned(|m| m.hop_idle_us = Some(1.0)));
        assert!(turned(|m| m.hop_loaded_us = None));
        assert!(turned(|m| m.sm_bandwidth_min_ratio = Some(0.9)));
        assert!(!turned(|m| m.provenance = None));
    }
}
