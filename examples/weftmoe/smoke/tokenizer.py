"""A tokenizer of single characters in Hugging Face's format, with a chat template that adds nothing."""

from pathlib import Path
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["CHARACTERS", "END", "PAD", "make_tokenizer"]

CHARACTERS = "0123456789+-*= "
PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_tokenizer(directory: Path, vocabulary: int) -> Any:
    """Write the tokenizer's files and return it.

    Args:
        directory: the model's.
        vocabulary: rows of the model's embedding; those without a character are never drawn by a trained model.

    Raises:
        ConfigError: the vocabulary has no room for the characters.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, UNKNOWN, END, *CHARACTERS]
    if vocabulary < len(tokens):
        raise ConfigError(f"smoke.vocab is {vocabulary}; the characters need {len(tokens)}")
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, unk_token=UNKNOWN, eos_token=END, clean_up_tokenization_spaces=False
    )
    made.chat_template = _TEMPLATE
    made.save_pretrained(str(directory))
    return made
