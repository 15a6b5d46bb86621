"""The parts of bench_ranks.py: sides, each of as many processes as there are ranks, and the cases in which they meet.

serve.py    what every rank does when asked: ours.py, fsdp.py and ddp.py build what it trains
side.py     such ranks, seen from the benchmark; network.py  the network that they have to themselves
run.py      starts, alternates and ends sides; sides.py  the sides by name; scale.py  sizes, and how often
overlap.py  what a trace of a step says of the network; tables.py  what tables and verdicts share
sent.py, sharded.py, replicated.py  one case each
"""
