"""Tiered state as ordinary tensors, and access to parameters between passes."""
