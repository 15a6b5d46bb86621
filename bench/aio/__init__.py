"""The parts of bench_aio.py: fio and us as two processes with the same load, and what their pairs say."""
