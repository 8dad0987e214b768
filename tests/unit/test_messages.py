"""What crosses between processes comes out as it went in, its arrays as parts of one."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from rl.messages import ALIGNMENT, Parcel, opened, parcel, pickled, unpickled
from tests.made_groups import made_batch


def arrays_of(message: object) -> list[np.ndarray]:
    return [
        array
        for group in message  # type: ignore[attr-defined]
        for rollout in group.rollouts
        for array in (rollout.token_ids, rollout.loss_mask, rollout.rollout_logprobs, rollout.policy_versions)
    ]


def sent(parcel: Parcel) -> Parcel:
    """As Ray hands it out: in other memory, which may not be written to."""
    joined, lengths = parcel
    joined = joined.copy()
    joined.flags.writeable = False
    return joined, lengths


def test_a_parcel_holds_what_was_put_in():
    groups = made_batch(3, 4, seed=0)
    arrived = opened(sent(parcel((groups, "text", None))))
    assert arrived[1:] == ("text", None)
    for before, after in zip(arrays_of(groups), arrays_of(arrived[0]), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)


def test_arrays_in_a_parcel_are_parts_of_it_each_where_an_array_may_begin():
    joined, lengths = sent(parcel(made_batch(2, 3, seed=1)))
    arrays = arrays_of(opened((joined, lengths)))
    first = joined.ctypes.data
    for array in arrays:
        assert first <= array.ctypes.data < first + len(joined)
        assert (array.ctypes.data - first) % ALIGNMENT == 0
        assert not array.flags.writeable


@pytest.mark.parametrize("message", [[], np.zeros((0, 3)), np.arange(12).reshape(3, 4)[:, ::2], {"a": np.ones(())}])
def test_odd_arrays_survive(message: object):
    np.testing.assert_equal(opened(parcel(message)), message)
    np.testing.assert_equal(unpickled([bytes(frame) for frame in pickled(message)]), message)


def test_the_pickle_of_a_message_leaves_its_arrays_out():
    frames = pickled(np.zeros(100_000, np.uint8))
    assert frames[0].nbytes < 1000
    assert frames[1].nbytes == 100_000
    with pytest.raises(pickle.UnpicklingError):
        unpickled(frames[:1])
