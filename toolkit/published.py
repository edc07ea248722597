"""What may leave this machine: texts and settings without folders, passwords and keys.

The model card, an export's recipe and training.json, trackers, and messages of the hub and of stores go through here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

SURE = r"(?i:secret|passw|passphrase|[_-]pwd|credential|authorization|(?:api|access|auth|private)[_-]?(?:key|token))"
"""Parts of names whose values are secret: PGPASSWORD, apiKey, my_password."""

PERHAPS = r"(?:(?:\b|[_-])(?i:token|pat|auth|pass)|[_-](?i:key)|[a-z](?:Key|Token|Pat|Auth))\d*(?![\w-])"
"""Ends of names whose values are secret if they look so: of OPENAI_KEY and hfToken, and not of sort_key."""

SIGNATURE = re.compile(rf"(?i)^(sig|signature|policy|auth|key-pair-id|x-(amz|goog)-.*)$|token|key$|{SURE}|{PERHAPS}")
"""Matches names in a URL's query that open the file to all who read it, as S3, GCS, Azure, CloudFront and GitHub do."""

LOOKS_SECRET = re.compile(r"['\"]?(?=\D*\d)[\w.+/=~-]{8,}['\"]?")

MARKED = re.compile(
    r"(?<![\w-])(?:(?:hf|gh[a-z]|github_pat|npm|xox[a-z]|glpat|pypi|[rs]k)[_-][\w-]{16,}|A[KS]IA[A-Z0-9]{16}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{8,}(?:\.[\w-]*)+)|(?<=-----BEGIN )[A-Z ]*PRIVATE KEY-----[^-]*"
    r"|(?<=://)[^\s/:'\"<>@]*(?::(?!\d+/)[^\s'\"<>@]{,300})?(?=@)"
)
"""Matches keys by their makers' marks (the hub, GitHub, npm, Slack, GitLab, PyPI, OpenAI, AWS, Google), JWTs, private
keys, and the user and password of a URL."""

GIVEN = re.compile(
    rf"(?<![\w-])([\w-]*?(?:{SURE}[\w-]*|{PERHAPS})|(?<=[?&#])[\w-]+)(['\"]?\s*[:=]\s*(?:Bearer |Basic )?)"
    r"('[^'\n]*'|\"[^\"\n]*\"|(?:[^\s'\",;&)}\]#]|#(?![\w-]+=))+)"
)
"""Matches a name, what separates it from its value, and the value: any name in a URL's query, else one of secrets."""

QUOTES = r"'\"`\u2018\u2019\u201c\u201d«»"
BETWEEN = r"(?:and|or|to|in|into|of|on|for|from|with|is|are|was|as|not|at|by|than|since|has|holds)\b"
START = r"(?:~(?!\d)[\w.-]*(?=[/\\])|(?!(?<=:)//)/|\\\\|[A-Za-z]:[\\/](?!/))"
FOLDERS = re.compile(
    rf"(?<=[{QUOTES}]){START}[^{QUOTES}\n]*[/\\](?=[^{QUOTES}\n/\\]+[{QUOTES}])"
    rf"|(?:(?<![\w./\\<])|(?<=file://)){START}(?:[^\s{QUOTES},;()/\\]*[/\\]"
    rf"|[^\s{QUOTES},;()/\\.]+(?: (?!{BETWEEN})[^\s{QUOTES},;:()/\\]+){{1,2}}[/\\])+(?=[^\s/\\])"
)
"""Matches the folders of a path: with blanks between quotes, else with two between slashes, unless they end a name."""


def for_readers(text: str) -> str:
    """Returns a text without secrets, whose paths are names of files alone: folders show where a user keeps them."""
    return FOLDERS.sub("", without_secrets(text))


def without_secrets(text: str) -> str:
    """Replaces by asterisks what opens an account: values of environment variables and of names, keys, URLs' users."""
    for name, value in os.environ.items():
        if len(value) > 5 and re.search(rf"{SURE}|{PERHAPS}", name):  # shorter ones are yes, auto and false
            text = text.replace(value, HIDDEN)
    return GIVEN.sub(_hidden, MARKED.sub(HIDDEN, text))


def settings_for_readers(value: Any, name: str = "") -> Any:
    """Returns settings of a name without secrets, at any depth."""
    if isinstance(value, Mapping):
        return {key: settings_for_readers(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [settings_for_readers(each, name) for each in value]
    is_secret = re.search(SURE, name) or (re.search(PERHAPS, name) and LOOKS_SECRET.fullmatch(str(value)))
    if is_secret and value is not None and not isinstance(value, bool):
        return HIDDEN
    return without_secrets(value) if isinstance(value, str) else value


def _hidden(found: re.Match[str]) -> str:
    name, sign, value = found.groups()
    is_given = re.search(SURE, name) and ("=" in sign or value[0] in "'\"")  # not in prose
    is_secret = is_given or LOOKS_SECRET.fullmatch(value)
    if found.string[found.start() - 1 : found.start()] in ("?", "&", "#"):
        is_secret = SIGNATURE.search(name)
    return f"{name}{sign}{HIDDEN}" if is_secret else found[0]
