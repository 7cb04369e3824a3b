"""One worker process of the reward pool: `python -m weftmoe.reward.worker MEMORY_MIB SECONDS`.

A JSON object a line on standard input, {"completion", "ground_truth"}; an answer a line: {"reward"}, or {"late"} or
{"error"} with the reason. The process ends with its input. Its first line says that it is ready, or what is missing.
"""

import json
import resource
import sys

from weftmoe.reward.math import LateAnswer, load_verifier, math_reward
from weftpub.errors import ConfigError

__all__ = ["main"]


def main() -> None:
    """Serve until standard input ends."""
    memory, seconds = (int(argument) for argument in sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_AS, (memory << 20, memory << 20))
    answers = sys.stdout
    sys.stdout = sys.stderr  # a library that prints must not answer for us
    try:
        load_verifier()
    except ConfigError as error:
        print(json.dumps({"missing": str(error)}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"reward": math_reward(job["completion"], job["ground_truth"], seconds=seconds)}
        except LateAnswer as error:
            answer = {"late": str(error)}
        except Exception as error:  # what a model wrote may raise anything in a parser; it is a wrong answer
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
