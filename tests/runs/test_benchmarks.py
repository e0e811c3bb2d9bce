"""The benchmarks measure what they say: mutations are made where they claim, they are wrong for certain, and answers
are judged as the documentation has it. What is timed is not run here."""

import asyncio
import dataclasses
import http.server
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from deeplightning.config.target import find

# Behind all else, since a program there has the name of our package `serve`.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import engines
import mutations
import scoring
import servers
import side_by_side
import soak
import step_memory
import timed
import train as training

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("benchmark_of_serve", ROOT / "benchmarks/serve.py")
serve = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = serve  # where its dataclasses look for it
spec.loader.exec_module(serve)

SMALL = {kind: count // 7 for kind, count in mutations.KINDS.items()}
SEEDS = (3, 11, 12, 13)


@pytest.fixture(scope="module")
def maker():
    return mutations.Maker(ROOT)


@pytest.fixture(scope="module")
def all_of_them(maker):
    """The mutations of the seeds that the figures are published for."""
    return [mutation for seed in SEEDS for mutation in maker.make(seed)]


def test_a_seed_makes_the_same_300_mutations_each_time(maker):
    """And another seed makes others; no two of a seed are the same."""
    one, again, other = maker.make(3), maker.make(3), maker.make(4)
    assert one == again
    assert len(one) == len({(m.config, m.file, m.text) for m in one}) == sum(mutations.KINDS.values()) == 300
    assert len({m.text for m in one} & {m.text for m in other}) < 150


def test_a_typo_is_no_word_that_is_legal(all_of_them, monkeypatch):
    """No class that typos make can be imported, and no param is taken by the class that it is given to."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_code")
    for mutation in all_of_them:
        if mutation.kind == "class":
            name = mutation.what.rpartition(" → ")[2]
            with pytest.raises(ValueError, match=r"."):
                find(name)
        elif mutation.kind == "param" and ".params." in mutation.what:
            place, param = re.match(r"(\S+)\.params\.\w+: `\w+` → `(\w+)`", mutation.what).groups()
            path = tuple(int(part) if part.isdigit() else part for part in place.split("."))
            taken = inspect.signature(find(mutations.File("", mutation.text).plain((*path, "type")))).parameters
            assert param not in taken


def answer(*places, code=2, suggestion=None):
    return scoring.Answer(code, tuple(scoring.Told(place, "…", suggestion) for place in places))


def test_an_answer_is_judged_by_code_line_and_word():
    """Caught is exit code 2; the line must be one of the mutation's; the first suggestion there must be what was meant;
    all else that is told is counted."""
    typo = mutations.Mutation("key", "a.yaml", "a.yaml", "", "", ("a.yaml:3",), ("lr",))
    score, plain = scoring.Score, dataclasses.replace(typo, meant=())
    assert scoring.score(typo, answer("a.yaml:3", suggestion="lr")) == score(True, True, True, 0)
    assert scoring.score(typo, answer("a.yaml:3", suggestion="eps")) == score(True, True, False, 0)
    assert scoring.score(typo, answer("a.yaml:3")) == score(True, True, False, 0)
    assert scoring.score(typo, answer("a.yaml:4", suggestion="lr")) == score(True, False, False, 1)
    assert scoring.score(typo, answer("b.yaml:3", suggestion="lr")) == score(True, False, False, 1)
    assert scoring.score(typo, answer("a.yaml:3", code=0, suggestion="lr")) == score(False, False, False, 1)
    assert scoring.score(typo, answer("a.yaml:3", code=1, suggestion="lr")) == score(False, False, False, 1)
    assert scoring.score(plain, answer("a.yaml:1", "a.yaml:3", "a.yaml:7")) == score(True, True, None, 2)
    assert scoring.score(plain, answer()) == score(True, False, None, 0)


@pytest.mark.slow
def test_shipped_configs_pass_and_planted_faults_are_told(maker):
    """Through the command itself: no fault in any config as it ships, and a small sample of mutations told in its
    line."""
    with scoring.sandbox(ROOT) as place:
        shipped = {config.name: scoring.check(config.name, place) for config in maker.configs}
        sample = [(mutation, scoring.check_mutation(mutation, place)) for mutation in maker.make(3, SMALL)]
        assert (place / "configs/base.yaml").read_text() == (ROOT / "configs/base.yaml").read_text()
    assert {name: said for name, said in shipped.items() if said.code or said.told} == {}
    right = [scoring.score(mutation, said).right_line for mutation, said in sample]
    assert len(right) == sum(SMALL.values()) == 38
    assert sum(right) >= 37, [pair for pair, fine in zip(sample, right, strict=True) if not fine]


def test_the_peers_have_our_torch_and_lightning():
    """What the environments hold is of one version, and the same four faults can be planted in each config."""
    ours = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.M))
    needed = {
        "requirements.txt": {"torch", "pytorch-lightning", "mlflow", "scikit-learn"},
        "serve_requirements.txt": {"torch", "torchvision", "mlflow", "flask", "pillow"},
        "texts_requirements.txt": {"torch", "transformers"},
    }
    for file, names in needed.items():
        pinned = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)", (side_by_side.PEERS / file).read_text(), re.M))
        shared = {
            name: version
            for name, version in pinned.items()
            if name in ours and name[:8] not in ("omegacon", "antlr4-p")
        }
        assert shared == {name: ours[name] for name in shared}
        assert names <= set(shared)
    for config in (
        ROOT / "configs/base.yaml",
        side_by_side.PEERS / "lightning_cli.yaml",
        side_by_side.PEERS / "hydra.yaml",
    ):
        assert [right for right, _, _ in side_by_side.FAULTS.values() if config.read_text().count(right) != 1] == []


def test_cpu_seconds_are_those_of_the_process(tmp_path):
    """A process that computes costs what it says itself, one that sleeps next to nothing."""
    burns = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time())"
    ended = side_by_side.run([sys.executable, "-S", "-c", burns], tmp_path)
    assert ended.code == 0
    assert 0.3 <= float(ended.output) <= ended.seconds
    sleeps = side_by_side.run([sys.executable, "-S", "-c", "import time; time.sleep(0.5)"], tmp_path)
    assert sleeps.seconds < 0.3


def test_series_of_losses_are_compared_step_by_step():
    """The largest difference counts; a step that one of them lacks, or a loss that is no number, is infinitely far."""
    assert engines.apart({0: 2.0, 1: 1.5}, {0: 2.5, 1: 1.25}) == 0.5
    for other in ({0: 2.0}, {0: 2.0, 2: 1.5}, {0: 2.0, 1: float("nan")}):
        assert engines.apart({0: 2.0, 1: 1.5}, other) == float("inf")
        assert engines.apart(other, {0: 2.0, 1: 1.5}) == float("inf")
    assert engines.apart({}, {}) == float("inf")


def test_bytes_that_a_process_holds_are_those_of_its_tensors():
    """Four for each parameter, eight and a count of steps for Adam's state; weights that an optimizer has beside the
    network's are counted as such."""
    network = engines.Wide()
    numbers = 64 * 256 + 4 * 256 * 256 + 256 * 10 + 5 * 256 + 10
    adam = torch.optim.Adam(network.parameters())
    network(torch.zeros(2, 1, 8, 8)).sum().backward()
    adam.step()
    state = 8 * numbers + 4 * 12
    assert engines.bytes_here(network, adam) == {"parameters": 4 * numbers, "state": state, "copies": 0}
    copy = torch.zeros(100, requires_grad=True)
    copy.grad = torch.zeros(100)
    other = torch.optim.SGD([copy], lr=0.1, momentum=0.9)
    other.step()
    assert engines.bytes_here(network, other) == {"parameters": 4 * numbers, "state": 400, "copies": 400}


def test_bytes_are_counted_from_when_a_tensor_is_made_until_it_is_freed():
    """Views count nothing; the peak of a phase is kept with what was made in which phase."""
    with step_memory.Live() as live:
        live.phase = "one"
        kept = torch.zeros(1000)
        live.phase = "two"
        passing = torch.zeros(500)
        view = kept[:10]
        assert live.total == 6000
        assert live.made == {"one": 4000, "two": 2000}
        del passing
        live.phase = "three"
        view + 1
    assert live.total == 4000
    assert live.peaks["two"] == (6000, {"one": 4000, "two": 2000})
    assert live.peaks["three"][0] == 4040


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["null", "deepspeed_stage_3"])
def test_what_a_step_holds_is_known_for_each_parameter(engine):
    """With bf16 `null` holds 4, 8 and 4 bytes for a parameter, its state and its gradient; stage 3 holds 2 and the
    optimizer's copy of 4, 8, and 2, and a bucket of the network's size for gradients."""
    network = ["--depth", "1", "--width", "32", "--heads", "1", "--image-size", "16", "--batch", "2"]
    script = str(ROOT / "benchmarks/step_memory.py")
    ended = subprocess.run([sys.executable, script, *network, "--engine", engine], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    names = ("parameters", "own weights", "state", "gradients", "buckets")
    expected = (4, 0, 8, 4, 0) if engine == "null" else (2, 4, 8, 2, 2)
    # Beside them Adam's counts of steps, and DeepSpeed fills up what it shares out.
    assert [found[name] / found["numbers"] for name in names] == pytest.approx(expected, rel=0.02)
    assert found["computed in"] == "bfloat16"


# ---- training

TORCH = {
    "__init__": "",
    "optim/__init__": "",
    "optim/optimizer": "hooks = []\nregister_optimizer_step_post_hook = hooks.append\n",
    "optim/sgd": "from torch.optim.optimizer import hooks\ndef step():\n    for hook in hooks: hook(None, (), {})\n",
}
STEPS = """\
import subprocess, sys, time
subprocess.run([sys.executable, '-S', '-c', 'import time\\nwhile time.process_time() < 0.2: pass'])
import torch.optim.sgd
kept = bytearray(60_000_000)
torch.optim.sgd.step()
while time.process_time() < 0.3: pass
torch.optim.sgd.step()
"""


def took(*cpu, children=0.0, said="", folder=Path()):
    """Of one process whose steps ended at these CPU seconds, and twice as late by the clock."""
    process = timed.Steps(cpu, [2 * seconds for seconds in cpu], children, 100.0)
    return timed.Took(9.0, 10.0, 1.0, said, folder, [process])


def test_steps_of_any_program_are_timed(tmp_path):
    """CPU seconds from the start to the end of the first, those of a process before it included; the memory is that of
    the program, not of the one that starts it."""
    for name, text in TORCH.items():
        path = tmp_path / "torch" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "steps.py").write_text(STEPS)
    found = timed.run([sys.executable, str(tmp_path / "steps.py")], tmp_path / "run")
    (process,) = found.processes
    assert len(process.cpu) == len(process.clock) == 2
    assert 0.2 <= process.children <= found.start <= found.cpu
    assert found.per_step(2) == process.cpu[1] - process.cpu[0] > 0
    assert 0 < found.start_wall < found.wall
    assert 57 < found.memory < 100
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3:.*a reason"):
        timed.run([sys.executable, "-S", "-c", "print('a reason'); raise SystemExit(3)"], tmp_path / "failing")


