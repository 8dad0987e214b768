"""What must be known or set before SGLang is imported."""

from __future__ import annotations

import os
from pathlib import Path

from rl.config.schema import SGLangRolloutConfig

SEEDED_BACKEND = "pytorch"
"""The sampling backend that can draw each sample from its own seed."""


def sampling_backend(config: SGLangRolloutConfig) -> str:
    return config.sampling_backend or SEEDED_BACKEND


def is_seeded(config: SGLangRolloutConfig) -> bool:
    return sampling_backend(config) == SEEDED_BACKEND


def prepare_environment(device: str, temp_folder: Path) -> None:
    """Of the process that will import SGLang. What the user has set wins, except for what this adapter relies on."""
    os.environ["TMPDIR"] = str(temp_folder)  # SGLang leaves its sockets there
    os.environ.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)  # log-probs must be at the sampling temperature
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for the spare tokens at a context's end
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a local folder
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of a package that looks for the kernels of every device
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # one small sampling function is compiled even here
