"""Show log lines on the terminal, and write each process' log to a file of the run, both without secrets."""

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

LABEL_COLS = 11  # columns of the label of a line, with the space after it


def to_terminal(cfg: Config) -> None:
    """Show the log of `deeplightning` on the terminal, once, on the ranks of `logger.ranks`."""
    print_once()
    for handler in [h for h in log.handlers if isinstance(h, _Terminal)]:
        log.removeHandler(handler)
    log.setLevel(logging.INFO)
    for chatty in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("pytorch_lightning.profilers").setLevel(logging.INFO)  # the reports of `engine.profiler`
    # Lightning 2.6 with torch 2.15; users cannot do anything about it.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec", category=FutureWarning)
    # Our image data modules can resume inside an epoch.
    warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before the epoch ended")
    # `deeplightning.engine.process_group.CountsOnce` counts each sample once, and warns if it cannot.
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the data", category=PossibleUserWarning)
    # `deeplightning.callbacks.steps.StreamEnds` warns once, with both numbers.
    warnings.filterwarnings("ignore", message="Length of IterableDataset")
    # `engine.gpus: null` is a choice.
    warnings.filterwarnings("ignore", message=r"GPU available but not used\.", category=PossibleUserWarning)
    # The key is called engine.matmul_precision here.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication available")
    if cfg.model.trainable != "all":  # frozen modules are in evaluation mode
        warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode at the start of training")
    if own_rank() in cfg.logger.ranks:
        handler = _Terminal(rank_prefix(cfg))
        handler.setFormatter(Redacting(cfg, "%(message)s"))
        log.addHandler(handler)
    elif not log.handlers:
        log.addHandler(logging.NullHandler())  # else Python itself prints the warnings of this rank


def one_line_warnings() -> None:
    """Show each of Python's warnings as one line, without its location in a library."""
    warnings.showwarning = lambda message, *_, **__: log.warning("%s", str(message).strip())


def print_once() -> None:
    """Keep handlers of the root logger, such as that of `logging.basicConfig`, from printing our lines again."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler and handler.stream in (sys.stdout, sys.stderr):
            handler.addFilter(_is_from_other_logger)


def _is_from_other_logger(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] != log.name


class _Terminal(logging.Handler):
    """Handler that writes info to stdout, and warnings and errors to stderr with their level. A terminal gets colour,
    lines wrapped between words, and the record's own lines if it has some (`extra={"terminal": [...]}`). `prefix`
    starts each line."""

    def __init__(self, prefix: str):
        super().__init__()
        self.prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        is_info = record.levelno < logging.WARNING
        stream = sys.stdout if is_info else sys.stderr
        if not is_info:
            level = record.levelname.lower()
            text = f"{styled(level, 31 if record.levelno > logging.WARNING else 33, stream)}: {text}"
        elif is_interactive(stream):
            if epoch := text.startswith("epoch "):  # its label has no fixed width; keep each value beside its name
                text = re.sub(r"(?<=\S) (?=\S)", "\xa0", text)
            rows = (wrapped(t, LABEL_COLS * (epoch or t[LABEL_COLS - 1 : LABEL_COLS] == " ")) for t in text.split("\n"))
            text = "\n".join(getattr(record, "terminal", None) or rows).replace("\xa0", " ")
        stream.write(self.prefix + text.replace("\n", f"\n{self.prefix}") + "\n")  # in one call: other ranks write too
        stream.flush()


def rank_prefix(cfg: Config) -> str:
    """Return the prefix of lines on the terminal: the rank, if several processes write there."""
    return f"[rank {own_rank()}] " if len(cfg.logger.ranks) > 1 else ""


def log_to_file(path: Path, cfg: Config) -> None:
    """Write the records of all loggers, from INFO, to a file as well; a second launch appends."""
    root = logging.getLogger()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for former in [h for h in root.handlers if isinstance(h, _RankFile | _OtherLoggers)]:  # of an earlier run
            root.removeHandler(former)
            former.close()
        handler = _RankFile(path, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{path}: the log cannot be written: {error.strerror}") from error
    handler.setFormatter(Redacting(cfg, "%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.INFO)
    if not root.handlers and own_rank() in cfg.logger.ranks:
        root.addHandler(_OtherLoggers(cfg))
    root.addHandler(handler)
    root.setLevel(min(root.level or logging.INFO, logging.INFO))
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


class _RankFile(logging.FileHandler):
    """Log file of one process of a run. A failing disk does not end the run; it is reported once."""

    _is_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_reported:
            self._is_reported = True
            log.warning("%s: not written completely: %s", self.baseFilename, error.strerror)


class _OtherLoggers(logging.StreamHandler[Any]):
    """Handler for warnings of other loggers, on stderr: Python prints them itself only if there is no handler."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(Redacting(cfg, f"{rank_prefix(cfg)}%(message)s"))
        self.addFilter(_is_from_other_logger)


_hook_formatter: logging.Formatter | None = None


def keep_format() -> None:
    """Keep the format that `engine.setup_hook` set on a handler of the logger `deeplightning`, for handlers that are
    created later."""
    global _hook_formatter
    ours = [h for h in log.handlers if isinstance(h, logging.NullHandler) or type(h).__module__.startswith(__package__)]
    _hook_formatter = next((h.formatter for h in ours if h.formatter and not isinstance(h.formatter, Redacting)), None)


class Redacting(logging.Formatter):
    """Formatter that redacts values from the environment. If `engine.setup_hook` set a format, that is used."""

    def __init__(self, cfg: Config | None, pattern: str):
        super().__init__(pattern)
        self.cfg = cfg

    def format(self, record: logging.LogRecord) -> str:
        if _hook_formatter is not None:  # it may add colour codes around the message
            record = copy.copy(record)
            record.msg, record.args = printable(record.getMessage(), LAYOUT), None
        text = _hook_formatter.format(record) if _hook_formatter else printable(super().format(record), LAYOUT)
        return self.cfg.redact_message(text) if self.cfg else text
