"""Exports: files of a model's weights for other programs, streamed from the tiers.

A rank holds no more than a range of a parameter outside the tiers. Rank 0 writes, and receives the shards of other
ranks range by range. If it cannot write, all ranks raise the error, and training can continue.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from optim_cpu.formats import round_parameters
from optim_cpu.quantization import decode_blocks
from tiering import _logs
from tiering.config.training import TieringConfig, format_size, parse_size
from tiering.errors import CheckpointError, ConfigError
from tiering.storage.read_only import COPY_REMEDY
from tiering.weights.tensor_file import TensorSpec
from tiering.weights.writer import SUFFIX, WeightWriter
from zero3.building.encoded_weights import EncodedTensor
from zero3.building.fill import RANGE
from zero3.building.peft_models import is_from_peft
from zero3.building.weights import STORED_NAMES
from zero3.checkpoint.saved_names import (
    Saved,
    adapter_names,
    has_adapter,
    is_from_transformers,
    own_names,
    transformers_names,
)
from zero3.params.layout import tiles
from zero3.params.precision import COMPUTE_DTYPES
from zero3.ranks.agreement import Leading
from zero3.state.tensors import TieredState

log = logging.getLogger(__name__)

T = TypeVar("T")

_PICKLES = (".bin", ".pt", ".pth")


class Export:
    """Writes the weights of ``model``, which ``state`` reads. Every rank makes the same calls.

    Raises CheckpointError, on every rank, if files cannot be written; then no file is left behind.
    """

    def __init__(self, model: nn.Module, config: TieringConfig, state: TieredState) -> None:
        self._model = model
        self._config = config
        self._state = state
        self._pieces = state.places()
        self._collectives = state.collectives
        self._writes = self._collectives is None or self._collectives.world.rank == 0

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """See Engine.save_16bit_model."""
        stem = _stem(save_filename)
        tensors = own_names(self._model)
        if exclude_frozen_parameters:
            frozen = {param for param, (_, piece) in self._pieces.items() if not piece.trainable}
            tensors = [saved for saved in tensors if saved.tensor not in frozen]
        precision = self._config.precision
        dtype = COMPUTE_DTYPES[(self._config.autocast or "bf16") if precision == "fp32" else precision]
        self._write(Path(save_dir), tensors, dtype, stem=stem)
        path = Path(save_dir) / f"{stem}{SUFFIX}"
        if path.name != save_filename:
            log.log(
                _logs.once(logging.WARNING),
                "%s was written instead of %s, because reading a pickle runs code; read it with"
                " safetensors.torch.load_file",
                *(path, save_filename),
            )
        return path

    def save_pretrained(self, save_dir: str | Path, max_shard_size: int | str = "5GB") -> Path:
        """See Engine.save_pretrained."""
        try:
            max_shard_bytes = parse_size(max_shard_size)
        except ValueError as error:
            raise ConfigError(f"max_shard_size: {error}") from None
        model, directory = self._model, Path(save_dir)
        dtype = COMPUTE_DTYPES[self._config.precision]
        if has_adapter(model):
            for adapter, folder in _adapter_folders(model, directory).items():
                files = partial(_write_adapter_config, model, adapter)
                self._write(folder, adapter_names(model, adapter), dtype, stem="adapter_model", files=files)
        elif is_from_transformers(model):
            files = partial(_write_transformers_config, model, dtype)
            self._write(
                directory, transformers_names(model), dtype, max_shard_bytes=max_shard_bytes, files=files
            )
        else:
            self._write(directory, own_names(model), dtype)
        return directory

    def _write(
        self,
        directory: Path,
        tensors: Sequence[Saved],
        dtype: torch.dtype,
        *,
        stem: str = "model",
        max_shard_bytes: int | None = None,
        files: Callable[[Path], None] | None = None,
    ) -> None:
        # The widest elements first, so that each tensor is aligned to its element size.
        ordered = sorted(tensors, key=lambda saved: -self._stored_as(saved, dtype).itemsize)
        specs = [
            TensorSpec(saved.name, _stored_name(saved, self._stored_as(saved, dtype)), saved.shape)
            for saved in ordered
        ]
        leading = Leading(self._collectives, f"save {directory}")
        io = self._config.tiering.io

        def open_writer() -> WeightWriter:
            self._check_not_in_use(directory, stem)
            return WeightWriter(directory, specs, stem=stem, max_shard_bytes=max_shard_bytes, io=io)

        writer = leading.attempt(open_writer)
        try:
            if files is not None:
                leading.attempt(lambda: files(_open_writer(writer).folder))
            for saved in ordered:
                leading.settle()
                with closing(self._ranges(saved, self._stored_as(saved, dtype))) as values:
                    for each in values:
                        leading.attempt(partial(_append, writer, each))
            leading.attempt(lambda: _open_writer(writer).finish())
            leading.settle()
        finally:
            if writer is not None:
                writer.abandon()
        total = sum(spec.nbytes for spec in specs)
        log.log(
            _logs.once(logging.INFO), "saved %d tensors, %s, in %s", len(specs), format_size(total), directory
        )

    def _check_not_in_use(self, directory: Path, stem: str) -> None:
        """CheckpointError if the export would replace a file from which frozen weights are read in place."""
        for path in self._state.files_in_use:
            # The files may be named by links, which have other names.
            file = path.resolve()
            if file.name.startswith(stem) and file.parent == directory.resolve():
                raise CheckpointError(
                    f"{file} cannot be replaced: this run reads frozen weights from it; save to another directory, or"
                    f" {COPY_REMEDY}"
                )

    def _stored_as(self, saved: Saved, dtype: torch.dtype) -> torch.dtype:
        if saved.tensor not in self._pieces:
            return saved.tensor.dtype
        group, piece = self._pieces[saved.tensor]
        if saved.quantised is not None:
            return dtype
        return piece.own_dtype or (torch.float32 if group.in_fp32 else dtype)

    def _ranges(self, saved: Saved, dtype: torch.dtype) -> Generator[Tensor]:
        """The elements of a stored tensor, flat, in host memory, one range at a time."""
        for tile in saved.tiles:
            yield from self._ranges(replace(saved, tensor=tile, shape=tuple(tile.shape), tiles=()), dtype)
        if saved.tiles:
            return
        # A buffer.
        if saved.tensor not in self._pieces:
            flat = saved.tensor.detach().flatten()[saved.first : saved.first + saved.numel]
            for first, end in tiles(saved.numel, RANGE):
                yield flat[first:end].cpu()
            return
        group, piece = self._pieces[saved.tensor]
        if not (group.sharded or self._writes):
            return
        if saved.quantised is not None:
            yield from self._decoded(saved, saved.quantised, dtype)
            return
        with closing(self._state.weight_ranges(group, piece, saved.first, saved.numel, RANGE)) as ranges:
            for values in ranges:
                if values.dtype is dtype:
                    yield values
                else:
                    rounded = torch.empty(values.numel(), dtype=dtype, device="cpu")
                    round_parameters(values, rounded)
                    yield rounded

    def _decoded(self, saved: Saved, encoded: EncodedTensor, dtype: torch.dtype) -> Generator[Tensor]:
        """The decoded weight of ``encoded``, one range at a time. Holds all its scales, and the codes of a range."""
        form, block = encoded.form, encoded.form.group_size
        group, piece = self._pieces[encoded.scales]
        scales = encoded.decoded_scales(self._state.weight(group, piece))
        group, piece = self._pieces[saved.tensor]
        # Rows are whole blocks, and so is a part of the weight.
        part = saved.first // form.code_elements, saved.numel // form.code_elements
        at, rest = saved.first // block, torch.empty(0, dtype=form.dtype, device="cpu")
        with closing(self._state.weight_ranges(group, piece, *part, RANGE)) as ranges:
            for codes in ranges:
                # A range may end inside a block.
                joined = torch.cat((rest, codes))
                end = at + joined.numel() * form.code_elements // block
                whole = (end - at) * block // form.code_elements
                yield decode_blocks(form, joined[:whole], scales[at:end], dtype)
                at, rest = end, joined[whole:]


def _stem(save_filename: str) -> str:
    """The name of the file that is written, without its suffix."""
    path = Path(save_filename)
    if path.name != save_filename or path.suffix not in (SUFFIX, *_PICKLES):
        raise ConfigError(
            f"save_filename {save_filename!r} is not the name of a {SUFFIX} file, the only supported format: use"
            " model.safetensors"
        )
    return "model" if path.stem == "pytorch_model" else path.stem


def _open_writer(writer: WeightWriter | None) -> WeightWriter:
    assert writer is not None
    return writer


def _append(writer: WeightWriter | None, values: Tensor) -> None:
    _open_writer(writer).append(values.contiguous().view(torch.uint8).numpy())


def _stored_name(saved: Saved, dtype: torch.dtype) -> str:
    if dtype not in STORED_NAMES:
        raise ConfigError(
            f"{saved.name!r} has dtype {dtype}, which safetensors does not support; register it with persistent=False,"
            " or store it in another dtype"
        )
    return STORED_NAMES[dtype]


def _write_transformers_config(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write the configuration from which ``from_pretrained`` builds the model, as transformers does."""
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_adapter_config(model: Any, adapter: str, folder: Path) -> None:
    """Write the configuration from which peft builds the adapter, as peft does."""
    config = copy.deepcopy(model.peft_config[adapter])
    if config.base_model_name_or_path is None:
        base = model.get_base_model() if is_from_peft(model) else model
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    config.save_pretrained(folder)


def _adapter_folders(model: Any, directory: Path) -> dict[str, Path]:
    """The folder of each adapter, as peft has them; transformers saves one adapter, without a folder of its own."""
    adapters = [str(name) for name in model.peft_config]
    if is_from_peft(model):
        return {name: directory if name == "default" else directory / name for name in adapters}
    if len(adapters) > 1:
        raise ConfigError(
            f"save_pretrained writes one adapter of a transformers model, which has {', '.join(map(repr, adapters))};"
            " delete the others before initialize, or save the whole model with save_16bit_model(DIR)"
        )
    return {adapters[0]: directory}
