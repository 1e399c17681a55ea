"""Before-rollout hooks: what a hook is given, the loader of a user's own, and how they are run."""

import difflib
import importlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.errors import Refused, RunEnd, Stopped


@dataclass(frozen=True)
class HookContext:
    """What a hook sees, the same on every rank but for ``world_rank``."""

    step: int
    """0 before the first rollout; a refusal then ends the run as refused, later as stopped."""
    policy: PreTrainedModel
    """The transformers model, without engine or adapter wrapper around it."""
    reference: PreTrainedModel | None
    """None where the reference is the policy without its adapters, or where there is none."""
    tokenizer: PreTrainedTokenizerBase
    longest_prompt: int
    """Tokens, chat template included, padding not: of all prompts at step 0, later of this step's, over all ranks."""
    max_new_tokens: int
    world_rank: int


# A hook raises Refused or Stopped to end the run; what it returns is shown to the user as notes.
Hook = Callable[[HookContext], list[str] | None]


def load_hooks(paths: Sequence[str]) -> list[Hook]:
    """The functions at ``package.module:function``; Refused names every path that leads nowhere, and why."""
    hooks: list[Hook] = []
    problems = []
    for path in paths:
        try:
            hooks.append(_load(path))
        except Refused as reason:
            problems.append(f"{path!r}: {reason}")
    if problems:
        listed = "\n  ".join(problems)
        raise Refused(f"hooks.before_rollout: cannot be loaded.\n  {listed}")
    return hooks


def _load(path: str) -> Hook:
    module_name, colon, name = path.partition(":")
    if not (colon and all(part.isidentifier() for part in module_name.split(".")) and name.isidentifier()):
        raise Refused('expected "package.module:function"')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise Refused(
                f"no module {error.name!r}. Fix: install it, or put its folder on PYTHONPATH (PYTHONPATH=. for here)"
            ) from None
        raise Refused(f"importing it failed: {_said(error)}") from None
    except Exception as error:  # a user's module may fail in any way
        raise Refused(f"importing it failed: {_said(error)}") from None
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, vars(module), n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise Refused(f"{module.__file__ or module_name} has no {name!r}{meant}")
    hook = getattr(module, name)
    if not callable(hook):
        raise Refused(f"is a {type(hook).__name__}, expected a function that takes a HookContext")
    return hook


def run_hooks(hooks: Sequence[Hook], context: HookContext) -> list[str]:
    """Runs the hooks in order and returns their notes. A hook's own failure ends the run, naming the hook."""
    notes: list[str] = []
    end = Stopped if context.step > 0 else Refused
    for hook in hooks:
        name = f"{hook.__module__}:{hook.__qualname__}" if hasattr(hook, "__qualname__") else repr(hook)
        try:
            returned = hook(context)
        except Refused as reason:
            raise end(str(reason)) from None
        except RunEnd:
            raise
        except Exception as error:  # a user's hook may fail in any way
            raise end(f"The before-rollout hook {name} failed at step {context.step}: {_said(error)}") from error
        if returned is None:
            continue
        if not (isinstance(returned, list) and all(isinstance(note, str) for note in returned)):
            got = f"returned {returned!r}"
            raise end(f"The before-rollout hook {name} {got}, expected None or a list of strings (notes for the user).")
        notes += returned
    return notes


def _said(error: Exception) -> str:
    """Type, message and the user's line of an error, in place of a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    if isinstance(error, SyntaxError):  # the last frame is the importer's; the message itself names file and line
        where = ""
    return f"{type(error).__name__}: {error}{where}"
