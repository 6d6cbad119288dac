"""One conversation with an environment of verifiers 0.4, for ``Program``: ``shop`` is a module with a ``Taskset``."""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf


async def installed(
    self, script, env=None, **options
):  # the sandbox has no network to install a harness
    return [sys.executable, "-c", script]


async def play(row):
    """Play the task of a row, and print its reward with its parts as JSON."""
    vf.Runtime.prepare_uv_script = installed
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "shop"}, "agent": agent}))
    model = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    (task,) = env.taskset.include(idx=[str(row["task"])])
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext("any", model))
    assert episode.ok, episode.errors or episode.traces[-1].errors
    agents = len(episode.traces)
    assert agents == 1, (
        f"an episode of {agents} agents; a conversation has one reward: use samples_per_prompt"
    )
    print(json.dumps({"reward": episode.traces[0].reward, "parts": episode.traces[0].metrics}))


asyncio.run(play(json.loads(sys.stdin.readline())))
