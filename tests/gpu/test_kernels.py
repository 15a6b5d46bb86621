"""The optimizers' arithmetic on a GPU gives the bits of the C kernels: by kernels.cu, and as torch operations."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import cycle

import pytest
import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.formats import QuantizedFormat, quantized
from optim_cpu.kernels import DType, Rule, StateFormat
from zero3.device import kernels as device_kernels
from zero3.device.kernels import Segment, cuda_library, torch_operations
from zero3.device.kernels.encoded_weight import DeviceWeight

from .conftest import no_wait

pytestmark = pytest.mark.gpu

CODES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
FORMS = [quantized("nf4"), quantized("nf4", double_quant=False), quantized("int8"), quantized("fp8")]
NUMELS = [1, 31, 4095, 4096, 4097, 0, 3 * 4096 + 5, 50_001, 1_000_003]


@pytest.fixture(params=["kernels.cu", "torch operations"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tests that ask for it run both ways. NVRTC comes with torch: that kernels.cu is not compiled is a failure."""
    if request.param == "torch operations":
        monkeypatch.setattr(cuda_library, "kernels_of", lambda tensor: None)
    else:
        assert cuda_library.kernels_of(torch.empty(1, device="cuda")) is not None, "the log says why"
    return str(request.param)


def spread(numel: int, seed: int) -> Tensor:
    """Values of every magnitude that training meets, denormal ones too."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-44, 12, (numel,), generator=generator).double()
    return (torch.randn(numel, generator=generator).double() * 10**exponents).float()


def every_kind(dtype: torch.dtype) -> Tensor:
    """Every bfloat16 or float16, or as many float32: among them ties and their neighbours of both, and NaN."""
    bits = torch.arange(1 << 16)
    if dtype is not torch.float32:
        return bits.to(torch.int16).view(dtype)
    lower = torch.tensor(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001]
    )
    return (bits << 16 | lower[bits % len(lower)]).to(torch.int32).view(torch.float32)


def squares_in_c(flat: Tensor) -> kernels.ExactSum:
    return kernels.sum_of_squares(flat.data_ptr(), CODES[flat.dtype], flat.numel())


def assert_same_bits(there: Tensor, here: Tensor, name: str = "") -> None:
    assert torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", CODES)
def test_sums_of_squares(dtype: torch.dtype, way: str) -> None:
    most = torch.finfo(dtype).max
    flats = [spread(numel, numel).clamp(-most, most).to(dtype) for numel in NUMELS]
    expected = [squares_in_c(flat) for flat in flats]
    assert 0 < float(expected[-1]) < math.inf
    on_gpu = [flat.cuda() for flat in flats]
    assert device_kernels.sums_of_squares(on_gpu) == expected
    assert device_kernels.sum_of_squares(on_gpu[-1]) == expected[-1]
    assert device_kernels.sums_of_squares(on_gpu * 20) == expected * 20  # more than a launch takes


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_sums_of_squares_show_what_is_not_finite(bad: float, way: str) -> None:
    flats = [torch.full((10_000,), 3e38, device="cuda") for _ in range(3)]
    flats[1][7777] = bad
    assert [total.is_finite for total in device_kernels.sums_of_squares(flats)] == [True, False, True]


def test_places_beyond_32_bits() -> None:
    """What kernels.cu counts elements in. 8 GiB for the squares, 16 for the sum."""
    assert cuda_library.kernels_of(torch.empty(1, device="cuda")) is not None
    numel = (1 << 32) + 5000
    free, _ = torch.cuda.mem_get_info()
    if free < 5 * numel:
        pytest.skip(f"20 GiB of device memory are not free, only {free / 2**30:.1f}")
    flat = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    flat[0], flat[5000], flat[-1] = 3, 5, 7
    assert float(device_kernels.sum_of_squares(flat)) == 9 + 25 + 49
    grad = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    device_kernels.accumulate(flat, grad, overwrite=False)
    assert [flat[i].item() for i in (0, 1, 5000, numel - 2, numel - 1)] == [4, 1, 6, 1, 8]
    assert int(torch.count_nonzero(flat[: 1 << 31])) == 1 << 31
    del flat, grad
    torch.cuda.empty_cache()


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("source", CODES)
@pytest.mark.parametrize("target", CODES)
def test_accumulate(target: torch.dtype, source: torch.dtype, overwrite: bool, way: str) -> None:
    """A cast keeps what a NaN carries: torch's is another, which no step can tell."""
    grad, accumulated = every_kind(source), every_kind(target)
    accumulated = accumulated[torch.randperm(len(accumulated), generator=torch.Generator().manual_seed(1))]
    on_gpu, grad_there = accumulated.cuda(), grad.cuda()
    with no_wait():
        device_kernels.accumulate(on_gpu, grad_there, overwrite=overwrite)
    kernels.accumulate(
        accumulated.data_ptr(), CODES[target], grad.data_ptr(), CODES[source], len(grad), overwrite=overwrite
    )
    result = on_gpu.cpu()
    if way == "torch operations":
        assert torch.equal(result.isnan(), accumulated.isnan())
        result, accumulated = result.nan_to_num(nan=0), accumulated.nan_to_num(nan=0)
    assert_same_bits(result, accumulated)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("source", CODES)
