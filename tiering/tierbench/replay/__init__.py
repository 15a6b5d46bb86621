"""tierbench profile: the step of a model, replayed as the engine moves it."""
