// y = x . w + bias. Every output is added up in one order, whatever the tile or thread: a chain of multiply-adds for
// each SPAN inputs, and the chains' results in turn (one long chain would lose three times as much to rounding).
//
// Weights are packed in panels of PANEL outputs: for each pair of inputs k, k + 1, first that pair of each output.
// A bfloat16 pair fills 32 bits, so that one load gives the k of eight (sixteen) outputs by a shift and their k + 1
// by a mask. A float panel holds the outputs of k, then those of k + 1.
#pragma once

#include "common.h"

// The widest vectors: sixteen floats with AVX-512, else eight. A build for tests may ask for the others.
#ifndef OUTRIDER_WIDE
#if HAVE_AVX2 && defined(__AVX512F__)
#define OUTRIDER_WIDE 16
#else
#define OUTRIDER_WIDE 8
#endif
#endif
enum { WIDE = OUTRIDER_WIDE };
typedef float wide __attribute__((vector_size(4 * OUTRIDER_WIDE)));
typedef uint32_t wide_bits __attribute__((vector_size(4 * OUTRIDER_WIDE)));

INLINE wide wide_set(float a) { return a - (wide){0}; }

INLINE wide wide_load(const float *p) {
    wide v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void wide_store(float *p, wide v) { memcpy(p, &v, sizeof v); }

INLINE wide_bits wide_pairs(const bf16 *p) {
    wide_bits v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE wide wide_even(const bf16 *p) { return (wide)(wide_pairs(p) << 16); }
INLINE wide wide_odd(const bf16 *p) { return (wide)(wide_pairs(p) & 0xffff0000u); }

INLINE wide wide_fma(wide a, wide b, wide c) {
#if OUTRIDER_WIDE == 8
    return v8_fma(a, b, c);
#elif HAVE_AVX2 && defined(__AVX512F__)
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

enum { PANEL = 2 * WIDE, MAX_TILE_ROWS = 6, MAX_TILE_PANELS = 4, SPAN = 256, ROW_BLOCK_FLOATS = 48 * 1024 };

enum { FLOAT32, BFLOAT16, MXFP4 };

typedef struct {
    const void *weights;  // packed
    const float *bias;    // null, or as many as outputs
    int64_t outputs;
    int64_t inputs;  // even
    int64_t type;
} Linear;

// What becomes of a result: stored, or added to what is there; each value first rounded as activations are.
typedef struct {
    void *out;
    int64_t stride;
    int out_is_bf16;
    int round;  // to bfloat16, before it is stored or added
    int add;
} Result;

// The first and second vector of a panel for the even (odd) one of a pair of inputs.
#define EVEN_bf16(w, v) wide_even((w) + (v) * 2 * WIDE)
#define ODD_bf16(w, v) wide_odd((w) + (v) * 2 * WIDE)
#define EVEN_float(w, v) wide_load((w) + (v) * WIDE)
#define ODD_float(w, v) wide_load((w) + PANEL + (v) * WIDE)

// Accumulators must be named one by one: compilers keep an array of them in memory. rP_M_V: panel, row, vector.
#define EACH_ROW_1(F, ...) F(0, __VA_ARGS__)
#define EACH_ROW_2(F, ...) EACH_ROW_1(F, __VA_ARGS__) F(1, __VA_ARGS__)
#define EACH_ROW_3(F, ...) EACH_ROW_2(F, __VA_ARGS__) F(2, __VA_ARGS__)
#define EACH_ROW_4(F, ...) EACH_ROW_3(F, __VA_ARGS__) F(3, __VA_ARGS__)
#define EACH_ROW_5(F, ...) EACH_ROW_4(F, __VA_ARGS__) F(4, __VA_ARGS__)
#define EACH_ROW_6(F, ...) EACH_ROW_5(F, __VA_ARGS__) F(5, __VA_ARGS__)
#define EACH_PANEL_1(F, ...) F(0, __VA_ARGS__)
#define EACH_PANEL_2(F, ...) EACH_PANEL_1(F, __VA_ARGS__) F(1, __VA_ARGS__)
#define EACH_PANEL_4(F, ...) EACH_PANEL_2(F, __VA_ARGS__) F(2, __VA_ARGS__) F(3, __VA_ARGS__)

#define DECLARE(M, P) wide r##P##_##M##_0 = {0}, r##P##_##M##_1 = {0};
#define STEP(M, P, ODD)                                          \
    {                                                            \
        wide b = wide_set(x[M * inputs + k + ODD]);              \
        r##P##_##M##_0 = wide_fma(w0, b, r##P##_##M##_0);        \
        r##P##_##M##_1 = wide_fma(w1, b, r##P##_##M##_1);        \
    }
#define ADD_TO(AT, R) wide_store(AT, start ? wide_load(AT) + R : R);
#define ADD(M, P)                                                \
    ADD_TO(tile + M * tile_stride + P * PANEL, r##P##_##M##_0)   \
    ADD_TO(tile + M * tile_stride + P * PANEL + WIDE, r##P##_##M##_1)
// How far ahead of its use a weight is fetched: more rows take longer over a line, and read one panel at a time.
enum { PREFETCH_1 = 1024, PREFETCH_2 = 1024, PREFETCH_3 = 1024, PREFETCH_4 = 4096, PREFETCH_5 = 4096, PREFETCH_6 = 4096 };
#define DECLARE_PANEL(P, TYPE, ROWS) EACH_ROW_##ROWS(DECLARE, P)
#define STEP_PANEL(P, TYPE, ROWS)                                \
    {                                                            \
        const TYPE *w = weights + P * panel_size + k * PANEL;    \
        __builtin_prefetch((const char *)w + PREFETCH_##ROWS);    \
        wide w0 = EVEN_##TYPE(w, 0), w1 = EVEN_##TYPE(w, 1);     \
        EACH_ROW_##ROWS(STEP, P, 0)                              \
        w0 = ODD_##TYPE(w, 0), w1 = ODD_##TYPE(w, 1);            \
        EACH_ROW_##ROWS(STEP, P, 1)                              \
    }
#define ADD_PANEL(P, TYPE, ROWS) EACH_ROW_##ROWS(ADD, P)

// ROWS rows of x against PANELS panels, into tile[ROWS][PANELS * PANEL].
#define DEFINE_TILE(TYPE, ROWS, PANELS)                                                                   \
    static __attribute__((noinline)) void tile_##TYPE##_##ROWS##x##PANELS(                                \
        const void *packed, const float *restrict x, int64_t inputs, float *restrict tile) {              \
        const TYPE *weights = packed;                                                                     \
        const int64_t panel_size = inputs * PANEL, tile_stride = (PANELS) * PANEL;                        \
        for (int64_t start = 0; start < inputs; start += SPAN) {                                          \
            int64_t stop = start + SPAN < inputs ? start + SPAN : inputs;                                 \
            EACH_PANEL_##PANELS(DECLARE_PANEL, TYPE, ROWS)                                                \
            for (int64_t k = start; k < stop; k += 2) { EACH_PANEL_##PANELS(STEP_PANEL, TYPE, ROWS) }     \
            EACH_PANEL_##PANELS(ADD_PANEL, TYPE, ROWS)                                                    \
        }                                                                                                 \
    }

// Few rows take several panels at once: eight chains hide the latency of a multiply-add.
#define DEFINE_TILES(TYPE)                                                                                \
    DEFINE_TILE(TYPE, 1, 4) DEFINE_TILE(TYPE, 1, 2) DEFINE_TILE(TYPE, 1, 1)                               \
    DEFINE_TILE(TYPE, 2, 2) DEFINE_TILE(TYPE, 2, 1) DEFINE_TILE(TYPE, 3, 2) DEFINE_TILE(TYPE, 3, 1)       \
    DEFINE_TILE(TYPE, 4, 1) DEFINE_TILE(TYPE, 5, 1) DEFINE_TILE(TYPE, 6, 1)

DEFINE_TILES(bf16)
DEFINE_TILES(float)
#include "mxfp4.h"

typedef void Tile(const void *, const float *restrict, int64_t, float *restrict);

// By element type, rows - 1 and panels - 1.
static Tile *const TILES[3][MAX_TILE_ROWS][MAX_TILE_PANELS] = {
    {{tile_float_1x1, tile_float_1x2, 0, tile_float_1x4},
     {tile_float_2x1, tile_float_2x2},
     {tile_float_3x1, tile_float_3x2},
     {tile_float_4x1},
     {tile_float_5x1},
     {tile_float_6x1}},
    {{tile_bf16_1x1, tile_bf16_1x2, 0, tile_bf16_1x4},
     {tile_bf16_2x1, tile_bf16_2x2},
     {tile_bf16_3x1, tile_bf16_3x2},
     {tile_bf16_4x1},
     {tile_bf16_5x1},
     {tile_bf16_6x1}},
    {{tile_mxfp4_1x1, tile_mxfp4_1x2, 0, tile_mxfp4_1x4},
     {tile_mxfp4_2x1, tile_mxfp4_2x2},
     {tile_mxfp4_3x1, tile_mxfp4_3x2},
     {tile_mxfp4_4x1},
     {tile_mxfp4_5x1},
     {tile_mxfp4_6x1}},
};

INLINE int64_t panel_bytes_of(const Linear *linear) {
    int64_t weights = linear->inputs * PANEL;
    return linear->type == MXFP4 ? weights / GROUP * GROUP_ROWS : weights * (linear->type == BFLOAT16 ? 2 : 4);
}

INLINE int64_t panels_at_once(int64_t rows, int64_t left) {
    int64_t most = rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    while (most > left) most /= 2;
    return most;
}

INLINE void finish_row(const float *tile, const Linear *linear, Result result, int64_t row, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
        float y = tile[n - begin] + (linear->bias ? linear->bias[n] : 0.0f);
        if (result.round) y = round_to_bf16(y);
        int64_t at = row * result.stride + n;
        if (result.add) y += element(result.out, result.out_is_bf16, at);
        set_element(result.out, result.out_is_bf16, at, y);
    }
}

// The plainest case, all of what lies between two linears, without the tests above.
INLINE void finish_row_plain(const float *tile, Result result, int64_t row, int64_t begin, int64_t end) {
    float *out = (float *)result.out + row * result.stride + begin;
    if (result.round)
        for (int64_t n = 0; n < end - begin; n++) out[n] = round_to_bf16(tile[n]);
    else
        memcpy(out, tile, (end - begin) * sizeof(float));
}

// Outputs first..last-1 (first a multiple of PANEL) of x[rows][inputs], as the calling thread's part of the whole.
static void linear_outputs(const Linear *linear, const float *x, int64_t rows, Result result, Range outputs) {
    _Alignas(64) float tile[MAX_TILE_ROWS * MAX_TILE_PANELS * PANEL];
    int64_t inputs = linear->inputs, panel_bytes = panel_bytes_of(linear);
    int64_t tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    int plain = !result.add && !result.out_is_bf16 && !linear->bias;
    int64_t panels;
    for (int64_t begin = outputs.begin; begin < outputs.end; begin += panels * PANEL) {
        const char *weights = (const char *)linear->weights + begin / PANEL * panel_bytes;
        panels = panels_at_once(rows, (outputs.end - begin + PANEL - 1) / PANEL);
        int64_t end = begin + panels * PANEL < outputs.end ? begin + panels * PANEL : outputs.end;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
            TILES[linear->type][count - 1][panels - 1](weights, x + row * inputs, inputs, tile);
            for (int64_t m = 0; m < count; m++) {
                if (plain)
                    finish_row_plain(tile + m * panels * PANEL, result, row + m, begin, end);
                else
                    finish_row(tile + m * panels * PANEL, linear, result, row + m, begin, end);
            }
        }
    }
}

// Blocks of rows that stay in the second-level cache while the panels pass by.
static void linear_range(const Linear *linear, const float *x, int64_t rows, Result result, Range outputs) {
    int64_t block = ROW_BLOCK_FLOATS / linear->inputs / MAX_TILE_ROWS * MAX_TILE_ROWS;
    if (block < 4 * MAX_TILE_ROWS) block = 4 * MAX_TILE_ROWS;
    char *out = result.out;
    for (int64_t row = 0; row < rows; row += block) {
        int64_t count = rows - row < block ? rows - row : block;
        result.out = out + row * result.stride * (result.out_is_bf16 ? 2 : 4);
        linear_outputs(linear, x + row * linear->inputs, count, result, outputs);
    }
}

// All outputs, shared between the threads.
INLINE void linear_share(const Linear *linear, const float *x, int64_t rows, Result result) {
    linear_range(linear, x, rows, result, share_of(linear->outputs, PANEL));
}
