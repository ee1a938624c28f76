"""The borders to other programs: Hugging Face models and weights, torch's attention calls, flashtrain's own weights.

huggingface_attention.py lets transformers models run on our attention (register_with_transformers, document_lengths),
with huggingface_masks.py for their masks, huggingface_mask_rules.py for what of these is understood,
huggingface_architectures.py for the models that are refused, and huggingface_context.py for sequences that several
devices share;
huggingface_decoder.py trains a transformers decoder like one of ours (HuggingFaceDecoder; huggingface_model.py builds
one from a folder or a name of the hub, huggingface_folder.py reads and writes it, huggingface_layers.py saves memory in
its layers, huggingface_numbers.py counts);
sdpa_routing.py sends torch's scaled_dot_product_attention calls through our kernels (route_sdpa).

decoder_weights.py reads and writes our decoders as transformers stores them (load_decoder, save_decoder), in the
layouts of GPT-2, Llama and Starcoder2 that decoder_layouts.py has; huggingface_bert.py BERT (load_bert, save_bert) and
huggingface_bert_classifiers.py classifiers on it (save_bert_classifier); own_weights.py writes any flashtrain model
with its configuration (save_weights), which they read too; weight_files.py has the safetensors of them all;
huggingface_tokenizers.py writes a tokenizer beside them that AutoTokenizer reads (save_tokenizer).
The names below are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrain import import_when_used

if TYPE_CHECKING:
    from flashtrain.integrations.decoder_weights import load_decoder as load_decoder
    from flashtrain.integrations.decoder_weights import save_decoder as save_decoder
    from flashtrain.integrations.huggingface_attention import document_lengths as document_lengths
    from flashtrain.integrations.huggingface_attention import register_with_transformers as register_with_transformers
    from flashtrain.integrations.huggingface_bert import load_bert as load_bert
    from flashtrain.integrations.huggingface_bert import save_bert as save_bert
    from flashtrain.integrations.huggingface_bert_classifiers import save_bert_classifier as save_bert_classifier
    from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder as HuggingFaceDecoder
    from flashtrain.integrations.huggingface_model import transformers_decoder as transformers_decoder
    from flashtrain.integrations.huggingface_tokenizers import save_tokenizer as save_tokenizer
    from flashtrain.integrations.own_weights import save_weights as save_weights
    from flashtrain.integrations.sdpa_routing import route_sdpa as route_sdpa

_HOMES = {
    "load_decoder": "decoder_weights",
    "save_decoder": "decoder_weights",
    "document_lengths": "huggingface_attention",
    "register_with_transformers": "huggingface_attention",
    "load_bert": "huggingface_bert",
    "save_bert": "huggingface_bert",
    "save_bert_classifier": "huggingface_bert_classifiers",
    "HuggingFaceDecoder": "huggingface_decoder",
    "transformers_decoder": "huggingface_model",
    "save_tokenizer": "huggingface_tokenizers",
    "route_sdpa": "sdpa_routing",
    "save_weights": "own_weights",
}
__all__ = [*_HOMES]
__getattr__ = import_when_used(__name__, _HOMES)
