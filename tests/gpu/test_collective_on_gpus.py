"""Buckets that rank 0 broadcasts by NCCL (RCCL) to a worker with a GPU of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl.protocols import Bucket
from rl.weights.collective import PartnerLost
from rl.weights.digest import tensor_digest
from rl.weights.inlet import WeightInlet, bucket_from_json, meeting_from_json, to_json
from rl.weights.outlet import WeightOutlet

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

START_S = 120.0


def facts(tensors: Any) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    return {name: (tensor_digest(tensor), str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors}


def bucket_of(seed: int) -> Bucket:
    table = torch.randn(96, 40, device="cuda:0", generator=torch.Generator(device="cuda:0").manual_seed(seed))
    return [
        ("matrix", table),
        ("transposed", table.t()),
        ("half", table.bfloat16()[:5]),
        ("odd", table.to(torch.int8)[:1, :7]),
        ("scalar", table[0, 0]),
        ("large", torch.full((2**24,), float(seed), device="cuda:0")),
    ]


def _work(orders: Any, answers: Any) -> None:
    """A worker on GPU 1: joins each meeting, takes each bucket, and leaves a bucket where it is told to."""
    torch.cuda.set_device(1)
    inlet = WeightInlet(torch.device("cuda", 1))
    while (order := orders.get()) is not None:
        kind, message = order
        if kind == "join":
            inlet.join(meeting_from_json(message), rank=1)
            answers.put(inlet.group_id)
        else:
            answers.put(facts(inlet.fetch(bucket_from_json(message)).items()))


@pytest.fixture
def worker() -> Iterator[tuple[Any, Any]]:
    context = torch.multiprocessing.get_context("spawn")
    orders, answers = context.Queue(), context.Queue()
    process = context.Process(target=_work, args=(orders, answers))
    process.start()
    yield orders, answers
    orders.put(None)
    process.join(30)
    assert process.exitcode == 0


def formed(outlet: WeightOutlet, orders: Any, answers: Any, *, timeout_s: float) -> str:
    meeting = outlet.meet(1, timeout_s)
    orders.put(("join", to_json(meeting)))
    outlet.join()
    assert answers.get(timeout=START_S) == meeting.group_id
    return meeting.group_id


def test_a_worker_on_another_gpu_receives_equal_tensors(worker: tuple[Any, Any]):
    orders, answers = worker
    outlet = WeightOutlet(device=torch.device("cuda", 0), host="127.0.0.1")
    formed(outlet, orders, answers, timeout_s=START_S)
    for seed in range(3):
        orders.put(("fetch", to_json(outlet.broadcast(bucket_of(seed)))))
        assert answers.get(timeout=START_S) == facts(bucket_of(seed))
    outlet.finish()
    outlet.drop()


def test_a_worker_that_takes_no_bucket_is_an_error_in_time_and_a_new_group_works(worker: tuple[Any, Any]):
    orders, answers = worker
    outlet = WeightOutlet(device=torch.device("cuda", 0), host="127.0.0.1")
    formed(outlet, orders, answers, timeout_s=START_S)
    orders.put(("fetch", to_json(outlet.broadcast(bucket_of(0)))))
    answers.get(timeout=START_S)
    formed(outlet, orders, answers, timeout_s=10.0)
    outlet.broadcast(bucket_of(1))
    began = time.monotonic()
    with pytest.raises(PartnerLost, match="did not take a bucket of weights within 10 s"):
        outlet.finish()
    assert time.monotonic() - began < 30
    formed(outlet, orders, answers, timeout_s=START_S)
    orders.put(("fetch", to_json(outlet.broadcast(bucket_of(2)))))
    assert answers.get(timeout=START_S) == facts(bucket_of(2))
    outlet.finish()
    outlet.drop()
