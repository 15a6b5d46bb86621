"""Real text in words: the standard library's sources, numbered by how often each word occurs in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tiering.demo.corpus import standard_library

if TYPE_CHECKING:
    from torch import Tensor

WORD = re.compile(r"\w+|[^\w\s]|\s+")  # joined, they are the text again


class Words:
    """The text as numbers below ``vocabulary``: 0 for words beyond it, else the more frequent the lower."""

    def __init__(self, vocabulary: int) -> None:
        words = WORD.findall(standard_library().decode("utf-8", errors="replace"))
        frequent = Counter(words).most_common(vocabulary - 1)
        number = {word: place for place, (word, _) in enumerate(frequent, start=1)}
        self.used = len(number)
        self._text = [number.get(word, 0) for word in words]

    def batches(self, sequence: int) -> Iterator[Tensor]:
        """One window after the other, each int64 [1, sequence]; from the beginning again at the end."""
        import torch

        if len(self._text) < sequence:
            raise ValueError(
                f"a window of {sequence} words is longer than the text, which has {len(self._text)}"
            )
        while True:
            for start in range(0, len(self._text) - sequence + 1, sequence):
                yield torch.tensor([self._text[start : start + sequence]])
