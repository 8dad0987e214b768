"""Machines of a cluster: who sits where, what is refused. Joining a real one: integration/test_ray_cluster.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.assemble import claim_cluster, engine_seat
from rl.config.compose import compose_run_config
from rl.config.schema import ConfigError
from rl.placement.ray_nodes import Machine, _Answer, _check, _token, seats_on
from rl.placement.ray_runtime import Seat

EIGHT = tuple(str(gpu) for gpu in range(8))
TWO_MACHINES = [Machine("a", EIGHT), Machine("b", EIGHT)]


def devices(*gpus: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def test_ranks_fill_one_machine_after_the_other():
    seats = seats_on(TWO_MACHINES, first=0, count=12)
    assert [seat.node for seat in seats] == [0] * 8 + [1] * 4
    assert seats[9] == Seat(1, devices(1))


def test_an_engine_has_neighbouring_gpus_of_one_machine():
    assert seats_on(TWO_MACHINES, first=8, count=2, size=4) == [
        Seat(1, devices(0, 1, 2, 3)),
        Seat(1, devices(4, 5, 6, 7)),
    ]


def test_gpus_are_counted_as_numbers_and_go_by_the_machines_own_names():
    """P159: as text, 10 comes before 2."""
    machine = Machine("a", ("2", "3", "10", "11"))
    assert [seat.env for seat in seats_on([machine], first=0, count=4)] == [devices(n) for n in (2, 3, 10, 11)]


def test_without_gpus_actors_are_dealt_out_in_turn():
    machines = [Machine("a", ()), Machine("b", ())]
    assert [seat.node for seat in seats_on(machines, first=1, count=3)] == [1, 0, 1]


def test_engines_of_a_fully_async_run_sit_behind_its_ranks():
    config = compose_run_config(["placement=fully_async", "placement.trainer_ranks=2", "backend.rollout.replicas=2"])
    machines = [Machine("a", ()), Machine("b", ())]
    assert [engine_seat(config, machines, index).node for index in range(2)] == [0, 1]


MACHINE = Machine("10.0.0.2 (b)", EIGHT)


def answer(variables: dict[str, str] | None = None, *, has_token: bool = True) -> _Answer:
    return _Answer(MACHINE.address, has_token, variables or {})


def test_a_folder_that_a_machine_does_not_share_is_refused(tmp_path: Path):
    with _token(tmp_path) as token:
        assert token.is_file()
        _check(MACHINE, answer(), token)
        with pytest.raises(ConfigError, match=r"output_dir=.* is not shared: machine 10\.0\.0\.2 \(b\)"):
            _check(MACHINE, answer(has_token=False), token)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
@pytest.mark.parametrize("value", ["4,5", ",".join(EIGHT)])  # all of them: each process would have them, not its own
def test_a_variable_that_would_choose_gpus_too_is_refused_by_name(name: str, value: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"{name}={value} on machine 10\.0\.0\.2 \(b\).*Unset {name} there"):
        _check(MACHINE, answer({name: value}), tmp_path)


def test_gpus_that_ray_gives_and_the_machine_leaves_out_are_refused(tmp_path: Path):
    """Ray's count of AMD's GPUs does not read CUDA_VISIBLE_DEVICES."""
    with pytest.raises(
        ConfigError, match=r"CUDA_VISIBLE_DEVICES=4,5,6,7 on machine .* leaves out GPU\(s\) 0,1,2,3 that"
    ):
        _check(MACHINE, answer({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}), tmp_path)
    _check(Machine("a", EIGHT[4:]), answer({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}), tmp_path)  # NVIDIA's does
    _check(Machine("a", EIGHT[:2]), answer({"CUDA_VISIBLE_DEVICES": ",".join(EIGHT)}), tmp_path)


def test_several_nodes_without_a_cluster_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = compose_run_config(["hardware.nodes=2"])
    with pytest.raises(ConfigError, match=r"hardware\.nodes=2 needs a Ray cluster.*ray\.address=HOST:PORT"):
        claim_cluster(config, tmp_path)
