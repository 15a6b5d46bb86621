"""Internal: the machine. CPUs, NUMA nodes, drives, control groups, kernel files. Only cpu_dtypes.py needs torch."""
