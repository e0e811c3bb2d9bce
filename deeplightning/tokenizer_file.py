"""A `tokenizer.json` of Hugging Face's becomes a tokenizer of a `TextSpec`. Needs the package `tokenizers`, which the
extra `text` brings; apart from `deeplightning.text_spec`, since the server of a container has it not."""

from collections.abc import Sequence

from tokenizers import Tokenizer as Theirs

PADDING = ("[PAD]", "<pad>", "<|padding|>", "<|endoftext|>")
"""What the token that fills up is called, where the file does not say it."""


class Tokenizer:
    """Tokens of texts by a file's rules, with the special tokens that it puts around them.

    Attributes:
        size: how many tokens there are.
        padding: the token that fills up.

    Raises:
        ValueError: it is no such file, or has no token to fill up with.
    """

    def __init__(self, content: str):
        try:
            self._theirs = Theirs.from_str(content)
        except Exception as error:  # they raise Exception itself
            raise ValueError(f"this is no tokenizer.json of Hugging Face ({str(error)[:200]})") from error
        known = self._theirs.get_vocab(with_added_tokens=True)
        named = (self._theirs.padding or {}).get("pad_token")
        found = next((name for name in (named, *PADDING) if name in known), None)
        if found is None:
            raise ValueError(f"it has no token to fill up with, none of {', '.join(PADDING)}")
        self.padding, self.size = known[found], max(known.values()) + 1
        self._theirs.no_padding()  # texts are filled up and cut by us
        self._theirs.no_truncation()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text; of one without any, the one that fills up."""
        return [encoding.ids or [self.padding] for encoding in self._theirs.encode_batch(list(texts))]
