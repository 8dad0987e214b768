"""What differs between two runs or experiments, as lines for a person."""

from __future__ import annotations

from rl.comparison.divergence import compare_digests
from rl.comparison.origins import origins, shown
from rl.comparison.settings import ABSENT, Settings, differing
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
    compared = compare_digests(ours.run_folder, theirs.run_folder)
    first, last = compared.steps[0], compared.steps[-1]
    found = compared.divergence
    if found is None:
        lines.append(f"digests: equal in all {len(compared.steps)} common rows, steps {first} to {last}")
        return lines, bool(deciding)
    equal = f"; equal in this step: {', '.join(found.equal_before)}" if found.equal_before else ""
    lines.append(f"digests: the runs part at step {found.step}, in {found.stage}: {found.meaning}")
    lines.append(f"  A {found.digests[0]}, B {found.digests[1]}{equal}; equal before it from step {first} on")
    return lines, True


def _origin(key: str, settings: Settings, value: object) -> str:
    """`level, place` of the value, where the command line behind it is known and these files still give it."""
    if settings.words is None or value is ABSENT:
        return ""
    try:
        found = origins(key, settings.words)[-1]
    except ConfigError:
        return ""
    return f"{found.level}, {found.where}" if found.value == value else ""