def test_the_seconds_of_a_step_leave_out_what_lies_between_epochs():
    """And the first epoch, where there are several."""
    assert took(5.0, 5.5, 6.5).per_step(3) == pytest.approx(0.75)
    several = took(1.0, 3.0, 7.0, 7.5, 20.0, 20.25)
    assert several.per_step(2) == pytest.approx((0.5 + 0.25) / 2)
    assert several.per_step(2, clock=True) == pytest.approx(0.5 + 0.25)
    assert took(1.0, 2.0, children=0.5).start == 1.5
    assert took(1.0, 2.0).start_wall == 1.0


def test_a_bound_without_a_figure_is_not_kept():
    assert training.Bound("a", 0.75, 0.75).row() == ["a", "≤ 0.75", "0.750", "kept"]
    assert training.Bound("a", 0.7501, 0.75).row()[-1] == "NOT kept"
    assert training.Bound("a", None, 0.75).row()[2:] == ["not measured", "NOT kept"]
    assert training.Bound("a", 0.87, 0.88, at_least=True).row()[1:] == ["≥ 0.88", "0.870", "NOT kept"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's advice to the script
def test_each_program_learns_the_same(command, store, tmp_path, monkeypatch, capsys):
    """The script, with pictures one by one or in batches from memory, Lightning, and a run of ours end with the same
    weights; what each has said and left is found."""
    import train_lightning
    import train_raw

    data = tmp_path / "data"
    timed.make_pictures(data, 100, 28, 1, 10)
    module = training.PIXELS.replace("size: 1", "size: 28").replace("classes: 2", "classes: 10")
    job = training.Job(data, module, "small", "train_network.Small", 6, batch_size=16, epochs=2, seed=3)
    (tmp_path / "config.yaml").write_text(training.config_of(job, store))
    for name in ("train_network.py", "train_own.py"):
        shutil.copy(timed.PEERS / name, tmp_path)
    run = command("train", tmp_path / "config.yaml", cwd=tmp_path, code=0)
    found = {"ours": took(1.0, said=run.out)}
    scripts = {
        "raw": (train_raw.main, []),
        "by hand": (train_raw.main, ["--in-memory"]),
        "lightning": (train_lightning.main, ["--store", str(store / "mlflow.db")]),
    }
    for name, (main, more) in scripts.items():
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [name, *training._words(job), *more])
        main()
        found[name] = took(1.0, said=capsys.readouterr().out, folder=folder)
    (weights,) = {training.finished(one).weights for one in found.values()}
    assert len(weights) == 12
    assert len({training.accuracy(one) for one in found.values()}) == 1


