"""Internal: the command ``tierbench``, which measures a drive and estimates a training step on it."""
