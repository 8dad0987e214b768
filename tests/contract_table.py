"""Prints which implementation passed which case of the contract suites, from pytest's JUnit files.

`python tests/contract_table.py FILE.xml ...` fails if a case of an implementation that CI can run was skipped, failed
or did not run at all, and if any other test was skipped.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

REQUIRED = {
    "test_engine_contract": {"local", "remote", "replicas", "vllm"},  # SGLang's cases are run by hand
    "test_trainer_contract": {"fsdp_one_rank", "fsdp_two_ranks", "megatron_one_rank"},
    "test_logger_contract": {"jsonl", "wandb"},
}
"""Suite -> implementations that may not be missing."""

OF_ONE_PROCESS = (
    "the_death_of_its_process_reaches_every_waiting_call",
    "the_death_of_an_idle_engine_reaches_whoever_waits_for_it",
)
NOT_APPLICABLE = {
    *(("local", case) for case in OF_ONE_PROCESS),  # it lives in the caller's process
    *(("replicas", case) for case in OF_ONE_PROCESS),  # it goes on: test_replicas.py
}
"""(implementation, case) that have no meaning."""


def skipped_tests(files: list[Path]) -> list[str]:
    """Names of all tests that were skipped, in contract suites or not."""
    cases = [case for file in files for case in ET.parse(file).getroot().iter("testcase")]
    return [f"{case.get('classname')}.{case.get('name')}" for case in cases if case.find("skipped") is not None]


def results(files: list[Path]) -> dict[str, dict[str, dict[str, str]]]:
    """suite -> implementation -> case -> outcome. Of two runs of a case the later file counts."""
    table: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            suite = case.get("classname", "").rpartition(".")[2]
            match = re.fullmatch(r"(\w+)\[(.+)\]", case.get("name", ""))
            if suite not in REQUIRED or match is None:
                continue
            name, parameters = match.groups()
            implementation = next((part for part in re.split("-", parameters) if part in REQUIRED[suite]), None)
            if implementation is None:
                continue
            rest = "-".join(part for part in parameters.split("-") if part != implementation)
            outcome = "skipped" if case.find("skipped") is not None else "ok"
            if case.find("failure") is not None or case.find("error") is not None:
                outcome = "FAILED"
            table[suite][implementation][f"{name} {rest}".strip()] = outcome
    return table


def main(paths: list[str]) -> int:
    table = results([Path(path) for path in paths])
    num_bad = 0
    for suite, required in REQUIRED.items():
        implementations = sorted(required)
        cases = sorted({case for of_one in table[suite].values() for case in of_one})
        print(f"\n{suite}: " + ", ".join(implementations))
        for case in cases:
            outcomes = [table[suite][name].get(case, "-") for name in implementations]
            print("  " + " ".join(f"{outcome:<8}" for outcome in outcomes) + case.removeprefix("test_"))
            for name, outcome in zip(implementations, outcomes, strict=True):
                is_exempt = (name, case.removeprefix("test_")) in NOT_APPLICABLE
                num_bad += outcome != "ok" and not is_exempt
        if not cases:
            print("  ran no case")
            num_bad += 1
    for name in skipped_tests([Path(path) for path in paths]):
        print(f"skipped: {name}")
        num_bad += 1
    print(f"\n{num_bad} skipped, failed or missing" if num_bad else "\nevery implementation ran and passed its cases")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
