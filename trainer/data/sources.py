"""Where rows come from: files, folders, the Hugging Face hub, reasoning-gym."""

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.reasoning_gym_tasks import PREFIX, read_reasoning_gym
from trainer.data.table import Table, joined, numbered
from trainer.data.text_files import BLOCK, read_csv, read_json, read_json_lines
from trainer.errors import Refused

if TYPE_CHECKING:
    import datasets

FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet")
SECONDS_TO_REACH_THE_HUB = 10.0
OTHER_FILE_TYPES = (".gz", ".zst", ".txt", ".tsv", ".xlsx", ".arrow")
"""Not read, but a name that ends so is no hub name."""


@dataclass(frozen=True)
class Source:
    """One source as a run file names it; the two keys only serve error messages."""

    name: str
    split: str = "train"
    """Of a folder or a hub data set; a file is a single table, which counts as its split "train"."""
    config: str = ""
    key: str = "data.source"
    split_key: str = "data.split"

    @property
    def path(self) -> Path:
        return Path(os.path.expanduser(self.name))  # which leaves a user who is not there as it is

    @property
    def setting(self) -> str:
        return f'{self.key} = "{self.name}"'


def read_rows(source: Source) -> Table:
    """All rows of a file, a folder, a hub data set or a reasoning-gym task.

    Raises:
        Refused: nothing there, not readable as a whole, no such split, or not a single row.
    """
    return joined(read_blocks(source))


def read_blocks(source: Source) -> Iterator[Table]:
    """The same rows in blocks; a text or Parquet file may be larger than memory."""
    found = False
    try:
        for block in _blocks(source):
            found = found or bool(block.rows or block.unreadable)
            yield block
    except OSError as error:
        raise Refused(f"{source.setting}: cannot be read: {error.strerror or error}") from error
    if not found:
        raise Refused(f"{source.setting}: {block.label} holds no rows.")


def _blocks(source: Source) -> Iterator[Table]:
    if not source.name:
        raise Refused(f"{source.key} is empty; expected a file ({', '.join(FILE_TYPES)}), a folder or a hub data set.")
    if source.name.startswith(PREFIX):
        _refuse_split(source)
        return iter([read_reasoning_gym(source.name)])
    if source.path.is_dir():
        return iter([_read_folder(source)])
    if source.path.is_file():
        _refuse_split(source)
        return _read_file(source)
    if _looks_like_path(source.name):
        raise Refused(f"{source.setting}: no such file or folder.\n{_neighbours(source.path)}")
    return iter([_load_dataset(source)])


def _read_file(source: Source) -> Iterator[Table]:
    ending = source.path.suffix.lower()
    match ending:
        case ".jsonl":
            return read_json_lines(source.path, source.name)
        case ".json":
            return read_json(source.path, source.name)
        case ".csv":
            return read_csv(source.path, source.name)
        case ".parquet":
            return _read_parquet(source)
    raise Refused(f'{source.setting}: got a file that ends in "{ending}", expected one of {", ".join(FILE_TYPES)}.')


def _read_parquet(source: Source) -> Iterator[Table]:
    import pyarrow
    import pyarrow.parquet

    read = 0
    try:
        file = pyarrow.parquet.ParquetFile(source.path)
        yield numbered([], source.name)
        for batch in file.iter_batches(BLOCK):
            rows = batch.to_pylist()
            yield numbered(rows, source.name, first=read + 1)
            read += len(rows)
    # ValueError and OverflowError: text that is not UTF-8, dates that Python cannot hold.
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise Refused(f"{source.setting}: not readable as Parquet, behind row {read}: {error}") from error


