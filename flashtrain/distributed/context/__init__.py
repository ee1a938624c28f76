"""One sequence over several devices: layouts, four ways of exact attention, and the Lightning strategy.

`layout` (which rank holds which tokens), `ways` (the four ways and the automatic choice), `attention`
(context_attention), `traffic` (what is communicated), `attention_check` (a step that shares no attention is refused).
Nothing here knows of Hydra; only `strategy` knows of Lightning.
"""
