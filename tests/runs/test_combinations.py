"""`deeplightning.config.combinations`: an error about two incompatible settings names both keys and a remedy."""

import re
from pathlib import Path

import pytest
import yaml
from combination_tables import ENGINES, SETTINGS, Setting, broken_rule, engines, table

from deeplightning.config.combinations import RULES
from deeplightning.config.examine import examine, load_config
from deeplightning.config.schema import Engine, Optimizer, keys
from deeplightning.run.load import CPU_OVERRIDES

SLOW = pytest.mark.slow  # other tests train with ddp and with one process; the stages differ little
ANYWHERE = {"a schedule per step", "a schedule on a metric", "`precision: 16`", "`compile`", "`deterministic`"}

BASE = """\
data: {module: {type: some_parts.anything}, batch_size: 4}
model:
  module: {type: some_parts.anything}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.1}}
train: {num_epochs: 1}
"""

PARTS = """\
import pytorch_lightning as pl


def anything(cfg=None, *args, **kwargs): ...


FusedAdam = fp16_compress_hook = anything


class Manual(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.automatic_optimization = False


class Again(Manual):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.automatic_optimization = True
"""

# Overrides that break each rule, in the order of RULES.
TWO_OPTIMIZERS = "{g: {type: torch.optim.SGD, params: {lr: 1}}, d: {type: torch.optim.SGD, params: {lr: 1}}}"
LBFGS = "model.optimizer={type: torch.optim.LBFGS, params: {lr: 1}}"
ADAM = "model.optimizer={type: torch.optim.Adam, params: {lr: 1}}"
FUSED = ["model.optimizer={type: some_parts.FusedAdam, params: {lr: 1}}"]
EMA = "{type: deeplightning.callbacks.average.EMA}"
LATER = "{type: GradientAccumulationScheduler, params: {scheduling: {1: 2}}}"
MANUAL = ["model.module={type: some_parts.Manual}"]

BREAKING = [
    ["engine.backend=deepspeed_stage_2", "train.gradient_clip={value: 1, algorithm: value}"],
    ["engine.backend=fsdp", "train.gradient_clip={value: 0.1, algorithm: agc}"],
    ["engine.backend=deepspeed_stage_1", "model.scheduler={type: some_parts.anything, warmup: 0.1}"],
    ["engine.backend=fsdp", "logger.gradient_norm=true"],
    ["engine.backend=fsdp", "train.gradient_clip={value: 1, norm_type: 1}"],
    ["engine.backend=deepspeed_stage_1", f"model.optimizer={TWO_OPTIMIZERS}"],
    ["engine.backend=fairscale_oss", "train.accumulator_epoch=1", "train.accumulator_factor=2"],
    ["engine.backend=fairscale_oss", f"train.callbacks=[{LATER}]"],
    [*MANUAL, "train.accumulator_factor=2"],
    [*MANUAL, "train.gradient_clip={value: 1}"],
    ["train.seeds=5", "train.resume_ckpt=auto"],
    ["engine.backend=deepspeed_stage_3", "engine.precision=64"],
    ["engine.backend=fsdp", "engine.precision=16", "engine.gpus=1"],
    ["engine.processes=2", "engine.precision=16-true", "engine.backend=deepspeed_stage_2"],
    ["engine.backend=fsdp", "engine.precision=deepspeed"],
    ["engine.backend=fsdp", LBFGS],
    ["train.accumulator_factor=2", LBFGS],
    ["engine.precision=16-true", ADAM],
    ["engine.gpus=1", "engine.processes=2"],
    ["engine.backend=ddp", "engine.params.process_group_backend=nccl"],
    ["engine.backend=ddp", "engine.params.ddp_comm_hook={ref: some_parts.fp16_compress_hook}"],
    ["engine.sync_batchnorm=true"],
    ["engine.params.bucket_cap_mb=5"],
    FUSED,
    ["engine.backend=fsdp", "engine.processes=2", "engine.channels_last=true"],
    ["engine.backend=fsdp", "engine.processes=2", "logger.histograms=1"],
    ["engine.backend=fsdp", "engine.processes=2", f"train.callbacks=[{EMA}]"],
    ["train.fast=true", "train.resume_ckpt=auto"],
    ["engine.precision=bf16-true", f"train.callbacks=[{EMA}]"],
    ["engine.backend=fsdp", "engine.processes=2", "engine.compile=graphs"],
    ["engine.backend=fsdp", "engine.processes=2", "engine.fused=true"],
    ["engine.precision=16-mixed", "engine.gpus=1", "engine.fused=true"],
    ["data.num_splits=3", "data.fold=3"],
    ["stages=[train, test]", "test.ckpt=best"],
    ["stages=[test]"],
]
OTHER_FAULTS = {"engine.gpus", "engine.backend"}  # the machine has no GPU, and perhaps no DeepSpeed


