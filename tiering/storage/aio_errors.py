"""The errors of an I/O context: -errno of C as an exception that names the transfer, the file and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from tiering._aio import lib
from tiering.errors import EngineStateError, SwapError
from tiering.storage.io_stats import errno_text
from tiering.storage.request import KIND_NAMES, FilePiece, Request

ALIGNMENT: int = lib.AIO_ALIGNMENT
"""Bytes: addresses and offsets on a file opened with O_DIRECT are multiples of it."""

_REMEDIES = {
    errno.EIO: "the disk returned an I/O error: see dmesg and the drive's SMART log",
    errno.ENODATA: "the file ends before the requested bytes (truncated?), or the medium is bad: see dmesg",
    errno.ENOSPC: "the file system is full: free space there or choose another directory",
    errno.EDQUOT: "the disk quota is used up: raise it or choose another directory",
    errno.EFBIG: "the file would pass the process's file size limit: raise it with `ulimit -f`",
    errno.ECANCELED: "not all of it was issued: an earlier transfer failed, or the context was closed",
    errno.EBADMSG: "the bytes read differ from the bytes written (CRC32C): the disk, its cable or the memory is bad;"
    " see dmesg and the drive's SMART log, and start again from weights saved before",
    errno.EBADF: "the descriptor was closed, or opened for the other direction",
    errno.ENOMEM: "the system is out of memory",
}

_START_HINTS = {
    ("io_uring", errno.EPERM): " (forbidden: a container's seccomp profile, or kernel.io_uring_disabled)",
    ("io_uring", errno.ENOSYS): " (this kernel has no io_uring, or a seccomp profile hides it)",
    ("io_uring", errno.EOPNOTSUPP): " (it needs Linux 5.11)",
    ("libaio", errno.EAGAIN): " (fs.aio-max-nr is used up: raise it with sysctl)",
}


def start_error(engine: str, code: int) -> SwapError:
    """The error of an engine that does not start."""
    hint = _START_HINTS.get((engine, code), "")
    return SwapError(
        f"I/O engine {engine!r} cannot start: {errno_text(code)}{hint};"
        " 'threads' works everywhere, and 'auto' uses the first engine that starts",
        errno=code,
        filename="",
        offset=0,
    )


class AioErrors:
    """Makes the errors of the context of process ``pid``. ``files`` are (name, whether O_DIRECT) by index."""

    def __init__(self, pid: int, files: Mapping[int, tuple[str, bool]]) -> None:
        self._pid = pid
        self._files = files

    def describe(self, request: Request) -> str:
        """The transfer in words, with its tensors, size and place."""
        name = self._files.get(request.file, (f"file {request.file}", False))[0]
        kind = KIND_NAMES[request.kind]
        if request.kind == lib.AIO_FLUSH:
            return f"{kind} of {name}"
        tensors = ", ".join(repr(tensor) for tensor in request.names)
        of_tensors = f" of {tensors}" if tensors else ""
        size = f"{request.nbytes} bytes"
        if len(pieces := request.pieces or request.vector) > 1:
            size += f" in {len(pieces)} pieces, the first"
        return f"{kind}{of_tensors} ({size}) at offset {request.offset / 2**30:.6g} GiB of {name}"

    def failed(self, request: Request, code: int, cause: SwapError | None) -> SwapError:
        """The error of a transfer that ended with ``code``; ``cause``: the failure that cancelled it."""
        remedy = _REMEDIES.get(code, "see dmesg")
        if request.canceled:
            remedy = "it was canceled by cancel()"
        elif cause is not None:
            remedy = f"it was never issued, because an earlier transfer failed: {cause}"
        name = self._files.get(request.failed_file, ("", False))[0]
        place = ""
        if (request.failed_file, request.failed_at) != (request.file, request.offset):
            of = "the file" if request.failed_file == request.file else name
            place = f" at byte {request.failed_at} of {of}"
        message = f"{self.describe(request)} failed: {errno_text(code)}{place}; {remedy}"
        error = SwapError(message, errno=code, filename=name, offset=request.failed_at, names=request.names)
        error.__cause__ = cause
        return error

    def refused(self, request: Request, code: int, priority: int) -> Exception:
        """The error of a call for ``request`` that C has refused."""
        name, direct = self._files.get(request.file, ("", False))
        text = self.describe(request)
        address = 0 if request.buffer is None else request.buffer.address
        if code == errno.EINVAL:
            if unknown := {piece.file for piece in request.vector or (request,)} - self._files.keys():
                return ValueError(f"{text}: no such file index ({min(unknown)}); add_file returns it")
            if not 0 <= priority < lib.AIO_PRIORITIES:
                return ValueError(f"{text}: priority {priority} is not 0 .. {lib.AIO_PRIORITIES - 1}")
            pieces = request.pieces or (request.offset,)
            if piece := next((piece for piece in request.vector if self._is_unaligned(piece, address)), None):
                (name, direct), address, pieces = self._files[piece.file], address + piece.at, (piece.offset,)
            offset = next((offset for offset in pieces if offset % ALIGNMENT), request.offset)
            length = request.nbytes // len(pieces) if request.pieces else 0
            if direct and (address | offset | length) % ALIGNMENT:
                piece_length = f", length of a piece ({length})" if request.pieces else ""
                text += (
                    f" needs address ({address:#x}){piece_length} and offset ({offset})"
                    f" to be multiples of {ALIGNMENT}, because the file is open with O_DIRECT"
                )
        return self.refusal(code, text, name, request.offset, request.names)

    def _is_unaligned(self, piece: FilePiece, address: int) -> bool:
        """Whether the file refuses the piece of a buffer at ``address``."""
        return self._files[piece.file][1] and bool(((address + piece.at) | piece.offset) % ALIGNMENT)

    def refusal(
        self, code: int, call: str, name: str = "", offset: int = 0, names: tuple[str, ...] = ()
    ) -> Exception:
        """The error of ``call``, which C has refused; ``name`` is the file's."""
        if code == errno.ECHILD:
            return EngineStateError(
                f"{call}: this AioContext belongs to process {self._pid} and did not survive the fork;"
                " open one in the child"
            )
        if code == errno.ESHUTDOWN:
            return EngineStateError(f"{call}: the AioContext is closed; open a new one")
        return SwapError(
            f"{call} was refused: {errno_text(code)}", errno=code, filename=name, offset=offset, names=names
        )
