// Random words of Philox-4x32-10, and the choice of a token with Gumbel noise: see noise.py and sampling.py.

#include <float.h>
#include <math.h>

#include "common.h"

enum { LANES = 64 };  // counters computed together

// words[i][lane] is word i of the counter (counters[lane], positions[lane], 0, 0).
INLINE void philox(uint64_t seed, const uint32_t *counters, const uint32_t *positions, uint32_t words[4][LANES]) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int lane = 0; lane < LANES; lane++) {
        words[0][lane] = counters[lane];
        words[1][lane] = positions[lane];
        words[2][lane] = words[3][lane] = 0;
    }
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
        for (int lane = 0; lane < LANES; lane++) {
            uint64_t even = (uint64_t)words[0][lane] * 0xD2511F53u, odd = (uint64_t)words[2][lane] * 0xCD9E8D57u;
            words[0][lane] = (uint32_t)(odd >> 32) ^ words[1][lane] ^ key0;
            words[1][lane] = (uint32_t)odd;
            words[2][lane] = (uint32_t)(even >> 32) ^ words[3][lane] ^ key1;
            words[3][lane] = (uint32_t)even;
        }
}

// words: [4][count]. A stride of 0 gives all counters one position.
int outrider_philox_words(
    uint64_t seed, const int64_t *counters, const int64_t *positions, int64_t stride, int64_t count,
    uint32_t *words) {
    uint32_t block_counters[LANES] = {0}, block_positions[LANES] = {0}, block[4][LANES];
    for (int64_t start = 0; start < count; start += LANES) {
        int64_t size = count - start < LANES ? count - start : LANES;
        for (int64_t lane = 0; lane < size; lane++) {
            block_counters[lane] = (uint32_t)counters[start + lane];
            block_positions[lane] = (uint32_t)positions[(start + lane) * stride];
        }
        philox(seed, block_counters, block_positions, block);
        for (int64_t i = 0; i < 4; i++)
            for (int64_t lane = 0; lane < size; lane++) words[i * count + start + lane] = block[i][lane];
    }
    return OK;
}

INLINE float uniform_of(uint32_t word) {
    float u = ((float)word + 0.5f) * 0x1p-32f;
    return u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f;
}

INLINE float noise_of(float uniform) { return (float)-log(-log(1.0 - (double)uniform)); }

// More than the noise of u, by at most ln 2 and a little: -log(-log1p(-u)) <= -log(u) <= -ln 2 floor(log2(u)).
INLINE float noise_bound(float uniform) {
    union {
        float value;
        int32_t bits;
    } u = {uniform};
    return (float)(127 - (u.bits >> 23)) * 0.693148f;
}

// The token of a row whose scaled logit and noise together are the largest, of those not below log_min_p.
INLINE int64_t sample_row(
    const float *logits, int64_t vocab, float largest, float temperature, float log_min_p, uint64_t seed,
    uint32_t position) {
    uint32_t counters[LANES], positions[LANES], words[4][LANES];
    float scaled[4 * LANES], reach[4 * LANES], uniform[4 * LANES], best = -INFINITY;
    int64_t token = 0;
    for (int lane = 0; lane < LANES; lane++) positions[lane] = position;
    for (int64_t start = 0; start < vocab; start += 4 * LANES) {
        int size = vocab - start < 4 * LANES ? (int)(vocab - start) : 4 * LANES;
        for (int lane = 0; lane < LANES; lane++) counters[lane] = (uint32_t)(start / 4 + lane);
        philox(seed, counters, positions, words);
        for (int lane = 0; lane < LANES; lane++)
            for (int i = 0; i < 4; i++) uniform[4 * lane + i] = uniform_of(words[i][lane]);
        float furthest = -INFINITY;
        for (int i = 0; i < size; i++) {
            float logit = logits[start + i] < FLT_MAX ? logits[start + i] : FLT_MAX;
            scaled[i] = (logit - largest) / temperature;
            reach[i] = scaled[i] >= log_min_p ? scaled[i] + noise_bound(uniform[i]) : -INFINITY;
            furthest = reach[i] > furthest ? reach[i] : furthest;
        }
        if (furthest <= best) continue;
        for (int i = 0; i < size; i++)
            if (reach[i] > best) {
                float noisy = scaled[i] + noise_of(uniform[i]);
                if (noisy > best) best = noisy, token = start + i;
            }
    }
    return token;
}

// Row r of logits [rows][vocab], none of them NaN, chooses the token at position + r with nothing filtered but by
// min-p. `largest` has each row's largest logit, at most FLT_MAX.
int outrider_sample_rows(
    const float *logits, int64_t rows, int64_t vocab, const float *largest, float temperature, float log_min_p,
    uint64_t seed, int64_t position, int64_t *tokens, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        tokens[row] = sample_row(
            logits + row * vocab, vocab, largest[row], temperature, log_min_p, seed, (uint32_t)(position + row));
    return OK;
}
