#!/usr/bin/env bash
# Runs the unit tests of the core and the journeys (at least one test of each public promise) in an environment with the
# packages of .venv but without the plug-ins.

source "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" || exit
cd -- "$root" || exit
core=$(mktemp -d) || exit
trap 'rm -r "$core"' EXIT
chmod 755 "$core"  # tests run commands as another user, too
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') &&
    "$python" -m venv --without-pip "$core" && site=$(echo "$core"/lib/python*/site-packages) &&
    ln -s "$packages"/* "$site" && rm "$site"/*deeplightning_* && ln -s "${python%/*}"/{st,uv} "$core/bin" || exit
readarray -t journeys < <(sed 's/ *#.*//; /^$/d' tests/journeys.txt)
"$core/bin/python" -m pytest -n logical --maxprocesses 4 --dist loadfile -m "not slow" tests/unit tests/runs/test_plugins.py \
    tests/runs/test_init.py "${journeys[@]}"
