"""How weights travel in a run. From the config alone, so that a plan can say it."""

from __future__ import annotations

from rl.config.replicas import engine_has_own_process, replicas_of
from rl.config.schema import ConfigError, FullyAsyncConfig, RunConfig, WeightTransport


def weight_transport(config: RunConfig) -> WeightTransport:
    """What `placement.weight_transport=auto` stands for in this run; any other value is what it says.

    Engines with devices of their own: collective, because NCCL refuses two ranks on one GPU. Each on devices that a
    trainer rank has, too: ipc. Else bytes.
    """
    chosen = config.placement.weight_transport
    if chosen is not WeightTransport.auto:
        return chosen
    if config.has_engine_devices:
        return WeightTransport.collective
    return WeightTransport.ipc if _all_devices_shared(config) else WeightTransport.bytes


def is_handed_over(config: RunConfig) -> bool:
    """Whether `ipc` is within this process, which one trainer rank and one engine that takes turns with it are in."""
    return config.placement.trainer_ranks == 1 and not engine_has_own_process(config)


def _all_devices_shared(config: RunConfig) -> bool:
    """Whether every device that an engine works on is a trainer rank's, too: there lies what it opens."""
    if config.has_engine_devices:
        return False
    if config.hardware.device == "cpu":
        return config.hardware.nodes == 1
    replicas = replicas_of(config)
    return replicas.num_groups * replicas.gpus_per_engine <= config.placement.trainer_ranks


def check_weight_transport(config: RunConfig) -> None:
    """Raises ConfigError where the devices do not allow the transport that was asked for."""
    chosen = config.placement.weight_transport
    if chosen is WeightTransport.ipc and not _all_devices_shared(config):
        raise ConfigError(
            "placement.weight_transport=ipc needs a trainer rank on every device that an engine has. Use "
            "placement=colocated, or placement.share_devices=true, with placement.trainer_ranks of at least "
            "backend.rollout.replicas x tensor_parallel, or placement.weight_transport=auto."
        )
    if chosen is WeightTransport.overlapped and not (
        isinstance(config.placement, FullyAsyncConfig) and config.hardware.nodes == 1
    ):
        raise ConfigError(
            "placement.weight_transport=overlapped needs placement=fully_async on one machine (hardware.nodes=1): the "
            "engines take the weights out of the host's memory while the trainer goes on. Use "
            "placement.weight_transport=auto."
        )
    if chosen is WeightTransport.collective and not config.has_engine_devices and config.hardware.device != "cpu":
        raise ConfigError(
            "placement.weight_transport=collective needs a GPU for each rank (NCCL refuses two on one), and here "
            "trainer and engine share theirs. Use placement=fully_async without placement.share_devices, or "
            "placement.weight_transport=auto."
        )
