"""What a task that has an endpoint takes and gives: its `kind` names both, as `table_regression` does.

A bundle keeps the kind under `task`, and export, server and page follow from it. Importing it loads nothing else.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from deeplightning.array import ArraySpec
    from deeplightning.table import TableSpec

INPUTS = {"image": "images", "text": "tokens", "table": "rows", "array": "arrays"}
"""What goes in, with the name of the graph's input."""

OUTPUTS = {
    "classification": "probabilities",
    "reconstruction": "pictures",
    "regression": "numbers",
}
"""What comes out, with the name of the graph's output."""


class Kind(NamedTuple):
    """A kind of task, of the words of `INPUTS` and `OUTPUTS`."""

    takes: str
    gives: str

    @property
    def input(self) -> str:
        """The name of the graph's input."""
        return INPUTS[self.takes]

    @property
    def output(self) -> str:
        """The name of the graph's output."""
        return OUTPUTS[self.gives]

    @property
    def has_labels(self) -> bool:
        """Whether each number of an answer has a name."""
        return self.gives != "reconstruction"


KINDS = {
    f"{takes}_{gives}": Kind(takes, gives)
    for takes, all_given in {
        "image": ("classification", "reconstruction"),
        "text": ("classification",),
        "table": ("classification", "regression"),
        "array": ("classification", "regression"),
    }.items()
    for gives in all_given
}
"""The kinds that can be exported and served, by name."""


def row_spec(takes: str, values: Mapping[str, Any]) -> "TableSpec | ArraySpec":
    """How rows of a table, or arrays, are prepared, of what `to_dict` of their spec gave.

    Raises:
        ValueError: the values are not those of such a spec.
    """
    if takes == "table":
        from deeplightning.table import TableSpec  # imported lazily: a server of pictures does without

        return TableSpec.from_dict(values)
    from deeplightning.array import ArraySpec

    return ArraySpec.from_dict(values)