# ---- the prediction server


@pytest.mark.slow
def test_a_run_made_for_measuring_tells_its_pictures_apart(tmp_path):
    """Picture i has class i by the bundle, and class 9 - i by the other bundle, each with nine tenths or more; the
    weights for the peers give the same answers by torchvision's transforms."""
    import serve_parts

    from serve.bundle import Bundle

    for turned in (False, True):
        run = servers.make_run("small", tmp_path, turned)
        bundle = Bundle.open(run)
        model, prepare = serve_parts.trained("small", run.with_suffix(".pt")), serve_parts.transform("small")
        for number, file in enumerate(servers.pictures("small")):
            (ours,) = bundle.predict(bundle.prepare(file, 10_000)[None])
            with torch.inference_mode():
                theirs = model(prepare(serve_parts.picture("small", file))[None]).softmax(1)[0]
            assert ours.argmax() == (9 - number if turned else number)
            assert ours.max() > 0.9
            assert torch.allclose(torch.from_numpy(ours), theirs, atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param("texts", marks=pytest.mark.slow), "tables"])
def test_peers_read_texts_and_rows_as_ours_does(name, tmp_path):
    """The same probabilities, whatever a peer fills a text up with."""
    import serve_parts

    from serve.bundle import Bundle

    run = servers.make_run(name, tmp_path)
    bundle, weights = Bundle.open(run), run.with_suffix(".pt")
    model, read = serve_parts.trained(name, weights), serve_parts.reader(name, weights)
    for number, content in enumerate(servers.contents(name)):
        (ours,) = bundle.predict(bundle.spec.prepare(content["text"] if name == "texts" else content["rows"][0])[None])
        with torch.inference_mode():
            theirs = model(read(content)[None]).softmax(1)[0]
        assert ours.argmax() == number
        assert torch.allclose(torch.from_numpy(ours), theirs, atol=1e-4)


