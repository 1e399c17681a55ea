"""``zero-grpo eval``: held-out numbers of a checkpoint, an exported folder or the base, outside of a run."""
