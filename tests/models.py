"""Tiny random checkpoints, with the tokenizer of the shipped model. Each is built once per test session."""

import atexit
import shutil
import tempfile
from enum import Enum
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from grpo_exp import assets

VOCABULARY, WIDTH = 64, 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # larger than usual, so that distributions are far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Family(Enum):
    llama = LlamaConfig
    qwen3 = Qwen3Config
    gemma2 = Gemma2Config  # caps its logits

    def config(self, tied: bool, head_dim: int = 8) -> PreTrainedConfig:
        extra = {"sliding_window": 8, "final_logit_softcapping": 2.0} if self is Family.gemma2 else {}
        config: PreTrainedConfig = self.value(**SIZES | {"head_dim": head_dim}, **extra, tie_word_embeddings=tied)
        return config


def build(family: Family = Family.qwen3, tied: bool = True, seed: int = 0, head_dim: int = 8) -> PreTrainedModel:
    """A model in fp32 that was never trained."""
    torch.manual_seed(seed)
    model: PreTrainedModel = Auto.from_config(family.config(tied, head_dim)).eval()
    return model


@cache
def checkpoint(
    family: Family = Family.qwen3, dtype: torch.dtype = torch.float32, tied: bool = True, head_dim: int = 8
) -> Path:
    """A folder that ``from_pretrained`` takes; it is gone when the session ends."""
    folder = Path(tempfile.mkdtemp(prefix="grpo_exp_models_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build(family, tied, head_dim=head_dim).to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(assets.path("tiny") / name, folder / name)
    return folder
