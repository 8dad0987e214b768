"""Command lines, experiment files and run.yaml files that are wrong in one place: is each refused, and how?

    python scripts/mutate_commands.py [--count 500] [--seed 0] [--messages]

Prints a table by kind of mistake: how many were made, accepted (none may be), ended in a traceback (none may), and the
longest CPU time to the error. Every mutant goes through the functions that the command uses, in this process; the exit
code is 1 if one is accepted, is a traceback, or takes more than 3 s of CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import random
import shutil
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from rl.__main__ import saved_config
from rl.config import compose, register
from rl.config.check import RANGES, check_run_config
from rl.config.compose import compose_run_config
from rl.config.flat import flat
from rl.config.given import type_at
from rl.config.load import to_plain
from rl.config.register import GROUPS, option_names
from rl.config.schema import ConfigError, RunConfig
from rl.config.smoke import run_config
from rl.sweeps.points import expand, split_words

BASE = "experiment=quickstart"
LIMIT_S = 3.0
LOOKALIKES = str.maketrans("aceopxy", "асеорху")  # noqa: RUF001 - Cyrillic, on purpose
LONG = 100_000


@dataclasses.dataclass(frozen=True)
class Mutant:
    kind: str
    words: tuple[str, ...] = ()
    experiment: str | None = None
    """Text of an experiment file, which `words` choose."""
    run_yaml: bytes | None = None
    """Contents of the run.yaml that is resumed from."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    message: str | None
    """The refusal; None: it was accepted."""
    is_traceback: bool
    seconds: float
    """CPU."""


class Mutator:
    """Draws mutants of the quickstart's config."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.config = compose_run_config([BASE])
        self.plain = to_plain(self.config)
        self.keys = sorted(key for key in flat(self.plain) if "_target_" not in key and key != "experiment")
        self.known = set(self.keys) | {key.rpartition(".")[0] for key in self.keys}

    def of_type(self, *wanted: Any) -> list[str]:
        return [key for key in self.keys if type_at(self.config, key) in wanted]

    def enums(self) -> list[str]:
        types = {key: type_at(self.config, key) for key in self.keys}
        return [key for key, wanted in types.items() if isinstance(wanted, type) and issubclass(wanted, Enum)]

    def typo(self, word: str) -> str:
        """One letter dropped, doubled, exchanged with its neighbor, or replaced; in the last component."""
        while True:
            head, dot, leaf = word.rpartition(".")
            at = self.rng.randrange(len(leaf))
            changed = self.rng.choice(
                (
                    leaf[:at] + leaf[at + 1 :],
                    leaf[:at] + leaf[at] + leaf[at:],
                    leaf[:at] + leaf[at : at + 2][::-1] + leaf[at + 2 :],
                    leaf[:at] + self.rng.choice("abcdefghijklmnopqrstuvwxyz_") + leaf[at + 1 :],
                )
            )
            if (
                changed not in ("", leaf)
                and changed[0].isalpha()
                and f"{head}{dot}{changed}" not in self.known | set(GROUPS)
            ):
                return f"{head}{dot}{changed}"

    def no_null(self) -> list[str]:
        return [key for key in self.keys if not _takes_null(self.config, key)]

    def out_of_range(self) -> str:
        while True:
            key, rule, _ = self.rng.choice(RANGES)
            wanted = type_at(self.config, key)
            if key not in self.keys or wanted not in (int, float):
                continue
            value = self.rng.choice([-1, 0, -(10**6), -0.5, 10**30, float("nan"), float("inf"), 1.5, 2**63])
            if wanted is int and not isinstance(value, int):
                continue
            is_too_large = abs(value) == float("inf") or (isinstance(value, int) and abs(value) >= 2**63)
            if is_too_large and wanted is float and abs(value) != float("inf"):
                continue
            if is_too_large or not math.isfinite(value) or not rule(value):
                return f"{key}={value}"

    def wrong_value(self, key: str) -> Any:
        """Of another type than the key's, as YAML reads it."""
        wanted = type_at(self.config, key)
        if wanted is bool:
            return self.rng.choice([2, 0, "perhaps", [True], 1.0])
        if wanted in (int, float):
            return self.rng.choice(["many", [1], {"a": 1}, "1,5", True])
        if isinstance(wanted, type) and issubclass(wanted, Enum):
            return self.rng.choice(["no_such_choice", 3, ["a"], {"a": 1}])
        return self.rng.choice([["a", "b"], {"a": 1}] if wanted is str else ["text", 3, {"a": 1}])


