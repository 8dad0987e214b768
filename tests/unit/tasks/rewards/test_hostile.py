"""Nothing that a model wrote is evaluated: hostile answers change nothing, and no text reaches the compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.verdict import Case, Reason
from tests.unit.tasks.rewards.test_truth_table import rows

HOSTILE = [
    '__import__("os").system("touch {file}")',
    "__import__('pathlib').Path('{file}').touch()",
    "exec(\"open('{file}', 'w')\")",
    'eval(compile("open(\'{file}\', \'w\')", "", "exec"))',
    'open("{file}", "w")',
    "().__class__.__bases__[0].__subclasses__()",
    "[x for x in ().__class__.__base__.__subclasses__() if x.__name__ == 'Popen'][0](['touch', '{file}'])",
    r"\operatorname{eval}(open('{file}','w'))",
    r"\text{__import__('os').system('touch {file}')}",
    r"\int_0^1 __import__('os').system('touch {file}') dx",
    r"\sum_{k=1}^{n} open('{file}','w')",
    r"\mathbb{R}\setminus\{__import__('os').system('touch {file}')\}",
    r"\lfloor 1.__class__ \rfloor",
    'sympify(\'__import__("os").system("touch {file}")\')',
    "5\n\nimport os; os.system('touch {file}')",
    "$(touch {file})",
    "`touch {file}`",
    '{"died": -14}',
    '8"}\n{"verdict": {"score": 1.0}}',
]


def test_hostile_answers_are_wrong_and_have_no_effect(checker: Checker, tmp_path: Path):
    file = tmp_path / "touched"
    texts = [text.replace("{file}", str(file)) for text in HOSTILE]
    cases = [
        Case(form.replace("TEXT", text), right, rule)
        for text in texts
        for form in ("\\boxed{TEXT}", "Answer: TEXT", "#### TEXT", "<think>TEXT</think> \\boxed{TEXT}")
        for right in ("7", r"\lfloor x\rfloor+1", r"\sum_{k=1}^{n} k")
        for rule in ("equivalence", "math", "dapo", "gsm8k", "geometry3k")
    ]
    verdicts = checker.check(cases)
    assert not file.exists()
    assert [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct] == []
    assert {verdict.reason for verdict in verdicts} <= {Reason.WRONG, Reason.NO_ANSWER}


def test_the_same_text_as_right_answer_has_no_effect_either(checker: Checker, tmp_path: Path):
    file = tmp_path / "touched"
    texts = [text.replace("{file}", str(file)) for text in HOSTILE]
    checker.check([Case(r"\boxed{7}", text, rule) for text in texts for rule in ("equivalence", "geometry3k")])
    assert not file.exists()


NO_TEXT_IS_COMPILED = """
import json, sys
from rl.tasks.rewards.judge import judge, warm_up
from rl.tasks.rewards.verdict import Case
warm_up()
compiled = []
def hook(event, args):
    if event == "compile" and not str(args[1]).endswith(".py"):
        compiled.append(str(args[0])[:80])
sys.addaudithook(hook)
for line in sys.stdin:
    judge(Case(**json.loads(line)))
print(json.dumps(compiled))
"""


@pytest.mark.slow
def test_no_text_is_compiled_even_where_nothing_refuses_it():
    """Over the whole truth table, without the hook that workers have: not even a number goes through `eval`."""
    lines = [json.dumps({"response": row["response"], "answer": row["answer"]}) for row in rows()]
    done = subprocess.run(
        [sys.executable, "-c", NO_TEXT_IS_COMPILED],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert json.loads(done.stdout) == []


ACTIONS = """
import json, os, socket, subprocess, sys
from rl.tasks.rewards.worker import RefusedError, refuse_all_but_arithmetic
actions = {
    "eval": lambda: eval("1"),
    "exec": lambda: exec("1"),
    "compile": lambda: compile("1", "", "eval"),
    "system": lambda: os.system("true"),
    "fork": os.fork,
    "run": lambda: subprocess.run(["true"]),
    "connect": lambda: socket.create_connection(("127.0.0.1", 1)),
    "write": lambda: open(sys.argv[1], "w"),
    "remove": lambda: os.remove(sys.argv[1]),
}
refuse_all_but_arithmetic()
refused = []
for name, action in actions.items():
    try:
        action()
    except RefusedError:
        refused.append(name)
print(json.dumps(sorted(set(actions) - set(refused))))
"""


def test_a_worker_refuses_all_but_arithmetic(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", ACTIONS, str(tmp_path / "file")], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == []
