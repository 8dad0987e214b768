"""Messages between the processes of a run, as bytes: a pickle, and the arrays that it leaves out as they lie in memory.

A pickle runs what it says, so nothing that comes from outside a run is ever read here.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes; of each frame in a parcel, as numpy has of its arrays."""

Parcel = tuple[NDArray[np.uint8], list[int]]
"""Frames in one array, and the bytes of each."""


def pickled(message: Any) -> list[memoryview]:
    """Frames: the pickle, then the bytes of each array."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return [memoryview(data), *(buffer.raw() for buffer in buffers)]


def unpickled(frames: Sequence[bytes | bytearray | memoryview]) -> Any:
    """Arrays lie in the frames, and can be written to if these can."""
    return pickle.loads(frames[0], buffers=frames[1:])  # noqa: S301


def parcel(message: Any) -> Parcel:
    """For Ray, which takes a few microseconds for each array of its own, and a message has some of each rollout."""
    frames = pickled(message)
    lengths = [frame.nbytes for frame in frames]
    starts = _starts(lengths)
    joined = np.empty(starts[-1], np.uint8)
    for start, frame in zip(starts, frames, strict=False):
        joined[start : start + frame.nbytes] = frame
    return joined, lengths


def opened(parcel: Parcel) -> Any:
    joined, lengths = parcel
    data = joined.data
    return unpickled([data[start : start + n] for start, n in zip(_starts(lengths), lengths, strict=False)])


def _starts(lengths: Sequence[int]) -> list[int]:
    """Of each frame, and where the last one ends."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // ALIGNMENT) * ALIGNMENT)
    return starts
