"""Buckets that do not pass through the driver: broadcast in a process group of their own, or as files."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from rl.protocols import BroadcastBucket, Bucket, EngineError, Meeting, RemoteBucket, StoredBucket, TensorSpec
from rl.weights.collective import PartnerLost
from rl.weights.digest import tensor_digest
from rl.weights.disk import read_bucket, remove_stale, write_bucket
from rl.weights.flat import flattened, specs_of, views
from rl.weights.inlet import WeightInlet, bucket_from_json, meeting_from_json, to_json
from rl.weights.outlet import WeightOutlet
from rl.weights.packed import pack, safetensors_bytes, unpack

CPU = torch.device("cpu")
TIMEOUT_S = 20.0
SHORT_S = 0.5


def bucket_of(seed: int) -> Bucket:
    """Every layout and width that a trainer may hold."""
    table = torch.randn(96, 40, generator=torch.Generator().manual_seed(seed))
    return [
        ("matrix", table),
        ("transposed", table.t()),
        ("every second row", table[::2]),
        ("half", table.bfloat16()[:5]),
        ("odd", table.to(torch.int8)[:1, :7]),
        ("scalar", table[0, 0]),
    ]


def assert_equal(received: dict[str, torch.Tensor], bucket: Bucket) -> None:
    assert received.keys() == {name for name, _ in bucket}
    for name, tensor in bucket:
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


class Group:
    """An outlet and two inlets, each with a thread, as they have processes in a run."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, num_inlets: int = 2) -> None:
        self.outlet = WeightOutlet(device=CPU, host="127.0.0.1")
        self.inlets = [WeightInlet(CPU) for _ in range(num_inlets)]
        self.timeout_s = timeout_s
        self._threads = [ThreadPoolExecutor(1) for _ in self.inlets]

    def form(self, *, absent: tuple[int, ...] = ()) -> tuple[Meeting, list[Future[None]]]:
        meeting = self.outlet.meet(len(self.inlets), self.timeout_s)
        told = meeting_from_json(to_json(meeting))
        joins = [
            self.on(at, self.inlets[at].join, told, rank=1 + at) for at in range(len(self.inlets)) if at not in absent
        ]
        self.outlet.join()
        return meeting, joins

    def on(self, at: int, function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        return self._threads[at].submit(function, *args, **options)

    def fetch_on_each(self, posted: RemoteBucket) -> list[Future[dict[str, torch.Tensor]]]:
        told = bucket_from_json(to_json(posted))
        return [self.on(at, inlet.fetch, told) for at, inlet in enumerate(self.inlets)]

    def close(self) -> None:
        self.outlet.drop()
        for inlet in self.inlets:
            inlet.leave()
        for thread in self._threads:
            thread.shutdown()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.close()


# Shared memory.


def test_processes_that_share_a_device_copy_equal_tensors_of_every_dtype_and_layout(group: Group):
    for seed in range(3):
        for received in group.fetch_on_each(group.outlet.share(bucket_of(seed))):
            assert_equal(received.result(), bucket_of(seed))
    group.outlet.finish()


def _digests_of(told: str) -> dict[str, str]:
    fetched = WeightInlet(CPU).fetch(bucket_from_json(told))
    return {name: tensor_digest(tensor) for name, tensor in fetched.items()}


def test_another_process_opens_a_shared_bucket_until_the_next_is_posted():
    outlet = WeightOutlet(device=CPU, host="127.0.0.1")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        told = to_json(outlet.share(bucket_of(0)))
        assert other.submit(_digests_of, told).result() == {
            name: tensor_digest(tensor) for name, tensor in bucket_of(0)
        }
        outlet.finish()
        with pytest.raises(EngineError, match="could not be opened"):
            other.submit(_digests_of, told).result()


def test_what_a_worker_copied_stays_as_it_is_when_the_trainer_posts_the_next(group: Group):
    first = [fetch.result() for fetch in group.fetch_on_each(group.outlet.share(bucket_of(0)))]
    group.outlet.share(bucket_of(1))
    for received in first:
        assert_equal(received, bucket_of(0))
    group.outlet.drop()


def test_kept_buckets_stay_whatever_is_posted_after_them_until_they_are_forgotten():
    outlet = WeightOutlet(device=CPU, host="127.0.0.1")
    kept = [to_json(outlet.keep(bucket_of(seed))) for seed in range(3)]
    outlet.share(bucket_of(7))
    outlet.drop()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        for seed, told in enumerate(kept):
            expected = {name: tensor_digest(tensor) for name, tensor in bucket_of(seed)}
            assert other.submit(_digests_of, told).result() == expected
        outlet.forget()
        with pytest.raises(EngineError, match="could not be opened"):
            other.submit(_digests_of, kept[0]).result()


def test_a_worker_on_a_device_without_a_trainer_rank_is_told_so(group: Group):
    shared = group.outlet.share(bucket_of(0))
    elsewhere = replace(shared, handles={"GPU-of-another": next(iter(shared.handles.values()))})
    with pytest.raises(EngineError, match=r"shared on GPU-of-another, and this worker is on the host .*=ipc needs"):
        group.inlets[0].fetch(elsewhere)


# Broadcasts.


def test_every_worker_receives_equal_tensors_of_every_dtype_and_layout(group: Group):
    meeting, joins = group.form()
    assert [join.result() for join in joins] == [None, None]
    assert [inlet.group_id for inlet in group.inlets] == [meeting.group_id] * 2
    for seed in range(3):
        posted = group.outlet.broadcast(bucket_of(seed))
        for received in group.fetch_on_each(posted):
            assert_equal(received.result(), bucket_of(seed))
    group.outlet.finish()


def test_a_tensor_that_is_a_bucket_of_its_own_is_sent_without_a_copy(group: Group):
    group.form()
    for bucket in ([bucket_of(0)[0]], [bucket_of(0)[1]]):
        posted = group.outlet.broadcast(bucket)
        name, tensor = bucket[0]
        sent = group.outlet._buffer
        assert sent is not None
        assert (sent.data_ptr() == tensor.data_ptr()) == tensor.is_contiguous()
        for received in group.fetch_on_each(posted):
            assert torch.equal(received.result()[name], tensor)


def test_only_one_bucket_lies_beside_the_model_and_none_afterwards(group: Group):
    """Posting the next waits for the last: a slow worker holds the trainer back, and no queue grows."""
    group.form()
    may_go_on = threading.Event()
    for at in range(2):
        group.on(at, may_go_on.wait)
    big: Bucket = [("a", torch.ones(2**22)), ("b", torch.ones(2**22))]  # 32 MiB: more than sockets hold
    fetches = group.fetch_on_each(group.outlet.broadcast(big))
    posting = ThreadPoolExecutor(1).submit(group.outlet.broadcast, bucket_of(1))
    time.sleep(0.2)
    assert not posting.done()
    may_go_on.set()
    for received in fetches:
        assert_equal(received.result(), big)
    for received in group.fetch_on_each(posting.result(TIMEOUT_S)):
        assert_equal(received.result(), bucket_of(1))
    group.outlet.finish()
    assert group.outlet._buffer is None


def test_what_a_worker_was_given_stays_as_it_is_while_the_next_bucket_comes(group: Group):
    group.form()
    first = [fetch.result() for fetch in group.fetch_on_each(group.outlet.broadcast(bucket_of(0)))]
    for received in group.fetch_on_each(group.outlet.broadcast(bucket_of(1))):
        received.result()
    for received in first:
        assert_equal(received, bucket_of(0))


def test_the_group_listens_on_the_loopback_interface_alone(group: Group):
    meeting, _ = group.form()
    assert meeting.address.startswith("127.0.0.1:")
    port = int(meeting.address.rpartition(":")[2])
    listening = {
        fields[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in (line.split() for line in Path(table).read_text().splitlines()[1:])
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
    }
    assert listening == {f"0100007F:{port:04X}"}


# Partners that are missing.


def test_a_worker_that_does_not_come_is_named_in_time_and_nobody_is_in_a_group():
    group = Group(timeout_s=SHORT_S, num_inlets=3)
    began = time.monotonic()
    with pytest.raises(PartnerLost, match=r"1 of 3 engine workers did not come .* rank\(s\) 2 of 4\. placement"):
        group.form(absent=(1,))
    assert time.monotonic() - began < 4 * SHORT_S
    group.close()
    assert [inlet.group_id for inlet in group.inlets] == [None] * 3


def test_a_worker_whose_trainer_does_not_come_says_so_in_time():
    group = Group(timeout_s=SHORT_S, num_inlets=1)
    meeting = group.outlet.meet(1, SHORT_S)
    with pytest.raises(PartnerLost, match=r"rank 1 of 2 came to 127\.0\.0\.1:\d+ .* was not formed within 0\.5 s"):
        group.inlets[0].join(meeting, rank=1)
    group.close()


@pytest.mark.parametrize("size", [2**10, 2**22])
def test_a_worker_that_does_not_take_a_bucket_is_an_error_in_time_and_a_new_group_works(size: int):
    """Of a kilobyte the socket takes everything; then it is the worker's next partner that waits, or nobody."""
    group = Group(timeout_s=SHORT_S)
    _, joins = group.form()
    for join in joins:
        join.result()
    bucket: Bucket = [("a", torch.ones(size)), ("b", torch.ones(size))]
    told = group.outlet.broadcast(bucket)
    taking = group.on(0, group.inlets[0].fetch, told)
    began = time.monotonic()
    if size == 2**22:
        with pytest.raises(PartnerLost, match=r"did not take a bucket of weights within 0\.5 s \(rank 0 of 3"):
            group.outlet.finish()
        assert group.outlet.group() is None
    assert time.monotonic() - began < 10 * SHORT_S
    group.outlet.drop()
    taking.exception(TIMEOUT_S)
    group.timeout_s = TIMEOUT_S
    first, _ = group.form()
    for received in group.fetch_on_each(group.outlet.broadcast(bucket)):
        assert_equal(received.result(), bucket)
    assert group.outlet.group() == first
    group.close()


def test_a_trainer_that_sends_nothing_is_an_error_of_the_worker_in_time():
    group = Group(timeout_s=SHORT_S, num_inlets=1)
    meeting, _ = group.form()
    told = BroadcastBucket(meeting.group_id, (TensorSpec("a", "float32", (4,)),), 16)
    with pytest.raises(PartnerLost, match=r"the trainer or another worker did not pass on .* \(rank 1 of 2"):
        group.on(0, group.inlets[0].fetch, told).result(TIMEOUT_S)
    assert group.inlets[0].group_id is None
    group.close()


def test_a_trainer_that_goes_away_is_noticed_before_the_time_is_up(group: Group):
    meeting, _ = group.form()
    told = BroadcastBucket(meeting.group_id, (TensorSpec("a", "float32", (4,)),), 16)
    waiting = group.fetch_on_each(told)
    time.sleep(0.1)
    began = time.monotonic()
    group.outlet.drop()
    for fetch in waiting:
        assert isinstance(fetch.exception(TIMEOUT_S), PartnerLost)
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_a_bucket_of_another_group_is_refused(group: Group):
    meeting, joins = group.form()
    joins[0].result()
    told = BroadcastBucket("another", (TensorSpec("a", "float32", (4,)),), 16)
    with pytest.raises(EngineError, match=f"group another, and this worker is in {meeting.group_id}"):
        group.inlets[0].fetch(told)


def test_a_group_ends_without_a_default_group_of_torch_and_beside_one():
    # In a process of its own: this one may hold the default group of a trainer that an earlier test started.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        processes.submit(broadcast_without_and_beside_a_default_group).result(60)


def broadcast_without_and_beside_a_default_group() -> None:
    import torch.distributed as dist

    group = Group()
    group.form()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for received in group.fetch_on_each(group.outlet.broadcast(bucket_of(0))):
        assert_equal(received.result(), bucket_of(0))
    assert dist.get_world_size() == 1
    group.close()
    dist.destroy_process_group()


# Files.


def test_a_stored_bucket_is_read_as_it_was_and_removed_when_the_next_one_comes(tmp_path: Path):
    group = Group()
    folder = tmp_path / "weights"
    for seed in range(3):
        posted = group.outlet.store(bucket_of(seed), str(folder))
        assert [str(path) for path in folder.iterdir()] == [posted.path]
        for received in group.fetch_on_each(posted):
            assert_equal(received.result(), bucket_of(seed))
    group.outlet.finish()
    assert list(folder.iterdir()) == []
    group.close()


def test_a_file_goes_with_a_failed_update(tmp_path: Path):
    outlet = WeightOutlet(device=CPU, host="127.0.0.1")
    outlet.store(bucket_of(0), str(tmp_path))
    outlet.drop()
    assert list(tmp_path.iterdir()) == []


def test_bytes_hold_tensors_that_are_strided_or_overlap_or_are_the_same_twice():
    table = torch.arange(24.0).reshape(4, 6)
    bucket: Bucket = [
        ("transposed", table.T),
        ("rows", table[::2]),
        ("all", table),
        ("tied", table),
        ("top", table[:2]),
    ]
    assert_equal(safetensors.torch.load(safetensors_bytes(bucket)), bucket)
    assert_equal(dict(unpack(pack(bucket))), bucket)


def test_one_flipped_bit_and_a_cut_and_a_missing_file_are_noticed(tmp_path: Path):
    posted = write_bucket(bucket_of(0), tmp_path)
    path = Path(posted.path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EngineError, match="is not what the trainer wrote"):
        read_bucket(posted)
    path.write_bytes(whole[:-1])
    with pytest.raises(EngineError, match="is not what the trainer wrote"):
        read_bucket(posted)
    path.write_bytes(whole)
    assert_equal(read_bucket(posted), bucket_of(0))
    path.unlink()
    with pytest.raises(EngineError, match=r"could not be read.*must be one that the engine's machine sees"):
        read_bucket(posted)


def test_files_of_a_run_that_was_killed_are_removed_and_no_others(tmp_path: Path):
    left = [Path(write_bucket(bucket_of(0), tmp_path).path), tmp_path / "bucket-1.part", tmp_path / "model.safetensors"]
    for path in left[1:]:
        path.touch()
    remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == left[2:]
    remove_stale(tmp_path / "never made")


def test_a_folder_that_cannot_be_written_is_named_and_holds_nothing(tmp_path: Path):
    (tmp_path / "weights").write_text("a file in the way")
    with pytest.raises(EngineError, match=f"could not be written to {tmp_path / 'weights'}"):
        write_bucket(bucket_of(0), tmp_path / "weights")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


# What travels beside them.


def test_messages_come_back_from_json_as_they_were():
    specs = (TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "float32", ()))
    for bucket in (BroadcastBucket("id", specs, 16), StoredBucket("/folder/file", "digest", 16)):
        assert bucket_from_json(to_json(bucket)) == bucket
    meeting = Meeting("id", "127.0.0.1:29500", 3, "gloo", 1.5)
    assert meeting_from_json(to_json(meeting)) == meeting
    assert meeting_from_json(to_json(replace(meeting, backend="nccl"))) != meeting


def test_the_layout_of_a_buffer_follows_from_the_specs_alone():
    bucket = bucket_of(0)
    buffer, _ = flattened(bucket, device=CPU, is_shared=False)
    assert_equal(views(buffer, specs_of(bucket)), bucket)
