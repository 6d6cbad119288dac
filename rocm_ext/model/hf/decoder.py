"""A model of transformers as a :class:`rocm_ext.model.decoder.Decoder`."""

import copy
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torchtune.modules.peft import DoRALinear
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from rocm_ext.base.errors import UserError, explain_errors
from rocm_ext.base.log import log
from rocm_ext.data.batches import MicroBatch
from rocm_ext.model.attention import Lengths
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.families import CONFIG, ModelConfig, own_code, refuse_code
from rocm_ext.model.hf.attention import PACKED, packed, scale_each_sequence
from rocm_ext.model.hf.checkpoint import (
    Converted,
    WeightNames,
    check_causal,
    keep_precision,
    persistent_buffers,
    take_text,
)
from rocm_ext.model.hf.experts import SORTED, Replay
from rocm_ext.model.hf.packed_states import ROWS, keep_apart
from rocm_ext.model.hf.sampler import TransformersSampler, memory_of, obstacle_of, replay_of
from rocm_ext.model.hf.targets import (
    ALL,
    ALL_EXPERTS,
    frozen_kinds,
    fused_experts,
    listed,
    put_in,
    put_in_experts,
)
from rocm_ext.model.lora import Sizes
from rocm_ext.model.names import Names, last_part
from rocm_ext.model.products import frozen_linear
from rocm_ext.model.token_rows import TokenRows

# model_types whose packed rows tests compare with transformers. All others get padded rows.
PACKS = frozenset(
    """
    apertus arcee bamba cohere cohere2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 falcon_h1 gemma gemma2
    gemma3_text glm glm4 glm4_moe gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe kimi_linear lfm2 lfm2_moe llama minimax_m2 ministral ministral3 mistral mixtral
    nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2
    """.split()  # noqa: SIM905
)


