"""Front ends of other libraries on the engine: one module for each library, which imports it.

transformers.py           Trainer of transformers and the trainers of TRL
_training_arguments.py    the configuration of an engine, completed from TrainingArguments
_traffic.py               bytes, bandwidth and stall of an engine between two log lines
"""
