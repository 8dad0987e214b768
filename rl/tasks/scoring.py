"""Runs `ProblemTask.score` in processes of its own, so that one that hangs holds up neither the run nor its end.

No thread waits for them: the event loop reads their sockets, and an end of the run kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from rl.config.schema import ConfigError
from rl.messages import unpickled
from rl.tasks.scoring_host import LENGTH, Failed, frame_lengths, packed
from rl.types import Prompt, Reward, RewardError, Rollout

if TYPE_CHECKING:
    from rl.tasks.base import ProblemTask

MAX_EAGER = 8
"""Children, and one per core at most, that are started as soon as they are asked for."""
MAX_CHILDREN = 128
"""Beyond the eager ones, a group that has waited for `PATIENCE_S` gets one: the others are slow or hang."""
PATIENCE_S = 0.5
SEND_BUFFER = 2**22
"""Bytes of a message that wait for the child without the event loop; the kernel may allow fewer."""
MAX_FRAMES = 1024
"""IOV_MAX of Linux: what one call sends."""

PROGRAM = "from rl.tasks.scoring_host import main; main()"
"""Not `-m`: what a module sends that is called `__main__` nobody else knows."""

log = logging.getLogger(__name__)


class _GoneError(Exception):
    """The child, or the process that forks it, has ended."""


class _NoStartError(Exception):
    """The process that forks could not load the task, and says why."""


class _Child:
    """A socket to a child, which belongs to no event loop, and what is known of its other end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._pid: int | None = None
        """None: it has not spoken yet."""

    async def score(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward] | Failed:
        loop = asyncio.get_running_loop()
        try:
            if self._pid is None:
                first = await self._receive(loop)
                if isinstance(first, Failed):
                    raise _NoStartError(first.reason)
                self._pid = first
            await self._send(loop, packed((prompt, rollouts)))
            return await self._receive(loop)
        except (EOFError, OSError) as error:
            raise _GoneError(repr(error)) from error

    async def _send(self, loop: asyncio.AbstractEventLoop, frames: list[memoryview]) -> None:
        """In one call and without a copy, where the socket has room for it."""
        try:
            sent = self._channel.sendmsg(frames[:MAX_FRAMES])
        except BlockingIOError:
            sent = 0
        if sent < sum(frame.nbytes for frame in frames):
            await loop.sock_sendall(self._channel, memoryview(b"".join(frames))[sent:])

    async def _receive(self, loop: asyncio.AbstractEventLoop) -> Any:
        (num_frames,) = frame_lengths(await self._bytes(loop, LENGTH.size))
        lengths = frame_lengths(await self._bytes(loop, LENGTH.size * num_frames))
        return unpickled([await self._bytes(loop, length) for length in lengths])

    async def _bytes(self, loop: asyncio.AbstractEventLoop, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            part = await loop.sock_recv(self._channel, count - len(data))
            if not part:
                raise EOFError("the connection ended")
            data += part
        return data

    def kill(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        self._channel.close()  # one that has not spoken yet ends when it finds nobody there


class _Host:
    """The process that forks the children."""

    def __init__(self, task: bytes) -> None:
        self._control, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as file, theirs:
            file.write(task)
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno())],
                stdin=file,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C is for the run to handle
            )
        self._end = weakref.finalize(self, _end, self._process, self._control)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> _Child:
        ours, theirs = socket.socketpair()
        # An error says that it has just died, and what is read from `ours` will say so, too.
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return _Child(ours)

    def close(self) -> None:
        self._end()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Its children end with it."""
    control.close()
    process.kill()
    process.wait()


class ScoringProcesses:
    """`score` of one task, for any number of groups at once, each in a child that is its own meanwhile.

    Cancelled, a group's child is killed. Children that are done wait for the next group.
    """

    def __init__(self, task: ProblemTask) -> None:
        self._task = task
        self._host: _Host | None = None
        self._idle: list[_Child] = []
        self._num_children = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_eager = min(MAX_EAGER, len(os.sched_getaffinity(0)))

    def start(self) -> None:
        """Starts the process that holds the task, without waiting for it. Raises ConfigError if it cannot be sent."""
        if self._host is not None and self._host.is_alive:
            return
        if self._host is not None:
            log.warning("the process that runs `score` of %s has ended and is started again", self._task.name)
            self._host.close()
        try:
            task = pickle.dumps(self._task)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"task {self._task.name}: `score` runs in a process of its own, and the task cannot be sent there "
                f"({error}). Keep out of its attributes what cannot be pickled (lambdas, open files, locks), make it "
                "in `score`, or define `grade_truly` in place of `score`."
            ) from error
        self._host = _Host(task)

    async def score(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        """Raises RewardError if `score` raised anything, or if its process ended twice."""
        failure = ""
        for _ in range(2):  # a child may have been killed from outside, for example for its memory
            child = await self._take()
            try:
                answer = await child.score(prompt, rollouts)
            except BaseException as error:
                self._drop(child)
                if isinstance(error, _NoStartError):
                    failure = str(error)
                    break
                if not isinstance(error, _GoneError):
                    raise
                failure = f"its process ended without a word ({error}), as after a crash or for want of memory"
            else:
                self._give_back(child)
                if not isinstance(answer, Failed):
                    return answer
                failure = answer.reason
                break
        raise RewardError(f"the grader of {prompt.prompt_id} failed: {failure}")

    def close(self) -> None:
        """Ends the processes. A later group starts new ones."""
        while self._idle:
            self._drop(self._idle[-1])
        if self._host is not None:
            self._host.close()
            self._host = None

    async def _take(self) -> _Child:
        may_fork = self._num_children < self._num_eager
        while not self._idle:
            if may_fork:
                self.start()
                assert self._host is not None
                self._num_children += 1
                return self._host.fork()
            may_fork = await self._is_out_of_patience() and self._num_children < MAX_CHILDREN
        return self._idle.pop()

    async def _is_out_of_patience(self) -> bool:
        """Waits until a child may be idle, or long enough for another one."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            done, _ = await asyncio.wait({turn}, timeout=PATIENCE_S)
            return not done
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _give_back(self, child: _Child) -> None:
        self._idle.append(child)
        self._wake_next()

    def _drop(self, child: _Child) -> None:
        child.kill()
        if child in self._idle:
            self._idle.remove(child)
        self._num_children -= 1
        self._wake_next()

    def _wake_next(self) -> None:
        if self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
