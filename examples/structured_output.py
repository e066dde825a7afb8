"""Generate JSON that matches a schema: a grammar masks every token that would break it."""

import json
import os

from chairlift import LLM, SamplingParams, Structure

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "height_m": {"type": "integer", "minimum": 0, "maximum": 9000},
    },
    "required": ["name", "height_m"],
    "additionalProperties": False,
}

llm = LLM(os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m"))
params = SamplingParams(temperature=0, max_tokens=100, structure=Structure.json(SCHEMA))
result = llm.chat([{"role": "user", "content": "Describe a mountain as JSON."}], params, use_tqdm=False)[0]
mountain = json.loads(result.outputs[0].text)
print(f"{mountain['name']}: {mountain['height_m']} m")
