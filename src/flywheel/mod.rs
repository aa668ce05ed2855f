//! Owns what was measured: the row of one trial, and the append-only file of all of them.
//!
//! A candidate is unmeasured, a trial is measured: its row says what was tried, on what, and what came of it, in raw
//! figures with their units. Derived figures (tokens per second, share of the floor) belong to the reader. The corpus
//! is read once, by digest, at the start of a build, and appended at the end; it is advice, so deleting it changes how
//! fast a search gets somewhere, never what is correct.

pub mod corpus;
pub mod trial;

pub use corpus::{
    BestTrial, BrokenRow, Corpus, CorpusError, CorpusStats, MergeReport, append, best, encoded, merge, stats,
};
pub use trial::{
    COLUMNS, CheckFigures, Column, Cost, Decision, Facts, Machine, ModelShape, Point, Proposer, RatioInterval,
    RowFault, SCHEMA, Timing, Trial, Verdict,
};
