"""One Ray for every actor of a run: the user's if there is one, else a small local one that ends with the run.

A local one listens on the loopback interface alone and has no dashboard. Of a cluster that it joins, a run claims whole
machines, see `rl/placement/ray_nodes.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rl.config.schema import ConfigError
from rl.config.secrets import is_secret_name
from rl.faults import TAIL_LINES, classify, host_oom_kills, last_lines, tail

OBJECT_STORE_BYTES = 2 * 2**30
"""At most. It holds a few buckets of weights and the rollouts on their way, and is mapped as it fills."""

START_ATTEMPTS = 3
"""A busy machine may not start a Ray in the 30 s that Ray waits for it."""

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

FORWARDED = ("GLOO_", "HF_", "HSA_", "NCCL_", "RCCL_", "TORCH_NCCL_")
"""Variables with these beginnings go to every actor as the user has set them."""

log = logging.getLogger(__name__)

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# An actor that asks Ray for no GPU sees those that its own environment names.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""At 0 Ray leaves 127.0.0.1 as it is. Otherwise it replaces it by the host's address and listens on every interface."""

_LOCAL_SETTINGS = {
    # Read when Ray is imported, by whomever, so it is set here.
    LOOPBACK: "0",
    # Our actors have environments of their own, so no worker that waits in stock would ever be used.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
if not os.environ.get("RAY_ADDRESS"):
    for _name, _value in _LOCAL_SETTINGS.items():
        os.environ.setdefault(_name, _value)


class _Runtime:
    started_here = False
    names_set_here: ClassVar[set[str]] = set()
    """Variables of this process that a run's own settings have set: to an actor they are not the user's."""
    claim: Any = None
    """Ray's placement group of the machines that this run has claimed; None: it has the whole of a local Ray."""


def use_cluster(address: str | None) -> None:
    """Has `ensure_ray` join the cluster at `address`. None: at RAY_ADDRESS, and where that is unset, none."""
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    if is_cluster() and os.environ["RAY_ADDRESS"].startswith(("127.", "localhost:")):
        os.environ.setdefault(LOOPBACK, "0")
    elif is_cluster() and os.environ.get(LOOPBACK) == "0":
        del os.environ[LOOPBACK]


def is_cluster() -> bool:
    """Whether this run joins a Ray that somebody has started."""
    return bool(os.environ.get("RAY_ADDRESS"))


def ensure_ray() -> None:
    """Joins the cluster at RAY_ADDRESS, or starts a Ray on the loopback interface. Nothing if Ray is connected.

    Raises ConfigError where the cluster cannot be joined.
    """
    import ray

    if ray.is_initialized():
        return
    if is_cluster():
        _join()
    else:
        _start()
    _keep_notes_to_the_log()
    _Runtime.started_here = True


def _join() -> None:
    import ray
    from ray.exceptions import RayError

    address = os.environ["RAY_ADDRESS"]
    if address.count(":") > 1:
        raise ConfigError(f"RAY_ADDRESS={address} is an IPv6 address, which is not supported: name an IPv4 HOST:PORT.")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"ray.address={address} (or RAY_ADDRESS): this cluster cannot be joined: {error} Look whether its head "
            "runs (ray status), with the same Ray and Python as here and, where it asks for a token, with that token "
            "in ~/.ray/auth_token or RAY_AUTH_TOKEN. Without an address a run starts a Ray of its own."
        ) from error


def _keep_notes_to_the_log() -> None:
    """Ray prints a long note of each process that dies, the same for every cause, above our own. run.log keeps it.

    Ray has no setting for it. Where a later version has not this function, its notes are printed as before.
    """
    from ray._private import worker

    def keep(data: dict[str, Any], *_: Any, **__: Any) -> None:
        log.info("Ray: %s", "\n".join(data["lines"]))

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = keep


