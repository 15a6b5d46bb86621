"""What the benchmarks have in common: where it was measured, tables and verdicts."""
