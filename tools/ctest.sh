#!/usr/bin/env bash
# Builds the C++ tests in build/tests-KIND and runs them. KIND: plain, or sanitizers as in -fsanitize=.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?plain, address,undefined or thread}
folder=build/tests-${kind/,/-}
sanitize=$kind
[ "$kind" != plain ] || sanitize=
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
headers=$packages/nvidia/cu13/include
# What Python loads cannot be sanitized from within.
torch=
[ "$kind" != plain ] || torch=$packages/torch
mkdir -p "$folder"
log=$folder/build.log
if ! {
  cmake -G Ninja -S . -B "$folder" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g" \
    -DHSCACHE_BUILD_PYTHON=OFF -DHSCACHE_BUILD_TESTS=ON -DHSCACHE_BUILD_CUDA=0 \
    -DHSCACHE_SANITIZE="$sanitize" -DHSCACHE_CUDA_INCLUDE="$headers" \
    -DHSCACHE_TORCH_ROOT="$torch" -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
    -Dpybind11_DIR="$packages/pybind11/share/cmake/pybind11" &&
    cmake --build "$folder"
} >"$log" 2>&1; then
  tail -n 60 "$log" >&2
  exit 1
fi
echo "-- C++ tests ($kind)"
ctest --test-dir "$folder" --output-on-failure --no-tests=error
