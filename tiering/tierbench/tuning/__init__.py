"""tierbench tune: which I/O engine, block size and depth suit a drive."""
