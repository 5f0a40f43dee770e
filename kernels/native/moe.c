// The mixture-of-experts half of a decoder layer, in one parallel region.
//
// Every row and expert chosen for it make a slot; slots lie in the order of their experts, so that each touched
// expert's weights are read once for all its rows. Experts' results are added in the order of their rank.

#include "linear.h"
#include "rms_norm.h"

typedef struct {
    const float *norm;  // null: x is taken as it is
    float eps;
    Linear router;
    const Linear *gate_up;  // rows interleaved: the gate of an output, then its up
    const Linear *down;
    int64_t top_k;
    int64_t normalize;  // shares among the chosen experts; else among all
    float alpha, limit, offset;
} MoeBlock;

enum { UNIT = 4 * PANEL };  // outputs of one expert that a thread takes at a time

// The best top_k of logits, best first, the lowest id on a tie, and their softmax.
static void route_row(const MoeBlock *block, const float *logits, int64_t *ids, float *shares) {
    int64_t experts = block->router.outputs, top_k = block->top_k, found = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        int64_t at = found < top_k ? found++ : top_k;
        for (; at > 0 && logits[expert] > logits[ids[at - 1]]; at--)
            if (at < top_k) ids[at] = ids[at - 1];
        if (at < top_k) ids[at] = expert;
    }
    float top = logits[ids[0]], total = 0.0f;
    for (int64_t rank = 0; rank < top_k; rank++) total += shares[rank] = exp_of(logits[ids[rank]] - top);
    if (!block->normalize) {
        total = 0.0f;
        for (int64_t expert = 0; expert < experts; expert++) total += exp_of(logits[expert] - top);
    }
    for (int64_t rank = 0; rank < top_k; rank++) shares[rank] /= total;
}

// Slots by expert: starts[expert] .. starts[expert + 1] - 1; slot_of[row * top_k + rank] is where a choice went.
// Returns how many experts were touched, and lists them.
static int64_t deal(
    const int64_t *ids, int64_t choices, int64_t experts, int64_t *starts, int64_t *slot_of, int64_t *touched) {
    int64_t found = 0;
    memset(starts, 0, (experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < choices; i++) starts[ids[i] + 1]++;
    for (int64_t expert = 0; expert < experts; expert++) {
        if (starts[expert + 1]) touched[found++] = expert;
        starts[expert + 1] += starts[expert];
    }
    for (int64_t i = 0; i < choices; i++) slot_of[i] = starts[ids[i]]++;
    for (int64_t expert = experts; expert > 0; expert--) starts[expert] = starts[expert - 1];
    starts[0] = 0;
    return found;
}

// gate * sigmoid(alpha * gate) * (up + offset), gate clamped from above and up from both sides.
static void gate_columns(const MoeBlock *block, const float *gate_up, int64_t count, int round, float *out) {
    const v8 one = v8_set(1.0f), alpha = v8_set(block->alpha), offset = v8_set(block->offset);
    const v8 high = v8_set(block->limit), low = v8_set(-block->limit);
    for (int64_t i = 0; i < count; i += VECTOR) {
        int64_t width = count - i < VECTOR ? count - i : VECTOR;
        _Alignas(32) float gates[VECTOR] = {0}, ups[VECTOR] = {0}, results[VECTOR];
        for (int64_t j = 0; j < width; j++) gates[j] = gate_up[2 * (i + j)], ups[j] = gate_up[2 * (i + j) + 1];
        v8 gate = v8_load(gates), up = v8_load(ups);
        gate = v8_select(gate > high, high, gate);
        up = v8_select(up > high, high, v8_select(up < low, low, up));
        v8_store(results, v8_rounded(gate * (one / (one + v8_exp(-(alpha * gate)))) * (up + offset), round));
        memcpy(out + i, results, width * sizeof(float));
    }
}

typedef struct {
    float *rows;     // [slots][hidden]: what goes into the experts, then what comes out
    float *gate_up;  // [slots][2 size]
    float *active;   // [slots][size]
    int64_t *starts;
    int64_t *touched;
    int64_t num_touched;
} Slots;

// Units of all touched experts, to whichever thread is free: no bit depends on who computes it.
static void gate_up_units(const MoeBlock *block, const Slots *slots, int64_t hidden, int64_t size, int round) {
    int64_t units = (2 * size + UNIT - 1) / UNIT;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < slots->num_touched * units; item++) {
        int64_t expert = slots->touched[item / units], first = slots->starts[expert];
        int64_t count = slots->starts[expert + 1] - first;
        Range range = {item % units * UNIT, item % units * UNIT + UNIT};
        if (range.end > 2 * size) range.end = 2 * size;
        Result result = {slots->gate_up + first * 2 * size, 2 * size, 0, round, 0};
        linear_range(&block->gate_up[expert], slots->rows + first * hidden, count, result, range);
        for (int64_t slot = first; slot < first + count; slot++)
            gate_columns(block, slots->gate_up + slot * 2 * size + range.begin, (range.end - range.begin) / 2, round,
                         slots->active + slot * size + range.begin / 2);
    }
}