def test_further_rows_are_judged_by_the_best_peer():
    """Half of the CPU of the peer that takes least."""
    found = serve.Found({serve.OURS: [turn(1.0)], "litserve": [turn(4.0)], "flask": [turn(1.5)]})
    best, right = serve.bounds("texts", found, [serve.OURS, "litserve", "flask"], [8])
    assert (best.figure, best.limit, best.kept) == (pytest.approx(1 / 1.5), 0.5, False)
    assert right.kept


def test_cpu_and_memory_are_those_of_the_whole_tree():
    """What a grandchild computes counts while it runs and after it has ended; what it holds counts as well."""
    # 50 ms more than is asked below: the kernel tells user and system time in ticks of 10 ms, each rounded down.
    burns = "import time; kept = bytearray(40_000_000); time.sleep(0)\nwhile time.process_time() < 0.45: pass\n"
    waits = f"{burns}print(flush=True); input()"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {waits!r}]); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", parent], stdin=-1, stdout=-1) as child:
        tree = servers.Tree(child.pid)
        child.stdout.readline()
        assert len(tree.processes()) == 2
        assert tree.memory() > tree.anonymous() > 38
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert len(tree.processes()) == 1
        assert tree.cpu() >= 0.4
        assert tree.memory() < 38
        child.communicate(b"\n")
    assert (tree.cpu(), tree.memory(), tree.anonymous()) == (0, 0, 0)


def turn(cpu, rate=100.0, p50=10.0, failed=0, start=1.0, memory=100.0, beside=None):
    load = serve.Load(cpu, rate, p50, 20.0, None, failed, "")
    return serve.Turn(start, memory, dict.fromkeys((1, 8, 32), load), beside)


