"""The embedded generation engine: batched sampling over a transformers model with a KV cache.

A batch of groups is decoded together: each prompt is run once, its cache repeated for the group's completions, and
finished rows leave the batch. Between two decode steps the owner may load new weights; the cache is then recomputed from
the tokens, so that every ``mu`` is exact for the version that its token carries.
"""

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..head import head_logits, linear_head, tempered
from ..kernels import matmul_context
from ..precision import DTYPES, dtype_name, observed_dtypes
from ..sync.shm import Payload, check_fit, load_into
from .sampling import derive_seed, sample, uniforms
from .types import EngineSpec, Generated, Request, Rollout


class HFEngine:
    """One model in the rollout dtype."""

    def __init__(self, spec: EngineSpec) -> None:
        from ..policy import load_policy

        torch.set_num_threads(spec.num_threads)
        self.spec = spec
        self.device = torch.device(spec.device)
        kwargs = {key: value for key, value in spec.init_kwargs.items() if key not in ("dtype", "torch_dtype")}
        self.model: Any = load_policy(spec.model, kwargs, spec.dtypes["rollout"], spec.trust_remote_code, self.device)
        self.head = linear_head(self.model)  # None: logits are the model's own, as in the trainer
        self.body: nn.Module = self.model if self.head is None else self.model.base_model
        self.head_dtype = DTYPES[spec.dtypes["rollout_head"]]
        self.version = -1
        self.loads = 0
        self._memory: mmap.mmap | None = None
        eos = self.model.generation_config.eos_token_id
        eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self.eos_ids = torch.tensor(eos_ids, dtype=torch.long, device=self.device)
        self._seen: dict[str, str] = {}

    def load(self, payload: Payload, fd: int) -> int:
        """Take over new weights; returns the checksum of what is held. Caches of running batches become invalid.

        Weights that do not fit change nothing, and the version before goes on serving.
        """
        check_fit(self.model, payload)
        self.version = -1  # none, while weights of two versions are mixed
        if self._memory is None:  # once: touching every page anew would take longer than copying the weights
            self._memory = mmap.mmap(fd, 0)
        held = load_into(self.model, payload, self._memory)
        if self.head is not None:
            self._head_weight = self.head.weight.detach().to(self.head_dtype)
            self._head_bias = None if self.head.bias is None else self.head.bias.detach().to(self.head_dtype)
        self._seen["wire"] = dtype_name(payload.dtype)
        self.version = payload.version
        self.loads += 1
        return held

    def observed(self) -> dict[str, str]:
        """Dtypes read from live objects; the head and the cache once something was generated."""
        return {"rollout": observed_dtypes(self.model.parameters()), **self._seen}

    @torch.inference_mode()
    def generate(self, requests: list[Request], between_steps: Callable[[], None] | None = None) -> Iterator[Generated]:
        """Decode some requests together and yield each as soon as all of its completions have ended."""
        if self.version < 0:
            raise RuntimeError("the engine has no weights yet")
        with matmul_context(self.device, DTYPES[self.spec.dtypes["rollout"]], self.head_dtype):
            yield from _Batch(self, requests).decode(between_steps)


