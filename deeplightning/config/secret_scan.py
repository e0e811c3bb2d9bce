"""Secrets that somebody has written into code, a config or a message are found. Standard library only.

Two passes: `secret_shapes.tsv` lists the forms of what services hand out; then each name that says that its value is
secret is looked up, and the assignment behind it is read by the syntax of the file's kind. A reference, a placeholder,
a type or prose stays. detect-secrets does not serve: it reports lines instead of places in them, its import takes
longer than all of this, and on the corpora of `tests/hostile` it finds less and errs more.
"""

import math
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path

BLOT = "***"
"""Replaces a secret."""

_CODE = re.compile(r"(?i)\.(?:pyi?|pyx|[jt]sx?|c|cc|cpp|cuh?|h|hpp|java|go|rs|jl|rb|lua|r|ipynb|tf|sql)$|^$")
_PROSE = re.compile(r"(?i)\.(?:md|rst|txt|tex|html?|csv)$")

# ---- names

_KEYWORD = re.compile(
    r"(?i)pass(?:word|wd|phrase|code|wort)|secret|pwd|pass(?![a-z])|token(?!i[sz])|credential|salt(?![a-z])|auth(?![a-z])"
    r"|(?:private|account|shared|encryption|api|access|auth|service|session|signing|licen[cs]e|deploy)[_-]?key"
    r"|client[_-]?key[_-]?data|_key(?![a-z])"
)
# The value is a secret whatever it looks like.
_STRONG = re.compile(
    r"password|passwd|passphrase|passcode|passwort|secret|(?:^|_)(?:pass|pwd)s?$|(?:private|account)_?key|key_data$"
)
# Only what looks random: a tokenizer has tokens, a dictionary keys.
_WEAK = re.compile(
    r"tokens?$|(?:^|_)auth_?token|(?:api|access|auth|shared|encryption|service|session|signing|licen[cs]e|deploy)_?keys?$"
    r"|credentials?$|(?:^|_)(?:auth|salt)$"
)
# What is known about a secret, and where it is kept.
_ABOUT = re.compile(
    r"_(?:name|env|var|variable|file|path|dir|ref|type|field|prompt|help|label|hint|url|count|len|length|ids?|class|index"
    r"|mask|embedding|dropout|regex|pattern|required|policy|message|error)s?$"
    r"|(?:pad|eos|bos|sep|cls|mask|unk|special|image|start|end|first|last|next|num|max)_tokens?$"
)

# ---- what services hand out

_WORD = r"(?:[A-Z]?[a-z]{1,18}(?:[A-Z][a-z]{2,18})*|[A-Z]{1,18})?\d{0,4}"
_NAME = re.compile(rf"{_WORD}(?:[_./-]{_WORD})*+")  # `fw_layers_of_the_encoder`: no token, whatever its prefix


