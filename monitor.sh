#!/usr/bin/env bash
# Shows the runs in the browser: bash monitor.sh [--tracking-uri URI] [--port 5001].

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh" || exit
# Without it MLflow's server starts ten processes (1.9 GB) for jobs that nobody sends; with it two (0.5 GB).
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=${MLFLOW_SERVER_ENABLE_JOB_EXECUTION:-false}
exec "$python" -m deeplightning.tracking.monitor "$@"
