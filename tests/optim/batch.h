/* batch.h - every kind of batch that the step kernels tell apart, with its memory, for the C tests.
 *
 * A case is an optimizer in one of its variants (decay, betas on both sides of one half, momentum) and a form (the
 * types in memory). A batch has a few segments, each of whose arrays is an allocation of exactly its size, so that the
 * address sanitizer sees one element too many, and begins some elements into it, so that addresses are misaligned.
 * Values come from integers alone and are the same on every machine.
 */
#ifndef OPTIM_BATCH_H
#define OPTIM_BATCH_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels.h"

#define REQUIRE(condition)                                                                                   \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                  \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

static inline uint64_t draw(uint64_t *state)
{
    uint64_t x = *state += 0x9E3779B97F4A7C15u;

    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static inline uint64_t digest(uint64_t before, const void *bytes, size_t n)
{
    const unsigned char *at = bytes;

    for (uint64_t word; n; at += word, n -= word) {
        uint64_t chunk = 0;
        word = n < 8 ? n : 8;
        memcpy(&chunk, at, word);
        before = (before ^ chunk ^ n) * 0xD6E8FEB86659FD93u;
        before ^= before >> 32;
    }
    return before;
}

/* Numbers. */

enum {
    TAME,
    WILD
}; /* finite ones of ordinary size; or also zeros, subnormals, huge, infinite, NaN of every kind */

static const struct {
    size_t size;
    int exponent_bits, mantissa_bits;
} dtypes[] = {[OPT_FP32] = {4, 8, 23}, [OPT_BF16] = {2, 8, 7}, [OPT_FP16] = {2, 5, 10}};

static inline uint32_t special(uint64_t x, uint32_t infinity, uint32_t one_ulp_below_infinity)
{
    uint32_t quiet = (infinity & -infinity) >> 1;
    const uint32_t list[] = {0,
                             1,
                             quiet,
                             2 * quiet - 1,
                             2 * quiet,
                             one_ulp_below_infinity,
                             infinity,
                             infinity + 1,
                             infinity | quiet,
                             infinity | quiet | (quiet >> 1)};

    return list[x % (sizeof list / sizeof *list)];
}

/* The bits of a number of that type. */
static inline uint32_t number(uint64_t *seed, int dtype, int kind, int positive)
{
    int mantissa_bits = dtypes[dtype].mantissa_bits;
    uint32_t bias = (1u << (dtypes[dtype].exponent_bits - 1)) - 1;
    uint32_t infinity = (2 * bias + 1) << mantissa_bits, sign = (infinity & -infinity)
                                                                << dtypes[dtype].exponent_bits;
    uint64_t x = draw(seed), choice = x >> 60;
    uint32_t mantissa = (uint32_t)x & ((1u << mantissa_bits) - 1), some_sign = x >> 59 & 1 ? sign : 0;
    uint32_t exponent = bias - 6 + (uint32_t)(x >> 32) % 12;

    if (kind == WILD && choice < 4)
        return (uint32_t)x & (2 * sign - 1); /* anything at all */
    if (kind == WILD && choice < 7)
        return special(x >> 8 & 0xFFFF, infinity, infinity - 1) | some_sign;
    if (choice == 15 && dtype == OPT_FP32) /* beside the middle of two neighbours in bfloat16 or fp16 */
        mantissa = (mantissa & ~0xFFFFu) + (x >> 40 & 1 ? 0x8000 : 0x1000) + (uint32_t)(x >> 41) % 3 - 1;
    return exponent << mantissa_bits | mantissa | (positive ? 0 : some_sign);
}

/* Memory. */

struct array {
    char *block, *at;
    size_t bytes; /* of the block */
};

static inline struct array make_array(uint64_t *seed, int dtype, int64_t numel, int kind, int positive)
{
    size_t size = dtypes[dtype].size, shift = draw(seed) % 5 * size, bytes = shift + (size_t)numel * size;
    struct array made = {malloc(bytes ? bytes : 1), NULL, bytes};

    REQUIRE(made.block);
    memset(made.block, 0x55, bytes);
    made.at = made.block + shift;
    for (int64_t i = 0; i < numel; i++) {
        uint32_t bits = number(seed, dtype, kind, positive);
        if (size == 4)
            memcpy(made.at + 4 * i, &bits, 4);
        else
            memcpy(made.at + 2 * i, &(uint16_t){(uint16_t)bits}, 2);
    }
    return made;
}

static inline intptr_t address_of(struct array a) { return (intptr_t)a.at; }

/* Rules. */

enum { ADAM, LION, ADAGRAD, SGD, OPTIMIZERS };

static const char *const optimizer_names[] = {"adam", "lion", "adagrad", "sgd"};
static const int variants[] = {12, 8, 2, 8};

static inline void make_rule(opt_rule *rule, int optimizer, int variant, int64_t step)
{
    static const double betas[4][2] = {{0.9, 0.999}, {0.4, 0.98}, {0.95, 0.3}, {0.25, 0}};
    const double decay = 0.1, lr = 1e-2;
    int maximize = variant % 5 == 4, refused = 0;
    uint64_t seed = 77;

    if (optimizer == ADAM) {
        const double *beta = betas[variant / 3];
        refused = opt_adam_rule(rule, lr, beta[0], beta[1], 1e-8, variant % 3 ? decay : 0, variant % 3 == 1,
                                1, maximize, step, seed);
    } else if (optimizer == LION) {
        const double *beta = betas[variant / 2];
        refused = opt_lion_rule(rule, lr, beta[0], beta[1], variant % 2 ? decay : 0, maximize, step, seed);
    } else if (optimizer == ADAGRAD) {
        refused = opt_adagrad_rule(rule, lr, 1e-3, 1e-10, variant ? decay : 0, maximize, step, seed);
    } else {
        int kind = variant / 2; /* plain, momentum, with dampening, Nesterov */
        refused = opt_sgd_rule(rule, lr, kind ? 0.9 : 0, kind == 2 ? 0.25 : 0, kind == 3,
                               variant % 2 ? decay : 0, maximize, step, seed);
    }
    REQUIRE(!refused);
}

/* Forms: 3 state formats by 3 types of gradient by 5 of parameter: float32 with out none, fp32, bf16, fp16; split. */

enum { FORMS = 45, NO_OUT = -1 };

struct form {
    int state_format, grad_dtype, split, out_dtype;
};

static inline struct form form_of(int number)
{
    static const int outs[] = {NO_OUT, OPT_FP32, OPT_BF16, OPT_FP16, NO_OUT};

    return (struct form){number % 3, number / 3 % 3, number / 9 == 4, outs[number / 9]};
}

/* Batches. */

enum { SEGMENTS = 6, PARAM = 0, REMAINDER, STATE0, STATE1, GRAD, OUT, ARRAYS };

struct batch {
    struct array arrays[SEGMENTS][ARRAYS];
    int64_t numel[SEGMENTS];
    opt_segment segments[SEGMENTS];
    opt_rule rule;
};

static inline void fill_segment(struct array *arrays, uint64_t *seed, int optimizer, struct form form,
                                int64_t numel, int kind)
{
    int param = form.split ? OPT_BF16 : OPT_FP32,
        state = form.state_format == OPT_STATE_FP32 ? OPT_FP32 : OPT_BF16;

    arrays[PARAM] = make_array(seed, param, numel, kind, 0);
    arrays[STATE0] = make_array(seed, state, numel, kind, optimizer == ADAGRAD);
    arrays[STATE1] = make_array(seed, state, numel, kind, 1);
    arrays[GRAD] = make_array(seed, form.grad_dtype, numel, kind, 0);
    if (form.split) /* any 16 bits */
        arrays[REMAINDER] = make_array(seed, OPT_BF16, numel, WILD, 0);
    if (form.out_dtype != NO_OUT)
        arrays[OUT] = make_array(seed, form.out_dtype, numel, WILD, 0);
}

/* One segment of `first` elements and some shorter than a few vectors. */
static inline struct batch *make_batch(uint64_t seed, int optimizer, int variant, struct form form,
                                       int64_t first)
{
    struct batch *b = calloc(1, sizeof *b);

    REQUIRE(b);
    make_rule(&b->rule, optimizer, variant, 1);
    for (int i = 0; i < SEGMENTS; i++) {
        struct array *arrays = b->arrays[i];
        b->numel[i] = i ? (int64_t)(draw(&seed) % 100) : first;
        fill_segment(arrays, &seed, optimizer, form, b->numel[i], i % 2 ? WILD : TAME);
        uint64_t first_index = ((uint64_t)i << 32) - 50; /* the upper half of the index changes on the way */
        opt_segment_fields fields = {
            .numel = b->numel[i],
            .param = address_of(arrays[PARAM]),
            .remainder = address_of(arrays[REMAINDER]),
            .state0 = address_of(arrays[STATE0]),
            .state1 = address_of(arrays[STATE1]),
            .state_format = form.state_format,
            .grad = address_of(arrays[GRAD]),
            .grad_dtype = form.grad_dtype,
            .out = address_of(arrays[OUT]),
            .out_dtype = form.out_dtype == NO_OUT ? OPT_FP32 : form.out_dtype,
            .first_index = first_index,
        };
        REQUIRE(opt_init_segments(&b->segments[i], &b->rule, &fields, 1) == 1);
    }
    return b;
}

/* Of all memory, what lies before the arrays included. */
static inline uint64_t digest_batch(const struct batch *b)
{
    uint64_t all = 0;

    for (int i = 0; i < SEGMENTS; i++)
        for (int j = 0; j < ARRAYS; j++)
            all = digest(all, b->arrays[i][j].block, b->arrays[i][j].bytes);
    return all;
}

static inline void free_batch(struct batch *b)
{
    for (int i = 0; i < SEGMENTS; i++)
        for (int j = 0; j < ARRAYS; j++)
            free(b->arrays[i][j].block);
    free(b);
}

#endif
