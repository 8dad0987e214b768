"""How weights travel in a run. From the config alone, so that a plan can say it."""

from __future__ import annotations

from rl.config.replicas import engine_has_own_process
from rl.config.schema import ConfigError, RunConfig, WeightTransport


def weight_transport(config: RunConfig) -> WeightTransport:
    """What `placement.weight_transport=auto` stands for in this run; any other value is what it says.

    Engines with devices of their own: collective. One engine that takes turns with the trainer lives in this process:
    ipc. Others are processes apart that share its devices, and NCCL refuses two ranks on one GPU: bytes.
    """
    chosen = config.placement.weight_transport
    if chosen is not WeightTransport.auto:
        return chosen
    if config.has_engine_devices:
        return WeightTransport.collective
    return WeightTransport.bytes if engine_has_own_process(config) else WeightTransport.ipc


def check_weight_transport(config: RunConfig) -> None:
    """Raises ConfigError where the devices do not allow the transport that was asked for."""
    chosen = config.placement.weight_transport
    if chosen is WeightTransport.ipc and engine_has_own_process(config):
        raise ConfigError(
            "placement.weight_transport=ipc needs one engine, on the trainer's devices and in this process: use "
            "placement=colocated with backend.rollout.replicas=1 and replicas_per_device=1, or "
            "placement.weight_transport=auto."
        )
    if chosen is WeightTransport.collective and not config.has_engine_devices and config.hardware.device != "cpu":
        raise ConfigError(
            "placement.weight_transport=collective needs a GPU for each rank (NCCL refuses two on one), and here "
            "trainer and engine share theirs. Use placement=fully_async without placement.share_devices, or "
            "placement.weight_transport=auto."
        )
