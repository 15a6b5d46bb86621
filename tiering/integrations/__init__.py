"""Front ends of other libraries on the engine: one module for each library, which imports it.

accelerate.py             Accelerator of accelerate; _accelerator_arguments.py completes its configuration
deepspeed.py              programs that import deepspeed; _deepspeed_children is for the processes that they start
_deepspeed_zero.py        their module deepspeed.zero
_deepspeed_trainer.py     their Trainer, which trains more than once; _deepspeed_models.py the models that they load
transformers.py           Trainer of transformers and the trainers of TRL
_trainer_engine.py        the engines of such a Trainer, and the methods of its Accelerator
_training_arguments.py    the configuration of an engine, completed from TrainingArguments
axolotl.py                the plugin of axolotl
lightning.py              Trainer and Fabric of lightning; pytorch_lightning.py has the Trainer of that package
_lightning.py             configuration, precision and checkpoints of both strategies
_lightning_trainer.py     the strategy of a Trainer, _lightning_fabric.py that of Fabric
_engines.py               the engine of each model
_remedies.py              remedies of errors, in the words of each front end
_missing.py               the error if a library is missing
_ranks.py                 the processes that a loop counts, and the ranks that train together
_traffic.py               bytes, bandwidth and stall of an engine between two log lines
"""
