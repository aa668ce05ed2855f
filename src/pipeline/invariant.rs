//! Owns the kernels of an artefact with `batch_invariant` on a GPU: steps in waves for 32 and 64 rows, which add up in one order. They read
//! prompts and verify proposals, too, so every row of the artefact has the bits that it has alone.

use std::sync::Arc;

use crate::candidate::{Candidate, WaveKnobs};
use crate::check::{ALIKE_POSITIONS, ALIKE_SEQUENCES, Checked, check_alike, check_rows};
use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
use crate::cuda::rows::RowLauncher;
use crate::cuda::sampler::SamplerSession;
use crate::defaults::rows::Room;
use crate::digest::Digest;
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::target::{Target, TargetKind};
use crate::validate::Validated;
use crate::waves::{ALIKE_ROWS_MAX, Alike, Proven, STEP_ROWS_MIN, derive_alike, prove_alike};

use super::bench::Programs;
use super::chain::Chain;
use super::device_rows::{
    Asked, FoundOfRows, Reader, RowsTimed, STEPS, Took, bench_prompts, bench_steps, place_kernel, prove_kernel,
    room_of_each, rows_of,
};
use super::device_sampler::sampler_source;
use super::device_steps::By;
use super::device_waves::{waves_digests, waves_source};
use super::execute::upload_pack;
use super::kernels::{Does, KernelSet, Planned, PlannedSet};
use super::stages::BuildContext;

/// Rows of the kernels, ascending. A step runs on the smallest that has room for it.
pub(super) const KERNEL_ROWS: [u32; 2] = [STEP_ROWS_MIN, ALIKE_ROWS_MAX];

/// Rows of the kernel that runs steps of `rows`.
///
/// # Errors
/// No rows, or more than the largest has.
pub(super) fn kernel_rows(rows: u32) -> Result<u32, Fault> {
    let kernel = KERNEL_ROWS.into_iter().find(|kernel| rows > 0 && *kernel >= rows);
    let wrong = || format!("{rows} rows: expected 1 to {ALIKE_ROWS_MAX}, as many as a step has at most");
    kernel.ok_or_else(|| Fault::input(wrong()))
}

/// Whether a manifest wants such kernels on a target. On a CPU a row has the bits that it has alone in any case.
pub(super) fn is_asked(manifest: &Manifest, target: &Target) -> bool {
    manifest.decode.batch_invariant && target.kind == TargetKind::Cuda
}

/// Refuses what runs other kernels than those.
///
/// # Errors
/// A manifest that wants such kernels on the target.
pub(super) fn refuse(manifest: &Manifest, target: &Target, what: &str, remedy: &str) -> Result<(), Fault> {
    if !is_asked(manifest, target) {
        return Ok(());
    }
    let message = format!("`decode.batch_invariant` leaves no {what} on target `{}`", target.name);
    Err(Fault::input(message).with_remedy(remedy))
}

/// Places and proves the schedule from which the plans are derived. The rows of `room` do not matter.
///
/// # Errors
/// A kernel that does not fit the target.
pub(super) fn schedule(context: &BuildContext<'_>, candidate: &Candidate, room: Room) -> Result<Validated, Fault> {
    let rows = rows_of(context).first().copied().unwrap_or(room.rows);
    prove_kernel(context, place_kernel(context, candidate, Room { rows, ..room })?)
}

/// Derives the plans and proves that they add up in one order.
///
/// # Errors
/// Why there are none. Plans that are not proven are a fault of this program.
pub(super) fn plan<'a>(target: &Target, validated: &'a Validated) -> Result<Alike<'a>, Fault> {
    let schedule = validated.schedule();
    let plans = derive_alike(schedule, target, &KERNEL_ROWS);
    let plans = plans.map_err(|refused| {
        Fault::input(format!("`decode.batch_invariant` needs steps that run wave by wave: {refused}"))
            .with_remedy("leave `batch_invariant` out, or name another target")
    })?;
    prove_alike(plans, validated, target).map_err(|violations| {
        let all: Vec<String> = violations.iter().map(ToString::to_string).collect();
        Fault::internal(format!("plans of waves that are not proven to be alike: {}", all.join("; ")))
    })
}

/// The kernel with these rows.
///
/// # Errors
/// There is none.
pub(super) fn with_rows<'a, 'b>(alike: &'b Alike<'a>, rows: u32) -> Result<&'b Proven<'a>, Fault> {
    let found = alike.plans().iter().find(|proven| proven.plan().rows == rows);
    found.ok_or_else(|| Fault::input(format!("no kernel for {rows} rows adds up as those for more rows do")))
}

/// Digests of what an exported kernel was compiled from, and of all that it walks.
///
/// # Errors
/// As [`plan`] and [`with_rows`].
pub(super) fn digests(target: &Target, validated: &Validated, rows: u32) -> Result<[Digest; 2], Fault> {
    let alike = plan(target, validated)?;
    waves_digests(target, with_rows(&alike, rows)?)
}

/// Proves and compiles the kernels for `room`.
///
/// # Errors
/// As [`schedule`] and [`plan`]; what the compiler refuses.
pub(super) fn make(chain: &Chain<'_>, room: Room) -> Result<KernelSet, Fault> {
    to_make(chain, room)?.compile(chain)
}

