"""Show log lines on the terminal, and write those of each process to a file of the run; both without secrets."""

import copy
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning_fabric.utilities.warnings import PossibleUserWarning

from deeplightning.config.schema import Config
from deeplightning.faults import SetupError
from deeplightning.process.identity import own_rank
from deeplightning.process.terminal import LAYOUT, is_interactive, styled, wrapped
from deeplightning.words import printable

log = logging.getLogger("deeplightning")

LABEL = 11  # columns of the word that begins a line, and of the space behind it


def to_terminal(cfg: Config) -> None:
    """Show once what is logged under `deeplightning` on the terminal, on the ranks that `logger.ranks` names."""
    print_once()
    for handler in [h for h in log.handlers if isinstance(h, _Terminal)]:
        log.removeHandler(handler)
    log.setLevel(logging.INFO)
    for chatty in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Lightning 2.6 under torch 2.15; nothing a user could do about it.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec", category=FutureWarning)
    # Our image data resume within an epoch by themselves.
    warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before the epoch ended")
    # No sample counts twice: `deeplightning.engine.process_group.CountsOnce`, which says where one does.
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the data", category=PossibleUserWarning)
    # Ours gives both numbers once: `deeplightning.callbacks.steps.StreamEnds`.
    warnings.filterwarnings("ignore", message="Length of IterableDataset")
    # `engine.gpus: null` is a choice.
    warnings.filterwarnings("ignore", message=r"GPU available but not used\.", category=PossibleUserWarning)
    # The key is called engine.matmul_precision here. Lightning's is news below its level, see above.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication available")
    if cfg.model.trainable != "all":  # what does not learn is in evaluation mode
        warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode at the start of training")
    if own_rank() in cfg.logger.ranks:
        handler = _Terminal(rank_shown(cfg))
        handler.setFormatter(Redacting(cfg, "%(message)s"))
        log.addHandler(handler)
    elif not log.handlers:
        log.addHandler(logging.NullHandler())  # else Python itself prints the warnings of a silent rank


def one_line_warnings() -> None:
    """Show Python's warnings as one line each, without the place in a library that a user cannot mend."""
    warnings.showwarning = lambda message, *_, **__: log.warning("%s", str(message).strip())


def print_once() -> None:
    """Keep handlers that print what any logger says, as of `logging.basicConfig`, from printing our lines again."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler and handler.stream in (sys.stdout, sys.stderr):
            handler.addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] != log.name


class _Terminal(logging.Handler):
    """News to stdout; warnings and errors to stderr, with the word. A terminal shows colour, breaks lines between
    words, and has its own form of a line where the record has one (`extra={"terminal": [...]}`).

    Args:
        begin: what each line starts with.
    """

    def __init__(self, begin: str):
        super().__init__()
        self.begin = begin

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        is_news = record.levelno < logging.WARNING
        stream = sys.stdout if is_news else sys.stderr
        if not is_news:
            word = record.levelname.lower()
            text = f"{styled(word, 31 if record.levelno > logging.WARNING else 33, stream)}: {text}"
        elif is_interactive(stream):
            rows = getattr(record, "terminal", None)
            if epoch := text.startswith("epoch "):  # whose label grows with its number; a value stays beside its name
                text = re.sub(r"(?<=\S) (?=\S)", "\xa0", text)
            lines = (wrapped(t, LABEL * (epoch or t[LABEL - 1 : LABEL] == " ")) for t in text.split("\n"))
            text = "\n".join(rows or lines).replace("\xa0", " ")
        stream.write(self.begin + text.replace("\n", f"\n{self.begin}") + "\n")  # at once: other ranks write too
        stream.flush()


def rank_shown(cfg: Config) -> str:
    """Return what a line on the terminal begins with where several processes report there."""
    return f"[rank {own_rank()}] " if len(cfg.logger.ranks) > 1 else ""


def log_to_file(path: Path, cfg: Config) -> None:
    """Write what any logger says, from INFO on, to a file as well; a second launch appends."""
    root = logging.getLogger()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for former in [h for h in root.handlers if isinstance(h, _RankFile | _Others)]:  # of an earlier run
            root.removeHandler(former)
            former.close()
        handler = _RankFile(path, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{path}: the log cannot be written: {error.strerror}") from error
    handler.setFormatter(Redacting(cfg, "%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.INFO)
    if not root.handlers and own_rank() in cfg.logger.ranks:
        root.addHandler(_Others(cfg))
    root.addHandler(handler)
    root.setLevel(min(root.level or logging.INFO, logging.INFO))
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


class _RankFile(logging.FileHandler):
    """What one process says of one run. A line that the disk does not take costs the run nothing; that is reported
    once."""

    _is_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_reported:
            self._is_reported = True
            log.warning("%s: not written completely: %s", self.baseFilename, error.strerror)


class _Others(logging.StreamHandler[Any]):
    """Warnings of loggers that are not ours, on stderr: Python prints them itself only where there is no handler."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(Redacting(cfg, f"{rank_shown(cfg)}%(message)s"))
        self.addFilter(_is_of_others)


_format: logging.Formatter | None = None


def keep_format() -> None:
    """Keep the format that `engine.setup_hook` has given a handler of the logger `deeplightning`, for the handlers of
    terminal and rank files that are created later."""
    global _format
    ours = [h for h in log.handlers if isinstance(h, logging.NullHandler) or type(h).__module__.startswith(__package__)]
    _format = next((h.formatter for h in ours if h.formatter and not isinstance(h.formatter, Redacting)), None)


class Redacting(logging.Formatter):
    """Write log lines without the values that came from the environment; in another format, if a hook has set one."""

    def __init__(self, cfg: Config | None, pattern: str):
        super().__init__(pattern)
        self.cfg = cfg

    def format(self, record: logging.LogRecord) -> str:
        if _format is not None:  # which may have colours of its own around the message
            record = copy.copy(record)
            record.msg, record.args = printable(record.getMessage(), LAYOUT), None
        text = _format.format(record) if _format else printable(super().format(record), LAYOUT)
        return self.cfg.redact_message(text) if self.cfg else text
