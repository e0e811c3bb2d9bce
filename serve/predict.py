"""`deeplightning ask [FILE …]` or `--text TEXT …`: send files or texts to a server, and print one JSON line for each.
Needs no installed package."""

import argparse
import http.client
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from deeplightning.words import printable

DEFAULT_URL = "http://127.0.0.1:5000/predict"
_HOME = Path(__file__).parent.parent
SAMPLES = (_HOME / "deeplightning" / "examples" / "digits", _HOME / "examples" / "digits")
"""Folders of the sample digits in an installed package and in a clone."""

KINDS = {".csv": "text/csv", ".json": "application/json", ".txt": "text/plain; charset=utf-8"}
"""Content types by file suffix; any other file is a picture."""

TIMEOUT_SECONDS = 60
"""Timeout of the connection to the server."""


class PredictError(Exception):
    """Raised if there is no answer; the message says why and what to do."""

    exit_code = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the server's answer to each text and file in order. The first key is `text`, `image` (the path), or `file`
    for a file of `KINDS` or an answer that is a picture.

    Returns:
        the exit code: 0; 3 at the first input without an answer, with a note on stderr; 141 if stdout is closed.
    """
    parser = argparse.ArgumentParser(
        prog="deeplightning ask",
        description="Ask a server about files or texts. One JSON line is printed for each, in order. A .json file is "
        "sent as JSON, .csv and .txt as text, any other as a picture.",
        epilog=f"Without --url, the server's address is read from PREDICT_URL; without that, {DEFAULT_URL} is asked.",
    )
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help="default: the bundled sample digits")
    parser.add_argument("--text", metavar="TEXT", nargs="+", default=[], help="texts, for a server that takes texts")
    parser.add_argument("--url", default=os.environ.get("PREDICT_URL") or DEFAULT_URL, help="the server's address")
    options = parser.parse_args(arguments)
    try:
        for text in options.text:
            answer = ask(options.url, text.encode(errors="surrogateescape"), "The text", "text/plain; charset=utf-8")
            print(printable(json.dumps({"text": text, **answer})), flush=True)
        for path in options.files or (_samples() if not options.text else []):
            kind = KINDS.get(path.suffix.lower())
            answer = ask(options.url, _read(path), str(path), kind or "application/octet-stream")
            name = "file" if kind or "image" in answer else "image"
            print(printable(json.dumps({name: str(path), **answer})), flush=True)
    except PredictError as error:
        print(printable(str(error)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # stdout; network errors are a PredictError
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the interpreter prints an error at exit
        return 141
    return 0


def ask(url: str, picture: bytes, name: str, kind: str = "application/octet-stream") -> dict[str, object]:
    """Return the server's answer to an encoded picture, or to a body of another content type.

    Raises:
        PredictError: no server answers, it refuses the picture (`name` in the message), or is another program.
    """
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        parts = urlsplit(url)
        connection = kinds[parts.scheme](parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
    except (KeyError, ValueError, http.client.InvalidURL):
        raise PredictError(f"The server's address is {url!r}; it must look like {DEFAULT_URL}.") from None
    target = (parts.path or "/predict") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("POST", target, picture, {"Content-Type": kind})
        response = connection.getresponse()
        body = response.read()
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        raise PredictError(
            f"No server answers at {url} ({error}). Start one with: deeplightning serve last (in a clone: bash "
            "deploy.sh RUN), or name another with --url."
        ) from None
    finally:
        connection.close()
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise PredictError(f"{url} answers {response.status} without a JSON object: it is not a Deep Lightning server.")
    if response.status != 200:
        raise PredictError(f"{name}: the server answers {response.status}: {answer.get('ERROR', answer)}")
    return answer


def _samples() -> list[Path]:
    if not (found := sorted(path for folder in SAMPLES for path in folder.glob("*.png"))):
        raise PredictError(f"There are no sample images in {SAMPLES[0]}; name the files to send.")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PredictError(f"{path} cannot be read: {error.strerror}.") from None


if __name__ == "__main__":
    sys.exit(main())