@pytest.fixture(autouse=True)
def here(here):
    Path("some_parts.py").write_text(PARTS)
    Path("c.yaml").write_text(BASE)


@pytest.mark.parametrize(("rule", "overrides"), list(zip(RULES, BREAKING, strict=True)), ids=[r.when for r in RULES])
def test_each_pair_is_named_with_both_keys_and_a_remedy(rule, overrides):
    """The error is at the first key and has the other with its value and place, the reason, and the remedy."""
    (fault,) = [f for f in examine("c.yaml", overrides).faults if f.key not in OTHER_FAULTS - {rule.key}]
    assert fault.key == rule.key
    assert fault.exit_code == rule.exit_code
    assert f" cannot be combined with {rule.other}: " in fault.message
    assert fault.message.endswith(f": {rule.why}; {rule.remedy}")
    setter = [override for override in overrides if rule.other in override.partition("=")[0]]
    if setter:
        assert f"(override {setter[0]})" in fault.message
    assert fault.place is not None


OF_ENGINE = [row for rule, row in zip(RULES, BREAKING, strict=True) if "engine." in f"{rule.key} {rule.other}"]


@pytest.mark.parametrize("overrides", OF_ENGINE, ids=str)
def test_one_cpu_process_uses_the_weights_of_a_run_whatever_its_engine(overrides):
    """A run of any engine can be exported in one CPU process: `CPU_OVERRIDES` reset all keys of the engine."""
    assert load_config("c.yaml", [*overrides, *CPU_OVERRIDES]).engine == Engine()


def test_every_key_of_the_engine_is_reset_to_use_weights():
    """`CPU_OVERRIDES` contain every key of the engine's schema."""
    assert {f"engine.{f.name}" for f in keys(Engine)} <= {override.partition("=")[0] for override in CPU_OVERRIDES}


HALF = "engine.precision=16-true"
KIN = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad")


def test_half_precision_refuses_an_eps_that_it_cannot_hold():
    """`16-true` with the default eps of Adam and its variants ends with exit code 2 and a valid eps; the eps may be in
    params, in a group, or in one of several optimizers."""
    good, small = "{type: torch.optim.Adam, params: {lr: 1, eps: 1e-6}}", "{match: bias, eps: 1e-9}"
    for optimizer, is_right in [
        *((f"{{type: torch.optim.{name}, params: {{lr: 0.1}}}}", False) for name in KIN),
        ("{type: torch.optim.Adadelta, params: {lr: 1}}", True),
        ("{type: torch.optim.SGD, params: {lr: 1}}", True),
        ("{type: torch.optim.Adadelta, params: {lr: 1, eps: 0}}", False),
        (good, True),
        (f"{good[:-1]}, groups: [{small}]}}", False),
        (f"{good[:-1]}, groups: [{{match: bias, weight_decay: 0}}]}}", True),
        (f"{{g: {good}, d: {good}}}", True),
        (f"{{g: {good}, d: {{type: torch.optim.Adam, params: {{lr: 1}}}}}}", False),
    ]:
        report = examine("c.yaml", [HALF, f"model.optimizer={optimizer}"])
        assert [fault.key for fault in report.faults] == ([] if is_right else ["engine.precision"]), optimizer
        assert is_right or (report.exit_code, "eps: 1e-4" in report.faults[0].message) == (2, True)


