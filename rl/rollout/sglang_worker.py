"""What runs inside SGLang's own processes: above all its scheduler, one per tensor-parallel rank.

`run_scheduler` takes the place of SGLang's `run_scheduler_process`; methods named `rl_...` are called by its RPC, whose
answer has room for a message alone: the answers of all ranks go there, as JSON.
"""

from __future__ import annotations

import functools
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.rollout.processes import end_with_parent
from rl.rollout.sglang_environment import SEEDED_BACKEND

if TYPE_CHECKING:
    import torch

    from rl.weights.inlet import WeightInlet


MAX_DRAWN_ELEMENTS = 2**24
"""Rows x vocabulary whose probabilities exist at once in double precision: 128 MiB a copy."""


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler's process. Its arguments differ between SGLang's versions; the first are its server arguments."""
    end_with_parent()
    from sglang.srt.managers import scheduler

    class ExtendedScheduler(SchedulerExtension, scheduler.Scheduler):
        pass

    scheduler.Scheduler = ExtendedScheduler
    # It warns of each model whose kernels this machine lacks, and the log's last lines are for what goes wrong.
    logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
    _share_no_loads()
    _report_failed_updates()
    _look_far_enough_for_stops()
    if args[0].sampling_backend == SEEDED_BACKEND:
        _seed_each_request()
    scheduler.run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """The detokenizer's process. SGLang does not wait until it has started."""
    end_with_parent()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


class SchedulerExtension:
    """Mixed into `sglang.srt.managers.scheduler.Scheduler`, whose attributes it uses."""

    tp_worker: Any
    tp_group: Any

    rl_version = -1
    rl_inlet: WeightInlet | None = None
    rl_fetched: dict[str, torch.Tensor] | None = None

    def handle_rpc_request(self, recv_req: Any) -> Any:
        if not recv_req.method.startswith("rl_"):
            return super().handle_rpc_request(recv_req)  # type: ignore[misc]
        import torch.distributed as dist
        from sglang.srt.managers.io_struct import RpcReqOutput

        try:
            answer = {"value": getattr(self, recv_req.method)(**(recv_req.parameters or {}))}
        except Exception as error:  # noqa: BLE001  # it belongs to the caller, and would end the scheduler here
            answer = {"error": f"{type(error).__name__}: {error}"}
        group = self.tp_group.cpu_group
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, answer, group=group)
        return RpcReqOutput(success=True, message=json.dumps(answers))

    @property
    def _rl_model(self) -> torch.nn.Module:
        return self.tp_worker.model_runner.model

    def rl_policy_version(self) -> int:
        return self.rl_version

    def rl_set_version(self, version: int) -> None:
        self.rl_version = version

    def rl_weight_digests(self) -> dict[str, str]:
        from rl.weights.digest import tensor_digest

        return {name: tensor_digest(parameter) for name, parameter in self._rl_model.named_parameters()}

    def rl_free_memory(self) -> tuple[int, int]:
        """Free and total bytes of this rank's device, as the device counts them."""
        import torch

        return torch.cuda.mem_get_info()

    def rl_blank_weights(self) -> None:
        """Makes every weight NaN, so that one which an update leaves out is seen.

        SGLang's loaders fill parts of fused parameters and skip names that they do not know, and report neither.
        """
        import torch

        with torch.inference_mode():
            for parameter in self._rl_model.parameters():
                if parameter.is_floating_point() and parameter.itemsize >= 2:
                    parameter.data.fill_(torch.nan)

    def rl_weight_group(self) -> str | None:
        return self._rl_inlet().group_id

    def rl_join_group(self, meeting: str, first_rank: int) -> None:
        import torch.distributed as dist

        from rl.weights.inlet import meeting_from_json

        own_rank = dist.get_rank(self.tp_group.cpu_group)
        self._rl_inlet().join(meeting_from_json(meeting), rank=first_rank + own_rank)

    def rl_fetch(self, bucket: str) -> list[tuple[str, str, list[int]]]:
        """One bucket, from wherever it is; `rl_load_fetched` puts it into the model."""
        from rl.weights.flat import specs_of
        from rl.weights.inlet import bucket_from_json

        self.rl_fetched = self._rl_inlet().fetch(bucket_from_json(bucket))
        return [(spec.name, spec.dtype, list(spec.shape)) for spec in specs_of(list(self.rl_fetched.items()))]

    def rl_load_fetched(self) -> None:
        """By the model's own loader, as `update_weights_from_tensor` does it with each bucket."""
        fetched, self.rl_fetched = self.rl_fetched, None
        assert fetched is not None, "nothing was fetched"
        model: Any = self._rl_model
        model.load_weights(list(fetched.items()))

    def _rl_inlet(self) -> WeightInlet:
        from rl.weights.inlet import WeightInlet

        if self.rl_inlet is None:
            self.rl_inlet = WeightInlet(next(self._rl_model.parameters()).device)
        return self.rl_inlet

    def rl_check_weights(self) -> None:
        """Raises ValueError if a parameter still holds a NaN somewhere."""
        import torch

        from rl.rollout.manifest_check import some

        blank = [
            name
            for name, parameter in self._rl_model.named_parameters()
            # A sum needs no copy of the parameter, and is NaN if one element is.
            if parameter.is_floating_point() and torch.isnan(parameter.sum(dtype=torch.float32))
        ]
        if blank:
            raise ValueError(
                f"{len(blank)} parameters were not loaded, or not wholly, or hold NaN in the trainer: {some(blank)}"
            )


