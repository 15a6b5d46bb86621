"""The parts of bench_larger_than_memory.py: a process that builds and trains, and what watches it from outside.

shape.py    Llama's shapes by size; words.py  the text
child.py    the process: builds or loads, trains, tells its phases; room.py  what it may take, and what it will need
shards.py   weights as a Hugging Face style directory, written a parameter at a time
watch.py    starts the process, samples its memory, and keeps what came of it
tables.py, picture.py  the report
"""
