#!/usr/bin/env bash
# All checks, as CI runs them: bash test.sh [--all] [arguments of pytest]. --all runs the tests that take minutes as well.
# bash test.sh --gpu [arguments of pytest] runs what is about GPUs instead, in at most 8 minutes: benchmarks/gpu.py.
# Every check runs, whatever the ones before it found; the exit code is 1 when one of them failed.

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh" || exit
cd -- "$root" || exit
marked=(-m "not slow")
arguments=()
gpu=
for argument in "$@"; do
    case "$argument" in
        --all) marked=() ;;
        --gpu) gpu=yes ;;
        *) arguments+=("$argument") ;;
    esac
done

failed=
check() {
    printf '\n$ %s\n' "$*"
    "$python" -m "$@" || failed+=" $1"
}

# One thread each: workers that spin for the same cores slow one another down tenfold.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ -z "$gpu" ] || exec "$python" benchmarks/gpu.py --suite "${arguments[@]}"
check ruff format --check .
check ruff check .
check mypy
check pytest -n logical --maxprocesses 4 --dist loadfile "${marked[@]}" "${arguments[@]}"
[ -z "$failed" ] || { printf '\nNot passed:%s\n' "$failed" >&2; exit 1; }
