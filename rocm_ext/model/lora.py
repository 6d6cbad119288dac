"""LoRA and DoRA layers: torchtune's modules with fp32 adapters over a base of any dtype.

Adapters stay in fp32 because an update below 2**-8 of a bf16 weight vanishes. The layers cast them to the activations'
dtype. Parameters have the same names as in torchtune's classes, so torchtune's builders and checkpoints work unchanged.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import mode
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules.low_precision.nf4_linear import linear_nf4  # torchao's, wherever it has it
from torchtune.modules.peft import DoRALinear, LoRALinear

from rocm_ext.base.errors import UserError, nearest, one_line, refuse
from rocm_ext.base.types import Json
from rocm_ext.config.model_folder import names_layer
from rocm_ext.model.names import last_part, last_parts, replace_parameter
from rocm_ext.model.products import frozen_linear, input_gradient, product
from rocm_ext.model.token_rows import TokenRows, token_rows
from rocm_ext.model.weights.quantized import Quantized


def scale_of(alpha: float, rank: int, rslora: bool) -> float:
    """Return the factor of B A: alpha / rank, or alpha / sqrt(rank) in rsLoRA (arXiv:2312.03732)."""
    return alpha / (math.sqrt(rank) if rslora else rank)


class Lora(LoRALinear):
    """LoRA with frozen W: ``y = W x + b + scale * B A dropout(x)`` (arXiv:2106.09685)."""

    rslora = False

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return scale_of(self.alpha, self.rank, self.rslora)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_dim] -> [..., out_dim]."""
        if self.disabled:
            return base_linear(self, x)
        a = self.lora_a.weight
        b = self.lora_b.weight
        drops = self.training and isinstance(self.dropout, nn.Dropout)
        # torch 2.11 compiles an operation in place in an autograd function to one without gradients (pytorch#180642)
        if self._quantize_base or drops or torch.compiler.is_compiling():
            base = base_linear(self, x)
            return base + low_rank(self.dropout(x), a, self.scale * b)
        out = _LoraFunction.apply(x, self.weight, self.bias, a, b, self.scale)
        # here, because torch refuses to change a view from a function in place
        return out.view(*x.shape[:-1], -1)


class _LoraFunction(torch.autograd.Function):
    """One autograd node for the complete layer: it accumulates both products in place and saves only x and A x."""

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale):  # type: ignore[override]
        x2 = x.reshape(-1, x.shape[-1])
        low = x2 @ a.to(x.dtype).T  # [n, rank]
        out = product(x2, weight, bias)
        out.addmm_(low, (scale * b).to(x.dtype).T)  # rounded as in sampling
        ctx.save_for_backward(x2, low, weight, a, b)
        ctx.scale = scale
        ctx.shape = x.shape
        return out

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        x2, low, weight, a, b = ctx.saved_tensors
        scale = ctx.scale
        grad_low = g @ (scale * b).to(g.dtype)  # [n, rank]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(g, weight)
            grad_x = grad_x.addmm_(grad_low, a.to(g.dtype)).view(ctx.shape)
        grad_a = (grad_low.T @ x2).to(a.dtype)
        grad_b = (g.T @ low).to(b.dtype)
        return grad_x, None, None, grad_a, grad_b.mul_(scale), None


