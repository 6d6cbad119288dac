"""A shop's agent: the model calls its tool until it answers. ``rocm-ext pocket --tools`` puts it beside the model.

It is a program as you may have one, with the standard library alone, and knows nothing of training: it reads a line of
JSON with a question, asks a model by OpenAI's chat completions, and prints the answer as JSON.
"""

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

DESCRIPTION = "Look up how many pieces of an item are on a shelf."
PARAMETERS = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "shelf": {"type": "string"}},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "stock", "description": DESCRIPTION, "parameters": PARAMETERS},
    }
]


def ask(messages: list[dict]) -> dict:
    """Return the model's next message."""
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    body = json.dumps({"model": "any", "messages": messages, "tools": TOOLS})
    with urlopen(
        Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(), headers)
    ) as response:
        return json.load(response)["choices"][0]["message"]


def main() -> None:
    """Answer the question on the standard input from the stock, whose file the command names."""
    stock = json.loads(Path(sys.argv[1]).read_text())
    messages = [{"role": "user", "content": json.loads(input())["prompt"]}]
    said = ask(messages)
    while calls := said.get("tool_calls"):
        messages.append(said)
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            place = f"{arguments.get('item')}{arguments.get('shelf')}"
            pieces = stock.get(place, "unknown")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(pieces)})
        said = ask(messages)
    print(json.dumps({"answer": said["content"]}))


if __name__ == "__main__":
    main()
