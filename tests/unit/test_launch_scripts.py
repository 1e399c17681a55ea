"""launch/slurm.sbatch and launch/multinode.sh, with stand-ins for what they start."""

import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"

# Two tasks, one after the other; the code of the last, as srun gives that of the highest.
SRUN = """
echo "srun $1 $2 $3" >>calls
shift 3
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@"; done
"""
SCONTROL = """
if [ "$1 $2" = "show hostnames" ]; then printf 'node-7\\nnode-8\\n'; else echo "scontrol $*" >>calls; fi
"""
PYTHON = """
variables="$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $OMP_NUM_THREADS"
printf '%s|' "$variables" "$@" >>calls
echo >>calls
exit $CODE
"""
SQUEUE = """
[ "$*" = "--noheader --jobs 123456 --format %T" ] && echo $STATE
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, body in {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "python": PYTHON}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(folder: Path, script: str, *arguments: str, code: int = 0, state: str = "RUNNING") -> tuple[int, list[str]]:
    """The script's exit code, and the calls that it made. ``state``: of the job, when its ranks have ended."""
    slurm = {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }
    ended = subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "CODE": str(code), "STATE": state} | slurm,
        capture_output=True,
        text=True,
    )
    assert ended.stderr == ""
    calls = folder / "calls"
    return ended.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_slurm_starts_every_rank_and_resumes(folder: Path) -> None:
    code, calls = run(folder, "slurm.sbatch", "run.toml", "--run.dir", "a b$(touch x)")
    assert code == 0
    arguments = "-m|trainer|train|run.toml|--run.dir|a b$(touch x)|--resume|auto|"
    srun = "srun --wait=60 --kill-on-bad-exit=0 --cpus-per-task=8"
    assert calls == [srun, *(f"{r} {r} 2 node-7 23456 8|{arguments}" for r in range(2))]


@pytest.mark.parametrize(("code", "queued"), [(75, True), (143, True), (2, False), (4, False), (130, False)])
def test_slurm_queues_again_after_a_preemption_alone(code: int, queued: bool, folder: Path) -> None:
    """143: a rank had the SIGTERM before it could listen."""
    ended, calls = run(folder, "slurm.sbatch", "run.toml", code=code)
    assert ended == code and ("scontrol requeue 123456" in calls) == queued


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", ""])
def test_slurm_lets_a_cancelled_job_end(state: str, folder: Path) -> None:
    """The ranks end with 75 then, too."""
    ended, calls = run(folder, "slurm.sbatch", "run.toml", code=75, state=state)
    assert ended == 75 and not any("requeue" in call for call in calls)


@pytest.mark.parametrize("words", [("--resume", "runs/a"), ("--resume=auto",)])
def test_slurm_resumes_by_itself_alone(words: tuple[str, ...], folder: Path) -> None:
    """A path that is named once would be lost when the job starts again."""
    script = ["bash", str(LAUNCH / "slurm.sbatch"), "run.toml", *words]
    ended = subprocess.run(script, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("refused: --resume: this script sets it to auto")
    assert not (folder / "calls").exists()


def test_slurm_asks_for_the_signal_that_saves() -> None:
    directives = [line for line in (LAUNCH / "slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH ")]
    assert "#SBATCH --requeue" in directives
    (asked,) = [line for line in directives if "--signal" in line]
    # To the steps, not to the batch shell alone (B:).
    assert asked == "#SBATCH --signal=TERM@180"


def test_multinode_hands_everything_on(folder: Path) -> None:
    code, calls = run(folder, "multinode.sh", "my hosts", "run.toml", "--run.dir", "a  b", code=75)
    assert code == 75
    assert calls == ["     |-P|-m|trainer|train|run.toml|--run.dir|a  b|--hostfile|my hosts|"]


def test_local_hands_everything_on(folder: Path) -> None:
    """-P: a trainer.py in the folder of the start is the user's."""
    code, calls = run(folder, "local.sh", "run.toml", "--gpus", "2", "--run.dir", "a  b", code=75)
    assert (code, calls) == (75, ["     |-P|-m|trainer|train|run.toml|--gpus|2|--run.dir|a  b|"])


def test_multinode_says_what_it_takes(folder: Path) -> None:
    ended = subprocess.run(["bash", str(LAUNCH / "multinode.sh"), "hosts"], capture_output=True, text=True)
    assert ended.returncode == 2 and "./launch/multinode.sh HOSTFILE RUN.toml" in ended.stdout
