/* cpus.c - the CPUs that this process may use: its affinity masks, and the quota of its control groups. */

#define _GNU_SOURCE /* CPU_ALLOC, sched_getaffinity */

#include "cpus.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

static int affinity_size(void)
{
    /* The kernel refuses a mask that is smaller than its own: try larger ones. */
    for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
        cpu_set_t *mask = CPU_ALLOC((size_t)cpus);
        size_t bytes = CPU_ALLOC_SIZE((size_t)cpus);
        int count = 0, refused;
        if (!mask)
            break;
        refused = sched_getaffinity(0, bytes, mask) ? errno : 0;
        if (!refused)
            count = CPU_COUNT_S(bytes, mask);
        CPU_FREE(mask);
        if (refused != EINVAL)
            return count > 0 ? count : 1;
    }
    return 1;
}

/* Read up to two numbers from a file; other words, as "max", end them. Returns how many there were. */
static int read_numbers(const char *base, const char *group, const char *name, double *numbers)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s%s/%s", base, group, name), count = 0;
    FILE *file = length < (int)sizeof path ? fopen(path, "re") : NULL;

    if (!file)
        return 0;
    count = fscanf(file, "%lf %lf", &numbers[0], &numbers[1]);
    fclose(file);
    return count > 0 ? count : 0;
}

/* The smallest quota of `group` and all groups above it; `group` is cut from its end. */
static double smallest_quota(const char *base, char *group, int version)
{
    double smallest = INFINITY, quota[2];

    for (;;) {
        int count = version == 2 ? read_numbers(base, group, "cpu.max", quota)
                                 : read_numbers(base, group, "cpu.cfs_quota_us", quota) +
                                       read_numbers(base, group, "cpu.cfs_period_us", quota + 1);
        if (count == 2 && quota[0] > 0 && quota[1] > 0)
            smallest = fmin(smallest, quota[0] / quota[1]);
        if (!*group)
            return smallest;
        *(strrchr(group, '/') ? strrchr(group, '/') : group) = 0;
    }
}

static int names_cpu(char *controllers)
{
    char *rest;

    for (char *name = strtok_r(controllers, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
        if (!strcmp(name, "cpu"))
            return 1;
    return 0;
}

double opt_cpu_quota(const char *root)
{
    char path[PATH_MAX], base[PATH_MAX], group[PATH_MAX], *line = NULL;
    double smallest = INFINITY;
    size_t room = 0;
    int length = snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *groups = length < (int)sizeof path ? fopen(path, "re") : NULL;

    /* A line is "number:controllers:group". Any level above the process may have a quota; in a container, its group may
     * be the root of the mount although /proc shows the host's path. If version 1 is mounted, too, version 2 is in the
     * directory `unified`. */
    while (groups && getline(&line, &room, groups) > 0) {
        char *controllers = strchr(line, ':'), *name = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!name)
            continue;
        *controllers++ = *name++ = 0;
        name[strcspn(name, "\n")] = 0;
        int version = strcmp(line, "0") ? 1 : 2;
        if ((version == 1 && !names_cpu(controllers)) || strlen(name) >= sizeof group)
            continue;
        const char *mounts[] = {version == 1 ? "/cpu" : "", version == 1 ? NULL : "/unified"};
        for (int i = 0; i < 2 && mounts[i]; i++) {
            strcpy(group, strcmp(name, "/") ? name : "");
            length = snprintf(base, sizeof base, "%s/sys/fs/cgroup%s", root, mounts[i]);
            if (length < (int)sizeof base)
                smallest = fmin(smallest, smallest_quota(base, group, version));
        }
    }
    free(line);
    if (groups)
        fclose(groups);
    return smallest;
}

int opt_usable_cpus(void)
{
    int cpus = affinity_size();
    double quota = opt_cpu_quota("");

    /* Rounded down: threads that use more time than the quota are stopped for the rest of its period, all at once. */
    return quota < cpus ? quota < 1 ? 1 : (int)quota : cpus;
}

void opt_forbid_cpu(pid_t thread, int cpu, struct opt_forbidden_cpu *forbidden)
{
    cpu_set_t others;

    /* With more CPUs than a cpu_set_t has, the mask stays. */
    if (cpu < 0 || sched_getaffinity(thread, sizeof forbidden->mask, &forbidden->mask))
        return;
    others = forbidden->mask;
    CPU_CLR((size_t)cpu, &others);
    if (CPU_COUNT(&others) && !sched_setaffinity(thread, sizeof others, &others))
        forbidden->cpu = cpu;
}

void opt_allow_cpu(struct opt_forbidden_cpu *forbidden)
{
    cpu_set_t now, others = forbidden->mask;

    if (forbidden->cpu == NO_CPU)
        return;
    CPU_CLR((size_t)forbidden->cpu, &others);
    if (!sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &others))
        sched_setaffinity(0, sizeof forbidden->mask, &forbidden->mask);
    forbidden->cpu = NO_CPU;
}
