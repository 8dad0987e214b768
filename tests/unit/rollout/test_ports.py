"""Engines that lose a port as they start, told in the words of those who bind it (P154)."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rl.protocols import EngineCapabilities, EngineError
from rl.rollout.engine import Engine
from rl.rollout.ports import on_free_ports
from rl.weights.collective import serve_store


def said_by_torch(port: int) -> str:
    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    return str(caught.value)


def said_by_python(port: int) -> str:
    with pytest.raises(OSError) as caught, socket.socket() as late:
        late.bind(("127.0.0.1", port))
    return str(caught.value)


class Starts:
    """Fails with `reason` so many times."""

    def __init__(self, reason: str, num_failures: int) -> None:
        self._reason, self._num_failures, self.num_calls = reason, num_failures, 0

    async def __call__(self) -> int:
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            raise EngineError(f"vLLM did not start: root cause above\n{self._reason}")
        return self.num_calls


@pytest.mark.parametrize("said_by", [said_by_torch, said_by_python])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_squatter_on_a_port_does_not_stop_the_start(said_by: Callable[[int], str], num_failures: int):
    with socket.create_server(("", 0)) as squatter:
        starts = Starts(said_by(squatter.getsockname()[1]), num_failures)
    assert asyncio.run(on_free_ports("vLLM", starts)) == num_failures + 1


def test_the_third_start_is_the_last_and_names_the_port_and_how_to_find_who_has_it():
    with socket.create_server(("", 0)) as squatter:
        port = squatter.getsockname()[1]
        starts = Starts(said_by_torch(port), 9)
    with pytest.raises(EngineError, match=rf"(?s)in 3 starts vLLM found a port taken.*ss -ltnp.*port: {port}"):
        asyncio.run(on_free_ports("vLLM", starts))
    assert starts.num_calls == 3


def test_what_is_wrong_with_more_than_a_port_is_raised_at_once():
    starts = Starts("CUDA out of memory", 9)
    with pytest.raises(EngineError, match="CUDA out of memory"):
        asyncio.run(on_free_ports("vLLM", starts))
    assert starts.num_calls == 1


NUM_PROCESSES = 20


def meet_at_once(start: Any, addresses: Any, end: Any) -> None:
    """In a process of its own: a meeting point on a port that is held until all have theirs."""
    start.wait()
    store, address = serve_store("127.0.0.1")
    addresses.put(address)
    end.wait()
    del store


def test_twenty_processes_that_ask_for_a_port_at_once_have_one_each():
    """Of those that are ours to choose: the kernel chooses, and the socket is the one that is listened on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rl.weights.collective"])  # so that torch is loaded once
    start, end, addresses = context.Barrier(NUM_PROCESSES), context.Event(), context.Queue()
    processes = [context.Process(target=meet_at_once, args=(start, addresses, end)) for _ in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    found = [addresses.get(timeout=100) for _ in processes]
    end.set()
    for process in processes:
        process.join(timeout=100)
    assert len(set(found)) == NUM_PROCESSES, found
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES


class PortlessSampler:
    """Starts at its second call, unless the engine was closed before."""

    name = "vLLM"
    capabilities = EngineCapabilities(seeded=True, loses_weights_asleep=False, renormalizes=False)

    def __init__(self) -> None:
        self.num_starts = 0
        self.after_failure: Callable[[], Awaitable[None]] | None = None

    async def start(self, **_: Any) -> None:
        self.num_starts += 1
        if self.num_starts == 1:
            if self.after_failure is not None:
                await self.after_failure()
            raise EngineError("address already in use")

    async def close(self) -> None: ...


def test_an_engine_is_up_although_its_sampler_lost_a_port():
    sampler: Any = PortlessSampler()
    asyncio.run(Engine(sampler).start())
    assert sampler.num_starts == 2


def test_an_engine_that_was_closed_meanwhile_is_not_started_again():
    sampler: Any = PortlessSampler()

    async def main() -> None:
        engine = Engine(sampler)
        sampler.after_failure = engine.close
        await engine.start()

    with pytest.raises(EngineError, match="the vLLM engine was closed while it started"):
        asyncio.run(main())
    assert sampler.num_starts == 1
