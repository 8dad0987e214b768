from __future__ import annotations

import io

from rich.console import Console

from rl.progress import ProgressLine


def test_without_a_terminal_there_is_a_line_every_ten_seconds_with_what_is_left():
    now = 0.0
    screen = io.StringIO()
    with ProgressLine("reading", 100, console=Console(file=screen, width=80), clock=lambda: now) as line:
        for _ in range(10):
            now += 3.0
            line.advance(10)
    assert screen.getvalue().splitlines() == [
        "reading: 40 of 100, about 18 s left",
        "reading: 80 of 100, about 6 s left",
    ]


def test_on_a_terminal_the_line_is_gone_at_the_end():
    screen = io.StringIO()
    with ProgressLine("reading [x]", 3, console=Console(file=screen, force_terminal=True, width=80)) as line:
        line.advance(3)
    text = screen.getvalue()
    assert "reading [x]" in text and "3/3" in text
    assert text.endswith(("\x1b[2K", "\x1b[1A\x1b[2K"))
