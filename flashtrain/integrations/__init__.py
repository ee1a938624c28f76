"""Interfaces to other programs: Hugging Face models, weights and tokenizers, and
torch's attention calls.

Each public name is imported on its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrain.lazy import import_when_used

if TYPE_CHECKING:
    from flashtrain.integrations.decoder_weights import load_decoder as load_decoder
    from flashtrain.integrations.decoder_weights import save_decoder as save_decoder
    from flashtrain.integrations.huggingface_attention import (
        register_with_transformers as register_with_transformers,
    )
    from flashtrain.integrations.huggingface_bert import load_bert as load_bert
    from flashtrain.integrations.huggingface_bert import save_bert as save_bert
    from flashtrain.integrations.huggingface_bert_classifiers import (
        save_bert_classifier as save_bert_classifier,
    )
    from flashtrain.integrations.huggingface_documents import document_lengths as document_lengths
    from flashtrain.integrations.huggingface_model import (
        transformers_decoder as transformers_decoder,
    )
    from flashtrain.integrations.huggingface_tokenizers import save_tokenizer as save_tokenizer
    from flashtrain.integrations.own_weights import save_weights as save_weights
    from flashtrain.integrations.sdpa_routing import route_sdpa as route_sdpa

_HOMES = {
    "load_decoder": "decoder_weights",
    "save_decoder": "decoder_weights",
    "document_lengths": "huggingface_documents",
    "register_with_transformers": "huggingface_attention",
    "load_bert": "huggingface_bert",
    "save_bert": "huggingface_bert",
    "save_bert_classifier": "huggingface_bert_classifiers",
    "transformers_decoder": "huggingface_model",
    "save_tokenizer": "huggingface_tokenizers",
    "route_sdpa": "sdpa_routing",
    "save_weights": "own_weights",
}
__all__ = [*_HOMES]
__getattr__ = import_when_used(__name__, _HOMES)
