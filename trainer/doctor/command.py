"""``zero-grpo doctor``: a run directory by its records, a run file by its parts."""

from collections.abc import Sequence
from pathlib import Path

from trainer.doctor.finding import Diagnosis
from trainer.errors import Refused


def diagnose(target: str, overrides: Sequence[str]) -> Diagnosis:
    """Refused where the run file or the folder cannot be read."""
    if not Path(target).is_dir():
        from trainer.doctor.live import diagnose_run_file

        return diagnose_run_file(target, overrides)
    from trainer.doctor.recorded import diagnose_records  # reading takes no transformers, which takes seconds
    from trainer.doctor.records import read

    if overrides:
        raise Refused(f"doctor {target}: records are read as they are; it takes no {' '.join(overrides)}.")
    return diagnose_records(read(Path(target)), target)
