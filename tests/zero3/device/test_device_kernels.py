"""Gradients and weights on a device have the bits that the C kernels give: as torch operations, and by kernels.cu.

And how kernels.cu is compiled and launched, by the calls of NVRTC and of the driver.
"""

from __future__ import annotations

import ctypes
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.dtypes import DTYPES
from optim_cpu.formats import QuantizedFormat, quantized
from optim_cpu.kernels import ExactSum
from zero3.device import kernels as device_kernels
from zero3.device.kernels import cuda_library, fused, torch_operations
from zero3.device.kernels.encoded_weight import DeviceWeight

from .kernels_by_gcc import ACCUMULATES, DECODES, REDUCES, SQUARES, STRUCTURES, CompiledByGcc, same_bits

LAUNCHED = [*ACCUMULATES, *REDUCES, *SQUARES, *DECODES]
FORMS = [
    quantized("nf4"),
    quantized("nf4", double_quant=False, block_size=128),
    quantized("int8"),
    quantized("fp8", block_size=32),
]


def test_structures_are_as_in_the_source(by_gcc: CompiledByGcc) -> None:
    """And fit what a launch may take by value."""
    sizes = {name: ctypes.sizeof(structure) for name, structure in STRUCTURES.items()}
    assert {name: by_gcc.library[f"size_of_{name}"]() for name in STRUCTURES} == sizes
    assert max(sizes["Rule"] + sizes["Segments"], sizes["Flats"] + 8, sizes["Sources"] + 20) <= 4096


