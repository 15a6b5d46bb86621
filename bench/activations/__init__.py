"""The parts of bench_activations.py: its sides and its cases.

saved.py          what autograd saves of the reference model, and the bytes that a step swaps: by its shapes alone
plain.py          plain PyTorch, alone and under save_on_cpu, in a process of its own; ours is step/ours.py
sides.py          the sides by name; scale.py  sizes, and how often
bits, rows, tiers: one case each
"""
