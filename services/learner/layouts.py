"""Which layouts fit a model and a world, and which layers a stage holds. Imports neither torch nor Megatron: `forebay check` reads it."""

from __future__ import annotations

from services.learner.architecture import Architecture
from services.learner.config import ParallelConfig, RecomputeConfig


def layout_violations(
    arch: Architecture, parallel: ParallelConfig, world_size: int, recompute: RecomputeConfig | None = None
) -> list[str]:
    """What of ``parallel`` does not fit the model or the world, one sentence each with the values that would do; empty: it fits."""
    return [
        *_world(arch, parallel, world_size),
        *_matrices(arch, parallel),
        *_stages(arch, parallel),
        *_experts(arch, parallel),
        *(_recompute(arch, parallel, recompute) if recompute else []),
    ]


def _world(arch: Architecture, parallel: ParallelConfig, world_size: int) -> list[str]:
    found = []
    cuts = {"parallel.tensor * context * pipeline": parallel.tensor * parallel.context * parallel.pipeline}
    if arch.is_moe:
        experts = parallel.expert_tensor_size * parallel.expert * parallel.pipeline
        cuts["parallel.expert_tensor * expert * pipeline"] = experts
    for what, cut in cuts.items():
        if world_size % cut:
            found.append(
                f"world size {world_size} is not a multiple of {what} = {cut}:"
                f" start {max(cut, world_size // cut * cut)} ranks or another multiple of {cut}"
            )
    return found


def _matrices(arch: Architecture, parallel: ParallelConfig) -> list[str]:
    tensor, found = parallel.tensor, []
    heads, groups = arch.num_heads, arch.num_kv_heads
    # Megatron lets several ranks share a key-value head, but a rank has whole key-value heads or a whole part of one.
    if heads % tensor or (groups % tensor and tensor % groups):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
        found.append(
            f"{heads} attention heads in {groups} groups (key-value heads) can't be shared by parallel.tensor = {tensor} ranks:"
            f" use one of {', '.join(map(str, fitting))}"
        )
    if not arch.is_moe and arch.ffn_size % tensor:
        found.append(
            f"{arch.ffn_size} rows of intermediate_size don't divide by parallel.tensor = {tensor}: use {_choices(arch.ffn_size)}"
        )
    if parallel.sequence and tensor == 1:
        found.append("parallel.sequence needs parallel.tensor > 1: drop one of them")
    return found


def _stages(arch: Architecture, parallel: ParallelConfig) -> list[str]:
    stages, virtual = parallel.pipeline, parallel.virtual_stages
    given = {"first_stage_layers": parallel.first_stage_layers, "last_stage_layers": parallel.last_stage_layers}
    given = {name: count for name, count in given.items() if count is not None}
    if stages == 1:
        options = [*given, *(["virtual_stages"] if virtual > 1 else [])]
        return [f"parallel.{name} needs parallel.pipeline > 1: drop one of them" for name in options]
    free, rest = stages - len(given), arch.num_layers - sum(given.values())
    if free == 0 and rest:
        return [
            f"parallel.first_stage_layers + last_stage_layers = {sum(given.values())} are not the model's {arch.num_layers} layers:"
            " leave one of them out"
        ]
    if free and (rest % free or rest < free):
        return [
            f"{arch.num_layers} layers don't divide by parallel.pipeline = {stages}"
            + (f" when {', '.join(f'{name} = {count}' for name, count in given.items())}" if given else "")
            + f": use {_choices(arch.num_layers)}, or set parallel.last_stage_layers = {_last_stage(arch.num_layers, stages)}"
        ]
    odd = sorted({count for count in _layers_per_stage(arch.num_layers, parallel) if count % virtual})
    return [
        f"stages of {count} layers don't divide by parallel.virtual_stages = {virtual}: use {_choices(count)}"
        for count in odd
    ]


def _last_stage(num_layers: int, stages: int) -> int:
    """The nearest to an even share, from below where that can be, that leaves equal stages before it."""
    fitting = [n for n in range(1, num_layers - stages + 2) if (num_layers - n) % (stages - 1) == 0]
    share = num_layers / stages
    return min(fitting, key=lambda n: (abs(n - share), n), default=num_layers)


def _experts(arch: Architecture, parallel: ParallelConfig) -> list[str]:
    expert, tensor = parallel.expert, parallel.expert_tensor_size
    if not arch.is_moe:
        options = [
            f"parallel.{name} = {value}"
            for name, value in (("expert", expert), ("expert_tensor", parallel.expert_tensor))
            if value not in (None, 1, parallel.tensor if name == "expert_tensor" else 1)
        ]
        return [f"{option}, but the model has no experts: leave it out" for option in options]
    found = []
    if arch.num_experts % expert:
        found.append(
            f"{arch.num_experts} experts don't divide by parallel.expert = {expert}: use {_choices(arch.num_experts)}"
        )
    if arch.moe_ffn_size % tensor:
        found.append(
            f"moe_intermediate_size {arch.moe_ffn_size} doesn't divide by parallel.expert_tensor = {tensor}:"
            f" use {_choices(arch.moe_ffn_size)}"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        found.append("a model with experts and parallel.tensor > 1 needs parallel.sequence = true")
    return found


def _recompute(arch: Architecture, parallel: ParallelConfig, recompute: RecomputeConfig) -> list[str]:
    if recompute.granularity == "selective" and "moe" in recompute.modules and not arch.is_moe:
        return ["recompute.modules has moe, but the model has no experts: use mlp"]
    fewest = min(_layers_per_stage(arch.num_layers, parallel)) // parallel.virtual_stages
    if recompute.granularity == "full" and recompute.num_layers > max(fewest, 1):
        return [f"recompute.num_layers = {recompute.num_layers}, but a stage has {fewest} layers: use 1 to {fewest}"]
    return []


def _choices(count: int) -> str:
    """The divisors of ``count`` as a list: all there are, or the eight smallest."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return "one of " + ", ".join(map(str, divisors[:8])) + (", ..." if len(divisors) > 8 else "")


def stage_layers(num_layers: int, parallel: ParallelConfig) -> tuple[tuple[range, ...], ...]:
    """``[stage][v]``: the layers, from 0, of virtual stage v of each pipeline stage, as Megatron deals them.

    Every turn v goes over all stages, so with 8 layers, 2 stages and 2 virtual stages: ((0-1, 4-5), (2-3, 6-7)). The layout must
    fit; see ``layout_violations``.
    """
    per_stage = _layers_per_stage(num_layers, parallel)
    dealt: list[list[range]] = [[] for _ in per_stage]
    start = 0
    for _ in range(parallel.virtual_stages):
        for stage, count in enumerate(per_stage):
            end = start + count // parallel.virtual_stages
            dealt[stage].append(range(start, end))
            start = end
    return tuple(tuple(parts) for parts in dealt)


def _layers_per_stage(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """Layers of each pipeline stage; the stages whose number is not given share the rest, rounded down."""
    counts: list[int | None] = [None] * parallel.pipeline
    if parallel.pipeline > 1:
        counts[0], counts[-1] = parallel.first_stage_layers, parallel.last_stage_layers
    free = counts.count(None)
    rest = num_layers - sum(count or 0 for count in counts)
    return [rest // free if count is None else count for count in counts]
