"""What bench_sidecar.py sets beside each other: an engine that trains, a tierd, and those who ask it."""
