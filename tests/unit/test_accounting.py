"""What became of each prompt that a run has started: found by its position, however the counts come out."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from rl.accounting import Accounting

# Of the first 10 positions 0 to 3 and 5 to 8 are settled, and 4, the oldest, is in flight with 9.
TRAINED, DROPPED, IN_FLIGHT = (0, 1, 2, 5, 7, 8), (3, 6), (9, 4)


def accounting(
    *, trained: tuple[int, ...] = TRAINED, dropped: tuple[int, ...] = DROPPED, started: int = 10
) -> Accounting:
    accounts = Accounting()
    assert [accounts.start() for _ in range(started)] == list(range(started))
    for position in trained:
        accounts.train(position)
    for position in dropped:
        accounts.drop(position, "filtered")
    return accounts


def test_what_has_overtaken_the_oldest_in_flight_is_kept_by_position_and_the_rest_as_a_limit():
    accounts = accounting()
    assert not accounts.problems(IN_FLIGHT)
    assert (accounts.trained, accounts.dropped) == (6, {"filtered": 2})
    assert (accounts.settled_below, accounts.settled_beyond) == (4, {5, 6, 7, 8})
    accounts.train(4)
    assert (accounts.settled_below, accounts.settled_beyond) == (9, set())
    assert not accounts.problems([9])


def test_a_skipped_prompt_and_a_doubled_one_are_found_though_the_counts_are_right():
    """By hand: 6 trained + 2 dropped + 2 in flight = 10 each time."""
    assert accounting().problems([9, 5]) == ["skipped: position 4", "twice: position 5"]
    assert accounting().problems([4, 2]) == ["skipped: position 9", "twice: position 2"]
    assert accounting().problems([4, 4]) == ["skipped: position 9", "twice: position 4"]
    assert accounting().problems([4, 10]) == ["skipped: position 9", "not among the first 10: position 10"]
    assert accounting().problems([4, -1]) == ["skipped: position 9", "not among the first 10: position -1"]
    assert accounting(trained=(0, 1, 2, 5, 7, 9)).problems([4, 9]) == ["skipped: position 8", "twice: position 9"]


def test_a_prompt_that_was_counted_twice_and_one_never_are_found_by_how_many_positions_are_settled():
    accounts = accounting(trained=(0, 1, 2, 5, 7))
    accounts.trained += 1  # one of them once more, instead of 8
    assert accounts.problems(IN_FLIGHT) == ["trained and dropped are 8, but of 7 positions", "skipped: position 8"]


def test_counts_that_do_not_add_up_are_told_with_the_prompts_that_are_missing():
    assert accounting(started=11).problems(IN_FLIGHT) == [
        "these are not 11, the prompts that were started",
        "skipped: position 10",
    ]
    assert accounting().problems([4]) == [
        "these are not 10, the prompts that were started",
        "skipped: position 9",
    ]
    many = accounting(started=20).problems(IN_FLIGHT)
    assert many[1] == "skipped: positions 10, 11, 12, 13, 14, 15, 16, 17, ..."


@pytest.mark.parametrize("position", [3, 7])
def test_a_prompt_cannot_be_settled_twice(position: int):
    with pytest.raises(AssertionError, match=f"{position} is settled twice"):
        accounting().train(position)
    with pytest.raises(AssertionError, match=f"{position} is settled twice"):
        accounting().drop(position, "filtered")


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_the_accounts_are_those_of_plain_sets_and_any_exchange_of_two_prompts_is_found(seed: int):
    """Random starts, batches and drops over 60 positions, through JSON each time, against sets of what was done."""
    rng = np.random.default_rng(seed)
    accounts = Accounting()
    trained: set[int] = set()
    dropped: set[int] = set()
    in_flight: list[int] = []
    while accounts.started < 60:
        in_flight += [accounts.start() for _ in range(rng.integers(1, 6))]
        for _ in range(rng.integers(0, len(in_flight) + 1)):
            position = in_flight.pop(rng.integers(len(in_flight)))
            if rng.uniform() < 0.3:
                accounts.drop(position, "filtered")
                dropped.add(position)
            else:
                accounts.train(position)
                trained.add(position)
        accounts = Accounting.from_state(json.loads(json.dumps(accounts.state())))
        settled = set(range(accounts.settled_below)) | accounts.settled_beyond
        assert (settled, accounts.trained) == (trained | dropped, len(trained))
        assert accounts.dropped == Counter({"filtered": len(dropped)} if dropped else {})
        assert accounts.settled_below not in settled and not accounts.problems(in_flight)
        for place, skipped in enumerate(in_flight):
            for doubled in {*range(accounts.started)} - {skipped}:
                exchanged = [*in_flight[:place], doubled, *in_flight[place + 1 :]]
                assert accounts.problems(exchanged) == [
                    f"skipped: position {skipped}",
                    f"twice: position {doubled}",
                ]
