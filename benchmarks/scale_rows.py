"""Define the rows of benchmarks/scale.py: what each creates at a size, and what it measures, in new processes.

`python benchmarks/scale_rows.py NAME ARGUMENT …` runs one of the functions `child_NAME` and prints its figures as JSON:
CPU seconds of calls alone, without the imports before them.
"""

import io
import json
import math
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import side_by_side
from servers import Server, form, free_port, make_run, pictures, post, started
from side_by_side import Ended
from timed import PEERS, ROOT

LIMIT_SECONDS = 1800  # of one command
FOLDER = "Artifact storage path: "

CONFIG = """\
seed: 7
data: {root: 'ROOT', batch_size: 32, module: {type: deeplightning.data.arrays.ArrayData, params: {train: a.npz}}}
model:
  module: {type: deeplightning.task.classif.Classification}
  network: NETWORK
  optimizer: {type: torch.optim.SGD, params: {lr: 0.01}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1, export: false}
logger: {params: {tracking_uri: 'STORE'}, pictures: null}
"""
LINEAR = "{type: torch.nn.Linear, params: {in_features: 16, out_features: CLASSES}}"
OWN = '''\
"""Networks of the benchmark's config."""

from torch import nn


def perceptron(width: int) -> nn.Module:
    """(N, 16) to logits (N, 3), by width² parameters and a few."""
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def of_values(values: dict) -> nn.Module:
    """Has many values in its config, and uses none."""
    return nn.Linear(16, 3)
'''


