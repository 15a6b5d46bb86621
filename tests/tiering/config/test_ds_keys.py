"""The table of keys knows all of DeepSpeed's, and no others but those listed here; no key is taken in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tiering.config.ds_config import examine, load, value_of
from tiering.config.ds_config.known_keys import KEYS, SECTIONS
from tiering.config.ds_config.type_params import PARAMS_BY_TYPE
from tiering.config.ds_config.verdicts import KeyVerdict

from .ds_shapes import content, names, shapes

DEEPSPEED: dict[str, Any] = json.loads(
    Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8")
)
THERE: dict[str, dict[str, Any]] = DEEPSPEED["keys"] | {
    key: {"default": None} for key in DEEPSPEED["removed"]
}

# What our table has beside the keys of DeepSpeed 0.19.8, and why.
OLD = {
    "aio.num_threads": "its name in the tools that measure drives",
    "aio.thread_count": "its name until intra_op_parallelism",
    "bf16.check_overflow": "the first name of check_grad_overflow",
    "bfloat16.check_overflow": "likewise, in the first name of bf16",
    "compile.backend": "of the first section for torch.compile",
    "compile.disable": "likewise",
    "compile.enabled": "likewise",
    "compile.kwargs": "likewise",
    "fp16.opt_level": "of Apex, which DeepSpeed ignored in this section",
    "seq_parallel_comm_data_type": "its name until seq_parallel_communication_data_type",
    "zero_optimization.cpu_offload_params": "as the guides to stage 3 had it first",
    "zero_optimization.gather_fp16_weights_on_model_save": "the name without stage3_",
    "zero_optimization.offload_optimizer.buffer_size": "taken for offload_param's by many files",
    "zero_optimization.offload_optimizer.pipeline": "made of pipeline_read and pipeline_write there",
}
NEW = {
    "zero_optimization.stage3_partition_stream_chunk_size": "of versions after 0.19.8",
    "bf16.auto_cast": "as fp16.auto_cast, which DeepSpeed has for fp16 alone",
    "bfloat16.auto_cast": "the older name of the section",
}
INSIDE_ZERO = "zero_optimization."  # where aio is put by mistake

# Where our default is another one. Of all others a file that says nothing trains alike.
OTHER_DEFAULTS = {
    "aio.queue_depth": "one thread keeps more requests in flight than several there",
    "train_batch_size": "what the rest of a batch makes it",
    "train_micro_batch_size_per_gpu": "likewise",
    "gradient_accumulation_steps": "likewise",
    **dict.fromkeys(
        ("zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"),
        "the device budget is the limit unless a file has another",
    ),
}


def knows(key: str) -> bool:
    """Whether the table has ``key``, or a section that it is inside of."""
    if key in KEYS:
        return True
    sections = [key[:end] for end in range(len(key)) if key[end] == "."]
    return any(
        section in KEYS and KEYS[section].has_inside(key.removeprefix(f"{section}.")) for section in sections
    )


def test_every_key_of_deepspeed_has_a_fate() -> None:
    assert len(THERE) > 300
    assert [key for key in THERE if not knows(key)] == []
    assert [key for key in DEEPSPEED["open"] if not knows(f"{key}.any.thing")] == []


def test_every_key_here_is_one_of_deepspeeds() -> None:
    ours = {key for key in KEYS if not key.startswith(("tiering.", "optimizer.params.", "scheduler.params."))}
    inside = {f"{section}.{name}" for section in ours for name in KEYS[section].inside if "*" not in name}
    sections = {key[:end] for key in THERE for end in range(len(key)) if key[end] == "."} | {
        *DEEPSPEED["open"]
    }
    sections |= {f"{INSIDE_ZERO}{key}" for key in {*THERE, *OLD} if key.startswith("aio.")}
    assert (ours | inside) - {*THERE} - sections - {*OLD, *NEW} == set()
    assert {key for key in (*OLD, *NEW) if not knows(key)} == set()  # none is listed for nothing


def test_every_parameter_of_an_optimizer_or_a_schedule_has_a_fate() -> None:
    for rule, classes in DEEPSPEED["optimizers"].items():
        there = {name for parameters in classes.values() for name in parameters}
        there |= {*DEEPSPEED["taken"].get(rule, ())}
        there -= {"adamw_mode"}  # a keyword that DeepSpeed itself gives: in a file it would be there twice
        assert {name for name in there if f"optimizer.params.{name}" not in KEYS} == set()
        if rule in PARAMS_BY_TYPE["optimizer"]:
            assert there - {*PARAMS_BY_TYPE["optimizer"][rule]} == set()
    for name in DEEPSPEED["taken"]["Muon"]:
        assert f"optimizer.params.{name}" in KEYS
    for schedule, parameters in DEEPSPEED["schedules"].items():
        assert {*PARAMS_BY_TYPE["scheduler"][schedule]} == {*parameters}


def test_defaults_are_deepspeeds() -> None:
    config, _ = load({"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
    differ = {}
    for key, about in THERE.items():
        to = KEYS[key].to if key in KEYS else ""
        if to and "default" in about and not to.startswith(("optimizer.", "scheduler.")):
            ours = value_of(config, to)
            same = ours == about["default"] or KEYS[key].requests_nothing(about["default"])
            if not same and (ours, about["default"]) != ([], None):  # no path
                differ[key] = (about["default"], ours)
    assert differ.keys() == OTHER_DEFAULTS.keys()


def test_what_deepspeed_does_by_default_is_never_refused() -> None:
    defaults = {
        key: about["default"]
        for key, about in THERE.items()
        if "default" in about and key in KEYS and KEYS[key].verdict is KeyVerdict.REFUSED
    }
    assert len(defaults) > 15
    assert [key for key, default in defaults.items() if not KEYS[key].requests_nothing(default)] == []


# Random keys and values in the files of ``ds_files/``


def free(section: str) -> bool:
    """Whether the names in ``section`` are the user's own, or of a feature that nobody has any more."""
    return any(
        f"{section}.".startswith(f"{entry}.") for entry in (*DEEPSPEED["open"], *DEEPSPEED["removed"], *OLD)
    )


