"""Who heeds `lengths.*` and `passkey.*`."""

from __future__ import annotations

from flashtrain.command.heeded.conditions import LANGUAGE, Rule, does

RULES = (
    Rule("lengths", does("lengths"), "mode=lengths (recipe=gpt2-long, long-document)"),
    Rule(
        "lengths.window lengths.scored lengths.stride lengths.windows lengths.resamples lengths.bins",
        does("lengths", task=(LANGUAGE,)),
        "mode=lengths of a language model (recipe=gpt2-long)",
    ),
    Rule("passkey", does("passkey", task=(LANGUAGE,)), "mode=passkey checkpoint=... of a language model"),
)
