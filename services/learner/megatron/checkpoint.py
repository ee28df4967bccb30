"""Checkpoints of the whole training state: Megatron's distributed checkpoints, written in the background, renamed when whole.

    ROOT/step-00000040/
        *.distcp, .metadata      parameters, masters, Adam's moments, random states: torch's distributed checkpoint
        common.pt, metadata.json what all ranks share, and the format, as Megatron names them
        checkpoint.json          step, model, layout, the caller's own record: what is checked first on loading

Megatron describes each tensor by its place in the *whole* tensor, so a checkpoint loads under any other parallel layout. Under the
same layout a run goes on bit for bit. Megatron's own writer forks; ours writes from a thread (torch's writer, over a process group
of its own), since a learner has threads of ZeroMQ, gloo and OpenMP, which a fork leaves behind in any state.

Format: https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/core/dist_checkpointing.html
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from common.errors import ConfigError, InvariantError
from services.learner.checkpoints import PARTIAL_PREFIX, CheckpointError, step_folder
from services.learner.megatron.mcore import (
    CHECKPOINT_LOAD_WARNINGS,
    CheckpointingConfig,
    CheckpointingException,
    MCoreSavePlanner,
    ShardedObject,
    ShardedTensor,
    StrictHandling,
    by_checkpoint_key,
    dist_checkpointing,
    mcore_to_pyt_state_dict,
    save_checkpoint_config,
    save_preprocess,
)
from services.learner.megatron.model import BuiltModel
from services.learner.megatron.optimizer_kinds import adam_step, kind, merged, rename, set_adam_step
from services.learner.world import is_between_ranks

FORMAT = 2
MANIFEST = "checkpoint.json"
COMMON = "common.pt"
# Megatron's names of options: the optimizer's state in the shape of the parameters, so that it is independent of the layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

# What reading a damaged checkpoint ends with. (torch's CheckpointException, which gathers the ranks' errors, is no Exception.)
UNREADABLE = (
    CheckpointingException, dcp.api.CheckpointException, OSError, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError,
)  # fmt: skip

log = structlog.get_logger()


class Checkpointer:
    """Writes and reads the checkpoints of one learner. Every method is collective over the world.

    ``source``: the Hugging Face folder that the model came from; ``timeout_s``: longest wait of one rank for another.
    """

    def __init__(self, model: BuiltModel, optimizer: Any, *, source: Path, timeout_s: float) -> None:
        self._model, self._optimizer, self._source = model, optimizer, source
        self._timeout = timedelta(seconds=timeout_s)
        self._callers: Any = None
        self._writers: Any = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    def begin(self, root: Path, step: int, extra: Mapping[str, Any]) -> None:
        """Copy the state to host memory and begin to write ``root/step-XXXXXXXX``, which gets its name when it is whole; one of the
        same step is replaced then.

        ``root`` must be the same folder for all ranks (a shared file system). ``extra``: the caller's own record, JSON, from rank 0.

        Raises:
            CheckpointError: it can't be begun.
        """
        if self._pending is not None:
            raise InvariantError(f"The checkpoint of step {self._pending[0]} is still being written.")
        self._join_groups()
        started, partial, error = time.monotonic(), root / f"{PARTIAL_PREFIX}{step:08d}", None
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            except OSError as caught:
                error = caught
        self._agree(error, step)
        tensors, common = _staged(self._model, self._optimizer)
        manifest = {
            "format": FORMAT,
            "step": step,
            "model": _model_record(self._model),
            "source": str(self._source),
            "layout": _layout(self._model, self._optimizer),
            "extra": dict(extra),
        }
        done = self._executor.submit(self._write, partial, step_folder(root, step), tensors, common, manifest)
        self._pending = step, done
        log.debug("checkpoint_begun", step=step, copied_s=round(time.monotonic() - started, 3))

    def finish(self, *, wait: bool) -> int | None:
        """The step of a checkpoint that has become whole on every rank since the last call, or none. ``wait``: until it is.

        Raises:
            CheckpointError: it could not be written; earlier ones are as they were.
        """
        if self._pending is None:
            return None
        step, future = self._pending
        done = torch.tensor(int(wait or future.done()))
        dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._callers)
        if not done:
            return None
        self._pending = None
        self._agree(future.exception(), step)
        return step

    def _join_groups(self) -> None:
        """The writing threads agree over a group of their own, while the main threads use the others."""
        if self._callers is None:
            self._callers, self._writers = (dist.new_group(backend="gloo", timeout=self._timeout) for _ in range(2))

    def _agree(self, error: BaseException | None, step: int) -> None:
        """Raises on every rank where one has failed."""
        failed = torch.tensor(int(error is not None))
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._callers)
        if failed:
            why = f"{type(error).__name__}: {error}" if error else "another rank has failed, and its log says why"
            raise CheckpointError(f"The checkpoint of step {step} was not written: {why}.") from error

    def _write(
        self, partial: Path, final: Path, tensors: dict[str, Any], common: Any, manifest: dict[str, Any]
    ) -> None:
        """In the thread: no rank returns before all have written their part, and rank 0 then names the folder."""
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(partial, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._writers,
        )
        if dist.get_rank() != 0:
            return
        torch.save(common, partial / COMMON)
        save_checkpoint_config(CheckpointingConfig("torch_dist", 1), str(partial))
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for file in partial.iterdir():
            _weight_update(file)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _weight_update(final.parent)

    def load(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Puts the state of ``path`` in place, whatever layout wrote it; returns (step, extra) as saved.

        The random states are restored under the same layout only. (Nothing that we train draws from them.)

        Raises:
            ConfigError: not a checkpoint, a damaged one, or one of another model or precision; says which.
        """
        manifest = read_manifest(path)
        layout = _layout(self._model, self._optimizer)
        _check_model(manifest, _model_record(self._model), path)
        wanted = _sharded_state(self._model, self._optimizer, is_loading=True)
        if manifest["layout"] == layout:
            wanted["rng"] = _rng(self._model)
        loaded = _read(path, wanted) if kind(manifest["layout"]) == kind(layout) else self._read_other(path, wanted)
        for v, chunk in enumerate(self._model.chunks):
            chunk.load_state_dict(loaded[f"model{v}"])
        _load_optimizer(self._optimizer, loaded["optimizer"])
        if "rng" in loaded:
            torch.set_rng_state(loaded["rng"]["cpu"])
            if self._model.device.type == "cuda":
                torch.cuda.set_rng_state(loaded["rng"]["cuda"], self._model.device)
        else:
            log.info("layout_changed", was=manifest["layout"], now=layout)
        return manifest["step"], manifest["extra"]

    def _read_other(self, path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
        """As ``_read``, from a checkpoint of an optimizer of another kind."""
        saved, own = kind(read_manifest(path)["layout"]), kind(_layout(self._model, self._optimizer))
        log.info("optimizer_changed", was=saved, now=own)
        rename(wanted, saved=saved, own=own)
        own_state = wanted.pop("optimizer")
        loaded = _read(path, wanted)
        # By itself: a tensor may be parameter and master.
        state = merged(own_state, _read(path, {"tensors": own_state})["tensors"])
        for part in [state] if len(self._optimizer.chained_optimizers) == 1 else state.values():
            set_adam_step(part, adam_step(loaded["optimizer"]), distributed=own[1])
        return {**loaded, "optimizer": state}


def load_weights(model: BuiltModel, path: Path) -> None:
    """The model's parameters alone, for an export.

    Raises:
        ConfigError: as ``Checkpointer.load``.
    """
    manifest = read_manifest(path)
    _check_model(manifest, _model_record(model), path)
    loaded = _read(path, _sharded_model(model))
    for v, chunk in enumerate(model.chunks):
        chunk.load_state_dict(loaded[f"model{v}"])


def read_manifest(path: Path) -> dict[str, Any]:
    """What ``begin`` wrote down: format, step, model, source, layout, extra.

    Raises:
        ConfigError: not a checkpoint, or one of another format.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not a checkpoint: {MANIFEST} is not there.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / MANIFEST} can't be read: {error}.") from None
    if manifest.get("format") != FORMAT:
        raise ConfigError(
            f"The checkpoint {path} has format {manifest.get('format')}; this version of Forebay reads format {FORMAT}."
        )
    return manifest


def _check_model(manifest: dict[str, Any], record: dict[str, Any], path: Path) -> None:
    saved = manifest["model"]
    differ = [
        f"{key}: {saved.get(key)}, not {record.get(key)}" for key in record | saved if saved.get(key) != record.get(key)
    ]
    if differ:
        raise ConfigError(
            f"The checkpoint {path} is one of another model than run.model ({'; '.join(differ)})."
            " Give the model that the run began with, or another run.id."
        )


def _model_record(model: BuiltModel) -> dict[str, Any]:
    """As JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(model.arch)))


