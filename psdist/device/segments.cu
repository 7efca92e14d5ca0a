// Shared by all encoders of segments (psdist/device). A segment is a range of one tensor, the region; a table
// has one row per segment. A task is a piece of a segment: a quantization block, a chunk or a tile. Kernels are
// launched with one warp or one block of threads per task of the whole table.

#define MAGNITUDE_BITS 0x7FFFFFFFu
#define INFINITY_BITS 0x7F800000u
#define ROUND_TO_WHOLE 12582912.0f  // 1.5 * 2 ** 23: adding it rounds to an integer, ties to even.

// Row of the table, as written by psdist/device/coders.py.
struct Row {
    u64 base;    // elements of the flat vector before the region
    u64 size;    // elements of the region
    u64 start;   // the segment's elements of the region: [start, stop)
    u64 stop;
    u64 out;     // the address of the segment's body
    u64 region;  // the region's number
    u64 first;   // the number of the segment's first task
    u64 key;     // of the region's random numbers, or the number of elements to keep
};

// Return the row of a task: the last row that begins at the task or before it.
static __device__ __forceinline__ const Row* row_of(const Row* rows, u64 count, u64 task) {
    u64 low = 0, high = count;
    while (high - low > 1) {
        u64 middle = (low + high) / 2;
        if (rows[middle].first <= task) low = middle; else high = middle;
    }
    return rows + low;
}

// Flags of a region: its sum with the residual, or with the velocity, is not finite. `forgotten` uses the same bits.
#define RESIDUAL_OVERFLOWS 1u
#define VELOCITY_OVERFLOWS 2u

// Values of a region: the gradient, plus momentum * velocity, plus decay * residual. Each sum is rounded separately.
// residual is null without error feedback, velocity without momentum, and either if its sum was not finite: it is then
// discarded.
struct Source {
    const float* values;
    const float* residual;
    float decay;
    const float* velocity;
    float momentum;
    __device__ __forceinline__ float moved(u64 i) const {
        return velocity ? values[i] + velocity[i] * momentum : values[i];
    }
    __device__ __forceinline__ float at(u64 i) const { return residual ? moved(i) + residual[i] * decay : moved(i); }
    __device__ __forceinline__ u32 magnitude(u64 i) const { return __float_as_uint(at(i)) & MAGNITUDE_BITS; }
};

static __device__ __forceinline__ Source source_of(
    const Row* row, const float* values, const float* residual, const u32* forgotten, float decay,
    const float* velocity = nullptr, float momentum = 0.0f) {
    bool has_residual = residual && !(forgotten[row->region] & RESIDUAL_OVERFLOWS);
    bool has_velocity = velocity && !(forgotten[row->region] & VELOCITY_OVERFLOWS);
    return Source{
        values + row->base, has_residual ? residual + row->base : nullptr, decay,
        has_velocity ? velocity + row->base : nullptr, momentum};
}

static __device__ __forceinline__ u32 warp_max(u32 value) {
    for (int by = 16; by; by /= 2) {
        u32 other = __shfl_xor_sync(0xFFFFFFFFu, value, by);
        value = other > value ? other : value;
    }
    return value;
}

static __device__ __forceinline__ u64 less(u64 one, u64 other) { return one < other ? one : other; }
static __device__ __forceinline__ u64 more(u64 one, u64 other) { return one > other ? one : other; }
