"""Names of OmegaConf 2.4 that its documentation leaves out: its grammar of `${…}`, and what its functions ask a config.

A text becomes a tree by `grammar_parser.parse`, and a tree a value by `grammar_visitor`, from what the caller looks up:
`OmegaConf.resolve` neither bounds what references make together nor tells what they read. Where one of these names is
gone, every config with a `${` fails here. Importing this costs 0.1 CPU s.
"""

from collections.abc import Callable
from typing import Any

from omegaconf.errors import GrammarParseError
from omegaconf.grammar_parser import parse as tree_of
from omegaconf.grammar_visitor import GrammarVisitor, OmegaConfGrammarParser


class Malformed(ValueError):
    """The braces hold no reference."""


def parse(text: str, argument: bool = False) -> object:
    """The tree of a value of a config; `\\${` means a plain `${`.

    Args:
        argument: read it as an argument of a resolver: a word, a number, a quoted text, a list, a mapping, a reference.

    Raises:
        Malformed: where a `${` opens no reference.
    """
    try:
        return tree_of(text, "singleElement", "VALUE_MODE") if argument else tree_of(text)
    except (GrammarParseError, RecursionError):
        raise Malformed from None


class Evaluation:
    """What trees stand for.

    Args:
        find: gives the value at a key, from the number of dots before it (0: it counts from the top) and its parts.
        make: turns that into a value.
        call: gives what a resolver returns, from its name, its arguments, and functions that give these as written.
    """

    def __init__(
        self,
        find: Callable[[int, tuple[str, ...]], object],
        make: Callable[[Any], object],
        call: Callable[[str, tuple[object, ...], tuple[Callable[[], str], ...]], Any],
    ):
        self._visitor = _Visitor(find, make, call)

    def value(self, tree: object) -> Any:
        """The value of a whole text.

        Raises:
            Malformed: a reference inside a key or a name gives neither a text nor a whole number, or a number has too
                many digits.
        """
        try:
            return self._visitor.visit(tree)
        except (ValueError, AssertionError):
            raise Malformed from None

    def target(self, tree: Any) -> Any:
        """What `find` gives for a text that is one `${a.b}` and no more, without making it; None: it is another."""
        text = tree.getChild(0)
        inner = text.getChild(0).getChild(0) if text.getChildCount() == 1 else None
        if not isinstance(inner, OmegaConfGrammarParser.InterpolationNodeContext):
            return None
        try:
            return self._visitor.visit(inner)
        except (ValueError, AssertionError):
            raise Malformed from None


class _Visitor(GrammarVisitor):
    def __init__(self, find: Callable[..., Any], make: Callable[[object], object], call: Callable[..., object]):
        super().__init__(
            node_interpolation_callback=lambda key, memo: find(key.relative_dots, key.parts),
            resolver_interpolation_callback=lambda name, args, args_str: call(name, args, args_str),
            memo=None,
        )
        self.make = make

    def visitInterpolation(self, ctx: Any) -> object:
        """Each reference inside a text, a key, a name or an argument."""
        inner, found = ctx.getChild(0), super().visitInterpolation(ctx)
        return self.make(found) if isinstance(inner, OmegaConfGrammarParser.InterpolationNodeContext) else found

    def visitElement(self, ctx: Any) -> object:
        """An argument, or an item of a list or mapping; `???` is a text."""
        return self.visit(ctx.getChild(0))

    def visitSequence(self, ctx: Any) -> Any:
        """Arguments, and functions that give their texts. Nothing between two commas is an empty text: OmegaConf gives
        the same, and warns of each with the whole sequence, which takes the square of its length."""
        is_open = True
        for child in ctx.getChildren():
            if isinstance(child, OmegaConfGrammarParser.ElementContext):
                yield self.visitElement(child), child.getText
                is_open = False
            elif is_open:
                yield "", str
            else:
                is_open = True
        if is_open:
            yield "", str
