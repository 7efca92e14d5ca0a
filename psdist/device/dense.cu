// Encoders of segments whose size follows from their elements: casts, INTEGER and ONE_BIT. The results equal those of
// psdist/compression/segments, byte for byte. Output words shared by two tasks are zero before, and are combined by
// atomicOr.

// Return 32 random bits for `number` (psdist/compression/segments/random_numbers.py).
static __device__ __forceinline__ u32 draw(u32 low, u32 high, u32 number) {
    u32 x = number * 0x9E3779B9u + low;
    x = (x ^ x >> 16) * 0x21F0AAADu + high;
    x = (x ^ x >> 15) * 0x735A2D97u;
    return x ^ x >> 15;
}

// Map random bits to a float uniform in (-0.5, 0.5).
static __device__ __forceinline__ float centred(u32 bits) {
    return (float)(bits >> 8) * 5.9604644775390625e-08f - 0.49999997019767761f;  // 2 ** -24, 0.5 - 2 ** -25
}

// Store a word of `per_word` packed codes. This task owns its elements [from, to).
static __device__ __forceinline__ void store_codes(u8* packed, u64 word, u32 codes, u32 bits, u32 from, u32 to) {
    u32 per_word = 32 / bits;
    u32* at = (u32*)packed + word;
    if (from == 0 && to == per_word) {
        *at = codes;
    } else if (bits == 8) {
        for (u32 i = from; i < to; i++) ((u8*)at)[i] = (u8)(codes >> 8 * i);
    } else {
        atomicOr(at, codes);
    }
}

// Flag each region that has a magnitude with bits >= `limit` among elements [start, stop) of the segments.
extern "C" __global__ void __launch_bounds__(256) check_finite(
    const float* values, const float* residual, const Row* rows, u64 count, u32* flags, const u32* forgotten,
    float decay, const float* velocity, float momentum, u32 limit) {
    const Row* row = row_of(rows, count, blockIdx.x);
    Source source = source_of(row, values, residual, forgotten, decay, velocity, momentum);
    u64 low = row->start + (blockIdx.x - row->first) * 4096, high = less(low + 4096, row->stop);
    u32 most = 0, found = 0;
    for (u64 i = low + threadIdx.x; i < high; i += 256) {
        u32 magnitude = source.magnitude(i);
        most = magnitude > most ? magnitude : most;
        if (source.velocity && !is_finite(source.moved(i))) found = VELOCITY_OVERFLOWS;
    }
    if (most >= limit) atomicOr(&flags[row->region], found | RESIDUAL_OVERFLOWS);
}

// kind: 0 float32, 1 float16, 2 bfloat16. A tile has 4096 elements. Values are checked as they are sent.
extern "C" __global__ void __launch_bounds__(256) encode_casts(
    const float* values, const Row* rows, u64 count, u32* flags, u32 kind) {
    const Row* row = row_of(rows, count, blockIdx.x);
    u64 low = row->start + (blockIdx.x - row->first) * 4096, high = less(low + 4096, row->stop);
    bool is_bad = false;
    for (u64 i = low + threadIdx.x; i < high; i += 256) {
        float value = values[row->base + i];
        u64 at = i - row->start;
        if (kind == 0) {
            ((float*)row->out)[at] = value;
            is_bad |= !is_finite(value);
        } else {
            u16 word = kind == 1 ? narrow_half(value) : narrow_brain(value);
            u32 exponent = kind == 1 ? 0x7C00u : 0x7F80u;
            ((u16*)row->out)[at] = word;
            is_bad |= (word & exponent) == exponent;
        }
    }
    if (is_bad) flags[row->region] = 1;
}

// One warp per quantization block. after: receives the residual, unless it is null.
extern "C" __global__ void __launch_bounds__(128) encode_integers(
    const float* values, const float* residual, float* after, const Row* rows, u64 count, u64 tasks, u32* flags,
    const u32* forgotten, float decay, u32 bits, u32 block, u32 stochastic) {
    u64 task = blockIdx.x * 4ull + threadIdx.x / 32;
    bool is_task = task < tasks;
    const Row* row = row_of(rows, count, is_task ? task : 0);
    Source source = source_of(row, values, residual, forgotten, decay);
    u32 lane = threadIdx.x % 32;
    u64 number = is_task ? task - row->first : 0;  // of the quantization block, in the segment
    u64 begin = (row->start / block + number) * block, end = less(begin + block, row->size);
    u32 most = 0;
    for (u64 i = begin + lane; i < end; i += 32) {
        u32 magnitude = source.magnitude(i);
        most = magnitude > most ? magnitude : most;
    }
    most = warp_max(most);
    if (!is_task) return;
    if (most >= INFINITY_BITS) {
        if (lane == 0) flags[row->region] = 1;
        return;
    }
    float limit = (float)((1 << (bits - 1)) - 1), top = __uint_as_float(0x7F7FFFFFu - ((bits - 1) << 23));
    float scale = __uint_as_float(most) / limit;
    scale = scale < top ? scale : top;
    float divisor = scale > 0.0f ? scale : 1.0f;
    u64 blocks = (row->stop + block - 1) / block - row->start / block;
    u8* body = (u8*)row->out;
    if (lane == 0) ((float*)body)[number] = scale;
    u32 low_key = (u32)row->key + (u32)(begin >> 32) * 0x85EBCA6Bu, high_key = (u32)(row->key >> 32);
    u32 per_word = 32 / bits, mask = (1u << bits) - 1;
    u64 low = more(begin, row->start), high = less(end, row->stop);
    for (u64 word = (low - row->start) / per_word + lane; word <= (high - 1 - row->start) / per_word; word += 32) {
        u64 origin = row->start + word * per_word;
        u32 from = origin < low ? (u32)(low - origin) : 0;
        u32 to = high - origin < per_word ? (u32)(high - origin) : per_word;
        u32 codes = 0;
        for (u32 j = from; j < to; j++) {
            u64 i = origin + j;
            float value = source.at(i), x = value / divisor;
            if (stochastic) x = x + centred(draw(low_key, high_key, (u32)i));
            x = x > limit ? limit : x;
            x = x < -limit ? -limit : x;
            signed char code = (signed char)__float_as_uint(x + ROUND_TO_WHOLE);
            codes |= ((u32)code & mask) << (bits * j);
            if (after) after[row->base + i] = value - (float)code * scale;
        }
        store_codes(body + 4 * blocks, word, codes, bits, from, to);
    }
}

