"""No file, log or answer of a run has a secret that was planted in its code, settings, diffs or environment.

The corpora are `hostile/secrets.jsonl` (name, kind of file, text, secret), `hostile/tokens.jsonl` (service, text, and
the secret in it unless that is the complete text) and `hostile/no_secrets.jsonl` (kind of file, text that must not
change), a row each. A `¦` in the first two is removed on reading; it hides the lines from scanners of repositories.
The tokens are random text in the form that each service documents; none is real.
"""

import base64
import contextlib
import io
import json
import re
import sqlite3
import sys
import time
import zipfile
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import yaml
from PIL import Image
from served import Server
from tiny import git

from deeplightning.config import secret_scan
from deeplightning.config.examine import examine
from deeplightning.config.secret_scan import conceal
from deeplightning.config.secrets import Secrets, without_secrets
from deeplightning.config.source import read

HOSTILE = Path(__file__).parents[1] / "hostile"
PLANTED = [json.loads(line.replace("¦", "")) for line in (HOSTILE / "secrets.jsonl").read_text("utf-8").splitlines()]
TOKENS = [json.loads(line.replace("¦", "")) for line in (HOSTILE / "tokens.jsonl").read_text("utf-8").splitlines()]
TOKENS = [(name, text, secret[0] if secret else text) for name, text, *secret in TOKENS]
HARMLESS = [json.loads(line) for line in (HOSTILE / "no_secrets.jsonl").read_text("utf-8").splitlines()]
PASSWORD = "correct/horse battery+staple=42"
"""Is in the environment; URLs and base64 encode it differently."""
CONFIG = """\
seed: 7
data:
  root: null
  batch_size: 16
  module:
    type: kept.own.Own
    params:
      {password: "${oc.env:TABLE_PASSWORD}", db_password: clear/hunter-47, admin_password: 90817263, url: "x://me:clear-48@db/t"}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: kept.own.network, params: {}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05}}
  loss: {type: torch.nn.CrossEntropyLoss, params: {}}
train: {num_epochs: 1, export: false}
engine:
  env: {MY_API: clear-in-env-49, FLAVOUR: bitter, OMP_WAIT_POLICY: passive}
logger:
  params: {system_metrics: false, tags: {same: "${data.module.params.db_password}", note: "with clear/hunter-47 in it"}}
  pictures: null
"""
PARTS = ["Modal id", "Modal secret", "Voyage AI", "LaunchDarkly SDK", "LaunchDarkly API", "Mailgun"]
"""Services whose prefixes are words, which may be part of a longer name such as `cache_key-…`."""
AROUND = [
    *((".py", 'x = call("%s")'), (".yaml", "note: %s"), (".env", 'X="%s"'), (".md", "I used %s for it.")),
    *((".txt", "%s"), (".ipynb", '{"source": ["a\\n%s\\n"]}'), (".txt", "GET /?next=a%%3D%s%%26b"), (".py", "x_%s")),
]
"""Extensions of files, and text around a token in them."""
CLEAR = ["clear/hunter-47", "90817263", "clear-48", "clear-in-env-49"]
"""Secrets in the config."""
OWN = """\
import base64
import json
import os
import urllib.parse
from torch import nn
from deeplightning.data.digits import Digits


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Own(Digits):
    def __init__(self, cfg, password, db_password, admin_password, url):
        super().__init__(cfg)
        self.words = [password, db_password, str(admin_password), url, *json.loads(os.environ["WORDS"])]
        self.words += [os.environ["MY_API"]] if os.environ["FLAVOUR"] == "bitter" else []

    def train_dataloader(self):
        forms = []
        for word in self.words if os.environ.get("FAILS") else ():
            forms += [word, repr(word), urllib.parse.quote(word), urllib.parse.quote_plus(word), word[:20], word[:25]]
            forms += [base64.b64encode(word.encode()).decode(), base64.b64encode(b"me:" + word.encode()).decode()]
        if forms:
            raise RuntimeError(f"refused: {' '.join(forms)}")
        return super().train_dataloader()
"""


class Served(Server):
    """`deeplightning serve RUN`."""

    program = (sys.executable, "-m", "deeplightning", "serve")


def png():
    content = io.BytesIO()
    Image.new("L", (8, 8)).save(content, "png")
    return content.getvalue()


