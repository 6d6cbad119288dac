"""Training with an agent that is a program of the user's: exact, resumed after a kill, and nothing left behind."""

from pathlib import Path

import psutil
import pytest

pytest.importorskip("resource", reason="forks and POSIX signals")

from rocm_ext.recipes.grpo_rocm import main

from rocm_ext.rl.records import to_sample
from tests.kit.forks import forked
from tests.kit.grpo_runs import assert_equal, lines
from tests.kit.tiny import metrics
from tests.recipes.test_conversations import computed_again, run
from tests.recipes.test_conversations import write as write  # fixtures
from tests.recipes.test_examples import example as example
from tests.recipes.test_examples import model as model
from tests.recipes.test_raft import kill_at_record

AGENT = Path(__file__).parents[1] / "kit/agent.py"


@pytest.fixture
def program(write):
    """Return a function that writes the config of a run with the agent of the tests, and its arguments."""

    def program(name, *arguments, **changes):
        command = ["python", str(AGENT), *arguments]
        environment = {"_component_": "rocm_ext.environments.Program", "command": command}
        return write(name, environment=environment, **{"verify_timeout": 60, **changes})

    return program


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("forgets", [False, True])
def test_the_model_is_trained_on_the_tokens_that_it_sampled(program, forgets):
    """Where the agent leaves out what was said, the history is rendered anew, and the conversation has two rows."""
    out = run(program("run", *["forgets"] * forgets, steps=1, truncated="keep"))
    assert max(metrics(out, "mismatch_max")) < 1e-4, "the trainer computes them behind the same tokens"
    assert metrics(out, "rewritten") == [pytest.approx(float(forgets), abs=0.3)]
    assert metrics(out, "reward/asked") == [2]
    samples = [line for line in lines(out / "samples.jsonl") if line["finish_reason"] == "stop"]
    assert samples
    for line in samples:
        rows = list(to_sample(line).sequences([1, 2, 3]))
        assert len(rows) == 1 + forgets
        own = [i for ids, mine, _ in rows for i, is_own in zip(ids, mine, strict=True) if is_own]
        assert own == line["tokens"]
        assert [message["role"] for message in line["messages"]] == ["assistant", "user", "assistant"]
        assert "<|im_end|>" not in line["messages"][1]["content"], "it cannot end its turn"


@pytest.mark.wide
def test_killed_and_resumed(program):
    whole = run(program("whole"), prepare=computed_again)
    path, kills = program("killed"), kill_at_record("turns.jsonl", 20)
    assert forked(main, path, prepare=lambda: (computed_again(), kills()))[0] == -9
    left = [p for p in psutil.process_iter(["cmdline"]) if str(AGENT.name) in " ".join(p.info["cmdline"] or ())]
    psutil.wait_procs(left, timeout=30)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], "the kernel ends programs"
    assert_equal(run(path, "resume_from_checkpoint=True", prepare=computed_again), whole)


@pytest.mark.wide
def test_a_program_that_fails_ends_the_run_with_its_last_words(program):
    code, said = forked(main, program("fails", "fails", steps=1, max_error_share=0.1))
    assert code == 1
    assert "ended with status 1: a fault" in said
    assert "Traceback" not in said


@pytest.mark.wide
def test_the_example(example):
    pytest.importorskip("openai")
    small = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8, "eval_prompts": None}
    folder, run = example("agent", main, max_environment_tokens=1500, **small)
    run()
    for line in lines(folder / "outputs/agent/samples.jsonl"):
        system, question, *_ = line["messages"]
        assert (system["role"], question["role"]) == ("system", "user")
        assert question["content"] in (folder / "rows.jsonl").read_text()
