"""Samples have the probabilities of the model under training, depend only on their seed, and fit into memory."""

import copy
import gc
import itertools
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torchtune.models.gemma2 import gemma2
from torchtune.models.llama3_1 import llama3_1, lora_llama3_1
from torchtune.models.mistral import mistral
from torchtune.models.phi3 import phi3
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules import RMSNorm
from transformers.generation import logits_process as hf

from rocm_ext.base.errors import UserError
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.attention import SlotCache, Slots
from rocm_ext.model.lora import (
    Dora,
    adapter_parameters,
    adapters,
    adopt,
    init_adapters,
    merged_linear,
)
from rocm_ext.model.native.decoder import NativeSampler, native
from rocm_ext.model.sampler import sampler_of
from rocm_ext.model.token_rows import TokenRows, attach, is_tied
from rocm_ext.plan.costs import CostCounter
from rocm_ext.sampling import LocalEngine, RequestQueue, Sampling, sample_seed
from rocm_ext.sampling.local import LocalSession
from rocm_ext.sampling.slots import draw, uniforms
from tests.kit.forks import several_ranks, succeed_on_ranks
from tests.kit.samples import Words, answers_of, ask, prompts, train

SHAPE = {"vocab_size": 331, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64,
         "intermediate_dim": 96, "max_seq_len": 1024, "norm_eps": 1e-6}  # fmt: skip
GIB = 2**30
ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "output_proj"]
CPU = torch.device("cpu")


@torch.no_grad()
def model(
    family: str = "qwen2", lora: str | None = None, adapted=tuple(ALL_PROJECTIONS), **changes
):
    """Make torchtune's decoder with random weights, sharp enough that attention matters, and optional adapters."""
    torch.manual_seed(0)
    shape = SHAPE | changes
    if lora is None:
        decoder = {"qwen2": qwen2, "llama": llama3_1, "mistral": mistral}[family](**shape)
    else:
        build = {"qwen2": lora_qwen2, "llama": lora_llama3_1}[family]
        more = {"lora_rank": 4, "lora_alpha": 6, "use_dora": lora == "dora"}
        decoder = build(list(adapted), "v_proj" in adapted, **shape, **more)
        adopt(decoder, {"lora_attn_modules": list(adapted)})
    for name, parameter in decoder.named_parameters():
        parameter.normal_(std=0.1).add_(1.0 if "norm" in name else 0.0)
    if lora is not None:
        init_adapters(decoder, 0, CPU)
        for _, layer in adapters(decoder):
            layer.lora_b.weight.normal_(std=0.2)
            layer.rslora = lora == "rslora"
            if isinstance(layer, Dora):
                layer.initialize_dora_magnitude()
                layer.magnitude.mul_(1 + 0.2 * torch.randn_like(layer.magnitude))
    return native(decoder).eval()


def with_rows(decoder):
    """Put rows of two tokens into ``decoder``, which differ from its own."""
    tied = decoder.output if is_tied(decoder) else None
    for layer in (decoder.tok_embeddings, *([] if tied else [decoder.output])):
        rows = TokenRows([3, 60], layer).float()
        rows.weight.data.normal_(std=0.1)
        attach(rows, layer, tied)
    return decoder


def sample(
    decoder, requests, sampling, tokenizer=None, slots=None, memory=GIB, merge=None, **options
):
    """Sample and return completions by prompt and sample."""
    with sampler_of(decoder, merge) as laid_out:
        session = LocalSession(laid_out, tokenizer or Words(), lambda: memory, slots, **options)
        completions = answers_of(session, requests, sampling)
    assert len(completions) == len(requests)
    return completions


def local_engine(decoder, tokenizer=None, **options) -> LocalEngine:
    return LocalEngine(
        decoder=decoder, tokenizer=tokenizer or Words(), free_memory=lambda: GIB, **options
    )


# ---- the same log-probs as a forward pass


@torch.no_grad()
def teacher_forced(decoder, completion, temperature: float = 1.0) -> torch.Tensor:
    """Compute log-probs of an answer's tokens with torchtune's own forward pass."""
    prompt = completion.request.tokens
    logits = decoder(torch.tensor([[*prompt, *completion.tokens[:-1]]]))[0, len(prompt) - 1 :]
    return (
        (logits.float() / temperature)
        .log_softmax(-1)
        .gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
    )


