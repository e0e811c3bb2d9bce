"""Turn a run into the command that serves it, with the settings of its config and of the command line.

A run with a bundle is served without torch, and nothing that its config names is imported. Otherwise a bundle is
exported first; if ONNX cannot express the network, torch serves the run (`deeplightning.torch_server`). Both import
what the config names, if `deeplightning.config.trust` allows it.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence

from deeplightning.config.examine import section
from deeplightning.config.schema import Serve, keys
from deeplightning.config.source import read
from deeplightning.config.tree import entry_at, line, plain
from deeplightning.config.trust import RunConfig, refuse_links, run_config
from deeplightning.faults import CheckpointError, ConfigError, Fault, nearest
from deeplightning.private.lazy_imports import import_lazily
from deeplightning.process.terminal import say
from deeplightning.runfolder import RunFolder
from deeplightning.tracking import resolve_run

TORCH_COST = "at 0.6 GB instead of 0.1 GB with a bundle, and 3 to 12 times the CPU time per answer"
"""PSS of all processes, and a forward pass of a resnet18 at 64 x 64 and a small network for digits, one thread (torch
2.15, November 2026)."""


def command(run: str, overrides: Sequence[str] = (), allow: Sequence[str] = ()) -> list[str]:
    """Return the program and the arguments that serve a run over HTTP.

    Args:
        run: an argument of `deeplightning.tracking.resolve_run`, or the folder of a bundle or of an MLflow model.
        overrides: of the config's section `serve`.
        allow: further modules, such as `own_network`, that the config of a run that was not made here may name.

    Raises:
        ConfigError: an override or the section `serve` is wrong, the variable with the server's key is not set, or the
            precision is not fp32 and the run cannot have a bundle.
        CheckpointError: there is no such run, it cannot be exported, or its config names foreign code.
    """
    folder = RunFolder(resolve_run(run, None))
    in_mlflow_model = folder.path / "artifacts" / folder.bundle.name  # see `deeplightning.tracking.flavour`
    bundles = [path for path in (folder.path, in_mlflow_model) if (path / folder.bundle_card.name).is_file()]
    config = run_config(folder, allow, "serve") if folder.config.is_file() and not bundles else None
    settings = _settings(config, overrides)
    if config is not None:
        refuse_links(folder)
    flags = [*_flags(settings)]
    if bundles:
        return [sys.executable, "-P", "-m", "serve", str(bundles[0]), *flags]
    has_bundle = folder.bundle_card.is_file()
    models = {"int8": folder.bundle_int8, "fp16": folder.bundle_fp16}
    if not has_bundle or (settings.precision in models and not models[settings.precision].is_file()):
        import_lazily()
        from deeplightning.export.bundle import NotExpressible
        from deeplightning.run.make_bundle import export_run, quantize_run

        try:
            if not has_bundle:
                export_run(folder, allow, "serve")
        except NotExpressible as error:
            if settings.precision in models:
                message = f"{settings.precision} requires a bundle, which this run cannot have: {error}"
                raise ConfigError(Fault(message, "serve.precision")) from error
            say(f"torch answers from the checkpoint, {TORCH_COST}: {error}", err=True)
            allowed = [f"--allow={module}" for module in allow]
            return [sys.executable, "-P", "-m", "deeplightning.torch_server", str(folder.path), *flags, *allowed]
        if settings.precision == "int8":
            say(quantize_run(folder, allow), err=True)
        elif settings.precision == "fp16":
            from deeplightning.export.fp16 import halve

            say(f"fp16: answers differ by up to {halve(folder):.3g}; kept as {folder.bundle_fp16}", err=True)
    return [sys.executable, "-P", "-m", "serve", str(folder.bundle), *flags]


def _flags(settings: Serve) -> Iterator[str]:
    """Yield options of the server for the settings that differ from the defaults, which the server has too."""
    for name in (field.name for field in keys(Serve)):
        value, option = getattr(settings, name), f"--{name.replace('_', '-')}"
        if value != getattr(Serve(), name):
            text = ",".join(value) if isinstance(value, list) else value
            yield option if value is True else f"{option}={text}"


def _settings(config: RunConfig | None, overrides: Sequence[str]) -> Serve:
    """Return the section `serve` of a run's config, without reading the other sections.

    A foreign config sets neither the address that the server listens on, nor the variable that contains its key.
    """
    known = [f"serve.{field.name}" for field in keys(Serve)]
    for text in overrides:
        name, place = text.lstrip("~+").partition("=")[0].strip(), f"override {text}"
        if text.startswith("-"):
            raise ConfigError(Fault("unknown option, see --help", place=place))
        if name.partition(".")[0] != "serve":
            near = nearest(name if "." in name else f"serve.{name}", known)
            raise ConfigError(Fault(f"only keys of `serve` can be set when a run is served.{near}", name, place))
    removals = list[str]()
    if config is not None:
        written = read(config)
        if not config.is_trusted and (host := entry_at(written.root, ("serve", "host"))) is not None:
            removals.append("~serve.host")
            if host.value != Serve().host:
                say(f"serve.host {line(plain(host))} of {config.path} is ignored; use --host to set it", err=True)
        variable = entry_at(written.root, ("serve", "api_key_env"))
        is_set = any(text.lstrip("~").startswith(("serve.api_key_env", "serve=")) for text in overrides)
        if not config.is_trusted and variable is not None and variable.value is not None and not is_set:
            message = (
                f"this run was not made here by you, and its config names the variable {line(plain(variable)):.60} "
                "of this machine. Set serve.api_key_env=NAME, or serve.api_key_env=null for a server without a key"
            )
            fault = Fault(message, "serve.api_key_env", variable.place, exit_code=CheckpointError.exit_code)
            raise CheckpointError(fault)
    source = read(config, [*removals, *overrides])
    settings: Serve = section("serve", source)
    if (key := settings.api_key_env) is None:
        return settings
    # A key itself is never on a command line, only the name of its variable.
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", key):  # perhaps the key itself, so it is not repeated
        raise ConfigError(Fault("must be the name of an environment variable, not its value", "serve.api_key_env"))
    if not os.environ.get(key):
        state = "is empty" if key in os.environ else "is not set"
        message = f"the variable {key} {state}; set it to the key that clients must send, or serve.api_key_env=null"
        raise ConfigError(Fault(source.secrets.redact(message), "serve.api_key_env"))
    return settings
