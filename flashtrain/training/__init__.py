"""The parts of a training run around its model, each for any Lightning program."""
