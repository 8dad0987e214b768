"""The checker: judges responses in worker processes that it kills when a case takes too long or too much memory.

Thread-safe, and the same from the main thread, another thread, a child process and a Ray actor: there are no signals
and no shared state, only pipes to processes that the first case starts. Pickled, it travels as its configuration.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import queue
import selectors
import signal
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

START_TIMEOUT_S = 120.0
"""Of a worker: it imports sympy, which takes a second on an idle machine."""
GRACE_S = 1.0
"""After the worker's own limit, before it is killed from outside: it ends itself unless the kernel cannot deliver."""
MAX_WORKERS = 8


class CheckerError(Exception):
    """A worker could not be started, or died for a reason that is not the case's."""


class _OverLimitError(Exception):
    """The case went over its limit of time or memory."""


class Worker:
    """One process. Not thread-safe."""

    def __init__(self, config: CheckerConfig) -> None:
        self._config = config
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-P", "-m", "rl.tasks.rewards.worker"]
        self._process = subprocess.Popen(
            [*command, str(config.timeout_s), str(config.memory_mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"},
            start_new_session=True,  # a Ctrl-C is for the run to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._buffer = b""
        try:
            self._read(deadline=time.monotonic() + START_TIMEOUT_S)
        except (CheckerError, _OverLimitError) as error:
            tail = self.last_words()
            self.kill()
            raise CheckerError(f"a worker of the checker did not start ({error}): {tail}") from error

    def judge(self, case: Case) -> dict[str, Any]:
        """The worker's reply. Raises _OverLimitError or CheckerError, and then the worker is dead."""
        deadline = time.monotonic() + self._config.timeout_s + GRACE_S
        try:
            self._requests.write(json.dumps(dataclasses.asdict(case)).encode() + b"\n")
            self._requests.flush()
        except OSError as error:
            raise self._death() from error
        return self._read(deadline=deadline)

    def _read(self, *, deadline: float) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    self.kill()
                    raise _OverLimitError(f"more than {self._config.timeout_s:g} s")
                part = os.read(self._answers.fileno(), 1 << 16)
                if not part:
                    raise self._death()
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _death(self) -> Exception:
        status = self._process.wait()
        if status == -signal.SIGALRM:
            return _OverLimitError(f"more than {self._config.timeout_s:g} s")
        if status == OUT_OF_MEMORY:
            return _OverLimitError(f"more than {self._config.memory_mib} MiB")
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return CheckerError(f"a worker of the checker died ({how}): {self.last_words()}")

    def last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-500:].decode(errors="replace").strip() or "it left no message"

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close() if not self._requests.closed else None
        self._answers.close()
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
        self._owner = 0
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def check(self, cases: Sequence[Case]) -> list[Verdict]:
        """Verdicts in the order of the cases. Waits; may be called from any thread."""
        return [future.result() for future in self._submit(cases)]

    async def grade(self, cases: Sequence[Case]) -> list[Verdict]:
        """`check` for the event loop."""
        return await asyncio.gather(*map(asyncio.wrap_future, self._submit(cases)))

    def close(self) -> None:
        """Ends the workers. Cases that still run get their verdicts first."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None and self._owner == os.getpid():
            threads.shutdown()
            while not self._idle.empty():
                self._idle.get().kill()

    def _submit(self, cases: Sequence[Case]) -> list[Future[Verdict]]:
        with self._lock:
            if self._threads is None or self._owner != os.getpid():  # a fork has no threads
                self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="checker")
                self._owner, self._idle = os.getpid(), queue.SimpleQueue()
            return [self._threads.submit(self._judge, case) for case in cases]

    def _judge(self, case: Case) -> Verdict:
        verdict = self._verdict(case)
        with self._lock:
            self.counts[verdict.reason] += 1
        return verdict

    def _verdict(self, case: Case) -> Verdict:
        if case.rule not in RULES:
            return Verdict(0.0, False, None, Reason.ERROR, f"no rule {case.rule!r}; there are {', '.join(RULES)}")
        try:
            return self._asked(case)
        except _OverLimitError as error:
            return Verdict(-1.0 if case.rule == "dapo" else 0.0, False, None, Reason.TIMEOUT, str(error))
        except CheckerError as error:
            log.warning("%s", error)
            return Verdict(0.0, False, None, Reason.ERROR, str(error))

    def _asked(self, case: Case) -> Verdict:
        """A worker that dies for no known reason may have been killed from outside: the case is asked once more."""
        try:
            reply = self._with_worker(case)
        except CheckerError as error:
            log.warning("%s; its case is judged again", error)
            reply = self._with_worker(case)
        if "error" in reply:
            raise CheckerError(f"judging failed: {reply['error']}")
        verdict = reply["verdict"]
        return Verdict(**{**verdict, "reason": Reason(verdict["reason"])})

    def _with_worker(self, case: Case) -> dict[str, Any]:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = Worker(self.config)
        try:
            return worker.judge(case)
        finally:
            if worker.is_alive:
                self._idle.put(worker)
            else:
                worker.kill()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])
