// silu(gate) * up.
#pragma once

#include "common.h"

// Over `count` neighbouring columns; rounded as activations are. out may be gate.
INLINE void swiglu_columns(const float *gate, const float *up, int64_t count, int round, float *out) {
    const v8 one = v8_set(1.0f);
    int64_t i = 0;
    for (; i + VECTOR <= count; i += VECTOR) {
        v8 g = v8_load(gate + i);
        v8 y = g * (one / (one + v8_exp(-g))) * v8_load(up + i);
        v8_store(out + i, v8_rounded(y, round));
    }
    for (; i < count; i++) {
        float y = gate[i] * (1.0f / (1.0f + exp_of(-gate[i]))) * up[i];
        out[i] = round ? round_to_bf16(y) : y;
    }
}