@pytest.fixture
def calls(by_gcc: CompiledByGcc, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Stands for NVRTC and the driver, of a GPU that torch tells of."""
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a stand-in")
    stream = SimpleNamespace(cuda_stream=0x7F12_3456_7890)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(cuda_library.ctypes, "CDLL", lambda path: by_gcc.library)
    return by_gcc.library


def test_compiled_and_launched(calls: ctypes.CDLL) -> None:
    """By the calls of NVRTC and of the driver, from a thread without a context, on that thread's stream."""
    library = cuda_library.CompiledKernels(torch.device("cuda", 3))
    options = ctypes.c_char.in_dll(calls, "last_options")
    assert ctypes.string_at(ctypes.addressof(options)).decode().split() == [
        "--gpu-architecture=sm_90",
        "-std=c++17",
        "-ftz=false",
        "-prec-div=true",
        "-prec-sqrt=true",
        "-fmad=false",
    ]
    flat, target = every_kind(torch.bfloat16)[: 1 << 14], torch.ones(1 << 14)
    sums = torch.empty(4, dtype=torch.float64)

    def launch() -> None:
        fused.block_squares(library, [flat], sums)
        fused.accumulate(library, target, flat, overwrite=False)
        fused.accumulate(library, target, flat, overwrite=False)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert sums.tolist() == [float(squares_in_c(block)) for block in flat.split(4096)]
    assert torch.equal(target, 1 + flat.float() + flat.float())
    assert ctypes.c_void_p.in_dll(calls, "last_stream").value == 0x7F12_3456_7890
    assert ctypes.c_int.in_dll(calls, "programs_alive").value == 0


def test_what_cannot_be_compiled(
    calls: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Is said once, with the compiler's words; and what fails later is an error."""
    device = torch.device("cuda", 5)
    library = cuda_library.CompiledKernels(device)
    with pytest.raises(
        cuda_library.UnavailableError, match=r'NVRTC_ERROR_COMPILATION\n.*"nothing" is undefined'
    ):
        library.launch("nothing<0>", 1, [])
    with pytest.raises(cuda_library.UnavailableError, match="named symbol not found"):
        library.launch("accumulate<7, 7, 7>", 1, [])
    with pytest.raises(RuntimeError, match=r"cuLaunchKernel failed: error 1; .*CUDA_LAUNCH_BLOCKING"):
        library.launch(cuda_library.PROBE, 0, [])
    monkeypatch.setattr(cuda_library, "PROBE", "nothing<0>")
    on_gpu = SimpleNamespace(is_cuda=True, device=device)
    assert [cuda_library.kernels_of(on_gpu) for _ in range(3)] == [None] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a stand-in could not be compiled" in caplog.text and '"nothing" is undefined' in caplog.text
    assert ctypes.c_int.in_dll(calls, "programs_alive").value == 0


def test_the_compiler_beside_torch(
    by_gcc: CompiledByGcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is taken from where NVIDIA's packages have it; what cannot be loaded is passed over."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(cuda_library.UnavailableError, match=r"libnvrtc\.so\.99 was found neither"):
        cuda_library.nvrtc(99)
    for directory in (tmp_path / "torch" / "lib", tmp_path / "nvidia" / "cu99" / "lib"):
        directory.mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libnvrtc.so.99").write_bytes(b"no library")
    library = tmp_path / "nvidia" / "cu99" / "lib" / "libnvrtc.so.99.1"
    library.symlink_to(by_gcc.library._name)
    assert cuda_library.nvrtc(99)._name == str(library)


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one for AMD's GPUs is, whose tensors say that they are CUDA's."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(cuda_library.UnavailableError, match="not a build for CUDA"):
        cuda_library.CompiledKernels(torch.device("cuda", 0))


def squares_in_c(flat: Tensor) -> ExactSum:
    return kernels.sum_of_squares(flat.data_ptr(), DTYPES[flat.dtype], flat.numel())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares(dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tensors, whose blocks are added side by side: none ends where another's begins, one has no block."""
    monkeypatch.setattr(torch_operations, "BLOCKS_AT_ONCE", 3)
    generator = torch.Generator().manual_seed(1)
    numels = [1, 31, 4095, 4096, 0, 4097, 3 * 4096 + 5, 50_001, 6 * 4096]
    flats = [(torch.randn(numel, generator=generator) * 1e2).to(dtype) for numel in numels]
    expected = [squares_in_c(flat) for flat in flats]
    assert device_kernels.sums_of_squares(flats) == expected
    assert [device_kernels.sum_of_squares(flat) for flat in flats] == expected
    assert device_kernels.sums_of_squares([]) == []


def test_sums_of_squares_of_many_blocks() -> None:
    """Whose sums are of every size."""
    generator = torch.Generator().manual_seed(2)
    flat = torch.randn(2500 * 4096, generator=generator).view(2500, 4096)
    flat *= 10.0 ** torch.randint(-9, 9, (2500, 1), generator=generator)
    flat = flat.view(-1)
    assert device_kernels.sum_of_squares(flat) == squares_in_c(flat)
    assert float(squares_in_c(flat)) == pytest.approx(float(flat.double().square_().sum()))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_sums_of_squares_show_what_is_not_finite(bad: float, way: str) -> None:
    flats = [torch.full((9000,), 3e38) for _ in range(3)]  # whose squares float32 does not hold
    flats[1][-1] = bad
    assert [total.is_finite for total in device_kernels.sums_of_squares(flats)] == [True, False, True]


@pytest.mark.slow
def test_launches_of_sums_are_shared(by_gcc: CompiledByGcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """By as many tensors as one launch takes."""
    monkeypatch.setattr(cuda_library, "kernels_of", lambda tensor: by_gcc)
    generator = torch.Generator().manual_seed(7)
    numels = ([1, 1023, 1024, 1025, 3000] * 20 + [0, 7]) * 2
    flats = [torch.randn(numel, generator=generator).bfloat16() for numel in numels]
    by_gcc.launched.clear()
    assert device_kernels.sums_of_squares(flats) == [squares_in_c(flat) for flat in flats]
    assert by_gcc.launched == ["block_squares<1>"] * 2  # of 202 that are not empty


def every_kind(dtype: torch.dtype) -> Tensor:
    """Every bfloat16 or float16, or as many float32: among them ties and their neighbours of both, and NaN."""
    bits = torch.arange(1 << 16)
    if dtype is not torch.float32:
        return bits.to(torch.int16).view(dtype)
    lower = torch.tensor(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001]
    )
    return (bits << 16 | lower[bits % len(lower)]).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name}-{form.group_size}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(dtype: torch.dtype, form: QuantizedFormat, way: str, by_gcc: CompiledByGcc) -> None:
    """Whole matrices and parts, with scales of every size, also where the codes of scales are not aligned."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(33, 1152, generator=generator)
    values *= 10.0 ** torch.randint(-42, 4, (33, 1), generator=generator)
    weight = DeviceWeight(form, *form.encode(values))
    decoded, launched = weight.decoded(dtype), len(by_gcc.launched)  # by the kernels in C
    parts = ((0, 33), (0, 1152)), ((5, 7), (0, 1152)), ((3, 33), (128, 1024)), ((4, 4), (0, 128))
    for rows, columns in parts:
        part = weight._decoded_elsewhere(dtype, rows, columns)
        assert same_bits(part, decoded[slice(*rows), slice(*columns)].contiguous())
    expected = [f"decode<{form.code:d}, {DTYPES[dtype]:d}>"] * 3 if way == "kernels.cu" else []
    assert by_gcc.launched[launched:] == expected


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_scale_that_is_not_finite_is_decoded_to_nan(scale: float, way: str) -> None:
    form = quantized("int8")
    codes, scales = form.encode(torch.arange(-64.0, 64.0).view(2, 64))
    scales.view(torch.float32)[1] = scale
    weight = DeviceWeight(form, codes, scales)
    for dtype in DTYPES:
        part, decoded = weight._decoded_elsewhere(dtype, (0, 2), (0, 64)), weight.decoded(dtype)
        assert part[1].isnan().all() and torch.equal(part[0], decoded[0])
        assert way == "torch operations" or same_bits(part, decoded)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_accumulate(target: torch.dtype, source: torch.dtype, overwrite: bool, way: str) -> None:
    """A cast keeps what a NaN carries: torch's is another, which no step can tell."""
    grad, ours = every_kind(source), every_kind(target)
    ours = ours[torch.randperm(len(ours), generator=torch.Generator().manual_seed(1))]
    theirs = ours.clone()
    device_kernels.accumulate(ours, grad, overwrite=overwrite)
    kernels.accumulate(
        theirs.data_ptr(),
        DTYPES[target],
        grad.data_ptr(),
        DTYPES[source],
        len(grad),
        overwrite=overwrite,
    )
    if way == "torch operations":
        assert torch.equal(ours.isnan(), theirs.isnan())
        ours, theirs = ours.nan_to_num(nan=0), theirs.nan_to_num(nan=0)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_reduce(target: torch.dtype, source: torch.dtype, overwrite: bool, way: str) -> None:
    """Of one, of some, and of more than a launch takes; zeros keep their sign; sources are left as they are."""
    generator, any_of = torch.Generator().manual_seed(1), [every_kind(dtype) for dtype in (target, source)]
    for count, numel in ((1, 5000), (5, 5000), (257, 99)):
        places = torch.randint(1 << 16, (count + 1, numel), generator=generator)
        ours, theirs = (any_of[0][places[0]] for _ in range(2))
        sources, copies = (list(any_of[1][places[1:]]) for _ in range(2))
        device_kernels.reduce(ours, sources, 1 / 3, overwrite=overwrite)
        from_c = DTYPES[target], [each.data_ptr() for each in copies], DTYPES[source], numel
        kernels.reduce(theirs.data_ptr(), *from_c, 1 / 3, overwrite=overwrite)
        if way == "torch operations" or count > fused.MOST_SOURCES:
            assert torch.equal(ours.isnan(), theirs.isnan())
            ours, theirs = ours.nan_to_num(nan=0), theirs.nan_to_num(nan=0)
        assert same_bits(ours, theirs)
        assert all(map(same_bits, sources, copies))
