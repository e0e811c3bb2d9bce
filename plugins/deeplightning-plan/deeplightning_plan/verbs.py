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
    """Print statistics of CONFIG's training set as YAML.

    They are the number of samples, the number per class, and the mean and std of its pictures for normalisation. No
    network is built.
    """
    from deeplightning_plan.training_set import statistics

    with stdout_for_the_result():
        text = statistics(load(config, overrides))
    say(text, nl=False)


@click.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config()
@click.option("--from", "low", type=float, default=1e-6, show_default=True, help="First rate.")
@click.option("--to", "high", type=float, default=1.0, show_default=True, help="Last rate.")
@click.option("--steps", type=click.IntRange(20), default=100, show_default=True, help="Optimizer steps, one per rate.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(), help="Folder for the curve; default: here.")
def lr(config: Path, overrides: tuple[str, ...], low: float, high: float, steps: int, out: Path) -> None:
    """Find a learning rate for CONFIG: the rate grows from step to step.

    The losses are written to files named after CONFIG, with .lr.csv and .lr.png. The last line on stdout is the
    override with the proposed rate. Nothing else is recorded or kept.
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
@click.option("--memory", metavar="SIZE", help="Memory limit, such as 8GB; required on the CPU.")
@click.option("--max", "most", type=click.IntRange(1), help="Largest batch to try; default: the training set.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Number of timed batches.")
def batch(config: Path, overrides: tuple[str, ...], memory: str | None, most: int | None, steps: int) -> None:
    """Find the largest batch of CONFIG that fits into memory, and the speed of each size.

    Each size is tried in its own process, on one device. The last line on stdout is the override with the largest
    batch. Nothing is recorded or kept.
    """
    cfg = load(config, overrides)
    from deeplightning_plan.batch_size import bytes_of, search

    limit = bytes_of(memory, "--memory") if memory is not None else None
    for line in search(config, overrides, limit, most, steps, cfg.redact_message):
        say(line)


@click.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config()
@click.option("--memory", is_flag=True, help="Print memory and time of the run under each engine instead.")
@click.option("--gpus", metavar="SPEC", help="With --memory or k8s: GPUs of a machine, such as 8x80GB or 8xH100.")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="With --memory or k8s: number of machines.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "k8s"]),
    help="With --memory: text (default) or json; alone, k8s: a job file for Kubernetes.",
)
@click.option("--image", metavar="IMAGE", help="With --format k8s: the container image, which contains your code.")
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

    Nothing is started. --memory counts one training step on tensors without memory; its table has the bytes of a
    process under each engine, which engines fit, the largest batch, and a proposal. --format k8s prints a file for
    `kubectl apply`, with a pod for each machine.
    """
    is_job = form == "k8s"
    if is_job and memory:
        raise click.UsageError("--format k8s prints processes, and --memory their memory: give one of them")
    if is_job != (image is not None):
        raise click.UsageError("--format k8s and --image go together: IMAGE contains Deep Lightning and your code")
    if memory or is_job:
        with stdout_for_the_result():
            from deeplightning_plan.memory_table import gpus_of, json_of, plan_memory, text_of

            cfg = _load_for_other_machine(config, overrides, importing=memory)
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

    for key, requested in (cfg.asked or {}).items():  # values resolved for this machine do not apply to others
        section, _, name = key.partition(".")
        setattr(getattr(cfg, section), name, requested)
    cfg.engine.num_nodes = nodes or cfg.engine.num_nodes
    name = cfg.logger.params.get("run_name") or config.stem
    return job_file(cfg, image, str(name), gpus.number if gpus else None).rstrip("\n")


def _load_for_other_machine(config: Path, overrides: tuple[str, ...], importing: bool) -> "Config":
    """Return a config for another machine, which may have other devices and lack this one's files.

    Raises:
        UserError: it is invalid on every machine.
    """
    from deeplightning.faults import error_of

    report = examine_config(config, overrides, importing=importing)
    of_this_machine = ("engine.gpus", "engine.num_nodes", "engine.processes")
    faults = [f for f in report.faults if f.key not in of_this_machine and f.exit_code != 3]
    if faults or report.config is None:
        raise error_of(faults or report.faults)
    return report.config
