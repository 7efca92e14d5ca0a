// Encoders of SPARSE segments. The kept elements of a task (a chunk of the region within the segment, or a tile of the
// segment) form a bitmap that begins at the task's first element. They are selected and measured first, which gives
// the sizes of segments; then values and gaps are written. Magnitudes are compared as float32 bits without the sign.
// Ties keep the first; zeros are never kept.

#define HISTOGRAM_TILE 16384

// Kept elements of a task. Positions are relative to the segment's first element.
struct Kept {
    u32 count;
    u32 bytes;     // of the gaps, without the part of the first one before the task
    u32 first;
    u32 last;
    u32 value_at;  // values of the segment before this task
    u32 gap_at;    // bytes of gaps before this task
    u32 previous;  // start of the gap before the first element
    u32 scale;     // bits of the scale
};

// State of the search for the largest elements of a region.
struct Search {
    u32 prefix;     // upper bits of the threshold, as far as known; finally the threshold
    u32 remaining;  // number of elements to keep among those with this prefix
    u32 ties;       // number of elements with this prefix
    u32 unused;
    u64 ties_stop;  // elements equal to the threshold are not kept from this position on
};

// Return the sum of `value` over the threads of a block of at most 8 warps.
static __device__ __forceinline__ u32 block_sum(u32 value, u32* sums) {
    for (int by = 16; by; by /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, by);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    u32 total = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) total += sums[i];
    __syncthreads();
    return total;
}

static __device__ __forceinline__ u32 block_max(u32 value, u32* found) {
    value = warp_max(value);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = value;
    __syncthreads();
    u32 most = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) most = found[i] > most ? found[i] : most;
    __syncthreads();
    return most;
}

// Remove the last `surplus` positions of `ties` from a bitmap. For one thread.
static __device__ void drop_ties(u32* words, u32* ties, u32 count, u32 surplus) {
    for (u32 w = count; surplus && w--;) {
        for (; surplus && ties[w]; surplus--) {
            u32 last = 1u << (31 - __clz((int)ties[w]));
            ties[w] ^= last;
            words[w] ^= last;
        }
    }
}

// Return the scale with the least squared error, given the split into small and large values at 1.2 times the mean.
// For one thread.
static __device__ float scale_of_2_bits(const Source& source, u64 begin, const u32* words, u32 count) {
    double total = 0.0, above = 0.0, squares = 0.0;
    u32 kept = 0;
    for (u32 w = 0; w < count; w++)
        for (u32 left = words[w]; left; left &= left - 1, kept++)
            total += (double)__uint_as_float(source.magnitude(begin + 32 * w + __ffs((int)left) - 1));
    double split = total / (double)(kept ? kept : 1) * 1.2;
    for (u32 w = 0; w < count; w++) {
        for (u32 left = words[w]; left; left &= left - 1) {
            double magnitude = (double)__uint_as_float(source.magnitude(begin + 32 * w + __ffs((int)left) - 1));
            double factor = magnitude > split ? 2.0 : 1.0;
            above += magnitude * factor;
            squares += factor * factor;
        }
    }
    float scale = (float)(above / (squares > 1.0 ? squares : 1.0)), top = __uint_as_float(0x7F7FFFFFu) / 2.0f;
    return scale < top ? scale : top;
}

// Return the part of a bitmap's word w that is in [low, high), counted from the bitmap's first element.
static __device__ __forceinline__ u32 mask_of(u32 w, u64 low, u64 high) {
    u64 origin = 32ull * w, from = more(low, origin), to = less(high, origin + 32);
    if (from >= to) return 0;
    u32 below = to - origin == 32 ? 0xFFFFFFFFu : (1u << (to - origin)) - 1;
    return below & ~((1u << (from - origin)) - 1);
}

