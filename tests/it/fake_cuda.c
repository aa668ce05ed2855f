// A driver with no hardware: the calls of libcuda (and of NVML) that monobloc makes, over host memory and threads.
//
// It judges the host side: which calls, in which order, with which sizes and attributes. Kernels are C functions with
// the effect of the device code of the same name, and do not test that code. Every copy must be inside an allocation,
// and allocations that remain when the context is released are reported.
//
// FAKE_CUDA=shows cuts | shows others: the logits of a row in waves depend on its chunks, or on other sequences.
// FAKE_CUDA=keeps nothing: no part of L2 keeps memory, as on a device that is divided.
// FAKE_CUDA=stamps: kernels of waves were compiled with time stamps.
// FAKE_CUDA=numbers: a wave kernel leaves in each word of its arena the bytes before it, and a tail one more.
// FAKE_CUDA=two devices: two of them, linked; two without links: they are not; one of two hangs: the second one never meets the first.
// An image that begins with \x7fELFK has three bytes more: the rows that its kernels were compiled for, what they do (enum Does), and a fault: 1
// for a wrong number.
// FAKE_CUDA=no-device | stub changes the result of `cuInit`; with FAKE_CUDA=slow the last step of a launch takes some milliseconds; -DOLD leaves out a call that old drivers do not have.

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, STUB = 34, NO_DEVICE = 100, INVALID_IMAGE = 200, NOT_FOUND = 500,
       NOT_READY = 600, ILLEGAL_ADDRESS = 700, PEER_ALREADY = 704, TOO_LARGE = 720, NOT_SUPPORTED = 801 };
enum { SM_COUNT = 4, SMEM_MAX = 232448, MEMORY = 1 << 30, L2 = 62914560, KEPT_MAX = 39321600, KEPT_RANGE_MAX = 134217728 };

typedef uint64_t Address;

static void require(int condition, const char *what) {
    if (!condition) {
        fprintf(stderr, "FAKE CUDA: %s\n", what);
        abort();
    }
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

// ---- context: bound per thread, and nothing works without it

static _Thread_local char *bound;
static char contexts[2];
static atomic_int crashed;

static int has_mode(const char *wanted) {
    const char *mode = getenv("FAKE_CUDA");
    return mode && !strcmp(mode, wanted);
}
static int device_count(void) { return has_mode("two devices") || has_mode("two without links") || has_mode("one of two hangs") ? 2 : 1; }
static int is_device(int device) { return device >= 40 && device < 40 + device_count(); }
// A line for a test that counts calls.
static void log_call(const char *call, size_t bytes) {
    if (!has_mode("calls")) return;
    printf("driver: %s of %zu bytes\n", call, bytes);
    fflush(stdout);
}
#define BOUND() require(bound >= contexts && bound < contexts + 2, "no context is bound"); if (crashed) return ILLEGAL_ADDRESS

int cuInit(unsigned flags) {
    const char *mode = getenv("FAKE_CUDA");
    if (mode && !strcmp(mode, "no-device")) return NO_DEVICE;
    if (mode && !strcmp(mode, "stub")) return STUB;
    return flags ? INVALID_VALUE : SUCCESS;
}
int cuGetErrorName(int code, const char **text) {
    *text = code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == TOO_LARGE ? "CUDA_ERROR_TOO_LARGE" : NULL;
    return *text ? SUCCESS : INVALID_VALUE;
}
int cuGetErrorString(int code, const char **text) { return cuGetErrorName(code, text); }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = device_count(); return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return is_device(*device) ? SUCCESS : INVALID_VALUE; }
int cuDeviceCanAccessPeer(int *can, int from, int to) {
    require(is_device(from) && is_device(to) && from != to, "cuDeviceCanAccessPeer");
    *can = !has_mode("two without links");
    return SUCCESS;
}
int cuDeviceGetP2PAttribute(int *value, int attribute, int from, int to) {
    require(attribute == 3 && is_device(from) && is_device(to) && from != to, "cuDeviceGetP2PAttribute");
    *value = !has_mode("two without links");
    return SUCCESS;
}
static atomic_int reached[2]; // whether kernels of a device access the memory of the other one
int cuCtxEnablePeerAccess(char *peer, unsigned flags) {
    BOUND();
    require(peer >= contexts && peer < contexts + 2 && peer != bound && !flags, "cuCtxEnablePeerAccess");
    return reached[bound - contexts]++ ? PEER_ALREADY : SUCCESS;
}
int cuDeviceGetName(char *name, int size, int device) {
    require(is_device(device) && size > 8, "cuDeviceGetName");
    strcpy(name, "Fake GPU");
    return SUCCESS;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = 0xa0 + i + device - 40;
    return SUCCESS;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = MEMORY; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 1: *value = 1024; break;         // threads per block
    case 13: *value = 1980000; break;     // SM kHz
    case 16: *value = SM_COUNT; break;
    case 36: *value = 3201000; break;     // memory kHz
    case 37: *value = 6144; break;        // bus bits
    case 38: *value = L2; break;
    case 75: *value = 9; break;           // compute capability
    case 76: *value = 0; break;
    case 81: *value = SMEM_MAX + 1024; break;
    case 82: *value = 65536; break;       // registers per SM
    case 95: *value = 1; break;           // cooperative
    case 97: *value = SMEM_MAX; break;
    case 108: *value = KEPT_MAX; break;   // L2 that may be kept
    case 109: *value = KEPT_RANGE_MAX; break;
    case 120: *value = 1; break;          // clusters
    default: require(0, "an unexpected attribute");
    }
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **handle, int device) { *handle = &contexts[device - 40]; return is_device(device) ? SUCCESS : INVALID_VALUE; }
static size_t kept_limit;
static int has_steps; // whether a kernel was found whose memory is kept
static int keeps_nothing(void) {
    const char *mode = getenv("FAKE_CUDA");
    return mode && !strcmp(mode, "keeps nothing");
}
int cuCtxSetLimit(int limit, size_t bytes) {
    BOUND();
    require(has_steps, "a limit of what L2 keeps, and nothing to keep: kernels for one row would have less of it");
    if (keeps_nothing()) return NOT_SUPPORTED;
    require(limit == 6 && bytes > 0 && bytes <= L2 / 2, "an unexpected limit of what L2 keeps");
    kept_limit = bytes;
    return SUCCESS;
}
int cuCtxSetCurrent(void *handle) { bound = handle; return SUCCESS; }

// ---- memory

typedef struct Block { char *start; size_t bytes; struct Block *next; } Block;
static Block *blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int streams, events, modules;