/// The kernels of [`make`] before they are compiled.
///
/// # Errors
/// As [`schedule`] and [`plan`].
pub(super) fn to_make(chain: &Chain<'_>, room: Room) -> Result<PlannedSet, Fault> {
    let validated = Arc::new(schedule(&chain.context, &chain.candidate, room)?);
    Ok(PlannedSet { is_alike: true, kernels: planned(chain, &validated)? })
}

/// The kernels over the pages of `validated`, before they are compiled.
///
/// # Errors
/// As [`plan`].
pub(super) fn planned(chain: &Chain<'_>, validated: &Arc<Validated>) -> Result<Vec<Planned>, Fault> {
    let of = |proven: &Proven<'_>| Planned {
        does: Does::Steps { rows: proven.plan().rows, by: By::Waves },
        validated: Some(Arc::clone(validated)),
        knobs: WaveKnobs::default(),
        source: waves_source(&chain.context, proven, Trace::Off),
    };
    Ok(plan(chain.context.target, validated)?.plans().iter().map(of).collect())
}

/// Times steps and prompts on the kernels, after their logits were compared with those of the interpreter, and the bits of rows in
/// batches and chunks with those of the rows alone.
///
/// # Errors
/// As `bench_rows`; a row with other bits.
pub(super) fn bench(
    chain: &Chain<'_>,
    device: &Device,
    Asked { rows, prompts, chunks }: Asked<'_>,
    programs: &mut Programs<'_>,
    on_found: &mut dyn FnMut(FoundOfRows<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let BuildContext { manifest, target, imported, workspace, .. } = chain.context;
    rows.iter().try_for_each(|&rows| kernel_rows(rows).map(drop))?;
    let last = manifest.decode.time_positions.iter().max().copied().unwrap_or(0) + STEPS + 1;
    let longest = prompts.iter().max().copied().unwrap_or(0);
    // Rounded, so that pages are whole and one sequence more than those that decode has room for a prompt.
    let of = |last: u32| room_of_each(&chain.context, &chain.candidate, last);
    let sequences = ALIKE_ROWS_MAX.max(ALIKE_SEQUENCES);
    let positions = u64::from(sequences) * of(last.max(ALIKE_POSITIONS)) + of(longest);
    let made = make(chain, Room { rows: 0, sequences, positions })?;
    let (validated, pack) = (made.validated(), chain.pack()?);
    let shared = upload_pack(device, validated, &pack)?;
    let mut sessions = made.load(device, target, STEPS, &shared, None)?.steps;
    let sampler = chain.compile(&sampler_source(target))?;
    let mut sampler = SamplerSession::load(device, &sampler.bytes, imported.graph.vocab, ALIKE_ROWS_MAX, STEPS)?;
    let parameters = imported.graph.parameter_count();
    let mut checked = vec![];
    for (_, session) in &mut sessions {
        checked.push(check_rows(validated, pack.clone(), parameters, session.as_mut())?);
    }
    let mut launchers: Vec<&mut dyn RowLauncher> =
        sessions.iter_mut().map(|(_, session)| session.as_mut() as &mut dyn RowLauncher).collect();
    let alike = check_alike(&mut launchers)?;
    workspace.report.note(&format!("{} rows have the bits that they have alone", alike.compared));
    let kernel = sessions.iter().map(|(_, session)| session.shape().rows).max().unwrap_or(0);
    let figures = checked[checked.len() - 1].figures();
    let took = Took::Alike(alike);
    on_found(FoundOfRows::Own(&RowsTimed { rows: kernel, kernel, position: 0, checked: figures, took }))?;
    let sessions = sessions.into_iter().map(|(_, session)| session).collect();
    let kernels = Kernels { sessions, checked, vocab: imported.graph.vocab };
    let asked = Asked { rows, prompts, chunks };
    kernels.time(&manifest.decode.time_positions, asked, &mut sampler, programs, on_found)
}

/// Kernels that were checked, ascending by rows.
struct Kernels {
    sessions: Vec<Box<dyn RowLauncher>>,
    checked: Vec<Checked>,
    vocab: u32,
}

impl Kernels {
    /// Times steps at each of `positions`, and prompts: by the kernel for most rows, unless others are asked for.
    fn time(
        mut self,
        positions: &[u32],
        Asked { rows, prompts, chunks }: Asked<'_>,
        sampler: &mut SamplerSession,
        programs: &mut Programs<'_>,
        on_found: &mut dyn FnMut(FoundOfRows<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let all: Vec<u32> = self.sessions.iter().map(|session| session.shape().rows).collect();
        let largest = all.len() - 1;
        for &position in positions {
            for &rows in rows {
                let at = all.iter().position(|kernel| *kernel >= rows).unwrap_or(largest);
                let (session, kernel, checked) = (&mut self.sessions[at], all[at], self.checked[at].figures());
                bench_steps(session.as_mut(), sampler, (rows, kernel, position, checked), programs, on_found)?;
            }
        }
        let chunks = if chunks.is_empty() { &all[largest..] } else { chunks };
        for &rows in chunks {
            let at = all.iter().position(|kernel| *kernel == rows).ok_or_else(|| {
                let all: Vec<String> = all.iter().map(u32::to_string).collect();
                Fault::input(format!("chunks of {rows}: expected {}, as many as a kernel has rows", all.join(" or ")))
            })?;
            let mut reader = Reader { rows: self.sessions[at].as_mut(), waves: None };
            let checked = self.checked[at].figures();
            bench_prompts(&mut reader, prompts, self.vocab, (rows, rows, checked), programs, on_found)?;
        }
        Ok(())
    }
}
