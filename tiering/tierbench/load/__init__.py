"""The load: private files, and windows of reads and writes over them, the engine's way."""
