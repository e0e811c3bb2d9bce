"""Describe a run as Kubernetes objects for `deeplightning plan --format k8s`; nothing here talks to a cluster.

A Job in completion mode `Indexed` starts a pod for each machine. The index is the rank of the node, and a headless
Service gives the first pod the address at which the others find it
(https://kubernetes.io/docs/concepts/workloads/controllers/job/).
"""

from __future__ import annotations

import os
import posixpath
import re
import textwrap
from typing import Any

from deeplightning.config.schema import Config
from deeplightning.config.tree import dump
from deeplightning.faults import ConfigError, Fault
from deeplightning.process.rendezvous import WAIT_VARIABLE
from deeplightning.words import is_address

WORKING_DIRECTORY = "/work"  # of the container: the image has the user's own code there
MAX_RESTARTS = 3  # of each pod
_CONFIG = "/etc/deeplightning/config.yaml"
_PORT = 29500
_RENDEZVOUS_SECONDS = 900  # pods of a job are scheduled minutes apart
_GRACE_SECONDS = 120  # to write `last.ckpt` after SIGTERM
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)")
_STORE = "MLFLOW_TRACKING_URI"


def job_file(cfg: Config, image: str, name: str, gpus: int | None = None) -> str:
    """Return the objects of a run as YAML: ConfigMap, for several machines Service, and Job.

    The ConfigMap has the present config; later edits of its files have no effect. It contains no value that came from
    the environment: the container reads it from the Secret `NAME-environment`.

    Args:
        image: has Deep Lightning, and the user's own code in `WORKING_DIRECTORY`.
        name: of the objects; characters that Kubernetes does not allow are replaced.
        gpus: of each machine; None: as many as the config names.

    Raises:
        ConfigError: the config has a launcher, or does not say how many GPUs a machine has.
    """
    name = _label(name)
    number = _gpus(cfg, gpus)
    settings: dict[str, Any] = cfg.public()
    settings["engine"] |= {"gpus": "auto" if number else None, "max_restarts": 0}
    settings["train"]["resume_ckpt"] = settings["train"]["resume_ckpt"] or "auto"
    text = dump(settings)
    nodes = cfg.engine.num_nodes
    secrets = sorted({*_VARIABLE.findall(text), *([_STORE] if _store(cfg) is None else [])})
    objects: list[dict[str, Any]] = []
    if nodes > 1:
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True}
        spec |= {"selector": {"batch.kubernetes.io/job-name": name}}
        objects.append({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
    objects.append(_job(cfg, image, name, number, secrets))
    lines = [
        "# kubectl apply --filename FILE",
        f"# Machines: {nodes}; on each {number} GPUs" if number else f"# Machines: {nodes}; no GPU",
        f"# The image has Deep Lightning, and your own code in {WORKING_DIRECTORY}.",
    ]
    if secrets:
        pairs = " ".join(f'--from-literal={variable}="${variable}"' for variable in secrets)
        lines.append(f"# Before: kubectl create secret generic {name}-environment {pairs}")
    if claims := [volume["name"] for volume in _volumes(cfg, name)[0] if "persistentVolumeClaim" in volume]:
        shared = ", which all pods write (ReadWriteMany)" if nodes > 1 else ""
        lines.append(f"# The cluster has the volume claims {' and '.join(claims)}{shared}.")
    config = dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}})
    config += "data:\n  config.yaml: |\n" + textwrap.indent(text, "    ")
    return "\n".join(lines) + "\n" + "---\n".join([config, *map(dump, objects)])


def _job(cfg: Config, image: str, name: str, gpus: int, secrets: list[str]) -> dict[str, Any]:
    nodes, engine = cfg.engine.num_nodes, cfg.engine
    volumes, mounts = _volumes(cfg, name)
    environment: list[dict[str, Any]] = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": f"{name}-environment", "key": variable}}}
        for variable in secrets
    ]
    if nodes > 1:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        environment += [
            {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
            {"name": "MASTER_PORT", "value": str(_PORT)},
            {"name": WAIT_VARIABLE, "value": str(_RENDEZVOUS_SECONDS)},
        ]
    cores = (gpus or engine.processes) * ((engine.threads or 1) + cfg.data.num_workers)
    resources: dict[str, Any] = {"requests": {"cpu": str(cores)}}
    if gpus:
        resources["limits"] = {"nvidia.com/gpu": gpus}
    container = {
        "name": "train",
        "image": image,
        "workingDir": WORKING_DIRECTORY,
        "command": ["deeplightning", "train", _CONFIG],
        "env": environment,
        "resources": resources,
        "volumeMounts": mounts,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    if nodes > 1:
        pod["subdomain"] = name
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},  # a drained node is not a failure
        # The config or a checkpoint is wrong: another try would fail too.
        {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [2, 4]}},
    ]
    spec: dict[str, Any] = {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": MAX_RESTARTS * nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _volumes(cfg: Config, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod, and their mounts in its container."""
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # processes and loader workers share memory there
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": posixpath.dirname(_CONFIG), "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for volume, place in {"runs": _store(cfg), "data": cfg.data.root}.items():
        if place is None or is_address(place):
            continue
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": volume}})
        mount = {"name": volume, "mountPath": posixpath.normpath(posixpath.join(WORKING_DIRECTORY, place))}
        mounts.append(mount | ({"readOnly": True} if volume == "data" else {}))
    return volumes, mounts


def _store(cfg: Config) -> str | None:
    """Return the address of the tracking store, or None if the environment has it, which may hold a password."""
    store = cfg.logger.params.get("tracking_uri")
    return str(store) if store is not None else None if os.environ.get(_STORE) else "mlruns"


def _gpus(cfg: Config, given: int | None) -> int:
    engine = cfg.engine
    if engine.launcher is not None:
        message = "a launcher starts processes, and a job file does so in its place; set it to null"
        raise ConfigError(Fault(message, "engine.launcher"))
    found = engine.gpus or 0 if given is None else given
    if found == "auto":
        message = "auto counts the GPUs of the machine; name how many each has by --gpus, such as 8xH100"
        raise ConfigError(Fault(message, "engine.gpus"))
    return found if isinstance(found, int) else len(found)


def _label(name: str) -> str:
    """Convert a name to a Kubernetes name: RFC 1123, short enough for the suffixes that Jobs append."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-")
    return found if found[:1].isalpha() else f"run-{found}".strip("-")
