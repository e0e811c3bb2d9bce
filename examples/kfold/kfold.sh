#!/usr/bin/env bash
# Trains on each fold, and says what was reached: bash examples/kfold/kfold.sh [key=value …]

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/../../env.sh" || exit
folds=5
experiment="kfold $(date +%Y-%m-%d_%H-%M-%S)"
for ((fold = 0; fold < folds; fold++)); do
    "$python" -m deeplightning train "$here/kfold.yaml" "data.num_splits=$folds" "data.fold=$fold" \
        "logger.params.experiment_name='$experiment'" "$@" >"/dev/null" || exit
done
"$python" -m deeplightning runs --name "$experiment" --status finished --metric val_acc |
    awk -F '  ' '{ split($6, result, " "); sum += result[2]; squares += result[2] ^ 2; print $5 ": " $6 }
        END { mean = sum / NR; printf "mean %.4f, standard deviation %.4f\n", mean, sqrt(squares / NR - mean ^ 2) }'