@pytest.mark.parametrize(
    ("family", "lora", "sampling"),
    [
        ("qwen2", "dora", Sampling(20)),
        ("llama", "lora", Sampling(20, temperature=0.6, top_k=40, top_p=0.9, min_p=0.02)),
        ("mistral", None, Sampling(20, temperature=0)),
        ("qwen2", "rslora", Sampling(20, temperature=0.6, logprobs_temperature=0.6)),
        (
            "qwen2",
            None,
            Sampling(
                20, temperature=1.7, top_k=40, top_p=0.9, min_p=0.02, logprobs_temperature=1.7
            ),
        ),
        ("mistral", None, Sampling(20, temperature=1, logprobs_temperature=0.6)),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_asked_temperature(family, lora, sampling):
    decoder = model(family, lora)
    answers = sample(decoder, ask(prompts(1, 9, 40), 4), sampling)
    found = torch.tensor(
        [value for completion in answers.values() for value in completion.logprobs]
    )
    at = sampling.logprobs_temperature
    expected, plain = (
        torch.cat([teacher_forced(decoder, c, t) for c in answers.values()]) for t in (at, 1.0)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert at == 1 or (found - plain).abs().max() > 0.2
    same = sample(decoder, ask(prompts(1, 9, 40), 4), replace(sampling, logprobs_temperature=1.0))
    assert {key: c.tokens for key, c in same.items()} == {
        key: c.tokens for key, c in answers.items()
    }


@pytest.mark.parametrize(
    "adapted", [ALL_PROJECTIONS, ["q_proj"], ["k_proj", "output_proj"]], ids=str
)
@pytest.mark.parametrize(("family", "lora"), [("qwen2", "dora"), ("llama", "lora")])
def test_an_adapter_beside_the_weights_gives_the_same(family, lora, adapted):
    decoder = model(family, lora, adapted)
    for completion in sample(decoder, ask(prompts(1, 9), 4), Sampling(12), merge=False).values():
        found = torch.tensor(completion.logprobs)
        torch.testing.assert_close(found, teacher_forced(decoder, completion), rtol=0, atol=1e-5)


@pytest.mark.parametrize("merge", [None, True])
def test_a_bf16_model_samples_what_it_would_be_trained_on(merge):
    decoder = model("qwen2", "lora")
    for name, parameter in decoder.named_parameters():
        if ".lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    exact = copy.deepcopy(decoder).float()
    completions = sample(decoder, ask(prompts(1, 9, 40), 8), Sampling(20), merge=merge).values()
    gaps = torch.cat([torch.tensor(c.logprobs) - teacher_forced(exact, c) for c in completions])
    assert 0 < gaps.abs().max() < 0.05


# ---- a sample follows from its seed
TEXTS = prompts(5, 1, 2, 16, 17, 33, 15, 250, 400, 40)
WARM = Sampling(24, temperature=0.9, top_p=0.97)


@pytest.fixture(scope="module")
def small():
    return with_rows(model("qwen2", "lora"))


@pytest.fixture(scope="module")
def reference(small):
    """8 answers to each of ``TEXTS``, all drawn at once."""
    answers = sample(small, ask(TEXTS, 8), WARM)
    assert len({tuple(c.tokens) for c in answers.values()}) > 70
    assert len({len(c.tokens) for c in answers.values()}) > 10
    return answers


def assert_same(found, reference) -> None:
    """Compare tokens and log-probs bit for bit."""
    for key, completion in found.items():
        expected = reference[key]
        assert (completion.tokens, completion.logprobs) == (expected.tokens, expected.logprobs), key
        assert (completion.text, completion.finish_reason) == (
            expected.text,
            expected.finish_reason,
        )


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_samples_of_a_wide_model_do_not_depend_on_slots(two_threads):
    """MKL sums products of 896 columns in blocks, on several threads, and differently for other numbers of rows."""
    wide = model(num_layers=1, num_heads=14, embed_dim=896)
    requests = ask(prompts(9, 200), 64)
    assert_same(
        sample(wide, requests, Sampling(4), slots=16),
        sample(wide, requests, Sampling(4), slots=128),
    )


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chosen=st.lists(st.integers(0, 79), min_size=1, max_size=40, unique=True),
    slots=st.sampled_from([None, 16, 17, 19, 24]),
)
@example(chosen=[3], slots=None)
@example(chosen=[*range(80)], slots=1)
@example(chosen=[*range(80)], slots=100)
def test_samples_do_not_depend_on_slots_order_or_others(small, reference, chosen, slots):
    requests = ask(TEXTS, 8)
    assert_same(sample(small, [requests[i] for i in chosen], WARM, slots=slots), reference)


def test_ranks_take_prompts_as_they_have_slots(small, reference):
    """Of two ranks, one steps once for all the steps of the other; one prompt is left for it alone."""
    taken = itertools.count(1)
    ranks = [SimpleNamespace(rank=rank, world=2, counter=lambda: taken.__next__) for rank in (0, 1)]
    with sampler_of(small) as decoder:
        sessions = [LocalSession(decoder, Words(), lambda: GIB, slots=16) for _ in ranks]
        queues = [RequestQueue(ask(TEXTS, 8), each, {"3": 1}) for each in ranks]
        slow = sessions[1].generate(queues[1], WARM)
        first = next(slow)
        found = [
            answers_of(sessions[0], queues[0], WARM),
            {first.request.key: first} | {c.request.key: c for c in slow},
        ]
    for answers in found:
        assert_same(answers, reference)
        assert {prompt for prompt, _ in answers} == {
            prompt for prompt, sample in answers if sample == 0
        }
    assert found[0].keys() | found[1].keys() == reference.keys()
    assert len(found[0]) + len(found[1]) == len(reference)
    assert {prompt for prompt, _ in found[1]} == {"3", "0"}  # 16 slots
    assert queues[0].share == 40


def test_another_cycle_draws_other_samples(small, reference):
    """Seeds differ, and fit into 63 bits."""
    other = sample(small, ask(TEXTS, 8, cycle=1), WARM)
    assert sum(other[key].tokens == reference[key].tokens for key in reference) < 8
    parts = itertools.product((0, 1, 11), (0, 1, 11, "eval"), ("", "1", "11"), (-1, 0, 1, 11))
    seeds = {sample_seed(*each) for each in parts}
    assert len(seeds) == 3 * 4 * 3 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


# ---- random numbers
def split_mix(seed: int, position: int) -> float:
    """Steele, Lea and Flood's reference implementation, in Python."""
    mask = 2**64 - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / 2**53


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31)), min_size=1, max_size=50)
)
def test_uniforms_are_split_mix(pairs):
    seeds, positions = torch.tensor(pairs).T
    assert uniforms(seeds, positions).tolist() == [split_mix(*pair) for pair in pairs]


