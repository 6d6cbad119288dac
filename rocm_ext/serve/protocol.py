"""Bodies and answers of Tinker's protocol, as the SDK ``tinker`` writes and reads them.

``forward_backward`` and its result, and the result of sampling, are protobuf; the SDK has the schema. All else is JSON,
checked by the SDK's own types.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker.proto import tinker_public_pb2 as proto

from rocm_ext.base.errors import UserError
from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.serve.losses import LOGPROBS, WEIGHTS

Request = TypeVar("Request", bound=BaseModel)

NOTHING = -99999.0  # the protocol's log-prob of positions that were not computed
_TARGETS = "target_tokens"
_DTYPES = {proto.DTYPE_FLOAT32: np.float32, proto.DTYPE_INT64: np.int64}


@dataclass(frozen=True)
class Computation:
    """A call of ``forward_backward`` or ``forward``.

    Attributes:
        model: id of the client's model.
        number: its ``seq_id``: calls of a model are done in this order, from 1.
        loss, settings: name and ``loss_fn_config`` of the loss.
        gradients: whether gradients are wanted.
        data: the datums.
    """

    model: str
    number: int
    loss: str
    settings: dict[str, float | str]
    gradients: bool
    data: Sequence[Any]


def parse(kind: type[Request], content: Any) -> Request:
    """Check a JSON body against a type of the SDK.

    Raises:
        UserError: a field is missing, unknown or of another type; the message names the first one.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise UserError(f"{where}: {first['msg']}") from error


def computation(body: bytes) -> Computation:
    """Read the body of ``forward_backward``; a UserError if it is malformed."""
    message = proto.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(
            "the body is no ForwardBackwardRequest in protobuf; use the SDK tinker"
        ) from error
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        settings[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return Computation(
        message.model_id,
        message.seq_id,
        message.loss_fn,
        settings,
        not message.forward_only,
        message.data,
    )


def rows_of(data: Sequence[Any], columns: Sequence[str], vocabulary: int, longest: int) -> Rows:
    """Convert datums to rows, in which every target is a label.

    A row's tokens are the datum's, and its last target: position i + 1 has the label that input i predicts.

    Args:
        data: datums in protobuf.
        columns: inputs that the loss reads, besides the targets.
        vocabulary: number of token ids.
        longest: most input tokens of a datum.

    Raises:
        UserError: there is no datum, or one is malformed; the message names it.
    """
    if not data:
        raise UserError("forward_backward has no data")
    rows = Rows([], [], [], {"rows": len(data)}, {name: [] for name in columns})
    for index, datum in enumerate(data):
        try:
            tokens = _tokens(datum.model_input)
            inputs = _inputs(datum.loss_fn_inputs, columns, len(tokens))
            targets = inputs.pop(_TARGETS)
            _check_tokens("model_input", tokens, vocabulary)
            _check_tokens(_TARGETS, targets, vocabulary)
            if len(tokens) > longest:
                raise ValueError(
                    f"{len(tokens)} tokens; this server takes {longest} (its tokenizer.max_seq_len)"
                )
        except ValueError as error:
            raise UserError(f"datum {index}: {error}") from error
        rows.tokens.append(np.append(tokens, targets[-1]).astype(np.int32))
        rows.labels.append(np.append(IGNORE, targets).astype(np.int32))
        rows.lengths.append((len(tokens) + 1,))
        for name, values in inputs.items():
            rows.columns[name].append(np.append(np.float32(0), values))
    return rows


def _tokens(chunks: Iterable[Any]) -> np.ndarray:
    """Return the token ids of a model's input: int32 [n]."""
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"model_input has a chunk of {kind}; this server reads text alone")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(tokens):
        raise ValueError("model_input is empty")
    return tokens


