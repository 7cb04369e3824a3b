"""Generated arithmetic in DAPO-Math-17k's schema: sums that a tiny model can learn, and still get wrong.

The question is ``a+b=``, each operand of 1 to `digits` digits; the answer is the sum. One character is one token of the
smoke's tokenizer, so a completion is a few tokens long.
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
    """Different sums, in an order and choice that follow from the seed. Short operands are as likely as long ones.

    Args:
        count: how many.
        seed: of the choice.
        digits: most digits of an operand.

    Raises:
        ConfigError: there are not twice as many different sums as asked for; drawing them would take long.
    """
    numbers = 10**digits
    if count > numbers * numbers // 2:
        raise ConfigError(
            f"{count} sums of operands with up to {digits} digits: ask for at most {numbers * numbers // 2}"
        )
    draw = random.Random(seed)
    seen: set[tuple[int, int]] = set()
    while len(seen) < count:
        sum_ = (draw.randrange(10 ** draw.randint(1, digits)), draw.randrange(10 ** draw.randint(1, digits)))
        if sum_ in seen:
            continue
        seen.add(sum_)
        yield {
            "data_source": ARITHMETIC,
            "prompt": [{"role": "user", "content": f"{sum_[0]}+{sum_[1]}="}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(sum(sum_)), "style": "exact"},
            "extra_info": {"index": f"sum-{len(seen) - 1}"},
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
    part = path.with_name(path.name + ".part")  # half of it, on a full disk, would be taken for all at the next start
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)
