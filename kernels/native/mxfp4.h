// Tiles of linear.h for MXFP4 weights: 4-bit floats in groups of 32 inputs that share a power of two.
//
// A panel holds, for each group, the scale byte of each of its outputs, then for each pair of inputs one byte of each
// output, as published: the first of the pair in the low four bits. A weight is dequantised in registers, exactly, and
// then goes through the multiply-adds that a bfloat16 weight of that value would go through.
#pragma once

#include "common.h"

enum { GROUP = 32, GROUP_ROWS = 1 + GROUP / 2 };  // rows of PANEL bytes that a group takes

typedef int32_t codes __attribute__((vector_size(4 * WIDE)));

// WIDE bytes, and the value that the lowest four bits of each stand for.
#if HAVE_AVX2 && defined(__AVX512F__) && (!defined(OUTRIDER_WIDE) || OUTRIDER_WIDE == 16)
INLINE codes codes_load(const uint8_t *p) { return (codes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE wide codes_value(codes c) {
    const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return (wide)_mm512_permutexvar_ps((__m512i)c, values);
}
#elif HAVE_AVX2 && (!defined(OUTRIDER_WIDE) || OUTRIDER_WIDE == 8)
INLINE codes codes_load(const uint8_t *p) { return (codes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
// Three bits look up the magnitude, the fourth is the sign.
INLINE wide codes_value(codes c) {
    const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    __m256 sign = (__m256)((c & 8) << 28);
    return (wide)_mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, (__m256i)c), sign);
}
#else
INLINE codes codes_load(const uint8_t *p) {
    codes c;
    for (int i = 0; i < WIDE; i++) c[i] = p[i];
    return c;
}
INLINE wide codes_value(codes c) {
    static const float values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    wide v;
    for (int i = 0; i < WIDE; i++) v[i] = values[c[i] & 15];
    return v;
}
#endif

// 2**(code - 127): the code is the exponent of a float, but for 0, which stands below the normal numbers.
INLINE wide codes_scale(codes c) { return (wide)((c << 23) | ((codes)(c == 0) & (1 << 22))); }

#define LOAD_SCALES(P, ROWS)                                                 \
    const uint8_t *group##P = weights + P * panel_size + g * GROUP_ROWS * PANEL; \
    const wide s##P##_0 = codes_scale(codes_load(group##P)), s##P##_1 = codes_scale(codes_load(group##P + WIDE));
#define STEP_PACKED_PANEL(P, ROWS)                                           \
    {                                                                        \
        const uint8_t *w = group##P + (1 + j) * PANEL;                       \
        __builtin_prefetch((const char *)w + PREFETCH_##ROWS / 2);           \
        codes c0 = codes_load(w), c1 = codes_load(w + WIDE);                 \
        wide w0 = codes_value(c0) * s##P##_0, w1 = codes_value(c1) * s##P##_1;               \
        EACH_ROW_##ROWS(STEP, P, 0)                                          \
        w0 = codes_value(c0 >> 4) * s##P##_0;                                \
        w1 = codes_value(c1 >> 4) * s##P##_1;                                \
        EACH_ROW_##ROWS(STEP, P, 1)                                          \
    }

#define DEFINE_PACKED_TILE(ROWS, PANELS)                                                                  \
    static __attribute__((noinline)) void tile_mxfp4_##ROWS##x##PANELS(                                   \
        const void *packed, const float *restrict x, int64_t inputs, float *restrict tile) {              \
        const uint8_t *weights = packed;                                                                  \
        const int64_t panel_size = inputs / GROUP * GROUP_ROWS * PANEL, tile_stride = (PANELS) * PANEL;   \
        for (int64_t start = 0; start < inputs; start += SPAN) {                                          \
            int64_t stop = start + SPAN < inputs ? start + SPAN : inputs;                                 \
            EACH_PANEL_##PANELS(DECLARE_PANEL, mxfp4, ROWS)                                               \
            for (int64_t g = start / GROUP; g < stop / GROUP; g++) {                                      \
                EACH_PANEL_##PANELS(LOAD_SCALES, ROWS)                                                    \
                for (int64_t j = 0; j < GROUP / 2; j++) {                                                 \
                    int64_t k = g * GROUP + 2 * j;                                                        \
                    EACH_PANEL_##PANELS(STEP_PACKED_PANEL, ROWS)                                          \
                }                                                                                         \
            }                                                                                             \
            EACH_PANEL_##PANELS(ADD_PANEL, mxfp4, ROWS)                                                   \
        }                                                                                                 \
    }

DEFINE_PACKED_TILE(1, 4) DEFINE_PACKED_TILE(1, 2) DEFINE_PACKED_TILE(1, 1)
DEFINE_PACKED_TILE(2, 2) DEFINE_PACKED_TILE(2, 1) DEFINE_PACKED_TILE(3, 2) DEFINE_PACKED_TILE(3, 1)
DEFINE_PACKED_TILE(4, 1) DEFINE_PACKED_TILE(5, 1) DEFINE_PACKED_TILE(6, 1)
