"""Sequence parallelism: several ranks train on one sequence, each on a part of its tokens (Ulysses).

    ulysses = tiering.sequence.ulysses_attention(model, ranks=2)
    engine, *_ = tiering.initialize(model=model, config=config)
    for batch in loader:  # the same batch on both ranks
        loss = engine(**ulysses.shard(batch)).loss

docs/guide/distributed.md describes the rules and a complete loop.
"""

from tiering.sequence.batch import token_loss
from tiering.sequence.exchange import heads_to_tokens, tokens_to_heads
from tiering.sequence.ulysses import Ulysses, ulysses_attention

__all__ = ["Ulysses", "heads_to_tokens", "token_loss", "tokens_to_heads", "ulysses_attention"]
