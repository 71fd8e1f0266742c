"""Write tests/golden/chat.json: conversations as `transformers` renders them.

Run with a Python that has transformers: python scripts/golden_text.py
The templates are ours; they use what the published ones use.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FEATURES = """\
{%- macro turn(role, text) %}
[{{ role | upper }}] {{ text | trim }}
{% endmacro -%}
{%- set ns = namespace(count=0, seen_system=false) -%}
{%- if strftime_now is defined -%}
    {{ '' if strftime_now('%Y') | length == 4 else 'no clock' }}
{%- endif -%}
{%- for message in messages | selectattr('role', 'ne', 'system') %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if ns.count >= 4 %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {% generation %}
    {{ turn(message.role, message.content) }}
    {% endgeneration %}
    {%- for key, value in message.items() if key not in ('role', 'content') %}
{{ key }}={{ value | tojson(indent=4) }}
    {%- endfor %}
{%- endfor %}
{{ messages | tojson }} {{ ns.count }} {{ bos_token ~ eos_token }}
{%- if tools %}
{{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}
{%- endif %}
"""
STRICT = """\
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content ~ '\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' ~ (ns.system if loop.first else '') ~ message.content ~ ' [/INST]' }}
    {%- else %}
        {{- ' ' ~ message.content | trim ~ eos_token }}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\n' ~ message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- set function = call.function if call.function else call %}
            {{- '\n<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": ' }}
            {{- function.arguments | tojson ~ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' ~ message.content }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "features": FEATURES, "strict": STRICT, "tools": TOOLS}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wie ist das Wetter? <b>天気</b>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}},
}


def say(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    turns = [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(texts)
    ]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": say("Hi there")},
    {"messages": say("Hi", "Hello! ", "Who are you?"), "add_generation_prompt": True},
    {"messages": say("  spaces  \n", system="Be brief.")},
    {"messages": say("日本語 👍🏽", "はい", "naïve “quotes” & <tags>", system="")},
    {"messages": say("1", "2", "3", "4", "5", "6", "7"), "add_generation_prompt": False},
    {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    {"messages": say("Write a poem", "Roses are"), "continue_final_message": True},
    {
        "messages": [
            *say("weather?", system="Use tools."),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"sky": "clear"}', "tool_call_id": "call_1"},
        ],
        "tools": [WEATHER],
        "add_generation_prompt": True,
    },
    {"messages": [{"role": "user", "content": "with a name", "name": "Ann"}]},
    {"messages": say("{{ not_a_template }} {% raw %}", 'back\\slash "quoted"', "\t\n\r\n.")},
]


def chat() -> dict[str, Any]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    cases = []
    for name, template in TEMPLATES.items():
        for index, conversation in enumerate(CONVERSATIONS):
            if conversation.get("tools") and name != "tools":
                continue  # the library drops what the template does not read
            if name == "features" and conversation.get("continue_final_message"):
                continue  # it shows the messages twice, and the library then leaves its mark in
            case: dict[str, Any] = {"template": name, "conversation": index}
            try:
                case["text"] = tokenizer.apply_chat_template(
                    conversation["messages"],
                    tools=conversation.get("tools"),
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=conversation.get("add_generation_prompt", False),
                    continue_final_message=conversation.get("continue_final_message", False),
                )
            except Exception as error:
                case["error"] = str(error)
            cases.append(case)
    return {
        "templates": TEMPLATES,
        "conversations": CONVERSATIONS,
        "cases": cases,
    }


def write(name: str, value: Any) -> None:
    path = GOLDEN / name
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8")
    sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    write("chat.json", chat())
