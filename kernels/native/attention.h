// Attention of one query row and head at a time, over the pages of its sequence in ascending order.
//
// A page's logits and its share of the mean are added in one fixed order, so that a row's result depends on its
// position and its sequence alone. The softmax is the running one: with each page the maximum may rise, and what was
// summed up so far is scaled down.
#pragma once

#include "rope.h"

typedef struct {
    float scale;
    int64_t heads;
    int64_t window;      // 0: none
    const float *sinks;  // null, or one logit per head
} Attention;

// Logits of a bfloat16 page come out with the even keys of each sixteen first.
INLINE int key_of_slot(int slot, int is_bf16) { return is_bf16 ? slot / 16 * 16 + slot % 8 * 2 + slot / 8 % 2 : slot; }

#define EACH_EIGHT(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7)
#define LOGITS_DECLARE(I) v8 s##I = v8_set(0.0f);
#define LOGITS_STORE(I) v8_store(logits + I * VECTOR, s##I * factor);
#define LOGITS_STEP_FLOAT(I) s##I = v8_fma(v8_load(k + I * VECTOR), b, s##I);
#define LOGITS_STEP_BF16(E, O, AT) \
    s##E = v8_fma(bf16_even(k + AT), b, s##E); \
    s##O = v8_fma(bf16_odd(k + AT), b, s##O);

// logits[PAGE] = q . key * scale for one page's keys [width][PAGE].
static void page_logits(const float *q, const void *keys, int is_bf16, int64_t width, float scale, float *logits) {
    v8 factor = v8_set(scale);
    EACH_EIGHT(LOGITS_DECLARE)
    if (is_bf16) {
        const bf16 *k = keys;
        for (int64_t i = 0; i < width; i++, k += PAGE) {
            v8 b = v8_set(q[i]);
            LOGITS_STEP_BF16(0, 1, 0) LOGITS_STEP_BF16(2, 3, 16) LOGITS_STEP_BF16(4, 5, 32) LOGITS_STEP_BF16(6, 7, 48)
        }
    } else {
        const float *k = keys;
        for (int64_t i = 0; i < width; i++, k += PAGE) {
            v8 b = v8_set(q[i]);
            EACH_EIGHT(LOGITS_STEP_FLOAT)
        }
    }
    EACH_EIGHT(LOGITS_STORE)
}

// Sixteen dimensions of sum += weight * value over the page's keys begin..end-1, in slot order.
#define SIXTEEN_DECLARE(N) v8 a##N = v8_load(sum + N * 16), b##N = v8_load(sum + N * 16 + VECTOR);
#define SIXTEEN_STORE(N) v8_store(sum + N * 16, a##N), v8_store(sum + N * 16 + VECTOR, b##N);
#define SIXTEEN_BF16(N) a##N = v8_fma(bf16_even(v + N * 16), w, a##N), b##N = v8_fma(bf16_odd(v + N * 16), w, b##N);
#define SIXTEEN_FLOAT(N) \
    a##N = v8_fma(v8_load(v + N * 16), w, a##N), b##N = v8_fma(v8_load(v + N * 16 + VECTOR), w, b##N);
#define EACH_1(F) F(0)
#define EACH_4(F) F(0) F(1) F(2) F(3)
#define DEFINE_PAGE_SUM(TYPE, IS_BF16, STEP_NAME, N)                                                              \
    static void page_sum_##TYPE##_##N(                                                                            \
        const float *weights, const TYPE *values, int64_t width, int begin, int end, float *sum) {                \
        EACH_##N(SIXTEEN_DECLARE)                                                                                 \
        for (int slot = 0; slot < PAGE; slot++) {                                                                 \
            int key = key_of_slot(slot, IS_BF16);                                                                 \
            if (key < begin || key >= end) continue;                                                              \
            v8 w = v8_set(weights[slot]);                                                                         \
            const TYPE *v = values + key * width;                                                                 \
            EACH_##N(STEP_NAME)                                                                                   \
        }                                                                                                         \
        EACH_##N(SIXTEEN_STORE)                                                                                   \
    }
DEFINE_PAGE_SUM(bf16, 1, SIXTEEN_BF16, 4)
DEFINE_PAGE_SUM(bf16, 1, SIXTEEN_BF16, 1)
DEFINE_PAGE_SUM(float, 0, SIXTEEN_FLOAT, 4)
DEFINE_PAGE_SUM(float, 0, SIXTEEN_FLOAT, 1)

