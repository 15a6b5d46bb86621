"""The parts of bench_step.py: sides, each a process of its own, and the cases in which they meet.

reference.py  the model, its tokens and hyperparameters
serve.py      what every side's process does when asked: plain.py, ours.py and deepspeed.py are such
side.py       such a process, seen from the benchmark; turns.py starts, alternates and ends them
sides.py      the sides by name; fio_beside.py  fio at a plan's ratio; scale.py  sizes, and how often
tables.py     what tables and verdicts share; ram, nvme, formats, disk, start, depth, curve: one case each
"""