# ---- drawing
def assert_chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Fail on counts that one in 100,000 correct samplers would exceed, by Wilson and Hilferty's approximation."""
    expected = counts.sum() * probabilities
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    assert ((observed - expected) ** 2 / expected).sum() < limit


def exact_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return [v] probabilities in fp64, from transformers' processors in transformers' order."""
    chain = [hf.TemperatureLogitsWarper(float(sampling.temperature))]
    chain += [hf.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    chain += [hf.TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    chain += [hf.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    scores = logits.double()[None]
    for warper in chain:
        scores = warper(None, scores)
    return scores[0].softmax(-1)


SAMPLINGS = [
    {}, {"temperature": 0.7}, {"temperature": 1.5}, {"top_k": 1}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, {"temperature": 1.5, "top_k": 100, "top_p": 0.95, "min_p": 0.1},
    {"top_p": 0.5, "min_p": 0.3}, {"temperature": 0.7, "top_k": 50, "logprobs_temperature": 0.7},
    {"temperature": 1.5, "logprobs_temperature": 0.5},
]  # fmt: skip
# Spread of the logits. Flat over 1,700 tokens: the 1,024 most probable ones hold less than 0.8
VOCABULARIES = {"320": (320, 2.0), "1700": (1700, 2.0), "1700, flat": (1700, 0.3)}


# every setting with every vocabulary; large ones matter to top_p, which sorts, and their other cases are slow
CASES = [
    pytest.param(
        name, options, id=f"{options}-{name}",
        marks=() if name == "320" or (name == "1700" and (not options or "top_p" in options)) else pytest.mark.wide,
    )
    for options in SAMPLINGS
    for name in VOCABULARIES
]  # fmt: skip


@pytest.mark.wide(always=5)
@pytest.mark.parametrize(("vocabulary", "options"), CASES)
def test_tokens_are_drawn_with_their_exact_probabilities(vocabulary, options):
    size, spread = VOCABULARIES[vocabulary]
    sampling = Sampling(1, **options)
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(size))
    probabilities = exact_probabilities(logits, sampling)
    n = 8_000
    rows = logits.expand(n, -1)
    # with equally spaced instead of random numbers every token comes up n p times, up to its two ends
    tokens, logprobs = draw(rows, (torch.arange(n).double() + 0.5) / n, sampling)
    counts = torch.bincount(tokens, minlength=size).double()
    assert (counts - n * probabilities).abs().max() < 1.05
    assert counts[probabilities == 0].sum() == 0
    torch.testing.assert_close(
        logprobs,
        (logits / sampling.logprobs_temperature).log_softmax(-1)[tokens],
        rtol=0,
        atol=1e-5,
    )

    tokens, _ = draw(
        rows, uniforms(torch.arange(n) * 7919, torch.zeros(n, dtype=torch.int64)), sampling
    )
    if sampling.top_k != 1:
        assert_chi_square(torch.bincount(tokens, minlength=size).double(), probabilities)


@st.composite
def rows_of_logits(draw_value):
    size = draw_value(st.sampled_from([1, 2, 7, 511, 512, 513, 1025, 1100]))
    generator = torch.Generator().manual_seed(draw_value(st.integers(0, 2**32)))
    scale = draw_value(st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4, 3e38]))
    logits = (scale * (2 * torch.rand(size, generator=generator) - 1)).float()
    hidden = torch.rand(size, generator=generator) < draw_value(st.sampled_from([0.0, 0.5, 0.99]))
    hidden[draw_value(st.integers(0, size - 1))] = False
    return logits.masked_fill(hidden, -torch.inf)


@settings(max_examples=150, deadline=None)
@given(logits=rows_of_logits(), options=st.fixed_dictionaries({}, optional={
    "temperature": st.sampled_from([1e-3, 0.5, 1.0, 3, 100.0]), "top_k": st.integers(1, 1200),
    "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.95, 1 - 1e-9, 1]), "min_p": st.sampled_from([1e-9, 0.1, 1.0]),
}))  # fmt: skip
def test_what_is_excluded_is_never_drawn(logits, options):
    sampling = Sampling(1, **options)
    edges = torch.tensor(
        [0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-24, 1 - 2.0**-53], dtype=torch.float64
    )
    tokens, logprobs = draw(logits.expand(len(edges), -1), edges, sampling)
    assert tokens.min() >= 0
    assert tokens.max() < len(logits)
    relative = ((logits.double() - logits.max()) / sampling.temperature).exp()
    assert (relative[tokens] > 0).all()
    assert logprobs.isfinite().all()
    # probabilities that differ only in fp32's last bits count as ties
    better = torch.stack([(relative > relative[token] * (1 + 1e-6)).sum() for token in tokens])
    assert sampling.top_k is None or (better < sampling.top_k).all()
    assert sampling.min_p is None or (relative[tokens] >= sampling.min_p * (1 - 1e-4)).all()
    if sampling.top_p is not None:
        kept = relative.sort(descending=True).values[: sampling.top_k]
        above = torch.stack([kept[kept > relative[token] * (1 + 1e-6)].sum() for token in tokens])
        assert (above <= kept.sum() * sampling.top_p * (1 + 1e-4)).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0}, {"max_new_tokens": 1.0}, {"max_new_tokens": True}, {"temperature": -0.1},
        {"temperature": "1"}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": 0}, {"top_p": 1.1},
        {"min_p": 0.0}, {"stop_strings": ("",)}, {"stop_strings": (1,)}, {"logprobs_temperature": 0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**{"max_new_tokens": 5, **bad})


# ---- adapters merged
@pytest.mark.parametrize(("family", "lora"), [("qwen2", "lora"), ("llama", "dora")])
def test_merged_weights_are_those_that_are_exported(family, lora, tmp_path):
    decoder = model(family, lora)
    peft_files.write_adapter(tmp_path, decoder, "QWEN2" if family == "qwen2" else "LLAMA3", "base")
    updates = peft_files.updates_by_weight(load_file(tmp_path / peft_files.ADAPTER_WEIGHTS))
    with sampler_of(decoder) as laid_out:
        for i, (layer, theirs) in enumerate(
            zip(laid_out.decoder.layers, decoder.layers, strict=True)
        ):

            def expected(ours, name, i=i):
                update = updates[f"model.layers.{i}.{name}.weight"]
                a, b, norms = (
                    update[".lora_A.weight"],
                    update[".lora_B.weight"],
                    update.get(".lora_magnitude_vector"),
                )
                return merged_linear(ours.weight, a, b, 6 / 4, norms)

            attention, mlp = theirs.attn, theirs.mlp
            assert torch.equal(
                layer.attn.output_proj.weight, expected(attention.output_proj, "self_attn.o_proj")
            )
            v = layer.attn.joined.weight[-layer.attn.num_kv_heads * layer.attn.head_dim :]
            assert torch.equal(v, expected(attention.v_proj, "self_attn.v_proj"))
            gate, up = layer.mlp.joined.weight.chunk(2)
            assert torch.equal(gate, expected(mlp.w1, "mlp.gate_proj"))
            assert torch.equal(layer.mlp.w2.weight, expected(mlp.w2, "mlp.down_proj"))
            assert torch.equal(up, expected(mlp.w3, "mlp.up_proj"))
            assert not torch.equal(layer.attn.output_proj.weight, attention.output_proj.weight)


@pytest.mark.parametrize("end", ["whole", "early", "error"])
def test_sampling_leaves_the_model_as_it_was(end):
    decoder = model("qwen2", "dora", tie_word_embeddings=True)
    before = {
        name: (p, p.detach().clone(), p.requires_grad) for name, p in decoder.named_parameters()
    }
    try:
        with sampler_of(decoder) as laid_out:
            completions = LocalSession(laid_out, Words(), lambda: GIB).generate(
                ask(prompts(3, 4)), Sampling(8)
            )
            next(completions)
            if end == "error":
                raise ZeroDivisionError
            if end == "whole":
                list(completions)
    except ZeroDivisionError:
        assert end == "error"
    assert laid_out.decoder is None  # a Sampler that outlives its context has no weights
    assert not laid_out._adapted
    after = dict(decoder.named_parameters())
    assert after.keys() == before.keys()
    for name, (parameter, value, trainable) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, value)
        assert (parameter.requires_grad, parameter.grad) == (trainable, None)


@torch.no_grad()
def other_family(name: str):
    """Make a decoder of torchtune's with modules that no native family has."""
    torch.manual_seed(0)
    if name == "phi3":
        decoder = phi3(**SHAPE)
    else:
        decoder = qwen2(**SHAPE)
        for layer in decoder.layers:
            layer.mlp.activation = nn.GELU()
            layer.attn.q_norm = layer.attn.k_norm = RMSNorm(16)
    for parameter in decoder.parameters():
        parameter.normal_(std=0.1)
    return native(decoder).eval()


