"""A bucket that another process opens on the same GPU."""

from __future__ import annotations

import pytest
import torch

from rl.protocols import Bucket
from rl.weights.digest import tensor_digest
from rl.weights.inlet import bucket_from_json, to_json
from rl.weights.ipc import open_bucket, share_bucket

pytestmark = pytest.mark.gpu


def facts(tensors) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    return {name: (tensor_digest(tensor), str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors}


def _digests(told: str, results) -> None:
    results.put(facts(open_bucket(bucket_from_json(told), torch.device("cuda")).items()))


@pytest.mark.parametrize("segments", ["plain", "expandable"])
def test_another_process_reads_equal_tensors_of_every_dtype_and_layout(segments: str, monkeypatch):
    if segments == "expandable":
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    generator = torch.Generator(device="cuda").manual_seed(0)
    table = torch.randn(96, 40, device="cuda", generator=generator)
    bucket: Bucket = [
        ("matrix", table),
        ("transposed", table.t()),
        ("strided", table[::3, 1:]),
        ("half", table.bfloat16()[:5]),
        ("odd", table.to(torch.int8)[:1, :7]),
        ("scalar", table[0, 0]),
        ("of the host", table.cpu()),
        ("large", torch.full((2**24,), 3.0, device="cuda")),
    ]
    del table
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    try:
        for _ in range(3):
            shared = share_bucket(bucket, torch.device("cuda"))
            process = context.Process(target=_digests, args=(to_json(shared.bucket), results))
            process.start()
            received = results.get(timeout=120)
            process.join(30)
            assert process.exitcode == 0
            assert received == facts(bucket)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
