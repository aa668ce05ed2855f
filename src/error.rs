//! Owns the three tiers of failure, with an exit code for each. Every stage has its own error enum.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Who has to act on a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The input (manifest, checkpoint, prompt, IR text) has to change.
    Input,
    /// The machine lacks something: a driver, a library, disk space, a network.
    Environment,
    /// A fault of monobloc itself.
    Internal,
}

impl Tier {
    /// Process exit code: 2 input, 3 environment, 70 internal (`EX_SOFTWARE` of sysexits.h).
    pub fn exit_code(self) -> u8 {
        match self {
            Tier::Input => 2,
            Tier::Environment => 3,
            Tier::Internal => 70,
        }
    }
}

/// A failure as the user sees it: what happened and where, and what to do about it.
///
/// Errors of stages are converted into this for `cli`; no module below `cli` prints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub tier: Tier,
    /// One lower-case sentence fragment naming the place; may be a rendered caret block of several lines.
    pub message: String,
    /// What to do about it, when that is known.
    pub remedy: Option<String>,
}

impl Fault {
    pub fn input(message: impl Into<String>) -> Self {
        Fault { tier: Tier::Input, message: message.into(), remedy: None }
    }

    pub fn environment(message: impl Into<String>) -> Self {
        Fault { tier: Tier::Environment, message: message.into(), remedy: None }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Fault { tier: Tier::Internal, message: message.into(), remedy: None }
    }

    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(remedy) = &self.remedy {
            write!(f, "\n  help: {remedy}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Fault {}
