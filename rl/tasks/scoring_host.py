"""The process in which `ProblemTask.score` runs: it holds the task, and forks a child for each socket that it is sent.

A child scores what it reads, until nobody asks any more or it is killed, so a score that hangs, whatever holds the
interpreter's lock, is the child's matter alone. Forks cost milliseconds: the task and its modules are here already.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from rl.messages import pickled, unpickled

LENGTH = struct.Struct(">Q")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Failed:
    """Stands in place of rewards, or of the first word of a child, its number."""

    reason: str


def packed(message: Any) -> list[memoryview]:
    """Number and lengths of the frames that follow, and these: a step has hundreds of megabytes of arrays."""
    frames = pickled(message)
    lengths = (len(frames), *(frame.nbytes for frame in frames))
    return [memoryview(b"".join(map(LENGTH.pack, lengths))), *frames]


def frame_lengths(data: bytes | bytearray) -> list[int]:
    return [length for (length,) in LENGTH.iter_unpack(data)]


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes care of children that have ended
    failure: Failed | None = None
    task: Any = None
    try:
        task = unpickled([sys.stdin.buffer.read()])
    except Exception as error:  # noqa: BLE001 - whatever it is, whoever asks must hear it
        failure = Failed(f"it could not load the task: {in_words(error)}")
    own_pid = os.getpid()
    while True:
        word, filenos, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return  # the run has ended
        channel = socket.socket(fileno=filenos[0])
        if failure is not None:
            _send(channel, failure)
        elif os.fork() == 0:
            control.close()
            try:
                _become_child(own_pid)
                _serve(task, channel)
            except (BrokenPipeError, ConnectionResetError):
                pass  # nobody asks any more
            finally:
                os._exit(0)
        channel.close()


def _become_child(parent_pid: int) -> None:
    """A group of its own, to be killed with whatever a score starts; and an end with the process that forked it."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # a fork has none of the threads that torch believes it has


def _serve(task: Any, channel: socket.socket) -> None:
    with channel.makefile("rb") as requests:
        _send(channel, os.getpid())
        while header := requests.read(LENGTH.size):
            (num_frames,) = frame_lengths(header)
            lengths = frame_lengths(requests.read(LENGTH.size * num_frames))
            prompt, rollouts = unpickled([bytearray(requests.read(length)) for length in lengths])
            try:
                answer = packed([task.score(prompt, rollout) for rollout in rollouts])
            except Exception as error:  # noqa: BLE001 - a grader that failed, whatever it raised
                answer = packed(Failed(in_words(error)))
            sys.stdout.flush()
            channel.sendall(b"".join(answer))


def _send(channel: socket.socket, message: Any) -> None:
    channel.sendall(b"".join(packed(message)))


def in_words(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{error!r}{where}"
