"""Prompts as tokens: rendered by the tokenizer's chat template, too long ones left out and counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftmoe.data import Prompt, PromptSet
from weftpub.errors import ConfigError

__all__ = ["EncodedPrompt", "encode_prompts", "load_tokenizer", "stop_tokens"]


@dataclass(frozen=True)
class EncodedPrompt:
    """One question, ready to be sent.

    Attributes:
        prompt: the question.
        tokens: rendered and tokenized, with the beginning of the answer's turn.
        turns: tokens up to and including each of the user's turns.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    turns: tuple[int, ...]


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a checkpoint directory.

    Raises:
        ConfigError: it has no chat template.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {directory} has no chat template; prompts cannot be rendered")
    return tokenizer


def stop_tokens(tokenizer: Any, hf_config: dict[str, Any], directory: Path) -> tuple[int, ...]:
    """Tokens that end a completion: those of generation_config.json where there are any, config.json's, also of a
    language model inside, and the tokenizer's.
    """
    import json

    found: set[int] = set()
    generation = directory / "generation_config.json"
    sources = [hf_config, hf_config.get("text_config") or {}]
    if generation.is_file():
        sources.append(json.loads(generation.read_text(encoding="utf-8")))
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if not found:
        raise ConfigError(f"{directory}: neither config.json nor the tokenizer names an end token")
    return tuple(sorted(found))


def encode_prompts(
    prompts: PromptSet, tokenizer: Any, *, longest: int, enable_thinking: bool
) -> tuple[list[EncodedPrompt], int]:
    """Encode all prompts.

    Returns:
        those of at most `longest` tokens, in order, and how many were left out.

    Raises:
        ConfigError: none is short enough.
    """
    encoded = [_encode(prompt, tokenizer, enable_thinking) for prompt in prompts.prompts]
    kept = [one for one in encoded if len(one.tokens) <= longest]
    if not kept:
        raise ConfigError(
            f"all {len(encoded)} prompts are longer than data.max_prompt_tokens={longest}; raise it, or give other data"
        )
    return kept, len(encoded) - len(kept)


def _encode(prompt: Prompt, tokenizer: Any, enable_thinking: bool) -> EncodedPrompt:
    chat = prompt.chat
    tokens = _tokens(tokenizer, chat, enable_thinking, answer=True)
    ends = [number for number, turn in enumerate(chat, 1) if turn["role"] == "user"]
    turns = [
        len(tokens) if end == len(chat) else len(_tokens(tokenizer, chat[:end], enable_thinking, answer=False))
        for end in ends
    ]
    return EncodedPrompt(prompt, tuple(tokens), tuple(turns))


def _tokens(tokenizer: Any, chat: Sequence[dict[str, str]], enable_thinking: bool, *, answer: bool) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(chat), tokenize=False, add_generation_prompt=answer, enable_thinking=enable_thinking
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
