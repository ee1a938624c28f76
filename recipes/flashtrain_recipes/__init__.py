"""The experiments: reproductions of published results, and benchmarks. They
are built on flashtrain.

COMPONENTS is what they register with flashtrain (flashtrain/registry.py): "group.name" ->
"module:object", imported at its first use.
"""

COMPONENTS = {
    "model.plain": "flashtrain_recipes.step_benchmark.plain_training:build_plain",
    "task.classification": "flashtrain_recipes.arena.spec:ClassificationTask",
    "mode.benchmark": "flashtrain_recipes.harness.spec:Benchmark",
    "mode.extend": "flashtrain_recipes.extend.spec:Extend",
    "mode.lengths": "flashtrain_recipes.long_context.spec:Lengths",
    "mode.patterns": "flashtrain_recipes.hybrid_quality.spec:Patterns",
    "mode.positions": "flashtrain_recipes.loss_by_position.spec:Positions",
    "mode.preview": "flashtrain_recipes.arena.spec:Preview",
    "mode.ruler": "flashtrain_recipes.ruler.spec:Ruler",
    "benchmark.attention": "flashtrain_recipes.attention_benchmark.measure:AttentionBenchmark",
    "benchmark.step": "flashtrain_recipes.step_benchmark.run:GPT2Steps",
    "benchmark.hybrid": "flashtrain_recipes.step_benchmark.hybrids:HybridSteps",
    "benchmark.sequence": "flashtrain_recipes.arena.speed:SequenceSteps",
    "benchmark.bert": "flashtrain_recipes.bert_benchmark.run:BertSteps",
    "benchmark.huggingface": "flashtrain_recipes.huggingface_benchmark.run:HuggingFaceSteps",
    "benchmark.huggingface-long": "flashtrain_recipes.huggingface_benchmark.long_steps:LongSteps",
    "benchmark.context": "flashtrain_recipes.context_benchmark.run:ContextBenchmark",
    "study.language_model": "flashtrain_recipes.long_context.study:LengthsStudy",
    "documents.synthetic": "flashtrain_recipes.synthetic_documents:build_source",
    "study.fine_tuning": "flashtrain_recipes.long_document:DocumentsStudy",
    "settings.benchmark": "flashtrain_recipes.benchmark_settings:BenchmarkSettings",
    "settings.lengths": "flashtrain_recipes.long_context.spec:LengthsSettings",
    "settings.patterns": "flashtrain_recipes.hybrid_quality.spec:PatternsSettings",
    "settings.positions": "flashtrain_recipes.loss_by_position.spec:PositionsSettings",
    "settings.ruler": "flashtrain_recipes.ruler.spec:RulerSettings",
    "figure.attention-lengths": "flashtrain_recipes.attention_benchmark.figures:lengths_figure",
    "figure.attention-shapes": "flashtrain_recipes.attention_benchmark.figures:dot_figure",
    "figure.accuracy": "flashtrain_recipes.arena.figures:accuracy_figure",
    "figure.curriculum": "flashtrain_recipes.arena.figures:curriculum_figure",
    "figure.longest": "flashtrain_recipes.huggingface_benchmark.figures:longest_figure",
    "figure.training": "flashtrain_recipes.harness.figures:training_figure",
    "figure.documents": "flashtrain_recipes.long_document:documents_figure",
    "figure.lengths": "flashtrain_recipes.long_context.study:lengths_figure",
    "figure.extend": "flashtrain_recipes.extend.run:extend_figure",
    "figure.positions": "flashtrain_recipes.loss_by_position.run:positions_figure",
    "figure.ruler": "flashtrain_recipes.ruler.run:ruler_figure",
    "figure.landing": "flashtrain_recipes.step_benchmark.figures:landing_figure",
    "figure.speed": "flashtrain_recipes.step_benchmark.figures:context_speed_figure",
}