// Select the `kept` largest elements of each chunk, or the proportional share of a shorter one. One block of 1 or 8
// warps per chunk. The first 16 magnitudes of each thread stay in registers; the others are read again.
extern "C" __global__ void __launch_bounds__(256) select_chunks(
    const float* values, const float* residual, float* after, const Row* rows, u64 count, u32* flags,
    const u32* forgotten, u32* bitmaps, Kept* kept_of, float decay, u32 chunk, u32 kept, u32 bits) {
    __shared__ u32 words[2048], ties[2048], sums[8];
    const Row* row = row_of(rows, count, blockIdx.x);
    Source source = source_of(row, values, residual, forgotten, decay);
    u64 begin = (row->start / chunk + (blockIdx.x - row->first)) * chunk, end = less(begin + chunk, row->size);
    u32 size = (u32)(end - begin), share = (u32)(((u64)kept * size + chunk - 1) / chunk);
    u64 low = more(begin, row->start) - begin, high = less(end, row->stop) - begin;
    u32 mine[16], most = 0, width = blockDim.x;
#pragma unroll
    for (u32 j = 0; j < 16; j++) {
        u32 i = width * j + threadIdx.x;
        float value = i < size ? source.at(begin + i) : 0.0f;
        mine[j] = __float_as_uint(value) & MAGNITUDE_BITS;
        most = mine[j] > most ? mine[j] : most;
        if (after && i >= low && i < high) after[row->base + begin + i] = value;
    }
    for (u32 i = 16 * width + threadIdx.x; i < size; i += width) {
        float value = source.at(begin + i);
        u32 magnitude = __float_as_uint(value) & MAGNITUDE_BITS;
        most = magnitude > most ? magnitude : most;
        if (after && i >= low && i < high) after[row->base + begin + i] = value;
    }
    most = block_max(most, sums);
    if (most >= INFINITY_BITS && threadIdx.x == 0) flags[row->region] = 1;
    u32 least = 0, beyond = most + 1, found = size;
    while (found != share && beyond - least > 1) {
        u32 middle = least + (beyond - least) / 2, mine_from = 0;
#pragma unroll
        for (u32 j = 0; j < 16; j++) mine_from += mine[j] >= middle;
        for (u32 i = 16 * width + threadIdx.x; i < size; i += width) mine_from += source.magnitude(begin + i) >= middle;
        u32 counted = block_sum(mine_from, sums);
        if (counted >= share) { least = middle; found = counted; } else { beyond = middle; }
    }
    u32 threshold = least ? least : 1, all = 0;
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 j = 0; j < 16; j++) {
        if (width * j < size) {
            u32 word = __ballot_sync(0xFFFFFFFFu, mine[j] >= threshold);
            u32 equal = __ballot_sync(0xFFFFFFFFu, mine[j] == threshold);
            if (lane == 0) { words[(width * j + threadIdx.x) / 32] = word; ties[(width * j + threadIdx.x) / 32] = equal; }
            all += __popc(word);
        }
    }
    for (u32 first = 16 * width; first < size; first += width) {
        u32 i = first + threadIdx.x, magnitude = i < size ? source.magnitude(begin + i) : 0;
        u32 word = __ballot_sync(0xFFFFFFFFu, magnitude >= threshold);
        u32 equal = __ballot_sync(0xFFFFFFFFu, magnitude == threshold);
        if (lane == 0) { words[i / 32] = word; ties[i / 32] = equal; }
        all += __popc(word);
    }
    all = block_sum(lane == 0 ? all : 0, sums);
    u32 used = (size + 31) / 32;
    if (threadIdx.x == 0) {
        if (all > share) drop_ties(words, ties, used, all - share);
        float top = __uint_as_float(0x7F7FFFFFu) / 128.0f, scale = __uint_as_float(most) / 127.0f;
        scale = scale < top ? scale : top;
        if (bits == 2) scale = scale_of_2_bits(source, begin, words, used);
        kept_of[blockIdx.x].scale = __float_as_uint(scale);
    }
    __syncthreads();
    u32 stride = (chunk + 31) / 32;
    u32* bitmap = bitmaps + (u64)blockIdx.x * stride;
    for (u32 w = threadIdx.x; w < stride; w += width) bitmap[w] = w < used ? words[w] & mask_of(w, low, high) : 0;
}

