"""What a training run needs around its model, each usable in any Lightning program and none knowing Hydra.

`hardware` (Hardware, detect_hardware), `memory` (estimate_memory), `encoder_memory` (estimate_encoder_memory),
`memory_choice` (memory_options), `out_of_memory` (OutOfMemory), `optimizers` (adamw, muon, lamb, parameter_groups),
`steps` (clip_gradients, schedules), `throughput` (Throughput), `callbacks` (StopOnNonFinite, StopAtTarget),
`checkpoints` (AtomicCheckpointIO, find_resumable, read_checkpoint, read_weights), `checkpoint_callbacks`
(checkpoint_callbacks, SaveLast), `signals` (SaveOnSignal), `progress` (make_progress), `loggers` (make_loggers,
log_figure, MetricsFile).
"""
