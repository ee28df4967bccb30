"""bench/learner.py: its counts are right, and it runs from end to end on a tiny model. TRL itself is not part of the tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import learner
from bench.learner_trl import padded
from bench.learner_work import SHAPES, WORKS, Counts, count_batches, count_samples, make_samples
from services.learner.architecture import read_architecture
from services.learner.packing import pack, plan_microbatches


def test_a_run_reports_both_ways_and_their_ratio() -> None:
    options = ["--shape", "tiny", "--work", "tiny", "--rounds", "1", "--no-trl", "--both", "--matmul-size", "32"]
    text = learner.main(options)
    assert "random weights in the shape of tiny" in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| Forebay")]
    assert [row[1].strip() for row in rows] == ["Forebay", "Forebay, no shared prefixes"]
    assert int(rows[0][6]) < int(rows[1][6])
    assert "(positions computed)" in text


def test_bfloat16_and_the_command_for_gpus_parse() -> None:
    args = learner.resolve(learner.parser().parse_args(["--device", "cuda"]))
    assert (args.work, args.dtype, args.trl) == ("long", "bfloat16", [])


def test_flops_are_three_forwards_of_the_matrices_and_of_the_causal_half_of_attention(tmp_path) -> None:
    shape = SHAPES["tiny"]
    LlamaConfig(**{k: v for k, v in shape.items() if k != "architectures"}).save_pretrained(tmp_path)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    head = shape["vocab_size"] * shape["hidden_size"]
    got = Counts(positions=7, pairs=20, rows=3).flops(read_architecture(tmp_path))
    attention = shape["num_hidden_layers"] * 4 * shape["hidden_size"] * 20
    assert got == pytest.approx(3 * (2 * matrices * 7 + attention + 2 * head * 3))


def test_shared_batches_have_fewer_positions_and_pairs_but_the_same_rows() -> None:
    samples = make_samples(WORKS["short"], 100, seed=0)
    counts = {}
    for share in (True, False):
        (plan,) = plan_microbatches(samples, max_tokens=4096, num_ranks=1, hidden_size=576, share_prefixes=share)
        counts[share] = count_batches([pack(samples, pieces) for pieces in plan])
    shorter = [dataclasses.replace(s, completion_ids=s.completion_ids[:-1], logprobs=s.logprobs[:-1]) for s in samples]
    assert counts[False].positions == count_samples(shorter).positions  # the last token predicts nothing
    assert counts[False].pairs == count_samples(shorter).pairs
    assert counts[True].rows == counts[False].rows == sum(len(s.completion_ids) for s in samples)
    prompts = {s.prompt_ids.tobytes(): len(s.prompt_ids) - 1 for s in samples}
    assert counts[False].positions - counts[True].positions == sum(7 * n for n in prompts.values())
    assert counts[True].pairs < counts[False].pairs


def test_trls_batch_is_padded_left_and_right_to_the_longest() -> None:
    samples = make_samples(WORKS["tiny"], 100, seed=1)
    batch = padded(samples)
    for i, sample in enumerate(samples):
        for part, ids in (("prompt", sample.prompt_ids), ("completion", sample.completion_ids)):
            row = batch[f"{part}_ids"][i][batch[f"{part}_mask"][i].bool()]
            np.testing.assert_array_equal(row.numpy(), ids)
    assert batch["prompt_mask"][:, -1].all()
    assert batch["completion_mask"][:, 0].all()
    assert int(batch["num_items_in_batch"]) == sum(len(s.completion_ids) for s in samples)
    assert isinstance(batch["advantages"], torch.Tensor)
