"""Tools and chat template for tests with `tool_server`."""

from __future__ import annotations

from typing import Any

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n<tool_call>{}</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Begins the reasoning, unless it is switched off or the model is to begin it.
THINKING_TEMPLATE = TOOL_TEMPLATE.replace(
    "{{ message.content }}", "<think>{{ message.reasoning_content }}</think>{{ message.content }}"
).replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif not model_begins %}<think>\n{% endif %}{% endif %}",
)
# Arguments short enough for a random model to complete.
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Bern"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "description": "The time of day"}}
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
