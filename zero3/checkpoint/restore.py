"""Restoring a checkpoint to the tiers: each rank reads the elements that it keeps, from the files of any rank.

Tensors are found by name and element range, so the run that saved may have had another number of ranks, stage,
placement, grouping or format of state. Every page is compared with its checksum as it is read.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from tiering import _logs
from tiering._remedies import NEW_OPTIMIZER_STATE, PART_OF_MODEL
from tiering.checkpoint.manifest import Manifest
from tiering.checkpoint.reader import Checkpoint, RankFiles, reading_checkpoint
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, SwapError, WeightsError
from tiering.placement.row_tiles import joined_shape
from tiering.storage.read_only import COPY_REMEDY
from tiering.weights.files import StoredTensor, WeightFiles
from tiering.weights.reader import Request
from zero3.building.encoded_weights import StoredValues
from zero3.building.fill import RANGE, copy_values
from zero3.building.first_values import FirstValues, for_home
from zero3.building.weights import STORED_NAMES, FileSource, OpenFiles, match
from zero3.checkpoint.adoption import Adoption
from zero3.checkpoint.run_state import RankState
from zero3.optimizer.client import ClientOptimizer
from zero3.params.layout import Piece, tiles
from zero3.params.param_group import ParamGroup
from zero3.params.precision import keeps_dtype
from zero3.parts import Assembly

log = logging.getLogger(__name__)


class Restore:
    """Fills the tiers of ``parts`` from ``checkpoint``; with ``states``, also the optimizer state.

    The constructor checks that the checkpoint is of this model, and changes nothing; it raises CheckpointError
    otherwise. Frozen parameters that the save has excluded keep their values. Unless ``strict``, so do all parameters
    that only the model has, and tensors that only the checkpoint has are ignored.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: nn.Module,
        parts: Assembly,
        io: IoConfig,
        *,
        states: bool,
        strict: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._parts = parts
        self._io = io
        excluded = checkpoint.manifest.excluded
        try:
            files = checkpoint.with_buffers(parts.world.rank)
            self._matched = match(model, files, names=parts.names, strict=strict, excluded=excluded)
        except WeightsError as error:
            remedy = "build the model that was saved"
            if strict:
                remedy += f"; {PART_OF_MODEL}"
            raise CheckpointError(
                f"checkpoint {checkpoint.path} is of another model: {error.problem}; {remedy}"
            ) from error
        self._adoption: Adoption | None = None
        self.filled = frozenset(self._matched.sources)
        self._unchanged: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, param in parts.names.parameters():
            if param not in self.filled:
                self._unchanged[name].append(param)
        for name, params in self._unchanged.items():
            shape = joined_shape([tuple(param.shape) for param in params])
            if name in excluded and excluded[name].shape != shape:
                raise CheckpointError(
                    f"checkpoint {checkpoint.path} is of another model: {name!r}, which it excludes, has shape"
                    f" {list(excluded[name].shape)} and not {list(shape)}; build the model that was saved"
                )
            dtypes = {STORED_NAMES[param.dtype] for param in params if keeps_dtype(param)}
            if name in excluded and dtypes - {excluded[name].dtype}:
                raise CheckpointError(
                    f"checkpoint {checkpoint.path} is of another model: {name!r}, which it excludes, was"
                    f" {excluded[name].dtype} and is {', '.join(dtypes)} here; quantise the model as it was when it was"
                    " saved"
                )
        self._names = {param: source.parts[0].name for param, source in self._matched.sources.items()}
        self._states = self._kinds() if states else {}
        self._warn_of_unchanged()

    @property
    def of_run(self) -> bool:
        """Whether a run has saved the checkpoint; otherwise it was converted from files of weights."""
        return self._checkpoint.manifest.optimizer is not None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint, with whole weights in place of their tiles."""
        return self._checkpoint.manifest

    def adoption(self) -> Adoption | None:
        """What takes over the swap files of a snapshot, if this rank need not copy their content."""
        if not self._checkpoint.manifest.swapped:
            return None
        adoption = Adoption(self._checkpoint, self._parts)
        in_part = "the load is of a part of it" if not self._states or self._unchanged else ""
        obstacle = in_part or adoption.obstacle()
        if not obstacle:
            return adoption
        self.log_copy(obstacle)
        return None

    def check_not_replaced(self) -> None:
        """CheckpointError if another snapshot has taken its place: that one is in the same swap files."""
        manifest, path = self._checkpoint.manifest, self._checkpoint.path
        if manifest.swapped and Manifest.read(path).save != manifest.save:
            raise CheckpointError(f"another run has made a snapshot in {path} meanwhile: load it again")

    def log_copy(self, obstacle: str) -> None:
        """Log why the swap files of a snapshot are not adopted."""
        self._log(f"its content is copied to new swap files, because {obstacle}")

    def check_values_known(self, uncertain: AbstractSet[nn.Parameter]) -> None:
        """CheckpointError if the load leaves an ``uncertain`` parameter unchanged."""
        unknown = [name for name, params in self._unchanged.items() if not uncertain.isdisjoint(params)]
        if unknown:
            raise CheckpointError(
                f"checkpoint {self._checkpoint.path} lacks {_first(unknown)}, which a failed load has already"
                " overwritten, or initialize(resume=...) has not filled: load a checkpoint that has all parameters, or"
                " build the engine again, without resume"
            )

    @contextmanager
    def reading(self, adoption: Adoption | None) -> Iterator[None]:
        """Open all files that this rank reads. Open files may be removed, as a save removes older checkpoints.

        With an ``adoption``, ``run`` adopts the swap files.
        """
        self._adoption = adoption
        matched = self._matched
        # In the order of the reads: ``check_in_place``, then ``run``.
        groups = sorted(self._parts.groups, key=lambda group: group.home.files is None)
        buffers = {tensor.file for _, _, tensor in matched.buffers}
        with reading_checkpoint(), ExitStack() as files:
            files.enter_context(self._checkpoint.held() if adoption is None else adoption.held())
            # Of what is adopted, only masters are read, for parameters that are not masters themselves.
            read = [group for group in groups if adoption is None or not group.home.in_snapshots]
            order = _order(read, matched.sources)
            # Before the first value changes: a file that is missing ends the load here.
            self._open(files, matched.files, matched.opened, order, buffers)
            for kind, opened, sources in self._states.values():
                of_kind = groups if adoption is None else []
                self._open(files, kind, opened, _order(of_kind, sources, states=True))
            yield

    def run(self) -> None:
        """Fill the tiers, inside ``reading``. Raises CheckpointError, with some values loaded, if a file is damaged."""
        sources = {
            param: FirstValues(
                source, tuple(self._moment(kind, param) for kind in self._parts.optimizer.state_names)
            )
            for param, source in self._matched.sources.items()
        }
        with reading_checkpoint():
            self._matched.fill_buffers()
            if self._parts.tiers.streams is not None:
                # Copies to the device may still read the homes that are overwritten next.
                self._parts.tiers.streams.before_host_changes()
            # A write that failed before must not end the load, which writes these bytes again. A read of bytes that
            # it leaves as they are fails once more.
            with suppress(SwapError):
                self._parts.tiers.staging.drain()
            if self._adoption is not None:
                self._adoption.run()
            self._parts.fill.refill(self._parts.groups, sources, adopted=self._adoption is not None)

    def check_in_place(self) -> None:
        """CheckpointError unless files that are read in place have the same values. Inside ``reading``."""
        for group in self._parts.groups:
            if group.home.files is None:
                continue
            layout = group.shard if group.sharded else group.layout
            params = dict(zip((piece.index for piece in group.layout.pieces), group.params, strict=True))
            for piece in layout.pieces:
                source = self._matched.sources.get(params[piece.index])
                if source is not None and not self._is_same(group, piece, source):
                    place = group.home.files.place_of(piece.start * group.dtype.itemsize)
                    raise CheckpointError(
                        f"checkpoint {self._checkpoint.path} has other values of {piece.name!r} than the run, which"
                        f" reads it in place from {place}: nothing was loaded. Initialize with the weights that the"
                        f" saved run had; or {COPY_REMEDY}, and then loaded"
                    )

    def _is_same(self, group: ParamGroup, piece: Piece, source: StoredValues) -> bool:
        """Whether ``source`` has the bytes that the home of ``group`` has for ``piece``."""
        values, itemsize = for_home(FirstValues(source), piece, group).values, group.dtype.itemsize
        for start, end in tiles(piece.numel, RANGE):
            stored = values.read(piece.first + start, end - start)
            expected = torch.empty(end - start, dtype=group.dtype, device="cpu")
            copy_values(stored, expected)
            at, nbytes = (piece.start + start) * itemsize, (end - start) * itemsize
            if not torch.equal(expected.view(torch.uint8), self._parts.tiers.load(group.home, at, nbytes)):
                return False
        return True

    def _open(
        self,
        opening: ExitStack,
        files: WeightFiles,
        opened: OpenFiles,
        order: Sequence[Request],
        files_without_order: AbstractSet[Path] = frozenset(),
    ) -> None:
        opening.enter_context(opened.reading(files, self._io, order))
        assert opened.reader is not None
        tensors = (entry if isinstance(entry, StoredTensor) else entry[0] for entry in order)
        opened.reader.open_files({tensor.file for tensor in tensors} | files_without_order)

    def count_steps(self) -> None:
        """Set the number of updates of each parameter in the optimizer."""
        optimizer, parameters = self._parts.optimizer, self._checkpoint.manifest.parameters
        optimizer.steps.clear()
        if not self._states:
            return
        steps: dict[nn.Parameter, int] = {}
        for name, params in self._by_name().items():
            first = 0
            # Buffers have names, too.
            for param in params if name in parameters else ():
                steps[param] = parameters[name].steps_of(first, first + param.numel())
                first += param.numel()
        for group in self._parts.groups:
            for piece, param in zip(group.layout.pieces, group.params, strict=True):
                if piece.trainable and steps.get(param):
                    optimizer.steps[piece.index] = steps[param]

    def _kinds(self) -> dict[str, tuple[WeightFiles, OpenFiles, dict[nn.Parameter, StoredValues]]]:
        """By kind of optimizer state: its files, and the source of each parameter in them."""
        manifest, optimizer = self._checkpoint.manifest, self._parts.optimizer
        if not self.of_run:
            log.log(
                _logs.once(logging.WARNING),
                "%s has only weights: the optimizer starts with new state",
                self._checkpoint.path,
            )
            return {}
        optimizer_here = optimizer.rule_name
        if set(manifest.kinds) != set(optimizer.state_names) or (
            not optimizer.state_names and manifest.optimizer != optimizer_here
        ):
            raise CheckpointError(
                f"checkpoint {self._checkpoint.path} has the state of {manifest.optimizer}"
                f" ({', '.join(manifest.kinds) or 'none'}), but this engine trains with {optimizer_here}"
                f" ({', '.join(optimizer.state_names) or 'none'}): choose the optimizer that was saved;"
                f" {NEW_OPTIMIZER_STATE}"
            )
        if isinstance(optimizer, ClientOptimizer) and manifest.tiled != self._parts.names.tiled():
            raise CheckpointError(
                f"checkpoint {self._checkpoint.path} has other tiles of weights than this model, but a"
                f" {optimizer_here} keeps its state by the numbers of parameters: cut the model as the saved run did;"
                f" {NEW_OPTIMIZER_STATE}"
            )
        if isinstance(optimizer, ClientOptimizer) and (self._matched.missing or self._matched.unexpected):
            raise CheckpointError(
                f"checkpoint {self._checkpoint.path} has other parameters than this model, but a {optimizer_here} keeps"
                f" its state by their numbers: build the model that was saved; {NEW_OPTIMIZER_STATE}"
            )
        if manifest.optimizer != optimizer_here:
            log.log(
                _logs.once(logging.WARNING),
                "the state of %s is loaded as that of %s, which has the same tensors",
                *(manifest.optimizer, optimizer_here),
            )
        states = {}
        for kind in optimizer.state_names:
            files, opened = self._checkpoint.states[kind], OpenFiles()
            states[kind] = files, opened, self._sources(files, opened)
        self._log_conversions()
        return states

    def _sources(self, files: WeightFiles, opened: OpenFiles) -> dict[nn.Parameter, StoredValues]:
        """The values in ``files`` of each parameter."""
        sources: dict[nn.Parameter, StoredValues] = {}
        for name, params in self._by_name().items():
            if name in files.tensors:
                source = FileSource(files.parts_of(files.tensors[name]), opened)
                sources |= source.of_tiles(params) if len(params) > 1 else {params[0]: source}
        return sources

    def _by_name(self) -> dict[str, list[nn.Parameter]]:
        """The parameters that are loaded by name. The tiles of a weight have one name, and follow each other."""
        params_of: dict[str, list[nn.Parameter]] = defaultdict(list)
        for param, name in self._names.items():
            params_of[name].append(param)
        return params_of

    def _log_conversions(self) -> None:
        """Log how the state differs from the saved state."""
        manifest, parts = self._checkpoint.manifest, self._parts
        if manifest.world_size != parts.world.size:
            self._log(f"saved by {manifest.world_size} ranks, loaded by {parts.world.size}")
        moment_dtype = STORED_NAMES[parts.layout.moment_dtype()]
        stored = {
            tensor.dtype
            for kind in manifest.kinds
            for tensor in self._checkpoint.states[kind].tensors.values()
        }
        for dtype in stored - {moment_dtype}:
            loss = ", which rounds them" if dtype == "F32" else ""
            self._log(f"moments saved as {dtype} are converted to {moment_dtype}{loss}")
        stateless = [name for name, param in self._trained() if not self._had_state(param)]
        if stateless and manifest.kinds:
            self._log(
                f"{len(stateless)} parameters were frozen in the saved run and are trained now ({stateless[0]!r}): they"
                " start with new state"
            )

    def _warn_of_unchanged(self) -> None:
        """Warn of parameters that the save has excluded, or that the model allows to be absent."""
        names = [name for name in self._unchanged if name not in self._matched.missing]
        if names:
            log.log(
                _logs.once(logging.WARNING),
                "checkpoint %s was saved without %s: they keep the values of this model, which should be those of the"
                " run that saved",
                *(self._checkpoint.path, _first(names)),
            )

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for group in self._parts.groups:
            for piece, param in zip(group.layout.pieces, group.params, strict=True):
                if piece.trainable:
                    yield piece.name, param

    def _had_state(self, param: nn.Parameter) -> bool:
        return param in self._names and self._checkpoint.manifest.parameters[self._names[param]].trained

    def _log(self, message: str) -> None:
        log.log(_logs.once(logging.INFO), "checkpoint %s: %s", self._checkpoint.path, message)

    def _moment(self, kind: str, param: nn.Parameter) -> StoredValues | None:
        if kind not in self._states:
            return None
        return self._states[kind][2].get(param)


def rank_state(files: RankFiles, io: IoConfig) -> RankState:
    """Read the state of a rank that is not on tiers. CheckpointError if a tensor is damaged."""
    opened, tensors = OpenFiles(), dict[str, Tensor]()
    with (
        reading_checkpoint(),
        opened.reading(files.tensors, io, files.tensors.tensors.values()),
    ):
        for name, stored in files.tensors.tensors.items():
            source = FileSource((stored,), opened)
            tensors[name] = source.read(0, stored.numel).clone().view(stored.shape)
    return RankState(files.content, tensors)


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _order(
    groups: Sequence[ParamGroup], sources: Mapping[nn.Parameter, StoredValues], *, states: bool = False
) -> list[Request]:
    """The ranges that this rank reads, in order: its parts of the parameters, and the ``states`` that it updates."""
    order: list[Request] = []
    for group in groups:
        layout = group.shard if states or group.sharded else group.layout
        pieces: dict[int, Piece] = {piece.index: piece for piece in layout.pieces}
        for piece, param in zip(group.layout.pieces, group.params, strict=True):
            local = pieces.get(piece.index)
            if local is None or param not in sources:
                continue
            begin, own = 0, local.own_elements(local.first, local.numel, group.dtype.itemsize)
            for part in sources[param].parts:
                first, end = max(own.start - begin, 0), min(own.stop - begin, part.numel)
                if first < end:
                    order.append((part, first, end))
                begin += part.numel
    return order
