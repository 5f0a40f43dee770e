// Vectors of eight floats, and the few operations that the kernels need: AVX2, or GCC vector extensions anywhere.
//
// Multiply-adds are written out, never left to the compiler: it could fuse them in one loop and not in another, and a
// row's bits would then depend on the loop that computed it. Compile with -ffp-contract=off.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__) && !defined(OUTRIDER_PORTABLE)
#include <immintrin.h>
#define HAVE_AVX2 1
#else
#define HAVE_AVX2 0
#endif

#define INLINE static inline __attribute__((always_inline))

enum { VECTOR = 8 };
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef uint16_t bf16;

INLINE v8 v8_set(float a) { return (v8){a, a, a, a, a, a, a, a}; }

INLINE v8 v8_load(const float *p) {
    v8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void v8_store(float *p, v8 v) { memcpy(p, &v, sizeof v); }

INLINE v8u v8u_load(const void *p) {
    v8u v;
    memcpy(&v, p, sizeof v);
    return v;
}

// a * b + c: fused with AVX2, rounded twice elsewhere; one of the two for a whole build.
INLINE v8 v8_fma(v8 a, v8 b, v8 c) {
#if HAVE_AVX2
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE v8 v8_select(v8i mask, v8 a, v8 b) { return (v8)((mask & (v8i)a) | (~mask & (v8i)b)); }

INLINE v8 v8_max(v8 a, v8 b) { return v8_select(a > b, a, b); }

INLINE float v8_max_of(v8 v) {
    float m = v[0];
    for (int i = 1; i < VECTOR; i++) m = v[i] > m ? v[i] : m;
    return m;
}

// Always the same tree.
INLINE float v8_sum_of(v8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// Sixteen bfloat16 at p: those with even and those with odd index. A float's upper half is a bfloat16.
INLINE v8 bf16_even(const bf16 *p) { return (v8)(v8u_load(p) << 16); }
INLINE v8 bf16_odd(const bf16 *p) { return (v8)(v8u_load(p) & 0xffff0000u); }

INLINE float bf16_to_float(bf16 b) {
    uint32_t bits = (uint32_t)b << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// To nearest, ties to even; NaN stays NaN.
INLINE bf16 float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (f != f) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float round_to_bf16(float f) { return bf16_to_float(float_to_bf16(f)); }

INLINE v8 v8_round_to_bf16(v8 v) {
    v8u bits = (v8u)v;
    v8u rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return v8_select(v == v, (v8)rounded, (v8)((bits & 0xffff0000u) | 0x400000u));
}

// Eight elements as they are kept, rounded where `round` asks for it.
INLINE v8 v8_rounded(v8 v, int round) { return round ? v8_round_to_bf16(v) : v; }

// e**x within 2 units in the last place; below -87 it is 0. Taylor's series to x**7 after taking out powers of two.
INLINE v8 v8_exp(v8 x) {
    const v8 magic = v8_set(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
    v8i tiny = x < v8_set(-87.0f);
    v8 bounded = v8_select(tiny, v8_set(-87.0f), v8_select(x > v8_set(88.0f), v8_set(88.0f), x));
    v8 shifted = v8_fma(bounded, v8_set(1.44269504f), magic);
    v8 n = shifted - magic;
    v8 r = v8_fma(n, v8_set(-0.693359375f), bounded);
    r = v8_fma(n, v8_set(2.12194440e-4f), r);
    v8 y = v8_set(1.0f / 5040);
    y = v8_fma(y, r, v8_set(1.0f / 720));
    y = v8_fma(y, r, v8_set(1.0f / 120));
    y = v8_fma(y, r, v8_set(1.0f / 24));
    y = v8_fma(y, r, v8_set(1.0f / 6));
    y = v8_fma(y, r, v8_set(0.5f));
    y = v8_fma(y, r, v8_set(1.0f));
    y = v8_fma(y, r, v8_set(1.0f));
    v8i power = ((v8i)shifted - (v8i)magic) << 23;
    return v8_select(tiny, v8_set(0.0f), (v8)((v8i)y + power));
}

INLINE float exp_of(float x) { return v8_exp(v8_set(x))[0]; }
