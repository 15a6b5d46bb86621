"""Internal: placement. Budgets and a workload in, a plan out. No torch."""
