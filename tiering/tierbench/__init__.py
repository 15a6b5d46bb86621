"""tierbench: measures a drive, and estimates a training step on it."""