@dataclass
class Place:
    """Where a row makes what it measures; `kept` is its own from size to size."""

    folder: Path
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What is measured over sizes.

    Attributes:
        unit: of the figures.
        sizes, full: five by default, and with `--full`.
        bound, bounds: the steepest growth, of all figures and of some by name.
        noise: a growth below this says nothing.
    """

    name: str
    title: str
    unit: str
    note: str
    sizes: tuple[int, ...]
    full: tuple[int, ...]
    measure: Callable[[int, Place], dict[str, float]]
    bound: float = 1.05
    bounds: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.05


# ---- commands


def run(*command: str | Path, cwd: Path, **variables: str) -> Ended:
    """Run a command in a new process.

    Raises:
        RuntimeError: it does not end with 0.
    """
    path = os.pathsep.join([str(PEERS), str(ROOT)])
    more = {"PYTHONPATH": path, "MLFLOW_DISABLE_TELEMETRY": "true", **variables}
    ended = side_by_side.run([str(word) for word in command], cwd, LIMIT_SECONDS, **more)
    if ended.code:
        lines = ended.output.splitlines()
        errors = [line for line in lines if line.startswith("error")] or lines[-1:]
        raise RuntimeError(f"exit code {ended.code}: {' '.join(errors)}")
    return ended


def folder_of(ended: Ended) -> Path:
    """Return the folder of the run that a command has created."""
    return Path(ended.output.rpartition(FOLDER)[2].strip())


def ours(*words: str | Path, cwd: Path, **variables: str) -> Ended:
    """Run `deeplightning WORD …`."""
    return run(sys.executable, "-m", "deeplightning", *words, cwd=cwd, **variables)


def child(name: str, *arguments: object, cwd: Path) -> dict[str, float]:
    """Return the figures of `child_NAME` from a new process."""
    ended = run(sys.executable, Path(__file__).resolve(), name, *map(str, arguments), cwd=cwd)
    return json.loads(ended.output.splitlines()[-1])


def cpu_of(call: Callable[[], object], times: int = 1) -> float:
    """Return the mean CPU seconds of a call in this process."""
    begun = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - begun) / times


def write_arrays(folder: Path, samples: int, classes: int) -> None:
    """Write `a.npz`: random inputs (samples, 16), and as many samples of each class."""
    random = np.random.default_rng(0)
    labels = np.arange(samples) % classes
    inputs = random.normal(size=(samples, 16)).astype(np.float32) + labels[:, None] % 7
    np.savez(folder / "a.npz", x=inputs.astype(np.float32), y=labels)


def write_config(folder: Path, network: str, name: str = "c.yaml") -> Path:
    path = folder / name
    text = CONFIG.replace("ROOT", str(folder)).replace("STORE", str(folder / "mlruns")).replace("NETWORK", network)
    path.write_text(text)
    (folder / "own.py").write_text(OWN)
    return path


# ---- samples


PICTURES = """\
seed: 7
data: {root: 'ROOT', batch_size: 32, module: MODULE}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.01}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1, export: false}
logger: {params: {tracking_uri: 'STORE'}, pictures: null}
"""
IN_MEMORY = "{type: train_own.Pictures, params: {size: 8, mode: L, classes: 10}}"
IN_FOLDERS = "{type: deeplightning.data.image_folder.ImageFolder, params: {image_size: 8, mode: L, cache: CACHE}}"


def samples(size: int, place: Place) -> dict[str, float]:
    """Measure the time to the first step, with pictures of 8x8 pixels in memory, in folders, in the cache."""
    from PIL import Image

    folder = place.folder / str(size)
    pixels = np.random.default_rng(0).integers(0, 256, size=(size, 8, 8), dtype=np.uint8)
    (folder / "array").mkdir(parents=True)
    np.savez(folder / "array" / "pictures.npz", images=pixels, labels=np.arange(size) % 10)
    of_class = [folder / "files" / "train" / str(number) for number in range(10)]
    for each in of_class:
        each.mkdir(parents=True)
    out = io.BytesIO()
    Image.fromarray(pixels[0]).save(out, "JPEG")
    for number in range(size):
        (of_class[number % 10] / f"{number}.jpg").write_bytes(out.getvalue())

    def first_step(name: str, root: str, module: str) -> float:
        config = folder / f"{name}.yaml"
        text = PICTURES.replace("ROOT", str(folder / root)).replace("STORE", str(folder / "mlruns"))
        config.write_text(text.replace("MODULE", module).replace("CACHE", "true"))
        ours("train", config, "train.max_steps=1", cwd=folder, TIMED_STEPS=str(folder / f"steps-{name}"))
        (file,) = folder.glob(f"steps-{name}.*")
        noted = json.loads(file.read_text())
        return noted["children"] + noted["cpu"][0]

    found = {
        "in memory": first_step("memory", "array", IN_MEMORY),
        "in folders": first_step("folders", "files", IN_FOLDERS.replace("CACHE", "false")),
        "in folders, the cache is written": first_step("written", "files", IN_FOLDERS),
        "in the cache": first_step("cached", "files", IN_FOLDERS),
        "listing of the files alone": child("listing", folder / "files", cwd=folder)["cpu"],
    }
    shutil.rmtree(folder)
    return found


def child_listing(folder: str) -> dict[str, float]:
    return {"cpu": cpu_of(lambda: [entry.stat() for each in os.walk(folder) for entry in os.scandir(each[0])])}


# ---- runs in a store


def runs(size: int, place: Place) -> dict[str, float]:
    """Measure one more run in a store of so many, the list of runs, and the first page of the monitor."""
    store = place.folder / "mlruns"
    child("runs_fill", store, size - place.kept.get("runs", 0), cwd=place.folder)
    place.kept["runs"] = size
    listed = ours("runs", "--tracking-uri", store, cwd=place.folder)
    last = ours("runs", "--last", "--tracking-uri", store, cwd=place.folder)
    more = child("runs_one", store, cwd=place.folder)
    place.kept["runs"] += 5
    return {"`runs`": listed.seconds, "`runs --last`": last.seconds, **more}


def _open_and_close(store: str, points: int = 42) -> None:
    from deeplightning.tracking import MLflowLogger

    logger = MLflowLogger(tracking_uri=store, system_metrics=False)
    logger.log_hyperparams({f"param_{number}": number for number in range(15)})
    for step in range(0, 10 * points, 10):
        logger.log_metrics({"train_loss": 1 / (1 + step)}, step)
    logger.finalize("success")


def child_runs_fill(store: str, number: str) -> dict[str, float]:
    for _ in range(int(number)):
        _open_and_close(store)
    return {}


def child_runs_one(store: str) -> dict[str, float]:
    from mlflow.tracking import MlflowClient

    _open_and_close(store)
    one = cpu_of(lambda: _open_and_close(store), 4)
    client = MlflowClient(f"sqlite:///{store}/mlflow.db")
    (experiment,) = client.search_experiments()

    def page() -> None:
        client.search_runs([experiment.experiment_id], max_results=100, order_by=["attributes.start_time DESC"])

    page()
    return {"a run opened and closed": one, "the monitor's first page": cpu_of(page, 3)}


# ---- points of a run


def points(size: int, place: Place) -> dict[str, float]:
    """Measure a run of so many points: tracked, resumed, compared, reported."""
    folder = place.folder / str(size)
    folder.mkdir()
    write_arrays(folder, 300, 3)
    config = write_config(folder, LINEAR.replace("CLASSES", "3"))
    first = folder_of(ours("train", config, cwd=folder))
    tracked = child("points_write", folder / "mlruns", first.parent.name, size, cwd=folder)
    resumed = ours("train", config, "train.num_epochs=2", f"train.resume_ckpt={first}/last.ckpt", cwd=folder)
    other = folder_of(ours("train", config, "seed=8", cwd=folder))
    found = {
        **tracked,
        "resume, and an epoch": resumed.seconds,
        "`diff`": ours("diff", first, other, cwd=folder).seconds,
        "`report`": ours("report", first, cwd=folder).seconds,
        "`runs`": ours("runs", "--tracking-uri", folder / "mlruns", cwd=folder).seconds,
    }
    shutil.rmtree(folder)
    return found


def child_points_write(store: str, run_id: str, number: str) -> dict[str, float]:
    from deeplightning.tracking import MLflowLogger

    logger = MLflowLogger(tracking_uri=store, run_id=run_id, system_metrics=False)

    def write() -> None:
        for step in range(int(number) // 10):
            logger.log_metrics({f"m{metric}": step / (1 + metric) for metric in range(10)}, 100 + step)
        logger.finalize("success")

    return {"tracked": cpu_of(write)}


# ---- values and files of a config


def values(size: int, place: Place) -> dict[str, float]:
    """Measure a config with so many values below a target."""
    given = ", ".join(f"key_{number}: {number / 7}" for number in range(size))
    config = write_config(place.folder, f"{{type: own.of_values, params: {{values: {{{given}}}}}}}")
    write_arrays(place.folder, 300, 3)
    return {
        "`check`": ours("check", config, cwd=place.folder).seconds,
        "`explain`": ours("explain", config, cwd=place.folder).seconds,
        "`train`": ours("train", config, cwd=place.folder).seconds,
    }


def files(size: int, place: Place) -> dict[str, float]:
    """Measure a config of so many files, each of which extends the next."""
    write_arrays(place.folder, 300, 3)
    write_config(place.folder, LINEAR.replace("CLASSES", "3"), "f0.yaml")
    for number in range(1, size):
        text = f"_base_: f{number - 1}.yaml\nseed: {number}\ntrain: {{num_epochs: {number}}}\n"
        (place.folder / f"f{number}.yaml").write_text(text)
    config = place.folder / f"f{size - 1}.yaml"
    return {
        "`check`": ours("check", config, cwd=place.folder).seconds,
        "`explain`": ours("explain", config, cwd=place.folder).seconds,
    }


# ---- classes


def classes(size: int, place: Place) -> dict[str, float]:
    """Measure 20,000 samples of so many classes: trained and tested with all pictures, exported, answered."""
    folder = place.folder / str(size)
    folder.mkdir()
    write_arrays(folder, 20_000, size)
    config = write_config(folder, LINEAR.replace("CLASSES", str(size)))
    plain = ours("train", config, cwd=folder)
    whole = ours("train", config, "stages=[train,test]", "~logger.pictures", cwd=folder)
    exported = ours("export", folder_of(whole), cwd=folder)
    np.save(folder / "asked.npy", np.zeros((100, 16), np.float32))
    answered = ours("predict", folder_of(whole), folder / "asked.npy", "--out", folder / "told.csv", cwd=folder)
    found = {
        "one epoch": plain.seconds,
        "test and pictures": whole.seconds - plain.seconds,
        "`export`": exported.seconds,
        "`predict`, 100 samples": answered.seconds,
    }
    body = json.dumps({"array": [0.0] * 16}).encode()
    asked = post("/predict", "application/json", body)
    with _served(folder_of(whole), place, asked) as server:
        found["an answer of the server, ms"] = 1000 * _per_answer(server, asked, 200)
    shutil.rmtree(folder)
    return found


@contextmanager
def _served(folder: Path, place: Place, asked: bytes) -> Iterator[Server]:
    """Start a server that answers requests; yield it.

    Raises:
        RuntimeError: it does not in two minutes.
    """
    port, end = free_port(), time.monotonic() + 120
    command = [sys.executable, "-m", "deeplightning", "serve", str(folder), "--port", str(port)]
    with started(command, port, place.folder / "server.log") as server:
        while True:
            with suppress(OSError):
                if server.ask(asked)[0] == 200:
                    break
            if time.monotonic() > end or server.child.poll() is not None:
                raise RuntimeError(f"the server does not answer: {server.last_words()}")
            time.sleep(0.05)
        yield server


def _per_answer(server: Server, asked: bytes, times: int) -> float:
    before = server.cpu()
    for _ in range(times):
        status, text = server.ask(asked)
        if status != 200:
            raise RuntimeError(f"the server answers {status}: {text[:200]}")
    return (server.cpu() - before) / times


# ---- trials of a search


def trials(size: int, place: Place) -> dict[str, float]:
    """Measure a search's own part of a trial after so many: draw, report, prune; and the table of all."""
    return child("trials", size, cwd=place.folder)


