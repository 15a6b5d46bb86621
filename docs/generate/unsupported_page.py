"""The table of unsupported names in docs/guide/migrate-from-deepspeed.md.

python -m docs.generate.unsupported_page docs/guide/migrate-from-deepspeed.md    # writes the section anew
"""

from __future__ import annotations

import sys
from pathlib import Path

from tiering._unsupported import REPLACEMENTS, shown

HEADING = "### Unsupported names\n"

INTRO = """
These names of the package deepspeed do not exist here. A script can import them; using one raises
UnsupportedNameError, `TIER-NAME`, with the replacement from this table. A name covers all names below it, and `.*` the
names that a module does not have here. `tiering migrate --table` prints the table. `python -m
docs.generate.unsupported_page docs/guide/migrate-from-deepspeed.md` generates it from `tiering/_unsupported.py`.
"""


def section() -> str:
    """The section of the page, with its heading."""
    rows = ["| name in deepspeed | replacement |", "|---|---|"]
    for names, text in REPLACEMENTS:
        listed = ", ".join(f"`{shown(name)}`" for name in names.split())
        rows.append(f"| {listed} | {text} |")
    return "\n".join([HEADING + INTRO, *rows, "", ""])


def main(path: Path) -> None:
    """Replace the section in the page at ``path``."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(HEADING)
    after = rest[rest.index("\n## ") + 1 :]
    path.write_text(before + section() + after, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
