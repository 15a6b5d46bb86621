/* rules.c - checks hyperparameters, and derives the float32 scalars of kernels.h from them in double.
 *
 * The derivation runs in the default floating-point environment. The compiler may move arithmetic across a change of the
 * environment, but not a call: so the functions that derive are separate and not inlined.
 */

#include <errno.h>
#include <math.h>

#include "fp_environment.h"
#include "isa.h"
#include "refuse.h"

#define NOT_INLINED __attribute__((noinline))

/* Both are false for NaN. From the bound on, rounding to float32 gives infinity. */
static int is_scalar(double x) { return x >= 0 && x < 0x1.ffffffp127; }
static int is_beta(double x) { return x >= 0 && x < 1; }

static int check_rule(const opt_rule *rule, double lr, double weight_decay, int64_t step)
{
    if (!rule)
        return opt_refuse("rule must be the address of an opt_rule");
    if (!is_scalar(lr))
        return opt_refuse("lr must be 0 or more, and finite as float32");
    if (!is_scalar(weight_decay))
        return opt_refuse("weight_decay must be 0 or more, and finite as float32");
    if (step < 1)
        return opt_refuse("step must be 1 or more: it counts the step being taken");
    return 0;
}

static int check_betas(double beta1, double beta2)
{
    if (!is_beta(beta1))
        return opt_refuse("beta1 must be at least 0 and below 1");
    if (!is_beta(beta2))
        return opt_refuse("beta2 must be at least 0 and below 1");
    return 0;
}

/* The fields that all rules have. decay_kind applies if weight_decay is not 0. */
static NOT_INLINED opt_rule derive_common(int optimizer, double lr, double weight_decay, int decay_kind,
                                          int maximize, int64_t step, uint64_t seed)
{
    return (opt_rule){
        .optimizer = optimizer,
        .decay_kind = weight_decay != 0 ? decay_kind : OPT_DECAY_NONE,
        .scale = maximize ? -1 : 1,
        .decay = (float)(decay_kind == OPT_DECAY_DECOUPLED ? lr * weight_decay : weight_decay),
        .step_size = (float)lr,
        .key = opt_mix(opt_mix(seed) + (uint64_t)step),
    };
}

static NOT_INLINED void derive_betas(opt_rule *rule, double beta1, double beta2)
{
    rule->beta1 = (float)beta1;
    rule->one_minus_beta1 = (float)(1 - beta1);
    rule->beta2 = (float)beta2;
    rule->one_minus_beta2 = (float)(1 - beta2);
}

static NOT_INLINED void derive_adam(opt_rule *rule, double lr, double beta1, double beta2, double eps,
                                    int bias_correction, int64_t step)
{
    double first = bias_correction ? 1 - pow(beta1, (double)step) : 1;
    double second = bias_correction ? 1 - pow(beta2, (double)step) : 1;
    double size = lr / first;
    double scale = 1 / (size * sqrt(second));

    /* For lr = 0 the step must be 0: an infinite denominator. The infinity is in the eps term, because infinity times
     * v = 0 would be NaN. */
    rule->denominator_scale = is_scalar(scale) ? (float)scale : 0;
    rule->denominator_eps = is_scalar(scale) ? (float)(eps / size) : INFINITY;
}

int opt_adam_rule(opt_rule *rule, double lr, double beta1, double beta2, double eps, double weight_decay,
                  int decoupled, int bias_correction, int maximize, int64_t step, uint64_t seed)
{
    int refused = check_rule(rule, lr, weight_decay, step);

    if (!refused)
        refused = check_betas(beta1, beta2);
    if (refused)
        return refused;
    if (!is_scalar(eps))
        return opt_refuse("eps must be 0 or more, and finite as float32");

    fp_environment saved = fp_enter_default();
    *rule = derive_common(OPT_ADAM, lr, weight_decay, decoupled ? OPT_DECAY_DECOUPLED : OPT_DECAY_L2,
                          maximize, step, seed);
    derive_betas(rule, beta1, beta2);
    derive_adam(rule, lr, beta1, beta2, eps, bias_correction, step);
    fp_restore(saved);
    return 0;
}

int opt_lion_rule(opt_rule *rule, double lr, double beta1, double beta2, double weight_decay, int maximize,
                  int64_t step, uint64_t seed)
{
    int refused = check_rule(rule, lr, weight_decay, step);

    if (!refused)
        refused = check_betas(beta1, beta2);
    if (refused)
        return refused;

    fp_environment saved = fp_enter_default();
    *rule = derive_common(OPT_LION, lr, weight_decay, OPT_DECAY_DECOUPLED, maximize, step, seed);
    derive_betas(rule, beta1, beta2);
    fp_restore(saved);
    return 0;
}

static NOT_INLINED void derive_adagrad(opt_rule *rule, double lr, double lr_decay, double eps, int64_t step)
{
    rule->step_size = (float)(lr / (1 + (double)(step - 1) * lr_decay));
    rule->eps = (float)eps;
}

int opt_adagrad_rule(opt_rule *rule, double lr, double lr_decay, double eps, double weight_decay,
                     int maximize, int64_t step, uint64_t seed)
{
    int refused = check_rule(rule, lr, weight_decay, step);

    if (refused)
        return refused;
    if (!is_scalar(lr_decay))
        return opt_refuse("lr_decay must be 0 or more, and finite as float32");
    if (!is_scalar(eps))
        return opt_refuse("eps must be 0 or more, and finite as float32");

    fp_environment saved = fp_enter_default();
    *rule = derive_common(OPT_ADAGRAD, lr, weight_decay, OPT_DECAY_L2, maximize, step, seed);
    derive_adagrad(rule, lr, lr_decay, eps, step);
    fp_restore(saved);
    return 0;
}

static NOT_INLINED void derive_sgd(opt_rule *rule, double momentum, double dampening, int64_t step)
{
    rule->momentum = (float)momentum;
    rule->carry = step > 1 ? (float)momentum : 0;
    rule->gain = step > 1 ? (float)(1 - dampening) : 1;
}

int opt_sgd_rule(opt_rule *rule, double lr, double momentum, double dampening, int nesterov,
                 double weight_decay, int maximize, int64_t step, uint64_t seed)
{
    int refused = check_rule(rule, lr, weight_decay, step);

    if (refused)
        return refused;
    if (!is_scalar(momentum))
        return opt_refuse("momentum must be 0 or more, and finite as float32");
    if (!is_scalar(fabs(dampening)))
        return opt_refuse("dampening must be finite as float32");
    if (nesterov && (momentum == 0 || dampening != 0))
        return opt_refuse("nesterov must come with a momentum above 0 and a dampening of 0");

    fp_environment saved = fp_enter_default();
    *rule = derive_common(OPT_SGD, lr, weight_decay, OPT_DECAY_L2, maximize, step, seed);
    rule->nesterov = nesterov != 0;
    derive_sgd(rule, momentum, dampening, step);
    fp_restore(saved);
    return 0;
}

int opt_state_count(const opt_rule *rule)
{
    uint32_t momentum;

    /* Compare the bits: a subnormal momentum equals 0 in a step and in some callers' environments, and not in others. */
    memcpy(&momentum, &rule->momentum, sizeof momentum);
    if (rule->optimizer == OPT_SGD)
        return momentum != 0;
    return rule->optimizer == OPT_ADAM ? 2 : 1;
}
