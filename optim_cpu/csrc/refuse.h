/* refuse.h - the one way in which a wrong argument is answered. */
#ifndef OPTIM_CPU_REFUSE_H
#define OPTIM_CPU_REFUSE_H

/* Returns -EINVAL, and has opt_invalid_argument() give the text: "argument rule", a static string. */
int opt_refuse(const char *argument_and_rule);

#endif
