"""``grpo-exp plan [-m] [KEY=VALUE…]``: runs, tokens, memory, time and the smallest difference to be found. Trains nothing.

Sweeps are composed and checked as ``grpo-exp -m`` does it, by a launcher that launches nothing. Exit codes: 0; 2 for what the
user can put right; 3 where ``--memory`` is given and an arm does not fit.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import Parser
from ..config.compose import Composed, run_app
from ..config.schema import Config
from ..launch.prepare import check_all
from ..report.compare import terminal
from ..report.inference import POWER
from ..report.layout import Grid, Lines
from ..report.numbers import in_bytes
from ..report.render import print_part
from ..report.stats import t_quantile
from . import collected

PARTS = ("parameters", "master", "optimizer", "gradients", "other_weights", "activations", "logits")
GIB = 2**30


@dataclass(frozen=True)
class Planned:
    """The runs of one arm: equal but for seed and repeat. ``jobs`` are places in the sweep."""

    name: str
    config: Config
    jobs: tuple[int, ...]


def main(argv: list[str]) -> int:
    """Run the command with the arguments after ``plan``; returns the exit code."""
    try:
        options, overrides = _parser().parse_known_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    collected.clear()

    def keep(job: Composed) -> int:
        collected.append(job)
        return 0

    from ..checks import find_problems

    is_sweep = any(text in ("-m", "--multirun") or text.startswith("+sweeps=") for text in overrides)
    code = run_app([*overrides, "hydra/launcher=planning"] if is_sweep else overrides, keep, find_problems)
    if code:
        return code
    check_all(collected)
    report = _report(collected, options)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        for part in _parts(report, options):
            print_part(part, terminal())
    return 3 if any(arm["fits"] is False for arm in report["arms"]) else 0


def _report(jobs: Sequence[Composed], options: argparse.Namespace) -> dict[str, Any]:
    from ..run import set_environment
    from .calibrate import seconds_per_step

    arms = list(_arms(jobs))
    set_environment(arms[0].config)
    import torch

    from .memory import Shape, estimate

    found = []
    for arm in arms:
        config = arm.config
        shape = Shape(options.prompt_tokens, options.completion_tokens or config.task.max_completion_tokens)
        memory = estimate(config, shape, torch.device("cpu"))
        workers = max(1, config.rollout.num_workers)
        total = memory.trainer + workers * memory.worker + memory.wire
        per_step = config.trainer.prompts_per_step * config.algo.group_size
        steps = config.trainer.max_steps
        step_s = seconds_per_step(jobs[arm.jobs[0]]) if options.calibrate else None
        entry: dict[str, Any] = {"name": arm.name, "num_runs": len(arm.jobs), "steps": steps}
        entry["tokens_at_most"] = None if steps is None else steps * per_step * shape.completion
        entry["num_params"] = memory.num_params
        entry["bytes"] = {key: value for key, value in vars(memory).items() if key != "num_params"}
        entry["bytes"] |= {"trainer": memory.trainer, "worker": memory.worker, "total": total}
        entry["num_workers"] = workers
        entry["fits"] = None if options.memory is None else total <= options.memory * GIB
        entry["step_s"] = step_s
        entry["run_s"] = None if step_s is None or steps is None else step_s * steps
        found.append(entry)
    seeds = sorted({int(job.config.seed) for job in jobs})
    return {
        "num_runs": len(jobs),
        "seeds": seeds,
        "tokens_at_most": _sum(arm["tokens_at_most"] and arm["tokens_at_most"] * arm["num_runs"] for arm in found),
        "run_s": _sum(arm["run_s"] and arm["run_s"] * arm["num_runs"] for arm in found),
        "detectable_sd": detectable(len(seeds)),
        "arms": found,
    }


def _sum(values: Any) -> Any:
    known = list(values)
    return None if any(value is None for value in known) else sum(known)


def _arms(jobs: Sequence[Composed]) -> list[Planned]:
    from ..config.compose import to_typed

    places: dict[str, list[int]] = {}
    for place, job in enumerate(jobs):
        levels = [f"{key}={value}" for key, value in job.factors.items() if key not in ("seed", "repeat")]
        places.setdefault(",".join(levels) or "the run", []).append(place)
    return [Planned(name, to_typed(jobs[found[0]].config), tuple(found)) for name, found in places.items()]


def detectable(num_seeds: int, level: float = 0.95, power: float = POWER) -> float | None:
    """The true difference, in standard deviations of the difference of a pair, that so many paired seeds find."""
    if num_seeds < 2:
        return None
    df = num_seeds - 1
    return (t_quantile((1 + level) / 2, df) + t_quantile(power, df)) / math.sqrt(num_seeds)


def _parts(report: dict[str, Any], options: argparse.Namespace) -> list[Grid | Lines]:
    arms = report["arms"]
    tokens = report["tokens_at_most"]
    lines = [f"{report['num_runs']} runs in {len(arms)} arms, {len(report['seeds'])} seeds"]
    if tokens is not None:
        lines.append(f"at most {tokens:,} tokens sampled and trained, if every completion is as long as it may be")
    if report["detectable_sd"] is None:
        lines.append("one seed: no difference can be told from noise")
    else:
        lines.append(
            f"{len(report['seeds'])} paired seeds find a difference of {report['detectable_sd']:.2f} standard deviations"
            f" of the difference of a pair or more, with {POWER:.0%} power at the 95% level"
            + (f": {report['detectable_sd'] * options.sd:.3g} for the given {options.sd:g}" if options.sd else "")
        )
    if report["run_s"] is not None:
        lines.append(
            f"about {report['run_s'] / 60:,.1f} min of runs one after the other on this machine, without evaluation"
        )
    rows = [(arm["name"], *(in_bytes(arm["bytes"][part]) for part in PARTS), in_bytes(arm["bytes"]["trainer"]))
            for arm in arms]  # fmt: skip
    trainer = Grid(
        "Memory of the trainer at its peak", ("arm", *(part.replace("_", " ") for part in PARTS), "in all"), tuple(rows)
    )
    rows = [(arm["name"], in_bytes(arm["bytes"]["generator"]), in_bytes(arm["bytes"]["kv_cache"]), str(arm["num_workers"]),
             in_bytes(arm["bytes"]["wire"]), in_bytes(arm["bytes"]["total"]),
             {None: "", True: "fits", False: "does NOT fit"}[arm["fits"]]) for arm in arms]  # fmt: skip
    header = ("arm", "generator", "KV cache", "workers", "wire", "trainer and all", "")
    return [
        Lines("Plan", tuple(lines)),
        trainer,
        Grid("Generator workers, and everything together", header, tuple(rows)),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="grpo-exp plan",
        description="What a run or a sweep needs, before it is launched: the arguments are those of grpo-exp.",
        epilog="Exit code 3: --memory is given and an arm needs more. Libraries' own memory is not counted.",
        allow_abbrev=False,
    )
    parser.add_argument("--memory", type=float, metavar="GIB", help="of the device; says which arms fit, all on one")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="tokens of a prompt (default 64)")
    parser.add_argument(
        "--completion-tokens", type=int, metavar="N", help="of a completion (default task.max_completion_tokens)"
    )
    parser.add_argument("--sd", type=float, help="standard deviation over seeds of a paired difference of the metric")
    parser.add_argument("--calibrate", action="store_true", help="run a few steps of each arm here, and say how long")
    parser.add_argument("--json", action="store_true", help="everything, in bytes and seconds")
    return parser
