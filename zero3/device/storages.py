"""Storages of torch: over memory of an arena, exchanged with each other, and closed, so that torch refuses reads.

Note [A closed storage cannot be read]
    Torch keeps a mark on each storage. While the mark is set, each access to the address of the memory raises: by a
    kernel, ``numpy()``, ``data_ptr()``, or an extension. (CUDA graphs set the mark for tensors that have lost their
    memory.) The mark costs no time, because torch checks it in any case. An exchange of the memory of two storages also
    exchanges their marks (``exchange_pointers``). So a group's storage is closed once: it is open while it has the
    memory of a lease, and closed again after the lease was returned.

    CUDA builds of torch have a function that sets the mark and the message of the error. Other builds have only the
    mark. There, its byte in torch's object is found by an experiment on a separate storage: the byte lies behind two
    marks that another function sets, and it is accepted only if reads of that storage fail while it is set.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, UntypedStorage
from torch.utils import dlpack
from torch.utils._python_dispatch import _disable_current_modes

from tiering.errors import ResidencyError
from tiering.storage.arena import Lease
from tiering.storage.read_only import Loading

log = logging.getLogger(__name__)


def as_tensor(lease: Lease, nbytes: int | None = None) -> Tensor:
    """The lease's bytes, or the first ``nbytes``, as a uint8 tensor that keeps the arena's memory reachable."""
    if lease.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # The tensor refers to the view, and the view to the lease, so the lease is not dropped while the tensor lives. An
    # explicit release still frees the range.
    return torch.frombuffer(lease.view, dtype=torch.uint8, count=-1 if nbytes is None else nbytes)


def content_of(loading: Loading) -> Tensor:
    """The bytes of a load from files. Raises SwapError if a read failed, WeightsError if a file has changed."""
    content = loading.wait()
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def bytes_of(storage: UntypedStorage) -> Tensor:
    """The bytes of ``storage`` as a flat uint8 tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def without_bytes(tensor: Tensor) -> Tensor:
    """A tensor that shares the version of ``tensor``, which counts changes in place, and not its memory."""
    return with_version_of(tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device))


def with_version_of(tensor: Tensor, data: Tensor) -> Tensor:
    """A tensor with the memory of ``data`` that shares the version of ``tensor``."""
    alias = tensor.detach()
    alias.data = data
    return alias


def share_version(first: Tensor, other: Tensor) -> bool:
    """Whether the two count their changes in place together. False where torch cannot tell."""
    if not _can_set_version():
        return False
    version, before = other._version, first._version
    torch._C._autograd._unsafe_set_version_counter((first,), (version + 1,))
    try:
        return other._version == version + 1
    finally:
        torch._C._autograd._unsafe_set_version_counter((first,), (before,))


def check_version(tensor: Tensor, saved: int, shape: torch.Size | None = None) -> None:
    """Raise RuntimeError, as torch does, if ``tensor`` has another version than ``saved``, that when it was saved.

    ``shape``: the one of the saved tensor, if ``tensor`` only shares its version.
    """
    if tensor._version != saved:
        # A nested tensor has none.
        shape_text = "nested" if tensor.is_nested else tuple(tensor.shape if shape is None else shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{tensor.dtype} {shape_text}], at version {tensor._version}; expected version {saved} instead"
        )


@cache
def _can_set_version() -> bool:
    try:
        tensor = torch.empty(0, device="cpu")
        torch._C._autograd._unsafe_set_version_counter((tensor,), (1,))
    except (AttributeError, TypeError):
        return False
    return tensor._version == 1


def exchange_pointers(first: Tensor, second: Tensor) -> None:
    """Exchange the memory and the sizes of the storages of two tensors on one device. All their views follow.

    The storages have one size, or one of them is empty.
    """
    # Queued kernels of a device keep their addresses, so this sets no order on the device: code that frees the memory
    # waits for an event behind these kernels.
    first.untyped_storage()._swap_data_ptr_(second.untyped_storage())  # type: ignore[attr-defined]


def apart(part: Tensor) -> Tensor:
    """A contiguous view as a tensor that is its whole storage. It keeps the memory of the viewed tensor alive."""
    # The capsule refers to ``part``, and so to the memory of the whole, as long as the new tensor lives.
    tensor: Tensor = dlpack.from_dlpack(dlpack.to_dlpack(part))  # type: ignore[attr-defined] # torch does not list it
    return tensor


@cache
def can_exchange(device: torch.device = torch.device("cpu")) -> bool:  # noqa: B008 # a constant
    """Whether this torch can exchange the memory of storages on ``device``. The method is private, so it is tried."""
    try:
        whole = torch.arange(4, dtype=torch.uint8, device=device)
        first, second = torch.empty(2, dtype=torch.uint8, device=device), apart(whole[2:])
        first.untyped_storage().resize_(0)
        exchange_pointers(first, second)
        works = first.tolist() == [2, 3] and second.untyped_storage().nbytes() == 0
    except (AttributeError, RuntimeError, TypeError):
        works = False
    if not works:
        log.warning(
            "torch %s cannot exchange storage pointers (%s): unsharding resizes storages, and on a CPU copies",
            *(torch.__version__, device.type),
        )
    return works


log = logging.getLogger(__name__)

TORCH_MESSAGE = (
    "Cannot access data pointer of Storage that is invalid"  # if torch cannot be given another one
)
_FIRST_BYTES = 72  # of torch's object, which is longer
_LARGEST_ELEMENT = 16  # bytes, of a complex number in float64