def _share_no_loads() -> None:
    """A scheduler publishes its load in a file of /dev/shm that stays behind it. Here it goes with the temp folder."""
    from sglang.srt.managers import load_snapshot

    original = load_snapshot.shm_path_for
    load_snapshot.shm_path_for = lambda name: str(Path(tempfile.gettempdir()) / Path(original(name)).name)


def _report_failed_updates() -> None:
    """A loader that raises ends the scheduler; here it becomes the update's own failure."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    original = SchedulerWeightUpdaterManager.update_weights_from_tensor

    @functools.wraps(original)
    def update(self: Any, recv_req: Any) -> Any:
        try:
            return original(self, recv_req)
        except Exception as error:  # noqa: BLE001  # whatever the model's own loader raises
            return UpdateWeightsFromTensorReqOutput(success=False, message=f"{type(error).__name__}: {error}")

    SchedulerWeightUpdaterManager.update_weights_from_tensor = update


def _look_far_enough_for_stops() -> None:
    """SGLang decodes as many tokens as the stop string encodes to; sampled otherwise, it may be made of more."""
    from sglang.srt.managers.schedule_batch import Req

    from rl.rollout.sampler import stop_reach

    original: Callable[..., int] = Req._stop_match_tail_len

    @functools.wraps(original)
    def tail_len(self: Any, new_accepted_len: int = 1) -> int:
        stops = self.sampling_params.stop_strs
        if not stops:
            return original(self, new_accepted_len)
        return min(stop_reach(stops) + new_accepted_len - 1, len(self.output_ids))

    Req._stop_match_tail_len = tail_len


def _seed_each_request() -> None:
    """Has the sampler draw each row from its request's own seed.

    SGLang does so only together with its batch-invariant kernels (enable_deterministic_inference), which are slower and
    not needed for this. Its own draw hashes to 32 bits: up to 0.5.16 a hash of all ones, which one token of a
    vocabulary of 150,000 gets every 29,000 steps, is chosen however improbable it is.
    """
    import torch
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch_info: Any = SamplingBatchInfo
    original = batch_info.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        info = original(cls, batch, *args, **kwargs)
        if info.sampling_seed is None:
            seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.temperatures.device, non_blocking=True)
        return info

    batch_info.from_schedule_batch = classmethod(from_schedule_batch)
    sampler.multinomial_with_seed = draw_with_seed


def draw_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[n, 1] columns of `logprobs` [n, V], which need not be normalized, each row's by its own seed and position."""
    import torch

    rows_at_once = max(1, MAX_DRAWN_ELEMENTS // logprobs.shape[-1])
    draws = uniforms(seed, positions).unsqueeze(-1)
    columns = []
    for start in range(0, len(logprobs), rows_at_once):
        # Double, so that the rarest token of a large vocabulary keeps its share; the first value above the draw is
        # never one of probability 0.
        cdf = logprobs[start : start + rows_at_once].double().exp_().cumsum(-1)
        target = draws[start : start + rows_at_once] * cdf[:, -1:]
        columns.append(torch.searchsorted(cdf, target, right=True))
    return torch.cat(columns).clamp_(max=logprobs.shape[-1] - 1)


def uniforms(seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[n] in [0, 1), double: draw number `positions` of each stream by SplitMix64 (Steele et al. 2014)."""
    import torch

    def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
        return (z >> bits) & (2 ** (64 - bits) - 1)  # of a signed integer, without its sign

    z = seed.long() + (positions.long() + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return shifted(z ^ shifted(z, 31), 11).to(torch.float64) * 2.0**-53


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
