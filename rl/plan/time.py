"""Seconds of a step, from peak rates of the hardware and a few efficiencies. Arithmetic over numbers.

The efficiencies are fitted by `python -m scripts.predict_published` to the three colocated rows of a published table,
and to nothing else. What they predict beside what was published: experiments/measurements/predicted_times.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from rl.config.schema import WeightTransport
from rl.plan.memory import cache_of
from rl.plan.sizes import RunSizes, Sharing

BANDWIDTH_SHARE = 0.8
"""Of the memory's peak, when weights and cache are read to decode. Assumed."""
LINK_SHARE = 0.5
"""Of the peak between the GPUs of a node, for gathered weights and scattered gradients. Assumed."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    train_share: float
    """Of the peak bf16 rate, in forward and backward."""
    score_share: float
    """Likewise when log-probs are computed."""
    layer_s: float
    """Of one layer in one step of decoding, beside reading memory and multiplying: launches, tensor parallelism."""
    token_s: float
    """Of one token of one engine, likewise: scheduling, sampling, handing it on."""
    network_gb_s: float
    """Of one GPU between nodes, where `hardware.network_gb_s` is not known."""


FITTED = Efficiency(train_share=0.553, score_share=0.219, layer_s=7.31e-5, token_s=1.325e-4, network_gb_s=16.7)
"""tests/unit/plan/test_predicted.py fits them again."""
HALF_WITHIN, ALL_WITHIN = 1.2, 2.7
"""Factors by which the predictions of predicted_times.md miss the rows that were not fitted: the median, the worst."""
OWN_SHORTEST, OWN_LONGEST = 0.33, 2.0
"""Seconds of a step over those planned, in the runs of placements_one_gpu.md."""

PUBLISH_GB_S = {
    ("vllm", WeightTransport.ipc): 12.0,
    ("sglang", WeightTransport.ipc): 12.5,
    ("vllm", WeightTransport.bytes): 3.3,
    ("sglang", WeightTransport.bytes): 1.5,
}
"""Measured on one H200, one trainer rank, see experiments/measurements/rollout_engines.md; assumed for several ranks,
which gather each bucket first."""
OTHER_PUBLISH_GB_S = {
    WeightTransport.collective: 12.0,
    WeightTransport.disk: 0.25,
    WeightTransport.overlapped: 4.0,  # the copy to the host, which the trainer waits for; assumed
}
"""Assumed: not measured on GPUs."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds, each over one step; of a publish, its share."""

    generate: float
    """All answers of a step from first to last, where they are sampled while nobody trains; else a step's worth."""
    train: float
    """Reference and old log-probs included."""
    publish: float
    step: float
    """Less than the sum where trainer and engine work at the same time."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal, and so wide that of the answers of one publish the longest is expected to reach the limit."""

    mean: float
    limit: float
    num_answers: float

    @property
    def sigma(self) -> float:
        reach = NormalDist().inv_cdf(self.num_answers / (self.num_answers + 1))
        return reach - math.sqrt(max(reach**2 - 2 * math.log(self.limit / self.mean), 0.0))

    def quantile(self, share: float) -> float:
        """Tokens that this share of the answers does not exceed."""
        if share >= 1 - 1 / (self.num_answers + 1) or self.limit <= self.mean:
            return self.limit
        deviation = NormalDist().inv_cdf(share)
        return min(self.limit, self.mean * math.exp(deviation * self.sigma - self.sigma**2 / 2))


def predict(run: RunSizes, efficiency: Efficiency = FITTED, *, publish_s: float | None = None) -> StepTimes | None:
    """None where the hardware's peak rates are not known. `publish_s`: of one publish, instead of what is measured."""
    if run.device.bandwidth_tb_s is None or run.device.tflops is None:
        return None
    every = run.step.publish_every
    train = train_s(run, efficiency)
    publish = (publish_seconds(run) if publish_s is None else publish_s) / every
    if run.sharing is Sharing.turns:
        generate = generate_s(run, efficiency, longest_share=1.0)
        return StepTimes(generate, train, publish, generate + train + publish)
    steady = _steady_s(run, efficiency)
    if run.sharing is Sharing.together:  # one device does both: the work adds up
        return StepTimes(steady, train, publish, steady + train + publish)
    stale = min(run.step.max_staleness, 1.0)
    # The groups of one publish are there once that share of all that were admitted is finished.
    first = generate_s(run, efficiency, longest_share=1 / (1 + run.step.max_staleness), steps=every) / every
    waits = max(first, train * (every - 1) / every) + train / every
    overlaps = max(train, steady)
    step = max(overlaps, (1 - stale) * waits + stale * overlaps)
    return StepTimes(steady, train, publish, step + publish)


def generate_s(run: RunSizes, efficiency: Efficiency, *, longest_share: float, steps: int = 1) -> float:
    """Of the answers of `steps` steps, begun together, until that share of them is finished.

    First every place of the engines is taken, then the longest answer goes on alone.
    """
    step, places = run.step, _places(run, steps)
    lengths = Lengths(step.response_tokens, step.max_new_tokens, max(step.rollouts * step.publish_every, 2))
    per_engine = math.ceil(step.rollouts * steps / run.engine.count)
    full = per_engine * step.response_tokens / places
    alone = max(0.0, lengths.quantile(longest_share) - step.response_tokens)
    return full * decode_s(run, efficiency, places) + alone * decode_s(run, efficiency, 1) + _prefill_s(run, steps)


