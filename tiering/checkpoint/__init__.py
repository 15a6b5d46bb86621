"""Internal: checkpoints on disk. Safetensors and JSON, whole or not there.

Knows files, not the engine; imports without torch.
"""

from tiering import _lazy

# For names of ``deepspeed.checkpoint``: see _module_finder.py.
__getattr__, __dir__ = _lazy.names(__name__, {})
