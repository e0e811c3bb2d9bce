"""Secrets that somebody has written into code are blotted out before a run keeps that code. Standard library only."""

import math
import re
from collections import Counter

BLOT = "***"
"""What stands where a secret stood."""

# A value under a name that says it is secret: any of four characters and more.
_NAMED = r"[\w.-]*(?:password|passwd|passphrase|secret)\w*"
# A value under a name that may stand for other things too, such as the token of a tokenizer: only what looks random.
_KEYED = r"[\w.-]*(?:token|api_?key|access_?key|auth_?key|credential)\w*"
_ASSIGNED = re.compile(
    rf"(?i)(?P<before>(?:(?P<named>\b{_NAMED})|(?P<keyed>\b{_KEYED}))[\"']?\]?\s*(?::\s*\w+\s*)?[:=]\s*[rbuf]?)"
    r"(?P<quote>[\"'])(?P<value>[^\"'\n]{4,})(?P=quote)"
)
# What services hand out, known by its first letters; keys in PEM; a password in an address.
_KNOWN = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{30,}|\bhf_[A-Za-z0-9]{30,}|\bsk-[\w-]{20,}"
    r"|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{35}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=://)[^\s/:@'\"]+:[^\s/@'\"{}]+(?=@)"
)


def conceal(text: str) -> tuple[str, list[int]]:
    """Text without what looks like a secret, and the lines that held one, from 1.

    A name of a variable (`DB_PASSWORD`), a placeholder in brackets and a reference (`${…}`) are no secrets.
    """
    lines: list[int] = []

    def assigned(found: re.Match[str]) -> str:
        value = found["value"]
        if re.fullmatch(r"[A-Z][A-Z0-9_]*|.*[{<\[ ].*|\*+", value) or not (found["named"] or _looks_random(value)):
            return found[0]
        lines.append(found.string.count("\n", 0, found.start("value")) + 1)
        return f"{found['before']}{found['quote']}{BLOT}{found['quote']}"

    def known(found: re.Match[str]) -> str:
        lines.append(found.string.count("\n", 0, found.start()) + 1)
        return BLOT + "\n" * found[0].count("\n")  # the lines behind keep their numbers

    text = _KNOWN.sub(known, text)
    return _ASSIGNED.sub(assigned, text), sorted({*lines})


def _looks_random(value: str) -> bool:
    """Letters and digits in no order, at least a dozen."""
    if len(value) < 12 or not re.fullmatch(r"[\w+/=.:-]+", value):
        return False
    if not (re.search(r"\d", value) and re.search(r"[A-Za-z]", value)):
        return False
    shares = [count / len(value) for count in Counter(value).values()]
    return -sum(share * math.log2(share) for share in shares) > 3.0
