"""What scripts that were written for DeepSpeed call, with its names and signatures, on top of the engine."""
