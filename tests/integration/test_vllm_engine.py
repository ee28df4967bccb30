"""Real vLLM behind the Engine protocol: log-probs, version segments, weight updates in flight, and updates that fail.

One engine serves the whole file: starting one takes tens of seconds on two cores.
"""

import asyncio

import numpy as np
import pytest
import pytest_asyncio
import torch

from bench.byte_tokenizer import save_byte_tokenizer
from common.errors import ConfigError
from protocol import messages as m
from protocol import weights
from protocol.config import RunConfig
from services.rollout.config import RolloutConfig
from services.rollout.engine import PromptTooLong

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and transformers' own; ours are tested everywhere else
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A random Llama with *tied* embeddings (the case where a reload can miss the output layer), and a byte tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    end_of_message = save_byte_tokenizer(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=end_of_message,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class Sender:
    """The learner's side of an update, for one engine."""

    def __init__(self, model_dir):
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.store, self.address = weights.serve_store("127.0.0.1", timeout_s=300)
        self.group = None
        self.num_weight_updates = 0
        self.num_groups = 0

    def plan(self, version):
        self.num_weight_updates += 1
        member = m.WeightUpdateMember(node_id="a", first_rank=1, num_workers=1)
        tag = m.VersionTag(version=version)
        return m.WeightUpdatePlan(
            update_id=self.num_weight_updates,
            tag=tag,
            stores=[self.address],
            members=[member],
            world_size=2,
            group_key=f"group-{self.num_groups}",
            timeout_s=300,
        )

    async def join(self, engine, plan):
        joining = asyncio.create_task(engine.form_groups(plan, plan.members[0]))
        if self.group is None:
            store = weights.group_store(self.store, plan.group_key)
            cpu = torch.device("cpu")
            self.group = await asyncio.to_thread(
                lambda: weights.BroadcastGroup(store, rank=0, world_size=2, device=cpu, timeout_s=300)
            )
        await joining

    def change(self, seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)

    def send(self):
        tensors = [(n, t) for n, t in self.model.state_dict().items() if n != "lm_head.weight"]
        specs = [weights.TensorSpec(n, "float32", tuple(t.shape)) for n, t in tensors]
        return weights.send_weights(self.group, specs, tensors, bucket_bytes=1 << 18)

    async def update(self, engine, version):
        plan = self.plan(version)
        await self.join(engine, plan)
        sending = asyncio.create_task(asyncio.to_thread(self.send))
        pause_s = await engine.update_weights(plan)
        assert await sending > 0
        return pause_s


@pytest.fixture(scope="module")
def sender(model_dir):
    return Sender(model_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir):
    from services.rollout.vllm_engine import VllmEngine

    run = RunConfig(id="t", model=model_dir, max_prompt_tokens=64, max_completion_tokens=900)
    engine = VllmEngine(run, RolloutConfig(dtype="float32", num_threads=1, max_num_seqs=16))
    await engine.start()
    yield engine
    await engine.close()


async def sample(engine, num_tokens, num_samples=4, prompt="hello", temperature=1.0):
    sampling = m.Sampling(max_tokens=num_tokens, temperature=temperature)
    return [c async for c in engine.generate(prompt, range(num_samples), sampling, 0)]


async def tokens_by_index(engine, indices, seed):
    """Sample index -> its tokens."""
    sampling = m.Sampling(max_tokens=20)
    return {c.sample_index: c.completion_ids.tolist() async for c in engine.generate("hello", indices, sampling, seed)}


def reference_logprobs(model, completion, temperature=1.0):
    ids = np.concatenate([completion.prompt_ids, completion.completion_ids])
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()[None]).logits[0]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    start = len(completion.prompt_ids)
    return np.array([logprobs[start + i - 1, token].item() for i, token in enumerate(completion.completion_ids)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_sampled_tokens_at_the_temperature(engine, sender, temperature):
    for completion in await sample(engine, 30, temperature=temperature):
        assert [(s.version, s.num_tokens) for s in completion.segments] == [(0, len(completion.completion_ids))]
        expected = reference_logprobs(sender.model, completion, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_ids_are_those_of_the_chat_template_and_are_never_encoded_again(engine):
    (completion,) = await sample(engine, 5, num_samples=1, prompt="añ")
    assert completion.prompt_ids.tolist() == engine.render("añ")


async def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_generated(engine):
    before = engine.generated_tokens()
    with pytest.raises(PromptTooLong, match="max_prompt_tokens"):
        await sample(engine, 5, prompt="x" * 100)
    assert engine.generated_tokens() == before


async def test_a_seeded_completion_that_is_generated_again_is_the_same(engine, monkeypatch):
    """Whatever else the engine is doing, and whichever of the group's samples are missing."""
    monkeypatch.setattr(engine, "config", engine.config.model_copy(update={"seeded_sampling": True}))
    group = await tokens_by_index(engine, range(4), seed=5)
    assert len({tuple(tokens) for tokens in group.values()}) == 4
    others, rest = await asyncio.gather(tokens_by_index(engine, range(4), seed=99), tokens_by_index(engine, [1, 3], 5))
    assert rest == {1: group[1], 3: group[3]}
    assert others != group


async def test_an_engine_that_can_not_tell_its_experts_says_what_it_lacks(model_dir):
    from vllm.triton_utils import HAS_TRITON

    from services.rollout.vllm_engine import VllmEngine

    if HAS_TRITON:
        pytest.skip("this vLLM can tell its experts")
    run = RunConfig(id="t", model=model_dir, max_prompt_tokens=64, max_completion_tokens=20, routing_replay=True)
    other = VllmEngine(run, RolloutConfig(num_threads=1))
    with pytest.raises(ConfigError, match=r"run\.routing_replay: vLLM tells its experts .* triton-cpu"):
        await other.start()
    await other.close()


async def test_new_weights_are_used_while_requests_are_in_flight(engine, sender):
    sender.change(seed=1)
    await sender.join(engine, sender.plan(1))  # which takes its time, and the requests go on meanwhile
    before = engine.generated_tokens()
    # So many and so long that some go on for seconds, whatever happens to this process meanwhile.
    in_flight = asyncio.create_task(sample(engine, 900, num_samples=16))
    while engine.generated_tokens() < before + 100:  # noqa: ASYNC110 (vLLM counts in no event; until requests are under way)
        await asyncio.sleep(0.01)
    await sender.update(engine, 1)
    crossed = [c for c in await in_flight if len(c.segments) == 2]
    assert crossed, "no request was in flight over the update"
    for completion in crossed:
        assert [s.version for s in completion.segments] == [0, 1]
        assert sum(s.num_tokens for s in completion.segments) == len(completion.completion_ids)
        # Tokens of the second segment are those of the new weights, given all that came before.
        second = completion.segments[1].num_tokens
        expected = reference_logprobs(sender.model, completion)
        np.testing.assert_allclose(completion.logprobs[-second:], expected[-second:], atol=1e-3)
    for completion in await sample(engine, 30):
        assert [s.version for s in completion.segments] == [1]
        np.testing.assert_allclose(completion.logprobs, reference_logprobs(sender.model, completion), atol=1e-4)


async def test_a_failed_update_leaves_the_old_weights_serving(engine, sender):
    before = sender.model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    plan = sender.plan(2)
    await sender.join(engine, plan)
    update = asyncio.create_task(engine.update_weights(plan))
    await asyncio.sleep(0.3)
    sender.group.close()  # the learner dies in the middle
    sender.group, sender.num_groups = None, 1
    with pytest.raises(Exception, match="Connection closed"):
        await update
    assert engine.holds.version == 1
    sender.model.load_state_dict(before)
    for completion in await sample(engine, 20):
        assert [s.version for s in completion.segments] == [1]
        np.testing.assert_allclose(completion.logprobs, reference_logprobs(sender.model, completion), atol=1e-4)
    await engine.leave_groups()
    sender.change(seed=2)
    await sender.update(engine, 2)
    for completion in await sample(engine, 20):
        np.testing.assert_allclose(completion.logprobs, reference_logprobs(sender.model, completion), atol=1e-4)
