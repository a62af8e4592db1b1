"""From prompts to complete groups: starts requests, collects completions, has them rewarded, hands out batches.

    PromptStream ─▶ WorkerPool ─▶ RewardRunner ─▶ GroupBuffer ─▶ next_batch()
         ▲ as many as the buffer has room for                     consumed by the trainer, one batch a step

Everything runs inside :meth:`RolloutSource.pump`, in the trainer's thread while the trainer waits for a batch, in a thread
of its own while it computes: never in both.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from multiprocessing.connection import wait
from typing import Any

from torch import nn

from ..batch import advantages_of
from ..config.schema import Config, RewardErrors
from ..errors import Interrupted, RunFailed
from ..tasks import Row, Task
from ..tasks.rewards import RewardRunner
from .aside import Aside, Codec, Evaluation, accuracy
from .background import Background
from .buffer import GroupBuffer, GroupCounts
from .pool import Failed, OnEvent, Retried, WorkerPool
from .sampling import derive_seed
from .stream import PromptStream
from .types import Generated, Group, Request, Rollout, Shaping

EVAL_TAG = 0x6576616C  # keeps the seeds of evaluation apart from those of training
PROBE_TAG = 0x70726F62  # and those of a probe
CHECK_TAG = 0x63686563  # and those of the check of the first sync
PUMP_S = 0.5  # between two looks at deadlines


class RolloutSource:
    """Owns stream, pool, rewards and buffer of one run."""

    def __init__(
        self,
        config: Config,
        task: Task,
        codec: Codec,
        pool: WorkerPool,
        on_event: OnEvent,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config, self.task, self.codec, self.pool = config, task, codec, pool
        self.on_event, self.should_stop = on_event, should_stop
        evaluation = config.rollout.evaluation
        self._evaluation_shaping = Shaping(**{entry.name: getattr(evaluation, entry.name) for entry in fields(Shaping)})
        self.stream = PromptStream(task.train, config.seed, config.trainer.max_epochs)
        self.buffer = GroupBuffer(config.trainer.prompts_per_step, config.rollout.staleness_bound)
        self.rewards = RewardRunner(
            task.reward_funcs,
            config.task.reward_timeout_s,
            config.task.reward_errors,
            config.task.shuffle_rewards,
            config.seed,
        )
        self._prompt_ids: dict[int, list[int]] = {}
        self._to_come: int | None = None  # groups that this run will still start; None: as many as there are
        self._generated: dict[int, Generated] = {}
        self._asides: dict[int, Aside] = {}
        self._purpose = ""  # of these, for an error
        self.num_replaced = 0  # groups that dynamic sampling left out since the last batch
        self._progress = time.monotonic()
        self._background = Background(self.pump)
        self.version = 0

    def publish(self, version: int, model: nn.Module) -> None:
        """Send new weights to the workers; groups that start from now on start under this version or a later one."""
        self.pool.sync(version, model)
        self.version = version

    def next_batch(self, steps_left: int | None) -> list[Group] | None:
        """The groups of the next step; None when the data are used up. Blocks.

        Args:
            steps_left: steps still to come, this one included; no more groups are started than these can train.

        Raises:
            RunFailed: if workers or rewards fail for good, or nothing has come for ``trainer.stall_timeout_s``.
            Interrupted: if the run was asked to stop.
        """
        self._progress = time.monotonic()
        while True:
            if self.should_stop():  # also where batches are always ready
                raise Interrupted
            self._start_groups(steps_left)
            self._drop_stale()
            batch = self.buffer.take(self.version, last=self.stream.exhausted)
            if batch is not None:
                self.num_replaced = 0
                return batch
            if self.stream.exhausted and not self.buffer.num_held:
                return None
            self._pump_or_fail()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Deal with what comes in while the caller computes. An inline worker would compute as well: it is left alone."""
        if not self.pool.connections():
            yield
            return
        with self._background.at_work():
            yield

    def pump(self, awake: int | None = None) -> None:
        """Wait for news from workers and rewards, and deal with them; return as soon as ``awake`` can be read."""
        waitables: list[Any] = [*self.pool.connections(), *self.rewards.connections()]
        due_s = self.rewards.wait_s()
        if waitables and not self.pool.works_when_polled:
            wait([*waitables, *([] if awake is None else [awake])], PUMP_S if due_s is None else min(PUMP_S, due_s))
        for item in self.pool.poll():
            match item:
                case Failed():
                    self._fail(item.serial, item.reason)
                case Retried():
                    if item.serial >= 0:
                        self.buffer.restart(item.serial, item.version)
                case Generated():
                    self._generated_one(item)
        self._collect_rewards()
        if awake is not None:  # there is time for it now
            coming = self.config.trainer.prompts_per_step
            self._encode(self.stream.coming_serials(coming if self._to_come is None else min(coming, self._to_come)))

    def _pump_or_fail(self) -> None:
        self.pump()
        if time.monotonic() - self._progress > self.config.trainer.stall_timeout_s:
            raise RunFailed(f"no group was finished in {self.config.trainer.stall_timeout_s:g} s: {self._state()}")

    def evaluate(self, version: int) -> Evaluation:
        """Sampled and greedy completions of the held-out prompts under exactly this version.

        Raises:
            Interrupted: if the run was asked to stop; then nothing is known of this version.
        """
        rows = self.task.eval
        prompts = self.codec.encode(rows)
        asides = [
            Aside(
                self._request(-(2 * index + 1 + greedy), ids, 1, 0.0 if greedy else None, (EVAL_TAG, version, index)),
                row,
                is_rewarded=not greedy,
            )
            for greedy in (0, 1)
            for index, (row, ids) in enumerate(zip(rows, prompts, strict=True))
        ]
        self._complete(asides, "evaluation")
        rollouts = [rollout for aside in asides for rollout in aside.rollouts or ()]
        rewards = [reward for aside in asides for reward in aside.rewards or () if reward == reward]
        sampled, greedy = (
            accuracy(self.task, self.codec, rows, part) for part in (rollouts[: len(rows)], rollouts[len(rows) :])
        )
        return Evaluation(sampled, greedy, sum(rewards) / len(rewards) if rewards else None)

    def fresh_groups(self, num_groups: int) -> list[Group]:
        """Groups of the first training prompts, sampled as for training under exactly the version that was published last.

        They are not trained on and not counted. Prompts and random numbers are the same every time, so that what changes
        between two calls is the policy.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        rows = self.task.train[:num_groups]
        size, temperature = self.config.algo.group_size, self.config.rollout.temperature
        asides = [
            Aside(self._request(-1 - index, ids, size, temperature, (PROBE_TAG, index)), row, is_rewarded=True)
            for index, (row, ids) in enumerate(zip(rows, self.codec.encode(rows), strict=True))
        ]
        self._complete(asides, "probe")
        groups = [
            Group(a.request.serial, a.request.prompt_ids, a.row, a.rollouts or [], self.version, a.rewards or [])
            for a in asides
        ]
        if any((rollout.versions != self.version).any() for group in groups for rollout in group.rollouts):
            raise RunFailed(f"a worker sampled under another version than the {self.version} it was sent")
        return groups

    def first_completions(self, max_new_tokens: int) -> list[tuple[list[int], Rollout]]:
        """A short completion from every worker, sampled as for training, with its prompt's ids.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        count = max(1, self.config.rollout.num_workers)
        rows = (self.task.train * count)[:count]
        temperature, limit = (
            self.config.rollout.temperature,
            min(max_new_tokens, self.config.task.max_completion_tokens),
        )
        requests = [
            replace(self._request(-1 - index, ids, 1, temperature, (CHECK_TAG, index)), max_new_tokens=limit)
            for index, ids in enumerate(self.codec.encode(rows))
        ]
        asides = [Aside(request, row, is_rewarded=False) for request, row in zip(requests, rows, strict=True)]
        self._complete(asides, "check of the first sync")
        return [(aside.request.prompt_ids, rollout) for aside in asides for rollout in aside.rollouts or ()]

    def _complete(self, asides: list[Aside], purpose: str) -> None:
        """Have some requests answered and rewarded under the version that was published last. Blocks."""
        self.pool.wait_synced()
        self._asides, self._purpose = {aside.request.serial: aside for aside in asides}, purpose
        self._progress = time.monotonic()
        self.pool.submit([aside.request for aside in asides])
        while not all(aside.done for aside in asides):
            if self.should_stop():
                raise Interrupted
            self._pump_or_fail()

    def resume(self, cursor: int, open_serials: list[int], counts: dict[str, int]) -> None:
        """Go on in the data where a checkpoint was: groups that were open then are started again, first of all."""
        self.stream.cursor, self.stream.again = cursor, list(open_serials)
        self.buffer.counts, self.buffer.reopened = GroupCounts(**counts), set(open_serials)

    def close(self) -> None:
        self.rewards.close()
        self.pool.close()
        self._background.close()  # last: what it started dies with it

    def _request(
        self,
        serial: int,
        prompt_ids: list[int],
        num_completions: int,
        temperature: float | None = None,
        seed: tuple[int, ...] | None = None,
    ) -> Request:
        return Request(
            serial=serial,
            prompt_ids=prompt_ids,
            num_completions=num_completions,
            max_new_tokens=self.config.task.max_completion_tokens,
            temperature=self._temperature(serial) if temperature is None else temperature,
            seed=derive_seed(self.config.seed, serial if seed is None else derive_seed(*seed)),
            evaluation=serial < 0,
            shaping=self._evaluation_shaping if serial < 0 and temperature is None else Shaping(),
        )

    def _temperature(self, serial: int) -> float:
        evaluation = self.config.rollout.evaluation.temperature if serial < 0 else None
        return self.config.rollout.temperature if evaluation is None else evaluation

    def _start_groups(self, steps_left: int | None) -> None:
        count = self.buffer.room()
        if steps_left is not None:
            self._to_come = steps_left * self.config.trainer.prompts_per_step - self.buffer.num_held
            count = min(count, self._to_come)
        serials = self.stream.next_serials(count) if count > 0 else []
        if self._to_come is not None:
            self._to_come -= len(serials)
        for serial in serials:
            self.buffer.start(serial, self.version)
        self._encode(serials)
        size = self.config.algo.group_size
        self.pool.submit([self._request(serial, self._prompt_ids[serial], size) for serial in serials])

    def _encode(self, serials: list[int]) -> None:
        """The prompts of these serials, where they are not known yet."""
        if new := [serial for serial in serials if serial not in self._prompt_ids]:
            prompts = self.codec.encode([self.stream.row(serial) for serial in new])
            self._prompt_ids |= zip(new, prompts, strict=True)

    def _generated_one(self, generated: Generated) -> None:
        aside = self._asides.get(generated.serial)
        expected = self.config.algo.group_size if aside is None else aside.request.num_completions
        found = len(generated.rollouts)
        problem = generated.problem() if found == expected else f"{found} of {expected} are there"
        if problem is not None:
            self._fail(generated.serial, f"the completions of a group were not usable: {problem}")
        elif aside is not None:
            aside.rollouts = generated.rollouts
            self._progress = time.monotonic()
            if aside.is_rewarded:
                self._reward(generated, aside.row)
        else:
            self._generated[generated.serial] = generated
            self._reward(generated, self.stream.row(generated.serial))

    def _reward(self, generated: Generated, row: Row) -> None:
        token_ids = [rollout.token_ids for rollout in generated.rollouts]
        self.rewards.submit(generated.serial, row, self.codec.decode([row] * len(token_ids), token_ids), token_ids)

    def _collect_rewards(self) -> None:
        for result in self.rewards.poll():
            if result.error is not None and self.config.task.reward_errors is RewardErrors.fail:
                raise RunFailed(result.error)
            if result.serial < 0:
                self._progress = time.monotonic()
                self._asides[result.serial].rewards = result.rewards
                continue
            generated = self._generated.pop(result.serial)
            if result.error is not None:
                self._fail(result.serial, result.error)
                continue
            prompt_ids, row = self._prompt_ids.pop(result.serial), self.stream.row(result.serial)
            group = Group(result.serial, prompt_ids, row, generated.rollouts, generated.oldest_version, result.rewards)
            self._progress = time.monotonic()
            if self._teaches_nothing(group):
                self.num_replaced += 1
                self.buffer.replace(group.serial)
                body = {"group": group.serial, "prompt": self.stream.index(group.serial), "reward": result.rewards[0]}
                self.on_event("replaced_group", body)
            else:
                self.buffer.finish(group)

    def _teaches_nothing(self, group: Group) -> bool:
        """Whether dynamic sampling (DAPO, arXiv 2503.14476) has another group in place of this one."""
        algo = self.config.algo
        if not algo.dynamic_sampling or self.num_replaced >= algo.max_replaced * self.config.trainer.prompts_per_step:
            return False
        return bool(advantages_of([group], algo, self.config.task.max_completion_tokens).zero_std[0])

    def _fail(self, serial: int, reason: str) -> None:
        if serial < 0:
            raise RunFailed(f"{self._purpose} failed: {reason}")
        self.buffer.fail(serial)
        del self._prompt_ids[serial]
        self.on_event("failed_group", {"group": serial, "prompt": self.stream.index(serial), "reason": reason})

    def _drop_stale(self) -> None:
        for group in self.buffer.drop_stale(self.version):
            lag = self.version - group.version
            lags = {str(known): count for known, count in sorted(self.buffer.stale_lags.items())}
            self.on_event("stale_drop", {"group": group.serial, "lag": lag, "lags": lags})

    def _state(self) -> str:
        return (
            f"{len(self.buffer.open)} groups open, {len(self.buffer.ready)} ready, {self.rewards.pending} in the reward"
            f" functions, {len(self.pool.connections())} worker processes"
        )
