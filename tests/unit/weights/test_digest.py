"""Fingerprints of weights."""

from __future__ import annotations

import pytest
import torch

from rl.weights.digest import tensor_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (64, 8)])
def test_any_single_changed_element_changes_the_digest(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = (10 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    digests = {tensor_digest(tensor)}
    for place in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[place] += 1
        digests.add(tensor_digest(changed))
    assert len(digests) == tensor.numel() + 1


def test_swapped_elements_and_rows_change_the_digest():
    tensor = torch.arange(12.0).reshape(4, 3)
    assert len({tensor_digest(tensor), tensor_digest(tensor.flip(0)), tensor_digest(tensor.flip(1))}) == 3


def test_equal_values_have_equal_digests_however_they_lie_in_memory(monkeypatch: pytest.MonkeyPatch):
    tensor = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    expected = tensor_digest(tensor)
    assert tensor_digest(tensor.t().contiguous().t()) == expected
    assert tensor_digest(torch.cat([tensor, tensor])[6:]) == expected
    monkeypatch.setattr("rl.weights.digest._CHUNK", 7)
    assert tensor_digest(tensor) == expected


def test_an_empty_tensor_has_a_digest():
    assert tensor_digest(torch.zeros(0)) == "0" * 16
