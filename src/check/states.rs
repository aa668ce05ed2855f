//! Owns the recurrent states of a device as a check reads them, and how far two states are apart.

use std::collections::BTreeMap;

use super::worst;
use crate::cuda::session::SessionError;
use crate::ir::op::{Op, Role};
use crate::ir::program::Grid;
use crate::ir::schedule::Schedule;
use crate::rows::SequenceId;

/// Values of the states of a sequence, by layer.
pub(super) type States = BTreeMap<u32, Vec<f32>>;

/// Where the states of a device are.
pub(super) struct DeviceStates {
    layers: Vec<OfLayer>,
}

struct OfLayer {
    layer: u32,
    /// Byte in the arena.
    at: u64,
    /// Values of a sequence.
    cols: usize,
    heads: usize,
    /// Values of a head before its past inputs.
    matrix: usize,
}

impl DeviceStates {
    pub fn of(schedule: &Schedule) -> DeviceStates {
        let of_grid = |grid: &Grid| {
            let (layer, buffer) = (grid.site?.layer?.0, grid.operand(Role::State)?.buffer);
            let (heads, matrix) = match &grid.op {
                Op::Mix(mix) => (mix.value_heads, mix.key_dim * mix.value_dim),
                Op::Scan(scan) => (scan.heads, scan.head_dim * scan.state),
                // A convolution keeps past inputs alone.
                _ => (1, 0),
            };
            let cols = schedule.program.buffers[buffer.index()].cols as usize;
            let at = schedule.placement[buffer.index()].expect("validate: a state has a place");
            Some(OfLayer { layer, at, cols, heads: heads as usize, matrix: matrix as usize })
        };
        DeviceStates { layers: schedule.program.grids.iter().filter_map(of_grid).collect() }
    }

    /// The states of a sequence. `read` returns 16-bit words of the arena from a byte on.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read(
        &self,
        sequence: SequenceId,
        read: &dyn Fn(u64, usize) -> Result<Vec<u16>, SessionError>,
    ) -> Result<States, SessionError> {
        let of_layer = |of: &OfLayer| {
            let words = read(of.at + (sequence.index() * of.cols * 4) as u64, of.cols * 4)?;
            let value = |pair: &[u16]| f32::from_bits(u32::from(pair[0]) | u32::from(pair[1]) << 16);
            Ok((of.layer, words.chunks_exact(2).map(value).collect()))
        };
        self.layers.iter().map(of_layer).collect()
    }

    /// Of each layer its number, and the largest distance of a head, norm by norm: of its matrix, or of its past inputs. The norm of a head counts as at
    /// least that of an average head.
    pub fn distances(&self, computed: &States, other: &States) -> Vec<(u32, f64)> {
        self.layers.iter().map(|of| (of.layer, of.distance(&computed[&of.layer], &other[&of.layer]))).collect()
    }
}

impl OfLayer {
    fn distance(&self, computed: &[f32], other: &[f32]) -> f64 {
        let each = self.cols / self.heads;
        [0..self.matrix, self.matrix..each]
            .into_iter()
            .map(|part| {
                let of_head = |head: usize| {
                    let columns = head * each + part.start..head * each + part.end;
                    let both = computed[columns.clone()].iter().zip(&other[columns]);
                    both.map(|(&a, &b)| (f64::from(a), f64::from(b)))
                        .fold([0.0; 2], |[away, norm], (a, b)| [away + (a - b) * (a - b), norm + a * a])
                };
                let heads: Vec<[f64; 2]> = (0..self.heads).map(of_head).collect();
                let average = heads.iter().map(|[_, norm]| norm).sum::<f64>() / heads.len().max(1) as f64;
                let relative =
                    |&[away, norm]: &[f64; 2]| if away == 0.0 { 0.0 } else { (away / worst(norm, average)).sqrt() };
                heads.iter().map(relative).fold(0.0, worst)
            })
            .fold(0.0, worst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_part_of_a_head_is_far_away() {
        let of = DeviceStates { layers: vec![OfLayer { layer: 3, at: 0, cols: 20, heads: 2, matrix: 8 }] };
        // Past inputs are small beside the matrix, and the second head beside the first.
        let state: Vec<f32> = (0..20).map(|i| if i % 10 < 8 { 5.0 + i as f32 } else { 0.01 }).collect();
        let right: States = [(3, state.clone())].into();
        assert_eq!(of.distances(&right, &right), [(3, 0.0)]);
        for (at, value) in [(0, 6.0), (9, 0.0), (17, f32::NAN)] {
            let mut wrong = state.clone();
            wrong[at] = value;
            let [(3, away)] = of.distances(&right, &[(3, wrong)].into())[..] else { panic!("one layer") };
            assert!(away.is_nan() || away > 0.02, "{at}: {away}");
        }
        let mut rounded = state;
        rounded.iter_mut().for_each(|value| *value *= 1.01);
        let [(3, away)] = of.distances(&right, &[(3, rounded)].into())[..] else { panic!("one layer") };
        assert!((0.009..0.011).contains(&away), "{away}");
    }
}
