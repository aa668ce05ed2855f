//! Owns the benchmark of steps whose histories differ in length: one sequence has a long one, and all others short ones.

use std::sync::Arc;

use crate::check::{BothLogits, check_ids, check_ragged, check_rows};
use crate::cuda::driver::Device;
use crate::cuda::rows::RowLauncher;
use crate::defaults::rows::{Room, STEP_ROWS};
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::target::Target;
use crate::validate::share_caches;
use crate::waves::STEP_ROWS_MIN;

use super::chain::{Chain, Host};
use super::device_rows::{Decoding, FoundOfRows, RowsTimed, STEPS, Took, load_launcher, time_rows};
use super::device_steps::{StepsKernel, StepsKernels, step_rows_for};
use super::execute::upload_pack;
use super::invariant;
use super::stages::BuildContext;
use super::{Workspace, import_stage};

/// Rows of the largest kernel whose SMs have whole rows: the other one is compared with it.
const WHOLE_ROWS_MAX: u32 = STEP_ROWS_MIN / 2;

/// Times steps of each number of rows, where one sequence is at each position of the manifest and the others are at `others`: on the kernel of
/// waves, and before it on the smaller one that steps of few rows have otherwise. Both are compared with the interpreter over short
/// histories. The logits at the timed positions are those of the smaller one, within tolerance.
///
/// # Errors
/// As `bench`; one row, or positions before `others`; no kernel of waves.
pub fn bench_ragged(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    rows: &[u32],
    others: u32,
    on_found: &mut dyn FnMut(FoundOfRows<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    invariant::refuse(manifest, target, "kernel of whole rows to compare with", "leave `--others` out")?;
    let positions = &manifest.decode.time_positions;
    if rows.contains(&1) || positions.iter().any(|position| *position < others) {
        return Err(Fault::input("`--others` wants `--rows` of 2 and more, and a `--position` that is no smaller"));
    }
    let model = import_stage(workspace, manifest)?;
    let host = Host::new(workspace);
    let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model)?, &host)?;
    let lacks = || Fault::input(format!("target `{}` has no kernels for rows, they need a CUDA target", target.name));
    let device = Device::open(host.device(target)?.ok_or_else(lacks)?.ordinal)?;
    let pages = |position: u32| u64::from((position + STEPS + 1).next_multiple_of(256));
    let longest = pages(positions.iter().copied().max().unwrap_or(0));
    for &rows in rows {
        let of = step_rows_for(rows)?;
        let most = of.max(STEP_ROWS_MIN);
        // Kernels with one room have caches that lie alike.
        let room = |rows: u32| Room { rows, sequences: most, positions: longest + u64::from(most - 1) * pages(others) };
        let mut kernels = StepsKernels::new(&chain.context, &chain.candidate);
        let whole = kernels.of(room(of.min(WHOLE_ROWS_MAX)))?;
        let waves = kernels.of(room(most))?;
        if !waves.by_waves {
            return Err(Fault::input(format!("no kernel of waves for {most} rows: `monobloc show steps` says why")));
        }
        share_caches(&whole.validated, &waves.validated).map_err(|differs| Fault::internal(differs.to_string()))?;
        Both::load(&chain, &device, [whole, waves])?.bench(rows, (positions, others), on_found)?;
    }
    Ok(())
}

/// Kernels over one cache, which were compared with the interpreter.
struct Both<'a> {
    chain: &'a Chain<'a>,
    whole: Box<dyn RowLauncher>,
    waves: Box<dyn RowLauncher>,
}

impl<'a> Both<'a> {
    fn load(chain: &'a Chain<'a>, device: &Device, [of_whole, of_waves]: [StepsKernel; 2]) -> Result<Both<'a>, Fault> {
        let pack = chain.pack()?;
        let parameters = chain.context.imported.graph.parameter_count();
        let shared = upload_pack(device, &of_whole.validated, &pack)?;
        let mut whole = load_launcher(chain, device, &of_whole, STEPS, Arc::clone(&shared), None)?;
        let mut waves = load_launcher(chain, device, &of_waves, STEPS, shared, Some(whole.cache()))?;
        check_rows(&of_whole.validated, pack.clone(), parameters, whole.as_mut())?;
        check_rows(&of_waves.validated, pack, parameters, waves.as_mut())?;
        Ok(Both { chain, whole, waves })
    }

    fn bench(
        &mut self,
        rows: u32,
        (positions, others): (&[u32], u32),
        on_found: &mut dyn FnMut(FoundOfRows<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let vocab = self.waves.vocab();
        for &position in positions {
            let mut decoding = Decoding::with_others(self.waves.as_mut(), rows, (position, others), STEPS)?;
            let ids = check_ids(vocab, rows);
            decoding.give_tokens(|row| ids[row as usize]);
            let mut logits = |session: &mut dyn RowLauncher| -> Result<Vec<Vec<f32>>, Fault> {
                // The first sequence has the long history.
                let count = rows.min(WHOLE_ROWS_MAX);
                let (tables, inputs) = decoding.launch_some(position, 1, count)?;
                session.poison_logits()?;
                session.run_whole(tables, inputs, true)?;
                (0..count).map(|row| Ok(session.logits(row)?)).collect()
            };
            let (expected, found) = (logits(self.whole.as_mut())?, logits(self.waves.as_mut())?);
            let at = |row: usize| if row == 0 { position } else { others };
            let both = expected.into_iter().zip(found).enumerate();
            let both = both.map(|(row, (expected, found))| BothLogits { position: at(row), expected, found });
            let precision = self.chain.context.manifest.precision;
            let checked = check_ragged(precision, &both.collect::<Vec<_>>())?.figures();
            for session in [self.whole.as_mut(), self.waves.as_mut()] {
                let kernel = session.shape().rows;
                if kernel < rows {
                    continue;
                }
                let took = Took::Ragged { others, step_us: time_rows(session, &mut decoding, position)? };
                on_found(FoundOfRows::Own(&RowsTimed { rows, kernel, position, checked, took }))?;
            }
        }
        Ok(())
    }
}

const _: () = assert!(WHOLE_ROWS_MAX >= STEP_ROWS[0], "a kernel of whole rows");
