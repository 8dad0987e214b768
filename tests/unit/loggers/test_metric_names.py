from rl.loggers.names import METRICS, clean_key, find, is_healthy, unlisted
from rl.types import EvalResult, Sampling


def test_each_key_is_listed_once():
    keys = [metric.key for metric in METRICS]
    assert len(keys) == len(set(keys))


def test_each_listed_key_finds_its_own_entry():
    for metric in METRICS:
        example = metric.key.replace("<benchmark>", "aime24").replace("<metric>", "avg@32")
        example = example.replace("<name>", "format").replace("<reason>", "grader_error").replace("<phase>", "train")
        example = example.replace("<versions>", "2").replace("<rule>", "published").replace("<k>", "8")
        example = example.replace("<claim>", "gsm8k_peak").replace("<what>", "trainer_peak")
        assert find(example) is metric, example


def test_an_unlisted_key_is_named():
    assert unlisted(["reward/mean", "reward/meen", "time/step"]) == ["reward/meen", "time/step"]


def test_a_placeholder_stands_for_one_word():
    assert find("reward/part/format") is not None
    assert find("reward/part/") is None
    assert find("eval/gsm8k/greedy/extra/deep") is None


def test_key_of_an_eval_result_is_listed():
    result = EvalResult("arithmetic", "avg@32", 0.5, 0.01, 10, 32, Sampling(1.0, 8, 0), 3, 0.0)
    assert unlisted([result.key, f"{result.key}/stderr"]) == []


def test_names_of_a_user_are_made_into_keys_that_every_tracker_takes():
    assert clean_key("reward/part/a b/c\n") == "reward/part/a_b_c_"
    assert clean_key("eval/my set/greedy") == "eval/my_set/greedy"
    assert clean_key("eval/aime24/avg@32") == "eval/aime24/avg@32"


def test_only_a_value_outside_the_stated_range_is_unhealthy():
    assert is_healthy("mismatch/kl_k3", 0.01)
    assert not is_healthy("mismatch/kl_k3", 0.011)
    assert not is_healthy("train/skipped_updates", 1.0)
    assert is_healthy("reward/mean", -1e9)
