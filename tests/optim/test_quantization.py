"""Block formats on tensors: the decoded weight is one, however it is computed, and products are those with it."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from optim_cpu import formats, kernels, quantization
from optim_cpu.formats import QUANTIZED, QuantizedFormat, quantized
from optim_cpu.quantization import LARGEST, Weight, decode_blocks, decode_scales

FORMATS = [
    quantized("nf4"),
    quantized("nf4", double_quant=False, block_size=128),
    quantized("int8"),
    quantized("fp8", block_size=32),
]


def name_of(form: QuantizedFormat) -> str:
    return f"{form.name}-{form.group_size}"


def encoded(form: QuantizedFormat, shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Weight]:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return values, Weight(form, *form.encode(values))


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_is_decoded_to_the_same_bits_by_kernels_and_by_torch(
    form: QuantizedFormat, dtype: torch.dtype
) -> None:
    values, weight = encoded(form, (100, 384))
    decoded = weight.decoded(dtype)
    assert torch.equal(decoded, weight._by_torch(0, 100, 0, 384).to(dtype))
    assert torch.equal(decoded, form.decode(form.encode(values), dtype))
    part = weight.decoded(dtype, slice(40, 90), slice(128, 256))
    assert torch.equal(part, decoded[40:90, 128:256])
    assert torch.equal(part, weight._by_torch(40, 90, 128, 256).to(dtype))
    kept = form.decode(form.encode(values))
    assert (
        (kept - values).abs()
        <= form.error
        * values.abs().view(100, -1, form.group_size).amax(-1).repeat_interleave(form.group_size, 1)
        * (1 + 2**-6)
    ).all()


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_with_the_decoded_weight(
    form: QuantizedFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "CHUNK", 64 * 384)  # several chunks
    _, weight = encoded(form, (200, 384))
    decoded = weight.decoded(torch.float64)
    for inputs in (1, 3, 16, 17, 64, 65):
        x = torch.randn(inputs, 384, generator=torch.Generator().manual_seed(inputs)).to(dtype)
        y = torch.randn(inputs, 200, generator=torch.Generator().manual_seed(inputs)).to(dtype)
        tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}[dtype]
        torch.testing.assert_close(
            weight.product(x).double(), x.double() @ decoded.t(), rtol=tolerance, atol=tolerance
        )
        torch.testing.assert_close(
            weight.transposed_product(y).double(), y.double() @ decoded, rtol=tolerance, atol=tolerance
        )
        assert weight.product(x).dtype is weight.transposed_product(y).dtype is dtype
        strided = torch.cat((x, x), 1)[:, :384]
        assert torch.equal(weight.product(strided), weight.product(x))
        strided = torch.cat((y, y), 1)[:, :200]
        assert torch.equal(weight.transposed_product(strided), weight.transposed_product(y))
        before = weight.product(x)
        kernels.set_thread_count(kernels.thread_count() + 1)
        assert torch.equal(weight.product(x), before)


class Meeting(Weight):
    """A weight that two threads multiply at once: both have decoded a part of theirs when the first one multiplies."""

    barrier = threading.Barrier(2)

    def decoded(self, *args: Any, **kwargs: Any) -> Tensor:
        values = super().decoded(*args, **kwargs)
        self.barrier.wait(60)
        return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_threads_decode_to_memory_of_their_own(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "CHUNK", 64 * 384)  # several chunks
    form = quantized("int8")
    weights = [Meeting(form, *form.encode(torch.randn(200, 384) + bias)) for bias in (-1, 1)]
    x, y = torch.randn(65, 384).to(dtype), torch.randn(65, 200).to(dtype)
    with ThreadPoolExecutor(2) as pool:
        products = list(pool.map(lambda weight: (weight.product(x), weight.transposed_product(y)), weights))
    for weight, (product, transposed) in zip(weights, products, strict=True):
        alone = Weight(form, weight._codes, weight._scales)
        assert torch.equal(product, alone.product(x))
        assert torch.equal(transposed, alone.transposed_product(y))


def test_memory_of_decoded_weights_stays_with_its_thread_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    mappings: list[weakref.ref[mmap]] = []

    def noted(descriptor: int, nbytes: int, *, flags: int) -> mmap:
        pages = mmap(descriptor, nbytes, flags=flags)
        sizes.append(nbytes)
        mappings.append(weakref.ref(pages))
        return pages

    def multiply() -> None:
        # The smallest mapping has room for a chunk: the second and the last two products need no other.
        for rows, dtype in (
            (8, torch.bfloat16),
            (64, torch.bfloat16),
            (64, torch.float32),
            (8, torch.bfloat16),
            (0, torch.float32),
        ):
            encoded(form, (rows, 384))[1].product(torch.ones(65, 384, dtype=dtype))
        assert [pages() is None for pages in mappings] == [True, False]

    monkeypatch.setattr(quantization.mmap, "mmap", noted)
    monkeypatch.setattr(quantization, "CHUNK", 64 * 384)
    form = quantized("int8")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(multiply).result()
        pool.submit(multiply).result()
    assert sizes == [64 * 384 * 2, 64 * 384 * 4]
    assert [pages() for pages in mappings] == [None, None]


def test_the_bytes_per_weight_are_those_of_qlora() -> None:
    single = quantized("nf4", double_quant=False)
    assert quantized("nf4").bytes_per_element == 0.5 + 1 / 64 + 4 / (64 * 256)
    assert (single.bytes_per_element, quantized("int8").bytes_per_element) == (0.5625, 1.0625)
    assert quantized("fp8", block_size=128).bytes_per_element == 1 + 4 / 128
    for form in FORMATS:
        codes, scales = form.encode(torch.ones(33, 384))
        assert form.nbytes(33 * 384) == codes.nbytes + scales.nbytes
        assert form.scale_bytes(33 * 384) == scales.nbytes
        assert not form.is_exact


def test_state_is_encoded_by_the_same_notion() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    assert torch.equal(formats.FP32.decode(formats.FP32.encode(values)), values)
    assert torch.equal(formats.SPLIT.decode(formats.SPLIT.encode(values)), values)
    rounded = formats.BF16.decode(formats.BF16.encode(values))
    assert 0 < ((rounded - values) / values).abs().max() <= formats.BF16.error
    assert (formats.SPLIT.is_exact, formats.SPLIT.bytes_per_element, formats.BF16.nbytes(10)) == (True, 4, 20)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("double_quant", [True, False])
def test_a_range_of_blocks_is_decoded_as_in_the_whole(name: str, double_quant: bool) -> None:
    form = quantized(name, double_quant=double_quant)
    codes, scales = form.encode(torch.randn(6, 4096, generator=torch.Generator().manual_seed(6)))
    moved = torch.cat((torch.zeros(1, dtype=torch.uint8), scales))[1:]
    floats = decode_scales(form, moved, 6 * 64)
    part = codes.flatten()[640 // form.code_elements : 20480 // form.code_elements]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole = form.decode((codes, scales), dtype).flatten()
        assert torch.equal(decode_blocks(form, part, floats[10:320], dtype), whole[640:20480])
    assert decode_blocks(form, codes[0, :0], floats[:0], torch.float32).shape == (0,)


def test_a_stack_of_matrices_is_one_matrix_of_all_rows() -> None:
    form = quantized("nf4")
    values = torch.randn(5, 32, 128, generator=torch.Generator().manual_seed(4))
    codes, scales = form.encode(values)
    assert codes.shape == (5, 32, 64)
    whole = form.decode((codes, scales))
    assert whole.shape == values.shape
    assert torch.equal(Weight(form, codes, scales).decoded(torch.float32, slice(96, 128)), whole[3])
    moved = torch.cat((torch.zeros(1, dtype=torch.uint8), scales))[1:]
    assert torch.equal(form.decode((codes, moved)), whole)  # at an odd address


def test_what_cannot_be_encoded_is_named() -> None:
    form = quantized("nf4")
    with pytest.raises(
        ValueError, match=r"unknown quantised format 'int3'; choose one of 'nf4', 'int8', 'fp8'"
    ):
        quantized("int3")
    with pytest.raises(ValueError, match=r"block_size is 100; it must be a power of two from 32 to 4096"):
        quantized("nf4", block_size=100)
    with pytest.raises(
        ValueError, match=r"the last dimension is 100; it must be a multiple of the block size, 64"
    ):
        form.encode(torch.ones(3, 100))
    with pytest.raises(
        TypeError, match=r"the values are torch.int8; they must be float32, bfloat16 or float16"
    ):
        form.encode(torch.ones(3, 64, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"an element is infinite or NaN"):
        form.encode(torch.full((3, 64), torch.inf))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("double_quant", [True, False])
def test_what_is_encoded_decodes_to_finite_values(name: str, double_quant: bool) -> None:
    form = quantized(name, double_quant=double_quant)
    values = torch.rand(8, 4096, generator=torch.Generator().manual_seed(5)) * 2 - 1
    # A mean of the scales far from the largest one, and a product with 127 that is rounded up.
    values[:4] /= 100
    for largest in (LARGEST, LARGEST * (1 - 2**-23), LARGEST * 0.9):
        values[:, ::64] = largest
        values[:, 1::64] = -largest
        codes = form.encode(values)
        for dtype in (torch.float32, torch.bfloat16):
            assert form.decode(codes, dtype).isfinite().all()
    values[7, 4000] = LARGEST * 1.01
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=r"the magnitude of an element is above 1.7e\+38"):
            form.encode(values.to(dtype))