@pytest.mark.parametrize("target", CODES)
def test_reduce(target: torch.dtype, source: torch.dtype, overwrite: bool, way: str) -> None:
    generator, any_of = torch.Generator().manual_seed(1), [every_kind(dtype) for dtype in (target, source)]
    for count, numel in ((1, 50_001), (8, 50_001), (257, 999)):
        places = torch.randint(1 << 16, (count + 1, numel), generator=generator)
        reduced, sources = any_of[0][places[0]], list(any_of[1][places[1:]])
        total, there = reduced.cuda(), [each.cuda() for each in sources]
        with no_wait():
            device_kernels.reduce(total, there, 1 / 3, overwrite=overwrite)
        from_c = CODES[target], [each.data_ptr() for each in sources], CODES[source], numel
        kernels.reduce(reduced.data_ptr(), *from_c, 1 / 3, overwrite=overwrite)
        result = total.cpu()
        if way == "torch operations" or count == 257:  # more than a launch takes
            assert torch.equal(result.isnan(), reduced.isnan())
            result, reduced = result.nan_to_num(nan=0), reduced.nan_to_num(nan=0)
        assert_same_bits(result, reduced)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name}-{len(form.arrays)}")
@pytest.mark.parametrize("dtype", CODES)
def test_decode(dtype: torch.dtype, form: QuantizedFormat, way: str) -> None:
    """Whole matrices and parts of them, without a wait, beside the kernels in C."""
    values = torch.randn(1000, 4096, generator=torch.Generator().manual_seed(1))
    codes, scales = form.encode(values)
    weight, there = DeviceWeight(form, codes, scales), DeviceWeight(form, codes.cuda(), scales.cuda())
    there.decoded(dtype)  # compiled, and the tables are there
    for part in ((slice(None), slice(None)), (slice(7, 900), slice(None)), (slice(3, 999), slice(512, 2048))):
        with no_wait():
            decoded = there.decoded(dtype, *part)
        assert_same_bits(decoded, weight.decoded(dtype, *part))


RULES: dict[str, Callable[[int], Rule]] = {
    "adamw": lambda step: kernels.adam(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, decoupled=True
    ),
    "adam": lambda step: kernels.adam(
        lr=1e-3, beta1=0.3, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, decoupled=False
    ),
    "adam, uncorrected": lambda step: kernels.adam(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, bias_correction=False
    ),
    "lion": lambda step: kernels.lion(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, step=step),
    "adagrad": lambda step: kernels.adagrad(lr=1e-2, lr_decay=0.1, eps=1e-10, weight_decay=0.1, step=step),
    "sgd": lambda step: kernels.sgd(
        lr=1e-2, momentum=0.9, dampening=0.3, nesterov=False, weight_decay=0.1, step=step
    ),
    "sgd, nesterov": lambda step: kernels.sgd(
        lr=1e-2, momentum=0.9, dampening=0.0, nesterov=True, weight_decay=0.1, step=step
    ),
    "sgd without momentum": lambda step: kernels.sgd(
        lr=1e-2, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.1, step=step
    ),
}


