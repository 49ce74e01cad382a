#!/usr/bin/env bash
# Runs libFuzzer on the copy plan: for SECONDS, from the committed corpus and from what earlier runs found
# in build/fuzz; or with "same" on as many inputs as take a moment, the same in every run, so that a
# failure is a change's and not luck's. It takes a clang with its runtime (CLANGXX names one; on Debian, as root, it is
# installed). Without one it says so and succeeds: the C++ tests run the same target on the corpus and on
# drawn inputs.
set -euo pipefail
cd "$(dirname "$0")/.."
share=${1:?seconds or same}
folder=build/fuzz
corpus=csrc/tests/corpus/copy_plan
flags=(-std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all)
mkdir -p "$folder/corpus"

find_clang() {
  local candidate
  echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$folder/trial.cpp"
  for candidate in ${CLANGXX:-} clang++ clang++-{14..22}; do
    if "$candidate" "${flags[@]}" "$folder/trial.cpp" -o "$folder/trial" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}
clang=$(find_clang)
if [ -z "$clang" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "-- installing clang-14 libclang-rt-14-dev for the fuzzer"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    clang-14 libclang-rt-14-dev; } >"$folder/install.log" 2>&1 || true
  clang=$(find_clang)
fi
if [ -z "$clang" ]; then
  echo "-- fuzzing left out: no clang that builds with -fsanitize=fuzzer. On Debian: apt-get install clang-14" \
    "libclang-rt-14-dev; elsewhere CLANGXX names one"
  exit 0
fi
"$clang" "${flags[@]}" -Icsrc csrc/tests/fuzz_copy_plan.cpp csrc/core/copy_plan.cpp -o "$folder/copy_plan"
if [ "$share" = same ]; then
  echo "-- fuzzing the copy plan with 200,000 inputs"
  # What the code compares holds addresses, which differ from run to run: none of it goes into inputs.
  limits=(-seed=20261130 -runs=200000 -reload=0 -use_cmp=0 "$folder/none")
  rm -rf "$folder/none"
  mkdir "$folder/none"
else
  echo "-- fuzzing the copy plan for $share s"
  limits=(-max_total_time="$share" "$folder/corpus")
fi
log=$folder/copy_plan.log
if ! "$folder/copy_plan" -timeout=60 -max_len=256 -artifact_prefix="$folder/" "${limits[@]}" "$corpus" \
  >"$log" 2>&1; then
  tail -n 60 "$log" >&2
  echo "the input that failed lies in $folder; add it to $corpus once the fault is mended" >&2
  exit 1
fi
tail -n 1 "$log"
