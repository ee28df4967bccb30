"""Real vLLM with a mixture of experts that tells its routed_experts, over a weight update; run by test_vllm_moe.py.

python vllm_moe_world.py MODEL OUT

A process of its own, for vLLM must find Triton's interpreter when it is imported. OUT is JSON: for the completions before, over and after
the update, their segments and how far log-probs and experts are from those of transformers with the weights of the last segment.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import torch
from test_vllm_engine import Sender, sample
from transformers import Qwen3MoeForCausalLM

from protocol import weights
from protocol.config import RunConfig
from services.rollout.config import RolloutConfig
from services.rollout.engine import Completion
from services.rollout.vllm_engine import VllmEngine


class MoeSender(Sender):
    """Sends the experts one by one, under the names that checkpoints have; transformers keeps those of a layer stacked."""

    def __init__(self, model_dir: Path) -> None:
        self.model = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.store, self.address = weights.serve_store("127.0.0.1", timeout_s=300)
        self.group, self.num_weight_updates, self.num_groups = None, 0, 0

    def send(self) -> int:
        tensors = [pair for name, tensor in self.model.state_dict().items() for pair in by_expert(name, tensor)]
        specs = [weights.TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors]
        return weights.send_weights(self.group, specs, tensors, bucket_bytes=1 << 18)


def by_expert(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        halves = [("gate_proj", tensor.chunk(2, 1)[0]), ("up_proj", tensor.chunk(2, 1)[1])]
    elif last == "down_proj":
        halves = [(last, tensor)]
    else:
        return [(name, tensor)]
    return [
        (f"{stem}.{expert}.{part}.weight", stacked[expert].contiguous())
        for expert in range(len(tensor))
        for part, stacked in halves
    ]


def compare(model: Qwen3MoeForCausalLM, completion: Completion) -> dict:
    """From the first position of the last segment on."""
    ids = torch.from_numpy(np.concatenate([completion.prompt_ids, completion.completion_ids])).long()
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for layer in model.model.layers
    ]
    with torch.no_grad():
        every = model(ids[None]).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    own = every[:-1].gather(1, ids[1:, None])[len(completion.prompt_ids) - 1 :, 0].numpy()
    last = completion.segments[-1].num_tokens
    # Each token's experts tell the token after it: rows of the last segment begin at the position that predicts its first token.
    first_row = 0 if len(completion.segments) == 1 else len(completion.routed_experts) - last
    routed_experts = np.sort(completion.routed_experts, -1)[first_row:]
    expected = torch.stack(chosen, 1).sort(-1).values.numpy()[first_row:-1]
    return {
        "versions": [segment.version for segment in completion.segments],
        "shape": list(completion.routed_experts.shape),
        "tokens": [len(completion.prompt_ids), len(completion.completion_ids)],
        "gap": float(np.abs(own - completion.logprobs)[-last:].max()),
        "other_experts": float((routed_experts != expected).any(-1).mean()),
    }


async def main(model_dir: Path) -> dict[str, list[dict]]:
    run = RunConfig(id="t", model=model_dir, max_prompt_tokens=64, max_completion_tokens=120, routing_replay=True)
    engine = VllmEngine(run, RolloutConfig(dtype="float32", num_threads=1, max_num_seqs=8))
    await engine.start()
    try:
        sender = MoeSender(model_dir)
        seen = {"before": [compare(sender.model, done) for done in await sample(engine, 20, num_samples=2)]}
        sender.change(seed=1)
        await sender.join(engine, sender.plan(1))  # which takes its time, and the requests go on meanwhile
        in_flight = asyncio.create_task(sample(engine, 100, num_samples=3, prompt="a longer prompt"))
        begun = engine.generated_tokens()
        while engine.generated_tokens() < begun + 24:  # noqa: ASYNC110 (vLLM counts in no event; until they are under way)
            await asyncio.sleep(0.01)
        await sender.update(engine, 1)
        seen["over"] = [compare(sender.model, done) for done in await in_flight]
        seen["after"] = [compare(sender.model, done) for done in await sample(engine, 20, num_samples=2)]
        return seen
    finally:
        await engine.close()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
