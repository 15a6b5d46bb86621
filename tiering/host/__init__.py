"""Internal: the machine. CPUs, NUMA nodes, drives, control groups, and kernel files. No torch."""
