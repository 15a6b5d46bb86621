"""What the benchmarks share: sides in processes of their own, rounds in which they alternate, and the report.

child.py            in a side's process: answers the benchmark's calls over a pipe
process.py          in a side's process: its memory, disk traffic, CPU time and age, as the kernel counts them
training.py         in a side's process: builds a model once, then trains so many steps per round
reference_model.py  the model, its tokens and its hyperparameters, the same for every side
engine.py, deepspeed_engine.py, plain_loop.py   what sides of the same kind share
side.py             in the benchmark: starts, calls and ends the processes of one side
rounds.py           in the benchmark: sides started together, alternating rounds, sides that fail
measured.py         in the benchmark: sides that train, after their rounds
report.py           tables and verdicts; machine.py  where they were measured
command.py          options, facts, files and exit status of the commands

A benchmark is a folder with its sides (modules that run in processes of their own), its cases and its tables.
child.py, process.py, training.py, reference_model.py, plain_loop.py and deepspeed_engine.py import nothing but the
standard library, torch and deepspeed: the interpreter of a peer has nothing else.
"""
