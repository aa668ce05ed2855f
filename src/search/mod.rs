//! Owns the search: which candidate to try next, and whether a tried one is kept.
//!
//! - `space`: the knobs and their values.
//! - `propose`: asks for the next candidate, and is told the results.
//! - `judge`: keeps or reverts.
//! - `prior`: the lessons of earlier campaigns.
//! - `additive`: predictions from these lessons and from the campaign's own trials.
//! - `cost`: estimates from calibrated figures.
//! - `drive`: the loop, over an `Arena` that builds and runs candidates.
//! - `history`: a campaign, read from its rows.
//! - `study`: cold campaigns against warm ones.
//!
//! All of it is data and pure functions. `pipeline` builds, runs and times what is proposed, so a thousand trials of a simulated
//! landscape take milliseconds.

mod additive;
pub mod cost;
mod drive;
pub mod fleet;
pub mod history;
pub mod judge;
pub mod prior;
pub mod propose;
pub mod space;
pub mod study;

pub use drive::{
    Arena, BuildOutcome, Driven, PastTrial, Proposes, Resumed, RunOutcome, Start, TrialRecord, TrialResult, drive,
    past_trials, replay,
};
pub use fleet::{Fleet, drive_fleet};
pub use history::{History, floor_gap, histories};
pub use judge::{Judged, Rounds, is_no_win, judge};
pub use prior::{Prior, Setting, lessons};
pub use propose::{Ask, Limits, Outcome, Search, Stop};
pub use space::{KNOBS, Space};
