"""The health of an NVMe drive, from its SMART log (NVM Express base specification 2.0, 5.16.1.3).

The kernel lets only root, with CAP_SYS_ADMIN, send this command to a drive; it reads 512 bytes and changes nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

# linux/nvme_ioctl.h: _IOWR('N', 0x41, struct nvme_admin_cmd), which has 72 bytes.
_ADMIN_COMMAND = 0xC0484E41
_GET_LOG_PAGE = 0x02
_SMART_LOG = 0x02
_ALL_NAMESPACES = 0xFFFFFFFF
_LOG_BYTES = 512
_TIMEOUT_MS = 2000
# Bytes: data units are thousands of 512 bytes.
_DATA_UNIT = 512_000


class _Command(ctypes.Structure):
    _fields_ = (
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("reserved", ctypes.c_uint16),
        ("nsid", ctypes.c_uint32),
        ("cdw2", ctypes.c_uint32),
        ("cdw3", ctypes.c_uint32),
        ("metadata", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("metadata_length", ctypes.c_uint32),
        ("data_length", ctypes.c_uint32),
        ("cdw10", ctypes.c_uint32),
        ("cdw11", ctypes.c_uint32),
        ("cdw12", ctypes.c_uint32),
        ("cdw13", ctypes.c_uint32),
        ("cdw14", ctypes.c_uint32),
        ("cdw15", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Smart:
    """A SMART log. ``used`` is the part of the endurance that is used, by the drive's estimate; it may exceed 1.

    ``spare`` and ``least_spare`` are fractions of the spare blocks: those that are left, and those below which the
    drive may fail. ``warnings`` are the bits of its critical warnings; ``written`` is in bytes, since it was made.
    """

    used: float
    spare: float
    least_spare: float
    written: int
    media_errors: int
    warnings: int

    @classmethod
    def of(cls, log: bytes) -> Smart:
        """The fields of the log's bytes."""

        def integer(first: int, nbytes: int) -> int:
            return int.from_bytes(log[first : first + nbytes], "little")

        return cls(
            used=log[5] / 100,
            spare=log[3] / 100,
            least_spare=log[4] / 100,
            written=integer(48, 16) * _DATA_UNIT,
            media_errors=integer(160, 16),
            warnings=log[0],
        )

    @property
    def endurance(self) -> float | None:
        """Bytes that may be written in all, by the drive's own estimate; None as long as it is too coarse."""
        return self.written / self.used if self.used >= 0.05 else None


def read_smart(name: str, devices: Path = Path("/dev")) -> Smart:
    """The log of the NVMe drive that the kernel calls ``name`` ("nvme0n1"). Raises OSError if it cannot be read."""
    log = (ctypes.c_uint8 * _LOG_BYTES)()
    command = _Command(
        opcode=_GET_LOG_PAGE,
        nsid=_ALL_NAMESPACES,
        address=ctypes.addressof(log),
        data_length=_LOG_BYTES,
        # The number of 32-bit words, less one, above the number of the log.
        cdw10=(_LOG_BYTES // 4 - 1) << 16 | _SMART_LOG,
        timeout_ms=_TIMEOUT_MS,
    )
    fd = os.open(devices / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = fcntl.ioctl(fd, _ADMIN_COMMAND, command)
    finally:
        os.close(fd)
    if status:
        raise OSError(0, f"the drive refused the command with status {status:#x}")
    return Smart.of(bytes(log))