// Count, per region, the magnitudes with each digit, among those that begin with the known prefix of the threshold. A
// row is a whole region. bins: 2048 per row, zeroed. digit: number of its bits, from `shift` up.
extern "C" __global__ void __launch_bounds__(256) count_digits(
    const float* values, const float* residual, const Row* rows, u64 count, u32* flags, const u32* forgotten,
    const Search* searches, u32* bins, float decay, const float* velocity, float momentum, u32 shift, u32 digit) {
    __shared__ u32 counts[2048];
    const Row* row = row_of(rows, count, blockIdx.x);
    Source source = source_of(row, values, residual, forgotten, decay, velocity, momentum);
    u32 mask = (1u << digit) - 1, prefix = searches[row - rows].prefix, most = 0, found = 0;
    for (u32 i = threadIdx.x; i < 2048; i += 256) counts[i] = 0;
    __syncthreads();
    u64 low = (blockIdx.x - row->first) * HISTOGRAM_TILE, high = less(low + HISTOGRAM_TILE, row->size);
    for (u64 i = low + threadIdx.x; i < high; i += 256) {
        u32 magnitude = source.magnitude(i);
        most = magnitude > most ? magnitude : most;
        if ((u64)magnitude >> (shift + digit) == prefix) atomicAdd(&counts[magnitude >> shift & mask], 1u);
        if (source.velocity && !is_finite(source.moved(i))) found = VELOCITY_OVERFLOWS;
    }
    if (most >= INFINITY_BITS) atomicOr(&flags[row->region], found | RESIDUAL_OVERFLOWS);
    __syncthreads();
    u32* mine = bins + (row - rows) * 2048ull;
    for (u32 i = threadIdx.x; i < 2048; i += 256)
        if (counts[i]) atomicAdd(&mine[i], counts[i]);
}

// Choose the next digit of each region's threshold, one block per region. Zeroes bins.
extern "C" __global__ void __launch_bounds__(256) choose_digit(
    const Row* rows, Search* searches, u32* bins, u32 digit, u32 is_first, u32 is_last) {
    __shared__ u32 sums[256];
    u32* mine = bins + blockIdx.x * 2048ull;
    u32 sum = 0;
    for (u32 i = 0; i < 8; i++) sum += mine[8 * threadIdx.x + i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        Search search = searches[blockIdx.x];
        if (is_first) search.remaining = (u32)rows[blockIdx.x].key;
        u32 group = 255;
        for (; group && sums[group] < search.remaining; group--) search.remaining -= sums[group];
        u32 chosen = 8 * group + 7;
        for (; chosen > 8 * group && mine[chosen] < search.remaining; chosen--) search.remaining -= mine[chosen];
        search.prefix = search.prefix << digit | chosen;
        search.ties = mine[chosen];
        if (is_last) {
            search.ties_stop = rows[blockIdx.x].size;
            if (search.prefix == 0) { search.prefix = 1; search.ties = search.remaining = 0; }
        }
        searches[blockIdx.x] = search;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 2048; i += 256) mine[i] = 0;
}

// Count the elements of a tile that equal the threshold, if not all of them are kept.
extern "C" __global__ void __launch_bounds__(256) count_ties(
    const float* values, const float* residual, const Row* rows, u64 count, const u32* forgotten,
    const Search* searches, u32* counts, float decay, const float* velocity, float momentum) {
    __shared__ u32 sums[8];
    const Row* row = row_of(rows, count, blockIdx.x);
    const Search* search = searches + (row - rows);
    if (search->ties <= search->remaining) return;
    Source source = source_of(row, values, residual, forgotten, decay, velocity, momentum);
    u64 low = (blockIdx.x - row->first) * HISTOGRAM_TILE, high = less(low + HISTOGRAM_TILE, row->size);
    u32 mine = 0;
    for (u64 i = low + threadIdx.x; i < high; i += 256) mine += source.magnitude(i) == search->prefix;
    mine = block_sum(mine, sums);
    if (threadIdx.x == 0) counts[blockIdx.x] = mine;
}

// Find the position of the first tie that is not kept, one block per region. The owner of the gradient may write to it
// meanwhile, so there may be fewer ties than were counted: the search never leaves the region.
extern "C" __global__ void __launch_bounds__(256) find_ties_stop(
    const float* values, const float* residual, const Row* rows, const u32* forgotten, Search* searches,
    const u32* counts, float decay, const float* velocity, float momentum) {
    __shared__ u32 mine[256];
    __shared__ u64 tile;
    __shared__ u32 before;
    const Row* row = rows + blockIdx.x;
    Search* search = searches + blockIdx.x;
    if (search->ties <= search->remaining) return;
    Source source = source_of(row, values, residual, forgotten, decay, velocity, momentum);
    u64 tiles = (row->size + HISTOGRAM_TILE - 1) / HISTOGRAM_TILE;
    if (threadIdx.x == 0) {
        before = 0;
        for (tile = 0; tile + 1 < tiles && before + counts[row->first + tile] <= search->remaining; tile++)
            before += counts[row->first + tile];
    }
    __syncthreads();
    u64 low = tile * HISTOGRAM_TILE, per = HISTOGRAM_TILE / 256, begin = low + threadIdx.x * per;
    u32 ties = 0;
    for (u64 i = begin; i < less(begin + per, row->size); i++) ties += source.magnitude(i) == search->prefix;
    mine[threadIdx.x] = ties;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 left = search->remaining - before, part = 0;
        for (; part < 255 && mine[part] <= left; part++) left -= mine[part];
        u64 i = low + part * per;
        for (; i < row->size; i++)
            if (source.magnitude(i) == search->prefix && left-- == 0) break;
        search->ties_stop = less(i, row->size);
    }
}

