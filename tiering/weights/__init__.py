"""Weights on disk in Hugging Face's format: headers of safetensors files, and streams of their tensors."""
