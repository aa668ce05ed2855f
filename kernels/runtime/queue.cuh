// Owns the queue entry: what one task needs at run time, 64 bytes. `codegen/abi.rs` declares it, and the test there writes the text of it here.
//
// Offsets into the exchange arena are packets (8 bytes); offsets into constants and caches are in OFFSET_BYTES. A block
// copies its queue to shared memory once for each launch (and again if the regime changes): a fetch for each task would lie
// on the critical path of every hop.
#pragma once

// Unit of offsets into constants and caches: codegen/abi.rs divides by it.
constexpr u32 OFFSET_BYTES = 256;
// Unit of the distance from a part of a matrix to the next: codegen/abi.rs divides by it.
constexpr u32 COPY_ALIGN_BYTES = 16;

struct alignas(16) Entry {
  u32 op; // case of the generated dispatch
  u32 task; // t12, for the watchdog
  u32 event; // first event the task waits for, for the watchdog
  u32 lo; // launch indices, from here
  u32 hi; // ... up to here
  u32 j; // second index
  u32 x; // packets of the first exchange operand (x, q, best, partial)
  u32 out; // packets of the published operand
  union { u32 aux, cache_scales, beta; }; // packets of a second published operand (best of the head, shares of experts), or of the buffer with beta; of attention: scales of a cache in fp8, in OFFSET_BYTES
  union { u32 row_scales, row; }; // of a matrix of codes: the scales of its rows, in OFFSET_BYTES; else the row of the step that the task takes
  union { u32 residual, sinks, gate, conv_bias; }; // first residual value of this block that the task owns; of attention: sinks, of Mamba-2 and short convolutions the bias of the convolution, in OFFSET_BYTES; of a merge, or of a norm: packets of the gate's buffer
  union { u32 norm_weight, q_norm, d; }; // norm weight of the input, or of q; of Mamba-2 its d
  union { u32 norm_bias, k_norm, a_log; }; // norm bias of the input, or norm weight of k; of a mix and of Mamba-2 its a_log
  union { u32 bias, rope, table, conv; }; // by op
  union { u32 k_cache, choice, shared_gate, state; }; // where keys are appended; packets of the choice of a slot, or of the gate of a shared expert; a state, in OFFSET_BYTES
  union { u32 v_cache, deals_first, dt_bias; }; // where values are appended; of rows, where parts are dealt: whether it is the first task of its layer to which they are; of a mix and of Mamba-2 its dt_bias
};
static_assert(sizeof(Entry) == 64, "the host fills this struct");

// One run of an SM's stream: weights of one task, or its share of the history.
struct alignas(16) StreamRun {
  u32 bytes; // weights: bytes of the run; history: 0
  union { u32 block_bytes, k_cache; }; // weights: what chunks do not reach beyond, in bytes; history: keys of this layer, in OFFSET_BYTES
  union { u32 chunk_bytes, v_cache; }; // weights: bytes of a chunk, the last of a block may be shorter; history: values of this layer
  union { u32 source, head_j; }; // weights: first byte in the pack, in units of 256 bytes, rounded down; history: KV head << 16 | share
  u32 splits; // history: shares; of rows: the row. Weights: above 16 bits the bytes from `source` on; of rows: units that are streamed together; else slots whose parts are, if not one
  union { u32 window, choice; }; // history: visible positions, 0: all. Weights: one more than the packet of the choice of their part, 0: there are no parts
  union { u32 row_bytes, part; }; // history: bytes of one cache row of one KV head. Weights: from part to part, in units of 16 bytes
  union { u32 rows, parts; }; // history: rows of one chunk. Weights: parts, and above 16 bits, of rows: which share of what is dealt, and in the top bit whether it is the first run of its layer; of several slots a unit of a part, in units of 16 bytes
};
static_assert(sizeof(StreamRun) == 32, "the host fills this struct");

// Attention::history_share of ir/op.rs: the rows before `position` that share `j` of `splits` reads.
__device__ __forceinline__ void history_share(u32 position, u32 window, u32 splits, u32 j, u32& start, u32& end) {
  u32 first = window && position + 1 > window ? position + 1 - window : 0;
  u32 share = ((position - first + splits - 1) / splits + 15) / 16 * 16;
  start = min(first + j * share, position);
  end = min(first + j * share + share, position);
}
