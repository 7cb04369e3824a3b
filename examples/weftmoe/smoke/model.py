"""Makes the smoke's Qwen3-MoE or Qwen3.5-MoE: random weights, then supervised steps on the arithmetic until it is
right now and then.

GRPO can only raise a reward that is sometimes there, and has nothing to raise once it always is: the warm-up stops
when the model's probability of a right answer, over the training problems, has reached `TARGET`. It runs in Hugging
Face's own model, in FP32 with torch's AdamW, so that it is the same for every variant that is compared afterwards.
"""

import inspect
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weftmoe.data import arithmetic_rows
from weftmoe.schema import Smoke
from weftmoe.smoke.note import Warmup, read_note, write_note
from weftmoe.smoke.tokenizer import make_tokenizer
from weftpub.canonical import family_of
from weftpub.errors import ConfigError

__all__ = ["TARGET", "make_model", "model_config"]

TARGET = 0.3
_PLAIN, _MULTIMODAL = "Qwen3MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"
_CHECK_EVERY = 5  # some twenty steps lead from a tenth to a half
_CHECKED = 128
_RISE = 20  # steps over which the learning rate rises
_IGNORED = -100  # the label that Hugging Face's loss passes over


def model_config(smoke: Smoke, tokens: int, architecture: str = _PLAIN) -> Any:
    """The language model's configuration; `tokens` is the longest sequence that it must take."""
    common: dict[str, Any] = {
        "vocab_size": smoke.vocab,
        "hidden_size": smoke.hidden,
        "moe_intermediate_size": smoke.intermediate,
        "num_hidden_layers": smoke.layers,
        "num_attention_heads": smoke.heads,
        "num_key_value_heads": smoke.kv_heads,
        "head_dim": smoke.head_dim,
        "num_experts": smoke.experts,
        "num_experts_per_tok": smoke.top_k,
        "max_position_embeddings": max(128, tokens),
        "tie_word_embeddings": False,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    if architecture == _PLAIN:
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(**common, intermediate_size=smoke.intermediate, norm_topk_prob=True)
    from transformers import Qwen3_5MoeTextConfig

    if smoke.layers < 2:
        raise ConfigError(f"smoke.layers={smoke.layers}: a Qwen3.5-MoE has layers of two kinds; set it to 2 or more")
    every = min(4, smoke.layers)
    return Qwen3_5MoeTextConfig(
        **common,
        layer_types=["linear_attention" if (i + 1) % every else "full_attention" for i in range(smoke.layers)],
        shared_expert_intermediate_size=smoke.shared,
        linear_num_key_heads=smoke.linear_heads // 2,
        linear_num_value_heads=smoke.linear_heads,
        linear_key_head_dim=smoke.linear_dim,
        linear_value_head_dim=smoke.linear_dim,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )


def make_model(
    directory: Path,
    smoke: Smoke,
    *,
    seed: int,
    tokens: int,
    device: str,
    architecture: str = _PLAIN,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Warmup:
    """Make model, tokenizer and config in Hugging Face's format, BF16; or take what an earlier start made there.

    Args:
        directory: where to.
        smoke: sizes and steps.
        seed: of weights, problems and batches.
        tokens: longest sequence.
        device: where the warm-up runs.
        architecture: what ``architectures[0]`` is to be; a multimodal model gets its language model only.
        progress: called with finished and planned steps.
    """
    found = read_note(directory, smoke, seed=seed, tokens=tokens, architecture=architecture)
    if found is not None:
        return found
    from transformers import AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(directory, smoke.vocab)
    torch.manual_seed(seed)
    # One expert after the other: faster than the grouped kernels at this size, and the same on every machine.
    config = model_config(smoke, tokens, architecture)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model = model.float().to(device)
    _fill_padding_row(model, config)
    with _plain_delta_rule():
        warmup = _warm_up(model, tokenizer, smoke, seed, progress)
    model.to(torch.bfloat16).save_pretrained(str(directory))
    if architecture == _MULTIMODAL:
        _deepen(directory)
    write_note(directory, smoke, warmup, seed=seed, tokens=tokens, architecture=architecture)
    return warmup


@contextmanager
def _plain_delta_rule() -> Iterator[None]:
    """Have transformers compute gated delta nets in plain torch, whatever kernels are installed: the model is to be the
    same for all, and flash-linear-attention's backward pass is refused on some GPUs.
    """
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

    taken = modeling.torch_chunk_gated_delta_rule
    modeling.torch_chunk_gated_delta_rule = inspect.unwrap(taken)
    try:
        yield
    finally:
        modeling.torch_chunk_gated_delta_rule = taken


@torch.no_grad()
def _fill_padding_row(model: Any, config: Any) -> None:
    """Give the padding token's embedding ordinary values. transformers makes that row zero, but a completion may hold
    the token, and there RMSNorm's derivative is 1 / sqrt(eps) = 1000: one such token ruled the norm of all gradients.
    """
    row = model.get_input_embeddings().weight[config.pad_token_id]
    row.normal_(std=config.initializer_range)


def _deepen(directory: Path) -> None:
    """Make a saved language model that of a multimodal checkpoint, by its names and its configuration."""
    from safetensors.torch import load_file, save_file

    weights, path = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(weights)
    family = family_of(_MULTIMODAL)
    save_file({family.to_checkpoint(name): t for name, t in tensors.items()}, weights, metadata={"format": "pt"})
    text = json.loads(path.read_text(encoding="utf-8"))
    text.pop("architectures")
    whole = {
        "architectures": [_MULTIMODAL],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2},
        "tie_word_embeddings": False,
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
    }
    path.write_text(json.dumps(whole, indent=1), encoding="utf-8")


def _warm_up(model: Any, tokenizer: Any, smoke: Smoke, seed: int, progress: Callable[[int, int], None]) -> Warmup:
    problems = _encode(tokenizer, smoke, seed)
    draw = random.Random(f"{seed}/warm-up")
    optimizer = torch.optim.AdamW(model.parameters(), lr=smoke.warmup_lr, betas=(0.9, 0.98), weight_decay=0.01)
    checked = draw.sample(problems, min(_CHECKED, len(problems)))
    began, loss, probability, step = time.monotonic(), float("nan"), _probability(model, checked), 0
    while step < smoke.warmup_steps and probability < TARGET:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = smoke.warmup_lr * min(1.0, step / _RISE)
        tokens, labels = _batch(draw.choices(problems, k=smoke.warmup_batch), model.device)
        out = model(input_ids=tokens, labels=labels)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % _CHECK_EVERY == 0 or step == smoke.warmup_steps:
            loss, probability = float(out.loss.detach()), _probability(model, checked)
        progress(step, smoke.warmup_steps)
    return Warmup(step, probability, loss, round(time.monotonic() - began, 2))


def _encode(tokenizer: Any, smoke: Smoke, seed: int) -> list[tuple[list[int], int]]:
    """Problems as (tokens of question and answer with its end, tokens of the question)."""
    found = []
    for row in arithmetic_rows(smoke.problems, seed=seed, digits=smoke.digits):
        question = tokenizer(row["prompt"][0]["content"], add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["reward_model"]["ground_truth"], add_special_tokens=False)["input_ids"]
        found.append(([*question, *answer, tokenizer.eos_token_id], len(question)))
    return found


def _batch(problems: Sequence[tuple[list[int], int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(tokens) for tokens, _ in problems)
    tokens = torch.zeros(len(problems), longest, dtype=torch.int64)
    labels = torch.full_like(tokens, _IGNORED)
    for row, (ids, question) in enumerate(problems):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, question : len(ids)] = tokens[row, question : len(ids)]
    return tokens.to(device), labels.to(device)


@torch.no_grad()
def _probability(model: Any, problems: Sequence[tuple[list[int], int]]) -> float:
    """Mean probability of the whole right answer: the reward that sampling would get."""
    tokens, labels = _batch(problems, model.device)
    logp = model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
    labels = labels[:, 1:]
    answered = labels != _IGNORED
    picked = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * answered
    return float(picked.sum(-1).exp().mean())