// 16 threads per quantization block. Each sums up one lane: element i of a block belongs to lane i % 16.
extern "C" __global__ void __launch_bounds__(128) encode_signs(
    const float* values, const float* residual, float* after, const Row* rows, u64 count, u64 tasks, u32* flags,
    const u32* forgotten, float decay, u32 block) {
    __shared__ double sums[128];
    u64 task = blockIdx.x * 8ull + threadIdx.x / 16;
    bool is_task = task < tasks;
    const Row* row = row_of(rows, count, is_task ? task : 0);
    Source source = source_of(row, values, residual, forgotten, decay);
    u32 lane = threadIdx.x % 16;
    u64 number = is_task ? task - row->first : 0;
    u64 begin = (row->start / block + number) * block, end = less(begin + block, row->size);
    double sum = 0.0;
    bool is_bad = false;
    for (u64 i = begin + lane; i < end; i += 16) {
        u32 magnitude = source.magnitude(i);
        is_bad |= magnitude >= INFINITY_BITS;
        sum += (double)__uint_as_float(magnitude);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (!is_task) return;
    if (is_bad) flags[row->region] = 1;
    double total = 0.0;
    for (u32 i = 0; i < 16; i++) total += sums[threadIdx.x - lane + i];
    u32 scale = __float_as_uint((float)(total / (double)(end - begin)));
    u64 blocks = (row->stop + block - 1) / block - row->start / block;
    u8* body = (u8*)row->out;
    if (lane == 0) ((u32*)body)[number] = scale;
    u64 low = more(begin, row->start), high = less(end, row->stop);
    for (u64 word = (low - row->start) / 32 + lane; word <= (high - 1 - row->start) / 32; word += 16) {
        u64 origin = row->start + word * 32;
        u32 from = origin < low ? (u32)(low - origin) : 0;
        u32 to = high - origin < 32 ? (u32)(high - origin) : 32;
        u32 codes = 0;
        for (u32 j = from; j < to; j++) {
            float value = source.at(origin + j);
            u32 sign = __float_as_uint(value) >> 31;
            codes |= sign << j;
            if (after) after[row->base + origin + j] = value - __uint_as_float(scale | sign << 31);
        }
        store_codes(body + 4 * blocks, word, codes, 1, from, to);
    }
}

// Copy tensors to their positions in the flat vector. out: address of a tensor. A tile has 4096 elements.
extern "C" __global__ void __launch_bounds__(256) gather(float* vector, const Row* rows, u64 count) {
    const Row* row = row_of(rows, count, blockIdx.x);
    u64 low = row->start + (blockIdx.x - row->first) * 4096, high = less(low + 4096, row->stop);
    for (u64 i = low + threadIdx.x; i < high; i += 256) vector[row->base + i] = ((const float*)row->out)[i];
}

// Convert float64 to float32 and back, one tile of 4096 elements per block. CuPy's own conversions flush denormals.
extern "C" __global__ void __launch_bounds__(256) narrow_doubles(const double* from, float* to, u64 size) {
    u64 low = blockIdx.x * 4096ull, high = less(low + 4096, size);
    for (u64 i = low + threadIdx.x; i < high; i += 256) to[i] = (float)from[i];
}
extern "C" __global__ void __launch_bounds__(256) widen_floats(const float* from, double* to, u64 size) {
    u64 low = blockIdx.x * 4096ull, high = less(low + 4096, size);
    for (u64 i = low + threadIdx.x; i < high; i += 256) to[i] = (double)from[i];
}

// Copy elements [start, stop) of the rows from one vector to another.
extern "C" __global__ void __launch_bounds__(256) copy_ranges(
    const float* from, float* to, const Row* rows, u64 count) {
    const Row* row = row_of(rows, count, blockIdx.x);
    u64 low = row->start + (blockIdx.x - row->first) * 4096, high = less(low + 4096, row->stop);
    for (u64 i = low + threadIdx.x; i < high; i += 256) to[row->base + i] = from[row->base + i];
}
