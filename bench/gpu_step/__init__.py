"""The parts of bench_gpu_step.py: sides, each a process of its own, and what is made of their rounds.

shape.py   Llama's shapes by size: elements, FLOPs, activations; what fits a card and its host; llama.py  the module
work.py    what all sides are asked to train, and how
serve.py   the process of every side: plain.py, ours.py and deepspeed.py are such
meter.py   what only the device can tell: memory, time, calls of its allocator
side.py    such a process, seen from the benchmark; run.py starts, alternates and ends them within a time
sides.py   the sides by name, with the memory each needs; waves.py  which of them fit beside each other
link.py    the pinned rates that gpu_copy.py measures; tables.py  tables and verdicts; cases.py  what meets what
"""
