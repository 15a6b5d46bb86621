"""Weights on disk, as Hugging Face tools keep them: what the files say of themselves, and streams of their tensors."""
