"""Train on short texts: examples/sst2 by `deeplightning train`, by plain PyTorch with a DataLoader, by Hugging Face's
Trainer.

    .venv/bin/python benchmarks/texts.py [--data FOLDER] [--rounds 5]

learns the example's made-up reviews, or those of a folder with SST-2's files train.tsv and dev.tsv, in two epochs, each
program in a fresh process in turn. Prints a Markdown table of medians, in CPU seconds of the whole process tree, and
each bound. Ends with 1 when one is not kept, with 3 when the Trainer's environment cannot be made.
"""

import argparse
import importlib.util
import json
import platform
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import side_by_side
from side_by_side import OURS, PEERS, ROOT, Bound, table
from timed import run

EXAMPLE = ROOT / "examples" / "sst2"
EPOCHS = 2
SELF, BY_LENGTH, RAW, TRAINER = "deeplightning", "deeplightning, by length", "plain PyTorch", "Hugging Face's Trainer"
AT_MOST = {RAW: 1.0, TRAINER: 0.8}  # CPU of the whole job


def write_reviews(folder: Path) -> None:
    """Write the example's made-up reviews in the format of SST-2's files."""
    spec = importlib.util.spec_from_file_location("reviews", EXAMPLE / "reviews.py")
    assert spec is not None
    assert spec.loader is not None
    reviews = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reviews)
    for name, texts in zip(("train", "dev", "test"), reviews.made_up().values(), strict=True):
        rows = zip(texts.texts, texts.labels.tolist(), strict=True)
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))


def commands(python: str, data: Path) -> dict[str, list[str]]:
    """Return the command of each program."""
    settings = ["stages=[train]", "train.export=false", f"data.root={json.dumps(str(data))}"]
    settings += ["data.module.params.test=null", "logger.params.tracking_uri=mlruns", "logger.pictures=null"]
    ours = [*OURS, "train", str(EXAMPLE / "sst2.yaml"), *settings]
    buckets = "{type: deeplightning.data.samplers.BucketedDistributedSampler, params: {buckets: 8, sort_key: lengths}}"
    peer = str(PEERS / "texts_raw.py")
    return {
        SELF: ours,
        BY_LENGTH: [*ours, f"data.sampler={buckets}"],
        RAW: [sys.executable, peer, str(data), "raw"],
        TRAINER: [python, peer, str(data), "trainer"],
    }


def accuracy(output: str) -> float:
    """Return the last accuracy on the validation set that a program has printed."""
    return float(re.findall(r"val_acc ([\d.]+)", output)[-1])


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--data", type=Path, help="a folder with train.tsv and dev.tsv; default: made-up reviews")
    words.add_argument("--rounds", type=int, default=5, help="in which each program has its turn; default 5")
    given = words.parse_args()
    try:
        python = side_by_side.environment("texts_requirements.txt", ".venv-texts")
    except side_by_side.NotMade as error:
        print(f"The environment of the Trainer cannot be made: {error}.", file=sys.stderr)
        sys.exit(3)
    taken: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data = given.data.resolve() if given.data else place / "reviews"
        if not given.data:
            data.mkdir()
            write_reviews(data)
        programs = commands(python, data)
        for number in range(given.rounds):
            for name in list(programs)[:: 1 if number % 2 == 0 else -1]:
                took = run(programs[name], place / f"{number}-{len(taken.get(name, []))}-{list(programs).index(name)}")
                steps = len(took.processes[0].cpu) // EPOCHS  # buckets have a few more
                row = {"job": took.cpu, "start": took.start, "step": 1e3 * took.per_step(steps), "mib": took.memory}
                taken.setdefault(name, []).append(row | {"acc": accuracy(took.output)})
                print(f"round {number + 1}: {name}: {taken[name][-1]}", file=sys.stderr, flush=True)
    print(f"{platform.python_version()}; {given.rounds} rounds, one thread, CPU seconds\n")
    middle = {name: {k: statistics.median(row[k] for row in rows) for k in rows[0]} for name, rows in taken.items()}
    head = ["program", "whole job", "to the first step", "ms a step", "MiB", "val_acc"]
    lines = [
        [name, f"{m['job']:.1f}", f"{m['start']:.2f}", f"{m['step']:.1f}", f"{m['mib']:.0f}", f"{m['acc']:.3f}"]
        for name, m in middle.items()
    ]
    print(table(head, lines))
    pairs = {peer: zip(taken[SELF], taken[peer], strict=True) for peer in AT_MOST}
    bounds = [
        Bound(f"the whole job, of {peer}", statistics.median(a["job"] / b["job"] for a, b in some), AT_MOST[peer])
        for peer, some in pairs.items()
    ]
    print(f"\n## Bounds\n\n{table(['what', 'bound', 'figure', 'kept'], [bound.row() for bound in bounds])}")
    sys.exit(0 if all(bound.kept for bound in bounds) else 1)


if __name__ == "__main__":
    main()