static void *allocate(size_t bytes) {
    Block *block = malloc(sizeof *block);
    *block = (Block){aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), bytes, NULL};
    memset(block->start, 0xcd, bytes);
    pthread_mutex_lock(&lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&lock);
    return block->start;
}
static int release(void *start) {
    pthread_mutex_lock(&lock);
    Block **at = &blocks;
    while (*at && (*at)->start != start) at = &(*at)->next;
    require(*at != NULL, "freed what was not allocated");
    Block *gone = *at;
    *at = gone->next;
    pthread_mutex_unlock(&lock);
    free(gone->start);
    free(gone);
    return SUCCESS;
}
static void *inside(Address address, size_t bytes) {
    pthread_mutex_lock(&lock);
    Block *b = blocks;
    while (b && !(address >= (Address)b->start && address + bytes <= (Address)b->start + b->bytes)) b = b->next;
    pthread_mutex_unlock(&lock);
    require(b != NULL, "an access outside every allocation");
    return (void *)address;
}
// Whether two addresses are in one allocation.
static int same_block(Address a, Address b) {
    pthread_mutex_lock(&lock);
    Block *at = blocks;
    while (at && !(a >= (Address)at->start && a < (Address)at->start + at->bytes)) at = at->next;
    int same = at && b >= (Address)at->start && b < (Address)at->start + at->bytes;
    pthread_mutex_unlock(&lock);
    return same;
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { BOUND(); *free_bytes = MEMORY / 2; *total = MEMORY; return SUCCESS; }
int cuMemAlloc_v2(Address *address, size_t bytes) {
    BOUND();
    if (bytes == 0) return INVALID_VALUE;
    if (bytes > MEMORY / 2) return OUT_OF_MEMORY;
    *address = (Address)allocate(bytes);
    return SUCCESS;
}
int cuMemFree_v2(Address address) { BOUND(); return release((void *)address); }
int cuMemHostAlloc(void **start, size_t bytes, unsigned flags) {
    BOUND();
    require(flags == 1 || flags == 3, "host memory that is not portable");
    *start = allocate(bytes);
    return SUCCESS;
}
int cuMemHostGetDevicePointer_v2(Address *address, void *start, unsigned flags) {
    BOUND();
    *address = (Address)start;
    return flags ? INVALID_VALUE : SUCCESS;
}
int cuMemFreeHost(void *start) { BOUND(); return release(start); }

// ---- kernels: the effect of the device code of the same name

typedef struct { Address start; size_t bytes; float ratio; int hit, miss; } KeptRange;
enum Does { ANYTHING, PAGED_ROW, ONE_ROW, CHUNK, TAIL };
typedef struct { unsigned grid, smem, cluster; KeptRange kept; const void *argument[8]; unsigned rows, does, is_wrong, device; } Call;
#define U32(i) (*(const uint32_t *)call->argument[i])
#define U64(i) (*(const uint64_t *)call->argument[i])
#define WORDS(i, n) ((uint32_t *)inside(U64(i), 4 * (size_t)(n)))

// Where L2 keeps anything, it keeps what SMs exchange, and logits.
static void require_kept(const Call *call, Address address) {
    require(keeps_nothing() || (address >= call->kept.start && address < call->kept.start + call->kept.bytes), "memory of a step that is not kept");
}

// Tokens of the pool. Kernels of images of their own keep them beside the cache, which then has rows of 64 values that differ from those of the
// next token, for every head.
enum { ROW_VALUES = 64 };
typedef struct Tokens { Address cache; size_t rows; uint32_t *tokens; struct Tokens *next; } Tokens;
static Tokens *all_tokens;
static void forget_tokens(Tokens *own) { memset(own->tokens, 0xff, 4 * own->rows); }
static uint32_t *tokens_of(const Call *call, Address cache, size_t rows) {
    if (!call->rows) return inside(cache, 4 * rows);
    pthread_mutex_lock(&lock);
    Tokens *own = all_tokens;
    while (own && (own->cache != cache || own->rows != rows)) own = own->next;
    if (!own) {
        own = malloc(sizeof *own); // never freed
        *own = (Tokens){cache, rows, malloc(4 * rows), all_tokens};
        forget_tokens(own);
        all_tokens = own;
    }
    pthread_mutex_unlock(&lock);
    return own->tokens;
}
static void keep_token(const Call *call, Address cache, size_t rows, uint32_t *tokens, size_t row, uint32_t token) {
    tokens[row] = token;
    if (!call->rows) return;
    size_t slab = 2ull * ROW_VALUES * rows;
    for (Address at = cache; same_block(cache, at + slab - 1); at += slab)
        for (size_t i = 0; i < ROW_VALUES; i++) ((uint16_t *)inside(at + 2ull * ROW_VALUES * row, 2 * ROW_VALUES))[i] = token & 1 ? 0x4000 : 0x3f80;
}

static void empty(const Call *call) { (void)call; }
static void grid_barrier(const Call *call) {
    unsigned n = call->grid;
    uint32_t *in = WORDS(0, n), *scratch = WORDS(1, n + 1), *out = WORDS(2, n);
    require(U32(3) * 4 <= call->smem, "more shared memory than the launch asked for");
    require(U64(4) > 0, "no deadline");
    for (unsigned b = 0; b <= n; b++) require(scratch[b] == 0, "the scratch is not zero");
    for (unsigned b = 0; b < n; b++) out[b] = in[(b + 1) % n] * 3 + b;
}
static void mapped(const Call *call) {
    volatile uint32_t *words = WORDS(0, 3);
    double start = now_ms();
    while (!words[2]) {
        words[0]++;
        if (words[1]) words[2] = 1;
        else if (now_ms() - start > U64(1) * 1e-6) words[2] = 2;
        usleep(100);
    }
}
static void clusters(const Call *call) {
    uint32_t *out = WORDS(0, call->grid);
    for (unsigned b = 0; b < call->grid; b++) out[b] = b % call->cluster * 100 + call->cluster;
}
// Called at the beginning of the last step, when the host has read the tokens of earlier steps.
static void in_last_step(void) {
    const char *mode = getenv("FAKE_CUDA");
    if (mode && !strcmp(mode, "slow")) usleep(10000);
}
// A kernel for rows whose model is a hash: the tokens that a row decides depend on every token that it sees through the page table.
// The cache holds one token for each row of the pool. The pack has the sizes. The last id of the vocabulary is never decided, and
// crashes the kernel.
typedef struct { uint32_t sequence, position; int32_t token; uint32_t from, first, steps; uint64_t seed; float inverse_temperature; uint32_t slot, reserved[2]; } Row;
typedef struct {
    Address pack, cache, exchange, logits, entries, entry_index, runs, run_index, prompt, mailbox, report, abort, stamps;
    uint64_t timeout_ns, seed;
    uint32_t prompt_len, position, steps, tag, eos_count;
    int32_t eos[8];
    float inverse_temperature;
    uint32_t top_k, top_p;
    Address rows, pages, fills;
    uint32_t row_count, logits_from;
} RowsParams;
static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
    return x ^ x >> 33;
}
// sampler.cc: the sampler's source, and the choice of a head with temperature.
void sampler_step(const void *params, _Bool rivals);
uint32_t choice_at_head(const float *logits, uint32_t vocab, float inverse_temperature, uint64_t seed, uint32_t position);

