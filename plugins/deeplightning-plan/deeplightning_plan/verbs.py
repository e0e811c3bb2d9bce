"""Define the verbs `plan`, `lr`, `batch` and `stats`. Heavy imports are inside them, so that `--help` is fast."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplightning.cli.group import (
    LOOSE,
    OVERRIDES,
    absolute,
    examine_config,
    load,
    show_notices,
    stdout_for_the_result,
    with_config,
)
from deeplightning.process.terminal import say, show

if TYPE_CHECKING:
    from deeplightning.config.schema import Config
    from deeplightning_plan.memory_table import Gpus


@click.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config()
def stats(config: Path, overrides: tuple[str, ...]) -> None:
    """Print what CONFIG's training set is like, as YAML.

    Its number of samples, how many each class has, and the mean and std of its pictures to normalise by. No network is
    built.
    """
    from deeplightning_plan.training_set import statistics

    with stdout_for_the_result():
        text = statistics(load(config, overrides))
    say(text, nl=False)


@click.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config()
@click.option("--from", "low", type=float, default=1e-6, show_default=True, help="The first rate.")
@click.option("--to", "high", type=float, default=1.0, show_default=True, help="The last rate.")
@click.option("--steps", type=click.IntRange(20), default=100, show_default=True, help="Optimizer steps, one a rate.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(), help="The folder of the curve; default: here.")
def lr(config: Path, overrides: tuple[str, ...], low: float, high: float, steps: int, out: Path) -> None:
    """Test which learning rates train CONFIG: the rate grows from step to step.

    The losses are written as CONFIG's name with .lr.csv and .lr.png. The last line on stdout is the override with the
    proposed rate. Nothing is recorded or kept.
    """
    if not 0 < low < high:
        raise click.UsageError(f"--from {low:g} --to {high:g}: must be above 0, the first below the last")
    with stdout_for_the_result():
        load(config, overrides)  # shows its notices
        from deeplightning_plan.learning_rate import range_test

        lines = range_test(config, overrides, low, high, steps, out)
    say("\n".join(lines))


@click.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config()
@click.option("--memory", metavar="SIZE", help="How much may be used, such as 8GB; must be given on the CPU.")
@click.option("--max", "most", type=click.IntRange(1), help="The largest batch to try; default: the training set.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Batches that are timed.")
def batch(config: Path, overrides: tuple[str, ...], memory: str | None, most: int | None, steps: int) -> None:
    """Find the largest batch of CONFIG that fits into memory, and how fast each size is.

    Each size is tried in a process of its own, on one device. The last line on stdout is the override with the largest
    batch. Nothing is recorded or kept.
    """
    cfg = load(config, overrides)
    from deeplightning_plan.batch_size import bytes_of, search

    limit = bytes_of(memory, "--memory") if memory is not None else None
    for line in search(config, overrides, limit, most, steps, cfg.redact_message):
        say(line)


@click.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config()
@click.option("--memory", is_flag=True, help="Print what the run takes under each engine instead: bytes and time.")
@click.option("--gpus", metavar="SPEC", help="With --memory or k8s: GPUs of a machine, such as 8x80GB or 8xH100.")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="With --memory or k8s: number of machines.")
@click.option(
    "--format",
    "form",
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
    form: str | None,
    image: str | None,
) -> None:
    """Print what `train CONFIG` would start: processes, their environment, commands.

    Nothing is started. With --memory one training step is counted on tensors without memory, and the table has what a
    process holds under each engine, which of them fit, the largest batch, and a proposal. With
    --format k8s it is a file for `kubectl apply`, with a pod for each machine.
    """
    is_job = form == "k8s"
    if is_job and memory:
        raise click.UsageError("--format k8s prints what is started, and --memory what it takes: give one of them")
    if is_job != (image is not None):
        raise click.UsageError("--format k8s and --image go together: IMAGE has Deep Lightning and your own code")
    if memory or is_job:
        with stdout_for_the_result():
            from deeplightning_plan.memory_table import gpus_of, json_of, plan_memory, text_of

            cfg = _for_elsewhere(config, overrides, importing=memory)
            wanted = gpus_of(gpus) if gpus is not None else None
            if is_job:
                text = _job(config, cfg, wanted, nodes, str(image))
            else:
                found, setting = plan_memory(cfg, wanted, nodes)
                text = json_of(found, setting, cfg) if form == "json" else "\n".join(text_of(found, setting, cfg))
        say(text)
        return
    given = {"--gpus": gpus, "--nodes": nodes, "--format": form}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise click.UsageError(f"{wrong[0]} requires --memory")
    from deeplightning.config.source import located
    from deeplightning.config.tree import dump
    from deeplightning.launch import Job, plan_of

    report = examine_config(config, overrides, importing=False)
    cfg = report.checked()
    show_notices(report)
    show(dump(plan_of(Job(cfg, located(config).absolute(), absolute(overrides)))))


def _job(config: Path, cfg: "Config", gpus: "Gpus | None", nodes: int | None, image: str) -> str:
    """Return the text of `plan --format k8s`."""
    from deeplightning_plan.kubernetes import job_file

    for key, asked in (cfg.asked or {}).items():  # values resolved for this machine do not apply to others
        section, _, name = key.partition(".")
        setattr(getattr(cfg, section), name, asked)
    cfg.engine.num_nodes = nodes or cfg.engine.num_nodes
    name = cfg.logger.params.get("run_name") or config.stem
    return job_file(cfg, image, str(name), gpus.number if gpus else None).rstrip("\n")


def _for_elsewhere(config: Path, overrides: tuple[str, ...], importing: bool) -> "Config":
    """Return a config for another machine, which may have other devices and none of this one's files.

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
