"""All closed sets of values that settings may have, and `option`, a dataclass field
with one of those values.

Nothing else is imported here, so that models, data and training read the same names.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, Literal, get_args

from flashtrain.errors import one_of

# machine and memory
Accelerator = Literal["auto", "cpu", "gpu"]
Attention = Literal["flash", "sdpa", "standard"]
ActivationCheckpointing = Literal["none", "selective", "full", "auto"]
Demo = Literal["auto", "always", "never"]
# csv: an older name of none, which published commands have.
Logger = Literal["none", "csv", "tensorboard", "wandb"]
LoggerMode = Literal["auto", "online", "offline"]
Gpu = Literal["h100", "h200", "a100-40gb", "a100-80gb", "b200", "l40s", "rtx4090"]
Precision = Literal["bf16-mixed", "16-mixed", "32-true", "bf16-true", "64-true"]
# the training
CheckpointFormat = Literal["auto", "file", "sharded"]
ContextGroups = Literal["fixed", "planned"]
ContextLayout = Literal["balanced", "zigzag", "contiguous"]
ContextMethod = Literal["auto", "ulysses", "all-gather", "ring", "hybrid"]
Optimizer = Literal["adamw", "lamb", "muon"]  # flashtrain's own; a program may register others
OptimizerStates = Literal["full", "8bit", "host"]
Schedule = Literal["constant", "cosine", "linear"]  # likewise
Strategy = Literal["auto", "ddp", "fsdp", "context_parallel"]
# text
ExportDtype = Literal["float32", "bfloat16", "float16"]
EncodingErrors = Literal["strict", "replace"]
Source = Literal["stdlib", "packages", "files", "hub", "tokens", "mixture", "chat"]  # likewise
SpecialTokens = Literal["letters", "tokens", "chat"]
TokenDtype = Literal["uint16", "uint32"]
Tokenizer = Literal["bytes", "bpe", "gpt2", "huggingface", "none"]  # or a folder
TooLong = Literal["cut", "drop", "refuse"]
TrainOn = Literal["assistant", "all"]
# decoders
Adapter = Literal["lora"]
DecoderName = Literal["gpt2", "llama", "transnormer"]  # likewise
DecoderSize = Literal["demo", "124m", "355m", "774m", "1.3b", "1.5b"]  # of these decoders
Float8 = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]  # torchao's recipes
Mask = Literal["causal", "document", "window", "prefix", "chunked"]  # likewise
Positions = Literal["learned", "rotary"]
Quantize = Literal["nf4"]
Residual = Literal["weights", "compute"]
Rope = Literal["ntk", "linear", "yarn", "llama3"]
# BERT
BertFamily = Literal["bert", "modern"]
BertSize = Literal["tiny", "base", "large"]
LabelledData = Literal["synthetic", "files", "hub"]
Layout = Literal["packed", "padded"]
Pooling = Literal["first", "mean", "max", "probe"]
Target = Literal["labels", "class", "tokens"]
SampleUnit = Literal["sentence", "paragraph", "document"]


REPLACES = "replaces"  # key of a field's metadata


def of_run(name: str, default: Any = None) -> Any:
    """Return a dataclass field of a stage that replaces the run's setting `name`, if not None."""
    return field(default=default, metadata={REPLACES: name})


def option(default: str | None, kind: Any, *, others: bool = False) -> Any:
    """Return a dataclass field whose value must be one of the names in `kind`, or None if `default`
    is None.

    Args:
        default: the field's default.
        kind: a Literal, or a tuple of names.
        others: whether other values are allowed too.
    """
    return field(default=default, metadata={"options": get_args(kind) or kind, "others": others})


def check_options(name: str, group: Any) -> None:
    """Raise UserError for the first field of `group` made by `option` whose value is not allowed;
    `name` is the group's name, for the message."""
    for one in fields(group):
        given = getattr(group, one.name)
        if "options" in one.metadata and not one.metadata["others"] and given is not None:
            setting = name if one.name == "name" else f"{name}.{one.name}"
            one_of(setting, given, one.metadata["options"])
