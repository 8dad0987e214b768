"""A process whose children judge cases, and may be killed.

It gets a socket for each child and speaks JSON lines on it: `{"ready": true}` once, then a reply for each case.
Children are forked after everything is imported, so that a new one costs milliseconds. Before each case a child sets
the kernel's own timer with its default action, which ends it on time even in a loop that never returns to the
interpreter; the kernel limits its memory, too. The parent forks the next and says on the socket how the last one ended.

Nothing that they read can run code. Text is parsed by grammars, and in a child an audit hook refuses to compile or
execute any text, to start processes, to open connections, and to write or remove files.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from rl.tasks.rewards.verdict import Case, Verdict

Judge = Callable[[Case], Verdict]

OUT_OF_MEMORY = 77
"""Exit status of a child whose case needed more than the memory limit."""

_REFUSED_PREFIXES = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "urllib.", "webbrowser.")
_READING = ("os.listdir", "os.scandir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


class RefusedError(BaseException):
    """Something tried what no checking needs. No Exception: libraries swallow those, and a wrong score would follow."""


def refuse_all_but_arithmetic() -> None:
    """From here on this process cannot run text as code, start a process, connect, or change a file. Irrevocable."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if (event == "compile" and not _is_module(args[1])) or (
            event == "exec" and not _is_module(args[0].co_filename)
        ):
            raise RefusedError(f"the checker refuses to {event} text")
        if event.startswith(_REFUSED_PREFIXES) and event not in _READING:
            raise RefusedError(f"the checker refuses {event}")
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITING:
            raise RefusedError("the checker refuses to write a file")

    sys.addaudithook(audit)


def _is_module(filename: object) -> bool:
    """A file of a library, which sympy may import late. Text that is evaluated has a name such as `<string>`."""
    return isinstance(filename, str) and os.path.isabs(filename) and filename.endswith(".py")


def serve(judge: Judge, channel: socket.socket, *, timeout_s: float) -> None:
    """Judges one case after another, until nobody asks any more."""
    with channel.makefile("rb") as requests:
        for line in requests:
            case = Case(**json.loads(line))
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            reply = _judged(judge, case)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(channel, reply)


def _judged(judge: Judge, case: Case) -> dict[str, Any]:
    try:
        return {"verdict": dataclasses.asdict(judge(case))}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # what is left of the interpreter may not have the memory to say so
    except (Exception, RefusedError) as error:  # noqa: BLE001 - whatever it is, it must count as an error
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    timeout_s, memory_mib = float(sys.argv[1]), int(sys.argv[2])
    channels = [socket.socket(fileno=int(fileno)) for fileno in sys.argv[3:]]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    limit = memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from rl.tasks.rewards.judge import judge, warm_up  # sympy; the checker imports this module without it

    warm_up()
    children: dict[int, socket.socket] = {}

    def fork(channel: socket.socket) -> None:
        child = os.fork()
        if child == 0:
            refuse_all_but_arithmetic()
            serve(judge, channel, timeout_s=timeout_s)
            os._exit(0)
        children[child] = channel

    for channel in channels:
        fork(channel)
    for channel in channels:
        send(channel, {"ready": True})
    while children:
        child, status = os.wait()
        channel, code = children.pop(child), os.waitstatus_to_exitcode(status)
        if code != 0:
            fork(channel)
            send(channel, {"died": code})


if __name__ == "__main__":
    main()
