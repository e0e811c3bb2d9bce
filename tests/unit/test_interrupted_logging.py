"""A signal handler that raises an exception never leaves a lock of `logging` held."""

import logging
import os
import signal
import threading
import time

import pytest
from hangs import limited

from deeplightning.callbacks.signals import Signals
from deeplightning.launch import ProcessHooks
from deeplightning.process import streams


class Lock:
    """A log handler's lock that sends SIGTERM when it is first acquired, before the caller enters its `try`."""

    def __init__(self):
        self.lock, self.is_sent = threading.RLock(), False

    def acquire(self):
        self.lock.acquire()
        if not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def release(self, *_):
        self.lock.release()

    __enter__, __exit__ = acquire, release


class Blocked(logging.FileHandler):
    """A log handler that hangs after it has written a record of the main thread."""

    def emit(self, record):
        super().emit(record)
        if threading.current_thread() is threading.main_thread():
            time.sleep(100)


def log_and_sleep(log):
    log.warning("main thread")
    time.sleep(100)


@pytest.mark.parametrize("kind", [logging.FileHandler, Blocked])
@pytest.mark.parametrize("setup", [streams.prepare, lambda: Signals(ProcessHooks())._install()], ids=["command", "run"])
def test_another_thread_can_log_after_an_interrupt_inside_logging(setup, kind, tmp_path):
    """The exception is raised when the main thread leaves `logging`, or after one second if it does not."""

    def is_interrupted():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        setup()
        handler, log = kind(tmp_path / "log"), logging.Logger("interrupted")
        handler.lock = Lock()
        log.addHandler(handler)
        with pytest.raises((streams.Terminated, streams.Interrupted), match="interrupted by SIGTERM"):
            log_and_sleep(log)
        thread = threading.Thread(target=log.warning, args=("other thread",))
        thread.start()
        thread.join()

    limited(2, is_interrupted)
    assert (tmp_path / "log").read_text() == "main thread\nother thread\n"
