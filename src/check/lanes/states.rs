//! Mixers that keep a recurrent state: their projections, the state between positions, and what a position makes of both.

use crate::model::graph::{GatedDelta, Linear, Mamba2, ShortConv};
use crate::model::weights::Weights;
use crate::reference::{ConvState, DeltaState, MambaState, mix_delta, mix_mamba, mix_short_conv};

/// Such a mixer.
#[derive(Clone, Copy)]
pub(super) enum Recurrent<'a> {
    Delta(&'a GatedDelta),
    Conv(&'a ShortConv),
    Mamba(&'a Mamba2),
}

/// Its state.
pub(super) enum State {
    Delta(DeltaState),
    Conv(ConvState),
    Mamba(MambaState),
}

/// What a mixer makes of a position: all but what follows it, and what multiplies that (of Mamba-2, else nothing).
pub(super) struct Mixed {
    pub y: Vec<f64>,
    pub gate: Vec<f64>,
}

impl<'a> Recurrent<'a> {
    /// Its matrices that read the layer's input.
    pub fn projections(self) -> Vec<&'a Linear> {
        match self {
            Recurrent::Delta(net) => net.projections().to_vec(),
            Recurrent::Conv(conv) => conv.projections().to_vec(),
            Recurrent::Mamba(mamba) => mamba.projections().to_vec(),
        }
    }

    /// The state before the first position.
    pub fn start(self) -> State {
        match self {
            Recurrent::Delta(net) => State::Delta(DeltaState::new(net)),
            Recurrent::Conv(conv) => State::Conv(ConvState::new(conv.h.rows, conv.kernel)),
            Recurrent::Mamba(mamba) => State::Mamba(MambaState::new(mamba)),
        }
    }

    /// A state as programs keep it.
    pub fn read(self, values: &[f32]) -> State {
        match self {
            Recurrent::Delta(net) => State::Delta(DeltaState::from_heads(net, values)),
            Recurrent::Conv(conv) => State::Conv(ConvState::from_channels(conv.h.rows, conv.kernel, values)),
            Recurrent::Mamba(mamba) => State::Mamba(MambaState::from_heads(mamba, values)),
        }
    }

    /// What [`read`](Self::read) reads.
    pub fn values(self, state: &State) -> Vec<f32> {
        match (self, state) {
            (Recurrent::Delta(net), State::Delta(state)) => state.by_head(net),
            (Recurrent::Conv(_), State::Conv(state)) => state.by_channel(),
            (Recurrent::Mamba(mamba), State::Mamba(state)) => state.by_head(mamba),
            _ => unreachable!("a state of its own"),
        }
    }

    /// One position; brings `state` to it. `projected` are the outputs of the [projections](Self::projections).
    pub fn mix(self, weights: &Weights, state: &mut State, projected: &[Vec<f64>]) -> Mixed {
        fn all<const N: usize>(projected: &[Vec<f64>]) -> [Vec<f64>; N] {
            std::array::from_fn(|n| projected[n].clone())
        }
        let alone = |y| Mixed { y, gate: vec![] };
        match (self, state) {
            (Recurrent::Delta(net), State::Delta(state)) => alone(mix_delta(weights, net, state, all(projected))),
            (Recurrent::Conv(conv), State::Conv(state)) => alone(mix_short_conv(weights, conv, state, all(projected))),
            (Recurrent::Mamba(mamba), State::Mamba(state)) => {
                let (y, gate) = mix_mamba(weights, mamba, state, all(projected));
                Mixed { y, gate }
            }
            _ => unreachable!("a state of its own"),
        }
    }
}
