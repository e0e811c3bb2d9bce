"""A failing disk ends a run with one error that has the path, or is only reported where the run can continue."""

import errno
import logging
import os
from types import SimpleNamespace

import pytest

from deeplightning.callbacks import provenance
from deeplightning.callbacks.checkpoints import Checkpoints
from deeplightning.callbacks.log_lines import _RankFile
from deeplightning.cli.exit_codes import report
from deeplightning.config import source
from deeplightning.engine.checkpoint_io import SafeCheckpointIO
from deeplightning.faults import SetupError
from deeplightning.runfolder import RunFolder, whole, write_whole
from deeplightning.tracking.claims import Claim, folder_of
from deeplightning.tracking.metrics_file import MetricsFile, read_lines
from deeplightning.tracking.store import locate


@pytest.fixture
def fails(monkeypatch):
    """`fails(number, name, owner)` makes a function, of `os` by default, fail at each call."""

    def failing(number, name, owner=os):
        real = getattr(owner, name)

        def fail(*arguments, **options):
            if name == "close":  # a failed close(2) closes too
                real(*arguments)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(owner, name, fail)

    return failing


def test_a_claim_that_cannot_be_closed_has_ended(tmp_path, fails, monkeypatch):
    """A claim ends even if close(2) fails: Linux closes the descriptor in any case."""
    claim = Claim(locate(str(tmp_path / "mlruns")), "a" * 32, tmp_path / "metrics.jsonl")
    fails(errno.EIO, "close")
    claim.close()
    monkeypatch.undo()
    assert not claim.path.exists()
    claim.close()


def test_a_metrics_file_that_cannot_be_closed_is_closed(tmp_path, fails, monkeypatch):
    """A failing close(2), which closes too, does not end the thread that sends the file."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"tags": {"a": "1"}})
    fails(errno.EDQUOT, "close")
    metrics.close()
    monkeypatch.undo()
    assert [line for _, line in read_lines(metrics.path)] == [{"tags": {"a": "1"}}]


def test_a_line_that_is_written_in_parts_is_whole(tmp_path, monkeypatch):
    """A line that a nearly full disk takes in parts is complete; a line cut off by a full disk does not damage the next
    one."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data, write=os.write: write(descriptor, data[:3]))
        metrics.append({"tags": {"first": "1"}})
    calls = []

    def full(descriptor, data, write=os.write):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="full"):
            metrics.append({"tags": {"lost": "x"}})
    metrics.append({"tags": {"second": "2"}})
    metrics.close()
    lines = [line for _, line in read_lines(metrics.path)]
    assert lines == [{"tags": {"first": "1"}}, {}, {"tags": {"second": "2"}}]


def test_a_log_file_that_takes_no_line_is_reported_once(tmp_path, caplog, capsys, fails, monkeypatch):
    """A log file that cannot be written is one warning, without a traceback in the run's output."""
    handler = _RankFile(tmp_path / "rank_0.log")
    record = logging.LogRecord("deeplightning", logging.INFO, __file__, 1, "a line", None, None)
    fails(errno.ENOSPC, "flush", handler)
    handler.emit(record)
    handler.emit(record)
    monkeypatch.undo()
    handler.close()
    (warning,) = [line for line in caplog.messages if "rank_0.log" in line]
    assert "not written completely: No space left on device" in warning
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ESTALE, errno.EINTR])
def test_a_disk_that_fails_ends_a_command_with_the_path(tmp_path, capsys, number):
    """The command exits with code 3 and one error, which has the path, without a traceback."""
    assert report(OSError(number, os.strerror(number), str(tmp_path / "best.json"))) == 3
    err = capsys.readouterr().err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    assert str(tmp_path / "best.json") in err
    assert "Traceback" not in err


def test_a_small_file_that_cannot_be_written_is_named(tmp_path, fails):
    """The error of a failed write has the path, which the system's error lacks, and the former file is kept."""
    path = tmp_path / "best.json"
    path.write_text("before")
    fails(errno.EDQUOT, "fsync")
    with pytest.raises(OSError, match=r"best\.json"):
        write_whole(path, "after")
    assert path.read_text() == "before"


def test_what_fails_while_it_is_written_leaves_the_former_file(tmp_path):
    """If writing a file in several parts fails, the former file is kept."""
    path = tmp_path / "predictions.csv"
    path.write_text("before")
    with pytest.raises(TypeError, match="bytes-like"), whole(path) as file:
        file.writelines([b"half", "of another type"])
    assert path.read_text() == "before"
    with whole(path) as file:
        file.write(b"after")
    assert path.read_text() == "after"


