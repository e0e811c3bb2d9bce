"""Keep the table of ONNX operators that PyTorch's exporter asks for.

onnxscript reads the sources of its five hundred functions again for each export, which takes longer than all else about
the export of a small network. The table is always the same.
"""

import functools
import sys

PLACES = "onnxscript._framework_apis."


def keep_table() -> None:
    """Make the table once in this process and its forks, if onnxscript is imported."""
    made = getattr(sys.modules.get(f"{PLACES}torch_2_5"), "get_torchlib_ops", None)
    if made is None or hasattr(made, "__wrapped__"):
        return
    kept = functools.cache(made)
    for name, module in list(sys.modules.items()):
        if name.startswith(PLACES) and vars(module).get("get_torchlib_ops") is made:
            module.get_torchlib_ops = kept  # type: ignore[attr-defined]
