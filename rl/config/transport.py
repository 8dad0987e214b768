"""How weights travel in a run. From the config alone, so that a plan can say it."""

from __future__ import annotations

from rl.config.replicas import replicas_of
from rl.config.schema import ConfigError, FullyAsyncConfig, RunConfig, WeightTransport


def weight_transport(config: RunConfig) -> WeightTransport:
    """What `placement.weight_transport=auto` stands for in this run; any other value is what it says.

    Engines with devices of their own: collective. One engine that shares the trainer's devices lives in this process:
    ipc. Several that share them are processes apart, and NCCL refuses two ranks on one GPU: bytes.
    """
    chosen = config.placement.weight_transport
    if chosen is not WeightTransport.auto:
        return chosen
    if isinstance(config.placement, FullyAsyncConfig):
        return WeightTransport.collective
    return WeightTransport.ipc if replicas_of(config).count == 1 else WeightTransport.bytes


def check_weight_transport(config: RunConfig) -> None:
    """Raises ConfigError where the devices do not allow the transport that was asked for."""
    chosen = config.placement.weight_transport
    is_apart = isinstance(config.placement, FullyAsyncConfig)
    if chosen is WeightTransport.ipc and (is_apart or replicas_of(config).count > 1):
        raise ConfigError(
            "placement.weight_transport=ipc needs one engine, on the trainer's devices and in this process: use "
            "placement=colocated with backend.rollout.replicas=1 and replicas_per_device=1, or "
            "placement.weight_transport=auto."
        )
    if chosen is WeightTransport.collective and not is_apart and config.hardware.device != "cpu":
        raise ConfigError(
            "placement.weight_transport=collective needs a GPU for each rank (NCCL refuses two on one), and with "
            "placement=colocated trainer and engine share theirs. Use placement=fully_async, or "
            "placement.weight_transport=auto."
        )
