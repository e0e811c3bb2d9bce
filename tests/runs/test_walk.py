"""Between the command and the first training step, calls go down the layers and rarely change the folder."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from commands import python
from test_layers import LAYERS, PARTS

MAX_UPWARD_CALLS = 10
"""Calls from a lower layer to a higher one: targets of the config and callbacks."""

MAX_FOLDER_CHANGES = 80
"""Changes of folder between first calls of our functions. Imports do not count, and `private` and the files outside the
folders belong to the folder that calls them."""

MAX_MODULES, MAX_LINES = 120, 22_000
"""Our files that a run of one process imports, and their lines; 117 and 21,914 on 30 November 2026."""

UNUSED = {
    *("launch.local", "launch.sealed", "process.rendezvous", "engine.sharded", "engine.fsdp"),  # several processes
    *("process.ranks", "process.failure", "process.shared_folder"),
    *("callbacks.start", "callbacks.average", "run.load", "tracking.resolve"),  # existing weights
    *("run.resume", "engine.restored", "cli.commands_run", "kinds", "config.short_names"),
    *("figures.style", "tracking.picture", "tracking.monitor", "data.cache"),
    *("config.explain", "task.compiled", "task.cuda_graphs", "run.make_bundle"),
    *("engine.checkpoint_reading", "engine.shards", "config.devices"),
    *("tracking.client", "tracking.delivery", "tracking.unsent"),  # imported by a thread after the first step
    *("config.allowed", "config.strategy", "config.trust", "config.other_tools", "config.option_groups"),
    *("callbacks.gradients", "callbacks.on_request", "callbacks.watch", "run.resolve_auto", "data.cache_files"),
}

PROGRAM = """\
import json, os, sys
import pytorch_lightning
from deeplightning.cli import main

LAYERS = json.loads(sys.argv.pop(1))
upward, calls, seen, folders = [], 0, set(), []

def layer(frame):
    folder = folder_of(frame)
    return LAYERS.index(folder) if folder in LAYERS else None

def folder_of(frame):
    parts = frame.f_globals.get("__name__", "").split(".")
    return parts[1] if parts[0] == "deeplightning" and parts[1:] else None

def imports(frame):
    while frame is not None and (frame.f_code.co_name != "<module>" or frame.f_globals["__name__"] == "__main__"):
        frame = frame.f_back
    return frame is not None

def watch(frame, event, argument):
    global calls
    name, folder = frame.f_code.co_name, folder_of(frame)
    if event != "call" or name == "<module>" or folder is None:
        return
    if name == "training_step":
        sys.setprofile(None)
        print(json.dumps([calls, upward, folders, [*sys.modules]]), flush=True)
        os._exit(0)
    is_generated = "<" in name + frame.f_code.co_filename  # a comprehension, or a method of a dataclass
    if frame.f_code not in seen and not is_generated and not imports(frame):
        seen.add(frame.f_code)
        folders.append(folder)
    if (own := layer(frame)) is None:
        return
    calls += 1
    caller = frame.f_back
    while caller is not None and layer(caller) is None:
        caller = caller.f_back
    if caller is not None and own < layer(caller):
        upward.append([f.f_globals["__name__"] + "." + f.f_code.co_name for f in (caller, frame)])

sys.setprofile(watch)
main()
"""


@pytest.mark.slow
def test_a_config_goes_down_the_layers(tiny, tmp_path):
    """Up to the first training step the program changes the folder at most 80 times, at most ten calls lead from a
    lower layer to a higher one, and no module is imported that a run of one process does not use."""
    done = python("-c", PROGRAM, json.dumps(LAYERS), "train", tiny, cwd=tmp_path)
    calls, upward, folders, modules = json.loads(done.stdout.splitlines()[-1])
    assert calls > 5_000, "the calls are counted"
    assert len(upward) <= MAX_UPWARD_CALLS, upward
    folders = [folder for folder in folders if folder in {*LAYERS, *PARTS} - {"private"}]
    changes = [folder for before, folder in pairwise(folders) if folder != before]
    assert MAX_FOLDER_CHANGES / 2 < len(changes) <= MAX_FOLDER_CHANGES, changes
    root = Path(__file__).parents[2]
    paths = [root.joinpath(*name.split(".")) for name in modules if name.split(".")[0] == "deeplightning"]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    assert len(files) <= MAX_MODULES
    assert sum(len(file.read_text().splitlines()) for file in files) <= MAX_LINES
    assert UNUSED & {name.removeprefix("deeplightning.") for name in modules} == set()
