"""A config that remembers which of its keys the parts of a run read, in whatever process they are."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

DOOR = ("rl.config.check", "rl.config.load", "rl.config.given", "rl.config.unused")
"""Rules look at keys to refuse; that is no use of them."""


def recorded(config: Any, folder: Path, prefix: str = "") -> Any:
    """A copy of `config`, of classes that say the same and note each key that code of rl/ reads in `folder`.

    Each process has a file of its own there. Ray sends such classes whole, so that actors note what they read, too.
    """
    original = type(config)
    noted: set[tuple[int, str]] = set()

    def __getattribute__(self: Any, name: str) -> Any:
        if name in names:
            frame = sys._getframe(1)
            reader = frame.f_globals.get("__name__", "")
            if reader.startswith("rl.") and reader not in DOOR and (os.getpid(), name) not in noted:
                noted.add((os.getpid(), name))
                with (folder / str(os.getpid())).open("a") as file:
                    file.write(f"{prefix}{name}\n")
        return object.__getattribute__(self, name)

    names = {field.name for field in dataclasses.fields(config)}
    spy = type(
        original.__name__, (original,), {"__getattribute__": __getattribute__, "__module__": original.__module__}
    )
    copy = object.__new__(spy)
    for name in names:
        value = getattr(config, name)
        is_node = dataclasses.is_dataclass(value) and not isinstance(value, type)
        object.__setattr__(copy, name, recorded(value, folder, f"{prefix}{name}.") if is_node else value)
    return copy


def keys_read(folder: Path) -> dict[int, set[str]]:
    """Process -> the keys that it read."""
    return {int(path.name): set(path.read_text().splitlines()) for path in folder.iterdir()}


def leaf_keys(config: Any, prefix: str = "") -> set[str]:
    """Dotted keys of all values that are no nodes."""
    keys: set[str] = set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            keys |= leaf_keys(value, f"{prefix}{field.name}.")
        elif field.name != "_target_":
            keys.add(prefix + field.name)
    return keys