static void down_units(const MoeBlock *block, const Slots *slots, int64_t hidden, int64_t size, int round) {
    int64_t units = (hidden + UNIT - 1) / UNIT;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < slots->num_touched * units; item++) {
        int64_t expert = slots->touched[item / units], first = slots->starts[expert];
        int64_t count = slots->starts[expert + 1] - first;
        Range range = {item % units * UNIT, item % units * UNIT + UNIT};
        if (range.end > hidden) range.end = hidden;
        Result result = {slots->rows + first * hidden, hidden, 0, round, 0};
        linear_range(&block->down[expert], slots->active + first * size, count, result, range);
    }
}

// x[rows][hidden] += the sum over ranks of share * expert(norm(x)).
int outrider_moe_block(const MoeBlock *block, void *x, int64_t is_bf16, int64_t count, int64_t threads) {
    int64_t hidden = block->router.inputs, size = block->gate_up[0].outputs / 2, experts = block->router.outputs;
    int64_t top_k = block->top_k, choices = count * top_k;
    int round = (int)is_bf16;
    if (count == 0) return OK;
    int64_t *ids = malloc((2 * choices + 2 * experts + 1) * sizeof *ids);
    float *normed = scratch(count * (hidden + experts) + choices * (1 + hidden + 3 * size));
    if (!normed || !ids) {
        free(ids);
        return OUT_OF_MEMORY;
    }
    int64_t *slot_of = ids + choices, *starts = slot_of + choices, *touched = starts + experts + 1;
    float *logits = normed + count * hidden, *shares = logits + count * experts, *memory = shares + choices;
    Slots slots = {memory, memory + choices * hidden, memory + choices * (hidden + 2 * size), starts, touched, 0};
    Result to_logits = {logits, experts, 0, 0, 0};
#pragma omp parallel num_threads(threads)
    {
        rms_norm_share(x, round, block->norm, block->eps, count, hidden, normed);
#pragma omp barrier
        linear_share(&block->router, normed, count, to_logits);
#pragma omp barrier
#pragma omp single
        {
            for (int64_t row = 0; row < count; row++)
                route_row(block, logits + row * experts, ids + row * top_k, shares + row * top_k);
            slots.num_touched = deal(ids, choices, experts, starts, slot_of, touched);
        }
        Range given = share_of(choices, 1), mine = share_of(count, 1);
        for (int64_t i = given.begin; i < given.end; i++)
            memcpy(slots.rows + slot_of[i] * hidden, normed + i / top_k * hidden, hidden * sizeof(float));
#pragma omp barrier
        gate_up_units(block, &slots, hidden, size, round);
        down_units(block, &slots, hidden, size, round);
        for (int64_t row = mine.begin; row < mine.end; row++)
            for (int64_t i = 0; i < hidden; i++) {
                float total = 0.0f;
                for (int64_t rank = 0; rank < top_k; rank++) {
                    float y = slots.rows[slot_of[row * top_k + rank] * hidden + i] * shares[row * top_k + rank];
                    total = rank ? total + y : y;
                }
                if (round) total = round_to_bf16(total);
                set_element(x, round, row * hidden + i, element(x, round, row * hidden + i) + total);
            }
    }
    free(ids);
    return OK;
}
