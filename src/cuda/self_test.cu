// Kernels of `monobloc doctor --device`: each tests one promise of the driver that the persistent kernel rests on.
// They stand alone on purpose: a fault in the runtime headers must not look like a fault of the machine.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

__device__ __forceinline__ u32 load_acquire(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_system(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_system(u32* word, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

extern "C" __global__ void self_test_empty() {}

// out[b] = in[(b + 1) % grid] * 3 + b, through a barrier over the grid: every block must be resident.
// `scratch` (grid + 1 words, zero) holds the arrivals and one word per block. The dynamic shared memory is written and
// read up to its last word. A block that waits past `deadline_ns` leaves without writing its result.
extern "C" __global__ void self_test_grid(const u32* in, u32* scratch, u32* out, u32 smem_words, u64 deadline_ns) {
    extern __shared__ u32 smem[];
    u32 grid = gridDim.x, block = blockIdx.x;
    for (u32 i = threadIdx.x; i < smem_words; i += blockDim.x) smem[i] = in[block] + i;
    __syncthreads();
    if (threadIdx.x != 0) return;
    scratch[1 + block] = smem[smem_words - 1] - (smem_words - 1);
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(scratch) : "memory");
    u64 start = now_ns();
    while (load_acquire(scratch) < grid) {
        if (now_ns() - start > deadline_ns) return;
    }
    out[block] = scratch[1 + (block + 1) % grid] * 3 + block;
}

// words[0]: beats, written here. words[1]: abort, written by the host. words[2]: why it left, 1 abort, 2 deadline.
extern "C" __global__ void self_test_mapped(u32* words, u64 deadline_ns) {
    u64 start = now_ns();
    u32 beats = 0, reason = 0;
    while (reason == 0) {
        store_system(&words[0], ++beats);
        if (load_system(&words[1]) != 0) reason = 1;
        else if (now_ns() - start > deadline_ns) reason = 2;
    }
    store_system(&words[2], reason);
}

// out[b] = rank of block b in its cluster * 100 + blocks in the cluster.
extern "C" __global__ void self_test_cluster(u32* out) {
    u32 rank = 0, blocks = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(blocks));
#endif
    if (threadIdx.x == 0) out[blockIdx.x] = rank * 100 + blocks;
}
