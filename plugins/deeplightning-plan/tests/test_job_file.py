"""`deeplightning plan --format k8s` writes valid Kubernetes objects that train the config."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import free_port

from deeplightning.config.examine import examine

ROOT = Path(__file__).parents[3]
BASE = ROOT / "configs" / "base.yaml"


@pytest.fixture
def planned(command, place):
    """`planned(word, …)` plans a job; returns its objects by kind, and the comments."""

    def plan(*words, image="registry.example.org/train:1", **variables):
        done = command("plan", BASE, "--format", "k8s", "--image", image, *words, cwd=place, **variables, code=0)
        comments = [line for line in done.out.splitlines() if line.startswith("#")]
        return {found["kind"]: found for found in yaml.safe_load_all(done.out)}, "\n".join(comments)

    return plan


def container_of(kinds):
    (container,) = kinds["Job"]["spec"]["template"]["spec"]["containers"]
    return container


def test_one_machine_needs_no_service(planned):
    """The job has one CPU pod, which resumes the run of a lost pod."""
    kinds, comments = planned("engine.processes=2", "data.num_workers=1")
    assert set(kinds) == {"ConfigMap", "Job"}
    container = container_of(kinds)
    assert container["env"] == []
    assert container["resources"] == {"requests": {"cpu": "4"}}
    config = yaml.safe_load(kinds["ConfigMap"]["data"]["config.yaml"])
    assert (config["engine"]["processes"], config["train"]["resume_ckpt"]) == (2, "auto")
    assert kinds["Job"]["metadata"]["name"] == "base"
    assert "Machines: 1; no GPU" in comments


def test_several_machines_with_gpus(planned):
    """Each pod gets its rank from its index, and the address of the first pod from its name."""
    name = "logger.params.run_name='My Run_7'"
    kinds, comments = planned("--gpus", "8xH100", "--nodes", "2", name, "engine.backend=fsdp")
    assert {each["metadata"]["name"] for each in kinds.values()} == {"my-run-7"}
    spec, pod = kinds["Job"]["spec"], kinds["Job"]["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert pod["subdomain"] == kinds["Service"]["metadata"]["name"]
    assert kinds["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": "my-run-7"}
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    container = container_of(kinds)
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["MASTER_ADDR"] == "my-run-7-0.my-run-7"
    assert "NODE_RANK" in variables
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    engine = yaml.safe_load(kinds["ConfigMap"]["data"]["config.yaml"])["engine"]
    assert (engine["num_nodes"], engine["gpus"], engine["backend"]) == (2, "auto", "fsdp")
    assert "ReadWriteMany" in comments


def test_every_mount_has_its_volume(planned):
    """The folders of runs and of data are volumes, which outlive a pod; remote ones need none."""
    kinds, _ = planned("data.root=/data/digits")
    pod = kinds["Job"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(kinds)["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert (mounts["runs"], mounts["data"]) == ("/work/mlruns", "/data/digits")
    kinds, _ = planned("data.root=s3://bucket/digits", "logger.params.tracking_uri=http://mlflow:5000")
    assert {mount["name"] for mount in container_of(kinds)["volumeMounts"]} == {"config", "shm"}


def test_what_the_environment_gave_goes_by_a_secret(planned):
    """The file has no values of environment variables, but the command that creates a secret with them."""
    words = ["logger.params.tracking_uri='http://me:${oc.env:TRACKING_WORD}@mlflow:5000'"]
    kinds, comments = planned(*words, TRACKING_WORD="tiger-42")
    assert "tiger-42" not in str(kinds) + comments
    (variable,) = container_of(kinds)["env"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "base-environment", "key": "TRACKING_WORD"}}
    assert 'kubectl create secret generic base-environment --from-literal=TRACKING_WORD="$TRACKING_WORD"' in comments


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--format", "k8s"], 2, "--image"),
        (["--image", "x"], 2, "--format k8s"),
        (["--format", "k8s", "--image", "x", "--memory"], 2, "one of them"),
        (["--format", "k8s", "--image", "x", "--gpus", "8xB9000"], 2, "B9000"),
        (["--format", "k8s", "--image", "x", "engine.gpus=auto"], 2, "--gpus, such as 8xH100"),
        (["--format", "k8s", "--image", "x", "engine.launcher.type=deeplightning.launch.Local"], 2, "engine.launcher"),
        (["--format", "k8s", "--image", "x", "train.num_epoch=3"], 2, "num_epochs"),
        (["--format", "k8s", "--image", "x", "logger.params.tracking_uri='sqlite:////r/mlflow.db'"], 2, "plain folder"),
        (["--format", "k8s", "--image", "x", "logger.params.tracking_uri='~/mlruns'"], 2, "plain folder"),
        (["--format", "k8s", "--image", "x", "data.root=."], 2, "data.root"),
    ],
)
def test_what_cannot_be_planned_is_named(command, place, words, code, message):
    """The exit code is 2, and nothing is printed to stdout."""
    done = command("plan", BASE, *words, cwd=place)
    assert (done.code, done.out) == (code, ""), done
    assert message in done.err


def test_the_pods_train_together(planned, tmp_path):
    """The containers' command and environment, run on this machine, train one run on two nodes."""
    fast = ["train.num_epochs=1", "train.limit_batches={train: 2, val: 1, test: 1}", "train.export=false"]
    kinds, _ = planned("engine.num_nodes=2", "logger.pictures=null", *fast)
    config, port = tmp_path / "config.yaml", free_port()
    config.write_text(kinds["ConfigMap"]["data"]["config.yaml"])
    container = container_of(kinds)
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    assert container["command"][-1] == "/etc/deeplightning/config.yaml"
    command = [sys.executable, "-m", *container["command"][:-1], str(config)]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pods = [
        subprocess.Popen(command, env=os.environ | variables | {"NODE_RANK": str(index)}, **options)
        for index in range(kinds["Job"]["spec"]["completions"])
    ]
    ended = [(pod.communicate(timeout=300), pod.returncode) for pod in pods]
    assert [code for _, code in ended] == [0, 0], ended
    (run,) = tmp_path.glob("mlruns/0/*/artifacts")
    assert (run / "cfg.yaml").is_file()


