"""Define the kinds of exportable tasks: a `kind` such as `table_regression` names input and output.

A bundle stores the kind as `task`; it determines export, server and page. Importing this module loads nothing else.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from deeplightning.array_spec import ArraySpec
    from deeplightning.table_spec import TableSpec

INPUTS = {"image": "images", "text": "tokens", "table": "rows", "array": "arrays"}
"""Kinds of input, with the name of the graph's input."""

OUTPUTS = {
    "classification": ("probabilities", "classes"),
    "reconstruction": ("pictures", ""),
    "regression": ("numbers", "targets"),
    "multilabel": ("probabilities", "labels"),
    "segmentation": ("probabilities", "classes"),
}
"""Kinds of output. Each has the name of the graph's output, and the plural noun of its labels, "" if it has none. Their
answers are defined in `serve.outputs`."""

CLASS_COLOURS = (
    *((40, 40, 40), (230, 75, 60), (50, 160, 240), (85, 190, 90), (250, 200, 50), (165, 90, 200)),
    *((245, 140, 40), (70, 205, 200), (235, 120, 180), (140, 110, 80), (190, 220, 90), (110, 120, 220)),
)
"""Red, green and blue of each class in segmentation pictures; further classes reuse them from the first."""

MAX_COMPARED_NUMBERS = 2**15
"""Most numbers of a per-pixel answer that a bundle keeps."""


class Kind(NamedTuple):
    """Kind of task: a key of `INPUTS` and one of `OUTPUTS`."""

    takes: str
    gives: str

    @property
    def input(self) -> str:
        """Name of the graph's input."""
        return INPUTS[self.takes]

    @property
    def nouns(self) -> str:
        """Plural noun of its inputs, for messages and as a key in files."""
        return "texts" if self.takes == "text" else self.input

    @property
    def spec(self) -> str:
        """Name of the task's attribute that prepares an input."""
        return {"image": "image_spec", "text": "text_spec"}.get(self.takes, "row_spec")

    @property
    def golden(self) -> str:
        """Key of a bundle's golden samples."""
        return "pictures" if self.takes == "image" else self.nouns

    @property
    def output(self) -> str:
        """Name of the graph's output."""
        return OUTPUTS[self.gives][0]

    @property
    def labelled(self) -> str:
        """What the labels name: classes, labels or targets; "" without labels."""
        return OUTPUTS[self.gives][1]

    @property
    def has_choices(self) -> bool:
        """Whether its labels are choices; else each names a number of the answer."""
        return self.labelled in ("classes", "labels")

    def answer(self, labels: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one answer, for a number of labels and the shape of a prepared input."""
        return {"reconstruction": tuple(shape), "segmentation": (labels, *shape[1:])}.get(self.gives, (labels,))

    def compared(self, answers: "np.ndarray") -> "np.ndarray":
        """Return the part of golden answers that a bundle keeps and a server compares, (N, …).

        For a segmentation, float (N, K, H, W), this is every s-th row and column, so that no answer has more than
        `MAX_COMPARED_NUMBERS` numbers.
        """
        if self.gives != "segmentation":
            return answers
        step = math.ceil(max(1, math.prod(answers.shape[1:]) / MAX_COMPARED_NUMBERS) ** 0.5)
        return answers[..., ::step, ::step]


KINDS = {
    f"{takes}_{gives}": Kind(takes, gives)
    for takes, all_given in {
        "image": ("classification", "reconstruction", "multilabel", "segmentation", "regression"),
        "text": ("classification",),
        "table": ("classification", "regression", "multilabel"),
        "array": ("classification", "regression", "multilabel"),
    }.items()
    for gives in all_given
}
"""Kinds that can be exported and served, by name."""


def labels_of(task: Any) -> list[str]:
    """Return a unique name for each number of a task's answers: repeated names get their index, from 0.

    ImageNet, for example, has two classes named crane.
    """
    names = [str(name) for name in task.class_names] if KINDS[task.kind].labelled else []
    counts = Counter(names)
    return [f"{name} ({index})" if counts[name] > 1 else name for index, name in enumerate(names)]


def is_plain(task: object) -> bool:
    """Return whether a task is the user's own LightningModule and does not define how it is exported.

    It may have attributes with the same names as ours, such as `kind`.
    """
    is_ours = any(each.__module__.startswith("deeplightning.task.") for each in type(task).__mro__)
    return not is_ours and not hasattr(task, "inference_model")


def has_spec(task: object) -> bool:
    """Return whether a task knows how its inputs are prepared."""
    return any(getattr(task, name, None) is not None for name in ("image_spec", "text_spec", "row_spec"))


def row_spec(takes: str, values: Mapping[str, object]) -> "TableSpec | ArraySpec":
    """Return a table or array spec from the result of its `to_dict`.

    Raises:
        ValueError: the values are not those of such a spec.
    """
    if takes == "table":
        from deeplightning.table_spec import TableSpec  # imported lazily: a server of pictures does not need it

        return TableSpec.from_dict(values)
    from deeplightning.array_spec import ArraySpec

    return ArraySpec.from_dict(values)
