"""The examples run as their pages say, on small random models."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from rocm_ext.recipes import grpo_rocm, lora_finetune_rocm, raft_rocm

from rocm_ext import cli
from rocm_ext.data.encoder import HFTokenizer
from rocm_ext.verifiers import Verdict
from tests.kit.families import write_family
from tests.kit.forks import forked
from tests.kit.servers import Fake, Sampler, Vllm
from tests.kit.tiny import metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"hardware": "cpu", "seed": 0}  # what the tests change beside the model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random Qwen3 with a tokenizer for any text and a chat template."""
    return write_family(
        tmp_path_factory.mktemp("examples") / "model", "qwen3", max_position_embeddings=4096
    )


@pytest.fixture
def example(tmp_path, model, monkeypatch):
    """Copy an example, go to its folder, and return a function that starts its config there."""

    def prepare(name: str, main, **changes):
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        (path,) = folder.glob("*.yaml")
        overrides = SMALL | {"model.checkpoint_dir": model, "model.lora_rank": 2} | changes

        def run(expected: int = 0, **more) -> str:
            code, messages = forked(
                main, path, *(f"{key}={value}" for key, value in (overrides | more).items())
            )
            assert code == expected, messages
            return messages

        return folder, run

    yield prepare
    sys.modules.pop("sql_verifier", None)


def test_own_rows(example):
    folder, run = example("own_rows", lora_finetune_rocm.main, epochs=1)
    run()
    out = folder / "outputs" / "own_rows"
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert len(metrics(out)) == 5  # 20 of 24 rows, 4 a step
    assert len(metrics(out, "val_loss")) == 1


@pytest.mark.wide
def test_own_verifier(example):
    """A random model is never right, and the run says so."""
    folder, run = example(
        "own_verifier", raft_rocm.main, cycles=1, samples_per_prompt=2, max_new_tokens=8
    )
    for rows in ("rows.jsonl", "heldout.jsonl"):
        assert cli.main(["verify", "--verifier", "sql_verifier.SQLQuery", "--data", rows]) == 0
    assert "nothing to train on. 24 answers: 24 UNPARSED" in run(expected=1, verify_workers=1)
    verdicts = [json.loads(line) for line in (folder / "outputs/sql_raft/verdicts.jsonl").open()]
    assert [each["detail"] for each in verdicts if each["phase"] == "sample"] == [
        "no ```sql block"
    ] * 24


@pytest.fixture
def sql(monkeypatch):
    """The verifier, and its first row, whose answer is Ben and Cleo."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_verifier"))
    from sql_verifier import SQLQuery

    yield (
        SQLQuery(seconds=2),
        json.loads((EXAMPLES / "own_verifier" / "rows.jsonl").open().readline()),
    )
    sys.modules.pop("sql_verifier", None)


OSLO = "select name from customers where city in ('Oslo')"


@pytest.mark.wide(always=5)
@pytest.mark.parametrize(("answer", "verdict"), [
    ("SELECT name FROM customers WHERE city = 'Oslo' ORDER BY name DESC", Verdict.CORRECT),
    (f"First:\n```sql\nSELECT 1\n```\nNo:\n```SQL\n{OSLO}\n```", Verdict.CORRECT),
    ("select name from customers", Verdict.WRONG),
    ("```sql\nDROP TABLE customers\n```", Verdict.WRONG),
    ("```sql\nATTACH DATABASE 'stolen.db' AS x\n```", Verdict.WRONG),
    ("```sql\nUPDATE customers SET city = 'Oslo'\n```", Verdict.WRONG),
    ("select name from customers where city = 'Oslo'; drop table customers", Verdict.WRONG),
    ("select random()", Verdict.WRONG),
    ("select hex(randomblob(1000000000))", Verdict.WRONG),
    ("with recursive t(n) as (select 1 union all select n + 1 from t) select n from t", Verdict.WRONG),
    ("with recursive t(n) as (select 1 union all select n + 1 from t) select count(*) from t", Verdict.TIMEOUT),
    ("select '\ud800'", Verdict.WRONG),
    ("```sql\n```", Verdict.WRONG),
    ("It is Ben and Cleo.", Verdict.UNPARSED),
])  # fmt: skip
def test_the_sql_verifier_judges(sql, answer, verdict, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verifier, row = sql
    result = verifier(answer, row)
    assert result.verdict == verdict, result
    assert result.reward == (verdict == Verdict.CORRECT)
    assert not list(tmp_path.iterdir())


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("columns", "says"), [
    ("printf('%.*c', 9999999, 'a')", "MemoryError"),  # 1 GB in 100 rows
    (", ".join(["hex(zeroblob(999999))"] * 100), "MemoryError"),  # 20 GB
    ("printf('%.*c', 99999, n)", "printed more than"),
    ("sum(instr(printf('%.*c', 2000000, 'a'), printf('%.*c', 1000000, 'a') || n))", "more than 2 s"),
])  # fmt: skip
def test_what_a_query_takes_is_bounded(sql, columns, says):
    """SQLite's own limits count instructions, and bound each value by itself."""
    verifier, row = sql
    hundred = "with recursive t(n) as (select 1 union all select n + 1 from t limit 100)"
    result = verifier(f"{hundred} select {columns} from t", row)
    assert result.verdict in (Verdict.WRONG, Verdict.TIMEOUT)
    assert says in result.detail


