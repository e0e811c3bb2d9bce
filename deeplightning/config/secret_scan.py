"""Find secrets in code, configs and messages. Standard library only.

A secret has the token format of a known service (`secret_shapes.tsv`), or is assigned to a name such as `password` or
`api_key`. References, placeholders, types and prose are not secrets. detect-secrets is not used: it reports lines
instead of spans, its import takes longer than this whole scan, and on the corpora of `tests/hostile` it finds fewer
secrets with more false positives.
"""

import math
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path

REDACTED = "***"
"""Replacement of a secret."""

_CODE = re.compile(r"(?i)\.(?:pyi?|pyx|[jt]sx?|c|cc|cpp|cuh?|h|hpp|java|go|rs|jl|rb|lua|r|ipynb|tf|sql)$|^$")
_PROSE = re.compile(r"(?i)\.(?:md|rst|txt|tex|html?|csv)$")
_WORD = r"(?:[A-Z]?[a-z]{1,18}(?:[A-Z][a-z]{2,18})*|[A-Z]{1,18})?\d{0,4}"
_WORDS = re.compile(rf"{_WORD}(?:[_./-]{_WORD})*+")  # `fw_layers_of_the_encoder` is not a token, whatever its prefix

# ---- names

_NAME = re.compile(
    r"(?ai)(?<![\w.-])[\w.-]{0,60}?(?:pass(?:word|wd|phrase|code|wort)|secret|pwd|pass(?![a-z])|token(?!i[sz])|credential"
    r"|(?:salt|auth)(?![a-z])|authorization|(?:private|account|shared|encryption|api|access|auth|service|session|signing"
    r"|licen[cs]e|deploy)[_-]?key|client[_-]?key[_-]?data|_key(?![a-z]))\w{0,60}"
)
# Any value of such a name is a secret.
_STRONG = re.compile(
    r"password|passwd|passphrase|passcode|passwort|secret|(?:^|_)(?:pass|pwd)s?$|(?:private|account)_?key|key_data$"
)
# Only a random-looking value is a secret: tokenizers have tokens, and dictionaries keys.
_WEAK = re.compile(
    r"tokens?$|(?:^|_)auth_?token|(?:api|access|auth|shared|encryption|service|session|signing|licen[cs]e|deploy)_?keys?$"
    r"|credentials?$|(?:^|_)(?:auth|salt|authorization)$"
)
# Names of data about a secret, such as its file or length.
_ABOUT = re.compile(
    r"_(?:name|env|var|variable|file|path|dir|ref|type|field|prompt|help|label|hint|url|count|len|length|ids?|class|index"
    r"|mask|embedding|dropout|regex|pattern|required|policy|message|error)s?$"
    r"|(?:pad|eos|bos|sep|cls|mask|unk|special|image|start|end|first|last|next|num|max)_tokens?$"
    r"|(?:forward|backward|first|second|third|last|one|two|single|multi|low|high|band|fusion|hop|by)_?pass$"
)

# ---- values assigned to a name

_TYPED = r"(?:\s*:\s*[\w.]+(?:\[[\w., |]{0,80}\])?(?:\s*\|\s*[\w.]+){0,4})?"
_OPEN = r"(?:(?:[(\[]|\b(?:SecretStr|SecretBytes|Secret|Field|str|bytes)\((?:\s*default\s*=)?)\s*[-+ ]*)*"
_ASSIGNED = [  # in any file
    re.compile(  # in quotes; setdefault("API_KEY", "…") too
        rf"(?:\\?[\"'`]?\]?(?:{_TYPED}\s*(?::=|=>|[=!]==?|=)|\s*:)\s*{_OPEN}"
        r"|\\?[\"'`]\s*,\s*(?:(?:default|value)\s*=\s*)?)[rbuRBU]{0,2}"
        r"(?P<quote>\"{3}|'{3}|\\?[\"'`])(?P<value>(?:(?!(?P=quote))(?:\\.|[^\n\\])){1,4096})(?P=quote)"
    ),
    re.compile(r"\\?[\"']?\s*[:=,]\s*\\?f?[\"']?(?:Bearer|Basic|Token|Bot)\s+(?P<value>[\w.~+/=-]{8,})"),
]
_INNER = re.compile(r"=(?P<value>[^;&\"'\s{}$<>%(),\[\]]+)")  # Server=db;Pwd=…;Port=1 and ?page=1&token=…
_OPTION = re.compile(r"(?:=|\s+)[\"']?(?P<value>[^\s\"'$-][^\s\"']*)")
_SETTING = re.compile(  # without quotes, in a settings file
    r"[\"']?[ \t]*[:=](?!=)[ \t]*(?P<value>[^\s\"'{}\[\]|>,;#!&*(][^\n,}\];]{0,300}?)"
    r"(?=[ \t]{0,20}(?:[,}\];]|[ \t]#|$))",
    re.MULTILINE,
)
_NOTE = re.compile(r"[\"']?[ \t]*[:=](?!=)[ \t]*(?P<value>[^\s\"',;(){}\[\]]+)(?=[.,;)]?[ \t]*$)", re.MULTILINE)

_HARMLESS = re.compile(
    r"(?i:str(?:ing)?|u?int\d*|bool(?:ean)?|float\d*|number|none|null|true|false|optional|required|yes|no|any|bytes)"
    r"|\$.*|.*[$%]?\{+[\w .:-]*\}.*|<.*>|\[.*\]|%\(.*|%[sd]|\*+|x{4,}|\.{3}.*|\?.*|…|!\w+|[\^~<>=!]+ ?\d[\w.,<>=*! ]*"
    r"|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|[A-Z]+|category|ignore"  # the name of a variable; kinds of columns
    r"|(?:~|\.{0,2})(?:/[\w.-]+)+/?",  # a path
    re.DOTALL,
)
_SENTENCE = re.compile(
    r"(?i)\b(?:enter|your|please|must|the|is|are|to|for|of|from|forgot|wrong|invalid|incorrect|missing|set)\b|[:.?!…]$"
)


