"""Small random models in the folder formats of Hugging Face's libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer import modules as parts
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from index.creation.probes import SENTENCES

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LIMIT = 12


def words() -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer with 300 tokens, truncated at 12."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(SENTENCES, trainer)
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", bos_token="<s>", model_max_length=LIMIT
    )


def bert(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=LIMIT, **SMALL)
    transformers.BertModel(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def roberta(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    """Like PhoBERT: the tokenizer has no limit, and the first position of the model is that of padding."""
    torch.manual_seed(4)
    config = transformers.RobertaConfig(
        vocab_size=len(words),
        max_position_embeddings=LIMIT + 1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SMALL,
    )
    transformers.RobertaModel(config).save_pretrained(folder)
    unlimited = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words.backend_tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    unlimited.save_pretrained(folder)
    return folder


def sentences(
    folder: Path, words: transformers.PreTrainedTokenizerFast, mode: str = "mean", truncate_dim: int | None = None
) -> Path:
    """Like E5: mean or class token, then a dense layer, normalised, with prompts."""
    tokens = parts.Transformer(str(bert(folder.with_name("bert"), words)))
    rest = [parts.Pooling(16, mode), parts.Dense(16, 8), parts.Normalize()]
    prompts = {"query": "query: ", "document": "passage: "}
    sentence_transformers.SentenceTransformer(
        modules=[tokens, *rest], prompts=prompts, device="cpu", truncate_dim=truncate_dim
    ).save(str(folder))
    return folder


def clip(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(1)
    text = {"vocab_size": len(words), "max_position_embeddings": LIMIT, "eos_token_id": 2, "bos_token_id": 1, **SMALL}
    vision = {"image_size": 32, "patch_size": 8, **SMALL}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(folder)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def siglip(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(2)
    text = {"vocab_size": len(words), "max_position_embeddings": LIMIT, "projection_size": 16, **SMALL}
    vision = {"image_size": 32, "patch_size": 8, **SMALL}
    transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    transformers.SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def vit(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(3)
    transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder
