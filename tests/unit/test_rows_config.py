"""Requirements of the checklist on configs and messages that no other test file covers."""

import logging
import sys
from io import StringIO

import pytest
from click.testing import CliRunner
from test_progress import Terminal

from deeplightning.callbacks.log_lines import to_terminal
from deeplightning.cli import cli
from deeplightning.config.examine import examine, load_config
from deeplightning.config.explain import explain


@pytest.mark.parametrize("verb", ["train", "check", "explain"])
def test_help_explains_overrides(verb):
    """`--help` shows how to change a setting on the command line, with an example."""
    shown = " ".join(CliRunner().invoke(cli, [verb, "--help"]).output.split())
    assert "key=value sets, ~key removes, +list=[x] appends" in shown
    assert "model.optimizer.params.lr=0.1" in shown


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_explain_shows_the_precision_that_half_precision_becomes(engine, tiny):
    """On a CPU `16` becomes bf16 under every engine, and `explain` shows both."""
    report = examine(tiny, [f"engine.backend={engine}", "engine.processes=2", "engine.precision=16"])
    engine_section = explain(report).partition("\nengine:\n")[2].partition("\ntrain:\n")[0]
    assert "\n  precision: bf16-mixed" in engine_section
    assert "16 → bf16-mixed" in explain(report, "engine.precision")


@pytest.mark.parametrize("stream", [Terminal(), StringIO()], ids=["terminal", "file"])
def test_warnings_and_errors_stand_out_on_a_terminal(stream, tiny, place, monkeypatch, capsys):
    """On stderr they are yellow and red on a terminal, and plain in a file. Other messages go to stdout, uncoloured."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "stderr", stream)
    to_terminal(load_config(tiny))
    log = logging.getLogger("deeplightning.test_rows")
    log.info("some news"), log.warning("take care"), log.error("too late")
    yellow, red, end = ("\x1b[33m", "\x1b[31m", "\x1b[0m") if stream.isatty() else ("", "", "")
    assert stream.getvalue() == f"{yellow}warning{end}: take care\n{red}error{end}: too late\n"
    assert capsys.readouterr().out == "some news\n"
