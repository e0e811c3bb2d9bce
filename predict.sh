#!/usr/bin/env bash
# Sends images to a running endpoint: bash predict.sh [IMAGE …]. Without IMAGE, the sample digits that ship with the code.

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh" || exit
exec "$python" -m serve.predict "$@"