def child_trials(size: str) -> dict[str, float]:
    from deeplightning_tune import outcome
    from deeplightning_tune.section import Tune
    from deeplightning_tune.space import space_of
    from deeplightning_tune.study import Study, begin

    number, more = int(size), 10
    space = {"a.lr": {"log_uniform": [1e-5, 1.0]}, "a.size": {"int": [1, 4096]}}
    tune = Tune(metric="val_acc", mode="max", num_trials=number + more, space=space)
    file = Path(f"study-{number}.db")
    begin(file, "max", {})
    study = Study(file, tune, space_of(space), 7)

    def trial() -> None:
        drawn = study.draw()
        study.attribute(drawn.number, run="r", folder="/f")
        study.report(drawn.number, 1, math.sin(drawn.number))
        study.finish(drawn.number, True)

    for _ in range(number):
        trial()
    each = cpu_of(trial, more)
    return {"a trial": each, "the table of all": cpu_of(lambda: (outcome.rows(study), outcome.as_csv(study)))}


# ---- processes


def processes(size: int, place: Place) -> dict[str, float]:
    """Measure the total of so many processes of ddp on this machine."""
    write_arrays(place.folder, 1280, 3)
    config = write_config(place.folder, LINEAR.replace("CLASSES", "3"))
    engine = ["engine.backend=ddp", f"engine.processes={size}"] if size > 1 else []
    one, many = (ours("train", config, *engine, f"train.num_epochs={epochs}", cwd=place.folder) for epochs in (1, 5))
    return {"start, epoch, end": one.seconds, "an epoch and a checkpoint more": (many.seconds - one.seconds) / 4}


