#!/usr/bin/env bash
# Trains: bash train.sh [CFG …] [key=value …]. Without CFG it is the clone's configs/base.yaml. Sets up the first time.

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh" || exit
if [ ! -f "${1-}" ]; then
    case " $* " in *' --config '* | *' --config='*) exec "$python" -m deeplightning train "$@" ;; esac
    case "${1-}" in
        '' | *=* | '~'* | +* | -*) set -- "$root/configs/base.yaml" "$@" ;;
    esac
fi
exec "$python" -m deeplightning train "$@"
