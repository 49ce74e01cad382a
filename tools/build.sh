#!/usr/bin/env bash
# Builds the native code and installs the package in place. HSCACHE_BUILD_CUDA=0|1 forces CUDA off or on.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
log=build/build.log
echo "-- building the native code: about a minute"
if ! .venv/bin/python -m pip --disable-pip-version-check install -v --no-build-isolation --no-deps -e . >"$log" 2>&1; then
  grep -E 'error|Error|HSCACHE|hidden_cache' "$log" | tail -n 40 >&2
  echo "the build failed; all of it stands in $log" >&2
  exit 1
fi
grep -oh 'hidden_cache: CUDA.*' "$log" | tail -n 1 | sed 's/^/-- /'
