//! Owns the traced run of a manifest's kernel: built once more with time stamps, launched, read.

use crate::check::{FILL_SEED, check_ids, fill_device_cache};
use crate::codegen::emit::{Trace, emit};
use crate::cuda::driver::Device;
use crate::cuda::session::Stamped;
use crate::error::Fault;
use crate::measure::step_bytes;
use crate::target::TargetKind;
use crate::trace::{Span, Stamps, Table, spans, table};
use crate::waves::{Refused, chunk_rows};

use super::chain::{Chain, Host};
use super::device_rows::{one_device, trace_rows};
use super::device_waves::{TracedWaves, trace_waves};
use super::execute::{self, load_session};
use super::invariant;
use super::stages::Generated;
use super::{Prepared, Workspace};

/// Launches before the one whose stamps are kept: clocks rise, pages and caches fill.
const WARM_UP: u32 = 3;

/// What was traced.
pub struct Traced {
    /// `NVIDIA H200`.
    pub hardware: String,
    pub sms: u32,
    pub position: u32,
    /// Steps, or a prompt chunk.
    pub launch: TracedLaunch,
    /// The launch after a prompt chunk that decides the next token, or why the model has none. `None`: steps were traced.
    pub tail: Option<Result<TracedLaunch, Refused>>,
}

impl Traced {
    /// The spans of all launches, on one clock.
    pub fn spans(&self) -> impl Iterator<Item = &Span> {
        let tail = self.tail.iter().flatten();
        self.launch.spans.iter().chain(tail.flat_map(|tail| &tail.spans))
    }
}

/// A traced launch, and what its stamps say.
pub struct TracedLaunch {
    pub steps: u32,
    /// Device time of a step between the events around the launch, stamps included.
    pub step_us: f64,
    /// Bytes that a step has to read in the middle of the launch.
    pub bytes_per_step: u64,
    /// Time of those bytes at the measured read peak; `None` if the target was not calibrated.
    pub floor_us: Option<f64>,
    pub spans: Vec<Span>,
    pub table: Table,
}

impl TracedLaunch {
    /// Time of a step in which the memory could have read at its peak and did not; `None` without a peak.
    pub fn memory_idle_us(&self) -> Option<f64> {
        self.floor_us.map(|floor| (self.step_us - floor).max(0.0))
    }
}

/// What is traced.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// `None`: the kernel for one row. `Some(n)`: a kernel for n rows, each from its own sequence.
    pub rows: Option<u32>,
    pub position: u32,
    pub steps: u32,
}

impl Prepared {
    /// Runs the kernel with time stamps.
    ///
    /// # Errors
    /// A target without a kernel, no device of its kind, no compiler, a position without room for the launch, more rows than kernels have.
    pub fn trace(&self, workspace: &Workspace, asked: Asked) -> Result<Traced, Fault> {
        let Prepared { manifest, target, imported, .. } = self;
        let Asked { rows, position, steps } = asked;
        let no_kernel = || {
            Fault::input(format!("target `{}` has no kernel to trace", target.name))
                .with_remedy("name a CUDA target of the manifest with `--target`")
        };
        if target.kind == TargetKind::Cpu {
            return Err(no_kernel());
        }
        if rows.is_none() {
            one_device(target, "the decode kernel")?;
        }
        let context_max = manifest.decode.context_max;
        if u64::from(position) + u64::from(steps) > u64::from(context_max) {
            let message = format!("{steps} steps from position {position} do not fit a context of {context_max}");
            return Err(Fault::input(message).with_remedy("lower `--position` or `--steps`"));
        }
        if rows.is_none() {
            invariant::refuse(
                manifest,
                target,
                "kernel for one row to trace",
                "name rows with `--rows`, as in `--rows 1`",
            )?;
        }
        let host = Host::new(workspace);
        let chain = self.chain(workspace, &host);
        let found = host.device(target)?.ok_or_else(no_kernel)?;
        let device = execute::open(found, target)?;
        let (validated, rows, spans, device_us) = match rows {
            None => {
                let stamped = self.run_traced(workspace, &chain, &device, position, steps)?;
                let stamps = Stamps { words: &stamped.words, tasks_max: stamped.tasks_max, position, steps };
                let spans = spans(self.validated.schedule(), stamps);
                let spans = spans.map_err(|error| Fault::internal(format!("the trace: {error}")))?;
                (self.validated.clone(), 1, spans, stamped.device_us)
            }
            Some(rows) => {
                let traced = trace_rows(&chain, &device, rows, position, steps, WARM_UP)?;
                (traced.validated, traced.rows, traced.spans, traced.device_us)
            }
        };
        let sms = spans.iter().map(|span| span.sm.0 + 1).max().unwrap_or(0);
        let bytes_per_step = step_bytes(&validated, &imported.graph, rows, position + steps / 2);
        let launch = TracedLaunch {
            steps,
            step_us: device_us / f64::from(steps),
            bytes_per_step,
            floor_us: self.floor_us(bytes_per_step),
            table: table(&spans, sms, steps),
            spans,
        };
        Ok(Traced { hardware: found.name.clone(), sms, position, launch, tail: None })
    }