def sections(section: dict[str, Any], path: str = "") -> Iterator[str]:
    """The dotted paths of all objects in ``given``, the whole first."""
    yield path
    for name, value in section.items():
        if isinstance(value, dict):
            yield from sections(value, f"{path}.{name}" if path else name)


FILES = {name: content(shape) for name, shape in shapes().items()}
OBJECTS = [
    (name, path)
    for name, file in FILES.items()
    for path in sections(file)
    if (path == "" or path in SECTIONS or knows(path)) and not free(path)
    # parameters of what is refused are not looked at
    if f"{path.rpartition('.')[0]}.type" not in shapes()[name].refused
]
LEAVES = [(name, path) for name, file in FILES.items() for path in names(file)]


def with_value(file: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of ``file`` with ``value`` at the dotted ``path``."""
    copy: dict[str, Any] = json.loads(json.dumps(file))
    node = copy
    *above, name = path.split(".")
    for section in above:
        node = node[section]
    node[name] = value
    return copy


@given(st.sampled_from(OBJECTS), st.text(st.characters(exclude_characters="."), min_size=1))
def test_an_unknown_key_anywhere_is_refused_by_its_name(place: tuple[str, str], name: str) -> None:
    file, section = place
    key = f"{section}.{name}" if section else name
    if knows(key) or key in SECTIONS or name.startswith("_"):  # the last is a remark
        return
    shape = shapes()[file]
    _, before = examine(FILES[file], world_size=shape.ranks, context=shape.known)
    settings = with_value(FILES[file], key, True)
    config, report = examine(settings, world_size=shape.ranks, context=shape.known)
    assert config is None
    spelled = key.removesuffix(name) + (name if name.isprintable() else json.dumps(name))
    assert {entry.key for entry in report.refused} == {spelled} | {entry.key for entry in before.refused}
    (note,) = [entry.note for entry in report.refused if entry.key == spelled]
    assert note.startswith("unknown key; ")


def test_one_letter_less_is_told_with_the_right_name() -> None:
    untold = {}
    for key in THERE:
        section, _, name = key.rpartition(".")
        if free(section):
            continue
        wrong = f"{name[: len(name) // 2]}{name[len(name) // 2 + 1 :]}"  # without the letter in its middle
        settings: dict[str, Any] = {wrong: True}
        for above in reversed(section.split(".") if section else []):
            settings = {above: settings}
        _, report = examine({"train_batch_size": 1} | settings)
        notes = {entry.key: entry.note for entry in report.refused}
        note = notes.get(f"{section}.{wrong}" if section else wrong, "taken in silence")
        if not re.fullmatch(rf"unknown key; did you mean ([a-z_0-9.]+ or )?([a-z_0-9.]+\.)?{name}\?", note):
            untold[key] = note
    assert untold == {}


@given(st.lists(st.sampled_from(LEAVES), min_size=1, max_size=4))
def test_auto_anywhere_is_filled_in_or_refused(places: list[tuple[str, str]]) -> None:
    file = places[0][0]
    settings = FILES[file]
    for path in [path for name, path in places if name == file]:
        settings = with_value(settings, path, "auto")
    shape = shapes()[file]
    config, report = examine(settings, world_size=shape.ranks, context=shape.known)
    assert (config is None) == bool(report.refused)
    assert all(entry.note for entry in report.refused)
    if config is not None:
        for entry in report.entries:
            # nothing that means something is left at the word
            assert entry.value != "auto" or entry.off or entry.note, entry


def test_auto_is_the_default_where_deepspeed_drops_the_word() -> None:
    dropped = ("zero_optimization.", "bf16.", "fp16.", "tensorboard.", "wandb.", "csv_monitor.")
    wrong = []
    for key in THERE:
        if key.startswith(dropped) and key in KEYS and key != "zero_optimization.stage":
            *above, name = key.split(".")
            settings: Any = {name: "auto"}
            for section in reversed(above):
                settings = {section: settings}
            config, _ = examine({"train_batch_size": 1} | settings)
            if config != load({"train_batch_size": 1})[0]:
                wrong.append(key)
    assert wrong == []