def test_half_precision_is_refused_only_where_weights_learn_in_it():
    """`16`, `bf16-true`, `32` and a test without training accept Adam's default eps."""
    assert examine("c.yaml", [HALF, ADAM, "stages=[test]", "test.ckpt=last"]).faults == []
    for precision in (16, "bf16-true", 32):
        assert examine("c.yaml", [f"engine.precision={precision}", ADAM]).faults == []


def test_deepspeed_computes_an_optimizer_in_32_bits():
    """`16-true` is allowed with ZeRO, whose optimizer has a float32 copy of the parameters that keeps the eps."""
    rule = next(rule for rule in RULES if rule.other == "model.optimizer")
    adam = Optimizer(type="torch.optim.Adam", params={"lr": 0.1})
    setting = Setting("", {"model.optimizer": adam, "engine.precision": "16-true"})
    assert broken_rule(setting, "deepspeed_stage_2", gpus=2) is None
    assert broken_rule(setting, "fsdp", gpus=2) is rule
    assert broken_rule(setting, "ddp") is rule


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.backend=deepspeed_stage_2", "train.gradient_clip={value: 1}"],  # one process: the backend is dropped
        ["engine.backend=ddp", "engine.processes=2", "train.gradient_clip={value: 1, algorithm: value}"],
        ["engine.backend=ddp", f"model.optimizer={TWO_OPTIMIZERS}"],
        ["engine.precision=64"],
        ["engine.backend=deepspeed_stage_2", "engine.precision=apex_O2"],
        ["engine.backend=deepspeed_stage_3_offload_nvme", "engine.params={nvme_path: .}"],
        ["engine.gpus=auto", "engine.processes=2"],
        ["engine.backend=ddp", "engine.processes=2", "engine.params={bucket_cap_mb: 5}"],
        ["stages=[test]", "test.ckpt=last"],
        ["stages=[train, test]"],
        ["train.checkpoint={monitor: val_acc, save_top_k: 3}"],
        ["engine.backend=ddp", "engine.processes=2", f"train.callbacks=[{EMA}]"],
        ["model.module={type: some_parts.Again}", "train.accumulator_factor=2", "train.gradient_clip={value: 1}"],
        ["train.accumulator_epoch=1", "train.accumulator_factor=2"],
        [*MANUAL, "train.accumulator_factor=2", "stages=[test]", "test.ckpt=last"],  # it does not train
        [*MANUAL, "train.gradient_clip={value: 1}", "train.num_epochs=0"],
        [*MANUAL, "train.gradient_clip={value: 1, algorithm: agc}"],  # a callback clips
    ],
)
def test_what_goes_together_passes(overrides):
    """Each setting of an incompatible pair is accepted with other settings."""
    assert [str(fault) for fault in examine("c.yaml", overrides).faults if fault.key not in OTHER_FAULTS] == []


@pytest.mark.parametrize(
    "callback", ["3", "null", "{type: 3}", "{params: {}}", "{type: my.OwnGradientAccumulationScheduler}"]
)
@pytest.mark.parametrize("backend", ["deepspeed_stage_2", "fsdp"])
def test_an_invalid_callback_breaks_no_rule(callback, backend):
    """An invalid callback, or one of the user's with a similar name, gives errors of its own key only."""
    found = examine("c.yaml", [f"train.callbacks=[{callback}]", f"engine.backend={backend}"]).faults
    assert [fault.key for fault in found if fault.key == "train.callbacks"] == []
    assert any(str(fault.key).startswith("train.callbacks.0") for fault in found)


def test_all_contradictions_are_reported_at_once():
    """Contradictions and other errors are reported together, in the order of the file."""
    report = examine("c.yaml", ["stages=[test]", "data.fold=1", "data.num_worker=1", "engine.sync_batchnorm=true"])
    keys_in_order = ["data.fold", "data.num_worker", "engine.sync_batchnorm", "test.ckpt"]
    assert ([fault.key for fault in report.faults], report.exit_code) == (keys_in_order, 2)


