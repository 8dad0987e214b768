"""Texts as processes of torch, Ray, NCCL, gloo and Linux leave them, and what is said of them first (P155)."""

from __future__ import annotations

import errno

import pytest

from rl.faults import FaultClass, classify, headline, host_oom_kills

RAY_DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: _RankHost
\tpid: 31261
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was \
killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed \
unexpectedly due to SIGSEGV or another unexpected error. If the problem persists, see the logs."""

RAY_DEATH_WITH = RAY_DEATH.replace(
    "Worker unexpectedly exits with a connection error code 2. End of file.", "Worker exits unexpectedly. {}"
)

RAY_TASK_ERROR = """\x1b[36mray::_RankHost.call()\x1b[39m (pid=31430, ip=127.0.0.1, actor_id=0c4a, repr=<_RankHost>)
           ^^^^^^^^^^^^^^^^^^^^
  File "/home/me/rl/trainer/group.py", line 17, in call
    def imp(self): import not_there_at_all
                   ^^^^^^^^^^^^^^^^^^^^^^^
{}"""

NCCL_TIMEOUT = (
    "[rank1]:[E1201 17:30:24.414 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=6, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds "
    "before timing out."
)
GLOO_TIMEOUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for "
    "recv operation to complete"
)
GLOO_CLOSED = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:9646. This is typically caused by a remote worker crashing."
)
CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 1.20 GiB is free."
)
SEGV_LOG = (
    ":actor_name:_RankHost",
    "*** SIGSEGV received at time=1796146218 on cpu 1 ***",
    "PC: @     0x7f5fa4985ad8  (unknown)  (unknown)",
    "Fatal Python error: Segmentation fault",
    "",
    '  File "/home/me/step.py", line 11 in segv',
)
RAY_MEMORY_MONITOR = (
    "Task was killed due to the node running low on memory. Memory on the node (IP: 10.0.0.4, ID: ab) where the task "
    "was running was 60.97GB / 62.00GB (0.983), which exceeds the memory usage threshold of 0.95."
)

TABLE = [
    (CUDA_OOM, (), FaultClass.GPU_MEMORY, "2.00 GiB"),
    (CUDA_OOM.replace("CUDA", "HIP"), (), FaultClass.GPU_MEMORY, "HIP out of memory"),
    (RAY_TASK_ERROR.format(CUDA_OOM), (), FaultClass.GPU_MEMORY, "torch.OutOfMemoryError"),
    ("RuntimeError: CUDA error: out of memory", (), FaultClass.GPU_MEMORY, "CUDA error"),
    (RAY_DEATH, (CUDA_OOM, *SEGV_LOG[-1:]), FaultClass.GPU_MEMORY, "2.00 GiB"),
    (RAY_MEMORY_MONITOR, (), FaultClass.HOST_MEMORY, "60.97GB / 62.00GB"),
    ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12 (Cannot "
     "allocate memory)", (), FaultClass.HOST_MEMORY, "DefaultCPUAllocator"),
    (RAY_DEATH, ("terminate called after throwing 'std::bad_alloc'", "*** SIGABRT received at time=1 ***"),
     FaultClass.HOST_MEMORY, "bad_alloc"),
    ("OSError: [Errno 28] No space left on device: '/out/step/x'", (), FaultClass.DISK, "/out/step/x"),
    (RAY_TASK_ERROR.format("OSError: [Errno 122] Disk quota exceeded"), (), FaultClass.DISK, "quota"),
    (RAY_TASK_ERROR.format("ModuleNotFoundError: No module named 'vllm'"), (), FaultClass.IMPORT, "'vllm'"),
    (RAY_DEATH, ("ImportError: libcudart.so.12: cannot open shared object file",), FaultClass.IMPORT, "libcudart"),
    (GLOO_TIMEOUT, (), FaultClass.COLLECTIVE_TIMEOUT, "4000ms"),
    (RAY_DEATH, (NCCL_TIMEOUT, "*** SIGABRT received at time=1796146224 on cpu 1 ***"),
     FaultClass.COLLECTIVE_TIMEOUT, "OpType=ALLREDUCE"),
    ("torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cpu//0", (),
     FaultClass.COLLECTIVE_TIMEOUT, "600000ms"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", (), FaultClass.GPU, "illegal"),
    (RAY_DEATH, ("Memory access fault by GPU node-2 (Agent handle: 0x55) on address 0x7f. Reason: Unknown.",
     "*** SIGABRT received at time=1 ***"), FaultClass.GPU, "GPU node-2"),
    ("EngineError: process 7 of the engine was killed: it has not answered for 25 s: it hangs.", (),
     FaultClass.HANG, "25 s"),
    (RAY_DEATH, SEGV_LOG, FaultClass.SIGNAL, "SIGSEGV"),
    (RAY_DEATH_WITH.format("Worker exits with an exit code 1. The process receives a SIGTERM."), (),
     FaultClass.SIGNAL, "SIGTERM"),
    ("the scheduler ended with exit code -9", (), FaultClass.SIGNAL, "-9"),
    (RAY_DEATH, (":actor_name:_RankHost",), FaultClass.SIGNAL, "SIGKILL"),
    (RAY_DEATH, ("WARNING ImportError: no flash_attn, falling back", "loaded"), FaultClass.SIGNAL, "SIGKILL"),
    (RAY_DEATH, ("ImportError: no flash_attn", "falling back to eager"), FaultClass.SIGNAL, "SIGKILL"),
    (RAY_DEATH_WITH.format("Worker exits with an exit code 3."), (), FaultClass.EXIT, "exit code 3"),
    (GLOO_CLOSED, (), FaultClass.PEER, "Connection closed by peer"),
    (RAY_TASK_ERROR.format("ValueError: shapes differ"), (), FaultClass.ERROR, "ValueError: shapes differ"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "lines", "fault_class", "evidence"), TABLE)
def test_an_end_has_one_class_and_a_line_that_says_so(reason, lines, fault_class, evidence):
    fault = classify(reason, lines)
    assert fault.fault_class is fault_class
    assert evidence in fault.evidence
    assert "\n" not in str(fault) and len(fault.evidence) < 310


def test_a_death_without_a_trace_is_the_hosts_doing_where_its_kernel_has_counted_one():
    assert classify(RAY_DEATH, has_host_killed=True).fault_class is FaultClass.HOST_MEMORY
    assert classify(RAY_DEATH, SEGV_LOG, has_host_killed=True).fault_class is FaultClass.SIGNAL


def test_the_kernels_count_of_such_ends_can_be_read():
    kills = host_oom_kills()
    assert kills is None or kills >= 0


def test_a_headline_names_the_class_once():
    full = OSError(errno.ENOSPC, "No space left on device")
    assert headline(full) == "no space left on the disk: OSError: [Errno 28] No space left on device"
    named = RuntimeError(f"rank 1 of the trainer failed in step: {classify(RAY_DEATH)}")
    assert headline(named) == f"RuntimeError: {named}"
    assert headline(ValueError("7 is odd")) == "ValueError: 7 is odd"
