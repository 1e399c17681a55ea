"""A run file by its parts: loaded as the run would load them, then asked."""

from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.config import RunConfig, load
from trainer.doctor import probes_model, probes_rollout, probes_step
from trainer.doctor.finding import Diagnosis, Finding, ranked
from trainer.doctor.parts import Parts, load_parts, sample
from trainer.errors import Refused, RunEnd
from trainer.world import connect, disconnect

REFUSED = "as `zero-grpo preflight` says:"
REFUSALS = {
    "context window": "rope_window",
    "unscaled window": "rope_window",
    "rotate positions differently": "rope_differs",
    "inv_freq": "rope_differs",
    "RoPE is not what its config says": "rope_differs",
    "tokens without a row": "tokenizer_mismatch",
    "there is no tokenizer": "tokenizer_mismatch",
    "which would start at random": "weights_not_loaded",
}
"""Causes that the start-up itself refuses, by words of its messages."""

Probe = Callable[[Parts], Finding | str]


def diagnose_run_file(path: str, overrides: Sequence[str]) -> Diagnosis:
    """Loads what the run would load, and asks it. Refused where the run file itself cannot be read."""
    config = load(path, overrides)
    world = connect(config.engine.device, timeout_seconds=config.watch.hang_timeout)
    try:
        return _diagnose(path, config, lambda: load_parts(config, Path(path).resolve().parent, world))
    finally:
        disconnect()


def _diagnose(path: str, config: RunConfig, made: Callable[[], Parts]) -> Diagnosis:
    try:
        parts = made()
    except Refused as refusal:
        said = str(refusal)
        cause = next((cause for words, cause in REFUSALS.items() if words in said), "refused")
        return Diagnosis(path, [Finding(cause, 1.0, {"said": said}, fix=f"{REFUSED} {said.rpartition('Fix: ')[2]}")])
    try:
        return ask(parts, path)
    finally:
        parts.state.engine.close()


def ask(parts: Parts, target: str) -> Diagnosis:
    """Every probe in its order: what was loaded, what is sampled, what a step does."""
    findings: list[Finding] = []
    fine: dict[str, str] = {}
    absent: dict[str, str] = {}
    _each(probes_model.PROBES, parts, findings, fine, absent)
    if not any(finding.cause == "non_finite" for finding in findings):
        try:
            sample(parts)
        except RunEnd as end:
            findings.append(Finding("non_finite", 0.9, {"said": str(end)}))
    why = "" if parts.completions else "nothing can be sampled"
    if not why:
        _each((probes_rollout.known_text, probes_rollout.masks), parts, findings, fine, absent)
        why = "" if "masks" in fine else "other tokens are scored than were sampled"
    rest = (*probes_rollout.PROBES, *probes_step.PROBES)
    if why:
        absent |= {probe.__name__: why for probe in rest}
    else:
        _each(rest, parts, findings, fine, absent)
    return Diagnosis(target, ranked(findings), fine, absent)


def _each(
    probes: Sequence[Probe], parts: Parts, findings: list[Finding], fine: dict[str, str], absent: dict[str, str]
) -> None:
    for probe in probes:
        try:
            found = probe(parts)
        except RunEnd as end:  # a guard of the run's own
            found = Finding("stopped", 0.6, {"probe": probe.__name__, "said": str(end)})
        if isinstance(found, Finding):
            findings.append(found)
        elif found:
            fine[probe.__name__] = found
        else:
            absent[probe.__name__] = "does not apply to this run"