@cache
def _known() -> list[tuple[str, str]]:
    """Of each row of `secret_shapes.tsv` the text, which is looked for first, and the pattern of all of it."""
    rows = []
    for line in Path(__file__).with_name("secret_shapes.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            _, text, after, before = f"{line}\t".split("\t")[:4]
            literal = re.escape(text)
            at = "" if before else literal  # `re` is fast where a pattern begins with a text
            start = "|".join(f"(?<{look}{at})" for look in (r"![A-Za-z\d]", r"=\\[nrt]", r"=%[\dA-F]{2}"))
            rows.append((text, f"{at}(?:{start}){before}{'' if at else literal}{after}"))
    return rows


# ---- assignments, from the end of a name on

_STRING = r"[rbuRBU]{0,2}(?P<quote>\\?[\"'`])(?P<value>(?:(?!(?P=quote))(?:\\.|[^\n\\])){1,4096})(?P=quote)"
_LONG = r"[rbuRBU]{0,2}(?P<quote>\"{3}|'{3})\s*(?P<value>[^\s](?:(?!(?P=quote))[\s\S]){0,4096}?)\s*(?P=quote)"
_TYPED = r"(?:\s*:\s*[\w.]+(?:\[[\w., |]{0,80}\])?(?:\s*\|\s*[\w.]+){0,4})?"
_OPEN = r"(?P<open>(?:[(\[]|\b(?:SecretStr|SecretBytes|Secret|Field|str|bytes)\((?:\s*default\s*=)?)\s*[-+ ]*)*"
_ASSIGN = rf"\\?[\"'`]?\]?(?:{_TYPED}\s*(?::=|=>|[=!]==?|=)|\s*:)\s*{_OPEN}"
_AFTER = r"\\?[\"'`]\s*(?:,|\{)\s*(?:[+-]\s*)?(?:(?:default|value)\s*=\s*)?"
_QUOTED = [  # in every kind of file
    re.compile(rf"(?:{_ASSIGN}){_LONG}"),
    re.compile(rf"(?:{_ASSIGN}){_STRING}"),
    re.compile(rf"{_AFTER}{_STRING}"),  # setdefault("API_KEY", "…"), variable "db_password" { default = "…" }
    re.compile(rf"[\"']\s+(?:value|default)\s*=\s*{_STRING}"),  # <add key="ApiPassword" value="…"/>
    re.compile(rf"\s*=\s*\(\s*[\"'][^\"'\n]*[\"']\s*,\s*{_STRING}"),  # auth=("me", "…")
    re.compile(r"\s+is:?\s+(?P<quote>[`\"'])(?P<value>\S+)(?P=quote)"),
    re.compile(r">(?P<value>[^<>\n$]+)</"),
]
_NEXT = re.compile(rf"\s*,\s*{_STRING}")
_INNER = re.compile(r"=(?P<value>[^;&\"'\s{}$<>%(]+)")  # Server=db;Pwd=…;Port=1 and ?page=1&token=…
_OPTION = re.compile(r"(?:=|\s+)[\"']?(?P<value>[^\s\"'$-][^\s\"']*)")
_DEFAULT = re.compile(r":?[-=](?P<value>[^}\s$]+)\}")  # ${PASSWORD:-…}
_REST = re.compile(  # a line's only assignment: up to the end of the line or a comment
    r"[\"']?[ \t]*[:=](?!=)[ \t]*(?P<value>[^\s\"'{}\[\]|>,;#!&*(][^\n]{0,300}?)(?=[ \t]{0,20}(?:[ \t]#|$))",
    re.MULTILINE,
)
_SETTINGS = [  # without quotes, in a file of settings
    re.compile(
        r"[\"']?[ \t]*[:=](?!=)[ \t]*(?P<value>[^\s\"'{}\[\]|>,;#!&*(][^\n,}\]#;]{0,300}?)"
        r"(?=[ \t]{0,20}(?:[,}\];]|[ \t]#|$))",
        re.MULTILINE,
    ),
    re.compile(r"[\"']?[ \t]*[:=](?!=)[ \t]*(?P<value>[^\s\"'{}\[\]|>#!&*(][^\s,}\]\"']*)"),
    re.compile(r":[ \t]*[|>][+-]?[ \t]*\n[+-]?[ \t]+(?P<value>\S[^\n]*)"),
    re.compile(r"[\"']?[ \t]*\n[ +-]*value:[ \t]*[\"']?(?P<value>[^\s\"']+)"),  # name: DB_PASSWORD, then value: …
]
_SPACED = re.compile(r"[ \t]+(?P<value>[^\s=:]\S*)")  # ENV DB_PASSWORD …, and the lines of .netrc
_ITEM = re.compile(r"[ +-]*-[ \t]+[\"']?(?P<value>[^\s\"'][^\n\"']*)[\"']?[ \t]*(?:\n|\Z)")
_NOTE = re.compile(r"[\"']?[ \t]*[:=](?!=)[ \t]*(?P<value>[^\s\"',;(){}\[\]]+)(?=[.,;)]?[ \t]*$)", re.MULTILINE)
_JOINED = re.compile(r"=(?P<value>[^\s\"',;(){}\[\]&]+)")  # in the middle of a sentence
_ODD = [  # where no name of ours precedes the value
    re.compile(
        r"(?i)\bAuthorization\\?[\"']?\s*[:=,]\s*\\?f?[\"']?(?:(?:Bearer|Basic|Token|Bot)\s+)?(?P<value>[\w.~+/=-]{8,})"
    ),
    re.compile(r"\bBearer\s+(?P<value>(?=[\w.~+/=-]*\d)[\w.~+/=-]{12,})"),
    re.compile(r"\b(?:curl|wget)\b[^\n|;]*\s(?:-u|--user)[ \t=]*[\"']?[\w.@-]+:(?P<value>[^\s\"'$]+)"),
    re.compile(r"\bsshpass\s+-p\s*(?P<value>[^\s\"'$]+)"),
    re.compile(r"(?i)\b(?:IDENTIFIED\s+BY|PASSWORD)\s+'(?P<value>[^'\n]+)'"),
]
_COMMENT = re.compile(r"(?m)(?:^|[\s+-])(?:#|//|--)[^\n]*|(\"{3}|'{3})[\s\S]*?\1")
_SECRET_OF_KUBERNETES = re.compile(r"(?m)^[ +-]*kind:[ \t]*Secret\b")
_DATA = re.compile(r"(?m)^([ +-]*)(?:data|stringData):[ \t]*\n((?:\1[ ]+\S[^\n]*(?:\n|\Z))+)")
_FILE = re.compile(r"^diff --git .*? b/(.*)$", re.MULTILINE)

# ---- values

_WORDS = re.compile(
    r"(?i)str(?:ing)?|u?int\d*|bool(?:ean)?|float\d*|number|none|null|true|false|optional|required|yes|no|any|bytes"
)
_PLACEHOLDER = re.compile(
    r"\$.*|.*[$%]?\{+[\w .:-]*\}.*|<.*>|\[.*\]|%\(.*|%[sd]|\*+|x{4,}|\.{3}.*|…|!\w+|[\^~<>=!]+ ?\d[\w.,<>=*! ]*",
    re.DOTALL,
)
_SENTENCE = re.compile(
    r"(?i)\b(?:enter|your|please|must|the|is|are|to|for|of|from|forgot|wrong|invalid|incorrect|missing|set)\b|[:.?!…]$"
)


def conceal(text: str, name: str = "", found: set[str] | None = None) -> tuple[str, list[int]]:
    """Text without what looks like a secret, and the lines that held one, from 1.

    A name of a variable (`DB_PASSWORD`), a placeholder in brackets and a reference (`${…}`) are no secrets.

    Args:
        name: the file's; its ending tells the syntax. Without one the text is taken for code.
        found: takes up the secrets that would be recognised elsewhere: no ordinary words.
    """
    spans = sorted({*_spans(text, name)})
    starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))] if spans else []
    parts: list[str] = []
    lines: set[int] = set()
    done = 0
    for start, end in spans:
        if end <= done:
            continue
        start = max(start, done)
        if found is not None:
            values = _lines(text[start:end])
            if text[end : end + 1] == "@":  # of an address: `me:password`
                values.append(values[0].partition(":")[2])
            found |= {value for value in values if is_rare(value)}
        lines.add(bisect(starts, start))
        parts += [text[done:start], BLOT, "\n" * text.count("\n", start, end)]  # the lines behind keep their numbers
        done = end
    return "".join([*parts, text[done:]]), sorted(lines)