// sum[width] += weights . values over keys begin..end-1. In each sixteen of sum a bfloat16 page keeps even ones first.
static void page_sum(const float *weights, const void *values, int is_bf16, int64_t width, int begin, int end, float *sum) {
    int64_t i = 0;
    for (; i + 64 <= width; i += 64)
        if (is_bf16)
            page_sum_bf16_4(weights, (const bf16 *)values + i, width, begin, end, sum + i);
        else
            page_sum_float_4(weights, (const float *)values + i, width, begin, end, sum + i);
    for (; i < width; i += 16)
        if (is_bf16)
            page_sum_bf16_1(weights, (const bf16 *)values + i, width, begin, end, sum + i);
        else
            page_sum_float_1(weights, (const float *)values + i, width, begin, end, sum + i);
}

// Turns logits into weights relative to `maximum`; returns their sum.
static float page_softmax(float *logits, float maximum) {
    v8 total = v8_set(0.0f), top = v8_set(maximum);
    for (int i = 0; i < PAGE; i += VECTOR) {
        v8 weight = v8_exp(v8_load(logits + i) - top);
        v8_store(logits + i, weight);
        total += weight;
    }
    return v8_sum_of(total);
}

static float page_maximum(const float *logits) {
    v8 top = v8_load(logits);
    for (int i = VECTOR; i < PAGE; i += VECTOR) top = v8_max(top, v8_load(logits + i));
    return v8_max_of(top);
}

enum { MAX_WIDTH = 256 };

// out[width] of one row and head; pages: those of the row's sequence.
static void attend(
    const float *q, const Attention *attention, const Cache *cache, const int32_t *pages, int64_t head, int64_t first,
    int64_t last, int round, float *out) {
    _Alignas(64) float logits[PAGE], sum[MAX_WIDTH];
    int64_t width = cache->width, kv_head = head / (attention->heads / cache->kv_heads);
    int is_bf16 = (int)cache->is_bf16;
    int64_t element_size = is_bf16 ? 2 : 4, page_bytes = width * PAGE * element_size;
    float maximum = attention->sinks ? attention->sinks[head] : -INFINITY, total = attention->sinks ? 1.0f : 0.0f;
    memset(sum, 0, width * sizeof(float));
    for (int64_t block = first / PAGE; block <= last / PAGE; block++) {
        int64_t at = (pages[block] * cache->kv_heads + kv_head) * page_bytes, start = block * PAGE;
        int begin = first > start ? (int)(first - start) : 0, end = last - start < PAGE ? (int)(last - start) + 1 : PAGE;
        page_logits(q, (const char *)cache->keys + at, is_bf16, width, attention->scale, logits);
        if (begin > 0 || end < PAGE)
            for (int slot = 0; slot < PAGE; slot++) {
                int key = key_of_slot(slot, is_bf16);
                if (key < begin || key >= end) logits[slot] = -INFINITY;
            }
        float top = page_maximum(logits);
        if (top > maximum) {
            float shrink = exp_of(maximum - top);
            for (int64_t i = 0; i < width; i++) sum[i] *= shrink;
            total *= shrink;
            maximum = top;
        }
        total += page_softmax(logits, maximum);
        page_sum(logits, (const char *)cache->values + at, is_bf16, width, begin, end, sum);
    }
    for (int64_t i = 0; i < width; i++) {
        float mean = sum[i] / total;
        int64_t to = is_bf16 ? i / 16 * 16 + i % 8 * 2 + i / 8 % 2 : i;
        out[to] = round ? round_to_bf16(mean) : mean;
    }
}

// The calling thread's (row, head) pairs, dealt in turn since later rows see more keys. q: [rows][q_stride].
INLINE void attention_share(
    const float *q, int64_t q_stride, const Attention *attention, const Rows *rows, const Cache *cache, int round,
    float *out) {
    int64_t heads = attention->heads, width = cache->width, threads = omp_get_num_threads();
    for (int64_t item = omp_get_thread_num(); item < rows->count * heads; item += threads) {
        int64_t row = item / heads, head = item % heads, last = rows->positions[row], sequence = rows->sequences[row];
        int64_t first = rows->first_positions ? rows->first_positions[sequence] : 0;
        if (attention->window && last - attention->window + 1 > first) first = last - attention->window + 1;
        attend(q + row * q_stride + head * width, attention, cache, rows->page_tables + sequence * rows->table_width,
               head, first, last, round, out + item * width);
    }
}
