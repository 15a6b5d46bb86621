"""tierbench tune: finds the I/O engine, block size and depth that suit a drive."""
