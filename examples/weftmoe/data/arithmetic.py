"""Generated arithmetic in DAPO-Math-17k's schema: sums that a tiny model can learn, and still get wrong.

The question is ``a+b=`` with one fixed number of digits an operand; the answer is the sum. One character is one token
of the smoke's tokenizer, so a completion is two or three tokens long.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["ARITHMETIC", "arithmetic_rows", "write_arithmetic"]

ARITHMETIC = "weftmoe_arithmetic"


def arithmetic_rows(count: int, *, seed: int, digits: int = 2) -> Iterator[dict[str, Any]]:
    """Different sums, in an order and choice that follow from the seed.

    Args:
        count: how many.
        seed: of the choice.
        digits: of each operand.

    Raises:
        ConfigError: there are fewer different sums than asked for.
    """
    base = 10**digits
    if count > base * base:
        raise ConfigError(f"{count} sums of {digits}-digit operands: there are only {base * base}")
    for index, number in enumerate(random.Random(seed).sample(range(base * base), count)):
        left, right = divmod(number, base)
        yield {
            "data_source": ARITHMETIC,
            "prompt": [{"role": "user", "content": f"{left:0{digits}d}+{right:0{digits}d}="}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(left + right), "style": "exact"},
            "extra_info": {"index": f"sum-{index}"},
        }


def write_arithmetic(path: Path, count: int, *, seed: int, digits: int = 2) -> None:
    """Write such rows as JSON lines (no package needed) or, by the file's name, as parquet (needs pyarrow)."""
    rows = list(arithmetic_rows(count, seed=seed, digits=digits))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise ConfigError(f"{path}: writing parquet needs pyarrow; install pyarrow or write .jsonl") from None
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
