"""Training batches from a text: one token per byte, windows drawn by a seed."""

import torch

from weftpub.errors import ConfigError

__all__ = ["ByteCorpus"]


class ByteCorpus:
    """Random windows of a text as (tokens, labels), both int64 [batch, sequence]; the seed decides which."""

    def __init__(self, text: bytes, *, batch: int, sequence: int, seed: int) -> None:
        """Raise ConfigError for a text that does not fill one window and its next byte."""
        if len(text) < sequence + 1:
            raise ConfigError(
                f"the text has {len(text)} bytes; one window needs {sequence + 1}. Give a longer one with --text"
            )
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)
        self._batch = batch
        self._sequence = sequence
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch; labels are the tokens one byte later."""
        last = len(self._bytes) - self._sequence
        starts = torch.randint(0, last, (self._batch,), generator=self._generator)
        windows = torch.stack([self._bytes[start : start + self._sequence + 1] for start in starts.tolist()])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
