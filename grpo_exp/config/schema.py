"""The typed shape of every configuration, and the one place where a default lives.

Each dataclass is one config group (a folder under ``conf/``); an option file there holds only what differs from the
defaults below. Nothing here imports torch, so the command line can compose and check a configuration in well under a
second. Values that Hydra cannot check by type are checked by :mod:`grpo_exp.config.validate`.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LossScaleMode(Enum):
    none = "none"
    static = "static"
    dynamic = "dynamic"


class Backend(Enum):
    hf = "hf"
    vllm = "vllm"
    vllm_server = "vllm_server"
    replay = "replay"  # no generator: rollouts that an earlier run recorded


class SyncTransport(Enum):
    """How weights get from the trainer to an engine."""

    auto = "auto"
    shm = "shm"
    file = "file"
    nccl = "nccl"
    ipc = "ipc"


class TaskName(Enum):
    reverse = "reverse"
    sort = "sort"
    shortest = "shortest"
    jsonl = "jsonl"
    reasoning_gym = "reasoning_gym"
    python = "python"  # rows and functions were given to AsyncGRPOTrainer as objects


class AnswerFrom(Enum):
    """What of a completion is scored as its answer, with ``task=reasoning_gym``."""

    text = "text"  # all of it
    tag = "tag"  # what the last <answer>…</answer> encloses
    number = "number"  # the last number


class RewardErrors(Enum):
    fail = "fail"
    skip = "skip"


class FailureRule(Enum):
    """What a failed run (not one that was merely stopped) counts for in the comparison. Each is listed in any case."""

    leave_out = "leave_out"  # nothing
    start = "start"  # its value before training, as if it had learned nothing
    last = "last"  # what it had when it failed


class Advantage(Enum):
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    rloo = "rloo"


class Loss(Enum):
    """The policy loss of a token; formulas and papers are in grpo_exp/algo/policy_loss.py."""

    ppo_clip = "ppo_clip"
    gspo = "gspo"  # one ratio per sequence
    cispo = "cispo"  # REINFORCE with a truncated ratio
    dppo_tv = "dppo_tv"  # kept within a difference of probabilities


class Normalization(Enum):
    sequence_mean = "sequence_mean"
    token_mean = "token_mean"
    constant = "constant"


class KlEstimator(Enum):
    """What is averaged for KL(policy || reference) at the sampled tokens; formulas in grpo_exp/algo/penalty.py."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Proximal(Enum):
    """The log-probability below ``new`` in the policy ratio."""

    rollout = "rollout"  # mu: the generator's own
    recompute = "recompute"  # old: the trainer's, under the weights at the start of the step
    interpolate = "interpolate"  # between mu and old, by the staleness of the token
    beta_removal = "beta_removal"  # mu + beta: the trainer's, under the weights that sampled the token


class Weight(Enum):
    """The detached weight of a token's loss, made from ``d = proximal - mu``."""

    none = "none"  # 1
    token = "token"  # exp(d)
    token_tis = "token_tis"  # min(exp(d), weight_high)
    token_icepop = "token_icepop"  # exp(d) where it is within weight_low … weight_high, else 0
    seq_tis = "seq_tis"  # min(W, weight_high), W = exp(sum of d over the sequence)
    seq_mis = "seq_mis"  # W where it is within weight_low … weight_high, else 0


class AlarmAction(Enum):
    """What is done when a rule of the alarm fires; all but ``none`` also write an event."""

    none = "none"  # the rule is off
    warn = "warn"
    lower_lr = "lower_lr"  # times alarm.lr_factor, for the rest of the run
    stop = "stop"  # the run ends as done, and the last checkpoint from before is kept


class Schedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Strategy(Enum):
    single = "single"
    ddp = "ddp"  # every rank holds the whole model
    fsdp2 = "fsdp2"  # every rank holds a part of every weight


class TrackerName(Enum):
    none = "none"
    wandb = "wandb"


class WandbMode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"


