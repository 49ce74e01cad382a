#!/usr/bin/env bash
# Installs dist/*.whl into a new environment that has torch and pytest only, and runs the fast tests
# against it, away from the source tree.
set -euo pipefail
cd "$(dirname "$0")/.."
bare=$(mktemp -d)
trap 'rm -rf "$bare"' EXIT
torch=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch").split("+")[0])')
"${PYTHON:-python3}" -m venv "$bare/venv"
pip() { "$bare/venv/bin/python" -m pip --disable-pip-version-check -q "$@" 2> >(grep -v '^WARNING: Location' >&2); }
pip install "torch==$torch" numpy
pip install "$(ls dist/*.whl)[test]"
cp -r tests benchmarks demo pyproject.toml "$bare/"
cd "$bare"
venv/bin/python -m pytest -q -m "not engine" -p no:cacheprovider
