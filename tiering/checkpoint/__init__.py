"""Checkpoints on disk: safetensors and JSON, whole or not there. Knows files, not the engine; imports without torch."""