@dataclass
class ModelConfig:
    """Which policy is trained. ``init_kwargs`` are keywords of ``from_pretrained``."""

    name_or_path: str = MISSING
    tokenizer: str | None = None
    init_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


@dataclass
class LoraConfig:
    """Low-rank adapters in the place of all weights; ``precision.adapter`` is their dtype."""

    rank: int = 0  # 0 = none: all weights are trained
    alpha: float = 32.0  # B A is multiplied by alpha / rank
    target_modules: list[str] = field(default_factory=list)  # names of linear layers; none = all but the head


@dataclass
class LossScaleConfig:
    """Loss scaling for fp16 compute; the fields of ``torch.amp.GradScaler``. ``static`` uses ``init`` for ever."""

    mode: LossScaleMode = LossScaleMode.none
    init: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass
class PrecisionConfig:
    """One dtype name per precision site. ``null`` follows the site named in the comment, ``auto`` the checkpoint."""

    params: str = "auto"
    compute: str | None = None  # follows params
    head: str | None = None  # follows compute
    grad_reduce: str | None = None  # follows params
    optimizer_state: str = "fp32"
    rollout: str | None = None  # follows compute
    rollout_head: str | None = None  # follows rollout
    kv_cache: str | None = None  # follows rollout
    wire: str | None = None  # follows rollout
    reference: str | None = None  # follows params
    adapter: str | None = None  # follows optimizer_state
    matmul: str = "highest"
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)


@dataclass
class SamplingConfig:
    """What makes the tokens that are sampled other than the policy's own. The defaults change nothing."""

    top_p: float = 1.0
    top_k: int = 0  # 0 = all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass
class EvaluationSamplingConfig(SamplingConfig):
    """How the sampled half of an evaluation draws; it trains nothing, so it may do what training may not."""

    temperature: float | None = None  # follows rollout.temperature


@dataclass
class VllmConfig:
    """What only vLLM has. Its memory is given, not a share of what is free, so that a trainer fits beside it."""

    max_model_len: int | None = None  # tokens of prompt and completion; null: the model's own context
    kv_cache_gib: float = 1.0
    enforce_eager: bool | None = None  # null: no compilation on a CPU, CUDA graphs on a GPU


@dataclass
class RolloutConfig(SamplingConfig):
    """Generator workers. ``num_workers=0`` runs the engine inside the trainer's process, in lockstep.

    The sampling settings are here to be refused: a completion that they shaped has no ratio to train on.
    """

    backend: Backend = Backend.hf
    num_workers: int = 1
    num_threads: int = 1
    batch_size: int = 256  # completions decoded together
    temperature: float = 1.0
    max_staleness: int | None = None  # null: 1, and 0 in lockstep, where nothing else is possible
    in_flight_sync: bool = True  # load new weights between two decode steps rather than between two batches
    startup_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    max_retries: int = 2  # of one group
    max_failures: int = 2  # errors and deaths of one worker, in a row; timeouts do not count
    sync: SyncTransport = SyncTransport.auto
    sync_dir: str | None = None  # for sync=file, seen by trainer and servers alike; null: sync/ in the run folder
    urls: list[str] = field(default_factory=list)  # vllm_server: one server per worker; empty: each starts its own
    token_variable: str = "VLLM_API_KEY"  # the environment variable with the token of those servers
    http_timeout_s: float = 120.0  # of one try
    http_retries: int = 4
    record: bool = False  # keep every trained group in rollouts/ of the run folder
    replay_from: str | None = None  # replay: a run that recorded, or a folder of runs: then the one of this run's seed
    evaluation: EvaluationSamplingConfig = field(default_factory=EvaluationSamplingConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)

    @property
    def staleness_bound(self) -> int:
        if self.max_staleness is None:
            return 1 if self.num_workers else 0
        return self.max_staleness


