"""Compiles kernels.cu for the GPU of this machine with NVRTC, which is part of torch, and launches it by CUDA's driver.

Both are called by their C interfaces, which NVIDIA keeps stable. The interface that torch has for them is private, and
some versions lack it. A kernel is compiled at its first launch, in a fraction of a second. Nothing is stored on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero3.device.kernels.fused import THREADS, Kernels

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cu")
PROBE = "block_squares<0>"

# Exact arithmetic, also where it is not an intrinsic, and no flush of subnormals: the defaults, except -fmad.
OPTIONS = ("-std=c++17", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-fmad=false")


class UnavailableError(Exception):
    """Kernels cannot be compiled or loaded on this machine. The message has the reason."""


def kernels_of(tensor: Tensor) -> Kernels | None:
    """The compiled kernels of the GPU that has ``tensor``; None if there are none, and torch operations are used."""
    return _kernels_on(tensor.device) if tensor.is_cuda else None


@functools.cache
def _kernels_on(device: torch.device) -> Kernels | None:
    try:
        return CompiledKernels(device)
    except UnavailableError as error:
        log.warning(
            "the kernels for %s could not be compiled: %s; its optimizer steps run as torch operations, to the same"
            " bits but slower",
            torch.cuda.get_device_name(device),
            error,
        )
        return None


class CompiledKernels:
    """The kernels of one GPU. Any thread may launch them, as the threads of autograd do."""

    def __init__(self, device: torch.device) -> None:
        if torch.version.cuda is None:
            raise UnavailableError("this torch is not a build for CUDA")
        self._device = device
        self._nvrtc = nvrtc(int(torch.version.cuda.split(".")[0]))
        self._driver = Driver(device.index)
        major, minor = torch.cuda.get_device_capability(device)
        self._architecture = f"sm_{major}{minor}"
        self._functions: dict[str, c_void_p] = {}
        self._lock = threading.Lock()
        self._function(PROBE)  # if one kernel can be compiled, all can: a later failure is an error

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Queue ``kernel`` on the calling thread's stream of the device (Kernels.launch)."""
        addresses = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.launch(self._function(kernel), blocks, THREADS, stream, addresses)

    def _function(self, kernel: str) -> c_void_p:
        with self._lock:
            if kernel not in self._functions:
                image, name = compiled(self._nvrtc, SOURCE.read_text(), kernel, self._architecture)
                self._functions[kernel] = self._driver.load(image, name)
            return self._functions[kernel]


def nvrtc(cuda: int) -> ctypes.CDLL:
    """The compiler for this major version of CUDA: torch's, or one that the dynamic loader finds.

    torch's comes first, because another one may not support the GPU. Raises UnavailableError if there is none.
    """
    name = f"libnvrtc.so.{cuda}"
    for path in _beside_torch(f"libnvrtc-builtins.so.{cuda}*"):  # the compiler looks for it by its name
        with contextlib.suppress(OSError):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    for path in (*_beside_torch(f"{name}*"), name):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = c_char_p
        return library
    raise UnavailableError(f"{name} was found neither next to torch nor by the dynamic loader")


def _beside_torch(pattern: str) -> Iterator[str]:
    """Matching files in torch's directory and in those of NVIDIA's packages."""
    packages = Path(torch.__file__).parents[1]
    for directory in ("torch/lib", "nvidia/*/lib"):
        yield from map(str, sorted(packages.glob(f"{directory}/{pattern}")))


def compiled(library: ctypes.CDLL, source: str, kernel: str, architecture: str) -> tuple[bytes, bytes]:
    """The machine code of ``kernel`` (a template in ``source``, with its parameters), and its name in that code.

    Raises UnavailableError with the output of the compiler.
    """

    def call(name: str, *arguments: Any) -> None:
        code = getattr(library, name)(*arguments)
        if code:
            raise UnavailableError(
                f"{name}: {library.nvrtcGetErrorString(code).decode()}{_log_of(library, program)}"
            )

    program = c_void_p()
    call("nvrtcCreateProgram", byref(program), source.encode(), b"kernels.cu", 0, None, None)
    try:
        call("nvrtcAddNameExpression", program, kernel.encode())
        options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
        call("nvrtcCompileProgram", program, len(options), (c_char_p * len(options))(*options))
        size, name = c_size_t(), c_char_p()
        call("nvrtcGetCUBINSize", program, byref(size))
        image = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, image)
        call("nvrtcGetLoweredName", program, kernel.encode(), byref(name))
        assert name.value is not None
        return image.raw, name.value  # a copy of the name, because the program owns the original
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _log_of(library: ctypes.CDLL, program: c_void_p) -> str:
    """The output of the compiler, after a newline; empty if there is none."""
    size = c_size_t()
    if not program or library.nvrtcGetProgramLogSize(program, byref(size)) or size.value <= 1:
        return ""
    output = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, output)
    return "\n" + output.value.decode(errors="replace")


class Driver:
    """The functions of CUDA's driver that are used here, for one device that torch has initialized.

    The driver works in the current context of a thread, which may be missing or belong to another device. So each call
    here runs in the primary context of the device, which torch uses as well, and then restores the previous context.
    Raises UnavailableError if the driver cannot be loaded.
    """

    def __init__(self, device: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnavailableError(str(error)) from None
        self._library.cuLaunchKernel.argtypes = (
            c_void_p, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_void_p, POINTER(c_void_p), c_void_p,
        )  # fmt: skip
        handle, self._context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), handle)

    def load(self, image: bytes, name: bytes) -> c_void_p:
        """The function ``name`` in ``image``, which stays loaded. Raises UnavailableError if it cannot be loaded."""
        module, function = c_void_p(), c_void_p()
        try:
            with self._in_context():
                self._call("cuModuleLoadData", byref(module), image)
                self._call("cuModuleGetFunction", byref(function), module, name)
        except RuntimeError as error:
            raise UnavailableError(str(error)) from None
        return function

    def launch(
        self, function: c_void_p, blocks: int, threads: int, stream: int, arguments: ctypes.Array[c_void_p]
    ) -> None:
        """Queue a kernel, with the addresses of its arguments."""
        with self._in_context():
            self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        before = c_void_p()
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(before))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            reason = text.value.decode() if text.value is not None else f"error {code}"
            raise RuntimeError(
                f"{name} failed: {reason}; CUDA_LAUNCH_BLOCKING=1 shows whether an earlier kernel caused it"
            )
