"""Precision sites by name: parsing dtype names, and which site follows which. Imports no torch.

A *site* is one place where a dtype is chosen. Names are ``fp32``, ``bf16``, ``fp16`` and, before it is resolved, ``auto``.
:func:`grpo_exp.precision.resolve` turns what is decided here into torch dtypes.
"""

import difflib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .schema import LossScaleMode, PrecisionConfig, Strategy

SPELLINGS: dict[str, str] = {
    "auto": "auto",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
}
ALLOWED = "auto, bf16 (bfloat16), fp16 (float16, half), fp32 (float32, float)"
NAMES = ("fp32", "bf16", "fp16")
UNKNOWN = "unknown"  # the dtype of a checkpoint that does not say
MATMUL_MODES = ("highest", "high", "medium")
FP16_SMALLEST_SUBNORMAL = 2.0**-24

FOLLOWS: dict[str, str | None] = {
    "params": None,
    "compute": "params",
    "head": "compute",
    "grad_reduce": "params",
    "optimizer_state": None,
    "rollout": "compute",
    "rollout_head": "rollout",
    "kv_cache": "rollout",
    "wire": "rollout",
    "reference": "params",
    "adapter": "optimizer_state",
}
"""Every dtype site, in the order in which they are resolved, with the site it follows where it is null.

``adapter`` is there where adapters are trained, and ``grad_reduce`` follows it then: it is their gradients that are summed.
"""


@dataclass(frozen=True)
class Site:
    """What one site came to be, and why."""

    name: str
    reason: str
    follows: str | None = None  # the site whose value this one took over


def parse_dtype(value: object, key: str) -> str:
    """Turn any accepted spelling into ``auto``, ``fp32``, ``bf16`` or ``fp16``.

    Strings in any case, with or without ``torch.`` in front, and ``torch.dtype`` objects are accepted; the result is
    accepted too, so parsing twice changes nothing.

    Raises:
        ConfigError: (a ValueError) for everything else, also for attributes of torch that are no float dtype.
    """
    is_torch_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    text = str(value) if is_torch_dtype or isinstance(value, str) else ""
    name = SPELLINGS.get(text.strip().lower().removeprefix("torch."))
    if name is None:
        raise ConfigError(key, value, ALLOWED, did_you_mean_dtype(text))
    return name


def did_you_mean_dtype(text: str) -> str:
    """A suggestion for a misspelt dtype, nothing where none is near: ``float64`` is no misspelt ``float16``."""
    word = text.strip().lower().removeprefix("torch.")
    width = "".join(filter(str.isdigit, word))
    known = [name for name in SPELLINGS if not width or name.endswith(width)]
    begun = [name for name in known if len(word) > 2 and name.startswith(word)]
    near = begun or difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"did you mean {SPELLINGS[near[0]]}?" if near else ""


