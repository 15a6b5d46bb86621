#include "refuse.h"

#include <errno.h>

#include "kernels.h"

static _Thread_local const char *invalid_argument = "";

const char *opt_invalid_argument(void) { return invalid_argument; }

int opt_refuse(const char *argument_and_rule)
{
    invalid_argument = argument_and_rule;
    return -EINVAL;
}
