#!/usr/bin/env bash
# All checks: bash test.sh [--quick | --full | --all] [arguments of pytest]. Times are of two cores.
#   --quick  format, lint, types, and the tests of tests/unit and plugins/ but those that train: one minute
#            and these, and the journeys (tests/journeys.txt), a test or more of each public promise: at most 6 minutes
#   --full   every test but the slow ones: 12 to 15 minutes; CI runs this
#   --all    the slow ones too, among them the trainings of plug-ins, manual and examples, a minute of the storm, the
#            unit tests and journeys of the core without the plug-ins, and the unit tests with the lowest releases that
#            pyproject.toml allows: about an hour
# Where the arguments name files of tests, these run and no others.
# bash test.sh --gpu [arguments of pytest] runs what is about GPUs instead, in at most 8 minutes: benchmarks/gpu.py.
# bash test.sh --docs builds the site of the manual in dist/site and runs the tests of the manual, in 1 minute. The first
#   time it installs Sphinx into .uv/docs. With --links it asks every address on the web that a page names, too.
# bash test.sh --storm [--minutes N] [--seed S] [--only KIND,…] [--case N] [--jobs N] tries what is promised under faults:
#   trainings that are killed, files that are damaged, and the rest of tests/storm. 60 minutes, unless told otherwise.
# Every check runs, whatever the ones before it found; the exit code is 1 when one of them failed.

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh" || exit
cd -- "$root" || exit
size=default
named=
links=
arguments=()
for argument in "$@"; do
    case "$argument" in
        --quick | --full | --all | --gpu | --docs | --storm) size=${argument#--} ;;
        --links) links=yes ;;
        *) arguments+=("$argument") ;;
    esac
    case "$argument" in tests/* | plugins/* | *.py | *.py::*) named=yes ;; esac
done

# The lines of lists of tests, without comments.
listed() { sed 's/ *#.*//; /^$/d' "$@"; }

# A file's tests share what is trained for them, so one worker runs them; unit tests go to whoever is free.
distribution=loadfile
marked=(-m "not slow")
selected=()
journeys=
case "$size" in
    quick) distribution=worksteal marked=(-m "not slow and not run") selected=(tests/unit plugins) ;;
    default) selected=(tests/unit plugins) journeys=tests/journeys.txt ;;
esac
[ "$size" != all ] || marked=()
if [ -z "$named" ]; then
    arguments+=("${selected[@]}")
    while read -r test; do arguments+=("$test"); done < <(listed "${journeys:-/dev/null}")
fi

failed=
check() {
    printf '\n$ %s\n' "$*"
    "$python" -m "$@" 3<&- || failed+=" $1"
}

# Each run in the tests asks git for the state of this folder, which takes 0.1 s of CPU time while git's index is as new
# as the files of a fresh clone.
git update-index -q --refresh >/dev/null 2>&1 || :

# One thread each: workers that spin for the same cores slow one another down tenfold.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ "$size" != gpu ] || exec "$python" benchmarks/gpu.py --suite "${arguments[@]}"

[ "$size" != storm ] || exec "$python" tests/storm "${arguments[@]}"

# Sphinx has an environment of its own, so that nobody who trains needs it.
sphinx() {
    local own=$root/.uv/docs lock
    lock=$(<docs/requirements.lock)
    if [ ! -f "$own/made-from" ] || [ "$(<"$own/made-from")" != "$lock" ]; then
        echo "Installing Sphinx into .uv/docs"
        "$python" -m uv venv --quiet --clear --python "$python" "$own" &&
            "$python" -m uv pip install --quiet --python "$own/bin/python" --require-hashes -r docs/requirements.lock &&
            mkdir -p "$own" && printf '%s\n' "$lock" >"$own/made-from" || return
    fi
    [ -z "$links" ] || "$own/bin/python" -m sphinx --quiet -b linkcheck -c docs . dist/links
}

if [ "$size" = docs ]; then
    printf '\n$ sphinx\n'
    sphinx || failed+=" sphinx"
    check pytest -n 0 tests/runs/test_site.py tests/unit/test_manual.py tests/unit/test_architecture.py \
        tests/runs/test_docs.py -k "not answers_as_it_says" "${arguments[@]}"
    [ -z "$failed" ] || { printf '\nNot passed:%s\n' "$failed" >&2; exit 1; }
    echo "The site: $root/dist/site/index.html"
    exit
fi
check ruff format --check .
check ruff check .
exec 3< <("$python" -m mypy 2>&1; echo "exit code $?")  # mypy takes a minute of one core: it runs beside the tests
check pytest -n logical --maxprocesses 4 --no-loadscope-reorder --dist "$distribution" "${marked[@]}" "${arguments[@]}"
types=$(cat <&3)
printf '\n$ mypy\n%s\n' "${types%$'\n'*}"
[ "${types##*$'\n'}" = "exit code 0" ] || failed+=" mypy"
if [ "$size" = all ] && [ -z "$named" ]; then
    printf '\n$ tools/without_plugins.sh\n'
    bash tools/without_plugins.sh || failed+=" without_plugins"
    printf '\n$ tests/storm\n'
    "$python" tests/storm --minutes 1 || failed+=" storm"
    printf '\n$ tools/raise_bounds.sh lowest\n'
    bash tools/raise_bounds.sh lowest
    case $? in
        0) ;;
        3) echo "Not run: the lowest releases could not be installed; the lines above say why." ;;
        *) failed+=" lowest" ;;
    esac
fi
[ -z "$failed" ] || { printf '\nNot passed:%s\n' "$failed" >&2; exit 1; }
