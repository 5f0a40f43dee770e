// What the kernels share: arrays of either element type, a thread's share of the work, scratch memory.
#pragma once

#include <omp.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "vector.h"

// Activations and caches are float or bfloat16; between the two, everything is float.
INLINE float element(const void *array, int is_bf16, int64_t i) {
    return is_bf16 ? bf16_to_float(((const bf16 *)array)[i]) : ((const float *)array)[i];
}

INLINE void set_element(void *array, int is_bf16, int64_t i, float value) {
    if (is_bf16)
        ((bf16 *)array)[i] = float_to_bf16(value);
    else
        ((float *)array)[i] = value;
}

// Where rows stand: see Rows in attention_block.py.
typedef struct {
    const int32_t *positions;
    const int32_t *sequences;
    const int32_t *page_tables;
    const int32_t *first_positions;  // null: all 0
    int64_t count;
    int64_t table_width;
} Rows;

typedef struct {
    int64_t begin, end;
} Range;

// The part of `count` items that the calling thread takes, whole multiples of `unit` as far as possible.
INLINE Range share_of(int64_t count, int64_t unit) {
    int64_t units = (count + unit - 1) / unit, id = omp_get_thread_num(), threads = omp_get_num_threads();
    Range range = {units * id / threads * unit, units * (id + 1) / threads * unit};
    if (range.begin > count) range.begin = count;
    if (range.end > count) range.end = count;
    return range;
}

enum { HUGE_PAGE = 2 << 20 };

// Asks for large pages, before first use: reading weights is bound by memory, and by the translation of addresses.
INLINE void use_huge_pages(void *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t begin = ((uintptr_t)memory + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1);
    uintptr_t end = ((uintptr_t)memory + bytes) & ~(uintptr_t)(HUGE_PAGE - 1);
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

// Memory for `count` floats, kept by the calling thread from call to call. Null when there is none.
INLINE float *scratch(size_t count) {
    static _Thread_local float *memory;
    static _Thread_local size_t size;
    if (count > size) {
        free(memory);
        size = (count + 1023) & ~(size_t)1023;
        memory = aligned_alloc(HUGE_PAGE, (size * sizeof(float) + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1));
        if (memory) use_huge_pages(memory, size * sizeof(float));
        if (!memory) size = 0;
    }
    return memory;
}

enum { OK = 0, OUT_OF_MEMORY = 1 };