def segment_of(
    param: Tensor,
    state: list[Tensor],
    grad: Tensor,
    rule: Rule,
    *,
    out: torch.dtype | None = None,
    state_format: StateFormat = StateFormat.FP32,
    split: bool = False,
    first_index: int = 0,
) -> Segment:
    """In host memory, with what a step changes to itself: a split ``param``, bfloat16 ``state``, an ``out``."""
    dtype = torch.float32 if state_format is StateFormat.FP32 else torch.bfloat16
    states = [tensor.to(dtype, copy=True) for tensor in state]
    if not split:
        rounded = None if out is None else torch.zeros_like(param, dtype=out)
        return Segment(rule, param.clone(), states, grad, rounded, None, state_format, first_index)
    half, remainder = param.bfloat16(), param.to(torch.int16)
    kernels.split(half.data_ptr(), remainder.data_ptr(), param.data_ptr(), param.numel())
    return Segment(rule, half, states, grad, None, remainder, state_format, first_index)


def arrays_of(segment: Segment) -> dict[str, Tensor]:
    """What a step changes."""
    arrays = {"param": segment.param, "remainder": segment.remainder, "out": segment.out}
    arrays |= {f"state {i}": tensor for i, tensor in enumerate(segment.state)}
    return {name: tensor for name, tensor in arrays.items() if tensor is not None}


def on_gpu(segment: Segment) -> Segment:
    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cuda()

    state, grad = [tensor.cuda() for tensor in segment.state], segment.grad.cuda()
    param, out, remainder = segment.param.cuda(), there(segment.out), there(segment.remainder)
    return Segment(
        segment.rule, param, state, grad, out, remainder, segment.state_format, segment.first_index
    )


def step_in_c(segments: list[Segment], grad_scale: float) -> None:
    batch = kernels.StepBatch()
    for segment in segments:
        if not segment.param.numel():
            continue
        batch.add(
            segment.param.numel(),
            batch.add_rule(segment.rule),
            param=segment.param.data_ptr(),
            remainder=0 if segment.remainder is None else segment.remainder.data_ptr(),
            state=tuple(tensor.data_ptr() for tensor in segment.state),
            state_format=segment.state_format,
            grad=segment.grad.data_ptr(),
            grad_dtype=CODES[segment.grad.dtype],
            out=0 if segment.out is None else segment.out.data_ptr(),
            out_dtype=DType.BF16 if segment.out is None else CODES[segment.out.dtype],
            first_index=segment.first_index,
        )
    batch.run(grad_scale)


def tail(segment: Segment, at: int) -> Segment:
    """The elements from ``at`` on, in the same memory."""
    views = {name: tensor[at:] for name, tensor in arrays_of(segment).items()}
    state = [views[f"state {i}"] for i in range(len(segment.state))]
    return Segment(
        segment.rule, views["param"], state, segment.grad[at:], views.get("out"), views.get("remainder"),
        segment.state_format, segment.first_index,
    )  # fmt: skip


