# Sourced by the installers of engines for CPUs: makes the virtual environment `$folder` with PYTHON (default python3).
#
# Sets `root`, `uv`, `sources` and `torch_index` (options that let the resolver find PyTorch's CPU build, which is not on
# PyPI), and `overrides`, an empty file of what the resolver is to change; `drop PACKAGE...` adds packages to leave out.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

if uv=$(command -v uv); then
    "$uv" venv --quiet --clear --python "$python" "$folder"
else
    "$python" -m venv --clear "$folder"
    "$folder/bin/python" -m pip install --quiet uv
    uv=$folder/bin/uv
fi

places="${UV_FIND_LINKS:-} ${PIP_FIND_LINKS:-}"  # uv separates by commas, pip by spaces
sources=()
torch_index=(--torch-backend cpu)
for place in ${places//,/ }; do
    sources+=(--find-links "$place")
    if compgen -G "$place/torch-${torch_version:-*}+cpu-*.whl" >/dev/null; then torch_index=(); fi
done

overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT

drop() {
    local package
    for package in "$@"; do
        echo "$package ; sys_platform == 'never'"
    done >>"$overrides"
}