def _start() -> None:
    import ray

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=os.cpu_count(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=min(OBJECT_STORE_BYTES, memory // 8),
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == START_ATTEMPTS:
                raise
            log.warning("Ray did not start in its 30 s (attempt %d of %d)", attempt, START_ATTEMPTS)
        else:
            return


def shutdown_ray() -> None:
    """Ends, or leaves, the Ray that `ensure_ray` started or joined; one that was there before stays."""
    if _Runtime.started_here:
        import ray

        if _Runtime.claim is not None and ray.is_initialized():
            ray.util.remove_placement_group(_Runtime.claim)
        _Runtime.claim = None
        _Runtime.started_here = False
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Seat:
    """Where an actor is to run."""

    node: int
    """Of the claimed machines; 0 is the driver's."""
    env: dict[str, str]
    """Names its devices there."""


def claim(placement_group: Any) -> None:
    """From now on every seat is in this placement group, whose bundle i is machine i."""
    _Runtime.claim = placement_group


def is_on_one_machine() -> bool:
    """Whether all processes of the run are: with a Ray of its own, or with one claimed machine of a cluster."""
    return _Runtime.claim is None or _Runtime.claim.bundle_count == 1


def seat_options(seat: Seat | None) -> dict[str, Any]:
    """Options of the actor that is to sit there: none in a Ray of the run's own, which has this machine alone."""
    if seat is None or _Runtime.claim is None:
        return {}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(_Runtime.claim, seat.node)}


def set_driver_env(env: dict[str, str]) -> None:
    """Environment of this process, for the parts that live in it. A value that the user has set wins."""
    for name, value in env.items():
        if name not in os.environ:
            os.environ[name] = value
            _Runtime.names_set_here.add(name)


def actor_env(env: dict[str, str], *, device: str) -> dict[str, str]:
    """Environment of an actor's process. A value that the user has set wins, but not over which devices it sees.

    On a CPU an actor has one thread unless either says otherwise. The user's settings of libraries go with it, as a
    cluster's processes do not have them; secrets do not, for Ray shows what it is given, and no actor downloads.
    """
    _check_device_variables(env)
    own = {"OMP_NUM_THREADS": "1"} | env if device == "cpu" else env
    ours = {*DEVICE_VARIABLES, *_Runtime.names_set_here}
    users = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED) and name not in ours and not is_secret_name(name)
    }
    return users | {name: value if name in ours else os.environ.get(name, value) for name, value in own.items()}


def _check_device_variables(env: dict[str, str]) -> None:
    """ROCm counts CUDA_VISIBLE_DEVICES among what its own variables leave, so that both would choose twice."""
    if "CUDA_VISIBLE_DEVICES" not in env:
        return
    for name in DEVICE_VARIABLES[1:]:
        value = env.get(name, os.environ.get(name))
        if value is not None:
            raise ConfigError(
                f"{name}={value} and CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']}, which this run sets for one "
                f"of its processes, would both choose GPUs. Unset {name} and name the GPUs of the run in "
                "CUDA_VISIBLE_DEVICES, which ROCm reads too."
            )


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs, for messages about its death."""

    node_id: str
    pid: int
    log: str | None
    """File that it writes its errors to, if it is one."""
    host_oom_kills: int | None
    """As counted when it started."""


def own_place() -> Place:
    """Of the actor that calls."""
    import ray

    link = Path("/proc/self/fd/2")
    target = os.readlink(link) if link.exists() else ""
    log = target if os.path.isfile(target) else None
    return Place(ray.get_runtime_context().get_node_id(), os.getpid(), log, host_oom_kills())


def own_host() -> str:
    """The address at which other processes of the run reach this one: loopback unless Ray has several machines."""
    if "ray" not in sys.modules:
        return "127.0.0.1"  # a run that needs no Ray need not import it
    import ray
    import ray.util

    if not ray.is_initialized() or len(ray.nodes()) == 1:
        return "127.0.0.1"
    return ray.util.get_node_ip_address()


def is_here(place: Place) -> bool:
    """Whether that actor's machine is this one."""
    import ray

    return place.node_id == ray.get_runtime_context().get_node_id()


def end_process(actor: Any, place: Place | None) -> None:
    """At once. Ray alone would ask the process to end itself, which one that hangs does not hear."""
    import ray

    if place is not None and is_here(place):
        with suppress(ProcessLookupError):
            os.kill(place.pid, signal.SIGKILL)
    ray.kill(actor)


def obituary(what: str, error: BaseException, place: Place | None) -> str:
    """`what` failed, the class of the fault and the line that shows it; then the end of its log, if it is here.

    Where the process has raised and not died, the end of what it raised instead.
    """
    from ray.exceptions import RayTaskError

    log = None if place is None else place.log
    has_host_killed = False
    if place is not None and place.host_oom_kills is not None and is_here(place):
        has_host_killed = (host_oom_kills() or 0) > place.host_oom_kills
    fault = classify(str(error), tail(log), has_host_killed=has_host_killed)
    if isinstance(error, RayTaskError):
        raised = str(error).splitlines()[-TAIL_LINES:]
        last = "\n".join(["last lines of what it raised:", *(f"  {line}" for line in raised)])
    else:
        last = last_lines(log)
    return "\n".join(part for part in (f"{what}: {fault}", last) if part)
