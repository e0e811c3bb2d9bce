"""Tables and signals from files to answers over HTTP, which equal the outputs of the trained network."""

import csv
import io
import json
import re
import wave

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file
from served import Server, logged_answers
from tiny import csv_rows

import deeplightning as dl
from deeplightning.runfolder import RunFolder

CONFIG = """\
seed: 3
stages: [train, test]
data:
  root: .
  module: {{type: {data}}}
  batch_size: 20
model:
  module: {{type: deeplightning.task.{task}}}
  network: {{type: deeplightning.model.{network}}}
  optimizer: {{type: torch.optim.AdamW, params: {{lr: 0.005}}}}
  loss: {{type: torch.nn.{loss}}}
train: {{num_epochs: 2}}
logger:
  type: deeplightning.tracking.MLflowLogger
  params: {{experiment_name: tables, tracking_uri: '{store}', system_metrics: false}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a shop's orders: class and price follow from two numbers, one with gaps, and two categories."""
    folder, random, rows = tmp_path_factory.mktemp("a shop"), np.random.default_rng(0), 400
    age, items = random.normal(40, 12, rows), random.integers(1, 9, rows)
    city, new = random.choice(["Bern", "Genf", "Zug, ZG"], rows), random.random(rows) < 0.5
    price = 3 * items + 0.1 * age + 5 * (city == "Genf") + random.normal(0, 0.5, rows)
    with (folder / "orders.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "items", "city", "new", "order", "price", "kind"])
        for n in range(rows):
            gap = "" if n % 9 == 0 else f"{age[n]:.3f}"
            kind = "large" if price[n] > 22 else "small"
            writer.writerow([gap, items[n], city[n], str(new[n]).lower(), f"order {n}", f"{price[n]:.4f}", kind])
    return folder


def run_of(command, store, place, name, overrides, **parts):
    """Train in a folder with a config that is kept under a name."""
    path = place / f"{name}.yaml"
    path.write_text(CONFIG.format(store=store, **parts))
    return command("train", path, *overrides, cwd=place, code=0)


TABLE = "data.module.params={train: orders.csv, target: %s, missing: fill, columns: {order: ignore, %s: ignore}}"
CLASSIFIED = [
    TABLE % ("kind", "price"),
    "model.network.params={num_numbers: 2, cardinalities: [4, 3], num_outputs: 2, width: 16, depth: 1}",
]
PARTS = {"data": "deeplightning.data.table.TableData", "network": "table_net.TableNet"}


@pytest.fixture(scope="module")
def classified_orders(command, store, place):
    """A run that classifies orders as large or small."""
    parts = PARTS | {"task": "classif.Classification", "loss": "CrossEntropyLoss"}
    return run_of(command, store, place, "kind", CLASSIFIED, **parts)


@pytest.fixture(scope="module")
def priced_orders(command, store, place):
    """A run that predicts prices."""
    sizes = "model.network.params={num_numbers: auto, cardinalities: auto, num_outputs: auto, width: 16, depth: 1}"
    parts = PARTS | {"task": "regression.Regression", "loss": "MSELoss"}
    return run_of(command, store, place, "price", [TABLE % ("price", "kind"), sizes], **parts)


@pytest.fixture(scope="module")
def signals(command, store, tmp_path_factory):
    """A run that classifies two-channel waves as slow or quick, from all file formats; quick waves vary in length."""
    place, random, steps = tmp_path_factory.mktemp("signals"), np.random.default_rng(1), np.arange(40)
    for name, speed in (("quick", 0.9), ("slow", 0.2)):
        (place / name).mkdir()
        for n in range(30):
            wave_of = np.sin(steps * speed + random.random((2, 1)) * 6)
            signal = wave_of * 0.5 + random.normal(0, 0.05, (2, 40))  # (2, 40)
            signal = signal[:, : 30 + n] if name == "quick" else signal
            if n % 3 == 0:
                np.save(place / name / f"{n}.npy", signal)
            elif n % 3 == 1:
                lines = "\n".join(",".join(f"{value:.6f}" for value in step) for step in signal.T)
                (place / name / f"{n}.csv").write_text(f"left,right\n{lines}\n")
            else:
                with wave.open(str(place / name / f"{n}.wav"), "wb") as file:
                    file.setnchannels(2)
                    file.setsampwidth(2)
                    file.setframerate(100)
                    file.writeframes(np.rint(signal.T.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return run_of(
        command, store, place, "waves",
        ["model.network.params={num_channels: auto, num_outputs: auto, width: 4}", "data.module.params.length=40"],
        data="deeplightning.data.signal_folder.SignalFolder", task="classif.Classification", network="signal.SignalNet",
        loss="CrossEntropyLoss",
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    """A server of the run in the fixture that a test's parameter names."""
    run = request.getfixturevalue(request.param)
    server = Server(run.folder, tmp_path_factory.mktemp("server") / "errors")
    server.folder = run.folder
    yield server
    assert server.stop() == 0


def ask(server, body, kind="application/json", path="/predict"):
    """Return status and answer to a body, which is sent as JSON unless it is bytes."""
    body = body if isinstance(body, bytes) else json.dumps(body)
    return server.ask("POST", path, body, {"Content-Type": kind})


def own_rows(folder, rows):
    """Compute the network's input, float32 (N, 4), from rows and the bundle's description of the columns."""
    spec = json.loads((folder / "bundle" / "bundle.json").read_text())["input"]["columns"]
    by_name = {column["name"]: column for column in spec}
    numbers = [
        [0.0 if row[name] in ("", None) else (float(row[name]) - by_name[name]["mean"]) / by_name[name]["std"]
         for name in ("age", "items")]
        for row in rows
    ]  # fmt: skip
    words = {name: ["", *by_name[name]["categories"]] for name in ("city", "new")}
    codes = [[words[name].index(row[name]) if row[name] in words[name] else 0 for name in words] for row in rows]
    return np.concatenate([np.array(numbers, np.float32), np.array(codes, np.float32)], 1)


def own_network(folder, outputs):
    """Return the network of a run with the bundle's weights."""
    from deeplightning.model.table_net import TableNet

    network = TableNet(2, outputs, [4, 3], width=16, depth=1)
    saved = load_file(folder / "bundle" / "weights.safetensors")
    network.load_state_dict({name.removeprefix("network."): value for name, value in saved.items()})
    return network.eval()


@pytest.mark.parametrize("server", ["classified_orders"], indirect=True)
def test_answers_to_rows_are_those_of_the_network(server, place):
    """200 rows in JSON and in CSV get the probabilities of plain torch, to 1e-5. Gaps are filled, and an unknown
    category has the code of all unknown ones. `predict` and the MLflow model answer alike."""
    rows = csv_rows(place / "orders.csv")[:200]
    rows[1] |= {"city": "Rome"}
    expected = own_network(server.folder, 2)(torch.from_numpy(own_rows(server.folder, rows))).softmax(1)
    status, reply = ask(server, {"rows": rows}, path="/predict?top_k=2")
    assert status == 200, reply
    answers = [
        [next(one["probability"] for one in answer["predictions"] if one["class"] == label) for label in (0, 1)]
        for answer in reply["predictions"]
    ]
    np.testing.assert_allclose(answers, expected.detach().numpy(), atol=1e-5)
    assert {answer["label"] for answer in reply["predictions"]} == {"large", "small"}
    assert dl.load_run(server.folder).predict(rows, top_k=2) == reply["predictions"]
    assert dl.load_run(server.folder).predict(pd.DataFrame(rows), top_k=2) == reply["predictions"]
    logged = logged_answers(RunFolder(server.folder), rows[:20])
    assert [answer["label"] for answer in logged] == [answer["label"] for answer in reply["predictions"][:20]]
    text = pd.DataFrame(rows).to_csv(index=False)
    assert ask(server, text.encode(), "text/csv; charset=utf-8", "/predict?top_k=2") == (status, reply)
    numbers = {"age": float(rows[2]["age"]), "items": int(rows[2]["items"]), "city": rows[2]["city"], "new": True}
    texts = numbers | {"new": "true", "age": rows[2]["age"]}
    assert ask(server, {"row": numbers}) == ask(server, {"rows": [texts]})


@pytest.mark.parametrize("server", ["classified_orders"], indirect=True)
@pytest.mark.parametrize(
    ("body", "kind", "status", "words"),
    [
        ({"rows": [{"age": 3}]}, "application/json", 400, "The columns items, city, new are missing"),
        ({"rows": [{"age": 3, "items": "x", "city": "", "new": ""}]}, "application/json", 400, "Column items: 'x' is"),
        ({"rows": [1]}, "application/json", 400, "rows is not a list of one or more objects"),
        ({"images": []}, "application/json", 400, "not an object with the one key rows"),
        (b"{", "application/json", 400, "is not JSON"),
        (b"[" * 100_000, "application/json", 413, "more values than a request may have"),
        ({"rows": [{}] * 257}, "application/json", 413, "257 rows; at most 256"),
        (b"age,items,city,new\n" + b"1,2,a,b\n" * 300, "text/csv", 413, "257 rows; at most 256"),
        (b"age,items,city,new\n1,2\n", "text/csv", 400, "Line 2 has 2 values, the header 4"),
        (b"age\xff", "text/csv", 400, "not in UTF-8"),
        (b"", "text/csv", 400, "has no body"),
        (b"x", "image/png", 415, "this server takes rows of a table; send"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(server, body, kind, status, words):
    """The error has what is wrong and what was expected, and the row, if there are several."""
    found, reply = ask(server, body, kind)
    assert (found, words in reply["ERROR"]) == (status, True), reply


@pytest.mark.parametrize("server", ["classified_orders"], indirect=True)
def test_the_server_describes_its_rows(server):
    """`/info` and `/openapi.json` describe the columns, and `/info` has a valid example row."""
    info = server.ask("GET", "/info")[1]
    assert (info["task"], info["labels"]) == ("table_classification", ["large", "small"])
    assert [column["name"] for column in info["input"]["columns"]] == ["age", "items", "city", "new"]
    assert ask(server, {"row": info["example"]})[0] == 200
    document = server.ask("GET", "/openapi.json")[1]
    bodies = document["paths"]["/predict"]["post"]["requestBody"]["content"]
    row = bodies["application/json"]["schema"]["properties"]["row"]
    assert row["properties"]["city"] == {"type": "string", "nullable": True}
    assert set(bodies) == {"application/json", "text/csv"}


@pytest.mark.parametrize("server", ["priced_orders"], indirect=True)
def test_predicted_numbers_are_in_the_unit_of_the_data(server, place, priced_orders):
    """200 prices equal plain torch's, scaled back by mean and deviation of the training prices; the interval is the
    prediction ± the 0.9 quantile of the absolute validation errors."""
    rows = csv_rows(place / "orders.csv")[:200]
    status, reply = ask(server, {"rows": rows})
    assert status == 200, reply
    model = load_file(server.folder / "bundle" / "weights.safetensors")
    assert not {"mean", "std"} & model.keys()
    outputs = own_network(server.folder, 1)(torch.from_numpy(own_rows(server.folder, rows)))[:, 0].detach().numpy()
    values = np.array([answer["predicted_value"] for answer in reply["predictions"]])
    assert dl.load_run(server.folder).predict(rows) == reply["predictions"]
    assert logged_answers(RunFolder(server.folder), rows[:20]) == reply["predictions"][:20]
    # Two points define the line that maps outputs to prices; the other 198 must lie on it.
    slope = (values[1] - values[0]) / (outputs[1] - outputs[0])
    np.testing.assert_allclose(values, values[0] + slope * (outputs - outputs[0]), rtol=1e-4)
    assert 6 < slope < 9  # the deviation of the prices is 7.2
    first = reply["predictions"][0]["predictions"][0]
    assert first["name"] == "price"
    half = first["high"] - first["value"]
    assert first["value"] - first["low"] == pytest.approx(half)
    tested = csv_rows(server.folder / "test_predictions.csv")
    errors = [abs(float(row["prediction"]) - float(row["target"])) for row in tested]
    assert np.mean([error <= half for error in errors]) > 0.7  # of 40 rows; the interval is for 0.9
    description = server.ask("GET", "/openapi.json")[1]["info"]["description"]
    assert description.startswith("Rows go in, numbers come out: price.")


@pytest.mark.parametrize("server", ["signals"], indirect=True)
def test_answers_to_signals_are_those_of_the_network(server, command, tmp_path):
    """Signals in JSON and .npy get the probabilities of plain torch, to 1e-5; shorter signals are padded."""
    from deeplightning.model.signal import SignalNet

    network = SignalNet(2, 2, 4)
    saved = load_file(server.folder / "bundle" / "weights.safetensors")
    network.load_state_dict({name.removeprefix("network."): value for name, value in saved.items()})
    spec = json.loads((server.folder / "bundle" / "bundle.json").read_text())["input"]
    assert spec["shape"] == [2, 40]
    random = np.random.default_rng(2)
    given = random.normal(0, 0.5, (200, 2, 40))
    mean, std = (np.array(spec[name])[:, None] for name in ("mean", "std"))
    with torch.no_grad():
        expected = network.eval()(torch.from_numpy(((given - mean) / std).astype(np.float32))).softmax(1).numpy()
    file = io.BytesIO()
    np.save(file, given)
    status, reply = ask(server, file.getvalue(), "application/octet-stream")
    assert status == 200, reply
    best = expected.argmax(1)
    assert [answer["predicted_class"] for answer in reply["predictions"]] == [str(number) for number in best]
    found = [float(answer["predicted_probability"]) for answer in reply["predictions"]]
    np.testing.assert_allclose(found, expected.max(1), atol=1e-5)
    assert ask(server, {"signals": given[:3].tolist()})[1] == {"predictions": reply["predictions"][:3]}
    assert ask(server, {"array": given[0].tolist()})[1] == reply["predictions"][0]
    short = given[0, :, :30]
    filled = np.pad(short, ((0, 0), (0, 10)))
    assert ask(server, {"signal": short.tolist()}) == ask(server, {"signal": filled.tolist()})
    described = server.ask("GET", "/openapi.json")[1]["paths"]["/predict"]["post"]["requestBody"]["content"]
    channel = described["application/json"]["schema"]["properties"]["signal"]["items"]
    assert channel == {"type": "array", "items": {"type": "number"}, "minItems": 1}
    files = tmp_path / "short.npy", tmp_path / "filled.npy"
    for path, signal in zip(files, (short, filled), strict=True):
        np.save(path, signal)
    answers = csv.reader(command("predict", server.folder, *files, cwd=tmp_path, code=0).out.splitlines())
    _, one, two = (line[-3:] for line in answers)
    assert one == two
    for body, kind, words in (
        ({"signal": given[0, :1].tolist()}, "application/json", "the shape 1 x 40, not 2 x 40"),
        (b"hello", "application/octet-stream", "not an array in numpy's format"),
    ):
        status, reply = ask(server, body, kind)
        assert (status // 100, words in reply["ERROR"]) == (4, True), reply


def test_sizes_of_the_network_follow_from_the_data(priced_orders, signals):
    """`auto` becomes the number of columns, categories, targets, channels or classes, also in the run's config."""
    sizes = [yaml.safe_load((run.folder / "cfg.yaml").read_text()) for run in (priced_orders, signals)]
    assert [cfg["model"]["network"]["params"] for cfg in sizes] == [
        {"num_numbers": 2, "cardinalities": [4, 3], "num_outputs": 1, "width": 16, "depth": 1},
        {"num_channels": 2, "num_outputs": 2, "width": 4},
    ]
    for words in (
        "num_outputs: auto → 1 (target_names of",
        "num_numbers: auto → 2 (table_spec of",
        "cardinalities: auto → [4, 3] (table_spec of",
    ):
        assert words in priced_orders.out + priced_orders.err
    assert "num_channels: auto → 2 (array_spec of" in signals.out + signals.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("age,kind\n" + "1,a\n" * 12, None),
        ("age,kind\n" + "2020-01-01,a\n" * 12, "columns.age: the values in .* are of type date32"),
        ("age,kind\n" + "1,a\n" * 11 + ",a\n", "column age, row .*: the value is missing"),
        ("age,kind\n" + "1,\n" * 11, "columns.kind: the values in .* are of type null"),
        ("age;kind\n" + "1;a\n" * 12, "Its header is one column; set data.module.params.delimiter to ';'"),
        ("age,sort\n1,a\n", "has no column 'kind'.* Its columns: age, sort"),
        (None, "is missing. Set data.root"),
    ],
)
def test_a_table_that_cannot_be_used_is_one_note(command, classified_orders, place, tmp_path, text, words):
    """A dry run reports one error with file, column and row, and none about sizes that depend on the data."""
    if text is not None:
        (tmp_path / "orders.csv").write_text(text)
    params = "data.module.params={train: orders.csv, target: kind}"
    sizes = "model.network.params={num_numbers: auto, cardinalities: auto, num_outputs: auto}"
    outcome = command("check", place / "kind.yaml", "--dry-run", params, sizes, f"data.root={tmp_path}", cwd=place)
    errors = [line for line in outcome.err.splitlines() if line.startswith("error")]
    assert (outcome.code, len(errors)) == ((0, 0) if words is None else (outcome.code, 1)), outcome
    assert words is None or (re.search(words, errors[0]) and outcome.code in (2, 3)), outcome


def test_a_checkpoint_of_other_rows_is_refused(command, classified_orders, place):
    """A run does not resume on data that is prepared differently: the network would get other inputs."""
    settings = [f"train.resume_ckpt={classified_orders.folder / 'last.ckpt'}", "train.num_epochs=3", "seed=4"]
    outcome = command("train", place / "kind.yaml", *CLASSIFIED, *settings, cwd=place)
    assert outcome.code in (2, 4), outcome
    assert "prepared differently from those of the data now: the training file" in outcome.err


def test_categories_that_the_network_lacks_are_refused_before_the_first_batch(command, classified_orders, place):
    """A table that has grown has more categories than a config with fixed sizes."""
    sizes = "model.network.params={num_numbers: 2, cardinalities: [3, 3], num_outputs: 2, width: 16, depth: 1}"
    outcome = command("train", place / "kind.yaml", CLASSIFIED[0], sizes, cwd=place, code=2)
    assert "inputs (2, 4) with cardinalities [4, 3]: index out of range" in outcome.err


def test_many_categories_need_32_bits(command, store, tmp_path):
    """In bf16, the codes 257 and 256 are equal; such a run is refused before its first batch."""
    rows = "".join(f"{n / 7:.3f},city {n % 300},{n % 2}.5\n" for n in range(3000))
    (tmp_path / "t.csv").write_text(f"x,city,y\n{rows}")
    command("init", "p", "--kind", "regression", "--data", "t.csv", cwd=tmp_path, code=0)
    words = ("engine.precision=bf16-true", "train.num_epochs=1", f"logger.params.tracking_uri={store}")
    refused = command("train", *words, cwd=tmp_path / "p", code=2).err
    assert "engine.precision: bf16-true rounds the codes of categories above 256; set 32" in refused
