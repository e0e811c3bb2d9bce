"""Undocumented names of OmegaConf 2.4: the parser of `${…}`, and the visitor that evaluates its trees.

`OmegaConf.resolve` is not enough: it neither limits the size of what references expand to nor reports which keys they
read. If one of these names moves, every config with a `${` fails here. Importing this module takes 0.1 CPU s.
"""

from collections.abc import Callable
from typing import Any

from omegaconf.errors import GrammarParseError
from omegaconf.grammar_parser import parse as tree_of
from omegaconf.grammar_visitor import GrammarVisitor, OmegaConfGrammarParser


class Malformed(ValueError):
    """Raised if a `${` opens no valid reference."""


def parse(text: str, argument: bool = False) -> object:
    """Parse a value of a config; `\\${` means a literal `${`.

    Args:
        argument: parse an argument of a resolver: a word, number, quoted text, list, mapping or reference.

    Raises:
        Malformed: a `${` opens no reference.
    """
    try:
        return tree_of(text, "singleElement", "VALUE_MODE") if argument else tree_of(text)
    except (GrammarParseError, RecursionError):
        raise Malformed from None


class Evaluation(GrammarVisitor):
    """Evaluates trees.

    Args:
        find: returns the value at a key, from the number of leading dots (0: an absolute key) and its parts.
        call: returns the result of a resolver, from its name, its arguments, and functions that return their source.
    """

    def __init__(
        self,
        find: Callable[[int, tuple[str, ...]], Any],
        call: Callable[[str, tuple[object, ...], tuple[Callable[[], str], ...]], Any],
    ):
        super().__init__(
            node_interpolation_callback=lambda key, memo: find(key.relative_dots, key.parts),
            resolver_interpolation_callback=lambda name, args, args_str: call(name, args, args_str),
            memo=None,
        )

    def value(self, tree: object) -> Any:
        """Return the value of a tree.

        Raises:
            Malformed: a reference in a key or name is neither a text nor a whole number, or a number has too many
                digits.
        """
        try:
            return self.visit(tree)
        except (ValueError, AssertionError):
            raise Malformed from None

    def visitElement(self, ctx: Any) -> object:
        """Evaluate an argument, or an item of a list or mapping; `???` is plain text."""
        return self.visit(ctx.getChild(0))

    def visitSequence(self, ctx: Any) -> Any:
        """Yield arguments and functions that return their source. An item missing between two commas is an empty text,
        as in OmegaConf, which also warns about each with the whole sequence, in quadratic time."""
        item_is_missing = True
        for child in ctx.getChildren():
            if isinstance(child, OmegaConfGrammarParser.ElementContext):
                yield self.visitElement(child), child.getText
                item_is_missing = False
            elif item_is_missing:
                yield "", str
            else:
                item_is_missing = True
        if item_is_missing:
            yield "", str
