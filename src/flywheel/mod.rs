//! Owns measured results: the row of one trial, and the append-only file of all trials.
//!
//! A candidate is unmeasured, a trial is measured. A row says what was tried, on what, and with which result, in raw figures with
//! their units. Derived figures (tokens per second, share of the floor) are left to the reader. The corpus is advice: without
//! it, a search takes more trials, but no result is less correct.

pub mod corpus;
mod known;
mod parquet;
pub mod trial;

pub use corpus::{
    BestTrial, BrokenRow, Corpus, CorpusError, CorpusStats, MergeReport, append, best, encoded, merge, stats,
};
pub use parquet::write_parquet;
pub use trial::{
    COLUMNS, CheckFigures, Column, Cost, Decision, Facts, Machine, ModelShape, Origin, Point, Proposer, RatioInterval,
    RowFault, SCHEMA, Timing, Trial, Verdict,
};
