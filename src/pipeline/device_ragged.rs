//! Owns the benchmark of steps whose histories differ in length: one sequence has a long one, and all others short ones.

use std::sync::Arc;

use crate::check::{BothLogits, Checked, Figures, check_ids, check_ragged, check_rows, chooses_experts};
use crate::cuda::driver::Device;
use crate::cuda::rows::RowLauncher;
use crate::defaults::rows::Room;
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::target::Target;
use crate::validate::share_caches;
use crate::waves::STEP_ROWS_MIN;

use super::chain::{Chain, Host};
use super::device_rows::{Decoding, FoundOfRows, RowsTimed, STEPS, Took, load_launcher, room_of_each, time_rows};
use super::device_steps::{StepsKernel, StepsKernels, step_rows_for};
use super::execute::upload_pack;
use super::invariant;
use super::stages::BuildContext;
use super::{Workspace, import_stage};

/// Times steps of each number of rows, where one sequence is at each position of the manifest and the others are at `others`: on the kernel
/// that such steps have otherwise, and on the one that cuts long histories into KV splits. Both are compared with the interpreter over short
/// histories. The logits at the timed positions are compared with each other.
///
/// # Errors
/// As `bench`; one row, or positions before `others`; no kernel that cuts histories.
pub fn bench_ragged(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    rows: &[u32],
    others: u32,
    on_found: &mut dyn FnMut(FoundOfRows<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    invariant::refuse(manifest, target, "kernel that cuts histories", "leave `--others` out")?;
    let positions = &manifest.decode.time_positions;
    if rows.contains(&1) || positions.iter().any(|position| *position < others) {
        return Err(Fault::input("`--others` wants `--rows` of 2 and more, and a `--position` that is no smaller"));
    }
    let model = import_stage(workspace, manifest)?;
    let host = Host::new(workspace);
    let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model)?, &host)?;
    let lacks = || Fault::input(format!("target `{}` has no kernels for rows, they need a CUDA target", target.name));
    let device = Device::open(host.device(target)?.ok_or_else(lacks)?.ordinal)?;
    let pages = |position: u32| room_of_each(&chain.context, &chain.candidate, position + STEPS + 1);
    let longest = pages(positions.iter().copied().max().unwrap_or(0));
    for &rows in rows {
        let of = step_rows_for(rows)?;
        let most = of.max(STEP_ROWS_MIN);
        // Kernels with one room have caches that lie alike.
        let room = |rows: u32| Room { rows, sequences: most, positions: longest + u64::from(most - 1) * pages(others) };
        let mut kernels = StepsKernels::new(&chain.context, &chain.candidate);
        let (whole, ragged) = (kernels.of(room(of))?, kernels.ragged(room(most))?);
        share_caches(&whole.validated, &ragged.validated).map_err(|differs| Fault::internal(differs.to_string()))?;
        Both::load(&chain, &device, [whole, ragged])?.bench(rows, (positions, others), on_found)?;
    }
    Ok(())
}

/// Kernels over one cache, which were compared with the interpreter.
struct Both<'a> {
    chain: &'a Chain<'a>,
    whole: Box<dyn RowLauncher>,
    ragged: Box<dyn RowLauncher>,
    /// What each was compared with the interpreter.
    judged: [Checked; 2],
    /// Whether rows choose experts.
    chooses: bool,
}

impl<'a> Both<'a> {
    fn load(chain: &'a Chain<'a>, device: &Device, kernels: [StepsKernel; 2]) -> Result<Both<'a>, Fault> {
        let [of_whole, of_ragged] = kernels;
        let pack = chain.pack()?;
        let parameters = chain.context.imported.graph.parameter_count();
        let shared = upload_pack(device, &of_whole.validated, &pack)?;
        let mut whole = load_launcher(chain, device, &of_whole, STEPS, Arc::clone(&shared), None)?;
        let mut ragged = load_launcher(chain, device, &of_ragged, STEPS, shared, Some(whole.cache()))?;
        let judged = [
            check_rows(&of_whole.validated, pack.clone(), parameters, whole.as_mut())?,
            check_rows(&of_ragged.validated, pack, parameters, ragged.as_mut())?,
        ];
        let chooses = chooses_experts(&of_whole.validated.schedule().program);
        Ok(Both { chain, whole, ragged, judged, chooses })
    }

    /// Compares the logits of both kernels in a step of `decoding`, whose first sequence has the long history. Of a mixture of experts two right kernels
    /// may choose different experts: both were compared with the interpreter over a history that is cut. The figures of each kernel.
    fn compare(
        &mut self,
        decoding: &mut Decoding,
        rows: u32,
        (position, others): (u32, u32),
    ) -> Result<[Figures; 2], Fault> {
        if self.chooses {
            return Ok(self.judged.each_ref().map(Checked::figures));
        }
        let mut logits = |session: &mut dyn RowLauncher| -> Result<Vec<Vec<f32>>, Fault> {
            let (tables, inputs) = decoding.launch(position, 1)?;
            session.poison_logits()?;
            session.run_whole(tables, inputs, true)?;
            (0..rows).map(|row| Ok(session.logits(row)?)).collect()
        };
        let (expected, found) = (logits(self.whole.as_mut())?, logits(self.ragged.as_mut())?);
        let both = expected.into_iter().zip(found).enumerate().map(|(row, (expected, found))| BothLogits {
            position: if row == 0 { position } else { others },
            expected,
            found,
        });
        let precision = self.chain.context.manifest.precision;
        let [judged, _] = &self.judged;
        let checked = check_ragged(precision, judged, &both.collect::<Vec<_>>())?.figures();
        Ok([checked; 2])
    }

    fn bench(
        &mut self,
        rows: u32,
        (positions, others): (&[u32], u32),
        on_found: &mut dyn FnMut(FoundOfRows<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let vocab = self.ragged.vocab();
        for &position in positions {
            let mut decoding = Decoding::with_others(self.ragged.as_mut(), rows, (position, others), STEPS)?;
            let ids = check_ids(vocab, rows);
            decoding.give_tokens(|row| ids[row as usize]);
            let of_kernels = self.compare(&mut decoding, rows, (position, others))?;
            let positions: Vec<u32> = (0..rows).map(|row| if row == 0 { position } else { others }).collect();
            let gains = self.ragged.gains(&positions, self.whole.shape().rows);
            let kernels = [(false, &mut self.whole), (true, &mut self.ragged)];
            for ((splits, session), checked) in kernels.into_iter().zip(of_kernels) {
                let step_us = time_rows(session.as_mut(), &mut decoding, position)?;
                let took = Took::Ragged { others, splits, is_served: splits == gains, step_us };
                let kernel = session.shape().rows;
                on_found(FoundOfRows::Own(&RowsTimed { rows, kernel, position, checked, took }))?;
            }
        }
        Ok(())
    }
}
