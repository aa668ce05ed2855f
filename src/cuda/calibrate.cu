// Kernels of `monobloc calibrate`: what a device reads, how long an exchange between all SMs takes, and how unequal SMs are.
// They stand alone, like those of the self-test: a change of the runtime must not change what a device is said to be.
//
// The host puts these in front: COPY (0 plain loads, 1 cp.async, 2 bulk copies), SLOTS and SLOT_BYTES of the ring.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

#if COPY == 2
__device__ __forceinline__ bool landed(u64* word, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
                 : "=r"(done)
                 : "r"(shared_address(word)), "r"(parity)
                 : "memory");
    return done;
}
#endif

// Streams `chunks` chunks from `from` through the ring by the threads 0 .. count - 1 that call it, with at most `flight` of
// them in flight, going round `wrap` chunks; until `*stop`. A chunk that does not land before `deadline_ns` ends it.
__device__ void stream(const u8* from, u32 chunks, u32 wrap, u32 flight, u32 thread, u32 count, volatile u32* stop,
                       u64 deadline_ns, u8* ring, u64* full, u32* sink) {
#if COPY == 2
    if (thread != 0) return;
    u32 issued = 0, seen = 0;
    while (seen < chunks) {
        bool more = issued < chunks && *stop == 0;
        if (more && issued - seen < flight) {
            u32 slot = issued % SLOTS, barrier = shared_address(&full[slot]);
            asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}" ::"r"(barrier), "r"(SLOT_BYTES)
                         : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             shared_address(ring + slot * SLOT_BYTES)),
                         "l"(from + u64(issued % wrap) * SLOT_BYTES), "r"(SLOT_BYTES), "r"(barrier)
                         : "memory");
            issued++;
            continue;
        }
        if (seen == issued) return;
        // A copy that is under way is waited for even after the deadline: shared memory must outlive it.
        while (!landed(&full[seen % SLOTS], seen / SLOTS & 1)) {}
        seen++;
        if (now_ns() > deadline_ns) chunks = issued;
    }
#else
    u32 sum = 0;
    for (u32 chunk = 0; chunk < chunks && *stop == 0 && now_ns() <= deadline_ns; chunk++) {
        const u8* source = from + u64(chunk % wrap) * SLOT_BYTES;
#if COPY == 1
        // A group a chunk, of which half of the ring is in flight: the count is part of the instruction.
        for (u32 i = thread * 16; i < SLOT_BYTES; i += count * 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             shared_address(ring + chunk % SLOTS * SLOT_BYTES + i)),
                         "l"(source + i)
                         : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS / 2) : "memory");
#else
#pragma unroll 8
        for (u32 i = thread * 16; i < SLOT_BYTES; i += count * 16) {
            uint4 v = __ldcg(reinterpret_cast<const uint4*>(source + i));
            sum ^= v.x ^ v.y ^ v.z ^ v.w;
        }
#endif
    }
#if COPY == 1
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    if (sum == 0x9e3779b9u) *sink = sum;  // never a constant: the loads stay
#endif
}

__device__ void prepare(u64* full, u32* stop) {
    if (threadIdx.x == 0) {
        *stop = 0;
#if COPY == 2
        for (int i = 0; i < SLOTS; i++)
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&full[i])));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
}

extern "C" __global__ void calibrate_empty() {}

// Every block reads `chunks` chunks of its own, once. took_ns[b]: from its first instruction until all had landed.
extern "C" __global__ void __launch_bounds__(256, 1) calibrate_read(const u8* from, u32 chunks, u64 deadline_ns, u64* took_ns) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ u64 full[SLOTS];
    __shared__ u32 stop;
    prepare(full, &stop);
    u64 begun = now_ns();
    const u8* own = from + u64(blockIdx.x) * chunks * SLOT_BYTES;
    stream(own, chunks, chunks, SLOTS, threadIdx.x, 256, &stop, begun + deadline_ns, ring, full, reinterpret_cast<u32*>(took_ns));
    __syncthreads();
    if (threadIdx.x == 0) took_ns[blockIdx.x] = now_ns() - begun;
}

// `rounds` exchanges of `packets` packets of 8 bytes, an even number: each block stores its share and polls until it has seen all, while
// threads 256 and up keep `flight` chunks on their way (0: none). Two buffers in turn: who stores into one has seen all of
// the other, so no SM still polls what it overwrites. took_ns[b] is 0 where a wait passed its deadline.
extern "C" __global__ void __launch_bounds__(512, 1) calibrate_hop(u64* buffers, u32 packets, u32 rounds, const u8* from,
                                                                  u32 wrap, u32 flight, u64 deadline_ns, u64* took_ns) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ u64 full[SLOTS];
    __shared__ u32 stop;
    u32 late = 0;
    prepare(full, &stop);
    u64 begun = now_ns();
    if (threadIdx.x >= 256) {
        const u8* own = from + u64(blockIdx.x) * wrap * SLOT_BYTES;
        if (flight)
            stream(own, ~0u, wrap, flight, threadIdx.x - 256, 256, &stop, begun + deadline_ns, ring, full,
                   reinterpret_cast<u32*>(took_ns));
        return;
    }
    u32 first = u64(packets) * blockIdx.x / gridDim.x, last = u64(packets) * (blockIdx.x + 1) / gridDim.x;
    for (u32 round = 1; round <= rounds && !late; round++) {
        u64* buffer = buffers + (round & 1) * packets;
        for (u32 i = first + threadIdx.x; i < last; i += 256)
            asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(buffer + i), "l"((u64(round) << 32) | i) : "memory");
        // Two pairs of packets a thread, asked for at once as kernels do: one trip to L2 where all are there.
        u32 gave_up = 0;
        for (u32 i = threadIdx.x * 2; i < packets && !gave_up; i += 1024) {
            const u32 j = i + 512 < packets ? i + 512 : i;
            for (u32 polls = 1;; polls++) {
                u64 a, b, c, d;
                asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(buffer + i) : "memory");
                asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(c), "=l"(d) : "l"(buffer + j) : "memory");
                if (u32(a >> 32) == round && u32(b >> 32) == round && u32(c >> 32) == round && u32(d >> 32) == round) break;
                if (polls % 4096 == 0 && now_ns() - begun > deadline_ns) {
                    gave_up = 1;
                    break;
                }
            }
        }
        // One barrier that also agrees on leaving: threads that left alone would keep the others waiting.
        asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 1, 256, p; selp.u32 %0, 1, 0, q;}"
                     : "=r"(late)
                     : "r"(gave_up)
                     : "memory");
    }
    if (threadIdx.x == 0) {
        *(volatile u32*)&stop = 1;
        took_ns[blockIdx.x] = late ? 0 : now_ns() - begun;
    }
}
