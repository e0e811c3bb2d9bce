"""Measure which faults in the shipped configs `deeplightning check` finds, and what it costs.

    .venv/bin/python benchmarks/check.py

prints four Markdown tables: 300 seeded mutations (`mutations.py` defines them and where they must be reported,
`scoring.py` scores the answers), semantic faults (`semantic.py`), four faults as LightningCLI and Hydra report them,
and CPU seconds of new processes. It exits with 1 if a promise at the end is not kept, and says which.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import semantic as semantic_faults
import side_by_side
from mutations import KINDS, Maker, Mutation, read_configs
from scoring import Answer, Score, check, check_mutation, sandbox, score

ROOT = Path(__file__).resolve().parents[1]

# The promises: shares of all mutations and of all typos, and CPU seconds at the median.
RIGHT_LINES = 0.98
RIGHT_WORDS = 0.9
HELP, BASE, LARGEST = 0.15, 0.35, 0.5
SEMANTIC = 15

MAX_PRINTED = 40  # misses

Scored = tuple[Mutation, Answer, Score]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seed", type=int, default=3, help="of the mutations that are told in full; default 3")
    words.add_argument("--others", type=int, nargs="*", default=[11, 12, 13], help="further seeds, a line each")
    words.add_argument("--repetitions", type=int, default=11, help="of each timed command; default 11")
    words.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")
    words.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers as well")
    options = words.parse_args()
    print(machine(), flush=True)
    broken: list[str] = []
    raw: dict[str, Any] = {}
    for part in options.parts:
        PARTS[part](options, broken, raw)
    if options.json:
        options.json.write_text(json.dumps(raw, indent=1))
    print("\n## Promises\n")
    print("\n".join(f"- broken: {promise}" for promise in broken) or "All are kept.")
    sys.exit(1 if broken else 0)


def machine() -> str:
    """Return the versions that the figures depend on."""
    names = ["pytorch-lightning", "torch", "griffelib"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"Python {platform.python_version()}, {versions}"


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


# ---- mutations


def mutations(options: argparse.Namespace, broken: list[str], raw: dict[str, Any]) -> None:
    """Print what `check` reports for planted faults, and for the unchanged configs."""

    maker = Maker(ROOT)
    with sandbox(ROOT) as place:
        alarms = [config.name for config in maker.configs if _alarm(check(config.name, place))]
        of_seed = {seed: score_all(maker.make(seed), place) for seed in [options.seed, *options.others]}
    scored = of_seed[options.seed]
    print(f"\n## {len(scored)} mutations of the shipped configs, seed {options.seed}\n")
    print(by_kind(scored))
    if len(of_seed) > 1:
        print("\nOther seeds:\n")
        rows = [[seed, *_shares(some)] for seed, some in of_seed.items() if seed != options.seed]
        print(table(["seed", *HEAD[1:]], rows))
    print(f"\nFalse alarms: {', '.join(alarms) or 'none'}, of {len(maker.configs)} shipped configs as they are.")
    missed = [one for one in scored if not one[2].right_line or one[2].right_word is False]
    print(f"\nNot told, told elsewhere, or with another word first: {len(missed) or 'none'}.\n")
    print("\n".join(f"- {told(*one)}" for one in missed[:MAX_PRINTED]))
    if len(missed) > MAX_PRINTED:
        print(f"- … and {len(missed) - MAX_PRINTED} more; `--json` writes them all")
    if alarms:
        broken.append(f"no false alarm: {', '.join(alarms)}")
    for seed, some in of_seed.items():
        lines = sum(s.right_line for _, _, s in some) / len(some)
        typos = [s.right_word for _, _, s in some if s.right_word is not None]
        if lines < RIGHT_LINES:
            broken.append(f"seed {seed}: {lines:.1%} caught with the right line, not {RIGHT_LINES:.0%}")
        if sum(typos) < RIGHT_WORDS * len(typos):
            broken.append(f"seed {seed}: the right word first for {sum(typos)} of {len(typos)} typos")
    raw["mutations"] = {
        seed: [
            {"kind": m.kind, "config": m.config, "file": m.file, "what": m.what, "lines": m.lines}
            | {"code": a.code, "told": [dataclasses.asdict(t) for t in a.told]}
            | dataclasses.asdict(s)
            for m, a, s in some
        ]
        for seed, some in of_seed.items()
    }


def score_all(some: list[Mutation], place: Path) -> list[Scored]:
    scored = []
    for mutation in some:
        answer = check_mutation(mutation, place)
        scored.append((mutation, answer, score(mutation, answer)))
    return scored


def _alarm(answer: Answer) -> bool:
    return answer.code != 0 or bool(answer.told)


HEAD = ["kind", "n", "caught", "right line", "right first word", "further faults"]


def by_kind(scored: list[Scored]) -> str:
    kinds = [kind for kind in KINDS if any(m.kind == kind for m, _, _ in scored)]
    rows = [[kind, *_shares([one for one in scored if one[0].kind == kind])] for kind in kinds]
    return table(HEAD, [*rows, ["all", *_shares(scored)]])


def _shares(some: list[Scored]) -> list[str]:
    scores = [one[2] for one in some]
    typos = [s.right_word for s in scores if s.right_word is not None]
    words = f"{sum(typos)} of {len(typos)}" if typos else "-"
    counts = [len(scores), sum(s.caught for s in scores), sum(s.right_line for s in scores)]
    return [*map(str, counts), words, str(sum(s.noise for s in scores))]


def told(mutation: Mutation, answer: Answer, _: Score) -> str:
    """Describe a miss: what was planted where, and what was reported."""
    said = "; ".join(f"{t.place}: {_cut(t.message)}" for t in answer.told[:3])
    said = said or ("…" + " ".join(answer.output.split())[-160:] if answer.code else "nothing")
    where = " or ".join(mutation.lines)
    return f"{mutation.kind}, {mutation.config}, {where}: {mutation.what}. Said (exit {answer.code}): {said}"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:159]}…"


# ---- beside what a user would take instead


def _peers() -> tuple[str | None, str]:
    try:
        return side_by_side.environment(), ""
    except side_by_side.NotMade as error:
        return None, f"\nLightningCLI and Hydra: not measured: {error}"


def faults(options: argparse.Namespace, broken: list[str], raw: dict[str, Any]) -> None:
    """Print how each program reports the same faults."""
    python, lacking = _peers()
    found = side_by_side.compare_faults(python)
    print("\n## The same faults, told by each\n")
    print("Faults told, exit code, lines of output, and whether a place in the config is named.\n")
    programs = list(next(iter(found.values())))
    rows = [[name, *(_words(said[program]) for program in programs)] for name, said in found.items()]
    print(table(["planted in base.yaml", *programs], rows) + lacking, flush=True)
    raw["faults"] = {name: {p: dataclasses.asdict(w) for p, w in said.items()} for name, said in found.items()}


def _words(word: side_by_side.Word) -> str:
    lines = "1 line" if word.lines == 1 else f"{word.lines} lines"
    return f"{word.told} of {word.planted}, exit {word.code}, {lines}, {'with place' if word.place else 'no place'}"


def semantic(options: argparse.Namespace, broken: list[str], raw: dict[str, Any]) -> None:
    """Print what `check --dry-run` reports for values that do not fit together."""
    found = {planted: semantic_faults.told(planted, ROOT) for planted in semantic_faults.PLANTED}
    print(f"\n## {len(found)} faults of meaning, `check --dry-run` in fresh processes\n")
    rows = [
        [planted.what, f"`{told.key}`" if told.key else "not told", f"{told.seconds:.1f}", _cut(told.message)]
        for planted, told in found.items()
    ]
    print(table(["planted", "told at", "CPU seconds", "what is said"], rows), flush=True)
    for planted, told in found.items():
        if told.key is None:
            broken.append(f"{planted.what} is not told")
        if told.seconds > SEMANTIC:
            broken.append(f"{planted.what} takes {told.seconds:.1f} CPU seconds, not {SEMANTIC}")
    raw["semantic"] = {planted.what: dataclasses.asdict(told) for planted, told in found.items()}


def seconds(options: argparse.Namespace, broken: list[str], raw: dict[str, Any]) -> None:
    """Print the CPU seconds of new processes."""
    python, lacking = _peers()
    configs = [config.name for config in read_configs(ROOT)]
    base = "configs/base.yaml"
    ours = side_by_side.OURS
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        largest, medians = side_by_side.largest_config(configs, place)
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "deeplightning --help": [*ours, "--help"],
            f"deeplightning check {base}": [*ours, "check", str(ROOT / base)],
            f"deeplightning check {largest} (the dearest)": [*ours, "check", str(ROOT / largest)],
        }
        if python is not None:
            job = side_by_side.PEERS / "hydra.yaml"
            cli = side_by_side.PEERS / "lightning_cli.yaml"
            commands |= {
                "LightningCLI --print_config": side_by_side.lightning_cli(python, cli, "--print_config"),
                "Hydra --cfg job, a template's imports": side_by_side.hydra(
                    python, "hydra_run.py", job, "--cfg", "job"
                ),
                "Hydra --cfg job, nothing imported": side_by_side.hydra(python, "hydra_bare.py", job, "--cfg", "job"),
            }
        taken = side_by_side.measure(commands, options.repetitions, place)
    names = list(commands)
    middle = {name: statistics.median(taken[name]) for name in names}
    print(f"\n## CPU seconds of a fresh process, {options.repetitions} times in turn\n")
    rows = []
    for name in names:
        low, _, high = statistics.quantiles(taken[name], n=4)
        spread = f"{low:.3f} to {high:.3f}"
        rows.append([f"`{name}`", f"{middle[name]:.3f}", spread, f"{middle[name] / middle[names[2]]:.2f}"])
    print(table(["command", "median", "quartiles", "to `check` of base.yaml"], rows) + lacking, flush=True)
    print("\n`check` of each shipped config, median of three: ", end="")
    print(", ".join(f"{Path(name).name} {value:.3f}" for name, value in sorted(medians.items())))
    for name, bound in zip(names[1:4], (HELP, BASE, LARGEST), strict=True):
        if middle[name] > bound:
            broken.append(f"{name} takes {middle[name]:.3f} CPU seconds, not {bound}")
    raw["seconds"] = taken


PARTS = {"mutations": mutations, "semantic": semantic, "faults": faults, "seconds": seconds}


if __name__ == "__main__":
    main()