@dataclass
class TaskConfig:
    """Prompts and reward. ``reward`` is an import path (``package.module:function`` or ``file.py:function``) for ``jsonl``.

    ``dataset`` to ``system_prompt`` are for ``reasoning_gym``.
    """

    name: TaskName = TaskName.reverse
    num_train: int = 8192
    num_eval: int = 256
    seed: int = 0
    length: int = 6
    max_completion_tokens: int = 256
    path: str | None = None
    eval_path: str | None = None
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    reward: str | None = None
    dataset: str | None = None  # of reasoning-gym
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    answer_from: AnswerFrom = AnswerFrom.text
    system_prompt: str | None = None  # a text, or the name of one of reasoning-gym's: default, simple, direct, …
    reward_timeout_s: float = 60.0
    reward_errors: RewardErrors = RewardErrors.fail
    shuffle_rewards: bool = False  # a control: rewards of a group are permuted, so nothing can be learnt


@dataclass
class AlgoConfig:
    """``clip_low`` and ``clip_high`` bound the ratio around 1, and with ``dppo_tv`` the change of the probability."""

    group_size: int = 8
    advantage: Advantage = Advantage.grpo
    advantage_eps: float = 1e-4
    loss: Loss = Loss.ppo_clip
    normalization: Normalization = Normalization.sequence_mean
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    mask_truncated: bool = False
    overlong_tokens: int = 0  # the last so many before max_completion_tokens are punished; 0: none
    overlong_penalty: float = 1.0  # reward that is taken off at max_completion_tokens
    dynamic_sampling: bool = False  # groups whose rewards are all equal are replaced by others
    max_replaced: int = 8  # of them in a step, times trainer.prompts_per_step; what is beyond is trained as it is
    kl_coef: float = 0.0  # of the KL divergence from the base checkpoint; 0: no reference is held
    kl_estimator: KlEstimator = KlEstimator.k3
    entropy_coef: float = 0.0  # of the entropy bonus
    epochs: int = 1  # times that a step goes through its groups
    mini_batches: int = 1  # parts of a step, each with an optimizer update of its own

    @property
    def num_updates(self) -> int:
        """Optimizer updates of a step."""
        return self.epochs * self.mini_batches

    @property
    def penalises(self) -> bool:
        """Whether the loss has terms that do not depend on the advantage."""
        return self.kl_coef != 0 or self.entropy_coef != 0

    @property
    def clip(self) -> tuple[float, float]:
        """How far the ratio may be below and above 1."""
        return self.clip_low, self.clip_high


@dataclass
class CorrectionConfig:
    """What is done about the mismatch. A bound is null where nothing uses it; masks are off where theirs are null."""

    proximal: Proximal = Proximal.rollout
    weight: Weight = Weight.none
    weight_low: float | None = None
    weight_high: float | None = None
    batch_norm: bool = False  # divide by the mean weight of the step
    geo_low: float | None = None  # keep a sequence whose geometric mean of exp(old - mu) is within these two
    geo_high: float | None = None
    veto: float | None = None  # drop a sequence with any exp(old - mu) below it


