"""A DeepSpeed configuration, read into the native schema, with a report on every key.

loading.py    a file, a dict or a launcher's text     keys.py      the table of all keys: what becomes of each
parsing.py    judges one of them, key by key          verdicts.py  what may become of a key
auto.py       what "auto" comes to                    converters.py values as files have them
in_effect.py  what it comes to, in values             messages.py  why a key is refused, and what was meant
report.py     told to people, logs and programs
"""

from tiering.config.ds_config.auto import Known
from tiering.config.ds_config.in_effect import description, value_of
from tiering.config.ds_config.loading import examine, load
from tiering.config.ds_config.report import Entry, Origin, Report
from tiering.config.ds_config.verdicts import Verdict

__all__ = ["Entry", "Known", "Origin", "Report", "Verdict", "description", "examine", "load", "value_of"]
