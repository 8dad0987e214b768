"""A process that judges one case after another, and that anybody may kill.

It speaks JSON lines: `{"ready": true}` once, then an answer for each case. Nothing that it reads can run code: text is
parsed by a grammar, and an audit hook refuses to compile or execute any text, to start processes, to open connections
and to write files. Before each case the kernel's own timer is set, with the default action, so that even a loop that
never returns to the interpreter ends the process on time; memory is limited by the kernel too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import sys
import time
from typing import Any, BinaryIO

from rl.tasks.rewards.rules import judge
from rl.tasks.rewards.verdict import Case

OUT_OF_MEMORY = 77
"""Exit status of a worker whose case needed more than the memory limit."""

_REFUSED = ("exec", "compile", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen")
_REFUSED_PREFIXES = ("socket.", "ctypes.", "shutil.", "ftplib.", "urllib.")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


class RefusedError(RuntimeError):
    """Something tried what no checking needs."""


def refuse_all_but_arithmetic() -> None:
    """From here on this process cannot run text as code, start a process, connect, or write a file. Irrevocable."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in _REFUSED or event.startswith(_REFUSED_PREFIXES):
            raise RefusedError(f"the checker refuses {event}")
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITING:
            raise RefusedError("the checker refuses to write a file")

    sys.addaudithook(audit)


def serve(requests: BinaryIO, answers: BinaryIO, *, timeout_s: float) -> None:
    for line in requests:
        case = Case(**json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        reply = _judged(case)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()


def _judged(case: Case) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        verdict = judge(case)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # what is left of the interpreter may not have the memory to say so
    except Exception as error:  # noqa: BLE001 - whatever it is, it must be counted as an error and not as an answer
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"verdict": dataclasses.asdict(verdict), "seconds": time.perf_counter() - started}


def main() -> None:
    timeout_s, memory_mib = float(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not be taken for an answer
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit = memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    refuse_all_but_arithmetic()
    answers.write(b'{"ready": true}\n')
    answers.flush()
    serve(sys.stdin.buffer, answers, timeout_s=timeout_s)


if __name__ == "__main__":
    main()
