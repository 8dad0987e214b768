#!/usr/bin/env bash
# Makes a virtual environment with this suite, its development tools and SGLang for CPUs, in one resolution:
#
#     bash scripts/install_sglang_cpu.sh [FOLDER]          # default .venv-sglang
#
# PYTHON names the interpreter (3.11 or 3.12; default python3). uv is taken from PATH, or installed into FOLDER.
# A folder in UV_FIND_LINKS or PIP_FIND_LINKS that holds PyTorch's CPU wheel is used; else PyTorch's own index is.
# vLLM and SGLang pin different versions of the same packages: each has an environment of its own.
set -euo pipefail

sglang_version=0.5.23
torch_version=2.13.0
triton_version=3.7.1

folder=${1:-.venv-sglang}
source "$(dirname "${BASH_SOURCE[0]}")/cpu_environment.sh"

# SGLang pins a PyTorch that this suite does not support, and 8 GB of CUDA kernels, which no CPU loads.
# torchvision and torchaudio have CUDA builds on PyPI, and a broken torchvision takes transformers down with it.
echo "torch==$torch_version+cpu" >>"$overrides"
drop cuda-python flash-attn-4 flashinfer-cubin flashinfer-python humming-kernels modelscope nvidia-cuda-nvcc \
    nvidia-cutlass-dsl nvidia-mathdx nvshmem4py-cu13 quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla \
    sglang-kernel tilelang timm torch-c-dlpack-ext torch-memory-saver torchaudio torchcodec torchvision

# One resolution, so that neither the suite nor SGLang moves a version that the other was resolved with.
# triton runs nothing here, but SGLang imports it.
"$uv" pip install --compile-bytecode --python "$folder/bin/python" "${sources[@]}" "${torch_index[@]}" \
    --overrides "$overrides" "sglang==$sglang_version" "triton==$triton_version" --editable "$root[dev]"

# SGLang and, where there is a torchvision, transformers import names from these two whatever the device is. PyPI has
# neither for CPUs, so each gets a stand-in: SGLang samples text with PyTorch's own operators; images do not work here.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for package in sgl_kernel torchvision; do
    mkdir -p "$site/$package"
    cat >"$site/$package/__init__.py" <<'PY'
"""Stand-in for a package that has no build for CPUs (scripts/install_sglang_cpu.sh made it).

Every name can be imported, from every submodule; whatever is called raises.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0+cpu.stand.in"


class _Missing(type):
    def __getattr__(cls, name):
        return _missing(cls.__module__, f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *args, **kwargs):
        raise RuntimeError(f"{cls.__module__}.{cls.__qualname__} is not installed: this is a stand-in for CPUs.")


def _missing(module, qualname, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(qualname, (), {"__module__": module})


class _Submodule(types.ModuleType):
    def __getattr__(self, name):
        return _missing(self.__name__, name, name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())


def __getattr__(name):
    return _missing(__name__, name, name)
PY
done

# What must be importable together, and the two imports that the traps above break.
SGLANG_USE_CPU_ENGINE=1 "$folder/bin/python" - <<'PY'
import warnings

warnings.simplefilter("ignore")
import sglang, torch, transformers
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import Scheduler
from transformers import Qwen3ForCausalLM

print(f"SGLang {sglang.__version__}, torch {torch.__version__}, transformers {transformers.__version__}: ready")
PY
echo "Use it with: source $folder/bin/activate"
