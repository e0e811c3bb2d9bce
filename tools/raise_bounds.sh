#!/usr/bin/env bash
# Tries other releases of the dependencies than those of the lock, in an environment of its own, .uv/other:
#   bash tools/raise_bounds.sh newest     ignores the upper bounds of pyproject.toml, and runs the tests of private names
#   bash tools/raise_bounds.sh lowest     takes the lowest release that pyproject.toml allows of each, and runs these and
#                                         the tests of `test.sh --quick`; `test.sh --all` runs it
# More arguments are pytest's. A bound is raised, or a floor changed, in pyproject.toml when the tests pass.

source "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" || exit
cd -- "$root" || exit
case "${1-}" in
    newest) options=(--upgrade) tests=(tests/runs/test_private.py tests/runs/test_startup.py) ;;
    lowest) options=(--resolution lowest-direct) tests=(tests/runs/test_private.py -W ignore) ;;  # old releases warn of new ones
    *) sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
kind=$1 other=$work/other asked=$work/asked
shift
uv=$root/.venv/bin/uv
rm -rf -- "$other" "$asked" && mkdir -p -- "$asked" || exit
# Of what is installed, the tests read pyproject.toml alone; without upper bounds for the newest.
if [ "$kind" = newest ]; then
    sed -E 's/(>=[0-9.]+),<[0-9.]+/\1/' pyproject.toml >"$asked/pyproject.toml"
else
    cp pyproject.toml "$asked/"
fi
"$uv" venv --quiet --python "$python" "$other" || exit
"$uv" pip install --quiet --python "$other/bin/python" "${options[@]}" --compile-bytecode --extra dev \
    -r "$asked/pyproject.toml" 2> >(tee "$asked/errors" >&2) ||
    { grep -q 'No solution found' "$asked/errors" && exit 1; exit 3; }
"$uv" pip list --python "$other/bin/python" 2>/dev/null |
    grep -E '^(torch|torchvision|torchmetrics|pytorch-lightning|mlflow|deepspeed|ray|submitit|optuna|omegaconf|flask|werkzeug|onnxruntime|onnxscript) '
pytest() { PYTHONPATH=$root OMP_NUM_THREADS=1 "$other/bin/python" -m pytest -q "$@"; }
if [ $# -gt 0 ]; then
    pytest -n 0 "$@"
    exit
fi
pytest -n 0 "${tests[@]}"
code=$?
[ "$kind" = newest ] || pytest -n logical --maxprocesses 4 --dist worksteal -W ignore -m "not slow and not run" tests/unit || code=1
exit "$code"
