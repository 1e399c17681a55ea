"""Keeps off the terminal what libraries say of their own internals: it buries what the run says."""

import logging
import os
import sys
import warnings

VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' bars too, one a rank
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # gloo and the rendezvous
}
LIBRARIES = (
    "torch",
    "transformers",
    "deepspeed",
    "peft",
    "datasets",
    "bitsandbytes",
    "huggingface_hub",
    "pydantic",
    "multiprocess",
)


def quiet_libraries() -> None:
    """To be called before the libraries are imported, since they read this once. What the user has set himself
    stays. And no code of theirs comes from the hub: bitsandbytes and transformers fetch it by the package kernels."""
    sys.modules["kernels"] = None  # type: ignore[assignment]  # as if it were not installed
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    # Not all warnings: those of a reward function are the user's own.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module=rf"({'|'.join(LIBRARIES)})(\.|$)")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
