"""From a config object to the object that it configures."""

from __future__ import annotations

import importlib
from typing import Any

from rl.config.schema import ConfigError

_REMEDIES: dict[str, str] = dict.fromkeys(("megatron", "triton"), "bash scripts/install_megatron.sh")
"""Package that is missing -> how to get it, where an extra of this package's own would not do."""


def target_class(target: str) -> type:
    """The class at a dotted path. Imports its module, and so whatever heavy package that module needs."""
    module_name, _, class_name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"_target_={target}: {module_name or 'that'} has no such class ({error}).") from error
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == module_name.partition(".")[0]:
            raise ConfigError(
                f"_target_={target}: there is no module {error.name}. Put its file into the package, for example into "
                "rl/tasks, or where Python finds it (PYTHONPATH)."
            ) from error
        remedy = _REMEDIES.get(missing, f"pip install -e '.[{missing}]' in the project's folder")
        raise ConfigError(f"{target} needs the package '{missing}', which is not installed. Run: {remedy}") from error


def build(config: Any, **collaborators: Any) -> Any:
    """Calls the class that `config._target_` names with `config` and its run-time collaborators."""
    return target_class(config._target_)(config, **collaborators)