def secrets_in_value(key: str, value: str) -> list[tuple[int, int]]:
    """The spans of secrets in the value of a config's key: all of it by the key's name, else what looks like one."""
    strength = _strength(key)
    is_path = strength == "weak" and re.match(r"(?:~|\.{0,2})/", value)  # `password_file: /run/secrets/db`
    if strength and not is_path and _is_secret(value, strength, False):
        return [(0, len(value))]
    spans: list[tuple[int, int]] = []
    for start, end in sorted({*_spans(value, "")}):
        if spans and start < spans[-1][1]:
            start, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((start, end))
    return spans


def conceal_diff(diff: str) -> str:
    """What git tells of changes, without secrets: each file by its own kind."""
    starts = [*_FILE.finditer(diff)]
    ends = [found.start() for found in starts] + [len(diff)]
    parts = [conceal(diff[: ends[0]])[0]]
    for number, found in enumerate(starts):
        parts.append(conceal(diff[found.start() : ends[number + 1]], found[1].strip('"'))[0])
    return "".join(parts)


def _spans(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Where secrets stand."""
    for part, form in _known():
        for found in re.finditer(form, text) if part in text else ():
            if not _NAME.fullmatch(found[found.lastindex or 0]):
                yield found.span(found.lastindex or 0)
    for pattern in _ODD:
        for found in pattern.finditer(text):
            if not _PLACEHOLDER.fullmatch(found["value"]):
                yield found.span("value")
    is_code, is_prose = bool(_CODE.search(name)), bool(_PROSE.search(name))
    notes = [found.span() for found in _COMMENT.finditer(text)] if is_code else []
    opened = [start for start, _ in notes]
    past = 0
    for keyword in _KEYWORD.finditer(text):
        start, end = keyword.span()
        if start < past:
            continue  # in the name that was looked at last
        least, most = max(0, start - 60), min(len(text), end + 60)
        while start > least and (text[start - 1].isalnum() or text[start - 1] in "_-.") and text[start - 1].isascii():
            start -= 1
        while end < most and (text[end].isalnum() or text[end] == "_"):
            end += 1
        past = end
        strength = _strength(text[start:end].lstrip("-"))
        if not strength:
            continue
        note = bisect(opened, start) - 1
        is_note = is_prose or (is_code and note >= 0 and notes[note][1] >= end)
        line = text[max(0, start - 200) : start].rpartition("\n")[2]
        for found in _assigned(text, start, end, line, is_note, is_code):
            if _is_secret(found["value"], strength, is_note and "quote" not in found.re.groupindex):
                yield found.span("value")
    if not is_code and not is_prose and _SECRET_OF_KUBERNETES.search(text):
        for block in _DATA.finditer(text):
            for found in re.finditer(r"(?m):[ \t]*[\"']?(?P<value>[\w+/=-]{4,})[\"']?[ \t]*$", block[2]):
                yield block.start(2) + found.start("value"), block.start(2) + found.end("value")


def _assigned(text: str, start: int, end: int, line: str, is_note: bool, is_code: bool) -> Iterator[re.Match[str]]:
    """What is assigned to the name between two places."""
    for pattern in _QUOTED:
        if found := pattern.match(text, end):
            yield found
            is_open = bool(found.groupdict().get("open"))
            while is_open and (found := _NEXT.match(text, found.end())):
                yield found
    patterns = []
    before = text[start - 1 : start]
    if before and before in ";\"'?&":
        patterns.append(_INNER)
    if text.startswith("--", start):
        patterns.append(_OPTION)
    if line.endswith("${"):
        patterns.append(_DEFAULT)
    if is_note:
        patterns += [_NOTE, _JOINED]
    elif not is_code and not line.endswith("${"):
        if not line.strip(" \t+-"):
            patterns.append(_REST)
        patterns += _SETTINGS
        if re.search(r"(?:^[+-]?(?:ENV|ARG|setenv)|\blogin[ \t]+\S+)[ \t]+$", line):
            patterns.append(_SPACED)
        if items := re.compile(r":[ \t]*\n").match(text, end):
            place = items.end()
            while found := _ITEM.match(text, place):
                yield found
                place = found.end()
    for pattern in patterns:
        if found := pattern.match(text, end):
            yield found


def _strength(name: str) -> str:
    """`strong`: the value is a secret whatever it looks like; `weak`: if it looks random; empty: it is none."""
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
    if len(value) < 4 or _WORDS.fullmatch(value) or _PLACEHOLDER.fullmatch(value):
        return False
    if re.fullmatch(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|[A-Z]+", value):  # the name of a variable
        return False
    if strength == "weak":
        return _looks_random(value)
    if value.isdecimal():
        return len(value) >= 6
    if re.match(r"(?:\.{0,2}|~)/[\w.-]+(?:/|$)", value):  # a path
        return False
    if " " in value:
        return not is_note and value.count(" ") < 6 and not _SENTENCE.search(value)
    return not is_note or bool(
        re.search(r"\d", value) and not re.fullmatch(r"[A-Za-z]\w*(?:\.\w+)+|[A-Z][a-z]+\d+", value)
    )


def _lines(value: str) -> list[str]:
    """A secret as messages may cite it: whole, and of a key of many lines each."""
    lines = [line.strip() for line in value.splitlines()]
    return [value, *(line for line in lines if not line.startswith("-----"))] if len(lines) > 1 else [value.strip()]


def is_rare(value: str) -> bool:
    """Whether a value is found in a message by accident only: not one of the words of a language or a program."""
    return len(value) >= 8 and not re.fullmatch(r"[A-Za-z_.-]+", value)


def _looks_random(value: str) -> bool:
    """Letters and digits in no order, at least a dozen."""
    if len(value) < 12 or not re.fullmatch(r"[\w+/=.:-]+", value):
        return False
    if not (re.search(r"\d", value) and re.search(r"[A-Za-z]", value)):
        return False
    shares = [count / len(value) for count in Counter(value).values()]
    return -sum(share * math.log2(share) for share in shares) > 3.0
