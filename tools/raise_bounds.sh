#!/usr/bin/env bash
# Tries other releases of the dependencies than those of the lock, in an environment of its own, .uv/other:
#   bash tools/raise_bounds.sh newest     ignores the upper bounds of pyproject.toml, and runs the tests of private names
#   bash tools/raise_bounds.sh lowest     takes the lowest release that pyproject.toml allows of each, and runs the same
# More arguments are pytest's. A bound is raised, or a floor changed, in pyproject.toml when the tests pass.

source "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" || exit
cd -- "$root" || exit
case "${1-}" in
    newest) options=(--upgrade) tests=(tests/runs/test_private.py tests/runs/test_startup.py) ;;
    lowest) options=(--resolution lowest-direct) tests=(tests/runs/test_private.py -W ignore) ;;  # old releases warn of new ones
    *) sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
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
"$uv" venv --quiet --python "$python" "$other" &&
    "$uv" pip install --quiet --python "$other/bin/python" "${options[@]}" --compile-bytecode --extra dev \
        -r "$asked/pyproject.toml" || exit 3
"$uv" pip list --python "$other/bin/python" 2>/dev/null |
    grep -E '^(torch|torchvision|torchmetrics|pytorch-lightning|mlflow|deepspeed|ray|submitit|optuna|omegaconf|flask|werkzeug) '
[ $# -gt 0 ] || set -- "${tests[@]}"
PYTHONPATH=$root OMP_NUM_THREADS=1 exec "$other/bin/python" -m pytest -n 0 -q "$@"
