"""Remedies that name arguments of the engine's methods.

A front end replaces them in the errors that its users see, because these users call other methods.
"""

NEW_OPTIMIZER_STATE = "load_optimizer_states=False starts with new optimizer state"
NEW_SCHEDULE = "load_lr_scheduler_states=False keeps this schedule as it is"
PART_OF_MODEL = "load_module_strict=False ignores tensors that only one side has"
ANOTHER_CHECKPOINT = "load another checkpoint (tag=)"
FEWER_CHECKPOINTS = "keep fewer checkpoints (keep=)"
CONFIGURED_VALUE = "pass strict_args=False to initialize() to train with the value of the configuration"