static float logit(uint64_t h, uint32_t id) { return mixed(h ^ id * 0x9e3779b97f4a7c15ull) % 4000 / 500.f; }
static const uint64_t NO_TOKENS = 0xcbf29ce484222325ull;
static uint64_t with_token(uint64_t h, uint32_t token, uint32_t vocab) {
    require(token < vocab, "a row of the cache that was never written is read");
    return (h ^ (token + 1)) * 0x100000001b3ull;
}
// The token of `position` after tokens with that hash.
static _Thread_local int spoils; // the launch of this thread has a fault: one logit is wrong
static uint32_t chosen(uint64_t h, uint64_t seed, uint32_t position, float inverse_temperature, uint32_t vocab, float *logits) {
    static float values[65536];
    uint32_t bits, best_id = 0;
    memcpy(&bits, &inverse_temperature, 4);
    float best = -1;
    require(vocab <= 65536, "a vocabulary for which there is no room");
    for (uint32_t id = 0; id < vocab; id++) {
        float value = values[id] = id < vocab - 1 ? logit(h, id) : -1000;
        if (spoils && id == 5) value = values[id] = 50;
        if (logits) logits[id] = value;
        if (value > best) best = value, best_id = id;
    }
    return bits == 0 ? best_id : choice_at_head(values, vocab, inverse_temperature, seed, position);
}
// What a decode kernel leaves on its device for the next launch.
typedef struct { uint32_t decided, next; } Left;
// The kernel for one row of that model, over a pool of pages, or over pages in the order of their blocks.
static void one_row(const Call *call, int paged, Left *left) {
    spoils = call->is_wrong;
    const RowsParams *p = call->argument[0];
    const uint32_t *sizes = inside(p->pack, 20);
    uint32_t page_rows = sizes[1], positions = sizes[0] * page_rows, vocab = sizes[4], end = p->position + p->steps, token = 0;
    uint32_t *cache = tokens_of(call, p->cache, (size_t)sizes[2] * page_rows), *mailbox = inside(p->mailbox, 4ull * (2 + positions));
    // The parameter after those of every kernel.
    const uint32_t *table = paged ? inside(p->rows, 4ull * sizes[0]) : NULL;
#define PLACE(at) (table ? table[(at) / page_rows] * page_rows + (at) % page_rows : (at))
#define CACHED(at) cache[PLACE(at)]
    const uint32_t *prompt = inside(p->prompt, 4ull * positions);
    require(p->timeout_ns > 0 && p->steps > 0 && end <= positions && p->top_k == 0 && p->top_p == 0, "the parameters of a launch");
    require(p->position < p->prompt_len || p->position == left->next, "a launch that does not go on where the one before ended");
    for (uint32_t at = p->position; at <= end; at++) {
        int is_given = at < p->prompt_len, ends = 0;
        token = is_given ? prompt[at] : left->decided;
        mailbox[1 + at] = token;
        mailbox[0] = at + 1;
        for (uint32_t i = 0; i < p->eos_count; i++) ends = ends || (!is_given && token == (uint32_t)p->eos[i]);
        if (ends || at == end) break;
        if (at + 1 == end) in_last_step();
        require(!table || table[at / page_rows] < sizes[2], "a position outside the page table");
        keep_token(call, p->cache, (size_t)sizes[2] * page_rows, cache, PLACE(at), token);
        uint64_t h = NO_TOKENS;
        for (uint32_t before = 0; before <= at; before++) h = with_token(h, CACHED(before), vocab);
        float *logits = p->logits ? (float *)inside(p->logits + 4ull * (at - p->position) * vocab, 4ull * vocab) : NULL;
        left->decided = chosen(h, p->seed, at + 1, p->inverse_temperature, vocab, logits);
        left->next = at + 1;
    }
    printf("%u steps of one row\n", p->steps);
}
static Left left_behind[2][2]; // by device, and by pages
static void one_row_kernel(const Call *call) { one_row(call, 0, &left_behind[0][0]); }
static void paged_kernel(const Call *call) { one_row(call, 1, &left_behind[0][1]); }
// Kernels of two devices. Each waits until the other one runs, or gives up as a kernel does; then both compute the same, each from what
// the host gave it. `peers` are after the other parameters: the distances to the exchange and to the logits of seven others.
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint came[2], went[2];
static int waits_for_other(const Call *call, Address abort, Address to_report, uint64_t timeout_ns, uint32_t tag);
static int comes_together(const Call *call, const Address *peers) {
    const RowsParams *p = call->argument[0];
    const Address *peer_logits = peers + 7;
    require(!same_block(p->exchange, p->exchange + peers[0]) && peers[1] == 0, "the exchange of the other device");
    inside(p->exchange + peers[0], 8);
    if (p->logits) {
        require(!same_block(p->logits, p->logits + peer_logits[0]), "the logits of the other device");
        inside(p->logits + peer_logits[0], 4);
    }
    return waits_for_other(call, p->abort, p->report, p->timeout_ns, p->tag);
}
static int waits_for_other(const Call *call, Address abort, Address to_report, uint64_t timeout_ns, uint32_t tag) {
    uint32_t *abort_word = inside(abort, 4), *report = inside(to_report, 32ull * call->grid);
    unsigned own = call->device, other = 1 - own;
    require(reached[own] && reached[other], "devices that do not reach each other");
    while (own == 1 && has_mode("one of two hangs")) {
        if (*(volatile uint32_t *)abort_word) return 0;
        usleep(100);
    }
    unsigned turn = ++came[own];
    // The other device has not ended the kernel before: one that does not go on from it may change what is read there.
    require(went[other] + 1 >= turn, "a kernel that starts before the other device has ended the one before");
    double start = now_ms();
    while (came[other] < turn) {
        if (*(volatile uint32_t *)abort_word) return 0;
        if (now_ms() - start > timeout_ns * 1e-6) {
            uint32_t words[] = {1, tag, 3, 2, tag - 1, tag, 1, 0};
            memcpy(report, words, sizeof words);
            *abort_word = 1;
            return 0;
        }
        usleep(100);
    }
    return 1;
}
static void devices_kernel(const Call *call) {
    if (comes_together(call, &((const RowsParams *)call->argument[0])->rows)) {
        pthread_mutex_lock(&devices_lock);
        one_row(call, 0, &left_behind[call->device][0]);
        pthread_mutex_unlock(&devices_lock);
    }
    went[call->device]++;
}
// Over a pool of pages: an address and two words come first.
static void paged_devices_kernel(const Call *call) {
    if (comes_together(call, (const Address *)((const char *)call->argument[0] + offsetof(RowsParams, rows) + 16))) {
        pthread_mutex_lock(&devices_lock);
        one_row(call, 1, &left_behind[call->device][1]);
        pthread_mutex_unlock(&devices_lock);
    }
    went[call->device]++;
}
// Rows that the image of this thread's launch is for; 0: those that its pack has.
static _Thread_local uint32_t rows_of_image;
static void rows_kernel(const Call *call) {
    const RowsParams *p = call->argument[0];
    const uint32_t *sizes = inside(p->pack, 20);
    uint32_t blocks = sizes[0], page_rows = sizes[1], pages = sizes[2], padded = rows_of_image ? rows_of_image : call->rows ? call->rows : sizes[3], vocab = sizes[4];
    spoils = call->is_wrong;
    const Row *rows = inside(p->rows, p->row_count * sizeof(Row));
    uint32_t *cache = tokens_of(call, p->cache, (size_t)pages * page_rows);
    // Without a mailbox a sampler decides.
    uint32_t *mailbox = p->mailbox ? inside(p->mailbox, 4 * (1 + (p->steps + 1) * padded)) : NULL;
    // Of each device.
    static uint32_t decided_of[2][64], last_tags[2];
    uint32_t *decided = decided_of[call->device], *last_tag = &last_tags[call->device];
    require(mailbox || (p->steps == 1 && p->logits), "a launch without a mailbox that is not one step with logits");
    uint32_t active = ~0u, next[64];
    require(p->row_count >= 1 && p->row_count <= padded && p->timeout_ns > 0, "the parameters of a launch");
    require_kept(call, p->exchange);
    if (p->logits) require_kept(call, p->logits);
    // A launch that only fills the cache does not clear its words, which no whole step may find.
    uint32_t *word = inside(p->exchange, 4);
    require(p->fills ? p->steps == 1 && !p->logits : *word == ~0u, "the words of a launch, or one that fills the cache and does more");
    if (p->fills) *word = 0;
    for (uint32_t step = 0; step <= p->steps; step++) {
        for (uint32_t r = 0; r < p->row_count; r++) {
            if (step == 0) {
                require(rows[r].token >= 0 || p->tag == *last_tag, "a token of a step that this launch does not follow");
                next[r] = rows[r].token >= 0 ? (uint32_t)rows[r].token : decided[rows[r].from];
                require(rows[r].token >= 0 || !p->fills, "a launch that decides nothing, with a token that is not given");
            } else if (active >> r & 1) next[r] = decided[r];
            if (mailbox) mailbox[1 + step * padded + r] = next[r];
            int goes_on = step < rows[r].steps && (active >> r & 1);
            for (uint32_t i = 0; i < p->eos_count; i++) goes_on = goes_on && !(step > 0 && next[r] == (uint32_t)p->eos[i]);
            if (!goes_on) active &= ~(1u << r);
        }
        if (mailbox && (step < p->steps || !p->fills)) mailbox[0] = step + 1;
        if (step == p->steps || !(active & ((1ull << p->row_count) - 1))) break;
        if (step + 1 == p->steps) in_last_step();
        for (uint32_t write = 1; write < 2; write--)
            for (uint32_t r = 0; r < p->row_count; r++) {
                if (!(active >> r & 1)) continue;
                uint32_t position = rows[r].position + step;
                const uint32_t *table = inside(p->pages + 4ull * rows[r].sequence * blocks, 4ull * blocks);
                require(position / page_rows < blocks && table[position / page_rows] < pages, "a position outside the page table");
                if (write) {
                    require(next[r] < vocab, "a token outside the vocabulary");
                    if (next[r] == vocab - 1 && !call->rows) { crashed = 1; return; }
                    keep_token(call, p->cache, (size_t)pages * page_rows, cache, table[position / page_rows] * page_rows + position % page_rows, next[r]);
                    continue;
                }
                uint64_t h = NO_TOKENS;
                for (uint32_t at = 0; at <= position; at++)
                    h = with_token(h, cache[table[at / page_rows] * page_rows + at % page_rows], vocab);
                float *logits = p->logits && step >= p->logits_from ? (float *)inside(p->logits + 4ull * r * vocab, 4ull * vocab) : NULL;
                decided[r] = chosen(h, rows[r].seed, position + 1, rows[r].inverse_temperature, vocab, logits);
            }
    }
    *last_tag = p->fills ? 0 : p->tag + p->steps;
    printf("%u steps of %u rows\n", p->steps, p->row_count);
}
// A batch kernel of two devices. Both decide the same, from tables and caches of their own.
static void rows_devices_kernel(const Call *call) {
    if (comes_together(call, (const Address *)((const RowsParams *)call->argument[0] + 1))) {
        pthread_mutex_lock(&devices_lock);
        rows_kernel(call);
        pthread_mutex_unlock(&devices_lock);
    }
    went[call->device]++;
}
// The same for 16 rows, whatever its pack has: kernels of one model share a pack.
static void rows16_devices_kernel(const Call *call) {
    rows_of_image = 16;
    rows_devices_kernel(call);
}
// The same as `rows_kernel`, whose last layer leaves words (rows/words.cuh) for the head: hashes of the tokens that a row sees. After its sizes the pack has where they
// begin in the exchange, the bytes of a phase, and the values of a row.
// bf16 has these numbers, too.
static uint32_t left_of(uint64_t h, uint32_t column) { return (uint32_t)(mixed(h + column) % 200); }
static void leaving_kernel(const Call *call) {
    rows_kernel(call);
    const RowsParams *p = call->argument[0];
    if (p->fills) return;
    const uint32_t *sizes = inside(p->pack, 32);
    uint32_t blocks = sizes[0], page_rows = sizes[1], pages = sizes[2], padded = sizes[3], vocab = sizes[4], cols = sizes[7];
    const Row *rows = inside(p->rows, p->row_count * sizeof(Row));
    const uint32_t *cache = tokens_of(call, p->cache, (size_t)pages * page_rows);
    uint32_t phase = (p->tag + p->steps - 1) % 2;
    char *words = inside(p->exchange + sizes[5], 2ull * sizes[6]);
    memset(words + (1 - phase) * sizes[6], 255, sizes[6]);
    for (uint32_t r = 0; r < padded && r < p->row_count; r++) {
        const uint32_t *table = inside(p->pages + 4ull * rows[r].sequence * blocks, 4ull * blocks);
        uint64_t h = NO_TOKENS;
        for (uint32_t at = 0; at < rows[r].position + p->steps; at++)
            h = with_token(h, cache[table[at / page_rows] * page_rows + at % page_rows], vocab);
        for (uint32_t column = 0; column < cols; column++) {
            float value = left_of(h, column);
            // A piece is 16 bytes; a span is 4 pieces of each of 8 rows. Half as long words are bf16.
            uint32_t width = sizes[6] == (padded + 7) / 8 * ((cols + 15) / 16) * 512 ? 4 : 2;
            uint32_t values = 16 / width, piece = column / values, spans = (cols * width + 63) / 64;
            uint32_t at = r / 8 * spans * 512 + piece / 4 * 512 + r % 8 * 64 + piece % 4 * 16 + column % values * width;
            memcpy(words + phase * sizes[6] + at, (char *)&value + 4 - width, width);
        }
    }
}
// The same of two devices.
static void leaving_devices_kernel(const Call *call) {
    if (comes_together(call, (const Address *)((const RowsParams *)call->argument[0] + 1))) {
        pthread_mutex_lock(&devices_lock);
        leaving_kernel(call);
        pthread_mutex_unlock(&devices_lock);
    }
    went[call->device]++;
}
// The decode kernel of a draft, which decides by its token and by what it is given. The pack has its positions, the values of a vector, the vocabulary,
// and where the exchange has what it leaves: packets. Later steps are given what the step before left, with its norm.
typedef struct {
    Address given, left, norm_of_model, norm;
    float eps_of_model, eps;
    uint32_t left_row, given_steps, ahead, only_reads;
} Given;
static void normed(const float *x, uint32_t count, Address weights, float eps, float *to) {
    const float *weight = inside(weights, 4ull * count);
    double squares = 0;
    for (uint32_t i = 0; i < count; i++) squares += (double)x[i] * x[i];
    for (uint32_t i = 0; i < count; i++) to[i] = x[i] / sqrt(squares / count + eps) * weight[i];
}
static void draft_kernel(const Call *call) {
    static uint32_t decided;
    static float left[4096], given[4096];
    const RowsParams *p = call->argument[0];
    const Given *g = (const Given *)&p->rows;
    const uint32_t *sizes = inside(p->pack, 16), *prompt = inside(p->prompt, 4ull * sizes[0]);
    uint32_t hidden = sizes[1], end = p->position + p->steps, *mailbox = inside(p->mailbox, 4ull * (2 + sizes[0]));
    require(g->given_steps > 0 && g->given_steps <= p->steps && hidden <= 4096, "the rows of a draft");
    uint64_t *packets = inside(p->exchange + sizes[3], 8ull * hidden);
    for (uint32_t at = p->position; at <= end; at++) {
        uint32_t token = at < p->prompt_len ? prompt[at] : decided, step = at - p->position;
        mailbox[1 + at] = token, mailbox[0] = at + 1;
        if (at == end) break;
        if (step >= g->given_steps) {
            for (uint32_t i = 0; i < hidden; i++) {
                require(packets[i] >> 32 == p->tag + step - 1, "a draft goes on with what no step left");
                memcpy(&left[i], &packets[i], 4);
            }
            normed(left, hidden, g->norm, g->eps, given);
        } else if (g->given) {
            memcpy(given, (const float *)inside(g->given, 4ull * hidden * (step + 1)) + step * hidden, 4ull * hidden);
        } else {
            uint32_t row = g->left_row + step, spans = (hidden + 15) / 16;
            for (uint32_t i = 0; i < hidden; i++)
                left[i] = *(float *)inside(g->left + (uint64_t)(row / 8 * spans + i / 16) * 512 + row % 8 * 64 + i % 16 * 4, 4);
            normed(left, hidden, g->norm_of_model, g->eps_of_model, given);
        }
        uint64_t h = with_token(NO_TOKENS, token, sizes[2]) + g->ahead;
        for (uint32_t i = 0; i < hidden; i++) {
            uint32_t bits;
            memcpy(&bits, &given[i], 4);
            h = mixed(h ^ bits);
            packets[i] = (uint64_t)(p->tag + step) << 32 | bits;
        }
        require(!g->only_reads || p->position + p->steps <= p->prompt_len, "a launch that only reads, without all of its tokens");
        decided = g->only_reads ? sizes[2] - 1 : h % sizes[2];
    }
}
// Kernels of waves of that model. Without a mailbox one only fills the cache.
typedef struct {
    Address pack, cache, work, waves, shares, records, rows, pages, arrived, report, abort, stamps, logits, mailbox;
    uint64_t timeout_ns;
    uint32_t wave_count, row_count, position, steps;
    Address taken, boxes;
    uint32_t tag, reserved;
} WaveParams;
// No tag is used twice in an arena, unless a part of it was cleared meanwhile.
static struct { Address work; uint64_t next; } arenas[256];
static void use_tags(const WaveParams *p) {
    int i = 0;
    while (i < 255 && arenas[i].work && arenas[i].work != p->work) i++;
    require(p->tag > 0 && p->tag >= arenas[i].next, "tags of packets are used again");
    arenas[i].work = p->work, arenas[i].next = (uint64_t)p->tag + p->steps * p->wave_count;
    require(arenas[i].next <= 1ull << 32, "tags of packets wrap around");
}
static void clear_tags(Address to, size_t bytes) {
    for (int i = 0; i < 256; i++)
        if (arenas[i].work && same_block(arenas[i].work, to) && bytes > 0) arenas[i].next = 1;
}
// Each wave takes 10 ns on every SM, and waits for its input in the first two of them.
static void stamp(const WaveParams *p, unsigned grid) {
    static uint64_t clock_ns = 1000;
    const char *mode = getenv("FAKE_CUDA");
    if (!mode || strcmp(mode, "stamps")) return;
    uint64_t *words = inside(p->stamps, 40ull * grid * p->steps * p->wave_count);
    for (uint32_t wave = 0; wave < p->steps * p->wave_count; wave++, clock_ns += 10)
        for (unsigned block = 0; block < grid; block++)
            memcpy(words + 5 * (block * p->steps * p->wave_count + wave), (uint64_t[]){clock_ns, clock_ns + 2, 0, clock_ns + 10, 0}, 40);
}
static void number_words(const WaveParams *p) {
    const char *mode = getenv("FAKE_CUDA");
    if (!mode || strcmp(mode, "numbers")) return;
    for (uint32_t at = 0; same_block(p->work, p->work + at + 3); at += 4) *(uint32_t *)inside(p->work + at, 4) = at + (p->taken != 0);
}
// The chunk that was read last, for its tail.
static struct { Address work; uint32_t position, row_count, tokens[512]; } last_chunks[2]; // of each device
// The residual of a tail, for which the fake uses tokens, is in the arena of the chunk before it.
static void tail_kernel(const Call *call) {
    const WaveParams *p = call->argument[0];
    const uint32_t *sizes = inside(p->pack, 20), *tokens = last_chunks[call->device].tokens;
    const Address work = last_chunks[call->device].work;
    const uint32_t chunk_position = last_chunks[call->device].position, chunk_rows = last_chunks[call->device].row_count;
    uint32_t blocks = sizes[0], page_rows = sizes[1], pages = sizes[2], vocab = sizes[4];
    uint32_t *cache = tokens_of(call, p->cache, (size_t)pages * page_rows), *mailbox = inside(p->mailbox, 4 * (1 + 2 * 16));
    const Row *rows = inside(p->rows, p->row_count * sizeof(Row));
    inside(p->waves, 80ull * p->wave_count);
    inside(p->taken, 4ull * p->row_count);
    require(*(uint32_t *)inside(p->arrived, 4) == 0, "the count of a tail does not begin at 0");
    require(p->steps == 1 && p->row_count == 1 && p->timeout_ns > 0 && p->position == rows[0].position, "the parameters of a tail");
    require(p->taken >= work && p->work != work, "a tail takes the residual of another arena, or has that of its chunk");
    require(rows[0].token == -1 && rows[0].sequence == 0 && rows[0].first == 0 && rows[0].steps == 1, "the row of a tail");
    require(rows[0].from + 1 == chunk_rows && rows[0].position == chunk_position + rows[0].from, "a row that the chunk does not end with");
    uint32_t position = rows[0].position;
    const uint32_t *table = inside(p->pages, 4ull * blocks);
    require(position / page_rows < blocks && table[position / page_rows] < pages, "a row outside the tables");
    keep_token(call, p->cache, (size_t)pages * page_rows, cache, table[position / page_rows] * page_rows + position % page_rows, tokens[rows[0].from]);
    uint64_t h = NO_TOKENS;
    for (uint32_t at = 0; at <= position; at++)
        h = with_token(h, cache[table[at / page_rows] * page_rows + at % page_rows], vocab);
    float *logits = p->logits ? (float *)inside(p->logits, 4ull * vocab) : NULL;
    mailbox[1 + 16] = chosen(h, rows[0].seed, position + 1, rows[0].inverse_temperature, vocab, logits);
    *(uint32_t *)inside(p->arrived, 4) = 1;
    printf("a tail\n");
}
static void waves_kernel(const Call *call) {
    const WaveParams *p = call->argument[0];
    stamp(p, call->grid);
    use_tags(p);
    number_words(p);
    // Another kernel of waves than the launch is for reads other tables, so its numbers are wrong.
    enum Does is_for = p->taken ? TAIL : p->mailbox ? ANYTHING : CHUNK;
    spoils = call->is_wrong || (call->rows && call->does != is_for && (call->does == CHUNK || call->does == TAIL));
    if (p->taken) { tail_kernel(call); return; }
    const uint32_t *sizes = inside(p->pack, 20);
    uint32_t blocks = sizes[0], page_rows = sizes[1], pages = sizes[2], padded = call->rows ? call->rows : sizes[3], vocab = sizes[4];
    uint32_t *cache = tokens_of(call, p->cache, (size_t)pages * page_rows);
    const Row *rows = inside(p->rows, p->row_count * sizeof(Row));
    uint32_t *mailbox = p->mailbox ? inside(p->mailbox, 4 * (1 + (p->steps + 1) * padded)) : NULL, next[512];
    static uint32_t decided_by[2][64];
    uint32_t *decided = decided_by[call->device];
    inside(p->waves, 80ull * p->wave_count);
    require(*(uint32_t *)inside(p->arrived, 4) == 0, "the count of a launch does not begin at 0");
    require(p->wave_count > 0 && p->timeout_ns > 0 && p->row_count <= 512, "the parameters of a launch");
    require_kept(call, p->work);
    if (p->logits && call->device == 0) require_kept(call, p->logits);
    require(p->position == rows[0].position && (mailbox || (p->steps == 1 && !p->logits)), "a launch that only fills the cache, and does more");
    for (uint32_t step = 0; step <= p->steps; step++) {
        for (uint32_t r = 0; r < p->row_count; r++) {
            require(step > 0 || mailbox || rows[r].token >= 0, "a launch that decides nothing, with a token that is not given");
            next[r] = step > 0 ? decided[r] : rows[r].token >= 0 ? (uint32_t)rows[r].token : decided[rows[r].from];
            if (mailbox) mailbox[1 + step * padded + r] = next[r];
        }
        if (step == p->steps) break;
        if (step + 1 == p->steps) in_last_step();
        for (uint32_t write = 1; write < 2; write--)
            for (uint32_t r = 0; r < p->row_count && (write || mailbox); r++) {
                uint32_t position = rows[r].position + step;
                const uint32_t *table = inside(p->pages + 4ull * rows[r].sequence * blocks, 4ull * blocks);
                require(position / page_rows < blocks && table[position / page_rows] < pages && next[r] < vocab, "a row outside the tables");
                if (write) {
                    uint32_t token = spoils && !mailbox && position % 3 == 1 ? next[r] ^ 1 : next[r];
                    keep_token(call, p->cache, (size_t)pages * page_rows, cache, table[position / page_rows] * page_rows + position % page_rows, token);
                    continue;
                }
                uint64_t h = NO_TOKENS;
                for (uint32_t at = 0; at <= position; at++)
                    h = with_token(h, cache[table[at / page_rows] * page_rows + at % page_rows], vocab);
                float *logits = p->logits && step + 1 == p->steps ? (float *)inside(p->logits + 4ull * r * vocab, 4ull * vocab) : NULL;
                decided[r] = chosen(h, rows[r].seed, position + 1, rows[r].inverse_temperature, vocab, logits);
                // Makes a row depend on its chunk, or on other sequences.
                const char *mode = getenv("FAKE_CUDA");
                int cut = r > 0 && rows[r - 1].sequence == rows[r].sequence, beside = rows[0].sequence != rows[p->row_count - 1].sequence;
                if (logits && mode && ((!strcmp(mode, "shows cuts") && cut && p->row_count == 7) || (!strcmp(mode, "shows others") && !cut && beside && p->row_count == 5)))
                    ((uint32_t *)logits)[7] ^= 1;
            }
        if (!mailbox) break;
    }
    *(uint32_t *)inside(p->arrived, 4) = 1;
    if (mailbox) {
        printf("%u steps of %u rows in waves (%u a step)\n", p->steps, p->row_count, p->wave_count);
    } else {
        last_chunks[call->device].work = p->work, last_chunks[call->device].position = p->position, last_chunks[call->device].row_count = p->row_count;
        memcpy(last_chunks[call->device].tokens, next, sizeof next);
        printf("a chunk of %u\n", p->row_count);
    }
}
// The same of two devices. The first one alone tells the host what rows decide, and has the logits of both; the other one computes the same after it. The distances to
// the arenas and to the counts of seven others come after the other parameters, then the blocks of the devices before.
static void waves_devices_kernel(const Call *call) {
    static atomic_uint ran[2];
    static Address told;
    const WaveParams *p = call->argument[0];
    const Address *peers = (const Address *)(p + 1), *counts = peers + 7;
    unsigned own = call->device;
    require(*(const uint32_t *)(counts + 7) == own * call->grid, "the blocks of the devices before");
    require(!same_block(p->work, p->work + peers[0]) && !same_block(p->arrived, p->arrived + counts[0]) && !peers[1] && !counts[1], "the arena or the count of the other device");
    inside(p->work + peers[0], 256);
    require(*(uint32_t *)inside(p->arrived + counts[0], 4) == 0, "the count of the other device does not begin at 0");
    require(own == 0 || !p->mailbox, "another device than the first one tells the host");
    if (waits_for_other(call, p->abort, p->report, p->timeout_ns, p->tag)) {
        while (own == 1 && ran[0] <= ran[1]) usleep(100);
        pthread_mutex_lock(&devices_lock);
        WaveParams params = *p;
        if (own == 0) told = p->mailbox;
        params.mailbox = told;
        Call same = *call;
        same.argument[0] = &params;
        waves_kernel(&same);
        ran[own]++;
        pthread_mutex_unlock(&devices_lock);
    }
    went[own]++;
}
// The sampler, on the tables that the host made.
typedef struct {
    Address logits, list, weights, counts, bests, present, parts_best, told, totals, tops, rows, edits, masks, answers, next;
    uint32_t next_stride, vocab, step, row_count, at_once, parts, part_ids, parts_inverse_q31, begins[258];
} SamplerParams;
static void sample(const Call *call, _Bool by_rivals) {
    const SamplerParams *p = call->argument[0];
    uint32_t rows = p->row_count;
    require(rows > 0 && call->grid == p->at_once * p->parts, "the blocks of a sampler");
    require(p->part_ids % 16 == 0 && (p->parts - 1) * p->part_ids < p->vocab && p->vocab <= p->parts * p->part_ids, "the parts of a row");
    inside(p->logits, 4ull * p->vocab);
    inside(p->list, 8ull * rows * p->vocab);
    inside(p->weights, 8ull * rows * 1024);
    inside(p->counts, 4ull * rows * 1024);
    inside(p->bests, 8ull * rows * 1024);
    inside(p->present, 128ull * rows * p->parts);
    inside(p->parts_best, 16ull * rows * p->parts);
    inside(p->told, 64ull * rows * p->parts);
    inside(p->totals, 32ull * rows);
    inside(p->tops, 8ull * rows * p->parts * 20);
    inside(p->rows, 80ull * rows);
    inside(p->answers, 192ull * rows);
    if (p->next) inside(p->next, 4ull * p->next_stride * (rows - 1) + 4);
    printf("step %u of a sampler for %u rows%s\n", p->step, rows, by_rivals ? ", by rivals" : "");
    sampler_step(p, by_rivals);
    if (call->is_wrong) *(uint32_t *)inside(p->answers, 4) ^= 1;
}
static void sampler(const Call *call) { sample(call, 0); }
static void rivals(const Call *call) { sample(call, 1); }
static void crash(const Call *call) { (void)call; crashed = 1; }
static void hang(const Call *call) { (void)call; for (;;) pause(); }