def _layout(model: BuiltModel, optimizer: Any) -> dict[str, Any]:
    return {
        "world": dist.get_world_size(),
        **{key: value for key, value in dataclasses.asdict(model.ranks).items() if key.endswith("_size")},
        "virtual_stages": len(model.chunks),
        "dtype": str(model.config.params_dtype).removeprefix("torch."),
        "distributed_optimizer": bool(optimizer.config.use_distributed_optimizer),
    }


def _sharded_model(model: BuiltModel) -> dict[str, Any]:
    return {f"model{v}": chunk.sharded_state_dict(metadata=dict(METADATA)) for v, chunk in enumerate(model.chunks)}


def _sharded_state(model: BuiltModel, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Every tensor of this rank as Megatron's description of its place in the whole."""
    state = _sharded_model(model)
    _fill_moments(optimizer)
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=dict(METADATA))
    return state


def _inner(optimizer: Any) -> list[tuple[Any, torch.optim.Optimizer]]:
    """Megatron's optimizers and torch's within them, where this rank has parameters of that kind and torch's Adam steps them.

    Transformer Engine's Adam keeps its step elsewhere, as Megatron's code expects; the functions below are for torch's.
    """
    pairs = [(chained, chained.optimizer) for chained in optimizer.chained_optimizers]
    return [(chained, inner) for chained, inner in pairs if isinstance(inner, torch.optim.Adam | torch.optim.AdamW)]


