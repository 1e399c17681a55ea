"""From `reward.function` in a run file to a Python callable."""

import difflib
import importlib
import importlib.util
import itertools
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.errors import Refused, RunEnd

FORMS = '"module:callable", or "file.py:callable" with the file beside the run file'
_serial = itertools.count()


@dataclass(frozen=True)
class TrainerState:
    """The part of transformers' TrainerState that a reward can depend on: how far the training is."""

    global_step: int
    max_steps: int | None


def resolve(reference: str, folder: Path, loaded: dict[Path, ModuleType]) -> Callable[..., Any]:
    """The callable that `module:name` or `file.py:name` names. Refused says what is wrong with it.

    ``folder`` holds the run file. ``loaded`` remembers the files, so that two functions of one file share its state.
    """
    module_name, _, name = reference.rpartition(":")
    if not module_name or not name:
        raise Refused(f"got {reference!r}, expected {FORMS}")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that a file of the user's shadows no package
    module = _load_file(folder / module_name, loaded) if module_name.endswith(".py") else _import_module(module_name)
    if not hasattr(module, name):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise Refused(f"{module_name} defines no {name!r}{did_you_mean(name, callables)}")
    function = getattr(module, name)
    if not callable(function):
        raise Refused(f"{name!r} in {module_name} is not callable, it is of type {type(function).__name__}")
    if isinstance(function, type):
        raise Refused(f"{name!r} in {module_name} is a class; name a function, or an instance that can be called")
    return function


def copy_files(files: Iterable[Path], folder: Path, run_dir: Path) -> None:
    """Copy reward files into RUN_DIR/rewards, so that a run keeps the code that judged it."""
    for file in files:
        place = file.relative_to(folder) if file.is_relative_to(folder) else Path(file.name)
        target = run_dir / "rewards" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def describe(error: BaseException) -> str:
    """`KeyError: 'task' (rewards.py:14)`: what was raised, and the last line of the user's own file before it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({_name(error.filename)}:{error.lineno})"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = text if len(text) <= 300 else text[:297] + "..."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{text} ({_name(own[-1].filename)}:{own[-1].lineno})" if own else text


def _load_file(path: Path, loaded: dict[Path, ModuleType]) -> ModuleType:
    path = path.resolve()
    if path in loaded:
        return loaded[path]
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*.py")]
        raise Refused(f"there is no file {path}{did_you_mean(path.name, beside)}")
    # A name of its own: two run files may both have a rewards.py, and neither may hide a package.
    module_name = f"{path.stem}__reward_file_{next(_serial)}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # a .py file that exists always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class up by its module's name
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except RunEnd:
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise Refused(f"importing {path.name} failed: {describe(error)}") from None
    loaded[path] = module
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except RunEnd:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise Refused(
                f"there is no module {error.name!r}; install it, put it beside the run file, "
                'or name a file as "file.py:callable"'
            ) from None
        raise Refused(f"importing {name} failed: {describe(error)}") from None


def _is_users(filename: str) -> bool:
    ours = Path(__file__).parents[1] in Path(filename).parents
    library = filename.startswith((sysconfig.get_path("stdlib"), "<frozen")) and "site-packages" not in filename
    return not (ours or library)


def _name(filename: str | None) -> str:
    return Path(filename).name if filename else "?"
