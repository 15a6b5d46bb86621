"""Reads a DeepSpeed configuration into the native schema, with a report on every key.

loading.py     reads a file, a dict or base64 text     keys.py        the table of all keys, with the rule of each
parsing.py     applies the rules, key by key           type_params.py the parameters of each optimizer and scheduler
auto.py        resolves "auto"                         verdicts.py    the kinds of rules
trainer.py     the trainer's argument of a key         converters.py  converts values of the file
in_effect.py   the values that are in effect           messages.py    error texts and suggestions
key_report.py  prints and exports the report           secrets.py     hides passwords and tokens
"""

from tiering.config.ds_config.auto import LoadContext
from tiering.config.ds_config.in_effect import description, value_of
from tiering.config.ds_config.key_report import KeyEntry, KeyReport, Origin
from tiering.config.ds_config.loading import examine, load, mapping_of
from tiering.config.ds_config.verdicts import KeyVerdict

__all__ = [
    "KeyEntry",
    "KeyReport",
    "KeyVerdict",
    "LoadContext",
    "Origin",
    "description",
    "examine",
    "load",
    "mapping_of",
    "value_of",
]
