"""Makes plans in a process of its own, as a trainer does, for tests that hold SGLang and must not hold AWEX.

Standard input: JSON, layout name to the descriptions of its ranks. Standard output: JSON, layout name to the plan.
"""

import json
import sys

from megatron_support import bare_trainer, megatron_ready

from weftpub.receive import EngineDescription


def main() -> None:
    megatron_ready()
    from weftpub_adapters.awex import plan_publish

    plans = {}
    for name, ranks in json.load(sys.stdin).items():
        descriptions = [EngineDescription.model_validate(rank) for rank in ranks]
        settings = descriptions[0].settings
        config = settings["hf_config"]
        model, store = bare_trainer(config, settings["format"])
        plans[name] = plan_publish(model, store, config, descriptions).to_json()
    json.dump(plans, sys.stdout)


if __name__ == "__main__":
    main()