def refusal(name: str) -> str:
    """The message of an error about a read of ``name`` that bypassed the engine."""
    return (
        f"[{ResidencyError.code}] {name} was read while its values are on another tier, in a way that does not fetch"
        " them: through a view that was kept after its block, in code that bypasses __torch_function__, or in an"
        " extension. Keep a copy (weight.detach().clone()), or read the parameter itself inside `with"
        " tiering.gathered(param):`. If the view is from the same forward, raise device_budget: its memory was needed"
        " for another group"
    )


def close_storage(tensor: Tensor, name: str) -> None:
    """Refuse every read of the storage of ``tensor`` from now on, if torch supports it. Errors contain ``name``."""
    if can_close():
        _close(tensor, refusal(name))


class Placeholder:
    """The value of a group's resharded parameters: a NaN with their shapes and dtypes, in a closed storage.

    The storage is open while a parameter takes or loses this value, because torch's profiler then reads the memory of
    both. Errors contain ``name``.
    """

    def __init__(
        self,
        forms: Iterable[tuple[Sequence[int], torch.dtype]],
        dtype: torch.dtype,
        device: torch.device,
        name: str,
    ) -> None:
        # Both hold NaNs of ``dtype``, and one is closed. An exchange opens or closes the storage of the views.
        nan, self._other = (
            torch.full((_LARGEST_ELEMENT // dtype.itemsize,), torch.nan, dtype=dtype, device=device)
            for _ in range(2)
        )
        # The same bytes for each dtype: a NaN in ``dtype``, and any value in others.
        self.views = [nan.view(each)[0].expand(tuple(shape)) for shape, each in forms]
        self._nan = nan
        self._closes = can_close()
        self._closed = False
        if self._closes:
            _close(nan, refusal(name))  # the message stays with the storage, the mark moves
            exchange_pointers(nan, self._other)

    def open(self) -> None:
        """Permit reads."""
        if self._closed:
            exchange_pointers(self._nan, self._other)
            self._closed = False

    def close(self) -> None:
        """Refuse reads."""
        if self._closes and not self._closed:
            exchange_pointers(self._nan, self._other)
            self._closed = True


def explain(error: BaseException) -> None:
    """Add ``refusal`` as a note to an error about a closed storage that has torch's own message."""
    if isinstance(error, RuntimeError) and TORCH_MESSAGE in str(error):
        error.add_note(refusal("an offloaded parameter"))


@cache
def can_close() -> bool:
    """Whether this version of torch can close a storage, and exchanges the mark with the memory."""
    with _disable_current_modes():  # a dispatch mode that reads operands would fail
        works = can_exchange() and _closes() and _exchanges_the_mark()
    if not works:
        log.debug(
            "torch %s cannot refuse reads of a storage: kept views of offloaded parameters read as NaN",
            torch.__version__,
        )
    return works


def _close(tensor: Tensor, message: str) -> None:
    address = tensor.untyped_storage()._cdata
    if _has_function():
        torch._C._set_storage_data_ptr_access_error_msg(address, message)
        return
    place = _place_of_mark()
    assert place is not None
    # For a write, torch checks the mark only if another mark is set as well.
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    _byte(address + place).value = 1


def _has_function() -> bool:
    return hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")


def _closes() -> bool:
    return _has_function() or _place_of_mark() is not None


@cache
def _place_of_mark() -> int | None:
    """The offset of the mark in torch's object of a storage; None if it is not behind the two marks against writes."""
    if not hasattr(torch._C, "_set_throw_on_mutable_data_ptr"):
        return None
    probe = torch.zeros(1, device="cpu")
    # The address of torch's object for the storage, which lives as long as ``probe``: until the last access below.
    address = probe.untyped_storage()._cdata
    before = ctypes.string_at(address, _FIRST_BYTES)
    torch._C._set_throw_on_mutable_data_ptr(probe)
    after = ctypes.string_at(address, _FIRST_BYTES)
    changed = [(place, after[place]) for place in range(_FIRST_BYTES) if before[place] != after[place]]
    first = changed[0][0] if changed else _FIRST_BYTES
    place = first + 2
    if changed != [(first, 1), (first + 1, 1)] or place >= _FIRST_BYTES or after[place] != 0:
        return None
    mark = _byte(address + place)
    mark.value = 1
    refuses = _refuses(probe)
    # Cleared before the read below, which must succeed again.
    mark.value = 0
    return place if refuses and probe.sum() == 0 else None


def _exchanges_the_mark() -> bool:
    closed, other = torch.zeros(2, device="cpu"), torch.ones(2, device="cpu")
    view = closed[1:]
    _close(closed, TORCH_MESSAGE)
    if not _refuses(view):
        return False
    exchange_pointers(closed, other)
    if _refuses(view) or not _refuses(other):
        return False
    exchange_pointers(closed, other)
    return _refuses(view) and not _refuses(other)


def _refuses(tensor: Tensor) -> bool:
    """Whether reading and writing ``tensor`` both fail."""
    refused = 0
    for use in (tensor.sum, tensor.zero_):
        try:
            use()
        except RuntimeError:
            refused += 1
    return refused == 2


def _byte(address: int) -> ctypes.c_ubyte:
    return ctypes.c_ubyte.from_address(address)