def conceal(text: str, name: str = "", found: set[str] | None = None) -> tuple[str, list[int]]:
    """Replace text that looks like a secret.

    The name of a variable (`DB_PASSWORD`), a placeholder in brackets and a reference (`${…}`) are not secrets.

    Args:
        name: the name of the file; its suffix gives the syntax. Without a name, the text is treated as code.
        found: receives the secrets that can be recognised elsewhere, which excludes ordinary words.

    Returns:
        The text, with the same number of lines, and the numbers of the lines with a secret, from 1.
    """
    spans = _spans(text, name)
    starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))] if spans else []
    parts, done = list[str](), 0
    for start, end in spans:
        if found is not None:
            values = _citable_parts(text[start:end])
            if text[end : end + 1] == "@":  # `me:password` in an address
                values.append(values[0].partition(":")[2])
            found |= {value for value in values if is_rare(value)}
        parts += [text[done:start], REDACTED, "\n" * text.count("\n", start, end)]
        done = end
    return "".join([*parts, text[done:]]), sorted({bisect(starts, start) for start, _ in spans})


def secrets_in_value(key: str, value: str) -> list[tuple[int, int]]:
    """Return the spans of secrets in the value of a key: the whole value for a secret name, else known tokens."""
    strength = _strength(key)
    return [(0, len(value))] if strength and _is_secret(value, strength, False) else _spans(value, "")


@cache
def _token_patterns() -> list[tuple[str, str]]:
    """Return for each row of `secret_shapes.tsv` its literal text, to search first, and the regular expression."""
    rows = []
    for line in Path(__file__).with_name("secret_shapes.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            _, text, after, before = f"{line}\t".split("\t")[:4]
            literal = re.escape(text)
            at = "" if before else literal  # `re` is fast if a pattern begins with a literal
            start = "|".join(f"(?<{look}{at})" for look in (r"![A-Za-z\d]", r"=\\[nrt]", r"=%[\dA-F]{2}"))
            rows.append((text, f"{at}(?:{start}){before}{'' if at else literal}{after}"))
    return rows


def _spans(text: str, name: str) -> list[tuple[int, int]]:
    """Return the spans of secrets, in order and without overlaps."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted({*_tokens(text), *_assignments(text, name)}):
        if spans and start < spans[-1][1]:
            start, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((start, end))
    return spans


def _tokens(text: str) -> Iterator[tuple[int, int]]:
    for part, form in _token_patterns():
        for found in re.finditer(form, text) if part in text else ():
            if not _WORDS.fullmatch(found[found.lastindex or 0]):
                yield found.span(found.lastindex or 0)


def _assignments(text: str, name: str) -> Iterator[tuple[int, int]]:
    is_code, is_prose = bool(_CODE.search(name)), bool(_PROSE.search(name))
    for named in _NAME.finditer(text):
        start, end = named.span()
        if not (strength := _strength(named[0].lstrip("-"))):
            continue
        patterns = _ASSIGNED + [_INNER] * (is_prose or text[start - 1 : start] in {*";\"'?&"})
        patterns += [_OPTION] * text.startswith("--", start)
        patterns += [_NOTE] if is_prose else [_SETTING] if not is_code else []
        for pattern in patterns:
            if (found := pattern.match(text, end)) and _is_secret(found["value"], strength, is_prose):
                yield found.span("value")


def _strength(name: str) -> str:
    """Return `strong` if any value of this name is a secret, `weak` if a random-looking one is, else ""."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[.-]+", "_", name).lower()
    words = re.sub(r"_?\d{1,2}$", "", words)
    is_strong = bool(_STRONG.search(words))
    if _ABOUT.search(words):
        return "weak" if is_strong else ""
    if is_strong:
        return "strong"
    return "weak" if _WEAK.search(words) or re.search(r"[A-Z\d]_KEY$", name) else ""


def _is_secret(value: str, strength: str, is_note: bool) -> bool:
    value = value.strip()
    if len(value) < 4 or _HARMLESS.fullmatch(value):
        return False
    if strength == "weak":
        return _looks_random(value)
    if value.isdecimal():
        return len(value) >= 6
    if " " in value:
        return not is_note and value.count(" ") < 6 and not _SENTENCE.search(value)
    return not is_note or bool(
        re.search(r"\d", value) and not re.fullmatch(r"[A-Za-z]\w*(?:\.\w+)+|[A-Z][a-z]+\d+", value)
    )


def _citable_parts(value: str) -> list[str]:
    """Return the parts of a secret that messages may contain: all of it, and each line of a key with several."""
    lines = [line.strip() for line in value.splitlines()]
    return [value, *(line for line in lines if not line.startswith("-----"))] if len(lines) > 1 else [value.strip()]


def is_rare(value: str) -> bool:
    """Return whether a value is unlikely to occur in other text: it is not a word or a name."""
    return len(value) >= 8 and not re.fullmatch(r"[A-Za-z_.-]+", value)


def _looks_random(value: str) -> bool:
    """Return whether a value has at least 12 letters and digits, and the entropy of random text."""
    if not (re.fullmatch(r"[\w+/=.:-]{12,}", value) and re.search(r"\d", value) and re.search(r"[A-Za-z]", value)):
        return False
    shares = [count / len(value) for count in Counter(value).values()]
    return -sum(share * math.log2(share) for share in shares) > 3.0
