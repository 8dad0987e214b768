"""Children that only sleep: the queue is about when they start and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rl.config.compose import compose_run_config
from rl.config.schema import ConfigError, RunConfig
from rl.sweeps import devices
from rl.sweeps.devices import Slots, slots_for, visible_gpus
from rl.sweeps.queue import Job, Queue
from tests.command import environment
from tests.processes import is_alive, wait_until

ON_CPU = compose_run_config(["experiment=quickstart"])
GPU_WORDS = ["experiment=quickstart", "hardware=h200x1", "hardware.gpus_per_node=8"]


def on_gpus(*words: str) -> RunConfig:
    return compose_run_config([*GPU_WORDS, *words])


def jobs_of(folder: Path, labels: list[str], config: RunConfig = ON_CPU) -> list[Job]:
    jobs = [Job(folder / f"{index:03d}", [], label, config) for index, label in enumerate(labels)]
    for job in jobs:
        job.folder.mkdir()
    return jobs


def sleeping(job: Job) -> list[str]:
    code = "import os, sys, time; print(os.environ.get('CUDA_VISIBLE_DEVICES')); time.sleep(float(sys.argv[1]))"
    return [sys.executable, "-S", "-c", code, job.label]


def test_the_next_point_starts_when_one_ends_not_when_all_have(tmp_path: Path):
    ends: list[tuple[str, int]] = []
    queue = Queue(
        jobs_of(tmp_path, ["3.0", "0.2", "3.0", "0.2"]),
        Slots(2, None),
        on_end=lambda job, code: ends.append((job.folder.name, code)),
        command=sleeping,
    )
    began = time.monotonic()
    assert queue.run()
    assert time.monotonic() - began < 5.5  # waves of two would take 6
    assert ends[0][0] == "001"
    assert {code for _, code in ends} == {0}


def test_what_a_point_prints_is_kept_and_shown_with_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def command(job: Job) -> list[str]:
        return [sys.executable, "-S", "-c", f"print('says {job.label}'); raise SystemExit(3)"]

    ends: list[int] = []
    jobs = jobs_of(tmp_path, ["a", "b"])
    Queue(jobs, Slots(2, None), on_end=lambda _job, code: ends.append(code), command=command).run()
    assert ends == [3, 3]
    assert [(job.folder / "console.log").read_text() for job in jobs] == ["says a\n", "says b\n"]
    assert "[000] says a\n" in (shown := capsys.readouterr().out) and "[001] says b\n" in shown


def test_no_two_points_share_a_gpu_and_a_large_one_is_not_overtaken():
    slots = Slots(8, ["0", "1", "2"])
    one, two = on_gpus(), on_gpus("placement=fully_async")
    assert (one.num_gpus_used, two.num_gpus_used) == (1, 2)
    assert Slots(1, None).take(ON_CPU) == []
    assert slots.take(two) == ["0", "1"]
    assert slots.take(two) is None
    assert slots.take(one) == ["2"]
    assert slots.take(one) is None
    slots.give_back(["0", "1"])
    assert slots.take(one) == ["0"]


def test_each_child_sees_only_its_gpus(tmp_path: Path):
    jobs = jobs_of(tmp_path, ["0.3", "0.3"], on_gpus())
    Queue(jobs, Slots(2, ["4", "6"]), on_end=lambda _job, _code: None, command=sleeping).run()
    assert [(job.folder / "console.log").read_text() for job in jobs] == ["4\n", "6\n"]


def test_gpus_are_those_of_the_variable_or_all_that_the_kernel_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus(tmp_path) == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(tmp_path) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]
    amd = tmp_path / "amd"
    for node, gpu_id in enumerate(("0", "51234", "51235", "51236")):  # node 0 is the CPU
        (folder := amd / f"sys/class/kfd/kfd/topology/nodes/{node}").mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
    assert visible_gpus(amd) == ["0", "1", "2"]


def test_more_jobs_than_gpus_are_refused_with_the_number_that_fits(monkeypatch: pytest.MonkeyPatch):
    for name in devices.OTHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    two = on_gpus("placement=fully_async")
    assert slots_for([two, two], None).jobs == 4
    with pytest.raises(
        ConfigError, match=r"sweep\.jobs=3: points of 2 GPU\(s\) each, and there are 4\..*sweep\.jobs=2"
    ):
        slots_for([two, two], 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"needs 2 GPU\(s\), and this machine shows 1"):
        slots_for([two], None)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"HIP_VISIBLE_DEVICES is set"):
        slots_for([two], None)
    assert slots_for([ON_CPU], None).jobs == 1
    assert slots_for([ON_CPU], 3).jobs == 3


DRIVER = """
import sys
from pathlib import Path
from rl.config.compose import compose_run_config
from rl.sweeps.child import stop_with_parent
from rl.sweeps.devices import Slots
from rl.sweeps.queue import Job, Queue
import os

CHILD = '''
import os, signal, sys, time
from rl.sweeps.child import stop_with_parent
signal.signal(signal.SIGINT, lambda *_: (print("saved", flush=True), sys.exit(130)))
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(130)))
stop_with_parent(int(sys.argv[1]))
print("pid", os.getpid(), flush=True)
time.sleep(60)
'''
config = compose_run_config(["experiment=quickstart"])
jobs = [Job(Path(sys.argv[1]) / name, [], name, config) for name in ("000", "001", "002")]
for job in jobs:
    job.folder.mkdir()
ends = lambda job, code: print("end", job.folder.name, code, flush=True)
done = Queue(jobs, Slots(2, None), on_end=ends,
             command=lambda job: [sys.executable, "-c", CHILD, str(os.getpid())]).run()
print("all started", done, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_children_save_and_end_with_the_sweep_however_it_ends(tmp_path: Path, number: signal.Signals):
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(Path(__file__).parents[3])),
        start_new_session=True,
    )

    def pids() -> list[int]:
        logs = [tmp_path / name / "console.log" for name in ("000", "001")]
        lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
        return [int(line.split()[1]) for line in lines if line.startswith("pid")]

    wait_until(lambda: len(pids()) == 2, "two children run")
    children = pids()
    os.killpg(driver.pid, number)
    output, _ = driver.communicate(timeout=30)
    wait_until(lambda: not any(is_alive(pid) for pid in children), "no child is left", timeout_s=20)
    for name in ("000", "001"):
        assert (tmp_path / name / "console.log").read_text().splitlines()[-1] == "saved"  # once: a second would kill
    assert not (tmp_path / "002" / "console.log").exists()
    if number is not signal.SIGKILL:
        assert output.count("130") == 2 and "all started False" in output
