"""Internal: weights on disk in Hugging Face's format. Headers of safetensors files, and streams of their tensors."""
