"""Config files: one TOML for all roles, strict pydantic models, ``--set a.b=value`` overrides.

Every default is written once, in the model that owns it, with its unit in its name (``timeout_s``, ``memory_limit_mib``).
"""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import ConfigError


class StrictModel(BaseModel):
    """Base of every config section: unknown keys fail, values don't change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def idle_settings(section: StrictModel, needs: dict[str, tuple[bool, str]], *, prefix: str = "") -> list[str]:
    """What to say of the fields of ``section`` that were changed although nothing reads them.

    ``needs``: of each field whether it is read, and what it belongs to. ``prefix``: of the names, where another section speaks.
    """
    return [
        f"{prefix}{name} belongs to {owner}"
        for name, (is_read, owner) in needs.items()
        if not is_read and getattr(section, name) != type(section).model_fields[name].default
    ]


M = TypeVar("M", bound=BaseModel)


def read_toml(path: Path) -> dict[str, Any]:
    """The file as a dict.

    Raises:
        ConfigError: no such file, not readable, or not TOML; says which line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"No config at {path.resolve()}. Shipped ones are in deploy/configs/.") from None
    except OSError as error:
        raise ConfigError(f"The config {path} can't be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config {path} is not valid TOML: {error}.") from None


def parse_override(text: str) -> tuple[list[str], Any]:
    """``"learner.optimizer.lr=1e-6"`` -> ``(["learner", "optimizer", "lr"], 1e-06)``. Values are TOML; a bare word is a string.

    Raises:
        ConfigError: no ``=`` or an empty key.
    """
    key, eq, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not eq or not all(parts):
        raise ConfigError(f"--set takes KEY=VALUE with a dotted key, such as learner.optimizer.lr=1e-6; got {text!r}.")
    try:
        return parts, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return parts, value


def apply_overrides(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A copy of ``data`` with each ``KEY=VALUE`` of ``overrides`` set; later ones win.

    Raises:
        ConfigError: a key goes through something that is not a table.
    """
    out: dict[str, Any] = json.loads(json.dumps(data, default=str))
    for text in overrides:
        parts, value = parse_override(text)
        table = out
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {text}: {part!r} is a value in the config, not a table.")
        table[parts[-1]] = value
    return out


def validate(model: type[M], data: dict[str, Any], *, source: str) -> M:
    """``data`` as ``model``.

    Raises:
        ConfigError: lists *every* violation with its key, not only the first.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [f"The config {source} has {error.error_count()} problem(s):"]
        for item in error.errors(include_url=False):
            where = ".".join(str(part) for part in item["loc"]) or "(top level)"
            lines.append(f"  {where}: {_say(model, item)}")
        raise ConfigError("\n".join(lines)) from None


def _say(model: type[BaseModel], item: Any) -> str:
    if item["type"] in ("missing", "value_error"):  # the input is a whole table, or in the words already
        return str(item["msg"]).removeprefix("Value error, ")
    if item["type"] != "extra_forbidden":
        return f"{item['msg']}; it is {item['input']!r}"
    known = sorted(_section_keys(model, item["loc"][:-1]))
    close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.75)
    meant = f" Did you mean {close[0]}?" if close else ""
    return f"unknown key.{meant} Known here: {', '.join(known)}" if known else "unknown key"


def _section_keys(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    current: Any = model
    for part in path:
        field = getattr(current, "model_fields", {}).get(part)
        current = field.annotation if field else None
    return list(getattr(current, "model_fields", {}))