def test_the_objects_pass_the_schemas_of_kubernetes(command, place, tmp_path):
    """`kubernetes-validate`, which has the schemas of Kubernetes' API, finds no error and no unknown field."""
    done = command("plan", BASE, "--format", "k8s", "--image", "x:1", "--gpus", "8xH100", "--nodes", "2", cwd=place)
    (tmp_path / "job.yaml").write_text(done.out)
    uv = Path(sys.executable).with_name("uv")
    words = [uv, "tool", "run", "kubernetes-validate", "--strict", tmp_path / "job.yaml"]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    if re.search("failed to fetch|error sending request|not found in the package", found.stderr.lower()):
        pytest.skip("no package index gives kubernetes-validate")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("word", ["train.seeds=3", "train.fast=true"])
def test_a_config_that_cannot_resume_gets_a_valid_job(planned, tmp_path, word):
    """The job's config does not combine `resume_ckpt` with what excludes it."""
    kinds, _ = planned(word)
    (tmp_path / "c.yaml").write_text(kinds["ConfigMap"]["data"]["config.yaml"])
    assert examine(tmp_path / "c.yaml").faults == []


def test_the_file_says_what_a_pod_resumes(planned):
    """`auto` selects by experiment, so two jobs need two."""
    assert "give each job its own experiment_name" in planned()[1]
    assert "give each job its own experiment_name" not in planned("train.seeds=3")[1]


@pytest.mark.parametrize("store", ["sqlite:////r/mlflow.db", "/r/mlruns"])
def test_a_local_store_of_the_environment_is_refused(store, command, place):
    """A pod would get its address, and no volume."""
    words = ("plan", BASE, "logger.params={experiment_name: x}", "--format", "k8s", "--image", "x")
    assert "plain folder" in command(*words, cwd=place, MLFLOW_TRACKING_URI=store, code=2).err
