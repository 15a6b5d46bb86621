"""``ulysses_attention``: a transformers model whose sequences are divided among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tiering import comm
from tiering.errors import ConfigError
from tiering.sequence import batch as batches
from tiering.sequence.registration import Registered, register


def ulysses_attention(
    model: nn.Module, ranks: int | None = None, *, group: dist.ProcessGroup | None = None
) -> Ulysses:
    """Divide the sequences of a transformers ``model`` among ``ranks`` ranks: each computes a part of the tokens.

    Only attention needs all tokens. There, each rank computes some heads of the whole sequence, by the implementation
    that the model had (``attn_implementation``): an all-to-all before it and one after it exchange tokens for heads.
    Everything else computes on the tokens of the rank. Parameters do not change. All ranks stay ranks of the engine: it
    averages gradients over all of them, in every ZeRO stage.

    ``ranks`` consecutive ranks form a sequence group: with 4 ranks and ``ranks=2``, ranks 0 and 1 share sequences, and
    ranks 2 and 3 share others. For other groups, pass ``group``, the sequence group of this rank, instead. All ranks of
    the run make the call, before or after ``tiering.initialize``, and get the same kind of object. Without a process
    group, the call joins the ranks as ``tiering.init_distributed`` does.

    Raises ConfigError if ``ranks`` does not divide the number of ranks, or the number of attention heads, or if the
    attention of the model cannot be replaced; ImportError without transformers.
    """
    if (ranks is None) == (group is None):
        raise ConfigError("ulysses_attention needs either `ranks` (such as ranks=2) or `group`, not both")
    if not dist.is_initialized():
        comm.init_distributed(verbose=False)
    members = _consecutive(ranks) if group is None else _members(group)
    # The checks of the model come before new groups: an error leaves nothing behind.
    registered = register(model, len(members[0]))
    own = group is None
    if group is None:
        group = _new_groups(members)
    registered.enable(group)
    return Ulysses(registered, group, members, own=own)


class Ulysses:
    """A model whose sequences are divided among the ranks of ``group``; ``ulysses_attention`` makes it.

    ``size`` and ``rank``: the ranks of the group, and the place of this rank, whose tokens are the ``rank``-th part.
    ``data_size`` and ``data_rank``: the number of groups, and the number of this one, for a ``DistributedSampler``.
    """

    def __init__(
        self, registered: Registered, group: dist.ProcessGroup, members: list[tuple[int, ...]], *, own: bool
    ) -> None:
        self.group = group
        self.size = len(members[0])
        self.rank = dist.get_rank(group)
        self.data_size = len(members)
        self.data_rank = next(n for n, ranks in enumerate(members) if dist.get_rank() in ranks)
        self._registered: Registered | None = registered
        self._own = own

    def shard(self, batch: Mapping[str, Any], *, pad: int | None = None) -> dict[str, Any]:
        """The arguments of the model for this rank: its tokens of ``batch``, the same batch on all ranks of the group.

        ``batch`` has ``input_ids`` or ``inputs_embeds`` (rows, tokens), ``labels`` as transformers has them (not
        shifted, -100 does not count), and may have ``position_ids``, ``token_type_ids`` and ``attention_mask`` (rows,
        tokens). Values that are no tensors stay. The result has the positions of this rank's tokens, the whole mask,
        and ``shift_labels`` and ``num_items_in_batch`` in place of the labels. With these, a transformers model
        computes as its loss the sum over this rank's tokens, multiplied by ``size`` and divided by the number of
        labels of the whole sequences that count. The mean of the losses over all ranks is then the mean over groups
        of the loss of their whole sequences, and so are the gradients that the engine averages. If the model computes
        no such loss itself, the result has no ``labels``: pass its logits to ``token_loss``.

        A number of tokens that ``size`` does not divide is padded at the end with the token ``pad``. Without ``pad``,
        ConfigError is raised, as it is for packed documents, for unknown tensors, and on all ranks of the group if
        they have different batches. A collective of the group.
        """
        registered = self._enabled("shard")
        mine = self._same_on_all_ranks(batch, pad)
        if "shift_labels" in mine and registered.computes_loss:
            # Computes the loss, from shift_labels: its forward looks whether there are labels.
            mine["labels"] = mine["shift_labels"]
        return mine

    def average(self, loss: Tensor) -> Tensor:
        """The loss of the group's whole sequences, fp32, from the ``loss`` of each rank. A collective of the group."""
        self._enabled("average")
        whole = loss.detach().float().clone()
        comm.all_reduce(whole, group=self.group)
        return whole / self.size

    def remove(self) -> None:
        """Give the model its own attention back, which computes whole sequences on each rank (``generate``)."""
        if self._registered is not None:
            self._registered.remove()
            self._registered = None
            if self._own:
                dist.destroy_process_group(self.group)

    def _enabled(self, call: str) -> Registered:
        if self._registered is None:
            raise ConfigError(
                f"{call}() was called after remove(): each rank computes whole sequences now; pass it the whole batch,"
                " or call ulysses_attention again"
            )
        return self._registered

    def _same_on_all_ranks(self, batch: Mapping[str, Any], pad: int | None) -> dict[str, Any]:
        """This rank's part of ``batch``. If that of a rank is bad or differs, every rank raises ConfigError."""
        problem, mine, numbers = None, {}, [0, 0, 0]
        try:
            mine = batches.shard(batch, self.size, self.rank, pad)
            numbers = batches.fingerprint(batch, pad)
        except ConfigError as error:
            problem = error
        # Without gloo, tensors on the CPU cannot be exchanged.
        device = "cpu" if "cpu" in str(dist.get_backend_config(self.group)) else "cuda"
        own = torch.tensor([problem is not None, *numbers], dtype=torch.int64, device=device)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        comm.all_gather(rows, own, group=self.group)
        if problem is not None:
            raise problem
        ranks = dist.get_process_group_ranks(self.group)
        first, *others = (row.tolist() for row in rows)
        for rank, (failed, *_) in zip(ranks, (first, *others), strict=True):
            if failed:
                raise ConfigError(f"the batch of rank {rank} cannot be divided; see the error of that rank")
        for rank, other in zip(ranks[1:], others, strict=True):
            if other != first:
                raise ConfigError(
                    f"rank {rank} has another batch ({other[1]} rows of {other[2]} tokens) than rank {ranks[0]}"
                    f" ({first[1]} rows of {first[2]} tokens), but the ranks of a sequence group train on the same"
                    " sequences; load the data with DistributedSampler(data, num_replicas=ulysses.data_size,"
                    " rank=ulysses.data_rank), or with the loader of an engine that has a mesh"
                )
        return mine


