"""Forward and backward passes: hooks, schedule of groups, prefetch, saved tensors, gradients."""