def test_the_sql_verifier_refuses_bad_rows(sql):
    verifier, row = sql
    for change, says in (({"answer": "SELEC 1"}, "syntax error"), ({"tables": "nothing"}, "syntax error"),
                         ({"answer": None}, "field 'answer' is missing")):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            verifier.check_row(row | change)


@pytest.mark.wide
def test_code_grpo(example):
    small = {
        "steps": 1,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_new_tokens": 8,
        "eval_every_n_steps": 1,
    }
    folder, run = example("code_grpo", grpo_rocm.main, **small)
    for rows in ("tasks.jsonl", "heldout.jsonl"):
        assert (
            cli.main(["verify", "--verifier", "PythonTests", "--data", rows, "--workers", "1"]) == 0
        )
    run(verify_workers=1)
    lines = [json.loads(line) for line in (folder / "outputs/code_grpo/verdicts.jsonl").open()]
    assert len(lines) == 4 + 3 * 2  # of the step; of 3 held-out tasks before and after it


@pytest.mark.wide
def test_two_machines(example, model, tmp_path):
    """With a server that follows vLLM's rules on this machine, and prompts from a file."""
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = {
        "_component_": "rocm_ext.data.prompt_dataset",
        "source": str(tmp_path / "prompts.jsonl"),
    }
    folder, run = example("two_machines", grpo_rocm.main)
    path = folder / "two_machines.yaml"
    cfg = yaml.safe_load(path.read_text())
    assert (cfg["max_staleness"], cfg["engine"]["_component_"]) == (
        1,
        "rocm_ext.sampling.OpenAIEngine",
    )
    cfg |= {"prompts": prompts, "eval_prompts": None, "steps": 2, "prompts_per_step": 4, "samples_per_prompt": 2,
            "max_new_tokens": 6, "verify_workers": 1}  # fmt: skip
    path.write_text(yaml.safe_dump(cfg))
    server = Fake(
        Vllm(Sampler(model, HFTokenizer(str(model / "tokenizer.json"))), model=str(model))
    )
    try:
        run(**{"engine.urls": f"[{server.url}/v1]"})
        assert len((folder / "outputs/two_machines/samples.jsonl").read_text().splitlines()) == 16
        assert any(verb == "load" for verb, _ in server.adapter_calls())
    finally:
        server.die()


@pytest.mark.wide
def test_agent(example):
    pytest.importorskip("openai")
    small = {
        "steps": 1,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_new_tokens": 8,
        "eval_prompts": None,
    }
    folder, run = example("agent", grpo_rocm.main, max_environment_tokens=1500, **small)
    run()
    for line in map(json.loads, (folder / "outputs/agent/samples.jsonl").open()):
        system, question, *_ = line["messages"]
        assert (system["role"], question["role"]) == ("system", "user")
        assert question["content"] in (folder / "rows.jsonl").read_text()
