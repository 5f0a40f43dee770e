// Single operations, each in one parallel region. All return OK or OUT_OF_MEMORY.

#include "attention.h"
#include "linear.h"
#include "rms_norm.h"
#include "swiglu.h"

int64_t outrider_panel(void) { return PANEL; }

void outrider_use_huge_pages(void *memory, int64_t bytes) { use_huge_pages(memory, bytes); }

// Packs weights [outputs][inputs] as linear.h wants them; packed holds the outputs rounded up to whole panels.
void outrider_pack(const void *weights, int64_t is_bf16, int64_t outputs, int64_t inputs, void *packed, int64_t threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t n = panel * PANEL + j, base = panel * PANEL * inputs + k / 2 * 2 * PANEL;
                int64_t from = n * inputs + k;
                if (is_bf16)
                    ((bf16 *)packed)[base + j * 2 + k % 2] = n < outputs ? ((const bf16 *)weights)[from] : 0;
                else
                    ((float *)packed)[base + k % 2 * PANEL + j] = n < outputs ? ((const float *)weights)[from] : 0;
            }
}

// Packs blocks [outputs][inputs / 32][16] and scales [outputs][inputs / 32] as mxfp4.h wants them.
void outrider_pack_mxfp4(
    const uint8_t *blocks, const uint8_t *scales, int64_t outputs, int64_t inputs, uint8_t *packed, int64_t threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL, groups = inputs / GROUP;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t n = panel * PANEL + j, from = n * groups + g;
                uint8_t *to = packed + (panel * groups + g) * GROUP_ROWS * PANEL + j;
                to[0] = n < outputs ? scales[from] : 0;
                for (int64_t i = 0; i < GROUP / 2; i++)
                    to[(1 + i) * PANEL] = n < outputs ? blocks[from * (GROUP / 2) + i] : 0;
            }
}

// out[rows][outputs] = x[rows][inputs] . linear.
int outrider_linear(
    const Linear *linear, const void *x, int64_t x_is_bf16, int64_t rows, void *out, int64_t out_is_bf16,
    int64_t threads) {
    if (rows == 0) return OK;
    float *wide = x_is_bf16 ? scratch(rows * linear->inputs) : (float *)x;
    if (!wide) return OUT_OF_MEMORY;
    Result result = {out, linear->outputs, (int)out_is_bf16, 0, 0};
#pragma omp parallel num_threads(threads)
    {
        if (x_is_bf16) {
            rms_norm_share(x, 1, 0, 0, rows, linear->inputs, wide);
#pragma omp barrier
        }
        linear_share(linear, wide, rows, result);
    }
    return OK;
}

int outrider_rms_norm(
    const void *x, int64_t is_bf16, const float *weight, float eps, int64_t rows, int64_t size, void *out,
    int64_t threads) {
    if (rows == 0) return OK;
    float *wide = is_bf16 ? scratch(rows * size) : out;
    if (!wide) return OUT_OF_MEMORY;
#pragma omp parallel num_threads(threads) if (rows >= 32)
    {
        rms_norm_share(x, (int)is_bf16, weight, eps, rows, size, wide);
        Range mine = share_of(rows, 1);
        if (is_bf16)
            for (int64_t i = mine.begin * size; i < mine.end * size; i++) ((bf16 *)out)[i] = float_to_bf16(wide[i]);
    }
    return OK;
}

// q and out: [rows][heads][width], of the cache's element type.
int outrider_attention(
    const Attention *attention, const Rows *rows, const Cache *cache, const void *q, void *out, int64_t threads) {
    int64_t size = attention->heads * cache->width, count = rows->count * size;
    int is_bf16 = (int)cache->is_bf16;
    if (count == 0) return OK;
    float *memory = is_bf16 ? scratch(2 * count) : (float *)q;
    if (!memory) return OUT_OF_MEMORY;
    float *wide = memory, *attended = is_bf16 ? memory + count : out;
#pragma omp parallel num_threads(threads)
    {
        if (is_bf16) {
            rms_norm_share(q, 1, 0, 0, rows->count, size, wide);
#pragma omp barrier
        }
        attention_share(wide, size, attention, rows, cache, is_bf16, attended);
        if (is_bf16) {
#pragma omp barrier
            Range mine = share_of(count, 1);
            for (int64_t i = mine.begin; i < mine.end; i++) ((bf16 *)out)[i] = float_to_bf16(attended[i]);
        }
    }
    return OK;
}
