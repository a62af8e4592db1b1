"""``grpo-exp probe``: its statistics, its cells, its files, and what it says of what it cannot measure."""

import contextlib
import importlib.util
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Ended, command
from safetensors.numpy import load_file
from scipy import stats as scipy_stats

from grpo_exp import assets
from grpo_exp.algo.mismatch import mismatch_metrics
from grpo_exp.config.schema import Backend
from grpo_exp.errors import ConfigError, ConfigErrors
from grpo_exp.policy import load_policy
from grpo_exp.probe_grid import against, cells, settings, store
from grpo_exp.probe_grid.command import main
from grpo_exp.probe_grid.stats import Statistic, batch_floor, statistics
from grpo_exp.rollout.start import ENGINES

SMALL = ("probe.num_prompts=6", "probe.max_new_tokens=8")


def tokens(num_sequences: int = 12, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """mu, old and reference of sequences of different lengths, correlated within each."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 30, num_sequences)
    mu = -rng.gamma(1.0, 1.0, lengths.sum())
    d = rng.normal(0, 0.05, lengths.sum()) + np.repeat(rng.normal(0, 0.03, num_sequences), lengths)
    return mu, mu + d, mu + rng.normal(0, 0.01, lengths.sum()), lengths


def half(values: Any) -> float:
    return float(scipy_stats.sem(values) * scipy_stats.t.ppf(0.975, len(values) - 1))


# -- statistics


def test_the_statistics_are_those_that_a_run_logs_of_its_mismatch() -> None:
    mu, old, reference, lengths = tokens()
    sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    position = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
    fresh, clip = torch.zeros_like(sequence), (0.2, 0.2)
    logged = mismatch_metrics(torch.from_numpy(mu), torch.from_numpy(old), sequence, position, fresh, clip)
    found = statistics(mu, old, reference, lengths)
    shared = found.keys() & logged.keys()
    assert {"mean", "sd", "abs_mean", "abs_p95", "abs_max", "outside", "k1", "k3", "drift_slope"} <= shared
    assert {key: found[key].value for key in shared} == pytest.approx({key: logged[key] for key in shared}, rel=1e-9)


def test_the_drift_is_the_least_squares_slope_of_the_running_sum() -> None:
    mu, old, reference, lengths = tokens()
    parts = np.split(old - mu, np.cumsum(lengths)[:-1])
    position = np.concatenate([np.arange(len(part)) for part in parts])
    running = np.concatenate([np.cumsum(part) for part in parts])
    expected = 1000 * scipy_stats.linregress(position, running).slope
    assert statistics(mu, old, reference, lengths)["drift_slope"].value == pytest.approx(expected, rel=1e-10)


def test_relative_errors_are_quotients_of_root_mean_squares() -> None:
    mu, old, reference, lengths = tokens()
    found = statistics(mu, old, reference, lengths)
    size = np.sqrt(np.mean(reference**2))
    assert found["relative_trainer"].value == pytest.approx(np.sqrt(np.mean((old - reference) ** 2)) / size)
    assert found["relative_rollout"].value == pytest.approx(np.sqrt(np.mean((mu - reference) ** 2)) / size)
    assert "relative_trainer" not in statistics(mu, old, None, lengths)


def test_with_equal_lengths_the_interval_of_a_mean_is_students_over_sequence_means() -> None:
    mu, old, reference, _ = tokens()
    lengths = np.full(10, 8)
    mu, old, reference = mu[:80], old[:80], reference[:80]
    found = statistics(mu, old, reference, lengths)
    d = (old - mu).reshape(10, 8)
    assert found["abs_mean"].half_width == pytest.approx(half(np.abs(d).mean(1)))
    assert found["sequence_abs"].half_width == pytest.approx(half(np.abs(d.sum(1))))
    assert found["sequence_kl"].value == pytest.approx(-d.sum(1).mean())


def test_intervals_hold_the_true_value_as_often_as_they_say() -> None:
    """Of 300 draws of 24 sequences; the truth is what very many sequences give."""
    truth = statistics(*tokens(40_000, seed=1))
    drawn = [statistics(*tokens(24, seed=seed + 2)) for seed in range(300)]
    for name in truth.keys() - {"abs_max"}:
        hits = sum(abs(one[name].value - truth[name].value) <= (one[name].half_width or 0.0) for one in drawn)
        assert 0.87 <= hits / 300 <= 0.99, name


def test_a_single_sequence_has_values_and_no_intervals() -> None:
    mu, old, reference, lengths = tokens(1)
    assert {one.half_width for one in statistics(mu, old, reference, lengths).values()} == {None}


def test_no_difference_at_all_is_zero_everywhere() -> None:
    mu, _, _, lengths = tokens()
    found = statistics(mu, mu, mu, lengths)
    assert {one.value for one in found.values()} == {0.0}
    assert batch_floor(mu, mu, lengths)["sd"] == Statistic(0.0, 0.0)


# -- the grid and its cells


def parse(*overrides: str) -> settings.Arguments:
    return settings.parse(list(overrides))


def test_lists_may_be_written_without_brackets_and_dtypes_as_elsewhere() -> None:
    found = parse("probe.rollout=bfloat16,fp32", "probe.micro_batch=4", "probe.head=[null,float32]", "seed=3").settings
    assert (found.rollout, found.micro_batch, found.head) == (["bf16", "fp32"], [4], [None, "fp32"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("probe.rolout=[bf16]", "did you mean probe.rollout?"),
        ("probe.every=5", "a setting of the probe inside a run"),
        ("probe.rollout=[bfloat]", "did you mean bf16?"),
        ("probe.rollout=[auto]", "a list of fp32, bf16, fp16"),
        ("probe.rollout=[]", "a list of fp32, bf16, fp16"),
        ("probe.compute=[null]", "a list"),
        ("probe.engine=[vlm]", "probe.engine='vlm'"),
        ("probe.micro_batch=[0]", "numbers from 1 on"),
        ("probe.num_prompts=many", "a whole number"),
        ("probe.num_prompts=0", "1 or more"),
        ("probe.prompts_from=mine", "auto, questions, task"),
        ("precision=bf16", "probe.rollout, probe.compute and probe.head"),
        ("precision.rollout=bf16", "probe.rollout"),
        ("rollout=lockstep", "probe.engine"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_with_what_to_do(override: str, said: str) -> None:
    with pytest.raises(ConfigErrors, match=r"(?s).*") as refused:
        parse(override)
    assert said in str(refused.value)
    assert len(refused.value.errors) == 1


def test_cells_that_come_to_the_same_are_one() -> None:
    found = parse("probe.compute=[fp32,bf16]", "probe.head=[null,fp32]", "probe.micro_batch=[1,8]").settings
    assert len(cells.trainers(found)) == 6  # fp32 has its head in fp32 already
    found = parse("probe.rollout=[bf16,bf16]", "probe.rollout_head=[null,bf16]").settings
    assert [cell.label for cell in cells.generators(found)] == ["hf bf16"]


# -- the command


def probe(*arguments: str, folder: Path) -> tuple[int, str]:
    """The command in this process, in a folder, its workers too: its exit code and what it ended with."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            return main(["probe.engine=lockstep", *arguments]), out.getvalue()
        except ConfigError as error:
            return 2, str(error)
        except SystemExit as end:
            return int(str(end.code)), ""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A probe of the tiny model: three generators, six trainers, two micro-batch sizes."""
    folder = tmp_path_factory.mktemp("probe")
    grid = ("probe.head=[null,fp32]", "probe.compute=[fp32,bf16]", "probe.micro_batch=[1,6]")
    return folder / "one", command("probe", "probe.engine=lockstep", *SMALL, *grid, "--out", "one", cwd=folder)


@pytest.fixture
def report(probed: tuple[Path, Ended]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((probed[0] / "probe.json").read_text())
    return found


def test_every_cell_has_its_row_in_the_table_the_report_and_the_figure(
    probed: tuple[Path, Ended], report: dict[str, Any]
) -> None:
    folder, done = probed
    assert done.code == 0, done.err
    assert [one["label"] for one in report["generators"]] == ["lockstep fp32", "lockstep bf16", "lockstep fp16"]
    assert len(report["cells"]) == 3 * 6
    assert all(cell["statistics"] and not cell["refused"] for cell in report["cells"])
    for heading in ("mean |d|", "drift", "Noise floor", "bf16, head fp32"):
        assert heading in done.out
    assert len(ET.parse(folder / "figure.svg").getroot().findall("{*}circle")) == 18
    assert {path.name for path in folder.iterdir()} >= {"probe.json", "tokens.safetensors", "figure.svg"}


def value(report: dict[str, Any], generator: str, compute: str, name: str = "abs_mean") -> float:
    [cell, *_] = [
        cell
        for cell in report["cells"]
        if (cell["generator"], cell["compute"], cell["head"]) == (generator, compute, compute)
    ]
    found: float = cell["statistics"][name]["value"]
    return found


def test_fp32_on_both_sides_is_at_the_noise_floor_and_16_bits_are_ordered(report: dict[str, Any]) -> None:
    assert value(report, "lockstep fp32", "fp32") < 1e-5
    assert (
        value(report, "lockstep fp32", "fp32")
        < value(report, "lockstep fp16", "fp32")
        < value(report, "lockstep bf16", "fp32")
    )
    assert value(report, "lockstep fp32", "bf16", "relative_trainer") > 1e-3
    assert value(report, "lockstep fp32", "fp32", "relative_rollout") < 1e-5


def test_kept_tokens_give_the_numbers_of_the_report_again(probed: tuple[Path, Ended], report: dict[str, Any]) -> None:
    arrays = load_file(probed[0] / "tokens.safetensors")
    assert arrays["prompts"].size == arrays["prompts.lengths"].sum()
    for index, generator in enumerate(report["generators"]):
        lengths = arrays[f"g{index}.tokens.lengths"]
        assert lengths.sum() == len(arrays[f"g{index}.tokens"]) == len(arrays[f"g{index}.mu"])
        mine = [cell for cell in report["cells"] if cell["generator"] == generator["label"]]
        for number, cell in enumerate(mine):
            mu, old, reference = (
                arrays[f"g{index}.{name}"].astype(np.float64) for name in ("mu", f"t{number}", "reference")
            )
            found = statistics(mu, old, reference, lengths)
            assert cell["statistics"]["sd"]["value"] == pytest.approx(found["sd"].value)


def test_kept_log_probabilities_are_those_of_the_model(probed: tuple[Path, Ended]) -> None:
    arrays = load_file(probed[0] / "tokens.safetensors")
    model = load_policy(str(assets.path("tiny")), params="fp32")
    prompt = arrays["prompts"][: arrays["prompts.lengths"][0]].tolist()
    answer = arrays["g0.tokens"][: arrays["g0.tokens.lengths"][0]].tolist()
    with torch.no_grad():
        log_p = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    expected = [float(log_p[len(prompt) - 1 + place, token]) for place, token in enumerate(answer)]
    for name in ("g0.mu", "g0.reference"):
        assert arrays[name][: len(answer)].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_second_probe_is_compared_with_the_first_and_asks_the_same(probed: tuple[Path, Ended]) -> None:
    folder, _ = probed
    arguments = ("--against", str(folder), "--out", "two", "probe.rollout=fp32", "probe.head=null", "--json")
    code, said = probe(*arguments, folder=folder.parent)
    assert code == 0
    found = json.loads(said)
    assert found["grid"]["num_prompts"] == 6  # as before
    [generator] = found["against"]["generators"]
    assert (generator["shared"], generator["abs_max"]) == (1.0, 0.0)
    assert len(found["against"]["cells"]) == 4
    assert all((cell["abs_max"], cell["difference"]) == (0.0, 0.0) for cell in found["against"]["cells"])


def test_tokens_are_compared_up_to_where_two_probes_part() -> None:
    one = {**store.packed("g0.tokens", [[1, 2, 3], [4, 5]]), "g0.mu": np.float32([-1, -2, -3, -4, -5])}
    two = {**store.packed("g0.tokens", [[1, 2, 9, 9], [4]]), "g0.mu": np.float32([-1, -2.5, -9, -9, -4])}
    pair = against._Pair(one, "g0", two, "g0")
    assert pair.same.tolist() == [True, True, False, False, True]
    assert pair.apart("mu", "mu") == {"abs_mean": pytest.approx(0.5 / 3), "abs_max": 0.5}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["probe.nothing=1"], "probe.nothing"),
        (["model.name_or_path=/no/such/folder"], "a folder with a checkpoint"),
        (["--against", "nowhere"], "the folder of an earlier probe"),
        (["--out", "."], "this one is there already"),
        (["-m"], ""),  # argparse prints what it has to say
        (["probe.num_prompts=33", "probe.prompts_from=questions"], "at most 32 of these"),
        (["--against", "one", "probe.max_new_tokens=4"], "a probe of the same prompts"),
        (["--against", "one", "seed=1"], "a probe with seed 1"),
    ],
)
def test_what_cannot_be_probed_ends_with_a_line_and_leaves_no_folder(
    probed: tuple[Path, Ended], tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "one").symlink_to(probed[0])
    code, error = probe(*arguments, folder=tmp_path)
    assert code == 2
    assert said in error
    assert not (tmp_path / "probes").exists() or list((tmp_path / "probes").iterdir()) == []


def test_a_cell_that_cannot_be_is_in_the_table_with_its_reason_and_the_others_are_measured(tmp_path: Path) -> None:
    grid = ("precision.params=bf16", "probe.rollout=bf16", "probe.compute=[bf16,fp16]")
    code, said = probe(*SMALL, *grid, "--out", "out", folder=tmp_path)
    assert code == 0
    found = json.loads((tmp_path / "out" / "probe.json").read_text())["cells"]
    assert [bool(cell["statistics"]) for cell in found] == [True, False]
    assert "autocast lowers fp32 weights" in found[1]["refused"]
    assert "Not measured" in said
    assert "trainer fp16" in said


def test_where_no_cell_can_be_measured_the_command_says_so_with_its_exit_code(tmp_path: Path) -> None:
    grid = ("precision.params=bf16", "probe.rollout=bf16", "probe.compute=fp16")
    code, said = probe(*SMALL, *grid, "--out", "out", folder=tmp_path)
    assert code == 2
    assert "autocast lowers fp32 weights" in said


def test_a_worker_that_fails_is_a_failed_cell_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, Backend.hf, "engines:NeverBuilt")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    code = main(["probe.rollout=fp32", "probe.compute=fp32", "probe.num_prompts=2", "--out", "out"])
    assert code == 1
    [generator] = json.loads((tmp_path / "out" / "probe.json").read_text())["generators"]
    assert "no such weights" in generator["failed"]


def test_the_help_loads_no_torch_and_names_every_setting(tmp_path: Path) -> None:
    done = command("probe", "--help", cwd=tmp_path)
    assert done.code == 0
    assert done.wall_s < 5
    assert all(f"probe.{name}=" in done.out for name in settings.ProbeSettings.__dataclass_fields__)


def test_the_grids_of_the_documentation_can_be_read() -> None:
    page = (Path(__file__).parents[1] / "docs" / "probe.md").read_text()
    lines = [
        line.removeprefix("$ grpo-exp probe ") for line in page.splitlines() if line.startswith("$ grpo-exp probe ")
    ]
    read = [parse(*line.split()) for line in lines if "--against" not in line]
    assert len(read) == 3
    assert read[1].settings.engine == ["hf", "vllm"]
    rows = {name for line in page.splitlines() if line.startswith("| `probe.") for name in line.split("`")[1::2]}
    assert {f"probe.{name}" for name in settings.ProbeSettings.__dataclass_fields__} <= rows


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed_is_listed_and_the_other_one_measured(tmp_path: Path) -> None:
    grid = ("probe.engine=[lockstep,vllm]", "probe.rollout=fp32", "probe.compute=fp32")
    code, said = probe(*SMALL, *grid, "--out", "out", folder=tmp_path)
    assert code == 0
    assert "vllm is not installed" in said
    generators = json.loads((tmp_path / "out" / "probe.json").read_text())["generators"]
    assert [bool(one["refused"]) for one in generators] == [False, True]
