"""Draws docs/phantom_clip.svg from the runs of ``grpo-exp -m +sweeps=phantom_clip``, and prints the table of that page.

python scripts/phantom_figure.py runs/phantom_clip
"""

import sys
from pathlib import Path
from typing import Any

from grpo_exp import jsonl
from grpo_exp.report.arms import design
from grpo_exp.report.charts import HEIGHT, WIDTH, ArmCurves, curves
from grpo_exp.report.load import RunRecord, find_runs
from grpo_exp.report.stats import mean

TARGET = Path(__file__).resolve().parent.parent / "docs" / "phantom_clip.svg"
STYLE = """
text{font:12px system-ui,sans-serif;fill:#222}.axis{stroke:#999;fill:none}.thin{stroke-width:1;opacity:.45;fill:none}
.bold{stroke-width:2.5;fill:none}.s0{stroke:#0b6e4f}.s1{stroke:#b5480b}.s2{stroke:#2856b8}.s3{stroke:#8a2f8f}
.d1{stroke-dasharray:9 4}.d2{stroke-dasharray:3 3}.d3{stroke-dasharray:11 3 2 3}
"""
COLUMNS = {
    "reward, mean of all steps": "reward/mean",
    "reward, last 5 steps": "reward/mean",
    "clip_frac": "ratio/clip_frac",
    "phantom_clip": "probe/phantom_clip",
    "alpha_abs_mean": "probe/alpha_abs_mean",
    "beta_abs_mean": "probe/beta_abs_mean",
}

PRECISIONS = ("fp32", "bf16", "fp32_rollout_bf16", "fp32_rollout_fp16")
CORRECTIONS = ("none", "beta_removal", "token_tis")

Arm = tuple[str, str]


def arms_of(runs: list[RunRecord]) -> dict[Arm, list[list[dict[str, Any]]]]:
    """Rows of the runs that are done, by precision and correction."""
    found = {(arm.levels["precision"], arm.levels["correction"]): arm.done for arm in design(runs).arms}
    return {
        (precision, correction): [list(jsonl.read(run.path / "metrics.jsonl")) for run in done]
        for correction in CORRECTIONS
        for precision in PRECISIONS
        if (done := found.get((precision, correction)))
    }


def values(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row["step"] and row.get(key) is not None]


def table(arms: dict[Arm, list[list[dict[str, Any]]]]) -> str:
    lines = [f"| precision | correction | {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * len(COLUMNS)]
    for (precision, correction), runs in arms.items():
        cells = []
        for title, key in COLUMNS.items():
            last = 5 if "last" in title else 0
            per_seed = [mean(values(rows, key)[-last:]) for rows in runs]
            low, high = min(per_seed), max(per_seed)
            cells.append(f"{mean(per_seed):.3g} ({low:.3g} to {high:.3g})" if high > low else f"{low:.3g}")
        lines.append(f"| `{precision}` | `{correction}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(arms: dict[Arm, list[list[dict[str, Any]]]]) -> str:
    """Two panels, without corrections: what beta alone clips, and what is learnt."""
    panels = []
    for key, label in (("probe/phantom_clip", "share of tokens that beta alone clips"), ("reward/mean", "reward/mean")):
        lines = []
        for index, (precision, runs) in enumerate((p, runs) for (p, c), runs in arms.items() if c == "none"):
            points = [
                [(float(row["step"]), row[key]) for row in rows if row["step"] and row.get(key) is not None]
                for rows in runs
            ]
            lines.append(ArmCurves(precision, index, points))
        panels.append(curves(lines, label, "step", label) or "")
    second = panels[1].replace("<svg ", f'<svg y="{HEIGHT}" ', 1)
    first = panels[0].replace("<svg ", '<svg y="0" ', 1)
    size = f'viewBox="0 0 {WIDTH} {2 * HEIGHT}" width="{WIDTH}" height="{2 * HEIGHT}"'
    background = f'<rect width="{WIDTH}" height="{2 * HEIGHT}" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{background}{first}{second}</svg>\n'


def main() -> None:
    arms = arms_of(find_runs([Path(sys.argv[1])]))
    TARGET.write_text(figure(arms))
    print(table(arms))


if __name__ == "__main__":
    main()
