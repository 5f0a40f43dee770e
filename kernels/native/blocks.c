// The two halves of a decoder layer, each in one parallel region: a call costs more than a small operation.

#include "attention.h"
#include "linear.h"
#include "rms_norm.h"
#include "swiglu.h"

typedef struct {
    const float *norm;
    float eps;
    Linear qkv;
    Linear output;
    Attention attention;
    Rotary rotary;
    HeadNorms head_norms;
} AttentionBlock;

typedef struct {
    const float *norm;
    float eps;
    Linear gate_up;
    Linear down;
} MlpBlock;

// x[rows][hidden] += output(attention(rope(qkv(norm(x))))). With `inputs` [rows][qkv.inputs], those are taken as they
// are in place of norm(x). x, inputs and cache are of one element type.
int outrider_attention_block(
    const AttentionBlock *block, const Rows *rows, const Cache *cache, void *x, const void *inputs, int64_t threads) {
    int64_t count = rows->count, heads = block->attention.heads, width = cache->width;
    int64_t qkv_size = (heads + 2 * cache->kv_heads) * width, in_size = block->qkv.inputs;
    int is_bf16 = (int)cache->is_bf16;
    if (count == 0) return OK;
    float *normed = scratch(count * (in_size + qkv_size + heads * width));
    if (!normed) return OUT_OF_MEMORY;
    float *qkv = normed + count * in_size, *attended = qkv + count * qkv_size;
    Result to_qkv = {qkv, qkv_size, 0, is_bf16, 0}, to_x = {x, block->output.outputs, is_bf16, is_bf16, 1};
#pragma omp parallel num_threads(threads)
    {
        if (inputs)
            rms_norm_share(inputs, is_bf16, 0, 0, count, in_size, normed);
        else
            rms_norm_share(x, is_bf16, block->norm, block->eps, count, in_size, normed);
#pragma omp barrier
        linear_share(&block->qkv, normed, count, to_qkv);
#pragma omp barrier
        rope_and_write_share(qkv, heads, rows, cache, block->rotary, block->head_norms, block->eps, is_bf16);
#pragma omp barrier
        attention_share(qkv, qkv_size, &block->attention, rows, cache, is_bf16, attended);
#pragma omp barrier
        linear_share(&block->output, attended, count, to_x);
    }
    return OK;
}

// Keys and values of the rows into the cache, as outrider_attention_block leaves them, and nothing else.
int outrider_write_keys_values(
    const AttentionBlock *block, const Rows *rows, const Cache *cache, const void *inputs, int64_t threads) {
    int64_t count = rows->count, heads = block->attention.heads;
    int64_t qkv_size = (heads + 2 * cache->kv_heads) * cache->width, in_size = block->qkv.inputs;
    int is_bf16 = (int)cache->is_bf16;
    if (count == 0) return OK;
    float *wide = scratch(count * (in_size + qkv_size));
    if (!wide) return OUT_OF_MEMORY;
    float *qkv = wide + count * in_size;
    Result to_qkv = {qkv, qkv_size, 0, is_bf16, 0};
#pragma omp parallel num_threads(threads)
    {
        rms_norm_share(inputs, is_bf16, 0, 0, count, in_size, wide);
#pragma omp barrier
        linear_share(&block->qkv, wide, count, to_qkv);
#pragma omp barrier
        rope_and_write_share(qkv, heads, rows, cache, block->rotary, block->head_norms, block->eps, is_bf16);
    }
    return OK;
}

// x[rows][hidden] += down(swiglu(gate_up(norm(x)))). gate_up.outputs is twice a multiple of PANEL.
int outrider_mlp_block(const MlpBlock *block, void *x, int64_t is_bf16, int64_t count, int64_t threads) {
    int64_t hidden = block->gate_up.inputs, size = block->gate_up.outputs / 2;
    int round = (int)is_bf16;
    if (count == 0) return OK;
    float *normed = scratch(count * (hidden + 2 * size));
    if (!normed) return OUT_OF_MEMORY;
    // Activations take the place of their gates.
    float *gate = normed + count * hidden, *up = gate + count * size;
    Result to_gate = {gate, size, 0, round, 0}, to_up = {up - size, size, 0, round, 0};
    Result to_x = {x, block->down.outputs, round, round, 1};
#pragma omp parallel num_threads(threads)
    {
        rms_norm_share(x, round, block->norm, block->eps, count, hidden, normed);
#pragma omp barrier
        Range mine = share_of(size, PANEL), above = {mine.begin + size, mine.end + size};
        linear_range(&block->gate_up, normed, count, to_gate, mine);
        linear_range(&block->gate_up, normed, count, to_up, above);
        for (int64_t row = 0; row < count; row++) {
            float *g = gate + row * size + mine.begin;
            swiglu_columns(g, up + row * size + mine.begin, mine.end - mine.begin, round, g);
        }
#pragma omp barrier
        linear_share(&block->down, gate, count, to_x);
    }
    return OK;
}
