"""The one place that names the files a run leaves. Standard library only."""

from pathlib import Path


class RunFolder:
    """The folder of one run (`path` is made absolute); every attribute is the path of one thing in it.

    Nothing is created here: whoever writes a file makes its folder.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser().absolute()
        self.config = self.path / "cfg.yaml"
        self.environment = self.path / "environment.json"
        self.git_diff = self.path / "git.diff"
        self.last = self.path / "last.ckpt"
        self.best = self.path / "best.ckpt"
        self.best_score = self.path / "best.json"
        self.samples = self.path / "samples.npz"
        self.bundle = self.path / "bundle"
        self.bundle_card = self.bundle / "bundle.json"
        self.bundle_model = self.bundle / "model.onnx"
        self.bundle_weights = self.bundle / "weights.safetensors"
        self.predictions = self.path / "predictions.csv"
        self.flops = self.path / "flops.txt"

    def checkpoint(self, epoch: int, step: int) -> Path:
        """A checkpoint kept besides `last` and `best`."""
        return self.path / f"epoch={epoch}-step={step}.ckpt"

    def log(self, rank: int) -> Path:
        """What one process said."""
        return self.path / "logs" / f"rank_{rank}.log"

    def results(self, stage: str) -> Path:
        """Metrics of `validate` (`val_results.json`) or `test` (`test_results.json`)."""
        return self.path / f"{_short(stage)}_results.json"

    def stage_predictions(self, stage: str) -> Path:
        """One row per sample of the validation or test set, in data order."""
        return self.path / f"{_short(stage)}_predictions.csv"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def _short(stage: str) -> str:
    return "val" if stage == "validate" else stage
