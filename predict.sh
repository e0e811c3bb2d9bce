#!/usr/bin/env bash
# Asks a running endpoint: bash predict.sh [FILE …]. Without FILE, about the sample digits that ship with the code.

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh" || exit
exec "$python" -m deeplightning ask "$@"