@pytest.mark.parametrize("name", ["phi3", "norms after RoPE, and GELU"])
def test_what_trains_is_what_samples(name):
    decoder = other_family(name)
    for completion in sample(decoder, ask(prompts(1, 9, 40), 4), Sampling(12)).values():
        found = torch.tensor(completion.logprobs)
        torch.testing.assert_close(found, teacher_forced(decoder, completion), rtol=0, atol=1e-5)


def test_attention_that_reads_no_cache_is_refused():
    shape = {
        **{key: value for key, value in SHAPE.items() if key != "norm_eps"},
        "vocab_size": 64,
        "num_layers": 1,
    }
    decoder = native(gemma2(**shape, head_dim=16))
    for refused in (local_engine(decoder).check, local_engine(decoder).session().__enter__):
        with pytest.raises(UserError, match="attention Gemma2Attention"):
            refused()


# ---- where answers end
@pytest.fixture(scope="module")
def untold(small):
    """Sample answers that only their length ends."""
    return sample(small, ask(TEXTS[:4], 6), Sampling(30), Words([]))


def test_a_stop_token_ends_an_answer(small, untold):
    stops = {untold["0", 0].tokens[0], untold["1", 0].tokens[10], untold["2", 0].tokens[29]}
    reasons = set()
    for key, completion in sample(small, ask(TEXTS[:4], 6), Sampling(30), Words(stops)).items():
        whole = untold[key].tokens
        end = next((i + 1 for i, token in enumerate(whole) if token in stops), None)
        assert completion.tokens == whole[:end]
        assert len(completion.logprobs) == len(completion.tokens)
        assert completion.finish_reason == ("length" if end is None else "stop")
        assert completion.text == Words().decode(whole if end is None else whole[: end - 1])
        reasons.add((completion.finish_reason, len(completion.tokens)))
    assert {("stop", 1), ("stop", 30), ("length", 30)} <= reasons


