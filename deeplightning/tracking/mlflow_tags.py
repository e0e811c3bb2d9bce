"""What MLflow's client says of a run by itself, without MLflow: who started it, from what; and a name for it."""

import configparser
import getpass
import json
import logging
import os
import random
import sys
from pathlib import Path

log = logging.getLogger("deeplightning.tracking")

USER = "mlflow.user"
RUN_NAME = "mlflow.runName"

_MANNERS = (
    "able amber bold brave brief brisk calm candid clear clever cosy crisp daring deft eager early exact fair fast "
    "firm fleet fond frank free fresh gentle glad grand happy hardy honest humble jolly keen kind lively loyal lucid "
    "lucky mellow merry mild modest neat nimble noble patient plain polite proud quick quiet rapid ready serene sharp "
    "silent simple sincere smart smooth snug sober solid spry stable steady stout sturdy subtle sunny sure swift "
    "tidy tranquil trusty upbeat vivid warm wise witty young zesty"
)
_THINGS = (
    "acorn alder anchor apple arch ash aspen atlas barley basin bay beacon birch bloom breeze bridge brook cairn "
    "canyon cedar chalk cliff clover comet coral cove creek delta dune elm ember fern field fjord flint forest garden "
    "glade grove harbour hazel heath hill island ivy juniper lagoon lake lantern larch lichen maple marsh meadow mesa "
    "mist moor moss mountain oak oasis orchard pebble pine plain pond poplar prairie rain reed reef ridge river rowan "
    "sand shore sky spring star stone stream summit thicket tide valley willow wind wood yarrow"
)


def run_name() -> str:
    """Draw a name in MLflow's manner, `quiet-harbour-417`, from system randomness, so that no seed repeats one."""
    draw = random.SystemRandom()
    return f"{draw.choice(_MANNERS.split())}-{draw.choice(_THINGS.split())}-{draw.randrange(1000)}"


def name_of(stem: str, run_id: str) -> str:
    """Return a descriptive name of a run, `SimpleCNN-Digits-a3f1`, with the first digits of its id."""
    return f"{stem}-{run_id[:4]}"


def run_tags() -> dict[str, str]:
    """Return the tags that MLflow's client resolves, without the repository's.

    In a notebook MLflow is asked itself: only there it finds the notebook's name.
    """
    if "ipykernel" in sys.modules or "DATABRICKS_RUNTIME_VERSION" in os.environ:
        from mlflow.tracking.context.registry import resolve_tags

        return {name: value for name, value in resolve_tags().items() if not name.startswith("mlflow.source.git.")}
    script = sys.argv[0] if sys.argv and sys.argv[0] else "<console>"
    tags = {USER: _user(), "mlflow.source.name": script, "mlflow.source.type": "LOCAL"}
    if given := os.environ.get("MLFLOW_RUN_CONTEXT"):
        try:
            tags |= {str(name): str(value) for name, value in dict(json.loads(given)).items()}
        except (ValueError, TypeError) as error:
            log.warning("The variable MLFLOW_RUN_CONTEXT is not used, it is no JSON object: %s", error)
    return tags


def _user() -> str:
    """Return the user name for MLflow's servers, else the user of this machine."""
    if name := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        return name
    known = configparser.ConfigParser(interpolation=None)
    try:
        known.read(Path("~/.mlflow/credentials").expanduser())
        if name := known.get("mlflow", "mlflow_tracking_username", fallback=None):
            return name
    except (configparser.Error, OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):  # a user whom the machine has no name for
        return "unknown"
