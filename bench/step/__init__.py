"""The parts of bench_step.py: its sides and its cases.

plain.py, ours.py, deepspeed.py  the sides, each run in a process of its own
sides.py          the sides by name; fio_beside.py  fio at a plan's ratio; scale.py  sizes, and how often
measured.py       the run that measures sides; tables.py  tables and verdicts of the cases
ram, nvme, formats, disk, start, depth, curve: one case each
"""
