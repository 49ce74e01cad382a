#!/usr/bin/env bash
# What runs long. On the executables of `make sanitize`: HSCACHE_SEEDS seeds of the hostile streams and
# HSCACHE_STRESS_S seconds of threads on one store under either sanitizer, then the fuzzer for
# HSCACHE_FUZZ_SECONDS. In Python: the store, HSCACHE_EXAMPLES sequences beside its model and as many
# seconds under threads; the connector, HSCACHE_REPLAYS of each order of calls on the fake GPU, and
# HSCACHE_REQUESTS random requests in a real engine. The last result stands in docs/soak.md.
set -uo pipefail
cd "$(dirname "$0")/.."
export HSCACHE_SEEDS=${HSCACHE_SEEDS:-100000} HSCACHE_STRESS_S=${HSCACHE_STRESS_S:-60}
export HSCACHE_EXAMPLES=${HSCACHE_EXAMPLES:-5000} HSCACHE_REQUESTS=${HSCACHE_REQUESTS:-500}
replays=${HSCACHE_REPLAYS:-5000}
fuzz_seconds=${HSCACHE_FUZZ_SECONDS:-600}
rows=()
status=0

# NAME SHARE COMMAND...: runs it, and keeps a line for the table.
stage() {
  local name=$1 share=$2 start=$SECONDS outcome=passed
  shift 2
  echo "-- $name: $share"
  if ! "$@" 2>&1 | tee build/soak.log; then
    outcome=FAILED
    status=1
  elif grep -q 'left out' build/soak.log; then
    outcome='left out: no clang'
  fi
  rows+=("| $name | $share | $((SECONDS - start)) | $outcome |")
}

seeds=hostile_streams.no_byte_is_wrong_under_any_schedule
stage "hostile streams, AddressSanitizer and UBSan" "$HSCACHE_SEEDS seeds" \
  build/tests-address-undefined/csrc/tests/cuda_tests "$seeds"
stage "hostile streams, ThreadSanitizer" "$HSCACHE_SEEDS seeds" \
  build/tests-thread/csrc/tests/cuda_tests "$seeds"
stage "threads on one store, AddressSanitizer and UBSan" "$HSCACHE_STRESS_S s" \
  build/tests-address-undefined/csrc/tests/core_tests store_stress.
stage "threads on one store, ThreadSanitizer" "$HSCACHE_STRESS_S s" \
  build/tests-thread/csrc/tests/core_tests store_stress.
stage "copy plan, libFuzzer" "$fuzz_seconds s" tools/fuzz.sh "$fuzz_seconds"
pytest=(.venv/bin/python -m pytest -q --timeout 7200)
stage "store beside its model" "$HSCACHE_EXAMPLES sequences" \
  "${pytest[@]}" tests/property/test_store_model.py
stage "store, 8 threads" "$HSCACHE_STRESS_S s" \
  "${pytest[@]}" tests/unit/test_store_rows.py -k many_threads
stage "connector replayed on the fake GPU" "$replays seeds of each order" \
  env HSCACHE_SEEDS="$replays" "${pytest[@]}" tests/unit/vllm/test_replay.py
stage "connector in a real engine" "$HSCACHE_REQUESTS requests" \
  "${pytest[@]}" tests/integration/test_row_ownership.py

{
  echo "# The last long run"
  echo
  echo "\`make soak\` at $(git rev-parse --short HEAD 2>/dev/null || echo 'no commit'), $(date -u +%Y-%m-%d), $(nproc) CPU cores."
  echo
  echo "| what | share | seconds | outcome |"
  echo "|---|---|---|---|"
  printf '%s\n' "${rows[@]}"
} >docs/soak.md
cat docs/soak.md
exit $status
