"""From graded groups to the micro-batches of each rank. Pure numpy, on the driver; knows no algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.config.schema import Packing
from rl.types import BoolArray, FloatArray, IntArray, LossCounts, MicroBatch, Prompt, Rollout, RolloutGroup, TrainBatch


@dataclass(frozen=True, slots=True)
class _Sequence:
    rollout: Rollout
    prompt: Prompt
    staleness: int
    loss_mask: BoolArray
    """[L]"""
    length: int
    """L"""
    num_loss_tokens: int = 0
    group_loss_tokens: int = 0

    @property
    def has_advantage(self) -> bool:
        rollout = self.rollout
        if rollout.token_advantages is None:
            return rollout.advantage != 0.0
        return bool(rollout.token_advantages[self.loss_mask].any())


def pack(
    groups: Sequence[RolloutGroup],
    *,
    prompts_per_mini_batch: int | None,
    num_ranks: int,
    max_tokens_per_micro_batch: int,
    packing: Packing,
    policy_version: int,
    skip_zero_advantage: bool,
) -> TrainBatch:
    """Splits groups into mini-batches in order, balances each over ranks by tokens and packs micro-batches.

    `policy_version` is the trainer's current published version. `skip_zero_advantage` leaves rollouts of advantage 0
    out of the forward pass; they still count in the denominators. Right only where the loss of such a token has a zero
    gradient, so not with a KL or entropy term. Rollouts without a loss token are always left out.
    """
    per_update = prompts_per_mini_batch or len(groups)
    assert len(groups) % per_update == 0, f"{len(groups)} groups do not split into mini-batches of {per_update}"
    by_group = [_sequences(group, policy_version) for group in groups]
    batch = TrainBatch(mini_batches=[], loss_counts=[], metrics=_metrics(groups, by_group, policy_version))
    for start in range(0, len(groups), per_update):
        sequences = [sequence for of_group in by_group[start : start + per_update] for sequence in of_group]
        trained = [sequence for sequence in sequences if sequence.num_loss_tokens > 0]
        batch.loss_counts.append(
            LossCounts(
                tokens=sum(sequence.num_loss_tokens for sequence in trained),
                sequences=len(trained),
                groups=len({sequence.rollout.group_id for sequence in trained}),
            )
        )
        run = [sequence for sequence in trained if not skip_zero_advantage or sequence.has_advantage]
        bins = _bins(run, num_ranks, max_tokens_per_micro_batch, packing)
        batch.mini_batches.append(_micro_batches(bins, fallback=min(sequences, key=_length)))
    return batch


def _length(sequence: _Sequence) -> int:
    return sequence.length


def _sequences(group: RolloutGroup, policy_version: int) -> list[_Sequence]:
    """A token whose log-prob the engine did not give as a number is not trained on, and in no denominator."""
    masks = [rollout.loss_mask & np.isfinite(rollout.rollout_logprobs) for rollout in group.rollouts]
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    total = sum(counts)
    return [
        _Sequence(rollout, group.prompt, policy_version - rollout.min_policy_version, mask, len(mask), count, total)
        for rollout, mask, count in zip(group.rollouts, masks, counts, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Rollouts packed for a forward pass alone."""

    micro_batches: list[list[MicroBatch]]
    """[dp_rank][micro], equally many on every rank, filled up by all-masked ones."""
    places: list[list[list[int]]]
    """[dp_rank][micro] -> which rollouts are packed in it, in order; none for a filler."""

    def unpack(self, logprobs: Sequence[Sequence[FloatArray]]) -> list[FloatArray]:
        """[dp_rank][micro] of [T] -> [rollout] of [L], 0 where its `loss_mask` is False."""
        unpacked: dict[int, FloatArray] = {}
        for micro_batches, places_of_rank, values_of_rank in zip(
            self.micro_batches, self.places, logprobs, strict=True
        ):
            for micro, places, values in zip(micro_batches, places_of_rank, values_of_rank, strict=True):
                if places:
                    masked = np.where(micro.loss_mask, values, np.float32(0.0))
                    unpacked.update(zip(places, np.split(masked, micro.cu_seqlens[1:-1]), strict=True))
        return [unpacked[place] for place in range(len(unpacked))]


def pack_to_score(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    *,
    num_ranks: int,
    max_tokens_per_micro_batch: int,
    packing: Packing,
) -> ScoreBatch:
    """`prompts[i]` is that of `rollouts[i]`. Balanced and packed as `pack` does it."""
    sequences = [
        _Sequence(rollout, prompt, 0, rollout.loss_mask, len(rollout.loss_mask))
        for prompt, rollout in zip(prompts, rollouts, strict=True)
    ]
    place_of = {id(sequence): place for place, sequence in enumerate(sequences)}
    bins = _bins(sequences, num_ranks, max_tokens_per_micro_batch, packing)
    places = [[[place_of[id(sequence)] for sequence in packed] for packed in of_rank] for of_rank in bins]
    return ScoreBatch(_micro_batches(bins, fallback=sequences[0]), places)