def _steady_s(run: RunSizes, efficiency: Efficiency) -> float:
    """Of one step's worth of tokens while new answers begin as old ones end."""
    step = run.step
    running = math.ceil((1 + step.max_staleness) * step.publish_every)
    places = _places(run, running)
    tokens = step.new_tokens / run.engine.count
    return tokens / places * decode_s(run, efficiency, places) + _prefill_s(run, 1)


def _places(run: RunSizes, steps: int) -> int:
    """Answers that one engine decodes at once."""
    step, cache = run.step, cache_of(run)
    per_engine = math.ceil(step.rollouts * steps / run.engine.count)
    in_cache = math.floor(cache.tokens / (step.prompt_tokens + step.response_tokens)) if cache.tokens else 1
    return max(1, min(run.engine.max_num_seqs, per_engine, in_cache))


def decode_s(run: RunSizes, efficiency: Efficiency, sequences: float) -> float:
    """One step of decoding: a token for each of so many sequences."""
    shape, engine, device = run.shape, run.engine, run.device
    assert shape.num_params is not None and device.bandwidth_tb_s is not None and device.tflops is not None
    context = run.step.prompt_tokens + run.step.response_tokens
    experts = shape.all_expert_params
    visited = 1 - (1 - shape.experts_per_token / shape.experts) ** sequences if shape.experts else 0.0
    rest = shape.num_params - experts - (0 if shape.tied_embeddings else shape.embedding_params)
    read = engine.weight_bytes * (rest + visited * experts) / engine.gpus
    per_sequence = context * shape.kv_bytes_per_token(bytes_per_element=2) / min(engine.gpus, shape.kv_heads)
    per_sequence += 2 * shape.state_bytes_per_sequence(bytes_per_element=2) / engine.gpus  # read and written
    read += sequences * per_sequence
    flops = shape.forward_flops(sequences, context) / engine.gpus
    return (
        read / (BANDWIDTH_SHARE * device.bandwidth_tb_s * 1e12)
        + flops / (efficiency.train_share * device.tflops * 1e12)
        + shape.layers * efficiency.layer_s
        + sequences * efficiency.token_s
    )


def _prefill_s(run: RunSizes, steps: int) -> float:
    """Prompts are read once a group: the engines keep what they share."""
    step, device = run.step, run.device
    assert device.tflops is not None
    tokens = step.prompts * steps * step.prompt_tokens / run.engine.count
    flops = run.shape.forward_flops(tokens, step.prompt_tokens / 2) / run.engine.gpus
    return flops / (FITTED.train_share * device.tflops * 1e12)


def train_s(run: RunSizes, efficiency: Efficiency) -> float:
    assert run.device.tflops is not None
    rate = run.trainer.ranks * run.device.tflops * 1e12
    trained = train_flops(run) / (efficiency.train_share * rate)
    scored = score_flops(run) / (efficiency.score_share * rate)
    return trained + scored + exchange_s(run, efficiency)


def train_flops(run: RunSizes) -> float:
    """Forward, backward (two of these) and, with recompute, one more forward, of all tokens of a step."""
    return (4 if run.trainer.recompute else 3) * _forward_flops(run)


def score_flops(run: RunSizes) -> float:
    """Extra forward passes: old log-probs, and those of the reference."""
    return (run.step.scored_share + run.trainer.has_reference) * _forward_flops(run)


def _forward_flops(run: RunSizes) -> float:
    sequence = run.step.prompt_tokens + run.step.response_tokens
    return run.shape.forward_flops(run.step.tokens, sequence / 2)


def exchange_s(run: RunSizes, efficiency: Efficiency) -> float:
    """Weights gathered twice in bf16 and gradients scattered in fp32 for each micro-batch; scored ones gather once."""
    trainer, step = run.trainer, run.step
    if trainer.ranks == 1:
        return 0.0
    per_update = step.tokens / step.updates / trainer.ranks
    sequences = step.rollouts / step.updates / trainer.ranks
    micro_batches = max(1, math.ceil(per_update / trainer.budget_tokens if trainer.budget_tokens else sequences))
    size = trainer.compute_bytes
    moved = (2 * size + 4) + size * (step.scored_share + trainer.has_reference)
    if trainer.is_megatron:  # weights stay; gradients of data-parallel copies are added up once an update
        moved, micro_batches = 8 * (trainer.data_ranks > 1) / trainer.tensor_parallel, 1
    idle = 0 if trainer.trains_on_images else run.trainer_tower_params
    num_bytes = step.updates * micro_batches * moved * (run.trainer_params - idle)
    return num_bytes / (_exchange_gb_s(run, efficiency) * 1e9)


def crosses_unknown_network(run: RunSizes) -> bool:
    return run.trainer.ranks > run.device.gpus_per_node and run.device.network_gb_s is None


def _exchange_gb_s(run: RunSizes, efficiency: Efficiency) -> float:
    """Of one GPU in one direction."""
    device = run.device
    if crosses_unknown_network(run):
        return efficiency.network_gb_s
    if run.trainer.ranks > device.gpus_per_node:
        assert device.network_gb_s is not None
        return LINK_SHARE * device.network_gb_s / device.gpus_per_node
    return efficiency.network_gb_s if device.link_gb_s is None else LINK_SHARE * device.link_gb_s / 2


def publish_seconds(run: RunSizes) -> float:
    """Of one publish."""
    rate = PUBLISH_GB_S.get((run.engine.name, run.transport)) or OTHER_PUBLISH_GB_S.get(run.transport, 12.0)
    return published_bytes(run) / (rate * 1e9)


def published_bytes(run: RunSizes) -> float:
    return run.trainer.compute_bytes * run.trainer_params
