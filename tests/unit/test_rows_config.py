"""What the checklist asks of configs and of the manual's tables of old settings, where the modules' own tests stop."""

import itertools
import logging
import re
import sys
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner

from deeplightning.callbacks.console import to_terminal
from deeplightning.checks.examine import examine, load_config
from deeplightning.checks.explain import explain
from deeplightning.cli import cli

ROOT = Path(__file__).parents[2]
ENGINES = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]


def test_three_arguments_of_a_wrong_kind_are_told_together(tiny):
    """A number as loss, a list as optimizer, a word as clipping: one answer with exit code 2 that names the keys."""
    report = examine(tiny, ["model.loss=5", "model.optimizer=[{type: torch.optim.SGD}]", "train.gradient_clip=norm"])
    assert [fault.key for fault in report.faults] == ["model.loss", "model.optimizer", "train.gradient_clip"]
    assert report.exit_code == 2


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            "deeplightning.task.img_classif.ImageClasification",
            "Did you mean deeplightning.task.img_classif.ImageClassification?",
        ),
        ("deeplightning.task.image_classif.ImageClassification", "Did you mean deeplightning.task.img_classif?"),
    ],
)
def test_a_task_that_is_not_there_is_told_with_the_nearest(task, words, tiny):
    """A class or a module that is misspelt under `model.module`: exit code 2."""
    (fault,) = examine(tiny, [f"model.module.type={task}"]).faults
    assert (fault.key, fault.exit_code) == ("model.module.type", 2)
    assert words in fault.message


@pytest.mark.parametrize("verb", ["train", "check", "explain"])
def test_help_explains_overrides(verb):
    """Who asks how a setting is changed from the command line is told, with an example."""
    said = " ".join(CliRunner().invoke(cli, [verb, "--help"]).output.split())
    assert "key=value sets, ~key removes, +list=[x] appends" in said
    assert "model.optimizer.params.lr=0.1" in said


def test_a_store_in_the_home_folder(command, tiny, place, tmp_path):
    """`~` in the tracking store's place is the home folder; what is not there is made, and nothing is called `~`."""
    settings = ["logger.params.tracking_uri='~/of mine/mlruns'", "train.num_epochs=1", "train.limit_batches={train: 1}"]
    done = command("train", tiny, *settings, cwd=place, HOME=str(tmp_path), code=0)
    assert done.folder.is_relative_to(tmp_path / "of mine" / "mlruns")
    assert (done.folder / "last.ckpt").is_file()


@pytest.mark.parametrize("engine", ENGINES)
def test_explain_shows_the_precision_that_half_precision_becomes(engine, tiny):
    """On CPU processes `16` is bf16 under every engine, and both are said."""
    report = examine(tiny, [f"engine.backend={engine}", "engine.processes=2", "engine.precision=16"])
    engine_section = explain(report).partition("\nengine:\n")[2].partition("\ntrain:\n")[0]
    assert "\n  precision: bf16-mixed" in engine_section
    assert "16 → bf16-mixed" in explain(report, "engine.precision")


def test_params_of_an_engine_are_no_list(tiny):
    """They are keyword arguments: a list is refused in words."""
    (fault,) = examine(tiny, ["engine={backend: ddp, processes: 2, params: [16]}"]).faults
    assert (fault.key, fault.exit_code) == ("engine.params", 2)
    assert "must be a mapping, not a list" in fault.message


def test_what_the_tables_name_is_taken(tiny):
    """What old settings are called today passes `check`: nineteen of ZeRO, those of input and output, of scaling and
    of activations, and those of DDP."""
    zero = (
        "{ignore_unused_parameters: true, round_robin_gradients: true, stage3_max_live_parameters: 1, "
        "stage3_max_reuse_distance: 1, stage3_prefetch_bucket_size: 1, stage3_param_persistence_threshold: 1, "
        "stage3_gather_16bit_weights_on_model_save: true, offload_optimizer: {device: cpu}, "
        "offload_param: {device: cpu}}"
    )
    params = (
        "{allgather_bucket_size: 1, allgather_partitions: true, contiguous_gradients: true, overlap_comm: true, "
        "reduce_bucket_size: 1, reduce_scatter: true, sub_group_size: 1, block_size: 1, queue_depth: 1, "
        "thread_count: 1, single_submit: true, overlap_events: true, initial_scale_power: 1, loss_scale: 1, "
        "loss_scale_window: 1, hysteresis: 1, min_loss_scale: 1, partition_activations: true, "
        "cpu_checkpointing: true, contiguous_memory_optimization: true, synchronize_checkpoint_boundary: true, "
        f"pin_memory: true, config: {{zero_optimization: {zero}}}}}"
    )
    settings = [f"engine={{backend: deepspeed_stage_3, processes: 2, params: {params}}}"]
    assert [str(fault) for fault in examine(tiny, settings).faults] == []


def table(page, start):
    """The rows of the first table of a page whose head begins so: each the cells by the names of their columns."""
    lines = (ROOT / "benchmarks" / page).read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {start} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), (lines[at], *lines[at + 2 :]))
    head, *cells = ([cell.strip(" `*") for cell in row.strip("|").split("|")] for row in rows)
    return [dict(reversed(list(zip(head, row, strict=True)))) for row in cells]  # of two columns of a name the first


@pytest.mark.parametrize(
    ("page", "start", "columns", "among"),
    [
        ("RESULTS.md", "program | CPU s", ("CPU s", "wall s", "MiB"), {"deeplightning", "raw PyTorch"}),
        ("engines.md", "engine", ("CPU s", "wall s", "parameters, KiB", "state, KiB"), {"null", *ENGINES}),
    ],
)
def test_speed_and_memory_are_told_as_they_were_measured(page, start, columns, among):
    """Beside other programs, and of each engine: numbers in every row."""
    rows = table(page, start)
    assert {row[start.partition(" |")[0]] for row in rows} >= among
    assert [row for row in rows for name in columns if not re.match(r"\d[\d,.]*", row[name])] == []


# ---- what a person sees


class Screen(StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("screen", [Screen(), StringIO()], ids=["terminal", "file"])
def test_warnings_and_errors_stand_out_on_a_terminal(screen, tiny, place, monkeypatch, capsys):
    """In yellow and red, on stderr; in a file the words remain. News go to stdout and are plain."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "stderr", screen)
    to_terminal(load_config(tiny))
    log = logging.getLogger("deeplightning.test_rows")
    log.info("some news"), log.warning("take care"), log.error("too late")
    yellow, red, end = ("\x1b[33m", "\x1b[31m", "\x1b[0m") if screen.isatty() else ("", "", "")
    assert screen.getvalue() == f"{yellow}warning{end}: take care\n{red}error{end}: too late\n"
    assert capsys.readouterr().out == "some news\n"
