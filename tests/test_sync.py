"""Weights reach the generator bit for bit, or the run is told."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import Family, build, checkpoint
from torch import Tensor, nn

from grpo_exp.errors import RunFailed
from grpo_exp.precision import DTYPES
from grpo_exp.rollout.hf import HFEngine
from grpo_exp.rollout.process import open_memory
from grpo_exp.rollout.types import EngineSpec, Request
from grpo_exp.sync.names import canonical_name
from grpo_exp.sync.shm import Payload, Sender, check_fit, tensors_in, unique_parameters

NAMES = ("fp32", "bf16", "fp16")


@pytest.fixture
def fd() -> Iterator[int]:
    opened = open_memory()
    yield opened
    os.close(opened)


def spec(rollout: str = "fp32", wire: str | None = None, tied: bool = True) -> EngineSpec:
    dtypes = {"rollout": rollout, "rollout_head": rollout, "wire": wire or rollout}
    path = str(checkpoint(tied=tied))
    return EngineSpec("grpo_exp.rollout.hf:HFEngine", path, {}, False, dtypes, "cpu", num_threads=1, batch_size=64)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def trained(tied: bool = True, seed: int = 1) -> nn.Module:
    """Other weights than those that the engine's checkpoint has."""
    return build(Family.qwen3, tied, seed)


@pytest.mark.parametrize("wire", NAMES)
@pytest.mark.parametrize("params", NAMES)
def test_the_wire_carries_the_trainers_cast_bit_for_bit(fd: int, params: str, wire: str) -> None:
    model = trained().to(DTYPES[params])
    payload = Sender(fd, DTYPES[wire], DTYPES[wire]).write(3, model)
    expected = {name: parameter.to(DTYPES[wire]) for name, parameter in unique_parameters(model).items()}
    received = tensors_in(mmap.mmap(fd, 0), payload)
    assert received.keys() == expected.keys()
    for name, tensor in received.items():
        assert tensor.dtype == DTYPES[wire]
        assert bits(tensor) == bits(expected[name]), name


@pytest.mark.parametrize("rollout", NAMES)
@pytest.mark.parametrize("wire", NAMES)
def test_the_engine_holds_the_wires_bits_in_its_own_dtype(fd: int, rollout: str, wire: str) -> None:
    model, engine = trained(), HFEngine(spec(rollout, wire))
    payload = Sender(fd, DTYPES[wire], DTYPES[rollout]).write(1, model)
    assert engine.load(payload, fd) == payload.checksum
    assert engine.version == 1
    for name, held in unique_parameters(engine.model).items():
        sent = unique_parameters(model)[name].to(DTYPES[wire]).to(DTYPES[rollout])
        assert bits(held) == bits(sent), name


def test_every_sync_replaces_the_one_before(fd: int) -> None:
    sender, engine = Sender(fd, torch.float32, torch.float32), HFEngine(spec())
    checksums = set()
    for version in range(1, 4):
        model = trained(seed=version)
        checksums.add(engine.load(sender.write(version, model), fd))
        assert torch.equal(engine.head.weight, model.get_output_embeddings().weight)
    assert len(checksums) == 3


@pytest.mark.parametrize(
    "prefixes", [("module.",), ("_orig_mod.",), ("_orig_mod.", "module."), ("module.", "_orig_mod.")]
)
def test_names_lose_what_wrappers_put_in_front(prefixes: tuple[str, ...]) -> None:
    """B8"""
    assert (
        canonical_name("".join(prefixes) + "model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    )


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        ("_fsdp_wrapped_module.model.norm.weight", "model.norm.weight"),
        ("model.layers.1._checkpoint_wrapped_module.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("model._fsdp_wrapped_module.layers.1._orig_mod.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("base_model.model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        (
            "module.base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ("lm_head.weight", "lm_head.weight"),
        ("some_module.weight", "some_module.weight"),
    ],
)
def test_names_lose_what_wrappers_put_in_between(wrapped: str, name: str) -> None:
    """B8"""
    assert canonical_name(wrapped) == name


def test_a_compiled_policy_syncs_like_a_plain_one(fd: int) -> None:
    """B8: ``torch.compile`` wraps the model and every name."""
    model, engine = trained(), HFEngine(spec())
    wrapped = nn.Module()
    wrapped.add_module("_orig_mod", model)
    payload = Sender(fd, torch.float32, torch.float32).write(1, wrapped)
    assert engine.load(payload, fd) == payload.checksum


def test_two_parameters_of_one_name_are_an_error() -> None:
    """B8"""
    clash = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)})
    with pytest.raises(RunFailed, match="two parameters are called"):
        unique_parameters(clash)


