"""What is said about the Megatron trainer without Megatron-Core."""

from __future__ import annotations

import sys

import pytest

from rl.config.build import build
from rl.config.check import check_megatron
from rl.config.schema import ConfigError, MegatronConfig


@pytest.mark.parametrize("package", ["megatron", "triton"])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, package):
    for name in list(sys.modules):
        if name.split(".")[0] in (package, "megatron") or name == "rl.trainer.megatron_trainer":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    if package == "triton":  # Megatron-Core is there, and imports a triton that is not
        monkeypatch.setattr(sys, "meta_path", [_MegatronThatNeedsTriton(), *sys.meta_path])
    with pytest.raises(ConfigError, match=rf"needs the package '{package}'.*scripts/install_megatron\.sh"):
        build(MegatronConfig())


class _MegatronThatNeedsTriton:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron":
            import triton  # noqa: F401  # pyright: ignore[reportMissingImports]


@pytest.mark.parametrize(
    ("tensor_parallel", "num_ranks", "device", "message"),
    [
        (2, 1, "cuda", r"backend\.trainer\.tensor_parallel=2.*not there yet"),
        (1, 2, "cuda", r"placement\.trainer_ranks=2.*not there yet"),
        (1, 1, "cpu", r"hardware\.device=cpu.*GPUs only"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(tensor_parallel, num_ranks, device, message):
    with pytest.raises(ConfigError, match=message):
        check_megatron(MegatronConfig(tensor_parallel=tensor_parallel), num_ranks=num_ranks, device=device)


def test_one_gpu_is_accepted():
    check_megatron(MegatronConfig(), num_ranks=1, device="cuda")
