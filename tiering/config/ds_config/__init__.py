"""Reads a DeepSpeed configuration into the native schema, with a report on every key.

loading.py     reads a file, a dict or base64 text     keys.py        the table of DeepSpeed's keys: the rule of each
parsing.py     applies the rules, key by key           known_keys.py  all keys by their dotted paths
auto.py        resolves "auto"                         type_params.py the parameters of each optimizer and scheduler
trainer.py     the trainer's argument of a key         verdicts.py    the kinds of rules
in_effect.py   the values that are in effect           converters.py  converts values of the file
key_report.py  prints and exports the report           messages.py    error texts and suggestions
assumed.py     unknown arguments of a trainer          secrets.py     hides passwords and tokens
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
