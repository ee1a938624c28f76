"""One sequence over several devices: layouts, four ways of exact attention, and the Lightning strategy.

`layout` (which rank holds which tokens), `ways` (the four ways and the automatic choice), `attention`
(context_attention), `exchange` (what is communicated), `sequence` (what models ask of it), `watchdog` (who is stuck).
Nothing here knows of Hydra; only `strategy` knows of Lightning.
"""