# ---- weights


def weights(size: int, place: Place) -> dict[str, float]:
    """Measure a network of so many parameters: two steps of SGD and a checkpoint, two more of a resumed run, the
    bundle."""
    folder = place.folder / str(size)
    folder.mkdir()
    write_arrays(folder, 80, 3)
    config = write_config(folder, f"{{type: own.perceptron, params: {{width: {math.isqrt(size)}}}}}")
    first = ours("train", config, cwd=folder)
    resumed = ours("train", config, "train.num_epochs=2", f"train.resume_ckpt={folder_of(first)}/last.ckpt", cwd=folder)
    exported = ours("export", folder_of(first), cwd=folder)
    shutil.rmtree(folder)
    return {
        "train": first.seconds,
        "resume": resumed.seconds,
        "export": exported.seconds,
        "train, MiB": first.memory,
        "resume, MiB": resumed.memory,
        "export, MiB": exported.memory,
        "weights alone, MiB": 4 * size / 2**20,
    }


# ---- clients


def clients(size: int, place: Place) -> dict[str, float]:
    """Measure so many connections that ask one picture after another; ours and wrk use the same cores."""
    server, folder = _small_server(place)
    script = folder / "ask.lua"
    kind, body = form(pictures("small")[0])
    (folder / "body").write_bytes(body)
    script.write_text(
        f"wrk.method = 'POST'\nlocal file = io.open('{folder}/body', 'rb')\nwrk.body = file:read('*a')\n"
        f"wrk.headers['Content-Type'] = '{kind}'\nlocal bad = 0\n"
        "function done(summary, latency, requests)\n  local e = summary.errors\n"
        '  print(string.format(\'{"n": %d, "bad": %d}\', summary.requests, e.status + e.read + e.write'
        " + e.timeout + e.connect))\nend\n"
    )
    before = server.cpu()
    url = f"http://127.0.0.1:{server.port}/predict"
    done = run("wrk", "-t1", f"-c{size}", "-d4s", "--timeout", "30s", "-s", script, url, cwd=folder)
    used, told = server.cpu() - before, json.loads(done.output.splitlines()[-1])
    if told["bad"]:
        raise RuntimeError(f"{told['bad']} of {told['n']} requests failed")
    return {"CPU ms an answer": 1000 * used / told["n"]}


