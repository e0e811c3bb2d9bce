"""The Python API for a training of one's own: four lines train and track, and only the last one has effects."""

import sys
import warnings

import pytest

from deeplightning.callbacks import callback_of
from deeplightning.callbacks.record import Record
from deeplightning.config.examine import load_config
from deeplightning.run.assemble import init_module, init_trainer


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def entries(*folders):
    """Return what is in folders, without compiled code and claims of other tests' runs, whose data are hashed late."""
    found = (path for folder in folders for path in folder.rglob("*"))
    return {path for path in found if "__pycache__" not in path.parts and ".unsent" not in str(path)}


def test_four_lines_train_and_track(tiny, tracked, store):
    """Four lines give a finished run with weights, config and metrics; the same lines again give another run."""
    folders = []
    for _ in range(2):
        cfg = load_config(tiny)
        data, task = init_module(cfg, "data"), init_module(cfg, "model")
        trainer = init_trainer(cfg)
        trainer.fit(task, data)
        folders.append(trainer.logger.artifact_folder)
    callback_of(trainer, Record).close()  # otherwise MLflow's variables name this run in later tests
    assert folders[0] != folders[1]
    for folder in folders:
        assert folder.is_relative_to(store)
        assert {"cfg.yaml", "last.ckpt", "environment.json"} <= {path.name for path in folder.iterdir()}
        run = tracked(folder)
        assert run.status == "FINISHED"
        assert [step for step, _ in run.series()["train_loss"]] == [0, 4, 8, 12, 16]


def test_building_writes_nothing_and_opens_no_run(tiny, store, place):
    """Building a trainer, a task and a data module creates no file."""
    before, cfg = entries(store, place), load_config(tiny)
    init_module(cfg, "data"), init_module(cfg, "model"), init_trainer(cfg)
    assert entries(store, place) == before


def test_a_trainer_trains_again_and_tests(fit):
    """The trainer of a run can test the weights in memory or of a checkpoint, with the same results."""
    fitted = fit("train.num_epochs=1")
    parts, last = (fitted.task, fitted.data), str(fitted.folder / "last.ckpt")
    first = fitted.trainer.test(*parts, verbose=False)
    with warnings.catch_warnings():
        assert fitted.trainer.test(*parts, ckpt_path=last, verbose=False) == first
    assert (fitted.folder / "test_results.json").is_file()


def test_runs_of_the_same_second_have_their_own_folders(tiny, monkeypatch):
    """Without a logger that has a folder, runs of the same second get different folders."""
    monkeypatch.setattr("deeplightning.callbacks.time.strftime", lambda _: "2026-11-30_10-00-00")
    folders = {callback_of(init_trainer(load_config(tiny)), Record).fallback for _ in range(2)}
    assert len(folders) == 2


def test_a_token_in_the_arguments_of_a_script_is_not_kept(tiny, tracked, monkeypatch):
    """The command that a run records has no text that looks like a secret."""
    monkeypatch.setattr(sys, "argv", ["fit.py", "--password", "hunter-47-clear"])
    cfg = load_config(tiny)
    data, task, trainer = init_module(cfg, "data"), init_module(cfg, "model"), init_trainer(cfg)
    trainer.fit(task, data)
    folder = trainer.logger.artifact_folder
    callback_of(trainer, Record).close()
    assert "fit.py --password" in (folder / "environment.json").read_text()
    assert "hunter-47" not in (folder / "environment.json").read_text()
    assert "hunter-47" not in tracked(folder).tags["command"]
