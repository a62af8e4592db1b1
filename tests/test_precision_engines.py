"""The table of sites, engines and devices on the page about precision, cell by cell: accepted is what it says, and no more."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_runs import small_config

from grpo_exp import precision as hook
from grpo_exp.checks import find_problems
from grpo_exp.config.rollouts import engine_problems
from grpo_exp.config.schema import Backend, Config
from grpo_exp.config.sites import FOLLOWS as FOLLOWED
from grpo_exp.errors import ConfigError

ROOT = Path(__file__).parents[1]
NAMES = ("fp32", "bf16", "fp16")
MODES = ("highest", "high", "medium")
COLUMNS = {
    "trainer, CPU": (Backend.hf, "cpu"),
    "`rollout=hf`, CPU": (Backend.hf, "cpu"),
    "`rollout=vllm`, CPU": (Backend.vllm, "cpu"),
    "`rollout=vllm_server`, CPU": (Backend.vllm_server, "cpu"),
    "trainer, GPU": (Backend.hf, "cuda"),
    "any engine, GPU": (None, "cuda"),
}
FOLLOWS = {"= params": "fp32", "= rollout": "bf16"}
WITH = {
    "grad_reduce": lambda name: ["distributed=ddp"],
    "adapter": lambda name: ["lora=r16"],
    "params": lambda name: [f"precision.compute={name}", "precision.loss_scale.mode=none"],
    "compute": lambda name: ["precision.loss_scale.mode=" + ("dynamic" if name == "fp16" else "none")],
    "reference": lambda name: ["algo.kl_coef=0.1"],
    "rollout": lambda name: [f"precision.rollout_head={name}"],
}
"""What has to be said besides, so that only the site in question is tried."""


def rows() -> dict[str, dict[str, str]]:
    """Site → column → cell."""
    lines = (ROOT / "docs" / "precision.md").read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| dtypes of |"))
    header = [cell.strip() for cell in lines[start].strip("|").split("|")]
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        site, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[site.strip("`")] = dict(zip(header[1:], cells, strict=True))
    return found


def cells() -> Iterator[tuple[str, str, str]]:
    for site, row in rows().items():
        for column, cell in row.items():
            if site != "read back in" and cell != "–":
                yield site, column, cell


def problems(config: Config, device: str) -> list[ConfigError]:
    """What is said before anything is loaded, with a device of that kind."""
    found = find_problems(config)
    if found:
        return found
    try:
        made = hook.resolve(
            config.precision,
            "fp32",
            torch.device(device),
            strategy=config.distributed.strategy,
            adapted=config.lora.rank > 0,
        )
    except ConfigError as error:
        return [error]
    sites = {site: hook.dtype_name(getattr(made, site)) for site in ("rollout", "rollout_head")}
    return engine_problems(config.rollout.backend, sites)


@pytest.mark.parametrize(("site", "column", "cell"), list(cells()))
def test_a_cell_says_what_is_accepted(site: str, column: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, device = COLUMNS[column]
    monkeypatch.setattr(hook, "supports_bf16", lambda device: True)
    monkeypatch.setattr(hook, "supports_tf32", lambda device: device.type == "cuda")
    backends = (
        [one for one in Backend if one is not Backend.replay] if backend is None else [backend]
    )  # a replay serves nothing
    for one in backends:
        text = rows()[site][f"`rollout={one.name}`, CPU"] if cell == "as on the CPU" else cell
        allowed = {FOLLOWS.get(part, part) for part in re.split(r",\s*", text)}
        choices = MODES if site == "matmul" else NAMES
        assert allowed <= set(choices)
        for name in choices:
            said = [f"rollout.backend={one.name}", f"precision.{site}={name}", *WITH.get(site, lambda name: [])(name)]
            if device == "cuda":
                said.append("trainer.device=cuda")
            found = problems(small_config("precision=bf16", *said), device)
            assert (not found) == (name in allowed), (one, name, found)


def test_every_site_has_a_row_and_a_test_that_reads_it_back() -> None:
    table = rows()
    assert set(table) - {"read back in"} == set(FOLLOWED) | {"matmul"}
    for cell in table["read back in"].values():
        assert cell == "not run" or (ROOT / "tests" / cell.strip("`")).is_file()
