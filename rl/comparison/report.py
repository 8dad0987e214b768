"""What a comparison says on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl.comparison.verdict import Finding

STYLES = {"reproduced": "green", "partial": "yellow", "failed": "red", "not comparable": "dim"}

FILE_WIDTH = 200
"""Characters, where no terminal says how many there are: lines in a log need not be folded to 80."""


def print_findings(findings: Sequence[Finding], *, picture: Path, console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("claim", "of", "ours", "theirs", "difference", "tolerance", "verdict"):
        table.add_column(name, justify="left" if name in ("claim", "of", "verdict") else "right", overflow="fold")
    for finding in findings:
        unit = f" {finding.unit}" if finding.unit and finding.unit != "fraction" else ""
        unit += " (derived)" if finding.is_derived else ""
        table.add_row(
            Text(finding.name),
            Text(f"{finding.metric}, {finding.what}"),
            _number(finding.ours),
            _number(finding.theirs) + (unit if finding.theirs is not None else ""),
            "" if finding.difference is None else f"{finding.difference:+.4g}",
            _number(finding.tolerance),
            Text(f"{finding.verdict}{': ' if finding.why else ''}{finding.why}", style=STYLES[finding.verdict]),
        )
    console.print(table)
    counts = Counter(finding.verdict for finding in findings)
    console.print(
        Text(f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}. Picture: {picture}"),
        soft_wrap=True,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
