"""The borders to other programs' formats: Hugging Face GPT-2 weights, and flashtrain's own exported weights.

huggingface_gpt2.py reads and writes GPT-2 as transformers stores it (load_gpt2, save_gpt2, and differences_from_gpt2,
which says what a model has that transformers' GPT-2 cannot hold); exported_weights.py writes any flashtrain model as
safetensors with its configuration and reads it back (save_weights, load_weights); safetensors_files.py holds what both
need of files.
"""

from flashtrain.integrations.exported_weights import load_weights, save_weights
from flashtrain.integrations.huggingface_gpt2 import differences_from_gpt2, load_gpt2, save_gpt2

__all__ = ["differences_from_gpt2", "load_gpt2", "load_weights", "save_gpt2", "save_weights"]
