from __future__ import annotations

import pytest

from rl.config.tasks import ArithmeticConfig, EvalSamplingConfig, SamplingConfig
from rl.tasks.arithmetic import Arithmetic
from rl.tasks.order import named_seed, row_at


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own():
    """P118: the order has no end at which anybody could wait."""
    epochs = [[row_at(7, epoch * 10 + place, num_rows=10) for place in range(10)] for epoch in range(6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_a_position_alone_decides_the_row():
    forward = [row_at(3, index, num_rows=50) for index in range(500)]
    backward = [row_at(3, index, num_rows=50) for index in reversed(range(500))]
    assert forward == backward[::-1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_dealt_out_to_ranks_nothing_is_lost_and_nothing_is_twice(num_ranks):
    shares = [[row_at(1, index, num_rows=10) for index in range(rank, 10, num_ranks)] for rank in range(num_ranks)]
    assert sorted(row for share in shares for row in share) == list(range(10))


def test_a_resumed_order_goes_on_where_it_stopped():
    whole = [row_at(5, index, num_rows=7) for index in range(30)]
    assert [*whole[:11], *(row_at(5, index, num_rows=7) for index in range(11, 30))] == whole


def test_a_single_row_is_an_order():
    assert [row_at(0, index, num_rows=1) for index in range(5)] == [0] * 5


def test_other_run_seeds_give_other_orders():
    orders = {tuple(row_at(seed, index, num_rows=20) for index in range(20)) for seed in range(5)}
    assert len(orders) == 5


def test_named_streams_are_stable_and_differ():
    assert named_seed(0, "training order") == named_seed(0, "training order")
    assert len({named_seed(seed, name) for seed in range(3) for name in ("a", "b")}) == 6
    assert 0 <= named_seed(0, "a") < 2**63


def test_a_task_serves_prompts_by_position(renderer):
    sampling = {"sampling": SamplingConfig(max_new_tokens=3), "eval_sampling": EvalSamplingConfig(max_new_tokens=3)}
    config = ArithmeticConfig(digits=1, held_out=20, validation=0, warm_start=0, **sampling)
    first, second = (Arithmetic(config, renderer=renderer, seed=0) for _ in range(2))
    served = [first.prompt(0, index).prompt_id for index in range(160)]
    assert [second.prompt(0, index).prompt_id for index in reversed(range(160))] == served[::-1]
    ids = sorted(prompt.prompt_id for prompt in first.training)
    assert sorted(served[:80]) == sorted(served[80:]) == ids and served[:80] != served[80:]
