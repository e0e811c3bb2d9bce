#!/usr/bin/env bash
# Pictures of all that a user sees: bash tools/screenshots.sh FOLDER [PART …]. Each program in tools/screenshots makes some;
# a PART is the name of one (`terminal`). FOLDER gets them, and is made if it is not there. Every part runs, whatever
# the ones before it did; the exit code is 1 when one of them failed.

if [ $# = 0 ] || [[ $1 == -* ]]; then
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
source "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" || exit
mkdir -p -- "$1" && folder=$(cd -- "$1" && pwd -P) || exit
shift

failed=
for program in "$root"/tools/screenshots/*.py; do
    part=$(basename -- "$program" .py)
    [ $# = 0 ] || [[ " $* " == *" $part "* ]] || continue
    printf '%s\n' "$part" >&2
    "$python" "$program" "$folder" || failed+=" $part"
done
for part in "$@"; do
    [ -f "$root/tools/screenshots/$part.py" ] || failed+=" $part (there is no such part)"
done
[ -z "$failed" ] || { printf 'Not made:%s\n' "$failed" >&2; exit 1; }
