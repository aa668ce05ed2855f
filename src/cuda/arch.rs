//! Owns `Arch`: a GPU instruction set name (`sm_90a`) and which devices run its cubins.

use std::fmt;

/// A real (not virtual) architecture, as `--gpu-architecture` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// Compute capability, major: 9 of `sm_90a`, 12 of `sm_120`.
    pub major: u32,
    /// Compute capability, minor: 0 of `sm_90a`, 6 of `sm_86`.
    pub minor: u32,
    pub portability: Portability,
}

/// Which devices run a cubin, by the suffix of its architecture (CUDA C++ Programming Guide, "Feature set compiler
/// targets").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Portability {
    /// No suffix: the same major, the same minor or a later one.
    Baseline,
    /// `f`: the family that shares the major; treated like `Baseline` here.
    Family,
    /// `a`: exactly this compute capability.
    Exact,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected an architecture like `sm_90a`, found `{found}`")]
pub struct ArchError {
    pub found: String,
}

impl Arch {
    /// Reads `sm_` digits and an optional `a` (from sm_90) or `f` (from sm_100); the last digit is the minor.
    pub fn parse(text: &str) -> Result<Arch, ArchError> {
        let refuse = || ArchError { found: text.to_owned() };
        let rest = text.strip_prefix("sm_").ok_or_else(refuse)?;
        let (digits, portability) = match (rest.strip_suffix('a'), rest.strip_suffix('f')) {
            (Some(digits), _) => (digits, Portability::Exact),
            (_, Some(digits)) => (digits, Portability::Family),
            (None, None) => (rest, Portability::Baseline),
        };
        if !(2..=3).contains(&digits.len()) || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(refuse());
        }
        let number: u32 = digits.parse().map_err(|_| refuse())?;
        // NVRTC takes the suffix of an earlier architecture as a fault of the source text.
        let exists = match portability {
            Portability::Baseline => true,
            Portability::Exact => number >= 90,
            Portability::Family => number >= 100,
        };
        exists.then_some(Arch { major: number / 10, minor: number % 10, portability }).ok_or_else(refuse)
    }

    /// The number NVRTC lists as supported: 90 for `sm_90a`.
    pub fn number(self) -> u32 {
        self.major * 10 + self.minor
    }

    /// Whether a device of compute capability `major.minor` runs a cubin of this architecture.
    pub fn runs_on(self, (major, minor): (u32, u32)) -> bool {
        match self.portability {
            Portability::Exact => (self.major, self.minor) == (major, minor),
            Portability::Baseline | Portability::Family => self.major == major && self.minor <= minor,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.portability {
            Portability::Baseline => "",
            Portability::Family => "f",
            Portability::Exact => "a",
        };
        write!(f, "sm_{}{suffix}", self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_shape_of_name_and_prints_it_back() {
        for (text, major, minor) in [("sm_75", 7, 5), ("sm_90a", 9, 0), ("sm_100f", 10, 0), ("sm_121a", 12, 1)] {
            let arch = Arch::parse(text).unwrap();
            assert_eq!((arch.major, arch.minor), (major, minor), "{text}");
            assert_eq!(arch.to_string(), text);
        }
    }

    #[test]
    fn refuses_what_is_not_a_real_architecture() {
        for text in [
            "",
            "sm_",
            "sm_9",
            "compute_90",
            "sm_90b",
            "sm_80a",
            "sm_90f",
            "sm_90aa",
            "sm_9000",
            "SM_90",
            "sm_+9",
            "sm_９０",
        ] {
            let message = Arch::parse(text).unwrap_err().to_string();
            assert_eq!(message, format!("expected an architecture like `sm_90a`, found `{text}`"));
        }
    }

    #[test]
    fn a_suffix_pins_the_device() {
        let runs = |arch: &str, cc| Arch::parse(arch).unwrap().runs_on(cc);
        assert!(runs("sm_90a", (9, 0)) && !runs("sm_90a", (9, 1)) && !runs("sm_90a", (10, 0)));
        assert!(runs("sm_80", (8, 6)) && !runs("sm_86", (8, 0)) && !runs("sm_80", (9, 0)));
    }
}
