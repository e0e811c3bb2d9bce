"""`bash test.sh --storm`: run cases until the time is up, print the table, exit with 1 for a broken promise.

`dist/storm/SEED` keeps the folder of each failed case, and `broken.txt` its message and the command that repeats it.
"""

import argparse
import gc
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if sys.path[0] == str(TESTS / "storm"):  # run by its path
    sys.path[0] = str(TESTS)

import storm  # noqa: E402
from storm.place import Skipped  # noqa: E402

READY = "STORM_ENVIRONMENT"
"""Variable that is set once this program has replaced itself, with the variables that the kinds require."""


def main() -> int:
    """Return the exit code. 0: every promise held. 1: one was broken. 2: the arguments are wrong. 130: Ctrl-C."""
    args = _arguments()
    found = storm.load_kinds()
    if unknown := [name for name in args.only if name not in found]:
        print(f"error: --only {unknown[0]}: no such kind of case; there are {', '.join(found)}", file=sys.stderr)
        return 2
    modules = {name: module for name, module in found.items() if not args.only or name in args.only}
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    left_out = _set_environment(modules, seed)
    _clean_environment()

    begun = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupted)
    from commands import import_all

    from storm.schedule import Storm, Tally
    from storm.table import repeat, table

    base = args.folder / str(seed)
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    broken = base / "broken.txt"

    def report(result: storm.worker.Result, folder: Path) -> None:
        mark = {True: "held", False: "BROKEN", None: "skipped"}[result.held]
        if result.held is False:
            again = repeat(result.kind, seed, result.number)
            with broken.open("a") as file:
                file.write(f"{result.kind} {result.number}\n{result.message}\n{again}\n{folder}\n\n")
            print(f"{result.kind} {result.number}: {mark}: {result.message}\n  {again}\n  {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            if args.verbose or result.held is None:
                print(f"{result.kind} {result.number}: {mark}: {result.message} ({result.seconds:.1f} s)", flush=True)

    tallies = {name: Tally(skipped=left_out.get(name, "")) for name in modules}
    run = Storm(modules, base, seed, args.minutes * 60, args.jobs, report, args.case, args.until_broken, tallies)
    code = 0
    try:
        import_all(storm.preload(modules))
        print(
            f"storm of seed {seed}, {args.minutes:g} minutes; imported in {time.monotonic() - begun:.0f} s", flush=True
        )
        run.run()
    except KeyboardInterrupt:
        code = 130
    gc.unfreeze()  # otherwise Triton's bindings print a page about objects that still exist at exit
    shown = table(run)
    (base / "table.md").write_text(f"{time.strftime('%Y-%m-%d')}, seed {seed}, {run.elapsed:.0f} s\n\n{shown}\n")
    print(f"\n{shown}\n{run.elapsed:.0f} s; seed {seed}; {base}", flush=True)
    if any(tally.broken for tally in run.tallies.values()):
        print(f"Broken promises, with the commands that repeat them: {broken}", file=sys.stderr)
        return 1
    for name in modules:
        shutil.rmtree(base / f"shared-{name}", ignore_errors=True)
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="test.sh --storm", description="Tests promises under injected faults.")
    parser.add_argument("--minutes", type=float, default=60.0, help="no case starts later (default 60)")
    parser.add_argument("--seed", type=int, help="determines every case (default: random, and printed)")
    parser.add_argument("--only", default="", help=f"comma-separated kinds: {','.join(storm.KINDS)}")
    parser.add_argument("--case", type=int, help="run only the case with this number of each kind")
    parser.add_argument(
        "--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="parallel cases (default: one more than cores)"
    )
    parser.add_argument("--until-broken", action="store_true", help="stop at the first broken promise")
    parser.add_argument("--folder", type=Path, default=TESTS.parent / "dist" / "storm", help="where to keep failures")
    parser.add_argument("--verbose", action="store_true", help="print a line for each case")
    args = parser.parse_args()
    args.only = [name for name in args.only.split(",") if name]
    args.folder = args.folder.absolute()
    return args


def _set_environment(modules: dict, seed: int) -> dict[str, str]:
    """Restart this program, with the same seed, if a kind needs variables from the start.

    Returns:
        For each kind that cannot be run here, the reason.
    """
    if READY in os.environ:
        return dict(line.split("=", 1) for line in os.environ.pop(READY).splitlines())
    wanted, left_out = {}, {}
    for name, module in modules.items():
        try:
            wanted |= module.environment() if hasattr(module, "environment") else {}
        except Skipped as skipped:
            left_out[name] = " ".join(str(skipped).split())
    if wanted:
        reasons = "\n".join(f"{name}={reason}" for name, reason in left_out.items())
        arguments = [sys.executable, *sys.argv, "--seed", str(seed)]
        os.execve(sys.executable, arguments, os.environ | wanted | {READY: reasons})
    return left_out


def _clean_environment() -> None:
    """Remove variables of the caller that would change a run."""
    from commands import environment

    kept = environment()
    os.environ.clear()
    os.environ.update(kept)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
