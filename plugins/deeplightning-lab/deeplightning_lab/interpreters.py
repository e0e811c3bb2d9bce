"""Match two Python environments to the packages of two runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from deeplightning.faults import SetupError
from deeplightning.reproduce.past import PastRun

_TIMEOUT_SECONDS = 60
_VERSIONS_SCRIPT = """\
import importlib.metadata, json, sys
found = {"python": ".".join(map(str, sys.version_info[:3]))}
for name in json.loads(sys.argv[1]):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def interpreters(good: PastRun, bad: PastRun, other: str | None) -> tuple[str, str]:
    """Return the interpreters for two runs: this one for both, or the other one for the run whose packages it has.

    Args:
        other: the interpreter of a second environment.

    Raises:
        SetupError: the versions in the two environments do not match those of the two runs, or `other` cannot be used.
    """
    if other is None:
        return sys.executable, sys.executable
    if os.sep in other:  # the runs have another working directory; a link of a venv is not resolved
        other = str(Path(other).absolute())
    one, two = _recorded_versions(good), _recorded_versions(bad)
    names = sorted(name for name in {*one, *two} if one.get(name) != two.get(name))
    if not names:
        raise SetupError(f"--environment {other}: both runs were made with the same packages; leave it out")
    here, there = (_installed_versions(python, names) for python in (sys.executable, other))
    for first, second, pythons in (
        (there, here, (other, sys.executable)),
        (here, there, (sys.executable, other)),
    ):
        if not (_differ(first, one, names) or _differ(second, two, names)):
            return pythons
    raise SetupError(
        f"--environment {other}: one of the two environments must have the packages of GOOD and the other those of "
        f"BAD. GOOD: {_listed(one, names)}; BAD: {_listed(two, names)}; {sys.executable}: {_listed(here, names)}; "
        f"{other}: {_listed(there, names)}"
    )


def _recorded_versions(run: PastRun) -> dict[str, str]:
    """Return the versions of packages and Python that a run recorded. Deep Lightning itself is switched as code."""
    environment = run.environment
    found = dict(environment.get("packages") or {}) | (dict(run.code.packages) if run.code is not None else {})
    found["python"] = (environment.get("python") or {}).get("version")
    return {name: str(version) for name, version in found.items() if version and name != "deeplightning"}


def _installed_versions(python: str, names: list[str]) -> dict[str, str]:
    try:
        command = [python, "-I", "-c", _VERSIONS_SCRIPT, json.dumps(names)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        return {str(name): str(version) for name, version in json.loads(result.stdout).items()}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SetupError(
            f"--environment {python}: this Python interpreter cannot be used ({error}); name one such as "
            "OTHER/.venv/bin/python"
        ) from error


def _differ(found: Mapping[str, str], wanted: Mapping[str, str], names: list[str]) -> bool:
    return any(found.get(name) != wanted.get(name) for name in names)


def _listed(versions: Mapping[str, str], names: list[str]) -> str:
    shown = [f"{name} {versions.get(name, 'none')}" for name in names[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