class Pairs(Words):
    """Two letters per token, so a stop string may cross the border of two tokens."""

    def decode(self, tokens):
        return "".join(f"{chr(97 + token % 7)}{chr(97 + token % 5)}" for token in tokens)


@pytest.mark.parametrize(
    "stops", [("dca",), ("gebb", "ab", "fabc"), ("never at all",), "whole answer"]
)
def test_a_stop_string_ends_an_answer(small, untold, stops):
    ends = []
    if whole_answer := stops == "whole answer":
        stops = (Pairs().decode(untold["0", 0].tokens)[:3],)
    for key, completion in sample(
        small, ask(TEXTS[:4], 6), Sampling(30, stop_strings=stops), Pairs([])
    ).items():
        whole = Pairs().decode(untold[key].tokens)
        first = min((at for at, _ in enumerate(whole) if whole.startswith(stops, at)), default=None)
        held = [n for n in range(1, 31) if any(stop in whole[: 2 * n] for stop in stops)]
        assert completion.tokens == untold[key].tokens[: min(held, default=30)]
        assert completion.finish_reason == ("stop" if held else "length")
        text = Pairs().decode(completion.tokens)
        cut = [text.find(stop) for stop in stops if stop in text]
        assert completion.text == text[: min(cut, default=len(text))]
        assert first is None or len(completion.text) == first
        ends.append(first)
    if len(stops[0]) > 4:
        assert ends == [None] * 24
    elif not whole_answer:
        assert {0, 1} <= {end % 2 for end in ends if end is not None}


