"""The DeepSpeed JSON that `engine.deepspeed` names."""

from pathlib import Path

from trainer.config import shipped
from trainer.config.deepspeed_json.mistakes import Block
from trainer.errors import Refused
from trainer.outside import NotJson, parsed


def locate(name: str) -> Path:
    """The file: one that ships, or the user's, read from the working directory."""
    return shipped.ds_configs() / f"{name}.json" if name in shipped.DEEPSPEED else Path(name)


def read(file: Path) -> Block:
    """The parsed file. Raises `Refused` with the line of what is no JSON."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise Refused(
            f"{file}: there is no such DeepSpeed configuration (engine.deepspeed). Names that ship:"
            f" {', '.join(shipped.DEEPSPEED)}."
        ) from None
    except UnicodeDecodeError:
        raise Refused(f"{file}: not UTF-8 text, expected a DeepSpeed JSON (engine.deepspeed).") from None
    except OSError as error:
        raise Refused(f"{file}: cannot be read (engine.deepspeed): {error.strerror}.") from None
    try:
        block = parsed(text, strict=True)
    except NotJson as error:
        if not error.line:
            raise Refused(f"{file}: {error}.") from None
        line = (text.splitlines() or [""])[min(error.line, len(text.splitlines()) or 1) - 1]
        comment = " JSON has no comments." if line.lstrip().startswith(("//", "#", "/*")) or " //" in line else ""
        raise Refused(
            f"{file}:{error.line}: not valid JSON: {error.reason}.{comment}\n  {line.strip()[:100]}"
        ) from None
    if not isinstance(block, dict):
        raise Refused(f"{file}: the JSON is a {type(block).__name__}, expected an object with DeepSpeed's keys.")
    return block