class _Batch:
    """The state of one batch: rows of completions, those still running, and the cache of these."""

    def __init__(self, engine: HFEngine, requests: list[Request]) -> None:
        self.engine, self.requests, self.device = engine, requests, engine.device
        self.owner = [index for index, request in enumerate(requests) for _ in range(request.num_completions)]
        self.rows = len(self.owner)
        self.limits = np.array([requests[owner].max_new_tokens for owner in self.owner])
        self.max_new = int(self.limits.max())
        self.prompts = [requests[owner].prompt_ids for owner in self.owner]
        temperatures = [requests[owner].temperature for owner in self.owner]
        self.greedy = torch.tensor([t == 0.0 for t in temperatures], device=self.device)
        self.temperature = torch.tensor([t or 1.0 for t in temperatures], device=self.device)
        self.any_greedy = bool(self.greedy.any())
        self.one_temperature = len(set(temperatures)) == 1
        seeds = [derive_seed(r.seed, completion) for r in requests for completion in range(r.num_completions)]
        self.uniform = torch.from_numpy(uniforms(seeds, self.max_new)).to(self.device)
        self.tokens = np.zeros((self.rows, self.max_new), dtype=np.int64)
        self.mu = np.zeros((self.rows, self.max_new), dtype=np.float32)  # mu is fp32 always
        self.versions = np.zeros((self.rows, self.max_new), dtype=np.int32)
        self.lengths = np.zeros(self.rows, dtype=np.int64)
        self.finished = np.zeros(self.rows, dtype=bool)
        self.running = np.arange(self.rows)
        self.version = engine.version
        self.cache: Any = None  # of the running rows, like the two below
        self.mask: Tensor | None = None  # [running, width]: 0 on padding, None where there is none
        self.next_position = torch.zeros(self.rows, dtype=torch.long, device=self.device)

    def decode(self, between_steps: Callable[[], None] | None) -> Iterator[Generated]:
        engine = self.engine
        loads = engine.loads
        hidden = self._prefill_prompts()
        open_rows = [request.num_completions for request in self.requests]
        for position in range(self.max_new):
            next_tokens = self._sample(hidden, position)
            ended = self._record(next_tokens, position)
            for row in self.running[ended]:
                open_rows[self.owner[row]] -= 1
                if open_rows[self.owner[row]] == 0:
                    yield self._collect(self.owner[row])
            if ended.all():
                return
            if between_steps is not None:
                between_steps()
            self._keep(~ended)
            if engine.loads != loads:
                loads = engine.loads
                hidden = self._prefill_sequences(position + 1)
            else:
                hidden = self._advance(next_tokens[torch.from_numpy(~ended).to(self.device)])

    def _sample(self, hidden: Tensor, position: int) -> Tensor:
        """Next token of every running row, [running]; ``mu`` is written down."""
        engine, raw = self.engine, hidden
        if engine.head is not None:
            raw = head_logits(hidden.to(engine.head_dtype), engine._head_weight, engine._head_bias)
        engine._seen["rollout_head"] = observed_dtypes([raw])
        rows = torch.from_numpy(self.running).to(self.device)
        if self.one_temperature:
            log_p = tempered(raw, float(self.temperature[0])).log_softmax(-1)
        else:
            log_p = (tempered(raw, 1.0) / self.temperature[rows, None]).log_softmax(-1)
        tokens = sample(log_p, self.uniform[rows, position])
        if self.any_greedy:
            tokens = torch.where(self.greedy[rows], log_p.argmax(-1), tokens)
        self.mu[self.running, position] = log_p.gather(-1, tokens[:, None])[:, 0].cpu().numpy()
        return tokens

    def _record(self, tokens: Tensor, position: int) -> np.ndarray:
        """Write the sampled tokens down and say which running rows ended with them."""
        rows = self.running
        self.tokens[rows, position] = tokens.cpu().numpy()
        self.versions[rows, position] = self.engine.version
        self.lengths[rows] += 1
        self.finished[rows] = torch.isin(tokens, self.engine.eos_ids).cpu().numpy()
        ended: np.ndarray = self.finished[rows] | (self.lengths[rows] >= self.limits[rows])
        return ended

    def _collect(self, owner: int) -> Generated:
        request = self.requests[owner]
        first = self.owner.index(owner)
        rollouts = [
            Rollout(
                token_ids=self.tokens[row, : self.lengths[row]].tolist(),
                mu=self.mu[row, : self.lengths[row]].copy(),
                versions=self.versions[row, : self.lengths[row]].copy(),
                finished=bool(self.finished[row]),
            )
            for row in range(first, first + request.num_completions)
        ]
        return Generated(request.serial, rollouts, self.version)

    def _prefill_prompts(self) -> Tensor:
        """Run each prompt once and repeat its cache for its completions."""
        hidden = self._forward_padded([request.prompt_ids for request in self.requests])
        repeats = torch.tensor(self.owner, device=self.device)
        self.cache.batch_select_indices(repeats)
        self.mask = None if self.mask is None else self.mask[repeats]
        self.next_position = self.next_position[repeats]
        return hidden[repeats]

    def _prefill_sequences(self, num_sampled: int) -> Tensor:
        """Run prompt and sampled tokens of every running row again, under newly loaded weights."""
        return self._forward_padded(
            [self.prompts[row] + self.tokens[row, :num_sampled].tolist() for row in self.running]
        )

    def _forward_padded(self, sequences: list[list[int]]) -> Tensor:
        """Fill a new cache with some sequences, padded on the left; returns what :meth:`_body` does."""
        from transformers import DynamicCache

        width = max(len(ids) for ids in sequences)
        ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences], device=self.device)
        lengths = torch.tensor([len(s) for s in sequences], device=self.device)
        padded = int(lengths.min()) < width
        columns = torch.arange(width, device=self.device)[None]
        self.mask = (columns >= (width - lengths)[:, None]).long() if padded else None
        positions = (columns - (width - lengths)[:, None]).clamp_(min=0)
        self.cache = DynamicCache(config=self.engine.model.config)
        self.next_position = lengths
        return self._body(ids, positions)

    def _advance(self, tokens: Tensor) -> Tensor:
        """One decode step of the running rows, [running, width]."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        positions = self.next_position[:, None]
        self.next_position = self.next_position + 1
        return self._body(tokens[:, None], positions)

    def _body(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states at the last position, [rows, width]; logits where the head is not applied apart."""
        output = self.engine.body(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.engine._seen["kv_cache"] = observed_dtypes([self.cache.layers[0].keys])
        states: Tensor = output.logits if self.engine.head is None else output.last_hidden_state
        return states[:, -1]

    def _keep(self, keep: np.ndarray) -> None:
        """Let finished rows go."""
        if keep.all():
            return
        index = torch.from_numpy(np.flatnonzero(keep)).to(self.device)
        self.cache.batch_select_indices(index)
        self.mask = None if self.mask is None else self.mask[index]
        self.next_position = self.next_position[index]
        self.running = self.running[keep]