class TransformersDecoder(Decoder):
    """A causal language model of transformers, see :class:`rocm_ext.model.decoder.Decoder`.

    Parameters have transformers' names.

    Args:
        model: transformers' model; parameters are on the meta device.
        architecture: content of ``config.json``, which decides the model's function.

    Attributes:
        text_part: the remaining part of a multimodal model, or None if ``model`` is a text model.

    Raises:
        UserError: this class does not support the model's structure.
    """

    kernel = "auto"
    replay: Replay | None = None
    names = Names()  # files have the same names, or `converted` translates them

    def __init__(self, model, architecture: str) -> None:
        super().__init__()
        self.architecture = architecture
        config = model.config.get_text_config()
        check_causal(model)
        self._names = WeightNames(model)
        self.names_of_experts = self._names.of_experts
        self.text_part = take_text(model)
        for name, child in model.named_children():
            self.add_module(name, child)
        outside = [name for name, _ in model.named_parameters(recurse=False)]
        head = _name_of(model, model.get_output_embeddings())
        self.layers_name = ""
        for name, part in model.named_modules():
            if isinstance(part, nn.ModuleList) and len(part) == config.num_hidden_layers:
                self.layers_name = name
                break
        top, nested, _ = self.layers_name.partition(".")
        self._body = self.text_part.body if self.text_part else top
        if outside or not nested or not head or model.get_input_embeddings() is None:
            problem = "is not built as other decoders of transformers are"
            if outside:
                problem = f"has weights outside its layers: {', '.join(outside)}"
            raise UserError(f"{type(model).__name__} {problem}")
        self.tied: tuple[str, str] | None = None
        embeddings = model.get_input_embeddings()
        output = model.get_output_embeddings()
        if output.weight is embeddings.weight:
            self.tied = (f"{head}.weight", f"{_name_of(model, embeddings)}.weight")
            tied = _Tied(embeddings, output.bias)
            setattr(model, head, tied)
            setattr(self, head, tied)
        paths: dict[nn.Parameter, str] = {}  # loading and sharding know one path per parameter
        for path, parameter in self.named_parameters(remove_duplicate=False):
            first = paths.setdefault(parameter, path)
            if first != path:
                raise UserError(
                    f"{type(model).__name__} has one weight in two places, {first} and {path}, which is not supported"
                )
        causal = {getattr(part, "is_causal", None) for part in self.layers.modules()}
        causal.discard(None)
        if False in (causal or {getattr(config, "is_decoder", True)}):
            raise UserError(
                f"{type(model).__name__} attends to later tokens; only causal language models are supported"
            )
        self.output_name = head
        self.max_seq_len = _number(config, "max_position_embeddings") or 2**31
        self.num_heads = _number(config, "num_attention_heads") or 8
        self.head_dim = _number(config, "head_dim") or config.hidden_size // self.num_heads
        self.packs = config._attn_implementation == PACKED
        states, self.kernels = keep_apart(model)
        self._states = states and self.packs
        ropes = [getattr(part, "rope_type", None) for part in model.modules()]
        # LongRoPE's frequencies depend on what follows
        self.shares = self.packs and "longrope" not in ropes
        # not submodules: this module has their parameters
        object.__setattr__(self, "model_", model)
        object.__setattr__(self, "output", _Head(model, top))
        _try_head(model, self.output, config.hidden_size)

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        return self.get_submodule(self.layers_name)  # type: ignore[return-value]

    @property
    def tok_embeddings(self) -> nn.Embedding:  # type: ignore[override]
        return self.get_submodule(self._body).get_input_embeddings()  # type: ignore[operator]

    @property
    def output_layer(self) -> nn.Module:
        return self.get_submodule(self.output_name)

    @property
    def body(self) -> nn.Module:
        """The model without its output layer."""
        return self.get_submodule(self._body)

    def _run(self, tokens: Tensor, **others) -> Tensor:
        """Run the model without its output layer: [b, s] -> [b, s, d]."""
        return self.body(input_ids=tokens, use_cache=False, **others).last_hidden_state

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        if self.replay is not None:
            self.replay.begin(batch.routes)
        if batch.lengths is None:
            return self._run(batch.tokens)
        lengths = Lengths(batch.lengths, batch.shared)
        states = {ROWS: lengths} if self._states else {}
        with packed(lengths, self.kernel):
            # without a mask, transformers would look for sequences
            mask = torch.ones_like(batch.tokens)
            return self._run(
                batch.tokens, position_ids=batch.positions, attention_mask=mask, **states
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of complete rows: [b, s] -> [b, s, v]."""
        if not self.packs:
            hidden_rows = self._run(tokens)
            return torch.stack([self.output(hidden) for hidden in hidden_rows])
        rows = []
        for row in tokens:
            positions = torch.arange(len(row), device=row.device)[None]
            nothing = row.new_zeros(0)
            length = len(row)
            batch = MicroBatch(
                row[None], positions, (length,), nothing, nothing, nothing, 0, length
            )
            hidden = self.hidden_states(batch)[0]
            rows.append(self.output(hidden))
        return torch.stack(rows)

    def converted(self, state: Mapping[str, Tensor]) -> Converted:
        if self.text_part is not None:
            of_text = {}
            for name in state:
                new, _ = self._names.of(name)
                if not self.text_part.lacks(new):
                    of_text[name] = state[name]
            state = of_text
        return Converted(self._names, state, self.tied)

    def buffers_to_load(self) -> dict[str, Tensor]:
        return persistent_buffers(self)

    memory = cached_property(memory_of)
    graph_obstacle = cached_property(obstacle_of)  # type: ignore[assignment]

    def check_sampling(self) -> int:
        return self.memory.positions

    def replay_routes(self) -> None:
        self.replay = replay_of(self)

    def sampler(
        self, merge: bool | None = None, device: torch.device | None = None
    ) -> TransformersSampler:
        return TransformersSampler(self, merge, device)

    def empty_model(self, attention: str) -> Any:
        """Build transformers' model again, with another attention and without weights and adapters."""
        model: Any = self.model_
        config = copy.deepcopy(model.config)
        dtype = self.tok_embeddings.weight.dtype
        with torch.device("cpu"), _meta_parameters():
            return type(model)._from_config(
                config,
                dtype=dtype,
                attn_implementation=attention,
                experts_implementation=SORTED,
            )

    def wrapped(self, model) -> "TransformersDecoder":
        """Return the decoder of another model of this architecture."""
        return TransformersDecoder(model, self.architecture)

    def place_buffers(self, device: torch.device) -> None:
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    @property
    def published_modules(self) -> frozenset[str]:  # type: ignore[override]
        return self.left_out.union(name for name, _ in self.named_modules())

    @property
    def left_out(self) -> frozenset[str]:  # type: ignore[override]
        return self.text_part.modules if self.text_part else frozenset()


class _Head(nn.Module):
    """The output layer with scaling and capping: the model's forward with given hidden states."""

    def __init__(self, model, body: str) -> None:
        super().__init__()
        causal = copy.copy(model)
        given = _Given(model.get_submodule(body))
        causal._modules = {**model._modules, body: given}
        self.causal = causal

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return its parameters, including token rows that it shares with the embeddings."""
        yield from super().parameters(recurse)
        for part in self.causal.children():
            rows = vars(part).get(TokenRows.NAME)
            if rows is not None:
                yield from rows.parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, d] -> [n, v]."""
        return self.causal(inputs_embeds=hidden[None], use_cache=False).logits[0]


def _try_head(model, head: nn.Module, width: int) -> None:
    """Refuse a model whose code needs more than hidden states from its body."""
    dtype = model.get_input_embeddings().weight.dtype
    hidden = torch.empty(2, width, device="meta", dtype=dtype)
    with explain_errors(
        f"{type(model).__name__} does not compute logits from hidden states as others do"
    ):
        logits = head(hidden)
    if logits.ndim != 2 or len(logits) != 2:
        raise UserError(
            f"{type(model).__name__} computes logits of shape {list(logits.shape)} for 2 hidden states"
        )


class _Given(nn.Module):
    """A model's body that returns its input as last hidden states."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = (body,)  # a tuple, so that it is not a submodule

    def __getattr__(self, name: str) -> Any:  # some models keep factors of the logits in their body
        try:
            return super().__getattr__(name)
        except AttributeError:
            (body,) = self._body
            value = None if name.startswith("_") else getattr(body, name, None)
            if not isinstance(value, int | float):
                raise
            return value

    def forward(self, *_, inputs_embeds: Tensor, **__) -> "_Output":
        return _Output(inputs_embeds)


class _Output:
    """A body's output for the model's code: the last hidden states; all other attributes are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Tied(nn.Module):
    """The embeddings as output layer; they stay one parameter, which FSDP2 and loading replace once."""

    def __init__(self, embeddings: nn.Module, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embeddings = (embeddings,)  # a tuple, so that they are not a submodule
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        return self._embeddings[0].weight  # type: ignore[return-value]

    def forward(self, hidden: Tensor) -> Tensor:
        return frozen_linear(hidden, self.weight, self.bias)


def _number(config, key: str) -> int:
    try:
        value = getattr(config, key, None)
    except Exception:  # layers differ in it
        return 0
    return value if isinstance(value, int) else 0


def _name_of(model: nn.Module, part: nn.Module | None) -> str:
    for name, module in model.named_modules():
        if module is part:
            return name
    return ""


def build(
    folder: Path,
    config: ModelConfig,
    kind: partial[nn.Module],
    sizes: Sizes,
    targets: Iterable[str] | str | None,
    parameters: Iterable[str] | str | None,
    trust_remote_code: bool,
) -> TransformersDecoder:
    """Build transformers' model of a folder with LoRA; for arguments see :func:`rocm_ext.model.from_checkpoint`.

    ``kind`` is torchtune's class of adapted layers, with its dropout and quantisation.

    Raises:
        UserError: transformers does not know the model, or the model lacks a layer of ``targets`` or a pattern.
    """
    model = _on_meta(folder, _needs_code(config, trust_remote_code))
    named = (config.get("architectures") or [""])[0]
    built = type(model).__name__
    if named and str(named).lower() != built.lower():
        raise UserError(
            f"{folder / CONFIG}: it names {named}, but transformers builds {built} for model_type "
            f"{config.get('model_type')!r}; only causal language models are supported"
        )
    decoder = TransformersDecoder(model.train(), json.dumps(config, sort_keys=True))
    if parameters is None and targets is not None and not list(targets):
        raise UserError(f"target_modules is empty; expected {ALL} or names of linear layers")
    if targets is not None and targets != ALL:
        targets = listed(targets)
        for name in map(str, parameters or ()):
            if name.endswith(".weight"):  # adapters name some linear layers by their weights
                targets.append(name.removesuffix(".weight"))
    names = put_in(model, decoder.layers_name, targets, kind, sizes)
    if parameters is not None:
        names += put_in_experts(model, parameters, sizes, names)
    sizes.check_keys(names)
    odd = {last_part(name) for name in names} & decoder.names_of_experts
    if odd and kind.func is DoRALinear:
        raise UserError(
            f"PEFT takes {', '.join(sorted(odd))} of this model for its experts', and does not open DoRA on them; set "
            "use_dora=False, or target_modules without them"
        )
    for name in names:  # an adapted output layer
        if "." not in name:
            setattr(decoder, name, getattr(model, name))
            decoder.output.causal._modules[name] = getattr(model, name)  # type: ignore[union-attr]
    _log_structure(decoder, built, names)
    return decoder


def shapes_of(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of all weights of transformers' model of a folder, by name."""
    weights = _on_meta(folder).state_dict()
    return {name: list(weight.shape) for name, weight in weights.items()}


def _needs_code(config: ModelConfig, trust_remote_code: bool) -> bool:
    """Return whether the folder's code has to run, because transformers lacks the class; refuse untrusted code."""
    named = (config.get("architectures") or [""])[0]
    code = own_code(config)
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    if code is None or code == named == known:
        return False
    if not trust_remote_code:
        refuse_code(str(named))
    return True


def _on_meta(folder: Path, trusted: bool = False) -> Any:
    """Build transformers' model of a folder without weights; ``trusted``: with the folder's code."""
    version = transformers.__version__
    dtype = torch.get_default_dtype()
    with explain_errors(f"{folder / CONFIG}: transformers {version} cannot build this model"):
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trusted, local_files_only=True
        )
        whole = config.get_text_config() is not config  # not only a text model
        known = MODEL_FOR_MULTIMODAL_LM_MAPPING if whole else MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in known and not getattr(config, "auto_map", None):
            raise UserError(
                f"{folder / CONFIG}: transformers {version} has no language model for model_type {config.model_type!r}"
            )
        packs = config.get_text_config().model_type in PACKS and not trusted
        options = {
            "dtype": dtype,
            "trust_remote_code": trusted,
            "experts_implementation": SORTED,
        }
        if packs:
            options["attn_implementation"] = PACKED
        kind = AutoModelForMultimodalLM if whole else AutoModelForCausalLM
        with torch.device("cpu"), _meta_parameters():
            model = kind.from_config(config, **options)
        keep_precision(model, dtype)
        if packs:
            scale_each_sequence(model)
    return model


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Context that puts new parameters on the meta device. Buffers get values, which checkpoints lack."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers draws no values for it
        register(self, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _log_structure(decoder: TransformersDecoder, name: str, adapted: list[str]) -> None:
    log.info("%s: transformers' code, %s rows", name, "packed" if decoder.packs else "padded")
    if not decoder.packs:
        log.info(
            "padded rows are as long as the longest of their micro-batch, and share no prompts"
        )
    if decoder.text_part is not None:
        parts = ", ".join(decoder.text_part.parts)
        log.info("%s trains only on text: %s are neither loaded nor changed", name, parts)
    frozen = frozen_kinds(decoder, adapted)
    experts = fused_experts(decoder)
    hint = ""
    if experts and not experts.keys() & adapted:
        hint = f"; target_parameters={ALL_EXPERTS} adapts fused experts"
    with_lora = Counter(last_part(name) for name in adapted)
    log.info("LoRA on %s; none on %s%s", _counted(with_lora), _counted(frozen), hint)


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
