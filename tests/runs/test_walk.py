"""The way of a config from the command to the first step goes down the layers: a file calls files below it."""

import json
from pathlib import Path

import pytest
from commands import python
from test_layers import LAYERS

MOST = 10
"""Calls from a lower layer to a higher one: targets that the config names, and functions that are handed down."""

MODULES, LINES = 120, 22_000
"""Files of ours that a run of one process imports, and their lines; 117 and 21,914 on 30 November 2026."""

UNUSED = {
    *("launch.local", "launch.sealed", "process.rendezvous", "engine.sharded", "engine.fsdp"),  # several processes
    *("process.ranks", "process.failure", "process.shared_folder"),
    *("callbacks.start", "callbacks.average", "run.find", "tracking.resolve"),  # it begins with new weights
    *("run.resume", "engine.restored", "cli.commands_run", "kinds", "config.short_names"),
    *("figures.style", "tracking.picture", "tracking.monitor", "data.cache"),
    *("config.explain", "task.compiled", "task.cuda_graphs", "run.class_weights", "run.make_bundle"),
    *("engine.checkpoint_reading", "engine.shards", "engine.gpus", "engine.devices"),
    *("tracking.client", "tracking.delivery", "tracking.unsent"),  # of the thread, behind the first step
    *("config.allowed", "config.strategy", "config.trust", "config.other_tools", "config.option_groups"),
    *("callbacks.gradients", "callbacks.on_request", "callbacks.watch", "run.resolve_auto", "data.cache_files"),
}

PROGRAM = """\
import json, sys
import pytorch_lightning
from deeplightning.cli import main

LAYERS = json.loads(sys.argv.pop(1))
climbs, ours = [], 0

def layer(frame):
    parts = frame.f_globals.get("__name__", "").split(".")
    return LAYERS.index(parts[1]) if parts[0] == "deeplightning" and parts[1:2] and parts[1] in LAYERS else None

def watch(frame, event, argument):
    global ours
    if event != "call" or frame.f_code.co_name == "<module>" or (here := layer(frame)) is None:
        return
    ours += 1
    caller = frame.f_back
    while caller is not None and layer(caller) is None:
        caller = caller.f_back
    if caller is not None and here < layer(caller):
        climbs.append([f.f_globals["__name__"] + "." + f.f_code.co_name for f in (caller, frame)])

class Fitting(BaseException):
    pass

def fit(*arguments, **more):
    sys.setprofile(None)
    print(json.dumps([ours, climbs, [*sys.modules]]), flush=True)
    raise Fitting

pytorch_lightning.Trainer.fit = fit
sys.setprofile(watch)
main()
"""


@pytest.mark.slow
def test_a_config_goes_down_the_layers(tiny, tmp_path):
    """Between the command and `Trainer.fit` at most ten calls lead from a lower layer to a higher one, and what a run
    of one process does not use is not imported."""
    done = python("-c", PROGRAM, json.dumps(LAYERS), "train", tiny, cwd=tmp_path)
    ours, climbs, modules = json.loads(done.stdout.splitlines()[-1])
    assert ours > 5_000, "the calls are counted"
    assert len(climbs) <= MOST, climbs
    root = Path(__file__).parents[2]
    ours_only = [root.joinpath(*name.split(".")) for name in modules if name.split(".")[0] == "deeplightning"]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in ours_only]
    assert len(files) <= MODULES
    assert sum(len(file.read_text().splitlines()) for file in files) <= LINES
    assert UNUSED & {name.removeprefix("deeplightning.") for name in modules} == set()
