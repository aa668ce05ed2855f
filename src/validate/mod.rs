//! Not written yet.
use crate::ir::schedule::Schedule;
pub struct Validated(Schedule);
impl Validated {
    pub fn schedule(&self) -> &Schedule {
        &self.0
    }
    pub fn unproven(s: Schedule) -> Self {
        Validated(s)
    }
}
