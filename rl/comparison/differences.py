"""What differs between two runs or experiments, as lines for a person."""

from __future__ import annotations

from rl.comparison.divergence import Compared, compare_digests
from rl.comparison.origins import origins, shown
from rl.comparison.settings import Settings
from rl.config.flat import ABSENT, differing
from rl.config.schema import ConfigError


def diff_lines(ours: Settings, theirs: Settings) -> tuple[list[str], bool]:
    """The lines, and whether something differs that decides an outcome: a setting or a digest."""
    lines = [f"A: {ours.name}", f"B: {theirs.name}"]
    pairs = differing(ours.values, theirs.values)
    deciding = {key: pair for key, pair in pairs.items() if key in ours.deciding | theirs.deciding}
    lines.append(f"settings: {len(deciding)} differ" if deciding else "settings: none differs")
    for key, pair in deciding.items():
        lines.append(f"  {key}")
        for letter, settings, value in zip("AB", (ours, theirs), pair, strict=True):
            lines.append(f"    {letter}  {shown(value):<14} {_origin(key, settings, value)}".rstrip())
    if others := [key for key, pair in pairs.items() if key not in deciding and ABSENT not in pair]:
        lines.append(f"  that decide nothing: {', '.join(others)}")
    facts = differing(ours.facts, theirs.facts)
    lines += [f"{key}: A {shown(pair[0])}, B {shown(pair[1])}" for key, pair in facts.items()]
    if ours.run_folder is None or theirs.run_folder is None:
        return lines, bool(deciding)
    try:
        compared = compare_digests(ours.run_folder, theirs.run_folder)
    except ConfigError as error:
        return [*lines, f"digests: {error}"], bool(deciding)
    lines += _digest_lines(compared)
    return lines, bool(deciding) or compared.divergence is not None


def _digest_lines(compared: Compared) -> list[str]:
    first, last, found = compared.steps[0], compared.steps[-1], compared.divergence
    if found is None:
        return [f"digests: equal in all {len(compared.steps)} common rows, steps {first} to {last}"]
    equal = ", ".join(found.equal_before) or "nothing"
    return [
        f"digests: the runs part at step {found.step}, in {found.stage}: {found.meaning}",
        f"  A {found.digests[0]}, B {found.digests[1]}; equal in this step: {equal}; compared from step {first} on",
    ]


def _origin(key: str, settings: Settings, value: object) -> str:
    """`level, place` of the value, where the command line behind it is known and these files still give it."""
    if settings.words is None or value is ABSENT:
        return ""
    try:
        found = origins(key, settings.words)[-1]
    except ConfigError:
        return ""
    return f"{found.level}, {found.where}" if found.gives(value) else ""