class Dora(DoRALinear):
    """DoRA with row-wise norms: ``y = m * (W + s B A) x / ||W + s B A|| + b`` (arXiv:2402.09353).

    torchtune 0.6.1 also scales the bias by ``m / ||…||``; the paper and PEFT do not. On a model with biases (Qwen2.5)
    the same adapter therefore gives other logits in torchtune than here.
    """

    rslora = False

    @property
    def scale(self) -> float:
        """Factor s of B A."""
        if not self.rslora:
            return self.scaling
        return self.scaling * math.sqrt(len(self.lora_a.weight))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_dim] -> [..., out_dim]."""
        if self.disabled:
            return base_linear(self, x)
        base = base_linear(self, x)
        if self.bias is not None:
            base = base - self.bias
        a = self.lora_a.weight
        b = self.scale * self.lora_b.weight
        low = low_rank(self.dropout(x), a, b)
        # The backward pass treats the norm as a constant (section 4.3 of the paper).
        factor = (self.magnitude / self.weight_norm()).to(x.dtype)
        out = factor * (base + low)
        return out if self.bias is None else out + self.bias

    @torch.no_grad()
    def weight_norm(self) -> Tensor:
        """Return the norms of the rows of W + s B A: [out_dim], fp32."""
        product = self.lora_b.weight.float() @ self.lora_a.weight.float()
        full = dense(self.weight).float() + self.scale * product
        return torch.linalg.vector_norm(full, dim=1)

    @torch.no_grad()
    def initialize_dora_magnitude(self) -> None:
        """Set m = ||W + s B A||. B is still zero, so training starts from the base model."""
        self.magnitude.copy_(self.weight_norm())


class ExpertLora(nn.Module):
    """LoRA on one weight of all experts of a layer: ``W_e + scale * B_e A_e`` for each expert e.

    It computes nothing: :mod:`rocm_ext.model.hf.experts` reads its factors. Parameters have the layout of PEFT's
    ``target_parameters`` from version 0.19.1 on. A is [experts * r, in]: an expert's rows are contiguous. B is
    [out, r * experts]: the columns of one rank are contiguous.

    Args:
        shape: the weight's shape, [experts, out, in], or [experts, in, out] if ``transposed``.
        transposed: see ``shape``.
        rank, alpha: LoRA's r and alpha.

    Attributes:
        experts, in_dim, out_dim: number of experts, and sizes of one expert's input and output.
        disabled: whether the experts compute without it.
    """

    SUFFIX = "_lora"  # gate_up_proj_lora is the LoRA on gate_up_proj
    rslora = False
    dropout: nn.Module | None = None
    _quantize_base = False

    def __init__(self, shape: torch.Size, transposed: bool, rank: int, alpha: float) -> None:
        super().__init__()
        self.experts, first, second = shape
        self.in_dim, self.out_dim = (first, second) if transposed else (second, first)
        self.transposed = transposed
        self.rank = rank
        self.alpha = alpha
        self.disabled = False
        self.lora_a = nn.Linear(self.in_dim, self.experts * rank, bias=False)
        self.lora_b = nn.Linear(rank * self.experts, self.out_dim, bias=False)

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return scale_of(self.alpha, self.rank, self.rslora)

    def adapter_params(self) -> list[str]:
        """Return the names of the trainable parameters."""
        return ["lora_a.weight", "lora_b.weight"]

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A, [experts, r, in], and scale * B, [experts, out, r], in ``dtype``."""
        a = self.lora_a.weight
        b = self.scale * self.lora_b.weight
        return expert_factors(a.to(dtype), b.to(dtype), self.experts)


def expert_factors(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Split the parameters of an :class:`ExpertLora` by expert: A is [experts, r, in], B is [experts, out, r]."""
    a_by_expert = a.unflatten(0, (experts, -1))  # [experts, r, in]
    b_by_rank = b.unflatten(1, (-1, experts))  # [out, r, experts]
    return a_by_expert, b_by_rank.permute(2, 0, 1).contiguous()


Adapter = Lora | Dora | ExpertLora


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """LoRA's r and alpha of each layer.

    A pattern's key is a regular expression for a layer's published name or its end. The first matching key decides, as
    in PEFT's ``get_pattern_key``.

    Attributes:
        rank, alpha: r and alpha of layers that no key matches.
        rank_pattern, alpha_pattern: r and alpha of matching layers, by key.
        parameters: PEFT's ``target_parameters``. Keys match these parameters' names, also in linear layers.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()

    def of(self, name: str) -> tuple[int, float]:
        """Return r and alpha of a linear layer, or of a fused weight of experts, by its published name."""
        name = self._matched(name)
        rank = _of_layer(name, self.rank_pattern, self.rank)
        return rank, _of_layer(name, self.alpha_pattern, self.alpha)

    def check_keys(self, names: Iterable[str]) -> None:
        """Check that every key matches one of the adapted layers ``names``."""
        names = [self._matched(name) for name in names]
        ends = {_end(name) for name in names}
        refuse(
            f"model.{pattern} has {key!r}, which matches no adapted layer{nearest(key, ends)}"
            for pattern in ("rank_pattern", "alpha_pattern")
            for key in getattr(self, pattern)
            if not any(names_layer(key, name) for name in names)
        )

    def _matched(self, name: str) -> str:
        for known in (name, f"{name}.weight"):  # a fused weight of experts, and a linear layer
            if any(ends_with(known, parameter) for parameter in self.parameters):
                return known
        return name


def _of_layer(name: str, pattern: Mapping[str, Any], usual: Any) -> Any:
    """Return the value of the first key that matches a layer, or else the ``usual`` one."""
    for key, value in pattern.items():
        if names_layer(key, name):
            return value
    return usual


def ends_with(name: str, target: str) -> bool:
    """Return whether PEFT's ``target`` names the layer or parameter ``name``: it is the name, or its end."""
    return f".{name}".endswith(f".{target}")


def _end(name: str) -> str:
    return last_parts(name, 2 if name.endswith(".weight") else 1)


def described(sizes: Mapping[str, tuple[int, float]]) -> Json:
    """Return PEFT's settings for layers with these r and alpha; ``sizes`` has the names that patterns match.

    Equal sizes give equal settings. ``r`` and ``lora_alpha`` are most layers' values. The keys for other layers are the
    ends of their names, if all layers with this end have the same value, else the names.
    """
    ranks = {}
    alphas = {}
    for name, size in sizes.items():
        ranks[name], alphas[name] = size
    rank, rank_pattern = _described(ranks)
    alpha, alpha_pattern = _described(alphas)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
    }


