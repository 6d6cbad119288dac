"""An agent on OpenAI's client: a tool of its own, then a stream; its reward is what it has read."""

import json
import sys

from openai import OpenAI

row = json.loads(sys.stdin.readline())
client = OpenAI(max_retries=0)
number = {"type": "number"}
parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
tools = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": parameters},
    }
]
messages = [
    {"role": "system", "content": "You may call add."},
    {"role": "user", "content": row["prompt"]},
]
while True:
    said = client.chat.completions.create(
        model="any", messages=messages, tools=tools, temperature=0.3
    )
    messages.append(said.choices[0].message)
    for call in said.choices[0].message.tool_calls or []:
        content = str(sum(json.loads(call.function.arguments).values()))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    if said.choices[0].finish_reason != "tool_calls":
        break
last = [{"role": "user", "content": "And in short?"}]
stream = client.chat.completions.create(
    model="any", messages=last, stream=True, stop=["."], max_tokens=5
)
chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
text = "".join(chunk.delta.content or "" for chunk in chunks)
known = [model.id for model in client.models.list()]
print("a line of a log")
print(
    json.dumps(
        {
            "reward": 0.5,
            "parts": {"total": said.usage.total_tokens},
            "detail": f"{text} {chunks[-1].finish_reason} {known}",
        }
    )
)
