# make demo   the main job: a real engine, a real model, hidden states out
# make test   all tests
# make help   everything else

SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
BUILD := build/.installed
export PATH := $(CURDIR)/.venv/bin:$(PATH)

CXX_FILES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help build demo test test-fast test-cpp sanitize fuzz soak wheel test-wheel lint format bench \
	bench-gpu clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

.venv/.ready: tools/bootstrap.sh $(wildcard tools/requirements*.txt)
	@tools/bootstrap.sh
	@touch $@

$(BUILD): .venv/.ready setup.py pyproject.toml CMakeLists.txt $(CXX_FILES)
	@tools/build.sh
	@touch $@

build: $(BUILD) ## make .venv, install what is needed, build the native code

demo: $(BUILD) ## run the main job on a real engine and a real model
	@$(PY) -m demo $(ARGS)

test: $(BUILD) test-cpp sanitize fuzz ## all tests: C++ (plain, under sanitizers, fuzzed), Python, the real engine
	@HSCACHE_EXAMPLES=$${HSCACHE_EXAMPLES:-400} HSCACHE_STRESS_S=$${HSCACHE_STRESS_S:-10} \
		$(PY) -m pytest --junitxml=build/pytest.xml $(ARGS)

test-fast: $(BUILD) test-cpp ## what does not start an engine, in under two minutes
	@HSCACHE_SEEDS=$${HSCACHE_SEEDS:-40} HSCACHE_EXAMPLES=$${HSCACHE_EXAMPLES:-50} \
		$(PY) -m pytest -m "not engine" --junitxml=build/pytest-fast.xml $(ARGS)

test-cpp: .venv/.ready ## the C++ tests
	@tools/ctest.sh plain

sanitize: .venv/.ready ## the C++ tests under AddressSanitizer with UBSan, and under ThreadSanitizer
	@tools/ctest.sh address,undefined
	@tools/ctest.sh thread

fuzz: .venv/.ready ## libFuzzer on the copy plan, the same inputs each time; HSCACHE_FUZZ_SECONDS for others
	@tools/fuzz.sh $${HSCACHE_FUZZ_SECONDS:-same}

soak: $(BUILD) sanitize ## what runs long, over half an hour: hostile seeds, threads, fuzzer, store, connector; docs/soak.md
	@tools/soak.sh

wheel: $(BUILD) ## a wheel in dist/
	@rm -rf dist
	@$(PY) -m pip --disable-pip-version-check wheel -q --no-build-isolation --no-deps -w dist .
	@ls -l dist

test-wheel: wheel ## install the wheel in a bare environment and run the fast tests there
	@tools/test_wheel.sh

lint: .venv/.ready ## formatters and linters in check mode
	@clang-format --dry-run --Werror $(CXX_FILES)
	@ruff format --check -q .
	@ruff check -q .
	@mypy

format: .venv/.ready ## put the code into shape
	@clang-format -i $(CXX_FILES)
	@ruff format -q .
	@ruff check -q --fix .

bench: $(BUILD) ## benchmarks: make bench ARGS="ops --quick"
	@$(PY) -m benchmarks $(ARGS)

bench-gpu: ## on a machine with a GPU: build, tests/gpu, compute-sanitizer, figures, one table
	@$(or $(wildcard $(PY)),python3) -m benchmarks.gpu_report $(ARGS)

clean: ## remove what was built; .venv stays
	@rm -rf build dist *.egg-info hidden_cache/*.so demo-output
