"""Products with frozen weights equal torch's, and those with large ones on a CPU are oneDNN's."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_ext.bench.probes import RandomWeights
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.losses import CrossEntropy
from rocm_ext.model.build import Weights, build_model, load_weights
from rocm_ext.model.products import frozen_linear, product, uses_onednn
from rocm_ext.model.sampler import copied_bytes, one_step, sampler_of

CPU = torch.device("cpu")
LARGE, SMALL = (1031, 130), (40, 24)
LEAST = 2**17
ONEDNN = "_linear_pointwise"
needs_onednn = pytest.mark.skipif(
    not uses_onednn(torch.float32, CPU), reason="this torch lacks MKL or oneDNN"
)


class Products(TorchDispatchMode):
    """Counts matrix products by operator, apart for those with large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.large: Counter[str] = Counter()
        self.small: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name in (ONEDNN, "mm", "addmm", "addmm_", "bmm"):
            sizes = [t.numel() for t in args if isinstance(t, torch.Tensor) and t.ndim > 1]
            counted = self.large if max(sizes) >= LEAST else self.small
            counted[name] += 1
        return func(*args, **(kwargs or {}))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [LARGE, SMALL])
@pytest.mark.parametrize("rows", [(1,), (17,), (3, 40)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_products_and_gradients_equal_torchs(shape, rows, bias, transposed):
    out, width = shape
    weight = drawn(width, out).T if transposed else drawn(out, width)
    b = drawn(out, seed=1) if bias else None
    x = drawn(*rows, width, seed=2).requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = F.linear(exact, weight.double(), None if b is None else b.double())
    found = frozen_linear(x, weight, b)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(product(x.detach(), weight, b), found)
    # gradients come in any layout
    for grad in (drawn(*rows, out, seed=3), drawn(*rows, 1, seed=3).expand(*rows, out)):
        (ours,) = torch.autograd.grad(found, x, grad, retain_graph=True)
        (theirs,) = torch.autograd.grad(expected, exact, grad.double(), retain_graph=True)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-3)


def test_what_becomes_of_a_product():
    """Its result may be changed in place, as OLMo's code does, and a trained bias gets its gradient."""
    weight = drawn(*LARGE)
    bias = drawn(LARGE[0], seed=1).requires_grad_()
    results = []
    for linear in (frozen_linear, F.linear):
        x = drawn(1, 4, LARGE[1], seed=2).requires_grad_()
        out = linear(x, weight).clamp_(-3, 3) + linear(x, weight, bias)
        results.append(torch.autograd.grad(out.square().sum(), [x, bias]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-2)


@needs_onednn
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [LARGE, (4, 2**15)])
def test_a_row_does_not_depend_on_the_others(shape, transposed):
    """Samples would depend on their batch; see :data:`rocm_ext.model.sampler.MIN_ROWS`."""
    out, width = shape
    weight = drawn(width, out).T if transposed else drawn(out, width)
    x = drawn(200, width, seed=2)
    whole = product(x, weight)
    for rows in (slice(0, 16), slice(0, 17), slice(90, 186), slice(104, 200)):
        assert torch.equal(product(x[rows], weight), whole[rows])


@needs_onednn
@pytest.mark.parametrize(
    ("weight", "is_onednns"),
    [
        (drawn(*LARGE), True),
        (drawn(*SMALL), False),
        (drawn(*LARGE).bfloat16(), False),
        (drawn(*LARGE).requires_grad_(), False),
        (drawn(*LARGE).to("meta"), False),
    ],
    ids=["large", "small", "bf16", "trained", "meta"],
)
def test_large_frozen_products_are_onednns(weight, is_onednns):
    x = torch.zeros(3, weight.shape[1], dtype=weight.dtype, device=weight.device)
    with Products() as seen:
        frozen_linear(x, weight)
    assert bool((seen.large + seen.small)[ONEDNN]) == is_onednns


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def decoder(request):
    """A decoder whose base layers are all large; some have no adapter."""
    node = OmegaConf.create({
        "_component_": "torchtune.models.qwen2.lora_qwen2", "lora_attn_modules": ["q_proj", "v_proj"],
        "apply_lora_to_mlp": True, "vocab_size": 600, "num_layers": 1, "num_heads": 8, "num_kv_heads": 8,
        "embed_dim": 512, "intermediate_dim": 704, "max_seq_len": 64, "lora_rank": 4, "lora_alpha": 8,
        "tie_word_embeddings": request.param,
    })  # fmt: skip
    made = build_model(node, torch.float32, 0, CPU)
    load_weights(made, Weights(RandomWeights(made, CPU), "random"), Ranks(CPU))
    return made


@needs_onednn
def test_a_step_and_a_sample_use_onednn_for_all_large_weights(decoder):
    tokens = torch.randint(600, (1, 24), generator=torch.Generator().manual_seed(0))
    batch = SimpleNamespace(
        tokens=tokens, positions=torch.arange(24)[None], lengths=(24,), shared=()
    )
    with Products() as training:
        hidden = decoder.hidden_states(batch)[0]
        loss = CrossEntropy()(decoder.output, hidden[:-1], tokens[0, 1:], {}, torch.zeros(23))
        loss.backward()
    with Products() as sampling, sampler_of(decoder) as sampler:
        one_step(sampler, 16, torch.no_grad())
    assert set(training.large) == {ONEDNN}
    assert set(sampling.large) == {ONEDNN}
    assert training.small["mm"]  # LoRA's


@needs_onednn
def test_a_sampler_holds_the_planned_bytes(decoder):
    """It transposes every linear layer, also those without an adapter and the tied output layer."""
    shared = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    with sampler_of(decoder) as sampler:
        held = {}
        for parameter in [*sampler.decoder.parameters(), *sampler.decoder.output.parameters()]:
            storage = parameter.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
        copied = sum(size for place, size in held.items() if place not in shared)
    biases = 3 * 512 * 4
    assert copied - biases == copied_bytes(decoder)
