"""The table of keys in docs/guide/migrate-from-deepspeed.md.

python -m docs.generate.keys_page docs/guide/migrate-from-deepspeed.md    # writes the page's last section anew
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tiering.config.ds_config.in_effect import description
from tiering.config.ds_config.keys import SHORT_FORMS
from tiering.config.ds_config.known_keys import KEYS
from tiering.config.ds_config.verdicts import KeyRule, KeyVerdict

HEADING = "## Every key\n"

INTRO = """
`python -m docs.generate.keys_page docs/guide/migrate-from-deepspeed.md` generates this table from the table that reads
your file, `tiering/config/ds_config/keys.py`. Keys of one section with the same class and note share a row. A refused
key is accepted if its value requests nothing: `false`, 0, `null`, or a section that is not `enabled`. If a section is
listed as a key, its class applies to all keys in it.
"""


def section() -> str:
    """The last section of the page, with its heading."""
    rows = [("section", "key", "class", "here"), ("---",) * 4, *_rows()]
    return "\n".join([HEADING + INTRO, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _rows() -> Iterator[tuple[str, ...]]:
    """Of each section in turn, first those of the file itself."""
    sections: dict[str, dict[tuple[str, str], list[str]]] = {"": {}}
    for path, key in {**SHORT_FORMS, **KEYS}.items():
        where, _, name = path.rpartition(".")
        if path.partition(".")[0] != "tiering":
            fate = (_class(key), _here(key))
            shown = f"`{name}`: a plain value" if path in SHORT_FORMS else f"`{name}`"
            sections.setdefault(where, {}).setdefault(fate, []).append(shown)
    for where, fates in sections.items():
        for (kind, here), names in fates.items():
            yield (f"`{where}`" if where else "", ", ".join(names), kind, here.replace("|", r"\|"))


def _class(key: KeyRule) -> str:
    return f"**{key.verdict}**" if key.verdict is KeyVerdict.REFUSED else str(key.verdict)


def _here(key: KeyRule) -> str:
    if not key.to or key.note:
        return key.note
    told = description(key.to)
    return f"`{key.to}`: {told}" if key.verdict is KeyVerdict.MAPPED else told


def main(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_text(text.partition(HEADING)[0] + section(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
