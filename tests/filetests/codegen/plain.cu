// test codegen t4 gemma fp32
// Decode kernel for `t4`: whole steps in one launch.
// 8 blocks of 8 consumer warps, 18 grids in 11 classes.
#include "monobloc.cuh"

struct Machine {
  static constexpr int SMS = 8;
  static constexpr int WARPS = 8;
  static constexpr int LOADER_WARPS = 4;
  static constexpr int SLOTS = 3;
  static constexpr int SLOT_BYTES = 16384;
  static constexpr int FLIGHT_HIGH = 3;
  static constexpr int FLIGHT_LOW = 1;
  static constexpr int FLIGHT_FREE = 2;
  static constexpr int RING_AT = 0;  // 49152 bytes
  static constexpr int STAGE_AT = 49152;  // 256 bytes
  static constexpr int REDUCE_AT = 49408;  // 4096 bytes
  static constexpr int HEADS_AT = 53504;  // 256 bytes
  static constexpr int RESIDUAL_AT = 53760;  // 128 bytes
  static constexpr int QUEUE_AT = 53888;  // 1024 bytes
  static constexpr int STATE_AT = 54912;  // 2048 bytes
  static constexpr int STATE_BYTES = 2048;
  static constexpr int SCRATCH_BYTES = 4352;
  static constexpr u32 CONTEXT_MAX = 64;
  static constexpr u32 SPLIT_FROM = 4294967295u;  // first position of the split regime
  static constexpr Elem WEIGHT = Elem::F32;
  static constexpr Elem CACHE = Elem::F32;
  static constexpr Elem WIRE = Elem::F32;
  static constexpr Copy COPY = Copy::PLAIN;
  static constexpr Dot DOT = Dot::FMA;
  static constexpr int REDUCE_BATCH = 8;
  static constexpr bool TRACE = false;
  static constexpr int STAMPS_MAX = 15;
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
  static constexpr float SCALE = 5.65625f;
  static constexpr bool REPLICATED = true;
};

// g3 qkv.0 and 1 more
struct Class3 {
  static constexpr int ROWS = 32;
  static constexpr int K = 32;
  static constexpr int UNIT_ROWS = 4;
  static constexpr int CHUNK = 32;
  static constexpr int UNITS = 1;
  static constexpr int UNITS_PER_WARP = 1;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = true;
  static constexpr Norm NORM = Norm::RMS;
  static constexpr float EPS = 1e-5f;
  static constexpr Epilogue EPILOGUE = Epilogue::STORE;
  static constexpr Act ACT = Act::SILU;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr bool BIAS = false;
  static constexpr bool PUBLISH = true;
  static constexpr int PARTS = 0;
};

// g4 attn.0
struct Class4 {
  static constexpr int HEADS = 2;
  static constexpr int GROUP = 2;
  static constexpr int HEADS_PER_TASK = 1;
  static constexpr int DIM = 8;
  static constexpr int PITCH = 8;
  static constexpr float SCALE = 0.25f;
  static constexpr float SOFTCAP = 50.0f;
  static constexpr u32 WINDOW = 16;
  static constexpr int ROTARY = 8;
  static constexpr bool INTERLEAVED = false;
  static constexpr HeadNorm Q_NORM = HeadNorm::HEAD;
  static constexpr float Q_EPS = 1e-5f;
  static constexpr HeadNorm K_NORM = HeadNorm::HEAD;
  static constexpr float K_EPS = 1e-5f;
  static constexpr int SPLITS = 1;
  static constexpr int CHUNK_ROWS = 512;
  static constexpr int WARPS_PER_HEAD = 1;
  static constexpr bool PREFETCH_V = true;
  static constexpr bool SWIZZLED = false;
};

// g5 o.0 and 1 more
struct Class5 {
  static constexpr int ROWS = 32;
  static constexpr int K = 16;
  static constexpr int UNIT_ROWS = 8;
  static constexpr int CHUNK = 32;
  static constexpr int UNITS = 1;
  static constexpr int UNITS_PER_WARP = 1;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = false;
  static constexpr Norm NORM = Norm::NONE;
  static constexpr float EPS = 0.0f;
  static constexpr Epilogue EPILOGUE = Epilogue::STORE;
  static constexpr Act ACT = Act::SILU;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr bool BIAS = false;
  static constexpr bool PUBLISH = true;
  static constexpr int PARTS = 0;
};