typedef struct { const char *name; void (*run)(const Call *); size_t parameters[8]; int smem; } Kernel;
// A module with the kernel for one row, which has the name of that for rows and fewer parameters.
static Kernel kernels_one_row[] = {{"monobloc_decode", one_row_kernel, {offsetof(RowsParams, rows)}, 0}, {0}};
// The same of two devices.
static Kernel kernels_devices[] = {{"monobloc_decode", devices_kernel, {offsetof(RowsParams, rows) + 14 * 8}, 0}, {0}};
static Kernel kernels_paged_devices[] = {{"monobloc_decode", paged_devices_kernel, {offsetof(RowsParams, rows) + 16 + 14 * 8}, 0}, {0}};
static Kernel kernels_rows_devices[] = {{"monobloc_decode", rows_devices_kernel, {sizeof(RowsParams) + 14 * 8}, 0}, {0}};
static Kernel kernels_rows16_devices[] = {{"monobloc_decode", rows16_devices_kernel, {sizeof(RowsParams) + 14 * 8}, 0}, {0}};
static Kernel kernels_waves_devices[] = {{"monobloc_waves", waves_devices_kernel, {sizeof(WaveParams) + 15 * 8}, 0}, {0}};
// A draft: what it is given is a parameter, too.
static Kernel kernels_draft[] = {{"monobloc_decode", draft_kernel, {offsetof(RowsParams, rows) + sizeof(Given)}, 0}, {0}};
// A batch kernel that leaves something for a draft.
static Kernel kernels_leaving[] = {{"monobloc_decode", leaving_kernel, {sizeof(RowsParams)}, 0}, {0}};
static Kernel kernels_leaving_devices[] = {{"monobloc_decode", leaving_devices_kernel, {sizeof(RowsParams) + 14 * 8}, 0}, {0}};
// The same, over a pool of pages: they and their sequence are parameters, too.
static Kernel kernels_paged[] = {{"monobloc_decode", paged_kernel, {offsetof(RowsParams, rows) + 16}, 0}, {0}};
static Kernel kernels[] = {
    {"self_test_empty", empty, {0}, 0},
    {"self_test_grid", grid_barrier, {8, 8, 8, 4, 8}, 0},
    {"self_test_mapped", mapped, {8, 8}, 0},
    {"self_test_cluster", clusters, {8}, 0},
    {"monobloc_decode", rows_kernel, {sizeof(RowsParams)}, 0},
    {"monobloc_waves", waves_kernel, {sizeof(WaveParams)}, 0},
    {"monobloc_sampler", sampler, {sizeof(SamplerParams)}, 0},
    {"monobloc_sampler_rivals", rivals, {sizeof(SamplerParams)}, 0},
    {"crash", crash, {0}, 0},
    {"hang", hang, {0}, 0},
    {0},
};

