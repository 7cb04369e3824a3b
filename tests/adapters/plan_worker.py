"""Makes plans in a process of its own, as a trainer does, for tests that hold SGLang and must not hold AWEX.

Standard input: JSON, layout name to the descriptions of its ranks. Standard output: JSON, layout name to the plan.
"""

import json
import sys

from megatron_support import megatron_ready

from weftpub.receive import EngineDescription
from weftpub.store import ExpertStore


def main() -> None:
    megatron_ready()
    from weftpub_adapters.awex import plan_publish
    from weftpub_adapters.megatron import Qwen3MoeFields, build_model

    plans = {}
    for name, ranks in json.load(sys.stdin).items():
        descriptions = [EngineDescription.model_validate(rank) for rank in ranks]
        settings = descriptions[0].settings
        fields = Qwen3MoeFields.from_hf(settings["hf_config"])
        store = ExpertStore(
            range(fields.layers),
            range(fields.experts),
            fields.hidden,
            fields.intermediate,
            format=settings["format"],
        )
        plans[name] = plan_publish(build_model(fields), store, settings["hf_config"], descriptions).to_json()
    json.dump(plans, sys.stdout)


if __name__ == "__main__":
    main()
