"""Adapters over a frozen model, for plans: what trains, and the bytes of the frozen linear layers in their format.

An adapter of rank r adds matrices of (r, inputs) and (outputs, r) elements to a linear layer (Hu et al., "LoRA",
arXiv 2106.09685). Embeddings, norms and the output head stay in the compute dtype, as bitsandbytes and
``tiering.quantize`` leave them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from optim_cpu.formats import QUANTIZED, quantized
from tiering.config.training import QuantizeConfig
from tiering.errors import ConfigError

ALL_LINEAR = "all-linear"
BASES = ("bf16", *QUANTIZED)


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters of ``rank`` on linear layers, over a frozen model whose linear layers are stored as ``base``.

    ``modules``: the last parts of the names of the layers with adapters; None: all except the output head.
    ``quantised``: names, or ends of names, of the layers that are stored as ``base``, with the same meaning of None.
    ``double_quant`` and ``block_size`` are those of ``tiering.quantize``. Raises ConfigError for a rank below 1 or an
    unknown base.
    """

    rank: int
    modules: tuple[str, ...] | None = None
    base: str = "bf16"
    quantised: tuple[str, ...] | None = None
    double_quant: bool = True
    block_size: int = 64

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"the rank of adapters is {self.rank}; it must be at least 1")
        if self.base not in BASES:
            raise ConfigError(
                f"unknown format {self.base!r} of the frozen model; use one of {', '.join(BASES)}"
            )

    @classmethod
    def of(cls, rank: int, modules: str = ALL_LINEAR, base: str = "bf16") -> Adapters:
        """From text such as ``q_proj,v_proj`` or ``all-linear``."""
        names = tuple(name.strip() for name in modules.split(",") if name.strip())
        return cls(rank, None if names in ((), (ALL_LINEAR,)) else names, base)

    @classmethod
    def configured(cls, adapters: Adapters | None, quantize: QuantizeConfig) -> Adapters | None:
        """``adapters`` over the base that a configuration stores, if it does; else themselves.

        Raises ConfigError if there are none, because then all parameters train, or if they name another base.
        """
        if quantize.type == "none":
            return adapters
        if adapters is None:
            raise ConfigError(
                f"tiering.quantize stores frozen layers in {quantize.type}, but all parameters of this plan are"
                " trained: plan adapters (--lora RANK), or remove the key"
            )
        if adapters.quantises and adapters.base != quantize.type:
            raise ConfigError(
                f"the base is {adapters.base} (--base), and {quantize.type} in tiering.quantize of the configuration;"
                " leave out one of them"
            )
        return replace(
            adapters,
            base=quantize.type,
            quantised=quantize.modules or None,
            double_quant=quantize.double_quant,
            block_size=quantize.block_size,
        )

    def __str__(self) -> str:
        where = "all linear layers" if self.modules is None else ", ".join(self.modules)
        return f"adapters of rank {self.rank} on {where}, over a frozen model in {self.base}"

    def adapts(self, name: str, *, is_head: bool) -> bool:
        """Whether the linear layer ``name`` gets an adapter; ``is_head``: it is the output head."""
        return not is_head if self.modules is None else name.rpartition(".")[2] in self.modules

    def check_found(self, names: set[str]) -> None:
        """Raises ConfigError unless each of ``modules`` is the last part of one of the adapted ``names``."""
        found = {name.rpartition(".")[2] for name in names}
        missing = [name for name in self.modules or () if name not in found]
        if missing:
            raise ConfigError(
                f"no linear layer of the model is called {missing[0]!r}; name others, or {ALL_LINEAR}"
            )

    def matrices(self, inputs: int, outputs: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of the two matrices of an adapter."""
        return (self.rank, inputs), (outputs, self.rank)

    @property
    def quantises(self) -> bool:
        """Whether frozen linear layers are stored as bytes, and not in the compute dtype."""
        return self.base != "bf16"

    def stores(self, name: str, inputs: int, *, is_head: bool) -> bool:
        """Whether the frozen linear layer ``name``, of so many ``inputs``, is stored as ``base``."""
        if not self.quantises:
            return False
        if self.quantised is None:
            return not is_head and inputs % self.block_size == 0
        return any(each.rpartition(".")[2] == name for each in self.quantised)

    def stored(self, numel: int) -> tuple[int, int]:
        """Bytes of (codes, scales) of a frozen linear layer of ``numel`` elements."""
        base = quantized(self.base, double_quant=self.double_quant, block_size=self.block_size)
        scales = base.scale_bytes(numel)
        return base.nbytes(numel) - scales, scales