def test_a_key_that_is_wrong_itself_contradicts_nothing():
    """A typo in a backend is one error, without a contradiction."""
    overrides = ["engine.backend=deepspede_stage_2", "train.gradient_clip={value: 1, algorithm: value}"]
    assert [fault.key for fault in examine("c.yaml", overrides).faults] == ["engine.backend"]


MPI = "engine={backend: ddp, processes: 2, params: {process_group_backend: mpi}}"
SEED_ENGINE = "engine={backend: deepspeed_stage_3, gpus: [96, 97]}"


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        (FUSED[0], "model.optimizer.type", "there is no CUDA device in use"),
        (MPI, "engine.params.process_group_backend", "has no MPI"),
        (SEED_ENGINE, "engine.gpus", "asks for GPU indexes 96, 97"),  # without them DeepSpeed is not needed
    ],
)
def test_what_this_machine_lacks_has_exit_code_3(override, key, words):
    """A missing GPU, MPI build of torch or CUDA device for a fused optimizer is one error with exit code 3."""
    (fault,) = examine("c.yaml", [override]).faults
    assert (fault.key, fault.exit_code, words in fault.message) == (key, 3, True)


def test_the_worst_fault_gives_the_exit_code():
    """An invalid config (2) takes precedence over a missing device (3), and that over missing weights (4)."""
    assert examine("c.yaml", ["stages=[test]"]).exit_code == 4
    assert examine("c.yaml", ["stages=[test]", "engine.gpus=[97]"]).exit_code == 3
    assert examine("c.yaml", ["stages=[test]", "engine.gpus=[97]", "sed=1"]).exit_code == 2


def test_each_rule_and_each_setting_has_its_row():
    """The tables of docs/reference/check.md and engines.md contain each rule and each setting."""
    assert len(re.findall(r"^\|", table(), re.MULTILINE)) == len(RULES) + 2
    rows, anywhere = engines(), engines().partition("All engines allow ")[2].partition(".\n")[0].split(", ")
    in_rows = re.findall(r"^\| (.+?) \|", rows, re.MULTILINE)[1:]
    assert sorted(in_rows + anywhere) == sorted(setting.words for setting in SETTINGS)


CELLS = [
    pytest.param(
        setting, backend, id=f"{setting.words}, {name}", marks=[SLOW] * (setting.words in ANYWHERE or name != "fsdp")
    )
    for setting in SETTINGS
    for name, backend in ENGINES.items()
]
LEGAL = [cell for cell in CELLS if broken_rule(*cell.values) is None]


def spread(backend):
    """Return overrides for two processes, or for one without a backend."""
    return ["engine.processes=1"] if backend is None else [f"engine.backend={backend}", "engine.processes=2"]


@pytest.mark.parametrize(("setting", "backend"), [cell.values for cell in CELLS if cell not in LEGAL])
def test_what_the_table_of_engines_refuses_is_refused(setting, backend):
    """`check` refuses each forbidden cell with the key and exit code of its rule."""
    rule = broken_rule(setting, backend)
    report = examine("c.yaml", [*spread(backend), *setting.overrides()])
    assert [(fault.key, fault.exit_code) for fault in report.faults] == [(rule.key, rule.exit_code)]


@pytest.mark.parametrize(
    ("setting", "backend"),
    [pytest.param(*c.values, id=c.id, marks=[*c.marks, *[SLOW] * (n % 4 > 0)]) for n, c in enumerate(LEGAL)],
)
def test_what_the_table_of_engines_allows_trains(setting, backend, job):
    """Each allowed cell trains on two CPU processes; `cfg.yaml` has the backend and precision that it used."""
    ranks = 1 if backend is None else 2
    done = job(*spread(backend), *setting.overrides(), ranks=ranks)
    assert (done.folder / "last.ckpt").is_file()
    written = yaml.safe_load((done.folder / "cfg.yaml").read_text())
    assert written["engine"]["backend"] == backend
    if "engine.precision" in setting.values:
        asked = setting.values["engine.precision"]
        assert written["engine"]["precision"] == ("bf16-mixed" if asked == 16 else asked)