def test_bounds_are_judged_by_medians_of_all_rounds():
    """A ratio is that of the medians; a wrong answer of ours and a figure that could not be had are told as not kept; a
    peer that was not asked for has no bound."""
    ours = [turn(4.0, 600, beside=5.0), turn(3.0, 500, beside=5.0), turn(9.0, 400, beside=5.0)]
    found = serve.Found({serve.OURS: ours, "litserve": [turn(20.0), turn(16.0), turn(90.0)]})
    found.in_process = {clients: [3.0, 3.1, 9.0] for clients in (1, 8, 32)}
    promises = {b.what: b for b in serve.bounds("resnet18", found, [serve.OURS, "litserve", "mlflow"], [1, 8, 32])}
    of_litserve = promises["resnet18, 32 clients, CPU per answer, of litserve"]
    assert (of_litserve.figure, of_litserve.limit, of_litserve.kept) == (0.2, 0.2, True)
    assert promises["resnet18, 32 clients, answers/s, times litserve"].kept
    assert not promises["resnet18, 1 client, median latency, of litserve"].kept
    assert promises["resnet18, 32 clients, CPU per answer, of mlflow"].row()[2:] == ["not measured", "NOT kept"]
    (over,) = (b for what, b in promises.items() if "8 clients, CPU ms of the whole server over" in what)
    assert (over.figure, over.limit) == (4.0, pytest.approx(1.25 * 3.1 + 0.15))
    (beside,) = (b for what, b in promises.items() if "busy neighbours" in what)
    assert (beside.figure, beside.kept) == (1.25, True)
    assert promises["resnet18, answers of ours that were not right"].kept
    assert not any("flask" in what or "batch 16" in what for what in promises)
    ours.append(turn(4.0, failed=1))
    *_, wrong = serve.bounds("resnet18", found, [serve.OURS], [32])
    assert (wrong.figure, wrong.kept) == (3, False)  # one of each load


class Stub(http.server.BaseHTTPRequestHandler):
    """Answers by the first byte of a body: its class; 7 is told as 0, 8 is refused, at 9 it hangs up."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        digit = self.rfile.read(int(self.headers["Content-Length"]))[:1].decode()
        if digit == "9":
            self.close_connection = True
            return
        text = json.dumps({"predicted_class": "0" if digit == "7" else digit})
        self.answer(429 if digit == "8" else 200, text.encode())

    def do_GET(self):
        text = b'n_batch_size_bucket{le="1.0"} 3.0\nn_batch_size_sum{a="b"} 12.0\nn_batch_size_count{a="b"} 4.0\n'
        self.answer(200, text)

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def stub():
    """The port of a server whose answers are known, and requests for each class."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port, [servers.post("/predict", "image/png", b"%d" % n) for n in range(10)]
        server.shutdown()


class OfTheStub(servers.Tree):
    """The server's processes are those of these tests."""

    def __init__(self, port):
        super().__init__(0)
        self.port = port

    ask = servers.Server.ask


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk makes the load, and is not installed")
@pytest.mark.parametrize(("asked", "met"), [((0, 1), "right"), ((7,), "wrong"), ((8,), "refused"), ((9,), "lost")])
def test_the_load_checks_every_answer(asked, met, stub, tmp_path):
    """Each answer is compared with the class of the picture it was asked about; what is not right is not counted as
    throughput."""
    port, requests = stub
    for number, digit in enumerate(asked):
        (tmp_path / f"{number}.request").write_bytes(requests[digit])
        (tmp_path / f"{number}.class").write_text(str(digit))
    kind = serve.kinds(None)[serve.OURS]
    load, _ = serve.put_load(OfTheStub(port), kind, tmp_path, 2, 1, f"http://127.0.0.1:{port}")
    assert (load.rate > 0, load.failed > 0) == (met == "right", met != "right")
    assert load.example.startswith({"wrong": "200", "refused": "429"}.get(met, ""))


@pytest.mark.parametrize(
    ("picture", "status", "fault"), [(3, 200, None), (7, 200, "picture "), (8, 429, None), (9, None, "EOFError ")]
)
def test_clients_of_the_soak_tell_right_answers_from_faults(picture, status, fault, stub):
    """A right class is counted by the model that gives it; a wrong one and a lost connection are faults, a refusal is
    none where it is allowed."""
    port, requests = stub
    load = soak.Load(port, [requests[picture]] * 10, [{picture: "the model"}] * 10, (429,))

    async def ask():
        async with soak.clients(load, 2):
            assert await soak.until(lambda: bool(load.statuses or load.faults), 30)

    asyncio.run(ask())
    assert {met for _, met in load.statuses} == ({status} if status else set())
    assert load.answered == len(load.seconds) == (load.statuses["good", 200] if picture == 3 else 0)
    assert bool(load.faults) == bool(fault)
    assert all(each.what.startswith(fault) and each.sent is not None for each in load.faults)