def _consecutive(ranks: int | None) -> list[tuple[int, ...]]:
    """The sequence groups of consecutive ranks."""
    world = dist.get_world_size()
    if not isinstance(ranks, int) or ranks < 1 or world % ranks:
        raise ConfigError(
            f"{ranks} ranks for each sequence do not divide the {world} ranks of this run; start a multiple of {ranks}"
            f" ranks, or choose a divisor of {world}"
        )
    return [tuple(range(first, first + ranks)) for first in range(0, world, ranks)]


def _members(group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """The sequence groups of all ranks, in the order of their first ranks."""
    mine = tuple(dist.get_process_group_ranks(group))
    all_of_them: list[Any] = [None] * dist.get_world_size()
    comm.all_gather_object(all_of_them, mine)
    groups = sorted(set(all_of_them))
    if (
        sorted(rank for ranks in groups for rank in ranks) != list(range(dist.get_world_size()))
        or len({len(ranks) for ranks in groups}) != 1
    ):
        raise ConfigError(
            f"the sequence groups {groups} do not divide the {dist.get_world_size()} ranks of this run into groups of"
            " equal size; pass each rank its own group, such as mesh['sequence'].get_group()"
        )
    return groups


def _new_groups(members: list[tuple[int, ...]]) -> dist.ProcessGroup:
    """Every rank creates every group, in the same order; returns that of this rank."""
    groups: list[dist.ProcessGroup] = [dist.new_group(list(ranks)) for ranks in members]
    return next(group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)
