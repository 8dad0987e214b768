"""How weights travel: chosen by where trainer and engines are, or forced."""

from __future__ import annotations

import pytest

from rl.config.check import check_devices
from rl.config.compose import compose_run_config
from rl.config.schema import ConfigError, WeightTransport
from rl.config.transport import weight_transport

CPU = ["experiment=quickstart"]
GPUS = ["experiment=quickstart", "hardware=h200x1", "hardware.gpus_per_node=4", "backend/rollout=vllm"]
ASYNC = "placement=fully_async"
TWO = "backend.rollout.replicas=2"


@pytest.mark.parametrize("machine", [CPU, GPUS])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], WeightTransport.ipc),
        ([ASYNC], WeightTransport.collective),
        ([ASYNC, TWO], WeightTransport.collective),
        ([TWO, "placement.trainer_ranks=2"], WeightTransport.ipc),
        (["backend.rollout.replicas_per_device=2"], WeightTransport.ipc),
        ([ASYNC, "placement.share_devices=true"], WeightTransport.ipc),
        (["placement.weight_transport=disk"], WeightTransport.disk),
        ([ASYNC, "placement.weight_transport=bytes"], WeightTransport.bytes),
        ([ASYNC, "placement.weight_transport=overlapped"], WeightTransport.overlapped),
    ],
)
def test_engines_apart_get_broadcasts_and_those_on_the_trainers_devices_open_its_memory(
    machine: list[str], words: list[str], expected: WeightTransport
):
    config = compose_run_config([*machine, *words])
    check_devices(config)
    assert weight_transport(config) is expected


def test_an_engine_on_a_gpu_without_a_trainer_rank_gets_bytes():
    config = compose_run_config([*GPUS, TWO])
    check_devices(config)
    assert weight_transport(config) is WeightTransport.bytes
    assert weight_transport(compose_run_config([*CPU, TWO])) is WeightTransport.ipc


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*CPU, ASYNC, "placement.weight_transport=ipc"], "ipc needs a trainer rank on every device"),
        ([*GPUS, TWO, "placement.weight_transport=ipc"], "ipc needs a trainer rank on every device"),
        ([*CPU, "placement.weight_transport=overlapped"], "overlapped needs placement=fully_async on one machine"),
        ([*GPUS, ASYNC, "placement.weight_transport=overlapped", "hardware.nodes=2"], "overlapped needs"),
        ([*GPUS, "placement.weight_transport=collective"], "collective needs a GPU for each rank"),
    ],
)
def test_a_transport_that_the_devices_do_not_allow_is_refused_with_a_remedy(words: list[str], message: str):
    with pytest.raises(ConfigError, match=f"placement.weight_transport={message}.*weight_transport=auto"):
        check_devices(compose_run_config(words))


def test_on_a_cpu_one_process_may_be_two_ranks_of_gloo():
    check_devices(compose_run_config([*CPU, "placement.weight_transport=collective"]))
