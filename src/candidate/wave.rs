//! Owns `WaveKnobs`: what is a free choice in a wave kernel, and the values of each choice.
//!
//! 0 leaves a choice to the rule of `waves::derive`, and all zeros are the kernel that is built without a search. A value that does not fit a model or a
//! target is refused by name when a plan is derived; the proof judges every plan, whatever knobs it came from.

use std::fmt;

/// One choice in a wave kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaveKnob {
    /// The name that a candidate prints.
    pub name: &'static str,
    pub meaning: &'static str,
    /// All values that it may have, ascending. The first one is 0.
    pub values: &'static [u32],
    /// Whether plans of prompt chunks have the choice, and plans of steps.
    pub of_chunks: bool,
    pub of_steps: bool,
}

/// The choices, written out once: field, name, values, of chunks, of steps, meaning.
macro_rules! wave_knobs {
    ($($field:ident $name:literal $values:expr, $chunks:literal $steps:literal, $meaning:literal;)*) => {
        /// The choices in a wave kernel. 0: as the rule decides.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub struct WaveKnobs {
            $(#[doc = $meaning] pub $field: u32,)*
        }

        /// Number of choices in a wave kernel.
        pub const WAVE_KNOB_COUNT: usize = [$($name),*].len();

        /// The choices in the order of the fields of [`WaveKnobs`].
        pub const WAVE_KNOBS: [WaveKnob; WAVE_KNOB_COUNT] = [$(WaveKnob {
            name: $name,
            meaning: $meaning,
            values: &$values,
            of_chunks: $chunks,
            of_steps: $steps,
        }),*];

        impl WaveKnobs {
            /// The values in the order of [`WAVE_KNOBS`].
            pub fn values(&self) -> [u32; WAVE_KNOB_COUNT] {
                let WaveKnobs { $($field),* } = *self;
                [$($field),*]
            }

            /// The choices with these values.
            pub fn of_values(values: &[u32; WAVE_KNOB_COUNT]) -> WaveKnobs {
                let [$($field),*] = *values;
                WaveKnobs { $($field),* }
            }
        }
    };
}

wave_knobs! {
    pass "wave_pass" [0, 8, 16, 24, 32, 48, 64], true true,
        "most units of a matrix that a block multiplies at once; 0: as many as registers or shared memory hold";
    slots "wave_slots" [0, 2, 3, 4, 5, 6, 8, 10, 12], true true,
        "slots of the ring of weights, each of which is a copy in flight; 0: as many as fit, up to 8";
    input_slots "wave_input_slots" [0, 2, 3, 4, 5, 6, 8], true true,
        "slots of the ring of inputs, which takes its room from the ring of weights; 0: by form and rows";
    slot_kib "wave_slot_kib" [0, 8, 16, 32], false true,
        "most KiB of a slot of weights; 0: 16, of experts 32 in bf16 and 18 in codes";
    parts "wave_parts" [0, 1, 2, 4, 8], true true,
        "parts of k of a product whose sums may be added up: the most up to this that are possible; 0: by the bytes that an SM moves, and in a chunk by the units of a pass";
    pairs "wave_pairs" [0, 1], true true,
        "1: blocks never work in pairs; 0: wherever a target has pairs";
    held "wave_held" [0, 1, 2, 4, 6, 8], false true,
        "chunks of weights that warps hold in registers while SMs meet, where they fit; 1: none; 0: 4";
    tile "wave_tile" [0, 16, 32, 64], true true,
        "positions of a tile of attention by warps; 0: warpgroups attend in chunks where they can, else as many as a slot of inputs holds, up to 64";
    row_groups "wave_row_groups" [0, 1, 2, 4, 8], true true,
        "groups of warps that share the rows of a product; 0: those that read fewest bytes of shared memory";
    unit_groups "wave_unit_groups" [0, 1, 2, 4, 8], false true,
        "groups of warps that share the units of a product, each of which reads all inputs; 0: as above";
    tiles "wave_tiles" [0, 1, 2], false true,
        "1: warpgroups multiply no tiles; 2: they do wherever tiles fit; 0: where it was measured to pay";
    row_parts "wave_row_parts" [0, 1, 2, 4, 8], false true,
        "most parts of a row that SMs share in a wave of rows; 0: one for each SM that has no row";
    tickets "wave_tickets" [0, 1], true true,
        "1: blocks take items of experts in turn, by number; 0: each takes the next one when it is ready";
    packets "wave_packets" [0, 1], false true,
        "1: heads never travel in packets, and SMs meet before attention; 0: up to 4 MiB do";
    products "wave_products" [0, 1, 2], true false,
        "what multiplies: 1: warps; 2: warpgroups with weights in registers; 0: warpgroups with both operands in shared memory, else as 2, else as 1";
}