def _described(values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return the most common value, and a pattern for the others."""
    usual = mode(values.values())
    by_end: dict[str, set[float]] = {}
    for name, value in values.items():
        by_end.setdefault(_end(name), set()).add(value)
    pattern = {}
    for name, value in values.items():
        if value != usual:
            end = _end(name)
            pattern[end if len(by_end[end]) == 1 else name] = value
    return usual, pattern


def adapted_linear(
    kind: Callable[..., nn.Module],
    sizes: Sizes,
    name: str,
    in_dim: int,
    out_dim: int,
    use_bias: bool,
) -> nn.Module:
    """Build the layer ``name``; ``kind`` is torchtune's class with all settings but the sizes."""
    rank, alpha = sizes.of(name)
    try:
        return kind(in_dim, out_dim, rank=rank, alpha=alpha, use_bias=use_bias)
    except (AssertionError, NotImplementedError) as error:
        raise UserError(
            f"quantize_base: {name} [{out_dim}, {in_dim}] cannot be stored in 4 bits ({one_line(error)}); leave it out "
            "of target_modules, or set quantize_base: fp8 or False"
        ) from error


def merged_linear(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None
) -> Tensor:
    """Merge LoRA into one weight: W + s B A, in W's dtype, computed in fp32; for DoRA rescale the rows to length m.

    Args:
        weight: W, [out, in].
        a, b: [r, in] and [out, r].
        scale: s, see :func:`scale_of`.
        magnitude: DoRA's m, [out].
    """
    full = weight.float() + scale * (b.float() @ a.float())
    if magnitude is not None:
        norms = torch.linalg.vector_norm(full, dim=1)
        full *= (magnitude.float() / norms)[:, None]
    return full.to(weight.dtype)


@torch.no_grad()
def merged_layer(layer: Lora | Dora, weight: Tensor) -> Tensor:
    """Return ``weight``, the layer's W as an ordinary tensor, with the layer's update merged into it."""
    a = layer.lora_a.weight
    b = layer.lora_b.weight
    magnitude = layer.magnitude if isinstance(layer, Dora) else None
    return merged_linear(weight, a, b, layer.scale, magnitude)


def low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Multiply [..., in] with A [r, in] and B [out, r], in the dtype of x: [..., out]."""
    low = F.linear(x, a.to(x.dtype))  # [..., r]
    return F.linear(low, b.to(x.dtype))


def base_linear(layer: LoRALinear | DoRALinear, x: Tensor) -> Tensor:
    """Apply the frozen layer without its adapter: [..., in_dim] -> [..., out_dim]."""
    if not layer._quantize_base:
        return frozen_linear(x, layer.weight, layer.bias)
    out = linear_nf4(input=x, weight=layer.weight)
    return out if layer.bias is None else out + layer.bias


def is_plain(weight: Tensor) -> bool:
    """Return whether ``weight`` is an ordinary tensor, neither sharded nor quantised."""
    return not hasattr(weight, "full_tensor") and not hasattr(weight, "get_original_weight")


def dense(weight: Tensor) -> Tensor:
    """Return ``weight`` as an ordinary tensor: gather a sharded one from all ranks, dequantise a quantised one."""
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()  # type: ignore[operator]
    if hasattr(weight, "get_original_weight"):
        weight = weight.get_original_weight()  # type: ignore[operator]
    return weight


def adopt(model: nn.Module, cfg_model) -> None:
    """Replace torchtune's LoRA layers in ``model`` by this module's and freeze everything but the adapters.

    Raises:
        UserError: ``model`` has no LoRA layers, or ``lora_attn_modules`` names a layer it does not have.
    """
    model.requires_grad_(False)
    adapted = set()
    for name, module in model.named_modules():
        if type(module) in (LoRALinear, DoRALinear):
            # keeps parameters, names and hooks; FSDP2 uses the same technique
            module.__class__ = Lora if type(module) is LoRALinear else Dora
        if isinstance(module, Adapter):
            adapted.add(last_part(name))
    for parameter in adapter_parameters(model).values():
        parameter.requires_grad_(True)
    missing = sorted(set(cfg_model.get("lora_attn_modules") or ()) - adapted)
    if missing:
        attention = model.layers[0].attn  # type: ignore[index, union-attr, assignment]
        available = sorted(name for name, _ in attention.named_children() if name.endswith("_proj"))
        raise UserError(
            f"model.lora_attn_modules {missing} match no layer; the model has {available}"
        )
    if not adapted:
        raise UserError(
            f"model {cfg_model.get('_component_')} has no LoRA layers; name a LoRA builder "
            "(torchtune.models.*.lora_*) and at least one of lora_attn_modules"
        )


def quantized(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are quantised, now or once they are loaded. Every rank keeps them unsharded."""
    weights: set[Any] = {p for p in model.parameters() if isinstance(p, Quantized)}
    for _, layer in adapters(model):
        if layer._quantize_base:
            weights.add(layer.weight)
    return weights


def adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield the adapted layers of ``model`` with their names, without wrappers' prefixes."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield plain(name), module


def trained(model: nn.Module) -> Iterator[tuple[str, Adapter | TokenRows]]:
    """Yield the trained parts of ``model`` with their names: adapted layers and rows of tokens."""
    yield from adapters(model)
    for name, rows in token_rows(model):
        yield f"{plain(name)}.{TokenRows.NAME}", rows


def changed_weights(model: nn.Module) -> dict[str, Adapter | TokenRows]:
    """Return the trained parts of ``model`` by the names of the weights that they change."""
    parts: dict[str, Adapter | TokenRows] = {}
    for name, layer in trained(model):
        if isinstance(layer, ExpertLora):
            parts[name.removesuffix(ExpertLora.SUFFIX)] = layer
        else:
            module = name.removesuffix(f".{TokenRows.NAME}")
            parts[f"{module}.weight"] = layer
    return parts


def expert_loras(model: nn.Module) -> dict[str, ExpertLora]:
    """Return the LoRA of adapted experts' weights by the weights' names, such as ``…experts.gate_up_proj``."""
    parts = changed_weights(model).items()
    return {name: part for name, part in parts if isinstance(part, ExpertLora)}


@torch.no_grad()
def reset(layer: Adapter | TokenRows) -> None:
    """Reset a trained part, so that the model computes the same as the base model."""
    if isinstance(layer, TokenRows):
        layer.reset()
        return
    layer.lora_b.weight.zero_()
    if isinstance(layer, Dora):
        layer.initialize_dora_magnitude()


def plain(name: str) -> str:
    """Return the name of a part of a model without wrappers' prefixes."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, e.g. ``layers.0.attn.q_proj.lora_a.weight``."""
    parameters = {}
    for name, layer in trained(model):
        for key in layer.adapter_params():
            parameters[f"{name}.{key}"] = layer.get_parameter(key)
    return parameters


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int, device: torch.device) -> None:
    """Create fresh fp32 adapters on ``device``: A is Kaiming-uniform, B is zero.

    DoRA's m and rows of tokens are zero here; :func:`reset` sets them once the weights are loaded. The values depend
    only on ``seed`` and the order of layers: they are the same on every device and rank.
    """
    generator = torch.Generator().manual_seed(seed)
    has_values = device.type != "meta"
    first = "cpu" if has_values else device
    for _, layer in trained(model):
        for key in layer.adapter_params():
            shape = layer.get_parameter(key).shape
            value = torch.zeros(shape, dtype=torch.float32, device=first)
            if has_values and key == "lora_a.weight":
                nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            replace_parameter(layer, key, nn.Parameter(value.to(device)))


def rank_and_alpha(layer: Adapter) -> tuple[int, float]:
    """Return LoRA's r and alpha of a layer."""
    if isinstance(layer, ExpertLora):
        return layer.rank, layer.alpha
    rank = len(layer.lora_a.weight)
    if isinstance(layer, Dora):  # DoRALinear stores alpha / r
        return rank, round(layer.scaling * rank, 6)
    return rank, layer.alpha
