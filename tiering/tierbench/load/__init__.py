"""The load: private files, and timed intervals of reads and writes over them, on the engine's I/O path."""