def changed_slots(payload: Payload, **changes: object) -> Payload:
    first, *rest = payload.slots
    slot = {**vars(first), **changes}
    return Payload(payload.version, payload.dtype, (type(first)(**slot), *rest), payload.checksum)


def test_missing_and_unknown_names_are_listed(fd: int) -> None:
    """B8: the names that are sent are just those that are expected."""
    payload = Sender(fd, torch.float32, torch.float32).write(1, trained())
    renamed = changed_slots(payload, name="model.embed_token.weight")
    with pytest.raises(
        RunFailed, match=r"missing \['model.embed_tokens.weight'\], unknown \['model.embed_token.weight'\]"
    ):
        check_fit(trained(), renamed)


def test_another_shape_is_named(fd: int) -> None:
    payload = Sender(fd, torch.float32, torch.float32).write(1, trained())
    with pytest.raises(RunFailed, match=r"other shapes for \['model.embed_tokens.weight'\]"):
        check_fit(trained(), changed_slots(payload, shape=(32, 64)))


def test_weights_that_do_not_fit_leave_the_old_version_serving(fd: int) -> None:
    """B7: and the next sync succeeds."""
    request = Request(serial=0, prompt_ids=[5, 6, 7], num_completions=2, max_new_tokens=4, temperature=1.0, seed=1)
    sender, engine = Sender(fd, torch.float32, torch.float32), HFEngine(spec())
    engine.load(sender.write(1, trained()), fd)
    before = next(engine.generate([request]))
    with pytest.raises(RunFailed, match="do not fit"):
        engine.load(changed_slots(sender.write(2, trained()), name="lm_head.weight"), fd)
    assert engine.version == 1
    after = next(engine.generate([request]))
    assert [rollout.token_ids for rollout in after.rollouts] == [rollout.token_ids for rollout in before.rollouts]
    engine.load(sender.write(3, trained(seed=3)), fd)
    assert engine.version == 3


def test_other_bytes_than_were_sent_are_noticed_and_nothing_is_served(fd: int) -> None:
    """B5"""
    engine = HFEngine(spec())
    payload = Sender(fd, torch.float32, torch.float32).write(1, trained())
    os.pwrite(fd, b"\x01\x02\x03\x04", payload.slots[-1].offset)
    with pytest.raises(RunFailed, match=r"other weights than were sent for version 1 .*checksum"):
        engine.load(payload, fd)
    with pytest.raises(RuntimeError, match="no weights"):
        next(engine.generate([Request(0, [5], 1, 1, 1.0, 0)]))


@pytest.mark.parametrize("tied", [True, False])
def test_head_and_embedding_arrive_as_they_are_in_the_trainer(fd: int, tied: bool) -> None:
    """B9: a tied pair travels once and stays tied, an untied one travels as two."""
    model, engine = trained(tied), HFEngine(spec(tied=tied))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.square().mean().backward()
    optimizer.step()
    payload = Sender(fd, torch.float32, torch.float32).write(1, model)
    assert ("lm_head.weight" in {slot.name for slot in payload.slots}) != tied
    engine.load(payload, fd)
    embedding, head = engine.model.get_input_embeddings().weight, engine.head.weight
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert (head.data_ptr() == embedding.data_ptr()) == tied


def shared_mappings() -> int:
    return sum("grpo_exp_weights" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_two_hundred_syncs_leave_no_descriptor_and_no_mapping_behind(fd: int) -> None:
    sender, engine, model = Sender(fd, torch.float32, torch.float32), HFEngine(spec()), trained()
    engine.load(sender.write(0, model), fd)
    before = len(os.listdir("/proc/self/fd")), shared_mappings(), os.fstat(fd).st_size
    for version in range(1, 201):
        engine.load(sender.write(version, model), fd)
    assert (len(os.listdir("/proc/self/fd")), shared_mappings(), os.fstat(fd).st_size) == before
