// The part of CUDA that kernel sources need, on the CPU. Each thread of a block is a coroutine: it runs until it ends,
// or waits for the others in __syncthreads. Blocks run one after another. A source without a required barrier gives
// wrong results in one of the two thread orders (host_order); the arithmetic is that of the device.
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __restrict__
#define __constant__ const
#define __shared__ static thread_local

struct Index { unsigned x, y, z; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

namespace host {
constexpr size_t STACK = 64 * 1024;

struct Fiber { ucontext_t start; jmp_buf at; bool is_begun, is_done; };
struct Block {
    std::vector<Fiber> fibers;
    std::vector<char> stacks;
    jmp_buf scheduler;
    ucontext_t caller;
    unsigned current;
    void (*body)(void*);
    void* state;
    int votes[2];     // of the current barrier: number of true votes
    unsigned phase;
    std::vector<u_int64_t> exchanged;
};
static thread_local Block block;

// A coroutine lives as long as its CPU thread, and runs its part of one block after another.
static void run_fiber() {
    for (;;) {
        block.body(block.state);
        block.fibers[block.current].is_done = true;
        if (!_setjmp(block.fibers[block.current].at)) _longjmp(block.scheduler, 1);
    }
}

static void resume(unsigned number) {
    Fiber& fiber = block.fibers[number];
    block.current = number;
    threadIdx.x = number;
    if (_setjmp(block.scheduler)) return;
    if (fiber.is_begun) _longjmp(fiber.at, 1);
    fiber.is_begun = true;
    setcontext(&fiber.start);
}

static void barrier() {
    if (!_setjmp(block.fibers[block.current].at)) _longjmp(block.scheduler, 1);
}

static int count_of(int predicate) {
    unsigned phase = block.phase & 1;
    block.votes[phase] += predicate != 0;
    barrier();
    return block.votes[phase];
}

static void make_fibers(unsigned threads) {
    block.fibers.resize(threads);
    block.stacks.resize(threads * STACK);
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = block.fibers[i];
        fiber.is_begun = false;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = block.stacks.data() + i * STACK;
        fiber.start.uc_stack.ss_size = STACK;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, run_fiber, 0);
    }
}

static void run_block(unsigned threads, int order, void (*body)(void*), void* state) {
    if (block.fibers.size() < threads) make_fibers(threads);
    block.exchanged.assign(threads, 0);
    block.body = body;
    block.state = state;
    block.votes[0] = block.votes[1] = 0;
    block.phase = 0;
    for (unsigned i = 0; i < threads; i++) block.fibers[i].is_done = false;
    for (bool is_running = true; is_running; block.phase++, block.votes[block.phase & 1] = 0) {
        is_running = false;
        for (unsigned i = 0; i < threads; i++) {
            unsigned number = order ? threads - 1 - i : i;
            if (!block.fibers[number].is_done) resume(number);
            is_running = is_running || !block.fibers[number].is_done;
        }
    }
}

template <class... A, size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}

template <class... A>
static void launch(void (*kernel)(A...), unsigned grid, unsigned threads, int order, void** arguments) {
    struct State { void (*kernel)(A...); void** arguments; } state{kernel, arguments};
    blockDim = {threads, 1, 1};
    gridDim = {grid, 1, 1};
    threadIdx = {0, 0, 0};
    for (unsigned number = 0; number < grid; number++) {
        blockIdx = {number, 0, 0};
        run_block(threads, order, [](void* given) {
            State* state = static_cast<State*>(given);
            call(state->kernel, state->arguments, std::index_sequence_for<A...>{});
        }, &state);
    }
}

template <class... A>
static int sizes_of(void (*)(A...), unsigned* sizes) {
    unsigned known[] = {0, (unsigned)sizeof(A)...};
    for (size_t i = 0; i < sizeof...(A); i++) sizes[i] = known[i + 1];
    return sizeof...(A);
}

// Value that thread `from` of the same warp contributed to this exchange.
template <class T>
static T exchange(T value, unsigned from) {
    u_int64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    block.exchanged[block.current] = bits;
    barrier();
    if (from < block.exchanged.size()) bits = block.exchanged[from];
    barrier();
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
}  // namespace host

static inline void __syncthreads() { host::barrier(); }
static inline int __syncthreads_count(int predicate) { return host::count_of(predicate); }
static inline int __syncthreads_or(int predicate) { return host::count_of(predicate) != 0; }
static inline int __syncthreads_and(int predicate) { return host::count_of(!predicate) == 0; }

// Whole warps only, and all warps of the block alike: a warp waits for the block here.
static inline void __syncwarp(unsigned = 0xFFFFFFFFu) { host::barrier(); }
template <class T> static T __shfl_sync(unsigned, T value, int lane, int = 32) {
    return host::exchange(value, (threadIdx.x & ~31u) + (lane & 31));
}
template <class T> static T __shfl_down_sync(unsigned, T value, unsigned by, int = 32) {
    return host::exchange(value, (threadIdx.x & 31) + by < 32 ? threadIdx.x + by : threadIdx.x);
}
template <class T> static T __shfl_up_sync(unsigned, T value, unsigned by, int = 32) {
    return host::exchange(value, (threadIdx.x & 31) >= by ? threadIdx.x - by : threadIdx.x);
}
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
    return host::exchange(value, threadIdx.x ^ mask);
}
static inline unsigned __ballot_sync(unsigned, int predicate) {
    unsigned result = 0;
    host::block.exchanged[host::block.current] = predicate != 0;
    host::barrier();
    unsigned first = threadIdx.x & ~31u;
    for (unsigned i = 0; i < 32 && first + i < host::block.exchanged.size(); i++)
        result |= (unsigned)host::block.exchanged[first + i] << i;
    host::barrier();
    return result;
}

template <class To, class From> static inline To bits_as(From value) {
    To result;
    static_assert(sizeof(To) == sizeof(From), "");
    std::memcpy(&result, &value, sizeof result);
    return result;
}
static inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
static inline float __uint_as_float(unsigned value) { return bits_as<float>(value); }
static inline int __float_as_int(float value) { return bits_as<int>(value); }
static inline float __int_as_float(int value) { return bits_as<float>(value); }
static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
static inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline unsigned long long __umul64hi(unsigned long long one, unsigned long long other) {
    return (unsigned long long)(((unsigned __int128)one * other) >> 64);
}
static inline unsigned __umulhi(unsigned one, unsigned other) { return (unsigned)(((u_int64_t)one * other) >> 32); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
template <class T> static inline T __ldg(const T* address) { return *address; }

// Coroutines share one CPU thread, so nothing runs between the read and the write.
template <class T, class V> static inline T atomicAdd(T* at, V value) { T old = *at; *at = old + (T)value; return old; }
template <class T, class V> static inline T atomicOr(T* at, V value) { T old = *at; *at = old | (T)value; return old; }
template <class T, class V> static inline T atomicAnd(T* at, V value) { T old = *at; *at = old & (T)value; return old; }
template <class T, class V> static inline T atomicExch(T* at, V value) { T old = *at; *at = (T)value; return old; }
template <class T, class V> static inline T atomicMax(T* at, V value) { T old = *at; if ((T)value > old) *at = (T)value; return old; }
template <class T, class V> static inline T atomicMin(T* at, V value) { T old = *at; if ((T)value < old) *at = (T)value; return old; }
template <class T> static inline T atomicCAS(T* at, T compare, T value) { T old = *at; if (old == compare) *at = value; return old; }
