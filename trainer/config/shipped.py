"""Folders that lie at the top of a checkout, where users look, and inside the package in a wheel."""

from pathlib import Path

DEEPSPEED = ("zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
"""The files of `ds_configs`, by the names that engine.deepspeed takes."""

PACKAGE = Path(__file__).resolve().parent.parent


def ds_configs() -> Path:
    return _first(PACKAGE / "ds_configs", PACKAGE.parent / "ds_configs")


def recipes() -> Path:
    return _first(PACKAGE / "recipes", PACKAGE.parent / "launch" / "recipes")


def _first(installed: Path, checkout: Path) -> Path:
    return installed if installed.is_dir() else checkout
