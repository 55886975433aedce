"""The attributes under which wrappers around modules keep the module that they wrap.

Everything here is by name, so that no library of wrappers is imported.
"""

__all__ = ["COMPILED", "COMPILED_FROM", "INNER_BY_CLASS", "INNER_NAMES", "INNER_NAMES_OF_MODELS", "PEFT"]

COMPILED = "_orig_mod"  # in the module that torch.compile(module) returns
COMPILED_FROM = "_torchdynamo_orig_callable"  # in the function that torch.compile(function) returns
PEFT = "base_model"  # models of Hugging Face have an attribute of this name as well: their body without the head
_CHECKPOINT = "_checkpoint_wrapped_module"  # checkpoint_wrapper
_FSDP = "_fsdp_wrapped_module"  # FSDP1
_PARALLEL = "module"  # DistributedDataParallel, DataParallel, DeepSpeed

INNER_NAMES = (COMPILED, _CHECKPOINT, _FSDP)
"""Names that stand for a wrapped module wherever they occur, since no author of a model uses them."""

INNER_NAMES_OF_MODELS = (_PARALLEL, *INNER_NAMES)
"""Names that stand for the model inside of a wrapper around all of it; deeper inside, "module" may be anything."""

INNER_BY_CLASS = {
    "DistributedDataParallel": _PARALLEL,
    "DataParallel": _PARALLEL,
    "FullyShardedDataParallel": _FSDP,
    "DeepSpeedEngine": _PARALLEL,
    "PeftModel": PEFT,
    "PeftMixedModel": PEFT,
}
"""Wrappers of parallelism and of PEFT by the name of their class, or of a base class of it."""
