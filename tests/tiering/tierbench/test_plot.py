"""The picture of bandwidth over time: what it shows, and what is refused before anything is measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tiering.errors import ConfigError
from tiering.tierbench.display import figures, plot
from tiering.tierbench.result import Result

from . import results

drawn = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="matplotlib is not installed: pip install tiering[bench]",
)


@drawn
def test_a_panel_shows_a_window() -> None:
    picture = plot.figure(results.TWO)
    panels = picture.get_axes()
    assert [panel.get_title().split("\n")[0] for panel in panels] == [
        "sustained write",
        "read",
        "write",
        "mixed",
    ]
    mixed = {line.get_label(): line for line in panels[3].get_lines()}
    assert set(mixed) == {"reads", "writes", "both together", "median", "worst second"}
    row = results.TWO.rows[3]
    assert list(mixed["reads"].get_ydata()[1:]) == [sample.read / 1e9 for sample in row.samples]
    assert list(mixed["writes"].get_xdata()[1:]) == [sample.at for sample in row.samples]
    looks = {(mixed[name].get_color(), mixed[name].get_linestyle()) for name in ("reads", "writes")}
    assert len({color for color, _ in looks}) == len({style for _, style in looks}) == 2
    assert panels[3].get_title().endswith(f"worst {figures.gb(row.worst_second or 0)}")
    cliff = {line.get_label(): line for line in panels[0].get_lines()}["write cache full"]
    assert cliff.get_xdata()[0] == pytest.approx(3.3, abs=0.1)
    assert "write cache full" not in {line.get_label() for panel in panels[1:] for line in panel.get_lines()}
    title = picture.get_suptitle()
    assert all(part in title for part in ("/mnt/nvme0/swap", "SAMSUNG", "bs 1M", "O_DIRECT", "io_uring"))


@drawn
@pytest.mark.parametrize("result", [results.TWO, results.BARE])
def test_it_is_written(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "rates.png"
    plot.check(path)
    plot.save(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@drawn
def test_what_cannot_be_written_is_an_error_with_words(tmp_path: Path) -> None:
    path = tmp_path / "there" / "rates.svg"
    path.parent.mkdir()
    plot.check(path)
    path.parent.rmdir()  # while it was measured
    with pytest.raises(ConfigError, match=r"rates\.svg cannot be written: No such file"):
        plot.save(results.BARE, path)


def test_what_cannot_be_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tiering\[bench\]'"):
        plot.check(tmp_path / "rates.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for path, message in (
        (tmp_path / "rates.jpeg", r"\.png or \.svg"),
        (tmp_path / "nowhere" / "rates.png", "nowhere"),
        (tmp_path, r"\.png or \.svg"),
    ):
        with pytest.raises(ConfigError, match=message):
            plot.check(path)
    (tmp_path / "directory.png").mkdir()
    with pytest.raises(ConfigError, match=r"directory\.png cannot be written"):
        plot.check(tmp_path / "directory.png")
    plot.check(tmp_path / "Rates.PNG")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # whoever runs tests may write everywhere
    with pytest.raises(ConfigError, match=r"Rates\.PNG cannot be written"):
        plot.check(tmp_path / "Rates.PNG")