@dataclass
class OptimConfig:
    """AdamW."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0


@dataclass
class DistributedConfig:
    """How the ranks that a launcher started (torchrun, accelerate launch) train one policy together."""

    strategy: Strategy = Strategy.single
    timeout_s: float = 600.0  # for ranks to meet in a sum of gradients, then the run fails


@dataclass
class TrackerConfig:
    name: TrackerName = TrackerName.none
    project: str = "grpo_exp"
    entity: str | None = None
    mode: WandbMode = WandbMode.auto
    tags: list[str] = field(default_factory=list)
    details_every: int = 25  # steps; 0 = no completions and no histogram of log-ratios
    num_samples: int = 4  # completions in the table of such a step
    log_checkpoint: bool = False  # upload the last checkpoint of a run that ends well, as an artifact


@dataclass
class TrainerConfig:
    """``max_*``: whichever bound is met first ends the run. A null bound does not count."""

    device: Device = Device.auto
    num_threads: int = 1
    max_steps: int | None = 150
    max_epochs: int | None = None
    max_minutes: float | None = None
    prompts_per_step: int = 32
    tokens_per_micro_batch: int = 4096
    logprob_chunk: int = 512  # positions whose logits are held at once
    share_prompts: bool = True  # forward the prompt of a group once for all its completions, where the model allows it
    eval_every: int = 50  # steps; 0 = only before the first and after the last step
    save_every: int = 50  # steps; 0 = only at the end
    keep_checkpoints: int = 2
    max_skipped_steps: int = 20  # in a row, then the run fails
    stall_timeout_s: float = 1800.0  # without a finished group, then the run fails


@dataclass
class ProbeConfig:
    """How often the gap between generator and trainer is taken apart, on fresh completions, and what that may cost."""

    every: int = 50  # steps; 0 = never
    prompts: int = 8  # the same ones each time, algo.group_size completions each
    max_share: float = 0.05  # of the wall time: a probe that would make it more is left out


@dataclass
class AlarmRule:
    """One sign of a collapse. The median of the last ``window`` steps is compared, so single steps ring no alarm."""

    threshold: float
    window: int = 10
    action: AlarmAction = AlarmAction.warn


@dataclass
class AlarmConfig:
    """Signs of a collapse, each with a threshold that the shipped tasks keep well away from. ``start``: the first window."""

    beta: AlarmRule = field(default_factory=lambda: AlarmRule(5.0))  # times its start, or 0.02 nats where that is less
    ess: AlarmRule = field(default_factory=lambda: AlarmRule(0.05))  # below it
    kl: AlarmRule = field(default_factory=lambda: AlarmRule(0.1))  # nats per token, above it
    entropy: AlarmRule = field(default_factory=lambda: AlarmRule(0.01))  # below this share of its start
    gradient: AlarmRule = field(default_factory=lambda: AlarmRule(10.0))  # times its start
    length: AlarmRule = field(default_factory=lambda: AlarmRule(10.0))  # times longer or shorter than at its start
    hysteresis: float = 0.2  # share of the threshold by which a value has to recede before the rule can fire again
    lr_factor: float = 0.5


@dataclass
class SweepConfig:
    """What a sweep is compared by, said before it runs. ``baseline`` is an arm, e.g. ``precision=fp32``."""

    name: str | None = None
    question: str | None = None
    baseline: str | None = None
    again: str | None = None  # the arm of which a sweep makes every run twice (A/A), e.g. precision=fp32
    metric: str = "eval/accuracy"
    window: int = 1  # the last rows with the metric, whose mean is the value of a run
    margin: float | None = None  # a difference within it counts as none; null = no test of equivalence
    failures: FailureRule = FailureRule.leave_out
    collapse: float | None = None  # below this share of the best gain at the end = collapsed; null = not asked


@dataclass
class Config:
    model: ModelConfig = MISSING
    precision: PrecisionConfig = MISSING
    rollout: RolloutConfig = MISSING
    task: TaskConfig = MISSING
    algo: AlgoConfig = MISSING
    correction: CorrectionConfig = MISSING
    optim: OptimConfig = MISSING
    lora: LoraConfig = field(default_factory=LoraConfig)
    distributed: DistributedConfig = MISSING
    tracker: TrackerConfig = MISSING
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    alarm: AlarmConfig = field(default_factory=AlarmConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    seed: int = 0
    repeat: int = 0  # changes nothing but makes another run: the same arm again, for the noise between runs
    runs_dir: str = "runs"


def default_config() -> Config:
    """Every group at its defaults; the model's name is still missing."""
    return Config(
        model=ModelConfig(),
        precision=PrecisionConfig(),
        rollout=RolloutConfig(),
        task=TaskConfig(),
        algo=AlgoConfig(),
        correction=CorrectionConfig(),
        optim=OptimConfig(),
        distributed=DistributedConfig(),
        tracker=TrackerConfig(),
    )
