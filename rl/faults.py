"""What ended a process, from what it left behind: one class and one line to read first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MAX_EVIDENCE_CHARS = 300
TAIL_LINES = 50
"""Of the log of a process that died: enough for a traceback, and for what came before it."""


class FaultClass(StrEnum):
    GPU_MEMORY = "out of GPU memory"
    HOST_MEMORY = "out of host memory"
    DISK = "no space left on the disk"
    IMPORT = "import error"
    COLLECTIVE_TIMEOUT = "collective timeout"
    GPU = "GPU fault"
    HANG = "hanging process"
    SIGNAL = "killed by a signal"
    PEER = "lost connection to another process"
    EXIT = "exit"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Fault:
    fault_class: FaultClass
    evidence: str
    """The line that says so, or what its absence says."""

    def __str__(self) -> str:
        return f"{self.fault_class}: {self.evidence}"


_CAUSES: tuple[tuple[FaultClass, re.Pattern[str]], ...] = tuple(
    (fault_class, re.compile(pattern))
    for fault_class, pattern in (
        (
            FaultClass.GPU_MEMORY,
            r"\b(CUDA|HIP) out of memory|CUDA error: out of memory|HIP error: out of memory|hipErrorOutOfMemory"
            r"|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|\bCUDA_ERROR_OUT_OF_MEMORY",
        ),
        (
            FaultClass.HOST_MEMORY,
            r"running low on memory|exceeds the memory usage threshold|\bMemoryError\b|can't allocate memory"
            r"|Cannot allocate memory|\bstd::bad_alloc\b|\boom-kill|Out of memory: Killed process",
        ),
        (FaultClass.DISK, r"No space left on device|Disk quota exceeded|\[Errno 28\]"),
        (
            FaultClass.COLLECTIVE_TIMEOUT,
            r"Timed out waiting \d+ms for (recv|send) operation|caught collective operation timeout"
            r"|ranks? .*failed to (pass monitoredBarrier|reach)|wait timeout after \d+ms",
        ),
        (
            FaultClass.GPU,
            r"illegal memory access|device-side assert|Memory access fault by GPU|HSA_STATUS_ERROR"
            r"|\b(CUDA|HIP) error: |hipErrorIllegalAddress|CUBLAS_STATUS_|unhandled (cuda|hip) error|uncorrectable ECC",
        ),
        (FaultClass.HANG, r": it hangs\b"),
        (
            FaultClass.SIGNAL,
            r"\bSIG(KILL|SEGV|ABRT|BUS|FPE|ILL|TERM|QUIT|HUP)\b|killed by signal|exit code -\d+"
            r"|exit code 1(3[0-9]|4[0-3])\b",
        ),
        (FaultClass.SIGNAL, r"Fatal Python error: (Segmentation|Aborted|Bus|Floating|Illegal)"),
        (
            FaultClass.PEER,
            r"Connection closed by peer|Connection reset by peer|remote process exited or there was a network error"
            r"|Broken pipe",
        ),
        (FaultClass.IMPORT, r"^\s*(?:\w+\.)*(ImportError|ModuleNotFoundError): "),
        (FaultClass.EXIT, r"exits? with an exit code \d+|exit code \d+"),
    )
)
"""The first that matches counts: an abort follows a collective timeout and is not its cause."""

_GUESSES = re.compile(r"(Some common causes include|There are some potential root causes).*", re.DOTALL)
"""Ray names the same three for every death."""
_NO_TRACE = re.compile(r"End of file|connection error code 2|was killed|actor died unexpectedly")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def classify(reason: str, lines: Sequence[str] = (), *, has_host_killed: bool = False) -> Fault:
    """`reason` is what was raised or reported of the end, `lines` the end of the process's log, oldest first.

    Log lines count only where the reason names no cause; an import error among them only as the last line, because
    libraries log those that they get over. `has_host_killed`: the kernel has killed for want of memory meanwhile.
    """
    reason_lines = _readable(_GUESSES.sub("", reason))
    log_lines = _readable("\n".join(lines))
    if (cause := _cause(reason_lines)) is not None and cause.fault_class is not FaultClass.PEER:
        return cause
    logged = _cause(log_lines)
    is_passing = logged is not None and logged.fault_class in {FaultClass.IMPORT, FaultClass.EXIT}
    if logged is not None and not (is_passing and logged.evidence != _short(log_lines[-1])):
        return logged
    if cause is not None:
        return cause
    if _NO_TRACE.search(reason):
        if has_host_killed:
            return Fault(FaultClass.HOST_MEMORY, "the kernel's out-of-memory killer has ended a process meanwhile")
        return Fault(FaultClass.SIGNAL, "no word and no exit code, as SIGKILL leaves it, or os._exit")
    return Fault(FaultClass.ERROR, _short(_last_statement(reason_lines)))


def headline(error: BaseException) -> str:
    """An error's type and message, with its class before them unless the message begins with it."""
    text = f"{type(error).__name__}: {error}"
    fault_class = classify(text).fault_class
    is_named = fault_class in (FaultClass.ERROR, FaultClass.EXIT) or any(name in text for name in FaultClass)
    return text if is_named else f"{fault_class}: {text}"


def host_oom_kills() -> int | None:
    """Processes that the kernel of this machine has killed for want of memory since it booted. None: not known."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return None
    return int(counters["oom_kill"]) if "oom_kill" in counters else None


def _cause(lines: Sequence[str]) -> Fault | None:
    for fault_class, pattern in _CAUSES:
        for line in reversed(lines):
            if pattern.search(line):
                return Fault(fault_class, _short(line))
    return None


def _readable(text: str) -> list[str]:
    return [line.rstrip() for line in _COLOR.sub("", text).splitlines() if line.strip()]


def _last_statement(lines: Sequence[str]) -> str:
    """The line of a traceback that says what was raised; the only line of anything else."""
    flush_left = [line for line in lines if not line.startswith((" ", "\t"))]
    return (flush_left or list(lines) or ["it gave no reason"])[-1]


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= MAX_EVIDENCE_CHARS else f"{line[:MAX_EVIDENCE_CHARS]} ..."


def last_lines(log: Path | str | None, count: int = TAIL_LINES) -> str:
    """The end of a process's log, for the message about its death; empty where the file is not on this machine."""
    lines = tail(log, count)
    return "\n".join([f"last lines of {log}:", *(f"  {line}" for line in lines)]) if lines else ""


def tail(log: Path | str | None, count: int = TAIL_LINES) -> list[str]:
    if log is None or not Path(log).is_file():
        return []
    return Path(log).read_text(errors="replace").splitlines()[-count:]