// An image that says what its kernels are for; never freed.
typedef struct OwnImage { Kernel kernels[sizeof kernels / sizeof *kernels]; unsigned rows, does, is_wrong; struct OwnImage *next; } OwnImage;
static OwnImage *own_images;
static const OwnImage *image_of(const Kernel *kernel) {
    const OwnImage *own = own_images;
    while (own && (kernel < own->kernels || kernel >= own->kernels + sizeof kernels / sizeof *kernels)) own = own->next;
    return own;
}
int cuModuleLoadData(void **module, const char *image) {
    BOUND();
    if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
    unsigned char does = image[4] == 'K' ? image[6] : ANYTHING;
    *module = image[4] == '4' ? kernels_leaving : image[4] == '5' ? kernels_draft : image[4] == '3' ? kernels_devices : image[4] == '6' ? kernels_paged_devices : image[4] == '7' ? kernels_rows_devices : image[4] == '8' ? kernels_waves_devices : image[4] == '9' ? kernels_rows16_devices : image[4] == 'A' ? kernels_leaving_devices : image[4] == '1' || does == ONE_ROW ? kernels_one_row : image[4] == '2' || does == PAGED_ROW ? kernels_paged : kernels;
    if (image[4] == 'K') {
        OwnImage *own = calloc(1, sizeof *own);
        *own = (OwnImage){.rows = (unsigned char)image[5], .does = does, .is_wrong = image[7], .next = own_images};
        memcpy(own->kernels, *module, *module == kernels ? sizeof kernels : sizeof kernels_paged);
        *module = own->kernels;
        own_images = own;
    }
    modules++;
    return SUCCESS;
}
int cuModuleUnload(void *module) { BOUND(); modules--; return module ? SUCCESS : INVALID_VALUE; }
int cuModuleGetFunction(Kernel **function, void *module, const char *name) {
    BOUND();
    for (Kernel *k = module; k->name; k++)
        if (!strcmp(k->name, name)) {
            has_steps |= k->run == rows_kernel || k->run == rows_devices_kernel || k->run == rows16_devices_kernel || k->run == leaving_kernel || k->run == leaving_devices_kernel || k->run == waves_kernel || k->run == waves_devices_kernel;
            *function = k;
            return SUCCESS;
        }
    return NOT_FOUND;
}
int cuFuncGetAttribute(int *value, int attribute, Kernel *function) {
    BOUND();
    (void)function;
    static const int values[] = {1024, 0, 0, 0, 168}; // threads, static smem, const, local, registers
    const char *mode = getenv("FAKE_CUDA");
    require(attribute <= 4, "an unexpected function attribute");
    *value = attribute == 4 && mode && !strcmp(mode, "few registers") ? 160 : values[attribute];
    return SUCCESS;
}
int cuFuncSetAttribute(Kernel *function, int attribute, int value) {
    BOUND();
    if (attribute == 8 && value > SMEM_MAX) return INVALID_VALUE;
    // Kernels that are loaded from one image are one function here.
    if (attribute == 8) function->smem = value > function->smem ? value : function->smem;
    else require(attribute == 14 && value == 1, "an unexpected function attribute");
    return SUCCESS;
}
int cuFuncGetParamInfo(Kernel *function, size_t index, size_t *offset, size_t *size) {
    BOUND();
    *offset = 8 * index;
    *size = index < 8 ? function->parameters[index] : 0;
    return *size ? SUCCESS : INVALID_VALUE;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, Kernel *function, int block, size_t smem) {
    BOUND();
    (void)function;
    *count = smem > SMEM_MAX / 2 || block > 512 ? 1 : 2;
    return SUCCESS;
}