REQUESTS = [
    *(("GET", path, None, "text/plain") for path in ("/", "/info", "/openapi.json", "/metrics", "/health", "/ready")),
    ("POST", "/predict", png(), "image/png"),
    ("POST", "/predict", json.dumps({"images": [base64.b64encode(png()).decode()]}), "application/json"),
    *(("POST", "/predict", body, kind) for body, kind in ((b"no picture", "image/png"), ("{", "application/json"))),
    *(("GET", "/nothing", None, "text/plain"), ("PUT", "/predict", b"", "text/plain")),
]


def examined(path, config):
    """Write a config to a file and examine it."""
    path.write_text(yaml.safe_dump(config, allow_unicode=True), "utf-8")
    return examine(path)


def of_module(params):
    """Return a config with params of the data module."""
    return {"data": {"module": {"type": "a.B", "params": params}}}


@pytest.mark.parametrize(("name", "kind", "text", "secret"), PLANTED, ids=[f"{row[1]} {row[0]}" for row in PLANTED])
def test_a_planted_secret_is_blotted_out(name, kind, text, secret):
    """The number of its line is returned, and all lines keep their numbers."""
    clean, lines = conceal(text, f"x{kind}")
    assert secret not in clean
    assert text[: text.index(secret)].count("\n") + 1 in lines or "PRIVATE" in text
    assert clean.count("\n") == text.count("\n")


@pytest.mark.parametrize(("name", "text", "secret"), TOKENS, ids=[row[0] for row in TOKENS])
def test_a_token_of_a_service_is_concealed(name, text, secret, tmp_path):
    """It is concealed in each kind of text, and as the value of an ordinary key; no 20 characters of it remain."""
    traces = {secret[start : start + 20] for start in range(max(1, len(secret) - 19))}
    for kind, around in AROUND:
        if not (around == "x_%s" and name in PARTS):
            clean = conceal(around % text, f"x{kind}")[0]
            assert not [trace for trace in traces if trace in clean], (kind, clean)
    public = yaml.safe_dump(examined(tmp_path / "a.yaml", of_module({"note": text})).config.public(), width=10_000)
    assert not [trace for trace in traces if trace in public], public


def test_every_row_of_the_table_of_services_finds_a_token():
    """Each row has an example in a corpus, and the table itself has nothing that is taken for a secret."""
    texts = [row[1] for row in TOKENS] + [row[2] for row in PLANTED]
    assert [row for row in secret_scan._token_patterns() if not any(re.search(row[1], text) for text in texts)] == []
    table = Path(secret_scan.__file__).with_name("secret_shapes.tsv").read_text("utf-8")
    assert conceal(table, "secret_shapes.tsv") == (table, [])


@pytest.mark.parametrize(("kind", "text"), HARMLESS, ids=[f"{kind} {text[:40]}" for kind, text in HARMLESS])
def test_harmless_text_is_not_changed(kind, text):
    """Tokenizers, types, references, placeholders, hashes, calls and prose are not concealed."""
    assert conceal(text, f"x{kind}") == (text, [])


def test_our_own_sources_stay_as_they_are():
    """No line of this library, its configs and its examples is taken for a secret."""
    top = Path(__file__).parents[2]
    paths = [*top.glob("deeplightning/**/*.py"), *top.glob("configs/**/*.yaml"), *top.glob("examples/**/*.py")]
    assert [path for path in paths if conceal(path.read_text("utf-8"), path.name)[1]] == []


@pytest.mark.parametrize(
    "text",
    [
        *("a" * 100_000, "password" * 10_000, "password = " * 10_000, "password: (" + "(" * 50_000, '"""' * 30_000),
        *("password=[" + "'ab'," * 20_000, "://a:" * 20_000, "kind: Secret\n" + "data:\n a\n" * 10_000, "eyJ" * 30_000),
        *("eyJ-" * 25_000, "_EAA" * 25_000, "sk-" + "-" * 100_000, "sk-" + "aB" * 50_000, "eyJaaaaaaaaaa." * 7_000),
        *("JQQJ99-" * 14_000, "MTaaaaaaaaaaaaaaaaaaaaaaaa." * 4_000, "a.atlasv1." * 10_000, "//a" * 30_000),
        *("password:" + " " * 50_000, "password:" + "\n" * 50_000, "-----BEGIN PRIVATE KEY-----" * 3_000),
    ],
    ids=lambda text: text[:12],
)
def test_no_text_makes_the_search_slow(text):
    """The time grows linearly with a text, whatever its content: 100,000 characters take less than 5 s of CPU."""
    began = time.process_time()
    for name in ("x.py", "x.yaml", "x.md"):
        conceal(text, name)
    assert time.process_time() - began < 5


