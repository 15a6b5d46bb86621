/* refuse.h - the error return for an invalid argument. */
#ifndef OPTIM_CPU_REFUSE_H
#define OPTIM_CPU_REFUSE_H

/* Returns -EINVAL, and stores the text for opt_invalid_argument() of this thread: "argument rule", a static string. */
int opt_refuse(const char *argument_and_rule);

#endif
