"""CPU optimizer arithmetic: fused passes over flat memory. Knows nothing of tiers.

``optim_cpu.kernels`` works on addresses and needs no torch; ``optim_cpu.adam`` works on torch tensors.
"""
