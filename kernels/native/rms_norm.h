// x / sqrt(mean(x^2) + eps) * weight, one row at a time.
#pragma once

#include "common.h"

INLINE void widen_row(const void *x, int is_bf16, int64_t row, int64_t size, float *out) {
    if (is_bf16) {
        const bf16 *from = (const bf16 *)x + row * size;
        for (int64_t i = 0; i < size; i++) out[i] = bf16_to_float(from[i]);
    } else {
        memcpy(out, (const float *)x + row * size, size * sizeof(float));
    }
}

// In place, on a row already widened; rounded as activations are.
static void rms_norm_row(float *x, const float *weight, float eps, int64_t size, int round) {
    v8 sums[4] = {v8_set(0), v8_set(0), v8_set(0), v8_set(0)};
    int64_t i = 0;
    for (; i + 4 * VECTOR <= size; i += 4 * VECTOR)
        for (int j = 0; j < 4; j++) {
            v8 v = v8_load(x + i + j * VECTOR);
            sums[j] = v8_fma(v, v, sums[j]);
        }
    float sum = v8_sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)size + eps);
    if (round)
        for (i = 0; i < size; i++) x[i] = round_to_bf16(x[i] * scale * weight[i]);
    else
        for (i = 0; i < size; i++) x[i] = x[i] * scale * weight[i];
}

// The calling thread's rows of x[rows][size], widened and normalised into out. A null weight only widens.
INLINE void rms_norm_share(
    const void *x, int is_bf16, const float *weight, float eps, int64_t rows, int64_t size, float *out) {
    Range mine = share_of(rows, 1);
    for (int64_t row = mine.begin; row < mine.end; row++) {
        widen_row(x, is_bf16, row, size, out + row * size);
        if (weight) rms_norm_row(out + row * size, weight, eps, size, is_bf16);
    }
}
