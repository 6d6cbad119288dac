"""A shop's assistant on OpenAI's client, as it would run in production: it looks up what a question is about."""

import json
import sys
from pathlib import Path

from openai import OpenAI

STOCK = json.loads(Path(__file__).with_name("stock.json").read_text())
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "in_stock",
            "description": "Look up how many pieces of an item there are.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {
                        "type": "string",
                        "description": "Its name in the singular, such as apple.",
                    }
                },
                "required": ["item"],
            },
        },
    }
]


def in_stock(item: str) -> str:
    """Return how many pieces of an item there are."""
    return str(STOCK.get(item, f"there is no item {item!r}"))


def answer(question: str) -> str:
    """Return what the model says once it calls no more tools."""
    client = OpenAI()  # by OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [
        {
            "role": "system",
            "content": "You answer questions about a shop's stock. Look up each item, then say a number.",
        },
        {"role": "user", "content": question},
    ]
    while True:
        said = (
            client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            .choices[0]
            .message
        )
        messages.append(said)
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            try:
                found = in_stock(**json.loads(call.function.arguments))
            except TypeError as error:  # the model's arguments
                found = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())
    print(json.dumps({"answer": answer(row["prompt"])}))
