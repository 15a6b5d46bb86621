"""Programs that import deepspeed run on this engine, without a package of that name.

    from tiering.integrations import deepspeed

    deepspeed.install()  # before accelerate, transformers, trl or lightning
    from transformers import Trainer, TrainingArguments

    Trainer(args=TrainingArguments(deepspeed="ds_config.json", ...), ...).train()

For a program that you do not change, with all processes that it starts:

    python -m tiering.integrations.deepspeed train.py ...
    python -m tiering.integrations.deepspeed -m llamafactory.cli train run.yaml
    python -m tiering.integrations.deepspeed accelerate launch train.py ...

``import deepspeed.x`` gives the module ``tiering.x`` (``zero.Init`` makes the process group, too), and
``importlib.metadata`` knows a distribution of that name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import tiering
from tiering.errors import EngineStateError
from tiering.integrations import _deepspeed_models, _deepspeed_trainer, _ranks

if TYPE_CHECKING:
    from torch import nn

    from tiering import EngineParts

__all__ = ["VERSION", "install", "is_installed", "uninstall"]

NAME = "deepspeed"
VERSION = "0.19.8"
"""The version of DeepSpeed whose names and configuration tiering has. Programs compare it with what they need."""

_CHILDREN = str(Path(__file__).parent / "_deepspeed_children")
_EARLY = ("accelerate", "lightning.fabric.strategies.deepspeed", "transformers.integrations.deepspeed", "trl")
"""Modules that decide when they are imported whether there is a DeepSpeed."""
_OWN = {f"{NAME}.zero": "tiering.integrations._deepspeed_zero"}
"""Modules that differ from those of tiering."""


def install(*, children: bool = True) -> None:
    """Make ``import deepspeed`` import tiering, in this process and, with ``children``, in those that it starts.

    Children are Python processes that inherit the variable PYTHONPATH of the environment; ``python -I`` and
    ``python -E`` ignore it. A second call changes nothing.

    Raises EngineStateError if another deepspeed is already imported, or a library that has found none.
    """
    if not is_installed():
        _check_imports()
        sys.meta_path.insert(0, _FINDER)
        if _ranks.STATE in sys.modules:
            _ranks.count(sys.modules[_ranks.STATE], is_installed)
    if children and _CHILDREN not in _python_path():
        os.environ["PYTHONPATH"] = os.pathsep.join([_CHILDREN, *_python_path()])


def uninstall() -> None:
    """Undo ``install``, also for processes that start later. Libraries keep what they have imported."""
    if is_installed():
        sys.meta_path.remove(_FINDER)
        for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
            del sys.modules[name]
    others = [entry for entry in _python_path() if entry != _CHILDREN]
    if others:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)


def is_installed() -> bool:
    """Whether ``import deepspeed`` imports tiering in this process."""
    return _FINDER in sys.meta_path


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _check_imports() -> None:
    if NAME in sys.modules:
        raise EngineStateError(
            f"install() was called after {getattr(sys.modules[NAME], '__file__', NAME)} was imported; call it before"
            " the first import of deepspeed, or uninstall that package"
        )
    early = [name for name in _EARLY if name in sys.modules]
    if early and find_spec(NAME) is None:
        raise EngineStateError(
            f"install() was called after {', '.join(early)}, which found no DeepSpeed when imported; call install()"
            " before these imports, or start the program by `python -m tiering.integrations.deepspeed`"
        )


class _Distribution(Distribution):
    """The distribution that ``importlib.metadata`` finds under the name: programs read its version."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
                "Summary: DeepSpeed's names, on the engine of tiering\n"
            ),
            "top_level.txt": f"{NAME}\n",
        }.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(tiering.__file__).parent.parent / path


_ALL = DistributionFinder.Context()


class _Finder(DistributionFinder):
    """Finds each module of ``deepspeed`` as the one of ``tiering`` with the same path. It is the first finder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _CHANGES:
            others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next(filter(None, others), None)
            return None if spec is None else _changed(spec)
        if name == NAME:
            return ModuleSpec(NAME, self, is_package=True)  # type: ignore[arg-type] # a protocol of two methods
        if not name.startswith(f"{NAME}."):
            return None
        try:
            found = find_spec(_ours(name))
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(name, self, is_package=is_package)  # type: ignore[arg-type] # as above

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name == NAME:
            return None
        module = import_module(_ours(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == NAME:
            # A module of its own: its version is not that of tiering.
            vars(module).update(
                __version__=VERSION,
                version=VERSION,
                initialize=_initialize,
                __getattr__=_attribute,
                __dir__=lambda: dir(tiering),
            )
        elif module.__spec__ is not None:
            # The import has replaced the module's own spec, by which it can be reloaded and pickled.
            module.__spec__ = module.__spec__.loader_state

    def find_distributions(self, context: DistributionFinder.Context = _ALL) -> Iterator[Distribution]:
        # A search of a path, as by pip, is for the packages that are installed there.
        if context.name in (None, NAME) and "path" not in vars(context):
            yield _Distribution()


_FINDER = _Finder()


def _changed(spec: ModuleSpec) -> ModuleSpec:
    """``spec`` of a module that is changed after its execution."""
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _CHANGES[module.__name__](module)

    # On the instance: all else about the module, such as its source, stays with its own loader.
    loader.exec_module = exec_module
    return spec


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    _ranks.STATE: lambda module: _ranks.count(module, is_installed),
    _deepspeed_trainer.MODULE: _deepspeed_trainer.make_repeatable,
    _deepspeed_models.MODULE: _deepspeed_models.show_biases,
}
"""The changes to modules of other libraries."""


def _ours(name: str) -> str:
    return _OWN.get(name) or f"{tiering.__name__}{name.removeprefix(NAME)}"


def _attribute(name: str) -> Any:
    module = f"{NAME}.{name}"
    return import_module(module) if module in _OWN else getattr(tiering, name)


def _initialize(
    args: Any = None, model: nn.Module | None = None, *others: Any, **options: Any
) -> EngineParts:
    """``tiering.initialize``, which makes the process group that programs rely on, also of one process."""
    if options.get("dist_init_required") is None:
        tiering.init_distributed(verbose=False)
    if isinstance(config := options.get("config"), Mapping):
        # trl adds keys with dots for a reference model. DeepSpeed does not read them.
        options["config"] = {
            key: value for key, value in config.items() if not key.startswith("zero_optimization.")
        }
    if model is not None:
        _ranks.check_accelerate()
    parts = tiering.initialize(args, model, *others, **options)
    parts.engine.become_child()
    return parts


def main(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a program that finds deepspeed here, as do the processes that it starts."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(_USAGE if not arguments else print(_USAGE))
    is_python = arguments[0] == "-m" or arguments[0].endswith(".py")
    command = [sys.executable, *arguments] if is_python else [*arguments]
    install()
    try:
        os.execvp(command[0], command)  # noqa: S606 # no shell, as everywhere here
    except OSError as error:
        sys.exit(f"tiering.integrations.deepspeed: cannot run {command[0]}: {error.strerror}")


_USAGE = """\
usage: python -m tiering.integrations.deepspeed FILE.py [ARGUMENT ...]
       python -m tiering.integrations.deepspeed -m MODULE [ARGUMENT ...]
       python -m tiering.integrations.deepspeed COMMAND [ARGUMENT ...]

Runs a program in which `import deepspeed` imports tiering, also in the Python processes that it starts."""


if __name__ == "__main__":
    main(sys.argv[1:])
