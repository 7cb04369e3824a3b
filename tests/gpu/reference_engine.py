"""An SGLang engine that loads directories by SGLang's own loader and answers greedily: the yardstick of a publish.

Standard input: JSON lines {"load": directory, "prompts": [[...]], "tokens": n}. Standard output: {"tokens": [[...]]}.
"""

import json
import os
import sys


def main() -> None:
    os.environ["SGLANG_PLUGINS"] = "none-of-them"
    arguments = json.loads(sys.argv[1])
    arguments.update(load_format="auto", enable_memory_saver=False, mem_fraction_static=0.2, max_total_tokens=4096)
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**arguments)
    loaded = arguments["model_path"]
    for line in sys.stdin:
        request = json.loads(line)
        if request["load"] != loaded:
            success, message = engine.update_weights_from_disk(request["load"])[:2]
            if not success:
                raise RuntimeError(f"{request['load']}: {message}")
            loaded = request["load"]
        sampling = {"max_new_tokens": request["tokens"], "temperature": 0, "ignore_eos": True}
        found = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in request["prompts"]]
        print(json.dumps({"tokens": [list(answer["output_ids"]) for answer in found]}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
