"""The part of bench_tiles.py that measures: its sides, its sizes and its goals."""
