"""The prompts of a run, rendered to tokens, and the requests for answers to them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune.modules import TransformerDecoder

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import warn
from rocm_ext.data.prompts import Prompt, check_disjoint
from rocm_ext.data.render import render_prompt
from rocm_ext.data.rows import check_vocabulary
from rocm_ext.data.tokenizer import special_token_lines, special_tokens_in
from rocm_ext.distributed.ranks import rank
from rocm_ext.plan import workload
from rocm_ext.runs.folder import GREEDY
from rocm_ext.sampling import Request, Sampling, sample_seed
from rocm_ext.verifiers import build
from rocm_ext.verifiers.selfcheck import try_out


class PromptSet:
    """``prompts`` and ``eval_prompts`` of a config.

    Args:
        cfg: config of ``raft_rocm`` or of a recipe that extends it.

    Attributes:
        training: prompts to train on; empty if ``prompts`` is null.
        held_out: prompts to evaluate on; empty if ``eval_prompts`` is null.
        tokens: token ids of every prompt, by its id; empty until :meth:`render`.

    Raises:
        UserError: prompts cannot be read, or a held-out prompt is also a training prompt.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.training = _read(cfg, "prompts")
        self.held_out = _read(cfg, "eval_prompts")
        if cfg.stop_after_no_gain and not self.held_out:
            raise UserError("stop_after_no_gain needs held-out prompts: set eval_prompts")
        check_disjoint(self.training, self.held_out)
        self.tokens: dict[str, list[int]] = {}
        self._by_id = {prompt.id: prompt for prompt in self}

    def render(self, tokenizer: Any) -> None:
        """Fill ``tokens`` as SFT rows are rendered.

        Raises:
            UserError: the chat template refuses a prompt.
        """
        special = special_tokens_in(tokenizer)
        reserved = []
        for prompt in self:
            try:
                self.tokens[prompt.id] = render_prompt(tokenizer, prompt.messages, prompt.tools or None)
            except UserError as error:
                raise UserError(f"{prompt.origin}: {error}") from error
            if found := special(message["content"] for message in prompt.messages):
                reserved.append((found, prompt.origin))
        warn(special_token_lines("prompts", len(self.tokens), reserved))

    def __iter__(self) -> Iterator[Prompt]:
        return iter((*self.training, *self.held_out))

    def __getitem__(self, prompt_id: str) -> Prompt:
        return self._by_id[prompt_id]

    def check_verifier(self) -> dict[str, Any]:
        """Check that the verifier can run here and can verify every prompt's row, and try it on an answer.

        The main rank tries it, unless ``max_error_share`` allows every answer to fail.

        Returns:
            The verifier's node in the config; worker processes build the verifier from it.

        Raises:
            UserError: the verifier cannot run, rejects a row (the message then names the row and the field), or fails
                on an answer.
        """
        node: Any = OmegaConf.to_container(self._cfg.verifier, resolve=True)
        verifier = build(node)
        verifier.check()
        for prompt in self:
            try:
                verifier.check_row(prompt.row)
            except (UserError, ValueError) as error:
                raise UserError(f"{prompt.origin}: {error}") from error
        if rank() == 0 and self._cfg.max_error_share < 1:
            try_out(node, [prompt.row for prompt in self], self._cfg.verify_timeout)
        return node

    def check_model(self, decoder: TransformerDecoder) -> None:
        """Check that the model can answer every prompt.

        Raises:
            UserError: prompt and answer exceed the model's context, or the tokenizer belongs to another model.
        """
        self.check_length(decoder.max_seq_len)
        check_vocabulary(max(map(max, self.tokens.values())), decoder.tok_embeddings.num_embeddings)

    def check_length(self, context: float) -> None:
        """Check that every prompt and its answer have at most ``context`` tokens.

        Raises:
            UserError: naming a prompt that is too long.
        """
        new = self._cfg.max_new_tokens
        for prompt in self:
            if (length := len(self.tokens[prompt.id])) + new > context:
                raise UserError(
                    f"{prompt.origin}: {length} tokens and max_new_tokens {new} are more than the {context} that the "
                    "model takes; lower max_new_tokens or remove the prompt"
                )

    def requests(self, prompts: Sequence[Prompt], step: int) -> list[Request]:
        """Return the requests for ``samples_per_prompt`` answers to each of ``prompts``.

        Args:
            prompts: prompts that the step asks.
            step: number of the step or cycle; with the run's seed it determines the seed of each answer.
        """
        return [self._request(p, step, n) for p in prompts for n in range(self._cfg.samples_per_prompt)]

    def evaluation_requests(self, sampling: Sampling) -> list[tuple[Request, Sampling]]:
        """Return the requests of an evaluation: per held-out prompt a greedy answer and ``eval_samples`` sampled ones.

        Every evaluation of a run has the same.

        Args:
            sampling: settings of the sampled answers; the greedy one takes its length limit and stop strings from them.
        """
        greedy = replace(sampling, temperature=0, top_k=None, top_p=None, min_p=None)
        return [
            (self._request(prompt, "eval", sample), greedy if sample == GREEDY else sampling)
            for prompt in self.held_out
            for sample in (GREEDY, *range(self._cfg.eval_samples))
        ]

    def _request(self, prompt: Prompt, step: int | str, sample: int) -> Request:
        seed = sample_seed(self._cfg.seed, step, prompt.id, sample)
        return Request(prompt.id, sample, seed, tuple(self.tokens[prompt.id]), prompt.messages, prompt.tools)

    def questions(self) -> workload.Questions:
        """Describe the prompts and the answers that are expected, before any sampling."""
        lengths = [len(tokens) for tokens in self.tokens.values()]
        return workload.Questions(
            prompts=len(self.training),
            held_out=len(self.held_out),
            longest=max(lengths),
            mean=fmean(lengths),
            answer=workload.expected_answer(self._cfg),
            source="the run's prompts",
        )

    def fingerprint(self, prompts: Sequence[Prompt]) -> str:
        """Hash the ids, tokens and rows of ``prompts`` with SHA-256, in hex; their order does not matter."""
        rows = sorted(json.dumps([p.id, self.tokens[p.id], p.row], sort_keys=True, default=str) for p in prompts)
        return sha256("\n".join(rows).encode()).hexdigest()


def _read(cfg: DictConfig, key: str) -> list[Prompt]:
    if cfg[key] is None:
        return []
    prompts = config.instantiate(cfg[key], key=key)
    if not prompts or not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise UserError(f"{key}: {cfg[key]._component_} must return a non-empty list of rocm_ext.data.prompts.Prompt")
    return prompts
