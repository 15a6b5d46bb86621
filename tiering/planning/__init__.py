"""``tiering plan``: plans without loading a model, estimates of step time, and remedies if it does not fit.

The engine does not need it.
"""
