"""The parts of bench_checkpoint.py: its sides and its cases.

saver.py   what every side's process does: ours.py, torch_save.py and torch_dcp.py are such
state.py   the state of the latter two, in memory
side.py    such a process, seen from the benchmark
sides.py   the sides by name; scale.py  sizes, and how often
watch.py   memory seen from outside, page cache included; files.py  out of the page cache, or gone
dd.py      what the disk gives to dd
tables.py  what tables and verdicts share; foreground.py, background.py, snapshots.py: the cases
resumed.py the process of the side with snapshots
"""
