"""The doctor: what is wrong with a run, by cause. From its records (RUN_DIR), or by asking its parts (RUN.toml)."""
