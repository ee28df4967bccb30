"""The safetensors of a Hugging Face model folder: checked as a whole, then read slice by slice.

Experts are stored one by one (as the hub's Qwen3-MoE models are, and as transformers saves them by default) or stacked into
one tensor per layer (transformers 5 with ``save_original_format=False``). Both read the same, under the names of the former.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ConfigError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Buffers that old checkpoints carry; they are computed from the config.
IGNORED_SUFFIX = "rotary_emb.inv_freq"
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
# An error's list of names ends here: a wrong folder of a model with experts has tens of thousands.
MAX_LISTED = 50


@dataclass(frozen=True)
class Region:
    """A rectangle of a tensor, ends excluded. ``columns``: all where none; a vector has none."""

    rows: tuple[int, int]
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file, or the rows of one expert in a stacked one."""

    handle: Any
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    expert: int | None = None
    first_row: int = 0

    def read(self, region: Region) -> Tensor:
        """Copies that region, and no more, from the file."""
        rows = slice(region.rows[0] + self.first_row, region.rows[1] + self.first_row)
        columns = slice(None) if region.columns is None else slice(*region.columns)
        stored = self.handle.get_slice(self.name)
        if self.expert is not None:
            part: Tensor = stored[self.expert : self.expert + 1, rows, columns][0]
        else:
            part = stored[rows] if len(self.shape) == 1 else stored[rows, columns]
        return part


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[dict[str, StoredTensor]]:
    """Every tensor of the model folder ``path`` by its Hugging Face name. Reads the headers alone.

    Raises:
        ConfigError: no weights; files that are missing, cut off or no safetensors; an index that doesn't fit its files.
    """
    with contextlib.ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {}
        where: dict[str, str] = {}
        twice: list[str] = []
        for file, handle in _open_all(path, stack).items():
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in where:
                    twice.append(f"{name} (in {where[name]} and {file})")
                where[name] = file
                tensors.update(_unstacked(handle, name))
        if twice:
            raise ConfigError(
                f"{path} has tensors in two files: {listed(twice)}. Remove the files that don't belong to it."
            )
        _check_index(path, where)
        yield tensors


def _open_all(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """File name -> open handle."""
    handles: dict[str, Any] = {}
    bad: list[str] = []
    for name in _weight_files(path):
        try:
            handles[name] = stack.enter_context(safe_open(path / name, framework="pt"))
        except FileNotFoundError:
            bad.append(f"{name} is missing")
        except (OSError, SafetensorError) as error:
            bad.append(f"{name} ({_size(path / name)}) can't be read: {error}")
    if bad:
        raise ConfigError(
            f"The weights in {path} are not complete: {'; '.join(bad)}. Copy or download these files again"
            " (a file of about 130 bytes is a git-lfs pointer: run `git lfs pull`)."
        )
    return handles


def _size(file: Path) -> str:
    with contextlib.suppress(OSError):
        return f"{file.stat().st_size:,} bytes"
    return "unknown size"


def _weight_files(path: Path) -> list[str]:
    if index := _read_index(path):
        return sorted(set(index.values()))
    if (path / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"No *.safetensors in {path}. Save the model with transformers' save_pretrained.")
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where there is no index."""
    file = path / INDEX_FILE
    if not file.exists():
        return {}
    try:
        weight_map: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(where) for name, where in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no index of weights: {error!r}.") from None


def _check_index(path: Path, where: Mapping[str, str]) -> None:
    index = _read_index(path)
    wrong = [f"{name} (in {file} by the index)" for name, file in sorted(index.items()) if where.get(name) != file]
    if wrong:
        raise ConfigError(f"{path / INDEX_FILE} names tensors that its files don't have: {listed(wrong)}.")


def _unstacked(handle: Any, name: str) -> dict[str, StoredTensor]:
    stored = handle.get_slice(name)
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    match = STACKED.fullmatch(name)
    if match is None or len(shape) != 3:
        return {name: StoredTensor(handle, name, shape, dtype)}
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    num_experts, rows = shape[0], shape[1] // len(parts)
    return {
        f"{match[1]}.{expert}.{part}.weight": StoredTensor(
            handle, name, (rows, shape[2]), dtype, expert=expert, first_row=i * rows
        )
        for expert in range(num_experts)
        for i, part in enumerate(parts)
    }


def check_tensors(
    tensors: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]], *, spare: Iterable[str], path: Path
) -> None:
    """That the folder has what the model wants, name by name, and nothing more but ``spare``.

    Raises:
        ConfigError: lists the names that are missing, those that nothing takes, wrong shapes, and dtypes that can't be read.
    """
    unmapped = tensors.keys() - wanted.keys() - set(spare)
    found = {
        "missing": sorted(wanted.keys() - tensors.keys()),
        "not mapped": sorted(name for name in unmapped if not name.endswith(IGNORED_SUFFIX)),
        "of another shape than config.json gives": [
            f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in tensors and tensors[name].shape != shape
        ],
        f"of a dtype other than {', '.join(DTYPES)}": [
            f"{name} {tensors[name].dtype}" for name in wanted if name in tensors and tensors[name].dtype not in DTYPES
        ],
    }
    if any(found.values()):
        lines = "\n".join(f"  {what} ({len(names)}): {listed(names)}" for what, names in found.items() if names)
        raise ConfigError(f"The weights in {path} are not those of the model in its config.json:\n{lines}")


def listed(names: list[str]) -> str:
    """The names, or the first ``MAX_LISTED`` of them and how many more."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more:,} more" if more > 0 else "")
