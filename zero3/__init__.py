"""The training engine: groups of parameters that move between tiers while the model computes."""
