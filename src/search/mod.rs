//! Owns the search: which candidate to try next, and what becomes of one that was tried.
//!
//! `space` says what may be turned, `propose` asks and is told, `judge` keeps or reverts, `prior` remembers what earlier
//! campaigns taught, `additive` makes expectations of it and of the campaign's own trials, `cost` guesses from calibrated figures. All of it is data and pure functions: `pipeline` builds, runs and
//! times what is proposed, so a thousand trials of a made-up landscape take milliseconds.

mod additive;
pub mod cost;
mod drive;
pub mod history;
pub mod judge;
pub mod prior;
pub mod propose;
pub mod space;
pub mod study;
#[cfg(test)]
mod transfer;

pub use drive::{
    Arena, BuildOutcome, Driven, PastTrial, Proposes, Resumed, RunOutcome, Start, TrialRecord, TrialResult, drive,
    past_trials, replay,
};
pub use history::{History, floor_gap, histories};
pub use judge::{Judged, Rounds, is_no_win, judge};
pub use prior::{Prior, Setting, lessons};
pub use propose::{Ask, Limits, Outcome, Search, Stop};
pub use space::{KNOBS, Space};
