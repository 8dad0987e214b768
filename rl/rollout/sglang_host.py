"""The process that holds SGLang's engine: SGLang ends its whole process when a scheduler dies, so it is not the run's.

Messages cross one pipe, many at a time. To the host: `Submit`, `Abort`, `Call`, `Close`. From it: `Started`, `Failed`,
`Finished`, `Answer`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.config.schema import SGLangRolloutConfig
from rl.protocols import EngineError
from rl.rollout.processes import end_with_parent
from rl.rollout.sampler import Sampled
from rl.rollout.sglang_requests import Request, sampled

if TYPE_CHECKING:
    from rl.rollout.sglang_server import Server

ABORT_RETRY_S = 0.2
END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Submit:
    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Abort:
    rids: list[str]


@dataclass(frozen=True, slots=True)
class Call:
    """Of a method of `sglang_server.Server`."""

    call_id: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class Started:
    max_model_len: int
    """Prompt and response together."""
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine did not start."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    rid: str
    result: Sampled | EngineError


@dataclass(frozen=True, slots=True)
class Answer:
    call_id: int
    value: Any
    error: str | None


def host_main(
    connection: Connection, config: SGLangRolloutConfig, *, model_folder: Path, device: str, log_folder: Path
) -> None:
    """The process's main function. SIGINT is blocked already, by the thread that started it."""
    end_with_parent()
    log = os.open(log_folder / "sglang.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    inbox = _Inbox(connection)
    threading.Thread(target=inbox.read, name="sglang-inbox", daemon=True).start()
    try:
        from rl.rollout.sglang_environment import prepare_environment

        prepare_environment(device, log_folder)
        from rl.rollout.sglang_server import Server

        server = Server(config, model_folder=model_folder, device=device)
    except Exception as error:  # noqa: BLE001  # whatever SGLang raises, its caller must hear of it
        connection.send([Failed(f"{type(error).__name__}: {error}")])
        end_process(exit_code=1)
    else:
        server.loop.run_until_complete(_Host(connection, server).run(inbox))


class _Inbox:
    """Reads the pipe in a thread of its own, so that whoever writes to it never waits long."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: list[Any] = []
        self._lock = threading.Lock()
        self._listener: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def read(self) -> None:
        while True:
            try:
                messages = self._connection.recv()
            except (EOFError, OSError):  # the run is gone
                messages = [Close()]
            if any(isinstance(message, Close) for message in messages):
                end_process(exit_code=0)
            with self._lock:
                self._messages += messages
                listener = self._listener
            if listener is not None:
                loop, event = listener
                loop.call_soon_threadsafe(event.set)

    async def listen(self) -> AsyncIterator[list[Any]]:
        """Yields what has come, a list each time."""
        event = asyncio.Event()
        with self._lock:
            self._listener = (asyncio.get_running_loop(), event)
        event.set()
        while True:
            await event.wait()
            event.clear()
            with self._lock:
                messages, self._messages = self._messages, []
            yield messages


class _Host:
    """Serves the messages, on SGLang's event loop."""

    def __init__(self, connection: Connection, server: Server) -> None:
        self._connection = connection
        self._server = server
        self._outbox: list[Any] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._aborted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, inbox: _Inbox) -> None:
        await self._server.listen()
        # A scheduler that fails has logged why and sends SIGQUIT. SGLang's own handler takes 5 s more.
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, lambda: end_process(exit_code=1))
        self._send(Started(self._server.max_model_len, self._server.vocab_size))
        async for messages in inbox.listen():
            for message in messages:
                self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case Submit(requests):
                for request in requests:
                    self._running[request.rid] = asyncio.ensure_future(self._generate(request))
            case Abort(rids):
                self._aborted.update(rid for rid in rids if rid in self._running)
                self._keep(self._abort(rids))
            case Call():
                self._keep(self._call(message))
            case _:
                raise TypeError(f"unknown message {message!r}")

    def _keep(self, work: Any) -> None:
        """A task that nobody refers to may be collected while it runs."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, request: Request) -> None:
        try:
            output = await self._server.generate(request)
            was_aborted = request.rid in self._aborted
            result = sampled(
                output, request, was_aborted=was_aborted, end_ids=self._server.end_ids, decode=self._server.decode
            )
        except EngineError as error:
            result = error
        except Exception as error:  # noqa: BLE001  # a request that SGLang refuses, with its own reason
            result = EngineError(f"SGLang refused a request: {type(error).__name__}: {error}")
        del self._running[request.rid]
        self._aborted.discard(request.rid)
        self._send(Finished(request.rid, result))

    async def _abort(self, rids: Sequence[str]) -> None:
        """Asks again until they have ended: the scheduler forgets an abort of a request that it has not seen yet."""
        await asyncio.sleep(0)
        while running := [rid for rid in rids if rid in self._running]:
            self._server.abort(running, is_all=len(running) == len(self._running))
            await asyncio.wait({self._running[rid] for rid in running}, timeout=ABORT_RETRY_S)

    async def _call(self, call: Call) -> None:
        try:
            value = await getattr(self._server, call.method)(*call.arguments)
        except Exception as error:  # noqa: BLE001  # it belongs to the caller
            text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            self._send(Answer(call.call_id, None, text))
        else:
            self._send(Answer(call.call_id, value, None))

    def _send(self, message: Any) -> None:
        """All messages of one turn of the loop go together."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        self._connection.send(messages)


def end_process(*, exit_code: int) -> None:
    """Kills SGLang's processes, waits until they are gone, and ends this one. It does not return.

    SGLang's own shutdown kills them as well; this one may be called by any thread, at any time.
    """
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=END_TIMEOUT_S)
    os._exit(exit_code)