impl WaveKnobs {
    /// Reads what `Display` writes. An absent knob is 0.
    ///
    /// # Errors
    /// A knob or a value that there is not.
    pub fn parse(text: &str) -> Result<WaveKnobs, String> {
        let mut values = [0; WAVE_KNOB_COUNT];
        for pair in text.split(';').map(str::trim).filter(|pair| !pair.is_empty() && *pair != DEFAULT) {
            let (name, value) = pair.split_once('=').ok_or_else(|| format!("expected `knob=value`, found `{pair}`"))?;
            let at = WAVE_KNOBS.iter().position(|knob| knob.name == name);
            let (knob, to) = at
                .and_then(|at| Some((WAVE_KNOBS.get(at)?, values.get_mut(at)?)))
                .ok_or_else(|| format!("unknown knob `{name}` of a wave kernel"))?;
            *to = value.parse().map_err(|_| format!("expected a number for `{name}`, found `{value}`"))?;
            knob.refuse(*to)?;
        }
        Ok(WaveKnobs::of_values(&values))
    }

    /// Whether every choice is left to the rules.
    pub fn is_default(&self) -> bool {
        *self == WaveKnobs::default()
    }
}

impl WaveKnob {
    /// Refuses a value that the choice does not have.
    ///
    /// # Errors
    /// The values that it has.
    pub fn refuse(&self, value: u32) -> Result<(), String> {
        if self.values.contains(&value) {
            return Ok(());
        }
        let all: Vec<String> = self.values.iter().map(u32::to_string).collect();
        Err(format!("`{}` is {value}, expected one of {}", self.name, all.join(", ")))
    }
}

/// What `Display` writes if every choice is left to the rules.
const DEFAULT: &str = "default";

/// `knob=value;knob=value`, without those that are 0.
impl fmt::Display for WaveKnobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = WAVE_KNOBS.iter().zip(self.values()).filter(|(_, value)| *value != 0);
        let all: Vec<String> = set.map(|(knob, value)| format!("{}={value}", knob.name)).collect();
        f.write_str(if all.is_empty() { DEFAULT } else { "" })?;
        f.write_str(&all.join(";"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_of_a_wave_knob_reads_back() {
        assert_eq!(WaveKnobs::default().to_string(), "default");
        assert_eq!(WaveKnobs::parse("default"), Ok(WaveKnobs::default()));
        assert_eq!(WaveKnobs::parse(""), Ok(WaveKnobs::default()));
        for (at, knob) in WAVE_KNOBS.iter().enumerate() {
            assert_eq!(knob.values.first(), Some(&0), "{}: the rule decides", knob.name);
            assert!(knob.values.is_sorted() && (knob.of_chunks || knob.of_steps), "{}", knob.name);
            for &value in knob.values {
                let mut values = [0; WAVE_KNOB_COUNT];
                (values[at], values[0]) = (value, 16);
                let knobs = WaveKnobs::of_values(&values);
                assert_eq!(WaveKnobs::parse(&knobs.to_string()), Ok(knobs));
            }
        }
    }

    #[test]
    fn unknown_wave_knobs_and_values_are_named() {
        for (text, expected) in [
            ("wave_pass=9", "`wave_pass` is 9, expected one of 0, 8, 16, 24, 32, 48, 64"),
            ("wave_pairs=2", "`wave_pairs` is 2, expected one of 0, 1"),
            ("sms=3", "unknown knob `sms` of a wave kernel"),
            ("wave_pass=x", "expected a number for `wave_pass`, found `x`"),
            ("wave_pass", "expected `knob=value`, found `wave_pass`"),
        ] {
            assert_eq!(WaveKnobs::parse(text), Err(expected.to_string()));
        }
    }
}
