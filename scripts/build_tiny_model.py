"""Build the model that ships in ``grpo_exp/assets/tiny``: Qwen3 architecture, 0.1 M parameters, 64 characters.

A short supervised warm start on ``reverse`` (and a little on ``sort``) that is stopped early, while the model still gets
most answers wrong: reinforcement learning is to do the rest. fp32, one thread and a fixed seed, so that two runs on one
machine write the same bytes. Usage: ``python scripts/build_tiny_model.py [FOLDER]`` (about ten seconds).
"""

import argparse
import os
import random
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_exp import assets
from grpo_exp.tasks import reverse, sort
from grpo_exp.tasks.types import Row

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789>: \n.,;?!'\"()+-*/=<#_|&%"
IGNORED = -100
LENGTH = 6
BATCH_SIZE = 128
LEARNING_RATE = 2e-3
SEED = 0
NUM_SORT = 48
STEPS = 71


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, ``<bos>`` in front, nothing put between the characters when decoding."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    assert len(vocabulary) == 64
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B:1", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def untrained(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest for which vLLM has kernels on a CPU
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).train()


def batch(rows: list[Row], tok: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [rows, time]; only the answer and its end token are learnt."""
    prompts = [tok.encode(row["prompt"]) for row in rows]
    answers = [tok.encode(row["answer"], add_special_tokens=False) + [tok.eos_token_id] for row in rows]
    ids = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)])
    labels = ids.clone()
    labels[:, : len(prompts[0])] = IGNORED
    return ids, labels


def sample_rows(rng: random.Random, count: int, num_sort: int) -> list[Row]:
    def string(alphabet: str) -> str:
        return "".join(rng.choice(alphabet) for _ in range(LENGTH))

    return [
        sort.row(string(sort.ALPHABET)) if index < num_sort else reverse.row(string(reverse.ALPHABET))
        for index in range(count)
    ]


def train(
    tok: PreTrainedTokenizerFast, steps: int = STEPS, num_sort: int = NUM_SORT, seed: int = SEED
) -> Qwen3ForCausalLM:
    """The warm start; ``num_sort`` of the 128 rows of a batch are of the task ``sort``, the others of ``reverse``."""
    torch.set_num_threads(1)
    model = untrained(seed)
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        ids, labels = batch(sample_rows(rng, BATCH_SIZE, num_sort), tok)
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def save(model: Qwen3ForCausalLM, tok: PreTrainedTokenizerFast, folder: Path) -> None:
    """An ordinary checkpoint: weights, config, generation config and tokenizer."""
    model.generation_config = GenerationConfig(do_sample=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors makes the weights private


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(assets.__path__[0]) / "tiny")
    tok = tokenizer()
    save(train(tok), tok, parser.parse_args().folder)


if __name__ == "__main__":
    main()
