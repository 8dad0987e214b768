"""One process group for weights: the trainer's rank 0 and every worker of every engine, on NCCL (RCCL) or gloo.

The backend's own class is made directly over a store of the group's own. So it stands beside whatever groups its
members have already (the trainer's ranks, an engine's tensor parallelism) and enters no table of torch's, which knows
one default group a process. Nobody waits for ever: whoever does not come in `Meeting.timeout_s` is named, and the group
is left, for one that lost a member cannot be used again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl.protocols import EngineError, Meeting

_POLL_S = 0.0005
_EVERYBODY = "everybody is here"


class PartnerLost(EngineError):
    """A member of a process group for weights did not come in time, or went away. Its group is of no use any more."""


class WeightGroup:
    """One member's place in a group. Rank 0 broadcasts; one broadcast at a time."""

    def __init__(self, meeting: Meeting, *, rank: int, store: Any, backend: Any) -> None:
        self.meeting = meeting
        self._rank = rank
        self._store = store  # rank 0's is the server that all others are connected to
        self._backend: Any = backend
        self._work: Any = None

    def start(self, buffer: torch.Tensor) -> None:
        """Begins to broadcast rank 0's bytes into everybody's `buffer` [n] uint8, which stays until `wait` returns."""
        try:
            self._work = self._backend.broadcast(buffer, 0)
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self) -> None:
        """Until the broadcast that was started last is complete here."""
        work, self._work = self._work, None
        if work is None:
            return
        deadline = time.monotonic() + self.meeting.timeout_s
        while not work.is_completed():
            # Asked for and not waited for: NCCL's own wait returns at once, and its time limit ends the process.
            if time.monotonic() > deadline:
                raise self._lost("it did not come")
            time.sleep(_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def leave(self) -> None:
        """Also in the middle of a broadcast; the other members notice at once (gloo) or in time."""
        if self._backend is not None:
            self._backend.abort()
        self._work = self._backend = self._store = None

    def _lost(self, reason: object) -> PartnerLost:
        self.leave()
        meeting = self.meeting
        who = "an engine's worker did not take" if self._rank == 0 else "the trainer or another worker did not pass on"
        return PartnerLost(
            f"{who} a bucket of weights within {meeting.timeout_s:g} s (rank {self._rank} of {meeting.num_ranks} in a "
            f"{meeting.backend} group for weights; rank 0 is the trainer): {reason}"
        )


def serve_store(host: str) -> tuple[Any, str]:
    """A TCPStore on a free port of `host` alone, and its address. It ends with the object."""
    listener = socket.create_server((host, 0))  # TCPStore by itself would listen on every interface
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, f"{host}:{port}"


def open_meeting(*, host: str, num_workers: int, device: torch.device, timeout_s: float) -> tuple[Any, Meeting]:
    """The store of a new group of rank 0 and so many others, and what they must be told."""
    store, address = serve_store(host)
    backend = "nccl" if device.type == "cuda" else "gloo"
    return store, Meeting(uuid.uuid4().hex, address, 1 + num_workers, backend, timeout_s)


def join_as_host(store: Any, meeting: Meeting, *, device: torch.device) -> WeightGroup:
    """Rank 0's way into its own meeting. Blocks until all are there; raises `PartnerLost`, which names who is not."""
    others = range(1, meeting.num_ranks)
    try:
        store.wait([_presence(rank) for rank in others], timedelta(seconds=meeting.timeout_s))
    except dist.DistStoreError as error:
        missing = [rank for rank in others if not store.check([_presence(rank)])]
        raise PartnerLost(
            f"{len(missing)} of {len(others)} engine workers did not come to form a {meeting.backend} group for "
            f"weights within {meeting.timeout_s:g} s: rank(s) {', '.join(map(str, missing))} of {meeting.num_ranks}. "
            "placement.weight_transport=bytes or disk does without a group."
        ) from error
    store.set(_EVERYBODY, "")
    return _form(store, meeting, rank=0, device=device)


def join(meeting: Meeting, *, rank: int, device: torch.device) -> WeightGroup:
    """A worker's way into the trainer's meeting. Blocks until all are there; raises `PartnerLost`."""
    host, _, port = meeting.address.rpartition(":")
    timeout = timedelta(seconds=meeting.timeout_s)
    try:
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, int(port), is_master=False, timeout=timeout
        )
        store.set(_presence(rank), "")
        store.wait([_EVERYBODY], timeout)
    except dist.DistError as error:
        raise PartnerLost(
            f"rank {rank} of {meeting.num_ranks} came to {meeting.address} to form a {meeting.backend} group for "
            f"weights, and it was not formed within {meeting.timeout_s:g} s: {error}"
        ) from error
    return _form(store, meeting, rank=rank, device=device)


def _presence(rank: int) -> str:
    return f"rank {rank} is here"


def _form(store: Any, meeting: Meeting, *, rank: int, device: torch.device) -> WeightGroup:
    """In a thread of its own: NCCL forms a group without a time limit, and would hold up a worker for ever."""
    formed: Future[Any] = Future()

    def form() -> None:
        try:
            formed.set_result(_new_backend(store, meeting, rank=rank, device=device))
        except RuntimeError as error:
            formed.set_exception(error)

    threading.Thread(target=form, name="weight-group", daemon=True).start()
    try:
        backend = formed.result(meeting.timeout_s)
    except (RuntimeError, TimeoutError) as error:
        raise PartnerLost(
            f"the {meeting.backend} group for weights was not formed within {meeting.timeout_s:g} s, though all "
            f"{meeting.num_ranks} ranks had come (this is rank {rank}): {error or 'no answer'}"
        ) from error
    return WeightGroup(meeting, rank=rank, store=store, backend=backend)


def _new_backend(store: Any, meeting: Meeting, *, rank: int, device: torch.device) -> Any:
    timeout = timedelta(seconds=meeting.timeout_s)
    address = _own_address(meeting)
    if meeting.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(store, rank, meeting.num_ranks, options)
    if address == "127.0.0.1":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # counts where nothing in this process has used NCCL yet
    nccl = dist.ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    options = nccl.Options()
    options._timeout = 10 * timeout  # after it NCCL's watchdog ends the process; our own limit comes first
    with torch.cuda.device(device):
        group = nccl(store, rank, meeting.num_ranks, options)
        group._set_sequence_number_for_group()
        group.eager_connect_single_device(device)
    return group


def _own_address(meeting: Meeting) -> str:
    """Of the interface by which this machine reaches the meeting: loopback if it is on the same one."""
    host, _, port = meeting.address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # of a datagram socket this sends nothing
        return probe.getsockname()[0]
