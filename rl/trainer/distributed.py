"""How a rank joins the others. One rank needs no socket."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def join_ranks(
    *, device: str, rank: int, num_ranks: int, store: str | None, collective_timeout_s: float
) -> torch.device:
    """Makes the default process group, if there is none yet, and returns this rank's device.

    `store` is the `host:port` of a TCPStore that someone else holds; None is for a single rank.
    """
    timeout = timedelta(seconds=collective_timeout_s)
    own = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank, num_ranks), "another process group is in the way"
        return own
    if store is None:
        assert num_ranks == 1, "several ranks need a store to meet at"
        held: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    else:
        host, _, port = store.rpartition(":")
        held = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, int(port), num_ranks, is_master=False, timeout=timeout
        )
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=held,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=own if device == "cuda" else None,
    )
    atexit.register(leave_ranks)
    return own


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
