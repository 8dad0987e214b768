"""The checker: judges responses in worker processes that it kills when a case takes too long or too much memory.

Thread-safe, and the same from the main thread, another thread, a child process and a Ray actor: no signal is handled
and no state is shared, there are only sockets to processes that the first case starts. Pickled, it travels as its
configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rl.config.tasks import CheckerConfig
from rl.tasks.rewards.rules import RULES
from rl.tasks.rewards.verdict import Case, Reason, Verdict
from rl.tasks.rewards.worker import OUT_OF_MEMORY

log = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Of the workers, which import sympy once: a second on an idle machine."""
GRACE_S = 1.0
"""After a worker's own limit, before it is killed from outside: it ends itself unless the kernel cannot deliver."""
MAX_WORKERS = 8


class CheckerError(Exception):
    """The checker failed: judging raised an error, or workers did not start or died."""


class _GoneError(CheckerError):
    """The workers are not to be used any more."""


class _NoStartError(_GoneError):
    """The workers did not start. They are not started for every case again: `close` forgets it."""


class _OverLimitError(Exception):
    """The case went over its limit of time or memory; the worker was replaced."""


class _Channel:
    """JSON lines to and from one worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, *, timeout_s: float) -> dict[str, Any]:
        """Raises TimeoutError, or EOFError where nobody is left to answer."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._socket.recv(1 << 16)
            if not part:
                raise EOFError("the connection ended")
            self._buffer += part
        self._socket.settimeout(None)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        self._socket.close()


class _Workers:
    """A process and the children in which it judges, each on a channel of its own."""

    def __init__(self, config: CheckerConfig, num_workers: int) -> None:
        self._config = config
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.is_gone = False
        self.idle: queue.SimpleQueue[_Channel] = queue.SimpleQueue()
        pairs = [socket.socketpair() for _ in range(num_workers)]
        filenos = [theirs.fileno() for _, theirs in pairs]
        command = [sys.executable, "-P", "-m", "rl.tasks.rewards.worker", str(config.timeout_s), str(config.memory_mib)]
        self._process = subprocess.Popen(
            [*command, *map(str, filenos)],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"},
            pass_fds=filenos,
            start_new_session=True,  # a Ctrl-C is for the run to handle
        )
        self._channels = [_Channel(ours) for ours, _ in pairs]
        for _, theirs in pairs:
            theirs.close()
        for channel in self._channels:
            try:
                channel.receive(timeout_s=START_TIMEOUT_S)
            except (EOFError, OSError) as error:
                raise _NoStartError(str(self._gone(f"the workers of the checker did not start ({error!r})"))) from error
            self.idle.put(channel)

    def judge(self, channel: _Channel, case: Case) -> Verdict:
        limit_s = self._config.timeout_s
        try:
            channel.send(dataclasses.asdict(case))
            reply = channel.receive(timeout_s=limit_s + GRACE_S)
        except TimeoutError as error:
            self.kill()
            raise _OverLimitError(f"more than {limit_s:g} s") from error
        except (EOFError, OSError) as error:
            raise self._gone(f"the workers of the checker are gone ({error!r})") from error
        if "error" in reply:
            raise CheckerError(f"judging failed: {reply['error']}")
        if "verdict" in reply:
            return Verdict(**{**reply["verdict"], "reason": Reason(reply["verdict"]["reason"])})
        code = reply["died"]
        if code == -signal.SIGALRM:
            raise _OverLimitError(f"more than {limit_s:g} s")
        if code == OUT_OF_MEMORY:
            raise _OverLimitError(f"more than {self._config.memory_mib} MiB")
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise self._gone(f"a worker of the checker died ({how})")

    def _gone(self, what: str) -> _GoneError:
        self._errors.seek(0)
        last_lines = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()[-1:]
        self.kill()
        return _GoneError(f"{what}: {''.join(last_lines) or 'no message was left'}")

    @property
    def is_usable(self) -> bool:
        return not self.is_gone and self._process.poll() is None

    def kill(self) -> None:
        """Ends the process and its children. A case that another thread still has there is asked again by it."""
        self.is_gone = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for channel in self._channels:
            channel.close()
        self._errors.close()


class Checker:
    """Judges cases, n in and n out, in order."""

    def __init__(self, config: CheckerConfig) -> None:
        self.config = config
        self.counts: Counter[Reason] = Counter()
        """Verdicts so far by reason."""
        self._num_workers = config.workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._workers: _Workers | None = None
        self._start_error: _NoStartError | None = None
        self._owner = os.getpid()

    def check(self, cases: Sequence[Case]) -> list[Verdict]:
        """Verdicts in the order of the cases. Waits; may be called from any thread."""
        return [future.result() for future in self._submit(cases)]

    async def grade(self, cases: Sequence[Case]) -> list[Verdict]:
        """`check` for the event loop."""
        return await asyncio.gather(*map(asyncio.wrap_future, self._submit(cases)))

    def close(self) -> None:
        """Ends the workers. Cases that still run get their verdicts first. A later case starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None and self._owner == os.getpid():
            threads.shutdown()
        with self._lock:
            workers, self._workers, self._start_error = self._workers, None, None
        if workers is not None and self._owner == os.getpid():
            workers.close()

    def _submit(self, cases: Sequence[Case]) -> list[Future[Verdict]]:
        with self._lock:
            if self._owner != os.getpid():  # a fork has neither the threads nor the workers
                self._threads, self._workers, self._owner = None, None, os.getpid()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="checker")
            return [self._threads.submit(self._judge, case) for case in cases]

    def _judge(self, case: Case) -> Verdict:
        verdict = self._verdict(case)
        with self._lock:
            self.counts[verdict.reason] += 1
        return verdict

    def _verdict(self, case: Case) -> Verdict:
        """What failed is tried once more: a worker may have been killed from outside, for example for its memory."""
        if case.rule not in RULES:
            return Verdict(0.0, False, None, Reason.ERROR, f"no rule {case.rule!r}; there are {', '.join(RULES)}")
        failure = ""
        for _ in range(2):
            try:
                return self._asked(case)
            except _OverLimitError as error:
                wrong = -1.0 if case.rule == "dapo" else 0.0
                return Verdict(wrong, False, None, Reason.TIMEOUT, str(error))
            except _NoStartError as error:
                return Verdict(0.0, False, None, Reason.ERROR, str(error))
            except CheckerError as error:
                failure = str(error)
                log.warning("%s", failure)
        return Verdict(0.0, False, None, Reason.ERROR, failure)

    def _asked(self, case: Case) -> Verdict:
        workers = self._usable_workers()
        channel = workers.idle.get()
        try:
            return workers.judge(channel, case)
        finally:
            workers.idle.put(channel)

    def _usable_workers(self) -> _Workers:
        """There are as many threads as workers, so that each finds an idle one."""
        with self._lock:
            if self._start_error is not None:
                raise self._start_error
            if self._workers is None or not self._workers.is_usable:
                try:
                    self._workers = self._started_workers()
                except _NoStartError as error:
                    self._start_error = error
                    log.error("%s", error)
                    raise
            return self._workers

    def _started_workers(self) -> _Workers:
        """Those that died at once are started once more: they may have been killed from outside, too."""
        try:
            return _Workers(self.config, self._num_workers)
        except _NoStartError as error:
            if not isinstance(error.__cause__, EOFError):
                raise  # they hang, and would again
            log.warning("%s; they are started once more", error)
        return _Workers(self.config, self._num_workers)

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])