def _bins(sequences: list[_Sequence], num_ranks: int, max_tokens: int, packing: Packing) -> list[list[list[_Sequence]]]:
    """[dp_rank][micro] -> the sequences packed in it, equally many on every rank; none where a filler must stand.

    Micro-batch number i runs the same modules on every rank: those with images come first and text alone follows. A
    rank without images would otherwise not run the vision tower, whose collectives the others wait in.
    """
    kinds = [sequences]
    if num_ranks > 1:
        kinds = [[s for s in sequences if bool(s.prompt.mm_inputs) is has_images] for has_images in (True, False)]
    ranks: list[list[list[_Sequence]]] = [[] for _ in range(num_ranks)]
    for kind in kinds:
        shares = [list(_split(share, max_tokens, packing)) for share in _balance(kind, num_ranks)]
        most = max(len(share) for share in shares)
        for rank, share in zip(ranks, shares, strict=True):
            rank.extend([*share, *([] for _ in range(most - len(share)))])
    return ranks


def _micro_batches(bins: list[list[list[_Sequence]]], *, fallback: _Sequence) -> list[list[MicroBatch]]:
    """[dp_rank][micro], at least one for each rank: a filler of `fallback` where nothing is run."""
    ranks = [[_micro_batch(packed) if packed else None for packed in of_rank] for of_rank in bins]
    if not ranks[0]:
        return [[_masked(_micro_batch([fallback]))] for _ in ranks]
    fillers = [
        _masked(min((micro for micro in at_once if micro is not None), key=lambda micro: len(micro.token_ids)))
        for at_once in zip(*ranks, strict=True)
    ]
    return [[filler if micro is None else micro for micro, filler in zip(rank, fillers, strict=True)] for rank in ranks]


def _masked(micro: MicroBatch) -> MicroBatch:
    """A filler: runs what `micro` runs, images included, and adds to nothing."""
    return replace(
        micro,
        loss_mask=np.zeros_like(micro.loss_mask),
        advantages=np.zeros_like(micro.advantages),
        rollout_logprobs=np.zeros_like(micro.rollout_logprobs),
    )


