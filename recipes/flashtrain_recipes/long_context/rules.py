"""Who heeds `lengths.*` and `passkey.*`."""

from __future__ import annotations

from flashtrain.heeded import Rule, does

RULES = (
    Rule("lengths", does("lengths"), "mode=lengths (recipe=gpt2-long, long-document)"),
    Rule(
        "lengths.window lengths.scored lengths.stride lengths.windows lengths.resamples lengths.bins",
        does("lengths", task="model"),
        "mode=lengths of a language model (recipe=gpt2-long)",
    ),
    Rule("passkey", does("passkey", task="model"), "mode=passkey checkpoint=... of a language model"),
)
