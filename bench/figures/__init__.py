"""What the benchmarks have in common: sides taking turns, paired ratios, where it was measured, tables and verdicts."""
