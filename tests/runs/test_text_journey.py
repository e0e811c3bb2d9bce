"""From a tab-separated file to answers over HTTP, by the commands that a person gives."""

import json

import pytest
from commands import python
from served import ROOT, Server, logged_answers

import deeplightning as dl
from deeplightning.runfolder import RunFolder


@pytest.fixture(scope="module")
def run(command, store, tmp_path_factory):
    """The example at reduced size."""
    few = ["data.module.params.limit=1000", "data.module.params.max_size=90", "model.network.params.vocabulary_size=90"]
    settings = ["train.num_epochs=1", "data.batch_size=32", "stages=[train]", "logger.pictures=null"]
    config, place = ROOT / "examples" / "sst2" / "sst2.yaml", tmp_path_factory.mktemp("work")
    tracked = f"logger.params={{experiment_name: texts, tracking_uri: '{store}', system_metrics: false}}"
    return command("train", config, *few, *settings, "logger.log_model=true", tracked, cwd=place, code=0)


def test_a_run_of_texts_deploys_and_answers_json(run, tmp_path):
    """The training leaves a bundle, which answers as it stands; so it does in Python and as an MLflow model. The client
    prints a line for each text; neither the server nor the client imports torch or Lightning."""
    server = Server(run.folder, tmp_path / "errors", flags=("-X", "importtime"))
    try:
        texts = ["the film is wise .", "the plot is not wise ."]
        status, said = server.ask(
            "POST", "/predict", json.dumps({"texts": texts}), {"Content-Type": "application/json"}
        )
        assert status == 200
        assert dl.load_run(run.folder).predict(texts) == said["predictions"]
        assert (run.folder / "model" / "MLmodel").is_file()
        logged = logged_answers(RunFolder(run.folder), [{"text": text} for text in texts])
        for one, other in zip(said["predictions"], logged, strict=True):
            assert one["label"] == other["label"]
            assert float(one["predicted_probability"]) == pytest.approx(other["probability"], abs=1e-6)
        assert {one["label"] for one in said["predictions"]} <= {"negative", "positive"}
        info = server.ask("GET", "/info")[1]
        assert (info["task"], info["labels"]) == ("text_classification", ["negative", "positive"])
        assert info["run"]["folder_name"] == run.folder.name
        done = python("-m", "serve.predict", "--text", *texts, PREDICT_URL=f"{server.url}/predict")
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(line["text"], line["label"]) for line in lines] == [
            (text, one["label"]) for text, one in zip(texts, said["predictions"], strict=True)
        ]
    finally:
        assert server.stop() == 0
    imported = {line.rpartition("|")[2].strip() for line in (tmp_path / "errors").read_text().splitlines()}
    assert "deeplightning.text_spec" in imported
    assert imported.isdisjoint({"torch", "pytorch_lightning", "mlflow", "tokenizers", "transformers"})