// Select the elements above their region's threshold, one block per tile of 4096 elements. searches: by region.
extern "C" __global__ void __launch_bounds__(256) select_above(
    const float* values, const float* residual, float* after, const Row* rows, u64 count, const u32* forgotten,
    const Search* searches, u32* bitmaps, float decay, const float* velocity, float momentum, float* moved) {
    const Row* row = row_of(rows, count, blockIdx.x);
    Source source = source_of(row, values, residual, forgotten, decay, velocity, momentum);
    const Search* search = searches + row->key;
    u32 threshold = search->prefix;
    u64 begin = row->start + (blockIdx.x - row->first) * 4096;
    u32* bitmap = bitmaps + blockIdx.x * 128ull;
    for (u32 j = 0; j < 16; j++) {
        u64 i = begin + 256 * j + threadIdx.x;
        float value = i < row->stop ? source.at(i) : 0.0f;
        u32 magnitude = __float_as_uint(value) & MAGNITUDE_BITS;
        bool is_kept = magnitude > threshold || (magnitude == threshold && i < search->ties_stop);
        u32 word = __ballot_sync(0xFFFFFFFFu, is_kept);
        if (threadIdx.x % 32 == 0) bitmap[8 * j + threadIdx.x / 32] = word;
        if (after && i < row->stop) after[row->base + i] = value;
        if (moved && i < row->stop) moved[row->base + i] = source.moved(i);
    }
}

// Return the first element of a task, relative to the segment's first one: negative (wrapped) if a chunk begins before
// it.
static __device__ __forceinline__ u32 origin_of(const Row* row, u64 task, u32 chunk) {
    u64 number = task - row->first;
    return chunk ? (u32)((row->start / chunk + number) * chunk - row->start) : (u32)(number * 4096);
}

// Measure kept elements, one thread per task. chunk: 0 for tiles. stride: words of a task's bitmap.
extern "C" __global__ void __launch_bounds__(64) measure_kept(
    const Row* rows, u64 count, u64 tasks, const u32* bitmaps, Kept* kept_of, u32 chunk, u32 stride) {
    u64 task = blockIdx.x * 64ull + threadIdx.x;
    if (task >= tasks) return;
    u32 origin = origin_of(row_of(rows, count, task), task, chunk);
    const u32* bitmap = bitmaps + task * stride;
    Kept kept = kept_of[task];
    kept.count = kept.bytes = 0;
    for (u32 w = 0; w < stride; w++) {
        u32 word = bitmap[w];
        if (!word) continue;
        u32 first = origin + 32 * w + __ffs((int)word) - 1;
        if (kept.count) kept.bytes += (first - kept.last - 1) / 255; else kept.first = first;
        kept.count += __popc(word);
        kept.last = origin + 32 * w + 31 - __clz((int)word);
    }
    kept.bytes += kept.count;
    kept_of[task] = kept;
}

// Sum up what precedes each task, one thread per segment. totals: the segment's number of values and bytes of gaps.
extern "C" __global__ void __launch_bounds__(32) arrange_kept(
    const Row* rows, u64 count, u64 tasks, Kept* kept_of, u32* totals) {
    u64 segment = blockIdx.x * 32ull + threadIdx.x;
    if (segment >= count) return;
    u64 stop = segment + 1 < count ? rows[segment + 1].first : tasks;
    u32 values = 0, bytes = 0, previous = 0;
    for (u64 task = rows[segment].first; task < stop; task++) {
        Kept* kept = kept_of + task;
        kept->value_at = values;
        kept->gap_at = bytes;
        kept->previous = previous;
        if (kept->count) {
            bytes += kept->bytes + (kept->first - previous) / 255;
            previous = kept->last + 1;
        }
        values += kept->count;
    }
    totals[2 * segment] = values;
    totals[2 * segment + 1] = bytes;
}

