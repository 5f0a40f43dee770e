// Rotary embedding of freshly computed q, k, v, and k and v into the cache.
#pragma once

#include "rms_norm.h"

enum { PAGE = 64 };

// One layer's cache: keys [pages][kv_heads][width][PAGE], values [pages][kv_heads][PAGE][width].
typedef struct {
    void *keys;
    void *values;
    int64_t is_bf16;
    int64_t kv_heads;
    int64_t width;
} Cache;

typedef struct {
    const float *cos;  // [positions][width / 2]
    const float *sin;
} Rotary;

// Weights [width] of the norms of every query and key head; null without.
typedef struct {
    const float *q;
    const float *k;
} HeadNorms;

// Turns one head in place: pairs (m, m + width / 2).
static void rope_head(float *x, const float *cosines, const float *sines, int64_t width, int round) {
    int64_t half = width / 2;
    for (int64_t m = 0; m < half; m++) {
        float first = x[m] * cosines[m] - x[m + half] * sines[m];
        float second = x[m + half] * cosines[m] + x[m] * sines[m];
        x[m] = round ? round_to_bf16(first) : first;
        x[m + half] = round ? round_to_bf16(second) : second;
    }
}

static void write_key(const Cache *cache, int64_t page, int64_t head, int64_t offset, const float *key) {
    int64_t base = (page * cache->kv_heads + head) * cache->width * PAGE + offset;
    for (int64_t i = 0; i < cache->width; i++) set_element(cache->keys, cache->is_bf16, base + i * PAGE, key[i]);
}

static void write_value(const Cache *cache, int64_t page, int64_t head, int64_t offset, const float *value) {
    int64_t base = ((page * cache->kv_heads + head) * PAGE + offset) * cache->width;
    for (int64_t i = 0; i < cache->width; i++) set_element(cache->values, cache->is_bf16, base + i, value[i]);
}

// The calling thread's heads of qkv[rows][heads + 2 kv_heads][width].
INLINE void rope_and_write_share(
    float *qkv, int64_t heads, const Rows *rows, const Cache *cache, Rotary rotary, HeadNorms norms, float eps, int round) {
    int64_t kv_heads = cache->kv_heads, width = cache->width, all = heads + 2 * kv_heads;
    Range mine = share_of(rows->count * all, 1);
    for (int64_t item = mine.begin; item < mine.end; item++) {
        int64_t row = item / all, head = item % all, position = rows->positions[row];
        float *x = qkv + item * width;
        const float *norm = head < heads ? norms.q : head < heads + kv_heads ? norms.k : 0;
        if (norm) rms_norm_row(x, norm, eps, width, round);
        if (head < heads + kv_heads)
            rope_head(x, rotary.cos + position * (width / 2), rotary.sin + position * (width / 2), width, round);
        if (head < heads) continue;
        int64_t page = rows->page_tables[rows->sequences[row] * rows->table_width + position / PAGE];
        if (head < heads + kv_heads)
            write_key(cache, page, head - heads, position % PAGE, x);
        else
            write_value(cache, page, head - heads - kv_heads, position % PAGE, x);
    }
}