def parse_init_kwargs(init_kwargs: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Keywords for ``from_pretrained`` as a new dictionary; a JSON string is parsed, the given object is never changed.

    Raises:
        ConfigError: (a ValueError) if it is neither a mapping, a JSON object nor None.
    """
    if isinstance(init_kwargs, str):
        try:
            init_kwargs = json.loads(init_kwargs)
        except json.JSONDecodeError as error:
            raise ConfigError("model.init_kwargs", str(init_kwargs), "a JSON object", str(error)) from None
    if init_kwargs is None:
        return {}
    if not isinstance(init_kwargs, Mapping):
        raise ConfigError("model.init_kwargs", repr(init_kwargs), "a mapping or a JSON object")
    return dict(init_kwargs)


def checkpoint_dtype(path: Path) -> str | None:
    """The dtype a local checkpoint declares in its config.json, else that of its first safetensors weight.

    Returns:
        ``fp32``, ``bf16``, ``fp16``, the name of another dtype, or None where the folder does not say.
    """
    config_file = path / "config.json"
    if config_file.is_file():
        declared = json.loads(config_file.read_text())
        name = declared.get("dtype") or declared.get("torch_dtype")
        if isinstance(name, str):
            plain = name.strip().lower().removeprefix("torch.")
            return SPELLINGS.get(plain, plain)
    for weights in sorted(path.glob("*.safetensors")):
        with weights.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, entry in header.items():
            if name != "__metadata__" and "F" in entry["dtype"]:
                return {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}.get(entry["dtype"], str(entry["dtype"]))
    return None


def loader_dtype(init_kwargs: Mapping[str, Any], params: object) -> str:
    """The one load dtype from its two places, ``precision.params`` and ``model.init_kwargs.dtype``.

    ``auto`` agrees with anything.

    Raises:
        ConfigError: if either is no dtype, or they disagree; the message names both keys.
    """
    asked = parse_dtype(params, "precision.params")
    for key in ("dtype", "torch_dtype"):
        if init_kwargs.get(key) is None:
            continue
        given = parse_dtype(init_kwargs[key], f"model.init_kwargs.{key}")
        if "auto" not in (asked, given) and given != asked:
            raise ConfigError(
                f"model.init_kwargs.{key}",
                given,
                f"{asked}, the value of precision.params",
                "two keys set the load dtype: make them agree, or leave one out",
            )
        asked = given if asked == "auto" else asked
    return asked


def resolve_sites(
    config: PrecisionConfig, init_kwargs: Mapping[str, Any], checkpoint: str, adapted: bool = False
) -> dict[str, Site]:
    """Decide every dtype site. ``checkpoint`` is the checkpoint's own dtype: what ``auto`` stands for.

    Raises:
        ConfigError: if a value is no dtype name, or ``auto`` stands for a dtype that nothing here computes in.
    """
    sites: dict[str, Site] = {}
    for site, follows in FOLLOWS.items():
        value = getattr(config, site)
        if site == "params":
            name = loader_dtype(init_kwargs, value)
            reason = (
                "precision.params" if parse_dtype(value, "precision.params") != "auto" else "model.init_kwargs.dtype"
            )
        elif value is None:
            assert follows is not None, site
            sites[site] = Site(sites[follows].name, f"follows {follows}", follows)
            continue
        else:
            name, reason = parse_dtype(value, f"precision.{site}"), f"precision.{site}"
        if name == "auto" and checkpoint not in NAMES:
            raise ConfigError(
                f"precision.{site}", "auto", NAMES, f"the checkpoint is stored in {checkpoint}: name a dtype"
            )
        sites[site] = Site(checkpoint, "the checkpoint's own dtype") if name == "auto" else Site(name, reason)
    if not adapted:
        del sites["adapter"]
    elif config.grad_reduce is None:
        sites["grad_reduce"] = Site(sites["adapter"].name, "follows adapter", "adapter")
    return sites


def site_problems(config: PrecisionConfig, init_kwargs: Mapping[str, Any]) -> list[ConfigError]:
    """Values that are wrong whatever the checkpoint and the device are."""
    problems: list[ConfigError] = []
    for site, follows in FOLLOWS.items():
        value = getattr(config, site)
        try:
            if site == "params":
                loader_dtype(init_kwargs, value)
            elif value is not None or follows is None:
                parse_dtype(value, f"precision.{site}")
        except ConfigError as error:
            problems.append(error)
    if config.matmul not in MATMUL_MODES:
        problems.append(ConfigError("precision.matmul", config.matmul, MATMUL_MODES))
    scale = config.loss_scale
    problems += [
        ConfigError(f"precision.loss_scale.{key}", value, allowed)
        for key, value, allowed, good in (
            ("init", scale.init, "a number > 0 that fp32 can hold", 2.0**-126 <= scale.init <= 2.0**127),
            ("growth_factor", scale.growth_factor, "a number > 1", 1 < scale.growth_factor < math.inf),
            ("backoff_factor", scale.backoff_factor, "a number between 0 and 1", 0 < scale.backoff_factor < 1),
            ("growth_interval", scale.growth_interval, "1 or more", scale.growth_interval >= 1),
        )
        if not good
    ]
    return problems


def combination_problems(
    config: PrecisionConfig, sites: Mapping[str, Site], optim_eps: float, strategy: Strategy = Strategy.single
) -> list[ConfigError]:
    """Sites that do not go together, whatever the device is."""
    name = {site: entry.name for site, entry in sites.items()}
    problems: list[ConfigError] = []

    def refuse(site: str, allowed: str, fix: str) -> None:
        problems.append(ConfigError(f"precision.{site}", name[site], allowed, fix))

    if name["compute"] != name["params"] and name["params"] != "fp32":
        refuse(
            "compute",
            name["params"],
            f"autocast lowers fp32 weights, it cannot compute otherwise over {name['params']} weights:"
            " set precision.params=fp32",
        )
    scaled = config.loss_scale.mode is not LossScaleMode.none
    needs_scale = name["compute"] == "fp16" and name["params"] == "fp32"
    if needs_scale and not scaled:
        problems.append(
            ConfigError(
                "precision.loss_scale.mode",
                "none",
                "dynamic, static",
                "fp16 compute over fp32 weights loses small gradients without a loss scale",
            )
        )
    if scaled and not needs_scale:
        problems.append(
            ConfigError(
                "precision.loss_scale.mode",
                config.loss_scale.mode.name,
                "none",
                f"a loss scale is for fp16 compute over fp32 weights, not {name['compute']} over {name['params']}",
            )
        )
    if name["optimizer_state"] not in ("fp32", name["params"]):
        refuse("optimizer_state", f"fp32, {name['params']}", "moments are kept in fp32 or in the dtype of the weights")
    elif name["optimizer_state"] == "fp16" and optim_eps < FP16_SMALLEST_SUBNORMAL:
        problems.append(
            ConfigError(
                "optim.eps",
                optim_eps,
                "1e-4 or so",
                "it rounds to 0 in fp16 moments; or precision.optimizer_state=fp32",
            )
        )
    if name["reference"] not in ("fp32", name["params"], name["compute"]):
        allowed = ", ".join(dict.fromkeys(("fp32", name["params"], name["compute"])))
        refuse("reference", allowed, "the reference computes as the policy does: in precision.compute")
    trained = name.get("adapter", name["params"])
    if trained not in ("fp32", name["params"]):
        refuse("adapter", f"fp32, {name['params']}", "adapters are kept in fp32 or in the dtype of the weights")
    if config.adapter is not None and "adapter" not in name:
        problems.append(ConfigError("precision.adapter", config.adapter, "null", "lora.rank=0: there is no adapter"))
    if "adapter" in name and name["reference"] != name["params"]:
        refuse("reference", name["params"], "with adapters the reference is the base, as it is")
    if strategy is Strategy.fsdp2 and name["reference"] != name["params"]:
        refuse("reference", name["params"], "distributed=fsdp2 computes the reference with the parts of the policy")
    if strategy is Strategy.single and name["grad_reduce"] != trained:
        refuse("grad_reduce", trained, "distributed=single reduces nothing over ranks")
    if name["kv_cache"] != name["rollout"]:
        refuse("kv_cache", name["rollout"], "every engine here keeps its cache in the rollout dtype")
    return problems