def test_what_cannot_be_sampled_is_refused(small):
    assert len(sample(small, ask(prompts(1000)), Sampling(24))["0", 0].tokens) <= 24
    with pytest.raises(UserError, match="are 1025 tokens; the model takes at most 1024"):
        sample(small, ask(prompts(3, 1001)), Sampling(24))
    local_engine(small).check()
    for stops in ([], None):
        with pytest.raises(UserError, match="no stop_tokens"):
            local_engine(small, SimpleNamespace(stop_tokens=stops)).check()
    for slots in (0, 8, 2.0, True, "8", 10**6):
        with pytest.raises(
            UserError, match=r"engine\.slots.*from 16 .*rounds smaller products differently"
        ):
            local_engine(small, slots=slots)


# ---- slots and memory
@pytest.fixture
def caches(monkeypatch):
    """Record what each call prefills, and keep weak references to every tensor of a cache."""
    record = SimpleNamespace(prefilled=[], prefixes=[], slots=[], shapes=[])
    prefill, allocate, begin = NativeSampler.prefill, Slots.lazy_initialization, SlotCache.__init__

    def counted(self, given):
        made = prefill(self, given)
        record.prefilled.append([tuple(tokens) for tokens in given])
        record.prefixes += [
            weakref.ref(t)
            for cache in made
            for part in cache.layers
            for t in (part.keys, part.values)
        ]
        return made

    def allocated(self, *args):
        allocate(self, *args)
        record.slots.extend(map(weakref.ref, (self.keys, self.values)))

    def begun(self, layers, slots, length):
        begin(self, layers, slots, length)
        record.shapes.append((slots, length))

    monkeypatch.setattr(NativeSampler, "prefill", counted)
    monkeypatch.setattr(Slots, "lazy_initialization", allocated)
    monkeypatch.setattr(SlotCache, "__init__", begun)
    record.alive = lambda which: sum(ref() is not None for ref in which)
    gc.collect()
    gc.disable()  # a cache's memory is free when its session ends, not when Python next looks for cycles
    yield record
    gc.enable()


