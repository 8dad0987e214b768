"""The job script of Slurm, with programs in place of Slurm's that end what a step leaves behind, as its cgroups do.

Each node is this machine. In the fast tests Ray and the run are stand-ins, too; in the slow one both are real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import environment, with_words
from tests.integration.test_faults import words_for
from tests.integration.test_ray_cluster import free_port
from tests.processes import command_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "ray_cluster.sh")

SCONTROL = """#!/bin/sh
printf '%s\\n' $NODES
"""
SRUN = f"""#!{sys.executable}
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path

nodes = sys.argv[sys.argv.index("-w") + 1].split(",")
words = sys.argv[sys.argv.index("-w") + 2 :]

def note(what):
    with open(os.environ["STEPS"], "a") as file:
        file.write(f"{{what}} {{','.join(nodes)}}: {{' '.join(words)}}\\n")

def descendants():
    parents = {{}}
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit():
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass
    wave, found = {{os.getpid()}}, set()
    while wave:
        wave = {{child for child, parent in parents.items() if parent in wave}}
        found |= wave
    return found

def end(*signals):
    while left := descendants():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            pass
    if signals:
        note("ended")
        os._exit(143)

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what daemons leave their parents for
signal.signal(signal.SIGTERM, end)
note("begun")
tasks = [subprocess.Popen(words, env={{**os.environ, "NODE": node}}) for node in nodes]
codes = [None]
while None in codes and not (any(codes) and "--kill-on-bad-exit=1" in sys.argv):
    time.sleep(0.1)
    codes = [task.poll() for task in tasks]
end()
note("done")
sys.exit(max(abs(code or 0) for code in codes))
"""
RAY = f"""#!{sys.executable}
import os, socket, sys, time

node = os.environ["NODE"]
if node == os.environ.get("BROKEN"):
    sys.exit("no room for Ray")
if "--block" not in sys.argv and os.fork():
    sys.exit()
if "--head" in sys.argv:
    address = next(word.partition("=")[2] for word in sys.argv if word.startswith("--node-ip-address="))
    port = next(word.partition("=")[2] for word in sys.argv if word.startswith("--port="))
    listener = socket.create_server((address, int(port)))
if node != os.environ.get("LATE"):
    with open(os.environ["RAYS"], "a") as file:
        seen = [name for name in os.environ if name.endswith("_VISIBLE_DEVICES")]
        file.write(f"{{node}} {{','.join(seen)}}\\n")
time.sleep(1000)
"""
RAY_MODULE = """
import os
def init(address, **settings): ...
def nodes():
    if not os.path.exists(os.environ["RAYS"]):
        return []
    return [{"NodeManagerAddress": line.split()[0], "Alive": True} for line in open(os.environ["RAYS"])]
"""
RUN = f"""#!{sys.executable}
import os, socket, sys

