"""Read the tokenizer of a `TextSpec` from a `tokenizer.json` of Hugging Face.

It needs the package `tokenizers`, which the extra `text` installs. It is apart from `deeplightning.text_spec` because
the server of a container does not have this package.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer as Theirs

PADDING = ("[PAD]", "<pad>", "<|padding|>", "<|endoftext|>")
"""Names of the padding token, where the file does not name one."""


class Tokenizer:
    """Split texts by the rules of a file, with the special tokens that it adds.

    Attributes:
        size: number of tokens.
        padding: the token that pads shorter texts.

    Raises:
        ValueError: it is no such file, or has no padding token.
    """

    def __init__(self, content: str):
        try:
            self._theirs = Theirs.from_str(content)
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"this is no tokenizer.json of Hugging Face ({str(error)[:200]})") from error
        known = self._theirs.get_vocab(with_added_tokens=True)
        named = (self._theirs.padding or {}).get("pad_token")
        found = next((name for name in (named, *PADDING) if name in known), None)
        if found is None:
            raise ValueError(f"it has no token to fill up with, none of {', '.join(PADDING)}")
        self.padding, self.size = known[found], max(known.values()) + 1
        self._theirs.no_padding()  # TextSpec pads and cuts
        self._theirs.no_truncation()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text; a text without any gets one padding token."""
        return [encoding.ids or [self.padding] for encoding in self._theirs.encode_batch(list(texts))]