// Return the code of a value, and the decoded value.
static __device__ __forceinline__ u32 code_of(float value, float scale, u32 bits, float* decoded) {
    if (bits == 8) {
        float x = scale > 0.0f ? value / scale : 0.0f;
        x = x > 127.0f ? 127.0f : x;
        x = x < -127.0f ? -127.0f : x;
        signed char code = (signed char)__float_as_uint(x + ROUND_TO_WHOLE);
        *decoded = (float)code * scale;
        return (u8)code;
    }
    bool is_negative = value < 0.0f, is_large = (value < 0.0f ? -value : value) > 1.5f * scale;
    *decoded = (is_large ? 2.0f : 1.0f) * (is_negative ? -1.0f : 1.0f) * scale;
    return (is_negative ? 2u : 0u) | (is_large ? 1u : 0u);
}

// Narrow to bfloat16; overflow becomes the largest finite value.
static __device__ __forceinline__ u16 finite_brain(float value) {
    u16 brain = narrow_brain(value);
    return (brain & 0x7FFF) == 0x7F80 ? (u16)(brain - 1) : brain;
}

// Write each task's part of the body, which was zeroed, one thread per task. scaled: elements per scale, or 0. The
// residual of kept values replaces the values in `after`; their velocity, in `moved`, becomes 0.
extern "C" __global__ void __launch_bounds__(64) write_kept(
    const float* values, const float* residual, float* after, const Row* rows, u64 count, u64 tasks,
    const u32* forgotten, const u32* bitmaps, const Kept* kept_of, const u32* totals, float decay, const float* velocity,
    float momentum, float* moved, u32 bits, u32 chunk, u32 stride, u32 scaled) {
    u64 task = blockIdx.x * 64ull + threadIdx.x;
    if (task >= tasks) return;
    const Row* row = row_of(rows, count, task);
    Source source = source_of(row, values, residual, forgotten, decay, velocity, momentum);
    Kept kept = kept_of[task];
    u32 sent = totals[2 * (row - rows)], gap_bytes = totals[2 * (row - rows) + 1];
    u32 scales = scaled ? (u32)((row->stop + scaled - 1) / scaled - row->start / scaled) : 0;
    u8* body = (u8*)row->out;
    u8* packed = body + 4 + 4ull * scales;
    u8* gaps = packed + ((u64)sent * bits + 7) / 8;
    bool is_raw = bits == 32 && 4 + 4ull * sent + gap_bytes > 4 * (row->stop - row->start);
    if (!is_raw && task == row->first) *(u32*)body = sent;
    if (scaled) ((u32*)(body + 4))[task - row->first] = kept.scale;
    float scale = __uint_as_float(kept.scale);
    u32 origin = origin_of(row, task, chunk), at = kept.value_at, previous = kept.previous;
    u8* gap_at = gaps + kept.gap_at;
    for (u32 w = 0; w < stride; w++) {
        for (u32 word = bitmaps[task * stride + w]; word; word &= word - 1, at++) {
            u32 place = origin + 32 * w + __ffs((int)word) - 1;
            float value = source.at(row->start + place), decoded = value;
            if (is_raw) {
                ((float*)body)[place] = value;
            } else if (bits == 32) {
                ((float*)packed)[at] = value;
            } else if (bits == 16) {
                ((u16*)packed)[at] = finite_brain(value);
                decoded = widen_brain(finite_brain(value));
            } else {
                u32 code = code_of(value, scale, bits, &decoded);
                if (bits == 8) packed[at] = (u8)code; else atomicOr((u32*)packed + at / 16, code << at % 16 * 2);
            }
            if (after) after[row->base + row->start + place] = bits == 32 ? 0.0f : value - decoded;
            if (moved) moved[row->base + row->start + place] = 0.0f;
            if (!is_raw) {
                u32 gap = place - previous;
                for (; gap >= 255; gap -= 255) *gap_at++ = 255;
                *gap_at++ = (u8)gap;
                previous = place + 1;
            }
        }
    }
}
