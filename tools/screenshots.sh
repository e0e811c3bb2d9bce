#!/usr/bin/env bash
# Takes screenshots of all user interfaces: bash tools/screenshots.sh FOLDER [PART …]. Each program in tools/screenshots is a
# PART, such as `terminal`. They write into FOLDER, which is created if it is missing. A part runs even if an earlier one
# failed; the exit code is 1 if any failed.

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
    [ -f "$root/tools/screenshots/$part.py" ] || failed+=" $part (no such part)"
done
[ -z "$failed" ] || { printf 'Failed:%s\n' "$failed" >&2; exit 1; }
