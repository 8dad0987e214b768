#!/usr/bin/env bash
# Installs Megatron-Core into the active environment, beside the suite:
#
#     bash scripts/install_megatron.sh
#
# Without dependencies: all it needs (torch, numpy, packaging) is there, and none of them may move. Its metadata asks
# for Python 3.12, but the release has a wheel for 3.11 that runs; pip refuses it unless told to ignore the metadata.
set -euo pipefail

megatron_version=0.19.2

python=$(command -v python)
if "$python" -m pip --version >/dev/null 2>&1; then
    pip=("$python" -m pip)
else
    # An environment that uv made has no pip, and uv has no switch to ignore Requires-Python.
    pip=(uv run --no-project --with pip --python "$python" python -m pip --python "$python")
fi

"${pip[@]}" install --no-deps --ignore-requires-python "megatron-core==$megatron_version"

# Megatron-Core imports triton whatever the model. Builds of torch for GPUs bring it; those for CPUs do not.
if ! "$python" -c "import triton" 2>/dev/null; then
    "${pip[@]}" install --no-deps "triton>=3.6,<3.8"
fi

"$python" -W ignore -c "import megatron.core as m, torch; print(f'megatron-core {m.__version__}, torch {torch.__version__}: ready')"
