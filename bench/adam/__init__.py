"""The parts of bench_adam.py: our rows, the peers' rows, and what their rounds say."""