def _inputs(given: Mapping[str, Any], columns: Sequence[str], length: int) -> dict[str, np.ndarray]:
    """Return the inputs of a loss by name, [n] each; weights are 1 where the datum has none."""
    unknown = sorted(set(given) - {_TARGETS, *columns})
    if unknown:
        expected = ", ".join([_TARGETS, *columns])
        raise ValueError(f"loss_fn_inputs has {', '.join(unknown)}; this loss reads {expected}")
    inputs = {}
    for name in (_TARGETS, *columns):
        if name in given:
            values = _array(name, given[name])
        elif name == WEIGHTS:
            values = np.ones(length, np.float32)
        else:
            raise ValueError(f"loss_fn_inputs has no {name}")
        if len(values) != length:
            raise ValueError(f"{name} has {len(values)} values for {length} tokens")
        inputs[name] = values
    return inputs


def _array(name: str, tensor: Any) -> np.ndarray:
    """Return a tensor in protobuf as an array [n]."""
    if len(tensor.shape) > 1 or tensor.HasField("sparse_csr"):
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; this server takes one value a token"
        )
    expected = np.int64 if name == _TARGETS else np.float32
    if _DTYPES.get(tensor.dtype) is not expected:
        raise ValueError(f"{name} must be {np.dtype(expected).name}")
    values = np.frombuffer(tensor.dense, expected)
    if tensor.shape and tensor.shape[0] != len(values):
        raise ValueError(f"{name} has {len(values)} values and shape {list(tensor.shape)}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has a value that is not finite")
    return values


def _check_tokens(name: str, tokens: np.ndarray, vocabulary: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        raise ValueError(f"{name} has token id {outside[0]}; the model has 0 to {vocabulary - 1}")


def text_tokens(prompt: Any, vocabulary: int) -> tuple[int, ...]:
    """Return the token ids of a prompt, a ``ModelInput`` of the SDK; a UserError if it has others than text."""
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise UserError(f"the prompt has a chunk of {chunk.type}; this server reads text alone")
        tokens += chunk.tokens
    if not tokens:
        raise UserError("the prompt is empty")
    try:
        _check_tokens("the prompt", np.asarray(tokens), vocabulary)
    except ValueError as error:
        raise UserError(str(error)) from error
    return tuple(tokens)


def computed(summed: float, logprobs: Sequence[np.ndarray]) -> bytes:
    """Return the result of a computation: the loss's sum, and log-probs [n] fp32 by datum."""
    message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = summed
    record = message.loss_fn_outputs.add()
    record.num_datums = len(logprobs)
    sizes = [values.nbytes for values in logprobs]
    field = record.fields[LOGPROBS]
    field.dtype = proto.DTYPE_FLOAT32
    field.data = np.concatenate(logprobs).tobytes()
    field.offsets = np.cumsum([0, *sizes]).astype(np.int64).tobytes()
    return message.SerializeToString()


@dataclass(frozen=True)
class TopK:
    """The most probable tokens of some positions: ids and log-probs, both [n, k]; see :data:`NOTHING`."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Sampled:
    """A sampled answer: tokens, their log-probs, whether a stop ended it, and the most probable tokens if asked."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    top: TopK | None = None


def sampled(
    sequences: Iterable[Sampled], prompt_logprobs: np.ndarray | None, prompt_top: TopK | None
) -> bytes:
    """Return the result of sampling; log-probs of a prompt's tokens are [n] fp32, NaN where not computed."""
    message = proto.SampleResponse()
    for sequence in sequences:
        made = message.sequences.add()
        made.tokens = np.asarray(sequence.tokens, np.int32).tobytes()
        made.logprobs = np.asarray(sequence.logprobs, np.float32).tobytes()
        stopped = sequence.stopped
        made.stop_reason = proto.STOP_REASON_STOP if stopped else proto.STOP_REASON_LENGTH
        if sequence.top is not None:
            _put(made.topk_sampled_logprobs, sequence.top)
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    if prompt_top is not None:
        _put(message.topk_prompt_logprobs, prompt_top)
    return message.SerializeToString()


def _put(message: Any, top: TopK) -> None:
    message.length, message.k = top.ids.shape
    message.token_ids = top.ids.astype(np.int32).tobytes()
    message.logprobs = top.logprobs.astype(np.float32).tobytes()
