# The compiled module's types are in aio_csrc/aio.h, where each signature is written once.
from typing import Any

ffi: Any
lib: Any
