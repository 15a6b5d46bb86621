"""Models without memory, checks of a model, and the first values of its parameters."""
