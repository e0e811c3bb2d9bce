#!/usr/bin/env bash
# Creates a folder of wheels for a GPU machine without a network: bash tools/gpu_wheels.sh [--python 3.12] [FOLDER]

source "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" || exit
exec "$python" "$root/tools/gpu_wheels.py" "$@"
