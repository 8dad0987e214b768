"""The receiving end of a weight update, on modules small enough to see through."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl.protocols import EngineError, TensorSpec, UpdateManifest
from rl.rollout.update import ModelUpdate


class Tied(nn.Module):
    """A head that shares the embedding, one persistent buffer and one that is computed."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("frequencies", torch.ones(2), persistent=False)


def manifest(*tensors: tuple[str, str, tuple[int, ...]]) -> UpdateManifest:
    return UpdateManifest(3, tuple(TensorSpec(*tensor) for tensor in tensors))


EMBEDDING = ("embedding.weight", "float32", (3, 2))
SCALE = ("scale", "float32", (2,))


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_tensor_may_travel_under_either_name_and_stays_tied(name: str):
    model = Tied()
    update = ModelUpdate(model, manifest((name, "float32", (3, 2)), SCALE))
    update.receive([(name, torch.arange(6.0).reshape(3, 2)), ("scale", torch.tensor([5.0, 6.0]))])
    update.check_complete()
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert model.scale.tolist() == [5.0, 6.0]


def test_the_model_keeps_its_dtype_and_its_memory():
    model = nn.Linear(2, 1, bias=False)
    address = model.weight.data_ptr()
    update = ModelUpdate(model, manifest(("weight", "bfloat16", (1, 2))))
    update.receive([("weight", torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16))])
    assert model.weight.dtype == torch.float32
    assert model.weight.tolist() == [[0.5, -2.0]]
    assert model.weight.data_ptr() == address


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([EMBEDDING], "lacks 1 tensors of the engine's model: scale"),
        ([SCALE], "lacks 2 tensors of the engine's model: embedding.weight, head.weight"),
        ([EMBEDDING, SCALE, ("bias", "float32", (3,))], "tensor bias of the manifest is not in the engine's model"),
        ([EMBEDDING, SCALE, ("frequencies", "float32", (2,))], "frequencies of the manifest is not in"),
        ([("embedding.weight", "float32", (2, 3)), SCALE], r"\(2, 3\) in the manifest, \(3, 2\) here"),
        ([EMBEDDING, SCALE, SCALE], "names a tensor twice"),
    ],
)
def test_a_manifest_that_does_not_fit_the_model_is_refused(tensors: list, message: str):
    with pytest.raises(EngineError, match=message):
        ModelUpdate(Tied(), manifest(*tensors))


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        ([("nothing", torch.zeros(2))], "tensor nothing is not in the manifest"),
        ([("scale", torch.zeros(3))], r"scale is \('float32', \(3,\)\), the manifest says \('float32', \(2,\)\)"),
        ([("scale", torch.zeros(2, dtype=torch.float16))], "scale is .'float16'"),
        ([("scale", torch.zeros(2)), ("scale", torch.zeros(2))], "scale arrived twice"),
    ],
)
def test_a_tensor_that_is_not_as_announced_is_refused(bucket: list, message: str):
    update = ModelUpdate(Tied(), manifest(EMBEDDING, SCALE))
    with pytest.raises(EngineError, match=message):
        update.receive(bucket)


def test_an_update_is_complete_only_with_every_tensor():
    update = ModelUpdate(Tied(), manifest(EMBEDDING, SCALE))
    update.receive([("scale", torch.zeros(2))])
    with pytest.raises(EngineError, match=r"1 tensors never arrived: embedding.weight"):
        update.check_complete()
    update.receive([("embedding.weight", torch.zeros(3, 2))])
    update.check_complete()
