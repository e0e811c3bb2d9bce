"""Describe a run as Kubernetes objects for `deeplightning plan --format k8s`; nothing here talks to a cluster.

A Job in completion mode `Indexed` starts a pod for each machine. The index is the rank of the node, and a headless
Service gives the first pod an address that the others connect to
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
from deeplightning.tracking.store import locate
from deeplightning.words import is_address

WORKING_DIRECTORY = "/work"  # of the container; the image has the user's code there
MAX_RESTARTS = 3  # of each pod
_CONFIG = "/etc/deeplightning/config.yaml"
_MASTER_PORT = 29500
_RENDEZVOUS_SECONDS = 900  # pods of a job are scheduled minutes apart
_GRACE_SECONDS = 120  # to write `last.ckpt` after SIGTERM
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)")
_STORE_VARIABLE = "MLFLOW_TRACKING_URI"


def job_file(cfg: Config, image: str, name: str, gpus: int | None = None) -> str:
    """Return the objects of a run as YAML: ConfigMap, for several machines Service, and Job.

    The ConfigMap has the current config; later edits of its files have no effect. It contains no values from the
    environment: the container reads them from the Secret `NAME-environment`.

    Args:
        image: contains Deep Lightning, and the user's code in `WORKING_DIRECTORY`.
        name: of the objects; characters that Kubernetes does not allow are replaced.
        gpus: of each machine; None: as many as the config requests.

    Raises:
        ConfigError: the config has a launcher, lacks the number of GPUs of a machine, or has a store without a volume.
    """
    name = _label(name)
    store = _store(cfg)
    held = "~" if store is None and not locate(None).is_remote else store  # a folder that only a variable names
    for key, path in (("logger.params.tracking_uri", held), ("data.root", cfg.data.root)):
        if re.match(r"sqlite:|file:|~|(\.|/work)/?$", path or ""):  # a mount at /work would hide the image's code
            raise ConfigError(Fault("a volume needs a plain folder, such as mlruns", key))
    number = _gpus(cfg, gpus)
    settings: dict[str, Any] = cfg.public()
    settings["engine"] |= {"gpus": "auto" if number else None, "max_restarts": 0}
    if not cfg.train.fast and (cfg.train.seeds or 1) == 1:  # they exclude it; a group of seeds resumes by itself
        settings["train"]["resume_ckpt"] = settings["train"]["resume_ckpt"] or "auto"
    text = dump(settings)
    nodes = cfg.engine.num_nodes
    secrets = sorted({*_VARIABLE.findall(text), *([_STORE_VARIABLE] if store is None else [])})
    objects: list[dict[str, Any]] = []
    if nodes > 1:
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True}
        spec |= {"selector": {"batch.kubernetes.io/job-name": name}}
        objects.append({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
    objects.append(_job(cfg, image, name, number, secrets))
    lines = [
        "# kubectl apply --filename FILE",
        f"# Machines: {nodes}; on each {number} GPUs" if number else f"# Machines: {nodes}; no GPU",
        f"# The image contains Deep Lightning, and your code in {WORKING_DIRECTORY}.",
    ]
    if settings["train"]["resume_ckpt"] == "auto":
        lines.append("# A pod resumes the newest run of its experiment: give each job its own experiment_name.")
    if secrets:
        pairs = " ".join(f'--from-literal={variable}="${variable}"' for variable in secrets)
        lines.append(f"# Before: kubectl create secret generic {name}-environment {pairs}")
    if claims := [volume["name"] for volume in _volumes(cfg, name)[0] if "persistentVolumeClaim" in volume]:
        shared = ", which all pods write (ReadWriteMany)" if nodes > 1 else ""
        lines.append(f"# The cluster must have the volume claims {' and '.join(claims)}{shared}.")
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
            {"name": "MASTER_PORT", "value": str(_MASTER_PORT)},
            {"name": WAIT_VARIABLE, "value": str(_RENDEZVOUS_SECONDS)},
        ]
    cores = (gpus or engine.processes) * ((engine.threads or 1) + cfg.data.num_workers)
    limits = {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}
    container = {
        "name": "train",
        "image": image,
        "workingDir": WORKING_DIRECTORY,
        "command": ["deeplightning", "train", _CONFIG],
        "env": environment,
        "resources": {"requests": {"cpu": str(cores)}, **limits},
        "volumeMounts": mounts,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
        **({"subdomain": name} if nodes > 1 else {}),
    }
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},  # a drained node is not a failure
        # The config or a checkpoint is invalid: a retry would fail too.
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
    paths = {"runs": _store(cfg), "data": cfg.data.root}
    for volume, path in ((v, p) for v, p in paths.items() if p is not None and not is_address(p)):
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": volume}})
        mount = {"name": volume, "mountPath": posixpath.normpath(posixpath.join(WORKING_DIRECTORY, path))}
        mounts.append(mount | ({"readOnly": True} if volume == "data" else {}))
    return volumes, mounts


def _store(cfg: Config) -> str | None:
    """Return the address of the tracking store, or None if it is in the environment, as it may contain a password."""
    store = cfg.logger.params.get("tracking_uri")
    return str(store) if store is not None else None if os.environ.get(_STORE_VARIABLE) else "mlruns"


def _gpus(cfg: Config, given: int | None) -> int:
    if cfg.engine.launcher is not None:
        raise ConfigError(Fault("the job starts the processes itself; set the launcher to null", "engine.launcher"))
    found = cfg.engine.gpus or 0 if given is None else given
    if found == "auto":
        message = "auto counts the GPUs of this machine; set those of each machine with --gpus, such as 8xH100"
        raise ConfigError(Fault(message, "engine.gpus"))
    return found if isinstance(found, int) else len(found)


def _label(name: str) -> str:
    """Convert a name to a Kubernetes name: RFC 1123, short enough for the suffixes that Jobs append."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-")
    return found if found[:1].isalpha() else f"run-{found}".strip("-")
