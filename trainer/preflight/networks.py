"""The models of rewards, as far as the memory plan asks: their config.json and nothing else of them."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from trainer.config.grpo import Reward
from trainer.outside import read
from trainer.plan.networks import Network, known, network_of


def networks_of(rewards: Sequence[Reward]) -> tuple[tuple[Network, ...], list[str]]:
    """Those that can be counted, and a sentence for each that cannot. What is wrong with a folder, others say."""
    found, told = [], []
    for reward in rewards:
        if reward.kind not in ("model", "embedding"):
            continue
        network, why = _read(reward.path)
        if network is None:
            told.append(f"reward.{reward.name}.path = {reward.path}: its memory is not in the plan, {why}")
        else:
            found.append(network)
    return tuple(found), told


def _read(path: str) -> tuple[Network | None, str]:
    """``path``: a folder, or a hub name whose files are here already."""
    file = Path(path) / "config.json" if Path(path).is_dir() else try_to_load_from_cache(path, "config.json")
    try:
        config = read(Path(file)) if isinstance(file, str | Path) else None
        kind = config["model_type"] if config else ""
        network = network_of(config) if config else None
    except (OSError, ValueError, KeyError, TypeError):
        return None, "since its config.json cannot be read"
    if not config:
        return None, "since its config.json is not on this machine yet"
    return network, f"whose formulas know {known()}, not {kind}"
