"""What the user's environment means to the processes of a run: two ranks and an engine, each a Ray actor."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import environment
from tests.integration.test_faults import ranks_of
from tests.integration.test_resume import wait_for_step
from tests.processes import command_of, descendants

WORDS = (
    "experiment=quickstart",
    "model=tiny",
    "placement=fully_async",
    "placement.trainer_ranks=2",
    "steps=4",
    "algorithm.prompts_per_step=4",
    "algorithm.prompts_per_mini_batch=4",
    "evaluation.every=0",
    "task.eval_limit=8",
    "output_dir=run",
)
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
CLOUDS = {"169.254.169.254", "metadata.google.internal"}
"""Ray asks as it starts which cloud it is in."""
USERS = {"FOO": "bar", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}


@dataclass
class Proxy:
    """Passes nothing on, and keeps what it was asked for."""

    url: str
    targets: list[str] = field(default_factory=list)
    """As "http://host/path", or "host:port" of a connection."""


@contextmanager
def proxy() -> Iterator[Proxy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = Proxy(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def take() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    connection, _ = listener.accept()
                    with connection, connection.makefile("rb") as request:
                        asked.targets.append(request.readline().decode().split()[1])

        threading.Thread(target=take, daemon=True).start()
        yield asked
        listener.shutdown(socket.SHUT_RDWR)


@dataclass
class Seen:
    """Of a run that has ended well."""

    environments: dict[int, dict[str, str]] = field(default_factory=dict)
    """Of its ranks and its engine, by process."""
    hosts_at_proxy: set[str | None] = field(default_factory=set)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("run")
    with proxy() as named:
        proxies = {name: named.url for lower in PROXY_VARIABLES for name in (lower, lower.upper())}
        process = subprocess.Popen(
            [sys.executable, "-m", "rl", *WORDS],
            cwd=folder,
            env=environment(**proxies, **USERS, no_proxy="", NO_PROXY=""),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            wait_for_step(process, folder / "run", 1)
            engines = [pid for pid in descendants(process.pid) if command_of(pid).startswith("ray::_EngineHost")]
            found = Seen({pid: environment_of(pid) for pid in [*ranks_of(process.pid), *engines]})
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0, output
        finally:
            process.kill()
        assert [row["step"] for row in read_metrics(folder / "run" / "metrics.jsonl")] == list(range(5))
        found.hosts_at_proxy = {
            urlsplit(target if "//" in target else f"//{target}").hostname for target in named.targets
        }
        with pytest.raises((OSError, HTTPException)):  # to see that it keeps them
            urllib.request.build_opener(urllib.request.ProxyHandler({"http": named.url})).open("http://127.0.0.1/own")
        assert named.targets[-1] == "http://127.0.0.1/own"
    yield found


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_process_of_a_run_asks_the_users_proxy_for_another(seen: Seen):
    """P157. That an IPv6 address of Ray is refused by name: tests/config/test_rules.py."""
    assert seen.hosts_at_proxy <= CLOUDS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_the_user_has_set_reaches_every_process_of_a_run(seen: Seen):
    """P158"""
    assert len(seen.environments) == 3
    for variables in seen.environments.values():
        assert variables | USERS == variables
