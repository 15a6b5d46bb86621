/* cpus.h - the CPUs that this process and its threads may use. Define _GNU_SOURCE, for cpu_set_t. */
#ifndef OPTIM_CPU_CPUS_H
#define OPTIM_CPU_CPUS_H

#include <sched.h>
#include <sys/types.h>

#define NO_CPU (-1)

/* A CPU that was taken out of the affinity mask of a thread. */
struct opt_forbidden_cpu {
    int cpu;        /* or NO_CPU */
    cpu_set_t mask; /* before that */
};

/* Number of threads that can compute at the same time: the size of the affinity mask, or the quota of the control groups
 * (opt_cpu_quota in kernels.h) if it is smaller. At least 1. */
int opt_usable_cpus(void);

/* Take `cpu` out of the affinity mask of `thread`, unless it is the only one there. */
void opt_forbid_cpu(pid_t thread, int cpu, struct opt_forbidden_cpu *forbidden);

/* Restore the mask of the calling thread if the present one is still that of opt_forbid_cpu(). Another one, as of
 * taskset, stays. */
void opt_allow_cpu(struct opt_forbidden_cpu *forbidden);

#endif
