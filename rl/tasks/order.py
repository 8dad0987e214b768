"""The endless order of training prompts, by position alone, and seeds of named streams."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def row_at(seed: int, index: int, *, num_rows: int) -> int:
    """Row at `index` of the endless order: every epoch visits each row once, in an order drawn from (seed, epoch)."""
    epoch, place = divmod(index, num_rows)
    return int(_epoch_order(seed, epoch, num_rows)[place])


@lru_cache(maxsize=4)  # groups in flight span two epochs at most
def _epoch_order(seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    return np.random.default_rng([named_seed(seed, "training order"), epoch]).permutation(num_rows)


def named_seed(seed: int, name: str) -> int:
    """Seed of a stream of its own: equal run seeds and names give equal streams, other names unrelated ones."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
