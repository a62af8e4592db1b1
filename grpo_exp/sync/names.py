"""Names of parameters as they are in a checkpoint, whatever is around the model."""

from functools import cache

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.")


@cache
def canonical_name(name: str) -> str:
    """A parameter's name in the checkpoint: without what wrappers put in front of it or in between."""
    before = ""
    while before != name:  # wrappers come in any order
        before = name
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "") if wrapper.startswith("_") else name.removeprefix(wrapper)
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter is trained beside a weight, and in no checkpoint of the model."""
    return ".lora_A." in name or ".lora_B." in name
