#!/usr/bin/env bash
# Shows the runs in the browser: bash monitor.sh [--tracking-uri URI] [--port 5001].

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh" || exit
exec "$python" -m deeplightning monitor "$@"
