"""The public door from Python: four lines train and track, and nothing happens before the last of them."""

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
    return {path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_four_lines_train_and_track(tiny, tracked, store):
    """`load_config`, `init_module` twice, `init_trainer`, `fit`: a finished run with weights, config and metrics; the
    same lines again are another run."""
    folders = []
    for _ in range(2):
        cfg = load_config(tiny)
        data, task = init_module(cfg, "data"), init_module(cfg, "model")
        trainer = init_trainer(cfg)
        trainer.fit(task, data)
        folders.append(trainer.logger.artifact_folder)
    callback_of(trainer, Record).close()  # else MLflow's variables name this run for other tests of the process
    assert folders[0] != folders[1]
    for folder in folders:
        assert folder.is_relative_to(store)
        assert {"cfg.yaml", "last.ckpt", "environment.json"} <= {path.name for path in folder.iterdir()}
        run = tracked(folder)
        assert run.status == "FINISHED"
        assert [step for step, _ in run.series()["train_loss"]] == [0, 4, 8, 12, 16]


def test_building_writes_nothing_and_opens_no_run(tiny, store, place):
    """A trainer, a task and a data module that are built and not used leave no file."""
    before = entries(store, place)
    claimed = {path for path in before if ".unsent" in str(path)}  # by runs of other tests, whose data are hashed late
    cfg = load_config(tiny)
    init_module(cfg, "data"), init_module(cfg, "model"), init_trainer(cfg)
    assert {path for path in entries(store, place) if ".unsent" not in str(path)} == before - claimed


def test_a_trainer_trains_again_and_tests(fit):
    """The trainer of a run tests too, with the weights in memory or of a checkpoint."""
    fitted = fit("train.num_epochs=1")
    first = fitted.trainer.test(fitted.task, fitted.data, verbose=False)
    with warnings.catch_warnings():
        second = fitted.trainer.test(
            fitted.task, fitted.data, ckpt_path=str(fitted.folder / "last.ckpt"), verbose=False
        )
    assert first == second
    assert (fitted.folder / "test_results.json").is_file()


def test_runs_of_the_same_second_have_their_own_folders(tiny, monkeypatch):
    """If no logger has a folder."""
    monkeypatch.setattr("deeplightning.callbacks.time.strftime", lambda _: "2026-11-30_10-00-00")
    folders = {callback_of(init_trainer(load_config(tiny)), Record).fallback for _ in range(2)}
    assert len(folders) == 2
