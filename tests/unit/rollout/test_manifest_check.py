"""A weight update must be what its manifest announced."""

from __future__ import annotations

import pytest
import torch

from rl.protocols import EngineError, TensorSpec, UpdateManifest
from rl.rollout.manifest_check import ManifestCheck, some

MANIFEST = UpdateManifest(3, (TensorSpec("a", "float32", (2,)), TensorSpec("b", "bfloat16", (1, 2))))
A, B = ("a", torch.zeros(2)), ("b", torch.zeros(1, 2, dtype=torch.bfloat16))


def test_all_tensors_once_in_any_order_and_any_buckets_are_complete():
    for buckets in ([[A, B]], [[B], [], [A]]):
        check = ManifestCheck(MANIFEST)
        for bucket in buckets:
            check.accept(bucket)
        check.check_complete()


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        ([A, A], "tensor a arrived twice"),
        ([("c", torch.zeros(1))], "tensor c is not in the manifest"),
        ([("a", torch.zeros(3))], r"tensor a is \('float32', \(3,\)\), the manifest says \('float32', \(2,\)\)"),
        ([("a", torch.zeros(2, dtype=torch.float16))], r"\('float16', \(2,\)\), the manifest says"),
    ],
)
def test_a_tensor_that_is_not_as_announced_is_refused(bucket: list[tuple[str, torch.Tensor]], message: str):
    with pytest.raises(EngineError, match=message):
        ManifestCheck(MANIFEST).accept(bucket)


def test_what_is_missing_is_named():
    check = ManifestCheck(MANIFEST)
    check.accept([A])
    with pytest.raises(EngineError, match=r"1 tensors never arrived: b\."):
        check.check_complete()


def test_a_manifest_that_names_a_tensor_twice_is_refused():
    with pytest.raises(EngineError, match="version 3 names a tensor twice"):
        ManifestCheck(UpdateManifest(3, (MANIFEST.tensors[0], MANIFEST.tensors[0])))


def test_many_names_are_cut():
    assert some(["b", "a"]) == "a, b"
    assert some("gfedcba") == "a, b, c, d, e, ..."