// g6 o.0.add and 3 more
struct Class6 {
  static constexpr int WIDTH = 32;
  static constexpr float EPS = 1e-5f;
  static constexpr float SCALE = 1.0f;
  static constexpr bool REPLICATED = true;
};

// g7 gate_up.0 and 1 more
struct Class7 {
  static constexpr int ROWS = 80;
  static constexpr int K = 32;
  static constexpr int UNIT_ROWS = 8;
  static constexpr int CHUNK = 32;
  static constexpr int UNITS = 2;
  static constexpr int UNITS_PER_WARP = 2;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = true;
  static constexpr Norm NORM = Norm::RMS;
  static constexpr float EPS = 1e-5f;
  static constexpr Epilogue EPILOGUE = Epilogue::GATED;
  static constexpr Act ACT = Act::GELU_TANH;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr bool BIAS = false;
  static constexpr bool PUBLISH = true;
  static constexpr int PARTS = 0;
};

// g8 down.0 and 1 more
struct Class8 {
  static constexpr int ROWS = 32;
  static constexpr int K = 40;
  static constexpr int UNIT_ROWS = 8;
  static constexpr int CHUNK = 30;
  static constexpr int UNITS = 1;
  static constexpr int UNITS_PER_WARP = 1;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = false;
  static constexpr Norm NORM = Norm::NONE;
  static constexpr float EPS = 0.0f;
  static constexpr Epilogue EPILOGUE = Epilogue::STORE;
  static constexpr Act ACT = Act::SILU;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 0.0f;
  static constexpr bool BIAS = false;
  static constexpr bool PUBLISH = true;
  static constexpr int PARTS = 0;
};

// g11 attn.1
struct Class9 {
  static constexpr int HEADS = 2;
  static constexpr int GROUP = 2;
  static constexpr int HEADS_PER_TASK = 1;
  static constexpr int DIM = 8;
  static constexpr int PITCH = 8;
  static constexpr float SCALE = 0.25f;
  static constexpr float SOFTCAP = 50.0f;
  static constexpr u32 WINDOW = 0;
  static constexpr int ROTARY = 8;
  static constexpr bool INTERLEAVED = false;
  static constexpr HeadNorm Q_NORM = HeadNorm::HEAD;
  static constexpr float Q_EPS = 1e-5f;
  static constexpr HeadNorm K_NORM = HeadNorm::HEAD;
  static constexpr float K_EPS = 1e-5f;
  static constexpr int SPLITS = 1;
  static constexpr int CHUNK_ROWS = 512;
  static constexpr int WARPS_PER_HEAD = 1;
  static constexpr bool PREFETCH_V = true;
  static constexpr bool SWIZZLED = false;
};

// g17 head
struct Class10 {
  static constexpr int ROWS = 61;
  static constexpr int K = 32;
  static constexpr int UNIT_ROWS = 8;
  static constexpr int CHUNK = 32;
  static constexpr int UNITS = 1;
  static constexpr int UNITS_PER_WARP = 1;
  static constexpr int POLL_BATCH = 1;
  static constexpr bool OWN_INPUT = true;
  static constexpr Norm NORM = Norm::RMS;
  static constexpr float EPS = 1e-5f;
  static constexpr Epilogue EPILOGUE = Epilogue::LOGITS;
  static constexpr Act ACT = Act::SILU;
  static constexpr float SCALE = 1.0f;
  static constexpr float SOFTCAP = 30.0f;
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
      case 6: return NormAdd<Machine, Class6>::run(c, e);
      case 7: return MatVec<Machine, Class7>::run(c, e);
      case 8: return MatVec<Machine, Class8>::run(c, e);
      case 9: return Attention<Machine, Class9>::run(c, e);
      case 10: return MatVec<Machine, Class10>::run(c, e);
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
