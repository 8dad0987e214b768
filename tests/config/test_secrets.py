import logging

import pytest

from rl.config.check import check_run_config
from rl.config.compose import compose_run_config
from rl.config.schema import ConfigError
from rl.config.secrets import MaskingFormatter, mask_secrets
from tests.command import with_words


def test_only_variables_whose_name_says_secret_are_masked(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2hunter2")
    monkeypatch.setenv("DB_PASSWORD", "abcd")
    monkeypatch.setenv("X_KEY", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsefalse")
    assert mask_secrets("url?t=hunter2hunter2&u=1") == "url?t=***&u=1"
    assert mask_secrets(["abcd", "p=abcd", "abcdef", "x=1", "falsefalse", 3, None]) == [
        "***", "p=***", "abcdef", "x=1", "falsefalse", 3, None,
    ]  # fmt: skip


def test_a_mode_or_a_socket_is_no_secret_though_its_name_sounds_like_one(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent.1")
    assert mask_secrets(["algorithm.correction.weights=token", "/tmp/agent.1"]) == [
        "algorithm.correction.weights=token",
        "/tmp/agent.1",
    ]


def test_passwords_in_urls_are_masked_also_percent_encoded_and_those_of_a_proxy_everywhere(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a/b c:marker")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:proxymarker@proxy:3128")
    assert mask_secrets("GET https://host/x?token=a%2Fb%20c%3Amarker&n=1") == "GET https://host/x?token=***&n=1"
    assert mask_secrets("https://someone:else@host/path") == "https://someone:***@host/path"
    assert mask_secrets("tunnel failed for proxymarker") == "tunnel failed for ***"
    assert mask_secrets("https://host:8080/a@b") == "https://host:8080/a@b"


def test_a_traceback_that_a_library_logs_is_masked(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2hunter2")
    try:
        raise OSError("401 for https://host/?token=hunter2hunter2")
    except OSError as error:
        record = logging.LogRecord("hub", logging.ERROR, "f", 1, "failed with %s", ("hunter2hunter2",), None)
        record.exc_info = (OSError, error, error.__traceback__)
    text = MaskingFormatter("%(message)s").format(record)
    assert "failed with ***" in text
    assert "token=***" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("model.path='https://host/model?token=hunter2hunter2'", "model.path"),
        ("model.path=https://me:pass@host/model", "model.path"),
        ("+hardware.rollout_env.HF_TOKEN=hunter2hunter2", "hardware.rollout_env.HF_TOKEN"),
        ("+hardware.rollout_env.hunter2hunter2=1", "hardware.rollout_env.***"),
    ],
)
def test_a_config_that_holds_a_secret_is_refused_without_saying_it(monkeypatch, word, key):
    monkeypatch.setenv("HF_TOKEN", "hunter2hunter2")
    config = compose_run_config(with_words(["experiment=quickstart", "model=hf", "model.path=x"], word))
    with pytest.raises(ConfigError, match="holds a secret") as refusal:
        check_run_config(config)
    assert str(refusal.value).startswith(f"{key} holds")
    assert "hunter2" not in str(refusal.value)
    assert "pass@" not in str(refusal.value)