def assert_same_steps(segments: list[Segment], places: Sequence[int] = (0,)) -> None:
    """One step there and here, of each segment from one of ``places`` on."""
    theirs = [on_gpu(segment) for segment in segments]
    some, others = ([tail(s, at) for s, at in zip(all_of, cycle(places))] for all_of in (segments, theirs))
    with no_wait():
        device_kernels.step_segments(others, 0.37)
    step_in_c(some, 0.37)
    for mine, there in zip(segments, theirs, strict=True):
        for name, tensor in arrays_of(there).items():
            assert_same_bits(tensor, arrays_of(mine)[name], name)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("grad_dtype", "out"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32)],
)
def test_every_rule(name: str, grad_dtype: torch.dtype, out: torch.dtype, way: str) -> None:
    """Values of every magnitude: some squares overflow, so infinities and NaN come up, too."""
    numel, param = 100_003, spread(100_003, 3)
    state = [torch.zeros(numel), torch.zeros(numel)]
    for step in range(1, 4):
        grad = spread(numel, 10 + step).mul(1e15).to(grad_dtype)
        segment = segment_of(param, state, grad, RULES[name](step), out=out)
        assert_same_steps([segment])
        assert not torch.equal(param, segment.param)
        param, state = segment.param, list(segment.state)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("state_format", StateFormat)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_every_format(
    name: str, state_format: StateFormat, split: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters in halves, moments in bfloat16 rounded to the nearest or by chance, in pieces that begin anywhere."""
    monkeypatch.setattr(torch_operations, "ELEMENTS_AT_ONCE", 33_331)
    numel = 100_003
    how = {"state_format": state_format, "split": split, "first_index": (1 << 32) - 50_000}
    state = [spread(numel, 5), spread(numel, 6).abs()]
    for dtype in CODES:
        grad = spread(numel, 11).mul(1e15).to(dtype)
        assert_same_steps([segment_of(spread(numel, 3), state, grad, RULES[name](4), **how)])


SPECIAL = torch.tensor(
    # zeros, subnormals, ties of a bf16 (up, to infinity, below the smallest, of a subnormal), infinities, NaN
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00018000, 0x00008000, 0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF,
     0x3F808001, 0x7F7F8000, 0x7F7F7FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
     0x7FFFFFFF, 0x3F800000, 0x5F000000, 0xA0000000]
).to(torch.int32).view(torch.float32)  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_every_format_at_the_edges(name: str, split: bool, way: str) -> None:
    """Each special parameter with each special gradient and state: what a GPU flushes or approximates would show."""
    param, grad, moment = (t.flatten() for t in torch.meshgrid(SPECIAL, SPECIAL, SPECIAL, indexing="ij"))
    for state_format in StateFormat:
        how = {"state_format": state_format, "split": split}
        assert_same_steps(
            [
                segment_of(param, [moment, moment.abs()], grad.to(dtype), RULES[name](3), **how)
                for dtype in CODES
            ]
        )


def test_segments_of_many_lengths_and_places(way: str) -> None:
    """More than a launch takes, two rules in turn; they begin at any element."""
    rules, segments = [RULES["adamw"](3), RULES["adamw"](4)], []
    for i, numel in enumerate([4, 1023, 1024, 1025, 3, 5000] * 20):
        param, m, v, grad = (spread(numel, 4 * i + j) for j in range(4))
        segments.append(segment_of(param, [m, v.abs()], grad.bfloat16(), rules[i % 2], out=torch.bfloat16))
    assert_same_steps(segments, places=(0, 1, 2, 3, 3))


def test_any_stream_and_thread(way: str) -> None:
    """A thread that never called CUDA launches on the stream that it was given, behind what is queued there."""
    segment = segment_of(spread(50_001, 1), [spread(50_001, 2)] * 2, spread(50_001, 3), RULES["adamw"](2))
    there, grad, stream = on_gpu(segment), segment.grad.cuda(), torch.cuda.Stream()
    there.grad.zero_()
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)  # some 50 ms: a step on another stream would be too early
                there.grad.copy_(grad)
                device_kernels.step_segments([there], 1.0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures
    stream.synchronize()
    step_in_c([segment], 1.0)
    for name, tensor in arrays_of(there).items():
        assert_same_bits(tensor, arrays_of(segment)[name], name)


def test_a_cold_thread_launches() -> None:
    """Whose very first call of CUDA is a launch by the driver, which does not make a context current by itself."""
    target, grad = torch.ones(10, device="cuda"), torch.ones(10, device="cuda", dtype=torch.bfloat16)
    device_kernels.accumulate(target, grad, overwrite=False)  # compiled
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            device_kernels.accumulate(target, grad, overwrite=False)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures
    assert target.tolist() == [3.0] * 10


def test_split_and_join() -> None:
    uppers = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    lowers = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    master = (uppers | lowers).flatten().to(torch.int32).view(torch.float32)
    halves = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    there = [half.cuda() for half in halves]
    device_kernels.split(master.cuda(), *there)
    kernels.split(halves[0].data_ptr(), halves[1].data_ptr(), master.data_ptr(), master.numel())
    for tensor, half in zip(there, halves, strict=True):
        assert_same_bits(tensor, half)
    number = ~master.isnan()
    assert_same_bits(device_kernels.join(*there).cpu()[number], master[number])


@pytest.mark.parametrize("dtype", CODES)
def test_round_parameters(dtype: torch.dtype) -> None:
    master = every_kind(torch.float32)
    there = torch.empty_like(master, dtype=dtype, device="cuda")
    device_kernels.round_parameters(master.cuda(), there)
    segment = segment_of(
        master, [], torch.zeros_like(master), kernels.sgd(
            lr=0.0, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.0, step=1
        ), out=dtype,
    )  # fmt: skip
    step_in_c([segment], 1.0)
    assert segment.out is not None
    assert_same_bits(there, segment.out)
