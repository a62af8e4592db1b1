"""Runs as an array of a Slurm cluster: what the Hydra launcher ``slurm`` does. All but the submission is that of ``local``.

A job starts from its run folder, with the source of the submission. Whether a run went well is read from its folder; Slurm
is asked only whether a job is still there.
"""

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path

from rich.console import Console

from ..config.compose import Composed
from ..config.freeze import Frozen
from ..errors import ConfigErrors, RunFailed
from ..folder import is_in_use, read_status
from . import queue
from .board import Board
from .ending import print_end
from .freeze_code import code_folder, copy_code
from .prepare import Action, Planned, alone, check_all, decide, foresee, prepare_all
from .sbatch import SlurmOptions, Submission, find_problems, rank_problems, script


def launch(jobs: list[Composed], options: SlurmOptions) -> list[Path]:
    """Submit every run of a sweep that is not done and not queued yet; returns the run folders.

    Raises:
        ConfigErrors: if any job cannot be run, or Slurm refuses the array; nothing is submitted then.
        RunFailed: if Slurm does not answer.
        SystemExit: 1 if a run that was waited for did not end well.
    """
    if problems := find_problems(options):
        raise ConfigErrors(problems)
    frozen = check_all(jobs, starts_ranks=True)
    if problems := rank_problems(options, [one.values["distributed"]["strategy"] for one in frozen]):
        raise ConfigErrors(problems)
    if options.dry_run:
        return _show(jobs, frozen, options)
    console = Console(stderr=True, highlight=False)
    runs_dir = Path(frozen[0].values["runs_dir"])
    if queue.jobs() is None:
        where = "squeue does not answer" if queue.is_there() else "squeue is not on the PATH: run this where Slurm is"
        raise RunFailed(f"{where}; hydra.launcher.dry_run=true shows what would be submitted")
    made = prepare_all(jobs, frozen, options.retry == "failed")
    with alone(runs_dir):  # no second command submits the same runs
        planned = [_as_queued(plan, queue.jobs() or {}) for plan in made]
        _submit([plan for plan in planned if _is_to_run(plan)], frozen[0], options, console)
    if not options.wait:
        console.print(f"grpo-exp status {runs_dir} shows how they go", soft_wrap=True, markup=False)
        return [plan.path for plan in planned]
    codes = _wait(planned, options.poll_s, Board(planned, console))
    print_end([(plan, codes[plan.path]) for plan in planned], frozen[0].values["sweep"], console)
    if any(codes.values()):
        raise SystemExit(1)
    return [plan.path for plan in planned]


def _is_to_run(plan: Planned) -> bool:
    return plan.action in (Action.start, Action.resume)


def _as_queued(plan: Planned, known: Mapping[str, queue.Job]) -> Planned:
    """What is in the queue already is waited for; what Slurm has given up runs nowhere, whatever its folder says."""
    number = queue.job_of(plan.path)
    job = known.get(number or "")
    if job is not None and not job.is_over and plan.action is not Action.skip:
        return replace(plan, action=Action.wait, note=f"job {job.id} is {job.state}")
    if number is not None and plan.action is Action.wait and not is_in_use(plan.path):
        return replace(plan, action=Action.resume, note="was interrupted")
    return plan


def _submission(plans: list[Planned], frozen: Frozen, options: SlurmOptions) -> Submission:
    """Named by its content: the same command, with the same source, writes the same files."""
    runs_dir = Path(frozen.values["runs_dir"])
    parent = runs_dir / ".slurm"
    code, paths = code_folder(parent), [plan.path for plan in plans]
    content = repr((code.name, paths, astuple(options)))
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    name = f"grpo-exp-{frozen.values['sweep']['name'] or runs_dir.name}"
    return Submission(re.sub(r"[^A-Za-z0-9._-]+", "-", name), parent / digest, code, paths)


def _submit(plans: list[Planned], frozen: Frozen, options: SlurmOptions, console: Console) -> None:
    if not plans:
        return
    submission = _submission(plans, frozen, options)
    copy_code(submission.code)
    submission.folder.mkdir(parents=True, exist_ok=True)
    (submission.folder / "runs.txt").write_text("".join(f"{path}\n" for path in submission.runs))
    file = submission.folder / "job.sh"
    file.write_text(script(options, submission))
    number = queue.submit(file)
    for index, path in enumerate(submission.runs):
        queue.remember(path, f"{number}_{index}", file)
    console.print(f"submitted {len(plans)} runs as job {number}: {file}", soft_wrap=True, markup=False)


def _show(jobs: list[Composed], frozen: list[Frozen], options: SlurmOptions) -> list[Path]:
    """The script and the frozen configurations on standard output; nothing is written or submitted."""
    planned = foresee(jobs, frozen, options.retry == "failed")
    todo = [plan for plan in planned if _is_to_run(plan)]
    for plan in planned:
        if plan not in todo:
            print(f"# {plan.path.name}: {plan.note}")
    if not todo:
        print("# nothing to submit")
        return []
    submission = _submission(todo, frozen[0], options)
    print(f"# {submission.folder / 'job.sh'}\n{script(options, submission)}")
    by_hash = {one.hash: one for one in frozen}
    for index, plan in enumerate(todo):
        print(f"# task {index}: {plan.path / 'config.yaml'}\n{by_hash[plan.path.name.rpartition('_')[2]].to_yaml()}")
    return [plan.path for plan in todo]


def _wait(planned: list[Planned], poll_s: float, board: Board) -> dict[Path, int]:
    """Exit code of every run once none is queued or running. An interrupt ends the waiting, not the jobs."""
    try:
        with board:
            while True:
                known = queue.jobs()
                if known is not None and (codes := _look(planned, known, board)) is not None:
                    return codes
                time.sleep(poll_s)
    except KeyboardInterrupt:
        where = planned[0].path.parent
        board.console.print(f"the jobs go on: grpo-exp status {where} shows them, grpo-exp cancel {where} ends them")
        raise


def _look(planned: list[Planned], known: Mapping[str, queue.Job], board: Board) -> dict[Path, int] | None:
    """One look at the queue: the exit codes if all is over."""
    running: dict[Path, Planned] = {}
    codes: dict[Path, int] = {}
    for plan in planned:
        job = known.get(queue.job_of(plan.path) or "")
        if plan.action is Action.skip:
            codes[plan.path] = _code(plan.path)
        elif job is not None and not job.is_over:
            if job.state == "RUNNING":
                running[plan.path] = plan
        elif is_in_use(plan.path) or (job is None and decide(plan, retry_failed=False).action is Action.wait):
            running[plan.path] = plan  # by a process of another launcher
        else:
            if job is not None and queue.end_of(plan.path) is None:
                queue.note_end(plan.path, job.state)
            codes[plan.path] = _code(plan.path)
    board.update(running, codes)
    return codes if len(codes) == len(planned) else None


def _code(path: Path) -> int:
    status = read_status(path) or {}
    return 0 if status.get("state") == "done" else int(status.get("exit_code") or 1)
