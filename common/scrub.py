"""Secrets out of what people hand on: config values by their key's name, texts by pattern and by the secrets themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

REMOVED = "(removed)"
_CONFIG_NAME = re.compile(r"key|secret|token|passw|credential", re.IGNORECASE)
_SECRET = r"(?:secret\w{0,64}|token|passw(?:or)?d|credentials?|(?:api|access|private)[_-]?key)"
_NUMBER = r"-?[\d.,_]+(?:e[+-]?\d+)?(?=[\s\"'\\,;)\]}]|$)"  # tokens are counted everywhere; a count is no secret
_ASSIGNED = re.compile(rf"""(?i)({_SECRET}\\?["']?\s*[=:]\s*\\?["']?)(?!{_NUMBER})[^\s"'\\,;)\]}}]{{4,}}""")
_IN_URL = re.compile(r"(\b\w{1,20}://)[^\s/@:]{1,256}:[^\s/@]{1,256}@")
_BEARER = re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}")
_ENV_NAME = re.compile(rf"{_SECRET}|_key$", re.IGNORECASE)
_MIN_SECRET = 8  # characters: a shorter one would take ordinary words with it


def scrub_config(value: Any, name: str = "") -> Any:
    """A copy of plain data without the values of keys that are named like secrets. Numbers stay: max_prompt_tokens is none."""
    if isinstance(value, dict):
        return {key: scrub_config(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub_config(item, name) for item in value]
    if isinstance(value, str):
        return REMOVED if value and _CONFIG_NAME.search(name) else scrub_text(value)
    return value


def scrub_text(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` without ``secrets``, and without what is written like one: API_TOKEN=value, user:password@host, bearer tokens."""
    for secret in secrets:
        text = text.replace(secret, REMOVED)
    text = _ASSIGNED.sub(rf"\1{REMOVED}", text)
    text = _IN_URL.sub(rf"\1{REMOVED}@", text)
    return _BEARER.sub(rf"\1{REMOVED}", text)


def secrets_of_environment() -> list[str]:
    """Values of this process's environment variables that are named like secrets."""
    return [value for name, value in os.environ.items() if _ENV_NAME.search(name) and len(value) >= _MIN_SECRET]
