"""Models with quantised weights, in files as their owners publish them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = 32  # of the small models' FP8; published ones have 128


def write_quantized(source: Path, target: Path, kind: str) -> Path:
    """Write the model of ``source`` with quantised weights.

    Args:
        source: folder of a model in 16 or 32 bits.
        target: folder to write.
        kind: ``fp8`` has scales of blocks, as Qwen3-8B-FP8 and DeepSeek-V3; ``rows`` those of rows, as FP8-dynamic of
            llm-compressor; ``mxfp4`` is gpt-oss-20b's.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    content = json.loads((source / "config.json").read_text())
    content["quantization_config"] = {
        "fp8": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [
                "lm_head",
                *(f"model.layers.{n}.mlp.gate" for n in range(2)),
            ],
        },
        "rows": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "channel",
                        "symmetric": True,
                    },
                    "input_activations": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "token",
                        "dynamic": True,
                    },
                }
            },
            "ignore": ["lm_head", r"re:.*\.k_proj$"],
        },
        "mxfp4": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "lm_head",
            ],
        },
    }[kind]
    (target / "config.json").write_text(json.dumps(content))
    files = sorted(source.glob("*.safetensors"))
    index: dict[str, str] = {}
    for file in files:
        tensors: dict[str, Tensor] = {}
        for name, weight in load_file(file).items():
            tensors |= _stored(name, weight, kind)
        save_file(tensors, target / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
    if len(files) > 1:
        (target / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
    return target


def _stored(name: str, weight: Tensor, kind: str) -> dict[str, Tensor]:
    if kind == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        blocks, scales = mxfp4(weight.mT)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}
    if (
        kind != "mxfp4"
        and name.endswith("_proj.weight")
        and not (kind == "rows" and "k_proj" in name)
    ):
        if kind == "rows":
            scale = weight.abs().amax(1, keepdim=True) / 448
            return {
                name: (weight / scale).to(torch.float8_e4m3fn),
                f"{name}_scale": scale.bfloat16(),
            }
        rows, columns = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
        scale = torch.empty(rows, columns)
        packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                scale[i, j] = weight[at].abs().max() / 448
                packed[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
        return {name: packed, f"{name}_scale_inv": scale}
    return {name: weight.bfloat16() if kind == "mxfp4" else weight}


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., out, in] to blocks [..., out, in / 32, 16] and scales [..., out, in / 32]."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponent.exp2()[..., None]
    code = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    return (code[..., ::2] + 16 * code[..., 1::2]).to(torch.uint8), (exponent + 127).to(torch.uint8)