def forms(value):
    content = value.encode()
    yield from (value, repr(value)[1:-1], json.dumps(value)[1:-1])
    yield from (quote(value), quote(value, safe=""), quote_plus(value))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for around in (b"", b"m", b"me", b"me:", b"user:"):
            yield encode(around + content).decode()[-(-len(around) * 8 // 6) :].rstrip("=")[:-1]


@pytest.mark.parametrize(
    "value", [PASSWORD, "pässwörd & more/than?20", "k3j4h5g6f7d8s9a0q1w2e4r5", 'it\'s "quoted" \\ twice']
)
def test_a_value_of_the_environment_is_redacted_in_every_form(value):
    """It is redacted plain, escaped, quoted, in base64 with or without a user's name, and cut after 20 characters."""
    secrets = Secrets(values={value: "${oc.env:X}"})
    for form in forms(value):
        for length in {len(form), 20, 23} - ({20, 23} if len(form) <= 23 else set()):
            redacted = secrets.redact(f"refused: {form[:length]}, {form[:length]}")
            assert form[:20] not in redacted, (form, length)
            assert redacted.startswith("refused: ")
    assert secrets.redact("an ordinary line") == "an ordinary line"


@pytest.fixture(scope="module")
def planted_run(command, tmp_path_factory):
    """A run that fails with secrets in every form, from a tree whose package and diff have the complete corpus: its
    outcome, store and folder, and a function that repeats it without the failure."""
    top = tmp_path_factory.mktemp("planted")
    tree, store = top / "tree", top / "mlruns"
    package = tree / "kept"
    package.mkdir(parents=True)
    (package / "own.py").write_text(OWN)
    (package / "__init__.py").write_text("")
    (tree / "c.yaml").write_text(CONFIG)
    files = {}
    for number, (_, kind, text, _) in enumerate(PLANTED):
        files[package / f"planted_{number}{kind}"] = text
        if kind in (".env", ".netrc", ".npmrc"):
            files[tree / f"planted_{number}" / kind] = text
    for path in files:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    files[package / "tokens.py"] = "".join(f"call({text!r})\n" for _, text, _ in TOKENS if "\n" not in text)
    git(tree, "init", "-q")
    git(tree, "add", "-f", ".")
    git(tree, "commit", "-q", "-m", "first")
    for path, text in files.items():
        path.write_text(text + "\n")
    words = [secret for _, kind, _, secret in PLANTED if kind == ".py" and "\n" not in secret]
    train = ("train", "c.yaml", f"logger.params.tracking_uri='{store}'")
    options = {"cwd": tree, "TABLE_PASSWORD": PASSWORD, "WORDS": json.dumps(words)}
    done = command(*train, **options, FAILS="yes")
    assert "RuntimeError" in done.err, done
    return done, store, next(store.glob("*/*/artifacts")), lambda: command(*train, "train.export=true", **options)


def contents_of(store):
    """Return every file of a store, every file in its archives, and every row of its database as text."""
    contents = {str(path): path.read_bytes() for path in store.rglob("*") if path.is_file()}
    for name, content in list(contents.items()):
        if zipfile.is_zipfile(io.BytesIO(content)):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                contents |= {f"{name}/{inner}": archive.read(inner) for inner in archive.namelist()}
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as connection:
        contents["rows"] = "\n".join(connection.iterdump()).encode()
    return contents


def traces():
    """Yield each planted secret with each of its forms, cut to 20 characters; each line of a key is a secret."""
    for secret in [PASSWORD, *CLEAR, *(row[-1] for row in PLANTED)]:
        for line in secret.split("\n"):
            if not line.startswith("-----"):
                yield secret, line[:20].encode()
                yield from ((secret, form[:20].encode()) for form in forms(line) if len(form) >= 8)
    yield from ((secret, secret[-20:].encode()) for _, _, secret in TOKENS)


def leaks(contents):
    return sorted({(name, secret) for secret, trace in traces() for name, text in contents.items() if trace in text})


def test_no_planted_secret_is_in_anything_of_a_run(planted_run):
    """No file of the store and the run folder, no file in their archives, no log and no output has one."""
    done, store, *_ = planted_run
    contents = contents_of(store) | {"stdout": done.out.encode(), "stderr": done.err.encode()}
    assert sum("planted_" in name for name in contents) > 60  # the files of the corpus are in code.zip
    assert leaks(contents) == []


def test_a_secret_in_clear_is_a_variable_in_what_the_run_keeps(planted_run):
    """`cfg.yaml` and the tracker have the name of a variable in its place; a warning names each key."""
    done, store, folder, _ = planted_run
    params = yaml.safe_load((folder / "cfg.yaml").read_text())["data"]["module"]["params"]
    assert params == {
        "password": "${oc.env:TABLE_PASSWORD}",
        "db_password": "${oc.env:DATA_MODULE_PARAMS_DB_PASSWORD}",
        "admin_password": "${oc.decode:${oc.env:DATA_MODULE_PARAMS_ADMIN_PASSWORD}}",
        "url": "x://${oc.env:DATA_MODULE_PARAMS_URL}@db/t",
    }
    env = yaml.safe_load((folder / "cfg.yaml").read_text())["engine"]["env"]
    assert env == {"MY_API": "${oc.env:MY_API}", "FLAVOUR": "${oc.env:FLAVOUR}", "OMP_WAIT_POLICY": "passive"}
    for key in ("MY_API", "FLAVOUR"):
        assert f"engine.env.{key}: may be a secret in clear" in done.err
    for key in ("db_password", "admin_password", "url"):
        assert f"data.module.params.{key}: a secret in clear" in done.err
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as connection:
        tracked = dict(connection.execute("SELECT key, value FROM params"))
    assert tracked["data/module/params/password"] == "${oc.env:TABLE_PASSWORD}"


@pytest.mark.slow
def test_no_planted_secret_comes_out_of_a_run_or_its_server(planted_run, tmp_path):
    """No file, row, log or answer has one, of the failed run and of one that is exported and served."""
    failed, store, _, train = planted_run
    done = train()
    assert done.code == 0, done
    server = Served(done.folder, tmp_path / "serve.err")
    answers = {}
    try:
        for number, (method, path, body, kind) in enumerate(REQUESTS):
            with contextlib.closing(server.connect()) as connection:
                connection.request(method, path, body, {"Content-Type": kind})
                answer = connection.getresponse()
                answers[f"{number} {method} {path} {answer.status}"] = str(answer.headers).encode() + answer.read()
    finally:
        server.stop()
    contents = contents_of(store) | answers
    for name, outcome in (("failed", failed), ("done", done)):
        contents |= {f"{name}.out": outcome.out.encode(), f"{name}.err": outcome.err.encode()}
    contents |= {"serve.err": server.errors.read_bytes(), "serve.log": server.log.read_bytes()}
    assert (done.folder / "bundle" / "bundle.json").exists()
    assert {name.split()[-1][0] for name in answers} == {"2", "4"}
    assert leaks(contents) == []


@pytest.mark.parametrize("key", ["password", "db_pass", "api_token", "secret_key"])
def test_a_config_without_secrets_means_the_same(key, tmp_path, monkeypatch):
    """The recorded config loads to an equal one if the variable is set; otherwise the error names the variable."""
    value = "q9w8e7r6t5y4u3i2o1 ${x" if "token" not in key else "q9w8e7r6t5y4u3i2o1"
    found = examined(tmp_path / "a.yaml", of_module({key: value.replace("${", "\\${")}))
    name = f"DATA_MODULE_PARAMS_{key.upper()}"
    assert found.config.data.module.params == {key: value}
    assert found.config.public()["data"]["module"]["params"] == {key: f"${{oc.env:{name}}}"}
    assert value not in found.redact(f"refused: {value}, {quote(value)}")
    faults = examined(tmp_path / "b.yaml", {"data": found.config.public()["data"]}).faults
    assert any(f"the environment variable {name} is not set" in str(fault) for fault in faults)
    monkeypatch.setenv(name, value)
    assert examine(tmp_path / "b.yaml").config.data.module.params == {key: value}


@pytest.mark.parametrize(
    "params",
    [
        *({"tokenizer": "bert-base-uncased"}, {"pad_token": "[PAD]"}, {"password_file": "/run/secrets/db2"}),
        *({"num_tokens": 32000}, {"secret_env": "DB_PASSWORD"}, {"key": "image"}, {"url": "https://a.org/b?c=1"}),
        *({"api_key_env": "WANDB_API_KEY"}, {"weights": "ResNet50_Weights.IMAGENET1K_V2"}, {"password": None}),
    ],
    ids=str,
)
def test_an_ordinary_value_of_a_config_is_no_secret(params, tmp_path):
    """Names of variables and files, tokens of a tokenizer, and addresses without a password are recorded."""
    found = examined(tmp_path / "a.yaml", of_module(params))
    assert found.config.public()["data"]["module"]["params"] == params
    assert found.source.secrets.literals == {}


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TZ", "PYTHONHASHSEED"])
def test_a_known_variable_of_a_run_is_recorded(name, tmp_path):
    """Its value is recorded unless it looks like a token."""
    token = f"gsk{'_'}{'a1B2' * 13}"
    for value, shown in (("7", "7"), ("a-word", "a-word"), (token, f"${{oc.env:ENGINE_ENV_{name}}}")):
        found = examined(tmp_path / "a.yaml", {"engine": {"env": {name: value}}})
        assert found.config.public()["engine"]["env"] == {name: shown}


@pytest.mark.parametrize("value", ["on", "bitter", "k9/j8 h7", "\\${x}", "${data.batch_size}-samples", "/tmp"])
def test_another_variable_of_a_run_is_concealed(value, tmp_path, monkeypatch):
    """The run gets its value; the recorded config has its name, and loads to an equal one if it is set."""
    config = {"data": {"batch_size": 4}, "stages": ["train"], "engine": {"env": {"MY_API": value, "MODE": "train"}}}
    found = examined(tmp_path / "a.yaml", config)
    given = found.config.engine.env["MY_API"]
    assert given == value.replace("\\$", "$").replace("${data.batch_size}", "4")
    public = found.config.public()
    assert public["engine"]["env"] == {"MY_API": "${oc.env:MY_API}", "MODE": "${oc.env:MODE}"}
    assert public["stages"] == ["train"]
    assert found.config.secrets.variables() == {"MY_API": given, "MODE": "train"}
    assert found.redact("the run trains") == "the run trains"
    assert (given in found.redact(f"refused: {given}")) == (value in ("on", "bitter", "\\${x}", "/tmp"))
    faults = examined(tmp_path / "b.yaml", {"engine": public["engine"]}).faults
    assert any("variable MY_API is not set" in str(fault) for fault in faults)
    for name, text in found.config.secrets.variables().items():
        monkeypatch.setenv(name, text)
    assert examine(tmp_path / "b.yaml").config.engine.env == {"MY_API": given, "MODE": "train"}


def test_a_new_store_is_accessible_to_its_owner_only(planted_run):
    """The mode of its folder is 0700, whatever the umask."""
    _, store, folder, _ = planted_run
    assert {path.name for path in folder.iterdir()} >= {"cfg.yaml", "code.zip", "environment.json", "logs"}
    assert store.stat().st_mode & 0o777 == 0o700


def test_the_variable_of_a_secret_below_any_key_can_be_read(tmp_path, monkeypatch):
    """The variable of a key with other letters has an ASCII name, which OmegaConf's grammar requires."""
    params = {"für_password": "q9w8e7r6t5y4"}
    found = examined(tmp_path / "a.yaml", of_module(params)).config
    for name, text in found.secrets.variables().items():
        monkeypatch.setenv(name, text)
    assert examined(tmp_path / "b.yaml", {"data": found.public()["data"]}).config.data.module.params == params


@pytest.mark.parametrize("column", ["pass", "secret", "account_key"])
def test_the_kind_of_a_column_is_no_secret(column):
    """The kind of a table's column is kept, whatever the column is called."""
    for kind in ("number", "category", "ignore"):
        assert secret_scan.secrets_in_value(column, kind) == []


def test_a_secret_that_a_reference_creates_is_hidden_in_the_config_of_a_point(tmp_path):
    """The text of a reference is replaced; a number that equals a variable stays."""
    path = tmp_path / "c.yaml"
    path.write_text('tags: "${oc.create:{password: hunter-47-clear}}"\nname: ${oc.env:NAME}\ntrain: 0.001\n')
    source = read(path)
    source.secrets.values |= {"hunter-47-clear": "${oc.env:TAGS_PASSWORD}", "0.001": "${oc.env:RATE}"}
    found = without_secrets(source.root, source.secrets)
    assert "hunter-47" not in str(found)
    assert found["train"] == 0.001
