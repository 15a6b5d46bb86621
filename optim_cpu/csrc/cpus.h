/* cpus.h - the CPUs that this process may use. */
#ifndef OPTIM_CPU_CPUS_H
#define OPTIM_CPU_CPUS_H

/* Number of threads that can compute at the same time: the size of the affinity mask, or the quota of the control groups
 * (opt_cpu_quota in kernels.h) if it is smaller. At least 1. */
int opt_usable_cpus(void);

#endif