def _fill_moments(optimizer: Any) -> None:
    """Adam's state before its first step, which Megatron can neither save nor load into."""
    for _, inner in _inner(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                state.setdefault("step", torch.tensor(0.0))
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


def _load_optimizer(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """Megatron's loading, but for Adam's step: it loses a step of 0, and for its shards 0.16 wants one each where it saved one for all."""
    inner = dict(_inner(optimizer))
    states = [loaded] if len(optimizer.chained_optimizers) == 1 else [loaded[i] for i in sorted(loaded)]
    for chained, state in zip(optimizer.chained_optimizers, states, strict=True):
        if chained not in inner:
            chained.load_state_dict(state)
        elif optimizer.config.use_distributed_optimizer:
            _load_shards(chained, inner[chained], state)
        else:
            state.get("optimizer", state)["state"].setdefault("common_step", torch.tensor(0.0))
            chained.load_state_dict(state)


def _load_shards(chained: Any, inner: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    shards = state.pop("param_state")
    chained.load_state_dict(state)
    moments = inner.state.values()
    steps = [moment.pop("step") for moment in moments]
    chained.load_parameter_state_from_fully_reshardable(shards)
    for moment, step in zip(moments, steps, strict=True):
        moment["step"] = step.clone()  # Megatron gives all the same tensor, which torch would advance once for each


def _rng(model: BuiltModel) -> Any:
    states = {"cpu": torch.get_rng_state()}
    if model.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(model.device)
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


@torch.no_grad()
def _staged(model: BuiltModel, optimizer: Any) -> tuple[dict[str, Any], Any]:
    """(what this rank writes, in torch's form and copied to host memory; what rank 0 writes for all)."""
    state = _sharded_state(model, optimizer, is_loading=False)
    state["rng"] = _rng(model)
    sharded, common = save_preprocess(state, validate_access_integrity=True)
    mine = by_checkpoint_key(sharded)
    for parts in mine.values():
        for part in parts:
            if isinstance(part, ShardedTensor):
                part.data = part.data.detach().to("cpu", copy=True)
    return mcore_to_pyt_state_dict(mine, False), _copied(common)


def _copied(value: Any) -> Any:
    """A copy whose tensors are on the host."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _read(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        for name in (COMMON, ".metadata"):
            (path / name).stat()
        with warnings.catch_warnings():
            # How Megatron calls torch.
            warnings.filterwarnings("ignore", message=CHECKPOINT_LOAD_WARNINGS)
            return dist_checkpointing.load(wanted, str(path), strict=StrictHandling.RAISE_UNEXPECTED)
    except UNREADABLE as error:
        cause: Any = error
        if isinstance(error, dcp.api.CheckpointException) and error.failures:
            cause, _ = next(iter(error.failures.values()))  # of the first rank that failed
        if is_between_ranks(error):
            raise
        raise ConfigError(
            f"The checkpoint {path} is damaged or not whole: {type(cause).__name__}: {str(cause)[:500]}."
            " Move its folder away, and the run goes on from the one before it."
        ) from error


def _weight_update(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