def _balance(sequences: list[_Sequence], num_ranks: int) -> list[list[_Sequence]]:
    """Longest first, each to the rank with the fewest tokens so far: largest load within 4/3 of the best."""
    shares: list[list[_Sequence]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for sequence in sorted(sequences, key=_length, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(sequence)
        loads[rank] += sequence.length
    return shares


def _split(share: list[_Sequence], max_tokens: int, packing: Packing) -> Iterator[list[_Sequence]]:
    """First fit of sequences sorted by falling length; equal lengths stay neighbors, which attention makes use of."""
    if packing is Packing.one_sequence:
        yield from ([sequence] for sequence in share)
        return
    bins: list[list[_Sequence]] = []
    room: list[int] = []
    for sequence in share:
        length = sequence.length
        place = next((i for i, left in enumerate(room) if left >= length), None)
        if place is None:
            bins.append([])
            room.append(max_tokens)
            place = len(bins) - 1
        bins[place].append(sequence)
        room[place] -= length
    yield from bins


def _micro_batch(sequences: list[_Sequence]) -> MicroBatch:
    rollouts = [sequence.rollout for sequence in sequences]
    lengths = np.array([sequence.length for sequence in sequences], dtype=np.int64)
    cu_seqlens = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    loss_mask = np.concatenate([sequence.loss_mask for sequence in sequences])
    assert not loss_mask[cu_seqlens[:-1]].any(), "the first token of a sequence has no prediction"
    return MicroBatch(
        token_ids=np.concatenate([r.token_ids for r in rollouts]),
        cu_seqlens=cu_seqlens,
        prompt_lengths=np.array([len(s.prompt.token_ids) for s in sequences], dtype=np.int32),
        loss_mask=loss_mask,
        advantages=_on_mask(loss_mask, _advantages(rollouts, lengths)),
        rollout_logprobs=_on_mask(loss_mask, np.concatenate([r.rollout_logprobs for r in rollouts])),
        temperatures=np.array([r.temperature for r in rollouts], dtype=np.float32),
        staleness=np.array([sequence.staleness for sequence in sequences], dtype=np.int32),
        group_loss_tokens=np.array([sequence.group_loss_tokens for sequence in sequences], dtype=np.int32),
        position_ids=_join_position_ids(sequences),
        mm_inputs=_join_mm_inputs([sequence.prompt.mm_inputs for sequence in sequences]),
    )


def _on_mask(loss_mask: BoolArray, values: FloatArray) -> FloatArray:
    """`values`, changed in place: 0 elsewhere, also where a log-prob is not finite."""
    np.copyto(values, np.float32(0.0), where=~loss_mask)
    return values


def _advantages(rollouts: Sequence[Rollout], lengths: NDArray[np.int64]) -> FloatArray:
    """[T]"""
    of_answers = np.repeat(np.array([rollout.advantage for rollout in rollouts], dtype=np.float32), lengths)
    for rollout, end in zip(rollouts, lengths.cumsum(), strict=True):
        if rollout.token_advantages is not None:
            of_answers[end - len(rollout.token_advantages) : end] = rollout.token_advantages
    return of_answers


def _join_position_ids(sequences: list[_Sequence]) -> IntArray | None:
    """[3, T] if any sequence has multimodal positions; text counts alike in all three. None if all are text."""
    if all(sequence.prompt.position_ids is None for sequence in sequences):
        return None
    return np.concatenate([_position_ids(sequence) for sequence in sequences], axis=1)


def _position_ids(sequence: _Sequence) -> IntArray:
    """[3, L]. The response follows the largest position of the prompt, which need not be its last."""
    of_prompt = sequence.prompt.position_ids
    if of_prompt is None:
        return np.broadcast_to(np.arange(sequence.length, dtype=np.int32), (3, sequence.length))
    num_response = sequence.length - of_prompt.shape[1]
    of_response = np.arange(num_response, dtype=np.int32) + of_prompt.max() + 1
    return np.concatenate([of_prompt, np.broadcast_to(of_response, (3, num_response))], axis=1, dtype=np.int32)


def _join_mm_inputs(inputs: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    names = {name for of_sequence in inputs for name in of_sequence}
    return {name: np.concatenate([i[name] for i in inputs if name in i]) for name in sorted(names)}


STALENESS_BINS = ("count_0", "count_1", "count_2", "count_3", "count_4_or_more")


def _staleness_histogram(staleness: NDArray[np.int64]) -> dict[str, float]:
    """Rollouts by staleness, of one per version; the last bin holds the rest."""
    counts = np.bincount(staleness.clip(max=len(STALENESS_BINS) - 1), minlength=len(STALENESS_BINS))
    return {f"staleness/{name}": count for name, count in zip(STALENESS_BINS, counts, strict=True)}


def _num_distinct(group: RolloutGroup) -> int:
    return len({rollout.token_ids.tobytes() for rollout in group.rollouts})


def batch_metrics(groups: Sequence[RolloutGroup], *, policy_version: int) -> dict[str, float]:
    """Statistics over every rollout of the batch, run or skipped."""
    return _metrics(groups, [_sequences(group, policy_version) for group in groups], policy_version)


def _metrics(
    groups: Sequence[RolloutGroup], by_group: Sequence[Sequence[_Sequence]], policy_version: int
) -> dict[str, float]:
    sequences = [sequence for of_group in by_group for sequence in of_group]
    rollouts = [sequence.rollout for sequence in sequences]
    rewards = np.concatenate([group.rewards for group in groups])
    lengths = np.array([rollout.num_response_tokens for rollout in rollouts])
    staleness = np.array([sequence.staleness for sequence in sequences])
    newest = np.array([rollout.max_policy_version for rollout in rollouts])
    spread = newest - (policy_version - staleness)
    discarded = np.array([rollout.num_discarded_tokens for rollout in rollouts])
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/shaped_mean": np.mean([rollout.shaped_reward for rollout in rollouts]),
        "reward/uniform_group_fraction": np.mean([group.is_uniform for group in groups]),
        "rollout/response_tokens_mean": lengths.mean(),
        "rollout/response_tokens_max": lengths.max(),
        "rollout/truncated_fraction": np.mean([rollout.is_truncated for rollout in rollouts]),
        "rollout/duplicate_fraction": 1 - sum(_num_distinct(group) for group in groups) / len(rollouts),
        "staleness/mean": staleness.mean(),
        "staleness/max": staleness.max(),
        "rollout/mixed_version_fraction": np.mean(spread > 0),
        "rollout/version_spread_max": spread.max(),
        "rollout/restarted_fraction": np.mean(discarded > 0),
        "rollout/discarded_tokens": discarded.sum(),
        "rollout/nonfinite_logprobs": lengths.sum() - sum(sequence.num_loss_tokens for sequence in sequences),
    }
    metrics |= _staleness_histogram(staleness)
    if rollouts[0].ref_logprobs is not None:
        gaps = [(r.rollout_logprobs - r.ref_logprobs)[r.loss_mask] for r in rollouts if r.ref_logprobs is not None]
        metrics["reward/kl_ref"] = np.concatenate(gaps).mean()
    for part in sorted({name for rollout in rollouts for name in rollout.reward_parts}):
        key = "reward/correct" if part == "correct" else f"reward/part/{part}"
        metrics[key] = np.mean([r.reward_parts[part] for r in rollouts if part in r.reward_parts])
    return {key: float(value) for key, value in metrics.items()}
