// test codegen a100 neox bf16
// Decode kernel for `a100`: whole steps in one launch.
// 8 blocks of 8 consumer warps, 9 grids in 9 classes.
#include "monobloc.cuh"

struct Machine {
  static constexpr int SMS = 8;
  static constexpr int WARPS = 8;
  static constexpr int LOADER_WARPS = 4;
  static constexpr int SLOTS = 9;
  static constexpr int SLOT_BYTES = 16384;
  static constexpr int FLIGHT_HIGH = 4;
  static constexpr int FLIGHT_LOW = 1;
  static constexpr int FLIGHT_FREE = 6;
  static constexpr int RING_AT = 0;  // 147456 bytes
  static constexpr int STAGE_AT = 147456;  // 128 bytes
  static constexpr int REDUCE_AT = 147584;  // 4096 bytes
  static constexpr int HEADS_AT = 151680;  // 256 bytes
  static constexpr int RESIDUAL_AT = 151936;  // 128 bytes
  static constexpr int QUEUE_AT = 152064;  // 512 bytes
  static constexpr int STATE_AT = 152576;  // 2048 bytes
  static constexpr int STATE_BYTES = 2048;
  static constexpr int SCRATCH_BYTES = 4224;
  static constexpr u32 CONTEXT_MAX = 64;
  static constexpr u32 SPLIT_FROM = 4294967295u;  // first position of the split regime
  static constexpr Elem WEIGHT = Elem::BF16;
  static constexpr Elem CACHE = Elem::BF16;
  static constexpr Elem WIRE = Elem::BF16;
  static constexpr Copy COPY = Copy::CP_ASYNC;
  static constexpr Dot DOT = Dot::MMA;
  static constexpr int REDUCE_BATCH = 8;
  static constexpr bool TRACE = false;
  static constexpr int STAMPS_MAX = 7;
};

// g0 select
struct Class0 {
  static constexpr int PARTS = 8;
  static constexpr int VOCAB = 61;
};

// g1 report
struct Class1 {
};

// g2 embed
struct Class2 {
  static constexpr int HIDDEN = 32;
  static constexpr float SCALE = 1.0f;
  static constexpr bool REPLICATED = false;
};

// g3 qkv.0
struct Class3 {
  static constexpr int ROWS = 96;
  static constexpr int K = 32;
  static constexpr int UNIT_ROWS = 8;
  static constexpr int CHUNK = 32;
  static constexpr int UNITS = 2;
  static constexpr int UNITS_PER_WARP = 2;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = false;
  static constexpr Norm NORM = Norm::LAYER;
  static constexpr float EPS = 1e-5f;
  static constexpr Epilogue EPILOGUE = Epilogue::STORE;
  static constexpr Act ACT = Act::SILU;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr bool BIAS = true;
  static constexpr bool PUBLISH = true;
  static constexpr int PARTS = 0;
};

// g4 attn.0
struct Class4 {
  static constexpr int HEADS = 4;
  static constexpr int GROUP = 1;
  static constexpr int HEADS_PER_TASK = 1;
  static constexpr int DIM = 8;
  static constexpr int PITCH = 8;
  static constexpr float SCALE = 0.35355338f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr u32 WINDOW = 0;
  static constexpr int ROTARY = 4;
  static constexpr bool INTERLEAVED = false;
  static constexpr HeadNorm Q_NORM = HeadNorm::NONE;
  static constexpr float Q_EPS = 0.0f;
  static constexpr HeadNorm K_NORM = HeadNorm::NONE;
  static constexpr float K_EPS = 0.0f;
  static constexpr int SPLITS = 1;
  static constexpr int CHUNK_ROWS = 1024;
  static constexpr int WARPS_PER_HEAD = 1;
  static constexpr bool PREFETCH_V = true;
  static constexpr bool SWIZZLED = false;
};

// g5 o.0
struct Class5 {
  static constexpr int ROWS = 32;
  static constexpr int K = 32;
  static constexpr int UNIT_ROWS = 8;
  static constexpr int CHUNK = 32;
  static constexpr int UNITS = 1;
  static constexpr int UNITS_PER_WARP = 1;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = false;
  static constexpr Norm NORM = Norm::NONE;
  static constexpr float EPS = 0.0f;
  static constexpr Epilogue EPILOGUE = Epilogue::RESIDUAL;
  static constexpr Act ACT = Act::SILU;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr bool BIAS = true;
  static constexpr bool PUBLISH = false;
  static constexpr int PARTS = 0;
};

// g6 up.0
struct Class6 {
  static constexpr int ROWS = 40;
  static constexpr int K = 32;
  static constexpr int UNIT_ROWS = 8;
  static constexpr int CHUNK = 32;
  static constexpr int UNITS = 1;
  static constexpr int UNITS_PER_WARP = 1;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = false;
  static constexpr Norm NORM = Norm::LAYER;
  static constexpr float EPS = 1e-5f;
  static constexpr Epilogue EPILOGUE = Epilogue::ACT;
  static constexpr Act ACT = Act::GELU_ERF;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr bool BIAS = true;
  static constexpr bool PUBLISH = true;
  static constexpr int PARTS = 0;
};

// g7 down.0
struct Class7 {
  static constexpr int ROWS = 32;
  static constexpr int K = 40;
  static constexpr int UNIT_ROWS = 8;
  static constexpr int CHUNK = 32;
  static constexpr int UNITS = 1;
  static constexpr int UNITS_PER_WARP = 1;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = false;
  static constexpr Norm NORM = Norm::NONE;
  static constexpr float EPS = 0.0f;
  static constexpr Epilogue EPILOGUE = Epilogue::RESIDUAL;
  static constexpr Act ACT = Act::SILU;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr bool BIAS = true;
  static constexpr bool PUBLISH = true;
  static constexpr int PARTS = 0;
};

// g8 head
struct Class8 {
  static constexpr int ROWS = 61;
  static constexpr int K = 32;
  static constexpr int UNIT_ROWS = 8;
  static constexpr int CHUNK = 32;
  static constexpr int UNITS = 1;
  static constexpr int UNITS_PER_WARP = 1;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = false;
  static constexpr Norm NORM = Norm::LAYER;
  static constexpr float EPS = 1e-5f;
  static constexpr Epilogue EPILOGUE = Epilogue::LOGITS;
  static constexpr Act ACT = Act::SILU;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr bool BIAS = false;
  static constexpr bool PUBLISH = false;
  static constexpr int PARTS = 8;
};

struct Dispatch {
  static __device__ __forceinline__ void run(Context<Machine>& c, u32 op, const Entry& e) {
    switch (op) {
      case 0: return Select<Machine, Class0>::run(c, e);
      case 1: return Report<Machine, Class1>::run(c, e);
      case 2: return Embed<Machine, Class2>::run(c, e);
      case 3: return MatVec<Machine, Class3>::run(c, e);
      case 4: return Attention<Machine, Class4>::run(c, e);
      case 5: return MatVec<Machine, Class5>::run(c, e);
      case 6: return MatVec<Machine, Class6>::run(c, e);
      case 7: return MatVec<Machine, Class7>::run(c, e);
      case 8: return MatVec<Machine, Class8>::run(c, e);
    }
  }
  static __device__ __forceinline__ void select_and_report(Context<Machine>& c, const Entry& e) {
    const u32 op = uniform(e.op);
    if (op == 0) return Select<Machine, Class0>::run(c, e);
    if (op == 1) return Report<Machine, Class1>::run(c, e);
  }
};

extern "C" __global__ void __launch_bounds__(384, 1) monobloc_decode(const __grid_constant__ Params p) {
  persistent<Machine, Dispatch>(p);
}
