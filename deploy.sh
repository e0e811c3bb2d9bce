#!/usr/bin/env bash
# Answers HTTP from a run: bash deploy.sh RUN [--host 127.0.0.1] [--port 5000].

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh" || exit
exec "$python" -m deeplightning serve "$@"
