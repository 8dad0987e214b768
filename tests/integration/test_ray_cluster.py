"""A run joins a Ray cluster that somebody has started: a real second Ray, by the script that people use."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import environment, with_words
from tests.integration.test_faults import last_checkpoint, words_for
from tests.processes import command_of

ROOT = Path(__file__).resolve().parents[2]
HEAD = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HEAD, 0)) as listener:
        return listener.getsockname()[1]


def listening(session: str) -> set[str]:
    """Addresses on which processes of that Ray listen."""
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    inodes = {line.split()[9]: line.split()[1].split(":")[0] for line in lines if line.split()[3] == "0A"}
    found = set()
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        if session not in command_of(pid):
            continue
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            target = os.readlink(descriptor) if descriptor.is_symlink() else ""
            if target.startswith("socket:[") and (inode := target[8:-1]) in inodes:
                found.add(inodes[inode])
    mapped = "0000000000000000FFFF0000"  # an IPv4 address as an IPv6 socket has it
    found = {address.removeprefix(mapped) for address in found}
    return {".".join(str(byte) for byte in reversed(bytes.fromhex(address))) for address in found}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a run that joins it; `ADDRESS` names it."""
    folder = tmp_path_factory.mktemp("ray")
    port = free_port()
    token = folder / "token"
    settings = {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token", "HOME": str(folder)}
    token.write_text("0123456789abcdef" * 4)
    temp = Path("/tmp") / f"rl-ray-{port}"  # the names of its sockets must stay below 107 characters
    env = environment(**settings, RAY_TMPDIR=str(temp))
    script = ["bash", str(ROOT / "scripts" / "ray_cluster.sh")]
    started = subprocess.run(
        [*script, "head", HEAD, str(port)], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        assert "no dashboard" in started.stdout
        yield {**settings, "ADDRESS": f"{HEAD}:{port}", "SESSION": str(temp)}
    finally:
        for path in Path("/proc").iterdir():  # `ray stop` would end every other Ray of this machine, too
            if path.name.isdigit() and str(temp) in command_of(int(path.name)):
                os.kill(int(path.name), 9)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_and_an_engine_of_a_run_sit_in_a_cluster_that_was_there_before(
    cluster: dict[str, str], warm_model: Path, tmp_path: Path
):
    assert listening(cluster["SESSION"]) == {HEAD}
    folder = tmp_path / "run"
    words = with_words(words_for(warm_model, folder), "placement=fully_async", "steps=2", "evaluation.every=0")
    done = run(cluster, *words, f"ray.address={cluster['ADDRESS']}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]
    assert last_checkpoint(folder, step=2)
    assert not list(folder.glob(".shared-*"))
    nodes = subprocess.run(
        ["ray", "status", f"--address={cluster['ADDRESS']}"],
        env=environment(**cluster),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert nodes.returncode == 0, nodes.stderr  # the run has left it as it was
    assert "bundle_group" not in nodes.stdout

    wanting = run(cluster, *words, f"ray.address={cluster['ADDRESS']}", "hardware.nodes=2", "clean=true", cwd=tmp_path)
    assert wanting.returncode == 2, wanting.stderr
    assert "hardware.nodes=2, hardware.gpus_per_node=0: the cluster has not so many machines free" in wanting.stderr

    stranger = {**cluster, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")}
    (tmp_path / "other").write_text("fedcba9876543210" * 4)
    refused = run(stranger, *words, f"ray.address={cluster['ADDRESS']}", "clean=true", cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert f"ray.address={cluster['ADDRESS']} (or RAY_ADDRESS): this cluster cannot be joined" in refused.stderr


def run(cluster: dict[str, str], *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    import sys

    return subprocess.run(
        [sys.executable, "-m", "rl", *words],
        cwd=cwd,
        env=environment(**cluster),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
