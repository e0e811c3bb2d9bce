"""What the checklist asks of configs and messages, where the modules' own tests stop."""

import logging
import sys
from io import StringIO

import pytest
from click.testing import CliRunner

from deeplightning.callbacks.log_lines import to_terminal
from deeplightning.cli import cli
from deeplightning.config.examine import examine, load_config
from deeplightning.config.explain import explain


@pytest.mark.parametrize("verb", ["train", "check", "explain"])
def test_help_explains_overrides(verb):
    """Who asks how a setting is changed from the command line is told, with an example."""
    said = " ".join(CliRunner().invoke(cli, [verb, "--help"]).output.split())
    assert "key=value sets, ~key removes, +list=[x] appends" in said
    assert "model.optimizer.params.lr=0.1" in said


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_explain_shows_the_precision_that_half_precision_becomes(engine, tiny):
    """On CPU processes `16` is bf16 under every engine, and both are said."""
    report = examine(tiny, [f"engine.backend={engine}", "engine.processes=2", "engine.precision=16"])
    engine_section = explain(report).partition("\nengine:\n")[2].partition("\ntrain:\n")[0]
    assert "\n  precision: bf16-mixed" in engine_section
    assert "16 → bf16-mixed" in explain(report, "engine.precision")


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
