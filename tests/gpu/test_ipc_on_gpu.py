"""A bucket that another process opens on the same GPU."""

from __future__ import annotations

import pytest
import torch

from rl.protocols import Bucket
from rl.weights.digest import tensor_digest
from rl.weights.ipc import open_bucket, share_bucket

pytestmark = pytest.mark.gpu


def facts(tensors) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    return {name: (tensor_digest(tensor), str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors}


def _digests(layout, handle, results) -> None:
    results.put(
        {name: (tensor_digest(t), str(t.dtype), tuple(t.shape)) for name, t in open_bucket(layout, handle).items()}
    )


def test_another_process_reads_equal_tensors_of_every_dtype_and_layout():
    generator = torch.Generator(device="cuda").manual_seed(0)
    table = torch.randn(96, 40, device="cuda", generator=generator)
    bucket: Bucket = [
        ("matrix", table),
        ("transposed", table.t()),
        ("strided", table[::3, 1:]),
        ("half", table.bfloat16()[:5]),
        ("odd", table.to(torch.int8)[:1, :7]),
        ("scalar", table[0, 0]),
    ]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    for _ in range(3):
        shared = share_bucket(bucket)
        process = context.Process(target=_digests, args=(shared.layout, shared.handle, results))
        process.start()
        received = results.get(timeout=120)
        process.join(30)
        assert process.exitcode == 0
        assert received == facts(bucket)
