"""The key ``attention``: every kernel computes the same function, and the one that is named runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtune.models.gemma2 import gemma2

from rocm_ext.base.errors import UserError
from rocm_ext.model.attention import choose_attention, sdpa, shares_beginnings
from rocm_ext.model.native.decoder import native
from rocm_ext.model.sampler import sampler_of
from rocm_ext.sampling import Request, Sampling
from rocm_ext.sampling.local import LocalSession
from tests.kit.hf_models import write_theirs
from tests.kit.parity import our_model, pack, random_sequences
from tests.recipes.test_parity import decoder_pair
from tests.sampling.test_generation import Words, model

FLASH, MATH, SOFTMAX = "_scaled_dot_product_flash_attention_for_cpu", "_safe_softmax", "_softmax"
KERNELS = {
    "auto": FLASH,
    "flash": FLASH,
    "math": MATH,
    "eager": SOFTMAX,
}  # and an operation that only it runs


class Names(TorchDispatchMode):
    """The operations of attention that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def ran(call):
    """What ``call`` returns, and which of the operations in ``KERNELS`` it ran."""
    with Names() as seen:
        found = call()
    return found, seen.names & set(KERNELS.values())


def step(decoder, kernel: str):
    """Logits of packed sequences, two in one call of auto and flash, their gradients, and attention's operations."""
    choose_attention(decoder, kernel)
    decoder.zero_grad()
    sequences = random_sequences([12, 10, 7], 0)
    logits, names = ran(lambda: decoder.output(decoder.hidden_states(pack(sequences))))
    logits.square().sum().backward()
    return logits, [p.grad for p in decoder.parameters() if p.grad is not None], names


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("models")
    return {name: write_theirs(top / name, name) for name in ("olmo 2", "gemma 2")}


@pytest.mark.parametrize("own", [True, False], ids=["native", "transformers"])
@pytest.mark.parametrize("kernel", ["flash", "math", "eager"])
def test_a_model_computes_the_same_with_every_kernel(folders, kernel, own):
    ours, same = (
        decoder_pair("qwen2")[1] if own else our_model(folders["olmo 2"]) for _ in range(2)
    )
    expected, gradients, _ = step(ours, "auto")
    found, theirs, names = step(same, kernel)
    assert names == {KERNELS[kernel]}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    torch.testing.assert_close(theirs, gradients, rtol=1e-4, atol=1e-6 * largest)


def test_capped_scores_are_computed_eagerly_or_not_at_all(folders):
    expected, _, _ = step(our_model(folders["gemma 2"]), "auto")
    found, _, _ = step(our_model(folders["gemma 2"]), "eager")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(UserError, match="capped scores or sinks"):
        step(our_model(folders["gemma 2"]), "math")


def test_attention_in_a_models_own_code_is_refused():
    shape = {
        "vocab_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "num_kv_heads": 2,
        "embed_dim": 32,
    }
    decoder = native(gemma2(**shape, intermediate_dim=48, max_seq_len=64))
    assert not decoder.packs
    choose_attention(decoder, "auto")
    with pytest.raises(UserError, match="attention is 'math'"):
        choose_attention(decoder, "math")


@pytest.mark.parametrize("kernel", ["math", "eager"])
def test_the_sampler_uses_the_same_kernel(kernel):
    def answers(kernel: str):
        decoder = model()
        choose_attention(decoder, kernel)
        requests = [Request(str(i), 0, i, tuple(range(i, i + 9)), ()) for i in range(3)]
        with sampler_of(decoder) as made:
            session = LocalSession(made, Words(), lambda: 2**30, 4, False)
            done, names = ran(
                lambda: list(session.generate(requests, Sampling(8, temperature=0.0)))
            )
        return {each.request.prompt_id: each.tokens for each in done}, names

    expected, _ = answers("auto")
    found, names = answers(kernel)
    assert names == {KERNELS[kernel]}
    assert found == expected


def test_beginnings_are_shared_unless_dropout_differs():
    decoder = model("qwen2", "lora")
    assert shares_beginnings(decoder)
    decoder.layers[0].attn.q_proj.dropout = torch.nn.Dropout(0.1)
    assert not shares_beginnings(decoder)


def test_masks_and_scales_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, generator=generator) for n in (4, 6, 6))
    allowed = torch.rand(2, 1, 4, 6, generator=generator) > 0.3
    allowed[..., 0] = True
    added = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, scale=0.2
    )
    for kernel in KERNELS:
        for mask in (allowed, added):
            found = sdpa(q, k, v, kernel, mask=mask, scale=0.2)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
