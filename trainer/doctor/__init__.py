"""The doctor: what is wrong with a run, by cause. From what it has left (RUN_DIR), or by asking its parts (RUN.toml)."""
