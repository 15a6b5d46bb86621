"""The names and signatures of DeepSpeed that scripts call, on top of the engine."""
