"""Fingerprints of weights."""

from __future__ import annotations

import pytest
import torch

from rl.weights.digest import tensor_digest, tensors_digest


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
    monkeypatch.setattr("rl.weights.digest._COLUMNS", 7)
    tensor = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    expected = tensor_digest(tensor)
    assert tensor_digest(tensor.t().contiguous().t()) == expected
    assert tensor_digest(torch.cat([tensor, tensor])[6:]) == expected
    monkeypatch.setattr("rl.weights.digest._ROWS", 1)
    assert tensor_digest(tensor) == expected


@pytest.mark.parametrize("columns", [1, 7, 60, 120, 4096])
def test_a_change_in_any_row_or_column_changes_the_digest(columns: int, monkeypatch: pytest.MonkeyPatch):
    """120 words of 8 bytes: whole rows with and without a rest, one row, and less than one."""
    monkeypatch.setattr("rl.weights.digest._COLUMNS", columns)
    tensor = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    digests = {tensor_digest(tensor)}
    for place in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[place] += 1
        digests.add(tensor_digest(changed))
    assert len(digests) == tensor.numel() + 1
    assert tensor_digest(tensor.flip(0)) not in digests


def test_many_tensors_have_one_digest_that_each_of_them_and_their_order_changes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rl.weights.digest._JOINED_BYTES", 40)
    tensors = [torch.full((count,), float(count)) for count in (1, 3, 20, 2, 2, 5, 30)]
    digests = {tensors_digest(tensors), tensors_digest(tensors[::-1]), tensors_digest(tensors[:-1])}
    for place, tensor in enumerate(tensors):
        digests.add(tensors_digest([*tensors[:place], tensor + 1, *tensors[place + 1 :]]))
    assert len(digests) == 3 + len(tensors)
    assert tensors_digest([tensor.clone() for tensor in tensors]) == tensors_digest(iter(tensors))


def test_an_empty_tensor_has_a_digest():
    assert tensor_digest(torch.zeros(0)) == "0" * 16
