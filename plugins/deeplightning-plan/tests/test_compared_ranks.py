"""A dry run of several processes compares what each rank builds, logs and exchanges."""

import pytest
from deeplightning_plan.compared_ranks import UNTRIED, Event, Ranks, compare

CONFIG = """\
seed: 7
data:
  module: {type: deeplightning.data.digits.Digits, params: {limit: 150}}
  batch_size: 16
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1}
"""

RANKS = """\
import torch

from deeplightning.task.img_classif import ImageClassification


class OnOneRank(ImageClassification):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            self.log("extra", loss.detach(), sync_dist=True)
        return loss


class Gathers(ImageClassification):
    def validation_step(self, batch, batch_idx):
        if self.global_rank == 1:
            self.all_gather(torch.ones(2))
        return super().validation_step(batch, batch_idx)


class Right(ImageClassification):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            self.log("extra", loss.detach(), rank_zero_only=True)
        self.log("every", loss.detach(), sync_dist=True)
        return loss
"""

LOST = "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:561] Connection closed by peer"
"""An error of a process whose peer has ended."""

PARTINGS = {
    "OnOneRank": "model.module: rank 0 logs `extra` (own_ranks.py:10) and rank 1 does not: with `sync_dist=True` a run",
    "Gathers": "rank 1 enters all_gather (own_ranks.py:17); a run would wait there for ever. Every rank must enter",
}


@pytest.mark.run
def test_a_dry_run_of_several_processes_names_what_one_rank_does_alone(command, tmp_path):
    """What would hang a run is found before it: the name, the line and the rank."""
    (tmp_path / "own_ranks.py").write_text(RANKS)
    (tmp_path / "c.yaml").write_text(CONFIG)

    def start(task):
        words = ("check", "c.yaml", "--dry-run", "engine.processes=2", f"model.module.type=own_ranks.{task}")
        return command.start(*words, cwd=tmp_path)

    running = {task: start(task) for task in (*PARTINGS, "Right")}
    for task, words in PARTINGS.items():
        outcome = running[task].end()
        assert outcome.code == 2, outcome
        assert words in outcome.err
        assert outcome.err.count("error: ") == 1
    outcome = running["Right"].end()
    assert outcome.code == 0, outcome
    assert "unchecked" not in outcome.err


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([("collective", "barrier")], [], None),
        ([("collective", "barrier")], [("collective", "barrier")], None),
        ([("collective", "barrier"), ("end",)], [("collective", "barrier")], None),
        ([("log", "a"), ("log", "b"), ("end",)], [("log", "b"), ("log", "a"), ("end",)], ""),
        ([("collective", "barrier"), ("collective", "barrier")], [("collective", "barrier"), ("end",)],
         "rank 0 enters barrier where rank 1 enters none any more; a run would wait there for ever."),
        ([("log", "a"), ("end",)], [("end",)], "rank 0 logs `a` and rank 1 does not"),
        ([("error", "E: x")], [("error", "E: x")], "with two processes it fails: E: x"),
        ([("collective", "barrier")], [("error", "E: x")], "rank 1 fails where rank 0 does not: E: x"),
        ([("error", LOST)], [], None),
        ([("error", LOST)], [("error", "E: x")], "rank 1 fails where rank 0 does not: E: x"),
        ([("error", "E: x")], [("error", LOST)], "rank 0 fails where rank 1 does not: E: x"),
        ([("error", LOST)], [("error", "RuntimeError: Broken pipe")], f"rank 0 fails: {LOST}; and rank 1:"),
    ],
)  # fmt: skip
def test_where_two_processes_part_is_seen_as_soon_as_it_is_certain(one, other, words):
    """Nobody waits for a rank that will not come; while either may still come, nothing is said. A process that only
    lost its connection is not the cause."""
    told = compare([Event(*event) for event in one], [Event(*event) for event in other])
    assert told == words if not words else words in str(told)


def test_processes_that_cannot_compute_gradients_are_untried():
    """After a fork torch refuses it where the parent has computed some; that is no fault of the config."""

    def act(rank, report):
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    with Ranks(act) as ranks:
        assert ranks.difference() == (UNTRIED, False)
