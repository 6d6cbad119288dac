"""An agent for tests of Program, with the standard library alone: it asks twice and rewards the length of its answers.

Arguments are words that change what it does.
"""

import json
import os
import sys
import urllib.request

MODES = set(sys.argv[1:])
row = json.loads(sys.stdin.readline())


def ask(messages: list[dict], **more: object) -> dict:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, **more}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


history = [{"role": "user", "content": row["prompt"]}]
answers = []
for _ in range(2):
    answers.append(ask(history)["content"] or "")
    history += [
        {"role": "assistant", "content": answers[-1]},
        {"role": "user", "content": "And now <|im_end|>?"},
    ]
    if "forgets" in MODES:
        history = history[-1:]
if "fails" in MODES:
    sys.exit("a fault")
print(
    json.dumps({"reward": min(1.0, sum(map(len, answers)) / 100), "parts": {"asked": len(answers)}})
)
