"""Canaries for the undocumented features of ONNX Runtime in `serve.private`. `test_server.py` checks the thread that
`ORT_DISABLE_TELEMETRY` prevents, `test_session.py` a real out-of-memory error, and `test_own_endpoint.py` an index that
is out of range."""

from pathlib import Path

import pytest
from served import colour_run

from serve.private import NO_MEMORY, onnxruntime, open_strictly


@pytest.mark.run
def test_sessions_do_not_fall_back_to_the_cpu(tmp_path, monkeypatch, capsys):
    """A provider that fails raises, with nothing on stdout; without the keyword ONNX Runtime would retry on the CPU."""
    model = colour_run(tmp_path).bundle_model
    tried = []

    def fail(session, providers, *rest):
        tried.append(providers)
        if len(tried) == 1:
            raise RuntimeError("the provider fails")

    # The method that makes the session for given providers; the constructor retries it in its fallback.
    monkeypatch.setattr(onnxruntime.InferenceSession, "_create_inference_session", fail)
    with pytest.raises(RuntimeError, match="the provider fails"):
        open_strictly(model, onnxruntime.SessionOptions(), [("CUDAExecutionProvider", {})])
    assert (len(tried), capsys.readouterr().out) == (1, "")


def test_texts_are_those_of_the_installed_version():
    """The binary contains the error messages and the variable."""
    (binary,) = Path(onnxruntime.__file__).parent.glob("capi/onnxruntime_pybind11_state*.so")
    content = binary.read_bytes()
    reports = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) >= (1, 29)
    for text in (*NO_MEMORY[:3], *["ORT_DISABLE_TELEMETRY"] * reports):  # the fourth comes from CUDA's own libraries
        assert text.encode() in content, text
