// The kernels of a server's device: the mean of contributions and an optimizer's arithmetic in one pass over memory.
// psdist_server/kernels/device_parameters.py adds constants and casts before this text, and the optimizers after it.
//
// A block of threads handles BLOCK elements of a range whose elements have the same scalars, like the processor's kernels
// (psdist_server/kernels/means.py): contributions are added in order, and the sum is divided. If everything is finite,
// the weights and the state are updated. Otherwise the mean is recomputed from the contributions that are finite in this
// block, and `flags` is set for the others. A block whose mean is still not finite is not updated, and NaN is written to
// `mean`.
//
// `staged` is the data copied from the host. For each contribution: the offset of its values, in bytes from `staged`, and
// their type (0 float32, 1 float16, 2 bfloat16), u64 each. From `first_flag`: one zero byte per contribution. Then the
// values. So a contribution has the same values however often it is read.
//
// The kernels work for any number of threads. A thread writes and reads the same elements of `values`.

struct Arrays { float* at[ARRAYS]; };
struct Scalars { float at[SCALARS]; };
struct Division { float divisor, factor; };
#define BATCH 4

struct Staged {
    const u8* start;
    u8* flags;
    int count;

    __device__ const u8* values(int part) const { return start + ((const u64*)start)[2 * part]; }
    __device__ int type(int part) const { return (int)((const u64*)start)[2 * part + 1]; }
};

// Call use(i, widened element) for a thread's elements among `size`. BATCH of them are read before the first is used, so
// that the thread waits for memory once for all of them.
template <class Item, class Widen, class Use>
static __device__ __forceinline__ void for_each(const Item* items, int size, Widen widen, Use use) {
    for (int base = threadIdx.x; base < size; base += BATCH * blockDim.x) {
        Item batch[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int i = base + b * blockDim.x;
            if (i < size) batch[b] = items[i];
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int i = base + b * blockDim.x;
            if (i < size) use(i, widen(batch[b]));
        }
    }
}

// Do the same for the elements of a contribution from `first`.
template <class Use>
static __device__ __forceinline__ void for_each_value(Staged staged, int part, i64 first, int size, Use use) {
    const u8* values = staged.values(part);
    int type = staged.type(part);
    if (type == 0) {
        for_each((const float*)values + first, size, [](float value) { return value; }, use);
    } else if (type == 1) {
        for_each((const u16*)values + first, size, [](u16 half) { return widen_half(half); }, use);
    } else {
        for_each((const u16*)values + first, size, [](u16 brain) { return widen_brain(brain); }, use);
    }
}

static __device__ __forceinline__ float divided(float sum, Division by) {
    return by.divisor == 0.0f ? sum * by.factor : sum / by.divisor;
}

// Compute the mean into `values`. Returns true if this thread's elements are finite.
static __device__ __noinline__ bool add_up(float* values, Staged staged, i64 first, int size, Division by) {
    for (int part = 0; part + 1 < staged.count; part++) {
        for_each_value(staged, part, first, size, [=](int i, float value) {
            values[i] = part == 0 ? value : values[i] + value;
        });
    }
    bool finite = true;
    bool alone = staged.count == 1;
    for_each_value(staged, staged.count - 1, first, size, [=, &finite](int i, float value) {
        float mean = divided(alone ? value : values[i] + value, by);
        values[i] = mean;
        finite = finite && is_finite(mean);
    });
    return finite;
}

// Compute the mean of the contributions that are finite in this block. Returns true if there is one and it is finite.
static __device__ __noinline__ bool add_up_finite(float* values, Staged staged, i64 first, int size, Division by) {
    int good = 0;
    for (int part = 0; part < staged.count; part++) {
        bool finite = true;
        for_each_value(staged, part, first, size, [&finite](int, float value) { finite = finite && is_finite(value); });
        if (__syncthreads_or(!finite)) {
            if (threadIdx.x == 0) staged.flags[part] = 1;
            continue;
        }
        bool is_first = good == 0;
        for_each_value(staged, part, first, size, [=](int i, float value) {
            values[i] = is_first ? value : values[i] + value;
        });
        good++;
    }
    if (good == 0) return false;
    Division division = {(float)good, 0.0f};
    if (by.divisor == 0.0f && (good == staged.count || by.factor == 1.0f)) division = by;
    bool finite = true;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        values[i] = divided(values[i], division);
        finite = finite && is_finite(values[i]);
    }
    return !__syncthreads_or(!finite);
}

template <class Element>
static __device__ __forceinline__ void update(
    Arrays arrays, i64 size, Staged staged, Division by, float* mean, Scalars scalars
) {
    __shared__ float values[BLOCK];
    i64 first = (i64)blockIdx.x * BLOCK;
    int here = (int)(size - first < BLOCK ? size - first : BLOCK);
    bool is_updated = !__syncthreads_or(!add_up(values, staged, first, here, by));
    if (!is_updated) is_updated = add_up_finite(values, staged, first, here, by);
    if (mean != nullptr) {
        for (int i = threadIdx.x; i < here; i += blockDim.x)
            mean[first + i] = is_updated ? values[i] : __uint_as_float(NAN_BITS);
    }
    if (!is_updated) return;
    for (int base = threadIdx.x; base < here; base += BATCH * blockDim.x) {
        float batch[BATCH][Element::COUNT];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int i = base + b * blockDim.x;
#pragma unroll
            for (int array = 0; array < Element::COUNT; array++)
                if (i < here) batch[b][array] = arrays.at[array][first + i];
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int i = base + b * blockDim.x;
            if (i >= here) continue;
            Element::update(batch[b], values[i], scalars);
#pragma unroll
            for (int array = 0; array < Element::COUNT; array++) arrays.at[array][first + i] = batch[b][array];
        }
    }
}

// Compute the mean alone. Sets a flag if it is not finite.
extern "C" __global__ void __launch_bounds__(THREADS) combine(
    i64 size, const u8* staged, u64 first_flag, i64 count, float divisor, float factor, float* mean
) {
    __shared__ float values[BLOCK];
    Staged contributions = {staged, (u8*)staged + first_flag, (int)count};
    i64 first = (i64)blockIdx.x * BLOCK;
    int here = (int)(size - first < BLOCK ? size - first : BLOCK);
    if (!add_up(values, contributions, first, here, {divisor, factor})) contributions.flags[0] = 1;
    for (int i = threadIdx.x; i < here; i += blockDim.x) mean[first + i] = values[i];
}

// Add squares to `lanes`, element i to lane i % SUM_LANES, in ascending order. One block; size: any in the last call.
extern "C" __global__ void __launch_bounds__(THREADS) sum_squares(const float* values, i64 size, double* lanes) {
    for (i64 lane = threadIdx.x; lane < SUM_LANES; lane += blockDim.x) {
        double sum = lanes[lane];
#pragma unroll 8
        for (i64 i = lane; i < size; i += SUM_LANES) {
            double value = (double)values[i];
            sum = sum + value * value;
        }
        lanes[lane] = sum;
    }
}

// Convert weights to the wire's 16-bit types. type: as in `staged`.
extern "C" __global__ void __launch_bounds__(THREADS) narrow(const float* weights, u16* out, i64 size, i64 type) {
    i64 first = (i64)blockIdx.x * BLOCK;
    int here = (int)(size - first < BLOCK ? size - first : BLOCK);
#pragma unroll 4
    for (int i = threadIdx.x; i < here; i += blockDim.x)
        out[first + i] = type == 1 ? narrow_half(weights[first + i]) : narrow_brain(weights[first + i]);
}
