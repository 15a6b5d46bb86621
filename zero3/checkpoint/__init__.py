"""Checkpoints of an engine, saved and loaded by all ranks, and exports of weights."""
