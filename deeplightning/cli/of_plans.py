"""`deeplightning plan`: what a run would start, and what it takes. Heavy imports stand inside, so that `--help` answers
at once."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deeplightning.cli.completion import complete_run
from deeplightning.cli.group import (
    LOOSE,
    OVERRIDES,
    absolute,
    cli,
    examine_config,
    newest_run,
    show_notices,
    stdout_for_the_result,
    with_config,
)
from deeplightning.process.terminal import say

if TYPE_CHECKING:
    from deeplightning.cli.memory import Gpus
    from deeplightning.config.schema import Config


def _config_of_run(options: dict[str, Any]) -> Path | None:
    """The config of the run that `--against` names.

    Raises:
        CheckpointError: the run was made elsewhere: a plan imports whatever its config names.
    """
    if (run := options.get("against")) is None:
        return None
    from deeplightning.checks.trust import is_own
    from deeplightning.faults import CheckpointError
    from deeplightning.runfolder import RunFolder
    from deeplightning.tracking.resolve import resolve_run

    folder = RunFolder(resolve_run(run))
    if not is_own(folder):
        raise CheckpointError(
            f"{folder.path}: this run was not made on this machine, and a plan imports what its config names; read the "
            f"config, then name it: deeplightning plan {shlex.quote(str(folder.config))} --against {shlex.quote(run)}"
        )
    return folder.config


@cli.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config(instead=_config_of_run)
@click.option("--memory", is_flag=True, help="Print what the run takes under each engine instead: bytes and time.")
@click.option(
    "--gpus", metavar="SPEC", help="With --memory or k8s: for these GPUs of a machine, such as 8x80GB or 8xH100."
)
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="With --memory or k8s: for so many machines.")
@click.option("--price", type=click.FloatRange(0), metavar="X", help="With --memory: what a GPU costs an hour.")
@click.option(
    "--against",
    metavar="RUN",
    callback=newest_run,
    shell_complete=complete_run,
    help="Print the plan beside what RUN took.",
)
@click.option(
    "--format",
    type=click.Choice(["text", "json", "k8s"]),
    help="With --memory: text (default) or json; alone, k8s: a job file for Kubernetes.",
)
@click.option("--image", metavar="IMAGE", help="With --format k8s: the container image, which has your own code.")
def plan(
    config: Path,
    overrides: tuple[str, ...],
    memory: bool,
    gpus: str | None,
    nodes: int | None,
    price: float | None,
    against: str | None,
    format: str | None,
    image: str | None,
) -> None:
    """Print what `train CONFIG` would start: processes, their environment, commands.

    Nothing is started. With --memory one training step is counted on tensors without memory, and the table has what a
    process holds under each engine, which of them fit, the largest batch, and a proposal. The config of --against is
    RUN's own, unless CONFIG is given. With --format k8s it is a file for `kubectl apply`, with a pod for each machine.
    """
    counts = memory or against is not None
    if format == "k8s" and counts:
        raise click.UsageError("--format k8s prints what is started, and --memory what it takes: give one of them")
    if (format == "k8s") != (image is not None):
        raise click.UsageError("--format k8s and --image go together: IMAGE has Deep Lightning and your own code")
    if counts:
        _plan_memory(config, overrides, gpus, nodes, price, against, format or "text")
        return
    if format == "k8s":
        _plan_job(config, overrides, gpus, nodes, str(image))
        return
    given = {"--gpus": gpus, "--nodes": nodes, "--price": price, "--format": format}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise click.UsageError(f"{wrong[0]} goes with --memory")
    from deeplightning.checks.explain import show
    from deeplightning.config.source import located
    from deeplightning.config.tree import dump
    from deeplightning.launch import Job, plan_of

    report = examine_config(config, overrides, importing=False)
    cfg = report.checked()
    show_notices(report)
    show(dump(plan_of(Job(cfg, located(config).absolute(), absolute(overrides)))))


def _plan_memory(
    config: Path,
    overrides: tuple[str, ...],
    gpus: str | None,
    nodes: int | None,
    price: float | None,
    run: str | None,
    format: str,
) -> None:
    """`plan --memory` and `plan --against`."""
    from deeplightning.cli import memory as of

    with stdout_for_the_result():
        cfg = _for_elsewhere(config, overrides, importing=True)
        wanted = _gpus(gpus)
        found, setting = of.plan_memory(cfg, wanted, nodes)
        if run is not None:
            from deeplightning.runfolder import RunFolder
            from deeplightning.tracking.resolve import resolve_run

            lines = of.against(found, cfg, RunFolder(resolve_run(run)))
        elif format == "json":
            lines = [of.json_of(found, setting, cfg, price)]
        else:
            lines = of.text_of(found, setting, cfg, price)
    say("\n".join(lines))


def _plan_job(config: Path, overrides: tuple[str, ...], gpus: str | None, nodes: int | None, image: str) -> None:
    """`plan --format k8s`."""
    from deeplightning.launch.kubernetes import job_file

    cfg = _for_elsewhere(config, overrides, importing=False)
    for key, asked in (cfg.asked or {}).items():  # what was settled for this machine does not hold for others
        section, _, name = key.partition(".")
        setattr(getattr(cfg, section), name, asked)
    cfg.engine.num_nodes = nodes or cfg.engine.num_nodes
    wanted = _gpus(gpus)
    name = cfg.logger.params.get("run_name") or config.stem
    say(job_file(cfg, image, str(name), wanted.number if wanted else None), nl=False)


def _for_elsewhere(config: Path, overrides: tuple[str, ...], importing: bool) -> "Config":
    """A config for another machine than this one, which may have other devices and no files of it.

    Raises:
        UserError: it is wrong on any machine.
    """
    from deeplightning.faults import error_of

    report = examine_config(config, overrides, importing=importing)
    elsewhere = ("engine.gpus", "engine.num_nodes", "engine.processes")
    faults = [f for f in report.faults if f.key not in elsewhere and f.exit_code != 3]
    if faults or report.config is None:
        raise error_of(faults or report.faults)
    return report.config


def _gpus(text: str | None) -> "Gpus | None":
    """What `--gpus` names."""
    from deeplightning.cli.memory import gpus_of

    try:
        return gpus_of(text) if text is not None else None
    except ValueError as error:
        raise click.UsageError(f"--gpus {error}") from error
