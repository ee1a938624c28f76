"""The borders to other programs: Hugging Face models and weights, torch's attention calls, flashtrain's own weights.

huggingface_attention.py lets transformers models run on our attention (register_with_transformers), with
huggingface_masks.py, huggingface_mask_rules.py and huggingface_documents.py (document_lengths) for their masks
and huggingface_architectures.py for the models that must be refused;
sdpa_routing.py sends torch's scaled_dot_product_attention calls through our kernels (route_sdpa).

huggingface_gpt2.py reads and writes GPT-2 as transformers stores it (load_gpt2, save_gpt2, and differences_from_gpt2,
which says what a model has that transformers' GPT-2 cannot hold), huggingface_bert.py BERT (load_bert, save_bert,
differences_from_bert), huggingface_bert_classifiers.py writes fine-tuned ones (save_bert_classifier);
exported_weights.py writes any flashtrain model as safetensors with its configuration and reads it back (save_weights,
load_weights; exported_by_flashtrain tells such a folder from transformers');
huggingface_tokenizers.py writes a tokenizer beside them that AutoTokenizer reads (save_tokenizer).
safetensors_files.py holds what they need of files, described_models.py how far a file's word on its model is believed.
"""

from flashtrain.integrations.huggingface_attention import document_lengths, register_with_transformers
from flashtrain.integrations.huggingface_bert import (
    architecture_of,
    differences_from_bert,
    differences_from_bert_classifier,
    load_bert,
    save_bert,
    save_bert_classifier,
)
from flashtrain.integrations.huggingface_gpt2 import differences_from_gpt2, load_gpt2, save_gpt2
from flashtrain.integrations.huggingface_tokenizers import save_tokenizer
from flashtrain.integrations.sdpa_routing import route_sdpa
from flashtrain.integrations.weight_files import exported_by_flashtrain, load_weights, save_weights

__all__ = [
    "architecture_of",
    "differences_from_bert",
    "differences_from_bert_classifier",
    "differences_from_gpt2",
    "document_lengths",
    "exported_by_flashtrain",
    "load_bert",
    "load_gpt2",
    "load_weights",
    "register_with_transformers",
    "route_sdpa",
    "save_bert",
    "save_bert_classifier",
    "save_gpt2",
    "save_tokenizer",
    "save_weights",
]
