//! Owns convolutions over positions, and the gated short convolution: one position of it, from the inputs that the positions before left.
//!
//! The formulas are those of [`ShortConv`].

use crate::model::graph::ShortConv;
use crate::model::weights::Weights;
use crate::reference::linear;

/// Inputs of a convolution at the last positions.
#[derive(Debug, Clone, PartialEq)]
pub struct ConvState {
    /// One position for each tap but the current one's, oldest first; `[channels]` each.
    pub inputs: Vec<Vec<f64>>,
}

impl ConvState {
    /// The state before the first position.
    pub fn new(channels: u32, kernel: u32) -> ConvState {
        ConvState { inputs: vec![vec![0.0; channels as usize]; kernel as usize - 1] }
    }

    /// The convolution at a position with `input`; brings the state to it.
    pub fn step(&mut self, taps: &[f32], bias: Option<&[f32]>, input: Vec<f64>) -> Vec<f64> {
        self.inputs.push(input);
        let output = convolve(taps, bias, &self.inputs);
        self.inputs.remove(0);
        output
    }

    /// The state as programs keep it ([`crate::ir::op::Convolve`]): the inputs of each channel, oldest first.
    pub fn by_channel(&self) -> Vec<f32> {
        let channels = self.inputs.first().map_or(0, Vec::len);
        (0..channels).flat_map(|c| self.inputs.iter().map(move |input| input[c] as f32)).collect()
    }

    /// Reads what [`by_channel`](Self::by_channel) has made.
    ///
    /// # Panics
    /// If these are not the values of a state of `channels`.
    pub fn from_channels(channels: u32, kernel: u32, values: &[f32]) -> ConvState {
        let mut state = ConvState::new(channels, kernel);
        for (c, values) in values.chunks_exact(kernel as usize - 1).enumerate() {
            state.inputs.iter_mut().zip(values).for_each(|(input, &value)| input[c] = f64::from(value));
        }
        state
    }
}

/// For each channel `sum over taps of tap * input, + bias?`: `taps` `[channels, inputs.len()]`, oldest first as `inputs`.
pub fn convolve(taps: &[f32], bias: Option<&[f32]>, inputs: &[Vec<f64>]) -> Vec<f64> {
    let of_channel = |(c, taps): (usize, &[f32])| {
        let sum: f64 = taps.iter().zip(inputs).map(|(tap, input)| f64::from(*tap) * input[c]).sum();
        sum + bias.map_or(0.0, |bias| f64::from(bias[c]))
    };
    taps.chunks_exact(inputs.len()).enumerate().map(of_channel).collect()
}

/// The output of a layer at a position with input `x`, `[hidden]` each; brings `state` to it.
pub fn step_short_conv(weights: &Weights, op: &ShortConv, state: &mut ConvState, x: &[f64]) -> Vec<f64> {
    let projected = op.projections().map(|projection| linear(weights, projection, x));
    linear(weights, &op.o, &mix_short_conv(weights, op, state, projected))
}

/// What the output projection reads, `[hidden]`, of the [projections](ShortConv::projections) of a position; brings `state` to it.
pub fn mix_short_conv(weights: &Weights, op: &ShortConv, state: &mut ConvState, [b, c, h]: [Vec<f64>; 3]) -> Vec<f64> {
    let (taps, bias) = (weights.vector_f32(op.conv), op.conv_bias.map(|id| weights.vector_f32(id)));
    let product = |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a * b).collect() };
    let mixed = state.step(&taps, bias.as_deref(), product(&b, &h));
    product(&c, &mixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn convolutions_read_the_oldest_tap_first() {
        let inputs = [vec![1.0, 10.0], vec![2.0, 20.0], vec![3.0, 30.0]];
        let taps = [1.0, 0.0, 0.0, 0.0, 0.5, 1.0];
        assert_eq!(convolve(&taps, None, &inputs), [1.0, 40.0]);
        assert_eq!(convolve(&taps, Some(&[0.5, -1.0]), &inputs), [1.5, 39.0]);
    }

    #[test]
    fn states_are_kept_channel_by_channel() {
        let state = ConvState { inputs: vec![vec![1.0, 2.0], vec![3.0, 4.0], vec![5.0, 6.0]] };
        assert_eq!(state.by_channel(), [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
        assert_eq!(ConvState::from_channels(2, 4, &state.by_channel()), state);
    }

    #[test]
    fn a_state_has_zeros_before_the_text() {
        let mut state = ConvState::new(1, 3);
        let taps = [4.0, 2.0, 1.0];
        let outputs = [1.0, 10.0, 100.0, 0.0].map(|input| state.step(&taps, None, vec![input])[0]);
        assert_eq!(outputs, [1.0, 12.0, 124.0, 240.0]);
        assert_eq!(state.inputs, [[100.0], [0.0]]);
    }
}
