"""The prompts of a run, rendered: those to learn from and those held out."""

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune.modules import TransformerDecoder

from rocm_ext import config
from rocm_ext.data.prompts import Prompt, check_disjoint
from rocm_ext.data.render import render_prompt
from rocm_ext.data.rows import check_vocabulary
from rocm_ext.errors import UserError
from rocm_ext.plan import workload
from rocm_ext.verifiers import build


class PromptSet:
    """``prompts`` and ``eval_prompts`` of a config.

    Args:
        cfg: of ``raft_rocm`` or a recipe that extends it.
        tokenizer: renders prompts as it renders SFT rows.

    Attributes:
        training: prompts to learn from; none where ``prompts`` is null.
        held_out: prompts to evaluate on; none where ``eval_prompts`` is null.
        tokens: token ids of every prompt, by its id.

    Raises:
        UserError: prompts cannot be read, or a held-out prompt is also trained on.
    """

    def __init__(self, cfg: DictConfig, tokenizer: Any) -> None:
        self._cfg = cfg
        self.training = _read(cfg, "prompts")
        self.held_out = _read(cfg, "eval_prompts")
        if cfg.stop_after_no_gain and not self.held_out:
            raise UserError("stop_after_no_gain needs held-out prompts: set eval_prompts")
        check_disjoint(self.training, self.held_out)
        self.tokens = {prompt.id: render_prompt(tokenizer, prompt.messages) for prompt in self}
        self._by_id = {prompt.id: prompt for prompt in self}

    def __iter__(self) -> Iterator[Prompt]:
        return iter((*self.training, *self.held_out))

    def __getitem__(self, prompt_id: str) -> Prompt:
        return self._by_id[prompt_id]

    def check_verifier(self) -> dict[str, Any]:
        """Refuse a verifier that cannot run here, and rows that it cannot verify.

        Returns:
            the verifier's node in the config, from which worker processes build it.

        Raises:
            UserError: naming the row and the field.
        """
        node: Any = OmegaConf.to_container(self._cfg.verifier, resolve=True)
        verifier = build(node)
        verifier.check()
        for prompt in self:
            try:
                verifier.check_row(prompt.row)
            except (UserError, ValueError) as error:
                raise UserError(f"{prompt.origin}: {error}") from error
        return node

    def check_model(self, decoder: TransformerDecoder) -> None:
        """Refuse prompts that the model cannot answer.

        Raises:
            UserError: a prompt leaves no room for an answer, or the tokenizer is another model's.
        """
        new, context = self._cfg.max_new_tokens, decoder.max_seq_len
        for prompt in self:
            if (length := len(self.tokens[prompt.id])) + new > context:
                raise UserError(
                    f"{prompt.origin}: {length} tokens, with max_new_tokens {new} more than the {context} that the "
                    "model takes; lower max_new_tokens or drop the prompt"
                )
        check_vocabulary(max(map(max, self.tokens.values())), decoder.tok_embeddings.num_embeddings)

    def expected_work(self) -> workload.Workload:
        """What cycles will train on, as far as it can be known before sampling."""
        lengths = [len(tokens) for tokens in self.tokens.values()]
        asked = workload.Questions(
            prompts=len(self.training),
            held_out=len(self.held_out),
            longest=max(lengths),
            mean=fmean(lengths),
            answer=workload.expected_answer(self._cfg),
            source="the run's prompts",
        )
        return workload.kept_rows(self._cfg, asked)

    def fingerprint(self, prompts: Sequence[Prompt]) -> str:
        """sha256 of what the model reads and what verifiers see of ``prompts``, in any order."""
        rows = sorted(json.dumps([p.id, self.tokens[p.id], p.row], sort_keys=True, default=str) for p in prompts)
        return sha256("\n".join(rows).encode()).hexdigest()


def _read(cfg: DictConfig, key: str) -> list[Prompt]:
    if cfg[key] is None:
        return []
    prompts = config.instantiate(cfg[key], key=key)
    if not prompts or not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise UserError(f"{key}: {cfg[key]._component_} gave no list of rocm_ext.data.prompts.Prompt")
    return prompts