address = next(word.partition("=")[2] for word in sys.argv if word.startswith("ray.address="))
host, _, port = address.partition(":")
socket.create_connection((host, int(port))).close()
assert len(os.environ["RAY_AUTH_TOKEN"]) == 64 and os.environ["RAY_AUTH_MODE"] == "token"
assert "ROCR_VISIBLE_DEVICES" not in os.environ
assert len(open(os.environ["RAYS"]).readlines()) == 3
print("run:", *sys.argv[1:])
sys.exit(7)
"""


def make_program(folder: Path, name: str, text: str) -> Path:
    """Returns the folder that has it."""
    made = folder / "bin"
    made.mkdir(exist_ok=True)
    (made / name).write_text(text)
    (made / name).chmod(0o755)
    return made


def make_stand_ins(folder: Path) -> dict[str, str]:
    """Of Ray, the command and the module; environment that has them found."""
    module = folder / "modules" / "ray"
    (module / "_private").mkdir(parents=True)
    (module / "__init__.py").write_text(RAY_MODULE)
    (module / "_private" / "__init__.py").touch()
    (module / "_private" / "authentication.py").touch()
    made = make_program(folder, "ray", RAY)
    return {
        "PATH": f"{made}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "modules"),
        "RAYS": str(folder / "rays"),
        "RL_KFD_NODES": str(folder / "kfd"),
    }


def make_gpus(folder: Path, count: int) -> None:
    """Of AMD's, as Linux lists them, after a processor."""
    for node in range(count + 1):
        (folder / "kfd" / str(node)).mkdir(parents=True)
        (folder / "kfd" / str(node) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {304 if node else 0}\n")


def own_address() -> str:
    done = subprocess.run(["bash", SCRIPT, "address"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(done.stderr)
    return done.stdout.strip()


def job_port() -> int:
    """Free, and one that a job's number can lead to."""
    while not 20000 <= (port := free_port()) < 40000:
        pass
    return port


class Job:
    """What `sbatch` runs."""

    def __init__(self, folder: Path, *, nodes: str, **changes: str) -> None:
        self.address = f"{own_address()}:{(port := job_port())}"
        make_program(folder, "scontrol", SCONTROL)
        made = make_program(folder, "srun", SRUN)
        self._steps = folder / "steps"
        settings = {
            "PATH": f"{made}:{os.environ['PATH']}",
            "NODES": nodes,
            "SLURM_JOB_NODELIST": "any",
            "SLURM_JOB_ID": str(1_000_000 + port - 20000),
            "STEPS": str(self._steps),
        }
        self._env = environment(**{**settings, **changes})

    def run(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "scripts/slurm_run.sh", *words],
            cwd=ROOT,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not self._left()
        return done

    def steps(self) -> list[str]:
        return self._steps.read_text().replace(self.address.replace(":", " "), "ADDRESS PORT").splitlines()

    def _left(self) -> list[str]:
        """Commands of living processes that are the job's."""
        mark = f"STEPS={self._steps}".encode()
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [command_of(pid) for pid in pids if mark in environ_of(pid)]


def environ_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


CLUSTER = "bash scripts/ray_cluster.sh"


def test_the_run_begins_when_every_node_has_joined_and_every_ray_lives_until_it_ends(tmp_path: Path):
    make_gpus(tmp_path, 4)
    make_program(tmp_path, "rl", RUN)
    job = Job(tmp_path, nodes="n1 n2 n3", **make_stand_ins(tmp_path), ROCR_VISIBLE_DEVICES="0,1,2,3")
    done = job.run("experiment=quickstart", "steps=2")
    assert done.returncode == 7, done.stdout + done.stderr
    assert f"run: experiment=quickstart steps=2 ray.address={job.address} hardware.nodes=3" in done.stdout
    steps = job.steps()
    run = (
        "n1: env -u HIP_VISIBLE_DEVICES -u ROCR_VISIBLE_DEVICES "
        f"rl experiment=quickstart steps=2 ray.address={job.address} hardware.nodes=3"
    )
    assert steps[:2] == [f"begun n1: {CLUSTER} address", f"done n1: {CLUSTER} address"]
    assert sorted(steps[2:5]) == [
        f"begun n1: {CLUSTER} head ADDRESS PORT --block",
        f"begun n1: {CLUSTER} wait ADDRESS PORT 3",
        f"begun n2,n3: {CLUSTER} join ADDRESS PORT --block",
    ]
    assert steps[5:8] == [
        f"done n1: {CLUSTER} wait ADDRESS PORT 3",
        f"begun {run}",
        f"done {run}",
    ]
    assert sorted(steps[8:]) == [
        f"ended n1: {CLUSTER} head ADDRESS PORT --block",
        f"ended n2,n3: {CLUSTER} join ADDRESS PORT --block",
    ]
    rays = (tmp_path / "rays").read_text().splitlines()
    assert sorted(rays) == ["n1 ", "n2 ", "n3 "]  # none with a variable that would choose devices


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_whose_ray_ends_at_once_ends_the_job_before_the_run(tmp_path: Path, node: str):
    job = Job(tmp_path, nodes="n1 n2 n3", **make_stand_ins(tmp_path), BROKEN=node)
    done = job.run("experiment=quickstart")
    assert done.returncode == 1
    assert "no room for Ray" in done.stderr
    assert "slurm_run.sh: Ray has ended on a machine before all 3 had joined" in done.stderr
    assert not any(" rl experiment" in step for step in job.steps())


def test_a_node_that_never_joins_ends_the_job_after_the_limit(tmp_path: Path):
    job = Job(tmp_path, nodes="n1 n2 n3", **make_stand_ins(tmp_path), LATE="n3", RL_CLUSTER_LIMIT_S="3")
    done = job.run("experiment=quickstart")
    assert done.returncode == 1
    assert f"after 3 s 2 of 3 machines are in the cluster at {job.address}: n1, n2" in done.stderr
    assert not any(" rl experiment" in step for step in job.steps())


def test_a_head_that_does_not_listen_is_named_after_the_limit(tmp_path: Path):
    env = environment(**make_stand_ins(tmp_path), RL_CLUSTER_LIMIT_S="1", NODE="n2")
    port = str(free_port())
    command = ["bash", SCRIPT, "join", "127.0.0.1", port]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"nothing listens on 127.0.0.1:{port} after 1 s. Start the head there" in done.stderr


@pytest.mark.parametrize(
    ("named", "own", "expected"),
    [
        ("10.0.0.7", "172.17.0.1 10.0.0.7 fd00::7", "10.0.0.7"),  # the first is that of containers, say
        ("127.0.1.1", "fd00::7 10.0.0.7", "10.0.0.7"),  # as Debian names itself
        ("203.0.113.5", "10.0.0.7", "10.0.0.7"),  # a public address that a router translates
        ("127.0.0.1", "fd00::7", None),
    ],
)
def test_the_address_of_a_head_is_an_ipv4_of_its_own_that_others_can_reach(tmp_path: Path, named, own, expected):
    make_program(tmp_path, "hostname", f'#!/bin/sh\nif [ $# -eq 0 ]; then echo n1; else echo "{own}"; fi\n')
    made = make_program(tmp_path, "getent", f'#!/bin/sh\necho "{named} STREAM n1"\n')
    env = environment(PATH=f"{made}:{os.environ['PATH']}")
    done = subprocess.run(["bash", SCRIPT, "address"], env=env, capture_output=True, text=True, check=False)
    if expected is None:
        assert done.returncode == 1
        assert "n1 has no IPv4 address but the loopback one" in done.stderr
    else:
        assert done.stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("num_gpus", "name", "value", "is_refused"),
    [
        (4, "ROCR_VISIBLE_DEVICES", "0,1,2,3", False),
        (4, "ROCR_VISIBLE_DEVICES", "0,1", True),
        (4, "HIP_VISIBLE_DEVICES", "3,2,1,0", True),
        (4, "CUDA_VISIBLE_DEVICES", "2,3", True),  # which Ray does not read there
        (4, "CUDA_VISIBLE_DEVICES", "0,1,2,3", False),
        (0, "CUDA_VISIBLE_DEVICES", "2,3", False),  # not AMD's: Ray reads it
        (0, "ROCR_VISIBLE_DEVICES", "0,1", True),
    ],
)
def test_a_variable_that_leaves_out_gpus_behind_rays_back_is_refused(
    tmp_path: Path, num_gpus: int, name: str, value: str, is_refused: bool
):
    make_gpus(tmp_path, num_gpus)
    stand_ins = make_stand_ins(tmp_path)
    made = make_program(tmp_path, "ray", "#!/bin/sh\nenv | grep VISIBLE_DEVICES\nexit 0\n")
    env = environment(**stand_ins, **{name: value}, HOME=str(tmp_path))
    assert made.is_dir()
    command = ["bash", SCRIPT, "head", "127.0.0.1", "6379"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode == 1) == is_refused, done.stderr
    if is_refused:
        assert f"{name}={value} would leave out GPUs of this machine" in done.stderr
        assert f"Unset {name}." in done.stderr
    else:
        assert (f"{name}={value}" in done.stdout) == (num_gpus == 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_two_ranks_and_an_engine_trains_on_two_real_rays_that_the_job_has_started(
    warm_model: Path, tmp_path: Path
):
    """Both on this machine, so that each step's end would end its Ray: without `--block` there is none to join."""
    folder = tmp_path / "run"
    words = with_words(words_for(warm_model, folder), "placement=fully_async", "steps=2", "evaluation.every=0")
    job = Job(tmp_path, nodes="n1 n2", RAY_TMPDIR=f"/tmp/rl-job-{os.getpid()}")
    done = job.run(*words, timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]
