"""An agent for tests of Program, with the standard library alone: it asks twice, and different answers get different
rewards, in [0, 1).

Arguments are words that change what it does.
"""

import json
import os
import sys
import urllib.request
import zlib

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
reward = zlib.crc32("\n".join(answers).encode()) / 2**32
print(json.dumps({"reward": reward, "parts": {"asked": len(answers)}}))
