"""Placement: budgets and a workload in, a plan out. No torch."""
