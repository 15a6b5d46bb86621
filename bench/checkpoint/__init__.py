"""The parts of bench_checkpoint.py: sides, each a process of its own, and the cases in which they meet.

serve.py  what every side's process does when asked: ours.py, torch_save.py and torch_dcp.py are such
state.py  the peers' state, in memory; side.py  such a process, seen from the benchmark; run.py starts and ends them
watch.py  memory seen from outside, page cache included; dd.py  what the disk gives; scale.py  sizes, and how often
sides.py  the sides by name; tables.py  tables and verdicts; foreground and background: the cases
"""
