"""What is installed, beside what this package was made for."""

import platform
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from trainer.record.environment import PACKAGES, installed_version


def versions() -> dict[str, str | None]:
    """By name, Python first; None where a package is not installed."""
    return {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}}


def out_of_range() -> list[str]:
    """Packages in another version than ours asks for, one sentence each."""
    try:
        asked = [Requirement(line) for line in requires("zero-grpo") or ()]
    except PackageNotFoundError:  # a checkout that was never installed
        return []
    needed = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [
        f"{one.name} {found} is installed; this version was made for {one.name}{one.specifier}"
        for one in needed
        if (found := installed_version(one.name)) and not one.specifier.contains(found, prereleases=True)
    ]
