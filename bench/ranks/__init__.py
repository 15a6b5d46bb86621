"""The parts of bench_ranks.py: its sides, each of as many processes as there are ranks, and its cases.

ours.py, fsdp.py, ddp.py  what a rank of each side trains; torch_loop.py  what the last two share
side.py      such ranks, with a network to themselves (network.py); sides.py  the sides by name
measured.py  a side after its turns, and the run that measures it; scale.py  sizes, and how often
overlap.py   what a trace of a step says of the network; tables.py  tables and verdicts of the cases
sent.py, sharded.py, replicated.py  one case each
"""
