"""The machines of a cluster that a run claims: whole ones, the driver's first, each checked before a model loads."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError
from rl.placement.ray_runtime import DEVICE_VARIABLES, Seat, claim, ensure_ray

CLAIM_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 120.0
WHOLE_MACHINES = (
    "A run in a cluster takes AMD machines whole; for some GPUs of one machine run there without ray.address, and name "
    "them in CUDA_VISIBLE_DEVICES."
)


@dataclass(frozen=True, slots=True)
class Machine:
    address: str
    gpus: tuple[str, ...]
    """As a process there names them in CUDA_VISIBLE_DEVICES."""


def claim_machines(count: int, *, gpus_per_node: int, folder: Path) -> list[Machine]:
    """Joins the cluster and claims `count` machines with so many GPUs each, until the run ends.

    Raises ConfigError where the cluster has not that many free, where one of them does not see `folder`, or where its
    variables would choose GPUs behind the run's back.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ensure_ray()
    here = ray.util.get_node_ip_address()
    bundle = {"CPU": 1.0, **({"GPU": float(gpus_per_node)} if gpus_per_node else {})}
    bundles = [{**bundle, f"node:{here}": 0.001}, *({**bundle} for _ in range(count - 1))]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD" if count > 1 else "PACK")
    if not group.wait(CLAIM_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        raise ConfigError(_shortage(count, gpus_per_node, here))
    claim(group)
    with _token(folder) as token:

        def on_each(probe: Any, *arguments: Any, num_gpus: int) -> list[Any]:
            seats = (PlacementGroupSchedulingStrategy(group, index) for index in range(count))
            options = ({"num_cpus": 0, "num_gpus": num_gpus, "max_retries": 0, "scheduling_strategy": s} for s in seats)
            return [ray.remote(probe).options(**one).remote(*arguments) for one in options]

        answers = on_each(_probe, str(token), num_gpus=0)
        gpus = on_each(_own_gpus, num_gpus=gpus_per_node)
        try:
            found, found_gpus = ray.get(answers, timeout=PROBE_TIMEOUT_S), ray.get(gpus, timeout=PROBE_TIMEOUT_S)
        except RayError as error:
            raise ConfigError(
                f"a machine of the cluster cannot run this suite: {str(error).splitlines()[-1]} Every machine needs "
                "the same environment under the same path."
            ) from error
    machines = [Machine(answer.address, own) for answer, own in zip(found, found_gpus, strict=True)]
    for machine, answer in zip(machines, found, strict=True):
        _check(machine, answer, token)
    return machines


def seats_on(machines: list[Machine], *, first: int, count: int, size: int = 1) -> list[Seat]:
    """Of `count` actors with `size` GPUs each, from GPU `first` on, counted through the machines in order.

    On machines without GPUs the actors are dealt out in turn.
    """
    per_node = len(machines[0].gpus)
    if per_node == 0:
        return [Seat((first + index) % len(machines), {}) for index in range(count)]
    made = []
    for index in range(count):
        node, local = divmod(first + index * size, per_node)
        gpus = machines[node].gpus[local : local + size]
        assert len(gpus) == size, "check_devices refuses an engine across two machines"
        made.append(Seat(node, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}))
    return made


@dataclass(frozen=True, slots=True)
class _Answer:
    address: str
    has_token: bool
    variables: dict[str, str]
    """Of the device variables, what the machine's own environment sets, which the run's processes there inherit."""


def _probe(token: str) -> _Answer:
    """Runs on a machine of the cluster, in a process for which Ray itself chooses no GPUs."""
    import ray

    variables = {name: os.environ[name] for name in DEVICE_VARIABLES if name in os.environ}
    return _Answer(f"{ray.util.get_node_ip_address()} ({platform.node()})", Path(token).is_file(), variables)


def _own_gpus() -> tuple[str, ...]:
    """Runs on a machine of the cluster, in a process that has all its GPUs."""
    import ray

    return tuple(str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


@contextmanager
def _token(folder: Path) -> Iterator[Path]:
    """A file of the run folder that only machines which share it can see."""
    path = folder / f".shared-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink()


def _check(machine: Machine, answer: _Answer, token: Path) -> None:
    if not answer.has_token:
        raise ConfigError(
            f"output_dir={token.parent} is not shared: machine {answer.address} does not see what this one writes "
            "there. Every trainer rank writes its part of a checkpoint. Choose a folder on storage that all machines "
            "mount under the same path."
        )
    _check_variables(machine, answer.variables)


def _check_variables(machine: Machine, variables: dict[str, str]) -> None:
    """On AMD Ray counts GPUs by HIP_VISIBLE_DEVICES alone, and ROCm chooses by all three variables."""
    usual, *others = DEVICE_VARIABLES
    for name in others:
        if variables.get(name):  # empty, it chooses nothing
            raise ConfigError(
                f"{name}={variables[name]} on machine {machine.address} and the {usual} that this run sets for its "
                f"processes would both choose GPUs. Unset {name} there before ray start (scripts/ray_cluster.sh does, "
                f"where it names all GPUs). {WHOLE_MACHINES}"
            )
    allowed = variables.get(usual, "").split(",")
    left_out = [gpu for gpu in machine.gpus if gpu not in allowed]
    if variables.get(usual) and left_out:
        raise ConfigError(
            f"{usual}={variables[usual]} on machine {machine.address} leaves out GPU(s) {','.join(left_out)} that Ray "
            f"has given to this run: on AMD it does not read {usual}. Unset it there before ray start. "
            f"{WHOLE_MACHINES}"
        )


def _shortage(count: int, gpus_per_node: int, here: str) -> str:
    import ray

    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    has = ", ".join(f"{node['NodeManagerAddress']} with {node['Resources'].get('GPU', 0):g} GPU(s)" for node in nodes)
    return (
        f"hardware.nodes={count}, hardware.gpus_per_node={gpus_per_node}: the cluster has not so many machines free, "
        f"this one ({here}) among them. It has {has}. Wait for other runs to end, add machines "
        "(scripts/ray_cluster.sh), or choose smaller hardware."
    )
