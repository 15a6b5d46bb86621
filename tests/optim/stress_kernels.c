/* stress_kernels.c - the kernels without Python, for the sanitizers: several callers share the pool, a child forks in
 * between, and every instruction set must leave the same bytes. Exit code 0 and silence mean success.
 *
 *     gcc -g -O1 -std=gnu11 -ffp-contract=off -fno-math-errno -fno-trapping-math -pthread -fsanitize=thread \
 *         -Ioptim_cpu/csrc optim_cpu/csrc/[a-z]*.c tests/optim/stress_kernels.c -lm -o stress && ./stress
 *
 * and the same with -fsanitize=address,undefined.
 */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels.h"

enum { NUMEL = 300001, TAIL = 7, CALLERS = 3, ROUNDS = 4 };

#define REQUIRE(condition)                                                                                   \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                  \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

struct state {
    float *p, *m, *v;
    uint16_t *grad, *out;
    double norm;
};

/* Exact sizes, so that the address sanitizer sees one element too many. */
static struct state make_state(void)
{
    struct state s = {malloc(NUMEL * 4), calloc(NUMEL, 4), calloc(NUMEL, 4),
                      malloc(NUMEL * 2), calloc(NUMEL, 2), 0};

    REQUIRE(s.p && s.m && s.v && s.grad && s.out);
    for (int i = 0; i < NUMEL; i++) {
        s.p[i] = (float)(i % 1009) - 500;
        s.grad[i] = (uint16_t)(0x3C00 + i % 777);
    }
    return s;
}

static void free_state(struct state *s)
{
    free(s->p);
    free(s->m);
    free(s->v);
    free(s->grad);
    free(s->out);
}

static void add_segment(opt_segment *segment, const opt_rule *rule, struct state *s, int64_t from, int64_t to)
{
    REQUIRE(!opt_segment_init(segment, rule, 0, to - from, (intptr_t)(s->p + from), 0,
                              (intptr_t)(s->m + from), (intptr_t)(s->v + from), OPT_STATE_FP32,
                              (intptr_t)(s->grad + from), OPT_BF16, (intptr_t)(s->out + from), OPT_BF16, 0));
}

static void *work(void *result)
{
    struct state s = make_state();

    for (int round = 1; round <= ROUNDS; round++) {
        opt_segment segments[2];
        opt_rule rule;
        REQUIRE(!opt_adam_rule(&rule, 1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 0, round, 0));
        add_segment(&segments[0], &rule, &s, 0, NUMEL - TAIL);
        add_segment(&segments[1], &rule, &s, NUMEL - TAIL, NUMEL);
        REQUIRE(!opt_run(segments, 2, &rule, 0.5f));
        REQUIRE(!opt_accumulate((intptr_t)s.p, OPT_FP32, (intptr_t)s.out, OPT_BF16, NUMEL, 0));
        REQUIRE(!opt_accumulate((intptr_t)s.grad, OPT_FP16, (intptr_t)s.p, OPT_FP32, NUMEL, 1));
        REQUIRE(!opt_accumulate((intptr_t)s.grad, OPT_BF16, (intptr_t)s.p, OPT_FP32, NUMEL, 1));
        REQUIRE(!opt_sum_of_squares((intptr_t)s.p, OPT_FP32, NUMEL, s.norm, &s.norm));
    }
    *(struct state *)result = s;
    return NULL;
}

static void require_same(const struct state *a, const struct state *b)
{
    REQUIRE(!memcmp(a->p, b->p, NUMEL * 4));
    REQUIRE(!memcmp(a->m, b->m, NUMEL * 4));
    REQUIRE(!memcmp(a->v, b->v, NUMEL * 4));
    REQUIRE(!memcmp(a->out, b->out, NUMEL * 2));
    REQUIRE(a->norm == b->norm);
}

static void run_callers(const struct state *expected)
{
    pthread_t threads[CALLERS];
    struct state results[CALLERS];

    for (int i = 0; i < CALLERS; i++)
        REQUIRE(!pthread_create(&threads[i], NULL, work, &results[i]));
    for (int i = 0; i < CALLERS; i++) {
        REQUIRE(!pthread_join(threads[i], NULL));
        require_same(&results[i], expected);
        free_state(&results[i]);
    }
}

static void run_in_child(const struct state *expected)
{
    int status;
    pid_t child = fork();

    REQUIRE(child >= 0);
    if (child == 0) {
        struct state result;
        work(&result);
        require_same(&result, expected);
        _exit(0);
    }
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
}

int main(void)
{
    struct state expected;
    const char *isa;

    REQUIRE(!opt_set_instruction_set("portable") && !opt_set_thread_count(1));
    work(&expected);
    for (int i = 0; (isa = opt_available_instruction_set(i)); i++) {
        REQUIRE(!opt_set_instruction_set(isa) && !opt_set_thread_count(3));
        run_callers(&expected);
#if !defined(__SANITIZE_THREAD__) /* which does not support threads started after a fork */
        run_in_child(&expected);
#else
        (void)run_in_child;
#endif
    }
    free_state(&expected);
    return 0;
}
