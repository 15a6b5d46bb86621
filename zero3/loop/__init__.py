"""The training loop: which call is legal when, the optimizer step, data, and stop signals."""
