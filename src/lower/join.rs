//! Owns how a draft is lowered: its token and what it is given, up to the input of its layer.

use super::{Builder, constant};
use crate::ir::BufferId;
use crate::ir::op::{Epilogue, Op, Role, UNIT_ROWS};
use crate::ir::program::{Cols, Operand, Rows, Second};
use crate::model::graph::Joined;

impl Builder<'_> {
    /// Joins the embedded token with what is given; returns the buffer that holds the input of the first layer.
    ///
    /// The residual begins with zeros, and both products are added to it. Only the second sum is exchanged.
    pub(super) fn join(&mut self, joined: &Joined, token: BufferId, table: BufferId, residual: BufferId) -> BufferId {
        let hidden = self.graph.hidden;
        let blocks = Cols::blocks(UNIT_ROWS, hidden);
        let [given, embedded] = ["given", "embedded"].map(|name| self.exchange(name, hidden));
        let operands = vec![
            self.read(Role::Token, token, Cols::all(1)),
            Operand { rows: Rows::Token, ..constant(Role::Table, table, blocks) },
            self.write(Role::Residual, residual, blocks),
            self.write(Role::Given, given, blocks),
            self.write(Role::Out, embedded, blocks),
        ];
        // What the step before left is named when the layer is lowered: see `join_left`.
        let scale = self.graph.embed_scale;
        self.grid("join", None, Op::Join { scale }, hidden.div_ceil(UNIT_ROWS), Second::Axis(1), operands);
        let x = self.exchange("x.0", hidden);
        let Joined { embedding_norm, given_norm, of_embedding, of_given } = joined;
        let sums = [
            ("join.embedded", embedded, embedding_norm, of_embedding, None),
            ("join.given", given, given_norm, of_given, Some(x)),
        ];
        for (name, input, norm, linear, out) in sums {
            let update = self.update(residual, blocks);
            let outputs = [update].into_iter().chain(out.map(|out| self.write(Role::Out, out, blocks))).collect();
            let epilogue = Epilogue::Residual { scale: 1.0 };
            self.matvec(name, None, input, Some(norm), &[linear], epilogue, Second::Axis(1), outputs);
        }
        x
    }

    /// Says that the next step begins with what the layer left in `x`.
    pub(super) fn join_left(&mut self, x: BufferId) {
        let left = self.read(Role::X, x, Cols::all(self.graph.hidden));
        let joins = self.program.grids.iter_mut().filter(|grid| matches!(grid.op, Op::Join { .. }));
        joins.for_each(|grid| grid.operands.insert(0, left.clone()));
    }
}
