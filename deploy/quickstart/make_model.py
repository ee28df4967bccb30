"""Makes the quickstart's toy language model: a byte-level BPE tokenizer and a small Llama, about 1 M parameters.

    python deploy/quickstart/make_model.py --out deploy/quickstart/model

It is a toy. It has seen nothing but synthetic tasks of families.py (every family, but none of the held-out (family,
constants) pairs of make_tasks.py), each answered with a short function in a Markdown fence. Most answers of its corpus
are wrong on purpose, with a few systematic bugs (see ``slip``), so that sampled at temperature 1 it solves about a
quarter of its attempts and reinforcement learning has something to do. It does sample programs token by token;
nothing is looked up.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from families import FAMILIES, Spec, choose
from make_tasks import SEED, split_constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 640
MAX_POSITIONS = 512

# How often each part of an answer in the corpus goes wrong. Parts fail independently: about 72 % of answers are wrong.
P_WRONG_BODY = 0.28
P_NO_RETURN = 0.12
P_PRINT = 0.46
P_NO_COLON = 0.05
P_OFF_BY_ONE = 0.06

NUM_STEPS = 600
BATCH_SIZE = 48
PEAK_LR = 4e-3
POOL_SIZE = 48 * BATCH_SIZE


def slip(spec: Spec, rng: random.Random) -> str:
    """An answer to ``spec`` as a careless programmer gives it: right in about 28 % of draws."""
    body = spec.family.right
    if rng.random() < P_WRONG_BODY:
        body = rng.choice(spec.family.wrong)
    off_by_one = isinstance(spec.a, int) and rng.random() < P_OFF_BY_ONE
    program = spec.program(body, a=spec.a + 1 if off_by_one else None)
    draw = rng.random()
    if draw < P_NO_RETURN:
        program = program.replace("return ", "")
    elif draw < P_NO_RETURN + P_PRINT:
        head, _, tail = program.rpartition("return ")
        program = f"{head}print({tail[:-1]})\n"
    if rng.random() < P_NO_COLON:
        program = program.replace("):", ")", 1)
    return f"```python\n{program}```"


def corpus(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs. Never a held-out (family, constants) pair."""
    rng = random.Random(f"{seed}/corpus")
    heldout = {(f.key, a, b) for f in FAMILIES for a, b in split_constants(f, SEED)[1]}
    while True:
        spec = choose(rng.choice(FAMILIES), rng)
        if spec.constants not in heldout:
            yield spec.prompt, slip(spec, rng)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that can encode any text; the words of the tasks become single tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, IM_START, IM_END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Shapes that vLLM's CPU attention takes (heads of 32) and that split over two tensor-parallel ranks."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """The ids that a rollout of ``prompt`` starts from: the chat template, up to the assistant's turn."""
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """(ids, labels) of one example; the prompt's labels are -100. Prompt and answer are encoded apart, as sampled."""
    before = prompt_ids(tokenizer, prompt)
    after = list(tokenizer(answer + IM_END, add_special_tokens=False)["input_ids"])
    return before + after, [-100] * len(before) + after


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids_BT, labels_BT), of examples of like length: padding would cost a third of the time."""
    pairs = corpus(seed)
    rng = random.Random(f"{seed}/batches")
    while True:
        pool = sorted((encode(tokenizer, *next(pairs)) for _ in range(POOL_SIZE)), key=lambda pair: len(pair[0]))
        groups = [pool[i : i + BATCH_SIZE] for i in range(0, POOL_SIZE, BATCH_SIZE)]
        rng.shuffle(groups)
        for group in groups:
            width = len(group[-1][0])
            ids = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in group]
            labels = [labels + [-100] * (width - len(labels)) for _, labels in group]
            yield torch.tensor(ids), torch.tensor(labels)


def learning_rate(step: int, num_steps: int) -> float:
    """A linear warm-up over the first 5 %, then a straight line down to zero."""
    warmup = max(1, num_steps // 20)
    return PEAK_LR * min((step + 1) / warmup, (num_steps - step) / (num_steps - warmup))


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_steps: int, seed: int) -> None:
    """Next-token training on the answers, in place, in float32 on the CPU."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    stream = batches(tokenizer, seed)
    for step in range(num_steps):
        ids_BT, labels_BT = next(stream)
        hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
        answered = labels_BT[:, 1:] != -100  # logits of the answers only: the vocabulary is a large part of the model
        logits_NV = model.lm_head(hidden_BTD[answered])
        loss = torch.nn.functional.cross_entropy(logits_NV, labels_BT[:, 1:][answered])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """An ordinary Hugging Face folder, weights in bfloat16."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    # In tokenizer_config.json, where every reader looks, not only in a file of its own as transformers 5 saves it.
    config_path = out / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) | {"chat_template": CHAT_TEMPLATE}
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    pairs = corpus(args.seed)
    tokenizer = train_tokenizer([text for _ in range(4000) for text in next(pairs)])
    model = LlamaForCausalLM(make_config(tokenizer))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    pretrain(model, tokenizer, args.steps, args.seed)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
