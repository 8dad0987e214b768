"""Starts of engines that lose a port to another process between finding it free and binding it."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rl.protocols import EngineError

log = logging.getLogger(__name__)

START_ATTEMPTS = 3
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|\[Errno 98\]", re.IGNORECASE)

Started = TypeVar("Started")


async def on_free_ports(name: str, start: Callable[[], Awaitable[Started]]) -> Started:
    """What `start` gives. It is called again, and looks for other ports, where one that it had found was taken.

    Engines choose ports of their own that nobody can hold for them. `EngineError` with what the log of that start says
    is how `start` fails; any other reason is final.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            return await start()
        except EngineError as error:
            if not _PORT_TAKEN.search(str(error)):
                raise
            if attempt == START_ATTEMPTS:
                raise EngineError(
                    f"in {START_ATTEMPTS} starts {name} found a port taken that had been free. `ss -ltnp` names the "
                    f"processes that listen on this machine; the port is in what follows.\n{error}"
                ) from error
            log.warning("%s lost a port to another process as it started (%d of %d)", name, attempt, START_ATTEMPTS)
    raise AssertionError("START_ATTEMPTS is at least 1")
