"""A DeepSpeed configuration, read into the native schema, with a report on every key.

loading.py    a file, a dict or a launcher's text     keys.py      the table of all keys: what becomes of each
reading.py    judges one of them, key by key          fates.py     what may become of a key
auto.py       what "auto" comes to                    readers.py   values as files have them
effect.py     what it comes to, in values             wording.py   why a key is refused, and what was meant
report.py     told to people, logs and programs       keys_page.py writes the table into the migration page
"""

from tiering.ds_config.auto import Known
from tiering.ds_config.effect import description, value_of
from tiering.ds_config.fates import Verdict
from tiering.ds_config.loading import examine, load
from tiering.ds_config.report import Entry, Origin, Report

__all__ = ["Entry", "Known", "Origin", "Report", "Verdict", "description", "examine", "load", "value_of"]