    /// Time of `bytes` at the read peak of the target, if that was measured.
    fn floor_us(&self, bytes: u64) -> Option<f64> {
        self.manifest.measured(&self.target).read_bytes_per_s.map(|per_s| bytes as f64 / per_s * 1e6)
    }

    /// Runs the kernels of waves that read prompts with time stamps: on a chunk of `tokens` tokens from `position` on, and on its tail.
    ///
    /// # Errors
    /// As [`Prepared::trace`]; a model or a target that has no kernel of waves.
    pub fn trace_prompt(&self, workspace: &Workspace, tokens: u32, position: u32) -> Result<Traced, Fault> {
        let Prepared { manifest, target, validated, .. } = self;
        invariant::refuse(manifest, target, "kernel that reads prompts alone", "trace steps with `--rows`")?;
        let (most, context_max) = (chunk_rows(&validated.schedule().program), manifest.decode.context_max);
        if tokens == 0 || tokens > most || u64::from(position) + u64::from(tokens) > u64::from(context_max) {
            let message = format!(
                "a chunk of {tokens} tokens at {position}: expected 1 to {most}, within a context of {context_max}"
            );
            return Err(Fault::input(message));
        }
        let host = Host::new(workspace);
        let chain = self.chain(workspace, &host);
        let found = host.device(target)?.ok_or_else(|| {
            Fault::input(format!("target `{}` has no kernel to trace", target.name))
                .with_remedy("name a CUDA target of the manifest with `--target`")
        })?;
        let device = execute::open(found, target)?;
        let traced = trace_waves(&chain, &device, tokens, position, WARM_UP)?;
        let sms = traced.chunk.spans.iter().map(|span| span.sm.0 + 1).max().unwrap_or(0);
        let launch = |TracedWaves { spans, device_us, bytes }: TracedWaves| TracedLaunch {
            steps: 1,
            step_us: device_us,
            bytes_per_step: bytes,
            floor_us: self.floor_us(bytes),
            table: table(&spans, sms, 1),
            spans,
        };
        let (chunk, tail) = (launch(traced.chunk), traced.tail.map(launch));
        Ok(Traced { hardware: found.name.clone(), sms, position, launch: chunk, tail: Some(tail) })
    }

    /// The kernel for one row, from `position` on.
    fn run_traced(
        &self,
        workspace: &Workspace,
        chain: &Chain<'_>,
        device: &Device,
        position: u32,
        steps: u32,
    ) -> Result<Stamped, Fault> {
        let Prepared { target, imported, validated, .. } = self;
        let source = emit(validated, target, Trace::On);
        let generated = Generated::of(source);
        let cubin = chain.compile(&generated)?;
        let pack = chain.pack()?;
        let mut session = load_session(workspace, device, validated, &cubin.bytes, &pack, Trace::On, steps)?;
        fill_device_cache(&mut session, validated.schedule(), FILL_SEED, position)?;
        session.start(&check_ids(imported.graph.vocab, position + 1), &[])?;
        for _ in 0..WARM_UP {
            session.state_is_before(position);
            session.run(position, steps, false)?;
        }
        session.state_is_before(position);
        Ok(session.run_traced(position, steps)?)
    }
}
