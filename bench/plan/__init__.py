"""Predicted step times beside real ones."""
