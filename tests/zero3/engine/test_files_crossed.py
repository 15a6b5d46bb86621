"""The number of files that a reader opens to follow one call of a training loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import tiering
from tests.zero3.plain import STREAMED, Tower, inputs

ROOT = Path(tiering.__file__).parents[1]
PACKAGES = tuple(f"{ROOT / package}/" for package in ("zero3", "tiering", "optim_cpu"))
MOST = {"forward": 27, "backward": 33, "step": 46, "save": 32}
# A wait that a slow disk prolongs looks there for hung transfers.
OF_SLOW_WAITS = {"tiering/storage/aio_errors.py"}


def files_crossed(call: Callable[[], Any]) -> tuple[Any, set[str]]:
    """The result of ``call``, and the files of the project that it enters in this thread."""
    files = set[str]()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        result = call()
    finally:
        sys.setprofile(before)
    return result, {str(Path(file).relative_to(ROOT)) for file in files} - OF_SLOW_WAITS


def test_a_call_crosses_few_files(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start(Tower(), accumulation=1, threshold=0, **STREAMED)
    crossed = dict[str, set[str]]()
    # The second step: groups are fetched in the order that the first one has recorded.
    for x in inputs(2):
        loss, crossed["forward"] = files_crossed(lambda x=x: engine(x))
        _, crossed["backward"] = files_crossed(lambda loss=loss: engine.backward(loss))
        _, crossed["step"] = files_crossed(engine.step)
    _, crossed["save"] = files_crossed(lambda: engine.save_checkpoint(tmp_path / "saved"))
    assert "tiering/storage/swap_space.py" in crossed["forward"] & crossed["backward"] & crossed["step"]
    for call, files in crossed.items():
        assert len(files) <= MOST[call], f"{call} crosses {len(files)} files: {' '.join(sorted(files))}"
