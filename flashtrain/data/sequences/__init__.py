"""Labelled sequences: the tasks of the Long Range Arena (Tay et al. 2021) and the batches that classifiers train on.

`batch` (SequenceBatch), `samples` (Sequences, SequenceSamples), `source` (SequenceSource, what a task's data is asked
for), one file a task (`pathfinder`, `listops`, `text`, `retrieval`, `image`), `augmentation` (turning images), and
`datamodule` (SequenceDataModule). A task's data knows nothing of models; `datamodule` reads any of them.
"""
