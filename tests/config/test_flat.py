from rl.config.flat import ABSENT, differing, flat


def test_a_key_that_one_lacks_differs_from_null():
    settings = [flat({"a": {"b": 1, "c": None}}), flat({"a": {"b": 2, "c": None}}), flat({"a": {"b": 1}})]
    assert differing(*settings) == {"a.b": (1, 2, 1), "a.c": (None, None, ABSENT)}
    assert differing(settings[0]) == differing() == {}
