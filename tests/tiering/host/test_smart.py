"""The SMART log of an NVMe drive, from a drive that answers the command of the kernel; quotas likewise."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from tiering.host import quotas as quotas_module
from tiering.host import smart
from tiering.host.quotas import Quota, quotas
from tiering.host.smart import Smart, read_smart


def log_of(*, used: int, warnings: int = 0, media_errors: int = 0) -> bytes:
    """The bytes of a log: 98 % spare blocks, of which 10 % must be left, and 2 million data units written."""
    log = bytearray(512)
    log[0], log[3], log[4], log[5] = warnings, 98, 10, used
    log[48:64] = (2_000_000).to_bytes(16, "little")
    log[160:176] = media_errors.to_bytes(16, "little")
    return bytes(log)


def test_the_log_is_asked_for_as_the_specification_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvme3n1").touch()
    status = 0

    def ioctl(fd: int, request: int, command: Any) -> int:
        assert Path(f"/proc/self/fd/{fd}").resolve().name == "nvme3n1"
        # _IOWR('N', 0x41, 72 bytes); Get Log Page, log 2, 128 words, of all namespaces.
        assert (request, ctypes.sizeof(command)) == (0xC0484E41, 72)
        assert (command.opcode, command.nsid, command.cdw10) == (2, 0xFFFFFFFF, 0x007F0002)
        ctypes.memmove(command.address, log_of(used=7, media_errors=3), command.data_length)
        return status

    monkeypatch.setattr(smart.fcntl, "ioctl", ioctl)
    log = read_smart("nvme3n1", tmp_path)
    assert log == Smart(0.07, 0.98, 0.10, 1_024_000_000_000, 3, 0)
    assert log.endurance == pytest.approx(1.024e12 / 0.07)
    assert Smart.of(log_of(used=2)).endurance is None, "one per cent more or less is half of it"
    status = 0x2002
    with pytest.raises(OSError, match="status 0x2002"):
        read_smart("nvme3n1", tmp_path)
    with pytest.raises(FileNotFoundError):
        read_smart("nvme4n1", tmp_path)


def test_quotas_are_those_that_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"user": (0, 200, 50_000), "group": (0, 0, 7)}

    class Libc:
        def syscall(self, number: int, fd: int, command: Any, owner: int, quota: Any) -> int:
            assert (number, Path(f"/proc/self/fd/{fd}").readlink()) == (443, tmp_path)
            kind = {0x80000700: "user", 0x80000701: "group"}[command.value & 0xFFFFFFFF]
            assert owner == (os.geteuid() if kind == "user" else os.getegid())
            if kind not in answers:
                return -1
            # ctypes passes a pointer, whose object is the structure.
            found = quota._obj
            found.hard_blocks, found.soft_blocks, found.used_bytes = answers[kind]
            return 0

    monkeypatch.setattr(quotas_module.ctypes, "CDLL", lambda *_, **__: Libc())
    (limit,) = quotas(tmp_path)
    assert (limit, limit.left) == (Quota("user", 200 * 1024, 50_000), 200 * 1024 - 50_000)
    answers = {"group": (1, 200, 5000)}
    (limit,) = quotas(tmp_path)
    assert (limit, limit.left) == (Quota("group", 1024, 5000), 0)


def test_the_kernel_of_this_machine_answers(tmp_path: Path) -> None:
    assert all(quota.limit > 0 for quota in quotas(tmp_path))
