"""Optimizers over tiled state: update rules, the pipeline over NVMe, updates on a GPU."""
