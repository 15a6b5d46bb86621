"""What README.md and docs/ show as code: fenced blocks, and the commands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: ``python``, ``sh`` (commands), ``console`` (commands behind "$ ", and output), or a file."""

    page: str
    line: int
    language: str
    body: str

    @property
    def key(self) -> tuple[str, str]:
        """Page and first line, without a remark."""
        return self.page, without_remark(self.body.partition("\n")[0].removeprefix("$ "))

    @property
    def file_name(self) -> str | None:
        """Of a configuration or a script: the name in its first line, as ``// ds_config.json`` or ``# train.py``."""
        remark = {"json": "//", "jsonc": "//", "python": "#"}.get(self.language)
        named = re.match(rf"{remark} (\S+\.\w+)\n", self.body) if remark else None
        return named[1] if named else None

    def commands(self) -> list[tuple[str, str]]:
        """Each command, without a remark, and the output that is shown below it."""
        if self.language == "sh":
            lines = self.body.replace("\\\n", " ").splitlines()
            return [(without_remark(line), "") for line in lines if line and not line.startswith("#")]
        commands: list[tuple[str, str]] = []
        for line in self.body.splitlines(keepends=True):
            if line.startswith("$ "):
                commands.append((without_remark(line[2:].rstrip("\n")), ""))
            else:
                commands[-1] = (commands[-1][0], commands[-1][1] + line)
        return commands


def without_remark(line: str) -> str:
    return re.sub(r"\s{2,}#.*", "", line).strip()


def blocks(page: str) -> list[Block]:
    text = PAGES[page].read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["language"], match["body"])
        for match in FENCE.finditer(text)
    ]
