#!/usr/bin/env bash
# Tests other releases of the dependencies than the locked ones, in a separate environment, .uv/other:
#   bash tools/raise_bounds.sh newest     ignores the upper bounds of pyproject.toml, and runs the tests of private names
#   bash tools/raise_bounds.sh lowest     installs the lowest release of each that pyproject.toml allows, and runs these and
#                                         the tests of `test.sh --quick`; `test.sh --all` runs it
# Further arguments go to pytest. When the tests pass, raise the upper or change the lower bound in pyproject.toml.

source "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" || exit
cd -- "$root" || exit
case "${1-}" in
    newest) options=(--upgrade) tests=(tests/runs/test_private.py tests/runs/test_startup.py) ;;
    lowest) options=(--resolution lowest-direct) tests=(tests/runs/test_private.py -W ignore) ;;  # old releases warn about new ones
    *) sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
kind=$1 other=$work/other asked=$work/asked
shift
uv=$root/.venv/bin/uv
rm -rf -- "$other" "$asked" && mkdir -p -- "$asked" || exit
# The requirements of pyproject.toml, for `newest` without their upper bounds.
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