def idle(size: int, place: Place) -> dict[str, float]:
    """Measure so many silent connections: the server's memory, and an answer beside them."""
    server, _ = _small_server(place)
    asked = post("/predict", *form(pictures("small")[0]))
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    if high < size + 200:
        raise RuntimeError(f"a process may open {high} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(low, size + 200), high))
    with ExitStack() as stack:
        for _ in range(size):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        time.sleep(0.5)
        found = {"MiB": server.memory(), "CPU ms an answer": 1000 * _per_answer(server, asked, 200)}
    place.kept.pop("stack").close()
    return found


def _small_server(place: Place) -> tuple[Server, Path]:
    """Return the server of the small network that all sizes share, until its stack is closed; and a folder."""
    if "run" not in place.kept:
        place.kept["run"] = make_run("small", place.folder)
    if "stack" not in place.kept:
        place.kept["stack"] = stack = ExitStack()
        asked = post("/predict", *form(pictures("small")[0]))
        place.kept["server"] = stack.enter_context(_served(place.kept["run"], place, asked))
    return place.kept["server"], place.folder


ROWS = [
    Row(
        *("samples", "Samples: from the command to the first step", "CPU s"),
        "Pictures of 8x8 pixels; JPEG files in folders of ten classes. The cache is written with the first epoch.",
        *((1000, 3000, 10_000, 30_000, 100_000), (10_000, 30_000, 100_000, 300_000, 1_000_000), samples),
    ),
    Row(
        *("runs", "Runs in a store", "CPU s"),
        "Runs of 15 parameters and 42 points. The monitor's first page is MLflow's search for its hundred newest runs.",
        *((10, 100, 500, 1500, 5000), (10, 100, 1000, 3000, 10_000), runs),
        noise=0.02,
    ),
    Row(
        *("points", "Points of a run", "CPU s"),
        "Ten metrics, in a store beside another run.",
        *((1000, 3000, 10_000, 100_000, 300_000), (1000, 10_000, 100_000, 300_000, 1_000_000), points),
    ),
    Row(
        *("values", "Values of a config", "CPU s"),
        "Below the `params` of a network.",
        *((10, 100, 1000, 3000, 10_000), (10, 100, 1000, 3000, 10_000), values),
    ),
    Row(
        *("files", "Files of a config", "CPU s"),
        "Each extends the next by `_base_`.",
        *((1, 5, 10, 20, 40), (1, 5, 10, 20, 40), files),
        noise=0.01,
    ),
    Row(
        *("classes", "Classes", "CPU s"),
        "20,000 samples of 16 numbers, a linear layer.",
        *((2, 30, 300, 3000, 10_000), (2, 30, 300, 3000, 10_000), classes),
        noise=0.3,
    ),
    Row(
        *("trials", "Trials of a search", "CPU s"),
        "Two dimensions, Optuna's TPE; without the trainings.",
        *((10, 30, 100, 300, 1000), (30, 100, 300, 1000, 3000), trials),
        noise=0.005,
    ),
    Row(
        *("processes", "Processes of one machine", "CPU s"),
        "ddp by gloo, on as many cores as there are.",
        *((1, 2, 3, 4, 8), (1, 2, 3, 4, 8), processes),
        noise=0.1,
    ),
    Row(
        *("weights", "Parameters of the network", "CPU s"),
        "float32, SGD without momentum: weights and gradients are twice the weights alone.",
        *((100_000, 1_000_000, 10_000_000, 30_000_000, 100_000_000), (10**5, 10**6, 10**7, 10**8, 10**9), weights),
        noise=0.3,
    ),
    Row(
        *("clients", "Clients that ask", "CPU ms"),
        "The small network of `benchmarks/serve.py`.",
        *((1, 8, 32, 128, 512), (1, 8, 32, 128, 512), clients),
        bound=0.05,
        noise=0.05,
    ),
    Row(
        *("idle", "Idle connections", "MiB, CPU ms"),
        "To the same server, which answers another client beside them.",
        *((10, 100, 1000, 3000, 10_000), (10, 100, 1000, 3000, 10_000), idle),
        noise=0.1,
    ),
]


if __name__ == "__main__":
    print(json.dumps(globals()[f"child_{sys.argv[1]}"](*sys.argv[2:])))