def test_the_name_of_a_checkpoint_is_synced(tmp_path, monkeypatch):
    """A saved checkpoint survives a loss of power: the file is synced, renamed, then its folder and the parents are
    synced."""
    done, names = [], {}
    real_sync, real_replace, real_open = os.fsync, os.rename, os.open

    def opened(path, *arguments, **options):
        descriptor = real_open(path, *arguments, **options)
        names[descriptor] = str(path)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("replace") or real_replace(*paths))
    monkeypatch.setattr(os, "fsync", lambda one: done.append(names.get(one, "file")) or real_sync(one))
    target = tmp_path / "run" / "last.ckpt"
    SafeCheckpointIO().save_checkpoint({"state_dict": {}}, target)
    assert done[:4] == ["file", "replace", str(target.parent), str(tmp_path)]


def test_a_best_that_cannot_be_read_is_put_aside(tmp_path, caplog):
    """A resumed run chooses a new best checkpoint, warns, and does not overwrite the unreadable one (call 195,
    ESTALE)."""
    folder = RunFolder(tmp_path)
    folder.best.write_bytes(b"nothing that can be read")
    callback = SimpleNamespace(state_key="x", settings=SimpleNamespace(monitor="val_acc", save_top_k=2))
    assert Checkpoints._find_kept(callback, folder, [], is_same_run=False) == []
    assert folder.best.exists()
    assert Checkpoints._find_kept(callback, folder, [], is_same_run=True) == []
    assert not folder.best.exists()
    assert (tmp_path / "best.1.ckpt").read_bytes() == b"nothing that can be read"
    assert f"chooses a new best checkpoint and keeps {tmp_path}/best.1.ckpt" in caplog.text


def test_code_that_cannot_be_written_is_named(tmp_path, caplog, fails):
    """A file that a run cannot write at its end is named in a warning (call 891, EINTR at a close)."""
    fails(errno.EINTR, "collect", provenance)
    origin = provenance.Provenance(SimpleNamespace(secrets=None, data=SimpleNamespace(root=None)), RunFolder(tmp_path))
    origin._code = object()
    origin.end(was_interrupted=False)
    assert "code.zip is not written: [Errno 4] Interrupted system call" in caplog.text


def test_the_former_code_of_a_run_is_kept_whole_or_not_at_all(tmp_path, fails, monkeypatch):
    """If the disk is full when a resumed run keeps the former code, that code stays unchanged, and a later attempt
    keeps it (call 178, ENOSPC)."""
    folder = RunFolder(tmp_path)
    folder.code.write_bytes(b"former")
    origin = provenance.Provenance(SimpleNamespace(secrets=None, data=SimpleNamespace(root=None)), folder)
    code = SimpleNamespace(pack=lambda redact: b"new")
    fails(errno.ENOSPC, "fsync")
    with pytest.raises(OSError, match="No space left"):
        origin._keep_code(code)
    monkeypatch.undo()
    assert folder.code.read_bytes() == b"former"
    assert not (tmp_path / "code.1.zip").exists()
    origin._keep_code(code)
    assert ((tmp_path / "code.1.zip").read_bytes(), folder.code.read_bytes()) == (b"former", b"new")


def test_a_config_on_a_failing_disk_is_no_wrong_config(tmp_path, fails, monkeypatch):
    """A config that cannot be read is an error of the system, exit code 3 (call 1, EIO)."""
    config = tmp_path / "c.yaml"
    config.write_text("seed: 1\n")
    content = SimpleNamespace(open=config.open)
    fails(errno.EIO, "open", content)
    monkeypatch.setattr(source, "frozen", lambda path: content)
    with pytest.raises(SetupError, match="cannot be read: Input/output error"):
        source.read(config, [])


def test_a_lock_is_released_even_if_the_disk_fails(tmp_path, monkeypatch, fails):
    """A failure to close the lock file is no error, and the folder can be locked again (call 626 of a resumed run,
    EIO)."""
    lock = RunFolder(tmp_path).lock()
    assert RunFolder(tmp_path).lock() is None
    fails(errno.EIO, "close")
    lock.release()
    monkeypatch.undo()
    again = RunFolder(tmp_path).lock()
    assert again is not None
    again.release()


def test_a_claim_that_cannot_be_written_leaves_nothing(tmp_path, fails, monkeypatch):
    """On a full disk each stage of a run tries again."""
    store = locate(str(tmp_path / "mlruns"))
    fails(errno.ENOSPC, "write")
    opened = []
    monkeypatch.setattr(Claim, "release", lambda self, of=Claim.release: opened.append(self._descriptor) or of(self))
    with pytest.raises(OSError, match="No space"):
        Claim(store, "a" * 32, tmp_path / "metrics.jsonl")
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    assert not list(folder_of(store).iterdir())