// ---- streams: every piece of work has its own thread and waits for the previous piece
//
// Copies read their source late, so that memory which is reused too early is noticed.

typedef struct Job {
    struct Job *before;
    atomic_int is_done;
    pthread_cond_t ended;
    double ended_ms;
    Call call;
    void (*run)(const Call *);
    uint64_t values[8];
} Job;
typedef struct Stream { Job *last; struct Stream *next; } Stream;
static atomic_int queued_after; // launches of a kernel after one of the same kernel that had not ended
static Stream *all_streams; // never freed: a destroyed one has no work left
typedef struct { Job *after; double at_ms; int is_recorded; } Event;
typedef struct { unsigned id; char pad[4]; union { unsigned number[16]; KeptRange kept; } value; } Attribute;
typedef struct {
    unsigned grid[3], block[3], smem;
    Stream *stream;
    Attribute *attributes;
    unsigned attribute_count;
} Config;

static pthread_mutex_t jobs_lock = PTHREAD_MUTEX_INITIALIZER;
// Sleeps until the job has ended: each of many queued jobs waits for the one before it, and looking again and again costs more than what they do.
static void await(Job *job) {
    if (!job || job->is_done) return;
    pthread_mutex_lock(&jobs_lock);
    while (!job->is_done) pthread_cond_wait(&job->ended, &jobs_lock);
    pthread_mutex_unlock(&jobs_lock);
}
static void wait_for(Stream *stream) {
    while (stream->last && !stream->last->is_done) await(stream->last);
}
// An attribute of a launch; NULL: the launch has none of this id.
static const Attribute *attribute_of(const Config *config, unsigned id) {
    for (unsigned i = 0; i < config->attribute_count; i++)
        if (config->attributes[i].id == id) return &config->attributes[i];
    return NULL;
}
static int cluster_of(const Config *config) {
    const Attribute *cluster = attribute_of(config, 4);
    if (!cluster) return 1;
    const unsigned *side = cluster->value.number;
    require(side[1] == 1 && side[2] == 1, "a cluster that is not one-dimensional");
    return side[0];
}
static void *run_job(void *argument) {
    Job *job = argument;
    await(job->before);
    job->run(&job->call);
    job->ended_ms = now_ms();
    pthread_mutex_lock(&jobs_lock);
    job->is_done = 1;
    pthread_cond_broadcast(&job->ended);
    pthread_mutex_unlock(&jobs_lock);
    return NULL;
}
static int submit(Stream *stream, void (*run)(const Call *), Call call, void *const *arguments, const size_t *sizes) {
    Job *job = calloc(1, sizeof *job);
    *job = (Job){.before = stream->last, .ended = PTHREAD_COND_INITIALIZER, .run = run, .call = call};
    for (int i = 0; i < 8 && sizes[i]; i++) {
        void *value = sizes[i] <= sizeof job->values[i] ? (void *)&job->values[i] : malloc(sizes[i]); // never freed
        job->call.argument[i] = memcpy(value, arguments[i], sizes[i]);
    }
    stream->last = job;
    pthread_t thread;
    pthread_create(&thread, NULL, run_job, job);
    pthread_detach(thread);
    return SUCCESS;
}
// Refuses what a driver would.
int cuTensorMapEncodeTiled(unsigned long long *map, int type, unsigned rank, void *address, const unsigned long long *dims, const unsigned long long *strides,
                           const unsigned *box, const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
    BOUND();
    if (type != 5 || rank < 2 || rank > 5 || interleave || swizzle < 0 || swizzle > 3 || promotion < 0 || promotion > 3 || fill) return INVALID_VALUE;
    if ((size_t)address % 16 || strides[0] < dims[0] * 8 || box[0] * 8 % 16 || swizzle && box[0] * 8 > 16u << swizzle) return INVALID_VALUE;
    for (unsigned i = 0; i < rank; i++)
        if (!dims[i] || dims[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return INVALID_VALUE;
    for (unsigned i = 0; i + 1 < rank; i++)
        if (!strides[i] || strides[i] % 16 || strides[i] >= 1ull << 40) return INVALID_VALUE;
    memset(map, 0, 128);
    return SUCCESS;
}
// What a launch asks L2 to keep: a range of one allocation, with all accesses to it.
static KeptRange kept_by(const Config *config) {
    const Attribute *window = attribute_of(config, 1);
    if (!window) return (KeptRange){0};
    KeptRange kept = window->value.kept;
    require(kept_limit > 0 && kept.bytes > 0 && kept.bytes <= KEPT_RANGE_MAX, "a range to keep that a driver refuses");
    require(kept.ratio == 1 && kept.hit == 2 && kept.miss == 1, "a range of which not all is kept");
    inside(kept.start, kept.bytes);
    return kept;
}
#ifndef OLD
int cuLaunchKernelEx(const Config *config, Kernel *function, void **arguments, void **extra) {
    BOUND();
    require(extra == NULL, "extra");
    log_call("launch", 0);
    const Attribute *cooperative = attribute_of(config, 2);
    int is_cooperative = cooperative && cooperative->value.number[0], cluster = cluster_of(config);
    if (config->smem > (unsigned)function->smem || config->grid[0] % cluster) return INVALID_VALUE;
    if (is_cooperative && config->grid[0] > 2 * SM_COUNT) return TOO_LARGE;
    Call call = {.grid = config->grid[0], .smem = config->smem, .cluster = cluster, .kept = kept_by(config), .device = bound - contexts};
    const OwnImage *own = image_of(function);
    if (own) call.rows = own->rows, call.does = own->does, call.is_wrong = own->is_wrong;
    Job *last = config->stream->last;
    if (last && !last->is_done && last->run == function->run) queued_after++;
    return submit(config->stream, function->run, call, arguments, function->parameters);
}
#endif
int cuOccupancyMaxActiveClusters(int *count, Kernel *function, const Config *config) {
    BOUND();
    (void)function;
    *count = SM_COUNT / cluster_of(config);
    return SUCCESS;
}
int cuStreamCreate(Stream **stream, unsigned flags) {
    BOUND();
    *stream = calloc(1, sizeof **stream);
    (*stream)->next = all_streams;
    all_streams = *stream;
    streams++;
    return flags == 1 ? SUCCESS : INVALID_VALUE;
}
int cuStreamDestroy_v2(Stream *stream) { BOUND(); wait_for(stream); streams--; return SUCCESS; }
int cuStreamQuery(Stream *stream) { BOUND(); return !stream->last || stream->last->is_done ? SUCCESS : NOT_READY; }
int cuStreamSynchronize(Stream *stream) { BOUND(); log_call("wait", 0); wait_for(stream); return SUCCESS; }
int cuCtxSynchronize(void) {
    BOUND();
    for (Stream *stream = all_streams; stream; stream = stream->next) wait_for(stream);
    return SUCCESS;
}
static void copy(const Call *call) {
    usleep(2000);
    memcpy((void *)U64(0), (const void *)U64(1), U64(2));
}
static void set(const Call *call) {
    if (U64(1) == 0) clear_tags(U64(0), U64(2));
    for (Tokens *own = all_tokens; own; own = own->next)
        if (own->cache == U64(0)) forget_tokens(own);
    memset((void *)U64(0), (int)U64(1), U64(2));
}
static int submit_three(Stream *stream, void (*run)(const Call *), uint64_t to, uint64_t from, uint64_t bytes) {
    return submit(stream, run, (Call){0}, (void *[]){&to, &from, &bytes}, (size_t[8]){8, 8, 8});
}
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, Stream *stream) {
    BOUND();
    log_call("copy to the device", bytes);
    return submit_three(stream, copy, (Address)inside(to, bytes), (Address)from, bytes);
}
int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, Stream *stream) {
    BOUND();
    log_call("copy to the host", bytes);
    return submit_three(stream, copy, (Address)to, (Address)inside(from, bytes), bytes);
}
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Stream *stream) {
    BOUND();
    log_call("copy on the device", bytes);
    return submit_three(stream, copy, (Address)inside(to, bytes), (Address)inside(from, bytes), bytes);
}
int cuMemcpyPeerAsync(Address to, char *to_context, Address from, char *from_context, size_t bytes, Stream *stream) {
    BOUND();
    require(to_context == bound && from_context != bound && from_context >= contexts && from_context < contexts + 2, "the contexts of a copy between devices");
    return submit_three(stream, copy, (Address)inside(to, bytes), (Address)inside(from, bytes), bytes);
}
int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Stream *stream) {
    BOUND();
    return submit_three(stream, set, (Address)inside(to, bytes), value, bytes);
}
int cuEventCreate(Event **event, unsigned flags) {
    BOUND();
    *event = calloc(1, sizeof **event);
    events++;
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}
int cuEventDestroy_v2(Event *event) { BOUND(); free(event); events--; return SUCCESS; }
int cuEventRecord(Event *event, Stream *stream) { BOUND(); *event = (Event){stream->last, now_ms(), 1}; return SUCCESS; }
static void await_job(const Call *call) {
    Job *job = (Job *)U64(0);
    await(job);
}
int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    BOUND();
    require(event->is_recorded && flags == 0, "an event that was not recorded is waited for");
    return submit_three(stream, await_job, (uint64_t)event->after, 0, 0);
}
int cuEventQuery(Event *event) { BOUND(); return !event->after || event->after->is_done ? SUCCESS : NOT_READY; }
static double time_of(Event *event) {
    return event->after && event->after->ended_ms > event->at_ms ? event->after->ended_ms : event->at_ms;
}
int cuEventElapsedTime(float *milliseconds, Event *start, Event *end) {
    BOUND();
    require(start->is_recorded && end->is_recorded, "an event that was not recorded");
    if (cuEventQuery(start) || cuEventQuery(end)) return NOT_READY;
    *milliseconds = time_of(end) - time_of(start);
    return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    int count = 0;
    for (Block *b = blocks; b; b = b->next) count++;
    printf("%d launches queued after one that ran\n", queued_after);
    printf("released with %d blocks, %d streams, %d events, %d modules left\n", count, streams, events, modules);
    fflush(stdout);
    return is_device(device) ? SUCCESS : INVALID_VALUE;
}

// ---- NVML

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &contexts[0];
    return strcmp(uuid, "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf") ? 6 : 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { require(size > 12, "size"); strcpy(text, "580.00.01"); return 0; }
int nvmlDeviceGetClockInfo(void *h, unsigned kind, unsigned *mhz) { (void)h; *mhz = kind == 1 ? 1200 : 3201; return 0; }
int nvmlDeviceGetMaxClockInfo(void *h, unsigned kind, unsigned *mhz) { (void)h; *mhz = kind == 1 ? 1980 : 3201; return 0; }
int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *degrees) { (void)h; *degrees = 41; return sensor; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { (void)h; (void)mw; return 3; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *bits) { (void)h; *bits = 0x20; return 0; }