def _read_folder(source: Source) -> Table:
    """What save_to_disk wrote, or else a folder of data files as they lie in a hub repository."""
    if not any((source.path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _load_dataset(source)
    import datasets

    try:
        saved = datasets.load_from_disk(str(source.path))
        if isinstance(saved, datasets.Dataset):
            _refuse_split(source, own=str(saved.split or "train"))
            return numbered(_whole(saved), source.name)
        if source.split in saved:
            return numbered(_whole(saved[source.split]), _with_split(source))
    except Refused:
        raise
    # Of a damaged state.json or dataset_info.json, KeyError, TypeError and whatever else its fields lead to.
    except Exception as error:
        raise Refused(
            f"{source.setting}: datasets.load_from_disk failed: {type(error).__name__}: {error}\n"
            "Fix: copy the whole folder again."
        ) from error
    raise Refused(f'{source.split_key} = "{source.split}": {source.name} holds the splits {", ".join(saved)}.')


def _whole(saved: "datasets.Dataset") -> list[dict[str, Any]]:
    """Its rows. Checked first: Arrow takes the places of a damaged file for true, and ends the process there."""
    saved.data.validate(full=True)
    rows: list[dict[str, Any]] = saved.to_list()
    return rows


def _load_dataset(source: Source) -> Table:
    import datasets

    try:
        if source.path.is_dir():
            _check_card(source)
        else:
            _check_hub(source)
        rows = datasets.load_dataset(source.name, source.config or None, split=source.split).to_list()
    except Refused:
        raise
    # httpx, fsspec, pyarrow, the hub client and the dataset builders each raise kinds of their own, none with a
    # common base; to the user they all mean that this source could not be had, and the reason is passed on.
    except Exception as error:
        config = f'"{source.config}", ' if source.config else ""
        raise Refused(
            f"{source.setting} could not be loaded.\n"
            f'Tried: datasets.load_dataset("{source.name}", {config}split="{source.split}")\n'
            f"It said: {type(error).__name__}: {error}\n"
            f"{_advice(source)}"
        ) from error
    return numbered(rows, _with_split(source))


def _check_card(source: Source) -> None:
    """Refused where the README of a folder, which says what its files are, names others: datasets would fetch them."""
    import yaml
    from huggingface_hub.repocard import metadata_load

    card, beside = source.path / "README.md", source.path / ".huggingface.yaml"
    told = [(metadata_load(card) or {}) if card.is_file() else {}]
    told += [yaml.safe_load(beside.read_text(encoding="utf-8")) or {}] if beside.is_file() else []
    for name in _texts([one.get("configs") for one in told]):
        if "://" in name or "::" in name or name.startswith(("/", "~")) or ".." in name.split("/"):
            raise Refused(
                f"{source.setting}: its README names {name!r}, outside of the folder. Fix: take out `configs`, or name "
                f"a file ({', '.join(FILE_TYPES)}) instead of the folder."
            )


def _texts(value: object) -> Iterator[str]:
    """Every text in parsed YAML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _check_hub(source: Source) -> None:
    """One plain request: datasets would try for half a minute before it says less."""
    import datasets
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    *owner, name = source.name.split("/")
    cached = Path(datasets.config.HF_DATASETS_CACHE) / "___".join([*owner, camelcase_to_snakecase(name)])
    if cached.is_dir():  # without the hub, datasets takes what it prepared before
        return
    try:
        HfApi().dataset_info(source.name, timeout=SECONDS_TO_REACH_THE_HUB)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return  # an answer, or a name that cannot be asked for: datasets says at once what is wrong
    except Exception as error:  # what the HTTP client raises, whose name depends on the hub client's version
        raise Refused(
            f"{source.setting}: no file or folder of that name, and the hub cannot be reached: {error}.\n"
            f"{_advice(source)}"
        ) from None


def _advice(source: Source) -> str:
    if source.path.is_dir():
        return f"Name a file ({', '.join(FILE_TYPES)}) of that folder, or a folder written by datasets' save_to_disk."
    folder = source.name.rsplit("/", 1)[-1]
    config = f', "{source.config}"' if source.config else ""
    return (
        f"{_neighbours(source.path)}\n"
        "If it is on the hub: check name, data.config and split, and the network (HF_ENDPOINT may name a mirror).\n"
        "Without network: save it where there is one, copy the folder, and name the folder here:\n"
        f'  datasets.load_dataset("{source.name}"{config}).save_to_disk("{folder}")'
    )


def _refuse_split(source: Source, own: str = "train") -> None:
    """A single table has no configurations, and no split but its own."""
    if source.config:
        raise Refused(
            f'data.config = "{source.config}" has no meaning for {source.setting}, a single table. Remove it.'
        )
    if source.split not in ("train", own):
        raise Refused(
            f'{source.split_key} = "{source.split}": {source.name} is a single table without splits. Remove it; to '
            "evaluate, name another file in data.eval_source, or hold rows out with data.eval_fraction."
        )


def _looks_like_path(name: str) -> bool:
    """A hub name is NAME or OWNER/NAME, without a file ending."""
    return (
        Path(name).suffix.lower() in FILE_TYPES + OTHER_FILE_TYPES
        or name.startswith((".", "/", "~"))
        or name.endswith("/")
        or name.count("/") > 1
    )


def _neighbours(path: Path) -> str:
    """From where a relative path was read, and what lies there under a similar name."""
    folder = path.absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    data_files = [name for name in names if Path(name).suffix.lower() in FILE_TYPES]
    found = f"similar names: {', '.join(near)}" if near else f"data files: {', '.join(data_files[:10]) or 'none'}"
    return f"Relative paths are read from {Path.cwd()}. In {folder}: {found}."


def _with_split(source: Source) -> str:
    return f'{source.name} (split "{source.split}")'
