"""The way of a config from the command to the first step is short, and goes down the layers: a file calls files below
it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from commands import python
from test_layers import LAYERS, PARTS

MOST = 10
"""Calls from a lower layer to a higher one: targets that the config names, and functions that are handed down."""

MOVES = 80
"""Changes of folder, in the order in which the functions of ours are first called. Imports are no calls; `private` and
the files beside the folders are tools that each folder has at hand, and count as part of it."""

MODULES, LINES = 120, 22_000
"""Files of ours that a run of one process imports, and their lines; 117 and 21,914 on 30 November 2026."""

UNUSED = {
    *("launch.local", "launch.sealed", "process.rendezvous", "engine.sharded", "engine.fsdp"),  # several processes
    *("process.ranks", "process.failure", "process.shared_folder"),
    *("callbacks.start", "callbacks.average", "run.find", "tracking.resolve"),  # it begins with new weights
    *("run.resume", "engine.restored", "cli.commands_run", "kinds", "config.short_names"),
    *("figures.style", "tracking.picture", "tracking.monitor", "data.cache"),
    *("config.explain", "task.compiled", "task.cuda_graphs", "run.class_weights", "run.make_bundle"),
    *("engine.checkpoint_reading", "engine.shards", "config.gpus", "config.devices"),
    *("tracking.client", "tracking.delivery", "tracking.unsent"),  # of the thread, behind the first step
    *("config.allowed", "config.strategy", "config.trust", "config.other_tools", "config.option_groups"),
    *("callbacks.gradients", "callbacks.on_request", "callbacks.watch", "run.resolve_auto", "data.cache_files"),
}

PROGRAM = """\
import json, os, sys
import pytorch_lightning
from deeplightning.cli import main

LAYERS = json.loads(sys.argv.pop(1))
climbs, ours, seen, rooms = [], 0, set(), []

def layer(frame):
    room = room_of(frame)
    return LAYERS.index(room) if room in LAYERS else None

def room_of(frame):
    parts = frame.f_globals.get("__name__", "").split(".")
    return parts[1] if parts[0] == "deeplightning" and parts[1:] else None

def imports(frame):
    while frame is not None and (frame.f_code.co_name != "<module>" or frame.f_globals["__name__"] == "__main__"):
        frame = frame.f_back
    return frame is not None

def watch(frame, event, argument):
    global ours
    name, room = frame.f_code.co_name, room_of(frame)
    if event != "call" or name == "<module>" or room is None:
        return
    if name == "training_step":
        sys.setprofile(None)
        print(json.dumps([ours, climbs, rooms, [*sys.modules]]), flush=True)
        os._exit(0)
    is_made = "<" in name + frame.f_code.co_filename  # a comprehension, or a method of a dataclass
    if frame.f_code not in seen and not is_made and not imports(frame):
        seen.add(frame.f_code)
        rooms.append(room)
    if (here := layer(frame)) is None:
        return
    ours += 1
    caller = frame.f_back
    while caller is not None and layer(caller) is None:
        caller = caller.f_back
    if caller is not None and here < layer(caller):
        climbs.append([f.f_globals["__name__"] + "." + f.f_code.co_name for f in (caller, frame)])

sys.setprofile(watch)
main()
"""


@pytest.mark.slow
def test_a_config_goes_down_the_layers(tiny, tmp_path):
    """Between the command and the first training step the program changes the folder 80 times, at most ten calls lead
    from a lower layer to a higher one, and what a run of one process does not use is not imported."""
    done = python("-c", PROGRAM, json.dumps(LAYERS), "train", tiny, cwd=tmp_path)
    ours, climbs, rooms, modules = json.loads(done.stdout.splitlines()[-1])
    assert ours > 5_000, "the calls are counted"
    assert len(climbs) <= MOST, climbs
    folders = [room for room in rooms if room in {*LAYERS, *PARTS} - {"private"}]
    moves = [folder for before, folder in pairwise(folders) if folder != before]
    assert MOVES / 2 < len(moves) <= MOVES, moves
    root = Path(__file__).parents[2]
    ours_only = [root.joinpath(*name.split(".")) for name in modules if name.split(".")[0] == "deeplightning"]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in ours_only]
    assert len(files) <= MODULES
    assert sum(len(file.read_text().splitlines()) for file in files) <= LINES
    assert UNUSED & {name.removeprefix("deeplightning.") for name in modules} == set()