@pytest.mark.parametrize("end", ["whole", "early"])
def test_caches_go_when_they_are_released_or_an_answer_is_cut(small, caches, end):
    with local_engine(small).session() as session:
        completions = session.generate(ask(TEXTS, 4), Sampling(12))
        next(completions)
        assert caches.alive(caches.slots) == 2 * SHAPE["num_layers"]
        if end == "early":
            completions.close()
        else:
            list(completions)
            assert caches.alive(caches.slots) == 2 * SHAPE["num_layers"]
            session.release()
        assert caches.alive(caches.slots) == caches.alive(caches.prefixes) == 0
        list(session.generate(ask(TEXTS), Sampling(12)))
        assert caches.alive(caches.slots) == 2 * SHAPE["num_layers"]
    assert caches.alive(caches.slots) == 0


def tensors(thing: nn.Module) -> list[torch.Tensor]:
    """Return all tensors of a module."""
    return [*thing.parameters(), *thing.buffers()]


@pytest.mark.wide(always=2)
@pytest.mark.parametrize(
    ("shape", "lengths", "sampling", "memory"),
    [
        ({}, (600, 700, 900), Sampling(20), 24e6),  # most of it for keys and values
        ({"intermediate_dim": 2048}, (500, 800, 900), Sampling(4), 95e6),  # prefilling
        ({"vocab_size": 20_000}, range(1, 41), Sampling(4, temperature=0.7, top_k=50), 11e6),  # drawing
        ({"vocab_size": 20_000}, range(1, 41), Sampling(4, temperature=9, top_p=0.9999), 30e6),  # and sorting all
        ({"vocab_size": 20_000}, range(1, 41),
         Sampling(4, temperature=0.7, top_k=50, min_p=1e-3, logprobs_temperature=0.7), 11e6),
    ],
    ids=["long", "wide", "vocabulary", "nucleus", "twice truncated"],
)  # fmt: skip
def test_slots_fit_into_memory(shape, lengths, sampling, memory, caches):
    requests, live = ask(prompts(*lengths), 45 // len(lengths)), CostCounter()
    with sampler_of(model(**shape)) as decoder:
        session = LocalSession(decoder, Words([]), lambda: int(memory))
        live.ignore(tensors(decoder.decoder))
        with live:
            list(session.generate(requests, sampling))
        session.release()
        gc.collect()
        assert live.now == 0
        assert 0.5 * memory < live.peak <= memory
        ((slots, length),) = caches.shapes
        assert 16 <= slots < len(requests)
        assert length >= max(lengths) + sampling.max_new_tokens
        with pytest.raises(UserError, match="are free for sampling; 16 answers of"):
            next(
                LocalSession(decoder, Words([]), lambda: int(memory / 5)).generate(
                    requests, sampling
                )
            )


# ---- a session stays open while the model is trained
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize(
    ("family", "lora", "changes"),
    [
        ("qwen2", "lora", {"tie_word_embeddings": True}),
        ("llama", "dora", {}),
        ("qwen2", "dora", {"adapted": ["k_proj", "output_proj"]}),
        ("llama", "rslora", {"adapted": ["q_proj", "v_proj"]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_refreshed_layout_equals_a_new_one_in_place(family, lora, changes, merge, dtype):
    decoder = model(family, lora, **changes)
    for name, parameter in decoder.named_parameters():
        if ".lora_" not in name and "magnitude" not in name:
            parameter.data = parameter.data.to(dtype)
    with sampler_of(with_rows(decoder), merge) as kept:
        parts = tensors(kept.decoder)
        before, places = [part.clone() for part in parts], [part.data_ptr() for part in parts]
        train(decoder, 1)
        assert all(
            map(torch.equal, parts, before)
        )  # the layout follows training only when it is refreshed
        kept.refresh()
        assert [part.data_ptr() for part in tensors(kept.decoder)] == places
        with sampler_of(decoder, merge) as new:
            assert len(parts) == len(tensors(new.decoder))
            assert all(map(torch.equal, parts, tensors(new.decoder)))
        assert not all(map(torch.equal, parts, before))


def test_a_session_that_stays_open_samples_like_new_ones(caches):
    """Longer and shorter prompts, more and fewer samples, other settings, and an early end between them."""
    decoder = model("qwen2", "dora")
    engine = local_engine(decoder)
    greedy = Sampling(40, temperature=0)
    with engine.session() as session:
        for step, (texts, samples, sampling) in enumerate(
            [
                (TEXTS, 8, WARM),
                (TEXTS[:3], 2, WARM),
                (TEXTS[5:], 1, greedy),
                (TEXTS, 10, WARM),
                (TEXTS[3:], 8, WARM),
            ]
        ):
            train(decoder, step)
            session.refresh()
            requests = ask(texts, samples, cycle=step)
            with engine.session() as other:
                expected = answers_of(other, requests, sampling)
            made = len(caches.shapes)
            if step == 2:
                next(session.generate(requests, sampling))
            found = answers_of(session, requests, sampling)
            assert len(found) == len(requests)
            assert_same(found, expected)
            assert session.stats()["tokens"] >= sum(len(c.tokens) for c in found.values())
            assert len(caches.shapes) - made == (1, 0, 1, 1, 0)[step]


def test_a_session_that_stays_open_may_be_trained_beside():
    """An open session leaves autograd as it was."""
    decoder = model("qwen2", "lora")
    with local_engine(decoder).session() as session:
        answers_of(session, ask(TEXTS[:2]), WARM)
        decoder(torch.tensor([TEXTS[0]])).sum().backward()
    assert all(layer.lora_b.weight.grad.any() for _, layer in adapters(decoder))


@several_ranks
@pytest.mark.parametrize("merge", [True, False])
def test_two_ranks_refresh_the_layout_of_sharded_weights(tmp_path, merge):
    def compare() -> None:
        whole, sharded = with_rows(model("qwen2", "dora")), with_rows(model("qwen2", "dora"))
        ranks = Ranks.from_env(CPU)
        ranks.shard(sharded.layers, sharded, set(adapter_parameters(sharded).values()))
        assert hasattr(sharded.layers[0].attn.q_proj.weight, "full_tensor")
        with sampler_of(sharded, merge) as kept:
            for decoder in (whole, sharded):
                train(decoder, 1)
            kept.refresh()
            with sampler_of(whole, merge) as expected:
                assert all(map(torch.equal, tensors(kept.decoder), tensors(expected.decoder)))
        ranks.close()
        raise SystemExit(0)

    succeed_on_ranks(compare, tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_change_no_sample():
    on_gpu = model("qwen2", "dora").cuda()
    with local_engine(on_gpu).session() as session:
        for step in range(3):
            train(on_gpu, step)
            session.refresh()
            expected = sample(on_gpu, ask(TEXTS, 8), WARM, graphs=False)
            assert_same(sample(on_gpu, ask(TEXTS, 8), WARM, graphs=True), expected)
            assert_same(answers_of(session, ask(TEXTS, 8), WARM), expected)


def test_slots_are_nearly_always_busy(small, caches):
    with sampler_of(small) as decoder:
        session = LocalSession(decoder, Words(), lambda: GIB, slots=16)
        requests = ask(prompts(*range(1, 21)), 10)
        lengths, sampled = [], []
        for completion in session.generate(requests, Sampling(24)):
            lengths.append(len(completion.tokens))
            sampled.append(session.stats()["tokens"])
            if (
                len(lengths) == 100
            ):  # answered prompts, one in progress and perhaps some already prefilled
                assert caches.alive(caches.prefixes) < 0.4 * len(caches.prefixes)
        stats = session.stats()
    assert len(lengths) == 200
    assert stats["tokens"] == sum(lengths)
    assert stats["occupancy"] > 0.9
    assert sampled[0] < 0.05 * stats["tokens"]
    assert sampled[100] == pytest.approx(stats["tokens"] / 2, rel=0.1)