def _takes_null(config: RunConfig, key: str) -> bool:
    *parents, name = key.split(".")
    node: Any = config
    for parent in parents:
        node = node[parent] if isinstance(node, dict) else getattr(node, parent)
    if not dataclasses.is_dataclass(node):
        return True
    return type(None) in typing.get_args(typing.get_type_hints(type(node))[name])


def _word(key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{key}=[{','.join(map(str, value))}]"
    if isinstance(value, dict):
        return f"{key}={{{','.join(f'{name}:{item}' for name, item in value.items())}}}"
    return f"{key}='{value}'" if isinstance(value, str) and "," in value else f"{key}={str(value).lower()}"


# ---- mistakes on the command line -------------------------------------------------------------------------------


def misspelled_key(m: Mutator) -> list[str]:
    return [f"{m.typo(m.rng.choice(m.keys))}=1"]


def added_key(m: Mutator) -> list[str]:
    key = m.rng.choice(m.keys)
    return [m.rng.choice([f"+{m.typo(key)}=1", f"++{m.typo(key)}=1", f"+{key}.new=1", f"+new_{m.rng.randrange(99)}=1"])]


def added_or_deleted_real_key(m: Mutator) -> list[str]:
    key = m.rng.choice([key for key in m.keys if not key.startswith(compose.OPEN_NODES)])
    value = flat(m.plain)[key]
    return [m.rng.choice([f"~{key}", _word(f"+{key}", value), _word(f"++{key}", value)])]


def key_without_its_group(m: Mutator) -> list[str]:
    nested = [key.rpartition(".")[2] for key in m.keys if "." in key]
    return [f"{m.rng.choice([name for name in nested if name not in m.keys])}=1"]


def wrong_option(m: Mutator) -> list[str]:
    group = m.rng.choice([*GROUPS, "backend", "experiment"])
    taken = option_names(group)
    others = [name for other in GROUPS for name in option_names(other) if name not in taken]
    real = m.rng.choice(taken)
    typo = next(word for word in iter(lambda: m.typo(real), None) if word not in taken)
    option = m.rng.choice([typo, m.rng.choice(others), f"schema_{real}", real.upper(), "null", "", "[a]", "7"])
    return [f"{group}={option}"]


def wrong_group(m: Mutator) -> list[str]:
    group = m.rng.choice(list(GROUPS))
    option = m.rng.choice(option_names(group))
    return [
        m.rng.choice([f"{m.typo(group)}={option}", f"new/{group}={option}", f"{group.replace('/', '.')}.x={option}"])
    ]


def key_of_another_option(m: Mutator) -> list[str]:
    pairs = [
        ("algorithm=gspo", "algorithm.dual_clip=3"),
        ("algorithm=grpo", "algorithm.gamma=0.9"),
        ("algorithm=rloo", "algorithm.clip_high=0.3"),
        ("algorithm=cispo", "algorithm.advantage_scale=none"),
        ("placement=colocated", "placement.in_flight=abort"),
        ("backend/rollout=local", "backend.rollout.enforce_eager=true"),
        ("backend/rollout=vllm", "backend.rollout.sampling_backend=pytorch"),
        ("backend/trainer=fsdp", "backend.trainer.tensor_parallel=2"),
        ("task=jsonl", "task.digits=2"),
        ("task=gsm8k", "task.generator=chain_sum"),
        ("logger=jsonl", "logger.project=rl"),
        ("model=hf", "model.layers=2"),
    ]
    return list(m.rng.choice(pairs))


def wrong_type(m: Mutator) -> list[str]:
    key = m.rng.choice([*m.of_type(bool, int, float), *m.enums(), "task.sampling.stop", "task.operators"])
    return [_word(key, m.wrong_value(key))]


def node_for_value(m: Mutator) -> list[str]:
    nodes = sorted({key.rpartition(".")[0] for key in m.keys if key.count(".") >= 1} - {"", *GROUPS, "backend"})
    nodes = [node for node in nodes if node.replace(".", "/") not in GROUPS]
    return [_word(m.rng.choice(nodes), m.rng.choice([3, "text", [1], True]))]


def null_for_value(m: Mutator) -> list[str]:
    return [f"{m.rng.choice(m.no_null())}=null"]


def out_of_range(m: Mutator) -> list[str]:
    return [m.out_of_range()]


def foreign_letters(m: Mutator) -> list[str]:
    key = m.rng.choice([key for key in m.keys if key.translate(LOOKALIKES) != key])
    number, enum = m.rng.choice(m.of_type(int)), m.rng.choice(m.enums())
    fullwidth = "１２"  # noqa: RUF001
    values = [f"{number}={fullwidth}", f"{number}='{fullwidth}'", f"{enum}=числа", f"{number}=1\u00a0"]
    return [m.rng.choice([f"{key.translate(LOOKALIKES)}=1", *values])]


def very_long(m: Mutator) -> list[str]:
    number, enum, key = m.rng.choice(m.of_type(int, float)), m.rng.choice(m.enums()), m.rng.choice(m.keys)
    return [
        m.rng.choice(
            [
                f"{number}={'9' * m.rng.choice([400, 5000, LONG])}",
                f"{enum}={'x' * LONG}",
                f"{key}{'x' * LONG}=1",
                f"output_dir={'x' * LONG}",
                f"output_dir=a/{'x' * 300}/b",
                f"experiment={'x' * 3000}",
                f"{'a.' * 2000}b=1",
                "task.sampling.stop=" + "[" * 500,
            ]
        )
    ]


def below_a_value(m: Mutator) -> list[str]:
    inside = ["published.claims.x.value=0.3", "published.source.url=x", "published={hardware: x}", "hydra.run.dir=x"]
    scalars = [
        key for key in m.keys if not key.startswith(compose.OPEN_NODES) and not isinstance(type_at(m.config, key), dict)
    ]
    return [m.rng.choice([*inside, f"{m.rng.choice(scalars)}.x=1", f"{m.rng.choice(scalars)}.x.y=1"])]


def not_an_override(m: Mutator) -> list[str]:
    key = m.rng.choice(m.keys)
    around = [f"{key}==1", f"{key}=[1", f"{key}={{a", f"{key} 1", f"{key}: 1", f'{key}=a b"', f"{key}=(", f"{key}=a:,"]
    return [m.rng.choice([*around, key, "", "=1", "=", f"a b={key}", "export", f"@{key}=1"])]


def several_values(m: Mutator) -> list[str]:
    key = m.rng.choice(m.of_type(int, float))
    return [f"{key}={m.rng.choice(['1,2', 'range(1,3)', 'choice(1,2)', 'glob(a*)', 'interval(0,1)', 'shuffle(1,2)'])}"]


def the_same_key_twice(m: Mutator) -> list[str]:
    key = m.rng.choice(["seed", "steps", "algorithm.group_size", "task.eval_limit", "algorithm", "placement"])
    values = ("grpo", "dapo") if key == "algorithm" else ("colocated", "fully_async") if key == "placement" else (8, 16)
    return [f"{key}={values[0]}", f"{key}={values[1]}"]


def key_that_does_nothing(m: Mutator) -> list[str]:
    return m.rng.choice(
        [
            ["stream.oversample=2"],
            ["canary.every=0", "canary.action=stop"],
            ["task.epochs=3"],
            ["clean=true"],
            ["algorithm.kl_estimator=k1"],
            ["algorithm.correction.high=3"],
            ["hardware.gpus_per_node=4"],
            ["ray.address=host:6379"],
            ["backend/rollout=vllm", "backend.rollout.memory_fraction=0.5"],
            ["task.checker.timeout_s=9"],
            ["model.path=somewhere"],
            ["model.revision=main"],
            ["mode=eval", "checkpoint.every=5"],
            ["mode=eval", "algorithm.clip_high=0.3"],
            ["mode=eval", "steps=5"],
            ["evaluation.checkpoint=run"],
        ]
    )


def contradiction(m: Mutator) -> list[str]:
    return m.rng.choice(
        [
            ["placement.max_staleness=2"],
            ["placement.publish_every=2"],
            ["algorithm.prompts_per_mini_batch=7"],
            ["algorithm.group_size=1"],
            ["algorithm.dual_clip=1.1"],
            ["algorithm.horizon=9"],
            ["stream.window=3"],
            ["checkpoint.keep_best=reward/mean"],
            ["checkpoint.keep_best=eval/arithmetic/greedy", "checkpoint.every=7"],
            ["placement=fully_async", "placement.publish_every=3"],
            ["placement=fully_async", "placement.in_flight=continue_on_new_weights"],
            ["hardware=h200x1", "placement.trainer_ranks=9"],
            ["task.sampling.temperature=0"],
            ["task.sampling.top_k=5"],
            ["model.heads=3"],
            ["task.held_out=9999"],
            ["algorithm.prompts_per_step=9000", "steps=null"],
            ["backend/trainer=megatron"],
        ]
    )


def smoke_run(m: Mutator) -> list[str]:
    name = m.rng.choice(["qwen3_8b_grpo", "qwen2_5_math_7b_dapo_colocated"])
    words = [f"experiment={name}", "smoke=cpu", f"{m.typo(m.rng.choice(m.keys))}=1"]
    without_effect = ["experiment=qwen2_5_math_7b_dapo_colocated", "smoke=cpu", "algorithm.kl_estimator=k2"]
    others = ["smoke=gpu", "smoke=", "+smoke=cpu", "smoke=cpu,gpu", "smoke.cpu=1"]
    replaced = ["steps=7", "backend/rollout=vllm", "algorithm.group_size=8", "hardware=h200x1", "logger=wandb"]
    return m.rng.choice(
        [words, without_effect, ["smoke=cpu"], [words[0], m.rng.choice(others)], [*words[:2], m.rng.choice(replaced)]]
    )


def sweep(m: Mutator) -> list[str]:
    key, number = m.rng.choice(m.keys), m.rng.choice(m.of_type(int))
    of_sweep = ["sweep.jobs=0", "sweep.jobs=1,2", "sweep.jbos=2", "sweep.launcher=lsf", "clean=true", "output_dir=a,b"]
    of_points = ["seed=1,1", "algorithm=glob(x*)", "seed=interval(0,1)", "mode=train,plan", "algorithm=grpo,drgrpo"]
    mistyped = [f"{m.typo(key)}=1,2", f"{number}=1,many", f"{m.out_of_range()},1", "seed=range(3,1)", "smoke=cpu"]
    return ["-m", m.rng.choice([*of_sweep, *of_points, *mistyped])]


# ---- mistakes in files ------------------------------------------------------------------------------------------

HEAD = "# @package _global_\n"


def _edited(m: Mutator, node: dict[str, Any], key: str, edit: Callable[[dict[str, Any], str], None]) -> dict[str, Any]:
    copy = yaml.safe_load(yaml.safe_dump(node))
    *parents, name = key.split(".")
    below = copy
    for parent in parents:
        below = below.setdefault(parent, {})
    edit(below, name)
    return copy


def _in_experiment(m: Mutator) -> dict[str, Any]:
    return yaml.safe_load((register.package_folder("experiments") / "quickstart.yaml").read_text(encoding="utf-8"))


def experiment_key(m: Mutator) -> str:
    key = m.typo(m.rng.choice(m.keys))
    return HEAD + yaml.safe_dump(_edited(m, _in_experiment(m), key, lambda node, name: node.update({name: 1})))


def experiment_type(m: Mutator) -> str:
    key = m.rng.choice([*m.of_type(bool, int, float), *m.enums()])
    value = m.wrong_value(key)
    return HEAD + yaml.safe_dump(_edited(m, _in_experiment(m), key, lambda node, name: node.update({name: value})))


def experiment_null(m: Mutator) -> str:
    key = m.rng.choice(m.no_null())
    return HEAD + yaml.safe_dump(_edited(m, _in_experiment(m), key, lambda node, name: node.update({name: None})))


def experiment_defaults(m: Mutator) -> str:
    node = _in_experiment(m)
    entry = m.rng.randrange(len(node["defaults"]))
    ((group, option),) = node["defaults"][entry].items()
    node["defaults"][entry] = m.rng.choice(
        [{m.typo(group): option}, {group: m.typo(option)}, {group: 7}, 7, m.typo(group)]
    )
    return HEAD + yaml.safe_dump(node)


def experiment_text(m: Mutator) -> str:
    text = (register.package_folder("experiments") / "quickstart.yaml").read_text(encoding="utf-8")
    return m.rng.choice(
        [
            text + "steps: 9\n",
            text + "experiment: other\n",
            text.replace("algorithm:\n", "algorithm:\n\tx: 1\n"),
            text + "seed: [1\n",
            "- 1\n- 2\n",
            "just words\n",
            text + "model:\n  revision: 007\n",
            text + "stream:\n  oversample: 3.0\n",
            text + "сеед: 1\n",
            text + f"output_dir: {'x' * LONG}\n",
        ]
    )


def run_yaml_key(m: Mutator) -> bytes:
    key = m.typo(m.rng.choice(m.keys))
    return yaml.safe_dump(_edited(m, m.plain, key, lambda node, name: node.update({name: 1}))).encode()


def run_yaml_type(m: Mutator) -> bytes:
    key = m.rng.choice([*m.of_type(bool, int, float), *m.enums()])
    value = m.wrong_value(key)
    return yaml.safe_dump(_edited(m, m.plain, key, lambda node, name: node.update({name: value}))).encode()


def run_yaml_null(m: Mutator) -> bytes:
    key = m.rng.choice(
        [*m.no_null(), "model", "algorithm", "backend", "task", "placement", "logger", "backend.rollout"]
    )
    return yaml.safe_dump(_edited(m, m.plain, key, lambda node, name: node.update({name: None}))).encode()


def run_yaml_target(m: Mutator) -> bytes:
    node = m.rng.choice(["model", "algorithm", "backend.trainer", "backend.rollout", "task", "placement", "logger"])
    others = ["os.system", "rl.gone.Gone", "", "x", "rl.types.Prompt", "rl.placement.colocated.Nothing", 5, None, ["a"]]
    value = m.rng.choice(others)
    return yaml.safe_dump(_edited(m, m.plain, f"{node}._target_", lambda n, name: n.update({name: value}))).encode()


def run_yaml_text(m: Mutator) -> bytes:
    text = yaml.safe_dump(m.plain, sort_keys=False)
    return m.rng.choice(
        [
            b"",
            text.encode()[: m.rng.randrange(20, len(text) // 2)],
            text.encode() + b"seed: 5\n",
            text.encode() + b"\xff\xfe\x00",
            m.rng.randbytes(200),
            b"- 1\n",
            b"3\n",
            text.replace("seed: 0", f"seed: {'9' * 5000}").encode(),
            text.replace("seed: 0", "seed: !!python/object/apply:os.getcwd []").encode(),
            text.replace("seed: 0", "seed: *gone").encode(),
            text.replace("mode: train", "mode: eval").encode(),
        ]
    )


COMMANDS = (
    misspelled_key,
    added_key,
    added_or_deleted_real_key,
    key_without_its_group,
    wrong_option,
    wrong_group,
    key_of_another_option,
    wrong_type,
    node_for_value,
    null_for_value,
    out_of_range,
    foreign_letters,
    very_long,
    below_a_value,
    not_an_override,
    several_values,
    the_same_key_twice,
    key_that_does_nothing,
    contradiction,
    smoke_run,
    sweep,
)
EXPERIMENTS = (experiment_key, experiment_type, experiment_null, experiment_defaults, experiment_text)
RUN_YAMLS = (run_yaml_key, run_yaml_type, run_yaml_null, run_yaml_target, run_yaml_text)


def mutants(count: int, *, seed: int) -> Iterator[Mutant]:
    """Each kind in turn."""
    m = Mutator(random.Random(seed))
    makers = (*COMMANDS, *EXPERIMENTS, *RUN_YAMLS)
    for index in range(count):
        make = makers[index % len(makers)]
        kind = make.__name__.replace("_", " ")
        if make in EXPERIMENTS:
            yield Mutant(kind, ("experiment=mutant",), experiment=make(m))  # type: ignore[arg-type]
        elif make in RUN_YAMLS:
            yield Mutant(kind, run_yaml=make(m))  # type: ignore[arg-type]
        else:
            words = make(m)
            has_experiment = any(str(word).startswith("experiment=") for word in words)
            yield Mutant(kind, tuple(words) if has_experiment else (BASE, *words))  # type: ignore[arg-type]


def judge(mutant: Mutant, files: Path) -> Verdict:
    """`files`: a folder with copies of conf/ and experiments/, which `own_files` has the config read."""
    began = time.process_time()
    is_traceback, message = False, None
    try:
        if mutant.run_yaml is not None:
            (files / "run").mkdir(exist_ok=True)
            (files / "run" / "run.yaml").write_bytes(mutant.run_yaml)
            check_run_config(saved_config(files / "run"))
        else:
            if mutant.experiment is not None:
                (files / "experiments" / "mutant.yaml").write_text(mutant.experiment, encoding="utf-8")
            _read_command(list(mutant.words))
    except ConfigError as error:
        message = str(error)
    except Exception:  # noqa: BLE001 - what this script is for: an error that is none of ours is a failure to report
        is_traceback, message = True, traceback.format_exc()
    finally:
        (files / "experiments" / "mutant.yaml").unlink(missing_ok=True)
    return Verdict(mutant, message, is_traceback, time.process_time() - began)


def _read_command(words: list[str]) -> None:
    if "-m" in words:
        expand(split_words([word for word in words if word != "-m"])[2])
    else:
        run_config(words)


@contextlib.contextmanager
def own_files() -> Iterator[Path]:
    """A copy of conf/ and experiments/, read instead of the real ones."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        for part in ("conf", "experiments"):
            shutil.copytree(register.package_folder(part), Path(name) / part)
        for module in (compose, register):
            stack.enter_context(mock.patch.object(module, "package_folder", lambda part: Path(name) / part))
        yield Path(name)


def is_bad(verdict: Verdict) -> bool:
    return verdict.message is None or verdict.is_traceback or verdict.seconds > LIMIT_S


def table(verdicts: Sequence[Verdict]) -> str:
    lines = ["| kind | made | accepted | tracebacks | longest, CPU s |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(verdict.mutant.kind for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.mutant.kind == kind]
        accepted, crashed = sum(v.message is None for v in own), sum(v.is_traceback for v in own)
        lines.append(f"| {kind} | {len(own)} | {accepted} | {crashed} | {max(v.seconds for v in own):.2f} |")
    return "\n".join(lines)


def shown(verdict: Verdict) -> str:
    mutant = verdict.mutant
    is_file = mutant.run_yaml is not None or mutant.experiment is not None
    message = verdict.message or "ACCEPTED"
    part = message[-1500:] if verdict.is_traceback else message[:300]
    return f"{mutant.kind}: {'a file' if is_file else ' '.join(mutant.words)[:120]}\n    {part}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--messages", action="store_true", help="print every message, too")
    arguments = parser.parse_args()
    with own_files() as files:
        verdicts = [judge(mutant, files) for mutant in mutants(arguments.count, seed=arguments.seed)]
    bad = [verdict for verdict in verdicts if is_bad(verdict)]
    for verdict in verdicts if arguments.messages else bad:
        print(shown(verdict))
    print(table(verdicts))
    print(f"{len(verdicts)} mutants, {len(bad)} of them accepted, a traceback or slower than {LIMIT_S:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
