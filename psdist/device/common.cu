// Casts between float32 and the 16-bit types of the wire, on their bits: the same bytes as psdist/compression/casts.py
// (NaN stays NaN, with unspecified payload bits). Sources that use them are appended to this text. Everything is
// compiled without contraction, and with denormals (psdist/device/device.py).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define EXPONENT_BITS 0x7F800000u
#define NAN_BITS 0x7FC00000u

static __device__ __forceinline__ bool is_finite(float value) {
    return (__float_as_uint(value) & EXPONENT_BITS) != EXPONENT_BITS;
}

// Widen float16 bits to float32, exactly: shift into place, then multiply by the difference of the exponent biases,
// which also normalizes denormals.
static __device__ __forceinline__ float widen_half(u16 half) {
    u32 shifted = (u32)(half & 0x7FFFu) << 13;
    u32 finite = __float_as_uint(__uint_as_float(shifted) * 5192296858534827628530496329220096.0f);  // 2 ** 112
    u32 magnitude = shifted >= (0x7C00u << 13) ? shifted | EXPONENT_BITS : finite;
    return __uint_as_float(magnitude | ((u32)(half & 0x8000u) << 16));
}

// Widen bfloat16 bits to float32, exactly: they are its upper half.
static __device__ __forceinline__ float widen_brain(u16 brain) {
    return __uint_as_float((u32)brain << 16);
}

// Narrow float32 to float16 bits, to nearest, ties to even. Overflow becomes infinity.
static __device__ __forceinline__ u16 narrow_half(float value) {
    u32 bits = __float_as_uint(value);
    u32 sign = bits & 0x80000000u;
    u32 magnitude = bits ^ sign;
    u32 result;
    if (magnitude >= (u32)(127 + 16) << 23) {
        result = magnitude > EXPONENT_BITS ? 0x7E00u : 0x7C00u;
    } else if (magnitude < (u32)(127 - 14) << 23) {
        // The addition rounds: the last place of its result is the last denormal place of float16.
        u32 denormal = (u32)(127 - 15 + 23 - 10 + 1) << 23;
        result = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(denormal)) - denormal;
    } else {
        u32 odd = (magnitude >> 13) & 1u;
        result = (magnitude + ((u32)((15 - 127) * (1 << 23)) + 0xFFFu) + odd) >> 13;
    }
    return (u16)(result | (sign >> 16));
}

// Narrow float32 to bfloat16 bits, to nearest, ties to even. NaN keeps its sign.
static __device__ __forceinline__ u16 narrow_brain(float value) {
    u32 bits = __float_as_uint(value);
    u32 upper = bits >> 16;
    if ((bits & 0x7FFFFFFFu) > EXPONENT_BITS) return (u16)((upper & 0x8000u) | 0x7FC0u);
    return (u16)((bits + 0x7FFFu + (upper & 1u)) >> 16);
}
