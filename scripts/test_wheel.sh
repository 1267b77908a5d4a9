#!/usr/bin/env bash
# Build the wheel and run the fast tests against it, with the source folders out of reach.
#
# The environment holds the wheel alone. Its dependencies are those of .venv, reached by a .pth
# line: Python does not read .pth files of a folder added that way, so the editable install in
# .venv stays inactive. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python
work=$PWD/build/wheel-test
rm -rf "$work" build/lib build/bdist.*
mkdir -p "$work/tree"

"$python" -m build --wheel --outdir "$work/dist" .

"$python" -m venv --without-pip "$work/venv"
wheel_python=$work/venv/bin/python
"$python" -m pip --python "$wheel_python" install --disable-pip-version-check --no-deps --no-index "$work"/dist/*.whl
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$purelib" > "$("$wheel_python" -c "$purelib")/dependencies.pth"

# Everything but the packages themselves: tests may use the examples and the documentation.
for entry in tests examples docs benchmarks scripts pyproject.toml README.md CHANGELOG.md LICENSE NOTICE Makefile constraints.txt; do
  if [ -e "$entry" ]; then cp -r "$entry" "$work/tree/"; fi
done

cd "$work/tree"
"$wheel_python" - <<'PYTHON'
import importlib
import sys

for name in ("asyncsched", "asyncsched.policies", "asyncsched.gpu"):
    path = importlib.import_module(name).__file__
    assert path is not None and path.startswith(sys.prefix), f"{name} comes from {path}, not from the wheel in {sys.prefix}"
    print(f"{name}: {path}")
PYTHON
exec "$wheel_python" -m pytest -p no:cacheprovider -m "not slow and not source_tree" "$@"
