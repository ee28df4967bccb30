"""Names and regions: what each rank holds of each Hugging Face tensor, and that the parts make up the whole again."""

from __future__ import annotations

import dataclasses
import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.learner.architecture import Architecture, Rope
from services.learner.megatron import hf_names
from services.learner.megatron.hf_names import all_entries, hf_shape, is_sent, join, merge, regions, stage_entries

ARCH = Architecture(
    family="qwen2",
    num_layers=5,
    hidden_size=24,
    ffn_size=48,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=19,
    max_positions=64,
    norm_eps=1e-6,
    rope=Rope(kind="default", theta=1e4),
    tied_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
    dtype="float32",
)
MOE = dataclasses.replace(
    ARCH, family="qwen3_moe", qkv_bias=False, num_experts=4, experts_per_token=2, moe_ffn_size=8, norm_topk_prob=True
)


def random_tensors(arch: Architecture, entry: hf_names.Entry) -> list[torch.Tensor]:
    return [torch.randn(hf_shape(arch, name)) for name in entry.hf]


def cut(arch: Architecture, entry: hf_names.Entry, full: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """The parameter of each of ``size`` ranks, as loading fills it."""
    parts = []
    for rank in range(size):
        layout = regions(arch, entry, rank, size)
        pieces = [full[i][slice(*r.rows), slice(*r.columns) if r.columns else ...] for i, r in layout]
        num_rows = sum(len(piece) for piece in pieces)
        if entry.kind == "vocab":
            num_rows = arch.padded_vocab_size(size) // size
        target = torch.full((num_rows, *pieces[0].shape[1:]) if pieces else (num_rows, arch.hidden_size), torch.nan)
        merge(pieces, target)
        parts.append(target)
    return parts


@settings(max_examples=60)
@given(
    groups=st.sampled_from([1, 2, 4, 8]),
    queries=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 6]),
    vocab=st.integers(1, 70),
    size=st.sampled_from([1, 2, 4]),
    moe=st.booleans(),
)
def test_the_parts_of_all_ranks_make_up_the_tensors_again(
    groups: int, queries: int, head_dim: int, vocab: int, size: int, moe: bool
) -> None:
    if groups * queries % size:
        queries *= 4
    arch = dataclasses.replace(
        MOE if moe else ARCH,
        num_layers=1,
        num_heads=groups * queries,
        num_kv_heads=groups,
        head_dim=head_dim,
        vocab_size=vocab,
    )
    for entry in all_entries(arch):
        full = random_tensors(arch, entry)
        parts = cut(arch, entry, full, size)
        assert len({part.shape for part in parts}) == 1, entry
        for tensor, expected in zip(join(arch, entry, parts), full, strict=True):
            assert torch.equal(tensor, expected), entry


@pytest.mark.parametrize(("groups", "size"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (2, 8), (8, 4)])
def test_queries_keys_and_values_are_packed_group_by_group_and_cut_into_equal_blocks(groups: int, size: int) -> None:
    """Megatron's order (attention.py, get_query_key_value_tensors): q q k v of group 0, then of group 1; blocks of rows."""
    arch = dataclasses.replace(ARCH, num_kv_heads=groups)
    entry = next(entry for entry in all_entries(arch) if entry.megatron.endswith("linear_qkv.weight"))
    query, key, value = random_tensors(arch, entry)
    packed = torch.cat(
        [
            torch.cat([q.reshape(-1, 24), k, v])
            for q, k, v in zip(
                query.view(groups, -1, 4, 24), key.view(groups, 4, 24), value.view(groups, 4, 24), strict=True
            )
        ]
    )
    for part, expected in zip(cut(arch, entry, [query, key, value], size), packed.chunk(size), strict=True):
        assert torch.equal(part, expected)


def test_rows_that_pad_the_vocabulary_are_zero() -> None:
    entry = all_entries(ARCH)[0]
    parts = cut(ARCH, entry, random_tensors(ARCH, entry), 4)
    assert [len(part) for part in parts] == [8, 8, 8, 8]
    assert torch.equal(parts[2][3:], torch.zeros(5, 24))
    assert torch.equal(parts[3], torch.zeros(8, 24))


@pytest.mark.parametrize(
    "arch", [ARCH, MOE, dataclasses.replace(ARCH, tied_embeddings=True)], ids=["dense", "moe", "tied"]
)
def test_stages_and_expert_ranks_send_each_name_of_the_model_once_and_in_its_order(arch: Architecture) -> None:
    whole = [name for entry in all_entries(arch) for name in entry.hf]
    assert len(set(whole)) == len(whole)
    layers = ((range(1), range(2, 3)), (range(1, 2), range(3, 5)))  # two stages, two chunks each
    for expert_ranks in (1, 2, 4):
        entries = [stage_entries(arch, layers, stage, expert_ranks) for stage in range(2)]
        sent = [name for stage in entries for entry in stage if is_sent(entry) for name in entry.hf]
        assert sorted(sent) == sorted(whole)
        assert sum(not is_sent(entry) for entry in entries[1]) == arch.tied_embeddings
        for stage in entries:
            for rank in range(expert_ranks):
                mine = [entry.megatron for entry in stage if entry.owner in (None, rank)]
                assert len(set(mine)) == len(mine)
    assert "1.decoder.layers.1.mlp.linear_fc1.weight" in {e.megatron for e in entries[1]} or arch.is_moe


def test_experts_are_dealt_in_runs() -> None:
    owners = {
        entry.hf[0].split(".")[5]: (entry.owner, entry.megatron.split(".")[7])
        for entry in stage_entries(MOE, ((range(1),),), 0, 2)
        if entry.owner is not None
    }
    assert owners == {"0": (0, "0"), "1": (0, "1"), "2": (1, "0"), "3": (1, "1")}


def test_the_names_of_transformer_engines_layers_are_known() -> None:
    assert doctest.testmod(hf_names) == (0, 1)
    for theirs, ours in {
        "0.decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": "0.decoder.layers.1.input_layernorm.weight",
        "1.decoder.layers.0.mlp.experts.linear_fc2.weight13": "1.decoder.layers.0.mlp.experts.local_experts.13.linear_fc2.weight",
        "0.decoder.layers.1.self_attention.linear_qkv.weight": "0.decoder.layers.1.self_attention.linear_qkv.weight",
    }.items():
        assert hf_names.table_name(theirs) == ours
